"""Figures of explanations: the paper's top-20 ROIs, a glass brain, gate weights by site, maps of the representation.

Each takes tables of an `Explanation`. Glass brains are drawn from the outlines in nilearn's files, without a network.
"""

from __future__ import annotations

import functools
import importlib.util
import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from matplotlib import rc_context
from matplotlib.collections import PathCollection
from matplotlib.figure import Figure as Canvas
from matplotlib.path import Path as Curve
from matplotlib.transforms import Affine2D

from m2lgdg.explain.explanation import roi_label
from m2lgdg.report.drawing import FAINT, INK, Figure, Sheet, colour, draw, image, mark, plain, short

Floats = npt.NDArray[np.float64]
TOP, HALF = 20, 10
RED, GREY = "#c0392b", "#8a8d91"
# View -> nilearn's file of outlines, their transform to MNI space, and the two MNI coordinates that the view shows.
OUTLINES = {
    "left": ("side", (0.38, 0, 0, 0.38, -108, -70), [1, 2]),
    "back": ("back", (0.39, 0, 0, 0.39, -73, -73), [0, 2]),
    "right": ("side", (0.38, 0, 0, 0.38, -108, -70), [1, 2]),
    "top": ("top", (0.36, 0, 0, 0.37, -71, -107), [0, 1]),
}


def top_rois(method: str, rois: pd.DataFrame) -> Figure:
    """Bar chart of the twenty highest scores, ranks 1 to 10 red and 11 to 20 grey, with intervals over folds and seeds."""
    top = rois.head(TOP)

    def paint(sheet: Sheet) -> None:
        axis = sheet.canvas.add_subplot()
        for i, row in enumerate(top.to_dict("records")):
            (bar,) = axis.barh([i], [row["score"]], color=RED if i < HALF else GREY, height=0.75)
            interval = f", {row['low']:.3g} to {row['high']:.3g} over folds and seeds" if "low" in row else ""
            sheet.tip(bar, f"{i + 1}. {roi_label(str(row['roi']))}: {row['score']:.3g}{interval}")
            if "low" in row:
                axis.plot([row["low"], row["high"]], [i, i], color=FAINT if i < HALF else "#55585c", lw=1)
        axis.set_yticks(range(len(top)), [short(roi_label(str(name))) for name in top["roi"]])
        axis.set_ylim(len(top) - 0.5, -0.5)
        axis.set_xlabel("score")

    caption = f"{method}: the {len(top)} ROIs with the highest scores; ranks 1 to 10 in red, the others grey."
    caption += " Lines: interval over folds and seeds." if "low" in top else ""
    return draw(f"rois-{method}", caption, f"Bar chart of the top ROIs of {method}; the table has the numbers", (7, 5.2), paint)


def glass_brain(method: str, rois: pd.DataFrame) -> Figure | None:
    """Glass brain with the top ROIs at their MNI centroids; None if the atlas has no centroids."""
    top = rois.head(TOP)
    if not _placed(top):
        return None
    files = {}
    relative = (top["score"] / (top["score"].max() or 1.0)).to_numpy()
    with rc_context({"svg.hashsalt": method, "svg.fonttype": "none"}):
        figure = Canvas(figsize=(9, 2.6))
        _paint_views(figure, top[["x", "y", "z"]].to_numpy(), 20 + 80 * relative)
        for form, metadata in (("svg", {"Date": None, "Creator": None}), ("png", {"Software": None})):
            buffer = io.BytesIO()
            figure.savefig(buffer, format=form, dpi=110, facecolor="white", metadata=metadata)
            files[form] = buffer.getvalue()
    caption = f"{method}: MNI centroids of the top ROIs, size by score; colours as above."
    alt = f"Glass brain with the top ROIs of {method}; the table has the coordinates"
    return Figure(plain(f"brain-{method}"), caption, alt, files["svg"], files["png"], image(files["png"], alt))


@dataclass(frozen=True)
class View:
    """Outlines of the brain in MNI space from one side, from nilearn's files: curves, their colours and widths, and bounds."""

    curves: list[Curve]
    colours: list[str]
    widths: list[float]
    bounds: tuple[float, float, float, float]  # left, right, bottom, top


@functools.cache
def _view(name: str) -> View:
    """Outlines of one view. They are read and not drawn by nilearn, because importing its plots takes two seconds."""
    (package,) = importlib.util.find_spec("nilearn").submodule_search_locations  # type: ignore[union-attr, misc]
    file = Path(package) / "plotting" / "glass_brain_files" / f"brain_schematics_{OUTLINES[name][0]}.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    to_mni = Affine2D.from_values(*OUTLINES[name][1])
    codes = {"segment": Curve.LINETO, "bezier": Curve.CURVE4}
    curves, colours, widths = [], [], []
    for group in content["paths"]:
        for item in group["items"]:
            code = Curve.CURVE3 if len(item["pts"]) == 3 else codes[item["type"]]
            curves.append(Curve(to_mni.transform(item["pts"]), [Curve.MOVETO, *[code] * (len(item["pts"]) - 1)]))
            colours.append(group["edgecolor"])
            widths.append(group["linewidth"])
    left, right, bottom, top = content["metadata"]["bounds"]
    (left, bottom), (right, top) = to_mni.transform([(left, bottom), (right, top)])
    aside, above = 0.025 * (right - left) + 0.1, 0.025 * (top - bottom) + 0.1
    return View(curves, colours, widths, (left - aside, right + aside, bottom - above, top + above))


def _paint_views(figure: Canvas, centroids: Floats, sizes: Floats) -> None:
    """Paint the ROIs on the left hemisphere, the brain from behind, the right hemisphere, and the brain from above."""
    views = {name: _view(name) for name in OUTLINES}
    total = sum(view.bounds[1] - view.bounds[0] for view in views.values())
    colours = np.array([RED if i < HALF else GREY for i in range(len(centroids))])
    start = 0.0
    for name, view in views.items():
        left, right, bottom, top = view.bounds
        width = (right - left) / total
        axis = figure.add_axes((start, 0, width, 1))
        start += width
        axis.axis("off")
        axis.set(xlim=(right, left) if name == "left" else (left, right), ylim=(bottom, top), aspect="equal")
        style: Any = {"facecolors": "none", "alpha": 0.7, "capstyle": "butt", "joinstyle": "miter"}
        outlines = PathCollection(view.curves, edgecolors=view.colours, linewidths=view.widths, **style)
        axis.add_collection(outlines, autolim=False)
        shown = {"left": centroids[:, 0] <= 0, "right": centroids[:, 0] >= 0}.get(name, np.full(len(centroids), True))
        across, up = centroids[shown][:, OUTLINES[name][2]].T
        axis.scatter(across, up, s=sizes[shown], c=colours[shown], alpha=0.85, zorder=1000)
        for text, at, side in (("L", 0.1, "left"), ("R", 0.9, "right")) if name in ("back", "top") else ():
            box = {"boxstyle": "square,pad=0", "ec": "white", "fc": "white"}
            axis.text(at, 0.95, text, transform=axis.transAxes, ha=side, va="top", size=12, color="k", bbox=box)


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
    return draw(f"gate-{method}", caption, caption, (7, 1.2 + 0.4 * len(sites)), paint)


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
