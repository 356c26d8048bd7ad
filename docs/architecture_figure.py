"""Draws docs/architecture.svg: the flow of data from a release folder to a report.

Usage: python docs/architecture_figure.py [OUT.svg or OUT.png]. Coordinates are pixels of a figure 800 wide.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

WIDTH, HEIGHT = 800, 430
SETTINGS = {"svg.hashsalt": "m2lgdg", "font.family": "DejaVu Sans"}  # the same bytes each time
POINT = 0.72  # of a pixel at 100 dots per inch
INK, GREY, ALERT = "#1f2933", "#52606d", "#b42318"


class Column(NamedTuple):
    """A band of the figure: one folder of the package, and the question it answers."""

    left: int
    title: str
    question: str
    tint: str
    edge: str


class Box(NamedTuple):
    """A step of the flow: centre, title and the lines under it."""

    x: int
    y: int
    title: str
    lines: tuple[str, ...]
    edge: str


BAND = 152  # width of a column, 6 apart
COLUMNS = (
    Column(8, "data/", "what do I have?", "#eaf2fb", "#2f6db3"),
    Column(166, "splits", "who trains, who tests?", "#eef6ec", "#3f8f3a"),
    Column(324, "methods/", "which classifier?", "#fdf3e3", "#c27a0e"),
    Column(482, "study/", "does it work there?", "#f5eefa", "#7d4fa3"),
    Column(640, "report/", "what do I publish?", "#fbecef", "#b83b5e"),
)
X = [column.left + BAND // 2 for column in COLUMNS]
TOP, MIDDLE, BOTTOM = 112, 208, 304
EDGE = [column.edge for column in COLUMNS]
BOXES = {
    "release": Box(X[0], TOP, "release folder", ("ROI series,", "phenotype table"), EDGE[0]),
    "cohort": Box(X[0], MIDDLE, "Cohort", ("series, phenotypes,", "sites, labels"), EDGE[0]),
    "check": Box(X[0], BOTTOM, "check", ("duplicates, flat ROIs,", "missing values"), EDGE[0]),
    "source": Box(X[1], TOP, "source", ("all other sites,", "with labels"), EDGE[1]),
    "splits": Box(X[1], MIDDLE, "leave_one_site_out", ("one fold for", "each target site"), EDGE[1]),
    "target": Box(X[1], BOTTOM, "target.unlabelled", ("no label, no site,", "no id"), EDGE[1]),
    "fit": Box(X[2], TOP, "Method.fit", ("impute, scale, train,", "stop early, calibrate"), EDGE[2]),
    "fitted": Box(X[2], MIDDLE, "fitted method", ("state_ (arrays),", "facts_ (JSON)"), EDGE[2]),
    "predict": Box(X[2], BOTTOM, "predict_proba", ("each subject", "by itself"), EDGE[2]),
    "runner": Box(X[3], TOP, "run_study", ("each method, target", "and seed once"), "#b9a3cc"),
    "statistics": Box(X[3], MIDDLE, "statistics", ("per site, macro,", "paired tests"), EDGE[3]),
    "predictions": Box(X[3], BOTTOM, "predictions.csv", ("one row per subject", "of a cell"), EDGE[3]),
    "report": Box(X[4], MIDDLE, "report.html", ("tables, figures,", "checklists"), EDGE[4]),
    "share": Box(X[4], BOTTOM, "share", ("a copy without", "local paths"), EDGE[4]),
}
HALF_WIDTH, HALF_HEIGHT = 66, 29
ARROWS = (
    *(("release", "cohort"), ("cohort", "check"), ("cohort", "splits")),
    *(("splits", "source"), ("splits", "target"), ("source", "fit"), ("target", "predict")),
    *(("fit", "fitted"), ("fitted", "predict"), ("predict", "predictions")),
    *(("predictions", "statistics"), ("predictions", "share"), ("statistics", "report")),
)
ALSO = (  # what else a fitted method is used for
    ("model/", "can I trust it at a new site?"),
    ("explain/", "why does it decide so?"),
    ("deploy/", "ONNX, local page"),
)


def text(axes: Axes, x: float, y: float, words: str, size: float, **style: object) -> None:
    """Centred text, its size in pixels."""
    axes.text(x, y, words, fontsize=size * POINT, **{"ha": "center", "va": "center", "color": INK} | style)


def draw_columns(axes: Axes) -> None:
    """Tinted bands with a folder's name and its question."""
    for column in COLUMNS:
        shape = FancyBboxPatch(
            (column.left + 6, 14), BAND - 12, 352, boxstyle="round,pad=6", facecolor=column.tint, edgecolor="none", zorder=0
        )
        axes.add_patch(shape)
        middle = column.left + BAND / 2
        text(axes, middle, 28, column.title, 15, family="DejaVu Sans Mono", weight="bold", color=column.edge)
        text(axes, middle, 50, column.question, 11.5, style="italic", color=GREY)


def draw_box(axes: Axes, box: Box) -> None:
    """A white box with a title and its lines."""
    corner = (box.x - HALF_WIDTH + 5, box.y - HALF_HEIGHT + 5)
    size = (2 * HALF_WIDTH - 10, 2 * HALF_HEIGHT - 10)
    style = {"facecolor": "white", "edgecolor": box.edge, "linewidth": 1.4, "zorder": 2}
    axes.add_patch(FancyBboxPatch(corner, *size, boxstyle="round,pad=5,rounding_size=7", **style))
    text(axes, box.x, box.y - 16, box.title, 11.5, weight="bold")
    for i, line in enumerate(box.lines):
        text(axes, box.x, box.y + 2 + 14 * i, line, 11, color=GREY)


def draw_arrow(axes: Axes, start: Box, end: Box) -> None:
    """A straight arrow between the facing sides of two boxes."""
    dx, dy = (end.x > start.x) - (end.x < start.x), (end.y > start.y) - (end.y < start.y)
    tail = (start.x + dx * HALF_WIDTH, start.y + dy * HALF_HEIGHT)
    head = (end.x - dx * HALF_WIDTH, end.y - dy * HALF_HEIGHT)
    style = {"arrowstyle": "-|>", "mutation_scale": 11, "linewidth": 1.6, "color": INK, "shrinkA": 0, "shrinkB": 0, "zorder": 3}
    axes.add_patch(FancyArrowPatch(tail, head, **style))


def draw() -> Figure:
    """The whole figure."""
    figure = Figure(figsize=(WIDTH / 100, HEIGHT / 100), dpi=100)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, WIDTH), ylim=(HEIGHT, 0))
    axes.axis("off")
    draw_columns(axes)
    for box in BOXES.values():
        draw_box(axes, box)
    for start, end in ARROWS:
        draw_arrow(axes, BOXES[start], BOXES[end])
    text(axes, X[0] + 8, (TOP + MIDDLE) / 2, "readers", 11, ha="left", color=GREY)
    text(axes, X[1], BOTTOM + 48, "labels stay out of here", 11, color=ALERT)
    text(axes, 20, 400, "A fitted method\nalso goes to", 11.5, ha="left", weight="bold")
    for left, (folder, use) in zip((136, 376, 606), ALSO, strict=True):
        text(axes, left, 400, folder, 13, ha="left", family="DejaVu Sans Mono", weight="bold", color=EDGE[2])
        text(axes, left + 9 * len(folder) + 4, 400, use, 11.5, ha="left", color=GREY)
    return figure


if __name__ == "__main__":
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("architecture.svg")
    with rc_context(SETTINGS):
        draw().savefig(out, metadata={"Date": None} if out.suffix == ".svg" else None)
    print(f"Wrote {out}.")
