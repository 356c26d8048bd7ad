"""`m2lgdg fit`: one model of all labelled subjects, for sites that are not in it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from m2lgdg.commands import options, terminal
from m2lgdg.registry import METHODS

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from m2lgdg.cohort import Cohort
    from m2lgdg.method import Method


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
    path: options.Cohort,
    to: Annotated[Path, typer.Option("--out", help="the model folder to write", show_default=False)],
    asked: Annotated[
        str | None,
        typer.Option(
            "--method",
            help=f"see `m2lgdg methods`; without: {METHODS.default}, with phenotypes if there are any",
            show_default=False,
        ),
    ] = None,
    variant: Annotated[str | None, typer.Option(help="a variant of the method")] = None,
    changes: Annotated[list[str] | None, typer.Option("--set", help="field=value of the method")] = None,
    inputs: Annotated[str | None, typer.Option(help="phenotype columns, comma-separated; 'none' for none")] = None,
    without: Annotated[list[str] | None, typer.Option(help="a site to leave out of training; give it once for each")] = None,
    seed: Annotated[int, typer.Option(help="of a method with randomness")] = 0,
    device: options.Device = "auto",
    plugin: options.Plugin = None,
    new_site: Annotated[
        bool | None,
        typer.Option(help="refit without each site, to know what scores mean at a new one; networks only if asked"),
    ] = None,
    groups: Annotated[int | None, typer.Option("--promise-folds", help="leave sites out in so many groups instead")] = None,
) -> None:
    """Train one method on all labelled subjects of a cohort and write it as a model folder."""
    from rich.markup import escape

    from m2lgdg.data.readers import read
    from m2lgdg.method import make
    from m2lgdg.registry import load_methods
    from m2lgdg.report.card import write_card
    from m2lgdg.storage import InputError
    from m2lgdg.study.config import method_fields

    load_methods(tuple(map(str, plugin or [])))
    name = asked or METHODS.default
    fields = method_fields(name, variant, changes or [])
    method = make(name, **fields)
    refuse_used(to)
    with terminal.progress(f"reading {path.name}") as progress:
        cohort = read(path, progress=progress)
    if inputs is not None:
        cohort = cohort.with_inputs([] if inputs == "none" else [one.strip() for one in inputs.split(",")])
    source = cohort.select((cohort.labels >= 0) & ~of_sites(cohort, without or []))
    if not len(source):
        raise InputError(f"cohort {cohort.name} has no labelled subject to learn from.")
    if not asked and not variant and cohort.inputs:
        method = make(name, **{"phenotypes": True} | fields)
    promised = _promised(method, source, new_site, groups)
    with _epochs() as show:
        method.fit(
            source,
            seed=seed,
            device=device,
            progress=show,
            source_distribution=True,
            new_site_calibration=promised,
            calibration_folds=groups,
        )
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


def of_sites(cohort: Cohort, sites: list[str]) -> npt.NDArray[np.bool_]:
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


def _promised(method: Method, source: Cohort, asked: bool | None, groups: int | None) -> bool:
    """Whether the fit shall also learn what to promise, and a line that says what that costs or what is lost without."""
    from m2lgdg.deep import DeepMethod
    from m2lgdg.model.new_site import sites_left_out
    from m2lgdg.storage import InputError

    if asked is False and groups is not None:
        raise InputError("--promise-folds and --no-promise contradict each other.")
    if asked is False:
        return False
    wanted = bool(asked) or groups is not None
    try:
        refits = len(sites_left_out(source, groups))
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
