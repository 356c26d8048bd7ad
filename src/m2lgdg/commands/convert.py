"""`m2lgdg convert`: a release or folder as one compact cohort file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from m2lgdg.commands import options, reading, suggestions, terminal


@terminal.command()
@reading.with_options
def convert(
    context: typer.Context,
    path: reading.Source,
    to: Annotated[Path, typer.Argument(metavar="OUT", help="Cohort file to write.", show_default=False)],
    half: Annotated[
        bool, typer.Option("--float16", help="Store series in half precision: half the size, 0.05 % error.")
    ] = False,
    drop_bad: Annotated[
        bool, typer.Option("--drop-bad", help="Exclude defective subjects instead of stopping at the first.")
    ] = False,
    drop_duplicates: Annotated[
        bool,
        typer.Option(
            "--drop-duplicates",
            help="Of subjects with the same scan, keep the first by id if their labels agree, and none if they differ.",
        ),
    ] = False,
    merge_sites: Annotated[
        bool, typer.Option("--merge-sites", help="Merge sites whose names differ only in spelling (UM_1, um-1).")
    ] = False,
    keep: Annotated[
        Path | None, typer.Option(help="inclusion.csv of `m2lgdg check`, edited or not: keep only the subjects it includes.")
    ] = None,
    connectomes: Annotated[
        bool,
        typer.Option(
            "--connectomes", help="Store the Fisher z of the correlations of each scan instead of its series; much smaller."
        ),
    ] = False,
    overwrite: options.Overwrite = False,
) -> None:
    """Read a release or folder once and write it as one compact cohort file."""
    from m2lgdg.data.check import atlas_line, with_checks, without_empty_scans
    from m2lgdg.findings import check_command, data_line

    options.refuse_existing(to, overwrite)
    cohort = reading.read_cohort(context, path, "exclude" if drop_bad else "stop")
    reading.print_choices(cohort)
    if context.params["max_motion"] is not None:
        reading.list_motion_exclusions(cohort)
    if drop_bad:
        cohort = without_empty_scans(cohort)
    if keep is not None:
        from m2lgdg.data.readers.selection import keep_included

        cohort = keep_included(cohort, keep)
    if merge_sites:
        cohort = reading.merge_sites(cohort)
    if drop_duplicates:
        cohort = reading.drop_duplicates(cohort)
    if connectomes:
        cohort = reading.to_connectomes(cohort)
    with terminal.progress("checking the cohort"):
        cohort = with_checks(cohort)
    with terminal.progress(f"writing {to.name}"):
        written = type(cohort).load(cohort.save(to, "float16" if half else "float32"))  # read back, to verify the file
    size = to.stat().st_size / 1e6
    lines = [f"{cohort!r}; {len(cohort.excluded)} excluded.", atlas_line(cohort)]
    lines += [f"Wrote {to} ({size:.1f} MB, content {written.hash[:12]}).", data_line(cohort.findings or (), check_command(to))]
    terminal.say(*filter(None, lines))
    reading.suggest_for_file(context, cohort, to, without=[*suggestions.SELECTING, "--kind"])  # of another file
