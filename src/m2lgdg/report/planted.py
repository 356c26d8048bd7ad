"""What was planted in a synthetic cohort, and how much of it each explained method finds.

Made from the planted ROIs and edges in `cohort.json` and the mean explanations, for the report.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from m2lgdg.report.contents import Contents
from m2lgdg.report.tables import Table
from m2lgdg.study.description import read_connectomes

TITLE = "Planted and found"
CLASSES = "difference of the class means, no model"


def planted_table(contents: Contents) -> Table | None:
    """Planted ROIs and edges among as many of the highest scores, with the number expected by chance; None if unknown."""
    planted, known = contents.description.get("planted"), contents.known_rois
    if not planted or known is None or not contents.mean_explanations:
        return None
    rois, edges = set(planted.get("rois", ())), {frozenset(edge) for edge in planted.get("edges", ())}
    count = len(known[1])
    rows = []
    for method, explanation in contents.mean_explanations.items():
        part = next(iter(explanation.by_atlas().values()))
        top_rois, top_edges = _highest(part.rois, ["roi"], len(rois)), _pairs(part.edges, len(edges))
        rows.append([method, *_found(top_rois, rois), *_found(top_edges, edges)])
    means = read_connectomes(contents.folder).get("difference")
    if means is not None and len(means) == count:
        above = np.triu_indices(count, 1)
        order = np.argsort(-np.abs(means[above]), kind="stable")[: len(edges)]
        top = [frozenset((known[1][above[0][i]], known[1][above[1][i]])) for i in order]
        rows.append([CLASSES, "-", *_found(top, edges)])
    chance = (len(rois) ** 2 / count, len(edges) ** 2 / (count * (count - 1) / 2))
    header = ["Method", f"of {len(rois)} planted ROIs", f"of {len(edges)} planted edges"]
    note = (
        f"planted ROIs among the {len(rois)} highest scores, planted edges among the {len(edges)} highest; expected by chance: "
        f"{chance[0]:.1f} ROIs and {chance[1]:.1f} edges. A planted ROI also changes its edges, so other edges can be true, too"
    )
    return Table(TITLE, header, rows, [[0] * 3 for _ in rows], note)


def _highest(table: pd.DataFrame, columns: list[str], count: int) -> list[Any]:
    """Names of the highest positive scores."""
    top = table[table["score"] > 0].sort_values("score", ascending=False, kind="stable").head(count)
    return top[columns[0]].tolist() if len(columns) == 1 else [frozenset(names) for names in top[columns].to_numpy().tolist()]


def _pairs(table: pd.DataFrame, count: int) -> list[Any]:
    return _highest(table, ["roi", "other roi"], count) if len(table) else []


def _found(top: list[Any], planted: set[Any]) -> list[str]:
    return [str(sum(name in planted for name in top)) if top else "-"]
