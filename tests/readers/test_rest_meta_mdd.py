"""REST-meta-MDD: a miniature of the release reads to the numbers, codes, sites and exclusions that its files mean."""

import itertools
import re
import shutil

import miniature
import numpy as np
import openpyxl
import pytest
from scipy.io import loadmat, savemat

from m2lgdg import Cohort, InputError, check_cohort, read
from m2lgdg.data import global_signal
from m2lgdg.data.atlases import regions
from m2lgdg.data.readers import rest_meta_mdd
from m2lgdg.data.readers.rest_meta_mdd import site_of

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
        "S5-1-0001": ("S5", "site left out: not used by the paper, for lack of time courses"),
        "S19-1-0001": ("S19", "site left out: not used by the paper, for lack of time courses"),
        "S20-1-0002": ("S20", "listed but no series file"),
    }


def test_phenotype_codes(cohort):
    table = cohort.phenotypes
    nan = np.nan
    assert cohort.inputs == ("sex", "age", "education")
    np.testing.assert_array_equal(table["sex"], [1, 1, 1, 1, 2, 2, nan])  # 0 is unknown
    np.testing.assert_array_equal(table["age"], [30, 62, nan, 22, 29, 45, nan])  # so are [] and 0
    # Zero years are years, but not of a subject of whom nothing is known.
    np.testing.assert_array_equal(table["education"], [12, 0, 16, 15, 14, nan, nan])
    np.testing.assert_array_equal(table["HAMD"], [20, nan, nan, 24, nan, 31, nan])  # controls have no such column
    np.testing.assert_array_equal(table["HAMA"], [nan, nan, nan, 11, nan, 18, nan])  # also as text
    np.testing.assert_array_equal(table["*HAMD1"], [2, nan, nan, nan, nan, 4, nan])
    np.testing.assert_array_equal(table["Illness duration (months)"], [6.5, nan, nan, 3, nan, 24, nan])
    np.testing.assert_array_equal(table["On medication?"], [-1, 1, nan, -1, nan, nan, nan])
    assert set(table.columns) == {"sex", "age", "education", *miniature.REST_CLINICAL}


@pytest.mark.parametrize(
    "column", ["HAMD", "HAMA", "*HAMD1", "HAMD24", "On medication?", "If first episode?", "Illness duration (months)"]
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
    assert cohort.lengths.tolist() == [20, 20, 20, 19, 19, 14, 14]
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


def test_power_is_named(release):
    assert read(release.folder, atlas="power264", on_bad="exclude").rois == tuple(regions("power264")["name"])


def test_power_atlas_skips_the_global_signal(release):
    cohort = read(release.folder, atlas="power264", on_bad="exclude")
    assert set(cohort.sites) == {"S1", "S14"}
    for subject, series in zip(cohort.subjects, cohort.series, strict=True):
        np.testing.assert_array_equal(series, release.series[subject][:, 1569:1833].astype(np.float32))
    assert excluded(cohort)["S2-1-0010"] == (
        "S2",
        "ROISignals_S2-1-0010.mat: 1568 columns, but atlas power264 needs columns 1570 to 1833.",
    )
    with pytest.raises(InputError, match="1568 columns, but atlas power264"):
        read(release.folder, atlas="power264")


def test_schaefer_atlas_of_newer_files(tmp_path):
    release = miniature.rest_meta_mdd(tmp_path / "rest", newer=("S14",))
    cohort = read(release.folder, atlas="schaefer400", on_bad="exclude")
    assert cohort.subjects.tolist() == ["S14-1-0001", "S14-2-0001"]
    assert cohort.rois[0] == "LH_Vis_1"
    np.testing.assert_array_equal(cohort.series[1], release.series["S14-2-0001"][:, 1833:].astype(np.float32))


def test_strategy(release, cohort):
    other = read(release.folder, strategy="FunImgARglobalCWF")
    # The global signal is the mean of the columns before its own; what is left is uncorrelated with it.
    signal = release.series["S1-1-0001"][:, :1568].mean(axis=1)
    assert np.abs(signal @ cohort.series[0]).mean() > 1
    np.testing.assert_allclose(signal @ other.series[0], 0, atol=1e-5)
    assert other.notes[0] == "atlas aal, folder ROISignals_FunImgARglobalCWF"
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


def kinds(cohort):
    return {one.kind for one in check_cohort(cohort).findings}


def test_the_global_signal_is_told_from_its_own_column(release, own):
    kept, regressed = read(release.folder), read(release.folder, strategy="FunImgARglobalCWF")
    assert re.fullmatch(r"global signal kept: its standard deviation is (6|7|8)\d % of that of the ROIs", str(kept.notes[-1]))
    assert str(regressed.notes[-1]).startswith("global signal regressed out: its standard deviation is 1 % of")
    assert "another pipeline" not in kinds(kept) | kinds(regressed)
    places = [own.folder / "Results" / f"ROISignals_{name}" for name in ("FunImgARCWF", "FunImgARglobalCWF", "aside")]
    for i, j in ((0, 2), (1, 0), (2, 1)):
        places[i].rename(places[j])  # the two folders are exchanged
    finding = read(own.folder).notes[-1]
    assert finding.severity == "finding"
    assert finding.text.startswith(
        "The folder name FunImgARCWF means that the global signal was kept, but its standard deviation is 1 %"
    )
    exchanged = read(own.folder, strategy="FunImgARglobalCWF").notes[-1]
    assert (exchanged.numbers["said"], exchanged.numbers["seen"]) == ("regressed out", "kept")


def test_older_files_have_no_global_signal(release):
    cohort = read(release.folder, exclude_sites=["S1", "S4", "S5", "S14", "S19"])
    assert not any("global signal" in str(note) for note in cohort.notes)


def test_a_folder_of_each_site(own, cohort):
    """A copy that was divided by site, under names of the user's own."""
    for file in (own.folder / FIRST_PLACE).glob("*.mat"):
        place = own.folder / "mine" / file.stem.split("_")[1].split("-")[0]
        place.mkdir(parents=True, exist_ok=True)
        file.rename(place / file.name)
    shutil.rmtree(own.folder / "Results")
    again = read(own.folder)
    assert again.hash == cohort.hash
    assert again.notes[0] == "atlas aal, 6 folders"
    file = own.folder / "mine/S1/ROISignals_S1-1-0001.mat"
    shutil.copy(file, own.folder / "mine/S2")
    with pytest.raises(InputError, match=r"two series of subject S1-1-0001, .*S1/ROISignals.* and .*S2/ROISignals.*; keep one"):
        read(own.folder)


def test_the_workbook_is_found_or_named(own, cohort, tmp_path, typed):
    elsewhere = tmp_path / "elsewhere.xlsx"
    shutil.copy(own.folder / miniature.REST_BOOK, own.folder / "Results" / "second.xlsx")
    with pytest.raises(InputError, match=r"several workbooks: REST-\S+, Results/second\.xlsx; .* with --participants"):
        read(own.folder)
    assert read(own.folder, participants=own.folder / miniature.REST_BOOK).hash == cohort.hash
    (own.folder / "Results" / "second.xlsx").unlink()
    (own.folder / miniature.REST_BOOK).rename(elsewhere)
    code, _, error = typed("check", own.folder)
    assert code == 2
    assert "has no phenotype workbook" in error and "--participants FILE" in error
    code, _, _ = typed("convert", own.folder, tmp_path / "mdd.cohort", "--participants", elsewhere)
    assert (code, Cohort.load(tmp_path / "mdd.cohort").hash) == (0, cohort.hash)


@pytest.fixture
def unrecorded(own):
    """S16 and S3, six subjects of each class: education was recorded for the patients of S16 alone."""
    sheets = {1: list(miniature.REST_PATIENTS), 2: list(miniature.REST_CONTROLS)}
    for site, group, years in (("S16", 1, 12), ("S16", 2, 0), ("S3", 1, 0), ("S3", 2, 0)):
        for i in range(6):
            subject = f"{site}-{group}-{i:04d}"
            sheets[group].append((subject, 1 + i % 2, 20 + i, years + (years and i)))
            signals = np.random.default_rng([i, group, len(site)]).normal(size=(8, 1833))
            savemat(own.folder / FIRST_PLACE / f"ROISignals_{subject}.mat", {"ROISignals": signals}, do_compression=True)
    miniature.rest_workbook(own.folder / miniature.REST_BOOK, sheets[1], sheets[2])
    return own.folder


def test_education_that_was_not_recorded_is_missing_for_the_whole_site(unrecorded):
    cohort = read(unrecorded)
    years = cohort.phenotypes["education"].to_numpy()
    assert np.isnan(years[np.isin(cohort.sites, ["S3", "S16"])]).all()  # the years of patients alone would be the label
    np.testing.assert_array_equal(years[np.isin(cohort.sites, ["S1", "S14"])], [12, 0, 16, 15, 14])
    found = [one.text.split(".")[0] for one in cohort.notes if getattr(one, "kind", "") == "no education"]
    assert found == [
        "S16: all 6 controls have 0 years of education",
        "S3: all 6 patients and all 6 controls have 0 years of education",
    ]
    others = read(unrecorded, exclude_sites=["S3", "S16"])
    assert not any(getattr(one, "kind", "") == "no education" for one in others.notes)  # of nobody who was read


# The real files of the folder that M2LGDG_REST_META_MDD names: series of S1 and S14 of a public copy, and the workbook.
BLOCKS = ("aal", "harvard-oxford", "craddock200", "dosenbach160", "power264")


@pytest.fixture(scope="module")
def real(mdd_folder):
    return read(mdd_folder, atlas=(*BLOCKS, "zalesky980"))


@pytest.fixture(scope="module")
def mean_fc(real):
    """(roi, roi) mean correlation of the ROIs of all atlases, and the columns of each."""
    parts = [real.parcellation(name) for name in (*BLOCKS, "zalesky980")]
    ends = np.cumsum([len(one.rois) for one in parts])
    total = np.zeros((ends[-1], ends[-1]))
    for series in zip(*(one.series for one in parts), strict=True):
        wide = np.hstack(series).astype(np.float64)
        wide -= wide.mean(axis=0)
        spread = wide.std(axis=0)
        unit = wide / np.where(spread > 0, spread, 1)
        total += unit.T @ unit / len(unit)
    columns = {one.atlas: slice(end - len(one.rois), end) for one, end in zip(parts, ends.tolist(), strict=True)}
    return total / len(real), columns


def places(atlas):
    return regions(atlas)[["x", "y", "z"]].to_numpy()[: {"dosenbach160": 160}.get(atlas)]


@pytest.mark.parametrize(("one", "other"), list(itertools.permutations(BLOCKS, 2)))
def test_the_column_that_correlates_most_is_at_the_same_place(mean_fc, one, other):
    """In another atlas of the same scan, the nearest ROI has nearly the same signal: so are columns and names confirmed."""
    fc, columns = mean_fc
    between = fc[columns[one], columns[other]]

    def distance(shift):  # mm from each ROI to that of the other atlas with the most similar signal
        return np.median(np.linalg.norm(places(one) - places(other)[np.roll(between, shift, axis=0).argmax(axis=1)], axis=1))

    assert distance(0) < 18  # the nearest ROI is 5 to 13 mm away
    assert min(distance(shift) for shift in (-2, -1, 1, 2)) > 25  # were the columns one or two places off


def test_zalesky_columns_are_the_brain_between_craddock_and_dosenbach(mean_fc):
    """Its 980 random parcels have no names; each looks like a parcel of Craddock, and no other block is repeated in it."""
    fc, columns = mean_fc
    best = fc[columns["zalesky980"], columns["craddock200"]].max(axis=1)
    assert np.median(best) > 0.6
    inside = np.abs(fc[columns["zalesky980"], columns["zalesky980"]] - np.eye(980))
    assert inside.max() < 0.99


def test_left_and_right_alternate(mean_fc):
    fc, columns = mean_fc
    for atlas, pairs in (("aal", 54), ("harvard-oxford", 56)):
        block = fc[columns[atlas], columns[atlas]]
        same, next_pair = (np.mean([block[2 * i + k, 2 * i + 1 + k] for i in range(pairs - k)]) for k in (0, 1))
        assert same > 0.5 > 0.3 > next_pair


def test_real_subjects(real, mdd_folder):
    files = {path.stem.removeprefix("ROISignals_") for path in mdd_folder.glob("**/ROISignals_S*.mat")}
    assert set(real.subjects) == {one for one in files if site_of(one) not in ("S4", "S5", "S19")}
    for subject, site, label in zip(real.subjects, real.sites, real.labels, strict=True):
        assert subject.startswith(f"{site}-{2 - label}-")
    assert {len(one) for one, site in zip(real.series, real.sites, strict=True) if site == "S1"} <= {200}
    assert {len(one) for one, site in zip(real.series, real.sites, strict=True) if site == "S14"} <= {190}
    for path in list(mdd_folder.glob("**/ROISignals_S1-*.mat"))[:3]:
        series = real.series[real.subjects.tolist().index(path.stem.removeprefix("ROISignals_"))]
        np.testing.assert_array_equal(series, loadmat(path)["ROISignals"][:, :116].astype(np.float32))


def test_real_global_signal(real):
    """By its own column, and by mean FC: with the global signal, that of the release is 0.2 or more at every site."""
    fc = global_signal.mean_fc(real.parcellation("aal"))
    said = next(str(note) for note in real.notes if str(note).startswith("global signal"))
    assert said.startswith("global signal regressed out") == (np.median(fc) < 0.05)


def test_real_workbook(mdd_folder):
    """The paper has 1,212 patients and 1,057 controls of 22 sites: those of the workbook without sites 4, 5 and 19."""
    (book,) = mdd_folder.glob("**/*.xlsx")
    table, notes = rest_meta_mdd._phenotypes(book)
    used = table[~table["site"].isin(["S4", "S5", "S19"])]
    assert (used["label"].sum(), (used["label"] == 0).sum(), used["site"].nunique()) == (1212, 1057, 22)
    assert {one.site for one in notes} == {"S3", "S5", "S16"}
    assert table.index[table["age"].isna()].tolist() == ["S10-2-0007", "S10-2-0008", "S23-2-0005"]
    assert table["education"][["S10-2-0007", "S10-2-0008", "S23-2-0005"]].isna().all()
    assert (table["education"] == 0).sum() == 32
    assert table["sex"].isna().sum() == 1
