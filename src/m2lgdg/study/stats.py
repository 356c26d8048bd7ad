"""Statistics of the paper's two tables: site scores over seeds, macro average over sites, paired tests with Holm correction.

Pure functions of tables. `cell_scores` turns predictions into scores; the others take scores, so that they also work on
published ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy.special import stdtr, stdtrit  # of Student's t; importing scipy.stats takes a second

from m2lgdg.metrics import METRICS, THRESHOLD, evaluate

if TYPE_CHECKING:
    from pandas.core.groupby import SeriesGroupBy

CELL = ["method", "variant", "seed", "target"]
BALANCED = "balanced ACC"  # mean of SEN and SPE
MIN_PER_CLASS = 5  # patients and controls that a target site needs to count in means and tests
FLAT = 0.005  # sd of probabilities at a site, below which they are as good as constant
CHANCE = "prior"  # constant by design
NORMAL = 1.959963984540054  # 97.5th percentile


def half_interval(sd: float, count: int) -> float:
    """Half the width of the 95 % t interval of a mean over `count` sites or trainings with this sd."""
    return float(stdtrit(count - 1, 0.975) * sd / np.sqrt(count))


def cell_scores(predictions: pd.DataFrame, metrics: Sequence[str] = METRICS) -> pd.DataFrame:
    """Scores of a predictions table, one row per cell and metric (method, variant, seed, target, metric, value)."""
    rows = []
    for key, group in predictions.groupby(CELL, sort=False):
        wanted = {*metrics, "SEN", "SPE"} - {BALANCED}
        values = evaluate(group["label"].to_numpy(), group["proba"].to_numpy(), metrics=sorted(wanted))
        values[BALANCED] = (values["SEN"] + values["SPE"]) / 2
        rows += [(*key, metric, values[metric]) for metric in metrics]
    return pd.DataFrame(rows, columns=[*CELL, "metric", "value"])


def class_counts(predictions: pd.DataFrame) -> pd.DataFrame:
    """Labelled patients and controls of each target site, in the order of the predictions."""
    subjects = predictions.drop_duplicates(["target", "subject"])
    classes = {"patients": subjects["label"] == 1, "controls": subjects["label"] == 0}
    return pd.DataFrame(classes).groupby(subjects["target"], sort=False).sum()


def counted_targets(predictions: pd.DataFrame, least: int = MIN_PER_CLASS) -> list[str]:
    """Target sites with enough patients and controls to count in means and tests."""
    counts = class_counts(predictions)
    return [str(target) for target in counts.index[counts.min(axis=1) >= max(least, 1)]]


def min_per_class(study: Mapping[str, Any]) -> int:
    """The key of that name in a study.json; the default if an earlier version wrote it, or if it is damaged."""
    value = study.get("min_per_class")
    return value if isinstance(value, int) and value > 0 else MIN_PER_CLASS


class Flat(NamedTuple):
    """Target sites at which decisions are uninformative: nearly constant probabilities, or all called the same."""

    constant: list[str]
    patients: list[str]
    controls: list[str]


def flat_predictions(predictions: pd.DataFrame, least: int = MIN_PER_CLASS) -> dict[tuple[str, str], Flat]:
    """Methods and variants, but for the one at chance, with such sites among those that count; seeds are averaged."""
    learned = predictions["target"].isin(counted_targets(predictions, least)) & (predictions["method"] != CHANCE)
    grouped = over_seeds(predictions[learned]).groupby(["method", "variant", "target"], sort=False)["proba"]
    table = grouped.agg(lowest="min", highest="max").assign(sd=grouped.std(ddof=0))
    found: dict[tuple[str, str], Flat] = {}
    for (method, variant, target), own in table.to_dict("index").items():
        sites = found.setdefault((method, variant), Flat([], [], []))
        told = (own["sd"] < FLAT, own["lowest"] >= THRESHOLD, own["highest"] < THRESHOLD)
        for names, here in zip(sites, told, strict=True):
            names += [target] * bool(here)
    return {key: sites for key, sites in found.items() if any(sites)}


def over_seeds(predictions: pd.DataFrame) -> pd.DataFrame:
    """Mean probability over seeds by method, variant, target and subject; subjects of unknown label are left out."""
    grouped = predictions[predictions["label"] >= 0].groupby(["method", "variant", "target", "subject"], sort=False)
    table: pd.DataFrame = grouped.agg(label=("label", "first"), proba=("proba", "mean")).reset_index()
    return table


def site_scores(scores: pd.DataFrame) -> pd.DataFrame:
    """Mean and sd (ddof 1) over seeds by method, variant, target and metric; undefined scores do not count."""
    grouped = scores.groupby(["method", "variant", "target", "metric"], sort=False)["value"]
    return grouped.agg(mean="mean", seeds="count").assign(sd=_deviations(grouped))[["mean", "sd", "seeds"]].reset_index()


def macro_scores(sites: pd.DataFrame) -> pd.DataFrame:
    """Unweighted mean of the site means over target sites, with its sd over sites (ddof 1)."""
    grouped = sites.groupby(["method", "variant", "metric"], sort=False)["mean"]
    return grouped.agg(mean="mean", sites="count").assign(sd=_deviations(grouped))[["mean", "sd", "sites"]].reset_index()


def _deviations(grouped: SeriesGroupBy[Any, Any]) -> list[float]:
    """Standard deviation (ddof 1) of each group without its NaN, in the order of the groups; NaN for fewer than two values."""
    defined = (values[~np.isnan(values)] for values in (group.to_numpy(dtype=np.float64) for _, group in grouped))
    return [float(values.std(ddof=1)) if len(values) > 1 else np.nan for values in defined]


def paired_tests(sites: pd.DataFrame, best: tuple[str, str], others: Iterable[tuple[str, str]] | None = None) -> pd.DataFrame:
    """Paired t-tests of `best` against each other (method, variant), by metric: mean difference, t, p and Holm-adjusted p.

    Sites at which either score is undefined are left out; the correction is over the comparisons within a metric.
    """
    tables = {
        metric: group.pivot(index="target", columns=["method", "variant"], values="mean")
        for metric, group in sites.groupby("metric", sort=False)
    }
    rows = []
    named = None if others is None else list(others)  # an iterator could be read only once
    for metric, table in tables.items():
        compared = [key for key in (table.columns if named is None else named) if key != best and key in table.columns]
        tests = [(key, *paired_test(table[best], table[key])) for key in compared]
        adjusted = holm([p for *_, p in tests])
        rows += [(*key, metric, delta, t, n, p, q) for (key, delta, t, n, p), q in zip(tests, adjusted, strict=True)]
    return pd.DataFrame(rows, columns=["method", "variant", "metric", "delta", "t", "sites", "p", "p_holm"])


def training_differences(scores: pd.DataFrame, method: str) -> pd.DataFrame:
    """A method minus each of its variants, paired by training: mean, half-width of its 95 % t interval, number of pairs.

    Trainings with the same site and seed are a pair; the mean is that of the site means. The interval uses the pooled variance
    within sites: it covers randomness in training at these sites, not differences between sites. It is NaN with one pair per
    site or with identical trainings. The table is empty if the method itself was not run.
    """
    rows_of_method = scores[scores["method"] == method]
    table = rows_of_method.pivot(index=["metric", "target", "seed"], columns="variant", values="value")
    rows = []
    variants = dict.fromkeys(rows_of_method["variant"][rows_of_method["variant"] != ""])
    for variant in variants if "" in table else []:
        for metric, pairs in (table[""] - table[variant]).dropna().groupby(level="metric", sort=False):
            sites = pairs.groupby(level="target")
            means, counts, freedom = sites.mean(), sites.count(), len(pairs) - sites.ngroups
            half = np.nan
            if freedom > 0 and not np.allclose(pairs, 0, rtol=0, atol=1e-12):
                variance = float(((pairs - sites.transform("mean")) ** 2).sum()) / freedom
                half = float(stdtrit(freedom, 0.975) * np.sqrt(variance * (1 / counts).sum()) / len(means))
            rows.append((variant, metric, float(means.mean()), half, len(pairs)))
    return pd.DataFrame(rows, columns=["variant", "metric", "mean", "half", "trainings"])


def paired_test(first: pd.Series, second: pd.Series) -> tuple[float, float, int, float]:
    """Mean difference of two scores over sites, t, number of sites with both, and the two-sided p value."""
    difference = first.to_numpy() - second.to_numpy()
    difference = difference[~np.isnan(difference)]
    count = len(difference)
    if count < 2 or np.ptp(difference) < 1e-12:  # t is undefined for identical differences
        return float(difference.mean()) if count else np.nan, np.nan, count, np.nan
    t = float(difference.mean() / (difference.std(ddof=1) / np.sqrt(count)))
    return float(difference.mean()), t, count, float(2 * stdtr(count - 1, -abs(t)))


def holm(p_values: Sequence[float]) -> npt.NDArray[np.float64]:
    """Holm's step-down adjusted p values; NaN stays NaN and is not counted as a comparison."""
    p = np.asarray(p_values, dtype=np.float64)
    adjusted = np.full(len(p), np.nan)
    order = [i for i in np.argsort(p) if not np.isnan(p[i])]
    largest = 0.0
    for rank, i in enumerate(order):
        largest = max(largest, min(1.0, (len(order) - rank) * p[i]))
        adjusted[i] = largest
    return adjusted
