"""HTML of objects in a notebook: a caption, a small table, and lines of text, all escaped.

`Cohort`, `Method`, the result of a check and the result of a run call it in `_repr_html_`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

MOST_ROWS = 40
LONGEST = 80  # characters of the value of a field


def shown_table(title: str, header: Sequence[str], rows: Iterable[Sequence[object]], lines: Iterable[str] = ()) -> str:
    """A titled table with at most `MOST_ROWS` rows, and lines of text below it."""
    listed = list(rows)
    head = "".join(f"<th>{escape(str(name))}</th>" for name in header)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(_text(value))}</td>" for value in row) + "</tr>" for row in listed[:MOST_ROWS]
    )
    below = [f"{len(listed) - MOST_ROWS} more rows", *lines] if len(listed) > MOST_ROWS else list(lines)
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>" if listed else ""
    return f"<div><p><b>{escape(title)}</b></p>{table}{''.join(f'<p>{escape(line)}</p>' for line in below)}</div>"


def method_html(name: str, doc: str, fields: Mapping[str, Any], facts: Mapping[str, Any] | None) -> str:
    """A method: its fields, and the sites that it was fitted on."""
    lines = [doc.strip().splitlines()[0]] if doc.strip() else []
    if facts is None:
        lines.append("Not fitted.")
    else:
        sites = facts["source"]["sites"].values()
        patients, controls = (sum(site[key] for site in sites) for key in ("patients", "controls"))
        lines.append(f"Fitted on {patients} patients and {controls} controls of {len(sites)} sites.")
    texts = ((field, _text(value)) for field, value in fields.items())
    rows = [(field, text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…") for field, text in texts]
    return shown_table(f"Method {name}", ("field", "value"), rows, lines)


def _text(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
