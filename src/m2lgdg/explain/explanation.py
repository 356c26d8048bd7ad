"""`Explanation`: what decisions rest on, as tables of ROIs, edges, phenotypes and gate weights that can be saved and averaged.

`explain` makes one of a fitted method and a cohort; `mean_over` joins those of several folds or seeds; the report shows them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from m2lgdg.cohort import Cohort, natural_key
from m2lgdg.data.atlases import regions
from m2lgdg.storage import InputError, one_line, write_texts

Floats = npt.NDArray[np.float64]
ROI_COLUMNS = ("rank", "roi", "code", "x", "y", "z", "score", "sd")
EDGE_COLUMNS = ("roi", "other roi", "score", "direction")
PHENOTYPE_COLUMNS = ("phenotype", "score", "sd", "direction")
TABLES = {"roi": "rois", "edges": "edges", "phenotypes": "phenotypes", "gate": "gate", "map": "map"}  # file -> table
COMPLETENESS_COLUMNS = ("subject", "difference", "attributed", "absolute", "relative")


@dataclass(frozen=True, eq=False)
class Explanation:
    """What decisions rest on, as tables sorted by score; a score is the sum of the columns named after features or blocks.

    `rois`: rank, roi, code and MNI centroid where the atlas is known, score, its sd over subjects (a pattern has none).
    `edges`: every pair of ROIs, where the method sees connectivity. `direction` is signed: above 0 speaks for patient.
    `gate`: mean gate weights by site and label (-1 unknown), where the network has a gate.
    `completeness`: for each subject, how far the attributions are from the change of the decision that they should sum to.
    `map`: the network's representation in two dimensions, with site and label of each point and no id.
    """

    rois: pd.DataFrame
    edges: pd.DataFrame
    phenotypes: pd.DataFrame
    gate: pd.DataFrame
    completeness: pd.DataFrame
    map: pd.DataFrame
    about: dict[str, Any]

    def save(self, folder: str | Path) -> Path:
        """Write roi.csv, edges.csv, phenotypes.csv, gate.csv, map.csv and explanation.json; no subject is named."""
        texts = {f"{name}.csv": getattr(self, held).to_csv(index=False, lineterminator="\n") for name, held in TABLES.items()}
        about = self.about | {"completeness": self.error()}
        texts["explanation.json"] = json.dumps(about, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
        return write_texts(folder, texts)

    @classmethod
    def load(cls, folder: str | Path) -> Explanation:
        """Read what `save` wrote; of `completeness` only the error over subjects is left."""
        folder = Path(folder)
        try:
            about = json.loads((folder / "explanation.json").read_text(encoding="utf-8"))
            tables = {held: _read_table(folder / f"{name}.csv") for name, held in TABLES.items()}
        except (OSError, ValueError) as error:
            raise InputError(f"{folder} holds no explanation that can be read ({one_line(error)}).") from None
        scored = [held for held in ("rois", "edges", "phenotypes") if held in tables and len(tables[held])]
        if not isinstance(about, dict) or any("score" not in tables[held] for held in scored):
            raise InputError(f"{folder} holds no explanation that can be read (a table without scores, or no facts).")
        return cls(**tables, completeness=pd.DataFrame(columns=list(COMPLETENESS_COLUMNS)), about=about)

    def with_centroids(self, centroids: pd.DataFrame) -> Explanation:
        """The same with other codes and centroids of its ROIs (those of `read_places`)."""
        own = self.rois.drop(columns=[name for name in ("code", "x", "y", "z") if name in self.rois])
        return replace(self, rois=_ranked(own.join(centroids.set_index("name")[["code", "x", "y", "z"]], on="roi")))

    def error(self) -> dict[str, float] | None:
        """The completeness error over subjects: mean and largest absolute, median and largest relative; None for patterns."""
        if not len(self.completeness):
            return self.about.get("completeness")
        absolute, relative = self.completeness["absolute"], self.completeness["relative"].dropna()
        found = {"mean_absolute": float(absolute.mean()), "max_absolute": float(absolute.max())}
        if len(relative):
            found |= {"median_relative": float(relative.median()), "max_relative": float(relative.max())}
        return found


def roi_table(parts: dict[str, Floats], cohort: Cohort) -> pd.DataFrame:
    """(subject, roi) scores by feature -> ROIs by their mean, with codes and centroids where the atlas is known."""
    n = len(cohort.rois)
    each = sum(parts.values(), np.zeros((1, n)))  # (subject, roi)
    table = pd.DataFrame({"roi": cohort.rois, "score": each.mean(axis=0), "sd": _spread(each)})
    known = regions(cohort.atlas)
    if known is not None:
        table = table.join(known.set_index("name")[["code", "x", "y", "z"]], on="roi")
    table = table.assign(**{name: values.mean(axis=0) for name, values in parts.items()})
    return _ranked(table)


def _ranked(table: pd.DataFrame) -> pd.DataFrame:
    """Sorted by score, with ranks from 1; of equal scores the earlier ROI comes first."""
    table = _sorted(table).assign(rank=np.arange(1, len(table) + 1))
    first = [name for name in ROI_COLUMNS if name in table]
    return table[[*first, *(name for name in table if name not in first)]]


def _sorted(table: pd.DataFrame) -> pd.DataFrame:
    return table.sort_values("score", ascending=False, kind="stable", ignore_index=True)


def _spread(each: Floats) -> Floats:
    """The sd over subjects (ddof 1); none of a single one."""
    return np.asarray(each.std(axis=0, ddof=1)) if len(each) > 1 else np.full(each.shape[1], np.nan)


def edge_table(parts: dict[str, Floats], names: Sequence[str]) -> pd.DataFrame:
    """(2, roi, roi) sizes and directions by feature -> pairs of ROIs by size."""
    rows, columns = np.triu_indices(len(names) if parts else 0, 1)
    size, direction = sum(parts.values(), np.zeros((2, len(names), len(names))))[:, rows, columns]
    ends = np.array(names, dtype=object)
    table = pd.DataFrame(dict(zip(EDGE_COLUMNS, (ends[rows], ends[columns], size, direction), strict=True)))
    return _sorted(table.assign(**{name: matrices[0, rows, columns] for name, matrices in parts.items()}))


def phenotype_table(signed: Floats, names: Sequence[str]) -> pd.DataFrame:
    """(subject, input) signed scores -> phenotypes by mean size."""
    size = np.abs(signed)
    columns = (list(names), size.mean(axis=0), _spread(size), signed.mean(axis=0))
    return _sorted(pd.DataFrame(dict(zip(PHENOTYPE_COLUMNS, columns, strict=True))))


def gate_table(gate: Floats, cohort: Cohort) -> pd.DataFrame:
    """Mean weights by site and label, sites in natural order; the two weights of a gate are those of scan and phenotypes."""
    names = ["imaging", "phenotypes"] if gate.shape[1] == 2 else [f"weight {i + 1}" for i in range(gate.shape[1])]
    table = pd.DataFrame({"site": cohort.sites, "label": cohort.labels, "subjects": 1})
    if not names:
        return table.iloc[:0]
    groups = table.assign(**dict(zip(names, gate.T, strict=True))).groupby(["site", "label"], as_index=False)
    return _by_site(groups.agg({"subjects": "sum"} | dict.fromkeys(names, "mean")))


def _by_site(table: pd.DataFrame) -> pd.DataFrame:
    return table.sort_values("site", kind="stable", key=lambda column: column.map(natural_key), ignore_index=True)


def completeness_table(change: Floats, cohort: Cohort) -> pd.DataFrame:
    """(subject, 2) change of a decision and what is attributed of it -> how far apart they are."""
    difference, attributed = change.T
    absolute = np.abs(attributed - difference)
    moved = np.where(difference == 0, np.nan, np.abs(difference))  # relative to nothing there is no error
    columns = (cohort.subjects[: len(change)], difference, attributed, absolute, absolute / moved)
    return pd.DataFrame(dict(zip(COMPLETENESS_COLUMNS, columns, strict=True)))


def mean_over(explanations: Iterable[Explanation]) -> Explanation:
    """One explanation for several folds or seeds of a method, each counting the same, with `low` and `high` of each score.

    These are the 2.5 and 97.5 percentiles over the explanations, or the smallest and largest where there are fewer than five.
    """
    given = list(explanations)
    methods = sorted({one.about["method"] for one in given})
    if len(methods) != 1:
        raise InputError(f"a mean is over explanations of one method, not of {', '.join(methods) or 'none'}.")
    gate = pd.concat([one.gate for one in given]).groupby(["site", "label"], as_index=False).mean()
    return Explanation(
        rois=_ranked(_averaged([one.rois for one in given], ["roi", "code"], "ROIs")),
        edges=_sorted(_averaged([one.edges for one in given], ["roi", "other roi"], "edges")),
        phenotypes=_sorted(_averaged([one.phenotypes for one in given], ["phenotype"], "phenotypes")),
        gate=_by_site(gate),
        completeness=pd.concat([one.completeness for one in given], ignore_index=True),
        map=given[0].map.iloc[:0],  # maps of different trainings have nothing to do with each other
        about=given[0].about
        | _joined_about(given)
        | {
            "cohort": [one.about["cohort"] for one in given],
            "subjects": [one.about["subjects"] for one in given],
            "explanations": len(given),
            "agreement": _agreement([one.rois for one in given]),
            "interval": "2.5 and 97.5 percentiles over explanations" if len(given) >= 5 else "smallest and largest",
        },
    )


def _read_table(path: Path) -> pd.DataFrame:
    """A saved table; numbers are numbers in an empty one too."""
    names = dict.fromkeys(("roi", "other roi", "code", "phenotype", "site", "part"), str)
    table = pd.read_csv(path, dtype=names, keep_default_na=False, na_values=[""])
    return table if len(table) else table.astype({column: float for column in table if column not in names})


def _agreement(tables: list[pd.DataFrame]) -> float | None:
    """Mean rank correlation of the ROI scores of two explanations; None where there are no two, or nothing to rank."""
    ranks = np.array([table.set_index("roi")["score"].rank().reindex(tables[0]["roi"]).to_numpy() for table in tables])
    if len(tables) < 2 or not (np.ptp(ranks, axis=1) > 0).all():
        return None
    rows, columns = np.triu_indices(len(tables), 1)
    return float(np.corrcoef(ranks)[rows, columns].mean())


def _joined_about(given: list[Explanation]) -> dict[str, Any]:
    """Completeness errors and readabilities over explanations: largest of the largest, means of the others."""
    joined: dict[str, Any] = {}
    errors = [error for one in given if (error := one.error()) is not None]
    for name, each in (("completeness", errors), ("readability", [one.about.get("readability") or {} for one in given])):
        numbers = pd.DataFrame(each).select_dtypes("number")
        if numbers.size:
            joined[name] = {
                str(key): float(column.max() if str(key).startswith("max") else column.mean())
                for key, column in numbers.dropna(axis=1, how="all").items()
            }
    return joined


def _averaged(tables: list[pd.DataFrame], keys: list[str], what: str) -> pd.DataFrame:
    """The mean of every number by the keys, in the first table's order, and the interval of the score."""
    keys = [key for key in keys if key in tables[0]]
    if len({tuple(sorted(map(tuple, table.reindex(columns=keys).astype(str).to_numpy()))) for table in tables}) > 1:
        raise InputError(f"a mean is over explanations of the same {what}, these differ.")
    groups = pd.concat(tables).groupby(keys, sort=False, dropna=False)
    low, high = (0.025, 0.975) if len(tables) >= 5 else (0.0, 1.0)
    mean = groups.mean()
    at = list(mean.columns).index("score") + 1
    mean.insert(at, "low", groups["score"].quantile(low))
    mean.insert(at + 1, "high", groups["score"].quantile(high))
    return mean.reset_index()
