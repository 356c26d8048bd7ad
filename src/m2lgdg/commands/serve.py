"""`m2lgdg serve`: a local web page that predicts one subject at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from m2lgdg.commands import models, options, terminal


@terminal.command()
def serve(
    model: options.Model = Path("abide-aal"),
    host: Annotated[
        str, typer.Option(help="127.0.0.1, localhost or ::1; with a token also an address that other machines reach.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0 chooses a free one.")] = 8765,
    token: Annotated[
        str | None,
        typer.Option(
            envvar="M2LGDG_TOKEN",
            show_envvar=True,
            help="Answer only requests with this token; others on the machine see the option, not the variable.",
            show_default=False,
        ),
    ] = None,
    plugin: options.Plugin = None,
) -> None:
    """Serve a local page that predicts one subject: upload a scan, see probability, quality flags and important ROIs.

    Without MODEL it is abide-aal, a model of the package.
    """
    import contextlib
    import os
    import sys
    import threading

    from m2lgdg.deploy.serve.run import LOOPBACK, bound, run

    def opened(address: str) -> None:
        where = "on this machine only" if host in LOOPBACK else f"on {host}, with a token"
        terminal.say(f"Serving {model} {where}; stop with Ctrl-C. Open {address} in a browser.")
        terminal.say(f"Uploads are not stored. {models.RESEARCH}")

    with contextlib.closing(bound(host, port, token)) as socket:  # before the model, which takes seconds to load
        run(models.load_model(model, plugin), socket, opened, token)
    terminal.say("Stopped; nothing was written.")
    if threading.active_count() > 1:  # a computation without a client, which Python would otherwise finish first
        sys.stdout.flush()
        os._exit(0)
