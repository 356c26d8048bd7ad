"""The commands. Each parses its arguments, calls one library function, says what it wrote and what to run next.

Heavy imports stand inside functions, so that `m2lgdg --help` answers at once.
"""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console

if TYPE_CHECKING:
    from m2lgdg.check import Check
    from m2lgdg.cohort import Cohort
    from m2lgdg.readers.gather import OnBad, Progress
    from m2lgdg.study import Summary

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
Patient = Annotated[str | None, typer.Option(help="bids: words of the label column for patients, such as 'asd,autism'")]
Control = Annotated[str | None, typer.Option(help="bids: words of the label column for controls")]

READER_OPTIONS = (
    *("atlas", "strategy", "quality_checked", "all_sites", "tr"),
    *("participants", "atlas_image", "atlas_labels", "only", "site", "patient", "control"),
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
    from m2lgdg.storage import InputError

    given = {name: context.params[name] for name in READER_OPTIONS}
    options: dict[str, Any] = {name: value for name, value in given.items() if value not in (None, "") and value is not False}
    if options.pop("all_sites", False):
        options["exclude_sites"] = ()
    try:
        with _progress(f"reading {path.name}") as progress:
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

    from m2lgdg.storage import write_texts

    findings = pd.DataFrame([(each.level, each.text) for each in result.findings], columns=["level", "text"])
    tables = {"inclusion": result.inclusion, "sites": result.sites, "findings": findings}
    write_texts(folder, {f"{name}.csv": table.to_csv(index=False, lineterminator="\n") for name, table in tables.items()})


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
    _write_check(result, folder)
    out.print(f"[bold]{escape(repr(cohort))}[/]\n", soft_wrap=True)
    _show(result)
    verdict = {0: "usable", 1: "usable, with findings", 2: "unusable"}[result.exit_code]
    out.print(f"\nThe cohort is [bold]{verdict}[/]. Wrote inclusion.csv, sites.csv and findings.csv to {escape(str(folder))}.")
    if result.exit_code < 2 and path.is_dir():
        out.print(f"Next: m2lgdg convert {escape(str(path))} {_file_name(cohort)}.cohort", soft_wrap=True)
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
    out.print(f"{escape(repr(cohort))}; {len(cohort.excluded)} excluded.", soft_wrap=True)
    size = to.stat().st_size / 1e6
    out.print(f"Wrote {escape(str(to))} ({size:.1f} MB, content {written.hash[:12]}).", soft_wrap=True)
    out.print(f"Next: m2lgdg check {escape(str(to))}", soft_wrap=True)


Out = Annotated[Path, typer.Option("--out", help="folder of the study", show_default=False)]
Folder = Annotated[Path, typer.Argument(metavar="DIR", help="the folder of a study", show_default=False)]
Jobs = Annotated[int, typer.Option(min=1, help="processes")]


@contextmanager
def _watch(jobs: int) -> Iterator[Any]:
    """A live line: cells done, running, failed, time left."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("cells"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bar:
        task = bar.add_task("", total=None)

        def watch(summary: Summary) -> None:
            finished = summary.reused + summary.done + len(summary.failed)
            ran = summary.done + len(summary.failed)
            left = summary.seconds / ran * (summary.total - finished) if ran else 0.0
            text = f"{min(jobs, summary.total - finished)} running, {len(summary.failed)} failed, {left:.0f} s left"
            bar.update(task, completed=finished, total=summary.total, description=text)

        yield watch


def _report_run(summary: Summary, folder: Path) -> None:
    from rich.markup import escape

    reused = f" ({summary.reused} were there already)" if summary.reused else ""
    out.print(
        f"{summary.reused + summary.done} of {summary.total} cells done{reused} in {summary.seconds:.0f} s.", soft_wrap=True
    )
    for reason in dict.fromkeys(reason for _, reason in summary.failed):
        cells = [cell for cell, other in summary.failed if other == reason]
        more = f" (and {len(cells) - 1} more)" if len(cells) > 1 else ""
        err.print(f"failed: {cells[0]}{more}: {reason}", style="red", markup=False, highlight=False, soft_wrap=True)
    out.print(f"Wrote {escape(str(folder / 'predictions.csv'))}.", soft_wrap=True)
    out.print(f"Next: m2lgdg table {escape(str(folder))}   or   m2lgdg report {escape(str(folder))}", soft_wrap=True)


@app.command()
def run(
    study: Annotated[
        Path, typer.Argument(metavar="STUDY", help="a study file (.toml, or study.json of a run)", show_default=False)
    ],
    to: Out,
    jobs: Jobs = 1,
    engine: Annotated[str | None, typer.Option(help="serial, joblib or dask; by default joblib where jobs > 1")] = None,
    scheduler: Annotated[str | None, typer.Option(help="address of a Dask scheduler")] = None,
    shard: Annotated[str | None, typer.Option(help="i/n: only every n-th cell, for job arrays")] = None,
    changes: Annotated[list[str] | None, typer.Option("--set", help="key=value, as in the file: --set seeds=[0,1]")] = None,
    plugin: Annotated[list[Path] | None, typer.Option(help="a Python file with methods of your own")] = None,
) -> None:
    """Run a study: every method at every target site. Stop it any time; running it again goes on where it was.

    Exit code 0: all cells are there, 1: some failed, 2: the study cannot be run.
    """
    from m2lgdg.config import read_study
    from m2lgdg.study import run_study

    # Plugins of the command line are relative to here, those of the file to the file.
    resolved = read_study(study, changes, [str(path.resolve()) for path in plugin or []])
    with _watch(jobs) as watch:
        summary = run_study(resolved, to, engine=engine, jobs=jobs, scheduler=scheduler, shard=shard, watch=watch)  # type: ignore[arg-type]
    _report_run(summary, to)
    raise typer.Exit(1 if summary.failed else 0)


@app.command()
def table(
    folder: Folder,
    form: Annotated[str, typer.Option("--format", help="text, markdown, latex or csv")] = "text",
    best: Annotated[str | None, typer.Option(help="the method to test against the others (default: highest AUC)")] = None,
) -> None:
    """Print the paper's tables of a study: each target site, then macro over sites with paired tests."""
    from m2lgdg.report.tables import render, study_tables
    from m2lgdg.study import read_predictions

    typer.echo(render(study_tables(read_predictions(folder), best), form), nl=False)  # type: ignore[arg-type]


@app.command()
def methods(plugin: Annotated[list[Path] | None, typer.Option(help="a Python file with methods of your own")] = None) -> None:
    """List the methods with their references, variants and fields."""
    from dataclasses import fields

    from rich.markup import escape

    from m2lgdg.method import load_methods

    for name, cls in load_methods(tuple(map(str, plugin or []))).items():
        out.print(f"[bold]{escape(name)}[/]  {escape((cls.__doc__ or '').splitlines()[0])}", soft_wrap=True)
        if cls.reference:
            out.print(f"    {escape(cls.reference)}", style="dim", soft_wrap=True)
        values = ", ".join(f"{field.name} = {field.default!r}" for field in fields(cls))
        out.print(f"    fields: {escape(values) or 'none'}", style="dim", soft_wrap=True)
        if cls.variants:
            out.print(f"    variants: {escape(', '.join(cls.variants))}", style="dim", soft_wrap=True)


@app.command()
def report(folder: Folder) -> None:
    """Write report.html, one page with a study's answer, tables and figure that opens anywhere."""
    from m2lgdg.report.page import write_report

    out.print(f"Wrote {write_report(folder)}. Open it in a browser; it needs no network.", soft_wrap=True)


DEMO_STUDY = """# Every site of a synthetic cohort left out once. Change it, and run: m2lgdg run study.toml --out mine
name = "demo"
cohort = "{cohort}"
seeds = [0]
methods = ["prior", "phenotype-logistic", "fc-logistic", "connectome-ensemble"]
"""


@app.command()
def demo(
    to: Annotated[Path, typer.Option("--out", help="folder to write to")] = Path("demo"),
    preset: Annotated[str, typer.Option(help="tiny, demo or rest-meta-mdd")] = "demo",
    seed: Annotated[int, typer.Option(help="another seed, another cohort")] = 0,
    jobs: Jobs = 2,
) -> None:
    """Make a synthetic cohort whose truth is known, check it, leave each site out once, show tables and a report."""
    from m2lgdg.check import check_cohort
    from m2lgdg.report.page import write_report
    from m2lgdg.report.tables import render, study_tables
    from m2lgdg.storage import write_text
    from m2lgdg.study import read_predictions, run_study
    from m2lgdg.synthetic import make_cohort

    cohort = make_cohort(preset, seed=seed)
    path = cohort.save(to / f"{preset}.cohort")
    result = check_cohort(cohort)
    _write_check(result, to / "check")
    out.print(f"[bold]{cohort!r}[/]\n", soft_wrap=True)
    _show(result)
    assert cohort.truth is not None
    out.print(f"\nPlanted in the patients: {', '.join(cohort.truth['rois'])}, and {len(cohort.truth['edges'])} edges.\n")
    study = write_text(to / "study.toml", DEMO_STUDY.format(cohort=path.name))
    with _watch(jobs) as watch:
        summary = run_study(study, to / "results", jobs=jobs, watch=watch)
    typer.echo(render(study_tables(read_predictions(to / "results"))[-1:], "text"))
    page = write_report(to / "results")
    out.print(
        f"{summary.total} trainings in {summary.seconds:.0f} s. Wrote {path}, {to / 'check'}, {study} and {page}.",
        soft_wrap=True,
    )
    out.print(
        f"Next: open {page}, see all tables with m2lgdg table {to / 'results'}, or check your own: m2lgdg check FOLDER",
        soft_wrap=True,
    )
    raise typer.Exit(1 if summary.failed else 0)


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
    from m2lgdg.storage import InputError, one_line

    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a name that is no Unicode is spelled out, and stops nothing
            stream.reconfigure(errors="backslashreplace")
    try:
        app()
    except InputError as error:
        _stop(f"{one_line(error)}.")
    except MemoryError:
        _stop("this needs more memory than there is.")
    except OSError as error:
        _stop(f"{error.filename}: {error.strerror}." if error.filename else f"{one_line(error)}.")
    except KeyboardInterrupt:
        sys.exit(130)


def _stop(sentence: str) -> NoReturn:
    err.print(f"m2lgdg: {sentence}", style="red", markup=False, highlight=False, soft_wrap=True)
    sys.exit(2)


if __name__ == "__main__":
    main()
