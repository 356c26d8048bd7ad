"""`m2lgdg run`: every cell of a study, with a live line of progress."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from m2lgdg.commands import options, terminal

if TYPE_CHECKING:
    from m2lgdg.study.runner import Summary


@contextmanager
def watched(jobs: int) -> Iterator[Any]:
    """A live line: cells done, running, failed, time left; Ctrl-C, or the end of a job's time, in a sentence how to go on."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from m2lgdg.study.runner import Stopped

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
    study: options.StudyFile,
    to: Annotated[Path, typer.Option("--out", help="folder of the study", show_default=False)],
    jobs: options.Jobs = 1,
    engine: Annotated[str | None, typer.Option(help="serial, joblib or dask; by default joblib where jobs > 1")] = None,
    scheduler: Annotated[str | None, typer.Option(help="address of a Dask scheduler")] = None,
    shard: Annotated[str | None, typer.Option(help="i/n: only every n-th cell, for job arrays")] = None,
    changes: options.Changes = None,
    only: Annotated[
        list[str] | None, typer.Option(help="one of the study's methods, without the others; may be repeated")
    ] = None,
    plugin: options.Plugin = None,
    reuse: Annotated[
        list[Path] | None, typer.Option(help="the folder of another run, whose cells are taken where the same")
    ] = None,
) -> None:
    """Run a study: every method at every target site. Stop it any time; running it again goes on where it was.

    Exit code 0: all cells are there, 1: some failed, 2: the study cannot be run, 130: stopped (Ctrl-C, SIGTERM).
    """
    from m2lgdg.study.config import read_study, with_only
    from m2lgdg.study.runner import run_study

    # Plugins of the command line are relative to here, those of the file to the file.
    resolved = read_study(study, changes, [str(path.resolve()) for path in plugin or []])
    resolved = with_only(resolved, only) if only else resolved
    with watched(jobs) as watch:
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
