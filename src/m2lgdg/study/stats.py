"""From predictions to the paper's two tables: per site over seeds, macro over sites, paired tests over sites with Holm.

Pure functions of tables: `site_scores` turns predictions into scores, the others only see scores, so that published
scores can be put through them too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy.stats import t as student
from scipy.stats import ttest_rel

from m2lgdg.metrics import METRICS, evaluate

CELL = ["method", "variant", "seed", "target"]


def half_interval(sd: float, count: int) -> float:
    """Half the width of the 95 % t interval of a mean over so many sites or trainings, from the sd over them."""
    return float(student.ppf(0.975, count - 1) * sd / np.sqrt(count))


def cell_scores(predictions: pd.DataFrame, metrics: Sequence[str] = METRICS) -> pd.DataFrame:
    """One row a cell and metric (method, variant, seed, target, metric, value) from the predictions table."""
    rows = []
    for key, part in predictions.groupby(CELL, sort=False):
        values = evaluate(part["label"].to_numpy(), part["proba"].to_numpy())
        rows += [(*key, metric, values[metric]) for metric in metrics]
    return pd.DataFrame(rows, columns=[*CELL, "metric", "value"])


def site_scores(scores: pd.DataFrame) -> pd.DataFrame:
    """Mean and sd (ddof 1) over seeds by method, variant, target and metric; seeds where it is undefined do not count."""
    grouped = scores.groupby(["method", "variant", "target", "metric"], sort=False)["value"]
    return grouped.agg(mean="mean", sd=lambda values: values.std(ddof=1), seeds="count").reset_index()


def macro_scores(sites: pd.DataFrame) -> pd.DataFrame:
    """Unweighted mean over target sites of the per-site means, and its sd over sites (ddof 1)."""
    grouped = sites.groupby(["method", "variant", "metric"], sort=False)["mean"]
    table: pd.DataFrame = grouped.agg(macro="mean", sd=lambda values: values.std(ddof=1), sites="count").reset_index()
    return table.rename(columns={"macro": "mean"})


def paired_tests(sites: pd.DataFrame, best: tuple[str, str], others: Iterable[tuple[str, str]] | None = None) -> pd.DataFrame:
    """`best` against each other (method, variant), by metric: mean difference over sites, paired t, p and Holm's p.

    Sites on which either has no defined score are left out; the correction is over the comparisons within a metric.
    """
    tables = {
        metric: part.pivot(index="target", columns=["method", "variant"], values="mean")
        for metric, part in sites.groupby("metric", sort=False)
    }
    rows = []
    named = None if others is None else list(others)  # read once, asked for every metric
    for metric, table in tables.items():
        compared = [key for key in (table.columns if named is None else named) if key != best and key in table.columns]
        tests = [(key, *_paired(table[best], table[key])) for key in compared]
        adjusted = holm([p for *_, p in tests])
        rows += [(*key, metric, delta, t, n, p, q) for (key, delta, t, n, p), q in zip(tests, adjusted, strict=True)]
    return pd.DataFrame(rows, columns=["method", "variant", "metric", "delta", "t", "sites", "p", "p_holm"])


def training_differences(scores: pd.DataFrame, method: str) -> pd.DataFrame:
    """A method minus each of its variants, training by training (`cell_scores`): mean, half its 95 % t interval, trainings.

    Trainings of one site and seed are a pair; the mean is that of the sites' means. The interval comes from the spread inside
    sites alone, one variance for all: it tells what chance in training leaves open at these sites, not what other sites would
    say. With one pair a site, or where all are the same trainings, it is NaN. No rows where the whole was not run.
    """
    own = scores[scores["method"] == method]
    table = own.pivot(index=["metric", "target", "seed"], columns="variant", values="value")
    rows = []
    for variant in dict.fromkeys(own["variant"][own["variant"] != ""]) if "" in table else []:
        for metric, pairs in (table[""] - table[variant]).dropna().groupby(level="metric", sort=False):
            sites = pairs.groupby(level="target")
            means, counts, freedom = sites.mean(), sites.count(), len(pairs) - sites.ngroups
            half = np.nan
            if freedom > 0 and not np.allclose(pairs, 0, rtol=0, atol=1e-12):
                variance = float(((pairs - sites.transform("mean")) ** 2).sum()) / freedom
                half = float(student.ppf(0.975, freedom) * np.sqrt(variance * (1 / counts).sum()) / len(means))
            rows.append((variant, metric, float(means.mean()), half, len(pairs)))
    return pd.DataFrame(rows, columns=["variant", "metric", "mean", "half", "trainings"])


def _paired(first: pd.Series, second: pd.Series) -> tuple[float, float, int, float]:
    both = pd.concat([first, second], axis=1).dropna().to_numpy()
    difference = both[:, 0] - both[:, 1]
    if len(both) < 2 or np.ptp(difference) < 1e-12:  # a t of identical differences is not defined
        return float(difference.mean()) if len(both) else np.nan, np.nan, len(both), np.nan
    test = ttest_rel(both[:, 0], both[:, 1])
    return float(difference.mean()), float(test.statistic), len(both), float(test.pvalue)


def holm(p_values: Sequence[float]) -> npt.NDArray[np.float64]:
    """Holm's step-down adjusted p values; NaN stays NaN and does not count as a comparison."""
    p = np.asarray(p_values, dtype=np.float64)
    adjusted = np.full(len(p), np.nan)
    order = [i for i in np.argsort(p) if not np.isnan(p[i])]
    largest = 0.0
    for rank, i in enumerate(order):
        largest = max(largest, min(1.0, (len(order) - rank) * p[i]))
        adjusted[i] = largest
    return adjusted
