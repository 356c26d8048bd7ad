"""`m2lgdg adapt`: correct the intercept of a model for one site, with some of its unlabelled subjects."""

from __future__ import annotations

from typing import Annotated

import typer

from m2lgdg.commands import models, options, suggestions, terminal

ASSUMED = (
    "The prevalence at this site was not given, so that of the training sites ({:.0f} %) is assumed. If fewer of these "
    "subjects are patients, too many are called patients now, and if more are, too few: give it with --prevalence."
)
GIVEN = (
    "With {:.0f} % patients at the site, probabilities and the threshold move together, so that it changes no "
    "decision by itself: about the same proportion of patients, and of controls, is called a patient as at the training sites."
)


@terminal.command()
def adapt(
    context: typer.Context,
    model: options.Model,
    path: options.Cohort,
    to: options.NewModel,
    prevalence: Annotated[
        float | None,
        typer.Option(
            help="Prevalence of patients at the site, such as 0.3 (default: that of the training sites).", show_default=False
        ),
    ] = None,
    update: Annotated[
        bool,
        typer.Option("--update", help="Add these subjects to those the model was adapted with; the site is the same."),
    ] = False,
    subjects: Annotated[
        int | None, typer.Option(min=1, help="Use only this many subjects, the first of the cohort.", show_default=False)
    ] = None,
    site: options.Site = None,
    kind: options.Kind = None,
    table: options.Table = None,
    plugin: options.Plugin = None,
) -> None:
    """Correct the intercept of a model for one site, with unlabelled subjects of it; weights do not change.

    Sites differ in the mean of a model's scores. The logits are shifted so that the mean probability of these subjects is the
    prevalence. Labels in the cohort are not used.
    """
    from m2lgdg.data.check import with_checks
    from m2lgdg.deploy.adapt import adapt as adapt_model
    from m2lgdg.storage import InputError, need_unused

    fitted = models.load_model(model, plugin)
    threshold = fitted.threshold
    need_unused(to)
    cohort = models.read_subjects(path, site, kind, table)
    if subjects is not None:
        if len(cohort) < subjects:
            raise InputError(f"--subjects {subjects}: cohort {cohort.name} has {len(cohort)} subjects.")
        cohort = cohort.select(range(subjects))
    with terminal.progress("adapting"):
        cohort = with_checks(cohort)
        result = adapt_model(fitted, cohort, prevalence=prevalence, update=update)
    models.write_model(fitted, to)
    level = result.level
    called = f"{result.patients_before} of these {result.added} subjects were at or above the threshold of {threshold:.3g}"
    terminal.say(
        f"Wrote {to}: {level.sentence()}",
        f"Decisions: {called}; now {result.patients_after} are at or above {fitted.threshold:.3g}.",
        (ASSUMED if level.assumed else GIVEN).format(100 * level.prevalence),
        *(f"Note: {note}" for note in result.notes),
    )
    models.print_data_line(cohort, path, table, new_site=True)
    models.print_notes(fitted, cohort)
    terminal.say(
        f"With further subjects of {level.site or 'the site'}, run m2lgdg adapt {to} again with --update; scans that were "
        "counted before do not count again."
    )
    others = suggestions.Fill("SUBJECTS")
    suggestions.print_next(
        context, "predict", to, others, "--out", suggestions.free("predictions.csv"), without=["--site", "--table"]
    )
