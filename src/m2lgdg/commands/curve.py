"""`m2lgdg curve`: learning curve of a study, to see how many subjects it needs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from m2lgdg.commands import options, terminal
from m2lgdg.commands.run import study_file, watched


@terminal.command()
def curve(
    study: options.StudyFile,
    to: Annotated[Path, typer.Option("--out", help="Folder to write; run again to continue.", show_default=False)],
    sizes: Annotated[
        str, typer.Option(help="Parts of source to train on: fractions up to 1, or numbers of subjects, comma-separated.")
    ] = "0.125,0.25,0.5,0.75,1",
    repeats: Annotated[int, typer.Option(min=1, help="Random parts of each size.")] = 3,
    goal: Annotated[
        float | None, typer.Option(help="AUC to reach, such as 0.8: extrapolate how many subjects it needs.")
    ] = None,
    jobs: options.Jobs = 1,
    method: Annotated[
        list[str] | None, typer.Option(help="Method of the study (default: its linear methods); may be repeated.")
    ] = None,
    also: Annotated[
        list[Path] | None,
        typer.Option(metavar="DIR", help="Folder of another curve of the same subjects, in the same figure; may be repeated."),
    ] = None,
    changes: options.Changes = None,
    without: options.Without = None,
    plugin: options.Plugin = None,
) -> None:
    """Learning curve: AUC at left-out sites against the number of source subjects, with an extrapolation.

    Each method is trained on nested parts of source, which keep its proportions of sites and classes. Exit code 0: all
    trainings are done, 1: some failed, 2: the curve cannot be computed, 130: stopped.
    """
    from m2lgdg.report.curve import need_curves, sentences, with_others, write_curve
    from m2lgdg.storage import InputError
    from m2lgdg.study.curve import learning_curve, linear_study

    if goal is not None and not 0.5 < goal < 1:
        raise InputError(f"--goal {goal:g}: an AUC between 0.5 and 1 is expected, such as 0.8.")
    resolved = linear_study(study_file(study, changes, plugin, without), method)
    need_curves(also or (), resolved.methods)
    with watched(jobs) as watch:
        result, summary = learning_curve(resolved, to, sizes=_numbers(sizes), repeats=repeats, jobs=jobs, watch=watch)
    result = with_others(result, to, also or ())
    names = write_curve(result, to)
    terminal.warn(*(f"failed: {cell}: {reason}" for cell, reason in summary.failed[:5]))
    reused = f" ({summary.reused} from an earlier run)" if summary.reused else ""
    done = summary.reused + summary.done
    terminal.say(f"{done} of {summary.total} trainings done{reused} in {summary.seconds:.0f} s.")
    terminal.say(*sentences(result, goal), f"Wrote {', '.join(names)} to {to}.")
    raise typer.Exit(1 if summary.failed else 0)


def _numbers(text: str) -> list[float]:
    from m2lgdg.storage import InputError

    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise InputError(f"--sizes {text}: numbers separated by commas are expected, such as 0.25,0.5,1.") from None
