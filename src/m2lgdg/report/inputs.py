"""What each method of a study sees of a subject (scan, phenotypes, tables of brain structure), and what each of these adds.

Two variants of a method that differ in one of them are compared at each site. `m2lgdg table` prints the comparisons, and the
report has a section of them; the card of a model says what it takes.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from m2lgdg.method import Method
from m2lgdg.methods.average import Average
from m2lgdg.methods.tables import CONFOUNDS, TableBlock
from m2lgdg.metrics import delong
from m2lgdg.model.model import Model
from m2lgdg.registry import Declaration, load_methods
from m2lgdg.report.tables import NAN, Column, Estimate, Interval, Spread, Table, Value, columns
from m2lgdg.storage import InputError
from m2lgdg.study.predictions import sweep_variant
from m2lgdg.study.stats import NORMAL, counted_targets, half_interval, holm, paired_test

Key = tuple[str, str]  # method and variant
SCAN, PHENOTYPES, TABLE = "scan", "phenotypes", "table "  # the last before the name of a table
SWITCHES = {SCAN: ("scan", "imaging"), PHENOTYPES: ("phenotypes",), TABLE: ("tables",)}  # fields that turn an input on or off
BY_INPUT, ADDED = "AUC by what a method sees", "What each input adds"
UNKNOWN = Declaration({}, {}, False)


def label(method: str, variant: str) -> str:
    """Name of a method and variant in tables; a plus only for phenotypes, because an ablation removes something."""
    if not variant:
        return method
    return f"{method} + {variant}" if variant == "phenotypes" else f"{method}: {variant}"


class Seen(NamedTuple):
    """Fields of a method and variant, and what it sees of a subject: "scan", "phenotypes" and "table NAME"."""

    fields: Mapping[str, Any]
    inputs: frozenset[str]

    @property
    def tables(self) -> list[str]:
        """Names of the tables."""
        return sorted(name.removeprefix(TABLE) for name in self.inputs if name.startswith(TABLE))


def seen_by(
    keys: Iterable[Key], study: Mapping[str, Any], declared: Mapping[str, Declaration], tables: Mapping[str, Mapping[str, Any]]
) -> dict[Key, Seen]:
    """What each method and variant of a study sees; `tables` are those of the cohort, as `describe` has them."""
    usable = [name for name, each in tables.items() if each["columns"] > each["constant"]]
    found = {}
    for key in keys:
        fields = _fields(key, study, declared.get(key[0], UNKNOWN))
        role = declared[key[0]].role if key[0] in declared else ""
        found[key] = Seen(fields, _inputs(fields, role, study.get("inputs") != [], declared, usable))
    return found


def _fields(key: Key, study: Mapping[str, Any], declared: Declaration) -> dict[str, Any]:
    """All fields, as JSON has them."""
    method, variant = key
    sweeps = study.get("sweep") if isinstance(study.get("sweep"), dict) else {}
    swept = {sweep_variant(name, one): {name: one} for name, values in (sweeps or {}).get(method, {}).items() for one in values}
    usual: dict[str, Any] = {"phenotypes": True} if variant == "phenotypes" else {}  # of a method that is not declared
    changed = swept.get(variant, declared.variants.get(variant, usual))
    fields = {**declared.fields, **((study.get("method") or {}).get(method) or {}), **changed}
    stored: dict[str, Any] = json.loads(json.dumps(fields, default=str))
    return stored


def _inputs(
    fields: Mapping[str, Any], role: str, phenotypes: bool, declared: Mapping[str, Declaration], tables: Sequence[str]
) -> frozenset[str]:
    if isinstance(fields.get("settings"), dict) and isinstance(fields.get("methods"), list):  # the average of methods
        members = [_member(str(given), fields["settings"], declared) for given in fields["methods"]]
        return frozenset().union(*(_inputs(*one, phenotypes, declared, tables) for one in members))
    if "estimator" in fields and fields.get("features") in ("phenotypes", "tables"):  # of scikit-learn, on these alone
        return frozenset({PHENOTYPES} if fields["features"] == "phenotypes" else (f"{TABLE}{name}" for name in tables))
    given = fields.get("tables", "none")
    chosen = list(tables) if given == "all" else [] if given == "none" else [given] if isinstance(given, str) else given
    taken = {f"{TABLE}{name}" for name in chosen if name in tables}
    if role == PHENOTYPES:
        return frozenset({PHENOTYPES} | taken)
    taken |= {SCAN} if all(fields.get(name, True) for name in SWITCHES[SCAN]) else set()
    return frozenset(taken | ({PHENOTYPES} if fields.get("phenotypes") and phenotypes else set()))


def _member(given: str, settings: Mapping[str, Any], declared: Mapping[str, Declaration]) -> tuple[dict[str, Any], str]:
    """Fields and role of a method that is averaged; nothing is known of a plugin, nor of a network without PyTorch."""
    name, _, variant = given.partition(":")
    about = declared.get(name)
    if about is None:
        with contextlib.suppress(InputError, LookupError):
            about = load_methods().declaration(name)
    about = about or UNKNOWN
    return {**about.fields, **about.variants.get(variant, {}), **(settings.get(given) or {})}, about.role


def worded(inputs: Iterable[str]) -> str:
    """Inputs in words, with the names of tables in brackets."""
    given = set(inputs)
    tables = ", ".join(sorted(name.removeprefix(TABLE) for name in given if name.startswith(TABLE)))
    words = [name for name in (SCAN, PHENOTYPES) if name in given] + ([f"structure ({tables})"] if tables else [])
    *some, last = words or ["nothing"]
    return f"{', '.join(some)} and {last}" if some else last


class Added(NamedTuple):
    """Mean AUC over sites of a method with an input and without it, and the paired difference with its 95 % intervals."""

    more: Key
    less: Key
    what: frozenset[str]
    to: frozenset[str]
    area: float
    before: float
    difference: float
    over_subjects: Interval
    over_sites: Interval
    p: float
    sites: int


def additions(seen: Mapping[Key, Seen], predictions: pd.DataFrame, least: int) -> list[Added]:
    """Every pair of variants of a method that differ in one input only, tables of brain structure first."""
    own = predictions[predictions["target"].isin(counted_targets(predictions, least)) & (predictions["label"] >= 0)]
    rows_of = dict(iter(own.groupby(["method", "variant"], sort=False)))
    found = []
    for kind, switches in reversed(SWITCHES.items()):
        for more, less in _pairs(seen, kind, switches):
            if more in rows_of and less in rows_of:
                what = seen[more].inputs - seen[less].inputs, seen[less].inputs
                pair = _added(more, less, *what, rows_of[more], rows_of[less])
                found += [pair] if pair is not None else []
    return found


def _pairs(seen: Mapping[Key, Seen], kind: str, switches: Sequence[str]) -> list[tuple[Key, Key]]:
    """With and without inputs of a kind, all else being equal."""

    def rest(key: Key) -> tuple[str, dict[str, Any], set[str]]:
        fields, inputs = seen[key]
        others = {name for name in inputs if not name.startswith(kind)}
        return key[0], {name: value for name, value in fields.items() if name not in switches}, others

    different = distinct(seen)
    having = [key for key in different if any(name.startswith(kind) for name in seen[key].inputs)]
    lacking = {key: rest(key) for key in different if key not in having and seen[key].inputs}
    return [(more, less) for more in having for less, other in lacking.items() if rest(more) == other]


def distinct(seen: Mapping[Key, Seen]) -> list[Key]:
    """Without variants that are another one, such as a sweep value that names all tables there are."""
    first: dict[str, Key] = {}
    for key, (fields, inputs) in seen.items():
        others = {name: value for name, value in fields.items() if name not in SWITCHES[TABLE]}
        first.setdefault(json.dumps([key[0], others, sorted(inputs)], sort_keys=True), key)
    return list(first.values())


def _added(
    more: Key, less: Key, what: frozenset[str], to: frozenset[str], first: pd.DataFrame, second: pd.DataFrame
) -> Added | None:
    areas, variances = [], []
    for target in first["target"].unique():
        sides = [side[side["target"] == target] for side in (first, second)]
        by_seed = [side.pivot(index="subject", columns="seed", values="proba") for side in sides]
        if not len(sides[1]):
            continue
        labels = sides[0].drop_duplicates("subject").set_index("subject")["label"].loc[by_seed[0].index]
        scores = np.concatenate([each.reindex(labels.index).to_numpy().T for each in by_seed])  # (seed of either, subject)
        of_each, covariance = delong(labels.to_numpy(), scores)
        means = _means([each.shape[1] for each in by_seed])  # (2, seed of either)
        areas.append(means @ of_each)
        contrast = means[0] - means[1]
        variances.append(contrast @ covariance @ contrast)
    if not areas:
        return None
    with_it, without = np.array(areas).T  # (site,) each
    difference, _, sites, p = paired_test(pd.Series(with_it), pd.Series(without))
    half = NORMAL * float(np.sqrt(np.sum(variances))) / len(areas)
    spread = half_interval(float((with_it - without).std(ddof=1)), sites) if sites > 1 else NAN
    subjects, of_sites = (Interval(difference - one, difference + one) for one in (half, spread))
    return Added(more, less, what, to, float(with_it.mean()), float(without.mean()), difference, subjects, of_sites, p, sites)


def _means(counts: Sequence[int]) -> npt.NDArray[np.float64]:
    """(2, seed of either) weights of the mean over the seeds of each."""
    of_first = np.arange(sum(counts)) < counts[0]
    return np.stack([of_first / counts[0], ~of_first / counts[1]])


def input_tables(seen: Mapping[Key, Seen], sites: pd.DataFrame, pairs: Sequence[Added]) -> list[Table]:
    """AUC by what a method sees, and what each input adds; none unless a method takes a table of brain structure.

    `sites` are the scores of the sites that count, by method, variant and metric; `pairs` are from `additions`.
    """
    takers = {key[0] for key, each in seen.items() if each.tables}
    if not takers:
        return []
    alone = [key for key, each in seen.items() if key[0] not in takers and each.inputs == {PHENOTYPES}]
    shown = [key for key in distinct(seen) if key[0] in takers] + alone
    areas = sites[sites["metric"] == "AUC"].pivot(index="target", columns=["method", "variant"], values="mean")
    rows: list[list[Value]] = []
    for key in sorted(shown, key=lambda key: (len(_kinds(seen[key].inputs)), len(seen[key].inputs))):
        values = areas[key].dropna() if key in areas else pd.Series(dtype=float)
        half = half_interval(float(values.std(ddof=1)), len(values)) if len(values) > 1 else NAN
        mean = float(values.mean()) if len(values) else NAN
        ends = Interval(max(mean - half, 0.0), min(mean + half, 1.0)) if not math.isnan(half) else Interval(NAN, NAN)
        rows.append([worded(seen[key].inputs), label(*key), Spread(mean, float(values.std(ddof=1))), ends])
    header = [Column("Inputs"), Column("Method"), *columns("percent", "AUC", "95 % interval", form=".1f")]
    note = f"mean ± sd in % over {len(areas)} target sites, with the 95 % t interval over sites; fewest inputs first"
    tables = [Table(BY_INPUT, header, rows, note)]
    return [*tables, added_table(pairs)] if pairs else tables


def _kinds(inputs: Iterable[str]) -> set[str]:
    return {TABLE if name.startswith(TABLE) else name for name in inputs}


def added_table(pairs: Sequence[Added]) -> Table:
    """The differences of all pairs, with p values corrected for their number."""
    adjusted = holm([one.p for one in pairs]).tolist()
    rows: list[list[Value]] = [
        [
            *(worded(one.what), worded(one.to), label(*one.more), one.before, one.area),
            *(Estimate(one.difference, *one.over_subjects), one.over_sites, p),
        ]
        for one, p in zip(pairs, adjusted, strict=True)
    ]
    header = [Column("Added"), Column("to"), Column("Method"), *columns("percent", "AUC before", "AUC", form=".1f")]
    header += columns("percent", "difference (95 % interval, subjects)", "95 % interval, sites", form="+z.1f")
    count = max(one.sites for one in pairs)
    note = (
        f"mean AUC in % over {count} target site{'s' * (count > 1)} of a method without an input (before) and with it, all "
        "other fields being the same; 95 % intervals of the difference over subjects (DeLong's paired variances within sites, "
        "of the mean over seeds) and over sites (Student's t); p of the paired t-test over sites, Holm-corrected over all "
        "rows"
    )
    return Table(ADDED, [*header, Column("p (Holm)", "p")], rows, note)


def missing_variant(seen: Mapping[Key, Seen], declared: Mapping[str, Declaration], main: Key) -> str:
    """What to add to the study file if the main method takes tables and was not run without them; else empty."""
    own, pairs = seen[main], _pairs(seen, TABLE, SWITCHES[TABLE])
    if not own.tables or any(main in pair for pair in pairs):
        return ""
    variants = declared[main[0]].variants if main[0] in declared else {}
    whole = seen.get((main[0], ""), own).fields  # what a variant changes
    bare = {**own.fields, "tables": "none"}
    fitting = [name for name, changed in variants.items() if {**whole, **changed} == bare]
    line = f'variants = ["{fitting[0]}"]' if fitting else f'[sweep.{main[0]}] tables = ["none"]'
    return f"{label(*main)} was not run without its tables, so what they add is not known; add {line} to the study file."


def tables_taken(seen: Mapping[Key, Seen]) -> str:
    """Which methods take which tables."""
    by_tables: dict[str, list[str]] = {}
    for key, each in seen.items():
        if each.tables:
            by_tables.setdefault(", ".join(each.tables), []).append(label(*key))
    return "; ".join(f"{names}: {', '.join(methods)}" for names, methods in by_tables.items()) or "taken by no method"


def parts_table(records: Iterable[Mapping[str, Any]]) -> Table | None:
    """Part of each table in the decision of linear methods, over their fits; None without any."""
    parts: dict[tuple[str, str, str], list[float]] = {}
    for record in records:
        for name, part in ((record.get("learned") or {}).get("table_parts") or {}).items():
            parts.setdefault((str(record["method"]), str(record["variant"]), name), []).append(float(part))
    rows: list[list[Value]] = [
        [label(*key[:2]), key[2], len(each), float(np.median(each)), min(each), max(each), sum(one == 0 for one in each)]
        for key, each in parts.items()
    ]
    header = [Column("Method"), Column("table"), Column("fits", "count")]
    header += [*columns("number", "median", "smallest", "largest"), Column("fits without it", "count")]
    note = (
        "sd of what a table adds to the decision of source subjects, in sds of the decision without tables; weights are "
        "learned on held-out source sites of each fit, and a table that adds nothing there has the weight 0"
    )
    return Table("Part of each table in the decision", header, rows, note) if rows else None


def structure_sentence(pairs: Sequence[Added], main: Key) -> str:
    """What tables of brain structure add to the main method, or to the first that was run with and without them."""
    about = [one for one in pairs if all(name.startswith(TABLE) for name in one.what)]
    if not about:
        return ""
    one = min(about, key=lambda each: (main not in (each.more, each.less), each.more[0] != main[0]))  # the first of the best
    subjects, sites = (_ends(each) for each in (one.over_subjects, one.over_sites))
    intervals = f"95 % interval {subjects} over subjects{f', {sites} over sites' if sites else ''}"
    return (
        f"What {worded(one.what)} adds to {worded(one.to)}: {100 * one.difference:+.1f} points of AUC ({intervals}), from "
        f"{100 * one.before:.1f} % ({label(*one.less)}) to {100 * one.area:.1f} % ({label(*one.more)})."
    )


def _ends(interval: Interval) -> str:
    """Empty for an interval that is not defined, such as that over one site."""
    return "" if math.isnan(interval.low) else f"{100 * interval.low:+.1f} to {100 * interval.high:+.1f}"


def _fitted_methods(fitted: Model) -> list[Method]:
    """Those of all atlases, and of an average all that it averages."""
    members = fitted.members.values()
    return [one for each in members for one in (each.averaged.values() if isinstance(each, Average) else [each])]


def fitted_tables(fitted: Model) -> dict[str, list[Method]]:
    """Tables of brain structure that the model takes, each with the fitted methods that take it."""
    found: dict[str, list[Method]] = {}
    for one in _fitted_methods(fitted):
        for name in one.facts_.get("tables", {}):
            found.setdefault(name, []).append(one)
    return found


def sees_tables_only(fitted: Model) -> bool:
    """Whether tables alone decide."""
    methods = _fitted_methods(fitted)
    seen = [_inputs(one.fields(), one.role, True, {}, list(one.facts_.get("tables", {}))) for one in methods]
    return all(name.startswith(TABLE) for inputs in seen for name in inputs)


def table_words(name: str, every: list[Method]) -> str:
    """Columns of a table, how many training subjects have it, its weight (by atlas), and what is taken out of it."""
    abouts, first = [one.facts_["tables"][name] for one in every], every[0].facts_
    names, count = abouts[0]["columns"], sum(sum(site.values()) for site in first["source"]["sites"].values())
    confounds = [each for each in first.get("table_confounds", first["inputs"]) if each in CONFOUNDS]
    head = TableBlock(name, names, {}).head_column
    confounds = [*confounds, *(["age squared"] if "age" in confounds else []), *([f"head size ({head})"] if head else [])]
    weights = sorted({float(each["weight"]) for each in abouts if "weight" in each})
    words = [
        f"{len(names)} column{'s' * (len(names) > 1)} ({names[0]}{f' to {names[-1]}' * (len(names) > 1)})",
        f"of {abouts[0].get('subjects', count)} of {count} training subjects",
        *([f"weight {' to '.join(f'{one:.3g}' for one in dict.fromkeys((weights[0], weights[-1])))}"] if weights else []),
        f"{', '.join(confounds)} regressed out within training sites" if confounds else "nothing is regressed out",
    ]
    return "; ".join(words)
