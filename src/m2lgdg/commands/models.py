"""`m2lgdg fit`, `predict` and `calibrate`: a model of all sites, what it says of a new one, and its local calibration."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from m2lgdg.commands import terminal

Given = Annotated[
    Path, typer.Argument(metavar="COHORT", help="a cohort file, or a folder that `m2lgdg check` reads", show_default=False)
]


@contextmanager
def _epochs() -> Iterator[Any]:
    """A live line of training: epoch, losses by name, validation AUC."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn("epoch"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=terminal.err, transient=True, disable=not terminal.err.is_terminal) as bar:
        task = bar.add_task("", total=None)

        def show(epoch: int, epochs: int, **values: float) -> None:
            text = "  ".join(f"{name} {value:.3f}" for name, value in values.items())
            bar.update(task, completed=epoch, total=epochs, description=text)

        yield show


@terminal.app.command()
def fit(
    path: Given,
    to: Annotated[Path, typer.Option("--out", help="the model folder to write", show_default=False)],
    name: Annotated[str, typer.Option("--method", help="see `m2lgdg methods`")] = "connectome-ensemble",
    variant: Annotated[str | None, typer.Option(help="a variant of the method")] = None,
    changes: Annotated[list[str] | None, typer.Option("--set", help="field=value of the method")] = None,
    inputs: Annotated[str | None, typer.Option(help="phenotype columns, comma-separated; 'none' for none")] = None,
    seed: Annotated[int, typer.Option(help="of a method with randomness")] = 0,
    device: Annotated[str, typer.Option(help="cpu, cuda, mps or auto")] = "auto",
    plugin: Annotated[list[Path] | None, typer.Option(help="a Python file with methods of your own")] = None,
) -> None:
    """Train one method on all labelled subjects of a cohort and write it as a model folder."""
    from rich.markup import escape

    from m2lgdg.config import method_fields
    from m2lgdg.method import load_methods, make
    from m2lgdg.readers import read
    from m2lgdg.report.card import write_card
    from m2lgdg.storage import InputError

    load_methods(tuple(map(str, plugin or [])))
    method = make(name, **method_fields(name, variant, changes or []))
    with terminal.progress(f"reading {path.name}") as progress:
        cohort = read(path, progress=progress)
    if inputs is not None:
        cohort = cohort.with_inputs([] if inputs == "none" else [one.strip() for one in inputs.split(",")])
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise InputError(f"{to} is not empty; choose another --out.")
    with _epochs() as show:
        method.fit(cohort.select(cohort.labels >= 0), seed=seed, device=device, progress=show, limits=True)
    method.save(to)
    learned = method.facts_
    if "history" in learned:
        best = learned["history"][learned["best_epoch"] - 1]
        on = "training" if learned["validation"] == "training subjects" else "validation"
        terminal.out.print(f"{len(learned['history'])} epochs, best {learned['best_epoch']}: {on} AUC {best['val_auc']:.3f}.")
    for note in learned.get("notes", []):
        terminal.out.print(f"Note: {escape(note)}", soft_wrap=True)
    count = sum(sum(site.values()) for site in learned["source"]["sites"].values())
    where = f"{count} subjects of {len(learned['source']['sites'])} sites"
    terminal.out.print(f"Wrote {escape(str(to))}: {name} trained on {where}.", soft_wrap=True)
    write_card(to)
    plugins = "".join(f" --plugin {escape(str(path))}" for path in plugin or [])
    terminal.out.print(f"Next: m2lgdg predict {escape(str(to))} NEW_SITE --out predictions.csv{plugins}", soft_wrap=True)


@terminal.app.command()
def predict(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="a model folder that `m2lgdg fit` wrote", show_default=False)],
    path: Given,
    to: Annotated[Path, typer.Option("--out", help="the table to write", show_default=False)],
    share: Annotated[bool, typer.Option("--share", help="salted hashes for subject ids, rows in their order")] = False,
    plugin: Annotated[list[Path] | None, typer.Option(help="a Python file with methods of your own")] = None,
) -> None:
    """Give every subject of a cohort a probability; labels, if there are any, are not looked at."""
    from collections import Counter

    import pandas as pd
    from rich.markup import escape

    from m2lgdg.method import Method, load_methods
    from m2lgdg.readers import read
    from m2lgdg.storage import write_text

    load_methods(tuple(map(str, plugin or [])))
    fitted = Method.load(model)
    with terminal.progress(f"reading {path.name}") as progress:
        cohort = read(path, progress=progress)
    proba = fitted.predict_proba(cohort)[:, 1]
    table = pd.DataFrame({"subject": cohort.subjects, "site": cohort.sites, "proba": proba})
    table["decision"] = (proba >= fitted.threshold).astype(int)
    flags = fitted.flags(cohort)
    for kind, score in (fitted.limits_.scores(cohort) if fitted.limits_ else {}).items():
        table[f"{kind}_shift"] = score.round(3)
    table["flags"] = ["; ".join(said) for said in flags]
    if share:
        from m2lgdg.report.share import Pseudonyms

        table = Pseudonyms().sorted_table(table, [])
    write_text(to, table.to_csv(index=False, lineterminator="\n"))
    patients = int(table["decision"].sum())
    terminal.out.print(
        f"Wrote {escape(str(to))}: {len(table)} subjects, {patients} at {fitted.threshold:.3g} or above.", soft_wrap=True
    )
    for line in fitted.limits_.compare(cohort) if fitted.limits_ else []:
        terminal.out.print(f"  {line}", markup=False, highlight=False, soft_wrap=True)
    kinds = Counter(flag.split(":")[0] for said in flags for flag in said)
    if kinds:
        told = ", ".join(f"{kind} ({count})" for kind, count in kinds.items())
        terminal.out.print(f"Flagged: {escape(told)}; see the column flags.", soft_wrap=True)
    terminal.out.print("Research use; not a diagnostic device. A site the model has never seen may be badly calibrated.")


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
    from m2lgdg.method import Method, load_methods
    from m2lgdg.readers import read
    from m2lgdg.report.card import write_card
    from m2lgdg.storage import InputError

    load_methods(tuple(map(str, plugin or [])))
    fitted = Method.load(model)
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise InputError(f"{to} is not empty; choose another --out.")
    with terminal.progress(f"reading {path.name}") as progress:
        cohort = read(path, progress=progress)
    found = local.calibrate(fitted, cohort)
    fitted.save(to)
    write_card(to)
    terminal.out.print(
        f"Slope {found.slope:.2f} (source 1), offset {found.offset:+.2f} (0), threshold {found.threshold:.2f} (0.5)."
    )
    for name, (share, low, high) in (("Sensitivity", found.sensitivity), ("Specificity", found.specificity)):
        terminal.out.print(f"{name} {share:.0%}, 95 % interval {low:.0%} to {high:.0%} (subjects left out in turn).")
    count = found.patients + found.controls
    terminal.out.print(
        f"Wrote {escape(str(to))}: calibrated on {count} subjects, who must not be used to evaluate it.", soft_wrap=True
    )
