"""`m2lgdg-bids`: from derivatives to series and quality of each participant, then to the cohort and the report."""

import json
import sys

import miniature
import numpy as np
import pandas as pd
import pytest

from m2lgdg import Cohort, make, read
from m2lgdg.cli import bids
from m2lgdg.connectivity import correlations
from m2lgdg.deploy.bids_app import METHODS
from m2lgdg.study.predictions import read_predictions

ATLAS = "4S156Parcels"


@pytest.fixture
def app(monkeypatch, capsys):
    """Run the BIDS-App as typed: exit code, standard output and error."""

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["m2lgdg-bids", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            bids()
        streams = capsys.readouterr()
        return ended.value.code, streams.out, streams.err

    return run


@pytest.fixture
def release(tmp_path):
    return miniature.xcpd(tmp_path / "xcpd")


@pytest.fixture(scope="module")
def few(tiny):
    """Three patients and three controls of each of two sites."""
    chosen = [
        np.flatnonzero((tiny.sites == site) & (tiny.labels == label))[:3] for site in ("north", "south") for label in (0, 1)
    ]
    return tiny.select(np.sort(np.concatenate(chosen)))


def derivatives(folder, cohort, labels=True, site=True):
    """XCP-D tables of a synthetic cohort."""
    miniature.description(folder, "XCP-D")
    columns = ["participant_id", *(["site"] if site else []), *(["diagnosis"] if labels else []), "age"]
    rows = []
    for i, series in enumerate(cohort.series):
        words = {"site": cohort.sites[i], "diagnosis": "patient" if cohort.labels[i] else "control"}
        rows.append([f"sub-{i:02}", *(words[name] for name in columns if name in words), 20 + i % 9])
        place = folder / f"sub-{i:02}" / "func"
        place.mkdir(parents=True)
        name = f"sub-{i:02}_task-rest_space-MNI_atlas-own_timeseries"
        np.savetxt(place / f"{name}.tsv", series, delimiter="\t", header="\t".join(cohort.rois), comments="", fmt="%.9g")
        (place / f"{name}.json").write_text('{"RepetitionTime": 2.0}')
    miniature.write_rows(folder / "participants.tsv", columns, rows)
    return folder


def test_a_participant_has_a_series_and_a_quality_file(app, release, tmp_path):
    out = tmp_path / "out"
    code, text, err = app(release.folder, out, "participant", "--participant_label", "0052", "sub-8", "--atlas", ATLAS)
    assert (code, err) == (0, "") and "series and quality of 2 participants" in text
    assert sorted(path.name for path in out.glob("sub-*")) == ["sub-0052", "sub-8"]
    stem = out / "sub-0052" / "func" / "sub-0052_"
    header, *rows = (stem.parent / f"{stem.name}atlas-{ATLAS}_timeseries.tsv").read_text().splitlines()
    assert tuple(header.split("\t")) == miniature.PARCELS
    written = np.array([line.split("\t") for line in rows], dtype=np.float32)
    np.testing.assert_array_equal(written, np.nan_to_num(release.series["sub-0052"]).astype(np.float32))
    sidecar = json.loads((stem.parent / f"{stem.name}atlas-{ATLAS}_timeseries.json").read_text())
    assert sidecar == {"RepetitionTime": 0.8}
    quality = json.loads((stem.parent / f"{stem.name}desc-quality.json").read_text())
    flat = [miniature.PARCELS[3], miniature.PARCELS[7]]
    assert quality[ATLAS] == {"volumes": 9, "rois": len(miniature.PARCELS), "minutes": 0.12, "flat_rois": flat}
    assert any("fewer than" in sentence for sentence in quality["findings"])
    description = json.loads((out / "dataset_description.json").read_text())
    assert description["DatasetType"] == "derivative" and description["GeneratedBy"][0]["Name"] == "m2lgdg"
    assert str(tmp_path) not in json.dumps(description)


def test_both_levels_give_the_cohort_of_the_derivatives(app, tiny, tmp_path, monkeypatch):
    monkeypatch.setattr("m2lgdg.deploy.bids_app.METHODS", METHODS[:2])
    folder, out = derivatives(tmp_path / "xcpd", tiny), tmp_path / "out"
    assert app(folder, out, "participant")[0] == 0
    code, text, err = app(folder, out, "group")
    assert code == 0, err
    direct, group = read(folder, "bids"), Cohort.load(out / "group.cohort")
    assert group.subjects.tolist() == direct.subjects.tolist() and group.sites.tolist() == direct.sites.tolist()
    assert group.labels.tolist() == direct.labels.tolist() and group.tr.tolist() == direct.tr.tolist()
    assert all(np.array_equal(a, b) for a, b in zip(group.series, direct.series, strict=True))
    assert {path.name for path in (out / "check").iterdir()} == {"inclusion.csv", "sites.csv", "findings.csv"}
    assert set(read_predictions(out / "results")["method"]) == set(METHODS[:2])
    assert (out / "results" / "report.html").is_file() and str(out / "results" / "report.html") in text


def test_head_motion_reaches_the_group(app, few, tmp_path):
    folder, out = derivatives(tmp_path / "xcpd", few, labels=False), tmp_path / "out"
    for i, run in enumerate(sorted(folder.glob("sub-*/func/*.tsv"))):
        moved = "framewise_displacement\nn/a\n0.1\n" + f"{0.1 + i / 100:.2f}\n"
        (run.parent / f"{run.name.split('_space-')[0]}_motion.tsv").write_text(moved)
    expected = read(folder, "bids").phenotypes["mean_fd"].to_numpy()
    assert expected[:2].tolist() == pytest.approx([0.1, 0.105])
    assert app(folder, out, "participant")[0] == app(folder, out, "group")[0] == 0
    quality = out / "sub-01" / "func" / "sub-01_desc-quality.json"
    assert json.loads(quality.read_text())["mean_fd"] == expected[1]
    assert Cohort.load(out / "group.cohort").phenotypes["mean_fd"].tolist() == expected.tolist()
    quality.write_text("{")
    code, _, err = app(folder, out, "group")
    assert code == 2 and err == f"m2lgdg: {quality} is damaged; run the participant level for sub-01 again.\n"


def test_the_group_level_alone_reads_the_derivatives(app, few, tmp_path):
    folder = derivatives(tmp_path / "xcpd", few, labels=False)
    code, text, _ = app(folder, tmp_path / "out", "group")
    assert code == 0 and "No study was run: the participants have no labels of both classes." in text
    assert len(Cohort.load(tmp_path / "out" / "group.cohort")) == len(few)
    assert not (tmp_path / "out" / "results").exists()
    folder = derivatives(tmp_path / "one", few, site=False)
    assert "are of one site" in app(folder, tmp_path / "other", "group")[1]
    assert (tmp_path / "other" / "dataset_description.json").is_file()


def test_a_participant_that_cannot_be_read_is_named_and_the_others_are_written(app, few, tmp_path):
    folder = derivatives(tmp_path / "xcpd", few)
    (bad,) = folder.glob("sub-03/func/*.tsv")
    bad.write_text("a\tb\n1\tword\n")
    code, text, err = app(folder, tmp_path / "out", "participant")
    assert code == 1 and err.startswith("sub-03: ") and f"{len(few) - 1} participants" in text
    assert not (tmp_path / "out" / "sub-03").exists()


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("participant", "--participant_label", "0053"), "does not list participant 0053; did you mean 005"),
        (("participant", "--participants", "none.tsv"), "none.tsv does not exist"),
        (("participant",), "has several atlases; choose one of"),
        (("group", "--atlas", "aal"), "has no atlas aal"),
        (("individual",), "invalid choice: 'individual'"),
    ],
)
def test_bad_input_is_one_sentence(app, release, tmp_path, words, reason):
    code, _, err = app(release.folder, tmp_path / "out", *words)
    assert code == 2 and reason in err and "Traceback" not in err
    assert not (tmp_path / "out").exists()


def test_a_message_names_the_table_of_the_user(app, release, tmp_path):
    table = release.folder / "participants.tsv"
    table.write_text(table.read_text().replace("\tpatient\t", "\tsibling\t"))
    code, _, err = app(release.folder, tmp_path / "out", "participant", "--atlas", ATLAS)
    assert code == 2 and str(table) in err and "sibling" in err


def test_connectomes_are_read_by_the_group_level(app, few, tmp_path):
    """XCP-D's tables of correlations: the cohort and its study, with the predictions of a fit on the same connectomes."""
    out, folder = tmp_path / "out", derivatives(tmp_path / "xcp_d", few)
    for i, matrix in enumerate(correlations(few.series)):
        place = folder / f"sub-{i:02}" / "func"
        for file in place.iterdir():
            file.unlink()
        table = pd.DataFrame(matrix, index=list(few.rois), columns=list(few.rois))
        name = f"sub-{i:02}_task-rest_space-MNI_seg-own_stat-pearsoncorrelation_relmat.tsv"
        table.to_csv(place / name, sep="\t", index_label="Node")
    code, _, problem = app(folder, out, "participant")
    assert code == 2 and "xcp_d has connectomes and no series, of which the participant level" in problem and not out.exists()
    code, _, problem = app(folder, out, "group", "--confounds", "simple")
    assert code == 2 and problem.count("\n") == 1 and "confounds" in problem and not out.exists()
    code, printed, problem = app(folder, out, "group")
    assert code == 0, printed + problem
    cohort = Cohort.load(out / "group.cohort")
    assert cohort.values == "correlation" and cohort.rois == few.rois
    table = read_predictions(out / "results")
    assert set(table["method"]) == set(METHODS)
    source, target = cohort.select(sites=["north"]), cohort.select(sites=["south"])
    expected = make("fc-logistic").fit(source).predict_proba(target)[:, 1]
    own = table[(table["method"] == "fc-logistic") & (table["target"] == "south")].set_index("subject")
    np.testing.assert_allclose(own.loc[target.subjects.tolist(), "proba"], expected, atol=1e-6)


def test_a_table_of_brain_structure_is_of_the_group_level(app, few, tmp_path, monkeypatch):
    monkeypatch.setattr("m2lgdg.deploy.bids_app.no_study", lambda cohort, check: "it is not of interest here")
    derivatives(tmp_path / "xcpd", few)
    rows = [f"sub-{i:02}" for i in range(len(few) - 1)]  # the last has none
    table = pd.DataFrame(
        {"Left-Caudate": 3500.0 + np.arange(len(rows)), "eTIV": 1.5e6}, index=pd.Index(rows, name="participant_id")
    )
    table.to_csv(tmp_path / "aseg.tsv", sep="\t")
    words = ("--table", f"aseg={tmp_path / 'aseg.tsv'}", "--patient", "patient", "--control", "control")
    for level in ("participant", "group"):
        code, _, error = app(tmp_path / "xcpd", tmp_path / "out", level, *words)
        assert code == 0 and not error
    made = Cohort.load(tmp_path / "out" / "group.cohort").tables["aseg"]
    assert made["Left-Caudate"].tolist()[:-1] == table["Left-Caudate"].tolist() and made.iloc[-1].isna().all()
    code, _, error = app(tmp_path / "xcpd", tmp_path / "other", "group", "--table", "aseg.tsv")
    assert code == 2 and "give it as NAME=FILE" in error
