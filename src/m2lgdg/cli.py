"""The commands. Each parses its arguments, calls one library function, says what it wrote and what to run next.

Heavy imports stand inside functions, so that `m2lgdg --help` answers at once.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

if TYPE_CHECKING:
    from m2lgdg.check import Check
    from m2lgdg.cohort import Cohort
    from m2lgdg.readers.gather import OnBad, Progress

app = typer.Typer(
    name="m2lgdg",
    help="Does a brain-imaging classifier work at a hospital it has never seen?",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
out = Console()
err = Console(stderr=True)

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

READER_OPTIONS = (
    *("atlas", "strategy", "quality_checked", "all_sites", "tr"),
    *("participants", "atlas_image", "atlas_labels", "only", "site"),
)


@contextmanager
def _progress(what: str) -> Iterator[Progress]:
    """A progress bar on the terminal's error side; gone when the work is done."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _read(context: typer.Context, path: Path, kind: str | None, on_bad: OnBad) -> Cohort:
    """Read with those of READER_OPTIONS that the user gave."""
    from m2lgdg.readers import read

    options: dict[str, Any] = {name: context.params[name] for name in READER_OPTIONS if context.params[name]}
    if options.pop("all_sites", False):
        options["exclude_sites"] = ()
    with _progress(f"reading {path.name}") as progress:
        return read(path, kind, on_bad=on_bad, progress=progress, **options)


def _show(result: Check) -> None:
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in result.sites.columns:
        table.add_column(column, justify="left" if column == "site" else "right")
    for row in result.sites.itertuples(index=False):
        table.add_row(*(escape(str(value)) for value in row))
    out.print(table)
    out.print()
    style = {"unusable": "bold red", "finding": "yellow", "note": "dim"}
    for finding in result.findings:
        out.print(f"[{style[finding.level]}]{finding.level:>8}[/] {escape(finding.text)}", soft_wrap=True)


def _write_check(result: Check, folder: Path) -> None:
    import pandas as pd

    from m2lgdg.storage import write_text

    findings = pd.DataFrame([(each.level, each.text) for each in result.findings], columns=["level", "text"])
    for name, table in (("inclusion", result.inclusion), ("sites", result.sites), ("findings", findings)):
        write_text(folder / f"{name}.csv", table.to_csv(index=False, lineterminator="\n"))


@app.command()
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
    new_site: Annotated[bool, typer.Option("--new-site", help="the cohort is only to be predicted: one site is fine")] = False,
    to: Annotated[Path | None, typer.Option("--out", help="folder for the lists (default: NAME-check)")] = None,
) -> None:
    """Say what is wrong with a cohort: a table by site, then a sentence for each finding.

    Writes the list of included and excluded subjects with reasons. Exit code 0: usable, 1: usable with findings, 2: unusable.
    """
    from rich.markup import escape

    from m2lgdg.check import check as run_check

    cohort = _read(context, path, kind, "exclude")
    result = run_check(cohort, new_site=new_site)
    folder = to or Path(f"{cohort.name}-check")
    _write_check(result, folder)
    out.print(f"[bold]{escape(repr(cohort))}[/]\n", soft_wrap=True)
    _show(result)
    verdict = {0: "usable", 1: "usable, with findings", 2: "unusable"}[result.exit_code]
    out.print(f"\nThe cohort is [bold]{verdict}[/]. Wrote inclusion.csv, sites.csv and findings.csv to {escape(str(folder))}.")
    if result.exit_code < 2 and path.is_dir():
        out.print(f"Next: m2lgdg convert {escape(str(path))} {escape(cohort.name)}.cohort", soft_wrap=True)
    raise typer.Exit(result.exit_code)


@app.command()
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
    out.print(f"{escape(repr(cohort))}; {len(cohort.excluded)} excluded.", soft_wrap=True)
    size = to.stat().st_size / 1e6
    out.print(f"Wrote {escape(str(to))} ({size:.1f} MB, content {written.hash[:12]}).", soft_wrap=True)
    out.print(f"Next: m2lgdg check {escape(str(to))}", soft_wrap=True)


@app.command()
def demo(
    to: Annotated[Path, typer.Option("--out", help="folder to write to")] = Path("demo"),
    preset: Annotated[str, typer.Option(help="tiny, demo or rest-meta-mdd")] = "demo",
    seed: Annotated[int, typer.Option(help="another seed, another cohort")] = 0,
) -> None:
    """Make a synthetic multi-site cohort whose truth is known, and check it."""
    from m2lgdg.check import check as run_check
    from m2lgdg.synthetic import make_cohort

    cohort = make_cohort(preset, seed=seed)
    path = cohort.save(to / f"{preset}.cohort")
    result = run_check(cohort)
    _write_check(result, to / "check")
    out.print(f"[bold]{cohort!r}[/]\n", soft_wrap=True)
    _show(result)
    assert cohort.truth is not None
    out.print(f"\nPlanted in the patients: {', '.join(cohort.truth['rois'])}, and {len(cohort.truth['edges'])} edges.")
    out.print(f"Wrote {path} and {to / 'check'}.\nNext: m2lgdg check {path}, or your own data: m2lgdg check FOLDER")


def _version(wanted: bool) -> None:
    if wanted:
        from m2lgdg import __version__

        out.print(f"m2lgdg {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="print the version")] = False,
) -> None:
    pass


def main() -> None:
    """Run a command; whatever the user gave wrong ends in one sentence and exit code 2."""
    from m2lgdg.storage import InputError

    try:
        app()
    except InputError as error:
        err.print(f"m2lgdg: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
