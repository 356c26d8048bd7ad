"""How a figure of the report is drawn: once by matplotlib, then as files for a paper and as a part of the page.

On the page lines and letters take the page's own colour, light or dark, and marks tell their values under the pointer.
"""

from __future__ import annotations

import base64
import hashlib
import io
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from html import escape
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure as Canvas

INK = "#0b0c0d"  # in a file nearly black; on the page it becomes the colour of the text
FAINT = "#8a8d91"
COLOURS = (
    *("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6bb1", "#a6761d", "#e7298a", "#66a61e"),
    *("#7f7f7f", "#17becf"),
)
MARKS = ("o", "s", "D", "^", "v", "P", "X")
STYLE: Any = {
    "svg.fonttype": "none",  # text stays text: it can be searched, and any script is shown by the reader's own fonts
    "text.parse_math": False,  # a site may be called $1
    "font.size": 9,
    "font.family": "sans-serif",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
} | dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK)


@dataclass(frozen=True)
class Figure:
    """A finished figure: `svg` and `png` are whole files, `page` is what stands in report.html."""

    name: str
    caption: str
    alt: str
    svg: bytes
    png: bytes
    page: str


@dataclass
class Sheet:
    """Where a figure is drawn; `tip` lets a mark tell something under the pointer."""

    canvas: Canvas
    tips: dict[str, str] = field(default_factory=dict)

    def tip(self, artist: Any, text: str) -> None:
        """Show a text when the pointer is on an artist."""
        name = f"tip{len(self.tips)}"
        artist.set_gid(name)
        self.tips[name] = text


def draw(
    name: str, caption: str, alt: str, size: tuple[float, float], paint: Callable[[Sheet], None], raster: bool = False
) -> Figure:
    """Paint a figure and save it; a figure of very many marks stands on the page as an image (`raster`)."""
    name = plain(name)
    with rc_context(STYLE | {"svg.hashsalt": name}), _quiet():
        sheet = Sheet(Canvas(figsize=size, layout="constrained"))
        paint(sheet)
        svg, png = io.BytesIO(), io.BytesIO()
        sheet.canvas.savefig(svg, format="svg", metadata={"Date": None, "Creator": None}, transparent=True)
        sheet.canvas.savefig(png, format="png", dpi=150, facecolor="white", metadata={"Software": None})
    page = image(png.getvalue(), alt) if raster else _inline(svg.getvalue().decode(), name, alt, sheet.tips)
    return Figure(name, caption, alt, svg.getvalue(), png.getvalue(), page)


@contextmanager
def _quiet() -> Iterator[None]:
    """A script that matplotlib's font lacks is boxes in the PNG; the page shows it with the reader's fonts."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        warnings.filterwarnings("ignore", message=".*constrained_layout not applied.*")
        yield


def image(png: bytes, alt: str) -> str:
    """A PNG as a part of the page."""
    return f'<img alt="{escape(alt)}" src="data:image/png;base64,{base64.b64encode(png).decode()}">'


def _inline(svg: str, name: str, alt: str, tips: dict[str, str]) -> str:
    """The SVG as a part of a page: names that cannot clash, the page's colours, a text alternative, and the tips."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", svg, flags=re.DOTALL)
    svg = re.sub(r' xmlns(:\w+)?="[^"]*"', "", svg)
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", svg)
    for gid, text in tips.items():
        svg = svg.replace(f'<g id="{name}-{gid}">', f'<g id="{name}-{gid}"><title>{escape(text)}</title>')
    svg = svg.replace(INK, "currentColor")
    return svg.replace("<svg", f'<svg role="img" aria-label="{escape(alt)}"', 1)


def plain(name: str) -> str:
    """A name of letters, digits and dashes for files and for parts of the page; two names never become one."""
    kept = re.sub(r"[^A-Za-z0-9]+", "-", name)[:60].strip("-")
    return (
        kept if kept and kept == name else f"{kept}-{hashlib.sha256(name.encode(errors='replace')).hexdigest()[:8]}".lstrip("-")
    )


def colour(i: int) -> str:
    """The i-th colour; they come again after twelve."""
    return COLOURS[i % len(COLOURS)]


def mark(i: int) -> str:
    """The i-th mark: changes with each round of the colours."""
    return MARKS[(i // len(COLOURS)) % len(MARKS)]


def short(text: str, most: int = 28) -> str:
    """A name that fits beside an axis."""
    return text if len(text) <= most else text[: most - 1] + "…"
