"""The data of a study for the report: its sites and classes in numbers, and mean connectomes.

Made from the files that `m2lgdg run` writes, or from the cohort where it is available. What is not known is left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
from matplotlib import colormaps

from m2lgdg.explain.explanation import roi_label
from m2lgdg.report.contents import Contents
from m2lgdg.report.drawing import WIDTH, Figure, Sheet, draw, short
from m2lgdg.report.tables import Table
from m2lgdg.study.description import LEAST, Floats, read_connectomes, read_site_connectomes, square

MOST_EDGES = 20
NAMED = 3  # edges in the caption
MOST_SITES, SITES_ACROSS = 24, 4
Group = dict[str, Any]


def site_table(contents: Contents) -> Table | None:
    """Subjects, patients, age, sex, TR, volumes and motion of all, of each class and of each site; largest site first."""
    groups, sites = contents.description.get("groups", {}), contents.description.get("sites", {})
    sites = sites or _counted_sites(contents)
    if not sites:
        return None
    left_out = Counter(row["site"] for row in contents.inclusion if row["status"] == "excluded")
    targets = set(contents.predictions["target"])
    ordered = sorted(sites.items(), key=lambda item: (-item[1]["subjects"], item[0]))
    rows: list[tuple[str, Group]] = []
    for name, group in groups.items():  # of a class, the proportion of patients says nothing
        rows.append(("all", group) if name == "all" else (f"all {name}", _without(group, "patients")))
    for site, group in ordered:
        rows.append((site, group | {"left": left_out[site], "role": "target" if site in targets else "source"}))
    columns: dict[str, Callable[[Group], str]] = {
        "subjects": lambda group: f"{group['subjects']:,}",
        "left out": lambda group: str(group["left"]) if "left" in group else "-",
        "patients": _patients,
        "age, years": lambda group: _quartiles(group.get("age"), ".1f"),
        "male": lambda group: _percent(group.get("male"), group.get("sex_known")),
        "TR, s": lambda group: _span(group.get("tr")),
        "volumes": lambda group: _span(group.get("volumes")),
        "motion, mm": lambda group: _quartiles(group.get("motion"), ".2f"),
        "role": lambda group: str(group.get("role", "-")),
    }
    cells = {title: [show(group) for _, group in rows] for title, show in columns.items()}
    shown = {title: values for title, values in cells.items() if set(values) != {"-"}}
    for name, same in (("left out", "0"), ("role", "target")):
        if set(shown.get(name, ())) <= {"-", same}:
            shown.pop(name, None)
    table = [[name, *(values[i] for values in shown.values())] for i, (name, _) in enumerate(rows)]
    note = "subjects of the cohort of this study, largest site first"
    note += "; age: median (quartiles)" if "age, years" in shown else ""
    note += "; motion: mean framewise displacement, median (quartiles)" if "motion, mm" in shown else ""
    return Table("Sites", ["Site", *shown], table, [[0] * (1 + len(shown)) for _ in table], note)


def _counted_sites(contents: Contents) -> dict[str, Group]:
    """Subjects of each site from inclusion.csv, and patients of target sites whose subjects were all tested."""
    sizes = Counter(row["site"] for row in contents.inclusion if row["status"] == "included")
    tested = contents.predictions.drop_duplicates(["target", "subject"]).groupby("target", sort=False)["label"]
    labels = {str(site): values.to_numpy() for site, values in tested}
    sites: dict[str, Group] = {site: {"subjects": size} for site, size in sizes.items()}
    for site, group in sites.items():
        if len(labels.get(site, ())) == group["subjects"]:
            group["patients"] = int(labels[site].sum())
            group["controls"] = group["subjects"] - group["patients"]
    return sites


def _without(group: Group, name: str) -> Group:
    return {key: value for key, value in group.items() if key != name}


def _patients(group: Group) -> str:
    if "patients" not in group:
        return "-"
    labelled = group["patients"] + group["controls"]
    return f"{group['patients']:,} ({100 * group['patients'] / labelled:.0f} %)" if labelled else str(group["patients"])


def _percent(part: int | None, whole: int | None) -> str:
    return f"{100 * part / whole:.0f} %" if whole and part is not None else "-"


def _quartiles(values: list[float] | str | None, form: str) -> str:
    if values is None or isinstance(values, str):
        return values or "-"
    low, middle, high = (format(value, form) for value in values)
    return f"{middle} ({low} to {high})"


def _span(values: list[float] | None) -> str:
    if values is None:
        return "-"
    low, high = f"{values[0]:.4g}", f"{values[-1]:.4g}"
    return low if low == high else f"{low} to {high}"


def connectomes(contents: Contents) -> tuple[Figure | None, Table | None]:
    """Mean connectomes of both classes with their difference, and the edges that differ most; None if they are not stored."""
    means = read_connectomes(contents.folder)
    known = contents.known_rois
    if not means or known is None or len(known[1]) != len(means["difference"]):
        return None, None
    names = [roi_label(roi) for roi in known[1]]
    edges = _largest(means["difference"], MOST_EDGES)
    rows = []
    for i, j in edges:
        values = [f"{means[name][i, j]:.3f}" for name in ("controls", "patients")]
        rows.append([names[i], names[j], *values, f"{means['difference'][i, j]:+.3f}"])
    header = ["ROI", "other ROI", "controls", "patients", "difference within sites"]
    note = (
        f"{len(rows)} largest of {len(names) * (len(names) - 1) // 2:,} differences of the mean Fisher-z FC, patients minus "
        "controls within sites; all subjects of the cohort, so neither tested nor a result of a left-out site"
    )
    table = Table("Edges that differ most between classes", header, rows, [[0] * 5 for _ in rows], note)
    named = "; ".join(f"{row[0]} and {row[1]} {row[4]}" for row in rows[:NAMED])
    return _matrices(means, named), table


def site_connectomes(contents: Contents) -> Figure | None:
    """Mean connectome of each site minus the mean over sites; None if fewer than two sites have a stored mean."""
    means, sites = read_site_connectomes(contents.folder), contents.description.get("sites", {})
    if means is None or len(means) != len(sites):
        return None
    labelled = {name: group["patients"] + group["controls"] for name, group in sites.items()}
    known = [(*each, row) for each, row in zip(labelled.items(), means, strict=True) if not np.isnan(row).any()]
    if len(known) < 2:
        return None
    centre = np.mean([row for *_, row in known], axis=0)
    known = sorted(known, key=lambda each: (-each[1], each[0]))
    shown = known[:MOST_SITES]
    distance = {name: float(np.sqrt(np.mean((row - centre) ** 2))) for name, _, row in known}
    most = float(np.quantile(np.abs([row - centre for *_, row in shown]), 0.995)) or 1.0
    lines = -(-len(shown) // SITES_ACROSS)

    def paint(sheet: Sheet) -> None:
        hues = colormaps["RdBu_r"].resampled(41)
        axes = np.ravel(sheet.canvas.subplots(lines, SITES_ACROSS, squeeze=False))
        for axis in axes:
            axis.axis("off")
        for axis, (name, subjects, row) in zip(axes, shown, strict=False):
            image = axis.imshow(square(row - centre), cmap=hues, vmin=-most, vmax=most, interpolation="nearest")
            axis.set_title(f"{short(name, 14)} ({subjects})", fontsize=8)
        sheet.canvas.colorbar(image, ax=axes.tolist(), location="bottom", shrink=0.4, aspect=30, label="Fisher z")

    far, usual = max(distance, key=lambda name: distance[name]), float(np.median(list(distance.values())))
    caption = (
        "Mean functional connectivity of each site minus the mean over sites, labelled subjects (their number in brackets), "
        "ROIs as above. This is what a method has to see through at a site it does not know. Farthest from the mean: "
        f"{far} (root mean square {distance[far]:.3f} over edges; median of the sites {usual:.3f})."
    )
    caption += f" The {MOST_SITES} largest of {len(known)} sites are shown." if len(known) > MOST_SITES else ""
    caption += f" Sites with fewer than {LEAST} labelled subjects are left out." if len(known) < len(sites) else ""
    size = (WIDTH, 0.9 + 1.6 * lines)
    return draw("site-connectomes", caption, "Mean connectome of each site minus the mean over sites", size, paint, raster=True)


def _largest(matrix: Floats, count: int) -> list[tuple[int, int]]:
    """The edges of largest absolute value, one of each pair."""
    rows, columns = np.triu_indices(len(matrix), 1)
    order = np.argsort(-np.abs(matrix[rows, columns]), kind="stable")[:count]
    return [(int(rows[i]), int(columns[i])) for i in order]


def _matrices(means: dict[str, Floats], named: str) -> Figure:
    """Means of both classes in one matrix, one on each side of the diagonal, and the difference."""
    both = np.triu(means["patients"]) + np.tril(means["controls"])
    panels = {"patients above, controls below": both, "patients minus controls": means["difference"]}

    def paint(sheet: Sheet) -> None:
        hues = colormaps["RdBu_r"].resampled(41)  # of more, scales are images with the same id, which a page cannot have twice
        for axis, (title, matrix) in zip(sheet.canvas.subplots(1, 2), panels.items(), strict=True):
            most = float(np.quantile(np.abs(matrix), 0.995)) or 1.0
            shown = axis.imshow(matrix, cmap=hues, vmin=-most, vmax=most, interpolation="nearest")
            axis.set_title(title, fontsize=9)
            axis.set(xlabel="ROI", ylabel="ROI")
            sheet.canvas.colorbar(shown, ax=axis, location="bottom", shrink=0.8, aspect=30, label="Fisher z")

    caption = (
        "Mean functional connectivity (Fisher z). Left: patients above and controls below the diagonal. Right: patients minus "
        "controls, weighted mean of the differences within sites, which leaves out what differs between sites only. "
        f"Colours end at the 99.5th percentile. Largest differences: {named}."
    )
    return draw("connectomes", caption, "Mean connectomes of patients and controls, and their difference", (WIDTH, 3.8), paint)
