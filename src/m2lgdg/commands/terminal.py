"""The typer application, the two consoles and the display of progress that all commands share.

Each module of this folder registers its command here, and `m2lgdg.cli` imports them all. Heavy imports are inside functions.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

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
EVERY = 60.0  # seconds between two lines of progress where there is no terminal


class Show(Protocol):
    """Updates what is shown of long work: how much of it is done, a text, and its description if that changes."""

    def __call__(self, done: int, total: int | None, text: str = "", description: str | None = None) -> None:
        """Show the present state of the work."""


@contextmanager
def stoppable() -> Iterator[None]:
    """End with a message on Ctrl-C; no partial file exists, because files are written atomically."""
    try:
        yield
    except KeyboardInterrupt:
        err.print("Stopped: nothing was written.", highlight=False)
        raise typer.Exit(130) from None


@contextmanager
def progress(description: str) -> Iterator[Show]:
    """Progress of long work on standard error, which Ctrl-C ends with a message."""
    with stoppable(), shown(description) as show:
        yield show


def shown(description: str) -> AbstractContextManager[Show]:
    """Progress of long work on standard error: a bar in a terminal, which is removed at the end, otherwise lines."""
    return _bar(description) if err.is_terminal else Lines(description)


@contextmanager
def _bar(description: str) -> Iterator[Show]:
    from rich.markup import escape
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    texts = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[text]}"))
    with Progress(*texts, TimeElapsedColumn(), console=err, transient=True) as bar:
        task = bar.add_task(escape(description), total=None, text="")

        def show(done: int, total: int | None, text: str = "", description: str | None = None) -> None:
            bar.update(task, completed=done, total=total, text=escape(text), description=description and escape(description))

        yield show


class Lines:
    """Progress where there is no terminal, such as in a log file: a plain line every minute, printed by a thread.

    The interval, the clock and the function that waits can be replaced in tests; it returns True when the work has ended.
    """

    def __init__(
        self,
        description: str,
        *,
        every: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], bool] | None = None,
    ) -> None:
        self.description, self.text, self.done = description, "", 0
        self.total: int | None = None
        self.every, self.clock, self.start = EVERY if every is None else every, clock, clock()
        self.ended = threading.Event()
        self.wait = wait or self.ended.wait
        self.thread = threading.Thread(target=self._print_lines, daemon=True)

    def __enter__(self) -> Show:
        self.thread.start()
        return self.update

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self.thread.join()

    def update(self, done: int, total: int | None, text: str = "", description: str | None = None) -> None:
        """Remember how far the work is, for the next line."""
        self.done, self.total, self.text = done, total, text
        self.description = description or self.description

    def line(self) -> str:
        """What is done, of how many, and the time since the start."""
        counts = [] if self.total is None else [f"{self.done} of {self.total} done"]
        minutes = f"{(self.clock() - self.start) / 60:.0f} min since the start"
        return f"{self.description}: {', '.join([*counts, *([self.text] if self.text else []), minutes])}"

    def _print_lines(self) -> None:
        while not self.wait(self.every):
            err.print(self.line(), markup=False, highlight=False, soft_wrap=True)
