"""The terminal: the application all commands hang on, the two consoles, and the progress bar.

Each module of this folder adds commands; `m2lgdg.cli` puts them together. Heavy imports stand inside functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import typer
from rich.console import Console

app = typer.Typer(
    name="m2lgdg",
    help="Does a brain-imaging classifier work at a hospital it has never seen?",
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
    """Ctrl-C in long work ends in a sentence; what was begun is not there, since files appear whole or not at all."""
    try:
        yield
    except KeyboardInterrupt:
        err.print("Stopped: nothing was written.", highlight=False)
        raise typer.Exit(130) from None


@contextmanager
def progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on the terminal's error side; gone when the work is done."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with stoppable(), Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
