"""`m2lgdg fit`, `predict` and `calibrate`: a model of all sites, what it says of a new one, and its local calibration."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from m2lgdg.commands import terminal

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import pandas as pd

    from m2lgdg.cohort import Cohort
    from m2lgdg.method import Method
    from m2lgdg.promise import Promise

MOST_SITES = 5  # of a cohort, that are compared with source one by one
BEST = "connectome-adaptive"  # at sites never seen, of all we know (docs/beyond.md)
Given = Annotated[
    Path, typer.Argument(metavar="COHORT", help="a cohort file, or a folder that `m2lgdg check` reads", show_default=False)
]


@contextmanager
def _epochs() -> Iterator[Any]:
    """A live line of training: epoch, losses by name, validation AUC; then refits without a site, where there are some."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[values]}"))
    shown = Progress(*columns, console=terminal.err, transient=True, disable=not terminal.err.is_terminal)
    with terminal.stoppable(), shown as bar:
        task = bar.add_task("fitting", total=None, values="")

        def show(epoch: int, epochs: int, **values: float) -> None:
            text = "  ".join(f"{name} {value:.3f}" for name, value in values.items())
            what = "epoch" if values else "refits without a site"
            bar.update(task, completed=epoch, total=epochs, description=what, values=text)

        yield show


@terminal.app.command()
def fit(
    path: Given,
    to: Annotated[Path, typer.Option("--out", help="the model folder to write", show_default=False)],
    asked: Annotated[
        str | None,
        typer.Option(
            "--method", help=f"see `m2lgdg methods`; without: {BEST}, with phenotypes if there are any", show_default=False
        ),
    ] = None,
    variant: Annotated[str | None, typer.Option(help="a variant of the method")] = None,
    changes: Annotated[list[str] | None, typer.Option("--set", help="field=value of the method")] = None,
    inputs: Annotated[str | None, typer.Option(help="phenotype columns, comma-separated; 'none' for none")] = None,
    without: Annotated[list[str] | None, typer.Option(help="a site to leave out of training; give it once for each")] = None,
    seed: Annotated[int, typer.Option(help="of a method with randomness")] = 0,
    device: Annotated[str, typer.Option(help="cpu, cuda, mps or auto")] = "auto",
    plugin: Annotated[list[Path] | None, typer.Option(help="a Python file with methods of your own")] = None,
    promise: Annotated[
        bool | None,
        typer.Option(help="refit without each site, to know what scores mean at a new one; networks only if asked"),
    ] = None,
    groups: Annotated[int | None, typer.Option("--promise-folds", help="leave sites out in so many groups instead")] = None,
) -> None:
    """Train one method on all labelled subjects of a cohort and write it as a model folder."""
    from rich.markup import escape

    from m2lgdg.config import method_fields
    from m2lgdg.method import make
    from m2lgdg.readers import read
    from m2lgdg.registry import load_methods
    from m2lgdg.report.card import write_card
    from m2lgdg.storage import InputError

    load_methods(tuple(map(str, plugin or [])))
    name = asked or BEST
    fields = method_fields(name, variant, changes or [])
    method = make(name, **fields)
    refuse_used(to)
    with terminal.progress(f"reading {path.name}") as progress:
        cohort = read(path, progress=progress)
    if inputs is not None:
        cohort = cohort.with_inputs([] if inputs == "none" else [one.strip() for one in inputs.split(",")])
    source = cohort.select((cohort.labels >= 0) & ~_of_sites(cohort, without or []))
    if not len(source):
        raise InputError(f"cohort {cohort.name} has no labelled subject to learn from.")
    if not asked and not variant and cohort.inputs:
        method = make(name, **{"phenotypes": True} | fields)
    promised = _promised(method, source, promise, groups)
    with _epochs() as show:
        method.fit(source, seed=seed, device=device, progress=show, limits=True, promise=promised, promise_folds=groups)
    method.save(to)
    learned = method.facts_
    if "history" in learned:
        best = learned["history"][learned["best_epoch"] - 1]
        on = "training" if learned["validation"] == "training subjects" else "validation"
        terminal.out.print(f"{len(learned['history'])} epochs, best {learned['best_epoch']}: {on} AUC {best['val_auc']:.3f}.")
    for note in learned.get("notes", []):
        terminal.out.print(f"Note: {escape(note)}", soft_wrap=True)
    count = sum(sum(site.values()) for site in learned["source"]["sites"].values())
    sites = len(learned["source"]["sites"])
    where = f"{count} subjects of {sites} site{'' if sites == 1 else 's'}"
    terminal.out.print(f"Wrote {escape(str(to))}: {name} trained on {where}.", soft_wrap=True)
    write_card(to)
    words = ["m2lgdg", "predict", str(to), str(path) if without else "NEW_SITE"]
    words += [word for site in dict.fromkeys(without or []) for word in ("--only", site)] + ["--out", "predictions.csv"]
    words += [word for file in plugin or [] for word in ("--plugin", str(file))]
    terminal.out.print(f"Next: {escape(shlex.join(words))}", soft_wrap=True)


def _of_sites(cohort: Cohort, sites: list[str]) -> npt.NDArray[np.bool_]:
    """(subject,) who is of these sites, each of which must be there."""
    import numpy as np

    from m2lgdg.method import nearest
    from m2lgdg.storage import InputError

    for site in sites:
        if site not in cohort.site_names:
            raise InputError(f"{site} is not a site of cohort {cohort.name}{nearest(site, cohort.site_names)}")
    return np.isin(cohort.sites, sites)


def refuse_used(to: Path) -> None:
    """A model folder is new or empty; asked before hours of reading and training."""
    from m2lgdg.storage import InputError

    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise InputError(f"{to} is not empty; choose another --out.")


def _tell_seen(fitted: Method, cohort: Cohort) -> None:
    """Whoever gives a model its own training subjects sees numbers that no new site will have."""
    trained = fitted.facts_["source"]["sites"]
    seen = [site for site in cohort.site_names if site and site in trained]
    if seen:
        names = f"{'a site of this name' if len(seen) == 1 else 'sites of these names'}: {', '.join(seen)}"
        text = f"Note: the model was trained on {names}. For subjects it was trained on, all that is said here is too good."
        terminal.out.print(text, markup=False, highlight=False, soft_wrap=True)


def _promised(method: Method, source: Cohort, asked: bool | None, groups: int | None) -> bool:
    """Whether the fit shall also learn what to promise, and a line that says what that costs or what is lost without."""
    from m2lgdg.deep import DeepMethod
    from m2lgdg.promise import left_out
    from m2lgdg.storage import InputError

    if asked is False and groups is not None:
        raise InputError("--promise-folds and --no-promise contradict each other.")
    if asked is False:
        return False
    wanted = bool(asked) or groups is not None
    try:
        refits = len(left_out(source, groups))
    except InputError as error:
        if wanted:
            raise
        terminal.out.print(f"No promise of what scores mean at a new site: {error}", markup=False, soft_wrap=True)
        return False
    if isinstance(method, DeepMethod) and not wanted:
        terminal.out.print(
            f"No promise of what scores mean at a new site: it would take {refits} more trainings (--promise, or fewer with "
            "--promise-folds 5).",
            soft_wrap=True,
        )
        return False
    what = "a site" if groups is None else "a group of sites"
    terminal.out.print(
        f"Also fitting {refits} times without {what}, for what to promise at a new one (--no-promise leaves it out).",
        soft_wrap=True,
    )
    return True


@terminal.app.command()
def predict(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="a model folder that `m2lgdg fit` wrote", show_default=False)],
    path: Given,
    to: Annotated[Path, typer.Option("--out", help="the table to write", show_default=False)],
    only: Annotated[list[str] | None, typer.Option(help="a site of the cohort, instead of all; give it once for each")] = None,
    share: Annotated[bool, typer.Option("--share", help="salted hashes for subject ids, rows in their order")] = False,
    plugin: Annotated[list[Path] | None, typer.Option(help="a Python file with methods of your own")] = None,
    coverage: Annotated[
        float | None, typer.Option(help="add interval and sets that hold the truth this often: 0.5 ... 0.8, 0.85, 0.9, 0.95")
    ] = None,
    abstain: Annotated[bool, typer.Option("--abstain", help="decide only where the set is one class")] = False,
) -> None:
    """Give every subject of a cohort a probability; labels, if there are any, are not looked at."""
    from collections import Counter

    import pandas as pd
    from rich.markup import escape

    from m2lgdg.method import Method
    from m2lgdg.readers import read
    from m2lgdg.registry import load_methods
    from m2lgdg.storage import write_text

    load_methods(tuple(map(str, plugin or [])))
    fitted = Method.load(model)
    if abstain and coverage is None:
        coverage = 0.9
    promise = None if coverage is None else _kept_promise(fitted, coverage)
    with terminal.progress(f"reading {path.name}") as progress:
        cohort = read(path, progress=progress)
    if only:
        cohort = cohort.select(_of_sites(cohort, only))
    proba = fitted.predict_proba(cohort)[:, 1]
    table = pd.DataFrame({"subject": cohort.subjects, "site": cohort.sites, "proba": proba})
    table["decision"] = (proba >= fitted.threshold).astype(int)
    flags = fitted.flags(cohort)
    said = _add_sets(table, flags, promise, coverage, abstain) if promise and coverage else []
    for kind, score in (fitted.limits_.scores(cohort) if fitted.limits_ else {}).items():
        table[f"{kind}_shift"] = score.round(3)
    table["flags"] = ["; ".join(said) for said in flags]
    if share:
        from m2lgdg.report.anonymised import Pseudonyms

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
    _tell_seen(fitted, cohort)
    terminal.out.print(
        "Research use; not a diagnostic device. A site the model has never seen may be badly calibrated.", soft_wrap=True
    )
    if not only:  # explain takes whole cohorts
        then = f"Next: {shlex.join(['m2lgdg', 'explain', str(model), str(path)])} --out DIR for what the decisions rest on"
        terminal.out.print(escape(then), soft_wrap=True)


def _compared(fitted: Method, cohort: Cohort) -> Iterator[str]:
    """How a new site differs from source; each of several, where there are few enough to read."""
    if fitted.limits_ is None:
        return
    sites = cohort.site_names
    if len(sites) == 1:
        yield from fitted.limits_.compare(cohort)
    elif len(sites) > MOST_SITES:
        yield f"All {len(sites)} sites together:"
        yield from (f"  {line}" for line in fitted.limits_.compare(cohort))
    else:
        for site in sites:
            here = cohort.select(cohort.sites == site)
            yield f"{site} ({len(here)} subjects):"
            yield from (f"  {line}" for line in fitted.limits_.compare(here))


def _kept_promise(fitted: Method, coverage: float) -> Promise:
    """The model's promise, which must be there and know of this coverage."""
    from m2lgdg.storage import InputError

    if fitted.promise_ is None:
        why = "is calibrated to a site, and a promise is of sites without labels of their own"
        lacks = "has no promise of what its scores mean at a new site; fit it with --promise"
        raise InputError(f"--coverage and --abstain: this model {why if 'local' in fitted.facts_ else lacks}.")
    fitted.promise_.expected(coverage)
    return fitted.promise_


def _add_sets(table: pd.DataFrame, flags: list[list[str]], promise: Promise, coverage: float, abstain: bool) -> list[str]:
    """Put interval and set into the table, and into the flags on whom nothing is decided; returns what to tell of it."""
    from m2lgdg.promise import percent

    table["low"], table["high"] = promise.interval(table["proba"].to_numpy())
    table["set"] = promise.sets(table["proba"].to_numpy(), coverage)
    kept = promise.expected(coverage)
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


@terminal.app.command()
def calibrate(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="a model folder that `m2lgdg fit` wrote", show_default=False)],
    path: Given,
    to: Annotated[Path, typer.Option("--out", help="the model folder to write", show_default=False)],
    plugin: Annotated[list[Path] | None, typer.Option(help="a Python file with methods of your own")] = None,
) -> None:
    """Fit a model's probabilities and threshold to a site, from some labelled subjects of it; no weight changes."""
    from rich.markup import escape

    from m2lgdg import local
    from m2lgdg.method import Method
    from m2lgdg.promise import percent
    from m2lgdg.readers import read
    from m2lgdg.registry import load_methods
    from m2lgdg.report.card import write_card

    load_methods(tuple(map(str, plugin or [])))
    fitted = Method.load(model)
    refuse_used(to)
    with terminal.progress(f"reading {path.name}") as progress:
        cohort = read(path, progress=progress)
    before = fitted.threshold
    found = local.calibrate(fitted, cohort)
    fitted.save(to)
    write_card(to)
    terminal.out.print(
        f"Slope {found.slope:.2f} (before 1), offset {found.offset:+.2f} (0), threshold {found.threshold:.2f} ({before:.2g})."
    )
    for name, (share, low, high) in (("Sensitivity", found.sensitivity), ("Specificity", found.specificity)):
        interval = f"95 % interval {percent(low)} to {percent(high)}"
        terminal.out.print(f"{name} {percent(share)}, {interval} (subjects left out in turn).")
    count = found.patients + found.controls
    terminal.out.print(
        f"Wrote {escape(str(to))}: calibrated on {count} subjects, who must not be used to evaluate it.", soft_wrap=True
    )
    if len(cohort.site_names) > 1:
        terminal.out.print(f"Note: they are of {len(cohort.site_names)} sites; a calibration fits one site best.")
    _tell_seen(fitted, cohort)
    terminal.out.print(f"Next: m2lgdg predict {escape(str(to))} OTHERS --out predictions.csv", soft_wrap=True)
