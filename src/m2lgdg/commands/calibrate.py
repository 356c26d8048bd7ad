"""`m2lgdg calibrate`: adapt a model to one site with some of its labelled subjects."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from m2lgdg.commands import options, suggestions, terminal
from m2lgdg.commands.fit import print_data_line
from m2lgdg.commands.predict import warn_of_training_sites


@terminal.command()
def calibrate(
    context: typer.Context,
    model: options.Model,
    path: options.Cohort,
    to: Annotated[Path, typer.Option("--out", help="Model folder to write.", show_default=False)],
    site: options.Site = None,
    plugin: options.Plugin = None,
) -> None:
    """Calibrate probabilities and threshold of a model to one site, with labelled subjects of it; weights do not change."""
    from rich.markup import escape

    from m2lgdg.data.check import with_checks
    from m2lgdg.data.readers import read
    from m2lgdg.deploy.calibrate import calibrate as calibrate_model
    from m2lgdg.model.model import Model
    from m2lgdg.model.new_site import percent
    from m2lgdg.registry import load_methods
    from m2lgdg.report.card import write_card
    from m2lgdg.storage import need_unused, new_folder

    load_methods(tuple(map(str, plugin or [])))
    fitted = Model.load(model)
    need_unused(to)
    with terminal.progress(f"reading {path.name}") as progress:
        cohort = options.with_sites(read(path, progress=progress), site)
    before = fitted.threshold
    with terminal.progress("calibrating"):
        labelled = with_checks(cohort.select(cohort.labels >= 0))
        result = calibrate_model(fitted, labelled)
    with new_folder(to) as part:
        write_card(fitted.save(part))
    terminal.out.print(
        f"Slope {result.slope:.2f} (was 1), offset {result.offset:+.2f} (was 0), threshold {result.threshold:.2f} "
        f"(was {before:.2g})."
    )
    for name, (rate, low, high) in (("Sensitivity", result.sensitivity), ("Specificity", result.specificity)):
        interval = f"95 % interval {percent(low)} to {percent(high)}"
        terminal.out.print(f"{name} {percent(rate)}, {interval} (leave-one-subject-out).")
    count = result.patients + result.controls
    terminal.out.print(
        f"Wrote {escape(str(to))}: calibrated on {count} subjects; do not evaluate the model on them.", soft_wrap=True
    )
    if len(cohort.site_names) > 1:
        terminal.out.print(f"Note: the subjects are from {len(cohort.site_names)} sites; calibrate to one of them with --site.")
    print_data_line(labelled, path, new_site=True)
    warn_of_training_sites(fitted, cohort)
    others = suggestions.Fill("OTHER_SUBJECTS")
    suggestions.print_next(context, "predict", to, others, "--out", suggestions.free("predictions.csv"), without=["--site"])
