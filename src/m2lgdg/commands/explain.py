"""`m2lgdg explain`: importance of ROIs, edges, phenotypes and regions of tables for the decisions of a model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from m2lgdg.commands import models, options, terminal

if TYPE_CHECKING:
    from m2lgdg.explain.explanation import Explanation


@terminal.command()
def explain(
    model: options.Model,
    path: options.Scans,
    to: Annotated[Path, typer.Option("--out", help="Folder for the tables and pictures.", show_default=False)],
    site: options.Site = None,
    kind: options.Kind = None,
    table: options.Table = None,
    phenotype: options.Phenotype = None,
    of: Annotated[
        str,
        typer.Option(
            help="What attributions of a network are of: logit (of the predicted class) or margin (patient - control)."
        ),
    ] = "logit",
    steps: Annotated[int, typer.Option(help="Steps of integrated gradients.")] = 64,
    device: options.Device = "cpu",
    rois: options.Rois = None,
    plugin: options.Plugin = None,
) -> None:
    """Score ROIs, edges, phenotypes and regions of tables by their importance for a model's decisions on a cohort."""
    from m2lgdg.data.atlases import read_centroids
    from m2lgdg.explain.attribution import explain as explain_model
    from m2lgdg.explain.attribution import explain_subject
    from m2lgdg.explain.explanation import TITLES
    from m2lgdg.method import is_network
    from m2lgdg.report.brains import write_brains
    from m2lgdg.storage import InputError

    fitted = models.load_model(model, plugin)
    if to.exists() and not to.is_dir():
        raise InputError(f"{to} is not a folder; choose another --out.")
    cohort = models.read_for(fitted, path, site, kind, table, phenotype)
    centroids = None if rois is None else read_centroids(rois, cohort.rois, cohort.atlas)
    how: dict[str, Any] = {"of": of, "steps": steps, "device": device}
    with terminal.progress(f"explaining {fitted.name}") as progress, fitted.method.checking_weights():
        if len(cohort) == 1 and not is_network(fitted):
            explanation = explain_subject(fitted, cohort)
        else:
            explanation = explain_model(fitted, cohort, progress=progress, **how)
    explanation = explanation if centroids is None else explanation.with_centroids(centroids)
    explanation.save(to)
    pictures = write_brains(fitted.name, explanation, to)
    terminal.say(f"{explanation.about['scores']}.", style="dim")
    _show_scores(explanation)
    if fitted.site_level is not None:
        terminal.say(fitted.site_level.sentence())
    _show_checks(explanation)
    terminal.say(*explanation.about_lobes(), *explanation.lacking(), *explanation.about_rois())
    written = ", ".join(f"{name}.csv ({TITLES[name]})" for name in explanation.filled)
    terminal.say(
        f"Wrote {to}: {written}{''.join(f', {one.name}' for one in pictures)} and explanation.json.",
        "To explain every fold of a study, set `explain = true` in its file; the report shows the mean.",
    )


def _show_scores(explanation: Explanation) -> None:
    """The ten highest scores of each atlas, of the phenotypes and of each table of brain structure."""
    from m2lgdg.explain.explanation import roi_label
    from m2lgdg.explain.regions import by_table, labels, pointing

    atlases = explanation.by_atlas()
    shown = [(f"ROIs ({atlas})" if len(atlases) > 1 else "ROIs", one.rois, "roi") for atlas, one in atlases.items()]
    for title, table, column in (*shown, ("Phenotypes", explanation.phenotypes, "phenotype")):
        if table["score"].any():
            terminal.say(title, style="bold")
            for score, name in zip(table["score"][:10], table[column][:10], strict=True):
                terminal.say(f"  {score:10.4g}  {roi_label(str(name)) if column == 'roi' else name}")
    for name, own in by_table(explanation.regions).items():
        terminal.say(f"Regions of table {name} (larger or smaller values point to patient)", style="bold")
        for score, region, direction in zip(own["score"][:10], labels(own)[:10], own["direction"][:10], strict=True):
            terminal.say(f"  {score:10.4g}  {region} ({pointing(direction)})")


def _show_checks(explanation: Explanation) -> None:
    """Completeness of the attributions, and how well a linear probe predicts the site."""
    from m2lgdg.explain.attribution import LOOSE_COMPLETENESS
    from m2lgdg.model.new_site import percent

    error = explanation.error()
    if error is not None:
        relative = error.get("median_relative", 0.0)
        terminal.say(
            f"Completeness: attributions miss {relative:.1%} of the change in the decision (median; largest error "
            f"{error['max_absolute']:.2g} logits)."
        )
        if relative > LOOSE_COMPLETENESS:
            terminal.say("This is a large error: increase --steps. Networks with hard thresholds are never complete.")
    probe = explanation.about.get("readability") or {}
    if probe.get("site") is not None:
        accuracy, chance = percent(probe["site"]), percent(probe["site_chance"])
        terminal.say(f"A linear probe predicts the site from the representation with accuracy {accuracy} (chance {chance}).")
