"""The real ABIDE files of the folder that M2LGDG_ABIDE names: the reader must be right about them too."""

import re
from collections import Counter

import numpy as np
import pandas as pd
import pytest

from m2lgdg import read
from m2lgdg.data.atlases import regions

FEWEST = {  # the shortest series of each site in the release
    **{"CALTECH": 146, "CMU": 202, "KKI": 124, "LEUVEN_1": 246, "LEUVEN_2": 246, "MAX_MUN": 116, "NYU": 176, "OHSU": 78},
    **{"OLIN": 206, "PITT": 196, "SBL": 196, "SDSU": 176, "STANFORD": 176, "TRINITY": 146, "UCLA_1": 116, "UCLA_2": 116},
    **{"UM_1": 296, "UM_2": 296, "USM": 232, "YALE": 196},
}


@pytest.fixture(scope="module")
def cohort(abide_folder):
    return read(abide_folder)


@pytest.fixture(scope="module")
def table(abide_folder):
    table = pd.read_csv(abide_folder / "Phenotypic_V1_0b_preprocessed1.csv", dtype={"FILE_ID": str})
    return table[table["FILE_ID"] != "no_filename"].set_index("FILE_ID")


@pytest.fixture(scope="module")
def files(abide_folder):
    return {path.name.removesuffix("_rois_aal.1D"): path for path in abide_folder.glob("**/*_rois_aal.1D")}


def test_every_file_is_a_subject(cohort, files, table):
    assert cohort.subjects.tolist() == sorted(files)
    assert Counter(cohort.sites.tolist()) == Counter(table.loc[sorted(files), "SITE_ID"].tolist())
    reasons = Counter(each.reason for each in cohort.excluded)
    assert reasons["no scan in the release"] == 77
    assert reasons["listed but no series file"] == 1035 - len(files)
    assert set(reasons) <= {"no scan in the release", "listed but no series file"}


def test_group_1_is_the_patient(cohort, table):
    groups = table.loc[cohort.subjects.tolist(), "DX_GROUP"].to_numpy()
    assert np.array_equal(cohort.labels, np.where(groups == 1, 1, 0))
    both = {site: set(cohort.labels[cohort.sites == site].tolist()) for site in cohort.site_names}
    assert all(labels == {0, 1} for labels in both.values())


def test_series_equal_loadtxt(cohort, files):
    for subject, series in list(zip(cohort.subjects, cohort.series, strict=True))[:60]:
        np.testing.assert_array_equal(series, np.loadtxt(files[subject]).astype(np.float32))


def test_lengths(cohort):
    for site in cohort.site_names:
        lengths = cohort.lengths[cohort.sites == site]
        assert FEWEST[site] <= lengths.min() <= lengths.max() <= 316
    assert set(cohort.lengths[cohort.sites == "OHSU"].tolist()) == {78}


def test_names_come_from_the_header_codes(cohort, files):
    known = regions("aal")
    names = dict(zip(known["code"], known["name"], strict=True))
    codes = min(files.values()).read_text().split("\n", 1)[0].split()
    assert cohort.rois == tuple(names[code.lstrip("#")] for code in codes)
    assert len(cohort.rois) == 116


def test_a_known_defect_is_read_as_it_is(cohort):
    """Caltech_0051478 was scanned with half of its regions outside the field of view."""
    series = cohort.series[cohort.subjects.tolist().index("Caltech_0051478")]
    assert (np.ptp(series, axis=0) == 0).sum() == 65


def test_missing_codes_are_gone(cohort, table):
    rows = table.loc[cohort.subjects.tolist()]
    for name, column in (("age", "AGE_AT_SCAN"), ("fiq", "FIQ"), ("viq", "VIQ"), ("piq", "PIQ"), ("sex", "SEX")):
        np.testing.assert_array_equal(cohort.phenotypes[name], rows[column].replace(-9999, np.nan).to_numpy())
    numbers = cohort.phenotypes.select_dtypes("number").to_numpy()
    assert not (numbers == -9999).any()


def test_quality_checked_is_the_subset_of_the_literature(cohort, table, abide_folder):
    """Raters 1 and 3 must say OK and rater 2 not fail: 871 of the 1,035, as nilearn's fetcher gives, and most papers use."""
    sure, unsure = ["qc_rater_1", "qc_anat_rater_3", "qc_func_rater_3"], ["qc_anat_rater_2", "qc_func_rater_2"]
    passed = table[(table[sure] == "OK").all(axis=1) & (table[unsure] != "fail").all(axis=1)]
    assert passed["DX_GROUP"].value_counts().to_dict() == {2: 468, 1: 403}
    checked = read(abide_folder, quality_checked=True)
    assert set(checked.subjects.tolist()) == set(passed.index) & set(cohort.subjects.tolist())


def upper_edge(series):
    """The highest frequency with noticeable power, in cycles per volume."""
    centred = series.astype(np.float64) - series.mean(axis=0, dtype=np.float64)
    power = (np.abs(np.fft.rfft(centred * np.hanning(len(series))[:, None], axis=0)) ** 2).sum(axis=1)
    return np.fft.rfftfreq(len(series))[power > 0.02 * power.max()].max()


def test_tr_fits_the_spectrum(cohort):
    """The release was low-passed at 0.1 Hz, so the edge of the spectrum in cycles per volume is 0.1 Hz times the TR."""
    edges = {}
    for subject, series, tr in zip(cohort.subjects, cohort.series, cohort.tr, strict=True):
        protocol = re.sub(r"_\d+$", "", subject)  # CMU_a and CMU_b are one site with two protocols
        edges.setdefault((protocol, tr), []).append(upper_edge(series) / 0.1)
    assert len({protocol for protocol, _ in edges}) == len(edges)
    for (protocol, tr), seconds in edges.items():
        assert np.median(seconds) == pytest.approx(tr, rel=0.05), protocol
