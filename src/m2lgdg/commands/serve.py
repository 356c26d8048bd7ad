"""`m2lgdg serve`: a page on this machine where one subject's series is dropped and a model answers."""

from __future__ import annotations

from typing import Annotated

import typer

from m2lgdg.commands import options, terminal


@terminal.app.command()
def serve(
    model: options.Model,
    host: Annotated[str, typer.Option(help="127.0.0.1, localhost or ::1; no other machine is ever served")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes any that is free")] = 8765,
    plugin: options.Plugin = None,
) -> None:
    """Open a local page for one subject at a time: drop a series, see probability, flags and the ROIs that count."""
    import contextlib
    import os
    import sys
    import threading

    from rich.markup import escape

    from m2lgdg.deploy.serve.run import bound, run
    from m2lgdg.method import Method
    from m2lgdg.registry import load_methods

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
