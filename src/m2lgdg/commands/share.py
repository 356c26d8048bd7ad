"""`m2lgdg share`: the results of a study as a folder for sharing."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from m2lgdg.commands import options, suggestions, terminal


@terminal.command()
def share(
    context: typer.Context,
    folder: options.Folder,
    to: Annotated[Path, typer.Option("--out", help="New folder to write.", show_default=False)],
    secret: Annotated[
        Path | None,
        typer.Option(
            "--pseudonyms",
            help="Replace subject ids by pseudonyms of the secret in this file, which is made if it is not there: the same "
            "in every folder. Keep it, and do not share it.",
            show_default=False,
        ),
    ] = None,
    uncommitted: Annotated[
        bool, typer.Option("--uncommitted", help="Copy results of code that is in no commit, too, which are refused otherwise.")
    ] = False,
) -> None:
    """Copy the results of a study for a repository or archive: all that tables and report need, without local paths."""
    from rich.markup import escape

    from m2lgdg.data.pseudonyms import Pseudonyms
    from m2lgdg.report.sharing import share_study
    from m2lgdg.storage import InputError, new_folder

    if secret and secret.resolve().is_relative_to(to.resolve()):
        raise InputError(f"{secret} is inside {to}, which is given away; name a file elsewhere for --pseudonyms.")
    with terminal.progress("copying the study"), new_folder(to) as part:
        files = share_study(folder, part, Pseudonyms.of_file(secret) if secret else None, uncommitted=uncommitted)
        size = sum(file.stat().st_size for file in files) / 1e6
    terminal.out.print(f"Wrote {len(files)} files, {size:.1f} MB, to {escape(str(to))}.", soft_wrap=True)
    ids = f"pseudonyms of the secret in {secret}, and labels" if secret else "subject ids"
    terminal.out.print(f"It contains {escape(ids)}: share it only if the terms of the data allow it.", soft_wrap=True)
    suggestions.print_next(context, "report", to)
