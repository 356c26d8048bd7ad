"""Hooks of mkdocs: what the pages of docs/ need to become a site (`make docs`).

Files outside docs/ that a page links to are added to the site, the reference pages are generated from the package, and the
tutorial is executed, so that the site shows its real output. A command that fails ends the build.
"""

from __future__ import annotations

import os
import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

sys.path.insert(0, str(Path(__file__).parent))
import executed
import reference

ROOT = Path(__file__).resolve().parents[1]
ADDED = ("CONTRIBUTING.md", "CHANGELOG.md")  # pages at the root of the repository
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s#]+)(#[^)\s]*)?\)")
FENCE = re.compile(r"(^```.*?^```)", re.S | re.M)
CELL = re.compile(r"<td[^>]*>.*?</td>", re.S)
OPTION = re.compile(r"<code>(--[\w-]+)</code>")
INSIDE_NUMBERS = re.compile(r"(?<=\d) (?=(?:±|/|to) -?\d)|(?<=±) (?=\d)|(?<=/) (?=-?\d)|(?<=\bto) (?=-?\d)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages at the root, and the scripts and figures that pages link to."""
    for name in ADDED:
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    for page in [*Path(config.docs_dir).glob("*.md"), *(ROOT / name for name in ADDED)]:
        for _, _, target, _ in LINK.findall(FENCE.sub("", page.read_text(encoding="utf-8"))):
            path = (page.parent / target).resolve()
            inside = path.is_relative_to(config.docs_dir) or not path.is_relative_to(ROOT)
            if path.is_file() and not inside and path.suffix != ".md":
                uri = path.relative_to(ROOT).as_posix()
                if files.get_file_from_path(uri) is None:
                    files.append(File.generated(config, uri, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Links of a page as they are in the site; generated parts and real outputs."""
    name = page.file.src_uri
    folder = "" if name in ADDED else "docs"
    parts = FENCE.split(markdown)
    parts[::2] = [LINK.sub(lambda match: _link(match, folder, files), part) for part in parts[::2]]
    text = reference.filled("".join(parts))
    if os.environ.get("M2LGDG_RUN_DOCS", "1") != "0":
        try:
            text = executed.with_outputs(text)
        except executed.Failed as error:
            raise PluginError(f"{name}: {error}") from None
    return text


def on_page_content(html: str, page: Any, config: Any, files: Files) -> str:
    """Keep an option, a number and its sd, or both ends of an interval on one line of a narrow table."""
    text = CELL.sub(lambda cell: INSIDE_NUMBERS.sub("\N{NO-BREAK SPACE}", cell[0]), html)
    return OPTION.sub(r'<code class="option">\1</code>', text)


def _link(match: re.Match[str], folder: str, files: Files) -> str:
    """A link inside the repository, by its place in the site; text alone if the site does not have the target."""
    image, text, target, anchor = match[1], match[2], match[3], match[4] or ""
    if re.match(r"[a-z]+:", target):
        return match[0]
    path = posixpath.normpath(posixpath.join(folder, target))
    uri = path.removeprefix("docs/")
    if path == "README.md":
        uri = "index.md"
    if files.get_file_from_path(uri) is None and (ROOT / path).exists() and not path.startswith("docs/"):
        return text  # a folder of the repository
    return f"{image}[{text}]({uri}{anchor})"
