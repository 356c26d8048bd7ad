"""Federated training through Flower: its server app and client apps carry the messages of the files, with the same bits."""

import shutil

import pytest

pytest.importorskip("flwr")

from flower_grid import LocalGrid, context

import m2lgdg
from m2lgdg.federated import exchange, flower
from m2lgdg.method import Method
from m2lgdg.storage import InputError


@pytest.fixture(scope="module")
def joined(tmp_path_factory):
    root = tmp_path_factory.mktemp("flower")
    cohort = m2lgdg.make_cohort("tiny").with_inputs(())
    exchange.init(root / "study", cohort.site_names)
    for site in cohort.site_names:
        exchange.join(root / "study", cohort.select(sites=[site]), site, root / site)
    return root, cohort.site_names


@pytest.fixture
def study(joined, tmp_path):
    root = shutil.copytree(joined[0], tmp_path / "copy")
    return root, LocalGrid(flower.client_app, [root / site for site in joined[1]]), joined[1]


def lead(root, grid):
    flower.server_app(grid, context(root / "study"))


def weights(root):
    return {name: value.tobytes() for name, value in Method.load(root / "study" / "model").state_.items()}


def test_the_same_bits_as_by_files_and_after_a_lost_site(study, joined, tmp_path):
    root, grid, sites = study
    send, rounds = grid.send_and_receive, []

    def lose_one_site(messages, **options):
        rounds.append(1)
        grid.dead = {2} if len(rounds) == 6 else set()
        return send(messages, **options)

    grid.send_and_receive = lose_one_site
    with pytest.raises(InputError, match=f"site {sites[1]} did not answer"):
        lead(root, grid)
    lead(root, grid)  # the server goes on where it stopped
    files = shutil.copytree(joined[0], tmp_path / "files")
    for site in sites:
        shutil.copy(files / site / "outbox" / f"{site}.json", files / "study" / "joins")
    progress = exchange.combine(files / "study")
    while progress.request is not None:
        for site in sites:
            exchange.step(files / site, files / "study", files / "study" / "answers")
        progress = exchange.combine(files / "study")
    exchange.save_model(files / "study", progress)
    assert weights(root) == weights(files)


def test_a_client_accepts_the_protocol_only(study):
    _, grid, sites = study
    for content in ({"code": b"import os"}, {"request": "text"}, {"request": b"x", "more": 1}, {"request": b"not a request"}):
        replies = flower._asked(grid, {1: content}, 1.0)
        with pytest.raises(InputError, match=f"site {sites[0]} refused: the (message|request)"):
            flower._part(replies, 1, "answer", sites[0])


def test_two_nodes_of_one_site(study):
    root, grid, sites = study
    grid.folders[2] = grid.folders[1]
    with pytest.raises(InputError, match=f"joins as site {sites[0]}, which is not expected, or is connected already"):
        lead(root, grid)
