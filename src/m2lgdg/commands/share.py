"""`m2lgdg share`: a study's results as a folder that can be given away."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from m2lgdg.commands import options, terminal


@terminal.app.command()
def share(
    folder: options.Folder,
    to: Annotated[Path, typer.Option("--out", help="a new folder", show_default=False)],
) -> None:
    """Copy a study's results for a repository or an archive: what tables and report need, without paths of this machine."""
    from rich.markup import escape

    from m2lgdg.report.sharing import share_study

    files = share_study(folder, to)
    size = sum(file.stat().st_size for file in files) / 1e6
    terminal.out.print(f"Wrote {len(files)} files, {size:.1f} MB, to {escape(str(to))}.", soft_wrap=True)
    terminal.out.print("It has the ids of subjects: share it only where the terms of the data allow that.", soft_wrap=True)
    terminal.out.print(f"Next: m2lgdg report {escape(str(to))}   or   m2lgdg table {escape(str(to))}", soft_wrap=True)
