"""`Explanation`: importance of ROIs, edges, phenotypes and regions of tables, as tables that can be saved and averaged.

`explain` makes one from a fitted method and a cohort, `mean_over` averages those of several folds or seeds, and the report
shows them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from m2lgdg.cohort import Cohort, natural_key
from m2lgdg.data.atlases import groups, places
from m2lgdg.data.spreadsheets import csv_text, unquoted_table
from m2lgdg.explain.regions import KEYS, PLACE, REGION_COLUMNS, SAME, completed, empty_regions, mean_of, with_places
from m2lgdg.storage import InputError, one_line, write_texts

Floats = npt.NDArray[np.float64]
ROI_COLUMNS = ("rank", "roi", "code", "x", "y", "z", "score", "sd")
MAP_COLUMNS = ("site", "label", "part", "x", "y")  # part: source or target
COLUMNS = {  # by the name of the file
    "roi": ROI_COLUMNS,
    "edges": ("roi", "other roi", "score", "direction"),
    "phenotypes": ("phenotype", "score", "sd", "direction"),
    "regions": REGION_COLUMNS,
    "gate": ("site", "label", "subjects"),
    "map": MAP_COLUMNS,
}
EARLIER = ("roi", "edges", "phenotypes", "gate", "map")  # files of a version that wrote all, empty ones too
TITLES = {"roi": "ROIs", "edges": "edges", "phenotypes": "phenotypes", "regions": "regions of tables"}
TITLES |= {"gate": "gate weights", "map": "a map of subjects"}
TEXTS = dict.fromkeys(("atlas", "roi", "other roi", "code", "phenotype", "site", "part"), str)  # columns that are not numbers
TEXTS |= dict.fromkeys(("table", "column", "region", "hemisphere"), str)


@dataclass(frozen=True, eq=False)
class Explanation:
    """Importance tables sorted by score; a score is the sum of the columns named after features or blocks.

    `rois`: rank, roi, code and MNI centroid if the atlas is known, score, and its sd over subjects (patterns have none).
    `edges`: all pairs of ROIs, for methods on connectivity. `direction` is signed: positive values point to patient.
    `regions`: columns of tables of brain structure, with region, hemisphere and MNI centroid where they are known. A positive
    `direction` says that larger values, without age, sex and head size, point to patient. Of one subject there are also the
    `value`, in sd from the mean of source, and its `contribution`: positive values are for patient.
    `gate`: mean gate weights by site and label (-1: unknown), for networks with a gate.
    `completeness`: for each subject, how far the attributions are from the change of the decision that they should sum to.
    `map`: the network's representation in two dimensions, with the site and label of each point and no id.

    Of a model of several atlases, `rois` and `edges` have a column `atlas`, and `by_atlas` gives the explanation of each.
    """

    rois: pd.DataFrame
    edges: pd.DataFrame
    phenotypes: pd.DataFrame
    gate: pd.DataFrame
    completeness: pd.DataFrame
    map: pd.DataFrame
    about: dict[str, Any]
    regions: pd.DataFrame = field(default_factory=empty_regions)

    def save(self, folder: str | Path) -> Path:
        """Write explanation.json and the CSV files of `filled`; no file has subject ids."""
        texts = {f"{name}.csv": csv_text(table) for name, table in self.filled.items()}
        about = self.about | {"completeness": self.error(), "tables": list(self.filled)}
        texts["explanation.json"] = json.dumps(about, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
        write_texts(folder, texts)
        for name in COLUMNS.keys() - self.filled.keys():  # of an earlier explanation
            (Path(folder) / f"{name}.csv").unlink(missing_ok=True)
        return Path(folder)

    @property
    def filled(self) -> dict[str, pd.DataFrame]:
        """The tables that have more than scores of zero, by the names of their files."""
        tables = {name: getattr(self, "rois" if name == "roi" else name) for name in COLUMNS}
        return {name: table for name, table in tables.items() if len(table) and ("score" not in table or table["score"].any())}

    def by_atlas(self) -> dict[str, Explanation]:
        """The explanation in each atlas of the model."""
        abouts = self.about.get("by_atlas")
        if not abouts:
            return {str(self.about.get("atlas", "")): self}
        return {
            name: replace(self, rois=_of_atlas(self.rois, name), edges=_of_atlas(self.edges, name), about=about)
            for name, about in abouts.items()
        }

    def lacking(self) -> list[str]:
        """Sentences on the tables that this explanation does not have, and why."""
        has, linear = self.filled, self.about.get("steps") is None
        is_mean = "explanations" in self.about  # over cells, whose maps are not comparable
        sentences = {
            "There are no scores of ROIs and edges: the model does not use the scan.": "roi" not in has,
            "There are no scores of edges: the model does not have connectivity as its input.": "roi" in has
            and "edges" not in has,
            "There are no scores of phenotypes: the model does not use them.": "phenotypes" not in has,
            **self._lacking_tables(),
            "A linear method has no gate weights and no map of a representation.": linear,
            "There are no gate weights: the network has no gate.": not linear and "gate" not in has,
            "There is no map: the network does not give its representation.": not (linear or "map" in has or is_mean),
        }
        return [sentence for sentence, holds in sentences.items() if holds]

    def _lacking_tables(self) -> dict[str, bool]:
        """Why tables of brain structure of the model, or of the cohort, have no scores."""
        known: Mapping[str, Mapping[str, Any]] = self.about.get("structure") or {}
        none = "There are no scores of regions: the model takes no table of brain structure."
        return {none: known == {} and "structure" in self.about} | {
            (
                f"No subject has table {name}, so it has no scores."
                if not one["subjects"]
                else f"Table {name} has no weight in the decision: it added nothing at left-out source sites."
            ): not one["subjects"] or one.get("weight") == 0
            for name, one in known.items()
        }

    def about_rois(self) -> list[str]:
        """Sentences on ROIs without names or without places in the brain."""
        if "by_atlas" in self.about:
            return [sentence for one in self.by_atlas().values() for sentence in one.about_rois()]
        if "roi" not in self.filled:
            return []
        atlas = f"atlas {self.atlas}" if self.atlas else "this atlas"
        sentences = []
        numbered = [str(name) for name in self.rois["roi"] if str(name).isdigit()]
        if numbered and places(self.atlas, self.rois["roi"].astype(str).tolist()) is not None:
            sentences.append(f"The cohort has the codes of the ROIs of {atlas}: convert its files again to have their names.")
        elif numbered:
            example = f"{roi_label(numbered[0])}, for example, is the one that the cohort calls {numbered[0]}"
            sentences.append(f"The cohort has no names for the ROIs of {atlas}: {example}.")
        if "x" not in self.rois or self.rois[["x", "y", "z"]].isna().any(axis=None):
            sentences.append(
                f"No brain can be drawn, because there are no MNI coordinates for all ROIs of {atlas}: give them with --rois "
                "FILE, a table with the columns name, x, y and z, or the atlas image."
            )
        return sentences

    def about_lobes(self) -> list[str]:
        """A sentence with the sums of ROI scores by lobe for each atlas whose lobes are known."""
        atlases, sentences = self.by_atlas(), []
        for atlas, one in atlases.items():
            lobes = one.by_group("lobe")
            sums = ", ".join(f"{row['lobe']} {row['score']:.3g} ({row['rois']} ROIs)" for row in lobes.to_dict("records"))
            if lobes["score"].any():
                sentences.append(f"Sum of ROI scores by lobe{f' ({atlas})' if len(atlases) > 1 else ''}: {sums}.")
        overall = ", ".join(f"{row['lobe']} {100 * row['score']:.0f} %" for row in self.over_atlases().to_dict("records"))
        return [*sentences, f"Mean over atlases: {overall}."] if overall else sentences

    @classmethod
    def load(cls, folder: str | Path) -> Explanation:
        """Read what `save` wrote; of `completeness` only the summary over subjects was saved."""
        folder = Path(folder)
        try:
            about = json.loads((folder / "explanation.json").read_text(encoding="utf-8"))
            saved = about.get("tables", EARLIER) if isinstance(about, dict) else []
            tables = {
                name: _read_table(folder / f"{name}.csv") if name in saved else _empty_table(columns)
                for name, columns in COLUMNS.items()
            }
        except (OSError, ValueError, TypeError) as error:
            raise InputError(f"{folder} has no readable explanation ({one_line(error)}).") from None
        scored = [tables[name] for name in ("roi", "edges", "phenotypes", "regions") if len(tables[name])]
        if not isinstance(about, dict) or any("score" not in table for table in scored):
            raise InputError(
                f"{folder} has no readable explanation (a table without scores, or explanation.json without fields)."
            )
        tables["regions"] = tables["regions"].fillna({"hemisphere": ""})  # of the whole brain
        loaded = cls(rois=tables.pop("roi"), **tables, completeness=completeness_table(np.empty((0, 2)), ()), about=about)
        return loaded if "x" in loaded.rois else replace(loaded, rois=_placed(loaded.rois, loaded.atlas))

    @property
    def atlas(self) -> str:
        """Name of the atlas; empty if the cohort has none."""
        return str(self.about.get("atlas") or "")

    def by_group(self, by: str = "lobe") -> pd.DataFrame:
        """Sum of the ROI scores of each lobe, network or hemisphere in each atlas, highest first; empty if not known."""
        if "by_atlas" in self.about:
            return _with_atlas({name: one.by_group(by) for name, one in self.by_atlas().items()})
        table = self.rois[["score"]].assign(**{by: groups(self.atlas, self.rois["roi"].astype(str).tolist(), by)})
        sums = table[table[by] != ""].groupby(by, as_index=False).agg(rois=("score", "size"), score=("score", "sum"))
        return _sorted(sums.assign(**{"score per roi": sums["score"] / sums["rois"]}))

    def over_atlases(self, by: str = "lobe") -> pd.DataFrame:
        """Proportion of the ROI scores in each lobe, by atlas and as their mean, highest first; empty without several atlases.

        Atlases divide the brain differently, so each counts as a whole. Networks of different atlases have different names.
        """
        sums = {name: one.by_group(by).set_index(by)["score"] for name, one in self.by_atlas().items()}
        known = {name: each / each.sum() for name, each in sums.items() if each.sum() > 0}
        if len(known) < 2:
            return _empty_table((by, "score"))
        table = pd.DataFrame(known).fillna(0.0)
        mean = table.mean(axis=1).rename("score")
        return _sorted(pd.concat([mean, table], axis=1).rename_axis(by).reset_index())

    def with_centroids(self, centroids: pd.DataFrame) -> Explanation:
        """The same explanation with other ROI codes and centroids (a table of `read_centroids`), in the first atlas."""
        if "by_atlas" in self.about:
            (name, first), *others = self.by_atlas().items()
            return joined({name: first.with_centroids(centroids), **dict(others)}, self.phenotypes, self.regions)
        scores = self.rois.drop(columns=[name for name in ("code", "x", "y", "z") if name in self.rois])
        return replace(self, rois=_ranked(scores.join(centroids.set_index("name")[["code", "x", "y", "z"]], on="roi")))

    def error(self) -> dict[str, float] | None:
        """Completeness error over subjects: mean and maximum absolute, median and maximum relative; None for patterns."""
        if not len(self.completeness):
            return self.about.get("completeness")
        absolute, relative = self.completeness["absolute"], self.completeness["relative"].dropna()
        summary = {"mean_absolute": float(absolute.mean()), "max_absolute": float(absolute.max())}
        if len(relative):
            summary |= {"median_relative": float(relative.median()), "max_relative": float(relative.max())}
        return summary


def joined(
    atlases: Mapping[str, Explanation], phenotypes: pd.DataFrame | None = None, regions: pd.DataFrame | None = None
) -> Explanation:
    """One explanation of those in several atlases; phenotypes, regions (if not given) and gate weights are means."""
    first, every = next(iter(atlases.values())), list(atlases.values())
    if phenotypes is None:
        pooled = pd.concat([one.phenotypes for one in every])
        phenotypes = _sorted(pooled.groupby("phenotype", sort=False, as_index=False).mean())
    return Explanation(
        rois=_with_atlas({name: one.rois for name, one in atlases.items()}),
        edges=_with_atlas({name: one.edges for name, one in atlases.items()}),
        phenotypes=phenotypes,
        gate=_mean_gate(every),
        completeness=pd.concat([one.completeness for one in every], ignore_index=True),
        map=first.map,
        regions=mean_of([one.regions for one in every]) if regions is None else regions,
        about=first.about
        | _joined_about(every)
        | {"atlas": " + ".join(atlases), "by_atlas": {name: one.about | {"atlas": name} for name, one in atlases.items()}},
    )


def mean_over_methods(explained: Mapping[str, Explanation]) -> Explanation:
    """One explanation of the methods of an average: each table of a method is divided by its sum, as their units differ."""
    first = next(iter(explained.values()))
    with_gate = [one for one in explained.values() if len(one.gate)]
    steps = max(one.about.get("steps") or 0 for one in explained.values())
    return Explanation(
        rois=_ranked(_placed(_mean_scores({name: one.rois for name, one in explained.items()}, ["roi"]), first.atlas)),
        edges=_mean_scores({name: one.edges for name, one in explained.items()}, ["roi", "other roi"]),
        phenotypes=_mean_scores({name: one.phenotypes for name, one in explained.items()}, ["phenotype"]),
        gate=(with_gate or [first])[0].gate,
        completeness=first.completeness.iloc[:0],
        map=first.map,
        regions=_mean_regions({name: one.regions for name, one in explained.items()}),
        about=first.about
        | _joined_structure(list(explained.values()))
        | {"method": "average", "methods": {name: one.about for name, one in explained.items()}, "steps": steps or None}
        | {"scores": "mean over methods of their scores, each divided by its sum; " + first.about["scores"]},
    )


def _mean_scores(tables: Mapping[str, pd.DataFrame], keys: list[str]) -> pd.DataFrame:
    """Scores of each method and their mean, highest first; a row that a method lacks counts as 0."""
    scaled = {
        name: table.set_index(keys).select_dtypes("number") / (table["score"].sum() or 1.0) for name, table in tables.items()
    }
    index = pd.concat([table[keys] for table in tables.values()]).drop_duplicates().set_index(keys).index
    each = {name: table.reindex(index).fillna(0.0) for name, table in scaled.items()}
    mean = pd.DataFrame(index=index).assign(score=sum(one["score"] for one in each.values()) / len(each), sd=np.nan)
    for column in ("direction", "contribution"):
        if any(column in one for one in each.values()):
            mean[column] = sum(one.get(column, 0.0) for one in each.values()) / len(each)
    return _sorted(mean.assign(**{name: one["score"] for name, one in each.items()}).reset_index())


def _mean_regions(tables: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """As `_mean_scores`; the values of one subject are those of the first method that takes tables."""
    given = next((table for table in tables.values() if len(table)), None)
    if given is None:
        return empty_regions()
    mean = _mean_scores(tables, KEYS)
    return with_places(mean.merge(given[[*KEYS, "value"]], on=KEYS, how="left") if "value" in given else mean)


def _with_atlas(tables: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    named = [table.assign(atlas=name)[["atlas", *table.columns]] for name, table in tables.items()]
    return pd.concat(named, ignore_index=True)


def _of_atlas(table: pd.DataFrame, name: str) -> pd.DataFrame:
    return table[table["atlas"] == name].drop(columns="atlas").reset_index(drop=True) if "atlas" in table else table


def roi_table(scores: dict[str, Floats], cohort: Cohort) -> pd.DataFrame:
    """ROI table from (subject, roi) scores by feature, with codes and centroids if the atlas is known."""
    each = sum(scores.values(), np.zeros((1, len(cohort.rois))))  # (subject, roi)
    table = pd.DataFrame({"roi": cohort.rois, "score": each.mean(axis=0), "sd": _spread(each)})
    return _ranked(_placed(table, cohort.atlas).assign(**{name: values.mean(axis=0) for name, values in scores.items()}))


def _placed(table: pd.DataFrame, atlas: str) -> pd.DataFrame:
    known = places(atlas, table["roi"].astype(str).tolist())
    return table if known is None else table.join(known[["code", "x", "y", "z"]], on="roi")


def _ranked(table: pd.DataFrame) -> pd.DataFrame:
    """Table sorted by score, with ranks from 1; ties keep the order of ROIs."""
    table = _sorted(table).assign(rank=np.arange(1, len(table) + 1))
    first = [name for name in ROI_COLUMNS if name in table]
    return table[[*first, *(name for name in table if name not in first)]]


def _sorted(table: pd.DataFrame) -> pd.DataFrame:
    return table.sort_values("score", ascending=False, kind="stable", ignore_index=True)


def _spread(each: Floats) -> Floats:
    """Sd over subjects (ddof 1); nan for a single subject."""
    return np.asarray(each.std(axis=0, ddof=1)) if len(each) > 1 else np.full(each.shape[1], np.nan)


def edge_table(scores: dict[str, Floats], names: Sequence[str]) -> pd.DataFrame:
    """Edge table from (2, roi, roi) absolute and signed scores by feature."""
    rows, columns = np.triu_indices(len(names) if scores else 0, 1)
    size, direction = sum(scores.values(), np.zeros((2, len(names), len(names))))[:, rows, columns]
    ends = np.array(names, dtype=object)
    table = pd.DataFrame({"roi": ends[rows], "other roi": ends[columns], "score": size, "direction": direction})
    return _sorted(table.assign(**{name: matrices[0, rows, columns] for name, matrices in scores.items()}))


def phenotype_table(signed: Floats, names: Sequence[str]) -> pd.DataFrame:
    """Phenotype table from (subject, input) signed scores, sorted by mean absolute score."""
    size = np.abs(signed)
    columns = {"phenotype": list(names), "score": size.mean(axis=0), "sd": _spread(size), "direction": signed.mean(axis=0)}
    return _sorted(pd.DataFrame(columns))


def gate_table(gate: Floats, cohort: Cohort, modalities: Sequence[str] = ("imaging", "phenotypes")) -> pd.DataFrame:
    """Mean gate weights by site and label, sites in natural order, with the names of their modalities where they fit."""
    count = gate.shape[1]
    names = list(modalities) if count == len(modalities) else [f"weight {i + 1}" for i in range(count)]
    table = pd.DataFrame({"site": cohort.sites, "label": cohort.labels, "subjects": 1})
    if not names:
        return table.iloc[:0]
    groups = table.assign(**dict(zip(names, gate.T, strict=True))).groupby(["site", "label"], as_index=False)
    return _by_site(groups.agg({"subjects": "sum"} | dict.fromkeys(names, "mean")))


def _mean_gate(given: Iterable[Explanation]) -> pd.DataFrame:
    return _by_site(pd.concat([one.gate for one in given]).groupby(["site", "label"], as_index=False).mean())


def _by_site(table: pd.DataFrame) -> pd.DataFrame:
    return table.sort_values("site", kind="stable", key=lambda column: column.map(natural_key), ignore_index=True)


def completeness_table(change: Floats, subjects: Sequence[str]) -> pd.DataFrame:
    """Completeness table from (subject, 2): change of the decision, and sum of its attributions."""
    difference, attributed = change.T
    absolute = np.abs(attributed - difference)
    relative = absolute / np.where(difference == 0, np.nan, np.abs(difference))  # none without a change
    columns = {"difference": difference, "attributed": attributed, "absolute": absolute, "relative": relative}
    return pd.DataFrame({"subject": subjects[: len(change)], **columns})


def mean_over(explanations: Iterable[Explanation]) -> Explanation:
    """Mean explanation over several folds or seeds of a method, equally weighted, with `low` and `high` of each score.

    These are the 2.5 and 97.5 percentiles over the explanations, or minimum and maximum for fewer than five. Of regions they
    are those of `direction`, whose size is then the score; `same direction` is the proportion of explanations with its sign.
    """
    given = list(explanations)
    methods = sorted({one.about["method"] for one in given})
    if len(methods) != 1:
        raise InputError(f"only explanations of one method can be averaged, not of {', '.join(methods) or 'none'}.")
    atlases = list(given[0].by_atlas())
    if any(list(one.by_atlas()) != atlases for one in given):
        raise InputError("only explanations in the same atlases can be averaged.")
    phenotypes = _sorted(_averaged([one.phenotypes for one in given], ["phenotype"], "phenotypes"))
    if len(atlases) > 1:
        by_name = {name: mean_over(one.by_atlas()[name] for one in given) for name in atlases}
        return joined(by_name, phenotypes, _averaged_regions(given))
    return Explanation(
        rois=_ranked(_averaged([one.rois for one in given], ["roi", "code"], "ROIs")),
        edges=_sorted(_averaged([one.edges for one in given], ["roi", "other roi"], "edges")),
        phenotypes=phenotypes,
        gate=_mean_gate(given),
        completeness=pd.concat([one.completeness for one in given], ignore_index=True),
        map=given[0].map.iloc[:0],  # maps of different networks are not comparable
        regions=_averaged_regions(given),
        about=given[0].about
        | _joined_about(given)
        | {
            "cohort": [one.about["cohort"] for one in given],
            "subjects": [one.about["subjects"] for one in given],
            "explanations": len(given),
            "agreement": _agreement([one.rois for one in given]),
            "interval": "2.5 and 97.5 percentiles over explanations" if len(given) >= 5 else "smallest and largest",
        }
        | _agreeing_structure(given),
    )


def roi_label(name: str) -> str:
    """A ROI in tables and figures; one that has only a number is called a ROI."""
    return f"ROI {name}" if name.isdigit() else name


def _read_table(path: Path) -> pd.DataFrame:
    table = unquoted_table(pd.read_csv(path, dtype=TEXTS, keep_default_na=False, na_values=[""]))
    return table if len(table) else _empty_table(table.columns)


def _empty_table(columns: Iterable[str]) -> pd.DataFrame:
    """A table without rows whose columns have the types of a filled one."""
    return pd.DataFrame({column: pd.Series(dtype=TEXTS.get(column, float)) for column in columns})


def _agreement(tables: list[pd.DataFrame], key: str = "roi") -> float | None:
    """Mean pairwise rank correlation of the scores of ROIs or columns; None for a single explanation or constant scores."""
    ranks = np.array([table.set_index(key)["score"].rank().reindex(tables[0][key]).to_numpy() for table in tables])
    if len(tables) < 2 or not ranks.size or not (np.ptp(ranks, axis=1) > 0).all():
        return None
    rows, columns = np.triu_indices(len(tables), 1)
    return float(np.corrcoef(ranks)[rows, columns].mean())


def _joined_about(given: list[Explanation]) -> dict[str, Any]:
    """Completeness errors and probe results over explanations: maxima of maxima, means of the others."""
    joined: dict[str, Any] = {}
    read = [one.about.get("readability") or {} for one in given]
    for name, each in (("completeness", [one.error() or {} for one in given]), ("readability", read)):
        numbers = pd.DataFrame(each).select_dtypes("number").dropna(axis=1, how="all")
        if numbers.size:
            joined[name] = {
                str(key): float(numbers[key].max() if key.startswith("max") else numbers[key].mean()) for key in numbers
            }
    return joined | _joined_structure(given)


def _joined_structure(given: list[Explanation]) -> dict[str, Any]:
    """Mean weight and mean agreement of each table of brain structure, and the largest number of subjects."""
    known = [one.about["structure"] for one in given if "structure" in one.about]
    facts: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(name for each in known for name in each):
        every = [each[name] for each in known if name in each]
        facts[name] = {"subjects": max(one["subjects"] for one in every)}
        if all("weight" in one for one in every):  # a fold that leaves the table out gives it no weight
            facts[name]["weight"] = sum(one["weight"] for one in every) / len(given)
        if agreeing := [one["agreement"] for one in every if "agreement" in one]:
            facts[name]["agreement"] = sum(agreeing) / len(agreeing)
    return {"structure": facts} if known else {}


def _agreeing_structure(given: list[Explanation]) -> dict[str, Any]:
    """As `_joined_structure`, with the agreement of the directions of each table between the explanations."""
    joined, tables = _joined_structure(given), completed([one.regions for one in given])
    for name, facts in joined.get("structure", {}).items():
        signed = [table[table["table"] == name].assign(score=table["direction"]) for table in tables]
        agreement = _agreement(signed, "column")
        facts |= {} if agreement is None else {"agreement": agreement}
    return joined


def _averaged_regions(given: list[Explanation]) -> pd.DataFrame:
    """Mean directions with intervals; a score is the size of its mean direction, as those of noise cancel."""
    tables = completed([one.regions for one in given])
    if not len(tables[0]):
        return tables[0]
    signed = [table.drop(columns=list(PLACE)).assign(score=table["direction"]) for table in tables]
    mean = _averaged(signed, KEYS, "regions").set_index(KEYS)
    signs = [np.sign(table.set_index(KEYS)["direction"].reindex(mean.index)) for table in tables]
    same = sum((sign == np.sign(mean["direction"])) / len(tables) for sign in signs)
    return with_places(mean.assign(score=mean["direction"].abs(), **{SAME: same}).reset_index())


def _averaged(tables: list[pd.DataFrame], keys: list[str], what: str) -> pd.DataFrame:
    """Mean of every numeric column by the keys, in the first table's order, with the interval of the score."""
    full = next((table for table in tables if len(table)), tables[0])
    numbers = full.select_dtypes("number").columns
    tables = [table if len(table) else full.assign(**dict.fromkeys(numbers, 0.0)) for table in tables]  # saved only if not zero
    keys = [key for key in keys if key in full]
    if len({tuple(sorted(map(tuple, table.reindex(columns=keys).astype(str).to_numpy()))) for table in tables}) > 1:
        raise InputError(f"explanations with different {what} cannot be averaged.")
    groups = pd.concat(tables).groupby(keys, sort=False, dropna=False)
    low, high = (0.025, 0.975) if len(tables) >= 5 else (0.0, 1.0)
    mean = groups.mean()
    at = list(mean.columns).index("score") + 1
    mean.insert(at, "low", groups["score"].quantile(low))
    mean.insert(at + 1, "high", groups["score"].quantile(high))
    return mean.reset_index()
