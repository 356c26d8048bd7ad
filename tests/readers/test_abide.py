"""ABIDE I: miniatures of the PCP release, in each layout people keep it in, read to what was written."""

import re
from collections import Counter

import miniature
import numpy as np
import pandas as pd
import pytest

from m2lgdg import InputError, read
from m2lgdg.data.atlases import regions

KEPT = ["CMU_a_0050649", "CMU_b_0050669", "MaxMun_a_0051607", "Pitt_0050003", "Pitt_0050004"]
ABSENT = {
    "50002": ("PITT", "no scan in the release"),
    "Leuven_1_0050700": ("LEUVEN_1", "listed but no series file"),
}


def excluded(cohort):
    return {each.subject: (each.site, each.reason) for each in cohort.excluded}


def assert_series(cohort, release):
    for subject, series in zip(cohort.subjects, cohort.series, strict=True):
        np.testing.assert_array_equal(series, release.series[subject].astype(np.float32))


@pytest.mark.parametrize(
    ("layout", "strategy"), [("release", "cpac/filt_global"), ("flat", "not known"), ("subject", "not known")]
)
def test_every_layout(tmp_path, layout, strategy):
    release = miniature.abide(tmp_path / "ABIDE_pcp", layout=layout)
    cohort = read(release.folder)
    assert cohort.subjects.tolist() == KEPT
    assert cohort.sites.tolist() == ["CMU", "CMU", "MAX_MUN", "PITT", "PITT"]
    assert cohort.labels.tolist() == [1, 0, 0, 1, 0]  # DX_GROUP 1 is autism, 2 control
    assert_series(cohort, release)
    assert excluded(cohort) == ABSENT
    assert cohort.atlas == "aal"
    assert cohort.tr.tolist() == [2.0, 1.5, 3.0, 1.5, 1.5]  # CMU has two protocols
    assert tuple(map(str, cohort.notes[:2])) == (
        f"atlas aal, strategy {strategy}",
        "label from column DX_GROUP: 1 = patient, 2 = control",
    )


def test_columns_follow_the_header_codes(tmp_path):
    release = miniature.abide(tmp_path / "ABIDE_pcp")
    first = (release.folder / "cpac/filt_global/CMU_a_0050649_rois_aal.1D").read_text().split()[0]
    assert first != "#2001"  # this file has its columns in another order
    cohort = read(release.folder)
    assert cohort.rois == tuple(regions("aal")["name"])
    assert_series(cohort, release)


def test_phenotype_codes(tmp_path):
    table = read(miniature.abide(tmp_path / "ABIDE_pcp").folder)
    assert table.inputs == ("sex", "age", "viq", "piq", "fiq")
    nan = np.nan
    columns = table.phenotypes
    np.testing.assert_array_equal(columns["sex"], [1, 2, 1, 1, 2])
    np.testing.assert_array_equal(columns["age"], [27, 21, 40, 24.45, 19.09])
    np.testing.assert_array_equal(columns["fiq"], [110, 98, nan, 124, nan])  # empty and -9999
    np.testing.assert_array_equal(columns["viq"], [nan, 100, 100, 128, nan])
    np.testing.assert_array_equal(columns["piq"], [nan, 97, 97, 115, 117])
    np.testing.assert_array_equal(columns["ADOS_TOTAL"], [nan, nan, nan, 13, nan])
    np.testing.assert_array_equal(columns["DSM_IV_TR"], [2, 0, 0, 1, nan])
    assert columns["HANDEDNESS_CATEGORY"].tolist() == ["L", "R", "R", "R", ""]
    assert columns["CURRENT_MED_STATUS"].tolist() == ["", "", "0", "1", "`"]  # the stray backtick makes it text
    np.testing.assert_array_equal(columns["SUB_ID"], [50649, 50669, 51607, 50003, 50004])
    assert not {"", "Unnamed: 0", "X", "subject", "FILE_ID", "SITE_ID"} & set(columns.columns)


def test_quality_checked_leaves_out_whom_a_rater_failed(tmp_path):
    release = miniature.abide(tmp_path / "ABIDE_pcp")
    cohort = read(release.folder, quality_checked=True)
    assert cohort.subjects.tolist() == ["CMU_a_0050649", "Pitt_0050003"]  # one rater's maybe passes
    assert excluded(cohort) == ABSENT | {
        "CMU_b_0050669": ("CMU", "failed by the quality raters"),
        "MaxMun_a_0051607": ("MAX_MUN", "failed by the quality raters"),
        "Pitt_0050004": ("PITT", "failed by the quality raters"),
    }


def test_several_atlases_need_a_choice(tmp_path):
    release = miniature.abide(tmp_path / "ABIDE_pcp", atlases=("cc200", "aal"))
    with pytest.raises(InputError, match=r"several kinds of series; .*: atlas aal, strategy cpac/filt_global; atlas cc200"):
        read(release.folder)
    cohort = read(release.folder, atlas="cc200")
    assert cohort.rois == tuple(str(i) for i in range(1, 21))  # no names shipped: the codes of the header
    assert_series(cohort, release)
    assert len(read(release.folder, atlas="aal").rois) == 116
    with pytest.raises(InputError, match=r"has no series of atlas ho.*; available: atlas aal.*atlas cc200"):
        read(release.folder, atlas="ho")


def test_several_strategies_need_a_choice(tmp_path):
    strategies = ("cpac/filt_global", "cpac/nofilt_global", "dparsf/filt_global")
    release = miniature.abide(tmp_path / "ABIDE_pcp", strategies=strategies)
    with pytest.raises(InputError, match=r"several kinds of.*cpac/filt_global.*cpac/nofilt_global.*dparsf/filt_global"):
        read(release.folder)
    with pytest.raises(InputError, match="several kinds of"):
        read(release.folder, strategy="filt_global")
    with pytest.raises(InputError, match="no series of strategy noglobal"):
        read(release.folder, strategy="noglobal")
    assert_series(read(release.folder, strategy="cpac/filt_global"), release)
    cohort = read(release.folder, strategy="nofilt_global")
    assert cohort.notes[0] == "atlas aal, strategy cpac/nofilt_global"
    assert not np.array_equal(cohort.series[0], release.series[KEPT[0]].astype(np.float32))


def test_a_series_of_nobody(tmp_path):
    release = miniature.abide(tmp_path / "ABIDE_pcp", unlisted=("Nobody_0099999",))
    with pytest.raises(InputError, match=r"Nobody_0099999_rois_aal\.1D: subject Nobody_0099999 is not in column FILE_ID"):
        read(release.folder)
    cohort = read(release.folder, on_bad="exclude")
    assert cohort.subjects.tolist() == KEPT
    assert excluded(cohort) == ABSENT | {"Nobody_0099999": ("", "series file but not listed")}


def test_a_file_without_header_cannot_be_matched_to_the_others(tmp_path):
    release = miniature.abide(tmp_path / "ABIDE_pcp")
    file = release.folder / "cpac/filt_global/Pitt_0050003_rois_aal.1D"
    file.write_text(file.read_text().split("\n", 1)[1])
    with pytest.raises(InputError, match="subject Pitt_0050003: no column for ROI Precentral_L"):
        read(release.folder)


# The real files of the folder that M2LGDG_ABIDE names: the reader must be right about them too.
FEWEST = {  # the shortest series of each site in the release
    **{"CALTECH": 146, "CMU": 202, "KKI": 124, "LEUVEN_1": 246, "LEUVEN_2": 246, "MAX_MUN": 116, "NYU": 176, "OHSU": 78},
    **{"OLIN": 206, "PITT": 196, "SBL": 196, "SDSU": 176, "STANFORD": 176, "TRINITY": 146, "UCLA_1": 116, "UCLA_2": 116},
    **{"UM_1": 296, "UM_2": 296, "USM": 232, "YALE": 196},
}


@pytest.fixture(scope="module")
def real(abide_folder):
    return read(abide_folder)


@pytest.fixture(scope="module")
def table(abide_folder):
    table = pd.read_csv(abide_folder / "Phenotypic_V1_0b_preprocessed1.csv", dtype={"FILE_ID": str})
    return table[table["FILE_ID"] != "no_filename"].set_index("FILE_ID")


@pytest.fixture(scope="module")
def files(abide_folder):
    return {path.name.removesuffix("_rois_aal.1D"): path for path in abide_folder.glob("**/*_rois_aal.1D")}


def test_every_file_is_a_subject(real, files, table):
    assert real.subjects.tolist() == sorted(files)
    assert Counter(real.sites.tolist()) == Counter(table.loc[sorted(files), "SITE_ID"].tolist())
    reasons = Counter(each.reason for each in real.excluded)
    assert reasons["no scan in the release"] == 77
    assert reasons["listed but no series file"] == 1035 - len(files)
    assert set(reasons) <= {"no scan in the release", "listed but no series file"}


def test_group_1_is_the_patient(real, table):
    groups = table.loc[real.subjects.tolist(), "DX_GROUP"].to_numpy()
    assert np.array_equal(real.labels, np.where(groups == 1, 1, 0))
    both = {site: set(real.labels[real.sites == site].tolist()) for site in real.site_names}
    assert all(labels == {0, 1} for labels in both.values())


def test_series_equal_loadtxt(real, files):
    for subject, series in list(zip(real.subjects, real.series, strict=True))[:60]:
        np.testing.assert_array_equal(series, np.loadtxt(files[subject]).astype(np.float32))


def test_lengths(real):
    for site in real.site_names:
        lengths = real.lengths[real.sites == site]
        assert FEWEST[site] <= lengths.min() <= lengths.max() <= 316
    assert set(real.lengths[real.sites == "OHSU"].tolist()) == {78}


def test_names_come_from_the_header_codes(real, files):
    known = regions("aal")
    names = dict(zip(known["code"], known["name"], strict=True))
    codes = min(files.values()).read_text().split("\n", 1)[0].split()
    assert real.rois == tuple(names[code.lstrip("#")] for code in codes)
    assert len(real.rois) == 116


def test_a_known_defect_is_read_as_it_is(real):
    """Caltech_0051478 was scanned with half of its regions outside the field of view."""
    series = real.series[real.subjects.tolist().index("Caltech_0051478")]
    assert (np.ptp(series, axis=0) == 0).sum() == 65


def test_missing_codes_are_gone(real, table):
    rows = table.loc[real.subjects.tolist()]
    for name, column in (("age", "AGE_AT_SCAN"), ("fiq", "FIQ"), ("viq", "VIQ"), ("piq", "PIQ"), ("sex", "SEX")):
        np.testing.assert_array_equal(real.phenotypes[name], rows[column].replace(-9999, np.nan).to_numpy())
    numbers = real.phenotypes.select_dtypes("number").to_numpy()
    assert not (numbers == -9999).any()


def test_quality_checked_is_the_subset_of_the_literature(real, table, abide_folder):
    """Raters 1 and 3 must say OK and rater 2 not fail: 871 of the 1,035, as nilearn's fetcher gives, and most papers use."""
    sure, unsure = ["qc_rater_1", "qc_anat_rater_3", "qc_func_rater_3"], ["qc_anat_rater_2", "qc_func_rater_2"]
    passed = table[(table[sure] == "OK").all(axis=1) & (table[unsure] != "fail").all(axis=1)]
    assert passed["DX_GROUP"].value_counts().to_dict() == {2: 468, 1: 403}
    checked = read(abide_folder, quality_checked=True)
    assert set(checked.subjects.tolist()) == set(passed.index) & set(real.subjects.tolist())


def upper_edge(series):
    """The highest frequency with noticeable power, in cycles per volume."""
    centred = series.astype(np.float64) - series.mean(axis=0, dtype=np.float64)
    power = (np.abs(np.fft.rfft(centred * np.hanning(len(series))[:, None], axis=0)) ** 2).sum(axis=1)
    return np.fft.rfftfreq(len(series))[power > 0.02 * power.max()].max()


def test_tr_fits_the_spectrum(real):
    """The release was low-passed at 0.1 Hz, so the edge of the spectrum in cycles per volume is 0.1 Hz times the TR."""
    edges = {}
    for subject, series, tr in zip(real.subjects, real.series, real.tr, strict=True):
        protocol = re.sub(r"_\d+$", "", subject)  # CMU_a and CMU_b are one site with two protocols
        edges.setdefault((protocol, tr), []).append(upper_edge(series) / 0.1)
    assert len({protocol for protocol, _ in edges}) == len(edges)
    for (protocol, tr), seconds in edges.items():
        assert np.median(seconds) == pytest.approx(tr, rel=0.05), protocol
