"""How the tables of the pages are registered and how their numbers are written."""

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from textwrap import wrap

BLOCKS: dict[str, Callable[[], list[str]]] = {}  # name of a block -> the function that gives its lines


def block(name: str) -> Callable[[Callable[[], list[str]]], Callable[[], list[str]]]:
    """Register a function as the generator of the block of this name."""

    def register(function: Callable[[], list[str]]) -> Callable[[], list[str]]:
        BLOCKS[name] = cache(function)
        return function

    return register


def number(value: float, digits: int = 1) -> str:
    """A number with a fixed count of decimals; no minus before zero."""
    text = f"{value:.{digits}f}"
    return text.removeprefix("-") if float(text) == 0 else text


def spread(values: Sequence[float], digits: int = 1) -> str:
    """Mean and sd, or mean and half an interval; without the second where it is undefined (one seed)."""
    return " ± ".join(number(value, digits) for value in values if value == value)


def interval(middle: float, low: float, high: float) -> str:
    """A difference with its interval."""
    return f"{number(middle)} ({number(low)} to {number(high)})"


def chance(p: float) -> str:
    """A p value with three decimals."""
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def name(method: str, variant: str = "") -> str:
    """A method as the pages write it."""
    return f"`{method}`" + (f" with {variant}" if variant else "")


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table."""
    return [_line(header), "|" + "---|" * len(header), *(_line(row) for row in rows)]


def bullets(*sentences: str) -> list[str]:
    """Lines of a Markdown list, wrapped at 100 characters."""
    kept = {"break_long_words": False, "break_on_hyphens": False}
    return [line for text in sentences for line in wrap(f"- {text}", 100, subsequent_indent="  ", **kept)]


def _line(row: Sequence[str]) -> str:
    return "|" + "".join(f" {cell} |" if cell else " |" for cell in row)
