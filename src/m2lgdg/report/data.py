"""The data of a study for the report: flow of subjects, sites and classes in numbers, and mean connectomes.

Made from the files that `m2lgdg run` writes, or from the cohort where it is available. What is not known is left out.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np
from matplotlib import colormaps

from m2lgdg.explain.explanation import roi_label
from m2lgdg.findings import anonymous_sentences, is_duplicate, problems, summary
from m2lgdg.report.contents import MATRICES, Contents
from m2lgdg.report.drawing import CARD, FAINT, INK, WIDTH, Figure, Sheet, draw, on_page, short
from m2lgdg.report.tables import NAN, Column, Estimate, Interval, Table, Value, columns
from m2lgdg.scans import PARTIAL, SERIES
from m2lgdg.study.description import LEAST, NOT_CHECKED, Floats, read_connectomes, read_site_connectomes, square

MOST_EDGES, NAMED = 20, 3  # edges in the table, and in the caption
MOST_SITES, SITES_ACROSS = 24, 4
MOST_REASONS = 6
MOST_FINDINGS = 5  # of the box on the data that are not collapsed
DROP = " Both subjects of a pair are in the results below; m2lgdg convert --drop-duplicates leaves duplicates out of a cohort."
FLOW, LEFT, RIGHT = 520, 235, 255  # pixels: width of the flow diagram, of its main boxes, and of the boxes with reasons
GAP, PAD, LINE, INDENT = 26, 11, 19, 10
Group = dict[str, Any]
Step = tuple[list[str], list[str]]  # lines of the main box, and of the box beside the arrow that leaves it


def site_table(contents: Contents) -> Table | None:
    """Subjects, patients, age, sex, TR, volumes and motion of all, of each class and of each site; largest site first."""
    groups, sites = contents.description.get("groups", {}), contents.description.get("sites", {})
    sites = sites or _counted_sites(contents)
    if not sites:
        return None
    excluded = Counter(row["site"] for row in contents.included("excluded"))
    targets = set(contents.predictions["target"])
    rows: list[tuple[str, Group]] = []
    for name, group in groups.items():  # of a class, the proportion of patients says nothing
        classes = ("patients", "controls") if name != "all" else ()
        rows.append((f"all {name}" if classes else "all", {key: group[key] for key in group if key not in classes}))
    for site, group in sorted(sites.items(), key=lambda item: (-item[1]["subjects"], item[0])):
        rows.append((site, group | {"excluded": excluded[site], "role": "target" if site in targets else "source"}))
    show: dict[Column, Callable[[Group], Value]] = {
        Column("subjects", "number", ",.0f"): lambda group: group["subjects"],
        Column("left out", "number", ",.0f"): lambda group: group.get("excluded", NAN),
        Column("patients", "number", ",.0f"): lambda group: group.get("patients", NAN),
        Column("patients, %", "percent", ".0f"): _prevalence,
        Column("age, years", "number", ".1f"): lambda group: _quartiles(group.get("age")),
        Column("male, %", "percent", ".0f"): lambda group: group["male"] / group["sex_known"] if "male" in group else NAN,
        Column("TR, s", "number", ".4g"): lambda group: _span(group.get("tr")),
        Column("volumes", "number", ".4g"): lambda group: _span(group.get("volumes")),
        Column("motion, mm", "number", ".2f"): lambda group: _quartiles(group.get("motion")),
        **{Column(f"without {name}", "number", ",.0f"): _lacking(name) for name in contents.tables},
        Column("role"): lambda group: str(group.get("role", "-")),
    }
    cells = {column: [of(group) for _, group in rows] for column, of in show.items()}
    needless = {"left out": "0", "role": "target"} | {f"without {name}": "0" for name in contents.tables}  # in all rows
    shown = {
        column: values
        for column, values in cells.items()
        if not {column.shown(value) for value in values} <= {"-", needless.get(column.name, "-")}
    }
    names = {column.name for column in shown}
    note = "subjects of the cohort of this study, largest site first"
    note += "; age: median (quartiles)" if "age, years" in names else ""
    note += "; motion: mean framewise displacement, median (quartiles)" if "motion, mm" in names else ""
    table = [[name, *(values[i] for values in shown.values())] for i, (name, _) in enumerate(rows)]
    return Table("Sites", [Column("Site"), *shown], table, note)


def _lacking(table: str) -> Callable[[Group], Value]:
    return lambda group: float(group.get("without", {}).get(table, NAN))


def structure_table(contents: Contents) -> Table | None:
    """Columns of each table of brain structure, and who lacks it; None without any."""
    groups = contents.description.get("groups", {})
    rows: list[list[Value]] = []
    for name, about in contents.tables.items():
        lacking = [_lacking(name)(groups.get(kind, {})) for kind in ("patients", "controls")]
        numbers = [about["columns"], about["constant"], about["subjects"], *lacking, about["gaps"]]
        rows.append([name, *numbers, about["head_size"] or "none"])
    header = [Column("Table"), *columns("count", "columns", "constant columns", "subjects")]
    header += [*columns("count", "patients without", "controls without"), Column("gaps, %", "percent", ".1f")]
    note = (
        "a subject has a table if at least half of its columns have a value; others are decided without it; gaps: missing "
        "values of those who have it; head size: the column that is regressed out, with age and sex, where a method does that"
    )
    return Table("Tables of brain structure", [*header, Column("head size")], rows, note) if rows else None


def _on_tables(contents: Contents) -> str:
    """A sentence on the tables; empty without any."""
    if not contents.tables:
        return ""
    whole = len(contents.included()) or contents.predictions["subject"].nunique()
    each = [
        f"{name} ({_counted(about['columns'], 'column')}, {about['subjects']:,} of {whole:,} subjects)"
        for name, about in contents.tables.items()
    ]
    failed = sum(one.kind == "failed segmentation" for one in contents.findings or ())
    more = f" The segmentation of {_counted(failed, 'subject')} may have failed." if failed else ""
    return f" Tables of brain structure: {', '.join(each)}.{more}"


def _counted_sites(contents: Contents) -> dict[str, Group]:
    """Subjects of each site from inclusion.csv, and patients of target sites whose subjects were all tested."""
    sizes = Counter(row["site"] for row in contents.included())
    tested = contents.predictions.drop_duplicates(["target", "subject"]).groupby("target", sort=False)["label"]
    labels = {str(site): values.to_numpy() for site, values in tested}
    sites: dict[str, Group] = {site: {"subjects": size} for site, size in sizes.items()}
    for site, group in sites.items():
        if len(labels.get(site, ())) == group["subjects"]:
            patients = int(labels[site].sum())
            group |= {"patients": patients, "controls": group["subjects"] - patients}
    return sites


def _prevalence(group: Group) -> float:
    labelled = group.get("patients", 0) + group.get("controls", 0)
    return group["patients"] / labelled if labelled else NAN


def _quartiles(values: list[float] | str | None) -> Value:
    if values is None or isinstance(values, str):  # in words in a shared report
        return values or NAN
    low, middle, high = values
    return Estimate(middle, low, high)


def _span(values: list[float] | None) -> Value:
    if values is None:
        return NAN
    return Interval(values[0], values[-1]) if f"{values[0]:.4g}" != f"{values[-1]:.4g}" else values[0]


def flow_diagram(contents: Contents) -> Figure | None:
    """Boxes from all subjects of the release to those tested; None without inclusion.csv."""
    steps = flow_steps(contents)
    if not steps:
        return None
    svg = _drawn(steps)
    words = "; ".join(" ".join(lines) for step in steps for lines in step if lines)
    caption = "Flow of subjects. Left: subjects of the release, of the cohort and of the tested sites. Right: who left and why."
    return Figure("flow", caption, words, svg.encode(), b"", on_page(svg, "flow", words))


def flow_steps(contents: Contents) -> list[Step]:
    """Lines of each box, from top to bottom."""
    included, reasons = contents.included(), contents.exclusions()
    if not included:
        return []
    listed = [row["site"] for row in contents.inclusion if row["site"]]  # a scan of nobody in the table has no site
    first = [f"{_counted(len(listed), 'subject')} listed", f"of {_counted(len(set(listed)), 'site')}"]
    if scans := len(contents.inclusion) - len(listed):
        first.append(f"and {_counted(scans, 'scan')} of no listed subject")
    left, rest = (sum(count for _, count in some) for some in (reasons, reasons[MOST_REASONS:]))
    named = reasons[:MOST_REASONS] + [("other reasons", rest)] * (rest > 0)
    beside = [f"{left:,} left out", *(f"{reason}: {count:,}" for reason, count in named)] if left else []
    steps: list[Step] = [(first, beside)]
    everybody = contents.description.get("groups", {}).get("all", {})
    classes = [f"{everybody['patients']:,} patients, {everybody['controls']:,} controls"] if everybody else []
    tested = contents.predictions.drop_duplicates(["target", "subject"])
    targets = set(tested["target"])
    others = Counter(row["site"] for row in included if row["site"] not in targets)
    unlabelled = len(included) - others.total() - len(tested)
    aside = []
    if others:
        aside += [f"{others.total():,} used for training only", f"of {_counted(len(others), 'site')} that were no target"]
    if unlabelled > 0:
        aside += [f"{unlabelled:,} not tested", "without a label or not yet run"]
    sites = {row["site"] for row in included}
    steps.append(([f"{len(included):,} included", *classes, f"of {_counted(len(sites), 'site')}"], aside))
    last = [f"{len(tested):,} tested", f"at {_counted(len(targets), 'target site')}", "unseen in training"]
    return [*steps, (last, [])]


def _counted(count: int, name: str) -> str:
    return f"{count:,} {name}{'s' * (count != 1)}"


def _drawn(steps: list[Step]) -> str:
    shapes: list[str] = []
    top = bottom = 1.0
    for main, aside in steps:
        if shapes:
            shapes.append(_line(LEFT / 2, bottom, LEFT / 2, top))
        box, height = _box(0, top, LEFT, main)
        shapes.append(box)
        bottom, top = top + height, top + height
        if aside:
            box, height = _box(FLOW - RIGHT, bottom + 8, RIGHT, aside)
            shapes += [box, _line(LEFT / 2, bottom + 8 + height / 2, FLOW - RIGHT - 2, bottom + 8 + height / 2)]
            top += max(GAP, height + 16)
        else:
            top += GAP
    head = '<marker id="flow-tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    head += f'<path d="M0 0L8 4L0 8z" fill="{FAINT}"/></marker>'
    width = FLOW if any(aside for _, aside in steps) else LEFT + 2
    size = f'viewBox="-1 0 {width + 2} {bottom + 1:g}" width="{width + 2}" height="{bottom + 1:g}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="15">'
        f"<defs>{head}</defs>{''.join(shapes)}</svg>"
    )


def _box(x: float, y: float, width: float, lines: list[str]) -> tuple[str, float]:
    """A box with lines that fit into it, the first in bold, and its height."""
    wrapped = [(words, INDENT * (i > 0)) for line in lines for i, words in enumerate(_wrapped(line, width - 2 * PAD))]
    height = 2 * PAD + LINE * len(wrapped) - 4
    box = f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="5" fill="{CARD}" stroke="{FAINT}"/>'
    for i, (words, indent) in enumerate(wrapped):
        place = f'x="{x + PAD + indent:g}" y="{y + PAD + 12 + LINE * i:g}"'
        box += f'<text {place} fill="{INK}"{"" if i else FIRST}>{escape(words)}</text>'
    return box, height


def _wrapped(line: str, width: float) -> list[str]:
    """Lines of text that fit into a width; a word that does not is broken."""
    lines = [""]

    def fits(text: str) -> bool:
        return _width(lines[-1] + text.rstrip()) <= width - INDENT * (len(lines) > 1)

    for word in re.findall(r"\S+\s*", line):
        lines += [""] * bool(lines[-1] and not fits(word))
        for letter in word:
            lines += [""] * (not fits(letter))
            lines[-1] += letter
    return [one.rstrip() for one in lines]


def _width(text: str) -> float:
    """Width in pixels in a wide font."""
    wide, narrow = "mwMW@%—…", "fijlrt.,:;'|()[]! "
    return sum(14 if letter in wide or ord(letter) > 0x2E80 else 5.6 if letter in narrow else 9.3 for letter in text)


FIRST = ' font-weight="600"'


def _line(x: float, y: float, to_x: float, to_y: float) -> str:
    return f'<path d="M{x:g} {y:g}L{to_x:g} {to_y:g}" stroke="{FAINT}" fill="none" marker-end="url(#flow-tip)"/>'


def connectomes(contents: Contents) -> tuple[Figure | None, Table | None]:
    """Mean connectomes of both classes with their difference, and the edges that differ most; None if not stored."""
    means, (measure, brief) = read_connectomes(contents.folder), _measured(contents)
    known = contents.known_rois
    if not means or known is None or len(known[1]) != len(means["difference"]):
        return None, None
    names = [roi_label(roi) for roi in known[1]]
    above = np.triu_indices(len(names), 1)
    order = np.argsort(-np.abs(means["difference"][above]), kind="stable")[:MOST_EDGES]
    pairs = [(int(above[0][k]), int(above[1][k])) for k in order]
    kinds = ("controls", "patients", "difference")
    rows: list[list[Value]] = [[names[i], names[j], *(float(means[kind][i, j]) for kind in kinds)] for i, j in pairs]
    header = [Column("ROI"), Column("other ROI"), *columns("number", "controls", "patients", form=".3f")]
    note = (
        f"{len(rows)} largest of {len(above[0]):,} differences of the mean Fisher-z {brief}, patients minus controls within "
        "sites; all subjects of the cohort, so neither tested nor a result of a left-out site"
    )
    header.append(Column("difference within sites", "number", "+z.3f"))
    named = "; ".join(f"{first} and {second} {value:+.3f}" for first, second, *_, value in rows[:NAMED])
    return _matrices(means, measure, named), Table("Edges that differ most between classes", header, rows, note)


def _measured(contents: Contents) -> tuple[str, str]:
    """What the mean connectomes are of, and its short name."""
    return ("partial correlation",) * 2 if contents.scans == PARTIAL else ("functional connectivity", "FC")


def _matrices(means: dict[str, Floats], measure: str, named: str) -> Figure:
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
        f"Mean {measure} (Fisher z). Left: patients above and controls below the diagonal. Right: patients minus "
        "controls, weighted mean of the differences within sites, which leaves out what differs between sites only. "
        f"Colours end at the 99.5th percentile. Largest differences: {named}."
    )
    return draw("connectomes", caption, "Mean connectomes of patients and controls, and their difference", (WIDTH, 3.8), paint)


def site_connectomes(contents: Contents) -> Figure | None:
    """Mean connectome of each site minus the mean over sites; None if fewer than two sites have one."""
    means, sites = read_site_connectomes(contents.folder), contents.description.get("sites", {})
    if means is None or len(means) != len(sites):
        return None
    labelled = [(name, group["patients"] + group["controls"]) for name, group in sites.items()]
    known = [(name, count, row) for (name, count), row in zip(labelled, means, strict=True) if not np.isnan(row).any()]
    if len(known) < 2:
        return None
    centre = np.mean([row for *_, row in known], axis=0)
    known = sorted(((name, count, row - centre) for name, count, row in known), key=lambda each: (-each[1], each[0]))
    shown = known[:MOST_SITES]
    distance = {name: float(np.sqrt(np.mean(row**2))) for name, _, row in known}
    most = float(np.quantile(np.abs([row for *_, row in shown]), 0.995)) or 1.0
    lines = -(-len(shown) // SITES_ACROSS)

    def paint(sheet: Sheet) -> None:
        hues = colormaps["RdBu_r"].resampled(41)
        axes = np.ravel(sheet.canvas.subplots(lines, SITES_ACROSS, squeeze=False))
        for axis in axes:
            axis.axis("off")
        for axis, (name, subjects, row) in zip(axes, shown, strict=False):
            image = axis.imshow(square(row), cmap=hues, vmin=-most, vmax=most, interpolation="nearest")
            axis.set_title(f"{short(name, 14)} ({subjects})", fontsize=8)
        sheet.canvas.colorbar(image, ax=axes.tolist(), location="bottom", shrink=0.4, aspect=30, label="Fisher z")

    far, usual = max(distance, key=lambda name: distance[name]), float(np.median(list(distance.values())))
    caption = (
        f"Mean {_measured(contents)[0]} of each site minus the mean over sites, labelled subjects (their number in brackets), "
        "ROIs as above. This is what a method has to see through at a site it does not know. Farthest from the mean: "
        f"{far} (root mean square {distance[far]:.3f} over edges; median of the sites {usual:.3f})."
    )
    caption += f" The {MOST_SITES} largest of {len(known)} sites are shown." if len(known) > MOST_SITES else ""
    caption += f" Sites with fewer than {LEAST} labelled subjects are left out." if len(known) < len(sites) else ""
    size = (WIDTH, 0.9 + 1.6 * lines)
    return draw("site-connectomes", caption, "Mean connectome of each site minus the mean over sites", size, paint, raster=True)


@dataclass(frozen=True)
class Data:
    """The box on the data: a summary of the findings, the first ones, and the others, which are collapsed."""

    summary: str
    shown: list[str]
    folded: list[str]


def findings_box(contents: Contents) -> Data | None:
    """What the check of the cohort reported; None if nothing."""
    if contents.findings is None:
        return Data(NOT_CHECKED, [], [])
    findings = problems(contents.findings)
    if not findings:
        return None
    pairs = [one for one in findings if is_duplicate(one)]
    others = sorted(findings[len(pairs) :], key=lambda one: not one.kind.endswith("by label"))  # what leaks comes first
    groups = (pairs, others)
    stored = [[{"kind": one.kind, "text": one.text} for one in group] for group in groups]
    sentences = [sentence for group in stored for sentence in anonymous_sentences(group)]
    cut = MOST_FINDINGS if len(sentences) > MOST_FINDINGS + 1 else MOST_FINDINGS + 1
    return Data(f"{summary(findings)}.{DROP if pairs else ''}", sentences[:cut], sentences[cut:])


def who(contents: Contents) -> str:
    """Included subjects, the excluded ones with the reasons, what connectomes hold, and which tables there are."""
    if contents.scans == SERIES:
        return _who(contents) + _on_tables(contents)
    between = "" if contents.known_rois is None else f" between {len(contents.known_rois[1])} ROIs"
    kind = f" The scans are connectomes ({MATRICES[contents.scans]}{between}), not time series."
    return _who(contents) + kind + _on_tables(contents)


def _who(contents: Contents) -> str:
    included, reasons = contents.included(), contents.exclusions()
    if not included:
        return f"{contents.predictions['subject'].nunique()} subjects were tested."
    sentence = f"{len(included)} subjects of {len({row['site'] for row in included})} sites"
    if contents.cohort is not None:
        labels = contents.cohort.labels
        sentence += f" ({(labels == 1).sum()} patients, {(labels == 0).sum()} controls)"
    if not reasons:
        return f"{sentence}; no subject was excluded."
    listed = "; ".join(f"{reason} ({count})" for reason, count in reasons[:MOST_REASONS])
    more = "; other reasons in inclusion.csv" if len(reasons) > MOST_REASONS else ""
    return f"{sentence}; {sum(count for _, count in reasons)} excluded: {listed}{more}."
