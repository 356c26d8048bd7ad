"""Figures of scores: forest plot, ROC, calibration and decision curves, sensitivity curves, training curves.

Each takes tables and returns a `Figure`; `sections` decides which of them a study has.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from m2lgdg.metrics import calibration_bins, delong_interval, roc_curve
from m2lgdg.report.drawing import FAINT, INK, WIDTH, Figure, Sheet, colour, draw, mark, short
from m2lgdg.report.operating import net_benefit
from m2lgdg.report.paper_tables import Key, label
from m2lgdg.study.predictions import sweep_variant
from m2lgdg.study.stats import half_interval, macro_scores, site_scores, training_differences

Place = Literal["outside lower center", "outside upper center"]
SWEPT = ("AUC", "ACC", "F1")  # metrics of a sensitivity figure; the paper draws these
DISTINCT = 10  # colours that can be distinguished in one figure
ROWS = 120  # of methods and sites; beyond this the forest plot shows means only


def forest(
    mean: pd.DataFrame,
    scores: pd.DataFrame,
    keys: Sequence[Key],
    name: str = "forest",
    first: str = "",
    *,
    hues: Mapping[Key, int],
    counted: Sequence[str] | None = None,
) -> Figure:
    """AUC (mean over seeds) by target, with DeLong intervals of the probabilities averaged over seeds, highest mean first.

    `first` starts its caption, `hues` are the colour numbers of methods, `counted` the sites of means (all by default).
    """
    areas = scores[scores["metric"] == "AUC"].set_index(["method", "variant", "target"])["mean"]
    keys, sites = _sorted(areas.dropna(), keys, mean["target"].unique().tolist())
    defined = areas.dropna().index.get_level_values("target")
    sites = [site for site in sites if site in defined] or sites  # a site of one class has no AUC
    by_row = len(keys) > DISTINCT  # too many for a legend
    if by_row and len(keys) * len(sites) > ROWS:
        sites = [site for site in sites if counted is None or site in counted]
        return _forest_of_means(areas, sites, keys, name, first, hues)
    step, cells = 0.8 / len(keys), _by_cell(mean)

    def paint(sheet: Sheet) -> None:
        axis = sheet.canvas.add_subplot()
        for k, key in enumerate(keys):
            hue, shape = colour(hues[key]), mark(hues[key])
            axis.plot([], [], shape, color=hue, ms=5, label=short(label(*key), 40))
            for s, site in enumerate(sites):
                own, area = cells.get((*key, site)), 100 * float(areas.get((*key, site), np.nan))
                if own is None or math.isnan(area):
                    continue
                low, high = (100 * end for end in delong_interval(own["label"].to_numpy(), own["proba"].to_numpy()))
                y = s + k * step - 0.4 + step / 2
                axis.plot([low, high], [y, y], color=hue, lw=1.3, alpha=0.6)
                (dot,) = axis.plot([area], [y], shape, color=hue, ms=4.5)
                value = f"AUC {area:.1f} (95 % interval {low:.1f} to {high:.1f})"
                sheet.tip(dot, f"{label(*key)}, {site}: {value}, {len(own)} subjects")
        axis.axvline(50, color=FAINT, lw=1, ls=":")
        ends = [end for line in axis.lines for end in np.asarray(line.get_xdata(), dtype=float) if 0 < end < 100]
        axis.set_xlim(max(min([*ends, 50.0]) - 3, 0), 101)
        for edge in np.arange(len(sites) - 1) + 0.5:
            axis.axhline(edge, color=FAINT, lw=0.4, alpha=0.5)
        axis.set_ylim(len(sites) - 0.5, -0.5)
        axis.set_xlabel("AUC at the unseen site (%)")
        if not by_row:
            axis.set_yticks(range(len(sites)), [short(site) for site in sites])
            _legend(sheet, "outside upper center")
            return
        rows = [s + k * step - 0.4 + step / 2 for s in range(len(sites)) for k in range(len(keys))]
        axis.set_yticks(rows, [short(label(*key), 34) for _ in sites for key in keys], fontsize=8)
        axis.tick_params(axis="y", length=0)
        for s, site in enumerate(sites):
            axis.annotate(short(site), (0.01, s - 0.47), xycoords=("axes fraction", "data"), va="top", weight="bold")

    height = 1.4 + max((0.18 if by_row else 0.12) * len(keys) + 0.14, 0.4) * len(sites)
    caption = first + (
        "AUC at each target site (mean over seeds), methods and sites sorted by their mean. Lines: 95 % DeLong intervals of "
        "the probabilities averaged over seeds; dotted: chance."
    )
    alt = "AUC of each method at each target site with intervals; numbers in the tables"
    return draw(name, caption, alt, (WIDTH, height), paint)


def _sorted(areas: pd.Series, keys: Sequence[Key], sites: Sequence[str]) -> tuple[list[Key], list[str]]:
    """Methods and sites by their mean AUC, highest first; undefined ones last."""

    def mean(values: list[float]) -> float:
        defined = [value for value in values if not math.isnan(value)]
        return -sum(defined) / len(defined) if defined else math.inf

    table = {(key, site): float(areas.get((*key, site), np.nan)) for key in keys for site in sites}
    return (
        sorted(keys, key=lambda key: mean([table[key, site] for site in sites])),
        sorted(sites, key=lambda site: mean([table[key, site] for key in keys])),
    )


def _legend(
    sheet: Sheet, where: Place = "outside lower center", handles: Sequence[Any] | None = None, names: Sequence[str] = ()
) -> None:
    if handles is None:
        handles, names = sheet.canvas.axes[0].get_legend_handles_labels()
    columns = max(1, min(len(names), 72 // (max(map(len, names), default=1) + 8)))
    sheet.canvas.legend(handles, names, loc=where, ncols=columns, fontsize=9)


def _forest_of_means(
    areas: pd.Series, sites: Sequence[str], keys: Sequence[Key], name: str, first: str, hues: Mapping[Key, int]
) -> Figure:
    """One row per method: its AUC at each target, and their mean with an interval."""

    def paint(sheet: Sheet) -> None:
        axis = sheet.canvas.add_subplot()
        for k, key in enumerate(keys):
            by_site = {site: 100 * float(areas.get((*key, site), np.nan)) for site in sites}
            defined = {site: area for site, area in by_site.items() if not math.isnan(area)}
            for site, area in defined.items():
                (dot,) = axis.plot([area], [k], "o", color=FAINT, ms=3, alpha=0.5, mew=0)
                sheet.tip(dot, f"{label(*key)}, {site}: AUC {area:.1f}")
            values = np.array(list(defined.values()))
            if len(values) < 2:
                continue
            half = half_interval(float(values.std(ddof=1)), len(values))
            axis.plot([values.mean() - half, values.mean() + half], [k, k], color=colour(hues[key]), lw=2.2)
            (dot,) = axis.plot([values.mean()], [k], mark(hues[key]), color=colour(hues[key]), ms=6.5)
            value = f"mean AUC {values.mean():.1f} ± {half:.1f} (95 % interval)"
            sheet.tip(dot, f"{label(*key)}: {value}, {len(values)} sites")
        axis.axvline(50, color=FAINT, lw=1, ls=":")
        axis.set_yticks(range(len(keys)), [short(label(*key), 34) for key in keys], fontsize=9)
        axis.set_ylim(len(keys) - 0.5, -0.5)
        axis.set_xlabel("AUC at unseen sites (%)")

    caption = (
        f"{first}Mean AUC over target sites with 95 % t interval, sorted. Grey: each site (mean over seeds); dotted: chance."
    )
    alt = "Mean AUC of each method over target sites with intervals; numbers in the tables"
    return draw(name, caption, alt, (WIDTH, 1.0 + 0.26 * len(keys)), paint)


def roc_by_target(mean: pd.DataFrame, keys: Sequence[Key], focus: Sequence[Key], hues: Mapping[Key, int]) -> Figure | None:
    """ROC curves, one panel per target; of many methods only `focus` is coloured."""
    named = list(keys) if len(keys) <= DISTINCT else list(focus)
    others = [key for key in keys if key not in named]
    cells = _by_cell(mean)

    def paint(axis: Axes, site: str) -> None:
        for key in others + named:
            own = cells.get((*key, site))
            if own is None or own["label"].nunique() != 2:
                continue
            false_positive, true_positive = (100 * rate for rate in roc_curve(own["label"], own["proba"]))
            if key in others:
                axis.plot(false_positive, true_positive, color=FAINT, lw=0.5, alpha=0.5)
            else:
                axis.plot(false_positive, true_positive, color=colour(hues[key]), lw=1.3, label=short(label(*key), 40))
        axis.plot([0, 100], [0, 100], color=FAINT, lw=0.8, ls=":")

    caption = "ROC curves at each target site; probabilities averaged over seeds. Dotted: chance."
    caption += f" Grey: the other {len(others)} methods." if others else ""
    names = ("1 - specificity (%)", "sensitivity (%)")
    return _panels("roc", caption, "ROC curves by target site", _both_classes(mean), paint, names)


def calibration_by_target(mean: pd.DataFrame, keys: Sequence[Key], hues: Mapping[Key, int]) -> Figure | None:
    """Observed proportion of patients in bins of equal count, one panel per target."""
    cells = _by_cell(mean)

    def paint(axis: Axes, site: str) -> None:
        for key in keys:
            own = cells.get((*key, site))
            if own is None:
                continue
            count = max(2, min(8, len(own) // 12))
            bins = 100 * calibration_bins(own["label"].to_numpy(), own["proba"].to_numpy(), count)
            ends = [bins["observed"] - bins["low"], bins["high"] - bins["observed"]]
            style: dict[str, Any] = {"color": colour(hues[key]), "fmt": "o-", "ms": 3, "lw": 1.1, "elinewidth": 0.7}
            axis.errorbar(bins["proba"], bins["observed"], np.maximum(ends, 0), label=short(label(*key), 40), **style)
        axis.plot([0, 100], [0, 100], color=FAINT, lw=0.8, ls=":")

    caption = (
        "Calibration at each target site: observed proportion of patients in bins of equal count, with 95 % Wilson intervals."
    )
    names = ("predicted probability (%)", "observed proportion (%)")
    return _panels("calibration", caption, "Calibration curves by target site", _both_classes(mean), paint, names)


def decision_curves(mean: pd.DataFrame, keys: Sequence[Key], hues: Mapping[Key, int]) -> Figure | None:
    """Net benefit by threshold, averaged over target sites."""
    sites, cells = _both_classes(mean), _by_cell(mean)
    thresholds = np.linspace(0.01, 0.99, 99)

    def curves(key: Key) -> pd.DataFrame | None:
        given = [cells[*key, site] for site in sites if (*key, site) in cells]
        both = [own for own in given if own["label"].nunique() == 2]
        tables = [net_benefit(own["label"], own["proba"], thresholds.tolist()) for own in both]
        return sum(tables[1:], tables[0]) / len(tables) if tables else None

    drawn = {key: table for key in keys if (table := curves(key)) is not None}
    if not drawn:
        return None

    def paint(sheet: Sheet) -> None:
        axis = sheet.canvas.add_subplot()
        first = next(iter(drawn.values()))
        axis.plot(100 * thresholds, 100 * first["treat_all"], color=FAINT, lw=1, ls="--", label="treat all")
        axis.axhline(0, color=FAINT, lw=1, ls=":", label="treat none")
        for key, table in drawn.items():
            heights = 100 * table["model"]
            (line,) = axis.plot(100 * thresholds, heights, color=colour(hues[key]), lw=1.5, label=short(label(*key), 40))
            sheet.tip(line, label(*key))
        top = 100 * max(float(table["model"].max()) for table in drawn.values())
        axis.set(xlim=(0, 100), ylim=(-10, max(top, 0.0) + 5), xlabel="threshold probability (%)")
        axis.set_ylabel("net benefit (per 100 subjects)")
        _legend(sheet)

    caption = (
        "Decision curves: net benefit (true positives minus false positives weighted by the odds of the threshold, per 100 "
        "subjects), mean over target sites at their own prevalence; probabilities averaged over seeds."
    )
    return draw("decision", caption, "Decision curves; their numbers are in no table", (WIDTH, 3.8), paint)


def sensitivity_curves(
    method: str, scores: pd.DataFrame, axes: dict[str, list[Any]], default: dict[str, Any], hue: int = 0
) -> Figure:
    """AUC, ACC and F1 for each value of the swept fields, with a larger point for the default.

    `scores` are those of the method's cells; bars are intervals of the difference from the default.
    """
    macro = macro_scores(site_scores(scores)).set_index(["variant", "metric"])["mean"]
    halves = training_differences(scores, method).set_index(["variant", "metric"])["half"]

    def curve(sheet: Sheet, panel: Axes, name: str, values: list[Any], metric: str, hue: str) -> None:
        variants = ["" if value == default.get(name) else sweep_variant(name, value) for value in values]
        heights = [100 * float(macro.get((variant, metric), math.nan)) for variant in variants]
        panel.plot(range(len(values)), heights, "-", color=hue, lw=1.3)
        for i, (value, variant, height) in enumerate(zip(values, variants, heights, strict=True)):
            half = 100 * float(halves.get((variant, metric), math.nan))
            if math.isfinite(half):
                panel.errorbar([i], [height], half, color=hue, lw=0.8, alpha=0.7)
            if not variant:
                panel.axhline(height, color=FAINT, lw=0.8, ls=":")
            (dot,) = panel.plot([i], [height], "o", color=hue, ms=4 if variant else 8)
            tip = f"{name} = {_text(value)}{'' if variant else ' (default)'}: {metric} {height:.1f}"
            sheet.tip(dot, f"{tip} ± {half:.1f}" if math.isfinite(half) else tip)

    def paint(sheet: Sheet) -> None:
        grid = sheet.canvas.subplots(len(SWEPT), len(axes), sharex="col", sharey="row", squeeze=False)
        for column, (name, given) in zip(grid.T, axes.items(), strict=True):
            values = [*given, *([default[name]] if default.get(name) not in given and name in default else [])]
            values.sort(key=lambda value: value if isinstance(value, int | float) else _text(value))
            for panel, metric in zip(column, SWEPT, strict=True):
                curve(sheet, panel, name, values, metric, colour(hue))
            labels = [f"{value:g}" if isinstance(value, float) else short(_text(value), 12) for value in values]
            crowded = sum(map(len, labels)) > 16  # side by side they would overlap
            column[-1].set_xticks(range(len(values)), labels, rotation=60 if crowded else 0)
            column[-1].set_xlabel(name)
        for panel, metric in zip(grid[:, 0], SWEPT, strict=True):
            panel.set_ylabel(f"{metric} (%)")

    caption = f"{method}: AUC, ACC and F1 (means over target sites) by field value; larger point: default."
    if halves.notna().any():
        caption += " Bars: 95 % t interval of the difference from the default, from the variance over seeds within sites."
    return draw(f"sensitivity-{method}", caption, caption, (max(WIDTH, 2.2 * len(axes)), 5.6), paint)


def _text(value: Any) -> str:
    return " + ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _by_cell(mean: pd.DataFrame) -> dict[Any, pd.DataFrame]:
    return dict(iter(mean.groupby(["method", "variant", "target"], sort=False)))


def _both_classes(mean: pd.DataFrame) -> list[str]:
    return [site for site in mean["target"].unique().tolist() if mean[mean["target"] == site]["label"].nunique() == 2]


def _panels(
    name: str, caption: str, alt: str, sites: list[str], paint: Callable[[Axes, str], None], names: tuple[str, str]
) -> Figure | None:
    """Square panels, one per site, with a common legend; None if there is no site."""
    if not sites:
        return None
    columns = min(4 if len(sites) > 6 else 3, len(sites))
    rows = math.ceil(len(sites) / columns)

    def paint_all(sheet: Sheet) -> None:
        grid = sheet.canvas.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
        for axis in grid.flat[len(sites) :]:
            axis.remove()
        for axis, site in zip(grid.flat, sites, strict=False):
            paint(axis, site)
            axis.set_title(short(site, 20), fontsize=10, color=INK)
            axis.set(xlim=(-2, 102), ylim=(-2, 102), aspect="equal", xticks=(0, 50, 100), yticks=(0, 50, 100))
        for i in range(max(len(sites) - columns, 0), len(sites)):  # nothing below it
            grid.flat[i].tick_params(labelbottom=True)
        sheet.canvas.supxlabel(names[0], fontsize=9)
        sheet.canvas.supylabel(names[1], fontsize=9)
        handles, labels = grid.flat[0].get_legend_handles_labels()
        _legend(sheet, "outside upper center", handles, labels)

    side = min(WIDTH / columns, 2.5)
    return draw(name, caption, alt, (WIDTH, side * rows + 0.9), paint_all)
