"""A lab's own folder: every array format and every key of dataset.toml reads to what was written."""

from dataclasses import replace

import miniature
import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.io import savemat

from m2lgdg import InputError, check_cohort, read
from m2lgdg.data.atlases import regions
from m2lgdg.data.readers import tables

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


@pytest.mark.parametrize(
    ("suffix", "pattern"),
    [
        *((suffix, "{subject}") for suffix in (".npy", ".csv", ".tsv", ".mat", ".1D", ".txt")),
        *((".npy", f"{folder}/{{subject}}") for folder in ("series", "timeseries")),
    ],
)
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


def texts(cohort, level):
    return [finding.text for finding in check_cohort(cohort).findings if finding.severity == level]


def numbers(rows=30, columns=6, seed=0):
    return np.random.default_rng(seed).normal(size=(rows, columns)).astype(np.float32)


def lab(path, series, header=lambda subject: None, toml=None, people=None):
    """Subjects of two sites with a .csv each, whose columns are named by `header`."""
    path.mkdir(parents=True, exist_ok=True)
    columns = ("subject", "site", "label", "age", "tr")
    rows = [(name, "ab"[i % 2], i % 3 % 2, 20 + i, 2) for i, name in enumerate(series)] if people is None else people
    miniature.write_rows(path / "participants.tsv", columns, rows)
    for name, array in series.items():
        pd.DataFrame(array, columns=header(name)).to_csv(path / f"{name}.csv", index=False, header=header(name) is not None)
    if toml is not None:
        (path / "dataset.toml").write_text(toml)
    return path


def three(rows=30, columns=6):
    return {name: numbers(rows, columns, seed) for seed, name in enumerate(("p1", "p2", "p3"))}


ROIS = "name\nthalamus\ncaudate\ninsula\ncuneus\nputamen\nheschl\n"


def z(one):
    wide = np.asarray(one, dtype=np.float64)
    return (wide - wide.mean(axis=0)) / wide.std(axis=0)


def test_a_cohort_with_column_numbers_has_no_extra_volume(tmp_path):
    series = three()
    cohort = read(lab(tmp_path / "numbered", series, lambda name: range(6)))
    plain = read(lab(tmp_path / "plain", series))
    assert cohort.rois == plain.rois == ("1", "2", "3", "4", "5", "6")
    assert cohort.lengths.tolist() == [30, 30, 30]
    assert cohort.hash == plain.hash


@pytest.mark.parametrize("first", [0, 1])
def test_column_numbers_in_another_order_are_matched(tmp_path, first):
    series = three()
    path = lab(tmp_path / "lab", series, lambda name: range(first, first + 6))
    pd.DataFrame(series["p2"], columns=range(first, first + 6)).iloc[:, ::-1].to_csv(path / "p2.csv", index=False)
    np.testing.assert_array_equal(read(path).series[1], series["p2"])


def test_row_names_without_a_header_cell(tmp_path):
    """R's write.table gives the header one cell less than the rows."""
    path = lab(tmp_path / "lab", three())
    lines = ["a,b,c,d,e,f", *(f"{i + 1}," + ",".join(map(str, row)) for i, row in enumerate(numbers(8).tolist()))]
    (path / "p2.csv").write_text("\n".join(lines))
    with pytest.raises(InputError, match=r"p2\.csv: the header names 6 columns but the lines have 7; remove the first column"):
        read(path)


def test_columns_with_other_names_than_rois_are_put_into_order(tmp_path):
    series = three()
    usual = [f"V{i}" for i in range(6)]
    path = lab(tmp_path / "lab", series, lambda name: usual, 'rois = "rois.tsv"')
    (path / "rois.tsv").write_text(ROIS)
    pd.DataFrame(series["p2"], columns=usual).iloc[:, ::-1].to_csv(path / "p2.csv", index=False)
    cohort = read(path)
    assert cohort.rois == tuple(ROIS.split()[1:])
    for one, name in zip(cohort.series, series, strict=True):
        np.testing.assert_array_equal(one, series[name])
    assert "ROIs named by position: column V0 of the files is thalamus, column V5 is heschl" in map(str, cohort.notes)


def test_codes_of_the_atlas_are_matched_by_code(tmp_path):
    series = three(columns=116)
    codes = regions("aal")["code"].tolist()
    path = lab(tmp_path / "lab", series, lambda name: codes, 'atlas = "aal"')
    for name in ("p1", "p2"):  # most files, so that position would be wrong for all
        pd.DataFrame(series[name], columns=codes).iloc[:, ::-1].to_csv(path / f"{name}.csv", index=False)
    cohort = read(path)
    names = regions("aal")["name"].tolist()
    for one, array in zip(cohort.series, series.values(), strict=True):
        np.testing.assert_array_equal(one[:, [cohort.rois.index(name) for name in names]], array)


def test_columns_of_other_names_than_the_other_subjects(tmp_path):
    series = three()
    path = lab(tmp_path / "lab", series, lambda name: list("abcdef") if name != "p3" else list("uvwxyz"), 'rois = "rois.tsv"')
    (path / "rois.tsv").write_text(ROIS)
    with pytest.raises(InputError, match=r"p3\.csv: subject p3: no column for ROI thalamus, which the other subjects have"):
        read(path)
    pd.DataFrame(series["p3"]).to_csv(path / "p3.csv", index=False, header=False)  # unnamed: by position
    np.testing.assert_array_equal(read(path).series[2], series["p3"])


def test_two_orders_and_no_majority_are_refused(tmp_path):
    series = three()
    series.pop("p3")
    path = lab(tmp_path / "lab", series, lambda name: list("abcdef") if name == "p1" else list("fedcba"), 'rois = "rois.tsv"')
    (path / "rois.tsv").write_text(ROIS)
    with pytest.raises(InputError, match=r"dataset\.toml: the columns of the series files \(a \.\.\.\) are in several orders"):
        read(path)


def test_repeated_names_are_matched_by_position_in_one_order_only(tmp_path):
    series = three(columns=4)
    path = lab(tmp_path / "lab", series, lambda name: ["left", "right", "left", "right"])
    cohort = read(path)
    assert cohort.rois == ("1", "2", "3", "4")
    np.testing.assert_array_equal(cohort.series[2], series["p3"])
    pd.DataFrame(series["p3"], columns=["up", "right", "left", "right"]).to_csv(path / "p3.csv", index=False)
    with pytest.raises(InputError, match=r"p3\.csv: subject p3: no column for ROI 1"):
        read(path)


@pytest.mark.parametrize(("toml", "key"), [("tr = 2000", "tr"), ("tr = {a = 2000, b = 2}", "tr.a")])
def test_milliseconds_in_the_toml(tmp_path, toml, key):
    path = lab(tmp_path / "lab", three(), toml=toml)
    with pytest.raises(
        InputError, match=rf"dataset\.toml, key {key}: a TR of 2000 s is above 20 s and looks like milliseconds"
    ):
        read(path)


def test_milliseconds_in_the_table_and_as_an_option(tmp_path):
    rows = [("p1", "a", 0, 20, 2), ("p2", "b", 1, 21, 2000), ("p3", "a", 1, 22, 2)]
    with pytest.raises(InputError, match=r"participants\.tsv: subject p2, column tr: a TR of 2000 s is above 20 s"):
        read(lab(tmp_path / "lab", three(), people=rows))
    release = miniature.rest_meta_mdd(tmp_path / "mdd")
    with pytest.raises(InputError, match=r"option tr: a TR of 2000 s is above 20 s"):
        read(release.folder, tr=2000.0)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(-1, 1), st.sampled_from([0, 0, 0, 9, np.nan])), max_size=40))
def test_years_of_education_that_were_not_recorded(people):
    """A site keeps its years unless five or more of its patients, controls or unlabelled subjects have 0 and none has more."""
    sites, labels, years = (np.array(column) for column in (zip(*people, strict=True) if people else ([], [], [])))
    result, notes = tables.recorded_education(years.astype(float), sites, labels)
    told = [one.site for one in notes]
    for site in "ab":
        groups = [[y for s, one, y in people if (s, one) == (site, label) and y == y] for label in (-1, 0, 1)]
        unknown = any(len(some) >= 5 and set(some) == {0} for some in groups)
        expected = [np.nan if unknown else y for s, _, y in people if s == site]
        np.testing.assert_array_equal(result[sites == site], expected)
        assert told.count(site) == unknown


def test_zero_years_of_education_in_a_table(tmp_path):
    path = lab(tmp_path / "lab", {f"p{i}": numbers(seed=i) for i in range(12)})
    rows = [(f"p{i}", "ab"[i % 2], i % 4 // 2, 0 if i % 2 else i) for i in range(12)]
    miniature.write_rows(path / "participants.tsv", ("subject", "site", "label", "education"), rows)
    years = read(path).phenotypes["education"]  # three patients and three controls of site b have 0 years: too few to judge
    assert years.tolist() == [rows[int(one[1:])][3] for one in read(path).subjects]
    rows = [(one, site, int(site == "a"), years) for one, site, _, years in rows]
    miniature.write_rows(path / "participants.tsv", ("subject", "site", "label", "education"), rows)
    cohort = read(path)
    assert cohort.phenotypes["education"].isna().tolist() == (cohort.sites == "b").tolist()
    assert "b: all 6 controls have 0 years of education." in "\n".join(map(str, cohort.notes))


def test_ages_that_nobody_has_are_missing_and_findings(tmp_path):
    rows = [("p1", "a", 0, "1e300", 2), ("p2", "b", 1, -5, 2), ("p3", "a", 1, 0, 2), ("p4", "b", 0, 120, 2)]
    series = three() | {"p4": numbers(seed=9)}
    cohort = read(lab(tmp_path / "lab", series, people=rows))
    np.testing.assert_array_equal(cohort.phenotypes["age"], [np.nan, np.nan, np.nan, 120])
    findings = {finding.text: finding.subjects for finding in check_cohort(cohort).findings if finding.severity == "finding"}
    expected = "Subject {}, column age: age {} is not between 0 and 120 years; it was set to missing."
    assert findings[expected.format("p1", "1e+300")] == ("p1",)
    assert findings[expected.format("p2", "-5")] == ("p2",)
    assert not any("p3, column age" in text for text in findings)  # age 0 is a code for unknown


def test_numbered_rois_are_a_note(tmp_path, tiny):
    (note,) = [text for text in texts(read(lab(tmp_path / "lab", three())), "note") if "only numbers" in text]
    assert note.startswith("The 6 ROIs have only numbers (1 to 6)") and "dataset.toml by rois or atlas" in note
    assert not any("only numbers" in text for text in texts(tiny, "note"))


@pytest.mark.parametrize(
    ("role", "renamed", "words"),
    [
        (
            "subject",
            "who",
            r"the subject \(.*\); its columns are who, site, label, age, tr; name the right one in dataset\.toml: ",
        ),
        (
            "site",
            "ward",
            r"the site \(.*\); its columns are subject, ward, label, age, tr; name the right one in dataset\.toml: ",
        ),
    ],
)
def test_a_column_that_is_not_found(tmp_path, role, renamed, words):
    path = lab(tmp_path / "lab", three())
    table = path / "participants.tsv"
    table.write_text(table.read_text().replace(role, renamed, 1))
    with pytest.raises(InputError, match=rf"participants\.tsv has no column for {words}\[columns\] {role} = "):
        read(path)


def test_at_most_twelve_columns_are_listed(tmp_path):
    path = lab(tmp_path / "lab", three())
    (path / "participants.tsv").write_text("\t".join(["subject", *(f"c{i}" for i in range(20))]) + "\np1" + "\t1" * 20 + "\n")
    with pytest.raises(InputError, match=r"its columns are subject, c0, .*, c10 and 9 more; name the right one"):
        read(path)
    (path / "dataset.toml").write_text('[columns]\nsite = "ward"')
    with pytest.raises(InputError, match=r"participants\.tsv has no column ward; its columns are subject, c0"):
        read(path)


def test_no_label_column_lists_those_that_are_there(tmp_path):
    path = lab(tmp_path / "lab", three())
    table = path / "participants.tsv"
    table.write_text(table.read_text().replace("label", "state", 1))
    assert (
        'its columns are subject, site, state, age, tr; name the right one in dataset.toml: [columns] label = "..."'
        in texts(read(path), "note")
    )


def test_transposed_series_of_several_lengths(tmp_path):
    series = {name: numbers(rows, 12, rows).T for name, rows in (("p1", 40), ("p2", 40), ("p3", 55))}
    path = lab(tmp_path / "lab", series)
    words = r"p3\.csv: subject p3: 55 ROI columns, .* have 40; all files have 12 rows and the columns differ, .*swapped.*roi,t"
    with pytest.raises(InputError, match=words):
        read(path)
    assert any("swapped" in text for text in texts(read(path, on_bad="exclude"), "finding"))
    (path / "dataset.toml").write_text('orientation = "roi,time"')
    assert read(path).lengths.tolist() == [40, 40, 55]


def test_one_transposed_subject(tmp_path):
    series = three()
    series["p2"] = series["p2"].T
    with pytest.raises(InputError, match=r"p2\.csv: subject p2: 30 ROI columns, .* have 6; its rows are as many as these"):
        read(lab(tmp_path / "lab", series))


def test_transposed_series_of_one_length_are_a_finding(tmp_path):
    series = {name: one.T for name, one in three(200, 116).items()}
    cohort = read(lab(tmp_path / "lab", series))
    start = "Every scan has fewer volumes (116) than ROIs (200), the same number in all, and no ROI has a name."
    assert any(text.startswith(start) and "roi,time" in text for text in texts(cohort, "finding"))
    for other in (replace(cohort, atlas="craddock200"), replace(cohort, rois=tuple(f"roi-{i}" for i in range(200)))):
        assert not any("fewer volumes (116) than" in text for text in texts(other, "finding"))
        assert any("fewer volumes (116) than" in text for text in texts(other, "note"))


@pytest.mark.parametrize("toml", [None, 'pattern = "{subject}_run-{run}.csv"\njoin_runs = true'])
def test_runs_of_a_folder_can_be_joined(tmp_path, toml):
    path = lab(tmp_path / "lab", three(), toml=toml)
    runs = {}
    for name in ("p1", "p2", "p3"):
        (path / f"{name}.csv").unlink()
        runs[name] = [numbers(20 + i, seed=50 + i) * 10**i for i in range(1 if name == "p3" else 3)]
        for i, run in enumerate(runs[name]):
            np.savetxt(path / f"{name}_run-{8 + i}.csv", run, delimiter=",")  # 8, 9, 10
    cohort = read(path) if toml else read(path, join_runs=True)
    assert cohort.excluded == ()
    for one, parts in zip(cohort.series, runs.values(), strict=True):
        np.testing.assert_allclose(one, np.concatenate([z(part) for part in parts]), atol=1e-5)
    np.savetxt(path / "p9_run-1.csv", numbers(), delimiter=",")
    with pytest.raises(InputError, match=r"p9_run-1\.csv: subject p9 is not in"):
        read(path, join_runs=True)
    if toml:
        (path / "dataset.toml").write_text('pattern = "{subject}_run-{run}.csv"')
        with pytest.raises(InputError, match=r"key pattern: \{run\} needs join_runs = true"):
            read(path)


def test_a_bad_run_is_named(tmp_path):
    path = lab(tmp_path / "lab", three())
    array = numbers()
    array[3, 2] = np.nan
    np.savetxt(path / "p2_run-2.csv", array, delimiter=",")
    with pytest.raises(InputError, match=r"p2_run-2\.csv: NaN at volume 4 of ROI 3 \(1 such value\)\."):
        read(path, join_runs=True)


def named(widths=None, header=True):
    """Three subjects with six ROIs each; `widths` has the number of columns of some of them."""
    series = {name: numbers(40, (widths or {}).get(name, 6), seed) for seed, name in enumerate(("p1", "p2", "p3"))}
    return series, (lambda name: [f"roi{i}" for i in range(series[name].shape[1])]) if header else (lambda name: None)


@pytest.mark.parametrize(("width", "words"), [(5, "it has no column roi5"), (7, "only this one has roi6")])
def test_a_column_of_one_subject_is_named(tmp_path, width, words):
    with pytest.raises(InputError, match=rf"p3\.csv: subject p3: {width} ROI columns, but .* have 6; {words}\.$"):
        read(lab(tmp_path / "lab", *named({"p3": width})))


def test_without_names_both_reasons_are_given(tmp_path):
    with pytest.raises(InputError, match=r"all files have 40 rows .* either this file has other ROIs, or .* axes are swapped"):
        read(lab(tmp_path / "lab", *named({"p3": 5}, header=False)))


def test_a_table_and_series_with_names_of_their_own(tmp_path):
    path = tmp_path / "lab"
    (path / "ts").mkdir(parents=True)
    for i in range(3):
        pd.DataFrame(numbers(40, 6, i)).to_csv(path / "ts" / f"P{i}_aal.csv", index=False, header=[f"roi{n}" for n in range(6)])
    rows = [(f"P{i}", "ab"[i % 2], "ASD" if i % 2 else "TD", 20 + i, 0.1 * i) for i in range(3)]
    pd.DataFrame(rows, columns=["Patient ID", "Hospital", "Group", "Age (years)", "Mean FD"]).to_csv(
        path / "our.csv", index=False
    )
    cohort = read(path, max_motion=0.15)
    assert cohort.subjects.tolist() == ["P0", "P1"]
    assert cohort.sites.tolist() == ["a", "b"] and cohort.labels.tolist() == [0, 1]
    assert cohort.phenotypes["age"].tolist() == [20, 21]
    (path / "ts" / "P1_ho.csv").write_bytes(b"a,b")  # another atlas, so that the pattern is not certain
    with pytest.raises(InputError, match=r"no listed subject has a series file; the first is P0.*pattern = "):
        read(path)
    (path / "more.csv").write_bytes((path / "our.csv").read_bytes())
    with pytest.raises(InputError, match="is not of a supported kind"):
        read(path)


@pytest.mark.parametrize("on_bad", ["stop", "exclude"])
def test_ids_that_are_written_in_another_way(tmp_path, on_bad):
    path = lab(tmp_path / "lab", *named(), people=[(i + 1, "ab"[i % 2], i % 2, 20, 2) for i in range(3)])
    with pytest.raises(InputError, match=r"no listed subject .*; the first is 1, and a file is called p1\.csv; .*pattern = "):
        read(path, on_bad=on_bad)
    (path / "dataset.toml").write_text('pattern = "p{subject}.csv"')
    assert read(path).subjects.tolist() == ["1", "2", "3"]
    (path / "dataset.toml").write_text('pattern = "q{subject}.csv"')
    with pytest.raises(InputError, match=r"the first is 1, whose file would be .*q1\.csv\.$"):
        read(path, on_bad=on_bad)


def test_what_the_first_row_and_a_counting_column_are_can_be_said(tmp_path, typed, monkeypatch):
    """On the command line, as an option of `read`, and in dataset.toml; without a word they are refused."""
    series = {name: 900 + one for name, one in three(40).items()}
    path = lab(tmp_path / "lab", {name: np.insert(one, 6, np.arange(4, 44), axis=1) for name, one in series.items()})
    with pytest.raises(InputError, match=r"p1\.csv, column 7 is a row index, .*--index-column drop or keep"):
        read(path)
    assert read(path, index_column="keep").series[0].shape == (40, 7)
    (path / "dataset.toml").write_text('index_column = "drop"')
    np.testing.assert_allclose(read(path).series[1], series["p2"], rtol=1e-5)
    (path / "dataset.toml").write_text('index_column = "drop"\norientation = "roi,time"')  # here rows are ROIs
    assert read(path, on_bad="exclude").series[0].shape == (7, 40)
    (path / "dataset.toml").unlink()
    monkeypatch.chdir(tmp_path)
    assert typed("convert", path, "own.cohort", "--index-column", "drop")[0] == 0
    code, _, error = typed("convert", path, "other.cohort", "--index-column", "first")
    assert code == 2 and "option index_column: 'first' is not one of drop, keep." in error
    codes = lab(tmp_path / "codes", {name: np.vstack([np.arange(6) + 2001, one]) for name, one in series.items()})
    with pytest.raises(InputError, match=r"p1\.csv, row 1 \(2001, 2002, 2003 \.\.\.\) looks like .*--header yes or no"):
        read(codes)
    assert read(codes, header="yes").rois == tuple(str(2001 + i) for i in range(6))
    assert read(codes, header="no").lengths.tolist() == [41] * 3
    (codes / "dataset.toml").write_text("header = true")
    assert read(codes).lengths.tolist() == [40] * 3


def test_connectomes_for_series_are_refused_with_the_command_that_reads_them(tmp_path, typed):
    series = {name: np.corrcoef(one.T) for name, one in three().items()}
    path = lab(tmp_path / "lab", series)
    with pytest.raises(InputError, match=r"p1\.csv: subject p1: a symmetric or triangular matrix") as error:
        read(path, "folder")
    command = str(error.value).split("read them with: m2lgdg ")[1].split()
    assert typed(*command, "--out", tmp_path / "out")[0] in (0, 1)
    assert read(path).values == "correlation"  # guessed
    series["p1"] = three()["p1"]
    mixed = read(lab(tmp_path / "mixed", series), "folder", on_bad="exclude")
    assert mixed.subjects.tolist() == ["p1"] and len(mixed.excluded) == 2


@pytest.mark.parametrize("place", ["column", "toml", "site"])
def test_a_tr_of_two_thousandths_is_milliseconds(tmp_path, place):
    rows = [(name, "ab"[i % 2], i % 2, 20 + i, 0.002 if place == "column" else "n/a") for i, name in enumerate(three())]
    path = lab(tmp_path / "lab", three(), people=rows, toml={"toml": "tr = 0.002", "site": "tr = {a = 0.002}"}.get(place))
    with pytest.raises(InputError, match=r"a TR of 0\.002 s is below 0\.05 s, .*give it in seconds \(2\)"):
        read(path)


@pytest.mark.parametrize("toml", [None, 'pattern = "{subject}.csv"', 'pattern = "{site}/{subject}.csv"'])
def test_an_id_is_no_way_out_of_the_folder(tmp_path, toml):
    series = three()
    path = lab(tmp_path / "a" / "lab", series, toml=toml, people=[("../../secret", "a", 0, 20, 2), ("p2", "..", 1, 20, 2)])
    np.savetxt(tmp_path / "secret.csv", numbers(), delimiter=",")
    with pytest.raises(InputError, match=r"subject \.\./\.\./secret of site a is no name of a file in this folder"):
        read(path, on_bad="exclude")
    (path / "dataset.toml").write_text('pattern = "../../{subject}.csv"')
    with pytest.raises(InputError, match=r"key pattern: .* leads out of "):
        read(path)


@pytest.mark.parametrize("how", ["link", "toml"])
def test_no_text_of_a_table_elsewhere_is_shown(tmp_path, how):
    path = lab(tmp_path / "lab", three())
    (tmp_path / "secret.tsv").write_text("hunter2\tx\n1\t2\n")
    (path / "participants.tsv").unlink()
    if how == "link":
        (path / "participants.tsv").symlink_to(tmp_path / "secret.tsv")
    else:
        (path / "dataset.toml").write_text('participants = "../secret.tsv"')
    with pytest.raises(InputError, match=r"no column for the subject .*it has 2 columns \(not shown") as error:
        read(path)
    assert "hunter2" not in str(error.value)
