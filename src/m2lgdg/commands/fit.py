"""`m2lgdg fit`: train one model on all labelled subjects, for use at new sites."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from m2lgdg.commands import models, options, suggestions, terminal
from m2lgdg.registry import METHODS

if TYPE_CHECKING:
    from m2lgdg.cohort import Cohort
    from m2lgdg.model.model import Model


@terminal.command()
def fit(
    context: typer.Context,
    path: options.Cohort,
    to: options.NewModel,
    method_name: Annotated[
        str | None,
        typer.Option(
            "--method",
            help=f"Method; see `m2lgdg methods` (default: {METHODS.default}, with phenotypes if the cohort has any).",
            show_default=False,
        ),
    ] = None,
    variant: Annotated[str | None, typer.Option(help="Variant of the method.")] = None,
    changes: options.FieldChanges = None,
    atlas: Annotated[
        list[str] | None,
        typer.Option(
            help="Atlas to train on, from a cohort with several; may be repeated, 'all' for all. Decisions are averaged over "
            f"atlases (default: all with {METHODS.default}, otherwise the first).",
            show_default=False,
        ),
    ] = None,
    inputs: Annotated[
        str | None, typer.Option(help="Phenotype columns, comma-separated; 'none' for none (default: those of the cohort).")
    ] = None,
    site: options.Site = None,
    kind: options.Kind = None,
    table: options.Table = None,
    without: Annotated[list[str] | None, typer.Option(help="Site to leave out of training; may be repeated.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the random numbers.")] = 0,
    device: options.Device = "auto",
    plugin: options.Plugin = None,
    new_site_calibration: Annotated[
        bool | None,
        typer.Option(
            help="Refit without each site in turn, to calibrate probabilities for a new site (default: on, off for networks)."
        ),
    ] = None,
    calibration_folds: Annotated[
        int | None, typer.Option(help="Refit without each of this many groups of sites instead, which is faster.")
    ] = None,
) -> None:
    """Train one method on all labelled subjects of a cohort and write it as a model folder."""
    from m2lgdg.data.check import with_checks
    from m2lgdg.method import need_scans
    from m2lgdg.metrics import THRESHOLD
    from m2lgdg.model.model import make
    from m2lgdg.storage import InputError, need_unused
    from m2lgdg.study.config import method_fields

    models.load_plugins(plugin)
    name = method_name or METHODS.default
    fields = method_fields(name, variant, changes or [])
    if atlas:
        fields["atlases"] = atlas[0] if len(atlas) == 1 else atlas
    method = make(name, **fields)
    need_unused(to)
    models.need_own_name(to)
    cohort = models.read_subjects(path, kind=kind, table=table, in_memory=True)  # a map is hashed again for each site left out
    if inputs is not None:
        cohort = cohort.with_inputs([] if inputs == "none" else [column.strip() for column in inputs.split(",")])
    left_out = options.of_sites(cohort, without or [])
    source = cohort.select((cohort.labels >= 0) & ~left_out & (options.of_sites(cohort, site) if site else True))
    if not len(source):
        raise InputError(f"cohort {cohort.name} has no labelled subjects to train on.")
    need_scans(method.method, source)
    if not method_name and not variant and cohort.inputs:
        method = make(name, **{"phenotypes": True} | fields)
    with terminal.progress("checking the cohort"):
        source = with_checks(source)
    how: dict[str, Any] = {"seed": seed, "device": device, "source_distribution": True, "calibration_folds": calibration_folds}
    how["new_site_calibration"] = _with_calibration(method, source, new_site_calibration, calibration_folds)
    with _epochs() as show:
        method.fit(source, progress=show, **how)
    models.write_model(method, to)
    facts = method.facts_
    if "history" in facts:
        best = facts["history"][facts["best_epoch"] - 1]
        on = "training" if facts["validation"] == "training subjects" else "validation"
        terminal.say(
            f"Trained for {len(facts['history'])} epochs; best epoch {facts['best_epoch']} with {on} AUC {best['val_auc']:.3f}."
        )
    models.print_data_line(source, path, table)
    models.print_tables(method)
    sites = facts["source"]["sites"]
    count = sum(sum(one.values()) for one in sites.values())
    subjects = f"{count} subjects from {len(sites)} site{'' if len(sites) == 1 else 's'}"
    terminal.say(
        *(f"Note: {note}" for note in facts.get("notes", [])), f"Wrote {to}: {name} trained on {subjects}, with its model card."
    )
    if method.threshold != THRESHOLD:
        terminal.say(
            f"It decides at a probability of {method.threshold:.3g}, from left-out sites; tables of `m2lgdg run` decide at "
            f"{THRESHOLD:g}."
        )
    held_out = [word for name in dict.fromkeys(without or []) for word in ("--site", name)]
    subjects_to_predict = path if without else suggestions.Fill("NEW_SITE")
    words = (to, subjects_to_predict, *held_out, "--out", suggestions.free("predictions.csv"))
    suggestions.print_next(context, "predict", *words, without=["--site"] if without else ["--site", "--table"])


@contextmanager
def _epochs() -> Iterator[Any]:
    """Progress of training: epoch, losses by name and validation AUC, then the refits of new-site calibration."""
    with terminal.progress("fitting") as show:

        def show_epoch(epoch: int, epochs: int, **values: float) -> None:
            text = "  ".join(f"{name} {value:.3f}" for name, value in values.items())
            show(epoch, epochs, text, "epochs" if values else "refits for new-site calibration")

        yield show_epoch


def _with_calibration(method: Model, source: Cohort, requested: bool | None, folds: int | None) -> bool:
    """Whether to add new-site calibration to the fit; prints its cost, or why it is skipped."""
    from m2lgdg.method import is_network
    from m2lgdg.model.new_site import sites_left_out
    from m2lgdg.storage import InputError

    if requested is False and folds is not None:
        raise InputError("--calibration-folds and --no-new-site-calibration contradict each other.")
    if requested is False:
        return False
    wanted = bool(requested) or folds is not None
    try:
        refits = len(sites_left_out(source, folds))
    except InputError as error:
        if wanted:
            raise
        terminal.say(f"Skipped: {error}")
        return False
    if is_network(method) and not wanted:
        terminal.say(
            f"Skipped new-site calibration ({refits} extra fits); enable it with --new-site-calibration, or with "
            "--calibration-folds 5 for fewer fits."
        )
        return False
    left_out = "site" if folds is None else "group of sites"
    terminal.say(
        f"New-site calibration: {refits} extra fits, each without one {left_out}; skip them with --no-new-site-calibration."
    )
    return True
