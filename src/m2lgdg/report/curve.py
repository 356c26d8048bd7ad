"""Files of a learning curve: points, table and extrapolation as CSV, and the figure.

`m2lgdg curve` calls it with what `study.curve` computed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pandas as pd

from m2lgdg.data.spreadsheets import csv_text, unquoted_table
from m2lgdg.report.drawing import FAINT, WIDTH, Figure, Sheet, colour, draw, mark, short
from m2lgdg.storage import InputError, write_texts
from m2lgdg.study.curve import FURTHER, POINTS, Curve, Trend, summarise
from m2lgdg.study.predictions import need_same_subjects

EXTRAPOLATED = "An extrapolation assumes that the trend continues, with subjects from sites like these."


def write_curve(curve: Curve, to: str | Path) -> list[str]:
    """Write the files of a curve into its folder; returns their names."""
    figure = learning_figure(curve)
    texts: dict[str, str | bytes] = {
        "points.csv": csv_text(curve.points),
        "curve.csv": csv_text(curve.table),
        "trend.csv": csv_text(trend_table(curve)),
        f"{figure.name}.svg": figure.svg,
        f"{figure.name}.png": figure.png,
    }
    write_texts(to, texts)
    return list(texts)


def need_curves(folders: Sequence[Path], methods: Sequence[str]) -> None:
    """Refuse folders without a curve, or with one of these methods, before a curve is computed to be shown beside them."""
    owner: dict[str, str | Path] = dict.fromkeys(methods, "this curve")
    for folder in folders:
        other = stored_curve(folder)
        if other is None:
            raise InputError(f"{folder} has no points.csv; m2lgdg curve writes it.")
        for method in other.trends:
            if method in owner:
                raise InputError(f"{folder} and {owner[method]} both have {method}; one figure has each method once.")
            owner[method] = folder


def with_others(curve: Curve, own: Path, folders: Sequence[Path]) -> Curve:
    """The curve of a folder with the methods of those in others, which need the same subjects, labels and target sites."""
    points, targets = [curve.points], set(curve.points["target"])
    need_curves(folders, list(curve.trends))
    need_same_subjects([own, *folders])
    for folder in folders:
        other = stored_curve(folder)
        assert other is not None  # as need_curves has seen
        if unlike := sorted(targets ^ set(other.points["target"])):
            raise InputError(f"{folder} and this curve differ in their target sites ({unlike[0]}); both need the same.")
        points.append(other.points)
        parts = pd.concat([points[0], other.points]).groupby(["target", "size", "repeat"])  # these parts of source are the same
        if (parts[["subjects", "patients"]].nunique() > 1).any(axis=None):
            raise InputError(f"{folder} and this curve have different labels, or different subjects in source.")
    return curve if len(points) == 1 else summarise(pd.concat(points, ignore_index=True))


def trend_table(curve: Curve) -> pd.DataFrame:
    """Gain for each doubling of source, and the extrapolated AUC at multiples of the largest size."""
    rows = []
    for method, trend in curve.trends.items():
        rows.append((method, "gain for each doubling", np.nan, trend.slope, *trend.slope_interval()))
        for times in FURTHER:
            subjects = times * largest(curve, method)
            rows.append((method, "extrapolated AUC", round(subjects), *trend.at(subjects)))
    return pd.DataFrame(rows, columns=["method", "quantity", "subjects", "value", "low", "high"])


def largest(curve: Curve, method: str) -> float:
    """Largest number of source subjects of a method's points."""
    return float(curve.table.loc[curve.table["method"] == method, "subjects"].max())


def sentences(curve: Curve, goal: float | None) -> list[str]:
    """What the curve says about each method."""
    lines = []
    for method, trend in curve.trends.items():
        rows = curve.table[curve.table["method"] == method]
        ends = [f"{100 * row['AUC']:.1f} with {row['subjects']:.0f} subjects" for _, row in rows.iloc[[0, -1]].iterrows()]
        low, high = trend.slope_interval()
        gain = f"{100 * trend.slope:+.1f} points for each doubling{interval(low, high)}"
        subjects = FURTHER[0] * largest(curve, method)
        area, low, high = trend.at(subjects)
        lines.append(
            f"{method}: AUC {ends[0]}, {ends[1]}; {gain}. Extrapolated to {subjects:.0f} subjects: "
            f"{100 * area:.1f}{interval(low, high)}."
        )
        if goal is not None:
            lines.append(_goal(method, trend, goal))
    return [*lines, EXTRAPOLATED]


def _goal(method: str, trend: Trend, goal: float) -> str:
    needed = trend.needed(goal)
    if needed is None:
        return f"{method}: the trend does not reach an AUC of {100 * goal:.1f}."
    return f"{method}: the trend reaches an AUC of {100 * goal:.1f} with about {needed:,.0f} source subjects."


def interval(low: float, high: float) -> str:
    """A 95 % interval in percent, in brackets; nothing if it is not defined."""
    return "" if np.isnan(low) else f" (95 % interval {100 * low:.1f} to {100 * high:.1f})"


def stored_curve(folder: Path) -> Curve | None:
    """The curve that `m2lgdg curve` wrote into a study folder or into its folder `curve`; None if there is none."""
    paths = [folder / "points.csv", folder / "curve" / "points.csv"]
    path = next((path for path in paths if path.is_file()), None)
    if path is None:
        return None
    try:
        points = unquoted_table(pd.read_csv(path, dtype={"method": str, "target": str}))
        return summarise(points[POINTS].astype({"size": float, "subjects": float, "AUC": float}))
    except (ValueError, KeyError):
        raise InputError(f"{path} is damaged; remove it, or repeat m2lgdg curve to write it again.") from None


def learning_figure(curve: Curve, hues: Mapping[tuple[str, str], int] = MappingProxyType({})) -> Figure:
    """AUC against the number of source subjects on a logarithmic axis, with the trend dashed beyond the last size."""
    methods = list(curve.trends)

    def paint(sheet: Sheet) -> None:
        axis = sheet.canvas.add_subplot()
        axis.set_xscale("log", base=2)
        ticks: set[int] = set()
        for order, method in enumerate(methods):
            k = hues.get((method, ""), order)
            rows = curve.table[curve.table["method"] == method]
            axis.plot(rows["subjects"], 100 * rows["AUC"], "-", color=colour(k), lw=1.3, label=short(method, 40))
            axis.fill_between(rows["subjects"], 100 * rows["low"], 100 * rows["high"], color=colour(k), alpha=0.12, lw=0)
            for _, row in rows.iterrows():
                (dot,) = axis.plot([row["subjects"]], [100 * row["AUC"]], mark(k), color=colour(k), ms=4)
                value = f"AUC {100 * row['AUC']:.1f}{interval(row['low'], row['high'])}"
                sheet.tip(dot, f"{method}, {row['subjects']:.0f} source subjects: {value}, {row['sites']:.0f} sites")
            ahead = largest(curve, method) * np.array([1, *FURTHER])
            areas = 100 * np.array([curve.trends[method].at(n) for n in ahead])
            axis.plot(ahead, areas[:, 0], "--", color=colour(k), lw=1)
            axis.fill_between(ahead, areas[:, 1], areas[:, 2], color=colour(k), alpha=0.06, lw=0)
            ticks |= {round(n) for n in (*rows["subjects"], *ahead[1:])}
        axis.axhline(50, color=FAINT, lw=1, ls=":")
        if len(methods) == 1 or len(ticks) <= 8:
            axis.set_xticks(sorted(ticks), [f"{n}" for n in sorted(ticks)])
            axis.minorticks_off()
        axis.set_xlabel("source subjects")
        axis.set_ylabel("AUC at left-out sites (%)")
        axis.legend(fontsize=8)

    caption = (
        "Mean AUC over left-out sites against the number of source subjects, with 95 % bootstrap intervals over sites. "
        f"Dashed: line fitted to AUC against log2 of the number of subjects. {EXTRAPOLATED}"
    )
    return draw("learning-curve", caption, "Learning curve; numbers in curve.csv and trend.csv", (WIDTH, 4.2), paint)
