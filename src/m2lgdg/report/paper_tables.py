"""The paper's tables from the predictions of a study: each target site, the macro average, paired tests, variants.

`m2lgdg table` prints them and the report shows them, with published values in brackets if there are any, and with the two
tracks of a study apart: strict sees nothing of the target but the subject that is predicted, adapted sees other subjects of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pandas as pd

from m2lgdg.fields import nearest
from m2lgdg.metrics import PAPER_METRICS, THRESHOLD, delong_interval
from m2lgdg.registry import FC_NETWORK, PAPER, Declaration
from m2lgdg.report.contents import assignments, read_json
from m2lgdg.report.inputs import additions, input_tables, seen_by
from m2lgdg.report.inputs import label as label
from m2lgdg.report.published import read_published
from m2lgdg.report.tables import NAN, Column, Format, Interval, Spread, Table, Value, columns, render
from m2lgdg.storage import InputError
from m2lgdg.study.description import read_cohort_facts
from m2lgdg.study.plan import declarations
from m2lgdg.study.predictions import ADAPTED, STRICT, by_track, read_joined_predictions
from m2lgdg.study.stats import (
    BALANCED,
    FLAT,
    MIN_PER_CLASS,
    cell_scores,
    class_counts,
    counted_targets,
    flat_predictions,
    macro_scores,
    min_per_class,
    over_seeds,
    paired_tests,
    site_scores,
    training_differences,
)

FEW = 5  # with fewer sites, tests and intervals over sites have little power
INTERVAL = "AUC 95 % interval"
MACRO = "Macro average over target sites"
PANEL = "Paired tests over target sites"  # Panel B of the paper
BOTH_TRACKS = "Strict and adapted track"
SHOWN = (*PAPER_METRICS, BALANCED)
AT_THRESHOLD = f"ACC, SPE, SEN, F1 and {BALANCED} at the threshold {THRESHOLD:g}"
MOST_FLAT, MOST_SITES = 8, 5  # methods, and sites of each, that are named for uninformative decisions
SIGNED = "+z.2f"  # what rounds to zero has a plus
Key = tuple[str, str]
Lookup = dict[tuple[str, str, str], dict[Any, Any]]


def table(
    folder: str | Path,
    form: Format = "text",
    *,
    best: str | None = None,
    rivals: Sequence[str] = (),
    tests: bool = False,
    also: str | Path | Sequence[str | Path] = (),
    published: str | Path | None = None,
    sites: Sequence[str] | None = None,
    predictions: pd.DataFrame | None = None,
) -> str:
    """Scores at each target site, the macro average with paired tests, and variants paired by site and seed.

    Parameters
    ----------
    folder : str or Path
        Study folder.
    form : {"text", "markdown", "latex", "csv"}
    best, rivals : str, sequence of str
        Methods of the paired tests: `best`, by default the main method of the study, else the one with the highest AUC, is
        tested against the `rivals`, by default all others.
    tests : bool
        Whether to add the tests of all five metrics (Panel B of the paper), as `rivals` does: one table per metric as text,
        one wide table in the other formats.
    also : str or Path, or a sequence of them
        Further study folders with the same subjects and target sites; their methods are in the same tables.
    published : str or Path, optional
        Table (method, target, metric, value) of values to show in brackets.
    sites : sequence of str, optional
        Target sites whose tables are wanted; averages and tests, which are over all targets, are left out then.
    predictions : DataFrame, optional
        Those of all folders, if they were already read.

    Returns
    -------
    str
        The tables; of a study with both tracks those of each, and one with both next to each other.

    Examples
    --------
    >>> import tempfile
    >>> import m2lgdg
    >>> study = {"cohort": m2lgdg.make_cohort("tiny"), "methods": ["prior"], "targets": ["east"]}
    >>> print(m2lgdg.table(m2lgdg.run_study(study, tempfile.mkdtemp()).folder).splitlines()[0])
    Target east
    """
    folders = [folder, *([also] if isinstance(also, str | Path) else also)]
    predictions = read_joined_predictions(folders) if predictions is None else predictions
    tracks = by_track(predictions)
    studies = [read_json(Path(one) / "study.json", {}) for one in folders]
    batch, least = _adapted_subjects(studies), max(map(min_per_class, studies))
    if published is not None and STRICT not in tracks:
        raise InputError(f"{folder} has the adapted track only; published values are compared with the strict track.")
    tables, declared = [], {name: one for other in folders for name, one in declarations(other).items()}
    of_cohorts = [read_cohort_facts(one).description.get("tables", {}) for one in folders]
    for track, rows in tracks.items():
        scores, tested = cell_scores(rows, SHOWN), best or main_method(studies[0], rows, rivals)
        compared = Comparison(rows, tested, rivals=rivals, scores=scores, declared=declared, least=least)
        of_track = compared.tables()
        if tests or rivals:
            panels = compared.panels()
            if not panels:
                raise InputError(f"{folder}: paired tests need at least two target sites and two methods.")
            of_track += panels if form == "text" else one_panel(panels)
        of_track += training_tables(scores[scores["target"].isin(compared.counted)])
        for study, held in zip(studies, of_cohorts, strict=True):
            own = study.get("methods")
            keys = [key for key in compared.keys if isinstance(own, list) and key[0] in own]
            seen = seen_by(keys, study, declared, held)
            of_track += input_tables(seen, compared.averaged, additions(seen, rows, least))
        if published is not None and track == STRICT:
            values = read_published(published, set(map(label, rows["method"], rows["variant"])), set(rows["target"]))
            of_track = values.beside(of_track, compared.counted)
        tables += in_track(of_track, track, batch)
    if len(tracks) > 1:
        tables.append(both_tracks(tracks[STRICT], tracks[ADAPTED], batch, least))
    targets = predictions["target"].unique().tolist()
    for site in sites or ():
        if site not in targets:
            raise InputError(f"--site {site}: not a target of {folder}{nearest(site, targets)}")
    return render([table for table in tables if not sites or table.target in sites], form)


def _adapted_subjects(studies: Sequence[Mapping[str, Any]]) -> int:
    """Number of target subjects that the adapted track sees; 0 without that track."""
    sizes = {int(study.get("adapt_subjects") or 0) for study in studies if ADAPTED in (study.get("track") or [])}
    if len(sizes) > 1:
        raise InputError("the studies have different adapt_subjects, so their adapted tracks cannot be compared.")
    return sizes.pop() if sizes else 0


def named_key(keys: Sequence[Key], name: str) -> Key:
    """The (method, variant) with this name in tables, or else the first of the method with this name."""
    by_name = {method: (method, variant) for method, variant in reversed(keys)} | {label(*key): key for key in keys}
    if name not in by_name:
        raise InputError(f"the study has no method {name}; it has {', '.join(label(*key) for key in keys)}.")
    return by_name[name]


def main_method(study: Mapping[str, Any], predictions: pd.DataFrame, rivals: Sequence[str] = ()) -> str | None:
    """Main method of a study; None if it has none, or none that was run."""
    name = study.get("main")
    ran = ((predictions["method"] == name) & (predictions["variant"] == "")).any()
    return str(name) if ran and name not in rivals else None


def chosen_among(name: str, count: int) -> str:
    """Sentence for a method that was selected by its AUC at the sites it is reported for."""
    return f"{name} was chosen for its AUC, the highest of {count} methods at these very sites, so this AUC is optimistic"


def constant_at(predictions: pd.DataFrame, *, decided: bool = False) -> set[tuple[str, str, str]]:
    """(method, variant, target) with one probability, or if `decided` one decision, for all subjects of each cell."""
    cell = ["method", "variant", "target", "seed"]
    values = predictions["proba"] >= THRESHOLD if decided else predictions["proba"]
    same = predictions[cell].assign(value=values).groupby(cell, sort=False)["value"].nunique() == 1
    same = same.groupby(level=cell[:3], sort=False).all()
    return {key for key, constant in same.items() if constant}


def constant_keys(predictions: pd.DataFrame, at: set[tuple[str, str, str]] | None = None) -> set[Key]:
    """(method, variant) that are constant at all their targets, such as `prior`; `at`: where they are, if it is known."""
    at = constant_at(predictions) if at is None else at
    rows = predictions[["method", "variant", "target"]].drop_duplicates().itertuples(index=False, name=None)
    return {key[:2] for key in at} - {key[:2] for key in rows if key not in at}


class Comparison:
    """Scores of all methods of a predictions table, and which of them is tested against which.

    `best` has the highest macro AUC by default; among variants of one method it is the method itself, because the highest of
    many variants is also the luckiest. `scores` are those of the cells, if they are already computed. A target site needs
    `least` patients and controls to count in means and tests.
    """

    def __init__(
        self,
        predictions: pd.DataFrame,
        best: str | None = None,
        *,
        rivals: Sequence[str] = (),
        scores: pd.DataFrame | None = None,
        declared: Mapping[str, Declaration] = MappingProxyType({}),
        least: int = MIN_PER_CLASS,
    ) -> None:
        sites = site_scores(cell_scores(predictions, SHOWN) if scores is None else scores)
        self.predictions, self.declared, self.least = predictions, declared, least
        self.sites, self.counted = sites[sites["metric"].isin(SHOWN)], counted_targets(predictions, least)
        self.averaged = self.sites[self.sites["target"].isin(self.counted)]
        self.macro = macro_scores(self.averaged)
        self.keys: list[Key] = list(dict.fromkeys(zip(self.sites["method"], self.sites["variant"], strict=True)))
        self.targets = list(dict.fromkeys(self.sites["target"]))
        self.best, self.selected = self._best(best)
        self.rivals = list(dict.fromkeys(named_key(self.keys, name) for name in rivals)) or [
            key for key in self.keys if key != self.best
        ]
        if self.best in self.rivals:
            raise InputError(f"{label(*self.best)} cannot be its own rival; choose another --rival, or another --best.")

    def _best(self, name: str | None) -> tuple[Key, int]:
        """The method to compare the others with, and the number of methods it was selected from (1: not by its AUC)."""
        if name is not None:
            return named_key(self.keys, name), 1
        if len({method for method, _ in self.keys}) == 1 and (self.keys[0][0], "") in self.keys:
            return (self.keys[0][0], ""), 1
        area = self.macro[self.macro["metric"] == "AUC"]
        ranked = area.sort_values(["sites", "mean"], ascending=False, kind="stable", na_position="last")
        rows = list(zip(ranked["method"], ranked["variant"], strict=True))
        constant = constant_keys(self.predictions, self._constant["AUC"])
        learned = [key for key in rows if key not in constant]
        return (learned or rows or self.keys)[0], max(len(learned), 1)

    @cached_property
    def _constant(self) -> dict[str, set[tuple[str, str, str]]]:
        decided = constant_at(self.predictions, decided=True)
        return dict.fromkeys(SHOWN, decided) | {"AUC": constant_at(self.predictions)}

    def tables(self) -> list[Table]:
        """A table for each target site, then the macro table."""
        return [*self.site_tables(), self.macro_table()]

    def site_tables(self) -> list[Table]:
        """A table for each target site."""
        mean = over_seeds(self.predictions)
        rows_of = dict(iter(mean.groupby(["target", "method", "variant"], sort=False)))
        tables = []
        for site in self.targets:
            at_site = _by_key(self.sites[self.sites["target"] == site])
            unranked = {metric: {key for key in self.keys if (*key, site) in self._constant[metric]} for metric in SHOWN}
            rows: list[list[Value]] = []
            for key in self.keys:
                own = rows_of.get((site, *key), mean.iloc[:0])
                ends = delong_interval(own["label"].to_numpy(), own["proba"].to_numpy()) if len(own) else (NAN, NAN)
                interval = Interval(*((NAN, NAN) if key in unranked["AUC"] else ends))
                rows.append([label(*key), len(own) or NAN, *_spreads(at_site, key), interval])
            ranks = [[0, 0, *row, 0] for row in _ranks(at_site, self.keys, unranked)]
            several = sorted({int(row["seeds"]) for row in at_site.values() if row["seeds"] > 1})
            seeds = " to ".join(str(count) for count in dict.fromkeys([*several[:1], *several[-1:]]))
            subjects = mean[mean["target"] == site].drop_duplicates("subject")
            note = f"{len(subjects)} subjects, {int(subjects['label'].sum())} of them patients; scores in %, {AT_THRESHOLD}; "
            note += f"mean ± sd over {seeds} seeds (one seed where no sd is given)" if seeds else "one seed"
            note += "; 95 % interval: DeLong's, over subjects (none for an AUC of 0 or 100 and for constant probabilities)"
            note += ", of the probabilities averaged over seeds, whose AUC is often above the mean AUC of single seeds" * bool(
                seeds
            )
            note += "" if site in self.counted else f"; not in means and tests, which {self._needed}"
            header = [Column("Method"), Column("n", "count"), *columns("percent", *SHOWN, INTERVAL)]
            tables.append(Table(f"Target {site}", header, rows, note, site, ranks))
        return tables

    def macro_table(self) -> Table:
        """The mean over target sites, with the difference from `best` and its test."""
        by_key = _by_key(self.macro)
        areas = self.averaged[self.averaged["metric"] == "AUC"]
        differences, tests = _by_key(paired_tests(areas, self.best)), _by_key(paired_tests(areas, self.best, self.rivals))
        compared, best = len(self.keys) > 1, label(*self.best)
        rows: list[list[Value]] = []
        for key in self.keys:
            difference, p = _lookup(differences, (*key, "AUC"), "delta"), _lookup(tests, (*key, "AUC"), "p_holm")
            test: list[Value] = ["", ""] if key == self.best else [-difference, p]
            rows.append([label(*key), *_spreads(by_key, key), *(test if compared else [])])
        header = [Column("Method"), *columns("percent", *SHOWN)]
        header += [Column(f"AUC minus that of {best}", "percent", SIGNED), Column("p (Holm)", "p")] if compared else []
        unranked = {metric: constant_keys(self.predictions, self._constant[metric]) for metric in SHOWN}
        ranks = [[0, *row, *([0, 0] if compared else [])] for row in _ranks(by_key, self.keys, unranked)]
        return Table(MACRO, header, rows, self._macro_note(by_key, best), "all", ranks)

    @property
    def _needed(self) -> str:
        return f"need at least {self.least} patients and {self.least} controls (min_per_class)"

    def _macro_note(self, by_key: Lookup, best: str) -> str:
        sites, counts = len(self.counted), class_counts(self.predictions)
        subjects = int(counts.loc[self.counted].to_numpy().sum())
        if sites == 0:
            note = f"no mean and no tests, which {self._needed} at a target site"
        elif sites == 1:
            note = f"one target site, {subjects} subjects, so no tests; in %, {AT_THRESHOLD}"
        else:
            note = f"mean ± sd in % over {sites} target sites, {subjects} subjects; {AT_THRESHOLD}"
            if len(self.keys) > 1:
                note += (
                    f"; differences are each row minus {best} (negative: worse than {best}), with paired t-tests over sites, "
                )
                if len(self.rivals) < len(self.keys) - 1:
                    note += f"of {', '.join(label(*key) for key in self.rivals)} only, "
                note += f"Holm-corrected within AUC{_little_power(sites)}"
        note += f"; {chosen_among(best, self.selected)}" if self.selected > 1 else ""
        few = counts.drop(self.counted)
        left = [f"{one.Index} (patients {one.patients}, controls {one.controls})" for one in few.itertuples()]
        if left:
            note += f"; left out of means and tests, which {self._needed}: {', '.join(left)}"
        found = {key: _lookup(by_key, (*key, "AUC"), "sites") for key in self.keys} if sites else {}
        scored = {label(*key): 0 if np.isnan(count) else int(count) for key, count in found.items()}  # NaN: every cell failed
        fewer = ", ".join(f"{name} ({count})" for name, count in scored.items() if count < sites)
        note += f"; means over fewer than {sites} sites: {fewer}" if fewer else ""
        variants = [
            f"{variant}: {assignments(self.declared[method].variants[variant]) or 'the full method'}"
            for method, variant in self.keys
            if method in PAPER and method in self.declared and variant in self.declared[method].variants
        ]
        note += f". {'; '.join(variants)}" if variants else ""
        flat = flat_clauses(self.predictions, self.least)
        note += f". {'; '.join(flat)}" if flat else ""
        shared = [name for name in dict.fromkeys(method for method, _ in self.keys) if name in FC_NETWORK]
        return note + (f". {', '.join(shared)}: the algorithm on m2lgdg's own FC network" if shared else "")

    def panels(self) -> list[Table]:
        """Panel B of the paper, a table per metric; empty with one target site or one method."""
        sites = self.averaged[self.averaged["metric"].isin(PAPER_METRICS)]
        return panels_of(sites, self.best, self.rivals, self.selected)


def study_tables(predictions: pd.DataFrame, best: str | None = None, **options: Any) -> list[Table]:
    """A table for each target site, then the macro table; the options are those of `Comparison`."""
    return Comparison(predictions, best, **options).tables()


def panels_of(sites: pd.DataFrame, best: Key, rivals: Sequence[Key], selected: int = 1) -> list[Table]:
    """Panel B from site scores, such as published ones; `best` was selected from so many methods."""
    count, name = sites["target"].nunique(), label(*best)
    if count < 2 or not rivals:
        return []
    note = (
        f"{name} minus each method, in percentage points (positive: {name} is better); two-sided paired t-tests over {count} "
        f"target sites, each the mean over seeds; Holm-corrected within each metric{_little_power(count)}"
    )
    note += f"; {chosen_among(name, selected)}" if selected > 1 else ""
    tests = paired_tests(sites, best, rivals)
    fewer = tests[tests["sites"] < count]
    clauses = (f"{row.metric} of {label(row.method, row.variant)} ({row.sites})" for row in fewer.itertuples())
    note += f"; over fewer sites: {', '.join(clauses)}" if len(fewer) else ""
    tables = []
    for metric in [metric for metric in PAPER_METRICS if metric in set(tests["metric"])]:
        of_metric = tests[tests["metric"] == metric].itertuples()
        rows = [[label(row.method, row.variant), row.delta, row.t, row.p, row.p_holm] for row in of_metric]
        header = [Column("Method"), Column(f"{metric} difference", "percent", SIGNED), Column(f"{metric} t", "number")]
        tables.append(Table(f"{PANEL}, {metric}", [*header, *columns("p", f"{metric} p", f"{metric} p (Holm)")], rows, note))
    return tables


def one_panel(tables: Sequence[Table]) -> list[Table]:
    """The tables of Panel B as one wide table, as the paper prints them."""
    if not tables:
        return []
    header = [tables[0].columns[0], *(column for table in tables for column in table.columns[1:])]
    same_method = zip(*(table.rows for table in tables), strict=True)
    rows = [[cells[0][0], *(cell for row in cells for cell in row[1:])] for cells in same_method]
    return [replace(tables[0], title=PANEL, columns=header, rows=rows)]


def flat_clauses(predictions: pd.DataFrame, least: int = MIN_PER_CLASS) -> list[str]:
    """Clauses on methods with uninformative decisions at some sites, whatever their AUC."""
    count, clauses = len(counted_targets(predictions, least)), []
    found = flat_predictions(predictions, least)
    for key, sites in [*found.items()][:MOST_FLAT]:
        words = {
            "calls everybody a patient": sites.patients,
            "calls everybody a control": sites.controls,
            f"has nearly constant probabilities (sd below {FLAT:g})": sites.constant,
        }
        facts = [f"{what} at {len(at)} of {count} sites ({_first(at)})" for what, at in words.items() if at]
        clauses.append(f"{label(*key)} {' and '.join(facts)}")
    more = len(found) - MOST_FLAT
    return [*clauses, f"so do {more} more methods and variants at some sites"] if more > 0 else clauses


def _first(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_SITES} more" if len(names) > MOST_SITES else ""
    return ", ".join(names[:MOST_SITES]) + more


def _little_power(sites: int) -> str:
    return f" (little power with {sites} sites)" if sites < FEW else ""


def training_tables(scores: pd.DataFrame) -> list[Table]:
    """`training_table` of each method with variants."""
    variants_of = scores[scores["variant"] != ""].groupby("method", sort=False)["variant"].unique()
    tables = [training_table(scores, str(method), list(map(str, variants))) for method, variants in variants_of.items()]
    return [table for table in tables if table is not None]


def training_table(scores: pd.DataFrame, method: str, variants: list[str], what: str = "Variants") -> Table | None:
    """AUC of each variant minus that of the method, paired by site and seed; None with one seed or without the full method."""
    chosen = (scores["method"] == method) & scores["variant"].isin(["", *variants]) & (scores["metric"] == "AUC")
    areas = scores[chosen]
    if "" not in set(areas["variant"]) or areas["seed"].nunique() == 1:
        return None
    rows = [
        [row.variant, row.trainings, -row.mean, -row.mean - row.half, -row.mean + row.half]
        for row in training_differences(areas, method).itertuples()
    ]
    if not rows:  # no site and seed has both
        return None
    header = [Column("Variant"), Column("trainings", "count")]
    header += columns("percent", f"AUC minus that of {method}", "low", "high", form=SIGNED)
    note = (
        f"AUC of the variant minus that of {method} (negative: the variant is worse), paired by site and seed; 95 % t interval "
        "from the variance over seeds within sites, so for training randomness at these sites only; not corrected for the "
        "number of rows"
    )
    return Table(f"{what} of {method}, paired by site and seed", header, rows, note)


def _by_key(scores: pd.DataFrame) -> Lookup:
    """Rows by method, variant and metric; looking them up in pandas takes longer than computing them."""
    return {(row["method"], row["variant"], row["metric"]): row for row in scores.to_dict("records")}


def _lookup(by_key: Lookup, key: tuple[str, str, str], column: str) -> float:
    return float(by_key[key][column]) if key in by_key else NAN


def _spreads(by_key: Lookup, key: Key, metrics: Sequence[str] = SHOWN) -> list[Spread]:
    return [Spread(*(_lookup(by_key, (*key, metric), name) for name in ("mean", "sd"))) for metric in metrics]


def _ranks(by_key: Lookup, keys: Sequence[Key], unranked: Mapping[str, set[Key]]) -> list[list[int]]:
    """1 for the best values of a metric, 2 for the second best, by row; equal values (as printed) share a rank.

    A constant method has none: calling everybody a patient gives the highest sensitivity and is no merit.
    """
    by_metric = []
    for metric in SHOWN:
        values = [NAN if key in unranked[metric] else _lookup(by_key, (*key, metric), "mean") for key in keys]
        printed = np.round(100 * np.array(values), 2).tolist()
        best = sorted({value for value in printed if not math.isnan(value)}, reverse=True)[:2]
        by_metric.append([1 + best.index(value) if value in best else 0 for value in printed])
    return [list(row) for row in zip(*by_metric, strict=True)]


def what_was_seen(batch: int) -> str:
    """What the adapted track has seen of a target."""
    seen = f"each subject is predicted with an intercept for its site, from up to {batch} other subjects of it without labels"
    return f"{seen} (or aligned with them, where a method does that)"


def in_track(tables: list[Table], track: str, batch: int) -> list[Table]:
    """The tables of a track; those of the adapted one say so in title and note."""
    if track == STRICT:
        return tables
    seen = f"adapted track: {what_was_seen(batch)}; not comparable with methods that see nothing of the target"
    return [replace(table, title=f"{table.title}, adapted track", note=f"{seen}; {table.note}") for table in tables]


def both_tracks(strict: pd.DataFrame, adapted: pd.DataFrame, batch: int, least: int = MIN_PER_CLASS) -> Table:
    """Both tracks of each method, neither ranked nor tested; the fits are the same."""
    rates, calibration = (BALANCED, "SEN", "SPE", "AUC"), ("slope", "intercept")
    by_track: dict[str, Lookup] = {}
    for track, predictions in ((STRICT, strict), (ADAPTED, adapted)):
        counted = predictions[predictions["target"].isin(counted_targets(predictions, least))]
        by_track[track] = _by_key(macro_scores(site_scores(cell_scores(counted, (*rates, *calibration)))))
    keys = dict.fromkeys(zip(*(pd.concat([strict, adapted])[name] for name in ("method", "variant")), strict=True))
    rows: list[list[Value]] = [
        [label(*key), track, *_spreads(by_key, key, (*rates, *calibration))]
        for key in keys
        for track, by_key in by_track.items()
        if (*key, "AUC") in by_key
    ]
    note = (
        f"mean ± sd over target sites, each the mean over seeds; {BALANCED} is the mean of SEN and SPE; threshold 0.5; ideal "
        f"slope 1, intercept 0; one fit serves both tracks: in the adapted one {what_was_seen(batch)}, so that the two are "
        "different tasks, and neither ranked nor tested against each other"
    )
    header = [Column("Method"), Column("track"), *columns("percent", *rates, form=".1f")]
    return Table(BOTH_TRACKS, [*header, *columns("number", *calibration)], rows, note)
