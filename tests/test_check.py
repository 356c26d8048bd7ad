"""`check`: every kind of finding is found where it is planted, and not where it is not."""

from dataclasses import replace

import numpy as np

from m2lgdg import check_cohort, make_cohort
from m2lgdg.data.check import empty_scans
from m2lgdg.findings import Exclusion, is_proxy


def texts(result, level=None):
    return [finding.text for finding in result.findings if level in (None, finding.severity)]


def test_a_clean_cohort_is_usable_and_its_table_counts(tiny):
    result = check_cohort(tiny.with_inputs(["sex"]))
    short = [text for text in texts(result, "finding") if "fewer than 100 volumes" not in text]
    assert short == []
    table = result.sites.set_index("site")
    assert table["subjects"].to_dict() == {"north": 16, "south": 14, "west": 12, "east": 10}
    assert (table["patients"] + table["controls"] == table["subjects"]).all()
    assert table.loc["north", "patients"] == int(((tiny.sites == "north") & (tiny.labels == 1)).sum())
    demo = make_cohort("demo", missing=0.0, n_rois=60, sizes={"Aarhus": 20, "Bergen": 16})
    assert check_cohort(demo).exit_code == 0


def test_one_site_one_class_no_label_are_unusable(tiny):
    north = tiny.select(sites=["north"])
    assert check_cohort(north).exit_code == 2
    assert any("from one site, north" in text for text in texts(check_cohort(north), "unusable"))
    assert check_cohort(north, new_site=True).exit_code < 2
    patients = check_cohort(tiny.select(tiny.labels == 1))
    assert any("All labelled subjects are patients" in text for text in texts(patients, "unusable"))
    assert any("No subject has a label" in text for text in texts(check_cohort(replace(tiny, labels=np.full(len(tiny), -1)))))


def test_one_class_and_tiny_sites(tiny):
    keep = (tiny.sites != "east") | (tiny.labels == 1)
    result = check_cohort(tiny.select(keep))
    n = int((keep & (tiny.sites == "east")).sum())
    assert f"east has {n} patients and no controls; as a target, only its sensitivity is defined." in texts(result, "finding")
    assert f"east has only {n} subjects, too few for reliable metrics as a target." in texts(result, "finding")


def test_many_tiny_sites_are_one_sentence_and_swapped_series_are_noticed(tiny):
    few = tiny.select(np.concatenate([np.flatnonzero(tiny.sites == site)[:3] for site in tiny.site_names]))
    found = texts(check_cohort(few), "finding")
    listed = "(east 3, north 3, south 3, west 3)"
    assert f"4 sites have fewer than 10 subjects, too few for reliable metrics as a target {listed}." in found
    wide = replace(tiny, series=[one[:11] for one in tiny.series])
    assert "Every scan has fewer volumes (11) than ROIs (12). Are the time and ROI axes swapped?" in texts(
        check_cohort(wide), "note"
    )
    assert not any("swapped" in text for text in texts(check_cohort(tiny)))


def test_flat_rois_short_scans_and_units(tiny):
    series = [np.array(one) for one in tiny.series]
    series[0][:, :3] = 5.0
    odd = np.flatnonzero(tiny.sites == "west")
    for i in odd:
        series[i] *= 300
    result = check_cohort(replace(tiny, series=series))
    first = str(tiny.subjects[0])
    assert f"{first} ({tiny.sites[0]}) has 3 flat ROIs out of 12." in texts(result, "finding")
    assert any(text.startswith("west: the standard deviation of the signal is") for text in texts(result, "finding"))
    assert sum("units may differ" in text for text in texts(result)) == 1
    assert result.sites.set_index("site").loc[tiny.sites[0], "with flat ROIs"] == 1
    assert result.inclusion["subject"].tolist() == tiny.subjects.tolist()
    row = result.inclusion.set_index("subject").loc[first]
    assert row["status"] == "included"
    assert "3 flat ROIs" in row["reason"]


def test_exclusions_are_counted_by_reason_and_site(tiny):
    gone = (
        Exclusion.from_reason("a", "north", "listed but no series file"),
        Exclusion.from_reason("b", "north", "listed but no series file"),
        Exclusion.from_reason("c", "S4", "site left out: its subjects are those of S14 again"),
        Exclusion.from_reason("d", "west", "x.npy: subject d: NaN at volume 3 of ROI r."),
    )
    result = check_cohort(replace(tiny, excluded=gone))
    assert "2 subjects excluded: listed but no series file (north 2)." in texts(result, "finding")
    assert any(text.startswith("1 subject (c) excluded: site left out") for text in texts(result, "note"))
    assert any("x.npy: subject d: NaN at volume 3" in text for text in texts(result, "finding"))
    assert result.inclusion["status"].value_counts().to_dict() == {"included": len(tiny), "excluded": 4}


def test_missingness_that_tells_the_site_or_the_label(tiny):
    table = tiny.phenotypes.fillna(10.0)
    table.loc[tiny.sites == "east", "age"] = np.nan
    table.loc[tiny.labels == 0, "education"] = np.nan
    found = texts(check_cohort(replace(tiny, phenotypes=table)), "finding")
    assert (
        "age is missing at east (10 of 10), but for only 0 % of subjects elsewhere; its missingness reveals the site." in found
    )
    rates = "100 % of controls and 0 % of patients (within sites)"
    assert f"education is missing for {rates}; its missingness reveals the label." in found


def test_names_of_label_proxies():
    proxies = ("GAF", "CGI", "cgi_s", "CGI-I", "drug", "drugNaive", "treatment", "status", "clinical_status", "diag", "patient")
    assert [name for name in (*proxies, "isPatient", "case_control", "HAMD", "label", "asd") if not is_proxy(name)] == []
    others = ("age", "EYE_STATUS_AT_SCAN", "PatientAge", "patient_id", "marital_status", "diagonal", "drugstore", "treadmill")
    assert [name for name in (*others, "sex", "fiq", "subdivision", "gaffe") if is_proxy(name)] == []


def test_proxies_by_name_and_by_value(tiny):
    rng = np.random.default_rng(0)
    table = tiny.phenotypes.assign(HAMD=rng.normal(size=len(tiny)), score=tiny.labels + 0.1 * rng.normal(size=len(tiny)))
    result = check_cohort(replace(tiny, phenotypes=table))
    assert "Not inputs, because they reveal the diagnosis: HAMD." in texts(result, "note")
    assert "Column score separates patients from controls as only a label proxy should. Is it one?" in texts(result, "note")
    as_input = check_cohort(replace(tiny, phenotypes=table, inputs=("score", "HAMD"), allow_proxies=True))
    assert "Input score separates patients from controls as only a label proxy should. Is it one?" in texts(as_input, "finding")
    assert "Input HAMD reveals the diagnosis; a model can read the label from it." in texts(as_input, "finding")


def test_odd_values_in_a_cohort_file_are_findings(tiny):
    table = tiny.phenotypes.copy()
    table.loc[tiny.subjects[4], "age"] = 300
    tr = np.array(tiny.tr)
    tr[5] = 2000
    findings = texts(check_cohort(replace(tiny, phenotypes=table, tr=tr)), "finding")
    assert f"Subject {tiny.subjects[4]}, column age: 300 is not plausible." in findings
    assert any(text.startswith(f"1 subject has a TR above 20 s ({tiny.subjects[5]}: 2000 s)") for text in findings)


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
    assert any(text.startswith(f"{site}: the standard deviation") for text in texts(check_cohort(cohort), "finding"))


def test_missing_and_mixed_tr_are_findings(tiny):
    here = np.flatnonzero(tiny.sites == "north")
    tr = np.array(tiny.tr)
    assert not any("TR" in text for text in texts(check_cohort(tiny), "finding"))
    tr[here[:3]] = np.nan
    tr[here[3]] = 0.8
    cohort = replace(tiny, tr=tr)
    findings = {finding.text: finding.subjects for finding in check_cohort(cohort).findings}
    unknown = f"The TR of 3 of {len(tiny)} subjects is not known (north); give it in a column tr"
    assert [subjects for text, subjects in findings.items() if text.startswith(unknown)] == [tuple(tiny.subjects[here[:3]])]
    rest = f"{tiny.tr[here[4]]:g} s {len(here) - 4}"
    assert any(text.startswith(f"north has scans with 2 TRs (0.8 s 1, {rest})") for text in findings)
