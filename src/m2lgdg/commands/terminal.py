"""The typer application, the two consoles and the progress bar that all commands share.

Each module of this folder registers its command here, and `m2lgdg.cli` imports them all. Heavy imports are inside functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import typer
from rich.console import Console

app = typer.Typer(
    name="m2lgdg",
    help="Train classifiers of resting-state fMRI on the imaging sites you have, and test them on sites they have never seen.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
out = Console()
err = Console(stderr=True)


@contextmanager
def stoppable() -> Iterator[None]:
    """End with a message on Ctrl-C; no partial file exists, because files are written atomically."""
    try:
        yield
    except KeyboardInterrupt:
        err.print("Stopped: nothing was written.", highlight=False)
        raise typer.Exit(130) from None


@contextmanager
def progress(description: str) -> Iterator[Callable[[int, int], None]]:
    """Progress bar on standard error, removed when the work is done."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with stoppable(), Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bar:
        task = bar.add_task(description, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
