"""`m2lgdg check` and `m2lgdg convert`: what is wrong with a cohort, and one compact file of it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from m2lgdg.commands import terminal

if TYPE_CHECKING:
    from m2lgdg.check import Check
    from m2lgdg.cohort import Cohort
    from m2lgdg.readers.gather import OnBad

Source = Annotated[Path, typer.Argument(help="a release folder, your own folder, or a cohort file", show_default=False)]
Kind = Annotated[str | None, typer.Option(help="abide-pcp, rest-meta-mdd, bids, folder or cohort; guessed if not given")]
Atlas = Annotated[
    str | None, typer.Option(help="which atlas, where there are several (aal, cc200, power264, 4S156Parcels ...)")
]
Strategy = Annotated[str | None, typer.Option(help="which pipeline folder, where there are several (cpac/filt_global ...)")]
QualityChecked = Annotated[bool, typer.Option("--quality-checked", help="abide-pcp: leave out whom a rater failed")]
AllSites = Annotated[bool, typer.Option("--all-sites", help="rest-meta-mdd: keep sites 4, 5 and 19")]
Tr = Annotated[float | None, typer.Option(help="rest-meta-mdd: seconds per volume")]
Participants = Annotated[Path | None, typer.Option(help="bids: where participants.tsv lies")]
AtlasImage = Annotated[Path | None, typer.Option(help="bids: atlas image that cuts NIfTI runs into ROIs")]
AtlasLabels = Annotated[Path | None, typer.Option(help="bids: table of index and name for the atlas image")]
Only = Annotated[str | None, typer.Option(help="bids: entities a run must have, such as 'task-rest run-01'")]
Site = Annotated[str | None, typer.Option(help="bids: the site, where participants.tsv has no such column")]
Patient = Annotated[str | None, typer.Option(help="bids: words of the label column for patients, such as 'asd,autism'")]
Control = Annotated[str | None, typer.Option(help="bids: words of the label column for controls")]

READER_OPTIONS = (
    *("atlas", "strategy", "quality_checked", "all_sites", "tr"),
    *("participants", "atlas_image", "atlas_labels", "only", "site", "patient", "control"),
)


def _read(context: typer.Context, path: Path, kind: str | None, on_bad: OnBad) -> Cohort:
    """Read with those of READER_OPTIONS that the user gave."""
    from m2lgdg.readers import read
    from m2lgdg.storage import InputError

    given = {name: context.params[name] for name in READER_OPTIONS}
    options: dict[str, Any] = {name: value for name, value in given.items() if value not in (None, "") and value is not False}
    if options.pop("all_sites", False):
        options["exclude_sites"] = ()
    try:
        with terminal.progress(f"reading {path.name}") as progress:
            return read(path, kind, on_bad=on_bad, progress=progress, **options)
    except InputError as error:
        text = str(error)
        for name in options:  # as the user spelled it
            flag = "--all-sites" if name == "exclude_sites" else f"--{name.replace('_', '-')}"
            text = text.replace(f" no option {name};", f" no option {flag};")
        raise InputError(text) from None


def _file_name(cohort: Cohort) -> str:
    """The cohort's name as a file's, without a way to other folders."""
    return re.sub(r"[^\w.-]+", "-", cohort.name).strip("-.") or "cohort"


def show_check(result: Check) -> None:
    """The table by site and the findings, on the terminal."""
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in result.sites.columns:
        table.add_column(column, justify="left" if column == "site" else "right")
    for row in result.sites.itertuples(index=False):
        table.add_row(*(escape(str(value)) for value in row))
    terminal.out.print(table)
    terminal.out.print()
    style = {"unusable": "bold red", "finding": "yellow", "note": "dim"}
    for finding in result.findings:
        terminal.out.print(f"[{style[finding.level]}]{finding.level:>8}[/] {escape(finding.text)}", soft_wrap=True)


def write_check(result: Check, folder: Path) -> None:
    """Included and excluded subjects, sites and findings as three tables."""
    import pandas as pd

    from m2lgdg.storage import write_texts

    findings = pd.DataFrame([(each.level, each.text) for each in result.findings], columns=["level", "text"])
    tables = {"inclusion": result.inclusion, "sites": result.sites, "findings": findings}
    write_texts(folder, {f"{name}.csv": table.to_csv(index=False, lineterminator="\n") for name, table in tables.items()})


@terminal.app.command()
def check(
    context: typer.Context,
    path: Source,
    kind: Kind = None,
    atlas: Atlas = None,
    strategy: Strategy = None,
    quality_checked: QualityChecked = False,
    all_sites: AllSites = False,
    tr: Tr = None,
    participants: Participants = None,
    atlas_image: AtlasImage = None,
    atlas_labels: AtlasLabels = None,
    only: Only = None,
    site: Site = None,
    patient: Patient = None,
    control: Control = None,
    new_site: Annotated[bool, typer.Option("--new-site", help="the cohort is only to be predicted: one site is fine")] = False,
    to: Annotated[Path | None, typer.Option("--out", help="folder for the lists (default: NAME-check)")] = None,
) -> None:
    """Say what is wrong with a cohort: a table by site, then a sentence for each finding.

    Writes the list of included and excluded subjects with reasons. Exit code 0: usable, 1: usable with findings, 2: unusable.
    """
    from rich.markup import escape

    from m2lgdg.check import check_cohort

    cohort = _read(context, path, kind, "exclude")
    result = check_cohort(cohort, new_site=new_site)
    folder = to or Path(f"{_file_name(cohort)}-check")
    write_check(result, folder)
    terminal.out.print(f"[bold]{escape(repr(cohort))}[/]\n", soft_wrap=True)
    show_check(result)
    verdict = {0: "usable", 1: "usable, with findings", 2: "unusable"}[result.exit_code]
    terminal.out.print(
        f"\nThe cohort is [bold]{verdict}[/]. Wrote inclusion.csv, sites.csv and findings.csv to {escape(str(folder))}.",
        soft_wrap=True,
    )
    if result.exit_code < 2 and path.is_dir():
        drop = " --drop-bad" if any(one.reason.endswith(".") for one in cohort.excluded) else ""
        terminal.out.print(f"Next: m2lgdg convert {escape(str(path))} {_file_name(cohort)}.cohort{drop}", soft_wrap=True)
    if result.exit_code < 2 and path.is_file():
        then = (
            "predict MODEL {} --out predictions.csv" if new_site else "fit {} --out MODEL   or a study of it: docs/studies.md"
        )
        terminal.out.print(f"Next: m2lgdg {then.format(escape(str(path)))}", soft_wrap=True, highlight=False)
    raise typer.Exit(result.exit_code)


@terminal.app.command()
def convert(
    context: typer.Context,
    path: Source,
    to: Annotated[Path, typer.Argument(metavar="OUT", help="the cohort file to write", show_default=False)],
    kind: Kind = None,
    atlas: Atlas = None,
    strategy: Strategy = None,
    quality_checked: QualityChecked = False,
    all_sites: AllSites = False,
    tr: Tr = None,
    participants: Participants = None,
    atlas_image: AtlasImage = None,
    atlas_labels: AtlasLabels = None,
    only: Only = None,
    site: Site = None,
    patient: Patient = None,
    control: Control = None,
    half: Annotated[bool, typer.Option("--float16", help="half the size, 0.05 % error")] = False,
    drop_bad: Annotated[
        bool, typer.Option("--drop-bad", help="leave bad subjects out instead of stopping at the first")
    ] = False,
    keep: Annotated[Path | None, typer.Option(help="an inclusion.csv of `check`, edited or not: keep its included")] = None,
) -> None:
    """Read a release or folder once and write it as one compact cohort file."""
    from rich.markup import escape

    cohort = _read(context, path, kind, "exclude" if drop_bad else "stop")
    if keep is not None:
        from m2lgdg.readers.tables import keep_included

        cohort = keep_included(cohort, keep)
    written = type(cohort).load(cohort.save(to, "float16" if half else "float32"))  # read back: what is on disk is good
    terminal.out.print(f"{escape(repr(cohort))}; {len(cohort.excluded)} excluded.", soft_wrap=True)
    size = to.stat().st_size / 1e6
    terminal.out.print(f"Wrote {escape(str(to))} ({size:.1f} MB, content {written.hash[:12]}).", soft_wrap=True)
    terminal.out.print(f"Next: m2lgdg check {escape(str(to))}", soft_wrap=True)
