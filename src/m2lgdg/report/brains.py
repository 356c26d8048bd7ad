"""Figures of explanations: the paper's top-20 ROIs, a glass brain, gate weights by site, maps of the representation.

Each takes tables of an `Explanation`. Glass brains are drawn by nilearn from the outlines it ships, offline.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from m2lgdg.explain.explanation import roi_label
from m2lgdg.report.drawing import FAINT, INK, Figure, Sheet, colour, draw, image, mark, plain, short

TOP, HALF = 20, 10
RED, GREY = "#c0392b", "#8a8d91"


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
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.colors import ListedColormap
    from nilearn.plotting import plot_markers

    files = {}
    relative = (top["score"] / (top["score"].max() or 1.0)).to_numpy()
    with plt.rc_context({"svg.hashsalt": method, "svg.fonttype": "none"}):
        figure = plt.figure(figsize=(9, 2.6))
        plot_markers(
            (np.arange(len(top)) < HALF).astype(float), top[["x", "y", "z"]].to_numpy(), node_size=20 + 80 * relative,
            node_cmap=ListedColormap([GREY, RED]), node_vmin=0.0, node_vmax=1.0, alpha=0.85, display_mode="lyrz", figure=figure,
            colorbar=False,
        )  # fmt: skip
        for form, metadata in (("svg", {"Date": None, "Creator": None}), ("png", {"Software": None})):
            buffer = io.BytesIO()
            figure.savefig(buffer, format=form, dpi=110, facecolor="white", metadata=metadata)
            files[form] = buffer.getvalue()
        plt.close(figure)
    caption = f"{method}: MNI centroids of the top ROIs, size by score; colours as above."
    alt = f"Glass brain with the top ROIs of {method}; the table has the coordinates"
    return Figure(plain(f"brain-{method}"), caption, alt, files["svg"], files["png"], image(files["png"], alt))


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
