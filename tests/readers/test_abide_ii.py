"""The reader of ABIDE II on miniature releases: the composite table, .1D files, BIDS names, and sites with two spellings."""

import miniature
import numpy as np
import pytest
from test_images import DCAN, PARCELS, numbers, save_parcellated

from m2lgdg.data.readers import guess, read
from m2lgdg.storage import InputError

TABLE = "ABIDEII_Composite_Phenotypic.csv"
# With the space that the release has after AGE_AT_SCAN.
COLUMNS = ("SITE_ID", "SUB_ID", "NDAR_GUID", "DX_GROUP", "PDD_DSM_IV_TR", "AGE_AT_SCAN ", "SEX", "HANDEDNESS_CATEGORY")
COLUMNS += ("FIQ", "VIQ", "PIQ", "ADOS_G_TOTAL", "CURRENT_MEDICATION_NAME", "EYE_STATUS_AT_SCAN")
PEOPLE = [
    ("ABIDEII-BNI_1", 29006, "", 1, "", 48, 1, 1, 131, "", "", 11, "none", 2),
    ("ABIDEII-BNI_1", 29007, "", 2, "", 41.5, 2, -9999, "", "", "", "", "caf\u00e9ine", 2),
    ("ABIDEII-ETH_1", 29057, "NDAR_1", 1, 3, 22, 1, "", 110, 120, 101, -9999, "", 1),
    ("ABIDEII-OILH_2", 28675, "", 2, "", 18, 1, 2, -9999, 99, 98, "", "", 1),
    ("ABIDEII-U_MIA_1", 30002, "", 1, "", "", 2, 1, 95, "", "", 8, "", 2),  # listed, but without a series
]
ROIS = ("2001", "2002", "2101")
FILES = {  # the site in the name of a file or folder is not always spelled as in the table
    "29006": "ABIDEII-BNI_1_29006_rois_aal.1D",
    "29007": "ABIDEII-BNI_1/29007/29007_rois_aal.1D",
    "29057": "ABIDEII-ETHZ_1/ABIDEII-ETHZ_1_0029057_rois_aal.1D",
    "28675": "ABIDEII-ONRC_2/28675_rois_aal.1D",
}


def write_table(folder, rows=PEOPLE, columns=COLUMNS, encoding="latin-1"):
    folder.mkdir(parents=True, exist_ok=True)
    lines = [",".join(map(str, row)) for row in (columns, *rows)]
    (folder / TABLE).write_bytes(("\r\n".join(lines) + "\r\n").encode(encoding))
    return folder


def write_series(path, series, codes=ROIS):
    path.parent.mkdir(parents=True, exist_ok=True)
    miniature.write_1d(path, codes, series.astype(float), "\n")


@pytest.fixture
def release(tmp_path):
    folder = write_table(tmp_path / "abide2")
    for subject, name in FILES.items():
        write_series(folder / name, numbers(int(subject), 9, 3))
    return folder


@pytest.mark.parametrize("encoding", ["latin-1", "utf-8", "utf-8-sig"])
def test_what_is_read(release, encoding):
    write_table(release, encoding=encoding)
    assert guess(release) == "abide-ii"
    cohort = read(release)
    assert cohort.subjects.tolist() == ["28675", "29006", "29007", "29057"]
    assert cohort.sites.tolist() == ["ABIDEII-OILH_2", "ABIDEII-BNI_1", "ABIDEII-BNI_1", "ABIDEII-ETH_1"]
    assert cohort.labels.tolist() == [0, 1, 0, 1]
    assert (cohort.name, cohort.atlas, cohort.inputs) == ("abide-ii", "aal", ("sex", "age", "viq", "piq", "fiq"))
    assert cohort.rois == ("Precentral_L", "Precentral_R", "Frontal_Sup_L")
    nan = np.nan
    np.testing.assert_array_equal(cohort.phenotypes["sex"], [1, 1, 2, 1])
    np.testing.assert_array_equal(cohort.phenotypes["age"], [18, 48, 41.5, 22])
    np.testing.assert_array_equal(cohort.phenotypes["fiq"], [nan, 131, nan, 110])
    np.testing.assert_array_equal(cohort.phenotypes["viq"], [99, nan, nan, 120])
    np.testing.assert_array_equal(cohort.phenotypes["HANDEDNESS_CATEGORY"], [2, 1, nan, nan])
    assert cohort.phenotypes["CURRENT_MEDICATION_NAME"].tolist() == ["", "", "caf\u00e9ine", ""]
    assert "NDAR_GUID" not in cohort.phenotypes
    np.testing.assert_array_equal(cohort.tr, [nan, 3.0, 3.0, 2.0])
    for subject, series in zip(cohort.subjects, cohort.series, strict=True):
        np.testing.assert_array_equal(series, numbers(int(subject), 9, 3))
    assert [(each.subject, each.site, each.reason) for each in cohort.excluded] == [
        ("30002", "ABIDEII-U_MIA_1", "listed but no series file")
    ]


def test_series_of_the_dcan_pipeline(tmp_path):
    """Parcellated CIFTI-2 files, with ids that have leading zeros; the TR of a file comes before that of its site."""
    folder = write_table(tmp_path / "abide2")
    for subject in ("0029006", "0029057"):
        save_parcellated(folder / DCAN.format(subject, "1"), numbers(int(subject)), step=0.9)
    save_parcellated(folder / DCAN.format("0029006", "2"), numbers(5))
    cohort = read(folder)
    assert (cohort.subjects.tolist(), cohort.rois, cohort.atlas) == (["29006", "29057"], PARCELS, "Gordon")
    assert cohort.tr.tolist() == [0.9, 0.9]
    np.testing.assert_array_equal(cohort.series[0], numbers(29006))
    np.testing.assert_array_equal(read(folder, session="2").series[0], numbers(5))


def test_the_table_may_be_elsewhere(release, tmp_path):
    (release / TABLE).rename(tmp_path / "people.csv")
    cohort = read(release, kind="abide-ii", participants=tmp_path / "people.csv")
    assert len(cohort) == 4
    with pytest.raises(InputError, match=r"abide2 has no composite phenotype table \(ABIDEII_Composite_Phenotypic\.csv\)"):
        read(release, kind="abide-ii")


def test_the_folder_as_downloaded(release, tmp_path):
    """raw/ with the table beside preprocessed/ with the series."""
    expected = read(release)
    (tmp_path / "ABIDE_2" / "raw").mkdir(parents=True)
    (release / TABLE).rename(tmp_path / "ABIDE_2" / "raw" / TABLE)
    release.rename(tmp_path / "ABIDE_2" / "preprocessed")
    assert guess(tmp_path / "ABIDE_2") == "abide-ii"
    assert read(tmp_path / "ABIDE_2").hash == expected.hash
    words = r"neither in the folder nor up to two levels below; name it: m2lgdg check \S+ --kind abide-ii --participants FILE"
    with pytest.raises(InputError, match=words):
        read(tmp_path / "ABIDE_2" / "preprocessed", "abide-ii")
    (tmp_path / "ABIDE_2" / "old").mkdir()
    (tmp_path / "ABIDE_2" / "old" / TABLE).write_text("x")
    with pytest.raises(InputError, match=r"several tables of subjects, old/\S+ and raw/\S+; name one with --participants"):
        read(tmp_path / "ABIDE_2")


def test_a_file_at_another_site_than_the_table(release):
    (release / "ABIDEII-KKI_1").mkdir()
    (release / FILES["28675"]).rename(release / "ABIDEII-KKI_1" / "28675_rois_aal.1D")
    with pytest.raises(
        InputError, match=r"28675_rois_aal\.1D: site ABIDEII-KKI_1, but .* has subject 28675 at ABIDEII-OILH_2\."
    ):
        read(release)


def test_a_file_without_a_subject_and_two_of_one(release):
    write_series(release / "ABIDEII-BNI_1_0029006_rois_aal.1D", numbers(1, 9, 3))
    with pytest.raises(InputError, match=r"subject 29006 has a second series file"):
        read(release)
    (release / "ABIDEII-BNI_1_0029006_rois_aal.1D").rename(release / "NYU_mean_rois_aal.1D")
    with pytest.raises(InputError, match=r"NYU_mean does not end in a SUB_ID of five digits"):
        read(release)


def test_a_table_of_others(release):
    write_table(release, [("ABIDEII-BNI_1", 29999, "", 1, "", 48, 1, 1, 131, "", "", 11, "none", 2)])
    with pytest.raises(
        InputError, match=r"Phenotypic\.csv lists none of the 4 subjects who have a series, such as 28675 .*29999"
    ):
        read(release)
    write_table(release, PEOPLE[1:])
    with pytest.raises(InputError, match=r"29006_rois_aal\.1D: subject 29006 is not in .*Phenotypic\.csv\."):
        read(release)
    assert len(read(release, on_bad="exclude")) == 3


def test_options_of_other_files(release):
    with pytest.raises(InputError, match=r"has \.1D files, for which there is no option session\."):
        read(release, session="1")
