"""Options of `check` and `convert` that mend a cohort: empty scans, several runs, site names."""

import numpy as np
import pytest

from m2lgdg import Cohort, make_cohort


@pytest.fixture
def command(typed):
    return typed


def test_drop_bad_leaves_numerically_empty_scans_out(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cohort = make_cohort("tiny")
    series = list(cohort.series)
    series[3] = np.asarray(series[3]) * np.float32(1e-12)
    cohort._changed(series=tuple(series)).save("spoiled.cohort")
    empty = str(cohort.subjects[3])
    code, text, _ = command("check", "spoiled.cohort")
    assert code == 1 and empty in text
    assert command("convert", "spoiled.cohort", "kept.cohort")[0] == 0
    assert len(Cohort.load("kept.cohort")) == len(cohort)
    code, text, _ = command("convert", "spoiled.cohort", "dropped.cohort", "--drop-bad")
    dropped = Cohort.load("dropped.cohort")
    assert (code, len(dropped)) == (0, len(cohort) - 1) and empty not in dropped.subjects.tolist()
    last = dropped.excluded[-1]
    assert (last.subject, last.site, last.reason) == (empty, str(cohort.sites[3]), "numerically empty scan")


def test_runs_of_a_subject_are_joined_on_request(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lab = tmp_path / "lab"
    (lab / "ts").mkdir(parents=True)
    rng, rows = np.random.default_rng(0), ["participant_id\tsite\tdiagnosis"]
    for i in range(12):
        rows.append(f"s{i:02d}\t{'AB'[i % 2]}\t{'patient' if i % 4 < 2 else 'control'}")
        for run in (1, 2):
            np.save(lab / "ts" / f"s{i:02d}_run{run}.npy", rng.normal(size=(40, 6)) * run)
    (lab / "participants.tsv").write_text("\n".join(rows) + "\n")
    (lab / "dataset.toml").write_text('pattern = "ts/{subject}_run{run}.npy"\ntr = 2.0\n')
    code, _, errors = command("convert", lab, "one.cohort")
    assert code == 2 and "join_runs" in errors
    code, _, errors = command("convert", lab, "joined.cohort", "--join-runs")
    assert (code, errors) == (0, "")
    joined = Cohort.load("joined.cohort")
    assert set(joined.lengths.tolist()) == {80}
    first, second = np.load(lab / "ts" / "s03_run1.npy"), np.load(lab / "ts" / "s03_run2.npy")
    expected = np.concatenate([(one - one.mean(axis=0)) / one.std(axis=0) for one in (first, second)])
    np.testing.assert_allclose(joined.series[joined.subjects.tolist().index("s03")], expected, atol=1e-4)


def test_failed_leakage_checks_are_printed_with_the_tables(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cohort = make_cohort("tiny")
    sites = np.array([f" {site}" if i == 0 else site for i, site in enumerate(cohort.sites.tolist())])
    spoiled = cohort._changed(sites=sites)
    spoiled.save("spelled.cohort")
    (tmp_path / "study.toml").write_text('cohort = "spelled.cohort"\nmethods = ["prior"]\nseeds = [0]\ntargets = ["east"]\n')
    code, _, errors = command("run", "study.toml", "--out", "out")
    assert code == 1 and "--merge-sites" in errors
    assert "--merge-sites" in command("table", "out")[1]
    assert command("convert", "spelled.cohort", "merged.cohort", "--merge-sites")[0] == 0
    assert Cohort.load("merged.cohort").site_names == cohort.site_names
