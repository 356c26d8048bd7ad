"""Runs the commands and scripts of a page and puts their real output into it: README.md, tutorial and some pages.

Usage: python docs/executed.py [--check]. A page with the mark `<!-- executed -->` is run from top to bottom in an empty
folder: blocks of bash and python are executed, a block of text directly after one is its output, and a block with
title="NAME" is written to that file. A line `...` of an output stands for lines that are not shown (`shortened`).
With --check nothing is written, and pages whose output differs in more than its numbers are named.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = (ROOT / "README.md", *(ROOT / "docs" / f"{name}.md" for name in ("tutorial", "connectomes", "pytorch")))
MARK = "<!-- executed -->"
FENCE = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```$", re.S | re.M)
TITLE = re.compile(r'title="([\w.-]+)"')
CUT = "..."


class Failed(Exception):
    """A command of a page failed."""


def with_outputs(text: str) -> str:
    """The page after a run in an empty folder, with the output of every command; unchanged without the mark."""
    if MARK not in text:
        return text
    pieces, end, printed = [], 0, None
    with tempfile.TemporaryDirectory() as folder:
        for match in FENCE.finditer(text):
            language, info, body = match.groups()
            between = text[end : match.start()]
            if language == "text" and printed is not None and not between.strip():
                body = shortened(printed, body)
            printed = None
            if title := TITLE.search(info):
                (Path(folder) / title[1]).write_text(body, encoding="utf-8")
            elif language in ("bash", "python"):
                printed = output(language, body, Path(folder))
            pieces += [between, f"```{language}{info}\n{body}```"]
            end = match.end()
    return "".join([*pieces, text[end:]])


def output(language: str, code: str, folder: Path) -> str:
    """What a block prints on standard output."""
    interpreter = ["bash", "-euo", "pipefail", "-c"] if language == "bash" else [sys.executable, "-c"]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    package = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    settings = {"PATH": path, "PYTHONPATH": package, "COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb", "OMP_NUM_THREADS": "1"}
    result = subprocess.run([*interpreter, code], cwd=folder, env=os.environ | settings, capture_output=True, text=True)
    if result.returncode:
        last = "\n".join((result.stderr or result.stdout).strip().splitlines()[-5:])
        raise Failed(f"exit code {result.returncode} of\n{code}{last}")
    return "".join(f"{line.rstrip()}\n" for line in folded(result.stdout.strip("\n").splitlines()))


def folded(lines: list[str], width: int = 100) -> list[str]:
    """Long sentences on several lines, as in a terminal; rows of tables stay whole."""
    rows = re.compile(r"\S {2,}\S|\S,\S+,\S|-{9}")
    return [part for line in lines for part in ([line] if rows.search(line) else textwrap.wrap(line, width) or [""])]


def shortened(printed: str, present: str) -> str:
    """An output cut as the page has it now; all of it if the page has no cut, or if a line after a cut is not printed.

    Before the first cut are as many lines as on the page. After a cut, the output goes on with the line that is there on the
    page, up to the next blank line, or to the end after the last cut.
    """
    lines, shown = printed.splitlines(), present.splitlines()
    if CUT not in shown:
        return printed
    end = shown.index(CUT)
    result, rest = lines[:end], shown[end:]
    while rest:
        anchor = rest[1] if len(rest) > 1 else CUT
        same = [i for i in range(end, len(lines)) if lines[i] == anchor]
        alike = [i for i in range(end, len(lines)) if masked(lines[i]) == masked(anchor)]
        if not alike:
            return printed
        start = [*same, *alike][0]
        last = CUT not in rest[1:]
        blank = next((i for i in range(start, len(lines)) if not lines[i]), len(lines))
        result += [CUT] * (start > end) + lines[start : len(lines) if last else blank]
        end, rest = blank, [] if last else rest[rest.index(CUT, 1) :]
    return "".join(f"{line}\n" for line in result)


def masked(text: str) -> str:
    """A page without what may differ between machines: numbers, hashes, and the spaces and rules that align them."""
    return re.sub(r"[\s-]+", " ", re.sub(r"\b[0-9a-f]{12}\b|\d+(\.\d+)?", "#", text))


def main() -> int:
    """Run all pages, and write their outputs or name those that differ."""
    check, different = "--check" in sys.argv[1:], []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        now = with_outputs(text)
        if masked(now) != masked(text):
            different.append(page.name)
        if not check:
            page.write_text(now, encoding="utf-8")
    print(
        f"{'Differ' if check else 'Rewritten'}: {', '.join(different)}" if different else "All outputs are those of the pages."
    )
    return int(check and bool(different))


if __name__ == "__main__":
    sys.exit(main())
