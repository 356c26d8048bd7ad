"""What `m2lgdg check` and `m2lgdg convert` share: the options that say which cohort to read and how, and what follows it."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from m2lgdg.commands import options, suggestions, terminal

if TYPE_CHECKING:
    from m2lgdg.cohort import Cohort
    from m2lgdg.data.readers.series import OnBad

Source = Annotated[
    Path, typer.Argument(metavar="PATH", help="Release folder, your own folder, or a cohort file.", show_default=False)
]
NOT_SELECTED = "site not selected"
BY_KIND = (  # options of single kinds of data, which docs/data.md explains and `m2lgdg convert --help` lists
    *("strategy", "quality_checked", "all_sites", "tr", "atlas_image", "atlas_labels", "only", "values", "triangle"),
    *("session", "confounds", "site_name", "header", "index_column", "join_runs", "motion_column"),
)
READER_NAMES = {"all_sites": "exclude_sites", "site_name": "site"}  # where a reader's option has another name


def _options(
    kind: Annotated[
        str | None,
        typer.Option(
            help="Kind of data: abide-pcp, abide-ii, adhd-200, rest-meta-mdd, connectomes, bids, folder or cohort (default: "
            "guessed)."
        ),
    ] = None,
    atlas: Annotated[
        list[str] | None,
        typer.Option(
            "--atlas",
            help="Atlas, if there are several (aal, cc200, power264 ...); may be repeated, the first one counts as the main "
            "one. all: every atlas, in alphabetical order.",
            show_default=False,
        ),
    ] = None,
    strategy: Annotated[
        str | None, typer.Option(help="Preprocessing, if there are several (cpac/filt_global, unfiltered ...).")
    ] = None,
    quality_checked: Annotated[
        bool, typer.Option("--quality-checked", help="abide-pcp: exclude subjects that failed a rater's quality check.")
    ] = False,
    all_sites: Annotated[
        bool, typer.Option("--all-sites", help="rest-meta-mdd: keep sites 4, 5 and 19, which are excluded by default.")
    ] = False,
    tr: Annotated[float | None, typer.Option(help="rest-meta-mdd: repetition time (TR) in seconds.")] = None,
    participants: Annotated[
        Path | None,
        typer.Option(help="bids, connectomes, abide-ii, adhd-200, rest-meta-mdd: path of the table or workbook of subjects."),
    ] = None,
    atlas_image: Annotated[
        Path | None,
        typer.Option(help="bids: atlas image for NIfTI runs, or parcellation (.dlabel.nii) for dense CIFTI-2 series."),
    ] = None,
    atlas_labels: Annotated[
        Path | None,
        typer.Option(
            help="bids: table with the index and name of each ROI of the atlas image. connectomes: table with the name of each "
            "ROI, or a text file with one name a line."
        ),
    ] = None,
    only: Annotated[
        str | None,
        typer.Option(
            help="bids: entities that a run must have, such as 'task-rest run-01'. connectomes: words that the name of a file "
            "must have."
        ),
    ] = None,
    values: Annotated[
        str | None,
        typer.Option(
            help="connectomes: what the matrices hold: correlation, fisher-z, covariance or partial-correlation (default: told "
            "from their range and diagonal)."
        ),
    ] = None,
    triangle: Annotated[
        str | None,
        typer.Option(
            help="connectomes: half of a matrix that each row of a file holds, by rows: upper or lower (default: told from "
            "the values)."
        ),
    ] = None,
    session: Annotated[
        str | None,
        typer.Option(
            help="bids, connectomes, abide-ii, adhd-200: session to read, if there are several: first (the default) or its "
            "name, such as 02."
        ),
    ] = None,
    confounds: Annotated[
        str | None,
        typer.Option(help="bids: nilearn's strategy for fMRIPrep confounds: simple (the default), scrubbing or compcor."),
    ] = None,
    site: options.Site = None,
    site_name: Annotated[
        str | None, typer.Option(help="bids, connectomes: name of the site, if the table has no site column.")
    ] = None,
    patient: Annotated[
        str | None, typer.Option(help="bids, connectomes: values of the label column for patients, such as 'asd,autism'.")
    ] = None,
    control: Annotated[str | None, typer.Option(help="bids, connectomes: values of the label column for controls.")] = None,
    header: Annotated[
        str | None,
        typer.Option(help="folder: whether the first row of each file names its columns: yes or no (default: guessed)."),
    ] = None,
    index_column: Annotated[
        str | None,
        typer.Option(help="folder: what becomes of a column that counts volumes: drop or keep (default: an error)."),
    ] = None,
    join_runs: Annotated[
        bool,
        typer.Option(
            "--join-runs",
            help="bids, folder, abide-ii, adhd-200: join the runs of a subject, each z-scored per ROI, instead of stopping.",
        ),
    ] = False,
    max_motion: Annotated[
        float | None,
        typer.Option(help="Keep only subjects with a mean head motion (framewise displacement, mm) below this, such as 0.2."),
    ] = None,
    motion_column: Annotated[
        str | None, typer.Option(help="Phenotype column for --max-motion, if it is not func_mean_fd, mean_fd or the like.")
    ] = None,
    table: options.Table = None,
) -> None:
    """The options of a command that reads a cohort: only its parameters count."""


class Brief(TyperCommand):
    """A command whose help leaves out `BY_KIND`, so that it fits on a screen; it takes them all the same."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """The options of every kind of data, and where the others are."""
        others = [one for one in self.params if one.name in BY_KIND]
        before = [one.hidden for one in others]  # type: ignore[attr-defined]
        try:
            for one in others:
                one.hidden = True  # type: ignore[attr-defined]
            super().format_options(ctx, formatter)
        finally:
            for one, hidden in zip(others, before, strict=True):
                one.hidden = hidden  # type: ignore[attr-defined]
        formatter.write_paragraph()
        formatter.write_text(
            f"{len(others)} more options are for single kinds of data, such as --session, --atlas-image and --join-runs: "
            "m2lgdg convert --help lists them, docs/data.md#options-by-kind explains them."
        )


OPTIONS = inspect.signature(_options, eval_str=True).parameters


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """The command with the options above, after its own arguments; `read_cohort` takes their values from the context."""
    own = inspect.signature(command, eval_str=True).parameters
    required = {name: one for name, one in own.items() if one.default is one.empty}

    @functools.wraps(command)
    def called(**given: Any) -> None:
        command(**{name: value for name, value in given.items() if name in own})

    every = required | OPTIONS | own
    called.__signature__ = inspect.Signature(list(every.values()))  # type: ignore[attr-defined]
    called.__annotations__ = {name: one.annotation for name, one in every.items()}
    return called


def read_cohort(context: typer.Context, path: Path, on_bad: OnBad) -> Cohort:
    """Read a cohort with the options that were given, and keep the sites of --site."""
    from m2lgdg.data.readers import read
    from m2lgdg.storage import InputError

    given = {name: context.params[name] for name in OPTIONS if name not in ("kind", "site")}
    given = {name: value for name, value in given.items() if value not in (None, "", [], ()) and value is not False}
    if "table" in given:
        given["tables"] = options.table_files(given.pop("table"))
    named: dict[str, Any] = {READER_NAMES.get(name, name): () if name == "all_sites" else given[name] for name in given}
    try:
        with terminal.progress(f"reading {path.name}") as progress:
            cohort = read(path, context.params["kind"], on_bad=on_bad, progress=progress, **named)
    except InputError as error:
        text = str(error)
        for name in given:  # name the option as on the command line
            text = text.replace(f" no option {READER_NAMES.get(name, name)};", f" no option --{name.replace('_', '-')};")
        raise InputError(text) from None
    sites = context.params["site"]
    return _of_sites(cohort, options.of_sites(cohort, sites)) if sites else cohort


def _of_sites(cohort: Cohort, chosen: Any) -> Cohort:
    """The subjects of some sites; those of others are counted, but their ids stay out of the file."""
    from m2lgdg.data.readers.selection import keep

    kept = keep(cohort, chosen, lambda i: (NOT_SELECTED,))
    excluded = [one._replace(subject="") if one.kind == NOT_SELECTED else one for one in kept.excluded]
    sites = set(kept.sites.tolist())
    return kept._changed(excluded=tuple(sorted(one for one in excluded if one.site in sites or one.kind == NOT_SELECTED)))


def suggest_for_file(context: typer.Context, cohort: Cohort, file: Path, without: Sequence[str] = ()) -> None:
    """Suggest what to do with a cohort file: a study if it has labels of several sites, a fit, or a prediction."""
    without = (*without, "--table")  # the file has them
    if {0, 1} <= set(cohort.labels.tolist()) and not context.params.get("new_site"):
        several = len(cohort.site_names) > 1 and file.suffix == ".cohort" and not context.params.get("site")
        folder = suggestions.free(f"{file_name(cohort)}-{'results' if several else 'model'}")
        terminal.say("`m2lgdg run` compares methods at left-out sites (docs/studies.md); `m2lgdg fit` trains one model.")
        suggestions.print_next(context, "run" if several else "fit", file, "--out", folder, without=without)
    else:
        table = suggestions.free("predictions.csv")
        suggestions.print_next(context, "predict", suggestions.Fill("MODEL"), file, "--out", table, without=without)


def list_motion_exclusions(cohort: Cohort) -> None:
    """Print each subject that --max-motion excluded, with its value."""
    from m2lgdg.findings import NO_MOTION, TOO_MUCH_MOTION

    excluded = [one for one in cohort.excluded if one.kind in (TOO_MUCH_MOTION, NO_MOTION)]
    lines = [f"Excluded {one.subject} ({one.site}): {one.reason}." for one in excluded]
    terminal.say(*lines or ["Every subject is below --max-motion; nobody was excluded for head motion."])


def print_choices(cohort: Cohort) -> None:
    """Print what the reader noted: session, volumes lost by scrubbing, what connectomes hold, which tables there are."""
    for note in cohort.notes:
        if not isinstance(note, str) and note.kind in ("session", "run", "scrubbed", "values", "table"):
            terminal.say(f"{note.text[0].upper()}{note.text[1:].removesuffix('.')}.")


def merge_sites(cohort: Cohort) -> Cohort:
    """Cohort with one name for sites whose names are alike; prints which were merged."""
    from m2lgdg.data.site_names import alike, merged

    groups = alike(cohort.sites.tolist() + [one.site for one in cohort.excluded])
    changed = merged(cohort, groups)
    merges = [str(note) for note in changed.notes[len(cohort.notes) :]]
    terminal.say(*merges or ["No two site names are alike; nothing was merged."])
    return changed


def drop_duplicates(cohort: Cohort) -> Cohort:
    """Cohort in which no scan occurs twice; prints who was dropped and why."""
    from m2lgdg.data.duplicates import without_duplicates

    changed = without_duplicates(cohort)
    dropped = [f"Dropped {one.subject} ({one.site}): {one.reason}." for one in changed.excluded[len(cohort.excluded) :]]
    terminal.say(*dropped or ["No two subjects have the same scan; nothing was dropped."])
    return changed


def to_connectomes(cohort: Cohort) -> Cohort:
    """Cohort of the connectomes of its series."""
    from m2lgdg.scans import SERIES
    from m2lgdg.storage import InputError

    if cohort.values != SERIES:
        raise InputError(f"cohort {cohort.name} holds connectomes ({cohort.values}) already; leave --connectomes out.")
    return cohort.to_connectomes()


def file_name(cohort: Cohort) -> str:
    """Name of the cohort as a file name, without path separators."""
    return re.sub(r"[^\w.-]+", "-", cohort.name).strip("-.") or "cohort"
