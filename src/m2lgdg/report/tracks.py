"""The two tracks of a study kept apart: what each has seen, in every title and note, and one table with both.

Strict: nothing of the target but the subject that is predicted. Adapted: other subjects of the target, without labels. Used by
`m2lgdg table` and the report.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd

from m2lgdg.report.tables import Key, Table, label
from m2lgdg.study.predictions import ADAPTED, STRICT
from m2lgdg.study.stats import cell_scores, site_scores

SHOWN = ("SEN", "SPE", "AUC", "slope", "intercept")
BALANCED = "balanced ACC"
LEVEL_TABLE = "Strict and adapted track"


def what_was_seen(batch: int) -> str:
    """What the adapted track has seen of a target."""
    seen = f"each subject is predicted at the level of up to {batch} other subjects of its site, seen without labels"
    return f"{seen} (or aligned with them, where a method does that)"


def in_track(tables: list[Table], track: str, batch: int) -> list[Table]:
    """The tables of a track; those of the adapted one name it in their title and say in their note what was seen."""
    if track == STRICT:
        return tables
    seen = f"adapted track: {what_was_seen(batch)}; not comparable with methods that see nothing of the target"
    return [replace(table, title=f"{table.title}, adapted track", note=f"{seen}; {table.note}") for table in tables]


def level_table(strict: pd.DataFrame, adapted: pd.DataFrame, batch: int) -> Table:
    """Both tracks of each method over target sites, neither ranked nor tested; the fits are the same."""
    parts = {track: _by_site(part) for track, part in ((STRICT, strict), (ADAPTED, adapted))}
    rows = []
    for key in dict.fromkeys(key for part in parts.values() for key in part):
        for track, part in parts.items():
            if key in part:
                rows.append([label(*key), track, *(_mean(name, part[key][name]) for name in (BALANCED, *SHOWN))])
    note = (
        f"mean ± sd over target sites, each the mean over seeds; {BALANCED} is the mean of SEN and SPE; threshold 0.5; ideal "
        f"slope 1, intercept 0; one fit serves both tracks: in the adapted one {what_was_seen(batch)}, so that the two are "
        "different tasks, and neither ranked nor tested against each other"
    )
    header = ["Method", "track", BALANCED, *SHOWN]
    return Table(LEVEL_TABLE, header, rows, [[0] * len(header) for _ in rows], note)


def _by_site(predictions: pd.DataFrame) -> dict[Key, pd.DataFrame]:
    """Scores of each method and variant: a row per target, a column per metric."""
    scores = site_scores(cell_scores(predictions, SHOWN))
    tables = {}
    for (method, variant), part in scores.groupby(["method", "variant"], sort=False):
        table = part.pivot(index="target", columns="metric", values="mean")
        tables[str(method), str(variant)] = table.assign(**{BALANCED: (table["SEN"] + table["SPE"]) / 2})
    return tables


def _mean(name: str, values: pd.Series) -> str:
    defined = values.dropna().to_numpy(dtype=np.float64)
    if not len(defined):
        return "-"
    scale, digits = (1, 2) if name in ("slope", "intercept") else (100, 1)
    spread = f" ± {scale * defined.std(ddof=1):.{digits}f}" if len(defined) > 1 else ""
    return f"{scale * defined.mean():.{digits}f}{spread}"
