"""`m2lgdg report`: one HTML page of a study, with its tables and figures as files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from m2lgdg.commands import options, terminal


@terminal.app.command()
def report(
    folder: options.Folder,
    three_d: Annotated[bool, typer.Option("--3d", help="also brains that can be turned, of explained methods")] = False,
    rois: options.Rois = None,
    beside: options.Beside = None,
    share: Annotated[bool, typer.Option("--share", help="a report to give away, in --out or DIR/share")] = False,
    to: Annotated[Path | None, typer.Option("--out", help="folder of a shared report")] = None,
) -> None:
    """Write report.html, one page with a study's answer, tables and figures that opens anywhere, and all of them as files."""
    from rich.markup import escape

    from m2lgdg.report.page import write_report
    from m2lgdg.storage import InputError

    if to is not None and not share:
        raise InputError("--out is for --share; a report of your own goes into the study folder.")
    shared = (to or folder / "share") if share else None
    page = write_report(folder, three_d=three_d, centroids=rois, published=beside, share=shared)
    terminal.out.print(f"Wrote {escape(str(page))}, and tables/ and figures/ beside it.", soft_wrap=True)
    if shared is not None:
        terminal.out.print(f"All of {escape(str(shared))} may be given away; names of sites and methods are still in it.")
    terminal.out.print("Next: open it in a browser; it needs no network.")
