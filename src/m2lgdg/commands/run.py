"""`m2lgdg run`: run every cell of a study, with a progress bar."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from m2lgdg.commands import options, suggestions, terminal

if TYPE_CHECKING:
    from m2lgdg.study.config import Study
    from m2lgdg.study.runner import Summary


LONG = 1800  # seconds of trainings that are announced before they begin


def duration(seconds: float) -> str:
    """Seconds, minutes or hours, whichever is read most easily."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} minutes" if seconds < 7200 else f"{seconds / 3600:.0f} hours"


@contextmanager
def watched(jobs: int) -> Iterator[Any]:
    """Progress bar of cells and time left; Ctrl-C and SIGTERM end with a message on how to continue."""
    from m2lgdg.study.runner import Stopped

    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # otherwise worker processes would outlive this one
    try:
        with terminal.shown("cells") as show:

            def watch(summary: Summary) -> None:
                finished = summary.reused + summary.done + len(summary.failed)
                if summary.expected and summary.expected[1] > LONG and finished == summary.reused:
                    count, seconds = summary.expected
                    cores = f"{jobs} CPU core{'s' * (jobs > 1)}"
                    terminal.say(
                        f"Training {count} networks takes up to about {duration(seconds)} on {cores}. Fewer seeds "
                        "(--set seeds=[0]), one --site at a time, more --jobs or a GPU (--set device=cuda) take less."
                    )
                more = "at least " if summary.at_least else ""
                rest = "time left unknown" if summary.left is None else f"{more}{duration(summary.left)} left"
                text = f"{min(jobs, summary.total - finished)} running, {len(summary.failed)} failed, {rest}"
                show(finished, summary.total, text)

            yield watch
    except Stopped as stopped:
        terminal.warn(f"Stopped: {stopped}.", style=None)
        raise typer.Exit(130) from None
    finally:
        signal.signal(signal.SIGTERM, before)


def study_file(
    path: Path, changes: Sequence[str] | None, plugin: Sequence[Path] | None, without: Sequence[str] | None = None
) -> Study:
    """The study of a file with the changes of --set; plugins of the command line are relative to the working folder."""
    from m2lgdg.storage import InputError
    from m2lgdg.study.config import read_study

    study = read_study(path, list(changes or []), [str(one.resolve()) for one in plugin or []])
    if not without:
        return study
    targets = None if study.targets is None else [site for site in study.targets if site not in without]
    if targets == []:
        raise InputError(f"--without {without[0]}: no target of the study is left.")
    return study.model_copy(update={"exclude_sites": list(dict.fromkeys([*study.exclude_sites, *without])), "targets": targets})


def _report_run(summary: Summary, folder: Path, leaks: list[str], data: str) -> None:
    counts = [(summary.reused - summary.taken, "from an earlier run"), (summary.taken, "copied from --reuse")]
    text = ", ".join(f"{count} {origin}" for count, origin in counts if count)
    reused = f" ({text})" if text else ""
    terminal.say(f"{summary.reused + summary.done} of {summary.total} cells done{reused} in {summary.seconds:.0f} s.")
    for reason in dict.fromkeys(reason for _, reason in summary.failed):
        cells = [cell for cell, other in summary.failed if other == reason]
        more = f" (and {len(cells) - 1} more)" if len(cells) > 1 else ""
        terminal.warn(f"failed: {cells[0]}{more}: {reason}")
    terminal.warn(*leaks)
    terminal.say(*([data] if data else []), f"Wrote {folder / 'predictions.csv'}.")


def _check_command(study: Study, folder: Path) -> str:
    """Command that lists the findings about the cohort; a release folder was read with options, so its converted file."""
    from m2lgdg.findings import check_command

    return check_command(folder / "cohort.cohort" if Path(study.cohort).is_dir() else study.cohort)


@terminal.command()
def run(
    context: typer.Context,
    study: options.StudyFile,
    to: Annotated[Path, typer.Option("--out", help="Study folder to write; run again to continue.", show_default=False)],
    jobs: options.Jobs = 1,
    engine: Annotated[
        str | None,
        typer.Option(help="Engine: serial, joblib or dask (default: serial; joblib with several jobs; dask with --scheduler)."),
    ] = None,
    scheduler: Annotated[str | None, typer.Option(help="Address of a Dask scheduler.")] = None,
    shard: Annotated[str | None, typer.Option(help="Run only every n-th cell, as i/n such as 2/8, for job arrays.")] = None,
    changes: options.Changes = None,
    method: Annotated[
        list[str] | None, typer.Option(help="Method of the study to run (default: all); may be repeated.")
    ] = None,
    site: options.TargetSite = None,
    without: options.Without = None,
    plugin: options.Plugin = None,
    reuse: Annotated[
        list[Path] | None, typer.Option(help="Copy identical cells from another study folder; may be repeated.")
    ] = None,
) -> None:
    """Run a leave-one-site-out study: every method at every target site. Stop it at any time, and run it again to continue.

    Exit code 0: all cells are done, 1: some failed, or a leakage check failed, 2: the study cannot be run, 130: stopped
    (Ctrl-C, SIGTERM).
    """
    from m2lgdg.study.config import with_only
    from m2lgdg.study.description import cohort_line, failed_checks
    from m2lgdg.study.runner import run_study

    resolved = with_only(study_file(study, changes, plugin, without), method, site)
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
        reason = "none has the same data, fields, seed, device, threads, explanations and code"
        terminal.warn(f"No cell was copied from --reuse: {reason}.", style=None)
    leaks = failed_checks(to)
    _report_run(summary, to, leaks, cohort_line(to, _check_command(resolved, to)))
    if summary.reused + summary.done:
        from m2lgdg.report.paper_tables import flat_clauses
        from m2lgdg.study.predictions import by_track, read_predictions

        for track, rows in by_track(read_predictions(to)).items():
            for clause in flat_clauses(rows, resolved.min_per_class):
                terminal.warn(f"Uninformative decisions ({track} track): {clause}.", style=None)
        suggestions.print_next(context, "table", to, without=["--site"])
    raise typer.Exit(1 if summary.failed or leaks else 0)
