"""A lab's own folder: every array format and every key of dataset.toml reads to what was written."""

import miniature
import numpy as np
import pytest
from scipy.io import savemat

from m2lgdg import InputError, read
from m2lgdg.data.atlases import regions

SUBJECTS = ["0007", "0010", "013", "12"]  # sorted as text; the zeros are part of the name
WITH_HEADER = (".csv", ".tsv")


def excluded(cohort):
    return {each.subject: (each.site, each.reason) for each in cohort.excluded}


def assert_series(cohort, release):
    for subject, series in zip(cohort.subjects, cohort.series, strict=True):
        np.testing.assert_array_equal(series, release.series[subject].astype(np.float32))


def people_with(**columns):
    """The usual people with some columns of their own."""
    names = (*miniature.OWN_COLUMNS[:3], *columns)
    return names, [(*row[:3], *values) for row, *values in zip(miniature.OWN_PEOPLE, *columns.values(), strict=True)]


@pytest.mark.parametrize("suffix", [".npy", ".csv", ".tsv", ".mat", ".1D", ".txt"])
@pytest.mark.parametrize("pattern", ["{subject}", "series/{subject}", "timeseries/{subject}"])
def test_every_format_in_every_usual_place(tmp_path, suffix, pattern):
    release = miniature.own_folder(tmp_path / "lab", suffix, pattern=pattern)
    cohort = read(release.folder)
    assert cohort.subjects.tolist() == SUBJECTS
    assert_series(cohort, release)
    assert cohort.rois == (miniature.OWN_ROIS if suffix in WITH_HEADER else ("1", "2", "3", "4"))
    assert cohort.name == "lab"
    assert cohort.excluded == ()


def test_participants(tmp_path):
    cohort = read(miniature.own_folder(tmp_path / "lab").folder)
    nan = np.nan
    assert cohort.sites.tolist() == ["Aarhus", "Aarhus", "Bergen", "Bergen"]
    assert cohort.labels.tolist() == [1, 0, 1, 0]
    assert cohort.inputs == ("sex", "age", "education")
    np.testing.assert_array_equal(cohort.phenotypes["sex"], [1, 2, 2, 1])
    np.testing.assert_array_equal(cohort.phenotypes["age"], [31.5, nan, nan, 27])
    np.testing.assert_array_equal(cohort.phenotypes["education"], [12, nan, 16, 0])
    np.testing.assert_array_equal(cohort.phenotypes["motion"], [0.11, 0.2, 0.31, nan])
    assert cohort.phenotypes["scanner"].tolist() == ["Prisma", "", "Skyra", "Skyra"]
    assert np.isnan(cohort.tr).all()


def test_names_transpose_atlas_and_tr_from_the_toml(tmp_path):
    dataset = """
        name = "ours"
        pattern = "{site}/{subject}_ts.npy"
        orientation = "roi,time"
        atlas = "aal"
        tr = {Aarhus = 2.2, Bergen = 1.5}
    """
    release = miniature.own_folder(tmp_path / "lab", "_ts.npy", pattern="{site}/{subject}", dataset=dataset)
    rng = np.random.default_rng(1)
    for subject, site in zip(SUBJECTS, ("Aarhus", "Aarhus", "Bergen", "Bergen"), strict=True):
        release.series[subject] = miniature.signals(rng, 7, 116)
        np.save(release.folder / site / f"{subject}_ts.npy", release.series[subject].T)
    cohort = read(release.folder)
    assert_series(cohort, release)
    assert cohort.rois == tuple(regions("aal")["name"])
    assert (cohort.name, cohort.atlas) == ("ours", "aal")
    assert cohort.tr.tolist() == [2.2, 2.2, 1.5, 1.5]


def test_one_tr_for_all_yields_to_the_table(tmp_path):
    columns, people = people_with(tr=["n/a", 0.8, "n/a", 3])
    release = miniature.own_folder(tmp_path / "lab", columns=columns, people=people, dataset="tr = 2.0")
    assert read(release.folder).tr.tolist() == [2.0, 0.8, 3.0, 2.0]


def test_variable_of_a_mat_file(tmp_path):
    release = miniature.own_folder(tmp_path / "lab", ".mat", dataset="variable = 'bold'")
    for subject, series in release.series.items():
        savemat(release.folder / f"{subject}.mat", {"ts": np.zeros((2, 4)), "bold": series})
    assert_series(read(release.folder), release)
    (release.folder / "dataset.toml").unlink()
    with pytest.raises(InputError, match=r"0007\.mat has 2 variables \(ts, bold\); name one in dataset\.toml"):
        read(release.folder)


def test_roi_names_from_a_table(tmp_path):
    release = miniature.own_folder(tmp_path / "lab", ".csv", dataset="rois = 'rois.csv'")
    miniature.write_rows(release.folder / "rois.csv", ("name", "side"), [("d", "L"), ("c", "R"), ("b", "L"), ("a", "R")], ",")
    assert read(release.folder).rois == ("d", "c", "b", "a")


def test_columns_follow_the_names_of_each_file(tmp_path):
    release = miniature.own_folder(tmp_path / "lab", ".csv")
    swapped = [2, 0, 3, 1]
    names = [miniature.OWN_ROIS[i] for i in swapped]
    miniature.write_array(release.folder / "013.csv", release.series["013"][:, swapped], names)
    cohort = read(release.folder)
    assert cohort.rois == miniature.OWN_ROIS
    assert_series(cohort, release)


def test_label_words_missing_codes_and_columns_from_the_toml(tmp_path):
    """A code of the user's is missing everywhere, also as 999.0; but where it is a label's word, it is that label."""
    columns = ("who", "place", "dx_group", "scan_age", "age", "gender_code", "years")
    people = [
        ("a1", "X", 2, "31.0", "old", 1, "999.0"),
        ("a2", "X", 1, "999.0", "young", 999, 0),
        ("a3", "Y", 999, "40.0", "old", 2, 7),
        ("a4", "Y", 1, "28.5", "young", 9, 8),
    ]
    dataset = """
        missing = [999, "9", 1]
        inputs = ["age", "years"]
        [columns]
        subject = "who"
        site = "place"
        label = "dx_group"
        age = "scan_age"
        sex = "gender_code"
        [labels]
        patient = [2]
        control = [1]
    """
    cohort = read(miniature.own_folder(tmp_path / "lab", people=people, columns=columns, dataset=dataset).folder)
    nan = np.nan
    assert cohort.labels.tolist() == [1, 0, -1, 0]
    np.testing.assert_array_equal(cohort.phenotypes["sex"], [1, nan, 2, nan])
    np.testing.assert_array_equal(cohort.phenotypes["age"], [31, nan, 40, 28.5])  # not the column that is called age
    np.testing.assert_array_equal(cohort.phenotypes["years"], [nan, 0, 7, 8])
    assert cohort.inputs == ("age", "years")
    assert "label from column dx_group: 2 = patient, 1 = control" in map(str, cohort.notes)


def test_a_label_that_is_not_known_names_the_toml(tmp_path):
    people = [(*row[:2], word) for row, word in zip(miniature.OWN_PEOPLE, ("1", "1", "0", "0"), strict=True)]
    how = {"people": people, "columns": miniature.OWN_COLUMNS[:3]}
    assert read(miniature.own_folder(tmp_path / "usual", **how).folder).labels.tolist() == [1, 1, 0, 0]
    # Here 1 is the control, so it is no patient; who 0 is remains to be said.
    release = miniature.own_folder(tmp_path / "other", dataset="[labels]\ncontrol = [1]", **how)
    words = r"column diagnosis: label '0' is not known; give the words of each class in dataset\.toml"
    with pytest.raises(InputError, match=words):
        read(release.folder)
    (release.folder / "dataset.toml").write_text("[labels]\ncontrol = [1]\npatient = [0]")
    assert read(release.folder).labels.tolist() == [0, 0, 1, 1]


def test_one_site_for_all_keeps_its_whole_name(tmp_path):
    people = [(row[0], row[2]) for row in miniature.OWN_PEOPLE]
    release = miniature.own_folder(tmp_path / "lab", people=people, columns=("id", "group"), dataset="site = 'Trondheim'")
    assert set(read(release.folder).sites.tolist()) == {"Trondheim"}


def test_no_label_column_means_unlabelled(tmp_path):
    people = [row[:2] for row in miniature.OWN_PEOPLE]
    cohort = read(miniature.own_folder(tmp_path / "lab", people=people, columns=("id", "site")).folder)
    assert cohort.labels.tolist() == [-1, -1, -1, -1]
    assert "no label column: all subjects are unlabelled" in map(str, cohort.notes)


def test_proxies_only_where_the_user_insists(tmp_path):
    columns, people = people_with(HAMD=[20, 3, 1, 25])
    kind = {"columns": columns, "people": people}
    with pytest.raises(InputError, match="HAMD reveals the diagnosis"):
        read(miniature.own_folder(tmp_path / "no", dataset="inputs = ['HAMD']", **kind).folder)
    cohort = read(miniature.own_folder(tmp_path / "yes", dataset="inputs = ['HAMD']\nallow_proxies = true", **kind).folder)
    np.testing.assert_array_equal(cohort.phenotypes["HAMD"], [20, 3, 25, 1])


def test_ids_with_underscores_stay_text(tmp_path):
    columns, people = people_with(family=["17_1", "17_2", "18_1", "18_2"])
    cohort = read(miniature.own_folder(tmp_path / "lab", columns=columns, people=people).folder)
    assert cohort.phenotypes["family"].tolist() == ["17_1", "17_2", "18_2", "18_1"]


@pytest.mark.parametrize("dataset", [None, "pattern = '{subject}.npy'"])
def test_one_without_the_other(tmp_path, dataset):
    release = miniature.own_folder(tmp_path / "lab", dataset=dataset)
    (release.folder / "0010.npy").rename(release.folder / "0011.npy")
    with pytest.raises(InputError, match=r"participants\.tsv: subject 0010 has no series file"):
        read(release.folder)
    cohort = read(release.folder, on_bad="exclude")
    assert cohort.subjects.tolist() == ["0007", "013", "12"]
    assert excluded(cohort) == {
        "0010": ("Aarhus", "listed but no series file"),
        "0011": ("", "series file but not listed"),
    }
    (release.folder / "0007.npy").rename(release.folder / "0010.npy")
    (release.folder / "0011.npy").rename(release.folder / "0007.npy")
    np.save(release.folder / "99.npy", release.series["0007"])
    with pytest.raises(InputError, match=r"99\.npy: subject 99 is not in .*participants\.tsv"):
        read(release.folder)


def test_a_pattern_passes_over_other_files(tmp_path):
    """Two atlases side by side: the pattern says which one is meant, and names the subject of a file that nobody lists."""
    release = miniature.own_folder(tmp_path / "lab", "_aal.csv", dataset="pattern = '{subject}_aal.csv'")
    for subject in SUBJECTS:
        miniature.write_array(release.folder / f"{subject}_cc200.csv", np.eye(4))
    cohort = read(release.folder)
    assert_series(cohort, release)
    assert cohort.excluded == ()
    miniature.write_array(release.folder / "stray_aal.csv", np.eye(4))
    assert excluded(read(release.folder, on_bad="exclude")) == {"stray": ("", "series file but not listed")}


def test_a_bad_series_is_excluded_by_name(tmp_path):
    release = miniature.own_folder(tmp_path / "lab")
    np.save(release.folder / "12.npy", np.full((5, 4), np.inf))
    with pytest.raises(InputError, match=r"12\.npy: subject 12: infinite value at volume 1 of ROI 1 \(20 such values\)"):
        read(release.folder)
    assert excluded(read(release.folder, on_bad="exclude"))["12"] == (
        "Bergen",
        "12.npy: subject 12: infinite value at volume 1 of ROI 1 (20 such values).",
    )
