"""Federated training through Flower: its server app and client apps carry the messages of the files, with the same bits."""

import shutil

import numpy as np
import pytest

pytest.importorskip("flwr")

from federated import LocalGrid, context, folders
from hospitals import SIZES, bits, by_site, changed, finish

import m2lgdg
from m2lgdg import Model
from m2lgdg.federated import exchange, flower, messages
from m2lgdg.storage import InputError


@pytest.fixture(scope="module")
def joined(tmp_path_factory):
    root = tmp_path_factory.mktemp("flower")
    cohort = m2lgdg.make_cohort("tiny", sizes=SIZES).with_inputs(())
    exchange.init(root / "study", cohort.site_names)
    for site, part in by_site(cohort).items():
        exchange.join(root / "study", part, site, root / site)
    return root, cohort.site_names


@pytest.fixture
def study(joined, tmp_path):
    root = shutil.copytree(joined[0], tmp_path / "copy")
    return root, LocalGrid(flower.client_app, folders(root, joined[1])), joined[1]


def lead(root, grid):
    flower.server_app(grid, context(study_folder=root / "study"))


def weights(root):
    return bits(Model.load(root / "study" / "model"))


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
    folders(files, sites)  # the sites join
    finish(files)
    assert weights(root) == weights(files)


def test_a_client_accepts_the_protocol_only(study):
    _, grid, sites = study
    for content in ({"code": b"import os"}, {"request": "text"}, {"request": b"x", "more": 1}, {"request": b"not a request"}):
        replies = flower._asked(grid, {1: content}, 1.0)
        with pytest.raises(InputError, match=f"site {sites[0]} refused: the (message|request)"):
            flower._content(replies, 1, "answer", sites[0])


def test_two_nodes_of_one_site(study):
    root, grid, sites = study
    grid.contexts[2] = grid.contexts[1]
    with pytest.raises(InputError, match=f"joins as site {sites[0]}, which is not expected, or is connected already"):
        lead(root, grid)


WRONG = [
    ({"arrays": {"usable.amplitude": np.zeros(13, dtype=np.int64)}}, "is not signed by site"),
    ({"head": {"site": "west"}}, "is not signed by site"),
]


@pytest.mark.parametrize(("change", "message"), WRONG)
def test_a_damaged_answer_ends_the_run_and_the_next_run_goes_on(study, change, message):
    root, grid, _ = study
    send, rounds = grid.send_and_receive, []

    def damage_one_answer(sent, **options):
        replies = send(sent, **options)
        rounds.append(1)
        if len(rounds) == 2:  # after the joins
            record = replies[0].content[flower.RECORD]
            record["answer"] = changed(record["answer"], **change)
        return replies

    grid.send_and_receive = damage_one_answer
    with pytest.raises(InputError, match=message):
        lead(root, grid)
    assert not list((root / "study" / "totals").iterdir())  # nothing of the damaged round was added
    stop_after(grid, send, 3)
    with pytest.raises(KeyboardInterrupt):  # the site sends its answer again, and the study goes on
        lead(root, grid)
    assert list((root / "study" / "totals").iterdir())


def stop_after(grid, send, calls):
    """Let the server be killed after some rounds."""
    count = []

    def counted(sent, **options):
        count.append(1)
        if len(count) > calls:
            raise KeyboardInterrupt
        return send(sent, **options)

    grid.send_and_receive = counted


def test_a_killed_server_goes_on_with_the_same_bits(study, joined, tmp_path):
    root, grid, _ = study
    send = grid.send_and_receive
    for calls in (1, 2, 4, 9):
        stop_after(grid, send, calls)
        with pytest.raises(KeyboardInterrupt):
            lead(root, grid)
    grid.send_and_receive = send
    lead(root, grid)
    other = shutil.copytree(joined[0], tmp_path / "other")
    lead(other, LocalGrid(flower.client_app, folders(other, joined[1])))
    assert weights(root) == weights(other)


def test_a_lost_node_that_is_still_listed(study):
    """Flower lists a lost node for a while; the site that came back as another node answers."""
    root, grid, sites = study
    grid.contexts[9], grid.dead = grid.contexts[1], {1}
    nodes = flower._joined(grid, root / "study", exchange.open_study(root / "study"), 1.0)
    assert nodes[sites[0]] == 9 and set(nodes) == set(sites)


def test_a_site_sends_nothing_before_its_fingerprint(study, capsys):
    root, grid, sites = study
    for context_ in grid.contexts.values():
        del context_.node_config["fingerprint"]
    with pytest.raises(InputError, match=f"site {sites[0]} refused: the members .* have the fingerprint"):
        lead(root, grid)
    assert "have the fingerprint" in capsys.readouterr().err  # at the site itself
    assert not list(root.glob("*/outbox/answer-*"))


def test_a_study_without_a_site_needs_consent(study):
    root, grid, _ = study
    exchange.combine(root / "study", without=["west"])
    with pytest.raises(InputError, match=r"refused: .* begins without west"):
        lead(root, grid)
    agreed = messages.fingerprint(exchange.standing(root / "study").plan)
    for context_ in grid.contexts.values():
        context_.node_config |= {"without": "west", "fingerprint": agreed}
    stop_after(grid, grid.send_and_receive, 3)
    with pytest.raises(KeyboardInterrupt):
        lead(root, grid)
    assert (root / "study" / "totals" / "totals-02-001.safetensors").exists()
