"""The motion-adjusted AUC is that of its definition, patient by patient, and removes what is motion alone."""

import numpy as np
import pandas as pd
import pytest

from m2lgdg.report.operating import adjusted_auc, motion_sentence, motion_table


def made(rng, effect, slope, sites=("A", "B", "C"), shift=0.0, size=60):
    """Predictions of sites that differ in level, and motion by subject; patients move `shift` more."""
    rows, motion = [], {}
    for s, site in enumerate(sites):
        for i in range(size + 10 * s):
            label = i % 2
            moved = rng.gamma(2.0, 0.1) + shift * label
            decision = 0.5 * s + effect * label + slope * moved + rng.normal()
            motion[f"{site}{i}"] = moved
            rows.append(("fc", "", site, f"{site}{i}", label, 1 / (1 + np.exp(-decision))))
    return pd.DataFrame(rows, columns=["method", "variant", "target", "subject", "label", "proba"]), pd.Series(motion)


def by_definition(table, motion):
    """Janes and Pepe: the mean over patients of the proportion of controls with a smaller residual; one site at a time."""
    decision = np.log(table["proba"] / (1 - table["proba"])).to_numpy()
    moved = motion.loc[table["subject"]].to_numpy()
    sick, sites = table["label"].to_numpy() == 1, table["target"].to_numpy()
    names = sorted(set(sites))
    design = np.column_stack([moved, *(sites == site for site in names)]).astype(float)  # a slope, and a level for each site
    slope = np.linalg.lstsq(design[~sick], decision[~sick], rcond=None)[0][0]
    areas = []
    for site in names:
        controls = [(decision - slope * moved)[i] for i in np.flatnonzero((sites == site) & ~sick)]
        places = []
        for i in np.flatnonzero((sites == site) & sick):
            residual = decision[i] - slope * moved[i]
            places.append(np.mean([residual > other for other in controls]))
        areas.append(np.mean(places))
    return areas


def test_it_is_the_mean_place_of_a_patient_among_controls_who_moved_as_much():
    table, motion = made(np.random.default_rng(0), effect=0.8, slope=4.0, shift=0.1)
    scores, areas = adjusted_auc(table, motion), by_definition(table, motion)
    assert scores.adjusted == pytest.approx(np.mean(areas), abs=1e-12)
    half = 4.302653 * np.std(areas, ddof=1) / np.sqrt(3)  # Student's t, two degrees of freedom
    assert (scores.low, scores.high) == pytest.approx((np.mean(areas) - half, min(np.mean(areas) + half, 1)), abs=1e-6)
    assert (scores.sites, scores.subjects) == (3, 60 + 70 + 80)


def test_what_is_motion_alone_is_chance_after_the_adjustment():
    table, motion = made(np.random.default_rng(1), effect=0.0, slope=12.0, shift=0.25, size=400)
    scores = adjusted_auc(table, motion)
    assert scores.plain > 0.75 and scores.motion > 0.85 and scores.correlation > 0.8
    assert scores.adjusted == pytest.approx(0.5, abs=0.04)


def test_a_decision_without_motion_is_left_alone():
    table, motion = made(np.random.default_rng(2), effect=1.0, slope=0.0, shift=0.2, size=400)
    scores = adjusted_auc(table, motion)
    assert scores.adjusted == pytest.approx(scores.plain, abs=0.02) and scores.plain > 0.7
    constant = adjusted_auc(table.assign(proba=0.5 + table["target"].map({"A": 0.013, "B": 0.017, "C": 0.1})), motion)
    assert (constant.plain, constant.adjusted, constant.correlation) == (0.5, 0.5, 0.0)
    flat = adjusted_auc(table, motion * 0 + 0.1)
    assert flat.adjusted == flat.plain and flat.motion == 0.5


def test_subjects_without_a_value_and_sites_of_one_class_are_left_out():
    table, motion = made(np.random.default_rng(3), effect=1.0, slope=1.0)
    motion["A0"] = np.nan
    one_class = table[(table["target"] != "B") | (table["label"] == 1)]
    scores = adjusted_auc(one_class, motion)
    assert (scores.sites, scores.subjects) == (2, 59 + 35 + 80)
    patients = table[table["label"] == 1]
    assert adjusted_auc(patients, motion) is None and motion_table(patients, [("fc", "")], motion) is None
    assert motion_sentence(patients, ("fc", ""), motion) == ""


def test_table_and_sentence_have_the_same_numbers():
    rng = np.random.default_rng(4)
    table, motion = made(rng, effect=1.0, slope=2.0, shift=0.1)
    other = table.assign(method="other", proba=rng.random(len(table)))
    both = pd.concat([other, table])
    shown = motion_table(both, [("other", ""), ("fc", "")], motion)
    assert [row[0] for row in shown.shown] == ["fc", "other"]  # the highest first
    scores = adjusted_auc(table, motion)
    low, high = 100 * scores.low, 100 * scores.high
    assert shown.shown[0][1:4] == [f"{100 * scores.plain:.1f}", f"{100 * scores.adjusted:.1f}", f"{low:.1f} to {high:.1f}"]
    sentence = motion_sentence(both, ("fc", ""), motion)
    assert f"is {100 * scores.adjusted:.1f} % (95 % interval {low:.1f} to {high:.1f})" in sentence
    assert motion_table(both, [("fc", "")], None) is None and motion_sentence(both, ("fc", ""), None) == ""
