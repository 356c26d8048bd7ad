"""The figure of the answer: the main method at each unseen site, with chance, its simple peer and the mean over sites.

One look says where it works and where it does not: sites are grouped by their verdict, and those that fail are red.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes

from m2lgdg.report.answer import Answer, SiteResult
from m2lgdg.report.drawing import FAINT, INK, WIDTH, Figure, Sheet, colour, draw, short
from m2lgdg.report.paper_tables import Key, label

FAILED = "#c62f25"  # readable on a light and on a dark page
HEADS = {
    "above chance": "above chance",
    "too few to tell": "too few subjects to tell",
    "not above chance": "not above chance",
    "not counted": "too small to count",
}
ROW, FRAME = 0.235, 1.05  # inches: height of a row, and of axis and legend


class Row(NamedTuple):
    """A line of the figure: the heading of a group (without a site), or a site."""

    name: str
    site: SiteResult | None


def answer_figure(summary: Answer, hues: Mapping[Key, int]) -> Figure:
    """AUC of the main method at each site with its interval, its peer, and the mean over sites that count."""
    main, peer = label(*summary.main), "" if summary.peer is None else label(*summary.peer)
    rows, hue = _rows(summary), colour(hues[summary.main])
    mean = summary.mean if len(summary.sites) > 1 else None

    def paint(sheet: Sheet) -> None:
        axis = sheet.canvas.add_subplot()
        axis.plot([], [], "o", color=hue, ms=6, label=short(main, 34))
        if peer:
            axis.plot([], [], "D", color=INK, mfc="none", ms=4.5, label=f"simple peer: {short(peer, 34)}")
        for y, row in enumerate(rows):
            if row.site is None:
                _heading(axis, y, row.name)
            else:
                _site(sheet, axis, y, row.site, (main, peer), hue)
        if mean is not None:
            _mean(sheet, axis, len(rows), summary, (main, peer))
        _frame(axis, len(rows) + (mean is not None))
        ticks = {y: f"{short(row.name, 20)}  {row.site.patients}+{row.site.controls}" for y, row in enumerate(rows) if row.site}
        ticks |= {len(rows): "mean over sites"} if mean is not None else {}
        axis.set_yticks(list(ticks), list(ticks.values()), fontsize=10)
        sheet.canvas.legend(loc="outside upper center", ncols=2 if len(main + peer) < 50 else 1, fontsize=10)

    caption = (
        f"AUC of {main} at each unseen site (mean over seeds) with 95 % DeLong intervals; at the left, patients + controls. "
        "The AUC is how often a patient scores higher than a control of the same site. Above chance: the interval is above "
        "50 %. Too few to tell: it includes 50 % and the mean over sites. Not above chance: it ends below that mean. Intervals "
        "of single sites are not corrected for the number of sites."
    )
    alt = "AUC of the main method and its simple peer at each unseen site; numbers in the tables by site"
    return draw("answer", caption, alt, (WIDTH, FRAME + ROW * (len(rows) + (mean is not None))), paint)


def _rows(summary: Answer) -> list[Row]:
    groups = [(verdict, list(sites)) for verdict, sites in itertools.groupby(summary.sites, key=lambda one: one.verdict)]
    rows = []
    for verdict, sites in groups:
        rows += [Row(f"{HEADS[verdict]}: {len(sites)}", None)] if len(summary.sites) > 1 else []
        rows += [Row(one.site, one) for one in sites]
    return rows


def _heading(axis: Axes, y: int, name: str) -> None:
    shade = FAILED if name.startswith(HEADS["not above chance"]) else INK
    place = ("axes fraction", "data")
    axis.annotate(name, (0.01, y), xycoords=place, va="center", fontsize=9.5, color=shade, style="italic")


def _site(sheet: Sheet, axis: Axes, y: int, one: SiteResult, names: tuple[str, str], hue: str) -> None:
    shade = {"not above chance": FAILED, "above chance": hue}.get(one.verdict, FAINT)
    if one.verdict == "not above chance":
        axis.axhspan(y - 0.5, y + 0.5, color=FAILED, alpha=0.08, lw=0)
    if not math.isnan(one.low):
        axis.plot([100 * one.low, 100 * one.high], [y, y], color=shade, lw=1.6)
    (dot,) = axis.plot([100 * one.area], [y], "o", color=shade, ms=6, mfc="none" if one.verdict == "not counted" else shade)
    ends = "no interval" if math.isnan(one.low) else f"95 % interval {100 * one.low:.1f} to {100 * one.high:.1f}"
    counts = f"{one.patients} patients, {one.controls} controls"
    sheet.tip(dot, f"{names[0]}, {one.site}: AUC {100 * one.area:.1f} ({ends}), {counts}; {HEADS[one.verdict]}")
    axis.annotate(f"{100 * one.area:.0f}", (1.01, y), xycoords=("axes fraction", "data"), va="center", fontsize=10)
    if not math.isnan(one.peer):
        (dot,) = axis.plot([100 * one.peer], [y], "D", color=INK, mfc="none", ms=4.5, mew=0.9)
        sheet.tip(dot, f"{names[1]}, {one.site}: AUC {100 * one.peer:.1f}")


def _mean(sheet: Sheet, axis: Axes, y: int, summary: Answer, names: tuple[str, str]) -> None:
    mean = summary.mean
    if mean is None:
        return
    axis.axhline(y - 0.5, color=FAINT, lw=0.6)
    if not math.isnan(mean.low):
        axis.plot([100 * max(mean.low, 0.0), 100 * min(mean.high, 1.0)], [y, y], color=INK, lw=2.6)
    (dot,) = axis.plot([100 * mean.area], [y], "o", color=INK, ms=7)
    sheet.tip(dot, f"{names[0]}: mean AUC {100 * mean.area:.1f} over the sites that count")
    axis.annotate(
        f"{100 * mean.area:.1f}", (1.01, y), xycoords=("axes fraction", "data"), va="center", fontsize=10, weight="bold"
    )
    if not math.isnan(mean.peer):
        (dot,) = axis.plot([100 * mean.peer], [y], "D", color=INK, mfc="none", ms=6)
        sheet.tip(dot, f"{names[1]}: mean AUC {100 * mean.peer:.1f}")


def _frame(axis: Axes, count: int) -> None:
    axis.axvline(50, color=FAINT, lw=1.2, ls=":")
    drawn = [float(end) for line in axis.lines for end in np.asarray(line.get_xdata(), dtype=float) if 1 < end < 100]
    axis.set_xlim(max(min([*drawn, 45.0]) - 3, 0), 102)
    axis.set_ylim(count - 0.4, -0.6)
    axis.tick_params(axis="y", length=0)
    axis.set_xlabel("AUC at the unseen site (%); dotted: chance")
