"""`m2lgdg adapt`: set a model to the level of one site with some of its unlabelled subjects."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from m2lgdg.commands import options, suggestions, terminal
from m2lgdg.commands.fit import print_data_line
from m2lgdg.commands.predict import warn_of_training_sites


@terminal.command()
def adapt(
    context: typer.Context,
    model: options.Model,
    path: options.Cohort,
    to: Annotated[Path, typer.Option("--out", help="Model folder to write.", show_default=False)],
    prevalence: Annotated[
        float | None,
        typer.Option(
            help="Share of patients at the site, such as 0.3 (default: that of the training sites).", show_default=False
        ),
    ] = None,
    update: Annotated[
        bool, typer.Option("--update", help="Add these subjects to the level that the model already has; the site is the same.")
    ] = False,
    site: options.Site = None,
    plugin: options.Plugin = None,
) -> None:
    """Set a model to the level of one site, with unlabelled subjects of it; weights do not change.

    Sites differ in the mean of a model's scores. The logits are shifted so that the mean probability of these subjects is the
    share of patients. Labels in the cohort are not used.
    """
    from rich.markup import escape

    from m2lgdg.data.check import with_checks
    from m2lgdg.data.readers import read
    from m2lgdg.deploy.adapt import adapt as adapt_model
    from m2lgdg.model.model import Model
    from m2lgdg.registry import load_methods
    from m2lgdg.report.card import write_card
    from m2lgdg.storage import need_unused, new_folder

    load_methods(tuple(map(str, plugin or [])))
    fitted = Model.load(model)
    threshold = fitted.threshold
    need_unused(to)
    with terminal.progress(f"reading {path.name}") as progress:
        cohort = options.with_sites(read(path, progress=progress), site)
    with terminal.progress("adapting"):
        cohort = with_checks(cohort)
        result = adapt_model(fitted, cohort, prevalence=prevalence, update=update)
    with new_folder(to) as part:
        write_card(fitted.save(part))
    level = result.level
    called = f"{result.patients_before} of these {result.added} subjects were at or above the threshold of {threshold:.3g}"
    consequence = ASSUMED if level.assumed else GIVEN
    lines = [
        f"Wrote {to}: {level.sentence()}",
        f"Decisions: {called}; now {result.patients_after} are at or above {fitted.threshold:.3g}.",
        consequence.format(100 * level.prevalence),
        *(f"Note: {note}" for note in result.notes),
    ]
    for line in lines:
        terminal.out.print(line, markup=False, highlight=False, soft_wrap=True)
    print_data_line(cohort, path, new_site=True)
    warn_of_training_sites(fitted, cohort)
    terminal.out.print(
        f"With further subjects of {escape(level.site or 'the site')}, run m2lgdg adapt {escape(str(to))} again with --update; "
        "give only subjects that were not counted before.",
        soft_wrap=True,
    )
    others = suggestions.Fill("SUBJECTS")
    suggestions.print_next(context, "predict", to, others, "--out", suggestions.free("predictions.csv"), without=["--site"])


ASSUMED = (
    "The share of patients at this site was not given, so that of the training sites ({:.0f} %) is assumed. If fewer of these "
    "subjects are patients, too many are called patients now, and if more are, too few: give the share with --prevalence."
)
GIVEN = (
    "With {:.0f} % patients at the site, probabilities and the threshold move together, so that the share itself changes no "
    "decision: about the same proportion of patients, and of controls, is called a patient as at the training sites."
)
