"""`m2lgdg explain`: what a fitted model's decisions rest on, as tables of ROIs, edges and phenotypes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from m2lgdg.commands import options, terminal


@terminal.app.command()
def explain(
    model: options.Model,
    path: options.Cohort,
    to: Annotated[Path, typer.Option("--out", help="the folder to write the tables to", show_default=False)],
    steps: Annotated[int, typer.Option(help="points of the path of integrated gradients")] = 64,
    device: options.Device = "cpu",
    rois: options.Rois = None,
    plugin: options.Plugin = None,
) -> None:
    """Score the ROIs, edges and phenotypes that a model's decisions on a cohort rest on."""
    from rich.markup import escape

    from m2lgdg.data.atlases import read_centroids
    from m2lgdg.data.readers import read
    from m2lgdg.explain.attribution import LOOSE_COMPLETENESS
    from m2lgdg.explain.attribution import explain as explained
    from m2lgdg.method import Method
    from m2lgdg.model.new_site import percent
    from m2lgdg.registry import load_methods
    from m2lgdg.storage import InputError

    load_methods(tuple(map(str, plugin or [])))
    fitted = Method.load(model)
    if to.exists() and not to.is_dir():
        raise InputError(f"{to} is not a folder; choose another --out.")
    with terminal.progress(f"reading {path.name}") as progress:
        cohort = read(path, progress=progress)
    centroids = None if rois is None else read_centroids(rois, cohort.rois)
    with terminal.progress(f"explaining {fitted.name}") as progress, fitted.doubted():
        found = explained(fitted, cohort, steps=steps, device=device, progress=progress)
    found = found if centroids is None else found.with_centroids(centroids)
    found.save(to)
    terminal.out.print(f"{escape(found.about['scores'])}.", style="dim", soft_wrap=True)
    for title, table, column in (("ROIs", found.rois, "roi"), ("Phenotypes", found.phenotypes, "phenotype")):
        if table["score"].any():
            terminal.out.print(f"[bold]{title}[/]")
            for _, row in table.head(10).iterrows():
                terminal.out.print(f"  {row['score']:10.4g}  {escape(str(row[column]))}", highlight=False, soft_wrap=True)
    error = found.error()
    if error is not None:
        relative = error.get("median_relative", 0.0)
        terminal.out.print(
            f"Completeness: attributions miss {relative:.1%} of a decision's change (median; largest miss "
            f"{error['max_absolute']:.2g} logits)."
        )
        if relative > LOOSE_COMPLETENESS:
            terminal.out.print("That is much: take more --steps; a network that chooses by thresholds is never complete.")
    probed = found.about.get("readability") or {}
    if probed.get("site") is not None:
        right, chance = percent(probed["site"]), percent(probed["site_chance"])
        terminal.out.print(f"A linear probe reads the site from the representation: {right} right, chance {chance}.")
    written = "tables of ROIs, edges, phenotypes, gate weights, a map of subjects; explanation.json"
    terminal.out.print(f"Wrote {escape(str(to))}: {written}.", soft_wrap=True)
    then = "`explain = true` in a study file explains every fold, and the study's report shows their mean."
    terminal.out.print(f"Next: {then}", soft_wrap=True)
