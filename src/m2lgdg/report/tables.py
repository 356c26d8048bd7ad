"""`Table`: rows of numbers and how to show them; text, Markdown, LaTeX, CSV and HTML are renderings of it.

Every table of `m2lgdg table`, of the report and of the model card is one. Nothing reads a rendering back.
"""

from __future__ import annotations

import hashlib
import html
import math
import re
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, TypeAlias

import pandas as pd

from m2lgdg.data.spreadsheets import csv_rows, csv_text
from m2lgdg.storage import InputError

Format = Literal["text", "markdown", "latex", "csv"]
Kind = Literal["text", "count", "number", "percent", "p"]
NAN = math.nan
WORDED = 60  # letters; longer texts are sentences
PHRASE = 28  # letters; a column of text that has a longer one is read from the left


class Spread(NamedTuple):
    """A mean and its standard deviation."""

    value: float
    sd: float


class Interval(NamedTuple):
    """The ends of an interval."""

    low: float
    high: float


class Estimate(NamedTuple):
    """A value with the ends of its interval."""

    value: float
    low: float
    high: float


class Beside(NamedTuple):
    """A value with a published one, in percent."""

    own: Value
    published: float


# NaN is a number that is not defined; a text stands where a number is withheld or has no meaning.
Value: TypeAlias = "str | float | Spread | Interval | Estimate | Beside"


class Column(NamedTuple):
    """Name, kind and format of a column; percentages are stored as proportions."""

    name: str
    kind: Kind = "text"
    form: str = ".2f"

    def number(self, value: float) -> str:
        """A number as text."""
        if math.isnan(value):
            return "-"
        if self.kind == "count":
            return f"{value:.0f}"
        if self.kind == "p":
            return "<0.001" if value < 0.001 else f"{value:.3f}"
        return format(100 * value if self.kind == "percent" else value, self.form)

    def shown(self, value: Value) -> str:
        """A value as text."""
        match value:
            case str():
                return value
            case Beside(own, published):
                return f"{self.shown(own)} [{published:.2f}]"
            case Spread(mean, sd):
                return self.number(mean) + ("" if math.isnan(sd) else f" ± {self.number(sd)}")
            case Interval(low, high):
                return "-" if math.isnan(low) else f"{self.number(low)} to {self.number(high)}"
            case Estimate(middle, low, high):
                ends = f"{self.number(low)}{' to ' if '+' in self.form else '-'}{self.number(high)}"
                return self.number(middle) + ("" if math.isnan(low) else f" ({ends})")
            case _:
                return self.number(value)


def columns(kind: Kind, *names: str, form: str = ".2f") -> list[Column]:
    """Columns of one kind."""
    return [Column(name, kind, form) for name in names]


def number_of(value: Value) -> float:
    """The number by which rows are sorted; NaN for text."""
    match value:
        case str():
            return NAN
        case Beside(own, _):
            return number_of(own)
        case Spread() | Interval() | Estimate():
            return value[0]
        case _:
            return value


@dataclass(frozen=True)
class Table:
    """A titled table; `ranks` (row, column), if it has any, is 1 for the best of a column, 2 for the second, else 0.

    `target` is the site of its scores, or "all".
    """

    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Value]]
    note: str = ""
    target: str = ""
    ranks: Sequence[Sequence[int]] = ()

    @property
    def header(self) -> list[str]:
        """Names of the columns."""
        return [column.name for column in self.columns]

    @property
    def shown(self) -> list[list[str]]:
        """The rows as text."""
        return [[column.shown(value) for column, value in zip(self.columns, row, strict=True)] for row in self.rows]

    @property
    def entries(self) -> list[list[tuple[str, float | str, int]]]:
        """Text, number to sort by (empty without one) and rank of each value, row by row."""
        numbers = [["" if math.isnan(number := number_of(value)) else number for value in row] for row in self.rows]
        ranks = self.ranks or [[0] * len(self.columns)] * len(self.rows)
        return [list(zip(*row, strict=True)) for row in zip(self.shown, numbers, ranks, strict=True)]

    @property
    def worded(self) -> bool:
        """Whether it has sentences rather than numbers."""
        return any(isinstance(value, str) and len(value) > WORDED for row in self.rows for value in row[1:])

    @property
    def phrases(self) -> list[bool]:
        """By column, whether it has texts that are read from the left, as those of the first column are."""
        texts = zip(*self.shown, strict=True) if self.rows else [()] * len(self.columns)
        long = [any(len(text) > PHRASE for text in column) for column in texts]
        return [
            i > 0 and here and column.kind == "text" for i, (here, column) in enumerate(zip(long, self.columns, strict=True))
        ]

    def values(self, name: str) -> list[Value]:
        """A column."""
        return [row[self.header.index(name)] for row in self.rows]

    def highest_first(self, name: str) -> Table:
        """The table sorted by a column; rows without a value are last."""
        values = [number_of(value) for value in self.values(name)]
        order = sorted(range(len(values)), key=lambda i: math.inf if math.isnan(values[i]) else -values[i])
        return replace(self, rows=[self.rows[i] for i in order], ranks=[self.ranks[i] for i in order] if self.ranks else ())


def render(tables: Sequence[Table], form: Format) -> str:
    """The tables in one of the formats."""
    if form == "csv":
        return _long_csv(tables)
    if form not in RENDER:
        raise InputError(f"unknown format {form}; choose one of {', '.join(RENDER)}, csv.")
    return "\n\n".join(RENDER[form](table) for table in tables) + "\n"


def wide_csv(table: Table) -> str:
    """One table as CSV, as it is shown."""
    return csv_rows([table.header, *table.shown])


def _text(table: Table) -> str:
    grid = [table.header, *table.shown]
    widths = [max(map(len, column)) for column in zip(*grid, strict=True)]
    lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in grid]
    return "\n".join([table.title, lines[0], "-" * len(lines[0]), *lines[1:], f"({table.note})"])


def _marked(table: Table, escape: Callable[[str], str], first: str, second: str) -> list[list[str]]:
    """Texts, with the best and the second best of a column put into these marks."""
    marks = ("{}", first, second)
    return [[marks[rank].format(escape(text)) for text, _, rank in row] for row in table.entries]


def markdown_grid(table: Table) -> list[str]:
    """Lines of a table in Markdown, without title and note."""
    rows = [list(map(markdown, table.header)), ["---", *["---:"] * (len(table.columns) - 1)]]
    return [f"| {' | '.join(row)} |" for row in rows + _marked(table, markdown, "**{}**", "_{}_")]


def _markdown(table: Table) -> str:
    return "\n".join([f"### {markdown(table.title)}", "", *markdown_grid(table), "", f"{markdown(table.note)}."])


def _latex(table: Table) -> str:
    wide = [any(len(text) > WORDED for text in column) for column in zip(*table.shown, strict=True)][1:]
    alignment = "".join("p{6cm}" if paragraph else "c" for paragraph in wide or [False] * (len(table.columns) - 1))
    rows = [[latex(name) for name in table.header], *_marked(table, latex, r"\textbf{{{}}}", r"\underline{{{}}}")]
    head, *body = [" & ".join(row) + r" \\" for row in rows]
    return "\n".join(
        [
            r"% needs \usepackage{booktabs}",
            r"\begin{table}",
            rf"\caption{{{latex(table.title)}: {latex(table.note)}.}}",
            rf"\begin{{tabular}}{{l{alignment}}}",
            *(r"\toprule", head, r"\midrule", *body, r"\bottomrule"),
            r"\end{tabular}",
            r"\end{table}",
        ]
    )


def _long_csv(tables: Sequence[Table]) -> str:
    """One row per value: table, method, metric, mean, sd, and the published value if there are any."""
    rows: list[tuple[str, ...]] = []
    for table in tables:
        for row, shown in zip(table.rows, table.shown, strict=True):
            for column, value, text in zip(table.columns[1:], row[1:], shown[1:], strict=True):
                start = (table.title, shown[0], column.name)
                own, published = (value.own, f"{value.published:.2f}") if isinstance(value, Beside) else (value, "")
                if isinstance(own, Interval):
                    ends = (("low", own.low), ("high", own.high))
                    rows += [(*start[:2], f"{column.name}, {end}", _defined(column, at), "", "") for end, at in ends]
                elif isinstance(own, str):
                    rows.append((*start, text, "", published))
                else:
                    sd = _defined(column, own.sd) if isinstance(own, Spread) else ""
                    rows.append((*start, _defined(column, number_of(own)), sd, published))
    frame = pd.DataFrame(rows, columns=["table", "method", "metric", "mean", "sd", "published"])
    return csv_text(frame if frame["published"].any() else frame.drop(columns="published"))


def _defined(column: Column, value: float) -> str:
    return "" if math.isnan(value) else column.number(value)


RENDER = {"text": _text, "markdown": _markdown, "latex": _latex}

# Names as text: no character of a name may be markup. LaTeX compiles with pdflatex and the package booktabs alone.
SPECIAL = {letter: rf"\{letter}" for letter in "&%_#${}"} | {
    **{"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"},
    **{"[": "{[}", "]": "{]}", "*": "{*}"},  # after the end of a row, a bracket or a star would be an argument of it
    **{"<": "$<$", ">": "$>$", "|": "$|$", '"': "{''}", "'": "{'}", "`": "{`}"},
    **{"‘": "{`}", "’": "{'}", "“": "{``}", "”": "{''}", "–": "--", "—": "---", "…": r"\ldots{}", "§": r"\S{}"},
    **{"±": r"$\pm$", "×": r"$\times$", "·": r"$\cdot$", "÷": r"$\div$", "−": "$-$", "≤": r"$\leq$", "≥": r"$\geq$"},
    **{"≠": r"$\neq$", "≈": r"$\approx$", "∞": r"$\infty$", "→": r"$\rightarrow$", "←": r"$\leftarrow$"},
    **{"↔": r"$\leftrightarrow$", "↑": r"$\uparrow$", "↓": r"$\downarrow$", "°": r"$^\circ$", "µ": r"$\mu$"},
}
EUROPEAN = "ßæÆœŒøØłŁı"
ACCENTS = set("\u0300\u0301\u0302\u0303\u0304\u0306\u0307\u0308\u030a\u030b\u030c\u0327")
SMALL_GREEK = "αβγδεζηθικλμνξπρστυφχψω"
CAPITAL_GREEK = "ΓΔΘΛΞΠΣΥΦΨΩ"  # the others look like Latin letters and have no command


def markdown(text: str) -> str:
    """Text on one line, with markup and HTML escaped."""
    safe = html.escape(" ".join(text.split()), quote=False)
    return "".join(f"\\{letter}" if letter in "\\`*[]|" else letter for letter in safe)


def latex(text: str) -> str:
    """Text on one line for pdflatex; a character that its fonts lack is written as its code point, such as [U+6F22]."""
    return "".join(map(_letter, unicodedata.normalize("NFC", " ".join(text.split()))))


def _letter(letter: str) -> str:
    if letter in SPECIAL:
        return SPECIAL[letter]
    base, *marks = list(unicodedata.normalize("NFD", letter))
    if (" " <= base <= "~" and ("\u00c0" <= letter <= "\u017e" or not marks) and set(marks) <= ACCENTS) or letter in EUROPEAN:
        return letter  # LaTeX reads the UTF-8 of these letters itself
    if letter in SMALL_GREEK + CAPITAL_GREEK:
        name = unicodedata.name(letter).split()[-1].replace("LAMDA", "LAMBDA").lower()
        return rf"$\{name if letter in SMALL_GREEK else name.capitalize()}$"
    kind, _, digit = unicodedata.decomposition(letter).partition(" ")
    if kind in ("<super>", "<sub>") and len(digit) == 4 and (sign := chr(int(digit, 16))) in "0123456789+-=()n":
        return f"${'^' if kind == '<super>' else '_'}{{{sign}}}$"
    return f"{{[}}U+{ord(letter):04X}{{]}}"


def plain(name: str) -> str:
    """A name of letters, digits and dashes for files and HTML ids; different names stay different."""
    safe = re.sub(r"[^A-Za-z0-9]+", "-", name)[:60].strip("-")
    if safe and safe == name:
        return name
    return f"{safe}-{hashlib.sha256(name.encode(errors='replace')).hexdigest()[:8]}".lstrip("-")
