"""`m2lgdg calibrate`: a model fitted to one site by some of its labelled subjects."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from m2lgdg.commands import options, terminal
from m2lgdg.commands.fit import refuse_used
from m2lgdg.commands.predict import warn_of_training_sites


@terminal.app.command()
def calibrate(
    model: options.Model,
    path: options.Cohort,
    to: Annotated[Path, typer.Option("--out", help="the model folder to write", show_default=False)],
    plugin: options.Plugin = None,
) -> None:
    """Fit a model's probabilities and threshold to a site, from some labelled subjects of it; no weight changes."""
    from rich.markup import escape

    from m2lgdg.data.readers import read
    from m2lgdg.deploy.calibrate import calibrate as calibrated
    from m2lgdg.method import Method
    from m2lgdg.model.new_site import percent
    from m2lgdg.registry import load_methods
    from m2lgdg.report.card import write_card

    load_methods(tuple(map(str, plugin or [])))
    fitted = Method.load(model)
    refuse_used(to)
    with terminal.progress(f"reading {path.name}") as progress:
        cohort = read(path, progress=progress)
    before = fitted.threshold
    found = calibrated(fitted, cohort)
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
    warn_of_training_sites(fitted, cohort)
    terminal.out.print(f"Next: m2lgdg predict {escape(str(to))} OTHERS --out predictions.csv", soft_wrap=True)
