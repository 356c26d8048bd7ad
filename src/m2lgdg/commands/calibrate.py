"""`m2lgdg calibrate`: adapt a model to one site with some of its labelled subjects."""

from __future__ import annotations

import typer

from m2lgdg.commands import models, options, suggestions, terminal


@terminal.command()
def calibrate(
    context: typer.Context,
    model: options.Model,
    path: options.Cohort,
    to: options.NewModel,
    site: options.Site = None,
    kind: options.Kind = None,
    table: options.Table = None,
    plugin: options.Plugin = None,
) -> None:
    """Calibrate probabilities and threshold of a model to one site, with labelled subjects of it; weights do not change."""
    from m2lgdg.data.check import with_checks
    from m2lgdg.deploy.calibrate import calibrate as calibrate_model
    from m2lgdg.model.new_site import percent
    from m2lgdg.storage import need_unused

    fitted = models.load_model(model, plugin)
    need_unused(to)
    cohort = models.read_subjects(path, site, kind, table)
    before = fitted.threshold
    with terminal.progress("calibrating"):
        labelled = with_checks(cohort.select(cohort.labels >= 0))
        result = calibrate_model(fitted, labelled)
    models.write_model(fitted, to)
    terminal.say(
        f"Slope {result.slope:.2f} (was 1), offset {result.offset:+.2f} (was 0), threshold {result.threshold:.2f} "
        f"(was {before:.2g})."
    )
    for name, (rate, low, high) in (("Sensitivity", result.sensitivity), ("Specificity", result.specificity)):
        interval = f"95 % interval {percent(low)} to {percent(high)}"
        terminal.say(f"{name} {percent(rate)}, {interval} (leave-one-subject-out).")
    count = result.patients + result.controls
    terminal.say(f"Wrote {to}: calibrated on {count} subjects; do not evaluate the model on them.")
    if len(cohort.site_names) > 1:
        terminal.say(f"Note: the subjects are from {len(cohort.site_names)} sites; calibrate to one of them with --site.")
    models.print_data_line(labelled, path, table, new_site=True)
    models.print_notes(fitted, cohort)
    others = suggestions.Fill("OTHER_SUBJECTS")
    suggestions.print_next(
        context, "predict", to, others, "--out", suggestions.free("predictions.csv"), without=["--site", "--table"]
    )
