"""`m2lgdg predict`: a probability, a decision and quality flags for every subject of a new cohort."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from m2lgdg.commands import options, terminal
from m2lgdg.commands.fit import of_sites

if TYPE_CHECKING:
    import pandas as pd

    from m2lgdg.cohort import Cohort
    from m2lgdg.method import Method
    from m2lgdg.model.new_site import NewSiteCalibration

MOST_SITES = 5  # of a cohort, that are compared with source one by one


@terminal.app.command()
def predict(
    model: options.Model,
    path: options.Cohort,
    to: Annotated[Path, typer.Option("--out", help="the table to write", show_default=False)],
    only: Annotated[list[str] | None, typer.Option(help="a site of the cohort, instead of all; give it once for each")] = None,
    share: Annotated[bool, typer.Option("--share", help="salted hashes for subject ids, rows in their order")] = False,
    plugin: options.Plugin = None,
    coverage: Annotated[
        float | None, typer.Option(help="add interval and sets that hold the truth this often: 0.5 ... 0.8, 0.85, 0.9, 0.95")
    ] = None,
    abstain: Annotated[bool, typer.Option("--abstain", help="decide only where the set is one class")] = False,
) -> None:
    """Give every subject of a cohort a probability; labels, if there are any, are not looked at."""
    from collections import Counter

    import pandas as pd
    from rich.markup import escape

    from m2lgdg.data.readers import read
    from m2lgdg.method import Method
    from m2lgdg.registry import load_methods
    from m2lgdg.storage import write_text

    load_methods(tuple(map(str, plugin or [])))
    fitted = Method.load(model)
    if abstain and coverage is None:
        coverage = 0.9
    new_site = None if coverage is None else _kept_promise(fitted, coverage)
    with terminal.progress(f"reading {path.name}") as progress:
        cohort = read(path, progress=progress)
    if only:
        cohort = cohort.select(of_sites(cohort, only))
    proba = fitted.predict_proba(cohort)[:, 1]
    table = pd.DataFrame({"subject": cohort.subjects, "site": cohort.sites, "proba": proba})
    table["decision"] = (proba >= fitted.threshold).astype(int)
    flags = fitted.flags(cohort)
    said = _add_sets(table, flags, new_site, coverage, abstain) if new_site and coverage else []
    for kind, score in (fitted.source_distribution_.scores(cohort) if fitted.source_distribution_ else {}).items():
        table[f"{kind}_ood"] = score.round(3)
    table["flags"] = ["; ".join(said) for said in flags]
    if share:
        from m2lgdg.data.pseudonyms import Pseudonyms

        table = Pseudonyms().sorted_table(table, [])
    write_text(to, table.to_csv(index=False, lineterminator="\n"))
    patients = int((table["decision"].astype(str) == "1").sum())
    where = "decided as patients" if abstain else f"at {fitted.threshold:.3g} or above"
    terminal.out.print(f"Wrote {escape(str(to))}: {len(table)} subjects, {patients} {where}.", soft_wrap=True)
    for line in said:
        terminal.out.print(f"  {line}", markup=False, highlight=False, soft_wrap=True)
    for line in _compared(fitted, cohort):
        terminal.out.print(f"  {line}", markup=False, highlight=False, soft_wrap=True)
    kinds = Counter(flag.split(":")[0] for said in flags for flag in said)
    if kinds:
        told = ", ".join(f"{kind} ({count})" for kind, count in kinds.items())
        terminal.out.print(f"Flagged: {escape(told)}; see the column flags.", soft_wrap=True)
    warn_of_training_sites(fitted, cohort)
    terminal.out.print(
        "Research use; not a diagnostic device. A site the model has never seen may be badly calibrated.", soft_wrap=True
    )
    if not only:  # explain takes whole cohorts
        then = f"Next: {shlex.join(['m2lgdg', 'explain', str(model), str(path)])} --out DIR for what the decisions rest on"
        terminal.out.print(escape(then), soft_wrap=True)


def _compared(fitted: Method, cohort: Cohort) -> Iterator[str]:
    """How a new site differs from source; each of several, where there are few enough to read."""
    if fitted.source_distribution_ is None:
        return
    sites = cohort.site_names
    if len(sites) == 1:
        yield from fitted.source_distribution_.compare(cohort)
    elif len(sites) > MOST_SITES:
        yield f"All {len(sites)} sites together:"
        yield from (f"  {line}" for line in fitted.source_distribution_.compare(cohort))
    else:
        for site in sites:
            here = cohort.select(cohort.sites == site)
            yield f"{site} ({len(here)} subjects):"
            yield from (f"  {line}" for line in fitted.source_distribution_.compare(here))


def _kept_promise(fitted: Method, coverage: float) -> NewSiteCalibration:
    """The model's promise, which must be there and know of this coverage."""
    from m2lgdg.storage import InputError

    if fitted.new_site_ is None:
        why = "is calibrated to a site, and a promise is of sites without labels of their own"
        lacks = "has no promise of what its scores mean at a new site; fit it with --promise"
        raise InputError(f"--coverage and --abstain: this model {why if 'local' in fitted.facts_ else lacks}.")
    fitted.new_site_.expected(coverage)
    return fitted.new_site_


def _add_sets(
    table: pd.DataFrame, flags: list[list[str]], new_site: NewSiteCalibration, coverage: float, abstain: bool
) -> list[str]:
    """Put interval and set into the table, and into the flags on whom nothing is decided; returns what to tell of it."""
    from m2lgdg.model.new_site import percent

    table["low"], table["high"] = new_site.interval(table["proba"].to_numpy())
    table["set"] = new_site.sets(table["proba"].to_numpy(), coverage)
    kept = new_site.expected(coverage)
    lines = [
        f"Sets of {percent(coverage)} coverage, at sites of source left out: they held the true class of "
        f"{percent(kept.reached)} of subjects (lowest site {percent(kept.lowest)}, median {percent(kept.median)})."
    ]
    if abstain:
        table["decision"] = table["set"].map({"control": "0", "patient": "1"}).fillna("")
        for found, one in zip(flags, table["set"], strict=True):
            found += [f"abstained: {one}"] if one in ("both", "none") else []
        decided = int((table["decision"] != "").sum())
        right = "" if kept.decided == 0 else f", and {percent(kept.right)} of these were right"
        lines.append(f"Decided on {decided} subjects, abstained on {len(table) - decided}.")
        lines.append(f"At sites of source left out {percent(kept.decided)} were decided{right}.")
    return lines


def warn_of_training_sites(fitted: Method, cohort: Cohort) -> None:
    """Whoever gives a model its own training subjects sees numbers that no new site will have."""
    trained = fitted.facts_["source"]["sites"]
    seen = [site for site in cohort.site_names if site and site in trained]
    if seen:
        names = f"{'a site of this name' if len(seen) == 1 else 'sites of these names'}: {', '.join(seen)}"
        text = f"Note: the model was trained on {names}. For subjects it was trained on, all that is said here is too good."
        terminal.out.print(text, markup=False, highlight=False, soft_wrap=True)
