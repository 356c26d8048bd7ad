"""Figures of explanations: the paper's top-20 ROIs, a glass brain, gate weights by site, maps of the representation.

Each takes tables of an `Explanation`. Glass brains are drawn over the outlines of nilearn, without importing it.
"""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.patches import PathPatch
from matplotlib.path import Path as MplPath

from m2lgdg.explain.explanation import roi_label
from m2lgdg.report.drawing import FAINT, INK, WIDTH, Figure, Sheet, colour, draw, mark, short

TOP, HALF = 20, 10
RED, GREY = "#c0392b", "#8a8d91"


def top_rois(method: str, rois: pd.DataFrame) -> Figure:
    """Bar chart of the twenty highest scores, ranks 1 to 10 red and 11 to 20 grey, with intervals over folds and seeds."""
    top = rois.head(TOP)

    def paint(sheet: Sheet) -> None:
        axis = sheet.canvas.add_subplot()
        colours = [RED if i < HALF else GREY for i in range(len(top))]
        bars = axis.barh(range(len(top)), top["score"], color=colours, height=0.75)
        for i, (bar, row) in enumerate(zip(bars, top.to_dict("records"), strict=True)):
            interval = f", {row['low']:.3g} to {row['high']:.3g} over folds and seeds" if "low" in row else ""
            sheet.tip(bar, f"{i + 1}. {roi_label(str(row['roi']))}: {row['score']:.3g}{interval}")
        if "low" in top:
            inks = [FAINT if i < HALF else "#55585c" for i in range(len(top))]
            axis.hlines(range(len(top)), top["low"], top["high"], colors=inks, lw=1)
        axis.set_yticks(range(len(top)), [short(roi_label(str(name))) for name in top["roi"]])
        axis.set_ylim(len(top) - 0.5, -0.5)
        axis.set_xlabel("score")

    caption = f"{method}: the {len(top)} ROIs with the highest scores; ranks 1 to 10 in red, the others grey."
    caption += " Lines: interval over folds and seeds." if "low" in top else ""
    return draw(
        f"rois-{method}", caption, f"Bar chart of the top ROIs of {method}; the table has the numbers", (WIDTH, 5.2), paint
    )


def glass_brain(method: str, rois: pd.DataFrame) -> Figure | None:
    """Glass brain with the top ROIs at their MNI centroids; None if the atlas has no centroids."""
    top = rois.head(TOP)
    if not _placed(top):
        return None
    places = top[["x", "y", "z"]].to_numpy()
    sizes = 20 + 80 * (top["score"] / (top["score"].max() or 1.0)).to_numpy()
    colours = np.where(np.arange(len(top)) < HALF, RED, GREY)
    views = _outlines()

    def paint(sheet: Sheet) -> None:
        widths = np.array([views[name].bounds[1] - views[name].bounds[0] for name, *_ in VIEWS])
        edges = np.r_[0, np.cumsum(widths)] / widths.sum()  # one scale for all views
        for (name, across, up, side), left, right in zip(VIEWS, edges[:-1], edges[1:], strict=True):
            axis = sheet.canvas.add_axes((left, 0, right - left, 1), aspect="equal")
            axis.axis("off")
            for line in views[name].lines:
                axis.add_artist(PathPatch(line.path, fill=False, ec=line.colour, lw=line.width, alpha=0.7))
            shown = places[:, 0] * side >= 0  # of a view from one side, the ROIs of that hemisphere
            axis.scatter(places[shown, across], places[shown, up], s=sizes[shown], c=colours[shown], alpha=0.85, zorder=3)
            low, high, *heights = views[name].bounds
            axis.set(xlim=(high, low) if side < 0 else (low, high), ylim=heights)
            for letter, place in (("L", 0.1), ("R", 0.9)) if not side else ():
                axis.text(
                    place, 0.95, letter, transform=axis.transAxes, ha="left" if letter == "L" else "right", va="top", size=12
                )

    caption = f"{method}: MNI centroids of the top ROIs, size by score; colours as above."
    alt = f"Glass brain with the top ROIs of {method}; the table has the coordinates"
    return draw(f"brain-{method}", caption, alt, (9, 2.6), paint, raster=True, layout=False, dpi=110)


# Outlines, columns of x, y, z shown across and upwards, and the hemisphere: left (-1), right (1) or both (0).
VIEWS = (("side", 1, 2, -1), ("back", 0, 2, 0), ("side", 1, 2, 1), ("top", 0, 1, 0))


class Line(NamedTuple):
    """Outlines of one colour and width."""

    path: MplPath
    colour: str
    width: float


class View(NamedTuple):
    """Outlines of a brain from one direction, in mm of MNI space, and the bounds of the axes (x, x, y, y)."""

    bounds: tuple[float, float, float, float]
    lines: list[Line]


@cache
def _outlines() -> dict[str, View]:
    text = (files("m2lgdg.report") / "outlines.json").read_text(encoding="utf-8")
    return {
        name: View(
            tuple(view["bounds"]),
            [
                Line(MplPath(np.reshape(line["points"], (-1, 2)), line["codes"]), line["colour"], line["width"])
                for line in view["lines"]
            ],
        )
        for name, view in json.loads(text)["views"].items()
    }


def _placed(top: pd.DataFrame) -> bool:
    """Whether there are scores, and a centroid for each ROI."""
    return "x" in top and bool(top["score"].any()) and not top[["x", "y", "z"]].isna().any(axis=None)


def three_dimensional(rois: pd.DataFrame, to: Path) -> Path | None:
    """Write a self-contained page with the top ROIs on a rotatable brain; None if the atlas has no centroids."""
    top = rois.head(TOP)
    if not _placed(top):
        return None
    from nilearn.plotting import view_markers

    colours = [RED if i < HALF else GREY for i in range(len(top))]
    names = [f"{i + 1}. {roi_label(str(name))}" for i, name in enumerate(top["roi"])]
    view: Any = view_markers(top[["x", "y", "z"]].to_numpy(), colours, marker_size=8, marker_labels=names)
    to.parent.mkdir(parents=True, exist_ok=True)
    view.save_as_html(str(to))
    return to


def gate_weights(method: str, gate: pd.DataFrame) -> Figure | None:
    """Mean gate weight of the scan by site and label; None if the network has no gate."""
    if not len(gate) or "imaging" not in gate:
        return None
    sites = list(dict.fromkeys(gate["site"]))
    names = {0: "controls", 1: "patients", -1: "no label"}

    def paint(sheet: Sheet) -> None:
        axis = sheet.canvas.add_subplot()
        for k, (number, part) in enumerate(gate.groupby("label")):
            axis.plot([], [], mark(0), color=colour(k), label=names.get(int(str(number)), str(number)))
            for row in part.to_dict("records"):
                (dot,) = axis.plot(
                    [row["imaging"]], [sites.index(row["site"]) + 0.16 * (k - 0.5)], mark(0), color=colour(k), ms=6
                )
                group = f"{row['site']}, {names.get(row['label'])}"
                sheet.tip(dot, f"{group}: scan {row['imaging']:.2f}, phenotypes {1 - row['imaging']:.2f}")
        axis.set_yticks(range(len(sites)), [short(site) for site in sites])
        axis.set_ylim(len(sites) - 0.5, -0.5)
        axis.set_xlim(-0.02, 1.02)
        axis.axvline(0.5, color=FAINT, lw=0.8, ls=":")
        axis.set_xlabel("gate weight of the scan (phenotypes: 1 minus this)")
        sheet.canvas.legend(loc="outside right upper", fontsize=8)

    caption = f"{method}: mean gate weight of the scan, by target site and label."
    return draw(f"gate-{method}", caption, caption, (WIDTH, 1.2 + 0.4 * len(sites)), paint)


def representation_map(method: str, target: str, points: pd.DataFrame, number: int) -> Figure:
    """t-SNE of the representation, coloured by site and by label; target subjects are circled."""
    sites = list(dict.fromkeys(points["site"]))
    names = {0: "control", 1: "patient", -1: "no label"}
    of_target = points["part"] == "target"

    def paint(sheet: Sheet) -> None:
        for axis, column, groups in zip(sheet.canvas.subplots(1, 2), ("site", "label"), (sites, [0, 1, -1]), strict=True):
            for k, group in enumerate(groups):
                part = points[points[column] == group]
                if len(part):
                    text = short(str(group), 22) if column == "site" else names[int(group)]
                    axis.scatter(part["x"], part["y"], s=9, color=colour(k), marker=mark(k), lw=0, label=text)
            circled = points[of_target]
            axis.scatter(circled["x"], circled["y"], s=22, facecolors="none", edgecolors=INK, lw=0.5, label="target site")
            axis.set(xticks=[], yticks=[], title=f"by {column}")
            axis.legend(fontsize=6, loc="upper left", bbox_to_anchor=(1.0, 1.0), markerscale=1.5)

    caption = f"{method}, target {target}: t-SNE of the classifier's input, first seed; target subjects are circled."
    return draw(f"map-{method}-{number}", caption, caption, (9.5, 3.6), paint, raster=True)
