"""`m2lgdg run`, `table`, `methods`, `report` and `demo`: studies and what comes of them."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from m2lgdg.commands import terminal
from m2lgdg.commands.data import show_check, write_check

if TYPE_CHECKING:
    from m2lgdg.method import Method
    from m2lgdg.study import Summary

Out = Annotated[Path, typer.Option("--out", help="folder of the study", show_default=False)]
Folder = Annotated[Path, typer.Argument(metavar="DIR", help="the folder of a study", show_default=False)]
Beside = Annotated[
    Path | None, typer.Option(help="a table of published values (method, target, metric, value) to stand in brackets")
]
Jobs = Annotated[int, typer.Option(min=1, help="processes")]


@contextmanager
def _watch(jobs: int) -> Iterator[Any]:
    """A live line: cells done, running, failed, time left; Ctrl-C, or the end of a job's time, in a sentence how to go on."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from m2lgdg.study import Stopped

    columns = (TextColumn("cells"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=terminal.err, transient=True, disable=not terminal.err.is_terminal) as bar:
        task = bar.add_task("", total=None)

        def watch(summary: Summary) -> None:
            finished = summary.reused + summary.done + len(summary.failed)
            ran = summary.done + len(summary.failed)
            left = f"{summary.seconds / ran * (summary.total - finished):.0f} s left" if ran else "time left not known yet"
            text = f"{min(jobs, summary.total - finished)} running, {len(summary.failed)} failed, {left}"
            bar.update(task, completed=finished, total=summary.total, description=text)

        before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # without it the processes would outlive this one
        try:
            yield watch
        except Stopped as stopped:
            bar.stop()
            terminal.err.print(f"Stopped: {stopped}.", markup=False, highlight=False, soft_wrap=True)
            raise typer.Exit(130) from None
        finally:
            signal.signal(signal.SIGTERM, before)


def _report_run(summary: Summary, folder: Path) -> None:
    from rich.markup import escape

    there = [(summary.reused - summary.taken, "were there already"), (summary.taken, "were taken over")]
    told = ", ".join(f"{count} {how}" for count, how in there if count)
    reused = f" ({told})" if told else ""
    terminal.out.print(
        f"{summary.reused + summary.done} of {summary.total} cells done{reused} in {summary.seconds:.0f} s.", soft_wrap=True
    )
    for reason in dict.fromkeys(reason for _, reason in summary.failed):
        cells = [cell for cell, other in summary.failed if other == reason]
        more = f" (and {len(cells) - 1} more)" if len(cells) > 1 else ""
        terminal.err.print(f"failed: {cells[0]}{more}: {reason}", style="red", markup=False, highlight=False, soft_wrap=True)
    terminal.out.print(f"Wrote {escape(str(folder / 'predictions.csv'))}.", soft_wrap=True)
    terminal.out.print(f"Next: m2lgdg table {escape(str(folder))}   or   m2lgdg report {escape(str(folder))}", soft_wrap=True)


@terminal.app.command()
def run(
    study: Annotated[
        Path, typer.Argument(metavar="STUDY", help="a study file (.toml, or study.json of a run)", show_default=False)
    ],
    to: Out,
    jobs: Jobs = 1,
    engine: Annotated[str | None, typer.Option(help="serial, joblib or dask; by default joblib where jobs > 1")] = None,
    scheduler: Annotated[str | None, typer.Option(help="address of a Dask scheduler")] = None,
    shard: Annotated[str | None, typer.Option(help="i/n: only every n-th cell, for job arrays")] = None,
    changes: Annotated[list[str] | None, typer.Option("--set", help="key=value, as in the file: --set seeds=[0,1]")] = None,
    only: Annotated[
        list[str] | None, typer.Option(help="one of the study's methods, without the others; may be repeated")
    ] = None,
    plugin: Annotated[list[Path] | None, typer.Option(help="a Python file with methods of your own")] = None,
    reuse: Annotated[
        list[Path] | None, typer.Option(help="the folder of another run, whose cells are taken where the same")
    ] = None,
) -> None:
    """Run a study: every method at every target site. Stop it any time; running it again goes on where it was.

    Exit code 0: all cells are there, 1: some failed, 2: the study cannot be run, 130: stopped (Ctrl-C, SIGTERM).
    """
    from m2lgdg.config import read_study, with_only
    from m2lgdg.study import run_study

    # Plugins of the command line are relative to here, those of the file to the file.
    resolved = read_study(study, changes, [str(path.resolve()) for path in plugin or []])
    resolved = with_only(resolved, only) if only else resolved
    with _watch(jobs) as watch:
        summary = run_study(
            resolved,
            to,
            engine=engine,  # type: ignore[arg-type]
            jobs=jobs,
            scheduler=scheduler,
            shard=shard,
            reuse=reuse or [],
            watch=watch,
        )
    if reuse and not summary.taken and summary.done + len(summary.failed):
        why = "none is of this study's data, fields, seeds, device, threads, explanations and code"
        terminal.err.print(f"No cell was taken over from --reuse: {why}.", highlight=False, soft_wrap=True)
    _report_run(summary, to)
    raise typer.Exit(1 if summary.failed else 0)


@terminal.app.command()
def table(
    folder: Folder,
    form: Annotated[str, typer.Option("--format", help="text, markdown, latex or csv")] = "text",
    best: Annotated[
        str | None,
        typer.Option(help="the method to test against the others (default: highest AUC; among variants of one method itself)"),
    ] = None,
    beside: Beside = None,
) -> None:
    """Print the paper's tables of a study: each target site, then macro over sites with paired tests.

    Where variants were run with several seeds, a last table holds each against the whole, training by training.
    """
    from m2lgdg.predictions import read_predictions
    from m2lgdg.report.beside import read_published, stand_beside
    from m2lgdg.report.tables import render, study_tables, training_tables

    predictions = read_predictions(folder)
    tables = study_tables(predictions, best) + training_tables(predictions)
    if beside is not None:
        tables = stand_beside(tables, read_published(beside, predictions))
    typer.echo(render(tables, form), nl=False)  # type: ignore[arg-type]
    if form in ("text", "markdown"):
        _tell_changes(folder)


def _tell_changes(folder: Path) -> None:
    """A table of methods that did not run with their defaults, or of a part of the study, must say so."""
    from dataclasses import replace

    from m2lgdg.report.contents import read_contents, read_json
    from m2lgdg.report.tables import changed_fields

    changed = changed_fields(read_json(folder / "study.json", {}))
    if changed:
        typer.echo(f"\nNot with their defaults: {changed}.")
    missing = replace(read_contents(folder), failures=[]).missing()
    if missing:
        typer.echo(f"\nNot in these tables, failed or not run yet: {', '.join(missing)}.")


@terminal.app.command()
def methods(
    name: Annotated[str | None, typer.Argument(help="one method, with its fields, variants and sweeps")] = None,
    plugin: Annotated[list[Path] | None, typer.Option(help="a Python file with methods of your own")] = None,
) -> None:
    """List the methods with their references: the paper's, the simple peers, the others; or tell all of one."""
    from rich.markup import escape

    from m2lgdg.method import find
    from m2lgdg.registry import PAPER, load_methods

    known = load_methods(tuple(map(str, plugin or [])))
    if name is not None:
        _tell(name, find(name))
        return
    peers = [one for one, cls in known.items() if cls.__module__ == "m2lgdg.methods.linear"]
    others = [one for one in known if one not in PAPER and one not in peers]
    groups = {"The paper's method and those it is compared with": PAPER, "Simple peers": peers, "Others": others}
    for title, names in groups.items():
        terminal.out.print(f"[bold]{title}[/]")
        for one in (one for one in names if one in known):
            cls = known[one]
            terminal.out.print(f"  [bold]{escape(one)}[/]  {escape((cls.__doc__ or '').splitlines()[0])}", soft_wrap=True)
            if cls.reference:
                terminal.out.print(f"    {escape(cls.reference)}", style="dim", soft_wrap=True)
    terminal.out.print("Next: m2lgdg methods NAME for the fields and variants of one.")


def _tell(name: str, cls: type[Method]) -> None:
    """All there is to know of a method."""
    from dataclasses import fields
    from inspect import getdoc

    from rich.markup import escape

    terminal.out.print(f"[bold]{escape(name)}[/]  {escape(getdoc(cls) or '')}", soft_wrap=True)
    if cls.reference:
        terminal.out.print(f"\n{escape(cls.reference)}", style="dim", soft_wrap=True)
    variants = {
        one: ", ".join(f"{field} = {value!r}" for field, value in changed.items()) for one, changed in cls.variants.items()
    }
    tables = {
        "fields and their defaults": {field.name: repr(field.default) for field in fields(cls) if field.name not in cls.unused},
        "variants and what they change": {one: changes or "nothing" for one, changes in variants.items()},
        "fields to sweep and their values": {field: ", ".join(map(repr, values)) for field, values in cls.space.items()},
    }
    for title, table in tables.items():
        if table:
            terminal.out.print(f"\n[bold]{title}[/]")
        for key, told in table.items():
            terminal.out.print(f"  {escape(key)}: {escape(told)}", soft_wrap=True)
    if cls.unused:
        terminal.out.print(f"\nnot used by this method: {escape(', '.join(cls.unused))}", soft_wrap=True)


@terminal.app.command()
def report(
    folder: Folder,
    three_d: Annotated[bool, typer.Option("--3d", help="also brains that can be turned, of explained methods")] = False,
    rois: Annotated[Path | None, typer.Option(help="rois.tsv (name, x, y, z in MNI) or an atlas image, if not AAL")] = None,
    beside: Beside = None,
    share: Annotated[bool, typer.Option("--share", help="a report to give away, in --out or DIR/share")] = False,
    to: Annotated[Path | None, typer.Option("--out", help="folder of a shared report")] = None,
) -> None:
    """Write report.html, one page with a study's answer, tables and figures that opens anywhere, and all of them as files."""
    from rich.markup import escape

    from m2lgdg.report.page import write_report
    from m2lgdg.storage import InputError

    if to is not None and not share:
        raise InputError("--out is for --share; a report of your own goes into the study folder.")
    shared = (to or folder / "share") if share else None
    page = write_report(folder, three_d=three_d, places=rois, published=beside, share=shared)
    terminal.out.print(f"Wrote {escape(str(page))}, and tables/ and figures/ beside it.", soft_wrap=True)
    if shared is not None:
        terminal.out.print(f"All of {escape(str(shared))} may be given away; names of sites and methods are still in it.")
    terminal.out.print("Next: open it in a browser; it needs no network.")


DEMO_STUDY = """# Every site of a synthetic cohort left out once. Change it, and run: m2lgdg run study.toml --out mine
name = "demo"
cohort = "{cohort}"
seeds = [0]
methods = ["prior", "phenotype-logistic", "fc-logistic", "connectome-adaptive", "m2lgdg"]
explain = ["fc-logistic"]    # what its decisions rest on, for the report; networks can be explained too, which takes longer

[method.m2lgdg]
variant = "small"    # narrow enough for a laptop; without this line the paper's size, which wants a GPU
"""


@terminal.app.command()
def demo(
    to: Annotated[Path, typer.Option("--out", help="folder to write to")] = Path("demo"),
    preset: Annotated[str, typer.Option(help="tiny, demo or rest-meta-mdd")] = "demo",
    seed: Annotated[int, typer.Option(help="another seed, another cohort")] = 0,
    jobs: Jobs = 2,
) -> None:
    """Make a synthetic cohort whose truth is known, check it, leave each site out once, show tables and a report."""
    from m2lgdg.check import check_cohort
    from m2lgdg.predictions import read_predictions
    from m2lgdg.report.page import write_report
    from m2lgdg.report.tables import render, study_tables
    from m2lgdg.storage import write_text
    from m2lgdg.study import run_study
    from m2lgdg.synthetic import make_cohort

    cohort = make_cohort(preset, seed=seed)
    path = cohort.save(to / f"{preset}.cohort")
    result = check_cohort(cohort)
    write_check(result, to / "check")
    terminal.out.print(f"[bold]{cohort!r}[/]\n", soft_wrap=True)
    show_check(result)
    assert cohort.truth is not None
    terminal.out.print(
        f"\nPlanted in the patients: {', '.join(cohort.truth['rois'])}, and {len(cohort.truth['edges'])} edges.\n"
    )
    study = write_text(to / "study.toml", DEMO_STUDY.format(cohort=path.name))
    with _watch(jobs) as watch:
        summary = run_study(study, to / "results", jobs=jobs, watch=watch)
    typer.echo(render(study_tables(read_predictions(to / "results"))[-1:], "text"), nl=False)
    _tell_changes(to / "results")
    page = write_report(to / "results")
    terminal.out.print(
        f"\n{summary.total} trainings in {summary.seconds:.0f} s. Wrote {path}, {to / 'check'}, {study} and {page}.",
        soft_wrap=True,
    )
    terminal.out.print(
        f"Next: open {page}, see all tables with m2lgdg table {to / 'results'}, or check your own: m2lgdg check FOLDER",
        soft_wrap=True,
    )
    raise typer.Exit(1 if summary.failed else 0)
