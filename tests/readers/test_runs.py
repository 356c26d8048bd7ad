"""Confounds of fMRIPrep by nilearn's strategies: what is removed, scrubbed volumes, and head motion in the cohort."""

import json

import miniature
import nibabel
import numpy as np
import pandas as pd
import pytest
from nibabel.cifti2 import SeriesAxis
from nilearn.interfaces.fmriprep import load_confounds_strategy
from nilearn.signal import clean
from test_images import models, save, save_labels

from m2lgdg import Cohort
from m2lgdg.data.readers import read
from m2lgdg.storage import InputError

VOLUMES = 60
MOVED = (20, 21, 41)  # volumes of sub-01 with a large displacement


def motion_names():
    names = [f"{kind}_{axis}" for kind in ("trans", "rot") for axis in "xyz"]
    return [f"{name}{form}" for name in names for form in ("", "_derivative1", "_power2", "_derivative1_power2")]


def write_confounds(place, scan, seed, moved=(), far=0.9):
    """A table as fMRIPrep writes it, with CompCor components and their sidecar file."""
    rng = np.random.default_rng(seed)
    tissues = [f"{name}{form}" for name in ("csf", "white_matter") for form in ("", "_derivative1", "_power2")]
    tissues += [f"{name}_derivative1_power2" for name in ("csf", "white_matter")]
    components = [f"a_comp_cor_0{i}" for i in range(3)]
    names = [*motion_names(), *tissues, *components, "cosine00"]
    table = pd.DataFrame(rng.normal(size=(VOLUMES, len(names))), columns=names)
    table.loc[0, table.columns.str.contains("derivative")] = np.nan
    table["framewise_displacement"] = [np.nan, *(0.05 + 0.001 * np.arange(VOLUMES - 1))]
    table.loc[list(moved), "framewise_displacement"] = far
    table["std_dvars"] = 1.0
    file = place / f"{scan}_desc-confounds_timeseries.tsv"
    table.to_csv(file, sep="\t", na_rep="n/a", index=False)
    about = {
        name: {"Method": "aCompCor", "Mask": "combined", "Retained": True, "VarianceExplained": 0.2} for name in components
    }
    about |= {name: about[name] | {"SingularValue": 1.0, "CumulativeVarianceExplained": 0.2} for name in components}
    file.with_suffix(".json").write_text(json.dumps(about))
    return table


@pytest.fixture
def images(tmp_path):
    images = miniature.nifti(tmp_path)
    for subject, seed, moved in (("sub-01", 1, MOVED), ("sub-02", 2, ())):
        write_confounds(images.folder / subject / "func", f"{subject}_task-rest", seed, moved)
    return images


def run_of(images, subject):
    (run,) = (images.folder / subject / "func").glob("*_bold.nii.gz")
    return run


@pytest.mark.parametrize("strategy", ["simple", "scrubbing", "compcor"])
def test_what_a_strategy_leaves_of_the_signals(images, strategy):
    cohort = read(images.folder, atlas_image=images.atlas, confounds=strategy)
    for subject, series in zip(cohort.subjects, cohort.series, strict=True):
        confounds, mask = load_confounds_strategy(str(run_of(images, subject)), denoise_strategy=strategy)
        band = {"low_pass": 0.1, "high_pass": 0.01, "t_r": images.trs[subject]}
        options = {"confounds": confounds, "sample_mask": mask, "detrend": True, "standardize": None}
        expected = clean(images.series[subject], **options, **band)
        columns = [cohort.rois.index(str(i)) for i in miniature.REGIONS]
        np.testing.assert_allclose(series[:, columns], expected, rtol=0, atol=1e-3)
    assert any(f"strategy {strategy}" in note for note in map(str, cohort.notes))


def test_simple_is_the_default(images):
    for one, other in zip(
        read(images.folder, atlas_image=images.atlas).series,
        read(images.folder, atlas_image=images.atlas, confounds="simple").series,
        strict=True,
    ):
        np.testing.assert_array_equal(one, other)


def test_scrubbed_volumes_by_subject(images):
    cohort = read(images.folder, atlas_image=images.atlas, confounds="scrubbing")
    _, mask = load_confounds_strategy(str(run_of(images, "sub-01")), denoise_strategy="scrubbing")
    lost = VOLUMES - len(mask)
    assert lost >= len(MOVED)
    assert [len(series) for series in cohort.series] == [VOLUMES - lost, VOLUMES]
    assert cohort.phenotypes["scrubbed_volumes"].tolist() == [lost, 0]
    assert f"scrubbed volumes: sub-01 {lost} of 60" in map(str, cohort.notes)
    assert "scrubbed_volumes" not in read(images.folder, atlas_image=images.atlas).phenotypes


def test_mean_displacement_is_a_phenotype_and_limits_motion(images):
    cohort = read(images.folder, atlas_image=images.atlas)
    values = 0.05 + 0.001 * np.arange(VOLUMES - 1)
    moved = values.copy()
    moved[[volume - 1 for volume in MOVED]] = 0.9
    np.testing.assert_allclose(cohort.phenotypes["mean_fd"], [moved.mean(), values.mean()])
    assert "mean_fd" not in cohort.inputs
    kept = read(images.folder, atlas_image=images.atlas, max_motion=0.1)
    assert kept.subjects.tolist() == ["sub-02"]
    assert [(each.subject, each.reason) for each in kept.excluded] == [
        ("sub-01", f"head motion: mean_fd is not below 0.1 (value {moved.mean():.6g})")
    ]


def test_a_column_of_motion_in_the_table_stays(images):
    rows = [("sub-01", "A", "control", 0.3), ("sub-02", "B", "patient", 0.4)]
    miniature.write_rows(images.folder / "participants.tsv", ("participant_id", "site", "diagnosis", "MeanFD"), rows)
    table = read(images.folder, atlas_image=images.atlas).phenotypes
    assert table["MeanFD"].tolist() == [0.3, 0.4]
    assert "mean_fd" not in table


def test_joined_runs_have_one_displacement(images):
    place = images.folder / "sub-01" / "func"
    for run in (1, 2):
        scan = f"sub-01_task-rest_run-{run}"
        name = f"{scan}_space-MNI152NLin2009cAsym_desc-preproc_bold.nii.gz"
        nibabel.save(nibabel.load(run_of(images, "sub-02")), place / name)
        write_confounds(place, scan, run, moved=MOVED[:run])
    for file in place.glob("sub-01_task-rest_[sd]*"):
        file.unlink()
    cohort = read(images.folder, atlas_image=images.atlas, join_runs=True, confounds="scrubbing")
    values = np.tile(0.05 + 0.001 * np.arange(VOLUMES - 1), (2, 1))
    values[0, MOVED[0] - 1] = values[1, MOVED[0] - 1] = values[1, MOVED[1] - 1] = 0.9
    np.testing.assert_allclose(cohort.phenotypes["mean_fd"].iloc[0], values.mean())
    assert cohort.phenotypes["scrubbed_volumes"].iloc[0] == 2 * VOLUMES - len(cohort.series[0])


def test_dense_series_of_fmriprep_are_cleaned(tmp_path):
    folder = tmp_path / "fmriprep"
    miniature.description(folder, "fMRIPrep")
    miniature.write_rows(folder / "participants.tsv", ("participant_id", "site"), [("sub-01", "A")])
    signals = np.random.default_rng(0).normal(size=(VOLUMES, 26)).astype(np.float32) + 50
    run = folder / "sub-01/func/sub-01_task-rest_space-fsLR_den-91k_bold.dtseries.nii"
    save(run, signals, SeriesAxis(0, 2.0, VOLUMES), models())
    labels = save_labels(tmp_path / "atlas.dlabel.nii")
    plain = read(folder, atlas_image=labels).series[0]
    np.testing.assert_allclose(plain[:, 1], signals[:, :3].mean(axis=1), rtol=1e-6)
    write_confounds(run.parent, "sub-01_task-rest", 1, MOVED)
    cohort = read(folder, atlas_image=labels, confounds="scrubbing")
    confounds, mask = load_confounds_strategy(str(run), denoise_strategy="scrubbing")
    options = {"confounds": confounds, "sample_mask": mask, "detrend": True, "standardize": None}
    expected = clean(plain, **options, low_pass=0.1, high_pass=0.01, t_r=2.0)
    np.testing.assert_allclose(cohort.series[0], expected, atol=1e-4)
    assert cohort.phenotypes["scrubbed_volumes"].tolist() == [VOLUMES - len(mask)]


def test_bad_confounds(images):
    read_scrubbed = {"atlas_image": images.atlas, "confounds": "scrubbing"}
    with pytest.raises(InputError, match=r"option confounds: 'aroma' is not a strategy; choose one of simple, scrubbing, comp"):
        read(images.folder, atlas_image=images.atlas, confounds="aroma")
    table = images.folder / "sub-02" / "func" / "sub-02_task-rest_desc-confounds_timeseries.tsv"
    whole = pd.read_csv(table, sep="\t")
    whole.drop(columns=["framewise_displacement"]).to_csv(table, sep="\t", na_rep="n/a", index=False)
    with pytest.raises(InputError, match=r"sub-02_\S+confounds\S+: confounds of strategy scrubbing cannot be loaded"):
        read(images.folder, **read_scrubbed)
    assert np.isnan(read(images.folder, atlas_image=images.atlas).phenotypes["mean_fd"].iloc[1])
    whole.assign(framewise_displacement=0.9).to_csv(table, sep="\t", na_rep="n/a", index=False)
    with pytest.raises(InputError, match=r"sub-02_\S+: confounds of strategy scrubbing cannot be loaded \(All volumes"):
        read(images.folder, **read_scrubbed)
    table.unlink()
    with pytest.raises(InputError, match=r"sub-02\S+: no sub-02_task-rest_desc-confounds_timeseries\.tsv in its folder"):
        read(images.folder, **read_scrubbed)


def test_a_displacement_that_is_no_number(images):
    table = images.folder / "sub-02" / "func" / "sub-02_task-rest_desc-confounds_timeseries.tsv"
    text = pd.read_csv(table, sep="\t").astype({"framewise_displacement": object})
    text.loc[4, "framewise_displacement"] = "large"
    text.to_csv(table, sep="\t", na_rep="n/a", index=False)
    with pytest.raises(InputError, match=r"timeseries\.tsv, line 6, column framewise_displacement: 'large' is not a number\."):
        read(images.folder, atlas_image=images.atlas)


def test_confounds_are_for_runs_with_an_atlas(tmp_path):
    folder = miniature.xcpd(tmp_path / "xcpd", atlases=("Gordon",)).folder
    with pytest.raises(InputError, match=r"option confounds is for runs that an atlas divides into ROIs"):
        read(folder, confounds="simple")


def test_the_commands_print_scrubbed_volumes_and_the_session(images, typed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = ("--atlas-image", images.atlas, "--confounds", "scrubbing")
    code, text, _ = typed("check", images.folder, *options)
    assert code in (1, 2) and "scrubbed volumes: sub-01" in text
    code, text, _ = typed("convert", images.folder, "own.cohort", *options)
    assert code == 0 and "Scrubbed volumes: sub-01" in text
    assert Cohort.load("own.cohort").phenotypes["scrubbed_volumes"].iloc[0] > 0
    for session in ("1", "2"):
        name = run_of(images, "sub-02").name.replace("sub-02_", f"sub-02_ses-{session}_")
        nibabel.save(nibabel.load(run_of(images, "sub-02")), tmp_path / name)
    folder = images.folder / "sub-02" / "func"
    run_of(images, "sub-02").unlink()
    for file in tmp_path.glob("sub-02_ses*"):
        file.rename(folder / file.name)
    code, text, _ = typed("convert", images.folder, "other.cohort", "--atlas-image", images.atlas)
    assert code == 0 and "Session: the first of each subject (1 of 2 subjects have several)" in text
    code, text, error = typed("convert", images.folder, "none.cohort", "--atlas-image", images.atlas, "--session", "9")
    assert code == 2 and "no run of session 9; its sessions are 1, 2" in error
    assert not (tmp_path / "none.cohort").exists()
