"""Writes the tables of docs/*.md that follow from the committed results into the pages, between markers.

Usage: python docs/tables.py [--check]. A block is `<!-- table: NAME -->`, its lines, `<!-- end of table -->`; NAME is one of
`BLOCKS` (docs/page_tables/). With --check nothing is written, and blocks that differ from the results are listed.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from page_tables.writing import BLOCKS

ROOT = Path(__file__).resolve().parents[1]
MARKED = re.compile(r"<!-- table: ([\w-]+) -->\n(.*?)<!-- end of table -->", re.S)


def pages() -> list[Path]:
    """Every page that may hold a block."""
    return sorted((ROOT / "docs").glob("*.md"))


def blocks(page: Path) -> dict[str, list[str]]:
    """The lines of each block of a page."""
    return {match[1]: match[2].splitlines() for match in MARKED.finditer(page.read_text())}


def lines(key: str) -> list[str]:
    """The lines that a block should have."""
    if key not in BLOCKS:
        raise SystemExit(f"There is no table {key!r}; known are {', '.join(sorted(BLOCKS))}.")
    return BLOCKS[key]()


def rewritten(text: str) -> str:
    """The text of a page with every block generated anew."""
    return MARKED.sub(lambda match: "\n".join([f"<!-- table: {match[1]} -->", *lines(match[1]), "<!-- end of table -->"]), text)


def main() -> int:
    """Rewrite the blocks of all pages, or list those that differ."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a block differs from the results")
    check, different = parser.parse_args().check, []
    for page in pages():
        changed = [key for key, present in blocks(page).items() if present != lines(key)]
        different += [f"{page.name}: {key}" for key in changed]
        if changed and not check:
            page.write_text(rewritten(page.read_text()))
    for entry in different:
        print(f"{'Differs' if check else 'Rewritten'}: {entry}")
    return int(check and bool(different))


if __name__ == "__main__":
    sys.exit(main())
