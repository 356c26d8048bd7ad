"""`m2lgdg explain`: importance of ROIs, edges and phenotypes for the decisions of a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from m2lgdg.commands import options, terminal


@terminal.command()
def explain(
    model: options.Model,
    path: options.Cohort,
    to: Annotated[Path, typer.Option("--out", help="Folder for the tables.", show_default=False)],
    site: options.Site = None,
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
    """Score ROIs, edges and phenotypes by their importance for a model's decisions on a cohort."""
    from rich.markup import escape

    from m2lgdg.data.atlases import read_centroids
    from m2lgdg.data.readers import read
    from m2lgdg.explain.attribution import LOOSE_COMPLETENESS
    from m2lgdg.explain.attribution import explain as explain_model
    from m2lgdg.explain.explanation import TITLES, roi_label
    from m2lgdg.model.model import Model
    from m2lgdg.model.new_site import percent
    from m2lgdg.registry import load_methods
    from m2lgdg.storage import InputError

    load_methods(tuple(map(str, plugin or [])))
    fitted = Model.load(model)
    if to.exists() and not to.is_dir():
        raise InputError(f"{to} is not a folder; choose another --out.")
    with terminal.progress(f"reading {path.name}") as progress:
        cohort = options.with_sites(read(path, progress=progress), site)
    centroids = None if rois is None else read_centroids(rois, cohort.rois)
    with terminal.progress(f"explaining {fitted.name}") as progress, fitted.method.checking_weights():
        explanation = explain_model(
            fitted,
            cohort,
            of=of,  # type: ignore[arg-type]
            steps=steps,
            device=device,
            progress=progress,
        )
    explanation = explanation if centroids is None else explanation.with_centroids(centroids)
    explanation.save(to)
    terminal.out.print(f"{escape(explanation.about['scores'])}.", style="dim", soft_wrap=True)
    parts = explanation.by_atlas()
    shown = [(f"ROIs ({atlas})" if len(parts) > 1 else "ROIs", part.rois, "roi") for atlas, part in parts.items()]
    for title, table, column in (*shown, ("Phenotypes", explanation.phenotypes, "phenotype")):
        if table["score"].any():
            terminal.out.print(f"[bold]{title}[/]")
            for _, row in table.head(10).iterrows():
                terminal.out.print(
                    f"  {row['score']:10.4g}  {escape(roi_label(str(row[column])) if column == 'roi' else str(row[column]))}",
                    highlight=False,
                    soft_wrap=True,
                )
    if fitted.site_level is not None:
        terminal.out.print(fitted.site_level.sentence(), markup=False, highlight=False, soft_wrap=True)
    error = explanation.error()
    if error is not None:
        relative = error.get("median_relative", 0.0)
        terminal.out.print(
            f"Completeness: attributions miss {relative:.1%} of the change in the decision (median; largest error "
            f"{error['max_absolute']:.2g} logits)."
        )
        if relative > LOOSE_COMPLETENESS:
            terminal.out.print("This is a large error: increase --steps. Networks with hard thresholds are never complete.")
    probe = explanation.about.get("readability") or {}
    if probe.get("site") is not None:
        accuracy, chance = percent(probe["site"]), percent(probe["site_chance"])
        terminal.out.print(
            f"A linear probe predicts the site from the representation with accuracy {accuracy} (chance {chance})."
        )
    for sentence in [*explanation.about_lobes(), *explanation.lacking(), *explanation.about_rois()]:
        terminal.out.print(sentence, markup=False, highlight=False, soft_wrap=True)
    written = "".join(f"{name}.csv ({TITLES[name]}), " for name in explanation.parts)
    terminal.out.print(f"Wrote {escape(str(to))}: {written[:-2]} and explanation.json.", soft_wrap=True)
    terminal.out.print(
        "To explain every fold of a study, set `explain = true` in its file; the report shows the mean.", soft_wrap=True
    )
