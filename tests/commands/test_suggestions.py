"""Every `Next:` line works when it is pasted: run as printed, it ends with exit code 0, and leads on instead of in a circle."""

import re
import shlex

import numpy as np
import pytest

import m2lgdg.study.audit
from m2lgdg import Cohort
from m2lgdg.commands.suggestions import free
from m2lgdg.study.audit import Audited

STUDY = 'cohort = "{}"\nmethods = ["prior", "phenotype-logistic", "fc-logistic"]\nseeds = [0]\ntargets = ["east", "north"]\n'


@pytest.fixture
def paste(typed, tmp_path, monkeypatch):
    """Run a command, then every command that is suggested; returns the names of all commands, and all of their output."""
    work = tmp_path / "work here"
    work.mkdir()
    monkeypatch.chdir(work)

    def run(*words, code=0):
        done, texts, names = set(), [], []
        line = shlex.join(map(str, words))
        while line is not None:
            assert line not in done, f"a circle: {line}"
            done.add(line)
            names.append(shlex.split(line)[0])
            ended, out, err = typed(*shlex.split(line))
            assert ended in (code if isinstance(code, tuple) else (code,)), f"{line}\n{out}{err}"
            code = 0
            texts.append(out + err)
            lines = re.findall(r"Next:(.*)", out + err)
            assert len(lines) <= 1 and all(each.startswith(" m2lgdg ") for each in lines), lines
            line = lines[0].removeprefix(" m2lgdg ") if lines else None
            if line is not None and shlex.split(line)[0] == "check":  # usable with findings is 1
                code = (0, 1)
        return names, "\n".join(texts)

    return run


def own_folder(folder, cohort, without=None, spoiled=None):
    """A lab's own folder with the series of a cohort; one file may be missing, and one may be unreadable."""
    (folder / "ts").mkdir(parents=True)
    rows = ["participant_id\tsite\tdiagnosis"]
    for subject, site, label, series in zip(cohort.subjects, cohort.sites, cohort.labels, cohort.series, strict=True):
        rows.append(f"{subject}\t{site}\t{'patient' if label else 'control'}")
        if subject == spoiled:
            (folder / "ts" / f"{subject}.npy").write_bytes(b"nothing")
        elif subject != without:
            np.save(folder / "ts" / f"{subject}.npy", series)
    (folder / "participants.tsv").write_text("\n".join(rows) + "\n")
    (folder / "dataset.toml").write_text('pattern = "ts/{subject}.npy"\ntr = 2.0\n')
    return folder


def derivatives(folder, cohort):
    """BIDS derivatives with two runs of every subject, of two sites."""
    rows = ["participant_id\tsite\tdiagnosis"]
    for i, (site, label, series) in enumerate(zip(cohort.sites, cohort.labels, cohort.series, strict=True)):
        rows.append(f"sub-{i}\t{site}\t{'patient' if label else 'control'}")
        place = folder / f"sub-{i}" / "func"
        place.mkdir(parents=True)
        header = "\t".join(cohort.rois)
        for run in ("01", "02"):
            numbers = np.asarray(series)[:: 1 if run == "01" else -1]
            name = f"sub-{i}_task-rest_run-{run}_space-MNI_atlas-own_timeseries.tsv"
            np.savetxt(place / name, numbers, delimiter="\t", header=header, comments="")
    (folder / "participants.tsv").write_text("\n".join(rows) + "\n")
    (folder / "dataset_description.json").write_text("{}")
    return folder


@pytest.mark.parametrize("name", ["lab", "my lab's data"])
def test_a_clean_folder(paste, tmp_path, tiny, name):
    folder = own_folder(tmp_path / name, tiny)
    names, text = paste("check", folder, code=(0, 1))
    assert names == ["check", "convert", "run", "table", "report"]
    assert "report.html" in text


@pytest.mark.parametrize("bad", ["without", "spoiled"])
def test_a_missing_and_an_unreadable_file(paste, tmp_path, tiny, bad):
    folder = own_folder(tmp_path / "lab", tiny, **{bad: str(tiny.subjects[5])})
    names, text = paste("check", folder, code=(0, 1))
    assert names == ["check", "convert", "run", "table", "report"] and "--drop-bad" in text
    assert str(tiny.subjects[5]) not in Cohort.load("lab.cohort").subjects.tolist()


def test_a_numerically_empty_scan_in_a_cohort_file(paste, tiny):
    series = list(tiny.series)
    series[3] = np.asarray(series[3]) * np.float32(1e-12)
    tiny._changed(series=tuple(series), name="tiny").save("tiny.cohort")
    names, _ = paste("check", "tiny.cohort", code=1)
    assert names == ["check", "convert", "run", "table", "report"]
    assert len(Cohort.load("tiny-corrected.cohort")) == len(tiny) - 1


def test_a_duplicate(paste, tiny):
    series = list(tiny.series)
    series[4] = series[3]
    tiny._changed(series=tuple(series)).save("twice.cohort")
    names, text = paste("check", "twice.cohort", code=1)
    assert names == ["check", "convert", "run", "table", "report"] and "--drop-duplicates" in text
    assert len(Cohort.load("twice-corrected.cohort")) < len(tiny)


def test_a_selection_of_runs_and_sites_is_kept(paste, tmp_path, tiny):
    folder = derivatives(tmp_path / "derivatives", tiny)
    names, text = paste("check", folder, "--kind", "bids", "--only", "run-01", "--site", "north", "--site", "east", code=(0, 1))
    assert names == ["check", "convert", "fit"] and "--only run-01 --site north --site east" in text
    assert Cohort.load("derivatives.cohort").site_names == ["east", "north"]


def test_sites_of_a_cohort_file_are_kept(paste, tiny):
    tiny.save("tiny.cohort")
    names, text = paste("check", "tiny.cohort", "--site", "north", "--site", "south", code=(0, 1))
    assert names == ["check", "fit"]
    assert "--site north --site south" in text
    assert "trained on 30 subjects from 2 sites" in text


def test_a_held_out_site(paste, tiny, tmp_path):
    plugin = tmp_path / "own file.py"
    plugin.write_text("")
    tiny.save("tiny.cohort")
    names, text = paste(
        "fit", "tiny.cohort", "--method", "fc-logistic", "--out", "a model", "--without", "east", "--plugin", plugin
    )
    assert names[:2] == ["fit", "predict"] and "--site east" in text
    names, _ = paste("predict", "a model", "tiny.cohort", "--out", "all of them.csv")
    assert names == ["predict", "explain"]


@pytest.mark.parametrize("method", ["prior", "phenotype-logistic"])
def test_models_without_a_map(paste, tiny, method):
    tiny.save("tiny.cohort")
    paste("fit", "tiny.cohort", "--method", method, "--out", "model", "--without", "east")


def test_a_new_site_has_no_labels(paste, tiny):
    tiny.select(sites=["north"]).unlabelled().save("new.cohort")
    for words in (("check", "new.cohort", "--new-site"), ("convert", "new.cohort", "copy.cohort")):
        names, text = paste(*words, code=(0, 1))
        assert len(names) == 1 and "Then, with your own MODEL: m2lgdg predict MODEL" in text


def test_a_study_from_audit_to_report(paste, tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(m2lgdg.study.audit, "audit", lambda *_, **__: [Audited("prior", "east", 3)])  # its fits: test_audit
    folder = tmp_path / "a study"
    folder.mkdir()
    tiny.save(folder / "tiny.cohort")
    (folder / "study.toml").write_text(STUDY.format("tiny.cohort"))
    names, text = paste("audit", folder / "study.toml", "--method", "prior", "--site", "east", "--set", "seeds=[3]")
    assert names == ["audit", "run", "table", "report"]
    assert "--method prior --site east --set 'seeds=[3]'" in text or "'seeds=[3]'" in text
    assert "1 of 1 cells done" in text
    assert paste("run", folder / "study.toml", "--out", "all")[0] == ["run", "table", "report"]
    assert paste("share", "all", "--out", "to share")[0] == ["share", "report"]
    assert paste("table", "all", "--site", "east")[0] == ["table", "report"]


def test_methods_card_and_calibrate(paste, tiny, linear_study):
    assert paste("methods")[0] == ["methods", "methods"]
    tiny.save("tiny.cohort")
    paste("fit", "tiny.cohort", "--method", "fc-logistic", "--out", "model")
    for words in (
        ("card", "model"),
        ("card", "model", "--study", linear_study),
        ("export", "model", "--share", "--out", "s"),
        ("calibrate", "model", "tiny.cohort", "--site", "north", "--out", "calibrated"),
    ):
        assert len(paste(*words)[0]) == 1


def test_suggested_names_are_free(tmp_path):
    assert free(tmp_path / "a.cohort") == tmp_path / "a.cohort"
    (tmp_path / "a.cohort").touch()
    (tmp_path / "a-2.cohort").touch()
    assert free(tmp_path / "a.cohort") == tmp_path / "a-3.cohort"


def test_paths_that_look_like_options(paste, tiny):
    tiny.save("-odd.cohort")
    names, _ = paste("check", "./-odd.cohort", code=(0, 1))
    assert names == ["check", "run", "table", "report"]
