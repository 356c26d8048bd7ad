"""Series and tables that used to be read wrongly without a word: each is read rightly now, or refused in one sentence."""

import json
from dataclasses import replace

import miniature
import nibabel
import numpy as np
import pandas as pd
import pytest
from scipy.io import savemat

from m2lgdg import InputError, check_cohort, make_cohort, read
from m2lgdg.data.atlases import regions
from m2lgdg.data.check import empty_scans
from m2lgdg.data.duplicates import find_duplicates
from m2lgdg.data.readers.arrays import load_array, read_table

ATLAS = "4S156Parcels"


def texts(cohort, level):
    return [finding.text for finding in check_cohort(cohort).findings if finding.severity == level]


def numbers(rows=30, columns=6, seed=0):
    return np.random.default_rng(seed).normal(size=(rows, columns)).astype(np.float32)


def folder(path, series, header=lambda subject: None, toml=None, people=None):
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


@pytest.mark.parametrize("columns", [2, 6, 116])
@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".txt"])
def test_column_numbers_are_a_header(tmp_path, columns, first, suffix):
    array = numbers(columns=columns)
    separator = {".csv": ",", ".tsv": "\t", ".txt": " "}[suffix]
    frame = pd.DataFrame(array, columns=range(first, first + columns))
    frame.to_csv(tmp_path / f"a{suffix}", index=False, sep=separator)
    names, table = read_table(tmp_path / f"a{suffix}")
    assert names is None  # numbers in order name nothing
    np.testing.assert_array_equal(table, array)


def test_column_numbers_over_whole_numbers(tmp_path):
    array = np.random.default_rng(0).integers(500, 900, size=(30, 20))
    pd.DataFrame(array).to_csv(tmp_path / "a.csv", index=False)
    assert read_table(tmp_path / "a.csv")[1].shape == (30, 20)
    few = np.array([[1, 2, 3], [2, 4, 9], [3, 1, 1]])  # a small table of whole numbers has no header
    np.savetxt(tmp_path / "few.csv", few, fmt="%d", delimiter=",")
    np.testing.assert_array_equal(read_table(tmp_path / "few.csv")[1], few)


def test_codes_of_an_atlas_are_a_header(tmp_path):
    array = numbers(columns=12)
    codes = [2001 + 7 * i for i in range(12)]
    pd.DataFrame(array, columns=codes).to_csv(tmp_path / "a.csv", index=False)
    names, table = read_table(tmp_path / "a.csv")
    assert names == [str(code) for code in codes]
    np.testing.assert_array_equal(table, array)


def test_a_cohort_with_column_numbers_has_no_extra_volume(tmp_path):
    series = three()
    cohort = read(folder(tmp_path / "numbered", series, lambda name: range(6)))
    plain = read(folder(tmp_path / "plain", series))
    assert cohort.rois == plain.rois == ("1", "2", "3", "4", "5", "6")
    assert cohort.lengths.tolist() == [30, 30, 30]
    assert cohort.hash == plain.hash


@pytest.mark.parametrize("first", [0, 1])
def test_column_numbers_in_another_order_are_matched(tmp_path, first):
    series = three()
    path = folder(tmp_path / "lab", series, lambda name: range(first, first + 6))
    pd.DataFrame(series["p2"], columns=range(first, first + 6)).iloc[:, ::-1].to_csv(path / "p2.csv", index=False)
    np.testing.assert_array_equal(read(path).series[1], series["p2"])


@pytest.mark.parametrize("start", [0, 1])
@pytest.mark.parametrize("title", ["Unnamed: 0", "index", "time", "x"])
def test_a_row_index_is_refused(tmp_path, start, title):
    frame = pd.DataFrame(numbers(), columns=list("abcdef"))
    frame.insert(0, title, np.arange(start, start + 30))
    frame.to_csv(tmp_path / "a.csv", index=False)
    with pytest.raises(InputError, match=rf"a\.csv, column 1 \({title}\) is a row index, not an ROI; remove it .*index=False"):
        read_table(tmp_path / "a.csv")


def test_a_row_index_without_a_header(tmp_path):
    array = np.hstack([np.arange(30)[:, None], numbers()])
    np.savetxt(tmp_path / "a.txt", array)
    np.save(tmp_path / "a.npy", array)
    savemat(tmp_path / "a.mat", {"ts": array})
    with pytest.raises(InputError, match=r"a\.txt, column 1 is a row index"):
        read_table(tmp_path / "a.txt")
    for suffix in (".npy", ".mat"):
        with pytest.raises(InputError, match=rf"a\{suffix}, column 1 is a row index"):
            load_array(tmp_path / f"a{suffix}")
    pd.DataFrame(numbers()).to_csv(tmp_path / "both.csv")  # numbers over the columns and before the rows
    with pytest.raises(InputError, match=r"both\.csv, column 1 has no name in the header; remove it if it is a row index"):
        read_table(tmp_path / "both.csv")


def test_row_names_without_a_header_cell(tmp_path):
    """R's write.table gives the header one cell less than the rows."""
    path = folder(tmp_path / "lab", three())
    lines = ["a,b,c,d,e,f", *(f"{i + 1}," + ",".join(map(str, row)) for i, row in enumerate(numbers(8).tolist()))]
    (path / "p2.csv").write_text("\n".join(lines))
    with pytest.raises(InputError, match=r"p2\.csv: the header names 6 columns but the lines have 7; remove the first column"):
        read(path)


ROIS = "name\nthalamus\ncaudate\ninsula\ncuneus\nputamen\nheschl\n"


def test_columns_with_other_names_than_rois_are_put_into_order(tmp_path):
    series = three()
    usual = [f"V{i}" for i in range(6)]
    path = folder(tmp_path / "lab", series, lambda name: usual, 'rois = "rois.tsv"')
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
    path = folder(tmp_path / "lab", series, lambda name: codes, 'atlas = "aal"')
    for name in ("p1", "p2"):  # most files, so that position would be wrong for all
        pd.DataFrame(series[name], columns=codes).iloc[:, ::-1].to_csv(path / f"{name}.csv", index=False)
    cohort = read(path)
    names = regions("aal")["name"].tolist()
    for one, array in zip(cohort.series, series.values(), strict=True):
        np.testing.assert_array_equal(one[:, [cohort.rois.index(name) for name in names]], array)


def test_columns_of_other_names_than_the_other_subjects(tmp_path):
    series = three()
    path = folder(
        tmp_path / "lab", series, lambda name: list("abcdef") if name != "p3" else list("uvwxyz"), 'rois = "rois.tsv"'
    )
    (path / "rois.tsv").write_text(ROIS)
    with pytest.raises(InputError, match=r"p3\.csv: subject p3: no column for ROI thalamus, which the other subjects have"):
        read(path)
    pd.DataFrame(series["p3"]).to_csv(path / "p3.csv", index=False, header=False)  # unnamed: by position
    np.testing.assert_array_equal(read(path).series[2], series["p3"])


def test_two_orders_and_no_majority_are_refused(tmp_path):
    series = three()
    series.pop("p3")
    path = folder(
        tmp_path / "lab", series, lambda name: list("abcdef") if name == "p1" else list("fedcba"), 'rois = "rois.tsv"'
    )
    (path / "rois.tsv").write_text(ROIS)
    with pytest.raises(InputError, match=r"dataset\.toml: the columns of the series files \(a \.\.\.\) are in several orders"):
        read(path)


def test_repeated_names_are_matched_by_position_in_one_order_only(tmp_path):
    series = three(columns=4)
    path = folder(tmp_path / "lab", series, lambda name: ["left", "right", "left", "right"])
    cohort = read(path)
    assert cohort.rois == ("1", "2", "3", "4")
    np.testing.assert_array_equal(cohort.series[2], series["p3"])
    pd.DataFrame(series["p3"], columns=["up", "right", "left", "right"]).to_csv(path / "p3.csv", index=False)
    with pytest.raises(InputError, match=r"p3\.csv: subject p3: no column for ROI 1"):
        read(path)


def nifti_with(tmp_path, value, units):
    images = miniature.nifti(tmp_path)
    (run,) = images.folder.glob("sub-02/func/*.nii.gz")
    for sidecar in images.folder.glob("sub-02/func/*.json"):
        sidecar.unlink()
    image = nibabel.load(run)
    data = np.asarray(image.dataobj)
    image.header.set_zooms((*image.header.get_zooms()[:3], value))
    image.header.set_xyzt_units("mm", units)
    nibabel.save(nibabel.Nifti1Image(data, image.affine, image.header), run)
    return images


@pytest.mark.parametrize(("value", "units"), [(2.5, "sec"), (2500, "msec"), (2.5e6, "usec"), (2.5, "unknown")])
def test_tr_of_a_header_in_its_unit(tmp_path, value, units):
    images = nifti_with(tmp_path / "one", value, units)
    usual = nifti_with(tmp_path / "two", 2.5, "sec")
    cohort = read(images.folder, atlas_image=images.atlas)
    assert cohort.tr[1] == pytest.approx(2.5)
    expected = read(usual.folder, atlas_image=usual.atlas).series[1]
    np.testing.assert_allclose(cohort.series[1], expected, atol=1e-4)  # filtered to the same band


def test_tr_of_a_header_without_a_unit_in_milliseconds(tmp_path):
    images = nifti_with(tmp_path, 2500, "unknown")
    with pytest.raises(
        InputError, match=r"bold\.nii\.gz, header: a TR of 2500 s is above 20 s and looks like milliseconds; .*2\.5"
    ):
        read(images.folder, atlas_image=images.atlas)


@pytest.fixture
def xcpd(tmp_path):
    return miniature.xcpd(tmp_path / "xcpd")


def table_of(release, subject):
    (file,) = release.folder.glob(f"{subject}/**/*_atlas-{ATLAS}_*timeseries.tsv")
    return file


def test_milliseconds_in_a_sidecar(xcpd):
    table_of(xcpd, "sub-07").with_suffix(".json").write_text(json.dumps({"RepetitionTime": 2000}))
    with pytest.raises(InputError, match=r"sub-07.*\.json, RepetitionTime: a TR of 2000 s is above 20 s and looks like milli"):
        read(xcpd.folder, atlas=ATLAS)


@pytest.mark.parametrize(("toml", "key"), [("tr = 2000", "tr"), ("tr = {a = 2000, b = 2}", "tr.a")])
def test_milliseconds_in_the_toml(tmp_path, toml, key):
    path = folder(tmp_path / "lab", three(), toml=toml)
    with pytest.raises(
        InputError, match=rf"dataset\.toml, key {key}: a TR of 2000 s is above 20 s and looks like milliseconds"
    ):
        read(path)


def test_milliseconds_in_the_table_and_as_an_option(tmp_path):
    rows = [("p1", "a", 0, 20, 2), ("p2", "b", 1, 21, 2000), ("p3", "a", 1, 22, 2)]
    with pytest.raises(InputError, match=r"participants\.tsv: subject p2, column tr: a TR of 2000 s is above 20 s"):
        read(folder(tmp_path / "lab", three(), people=rows))
    release = miniature.rest_meta_mdd(tmp_path / "mdd")
    with pytest.raises(InputError, match=r"option tr: a TR of 2000 s is above 20 s"):
        read(release.folder, tr=2000.0)


def test_ages_that_nobody_has_are_missing_and_findings(tmp_path):
    rows = [("p1", "a", 0, "1e300", 2), ("p2", "b", 1, -5, 2), ("p3", "a", 1, 0, 2), ("p4", "b", 0, 120, 2)]
    series = three() | {"p4": numbers(seed=9)}
    cohort = read(folder(tmp_path / "lab", series, people=rows))
    np.testing.assert_array_equal(cohort.phenotypes["age"], [np.nan, np.nan, np.nan, 120])
    findings = {finding.text: finding.subjects for finding in check_cohort(cohort).findings if finding.severity == "finding"}
    expected = "Subject {}, column age: age {} is not between 0 and 120 years; it was set to missing."
    assert findings[expected.format("p1", "1e+300")] == ("p1",)
    assert findings[expected.format("p2", "-5")] == ("p2",)
    assert not any("p3, column age" in text for text in findings)  # age 0 is a code for unknown


def test_odd_values_in_a_cohort_file_are_findings(tiny):
    table = tiny.phenotypes.copy()
    table.loc[tiny.subjects[4], "age"] = 300
    tr = np.array(tiny.tr)
    tr[5] = 2000
    findings = texts(replace(tiny, phenotypes=table, tr=tr), "finding")
    assert f"Subject {tiny.subjects[4]}, column age: 300 is not plausible." in findings
    assert any(text.startswith(f"1 subject has a TR above 20 s ({tiny.subjects[5]}: 2000 s)") for text in findings)


def test_one_subject_under_two_names(xcpd):
    rows = [*miniature.PARTICIPANTS, ("0051", *miniature.PARTICIPANTS[0][1:])]
    miniature.write_rows(xcpd.folder / "participants.tsv", miniature.PARTICIPANT_COLUMNS, rows)
    lines = {row[0]: line for line, row in enumerate(rows, start=2)}
    words = rf"lines {lines['sub-0051']} and {lines['0051']}, column participant_id: sub-0051 and 0051 are the same subject"
    with pytest.raises(InputError, match=words):
        read(xcpd.folder, atlas=ATLAS)


def test_numbered_rois_are_a_note(tmp_path, tiny):
    (note,) = [text for text in texts(read(folder(tmp_path / "lab", three())), "note") if "only numbers" in text]
    assert note.startswith("The 6 ROIs have only numbers (1 to 6)") and "dataset.toml by rois or atlas" in note
    assert not any("only numbers" in text for text in texts(tiny, "note"))


def smooth(rng, volumes, rois):
    """Series with the frequencies of a filtered scan and an FC of their own."""
    spectrum = np.fft.rfft(rng.normal(size=(volumes, rois)), axis=0)
    spectrum[np.fft.rfftfreq(volumes) > 0.15] = 0
    return np.fft.irfft(spectrum, volumes, axis=0) @ (np.eye(rois) + rng.normal(size=(rois, rois)) / 6)


@pytest.fixture(scope="module")
def copies():
    """Different scans, and copies of five of them: reversed, longer, shorter, both, and every second volume."""
    cohort = make_cohort("tiny", n_rois=60, lengths=(160, 160), sizes={"a": 10, "b": 10}, seed=1)
    rng = np.random.default_rng(0)
    series = [smooth(rng, 160, 60) for _ in range(20)]

    def at(one, volumes):
        old, new = np.arange(len(one)), np.linspace(0, len(one) - 1, volumes)
        return np.stack([np.interp(new, old, column) for column in one.T], axis=1)

    series[10] = series[0][::-1]
    series[11] = at(series[1], 240)
    series[12] = at(series[2], 100)
    series[13] = at(series[3], 130)[::-1] * 3 + 5
    series[14] = series[4][::2]
    series[15] = at(series[5][8:-8], 110)  # cropped and resampled: found by FC alone
    return replace(cohort, series=[one.astype(np.float32) for one in series])


def test_reversed_and_resampled_copies_are_found_and_nobody_else(copies):
    pairs = {(pair.first, pair.second): pair.how for pair in find_duplicates(copies)}
    assert set(pairs) == {(i, i + 10) for i in range(6)}
    assert [pairs[i, i + 10] for i in range(4)] == ["reversed", "resampled", "resampled", "resampled"]
    assert pairs[5, 15] == "fc"


def test_copies_are_told_with_what_was_done(copies):
    findings = texts(copies, "finding")
    names = [f"{copies.subjects[i]} ({copies.sites[i]})" for i in range(len(copies))]
    start = "{} and {} appear to be the same scan (their {} correlate{} at "
    assert any(t.startswith(start.format(names[0], names[10], "series", "")) and "reversed in time" in t for t in findings)
    assert any(t.startswith(start.format(names[1], names[11], "series", "")) and "resampled in time" in t for t in findings)
    assert any(t.startswith(start.format(names[5], names[15], "FC", "s")) and "two people" in t for t in findings)


def test_copies_of_real_scans(abide_folder):
    """Of the real subjects no two are called copies, and every reversed or resampled copy is."""
    cohort = read(abide_folder, on_bad="exclude")
    assert find_duplicates(cohort) == []
    series = list(cohort.series)
    n = len(series)
    for i in range(n):
        one = series[i]
        old, new = np.arange(len(one)), np.linspace(0, len(one) - 1, int(len(one) * (0.6, 0.8, 1.4)[i % 3]))
        other = np.stack([np.interp(new, old, column) for column in one.T], axis=1).astype(np.float32)
        series.append(one[::-1].copy() if i % 4 == 3 else other)
    names = [f"{name}{copy}" for copy in ("", "-copy") for name in cohort.subjects]
    table = pd.concat([cohort.phenotypes, cohort.phenotypes]).set_axis(names)
    twice = {key: np.tile(getattr(cohort, key), 2) for key in ("sites", "labels", "tr")}
    both = replace(cohort, series=series, subjects=np.array(names), phenotypes=table, **twice)
    assert {(pair.first, pair.second) for pair in find_duplicates(both)} == {(i, i + n) for i in range(n)}


def test_an_empty_scan_is_an_unusable_subject(tiny):
    series = list(tiny.series)
    rng = np.random.default_rng(0)
    series[7] = (1e-13 * rng.normal(size=series[7].shape)).astype(np.float32)
    series[9] = (1e-4 * series[9]).astype(np.float32)  # other units, no residue
    cohort = replace(tiny, series=series)
    assert empty_scans(tiny) == []
    assert empty_scans(cohort) == [7]
    check = check_cohort(cohort)
    (finding,) = [finding for finding in check.findings if "unusable subject" in finding.text]
    assert (finding.severity, finding.subjects) == ("finding", (str(cohort.subjects[7]),))
    assert "numerically empty" in check.inclusion.set_index("subject").at[cohort.subjects[7], "reason"]


def test_a_site_in_other_units_is_not_empty(tiny):
    site = tiny.site_names[0]
    series = [one * np.float32(1e-9) if at == site else one for one, at in zip(tiny.series, tiny.sites, strict=True)]
    cohort = replace(tiny, series=series)
    assert empty_scans(cohort) == []
    assert any(text.startswith(f"{site}: the standard deviation") for text in texts(cohort, "finding"))


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
    path = folder(tmp_path / "lab", three())
    table = path / "participants.tsv"
    table.write_text(table.read_text().replace(role, renamed, 1))
    with pytest.raises(InputError, match=rf"participants\.tsv has no column for {words}\[columns\] {role} = "):
        read(path)


def test_at_most_twelve_columns_are_listed(tmp_path):
    path = folder(tmp_path / "lab", three())
    (path / "participants.tsv").write_text("\t".join(["subject", *(f"c{i}" for i in range(20))]) + "\np1" + "\t1" * 20 + "\n")
    with pytest.raises(InputError, match=r"its columns are subject, c0, .*, c10 and 9 more; name the right one"):
        read(path)
    (path / "dataset.toml").write_text('[columns]\nsite = "ward"')
    with pytest.raises(InputError, match=r"participants\.tsv has no column ward; its columns are subject, c0"):
        read(path)


def test_no_label_column_lists_those_that_are_there(tmp_path):
    path = folder(tmp_path / "lab", three())
    table = path / "participants.tsv"
    table.write_text(table.read_text().replace("label", "state", 1))
    assert (
        'its columns are subject, site, state, age, tr; name the right one in dataset.toml: [columns] label = "..."'
        in texts(read(path), "note")
    )


def test_a_bids_table_without_a_site_names_the_option(xcpd):
    columns = ["ward" if name == "site" else name for name in miniature.PARTICIPANT_COLUMNS]
    miniature.write_rows(xcpd.folder / "participants.tsv", columns, miniature.PARTICIPANTS)
    with pytest.raises(
        InputError, match=r"its columns are participant_id, .*ward.*; rename the right one to site, or .*--site"
    ):
        read(xcpd.folder, atlas=ATLAS)


def test_transposed_series_of_several_lengths(tmp_path):
    series = {name: numbers(rows, 12, rows).T for name, rows in (("p1", 40), ("p2", 40), ("p3", 55))}
    path = folder(tmp_path / "lab", series)
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
        read(folder(tmp_path / "lab", series))


def test_transposed_series_of_one_length_are_a_finding(tmp_path):
    series = {name: one.T for name, one in three(200, 116).items()}
    cohort = read(folder(tmp_path / "lab", series))
    start = "Every scan has fewer volumes (116) than ROIs (200), the same number in all, and no ROI has a name."
    assert any(text.startswith(start) and "roi,time" in text for text in texts(cohort, "finding"))
    for other in (replace(cohort, atlas="craddock200"), replace(cohort, rois=tuple(f"roi-{i}" for i in range(200)))):
        assert not any("fewer volumes (116) than" in text for text in texts(other, "finding"))
        assert any("fewer volumes (116) than" in text for text in texts(other, "note"))


def test_missing_and_mixed_tr_are_findings(tiny):
    here = np.flatnonzero(tiny.sites == "north")
    tr = np.array(tiny.tr)
    assert not any("TR" in text for text in texts(tiny, "finding"))
    tr[here[:3]] = np.nan
    tr[here[3]] = 0.8
    cohort = replace(tiny, tr=tr)
    findings = {finding.text: finding.subjects for finding in check_cohort(cohort).findings}
    unknown = f"The TR of 3 of {len(tiny)} subjects is not known (north); give it in a column tr"
    assert [subjects for text, subjects in findings.items() if text.startswith(unknown)] == [tuple(tiny.subjects[here[:3]])]
    rest = f"{tiny.tr[here[4]]:g} s {len(here) - 4}"
    assert any(text.startswith(f"north has scans with 2 TRs (0.8 s 1, {rest})") for text in findings)


def z(one):
    wide = np.asarray(one, dtype=np.float64)
    return (wide - wide.mean(axis=0)) / wide.std(axis=0)


def test_runs_of_a_bids_subject_can_be_joined(xcpd):
    file = table_of(xcpd, "sub-8")
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
        read(xcpd.folder, atlas=ATLAS)
    cohort = read(xcpd.folder, atlas=ATLAS, join_runs=True)
    expected = np.concatenate([z(first[list(miniature.PARCELS)]), z(second)])
    np.testing.assert_allclose(cohort.series[3], expected, atol=1e-5)
    single = np.array(xcpd.series["sub-07"])
    np.testing.assert_allclose(cohort.series[2], z(single), atol=1e-4)  # a single run is z-scored too
    assert any(
        note.startswith("runs joined: each run of every subject was z-scored per ROI") for note in map(str, cohort.notes)
    )
    runs[1].with_suffix(".json").write_text(json.dumps({"RepetitionTime": 1.0}))
    with pytest.raises(InputError, match=r"run-10.*: a TR of 1 s, but .*run-2.* has 3 s, so the runs cannot be joined"):
        read(xcpd.folder, atlas=ATLAS, join_runs=True)


def test_one_run_in_two_tasks_is_not_joined(xcpd):
    file = table_of(xcpd, "sub-8")
    other = file.with_name(file.name.replace("task-rest", "task-nback"))
    other.write_bytes(file.read_bytes())
    with pytest.raises(
        InputError, match=r"sub-8 has runs that differ in task .* select those to join with only, .*'task-nback'"
    ):
        read(xcpd.folder, atlas=ATLAS, join_runs=True)
    assert read(xcpd.folder, atlas=ATLAS, join_runs=True, only="task-rest").subjects.tolist()[3] == "sub-8"


@pytest.mark.parametrize("toml", [None, 'pattern = "{subject}_run-{run}.csv"\njoin_runs = true'])
def test_runs_of_a_folder_can_be_joined(tmp_path, toml):
    path = folder(tmp_path / "lab", three(), toml=toml)
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
    path = folder(tmp_path / "lab", three())
    array = numbers()
    array[3, 2] = np.nan
    np.savetxt(path / "p2_run-2.csv", array, delimiter=",")
    with pytest.raises(InputError, match=r"p2_run-2\.csv: NaN at volume 4 of ROI 3 \(1 such value\)\."):
        read(path, join_runs=True)
