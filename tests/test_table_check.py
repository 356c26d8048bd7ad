"""Checks of tables: each kind of finding is found where it is planted, and not in a table of healthy brains."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from m2lgdg import check_cohort, make_cohort
from m2lgdg.data.leakage import leakage_checks
from m2lgdg.data.missingness import missing_by_label
from m2lgdg.data.proxies import separating_columns
from m2lgdg.data.table_check import table_findings
from m2lgdg.findings import read_finding
from m2lgdg.metrics import auc

NOISE = {"roi_effect": 0.0, "edge_effect": 0.0, "phenotype_effect": 0.0, "missing": 0.0, "lengths": (40, 40)}
SIZES = {"a": 40, "b": 30, "c": 30}
COLUMNS = [f"lh_r{i}_thickness" for i in range(30)]


@pytest.fixture(scope="module")
def bare():
    """A cohort without any effect of the label."""
    return make_cohort("tiny", sizes=SIZES, seed=3, **NOISE)


def brains(cohort, seed=0):
    """Thickness in mm: regions differ, sites differ a little, and people differ in all regions together."""
    rng = np.random.default_rng(seed)
    site = {name: rng.normal(0, 0.08) for name in cohort.site_names}
    people = np.array([site[one] for one in cohort.sites.tolist()]) + rng.normal(0, 0.08, len(cohort))
    values = rng.uniform(2, 3.5, len(COLUMNS)) + people[:, None] + rng.normal(0, 0.1, (len(cohort), len(COLUMNS)))
    return pd.DataFrame(values, index=cohort.subjects.tolist(), columns=COLUMNS)


def found(cohort, table, **more):
    return list(table_findings(cohort.with_tables({"thickness": table} | more)))


@pytest.mark.parametrize("seed", range(5))
def test_healthy_brains_give_no_finding(bare, seed):
    assert found(bare, brains(bare, seed)) == []
    assert list(table_findings(bare)) == []
    for few in (bare.select([0]), bare.select([0, 50]), bare.select(sites=["a"])):
        assert found(few, brains(bare, seed)) == []


def test_empty_and_constant_columns_and_subjects_without_a_row(bare):
    table = brains(bare).assign(none=np.nan, nothing=np.nan, zero=0.0)
    table.iloc[[3, 60]] = np.nan
    lacking, empty, constant = found(bare, table)
    assert lacking.text == f"2 subjects have no values in table thickness ({bare.subjects[3]}, {bare.subjects[60]})."
    assert lacking.anonymous == "2 subjects have no values in table thickness."
    assert (empty.severity, empty.text) == ("finding", "Table thickness: no subject has a value in none, nothing.")
    assert (constant.severity, constant.text) == ("note", "Table thickness: all subjects have the same value in zero.")


@pytest.mark.parametrize(("factor", "words"), [(0.001, "1/1000 of"), (0.1, "1/10 of"), (10, "10 times"), (1000, "1000 times")])
def test_units_that_differ_between_sites(bare, factor, words):
    table = brains(bare)
    table[bare.sites == "b"] *= factor
    (one,) = found(bare, table)  # and no failed segmentation at that site
    assert (one.kind, one.site) == ("units of a table", "b")
    assert one.text == f"b: the values of table thickness are about {words} those of other sites; its units may differ."


def test_units_of_two_sites_and_of_a_mixed_table(bare):
    two = bare.select(sites=["a", "b"])
    table = brains(two)
    table[two.sites == "a"] *= 1000
    assert [(one.kind, one.site) for one in found(two, table)] == [("units of a table", "b")]  # the smaller one
    size = 1.5e6 * (1 + 0.05 * np.random.default_rng(0).normal(size=len(bare)))
    assert found(bare, brains(bare).assign(eTIV=size)) == []
    for factor in (0.5, 2, 3, 30):  # not a power of ten
        table = brains(bare)
        table[bare.sites == "b"] *= factor
        assert [one for one in found(bare, table) if one.kind == "units of a table"] == []


def test_repeated_rows(bare):
    table = brains(bare)
    table.iloc[50], table.iloc[7] = table.iloc[2], table.iloc[2]
    table.iloc[[10, 11]] = np.nan  # no rows are not the same row
    first, second = (one for one in found(bare, table) if one.kind == "same row")
    names = bare.subjects
    assert (first.subjects, second.subjects) == ((names[2], names[7]), (names[2], names[50]))
    assert second.site == bare.sites[2] and second.numbers["there"] == bare.sites[50]
    assert second.text.startswith(
        f"{names[2]} ({bare.sites[2]}) and {names[50]} ({bare.sites[50]}) have the same values in table"
    )
    assert not any(name in second.anonymous for name in names)
    inclusion = check_cohort(bare.with_tables({"thickness": table})).inclusion.set_index("subject")
    assert "have the same values" in inclusion.loc[names[7], "reason"]
    few = pd.DataFrame({"hole": np.arange(len(bare)) % 2, "side": 1.0 * (np.arange(len(bare)) % 3 > 0)}, index=names.tolist())
    assert "same row" not in {one.kind for one in found(bare, few[["hole"]])}


def test_failed_segmentations(bare):
    table, area = brains(bare), 300 * brains(bare, 1)
    table.iloc[5, :8] *= 0.5
    table.iloc[9, :2] *= 0.5  # two odd regions are not a failure
    table.iloc[20] *= 1.1  # nor is a large brain
    area.iloc[5] *= 0.4
    area.iloc[44, 3:12] = 0
    gaps = table.mask(np.random.default_rng(0).random(table.shape) < 0.1)
    for each in (table, gaps):
        first, second = found(bare, each, area=area)
        assert (first.kind, first.subjects, second.subjects) == (
            "failed segmentation",
            (bare.subjects[5],),
            (bare.subjects[44],),
        )
        assert set(first.numbers["counts"]) == {"thickness", "area"} and second.numbers["counts"] == {"area": "9 of 30"}
    assert second.text == (
        f"{bare.subjects[44]} ({bare.sites[44]}): many columns are out of range at once (table area 9 of 30); its segmentation "
        "may have failed."
    )
    assert bare.subjects[44] not in second.anonymous


def test_tables_that_disagree_on_a_column_that_both_have(bare):
    size = np.random.default_rng(0).normal(1.5e6, 1e5, len(bare))
    swapped = size.copy()
    swapped[[3, 60]] = swapped[[60, 3]]
    first, second = brains(bare).assign(eTIV=size, BrainSegVolNotVent=size / 1.2), 300 * brains(bare, 1)
    findings = found(bare, first, area=second.assign(eTIV=swapped, BrainSegVolNotVent=swapped / 1.2))
    assert [(one.kind, one.subjects) for one in findings] == [("tables disagree", (bare.subjects[i],)) for i in (3, 60)]
    assert findings[0].text == (
        f"Subject {bare.subjects[3]} ({bare.sites[3]}) has eTIV {size[3]:g} in table thickness and {size[60]:g} in table area: "
        "one of the rows may be that of another subject."
    )
    assert bare.subjects[3] not in findings[0].anonymous
    assert found(bare, first, area=second.assign(eTIV=size)) == []
    assert found(bare, first, other=brains(bare, 2)) == []  # columns of the same name, but of something else


def both_sides(cohort, seed=0):
    """Areas of 12 regions of each hemisphere; some are larger on the left, some on the right, as in all people."""
    rng = np.random.default_rng(seed)
    left = rng.uniform(500, 3000, 12) * np.exp(rng.normal(0, 0.1, (len(cohort), 12)))
    right = left * np.exp(rng.normal(0, 0.1, 12) + rng.normal(0, 0.05, (len(cohort), 12)))
    columns = [f"{side}_r{i}_area" for side in ("lh", "rh") for i in range(12)]
    return pd.DataFrame(np.hstack([left, right]), index=cohort.subjects.tolist(), columns=columns)


@pytest.mark.parametrize("site", ["a", "b"])
def test_hemispheres_that_are_exchanged_at_a_site(bare, site):
    table = both_sides(bare)
    assert found(bare, table) == []
    here = bare.sites == site
    table[here] = np.hstack([table[here].to_numpy()[:, 12:], table[here].to_numpy()[:, :12]])
    (one,) = found(bare, table)
    assert one.text == (
        f"{site}: left and right of table thickness differ the other way round than at other sites; the hemispheres may be "
        "exchanged."
    )
    flipped = table.set_axis([{"l": "Left-", "r": "Right-"}[each[0]] + each[3:] for each in table], axis=1)
    assert [each.kind for each in found(bare, flipped)] == ["hemispheres of a table"]
    two = bare.select(sites=["a", "b"])
    assert [each.site for each in found(two, table)] == ["b"]  # which of two is not known; that with fewer subjects
    assert found(bare.select(sites=[site]), table) == []


def test_a_row_that_is_repeated_in_one_hemisphere(bare):
    table = both_sides(bare)
    table.iloc[70, 12:] = table.iloc[4, 12:]
    (one,) = found(bare, table)
    assert one.subjects == (bare.subjects[4], bare.subjects[70])
    assert "have the same values in table thickness, right hemisphere: a row may be repeated" in one.text
    table.iloc[70] = table.iloc[4]
    (one,) = found(bare, table)
    assert "in table thickness: a row may be repeated" in one.text


def test_units_of_some_columns_at_a_site():
    cohort = make_cohort("tiny", sizes={name: 20 for name in "abcde"}, seed=3, **NOISE)
    table = brains(cohort)
    table.loc[cohort.sites == "c", COLUMNS[:12]] *= 1e-3
    table.loc[cohort.sites == "e", COLUMNS[20]] *= 1e6
    first, second = found(cohort, table)
    assert first.numbers["columns"] == COLUMNS[:12] and first.site == "c"
    assert first.text.startswith("c: the values of lh_r0_thickness, lh_r1_thickness, ")
    assert first.text.endswith("and 6 more in table thickness are about 1/1000 of those of other sites; their unit may differ.")
    assert second.text == (
        "e: the values of lh_r20_thickness in table thickness are about 1000000 times those of other sites; their unit may "
        "differ."
    )
    apart = brains(cohort)
    apart[COLUMNS[3]] *= np.exp(np.random.default_rng(0).normal(0, 2, 5))[np.unique(cohort.sites, return_inverse=True)[1]]
    assert found(cohort, apart) == []  # sites that do not agree anyway


def test_another_unit_is_no_disagreement_of_two_tables(bare):
    table = brains(bare)
    other = table.rename(columns=lambda name: name.replace("_thickness", "_x")).assign(lh_r0_thickness=table["lh_r0_thickness"])
    metres = table.copy()
    metres[bare.sites == "b"] /= 1000
    assert [one.kind for one in found(bare, metres, other=other)] == ["units of a table"]


def test_codes_and_values_of_patients_at_both_ends(bare):
    rng = np.random.default_rng(0)
    patients = bare.labels == 1
    codes = np.where(patients, rng.choice([1.0, 3.0], len(bare)), 2.0)
    ends = np.where(patients, rng.choice([-3.0, 3.0], len(bare)), 0.0) + rng.normal(0, 0.5, len(bare))
    for values in (codes, ends):
        (one,) = found(bare, brains(bare).assign(values=values))
        assert (one.kind, one.numbers["column"]) == ("separating table", "values")
        assert found(replace(bare, labels=rng.permutation(bare.labels)), brains(bare).assign(values=values)) == []


def test_columns_that_separate_the_classes_only_together(bare):
    rng = np.random.default_rng(0)
    noise = rng.normal(size=len(bare))
    (one,) = found(bare, brains(bare).assign(sum=noise + bare.labels, noise=noise))
    assert (one.kind, one.severity) == ("whole table separates", "finding")
    assert one.text.startswith("The columns of table thickness together separate patients from controls almost without error.")
    cohort = bare.with_tables({"thickness": brains(bare).assign(sum=noise + bare.labels, noise=noise)})
    assert proxies(cohort)["passed"]  # a question, as strong markers of a disease may do as much
    wide = pd.DataFrame(rng.normal(size=(len(bare), 400)), index=bare.subjects.tolist())
    assert found(bare, wide) == []  # more columns than subjects


def proxies(cohort):
    (result,) = [one for one in leakage_checks(cohort) if one["check"] == "no label proxy among the tables"]
    return result


def test_a_column_that_separates_the_classes(bare):
    rng = np.random.default_rng(0)
    shift = {"a": 0, "b": 100, "c": -40}
    score = bare.labels + rng.normal(0, 0.2, len(bare))
    within = score + np.array([shift[one] for one in bare.sites.tolist()])  # only inside sites
    table = brains(bare).assign(score=score, within=within)
    (one,) = found(bare, table)
    assert one.kind == "separating table" and one.numbers["column"] in ("score", "within") and one.numbers["more"] == 1
    assert "of table thickness, and 1 other column likewise, separates patients from controls as only a" in one.text
    cohort = bare.with_tables({"thickness": table})
    assert one in check_cohort(cohort).findings and not proxies(cohort)["passed"]
    assert "of table thickness separates patients from controls as a label proxy does" in proxies(cohort)["detail"]
    healthy = bare.with_tables({"thickness": brains(bare)})
    assert proxies(healthy)["passed"] and "30 columns checked" in proxies(healthy)["detail"]
    assert "no label proxy among the tables" not in {one["check"] for one in leakage_checks(bare)}
    assert found(replace(bare, labels=rng.permutation(bare.labels)), table) == []
    assert found(replace(bare, labels=np.full(len(bare), -1)), table) == []
    (alone,) = found(bare, brains(bare).assign(score=-score))
    assert alone.text.startswith("Column score of table thickness separates patients")


@given(st.integers(0, 10**6))
@settings(max_examples=20, deadline=None)
def test_separating_columns_are_those_with_such_an_auc(seed):
    """An independent oracle: the AUC of each column, over the subjects who have a value."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 2, 80)
    effect = rng.uniform(0, 3, 6)
    values = np.round(labels[:, None] * effect + rng.normal(size=(80, 6)), 1)  # with ties
    values[rng.random(values.shape) < 0.1] = np.nan
    table = pd.DataFrame(values, columns=list("abcdef"))
    expected = {}
    for column in table:
        has = table[column].notna().to_numpy()
        n, m = int((labels[has] == 1).sum()), int((labels[has] == 0).sum())
        least = max(0.35, min(0.45, 4 * np.sqrt((n + m + 1) / (12 * n * m))))
        values = table[column][has].reset_index(drop=True)
        groups = (
            values if values.nunique() <= 4 else pd.qcut(values, max(3, len(values) // 20), labels=False, duplicates="drop")
        )
        rates = pd.Series(labels[has]).groupby(groups).transform("mean")
        distance = max(abs(auc(labels[has], each.to_numpy(dtype=float)) - 0.5) for each in (values, rates))
        if distance > least:
            expected[column] = distance
    assert separating_columns(table, labels, np.full(80, "x")) == sorted(expected, key=lambda one: -expected[one])


def test_missing_rows_and_gaps_that_tell_the_label(bare):
    patients = bare.labels == 1
    table = brains(bare)
    table[patients & (np.random.default_rng(0).random(len(bare)) < 0.7)] = np.nan
    cohort = bare.with_tables({"thickness": table})
    (one,) = missing_by_label(cohort)
    assert one.kind == "table missing by label" and one.numbers["controls"] == 0 and one.numbers["patients"] > 50
    assert one.text.startswith("Table thickness is missing for 0 % of controls and ")
    (result,) = [each for each in leakage_checks(cohort) if each["check"] == "missingness does not reveal the label"]
    assert not result["passed"] and one in check_cohort(cohort).findings
    table = brains(bare)
    table.loc[patients, COLUMNS[4]], table.loc[~patients, COLUMNS[7:9]] = np.nan, np.nan
    (one,) = missing_by_label(bare.with_tables({"thickness": table}))
    assert one.kind == "table gaps by label" and one.numbers["more"] == 2
    assert one.text.endswith(", and 2 other columns likewise, which reveals the label.")
    table = brains(bare)
    table[bare.sites == "b"] = np.nan  # a site without structural scans tells the site, not the label
    assert missing_by_label(bare.with_tables({"thickness": table})) == []


def test_findings_about_tables_survive_a_file(bare, tmp_path):
    table = brains(bare).assign(none=np.nan, score=bare.labels)
    table.iloc[5, :8] *= 0.5
    table.iloc[7] = table.iloc[2]
    checked = bare.with_tables({"thickness": table}).with_findings(found(bare, table))
    kinds = {"empty columns", "same row", "separating table", "failed segmentation"}
    assert {one.kind for one in checked.findings} == kinds
    loaded = type(bare).load(checked.save(tmp_path / "c.cohort"))
    assert [one.text for one in loaded.findings] == [one.text for one in checked.findings]
    assert all(read_finding(one._asdict()).anonymous == one.anonymous for one in checked.findings)
