"""Paths in text that is shared: they are removed as a whole, because any part of one may be the name of a person.

Used by `m2lgdg share` and by `--share` of other commands. Nothing here tries to recognise names.
"""

from __future__ import annotations

import re

REMOVED = "[path]"
# A slash or backslash; not that of 1/2, n/a or and/or.
SEPARATOR = re.compile(r"\\|(?!(?<=\d)/\d|(?<=\bn)/a\b|(?<=\band)/or\b)/")
# Where a path begins that is given from a root, a drive, a server, a home folder or the working folder.
START = re.compile(
    r"(?:^|(?<=[\s'\"`=(\[{<,:;|]))(?:file:(?=[\\/])|[A-Za-z]:(?=[\\/])|\\\\|~(?=[\\/A-Za-z_])|\.{0,2}[\\/])", re.IGNORECASE
)
HOME = re.compile(r"(?<![\w.~/\\])~[A-Za-z_][\w.-]*")
# The last part of a path is kept only if it is a file of a known kind: other parts may be a folder named after a person.
KINDS = "1D bin cohort csv gz h5 html json jsonl mat md nii npy npz onnx pt py safetensors toml tsv txt xls xlsx yaml yml"
FILE = re.compile(rf"[^\s'\"<>|:;,()]+\.(?:{'|'.join(KINDS.split())})(?!\w|\.\w)")


def has_path(text: str) -> bool:
    """Whether a text may contain a path."""
    return bool(SEPARATOR.search(text) or HOME.search(text))


def starts_path(name: str) -> bool:
    """Whether a name contains a path from a root, a drive, a server or a home folder; `A/B` may be the name of a site."""
    return bool(HOME.search(name) or any(SEPARATOR.search(name, match.start()) for match in START.finditer(name)))


def without_paths(text: str) -> str:
    """Text in which a line with a path has the words before it, and the name and words after it if it is that of a file.

    Where a path begins is known if it is given from a root; of other paths the words before are removed as well. Where it ends
    is not known, since folders may have spaces and quotes in their names: it ends at the last separator of the line.
    """
    return "\n".join(map(_without_path, text.split("\n")))


def _without_path(line: str) -> str:
    line = HOME.sub(lambda match: match[0] if SEPARATOR.match(line, match.end()) else REMOVED, line)
    separators = [match.start() for match in SEPARATOR.finditer(line)]
    if not separators:
        return line
    starts = [match.start() for match in START.finditer(line) if match.start() <= separators[0]]
    before, after = line[: starts[0]] if starts else "", line[separators[-1] + 1 :]
    return before + (after if FILE.match(after) else REMOVED)


def file_name(path: str) -> str:
    """Last part of a path of any system, if it is a file of a known kind; else a word in its place."""
    name = re.split(r"[\\/]", path)[-1]
    return name if re.search(rf"\.(?:{'|'.join(KINDS.split())})$", name) else "folder"
