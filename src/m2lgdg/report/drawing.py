"""Drawing of report figures: once with matplotlib, then saved as files for a paper and embedded in the page.

On the page, lines and text take the colour of the page (light or dark), and marks show their values under the pointer.
"""

from __future__ import annotations

import base64
import io
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from html import escape
from types import MappingProxyType
from typing import Any

from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Canvas
from matplotlib.layout_engine import ConstrainedLayoutEngine

from m2lgdg.report.tables import plain

INK = "#0b0c0d"  # nearly black in files; replaced by the text colour on the page
FAINT = "#8a8d91"
CARD = "#f5f7f9"  # background of boxes; replaced by that of the page
COLOURS = (
    *("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6bb1", "#a6761d", "#e7298a", "#66a61e"),
    *("#7f7f7f", "#17becf"),
)
MARKS = ("o", "s", "D", "^", "v", "P", "X")
WIDTH = 6.0  # inches of a figure: its text is readable on a phone and as large as that of the page on a screen
STYLE: Any = {
    "svg.fonttype": "none",  # text stays text: searchable, and any script is shown with the reader's fonts
    "text.parse_math": False,  # a site may be named $1
    "font.size": 10,
    "font.family": "sans-serif",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
} | dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK)


@dataclass(frozen=True)
class Figure:
    """A finished figure: its files (no `png`: SVG only), and the HTML for report.html."""

    name: str
    caption: str
    alt: str
    svg: bytes
    png: bytes
    page: str


@dataclass
class Sheet:
    """Canvas of a figure, with tooltips for its marks."""

    canvas: Canvas
    tips: dict[str, str] = field(default_factory=dict)

    def tip(self, artist: Any, text: str) -> None:
        """Show a text when the pointer is over an artist."""
        name = f"tip{len(self.tips)}"
        artist.set_gid(name)
        self.tips[name] = text


def draw(
    name: str,
    caption: str,
    alt: str,
    size: tuple[float, float],
    paint: Callable[[Sheet], None],
    *,
    raster: bool = False,
    layout: bool = True,
    dpi: int = 150,
) -> Figure:
    """Paint a figure and save it; with `raster` the page embeds the PNG, for figures with very many marks.

    Without `layout`, axes stay where `paint` put them, which saves measuring every text.
    """
    name = plain(name)
    svg, png = io.BytesIO(), io.BytesIO()
    with rc_context(STYLE | {"svg.hashsalt": name}), warnings.catch_warnings():
        # The page shows glyphs that matplotlib's font lacks with the reader's fonts.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        warnings.filterwarnings("ignore", message=".*constrained_layout not applied.*")
        sheet = Sheet(Canvas(figsize=size, dpi=dpi, facecolor="white"))
        FigureCanvasAgg(sheet.canvas)  # of the PNG, so that the size of each text is measured once
        engine = ConstrainedLayoutEngine() if layout else None
        sheet.canvas.set_layout_engine(engine)
        paint(sheet)
        if engine is not None:
            engine.execute(sheet.canvas)
            sheet.canvas.set_layout_engine(None)  # otherwise each file would lay the figure out again and draw it twice
        sheet.canvas.savefig(png, format="png", dpi=dpi, metadata={"Software": None}, pil_kwargs={"compress_level": 3})
        sheet.canvas.savefig(svg, format="svg", metadata={"Date": None, "Creator": None}, transparent=True)
    page = on_page(svg.getvalue().decode(), name, alt, sheet.tips)
    if raster:
        page = f'<img alt="{escape(alt)}" src="data:image/png;base64,{base64.b64encode(png.getvalue()).decode()}">'
    return Figure(name, caption, alt, svg.getvalue(), png.getvalue(), page)


def on_page(svg: str, name: str, alt: str, tips: Mapping[str, str] = MappingProxyType({})) -> str:
    """The SVG for a page: unique ids, the page's colours, alternative text, tooltips."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", svg, flags=re.DOTALL)
    svg = re.sub(r' xmlns(:\w+)?="[^"]*"', "", svg)
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", svg)
    for gid, text in tips.items():
        svg = svg.replace(f'<g id="{name}-{gid}">', f'<g id="{name}-{gid}"><title>{escape(text)}</title>')
    svg = svg.replace(INK, "currentColor").replace(f'fill="{CARD}"', 'fill="var(--card)"')
    return svg.replace("<svg", f'<svg role="img" aria-label="{escape(alt)}"', 1)


def colour(i: int) -> str:
    """Colour of the i-th line."""
    return COLOURS[i % len(COLOURS)]


def mark(i: int) -> str:
    """Mark of the i-th line; changes with each cycle of the colours."""
    return MARKS[(i // len(COLOURS)) % len(MARKS)]


def short(text: str, most: int = 28) -> str:
    """A name shortened to fit next to an axis."""
    return text if len(text) <= most else text[: most - 1] + "…"
