"""Subgroups: every number against a slow loop; hidden sizes stay hidden from anyone who can subtract."""

from itertools import product

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from m2lgdg import Cohort, InputError
from m2lgdg.report.subgroups import SMALL, WITHHELD, subgroup_table, suppressed
from m2lgdg.report.tables import render
from m2lgdg.study.description import LEAST
from m2lgdg.study.stats import over_seeds

SERIES = np.random.default_rng(0).normal(size=(4, 2)).astype(np.float32)
COLUMNS = ["method", "variant", "seed", "target", "subject", "label", "proba"]


def cohort_of(sites, labels, **phenotypes):
    subjects = [f"p{i:03d}" for i in range(len(sites))]
    table = pd.DataFrame(phenotypes, index=subjects) if phenotypes else pd.DataFrame()
    return Cohort([SERIES] * len(sites), subjects, sites, labels, ("r1", "r2"), table)


def predicted(cohort, proba, seed=0, method="fc", variant=""):
    rows = zip(cohort.sites.tolist(), cohort.subjects.tolist(), cohort.labels.tolist(), proba, strict=True)
    return pd.DataFrame([(method, variant, seed, *row) for row in rows], columns=COLUMNS)


def rows_of(table):
    return {row[0]: dict(zip(table.header[1:], row[1:], strict=True)) for row in table.shown}


@pytest.fixture(scope="module")
def made():
    """90 subjects of three sites with everything in their phenotypes, two seeds; and another method that must not count."""
    rng = np.random.default_rng(1)
    sites = np.repeat(["A", "B", "C"], [18, 22, 50])
    labels = rng.integers(0, 2, 90)
    labels[5] = -1
    sex = np.where(np.arange(90) % 3 == 0, 2.0, 1.0)
    sex[40:52] = np.nan
    age = rng.uniform(8, 28, 90)
    age[:3], age[3] = 12.0, 18.0  # edges belong to the band above
    eyes = np.where(np.arange(90) < 45, 1.0, 2.0)
    cohort = cohort_of(sites, labels, sex=sex, age=age, EYE_STATUS_AT_SCAN=eyes, func_mean_fd=rng.gamma(2.0, 0.1, 90))
    first, second = (np.clip(0.5 + 0.2 * (labels - 0.5) + 0.25 * rng.normal(size=90), 0, 1) for _ in range(2))
    noise = predicted(cohort, rng.uniform(size=90), method="other")
    table = pd.concat([predicted(cohort, first), predicted(cohort, second, seed=1), noise])
    return cohort, table, (first + second) / 2


def slow_scores(cohort, proba, chosen):
    """The cells of a shown group, from the definitions."""
    who = [i for i in chosen if cohort.labels[i] >= 0]
    areas, variances = [], []
    for site in ("A", "B", "C"):
        patients = [proba[i] for i in who if cohort.sites[i] == site and cohort.labels[i] == 1]
        controls = [proba[i] for i in who if cohort.sites[i] == site and cohort.labels[i] == 0]
        if len(patients) >= 5 and len(controls) >= 5:
            wins = [1.0 if a > b else 0.5 if a == b else 0.0 for a, b in product(patients, controls)]
            areas.append(sum(wins) / len(wins))
            table = np.reshape(wins, (len(patients), len(controls)))  # DeLong: variances of the row and column means
            variances.append(table.mean(1).var(ddof=1) / len(patients) + table.mean(0).var(ddof=1) / len(controls))
    mean, half = (np.mean(areas), 1.959964 * np.sqrt(sum(variances)) / len(areas)) if areas else (np.nan, np.nan)
    right = {k: [(proba[i] >= 0.5) == bool(k) for i in who if cohort.labels[i] == k] for k in (0, 1)}
    return {
        "subjects": str(len(who)),
        "patients": str(len(right[1])),
        "AUC": f"{100 * sum(areas) / len(areas):.1f}" if areas else "-",
        "AUC 95 % interval": f"{100 * max(mean - half, 0):.1f} to {100 * min(mean + half, 1):.1f}" if areas else "-",
        "AUC sites": str(len(areas)),
        "SEN": f"{100 * sum(right[1]) / len(right[1]):.1f}",
        "SPE": f"{100 * sum(right[0]) / len(right[0]):.1f}",
        "ACC": f"{100 * sum(right[0] + right[1]) / len(who):.1f}",
    }, (mean, half)


def test_every_shown_group_is_scored_as_a_loop_does(made):
    cohort, table, proba = made
    shown = rows_of(subgroup_table(over_seeds(table), cohort, ("fc", "")))
    sex, age, eyes, motion = (cohort.phenotypes[name] for name in ("sex", "age", "EYE_STATUS_AT_SCAN", "func_mean_fd"))
    labelled = cohort.labels >= 0
    cut = np.quantile(motion[labelled], [1 / 3, 2 / 3])
    groups = {
        "all": np.full(90, True),
        "sex: female": sex == 2,
        "sex: male": sex == 1,
        "sex: unknown": sex.isna(),
        "age: under 12": age < 12,
        "age: 12 to 17": (age >= 12) & (age < 18),
        "age: 18 to 29": (age >= 18) & (age < 30),
        "eyes: closed": eyes == 2,
        "eyes: open": eyes == 1,
        "motion: lowest third": motion < cut[0],
        "motion: middle third": (motion >= cut[0]) & (motion < cut[1]),
        "motion: highest third": motion >= cut[1],
        "site: under 20 subjects": cohort.sites == "A",
        "site: 20 to 49 subjects": cohort.sites == "B",
        "site: 50 subjects or more": cohort.sites == "C",
    }
    assert list(shown) == list(groups)
    slow = {name: slow_scores(cohort, proba, np.flatnonzero(mask)) for name, mask in groups.items()}
    sizes = {name: int((np.asarray(mask) & labelled).sum()) for name, mask in groups.items() if "unknown" not in name}
    differences = []
    for name, (cells, (mean, half)) in slow.items():
        kind = name.partition(":")[0]
        reference = max((other for other in sizes if other.startswith(f"{kind}:")), key=sizes.get, default="all")
        other, others = slow[reference][1]
        middle, around = 100 * (mean - other), 100 * np.hypot(half, others)  # the variances of different people add up
        text = "-" if np.isnan(middle) else f"{middle:+.1f} ({middle - around:+.1f} to {middle + around:+.1f})"
        text = "-" if name == "all" else "reference" if name == reference else text
        assert shown[name] == cells | {"AUC difference (95 % interval)": text}, name
        differences.append(text)
    assert differences.count("reference") == 5 and sum("to" in text for text in differences) >= 6
    assert shown["all"]["AUC sites"] == "3"


def test_what_is_not_known_is_not_shown():
    rng = np.random.default_rng(2)
    labels = np.arange(40) % 2
    bare = cohort_of(["A"] * 20 + ["B"] * 20, labels)
    table = subgroup_table(over_seeds(predicted(bare, rng.uniform(size=40))), bare, ("fc", ""))
    assert [row[0] for row in table.shown] == ["all"]  # both sites are of one size
    words = cohort_of(["A"] * 20 + ["B"] * 20, labels, eyes=["shut"] * 15 + ["fixation"] * 13 + [""] * 12)
    table = subgroup_table(over_seeds(predicted(words, rng.uniform(size=40))), words, ("fc", ""))
    assert [row[:2] for row in table.shown[1:]] == [["eyes: fixation", "13"], ["eyes: shut", "15"], ["eyes: unknown", "12"]]
    assert "| eyes: shut | 15 |" in render([table], "markdown")


def test_one_small_group_takes_the_next_smallest_with_it():
    labels = np.arange(60) % 2
    sex = [1.0] * 31 + [2.0] * 22 + [np.nan] * 7
    cohort = cohort_of(["A"] * 30 + ["B"] * 30, labels, sex=sex)
    shown = rows_of(subgroup_table(over_seeds(predicted(cohort, labels * 0.9)), cohort, ("fc", ""), hide_small=True))
    assert shown["sex: unknown"] == {"subjects": SMALL, "patients": SMALL} | dict.fromkeys(
        ("AUC", "AUC 95 % interval", "AUC sites", "SEN", "SPE", "ACC", "AUC difference (95 % interval)"), "-"
    )
    assert shown["sex: female"]["subjects"] == WITHHELD
    assert shown["sex: male"]["subjects"] == "31"
    assert shown["sex: male"]["AUC"] == "100.0"


def test_a_handful_of_subjects_has_no_table_and_no_group():
    cohort = cohort_of(["A"] * 9, [0, 1] * 4 + [1], sex=[1.0] * 5 + [2.0] * 4)
    table = subgroup_table(over_seeds(predicted(cohort, [0.5] * 9)), cohort, ("fc", ""), hide_small=True)
    assert table.shown == [["all", SMALL, SMALL, *["-"] * 7]]
    cohort = cohort_of(["A"] * 11, [0, 1] * 5 + [1], sex=[1.0] * 10 + [2.0])
    table = subgroup_table(over_seeds(predicted(cohort, [0.5] * 11)), cohort, ("fc", ""), hide_small=True)
    assert table.shown[1:] == [["sex: all groups", WITHHELD, WITHHELD, *["-"] * 7]]


def test_what_does_not_fit_is_an_error(made):
    cohort, table, _ = made
    with pytest.raises(InputError, match=r"no predictions of fc: odd for labelled subjects"):
        subgroup_table(over_seeds(table), cohort, ("fc", "odd"))
    with pytest.raises(InputError, match="subject p000 of the predictions is not in cohort"):
        subgroup_table(over_seeds(table), cohort.select(np.arange(1, 90)), ("fc", ""))


def possible(total, marks):
    """All sizes of hidden groups that an outsider who knows their sum and marks must think possible."""
    ranges = [range(1, LEAST) if mark == SMALL else range(LEAST, total + 1) for mark in marks[:-1]]
    for sizes in product(*ranges):
        last = total - sum(sizes)
        if (1 <= last < LEAST) if marks[-1] == SMALL else last >= LEAST:
            yield (*sizes, last)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.one_of(st.integers(1, 12), st.integers(1, 35)), min_size=2, max_size=5))
def test_no_hidden_size_can_be_computed(sizes):
    marks = suppressed(sizes)
    assert all(mark for size, mark in zip(sizes, marks, strict=True) if size < LEAST)
    if all(size >= LEAST for size in sizes):
        assert marks == [""] * len(sizes)
        return
    assert sum(bool(mark) for mark in marks) >= 2
    if set(marks) == {WITHHELD}:  # then neither the groups nor their number are shown
        return
    assert all((mark == SMALL) == (size < LEAST) for size, mark in zip(sizes, marks, strict=True))
    hidden = [i for i, mark in enumerate(marks) if mark]
    worlds = list(possible(sum(sizes[i] for i in hidden), [marks[i] for i in hidden]))
    assert tuple(sizes[i] for i in hidden) in worlds
    for column in zip(*worlds, strict=True):
        assert len(set(column)) > 1


def test_no_more_is_withheld_than_needed():
    assert suppressed([5, 40, 12, 90]) == [SMALL, "", WITHHELD, ""]
    assert suppressed([5, 6, 40]) == [SMALL, SMALL, ""]
    assert suppressed([9, 9, 40]) == [SMALL, SMALL, WITHHELD]  # 18 in two groups below 10 are 9 and 9
    assert suppressed([1, 1, 40]) == [SMALL, SMALL, WITHHELD]
    assert suppressed([1, 10]) == [WITHHELD, WITHHELD]


def test_a_labs_own_table_shows_small_groups_with_their_size():
    labels = np.arange(60) % 2
    cohort = cohort_of(["A"] * 30 + ["B"] * 30, labels, sex=[1.0] * 31 + [2.0] * 22 + [np.nan] * 7)
    shown = rows_of(subgroup_table(over_seeds(predicted(cohort, labels * 0.9)), cohort, ("fc", "")))
    assert [shown[f"sex: {name}"]["subjects"] for name in ("male", "female", "unknown")] == ["31", "22", "7"]
    assert shown["sex: unknown"]["SEN"] == shown["sex: unknown"]["SPE"] == "100.0"
    few = cohort_of(["A"] * 9, [0, 1] * 4 + [1], sex=[1.0] * 5 + [2.0] * 4)
    table = subgroup_table(over_seeds(predicted(few, [0.5] * 9)), few, ("fc", ""))
    assert [row[:2] for row in table.shown] == [["all", "9"], ["sex: female", "4"], ["sex: male", "5"]]
