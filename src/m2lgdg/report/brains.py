"""What methods look at, as figures and tables: top ROIs, edges and regions of tables, glass brains, gate weights, maps, lobes.

Made from an `Explanation`. Glass brains are drawn over the outlines of nilearn, without importing it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cache, partial
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd
from matplotlib.collections import LineCollection
from matplotlib.patches import PathPatch
from matplotlib.path import Path as MplPath

from m2lgdg.explain.explanation import Explanation, roi_label
from m2lgdg.explain.regions import SAME, by_table, labels, pointing
from m2lgdg.report.contents import Cells, Contents
from m2lgdg.report.drawing import FAINT, INK, WIDTH, Figure, Sheet, colour, draw, mark, short
from m2lgdg.report.tables import NAN, Column, Table, Value, columns, plain
from m2lgdg.storage import write_bytes
from m2lgdg.study.description import read_connectomes

TOP, HALF = 20, 10
MOST_MAPS = 3  # targets with maps on the page, to keep it small
RED, BLUE, GREY = "#c0392b", "#2166ac", "#8a8d91"
MARK_AREAS = (30.0, 140.0)  # points squared of the lowest and the highest score shown
NUMBER = 5.0  # mm within which two numbers on a brain overlap
BRAIN_SIZES = {2: (WIDTH, 5.4), 4: (9.0, 2.6)}  # inches of a glass brain by its number of columns
GROUPS = {0: "controls", 1: "patients", -1: "no label"}
TOWARDS = "Red: larger values point to patient; blue: smaller values do"
AGREEING = 0.75  # proportion of folds and seeds with the same direction from which it is shown
Floats = npt.NDArray[np.float64]


def top_rois(method: str, rois: pd.DataFrame) -> Figure:
    """Bar chart of the twenty highest scores, with intervals over folds and seeds."""
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


def glass_brain(method: str, rois: pd.DataFrame, *, columns: int = 2, ranks: bool = True) -> Figure | None:
    """Glass brain with the top ROIs at their MNI centroids; None if the atlas has none."""
    top = rois.head(TOP)
    if not _placed(top):
        return None
    numbers = np.arange(1, len(top) + 1)
    paint = partial(_marks_on_brain, top, np.where(numbers <= HALF, RED, GREY), numbers * ranks, columns)
    caption = f"{method}: MNI centroids of the top ROIs, size by score, colours as above. Numbers are ranks 1 to {HALF}."
    alt = f"Glass brain with the top ROIs of {method}; the table has the coordinates"
    return draw(f"brain-{method}", caption, alt, BRAIN_SIZES[columns], paint, raster=True, layout=False, dpi=110)


def write_brains(method: str, explanation: Explanation, folder: Path) -> list[Path]:
    """Write the top ROIs on a glass brain as a picture for each atlas with centroids."""
    written, each = [], explanation.by_atlas()
    for atlas, one in each.items():
        path, brain = folder / (f"brain-{plain(atlas)}.png" if len(each) > 1 else "brain.png"), glass_brain(method, one.rois)
        if brain is None:
            path.unlink(missing_ok=True)  # of an earlier explanation
        else:
            written.append(write_bytes(path, brain.png))
    return written


def _marks_on_brain(top: pd.DataFrame, colours: npt.NDArray[Any], ranks: npt.NDArray[Any], columns: int, sheet: Sheet) -> None:
    """Marks at centroids, size by score; ranks from 1 to ten are written on them."""
    places, sizes = top[["x", "y", "z"]].to_numpy(), _between(top["score"].to_numpy(), *MARK_AREAS)
    for axis, across, up, side in _brain_axes(sheet, columns):
        shown = places[:, 0] * side >= 0  # of a view from one side, the ROIs of that hemisphere
        flat = places[:, [across, up]]
        axis.scatter(*flat[shown].T, s=sizes[shown], c=colours[shown], alpha=0.85, zorder=3)
        for i in np.flatnonzero(shown & (ranks > 0) & (ranks <= HALF)):
            covered = np.linalg.norm(flat[:i][shown[:i]] - flat[i], axis=1) < NUMBER  # by a mark with a higher score
            if not covered.any():
                axis.text(*flat[i], str(ranks[i]), color="white", size=6, ha="center", va="center", zorder=4)


def top_regions(method: str, name: str, own: pd.DataFrame) -> Figure:
    """Bar chart of the highest scores of a table of brain structure, to the right where larger values point to patient."""
    top, names = own.head(TOP), labels(own)[:TOP]

    def paint(sheet: Sheet) -> None:
        axis = sheet.canvas.add_subplot()
        bars = axis.barh(range(len(top)), top["direction"], color=_towards(top), height=0.75)
        for i, (bar, row) in enumerate(zip(bars, top.to_dict("records"), strict=True)):
            interval = f" ({row['low']:.3g} to {row['high']:.3g} over folds and seeds)" if "low" in row else ""
            towards = f"{pointing(row['direction'])} values point to patient"
            towards += f" in {100 * row[SAME]:.0f} % of folds and seeds" if SAME in row else ""
            sheet.tip(bar, f"{i + 1}. {row['column']}: {row['direction']:.3g}{interval}, {towards}")
        if "low" in top:
            axis.hlines(range(len(top)), top["low"], top["high"], colors="#55585c", lw=1)
        axis.axvline(0, color=INK, lw=0.8)
        axis.set_yticks(range(len(top)), [short(text) for text in names])
        axis.set_ylim(len(top) - 0.5, -0.5)
        axis.set_xlabel("direction (positive: larger values point to patient)")

    caption = f"{method}, table {name}: the {len(top)} regions with the highest scores of {len(own)}. {TOWARDS}"
    caption += "; grey: fewer than three in four folds and seeds agree" * (SAME in top) + "."
    caption += " Lines: interval over folds and seeds." if "low" in top else ""
    alt = f"Bar chart of the top regions of table {name} of {method}; the table has the numbers"
    return draw(f"regions-{method}-{name}", caption, alt, (WIDTH, 1.0 + 0.21 * len(top)), paint)


def brain_of_regions(method: str, name: str, own: pd.DataFrame) -> Figure | None:
    """Glass brain with those of the top regions of a table that have a place; None if none has."""
    ranked = own.head(TOP).assign(rank=np.arange(1, min(len(own), TOP) + 1))
    top = ranked[ranked["x"].notna()]
    top = top.assign(x=top["x"].where(top["hemisphere"] != "M", 0.0))  # midline: shown from both sides
    if not len(top):
        return None
    paint = partial(_marks_on_brain, top, _towards(top), top["rank"].to_numpy(), 2)
    without = len(ranked) - len(top)
    caption = f"{method}, table {name}: MNI centroids of these regions, size by score, colours and ranks as above."
    caption += f" {without} of them {'have' if without > 1 else 'has'} no single place." if without else ""
    alt = f"Glass brain with the top regions of table {name} of {method}; the table has the coordinates"
    return draw(f"brain-{method}-{name}", caption, alt, BRAIN_SIZES[2], paint, raster=True, layout=False, dpi=110)


def _towards(rows: pd.DataFrame) -> npt.NDArray[Any]:
    """(row,) colours of directions; grey where too few folds and seeds agree."""
    differ = rows.get(SAME, pd.Series(1.0, index=rows.index)) < AGREEING
    return np.select([differ, rows["direction"] > 0, rows["direction"] < 0], [GREY, RED, BLUE], GREY)


def top_edges(method: str, edges: pd.DataFrame, rois: pd.DataFrame) -> Figure | None:
    """The twenty highest edges, on a glass brain or, without centroids, on a circle."""
    top = edges.head(TOP)
    if not len(top) or not top["score"].any():
        return None
    ends = top[["roi", "other roi"]].to_numpy()
    colours = np.select([top["direction"] > 0, top["direction"] < 0], [RED, BLUE], GREY)
    widths = _between(top["score"].to_numpy(), 0.6, 3.0)
    caption = f"{method}: the {len(top)} edges with the highest scores, width by score. "
    caption += "Red: higher connectivity points to patient; blue: to control; grey: no direction."
    alt = f"The {len(top)} edges with the highest scores of {method}; the table has their names"
    named = rois.drop_duplicates("roi").set_index("roi")
    if "x" in named and set(ends.ravel()) <= set(named.index) and _placed(named.loc[ends.ravel()]):
        places = named[["x", "y", "z"]].loc[ends.ravel()].to_numpy().reshape(-1, 2, 3)  # (edge, end, xyz)
        paint = partial(_edges_on_brain, places, colours, widths)
        return draw(f"edges-{method}", caption, alt, BRAIN_SIZES[2], paint, raster=True, layout=False, dpi=110)
    return draw(f"edges-{method}", caption, alt, (WIDTH, WIDTH), partial(_edges_on_circle, ends, colours, widths), layout=False)


def _edges_on_brain(places: Floats, colours: npt.NDArray[Any], widths: Floats, sheet: Sheet) -> None:
    for axis, across, up, side in _brain_axes(sheet, 2):
        shown = (places[:, :, 0] * side >= 0).all(axis=1)  # of a view from one side, edges within that hemisphere
        flat = places[shown][:, :, [across, up]]
        axis.add_collection(
            LineCollection(list(flat), colors=colours[shown].tolist(), linewidths=widths[shown], alpha=0.85, zorder=3)
        )
        axis.scatter(*flat.reshape(-1, 2).T, s=12, color="#55585c", zorder=4)


def _edges_on_circle(ends: npt.NDArray[Any], colours: npt.NDArray[Any], widths: Floats, sheet: Sheet) -> None:
    names = sorted(set(ends.ravel()))
    angles = {name: 2 * np.pi * i / len(names) for i, name in enumerate(names)}
    axis = sheet.canvas.add_axes((0, 0, 1, 1), aspect="equal", xlim=(-1.7, 1.7), ylim=(-1.7, 1.7))
    axis.axis("off")
    for (first, second), colour_of_edge, width in zip(ends, colours.tolist(), widths, strict=True):
        (x, y), (other_x, other_y) = ((np.cos(angles[name]), np.sin(angles[name])) for name in (first, second))
        path = MplPath([(x, y), (0, 0), (other_x, other_y)], [MplPath.MOVETO, MplPath.CURVE3, MplPath.CURVE3])
        line = PathPatch(path, fill=False, ec=colour_of_edge, lw=width, alpha=0.85)
        sheet.tip(axis.add_patch(line), f"{roi_label(first)} and {roi_label(second)}")
    for name, angle in angles.items():
        left = np.cos(angle) < 0  # names are never upside down
        axis.plot(np.cos(angle), np.sin(angle), "o", color=FAINT, ms=4)
        axis.text(
            1.05 * np.cos(angle), 1.05 * np.sin(angle), short(roi_label(name), 22), size=8, va="center",
            ha="right" if left else "left", rotation=np.degrees(angle) + (180 if left else 0), rotation_mode="anchor",
        )  # fmt: skip


def _between(scores: npt.NDArray[Any], low: float, high: float) -> Floats:
    span = float(np.ptp(scores))
    relative = (scores - scores.min()) / span if span else np.full(len(scores), 0.5)
    return np.asarray(low + (high - low) * relative, dtype=np.float64)


def _brain_axes(sheet: Sheet, columns: int) -> Iterator[tuple[Any, int, int, int]]:
    """Axes with the outlines of each view; columns of x, y, z shown across and upwards, and the hemisphere."""
    views, order = _outlines(), VIEWS if columns == len(VIEWS) else [VIEWS[i] for i in (0, 2, 1, 3)]
    rows = [order[i : i + columns] for i in range(0, len(order), columns)]
    spans = [np.array([views[name].bounds[1] - views[name].bounds[0] for name, *_ in row]) for row in rows]
    heights = [max(views[name].bounds[3] - views[name].bounds[2] for name, *_ in row) for row in rows]
    widest, tallest = max(span.sum() for span in spans), sum(heights)
    top = 1.0
    for row, span, height in zip(rows, spans, heights, strict=True):
        bottom, left = top - height / tallest, (1 - span.sum() / widest) / 2  # one scale for all views
        for (name, across, up, side), width in zip(row, span / widest, strict=True):
            axis = sheet.canvas.add_axes((left, bottom, width, height / tallest), aspect="equal")
            axis.axis("off")
            for path, ink, thickness in views[name].lines:
                axis.add_artist(PathPatch(path, fill=False, ec=ink, lw=thickness, alpha=0.7))
            yield axis, across, up, side
            low, high, *limits = views[name].bounds
            axis.set(xlim=(high, low) if side < 0 else (low, high), ylim=limits)
            for letter, place, align in (("L", 0.1, "left"), ("R", 0.9, "right")) if not side else ():
                axis.text(place, 0.95, letter, transform=axis.transAxes, ha=align, va="top", size=12)
            left += width
        top = bottom


# Outlines, columns of x, y, z shown across and upwards, and the hemisphere: left (-1), right (1) or both (0).
VIEWS = (("side", 1, 2, -1), ("back", 0, 2, 0), ("side", 1, 2, 1), ("top", 0, 1, 0))


class View(NamedTuple):
    """Outlines of a brain from one direction (path, colour, width) in mm of MNI space, and the bounds of the axes."""

    bounds: tuple[float, float, float, float]  # x, x, y, y
    lines: list[tuple[MplPath, str, float]]


@cache
def _outlines() -> dict[str, View]:
    views = json.loads((files("m2lgdg.report") / "outlines.json").read_text(encoding="utf-8"))["views"]

    def line(one: dict[str, Any]) -> tuple[MplPath, str, float]:
        return MplPath(np.reshape(one["points"], (-1, 2)), one["codes"]), one["colour"], one["width"]

    return {name: View(tuple(view["bounds"]), list(map(line, view["lines"]))) for name, view in views.items()}


def _placed(top: pd.DataFrame) -> bool:
    return "x" in top and bool(top["score"].any()) and not top[["x", "y", "z"]].isna().any(axis=None)


def three_dimensional(method: str, explanation: Explanation) -> dict[str, str]:
    """Self-contained pages with the top ROIs or regions on a rotatable brain, for each atlas and table with centroids."""
    from nilearn.plotting import view_markers

    shown: dict[str, tuple[pd.DataFrame, list[str], list[str], list[int]]] = {}
    for name, each in by_atlas(method, explanation).items():
        top = each.rois.head(TOP)
        if _placed(top):
            names = [roi_label(str(roi)) for roi in top["roi"]]
            shown[name] = top, names, [RED if i < HALF else GREY for i in range(len(top))], [*range(1, len(top) + 1)]
    for name, own in by_table(explanation.regions).items():
        at = np.flatnonzero(own.head(TOP)["x"].notna())
        if len(at):
            top = own.iloc[at]
            shown[f"{method}-{name}"] = top, [labels(own)[i] for i in at], _towards(top).tolist(), (at + 1).tolist()
    pages = {}
    for name, (top, names, colours, ranks) in shown.items():
        texts = [f"{rank}. {text}" for rank, text in zip(ranks, names, strict=True)]
        view: Any = view_markers(top[["x", "y", "z"]].to_numpy(), colours, marker_size=8, marker_labels=texts)
        pages[f"{plain(f'brain-{name}')}-3d.html"] = str(view.get_standalone())
    return pages


def gate_weights(method: str, gate: pd.DataFrame) -> Figure | None:
    """Mean gate weight of the scan, or of each modality if there are more than two, by site and label; None without a gate."""
    modalities = [name for name in gate.columns if name not in ("site", "label", "subjects")]
    if len(gate) and modalities and modalities != ["imaging", "phenotypes"] and not modalities[0].startswith("weight "):
        return _stacked_gate(method, gate, modalities)
    if not len(gate) or "imaging" not in gate:
        return None
    sites, names = list(dict.fromkeys(gate["site"])), GROUPS

    def paint(sheet: Sheet) -> None:
        axis = sheet.canvas.add_subplot()
        for k, (number, own) in enumerate(gate.groupby("label")):
            axis.plot([], [], mark(0), color=colour(k), label=names.get(int(str(number)), str(number)))
            for row in own.to_dict("records"):
                (dot,) = axis.plot(
                    [row["imaging"]], [sites.index(row["site"]) + 0.16 * (k - 0.5)], mark(0), color=colour(k), ms=6
                )
                group = f"{row['site']}, {names.get(row['label'])}"
                weights = [f"{name} {row[name]:.2f}" for name in modalities]
                sheet.tip(dot, f"{group}: {', '.join(['scan' + weights[0].removeprefix('imaging'), *weights[1:]])}")
        axis.set_yticks(range(len(sites)), [short(site) for site in sites])
        axis.set_ylim(len(sites) - 0.5, -0.5)
        axis.set_xlim(-0.02, 1.02)
        axis.axvline(0.5, color=FAINT, lw=0.8, ls=":")
        axis.set_xlabel("gate weight of the scan (phenotypes: 1 minus this)")
        sheet.canvas.legend(loc="outside right upper", fontsize=8)

    caption = f"{method}: mean gate weight of the scan, by target site and label."
    return draw(f"gate-{method}", caption, caption, (WIDTH, 1.2 + 0.4 * len(sites)), paint)


def _stacked_gate(method: str, gate: pd.DataFrame, modalities: list[str]) -> Figure:
    """Bars of the weights of all modalities, one for each label of each site."""
    rows = gate.to_dict("records")
    names = [f"{short(str(row['site']), 18)}, {GROUPS.get(row['label'], row['label'])}" for row in rows]

    def paint(sheet: Sheet) -> None:
        axis, left = sheet.canvas.add_subplot(), np.zeros(len(rows))
        for k, modality in enumerate(modalities):
            text = "scan" if modality == "imaging" else modality
            weights = gate[modality].to_numpy(dtype=np.float64)
            bars = axis.barh(range(len(rows)), weights, left=left, color=colour(k), height=0.75, label=short(text, 18))
            for bar, name, weight in zip(bars, names, weights, strict=True):
                sheet.tip(bar, f"{name}: {text} {weight:.2f}")
            left += weights
        axis.set_yticks(range(len(rows)), names)
        axis.set_ylim(len(rows) - 0.5, -0.5)
        axis.set_xlim(0, 1)
        axis.set_xlabel("gate weight")
        sheet.canvas.legend(loc="outside upper center", ncols=min(len(modalities), 4), fontsize=8)

    caption = f"{method}: mean gate weight of each modality, by target site and label."
    return draw(f"gate-{method}", caption, caption, (WIDTH, 1.2 + 0.22 * len(rows)), paint)


def representation_map(method: str, target: str, points: pd.DataFrame, number: int) -> Figure:
    """t-SNE of the representation, by site and by label; target subjects are circled."""
    sites = list(dict.fromkeys(points["site"]))
    names = {0: "control", 1: "patient", -1: "no label"}
    of_target = points["part"] == "target"

    def paint(sheet: Sheet) -> None:
        for axis, column, groups in zip(sheet.canvas.subplots(1, 2), ("site", "label"), (sites, [0, 1, -1]), strict=True):
            for k, group in enumerate(groups):
                own = points[points[column] == group]
                if len(own):
                    text = short(str(group), 22) if column == "site" else names[int(group)]
                    axis.scatter(own["x"], own["y"], s=9, color=colour(k), marker=mark(k), lw=0, label=text)
            circled = points[of_target]
            axis.scatter(circled["x"], circled["y"], s=22, facecolors="none", edgecolors=INK, lw=0.5, label="target site")
            axis.set(xticks=[], yticks=[], title=f"by {column}")
            axis.legend(fontsize=6, loc="upper left", bbox_to_anchor=(1.0, 1.0), markerscale=1.5)

    caption = f"{method}, target {target}: t-SNE of the classifier's input, first seed; target subjects are circled."
    return draw(f"map-{method}-{number}", caption, caption, (9.5, 3.6), paint, raster=True)


def by_atlas(method: str, explanation: Explanation) -> dict[str, Explanation]:
    """Explanation of each atlas by a name for tables and figures, which has the atlas if there are several."""
    atlases = explanation.by_atlas()
    return {f"{method} ({atlas})" if len(atlases) > 1 else method: each for atlas, each in atlases.items()}


def explained_text(explanation: Explanation, count: int) -> str:
    """What the scores of a mean explanation over so many cells are, and how far they can be trusted."""
    scores, error = str(explanation.about["scores"]), explanation.error()
    text = f"{scores[0].upper()}{scores[1:]}. "
    if error is not None:
        relative = f"median {100 * error['median_relative']:.1f} % of the decision, " if "median_relative" in error else ""
        text += f"Completeness error of the attributions: {relative}at most {error['max_absolute']:.2g} logits. "
    text += f"Mean over {count} explained cell{'s' * (count > 1)}."
    if explanation.about.get("agreement") is not None:
        agreement = explanation.about["agreement"]
        text += f" Mean rank correlation of ROI scores between cells: {agreement:.2f} (1: identical order)."
    agreeing = {name: one["agreement"] for name, one in explanation.about.get("structure", {}).items() if "agreement" in one}
    if agreeing:
        shown = ", ".join(f"{value:.2f} ({name})" for name, value in agreeing.items())
        text += f" Of the directions of regions: {shown}."
    return " ".join([text, *explanation.lacking(), *explanation.about_rois()])


def explained_figures(method: str, explanation: Explanation, cells: Cells) -> list[Figure]:
    """ROIs, edges, regions of tables, gate weights, and maps of the first seed for the first few targets."""
    atlases = {name: each for name, each in by_atlas(method, explanation).items() if each.rois["score"].any()}
    drawn: list[Figure | None] = []  # the page has two columns: bars beside their brains
    for name, each in atlases.items():
        drawn += [top_rois(name, each.rois), glass_brain(name, each.rois)]
    for name, own in by_table(explanation.regions).items():
        drawn += [top_regions(method, name, own), brain_of_regions(method, name, own)]
    drawn += [top_edges(name, each.edges, each.rois) for name, each in atlases.items()]
    drawn.append(gate_weights(method, explanation.gate))
    maps: dict[str, pd.DataFrame] = {}
    for record, each in cells:
        if len(each.map):
            maps.setdefault(record["target"], each.map)
    drawn += [representation_map(method, target, maps[target], i) for i, target in enumerate([*maps][:MOST_MAPS])]
    return [figure for figure in drawn if figure is not None]


def explained_tables(method: str, explanation: Explanation) -> list[Table]:
    """Scores of ROIs, edges, lobes, networks, phenotypes and regions of tables."""
    tables = [_lobes_over_atlases(method, explanation)]
    for name, each in by_atlas(method, explanation).items():
        tables.append(_scores(f"ROIs, {name}", each.rois, ["rank", "roi", "code", "x", "y", "z", "score", "low", "high"]))
        tables += [_grouped(name, each, by) for by in ("lobe", "network")]
        tables.append(_scores(f"Edges, {name}", each.edges, ["roi", "other roi", "score", "low", "high", "direction"]))
    names = ["phenotype", "score", "low", "high", "direction"]
    tables.append(_scores(f"Phenotypes, {method}", explanation.phenotypes, names))
    names = ["region", "column", "x", "y", "z", "score", "direction", "low", "high", SAME]  # low and high are of the direction
    for name, own in by_table(explanation.regions).items():
        tables.append(_scores(f"Regions of table {name}, {method}", own, names))
    return [table for table in tables if table.rows]


def _scores(title: str, table: pd.DataFrame, names: list[str]) -> Table:
    of = " of directions" if SAME in names else ""
    names = [name for name in names if name in table]
    top = table[table["score"] > 0].head(TOP)[names]
    texts = ("roi", "other roi", "code", "phenotype", "region", "column")
    header = [Column(name, "text" if name in texts else "number", ".1f" if name in "xyz" else ".4g") for name in names]
    header = [Column(f"{SAME}, %", "percent", ".0f") if one.name == SAME else one for one in header]
    named = top.assign(**{name: top[name].map(lambda roi: roi_label(str(roi))) for name in ("roi", "other roi") if name in top})
    rows = [list(row) for row in named.itertuples(index=False)]
    return Table(
        title, header, rows, f"{len(rows)} highest of {len(table)} scores; low, high: interval{of} over folds and seeds"
    )


def _lobes_over_atlases(method: str, explanation: Explanation) -> Table:
    """Without rows unless two atlases have lobes."""
    table = explanation.over_atlases()
    header = [Column("lobe"), *columns("percent", "mean, %", *(f"{name}, %" for name in table.columns[2:]), form=".1f")]
    note = "proportion of the sum of all ROI scores of an atlas; mean: over atlases, each counting the same"
    rows = [list(row) for row in table.itertuples(index=False)]
    return Table(f"ROI scores by lobe over atlases, {method}", header, rows, note)


def _grouped(method: str, explanation: Explanation, by: str) -> Table:
    """Sums of the ROI scores of each lobe or network."""
    groups = explanation.by_group(by)
    groups = groups[groups["score"] > 0]
    rows = [
        [str(name), rois, score, score / groups["score"].sum(), each]
        for name, rois, score, each in groups[[by, "rois", "score", "score per roi"]].itertuples(index=False)
    ]
    header = [Column(by), Column("ROIs", "count"), Column("score", "number", ".4g"), Column("of all, %", "percent", ".1f")]
    note = f"sum of the scores of the ROIs of each {by}; a {by} with more ROIs has a higher sum"
    return Table(f"ROI scores by {by}, {method}", [*header, Column("score per ROI", "number", ".4g")], rows, note)


def readability_table(title: str, explanations: Mapping[str, Explanation]) -> Table | None:
    """Accuracy of linear probes for site and label; None if no method has them."""
    names = {"site": "site accuracy", "site_chance": "site chance", "label": "label accuracy", "label_chance": "label chance"}
    rows = []
    for method, explanation in explanations.items():
        numbers = explanation.about.get("readability")
        if numbers:
            rows.append([method, *(numbers.get(name, NAN) for name in (*names, "dimensions"))])
    header = [Column("Method"), *columns("percent", *(f"{name}, %" for name in names.values()), form=".1f")]
    header.append(Column("effective dimensions", "number", ".1f"))
    return Table(title, header, rows, "accuracy of linear probes, mean over explained cells") if rows else None


def planted_table(contents: Contents) -> Table | None:
    """Planted ROIs and edges among as many of the highest scores, with the number expected by chance; None if unknown."""
    planted, known = contents.description.get("planted"), contents.known_rois
    if not planted or known is None or not contents.mean_explanations:
        return None
    rois, edges = {frozenset([roi]) for roi in planted.get("rois", ())}, {frozenset(edge) for edge in planted.get("edges", ())}
    count = len(known[1])
    rows: list[list[Value]] = []
    for method, explanation in contents.mean_explanations.items():
        first = next(iter(explanation.by_atlas().values()))
        found = _found(first.rois, ["roi"], rois), _found(first.edges, ["roi", "other roi"], edges)
        rows.append([method, *found])
    means = read_connectomes(contents.folder).get("difference")
    if means is not None and len(means) == count:
        i, j = np.triu_indices(count, 1)
        names = np.array(known[1], dtype=object)
        table = pd.DataFrame({"roi": names[i], "other roi": names[j], "score": np.abs(means[i, j])})
        rows.append(["difference of the class means, no model", NAN, _found(table, ["roi", "other roi"], edges)])
    chance = (len(rois) ** 2 / count, len(edges) ** 2 / (count * (count - 1) / 2))
    header = [Column("Method"), *columns("count", f"of {len(rois)} planted ROIs", f"of {len(edges)} planted edges")]
    note = (
        f"planted ROIs among the {len(rois)} highest scores, planted edges among the {len(edges)} highest; expected by chance: "
        f"{chance[0]:.1f} ROIs and {chance[1]:.1f} edges. A planted ROI also changes its edges, so other edges can be true, too"
    )
    return Table("Planted and found", header, rows, note)


def _found(table: pd.DataFrame, names: list[str], planted: set[frozenset[str]]) -> float:
    """Number of planted ROIs or edges among as many of the highest positive scores; NaN without scores."""
    if not len(table) or not (table["score"] > 0).any():
        return NAN
    top = table[table["score"] > 0].sort_values("score", ascending=False, kind="stable").head(len(planted))
    return sum(frozenset(row) in planted for row in top[names].to_numpy().tolist())
