"""The command line: all commands of `m2lgdg.commands`, and the one place where a user error becomes a message.

A command parses its arguments, calls one library function, and prints what it wrote and what to run next.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from typing import Annotated, NoReturn

import typer

from m2lgdg.commands import terminal


def _version(wanted: bool) -> None:
    if wanted:
        from m2lgdg import __version__

        terminal.say(f"m2lgdg {__version__}")
        raise typer.Exit


@terminal.app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run a command of `m2lgdg`."""
    _guarded(terminal.app)


def bids() -> None:
    """Run the BIDS-App `m2lgdg-bids`."""
    from m2lgdg.commands.bids_app import bids_app

    _guarded(bids_app)


def _guarded(run: Callable[[], object]) -> None:
    """Run a command; an input error ends in one sentence and exit code 2."""
    from m2lgdg.storage import InputError, one_line

    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a name that is not valid Unicode is escaped instead of raising
            stream.reconfigure(errors="backslashreplace")
    try:
        run()
    except InputError as error:
        text = one_line(error)
        _stop(text if text.endswith("?") else f"{text}.")
    except MemoryError:
        _stop("out of memory.")
    except OSError as error:
        _stop(f"{error.filename}: {error.strerror}." if error.filename else f"{one_line(error)}.")
    except KeyboardInterrupt:
        sys.exit(130)


def _stop(sentence: str) -> NoReturn:
    """Print an error and exit with code 2; control characters are escaped, so that a hostile name cannot steer the terminal."""
    sentence = "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in sentence)
    terminal.warn(f"m2lgdg: {sentence}")
    sys.exit(2)


if __name__ == "__main__":
    main()
