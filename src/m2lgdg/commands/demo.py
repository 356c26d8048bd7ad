"""`m2lgdg demo`: the whole workflow on a synthetic cohort, from check to report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from m2lgdg.commands import options, reading, suggestions, terminal
from m2lgdg.commands.check import show_check, write_check
from m2lgdg.commands.run import watched
from m2lgdg.commands.table import changes

DEMO_STUDY = """# Leave-one-site-out on a synthetic cohort. Edit it, then: m2lgdg run study.toml --out my-results
name = "demo"
cohort = "{cohort}"
seeds = [0]
methods = {methods}
main = "{main}"    # the method that the report is about
explain = ["fc-logistic", "connectome-adaptive"]    # ROIs and edges in the report; a network takes longer
"""
MAIN = {True: "m2lgdg-connectome", False: "connectome-adaptive"}  # with and without PyTorch
NETWORKS = """
[method.m2lgdg-connectome]
variant = "small"    # small enough for a laptop
epochs = 5           # fewer epochs and members than `small` has, so that the demo ends sooner
members = 1

[method.m2lgdg]
variant = "small"    # without this line, the size of the paper, which needs a GPU
epochs = 3           # fewer epochs and time points than `small` has
length = 25
"""


def demo_study(cohort: str, *, networks: bool) -> str:
    """Study file of the demo; networks are among its methods if PyTorch is installed."""
    methods = ["prior", "phenotype-logistic", "fc-logistic", "connectome-adaptive"]
    methods += ["m2lgdg-connectome", "m2lgdg"] * networks
    return DEMO_STUDY.format(cohort=cohort, methods=json.dumps(methods), main=MAIN[networks]) + NETWORKS * networks


@terminal.command()
def demo(
    context: typer.Context,
    to: Annotated[Path, typer.Option("--out", help="Folder to write to.")] = Path("demo"),
    preset: Annotated[str, typer.Option(help="Cohort: tiny, mild, demo (a strong effect) or rest-meta-mdd.")] = "mild",
    seed: Annotated[int, typer.Option(help="Seed of the synthetic cohort.")] = 0,
    jobs: options.Jobs = 2,
) -> None:
    """Run the whole workflow on a synthetic cohort with a known effect: check, leave-one-site-out study, tables and report."""
    from m2lgdg.data.check import check_cohort
    from m2lgdg.data.synthetic import make_cohort
    from m2lgdg.findings import is_duplicate
    from m2lgdg.report.page import write_report
    from m2lgdg.report.paper_tables import study_tables
    from m2lgdg.report.tables import render
    from m2lgdg.storage import install_command, missing_libraries, write_text
    from m2lgdg.study.predictions import read_predictions
    from m2lgdg.study.runner import run_study

    with terminal.progress("making and checking the cohort"):
        cohort = make_cohort(preset, seed=seed)
        result = check_cohort(cohort)
    write_check(result, to / "check")
    terminal.say(f"{cohort!r}\n", style="bold")
    show_check(result)
    if any(map(is_duplicate, result.findings)):
        terminal.out.print()
        cohort = reading.drop_duplicates(cohort)
        result = check_cohort(cohort)
    path = cohort.with_findings(result.findings).save(to / f"{preset}.cohort")
    assert cohort.truth is not None
    terminal.say(f"\nEffect planted in patients: {', '.join(cohort.truth['rois'])}, and {len(cohort.truth['edges'])} edges.\n")
    networks = not missing_libraries("networks")
    if not networks:
        terminal.say(f"PyTorch is not installed, so only linear methods run; for networks: {install_command('networks')}\n")
    study = write_text(to / "study.toml", demo_study(path.name, networks=networks))
    with watched(jobs) as watch:
        summary = run_study(study, to / "results", jobs=jobs, watch=watch)
    predictions = read_predictions(to / "results")
    typer.echo(render(study_tables(predictions, MAIN[networks])[-1:], "text"), nl=False)
    for line in changes(to / "results", predictions):
        typer.echo(f"\n{line}")
    with terminal.progress("writing the report"):
        page = write_report(to / "results")
    terminal.say(
        f"\n{summary.total} trainings in {summary.seconds:.0f} s. Wrote {path}, {to / 'check'}, {study} and {page}.",
        f"Open {page} in a browser. To check your own data: m2lgdg check FOLDER",
    )
    suggestions.print_next(context, "table", to / "results")
    raise typer.Exit(1 if summary.failed else 0)
