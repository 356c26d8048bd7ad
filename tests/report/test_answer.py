"""The answer by site, and whether to believe it: verdicts, intervals and levels against numbers computed here another way."""

import json
import math

import numpy as np
import pandas as pd
import pytest
from scipy.stats import norm, t

from m2lgdg.metrics import auc
from m2lgdg.registry import METHODS
from m2lgdg.report.answer import answer, further_site
from m2lgdg.report.answer_figure import FAILED, answer_figure
from m2lgdg.report.contents import read_contents
from m2lgdg.report.operating import Adjusted
from m2lgdg.report.trust import checks, motion_status, site_levels

COLUMNS = ["method", "variant", "seed", "target", "subject", "label", "proba"]


def rows(method, site, decisions, labels, seed=0):
    proba = 1 / (1 + np.exp(-np.asarray(decisions)))
    return [
        (method, "", seed, site, f"{site}{i}", label, one) for i, (label, one) in enumerate(zip(labels, proba, strict=True))
    ]


def normal_site(shift, count, level=0.0):
    """Decisions whose classes are normal quantiles, apart by `shift`, so that every AUC is the same in each run."""
    quantiles = norm.ppf((np.arange(count) + 0.5) / count)
    return np.r_[quantiles + shift + level, quantiles + level], np.r_[np.ones(count, int), np.zeros(count, int)]


def contents_of(table, folder, **settings):
    folder.mkdir(exist_ok=True)
    pd.DataFrame(table, columns=COLUMNS).to_csv(folder / "predictions.csv", index=False)
    names = list(dict.fromkeys(row[0] for row in table))
    study = {"methods": names, "targets": list(dict.fromkeys(row[3] for row in table)), "seeds": [0], "name": "a study"}
    study |= {"method": {name: METHODS.declaration(name).fields for name in names}}
    (folder / "study.json").write_text(json.dumps(study | settings))
    return read_contents(folder)


@pytest.fixture
def contents(tmp_path):
    sites = {"large": (1.5, 60), "medium": (1.4, 40), "poor": (-0.1, 60), "small": (0.4, 6), "tiny": (2.0, 3)}
    sites |= {"perfect": (9.0, 8), "far": (1.5, 50)}
    table = [row for site, (shift, count) in sites.items() for row in rows("fc-svm", site, *normal_site(shift, count))]
    return contents_of(table, tmp_path / "study")


def test_sites_are_judged_by_their_intervals(contents):
    found = answer(contents)
    verdicts = {one.site: one.verdict for one in found.sites}
    assert verdicts == {
        **dict.fromkeys(("perfect", "large", "far", "medium"), "above chance"),
        "small": "too few to tell",
        "poor": "not above chance",
        "tiny": "not counted",
    }
    assert [one.site for one in found.sites] == ["perfect", "far", "large", "medium", "small", "poor", "tiny"]
    by_site = {one.site: one for one in found.sites}
    assert by_site["perfect"].area == 1 and math.isnan(by_site["perfect"].low)
    assert (by_site["poor"].patients, by_site["poor"].controls) == (60, 60)
    for site, one in by_site.items():
        own = contents.predictions[contents.predictions.target == site]
        assert one.area == pytest.approx(auc(own.label.to_numpy(), own.proba.to_numpy()))
    assert found.by_site == (
        "Above chance at 4 of 6 sites; not above chance, and below the other sites, at poor; too few subjects to tell at small."
    )


def test_a_constant_method_is_above_chance_nowhere(tmp_path):
    table = [row for site in "abc" for row in rows("fc-svm", site, np.zeros(20), [0, 1] * 10)]
    found = answer(contents_of(table, tmp_path / "study"))
    assert {one.verdict for one in found.sites} == {"too few to tell"} and "The interval includes chance." in found.answer


def test_the_figure_has_every_site_once_and_failing_ones_in_red(contents):
    figure = answer_figure(answer(contents), {("fc-svm", ""): 0})
    svg = figure.svg.decode()
    for site in ("large", "poor", "small", "tiny"):
        assert svg.count(f"{site}  ") == 1
    assert FAILED in svg and "not above chance: 1" in svg and "above chance: 4" in svg
    assert figure.page.count("<title>fc-svm, ") == 7 and "poor: AUC" in figure.page and "mean over sites" in svg


def test_the_interval_of_a_further_site(tmp_path):
    rng = np.random.default_rng(1)
    shifts = np.linspace(0.2, 1.8, 8)
    table = [row for i, shift in enumerate(shifts) for row in rows("fc-svm", f"s{i}", *normal_site(shift, 40))]
    contents = contents_of(table, tmp_path / "study")
    low, high = further_site(contents, ("fc-svm", ""))
    areas, within = [], []
    for i in range(8):
        own = contents.predictions[contents.predictions.target == f"s{i}"]
        p, y = own.proba.to_numpy(), own.label.to_numpy()
        areas.append(auc(y, p))
        drawn = []
        for _ in range(400):  # a bootstrap within classes instead of DeLong's variance
            some = np.r_[rng.choice(np.flatnonzero(y == 1), 40), rng.choice(np.flatnonzero(y == 0), 40)]
            drawn.append(auc(y[some], p[some]))
        within.append(np.var(drawn))
    between = np.var(areas, ddof=1) - np.mean(within)
    half = t.ppf(0.975, 7) * np.sqrt(between + np.var(areas, ddof=1) / 8)
    assert (low, high) == pytest.approx((np.mean(areas) - half, min(np.mean(areas) + half, 1)), abs=0.01)
    few = contents_of([row for row in table if row[3] in ("s0", "s1", "s2", "s3")], tmp_path / "few")
    assert further_site(few, ("fc-svm", "")) is None


def lines(contents):
    return {check.about: check for check in checks(contents, answer(contents))}


def test_a_site_at_another_level_is_told(tmp_path):
    levels = {"a": 0.0, "b": 0.0, "high": 2.5}
    table = [row for site, level in levels.items() for row in rows("fc-svm", site, *normal_site(1.0, 40, level - 0.5))]
    contents = contents_of(table, tmp_path / "study")
    found = {one.site: one for one in site_levels(contents, answer(contents))}
    assert [site for site, one in found.items() if one.off] == ["high"] and next(iter(found)) == "high"
    own = contents.predictions[contents.predictions.target == "high"].proba
    assert found["high"].predicted == pytest.approx(own.mean()) and found["high"].patients == 0.5
    line = lines(contents)["Level"]
    assert (
        line.status == "look"
        and "At 1 of 3 sites" in line.text
        and f"high: {100 * own.mean():.0f} instead of 50 %" in line.text
    )
    same = contents_of([row for row in table if row[3] != "high"], tmp_path / "same")
    assert lines(same)["Level"].status == "fine"


def test_what_is_not_known_is_said(contents):
    found = lines(contents)
    assert {name for name, check in found.items() if check.status == "not known"} == {"Leaks", "Head motion", "Data"}
    assert "Part of the AUC may be motion" in found["Head motion"].text


def test_leaks_prevalence_choice_and_seeds(tmp_path):
    table = []
    for site, patients in (("a", 10), ("b", 30)):
        labels = np.r_[np.ones(patients, int), np.zeros(40 - patients, int)]
        for seed in (0, 1):
            table += rows("m2lgdg", site, labels + np.sin(np.arange(40) * (seed + 1)), labels, seed)
        table += rows("phenotype-logistic", site, 3 * labels, labels)
    (tmp_path / "study").mkdir()
    (tmp_path / "study" / "checks.json").write_text('[{"check": "no subject on both sides", "passed": false, "detail": "x."}]')
    contents = contents_of(table, tmp_path / "study", seeds=[0, 1], inputs=["age"])
    found = lines(contents)
    assert found["Leaks"].status == "bad" and "1 of 1 checks failed" in found["Leaks"].text
    assert found["Proportion of patients"].text.startswith("25 to 75 % of the subjects of a site are patients.")
    assert "has an accuracy of 75 %" in found["Proportion of patients"].text
    assert found["Choice of the method"].status == "fine"  # the headline method, whatever its AUC
    assert found["Without a scan"].status == "bad" and "The scan adds nothing" in found["Without a scan"].text
    seeds = [
        contents.cell_scores.query("method == 'm2lgdg' and metric == 'AUC' and seed == @seed").value.mean() for seed in (0, 1)
    ]
    assert f"between {100 * min(seeds):.1f} and {100 * max(seeds):.1f} %" in found["Training again"].text
    once = contents_of([row for row in table if row[2] == 0], tmp_path / "once")
    assert lines(once)["Training again"].status == "look"
    several = [
        ("fc-svm", *row[1:]) if row[0] == "phenotype-logistic" else ("fc-logistic", *row[1:]) for row in table if row[2] == 0
    ]
    assert lines(contents_of(several, tmp_path / "several"))["Choice of the method"].status == "look"


@pytest.mark.parametrize(
    ("plain", "adjusted", "low", "motion", "status"),
    [
        (0.7, 0.69, 0.6, 0.55, "fine"),
        (0.7, 0.6, 0.52, 0.6, "look"),
        (0.7, 0.55, 0.48, 0.6, "bad"),
        (0.6, 0.58, 0.51, 0.7, "look"),
    ],
)
def test_motion_is_judged_by_what_it_takes_away(plain, adjusted, low, motion, status):
    assert motion_status(Adjusted(plain, adjusted, low, 0.9, motion, 0.1, 5, 100)) == status
