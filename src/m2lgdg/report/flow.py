"""Flow diagram of subjects as SVG: who was in the release, left out and why, included, and tested.

Made from `inclusion.csv` and the predictions of a study, for the first section of the report.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from html import escape

from m2lgdg.report.contents import Contents
from m2lgdg.report.drawing import CARD, FAINT, INK, Figure, on_page

WIDTH, LEFT, RIGHT = 520, 235, 255  # of the picture, of the main boxes, and of the boxes with reasons
GAP, PAD, LINE, LETTERS = 26, 11, 19, 7.7  # pixels; LETTERS is the mean width of one
MOST_REASONS = 6
Step = tuple[list[str], list[str]]  # lines of the main box, and of the box beside the arrow that leaves it


def flow_diagram(contents: Contents) -> Figure | None:
    """Boxes from all subjects of the release to those tested; None for a folder without inclusion.csv."""
    steps = flow_steps(contents)
    if not steps:
        return None
    svg = _drawn(steps)
    words = "; ".join(" ".join(lines) for step in steps for lines in step if lines)
    caption = "Flow of subjects. Left: subjects of the release, of the cohort and of the tested sites. Right: who left and why."
    return Figure("flow", caption, words, svg.encode(), b"", on_page(svg, "flow", words))


def flow_steps(contents: Contents) -> list[Step]:
    """Lines of each box, from top to bottom."""
    included = [row for row in contents.inclusion if row["status"] == "included"]
    excluded = [row for row in contents.inclusion if row["status"] == "excluded"]
    if not included:
        return []
    sites = {row["site"] for row in included}
    listed = len({row["site"] for row in contents.inclusion})
    first = [f"{_counted(len(contents.inclusion), 'subject')} listed", f"of {_counted(listed, 'site')}"]
    steps: list[Step] = [(first, _reasons(excluded))]
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
    steps.append(([f"{len(included):,} included", *classes, f"of {_counted(len(sites), 'site')}"], aside))
    last = [f"{len(tested):,} tested", f"at {_counted(len(targets), 'target site')}", "that their models never saw"]
    return [*steps, (last, [])]


def _reasons(excluded: list[dict[str, str]]) -> list[str]:
    if not excluded:
        return []
    reasons = Counter(row["kind"] for row in excluded).most_common()
    lines = [f"{reason}: {count:,}" for reason, count in reasons[:MOST_REASONS]]
    rest = sum(count for _, count in reasons[MOST_REASONS:])
    return [f"{len(excluded):,} left out", *lines, *([f"other reasons: {rest:,}"] if rest else [])]


def _counted(count: int, name: str) -> str:
    return f"{count:,} {name}{'s' if count != 1 else ''}"


def _drawn(steps: list[Step]) -> str:
    parts, y = [], 1.0
    x = WIDTH - RIGHT
    for i, (main, aside) in enumerate(steps):
        lines = _wrapped(main, LEFT)
        height = _height(lines)
        parts.append(_box(0, y, LEFT, lines))
        bottom = y + height
        if i + 1 < len(steps):
            beside = _wrapped(aside, RIGHT)
            span = max(GAP, _height(beside) + 16 if beside else 0)
            if beside:
                parts += [_box(x, bottom + 8, RIGHT, beside), _line(LEFT / 2, bottom + span / 2, x - 2, bottom + span / 2)]
            parts.append(_line(LEFT / 2, bottom, LEFT / 2, bottom + span))
            y = bottom + span
        else:
            y = bottom
    head = '<marker id="flow-tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    head += f'<path d="M0 0L8 4L0 8z" fill="{FAINT}"/></marker>'
    width = WIDTH if any(aside for _, aside in steps) else LEFT + 2
    size = f'viewBox="-1 0 {width + 2} {y + 1:g}" width="{width + 2}" height="{y + 1:g}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="15">'
        f"<defs>{head}</defs>{''.join(parts)}</svg>"
    )


def _wrapped(lines: list[str], width: float) -> list[tuple[str, bool]]:
    """Lines that fit into a box, and whether each begins a sentence; the first is the title."""
    most = int((width - 2 * PAD) / LETTERS)
    return [(part, part_number == 0) for line in lines for part_number, part in enumerate(textwrap.wrap(line, most) or [""])]


def _height(lines: list[tuple[str, bool]]) -> float:
    return 2 * PAD + LINE * len(lines) - 4


def _box(x: float, y: float, width: float, lines: list[tuple[str, bool]]) -> str:
    box = f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{_height(lines):g}" rx="5" fill="{CARD}" stroke="{FAINT}"/>'
    texts = ""
    for i, (line, begins) in enumerate(lines):
        place = f'x="{x + PAD + (0 if begins else 10):g}" y="{y + PAD + 12 + LINE * i:g}"'
        weight = "" if i else ' font-weight="600"'
        texts += f'<text {place} fill="{INK}"{weight}>{escape(line)}</text>'
    return box + texts


def _line(x: float, y: float, to_x: float, to_y: float) -> str:
    return f'<path d="M{x:g} {y:g}L{to_x:g} {to_y:g}" stroke="{FAINT}" fill="none" marker-end="url(#flow-tip)"/>'
