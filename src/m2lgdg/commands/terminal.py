"""The typer application, the two consoles and the display of progress that all commands share.

Each module of this folder registers its command here, and is imported when that command is typed. Heavy imports are inside
functions.
"""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from typer.core import TyperGroup

# What `m2lgdg --help` says of each command, in the order in which a user needs them; each is in a module of its name.
GROUPS = {
    "Try it": {
        "demo": "the whole workflow on synthetic sites: check, study, report",
        "doctor": "what works on this machine, and what is missing",
    },
    "What do I have?": {
        "fetch": "download ABIDE I",
        "check": "sites of a folder or cohort file, and what is wrong with it",
        "convert": "write a folder as one cohort file",
    },
    "Does it work at a site it has never seen?": {
        "methods": "all methods, or the fields and variants of one",
        "run": "every method at every left-out site; stop and resume",
        "table": "tables of a study, with tests",
        "report": "one HTML page of a study: the answer, and whether to trust it",
        "curve": "AUC against the number of subjects",
    },
    "Use it": {
        "fit": "train a model on all sites",
        "predict": "probabilities for the subjects of a new site",
        "adapt": "correct the level of a model for a site, without labels",
        "calibrate": "calibrate a model to a site, with labels",
        "explain": "regions and edges that decide",
        "serve": "a local page and API for one subject",
    },
    "Share it": {
        "card": "model card",
        "models": "models that come with the package",
        "share": "copy of a study without paths",
        "export": "ONNX graph, or a model to pass on",
    },
    "Rarely needed": {
        "audit": "does a method see its target?",
        "federate": "one model of hospitals that may not share data",
    },
}
COMMANDS = tuple(name for group in GROUPS.values() for name in group)
VALUES = {"path": "PATH", "int": "NUMBER", "float": "NUMBER"}  # of options, in the help
_registered = typer.Typer()


def command(**settings: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a function as the command of its name, with settings of `typer.Typer.command`."""
    return _registered.command(**settings)


class Group(TyperGroup):
    """The command `m2lgdg`, which imports the command that was typed and no other."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands: dict[str, Any] = dict.fromkeys(COMMANDS)  # built by `get_command`

    def get_params(self, ctx: Any) -> list[Any]:
        """Options of `m2lgdg` itself."""
        return _plainly(super().get_params)(ctx)

    def list_commands(self, ctx: Any) -> list[str]:
        """Names of all commands, without importing them."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """A command, with its options; None if there is none of this name."""
        if cmd_name in COMMANDS and self.commands[cmd_name] is None:
            module = importlib.import_module(f"m2lgdg.commands.{cmd_name}")
            single = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
            single.registered_commands = [one for one in _registered.registered_commands if _name(one) == cmd_name]
            self.commands[cmd_name] = _with_parameters(typer.main.get_command(getattr(module, "group", single)))
        return self.commands.get(cmd_name)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """All commands in groups, one line each, without importing them."""
        for title, group in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(name.ljust(max(map(len, COMMANDS))), line) for name, line in group.items()])
        formatter.write_paragraph()
        formatter.write_text("m2lgdg COMMAND --help has the options of a command.")


def _with_parameters(command: Any) -> Any:
    """The command, or group of commands, whose help names values as TEXT, PATH or NUMBER instead of by Python's types."""
    for one in (command, *getattr(command, "commands", {}).values()):
        for parameter in one.params:
            about = getattr(parameter, "type_descriptor", None)  # of newer versions of typer
            if parameter.param_type_name == "option" and parameter.metavar is None and not getattr(parameter, "is_flag", False):
                kind = str(parameter.type if about is None else about.annotation).lower()
                parameter.metavar = next((name for part, name in VALUES.items() if part in kind), "TEXT")
        one.get_params = _plainly(one.get_params)
    return command


def _plainly(get_params: Callable[[Any], list[Any]]) -> Callable[[Any], list[Any]]:
    """Parameters of a command that convert what is not given, texts and paths without pydantic.

    Newer versions of typer import it for these, too, which takes 0.15 s.
    """

    def parameters(context: Any) -> list[Any]:
        found = get_params(context)
        for one in found:
            if hasattr(one, "type_descriptor") and "process_value" not in vars(one):
                one.process_value = _plain_conversion(one)
        return found

    return parameters


def _plain_conversion(parameter: Any) -> Callable[[Any, Any], Any]:
    kind, by_typer = parameter.type_descriptor.annotation, parameter.process_value
    many = parameter.multiple or parameter.nargs == -1

    def process_value(context: Any, value: Any) -> Any:
        if value is None and not parameter.required:
            value = () if many else None
        elif kind in (str, Path) and isinstance(value, str | Path) and not many:
            value = kind(value)
        else:
            return by_typer(context, value)  # with its messages
        return value if parameter.callback is None else parameter.callback(context, parameter, value)

    return process_value


def _name(registered: typer.models.CommandInfo) -> str:
    return registered.callback.__name__ if registered.callback else ""


app = typer.Typer(
    cls=Group,
    name="m2lgdg",
    help="Train classifiers of resting-state fMRI on the imaging sites you have, and test them on sites they have never seen.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
out = Console(emoji=False)  # a file may be named :dog:, and the table of emoji takes time to import
err = Console(stderr=True, emoji=False)


def say(*lines: str, style: str | None = None) -> None:
    """Print lines of plain text, each whole whatever the width of the terminal."""
    for line in lines:
        out.print(line, style=style, markup=False, highlight=False, soft_wrap=True)


def warn(*lines: str, style: str | None = "red") -> None:
    """Print lines on standard error."""
    for line in lines:
        err.print(line, style=style, markup=False, highlight=False, soft_wrap=True)


def print_json(value: Any) -> None:
    """Print a result for scripts on standard output; the width of the terminal does not matter."""
    import json

    typer.echo(json.dumps(value, indent=1, ensure_ascii=False))


Show = Callable[..., None]  # how much of long work is done, of how much, and if need be a text and another description


@contextmanager
def progress(description: str) -> Iterator[Show]:
    """Progress of long work on standard error, which Ctrl-C ends with a message; files are written whole or not at all."""
    try:
        with shown(description) as show:
            yield show
    except KeyboardInterrupt:
        warn("Stopped: nothing was written.", style=None)
        raise typer.Exit(130) from None


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
    """Progress where there is no terminal, such as in a log file: a plain line every minute, printed by a thread."""

    every = 60.0  # seconds

    def __init__(self, description: str) -> None:
        self.description, self.text, self.done = description, "", 0
        self.total: int | None = None
        self.start = time.monotonic()
        self.ended = threading.Event()
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
        minutes = f"{(time.monotonic() - self.start) / 60:.0f} min since the start"
        return f"{self.description}: {', '.join([*counts, *([self.text] if self.text else []), minutes])}"

    def _print_lines(self) -> None:
        while not self.ended.wait(self.every):
            warn(self.line(), style=None)
