"""The last line of a command: what to type next, with the paths and options that were given.

Every command calls `print_next`. A line that starts with `Next:` can be pasted as it is; a line with a part that only the user
knows names that part instead.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import typer

from m2lgdg.commands import terminal

NEVER = ("--out", "--overwrite", "--format")  # they concern what one command writes
SELECTING = ("--site", "--only", "--session", "--max-motion")  # a command that cannot keep the selection is not suggested


class Fill(str):
    """Part of a command that the user has to fill in, in capitals."""


def free(path: str | Path) -> Path:
    """The path, or the first of NAME-2, NAME-3 ... that does not exist yet, so that a suggestion overwrites nothing."""
    path = Path(path)
    name, count = path, 1
    while name.exists():
        count += 1
        name = path.with_name(f"{path.stem}-{count}{path.suffix}")
    return name


def print_next(
    context: typer.Context,
    command: str,
    *words: str | Path,
    without: Sequence[str] = (),
    error_stream: bool = False,
) -> None:
    """Print the command to type next: its words, and the options of the present command that it takes too, except `without`.

    Nothing is printed if the present command selected sites, runs or subjects and the next one cannot.
    """
    root = context.find_root()
    takes = {name for option in _options(root.command.get_command(root, command)) for name in option.opts}  # type: ignore[attr-defined]
    own = {name for name in words if isinstance(name, str)}
    carried: list[str] = []
    for option in _options(context.command):
        flag, given = option.opts[0], context.get_parameter_source(option.name)
        if getattr(given, "name", "") != "COMMANDLINE" or flag in (*NEVER, *without) or flag in own:
            continue
        if flag in takes:
            carried += _typed(option, context.params[option.name])
        elif flag in SELECTING:
            return
    text = " ".join(_quoted(word) for word in ("m2lgdg", command, *words, *carried))
    missing = [word for word in words if isinstance(word, Fill)]
    line = f"Next: {text}" if not missing else f"Then, with your own {' and '.join(missing)}: {text}"
    (terminal.warn if error_stream else terminal.say)(line, style=None)


def _options(command: Any) -> list[Any]:
    return [parameter for parameter in command.params if parameter.param_type_name == "option"]


def _typed(option: Any, value: Any) -> Iterator[str]:
    """The words of an option as typed on the command line."""
    if isinstance(value, bool):
        yield option.opts[0] if value else option.secondary_opts[0]
        return
    for each in dict.fromkeys(value) if isinstance(value, list | tuple) else [value]:
        yield from (option.opts[0], str(each))


def _quoted(word: str | Path) -> str:
    """The word quoted for a shell; a path that starts with a dash is written with its folder, so that it is not an option."""
    if isinstance(word, Path) and str(word).startswith("-"):
        word = f"./{word}"
    return shlex.quote(str(word))
