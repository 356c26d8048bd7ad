"""`m2lgdg fetch`: download a public release."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from m2lgdg.commands import options, suggestions, terminal


@terminal.command()
def fetch(
    context: typer.Context,
    release: Annotated[str, typer.Argument(metavar="RELEASE", help="Release to download: abide.", show_default=False)],
    atlas: Annotated[
        list[str] | None,
        typer.Option("--atlas", help="Atlas of the series (default: aal); may be repeated.", show_default=False),
    ] = None,
    to: Annotated[Path, typer.Option("--out", help="Folder in which ABIDE_pcp is made.")] = Path("."),
    site: options.Site = None,
    subjects: Annotated[int | None, typer.Option(help="Only so many subjects, from the start of the table.")] = None,
    strategy: Annotated[str, typer.Option(help="Preprocessing pipeline and strategy.")] = "cpac/filt_global",
    url: Annotated[str | None, typer.Option(help="Address of a copy of the release.")] = None,
) -> None:
    """Download ABIDE I: the phenotype table and the ROI series of some atlases.

    The same command continues a download that was interrupted, and fetches damaged files again.
    """
    from rich.markup import escape

    from m2lgdg.data.fetch import CITATION, SUMS, fetch_abide
    from m2lgdg.storage import InputError

    if release != "abide":
        raise InputError(f"release {release} cannot be fetched; the only one is abide (docs/data.md has the others).")
    with terminal.shown("fetching ABIDE") as progress:
        result = fetch_abide(
            to, atlas or ["aal"], strategy=strategy, sites=site or (), subjects=subjects, url=url, progress=progress
        )
    replaced = f" ({result.damaged} damaged files were replaced)" if result.damaged else ""
    counts = f"{result.new} files fetched{replaced}, {result.present} were there already"
    terminal.out.print(f"{result.subjects} subjects in {escape(str(result.folder))}: {counts}. Wrote {SUMS}.", soft_wrap=True)
    terminal.out.print(CITATION, markup=False, highlight=False, soft_wrap=True)
    suggestions.print_next(context, "check", result.folder)
