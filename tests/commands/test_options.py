"""`--site` selects sites in every command, `--only` selects runs and nothing else; earlier spellings are understood."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
from test_suggestions import derivatives

from m2lgdg import Cohort, Method
from m2lgdg.cli import terminal
from m2lgdg.findings import Exclusion
from m2lgdg.study.predictions import read_predictions


@pytest.fixture
def work(tmp_path, monkeypatch, tiny):
    monkeypatch.chdir(tmp_path)
    tiny.save("tiny.cohort")
    (tmp_path / "study.toml").write_text('cohort = "tiny.cohort"\nmethods = ["prior", "phenotype-logistic"]\nseeds = [0]\n')
    return tmp_path


def test_check_and_convert(typed, work, tiny):
    assert typed("convert", "tiny.cohort", "two.cohort", "--site", "north", "--site", "west")[0] == 0
    two = Cohort.load("two.cohort")
    assert two.site_names == ["north", "west"]
    assert {(one.site, one.reason) for one in two.excluded} == {("east", "site not selected"), ("south", "site not selected")}
    assert {one.subject for one in two.excluded} == {""}  # ids of other sites stay out of the file
    lacking = [Exclusion(f"lost-{site}", site, "listed but no series file") for site in ("north", "east", "")]
    tiny._changed(excluded=tuple(sorted(lacking))).save("lacking.cohort")
    assert typed("convert", "lacking.cohort", "north.cohort", "--site", "north")[0] == 0
    assert {one.subject for one in Cohort.load("north.cohort").excluded} == {"", "lost-north"}
    assert len(two) + len(two.excluded) == len(tiny)
    code, text, _ = typed("check", "tiny.cohort", "--site", "north", "--site", "west", "--out", "checked")
    assert code < 2 and f"note {len(two.excluded)} subjects excluded: site not selected" in text  # requested, so no finding
    with Path("checked/sites.csv").open() as file:
        assert [row["site"] for row in csv.DictReader(file)][:2] == ["north", "west"]
    code, _, errors = typed("check", "tiny.cohort", "--site", "nort")
    assert code == 2 and "did you mean north?" in errors


def test_fit_predict_and_calibrate(typed, work, tiny):
    assert (
        typed("fit", "tiny.cohort", "--site", "north", "--site", "south", "--method", "fc-logistic", "--out", "model")[0] == 0
    )
    assert list(Method.load("model").facts_["source"]["sites"]) == ["north", "south"]
    assert typed("predict", "model", "tiny.cohort", "--site", "west", "--out", "p.csv")[0] == 0
    with Path("p.csv").open() as file:
        assert {row["site"] for row in csv.DictReader(file)} == {"west"}
    code, text, _ = typed("calibrate", "model", "tiny.cohort", "--site", "west", "--out", "west")
    here = int((tiny.sites == "west").sum())
    assert code == 0 and f"calibrated on {here} subjects" in text and "Note: the subjects are from" not in text
    assert Method.load("west").facts_["local"]["patients"] == int((tiny.labels[tiny.sites == "west"] == 1).sum())
    code, text, _ = typed("calibrate", "model", "tiny.cohort", "--out", "all")
    assert "calibrate to one of them with --site" in text


def test_run_and_table(typed, work):
    assert typed("run", "study.toml", "--site", "east", "--site", "west", "--method", "prior", "--out", "out")[0] == 0
    assert set(read_predictions("out")["target"]) == {"east", "west"}
    assert json.loads(Path("out/study.json").read_text())["methods"] == ["prior"]
    code, text, _ = typed("table", "out", "--site", "west")
    assert code == 0 and "Target west" in text and "Target east" not in text and "Macro" not in text
    code, _, errors = typed("table", "out", "--site", "north")
    assert code == 2 and "--site north: not a target of out" in errors
    code, _, errors = typed("run", "study.toml", "--set", 'targets=["east"]', "--site", "west", "--out", "other")
    assert code == 2 and "--site west: not one of the study's targets" in errors


def test_the_name_of_a_single_site_has_its_own_option(typed, work, tiny):
    folder = derivatives(work / "derivatives", tiny)
    rows = [line.split("\t") for line in (folder / "participants.tsv").read_text().splitlines()]
    (folder / "participants.tsv").write_text("\n".join(f"{row[0]}\t{row[2]}" for row in rows) + "\n")
    code, _, errors = typed("convert", folder, "one.cohort", "--only", "run-01", "--site", "Lund")
    assert code == 2 and "--site-name NAME" in errors
    assert typed("convert", folder, "one.cohort", "--only", "run-01", "--site-name", "Lund")[0] == 0
    assert Cohort.load("one.cohort").site_names == ["Lund"]
    np.testing.assert_allclose(Cohort.load("one.cohort").series[0], tiny.series[0], rtol=1e-4)
    code, _, errors = typed("check", "tiny.cohort", "--site-name", "Lund")
    assert code == 2 and "takes no option" in errors


def test_an_option_means_the_same_everywhere():
    """One help text for each spelling, but for those that name what a command writes or reads."""
    import typer

    options = {}
    group = typer.main.get_command(terminal.app)
    for name, command in ((name, group.get_command(None, name)) for name in terminal.COMMANDS):
        for parameter in command.params:
            for flag in getattr(parameter, "opts", []):
                options.setdefault(flag, {})[name] = parameter.help
    assert set(options["--only"]) == {"check", "convert"}
    everywhere = ("check", "convert", "run", "table", "fit", "predict", "calibrate", "audit")
    assert set(everywhere) <= set(options["--site"])
    assert all("ite of the cohort" in text or "arget site" in text for text in options["--site"].values())


def test_check_never_shortens_a_site_and_says_its_prefix_once(typed, work, tiny):
    sites = np.array([f"ABIDEII-{site.upper()}_VERY_LONG_NAME_1" for site in tiny.sites])
    long = [np.tile(one, (1 + 1890 // len(one), 1))[:1890] + np.arange(1890)[:, None] % 7 for one in tiny.series]
    tiny._changed(sites=sites, series=long).save("long.cohort")
    code, text, _ = typed("check", "long.cohort")
    lines = text.splitlines()
    (head,) = [i for i, line in enumerate(lines) if line.startswith("site (ABIDEII-...)  ")]
    assert [line.split()[0] for line in lines[head + 1 : head + 5]] == [
        f"{site}_VERY_LONG_NAME_1" for site in ("EAST", "NORTH", "SOUTH", "WEST")
    ]
    assert code < 2 and "1890" in lines[head + 1] and "e+" not in text and "…" not in text
    tiny._changed(excluded=(Exclusion("x1", "", "series file but not listed"),)).save("unknown.cohort")
    assert "excluded: series file but not listed (site not known: 1)." in typed("check", "unknown.cohort")[1]
