"""What a study folder records of its cohort: leakage checks, findings, and what `run`, `table` and the report say of them."""

import json
from dataclasses import replace

import numpy as np
import pytest

from m2lgdg import InputError
from m2lgdg.cohort import Cohort
from m2lgdg.study.description import failed_checks


@pytest.fixture
def study_of(tmp_path):
    def write(cohort):
        cohort.save(tmp_path / "a.cohort")
        (tmp_path / "study.toml").write_text('cohort = "a.cohort"\nmethods = ["prior"]\nseeds = [0]\n')
        return tmp_path / "study.toml", tmp_path / "out"

    return write


def test_run_shows_failed_checks_and_ends_with_1(tiny, study_of, typed):
    north, south = (int(np.flatnonzero(tiny.sites == site)[0]) for site in ("north", "south"))
    series = [tiny.series[north] if i == south else one for i, one in enumerate(tiny.series)]
    study, out = study_of(replace(tiny, series=series))
    code, printed, said = typed("run", study, "--out", out)
    assert code == 1
    assert "4 of 4 cells done" in printed
    sentence = "Leakage check failed: no identical scan on both sides. Target north: source contains copies of its scans (1 at"
    assert [line for line in said.splitlines() if line.startswith(sentence)]
    assert failed_checks(out) == [line for line in said.splitlines() if line.startswith("Leakage check failed: ")]
    code, _, again = typed("run", study, "--out", out)  # also when every cell was done before
    assert (code, sentence in again) == (1, True)
    typed("report", out)
    assert sentence in (out / "report.html").read_text().partition("<main")[0]


def test_run_without_failed_checks_says_nothing_of_them(tiny, study_of, typed):
    study, out = study_of(tiny)
    code, printed, said = typed("run", study, "--out", out)
    assert code == 0
    assert "eakage" not in printed + said
    assert failed_checks(out) == []
    (out / "checks.json").unlink()
    assert failed_checks(out) == []


@pytest.mark.parametrize("text", ["{", "[1]", '{"check": 1}', "3", '[{"passed": false}]'])
def test_damaged_checks_are_an_error(tmp_path, text):
    (tmp_path / "checks.json").write_text(text)
    with pytest.raises(InputError, match=r"checks\.json is damaged and cannot be read as leakage checks; remove it"):
        failed_checks(tmp_path)


def test_failed_checks_are_sentences(tmp_path):
    checks = [{"check": "a", "passed": False, "detail": "B."}, {"check": "c", "passed": True, "detail": "D."}]
    (tmp_path / "checks.json").write_text(json.dumps(checks))
    assert failed_checks(tmp_path) == ["Leakage check failed: a. B."]


def test_a_saved_cohort_may_have_proxies_that_are_allowed(tiny, tmp_path):
    cohort = replace(tiny, phenotypes=tiny.phenotypes.assign(HDRS17=1.0)).with_inputs(["HDRS17"], allow_proxies=True)
    assert Cohort.load(cohort.save(tmp_path / "a.cohort")).inputs == ("HDRS17",)
