"""The typer application, the two consoles and the display of progress that all commands share.

Each module of this folder registers its command here, and is imported when that command is typed. Heavy imports are inside
functions.
"""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Protocol

import typer
from rich.console import Console
from typer.core import TyperCommand, TyperGroup

# In the order in which a user needs them, each in a module of its name.
COMMANDS = (
    *("demo", "doctor", "fetch", "check", "convert", "methods", "run", "table", "report", "curve", "share"),
    *("fit", "federate", "adapt", "predict", "calibrate", "explain", "card", "export", "serve", "audit"),
)
_registered = typer.Typer()


def command(**settings: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a function as the command of its name, with settings of `typer.Typer.command`."""
    return _registered.command(cls=Command, **settings)


class Plain:
    """Converts texts and paths without pydantic, which recent versions of typer import for them (a tenth of a second)."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Options and arguments of a command, which convert themselves."""
        parameters: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for parameter in parameters:
            if hasattr(parameter, "type_descriptor") and "process_value" not in vars(parameter):
                parameter.process_value = _plainly(parameter)
        return parameters


def _plainly(parameter: Any) -> Callable[[Any, Any], Any]:
    """Conversion of a parameter: here if it cannot fail, and otherwise by typer, with its messages."""
    kind, by_typer = parameter.type_descriptor.annotation, parameter.process_value
    many = parameter.multiple or parameter.nargs == -1

    def process_value(ctx: Any, value: Any) -> Any:
        if value is None and not parameter.required:
            value = () if many else None
        elif kind in (str, Path) and isinstance(value, str | Path) and not many:
            value = kind(value)
        else:
            return by_typer(ctx, value)
        return value if parameter.callback is None else parameter.callback(ctx, parameter, value)

    return process_value


class Command(Plain, TyperCommand):
    """One command."""


class Subcommands(Plain, TyperGroup):
    """A command that has commands of its own."""


class Commands(MutableMapping[str, Any]):
    """Commands by name; each is imported, and its options are built, when it is first needed."""

    def __init__(self) -> None:
        self._built: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._built:
            if name not in COMMANDS:
                raise KeyError(name)
            module = importlib.import_module(f"m2lgdg.commands.{name}")
            single = typer.Typer(add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False)
            single.registered_commands = [one for one in _registered.registered_commands if _name(one) == name]
            self._built[name] = typer.main.get_command(getattr(module, "group", single))  # a group has commands of its own
        return self._built[name]

    def __setitem__(self, name: str, command: Any) -> None:
        self._built[name] = command

    def __delitem__(self, name: str) -> None:
        del self._built[name]

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys((*COMMANDS, *self._built)))

    def __len__(self) -> int:
        return len(set(self))


def _name(registered: typer.models.CommandInfo) -> str:
    return registered.callback.__name__ if registered.callback else ""


class Group(Plain, TyperGroup):
    """The command `m2lgdg`, which imports the command that was typed and no other."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = Commands()

    def list_commands(self, ctx: Any) -> list[str]:
        """Names of all commands, without importing them."""
        return list(self.commands)


app = typer.Typer(
    cls=Group,
    name="m2lgdg",
    help="Train classifiers of resting-state fMRI on the imaging sites you have, and test them on sites they have never seen.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
out = Console(emoji=False)  # a file may be named :dog:, and the table of emoji takes time to import
err = Console(stderr=True, emoji=False)


def print_json(value: Any) -> None:
    """Print a result for scripts on standard output; the width of the terminal does not matter."""
    import json

    typer.echo(json.dumps(value, indent=1, ensure_ascii=False))


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
