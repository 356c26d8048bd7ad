"""`m2lgdg serve`: a page on this machine where one subject's series is dropped and a model answers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from m2lgdg.commands import terminal


@terminal.app.command()
def serve(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="a model folder that `m2lgdg fit` wrote", show_default=False)],
    host: Annotated[str, typer.Option(help="127.0.0.1, localhost or ::1; no other machine is ever served")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes any that is free")] = 8765,
    plugin: Annotated[list[Path] | None, typer.Option(help="a Python file with methods of your own")] = None,
) -> None:
    """Open a local page for one subject at a time: drop a series, see probability, flags and the ROIs that count."""
    import contextlib
    import os
    import sys
    import threading

    from rich.markup import escape

    from m2lgdg.method import Method
    from m2lgdg.registry import load_methods
    from m2lgdg.serve.run import bound, run

    def opened(address: str) -> None:
        terminal.out.print(f"{escape(str(model))} answers at {address} on this machine only; Ctrl-C ends it.", soft_wrap=True)
        terminal.out.print("Nothing that is uploaded is stored. Research use; not a diagnostic device.")

    with contextlib.closing(bound(host, port)) as socket:  # first, since a model takes seconds to load
        load_methods(tuple(map(str, plugin or [])))
        run(Method.load(model), socket, opened)
    terminal.out.print("Ended.")
    if threading.active_count() > 1:  # a computation that nobody waits for any more, which Python would see to its end
        sys.stdout.flush()
        os._exit(0)
