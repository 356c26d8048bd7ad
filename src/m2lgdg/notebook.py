"""How a cohort, a check and a fitted model are shown: a line of text, and tables in HTML for notebooks.

`Cohort` and others call it from `__repr__` and `_repr_html_`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

import pandas as pd

from m2lgdg.cohort_arrays import UNKNOWN
from m2lgdg.findings import counted
from m2lgdg.scans import SERIES

MOST_ROWS = 40


def cohort_line(cohort: Any) -> str:
    """Subjects, sites, ROIs and tables in one line."""
    patients, controls, sites = int((cohort.labels == 1).sum()), int((cohort.labels == 0).sum()), len(cohort.site_names)
    atlas = f" ({cohort.atlas})" if cohort.atlas else ""
    kind = "" if cohort.values == SERIES else f", connectomes ({cohort.values})"
    others = "".join(f", {len(each.rois)} ROIs ({name})" for name, each in cohort.parcellations.items())
    tables = "".join(f", table {name} ({counted(len(table.columns), 'column')})" for name, table in cohort.tables.items())
    return (
        f"Cohort {cohort.name}: {len(cohort)} subjects ({patients} patients, {controls} controls) "
        f"of {sites} site{'s' * (sites != 1)}, {len(cohort.rois)} ROIs{atlas}{kind}{others}{tables}"
    )


def cohort_html(cohort: Any) -> str:
    """Sites with their subjects."""
    header, rows = ["site", "subjects", "patients", "controls", "unlabelled"], []
    for site in cohort.site_names:
        labels = cohort.labels[cohort.sites == site]
        rows.append([site, len(labels), *(int((labels == label).sum()) for label in (1, 0, UNKNOWN))])
    if cohort.values == SERIES:
        header.append("volumes")
        for row in rows:
            lengths = cohort.lengths[cohort.sites == row[0]]
            row.append(" to ".join(map(str, sorted({lengths.min(), lengths.max()}))))
    for name, table in cohort.tables.items():
        lacking = table.notna().mean(axis=1).to_numpy() < 0.5
        if lacking.any():
            header.append(f"without {name}")
            for row in rows:
                row.append(int(lacking[cohort.sites == row[0]].sum()))
    columns = ", ".join(map(str, cohort.phenotypes.columns[:12])) + (", ..." if len(cohort.phenotypes.columns) > 12 else "")
    return shown_table(repr(cohort), header, rows, [f"Phenotypes: {columns}."] if columns else [])


def shown_table(title: str, header: Sequence[str], rows: Iterable[Sequence[object]], lines: Iterable[str] = ()) -> str:
    """HTML for a notebook: a title, a table of which the middle is left out if it is long, and lines of text."""
    frame = pd.DataFrame(list(rows), columns=list(header))
    table = frame.to_html(index=False, border=0, max_rows=MOST_ROWS, float_format="{:.3g}".format) if len(frame) else ""
    return f"<div><p><b>{escape(title)}</b></p>{table}{''.join(f'<p>{escape(line)}</p>' for line in lines)}</div>"
