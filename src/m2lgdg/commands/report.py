"""`m2lgdg report`: the HTML report of a study, with its tables and figures as files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from m2lgdg.commands import options, terminal


@terminal.command()
def report(
    folder: options.Folder,
    three_d: Annotated[bool, typer.Option("--3d", help="Add rotatable 3D brains for explained methods.")] = False,
    rois: options.Rois = None,
    beside: options.Beside = None,
    best: options.Best = None,
    rival: options.Rival = None,
    share: Annotated[
        bool, typer.Option("--share", help="Write a report for sharing, without subject ids and paths, to --out or DIR/share.")
    ] = False,
    also: options.Also = None,
    to: Annotated[Path | None, typer.Option("--out", help="Folder of the report for sharing; only with --share.")] = None,
) -> None:
    """Write report.html, a self-contained page with the results of a study, and its tables and figures as files."""
    import gc

    from rich.markup import escape

    from m2lgdg.report.page import write_report
    from m2lgdg.storage import InputError

    if to is not None and not share:
        raise InputError("--out needs --share; without --share, the report is written to the study folder.")
    shared = (to or folder / "share") if share else None
    gc.freeze()  # imported modules stay; searching them again and again while figures are drawn takes a tenth of the time
    gc.set_threshold(50_000)
    with terminal.progress("writing the report"):
        page = write_report(
            folder,
            three_d=three_d,
            centroids=rois,
            published=beside,
            best=best,
            rivals=rival or (),
            share=shared,
            also=also or (),
        )
    terminal.out.print(f"Wrote {escape(str(page))}, and the folders tables/ and figures/ next to it.", soft_wrap=True)
    if shared is not None:
        terminal.out.print(f"All of {escape(str(shared))} can be shared; it still contains the names of sites and methods.")
    terminal.out.print("Open the report in a browser; it needs no network.")
