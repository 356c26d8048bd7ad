"""The reader of ADHD-200 on miniature releases of the Athena pipeline: tables by site, codes, runs and sessions."""

import numpy as np
import pytest
from test_images import numbers

from m2lgdg import Cohort
from m2lgdg.cohort import is_proxy
from m2lgdg.data.readers import guess, read
from m2lgdg.storage import InputError

COLUMNS = ("ScanDir ID", "Site", "Gender", "Age", "Handedness", "DX", "Secondary Dx ", "ADHD Measure", "ADHD Index")
COLUMNS += ("Inattentive", "Hyper/Impulsive", "IQ Measure", "Verbal IQ", "Performance IQ", "Full2 IQ", "Full4 IQ")
COLUMNS += ("Med Status", "QC_Rest_1", "QC_Rest_2")
KKI = [
    ("1018959", 3, 0, 12.36, 1, 0, "", 2, 41, 40, 43, 4, -999, -999, -999, 103, 1, 1, "N/A"),
    ("1019436", 3, 1, 12.98, 1, 3, "Simple Phobia", 2, 73, 76, 70, 4, 110, 99, -999, 124, 2, 1, "N/A"),
]
NYU = [  # ids without their leading zeros, a score on two subtests only
    ("10001", 5, 1, -999, 0.42, "1", "", 1, 75, 81, 70, 2, 119, 118, 121, -999, 1, 1, 1),
    ("10002", 5, "N/A", 9.0, "L", "0", "", 1, -999, -999, -999, 2, 100, 100, -999, -999, -999, 1, 1),
    ("10003", 5, 0, 10.5, 1, "pending", "", 1, -999, -999, -999, 2, 90, 91, -999, 92, -999, 1, 1),
]
SERIES = [  # site folder, id, session, run, volumes
    ("KKI", "1018959", 1, 1, 11),
    ("KKI", "1019436", 1, 1, 11),
    ("NYU", "0010001", 2, 1, 13),
    ("NYU", "0010001", 1, 2, 13),
    ("NYU", "0010001", 1, 1, 13),
    ("NYU", "0010002", 1, 2, 13),
    ("NYU", "0010003", 1, 1, 13),
]
AAL = (2001, 2002, 2101)


def write_table(path, rows, separator=","):
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [separator.join(f'"{cell}"' if "," in str(cell) else str(cell) for cell in row) for row in (COLUMNS, *rows)]
    path.write_text("\n".join(lines) + "\n")


def signal(subject, session, run, volumes, columns=3):
    return numbers(int(subject) * 100 + 10 * session + run, volumes, columns)


def write_series(folder, site, subject, session, run, volumes, atlas="aal", codes=AAL, form="sfnwmrda"):
    """A table of AFNI's 3dROIstats: the scan and the volume come before the ROIs, and names end in spaces."""
    scan = f"{form}{subject}_session_{session}_rest_{run}"
    file = folder / site / subject / f"{scan}_{atlas}_TCs.1D"
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = ["File\tSub-brick\t" + "\t".join(f"Mean_{code}  " for code in codes)]
    for i, row in enumerate(signal(subject, session, run, volumes, len(codes))):
        lines.append(f"{scan}.nii.gz\t{i}[?]\t" + "\t".join(f"{value:.8f}" for value in row))
    file.write_text("\n".join(lines) + "\n")
    return file


@pytest.fixture
def release(tmp_path):
    folder = tmp_path / "adhd200"
    write_table(folder / "KKI" / "KKI_phenotypic.csv", KKI)
    write_table(folder / "NYU" / "NYU_phenotypic.csv", NYU)
    for one in SERIES:
        write_series(folder, *one)
        write_series(folder, *one, form="snwmrda")
    return folder


def test_what_is_read(release):
    assert guess(release) == "adhd-200"
    cohort = read(release)
    assert cohort.subjects.tolist() == ["0010001", "0010002", "0010003", "1018959", "1019436"]
    assert cohort.sites.tolist() == ["NYU", "NYU", "NYU", "KKI", "KKI"]
    assert cohort.labels.tolist() == [1, 0, -1, 0, 1]  # pending: unknown
    assert (cohort.name, cohort.atlas, cohort.inputs) == ("adhd-200", "aal", ("sex", "age", "viq", "piq", "fiq"))
    assert cohort.rois == ("Precentral_L", "Precentral_R", "Frontal_Sup_L")
    assert cohort.tr.tolist() == [2.0, 2.0, 2.0, 2.5, 2.5]
    nan = np.nan
    np.testing.assert_array_equal(cohort.phenotypes["sex"], [1, nan, 2, 2, 1])  # the tables have 0 for female
    np.testing.assert_array_equal(cohort.phenotypes["age"], [nan, 9, 10.5, 12.36, 12.98])
    np.testing.assert_array_equal(cohort.phenotypes["viq"], [119, 100, 90, nan, 110])
    np.testing.assert_array_equal(cohort.phenotypes["fiq"], [121, nan, 92, 103, 124])  # four subtests, else two
    np.testing.assert_array_equal(cohort.phenotypes["ADHD Index"], [75, nan, nan, 41, 73])
    assert cohort.phenotypes["Secondary Dx"].tolist() == ["", "", "", "", "Simple Phobia"]
    runs = {"0010001": (1, 1, 13), "0010002": (1, 2, 13), "0010003": (1, 1, 13), "1018959": (1, 1, 11), "1019436": (1, 1, 11)}
    for subject, series in zip(cohort.subjects, cohort.series, strict=True):
        np.testing.assert_allclose(series, signal(subject, *runs[subject]), atol=1e-6)


def test_clinical_columns_are_no_inputs():
    assert all(is_proxy(name) for name in ("ADHD Index", "Inattentive", "Hyper/Impulsive", "Secondary Dx", "DX"))
    assert not any(is_proxy(name) for name in ("Verbal IQ", "Handedness", "age", "hypertension"))


def test_which_run_is_read(release):
    cohort = read(release)
    assert "session: the first of each subject (1 of 5 subjects have several); --session NAME selects another one, " in "".join(
        map(str, cohort.notes)
    )
    assert "run: the first of the session (1 subjects have several runs); --join-runs joins them" in map(str, cohort.notes)
    second = read(release, session="2")
    assert second.subjects.tolist() == ["0010001"]
    np.testing.assert_allclose(second.series[0], signal("0010001", 2, 1, 13), atol=1e-6)
    joined = read(release, join_runs=True)
    parts = [signal("0010001", *each, 13).astype(np.float64) for each in ((1, 1), (1, 2), (2, 1))]
    expected = np.concatenate([(part - part.mean(axis=0)) / part.std(axis=0) for part in parts])
    np.testing.assert_allclose(joined.series[0], expected, atol=1e-5)
    assert [len(series) for series in joined.series] == [39, 13, 13, 11, 11]


def test_one_table_for_all_sites(release):
    for file in release.glob("*/*.csv"):
        file.unlink()
    write_table(release / "adhd200_preprocessed_phenotypics.tsv", NYU + KKI, "\t")
    cohort = read(release)
    assert cohort.labels.tolist() == [1, 0, -1, 0, 1]


def test_strategies_and_atlases(release):
    for one in SERIES:
        write_series(release, *one, atlas="cc200", codes=(1, 2, 5, 200))
    with pytest.raises(InputError, match=r"adhd200 has several atlases; choose one of aal, cc200\."):
        read(release)
    with pytest.raises(InputError, match=r"adhd200 has no atlas ho; it has aal, cc200\."):
        read(release, atlas="ho")
    cohort = read(release, atlas=("aal", "cc200"))
    assert cohort.parcellations["cc200"].rois == ("1", "2", "5", "200")
    assert "strategy filtered" in map(str, cohort.notes)
    assert "strategy unfiltered" in read(release, strategy="unfiltered").notes
    with pytest.raises(InputError, match=r"option strategy: 'sharp' is not one of filtered, unfiltered\."):
        read(release, strategy="sharp")
    with pytest.raises(InputError, match=r"has no atlas cc200; it has aal"):
        read(release, strategy="unfiltered", atlas="cc200")


@pytest.mark.parametrize(
    ("position", "value", "message"),
    [
        (1, 9, r"subject 0010001, column Site: 9 is not a site of ADHD-200 \(1 to 8\)\."),
        (2, 2, r"subject 0010001, column Gender: '2' is neither 0 nor 1\."),
        (3, "ten", r"subject 0010001, column Age: 'ten' is not a number\."),
        (5, 4, r"subject 0010001, column DX: label '4' is not known"),
        (0, "1018959", r"subject 1018959 is listed twice in column ScanDir ID"),
    ],
)
def test_bad_cells(release, position, value, message):
    row = list(NYU[0])
    row[position] = value
    write_table(release / "NYU" / "NYU_phenotypic.csv", [row, *NYU[1:]])
    with pytest.raises(InputError, match=message):
        read(release)


def test_tables_that_do_not_fit(release):
    (release / "NYU" / "NYU_phenotypic.csv").unlink()
    with pytest.raises(
        InputError, match=r"0010001_session_1_rest_1_aal_TCs\.1D: subject 0010001 is not in .*KKI_phenotypic\.csv\."
    ):
        read(release)
    write_table(release / "KKI" / "KKI_phenotypic.csv", [("77", *NYU[0][1:])])
    with pytest.raises(
        InputError, match=r"lists none of the 5 subjects who have a series, such as 0010001 .*first subject is 0000077"
    ):
        read(release)
    (release / "KKI" / "KKI_phenotypic.csv").unlink()
    with pytest.raises(InputError, match=r"adhd200 has no phenotype table \(KKI_phenotypic\.csv"):
        read(release)


def test_a_bad_series(release):
    file = release / "KKI" / "1018959" / "sfnwmrda1018959_session_1_rest_1_aal_TCs.1D"
    text = file.read_text()
    file.write_text(text.replace("Mean_2101", ""))
    with pytest.raises(InputError, match=r"1018959_session_1_rest_1_aal_TCs\.1D: the header names 2 ROIs but the lines have 3"):
        read(release)
    copy = release / "other" / file.name
    copy.parent.mkdir()
    copy.write_text(text)
    with pytest.raises(InputError, match=r"aal_TCs\.1D: the same series file is in another folder"):
        read(release)


def test_the_commands_read_it(release, typed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, text, _ = typed("convert", release, "own.cohort", "--session", "first")
    assert code == 0 and "Session: the first of each subject" in text and "Run: the first of the session" in text
    assert Cohort.load("own.cohort").hash == read(release).hash
