"""BIDS derivatives: miniature XCP-D tables and fMRIPrep runs read to the numbers, TR and phenotypes that were written."""

import json

import miniature
import nibabel
import numpy as np
import pandas as pd
import pytest

from m2lgdg import InputError, read
from m2lgdg.data.readers.runs import repetition_time

SUBJECTS = ["sub-0051", "sub-0052", "sub-07", "sub-8"]
ATLAS = "4S156Parcels"


@pytest.fixture(scope="module")
def release(tmp_path_factory):
    return miniature.xcpd(tmp_path_factory.mktemp("bids") / "xcpd")


@pytest.fixture(scope="module")
def cohort(release):
    return read(release.folder, atlas=ATLAS)


@pytest.fixture
def own(tmp_path):
    """Tables that a test may spoil."""
    return miniature.xcpd(tmp_path / "xcpd")


def excluded(cohort):
    return {each.subject: (each.site, each.reason) for each in cohort.excluded}


def table_of(release, subject, atlas=ATLAS):
    (file,) = release.folder.glob(f"{subject}/**/*_atlas-{atlas}_*timeseries.tsv")
    return file


def test_tables_of_old_and_new_names(release, cohort):
    assert cohort.subjects.tolist() == SUBJECTS  # ids keep their zeros
    assert cohort.rois == miniature.PARCELS
    assert cohort.lengths.tolist() == [12, 9, 15, 10]
    for subject, series in zip(SUBJECTS, cohort.series, strict=True):
        np.testing.assert_array_equal(series, np.nan_to_num(release.series[subject]).astype(np.float32))
    assert cohort.atlas == ATLAS
    assert cohort.name == "xcpd"


def test_a_parcel_without_coverage_is_flat(cohort):
    flat = [np.flatnonzero(np.ptp(series, axis=0) == 0).tolist() for series in cohort.series]
    assert flat == [[], [3, 7], [], []]
    assert not cohort.series[1][:, [3, 7]].any()


def test_a_parcel_that_is_partly_missing_is_bad(own):
    file = table_of(own, "sub-0051")
    table = pd.read_csv(file, sep="\t")
    table.loc[2, "LH_Vis_1"] = np.nan
    table.to_csv(file, sep="\t", na_rep="n/a", index=False)
    with pytest.raises(InputError, match=r"sub-0051: NaN at volume 3 of ROI LH_Vis_1 \(1 such value\)"):
        read(own.folder, atlas=ATLAS)
    assert "NaN at volume 3" in excluded(read(own.folder, atlas=ATLAS, on_bad="exclude"))["sub-0051"][1]


def test_participants(cohort):
    nan = np.nan
    assert cohort.sites.tolist() == ["Oslo", "Oslo", "Rome", "Rome"]
    assert cohort.labels.tolist() == [1, 0, 0, -1]
    assert cohort.inputs == ("sex", "age")
    np.testing.assert_array_equal(cohort.phenotypes["sex"], [1, 2, nan, 2])
    np.testing.assert_array_equal(cohort.phenotypes["age"], [23.5, nan, 31, nan])  # age 0 is unknown
    np.testing.assert_array_equal(cohort.phenotypes["iq"], [101, nan, 99, 120])
    assert cohort.phenotypes["handedness"].tolist() == ["R", "", "L", "R"]
    assert list(cohort.phenotypes.columns) == ["sex", "age", "handedness", "iq", "mean_fd"]
    np.testing.assert_array_equal(cohort.phenotypes["mean_fd"], [0.1] * 4)  # of XCP-D's motion.tsv
    assert "label from column group: patient = patient, control = control" in map(str, cohort.notes)
    assert "site from column site" in map(str, cohort.notes)


@pytest.mark.parametrize(
    ("words", "how", "labels"),
    [
        (["2", "1", "2.0", "n/a"], {"patient": "2", "control": "1"}, [1, 0, 1, -1]),
        (["ASD", "TD", "asperger", "n/a"], {"patient": "asd, Asperger"}, [1, 0, 1, -1]),
        (["case", "sibling", "hc", "n/a"], {"control": "hc,sibling"}, [1, 0, 0, -1]),
        (["1", "1", "case", "n/a"], {"control": 1}, [0, 0, 1, -1]),  # 1 is the usual word for a patient
    ],
)
def test_words_of_the_labels(own, words, how, labels):
    rows = [(*row[:3], word, *row[4:]) for row, word in zip(miniature.PARTICIPANTS, [*words, "n/a"], strict=True)]
    miniature.write_rows(own.folder / "participants.tsv", miniature.PARTICIPANT_COLUMNS, rows)
    assert read(own.folder, atlas=ATLAS, **how).labels.tolist() == labels


def test_a_label_that_is_not_known_names_the_options(own):
    rows = [(*row[:3], "sibling", *row[4:]) for row in miniature.PARTICIPANTS]
    miniature.write_rows(own.folder / "participants.tsv", miniature.PARTICIPANT_COLUMNS, rows)
    with pytest.raises(InputError, match=r"column group: label 'sibling' is not known; .*options patient and control") as error:
        read(own.folder, atlas=ATLAS, patient="asd")
    assert "dataset.toml" not in str(error.value)
    with pytest.raises(InputError, match=r"options patient and control: sibling stands for both patient and control\."):
        read(own.folder, atlas=ATLAS, patient="Sibling", control="sibling,td")


def test_tr_comes_from_the_sidecar(cohort):
    np.testing.assert_array_equal(cohort.tr, [2.0, 0.8, np.nan, 3.0])


def test_tr_of_the_table_stands_in_for_a_sidecar(own):
    rows = [(*row, 1.1) for row in miniature.PARTICIPANTS]
    miniature.write_rows(own.folder / "participants.tsv", (*miniature.PARTICIPANT_COLUMNS, "RepetitionTime"), rows)
    assert read(own.folder, atlas=ATLAS).tr.tolist() == [2.0, 0.8, 1.1, 3.0]


def test_several_atlases_need_a_choice(release, tmp_path):
    with pytest.raises(InputError, match=r"has several atlases; choose one of 4S156Parcels, Gordon\."):
        read(release.folder)
    with pytest.raises(InputError, match=r"has no atlas aal; it has 4S156Parcels, Gordon\."):
        read(release.folder, atlas="aal")
    cohort = read(release.folder, atlas="Gordon")
    assert cohort.rois == miniature.GORDON
    one = miniature.xcpd(tmp_path / "one", atlases=("Gordon",))
    np.testing.assert_array_equal(read(one.folder).series[2], one.series["sub-07"].astype(np.float32))


def test_columns_follow_the_names(own, cohort):
    file = table_of(own, "sub-07")
    table = pd.read_csv(file, sep="\t")
    table[list(reversed(miniature.PARCELS))].to_csv(file, sep="\t", index=False)
    again = read(own.folder, atlas=ATLAS)
    assert again.rois == miniature.PARCELS
    np.testing.assert_array_equal(again.series[2], cohort.series[2])


def test_listed_without_series_is_recorded(cohort):
    assert excluded(cohort) == {"sub-99": ("Rome", "listed but no series file")}


def test_a_series_of_nobody(tmp_path):
    release = miniature.xcpd(tmp_path / "xcpd", participants=miniature.PARTICIPANTS[1:])
    with pytest.raises(InputError, match=r"sub-0051_.*timeseries\.tsv: subject sub-0051 is not in .*participants\.tsv"):
        read(release.folder, atlas=ATLAS)
    cohort = read(release.folder, atlas=ATLAS, on_bad="exclude")
    assert cohort.subjects.tolist() == SUBJECTS[1:]
    assert excluded(cohort)["sub-0051"] == ("", "series file but not listed")


def test_participants_from_elsewhere_without_prefix_or_site(own, tmp_path, cohort):
    (own.folder / "participants.tsv").unlink()
    rows = [(str(row[0]).removeprefix("sub-"), row[3]) for row in miniature.PARTICIPANTS]
    miniature.write_rows(tmp_path / "people.csv", ("subject", "dx"), rows, ",")
    with pytest.raises(InputError, match=r"people\.csv has no column for the site"):
        read(own.folder, atlas=ATLAS, participants=tmp_path / "people.csv")
    other = read(own.folder, atlas=ATLAS, participants=tmp_path / "people.csv", site="Lund")
    assert other.subjects.tolist() == ["0051", "0052", "07", "8"]
    assert other.labels.tolist() == [1, 0, 0, -1]
    assert set(other.sites) == {"Lund"}
    np.testing.assert_array_equal(other.series[3], cohort.series[3])


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return miniature.nifti(tmp_path_factory.mktemp("nifti"))


@pytest.fixture(scope="module")
def cut(images):
    return read(images.folder, atlas_image=images.atlas, atlas_labels=images.labels)


def test_regions_of_a_run(images, cut):
    """Each column is the filtered mean of the voxels of its region, in the order of the label table."""
    from nilearn.signal import clean

    names = [f"region-{i}" for i in sorted((*miniature.REGIONS, miniature.LOST))]
    assert cut.rois == tuple(names)
    assert (cut.labels.tolist(), cut.tr.tolist()) == ([0, 1], [2.0, 2.5])  # from the sidecar, from the header
    for subject, series in zip(cut.subjects, cut.series, strict=True):
        band = {"low_pass": 0.1, "high_pass": 0.01, "t_r": images.trs[subject]}
        expected = clean(images.series[subject], detrend=True, standardize=None, **band)
        columns = [names.index(f"region-{i}") for i in miniature.REGIONS]
        np.testing.assert_allclose(series[:, columns], expected, rtol=0, atol=1e-3)
        assert series[:, columns].std(axis=0).min() > 0.01


def test_a_region_lost_in_resampling_stays_as_a_flat_column(cut):
    lost = cut.rois.index(f"region-{miniature.LOST}")
    assert all(not series[:, lost].any() for series in cut.series)
    assert 0 < lost < len(cut.rois) - 1


def test_regions_without_a_label_table_are_numbered(images, cut):
    numbered = read(images.folder, atlas_image=images.atlas)
    assert numbered.rois == tuple(str(i) for i in sorted((*miniature.REGIONS, miniature.LOST)))
    np.testing.assert_array_equal(numbered.series[1], cut.series[1])
    assert numbered.atlas == "atlas"


def test_confounds_beside_the_run_are_removed(tmp_path):
    images = miniature.nifti(tmp_path)
    names = [f"{kind}_{axis}" for kind in ("trans", "rot") for axis in "xyz"]
    names = [f"{name}{form}" for name in names for form in ("", "_derivative1", "_power2", "_derivative1_power2")]
    motion = np.random.default_rng(5).normal(size=(60, len(names) + 3))
    table = pd.DataFrame(motion, columns=[*names, "csf", "white_matter", "cosine00"])
    slow = np.sin(2 * np.pi * 0.04 * 2.0 * np.arange(60))
    table["trans_x"] = slow
    table.loc[0, table.columns.str.contains("derivative")] = np.nan  # fMRIPrep's first derivative is n/a
    place = images.folder / "sub-01" / "func"
    (run,) = place.glob("*.nii.gz")
    image = nibabel.load(run)
    moved = nibabel.Nifti1Image(image.get_fdata(dtype=np.float32) + 50 * slow.astype(np.float32), image.affine, image.header)
    nibabel.save(moved, run)
    before = read(images.folder, atlas_image=images.atlas).series[0]
    table.to_csv(place / "sub-01_task-rest_desc-confounds_timeseries.tsv", sep="\t", na_rep="n/a", index=False)
    (place / "sub-01_task-rest_desc-confounds_timeseries.json").write_text(json.dumps({}))
    after = read(images.folder, atlas_image=images.atlas).series[0]
    there = before.any(axis=0)
    assert (np.abs(slow @ before)[there] > 1000).all()
    assert (np.abs(slow @ after)[there] < 20).all()


def test_a_cut_download_of_a_run(tmp_path):
    images = miniature.nifti(tmp_path)
    (run,) = images.folder.glob("sub-02/func/*.nii.gz")
    run.write_bytes(run.read_bytes()[:2000])
    with pytest.raises(InputError, match=r"sub-02_.*_bold\.nii\.gz: the region signals cannot be extracted"):
        read(images.folder, atlas_image=images.atlas)
    cohort = read(images.folder, atlas_image=images.atlas, on_bad="exclude")
    assert cohort.subjects.tolist() == ["sub-01"]
    assert excluded(cohort)["sub-02"][1].startswith("sub-02_task-rest_space")


def numbers(rows=30, columns=6, seed=0):
    return np.random.default_rng(seed).normal(size=(rows, columns)).astype(np.float32)


def z(one):
    wide = np.asarray(one, dtype=np.float64)
    return (wide - wide.mean(axis=0)) / wide.std(axis=0)


@pytest.mark.parametrize(
    ("value", "units", "seconds"), [(2.5, "sec", 2.5), (2500, "msec", 2.5), (2.5e6, "usec", 2.5), (2.5, "unknown", 2.5)]
)
def test_tr_of_a_header_in_its_unit(tmp_path, value, units, seconds):
    assert repetition_time(nifti_with(tmp_path, value, units)) == pytest.approx(seconds)


def nifti_with(folder, value, units):
    image = nibabel.Nifti1Image(np.zeros((2, 2, 2, 3), np.float32), np.eye(4))
    image.header.set_zooms((1, 1, 1, value))
    image.header.set_xyzt_units("mm", units)
    nibabel.save(image, folder / "a.nii.gz")
    return folder / "a.nii.gz"


def test_a_sidecar_without_a_tr_does_not_hide_the_header(tmp_path):
    run = nifti_with(tmp_path, 2.5, "sec")
    (tmp_path / "a.json").write_text('{"TaskName": "rest"}')
    assert repetition_time(run) == 2.5
    (tmp_path / "a.json").write_text('{"RepetitionTime": 0.002}')
    with pytest.raises(InputError, match=r"a\.json, RepetitionTime: a TR of 0\.002 s is below"):
        repetition_time(run)
    (tmp_path / "a.json").unlink()
    with pytest.raises(InputError, match=r"a\.nii\.gz, header: a TR of 0\.002 s is below"):
        repetition_time(nifti_with(tmp_path, 2, "msec"))


def test_milliseconds_that_say_seconds(own, tmp_path):
    words = r"header: a TR of 2500 s is above 20 s and looks like milliseconds; .*2\.5"
    with pytest.raises(InputError, match=words):
        repetition_time(nifti_with(tmp_path, 2500, "unknown"))
    table_of(own, "sub-07").with_suffix(".json").write_text(json.dumps({"RepetitionTime": 2000}))
    with pytest.raises(InputError, match=r"sub-07.*\.json, RepetitionTime: a TR of 2000 s is above 20 s and looks like milli"):
        read(own.folder, atlas=ATLAS)


def test_one_subject_under_two_names(own):
    rows = [*miniature.PARTICIPANTS, ("0051", *miniature.PARTICIPANTS[0][1:])]
    miniature.write_rows(own.folder / "participants.tsv", miniature.PARTICIPANT_COLUMNS, rows)
    lines = {row[0]: line for line, row in enumerate(rows, start=2)}
    words = rf"lines {lines['sub-0051']} and {lines['0051']}, column participant_id: sub-0051 and 0051 are the same subject"
    with pytest.raises(InputError, match=words):
        read(own.folder, atlas=ATLAS)


def test_a_bids_table_without_a_site_names_the_option(own):
    columns = ["ward" if name == "site" else name for name in miniature.PARTICIPANT_COLUMNS]
    miniature.write_rows(own.folder / "participants.tsv", columns, miniature.PARTICIPANTS)
    with pytest.raises(
        InputError, match=r"its columns are participant_id, .*ward.*; rename the right one to site, or .*--site"
    ):
        read(own.folder, atlas=ATLAS)


def test_runs_of_a_bids_subject_can_be_joined(own):
    file = table_of(own, "sub-8")
    runs = [file.with_name(file.name.replace("task-rest", f"task-rest_run-{run}")) for run in (2, 10)]
    first = pd.read_csv(file, sep="\t")
    second = pd.DataFrame(numbers(14, len(miniature.PARCELS)) * 40 + 900, columns=miniature.PARCELS)
    sidecar = file.with_suffix(".json").read_bytes()
    file.unlink()
    first.to_csv(runs[0], sep="\t", index=False)
    second.iloc[:, ::-1].to_csv(runs[1], sep="\t", index=False)  # its columns are in another order
    for run in runs:
        run.with_suffix(".json").write_bytes(sidecar)
    with pytest.raises(InputError, match=r"sub-8 has a second run, .*select one with only, .*or join them with join_runs"):
        read(own.folder, atlas=ATLAS)
    np.testing.assert_array_equal(
        read(own.folder, atlas=ATLAS, only="run-10").series[0], second.iloc[:, ::-1].astype(np.float32)
    )
    cohort = read(own.folder, atlas=ATLAS, join_runs=True)
    expected = np.concatenate([z(first[list(miniature.PARCELS)]), z(second)])
    np.testing.assert_allclose(cohort.series[3], expected, atol=1e-5)
    single = np.array(own.series["sub-07"])
    np.testing.assert_allclose(cohort.series[2], z(single), atol=1e-4)  # a single run is z-scored too
    assert any(
        note.startswith("runs joined: each run of every subject was z-scored per ROI") for note in map(str, cohort.notes)
    )
    runs[1].with_suffix(".json").write_text(json.dumps({"RepetitionTime": 1.0}))
    with pytest.raises(InputError, match=r"run-10.*: a TR of 1 s, but .*run-2.* has 3 s, so the runs cannot be joined"):
        read(own.folder, atlas=ATLAS, join_runs=True)


def test_one_run_in_two_tasks_is_not_joined(own):
    file = table_of(own, "sub-8")
    other = file.with_name(file.name.replace("task-rest", "task-nback"))
    other.write_bytes(file.read_bytes())
    with pytest.raises(
        InputError, match=r"sub-8 has runs that differ in task .* select those to join with only, .*'task-nback'"
    ):
        read(own.folder, atlas=ATLAS, join_runs=True)
    assert read(own.folder, atlas=ATLAS, join_runs=True, only="task-rest").subjects.tolist()[3] == "sub-8"


def runs_and_their_concatenation(own, forms=("run-1", "run-2")):
    """Runs of sub-8 beside the file without run- that XCP-D makes of them."""
    file = table_of(own, "sub-8")
    parts = [
        pd.DataFrame(numbers(12 + i, len(miniature.PARCELS), seed=i), columns=miniature.PARCELS) for i in range(len(forms))
    ]
    for form, part in zip(forms, parts, strict=True):
        run = file.with_name(file.name.replace("task-rest", f"task-rest_{form}"))
        part.to_csv(run, sep="\t", index=False)
        run.with_suffix(".json").write_bytes(file.with_suffix(".json").read_bytes())
    pd.concat(parts).to_csv(file, sep="\t", index=False)
    return parts


@pytest.mark.parametrize(
    "forms", [("run-1", "run-2"), ("dir-AP_run-1", "dir-PA_run-1"), ("run-1",), ("run-1", "run-2", "run-3")]
)
def test_a_concatenation_beside_its_runs_is_not_joined_to_them(own, forms):
    parts = runs_and_their_concatenation(own, forms)
    cohort = read(own.folder, atlas=ATLAS, join_runs=True)
    np.testing.assert_allclose(cohort.series[3], np.concatenate([z(part) for part in parts]), atol=1e-5)
    assert any("left out beside these runs (1 subjects, such as sub-8)" in str(note) for note in cohort.notes)


def test_a_first_run_without_a_number_is_a_run(own):
    file = table_of(own, "sub-8")
    parts = runs_and_their_concatenation(own, ("run-2", "run-3"))
    first = numbers(11, len(miniature.PARCELS), seed=9)
    pd.DataFrame(first, columns=miniature.PARCELS).to_csv(file, sep="\t", index=False)
    assert len(read(own.folder, atlas=ATLAS, join_runs=True).series[3]) == 11 + sum(map(len, parts))


@pytest.mark.parametrize("join", [False, True])
@pytest.mark.parametrize("entity", ["space-MNI152NLin6Asym", "den-2", "res-2"])
def test_one_run_in_two_forms_gets_advice_that_works(own, join, entity):
    file = table_of(own, "sub-8")
    own_space = "_space-MNI152NLin2009cAsym"
    name = file.name.replace(own_space, "") if entity.startswith("space") else file.name
    other = file.with_name(name.replace("_atlas-", f"_{entity}_atlas-"))
    other.write_bytes(file.read_bytes())
    with pytest.raises(InputError, match=r"sub-8 has one run in two forms, .*--only [a-z]+-\w*\)") as error:
        read(own.folder, atlas=ATLAS, join_runs=join)
    assert "--join-runs" not in str(error.value)
    only = str(error.value).split("--only ")[1].rstrip(").")
    assert "sub-8" in read(own.folder, atlas=ATLAS, only=only).subjects.tolist()


def test_a_table_two_levels_below_is_found_and_an_absent_one_asked_for(own, cohort):
    (own.folder / "raw" / "tables").mkdir(parents=True)
    (own.folder / "participants.tsv").rename(own.folder / "raw" / "tables" / "participants.tsv")
    assert read(own.folder, atlas=ATLAS).hash == cohort.hash
    (own.folder / "raw" / "tables" / "participants.tsv").unlink()
    (own.folder / "raw" / "Composite_Phenotypic.csv").write_text("x")
    with pytest.raises(
        InputError, match=r"two levels below; name the table .*--participants \S*Composite_Phenotypic\.csv \(with "
    ):
        read(own.folder, atlas=ATLAS)
