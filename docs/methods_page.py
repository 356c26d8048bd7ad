"""The list of docs/methods.md: each method with one sentence, its reference, its variants and its differences.

Usage: python docs/methods_page.py [--check]. The text comes from the registry and the docstrings of the classes; a test
compares it with the page.
"""

from __future__ import annotations

import inspect
import re
import sys
import textwrap
from pathlib import Path

from m2lgdg.registry import PAPER, SIMPLE, load_methods

PAGE = Path(__file__).resolve().parent / "methods.md"
LISTED = re.compile(r"(<!-- methods -->\n).*(<!-- end of methods -->)", re.S)
OPENING = re.compile(r"(Differs from|As published|As released|Interpretation|Variant|The publication's|`\w+`:)")
MORE = {
    "m2lgdg": "[M²LG-DG](m2lgdg.md)",
    "m2lgdg-connectome": "[Beyond the paper](beyond.md)",
    "fc-adaptive": "[How the default was chosen](linear-search.md)",
    "connectome-adaptive": "[The default model](connectome-adaptive.md)",
    "combat-logistic": "[Coming from ComBat](combat.md)",
    "mida": "[Two tracks](studies.md#two-tracks)",
    "coral-target": "[Two tracks](studies.md#two-tracks)",
}


def wrapped(text: str, first: str = "") -> list[str]:
    """A paragraph or an item of a list, at most 100 characters wide; words of HTML and emphasis stay text."""
    plain = re.sub(r"(`[^`]*`)|([<*_])", lambda match: match[1] or "\\" + match[2], " ".join(text.split()))
    indent = " " * len(first)
    return textwrap.wrap(
        plain, 100, initial_indent=first, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def details(docstring: str) -> list[str]:
    """The docstring after its first line: paragraphs, and one item for each difference."""
    parts: list[str] = []
    for line in docstring.splitlines()[1:]:
        if not line.strip():
            parts.append("")
        elif OPENING.match(line) or not parts or not parts[-1]:
            parts.append(line)
        else:
            parts[-1] += f" {line}"
    lines: list[str] = []
    for part in filter(None, parts):
        item = OPENING.match(part) is not None
        if not (item and lines and lines[-1].startswith(("- ", "  "))):
            lines.append("")
        lines += wrapped(part, "- " if item else "")
    return lines


def section(name: str) -> list[str]:
    """Heading, sentence, reference, variants and differences of one method."""
    known = load_methods()
    declaration = known.declaration(name)
    lines = [f"### {name}", "", *wrapped(declaration.summary)]
    facts = [f"Reference: {declaration.reference.rstrip('.')}."] if "docs/" not in declaration.reference else []
    facts = facts if declaration.reference else []
    if declaration.variants:
        facts.append(f"Variants: {', '.join(f'`{variant}`' for variant in declaration.variants)}.")
    if name == known.default:
        facts.append("The default of `m2lgdg fit`.")
    if name in MORE:
        facts.append(f"More: {MORE[name]}.")
    if facts:
        lines += ["", *wrapped(" ".join(facts))]
    return [*lines, *details(inspect.getdoc(known[name]) or ""), ""]


def listed() -> str:
    """All methods in the groups of `m2lgdg methods`."""
    known = load_methods()
    peers = known.with_role(*SIMPLE)
    groups = {
        "The paper's method and the methods it is compared with": PAPER,
        "Simple peers": peers,
        "Other methods": [name for name in known.modules if name not in PAPER and name not in peers],
    }
    lines = []
    for title, names in groups.items():
        lines += [f"## {title}", "", *(line for name in names for line in section(name))]
    return "\n".join(["", *lines, ""])


def main() -> int:
    """Rewrite the page, or report that it differs."""
    text = PAGE.read_text(encoding="utf-8")
    now = LISTED.sub(lambda match: match[1] + listed() + match[2], text)
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(now, encoding="utf-8")
    elif now != text:
        print("Differs: methods.md")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
