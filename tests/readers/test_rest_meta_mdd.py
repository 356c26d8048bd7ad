"""REST-meta-MDD: a miniature of the release reads to the numbers, codes, sites and exclusions that its files mean."""

import shutil

import miniature
import numpy as np
import openpyxl
import pytest
from scipy.io import savemat

from m2lgdg import InputError, read
from m2lgdg.data.atlases import regions

COLUMNS = {  # first and last column of an atlas, counted from 1, as the consortium's own script lists them
    "aal": (1, 116),
    "harvard-oxford-cortical": (117, 212),
    "harvard-oxford-subcortical": (213, 228),
    "harvard-oxford": (117, 228),
    "craddock200": (229, 428),
    "zalesky980": (429, 1408),
    "dosenbach160": (1409, 1568),
}
KEPT = ["S1-1-0001", "S1-1-0002", "S1-2-0001", "S14-1-0001", "S14-2-0001", "S2-1-0010", "S2-2-0003"]
FIRST_PLACE = "Results/ROISignals_FunImgARCWF"


@pytest.fixture(scope="module")
def release(tmp_path_factory):
    return miniature.rest_meta_mdd(tmp_path_factory.mktemp("rest"))


@pytest.fixture
def own(tmp_path):
    """A release that a test may spoil."""
    return miniature.rest_meta_mdd(tmp_path / "rest")


@pytest.fixture(scope="module")
def cohort(release):
    return read(release.folder)


def excluded(cohort):
    return {each.subject: (each.site, each.reason) for each in cohort.excluded}


def test_subjects_sites_and_labels_come_from_the_ids(cohort):
    assert cohort.subjects.tolist() == KEPT
    assert cohort.sites.tolist() == ["S1", "S1", "S1", "S14", "S14", "S2", "S2"]
    assert cohort.labels.tolist() == [1, 1, 0, 1, 0, 1, 0]
    assert cohort.site_names == ["S1", "S2", "S14"]
    assert cohort.name == "rest-meta-mdd"
    assert cohort.notes[0] == "atlas aal, folder ROISignals_FunImgARCWF"


def test_sites_4_5_and_19_are_left_out_with_their_reasons(cohort):
    assert excluded(cohort) == {
        "S4-1-0001": ("S4", "site left out: its subjects duplicate those of S14"),
        "S4-2-0001": ("S4", "site left out: its subjects duplicate those of S14"),
        "S5-1-0001": ("S5", "site left out: no time courses"),
        "S19-1-0001": ("S19", "site left out: no time courses"),
        "S20-1-0002": ("S20", "listed but no series file"),
    }


def test_phenotype_codes(cohort):
    table = cohort.phenotypes
    nan = np.nan
    assert cohort.inputs == ("sex", "age", "education")
    np.testing.assert_array_equal(table["sex"], [1, nan, 1, 1, 2, 2, 2])  # 0 is unknown
    np.testing.assert_array_equal(table["age"], [30, nan, nan, 22, 29, 45.5, nan])  # 0, [] and -9999 are unknown
    np.testing.assert_array_equal(table["education"], [12, 0, 16, 15, 14, nan, nan])  # zero years are years
    np.testing.assert_array_equal(table["HAMD"], [20, nan, nan, 24, nan, 31, nan])  # controls have no such column
    np.testing.assert_array_equal(table["Illness duration (months)"], [6.5, nan, nan, 3, nan, 24, nan])
    np.testing.assert_array_equal(table["On medication?"], [-1, 1, nan, 2, nan, nan, nan])
    assert set(table.columns) == {"sex", "age", "education", *miniature.REST_CLINICAL}


@pytest.mark.parametrize(
    "column", ["HAMD", "HAMA", "HAMD1", "On medication?", "If first episode?", "Illness duration (months)"]
)
def test_clinical_columns_are_no_inputs(cohort, column):
    with pytest.raises(InputError, match="reveals the diagnosis"):
        cohort.with_inputs(["age", column])


@pytest.mark.parametrize("atlas", COLUMNS)
def test_columns_of_each_atlas(release, atlas):
    cohort = read(release.folder, atlas=atlas)
    first, last = COLUMNS[atlas]
    for subject, series in zip(cohort.subjects, cohort.series, strict=True):
        np.testing.assert_array_equal(series, release.series[subject][:, first - 1 : last].astype(np.float32))
    assert cohort.lengths.tolist() == [9, 9, 9, 11, 11, 14, 14]
    assert cohort.atlas == atlas


def test_rois_are_named_where_we_know_the_names(cohort, release):
    assert cohort.rois == tuple(regions("aal")["name"])
    assert cohort.rois[0] == "Precentral_L"
    assert cohort.rois[115] == "Vermis_10"
    assert read(release.folder, atlas="zalesky980").rois == tuple(str(i) for i in range(1, 981))


@pytest.mark.parametrize(
    ("atlas", "first", "last"),
    [
        ("dosenbach160", "vmPFC_1", "post_occipital_160"),
        ("craddock200", "Occipital_Mid_L_1", regions("cc200")["name"][199]),
        ("harvard-oxford", "Frontal_Pole_L", "Accumbens_R"),
        ("harvard-oxford-cortical", "Frontal_Pole_L", "Occipital_Pole_R"),
        ("harvard-oxford-subcortical", "Brain_Stem_L", "Accumbens_R"),
    ],
)
def test_columns_of_included_atlases_are_named_in_their_order(release, atlas, first, last):
    cohort = read(release.folder, atlas=atlas)
    assert (cohort.rois[0], cohort.rois[-1]) == (first, last)
    assert not any(name.isdigit() for name in cohort.rois)


def test_power_and_schaefer_are_named(release):
    assert read(release.folder, atlas="power264", on_bad="exclude").rois == tuple(regions("power264")["name"])
    assert read(release.folder, atlas="schaefer400", on_bad="exclude").rois[0] == "LH_Vis_1"


def test_power_atlas_skips_the_global_signal(release):
    cohort = read(release.folder, atlas="power264", on_bad="exclude")
    assert set(cohort.sites) == {"S2", "S14"}
    for subject, series in zip(cohort.subjects, cohort.series, strict=True):
        np.testing.assert_array_equal(series, release.series[subject][:, 1569:1833].astype(np.float32))
    assert excluded(cohort)["S1-1-0001"] == (
        "S1",
        "ROISignals_S1-1-0001.mat: 1568 columns, but atlas power264 needs columns 1570 to 1833.",
    )
    with pytest.raises(InputError, match="1568 columns, but atlas power264"):
        read(release.folder, atlas="power264")


def test_schaefer_atlas_of_newer_files(release):
    cohort = read(release.folder, atlas="schaefer400", on_bad="exclude")
    assert cohort.subjects.tolist() == ["S14-1-0001", "S14-2-0001"]
    np.testing.assert_array_equal(cohort.series[1], release.series["S14-2-0001"][:, 1833:].astype(np.float32))


def test_strategy(release):
    cohort = read(release.folder, strategy="FunImgARglobalCWF")
    np.testing.assert_array_equal(cohort.series[0], (release.series["S1-1-0001"][:, :116] + 7).astype(np.float32))
    assert cohort.notes[0] == "atlas aal, folder ROISignals_FunImgARglobalCWF"
    with pytest.raises(InputError, match=r"strategy FunImgARC matches none of the folders .*ROISignals_FunImgARglobalCWF"):
        read(release.folder, strategy="FunImgARC")


def test_the_only_strategy_needs_no_choice(own):
    shutil.rmtree(own.folder / FIRST_PLACE)
    assert read(own.folder).notes[0] == "atlas aal, folder ROISignals_FunImgARglobalCWF"


def test_all_sites_on_request_show_the_copies(release):
    cohort = read(release.folder, exclude_sites=())
    assert cohort.site_names == ["S1", "S2", "S4", "S5", "S14", "S19"]
    series = dict(zip(cohort.subjects.tolist(), cohort.series, strict=True))
    np.testing.assert_array_equal(series["S4-1-0001"], series["S14-1-0001"])
    assert excluded(cohort) == {"S20-1-0002": ("S20", "listed but no series file")}


def test_sites_of_the_users_choice(release):
    cohort = read(release.folder, exclude_sites=["S4", "S1"])
    assert cohort.site_names == ["S2", "S5", "S14", "S19"]
    assert excluded(cohort)["S1-2-0001"] == ("S1", "site left out: by the user")
    # One name is that site, not its letters, and what names no site cannot silently leave nobody out.
    assert "S14" not in read(release.folder, exclude_sites="S14").site_names
    with pytest.raises(InputError, match="exclude_sites: '4' is not a site"):
        read(release.folder, exclude_sites=["4"])


def test_tr_is_unknown_unless_given(cohort, release):
    assert np.isnan(cohort.tr).all()
    assert read(release.folder, tr=2.0).tr.tolist() == [2.0] * 7


def test_a_series_of_nobody(tmp_path):
    release = miniature.rest_meta_mdd(tmp_path / "rest", unlisted=("S2-1-0099", "S4-1-0044"))
    with pytest.raises(InputError, match=r"S2-1-0099\.mat: subject S2-1-0099 is not in column ID of .*V4\.xlsx"):
        read(release.folder)
    cohort = read(release.folder, on_bad="exclude")
    assert cohort.subjects.tolist() == KEPT
    assert excluded(cohort)["S2-1-0099"] == ("S2", "series file but not listed")
    assert excluded(cohort)["S4-1-0044"][1].startswith("site left out: its subjects duplicate those of S14")


def test_a_width_that_no_release_has(own):
    savemat(own.folder / FIRST_PLACE / "ROISignals_S1-1-0001.mat", {"ROISignals": np.ones((5, 116))})
    with pytest.raises(InputError, match="116 columns, but files of the release have 1568, 1833, 2233"):
        read(own.folder)


def test_a_damaged_download(own):
    file = own.folder / FIRST_PLACE / "ROISignals_S2-1-0010.mat"  # MATLAB's own files are compressed, as this one
    content = bytearray(file.read_bytes())
    content[5000:5004] = b"damn"
    file.write_bytes(bytes(content))
    with pytest.raises(InputError, match=r"ROISignals_S2-1-0010\.mat is not a readable MATLAB file"):
        read(own.folder)
    cohort = read(own.folder, on_bad="exclude")
    assert excluded(cohort)["S2-1-0010"] == ("S2", "ROISignals_S2-1-0010.mat is not a readable MATLAB file (error).")
    assert cohort.subjects.tolist() == [one for one in KEPT if one != "S2-1-0010"]


def test_a_group_that_contradicts_its_sheet(own):
    book = openpyxl.load_workbook(own.folder / miniature.REST_BOOK)
    book["Controls"]["A2"] = "S1-1-0001"
    book.save(own.folder / miniature.REST_BOOK)
    with pytest.raises(InputError, match="sheet Controls: the id of subject S1-1-0001 has the group of the other sheet"):
        read(own.folder)
