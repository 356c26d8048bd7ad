"""Reader of a lab's folder: participants.tsv, one array file per subject, and an optional dataset.toml.

Called by `m2lgdg.read`. Without dataset.toml, series are expected as <subject>.npy/.csv/.tsv/.mat/.1D/.txt, and runs to be
joined as <subject>_run-<number>.npy (...).
"""

from __future__ import annotations

import glob
import os
import re
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from m2lgdg.cohort import Cohort, is_proxy, natural_key
from m2lgdg.data.atlases import included, names_by_position, regions, roi_names
from m2lgdg.data.readers.gather import (
    JOINED,
    TRANSPOSE,
    OnBad,
    Progress,
    Rois,
    Series,
    SeriesFile,
    joined,
    load_array,
    numbered_rois,
)
from m2lgdg.data.readers.participants import Participants, read_participants
from m2lgdg.data.readers.several import Atlases, AtlasFiles, gather_atlases, no_series, requested
from m2lgdg.data.readers.tables import ALIASES, LARGEST_TABLE, need_columns, need_distinct, need_seconds, read_text_table
from m2lgdg.findings import NOT_LISTED, Exclusion
from m2lgdg.storage import InputError, one_line, read_bytes

RUN = "[A-Za-z0-9]+"  # the name of a run
PARTS = ("", "series/", "timeseries/")
POSITIONAL = "aal"  # its files have one order: columns of any names are named by position, and another number is refused
ADVICE = 'give the words of each class in dataset.toml: [labels] patient = ["..."], control = ["..."]'
LONGEST_NAME = 255  # bytes of a file or folder name on common file systems
SUFFIXES = (".npy", ".csv", ".tsv", ".mat", ".1D", ".txt")
UNION_PART = re.compile(r"str|int|float|constrained-float|dict\[.*")  # inserted by pydantic into the location of an error
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Labels(_Strict):
    """The words of the label column for each class."""

    patient: list[str | int] = []
    control: list[str | int] = []


class FurtherAtlas(_Strict):
    """[atlases.NAME] of dataset.toml: the same scans in another atlas; what is not given is as in the first."""

    pattern: str | None = Field(default=None, description="path of a series, as the pattern of the first atlas")
    variable: str | None = None
    orientation: Literal["time,roi", "roi,time"] | None = None
    rois: str | None = Field(default=None, description="table with a name column, one row per ROI")


class Dataset(_Strict):
    """dataset.toml: every key is optional."""

    name: str | None = None
    participants: str = "participants.tsv"
    pattern: str | None = Field(
        default=None, description="path of a series with {subject}, {site} and {run}, such as 'ts/{subject}_aal.csv'"
    )
    join_runs: bool = Field(default=False, description="join the runs of a subject, each z-scored per ROI")
    orientation: Literal["time,roi", "roi,time"] = "time,roi"
    variable: str | None = Field(default=None, description="variable of a .mat file")
    atlas: str = ""
    rois: str | None = Field(default=None, description="table with a name column, one row per ROI")
    tr: Seconds | dict[str, Seconds] | None = Field(default=None, description="seconds per volume, for all sites or by site")
    site: str | None = Field(default=None, description="the site, if there is no site column")
    inputs: list[str] | None = None
    allow_proxies: bool = False
    missing: list[str | int | float] = []
    columns: dict[str, str] = {}
    labels: Labels = Labels()
    atlases: dict[str, FurtherAtlas] = Field(default={}, description="further atlases of the same scans, by name")


def matches(path: Path) -> bool:
    """Whether a folder has this layout."""
    return (path / "participants.tsv").is_file() or (path / "dataset.toml").is_file()


def read(
    path: Path,
    *,
    atlas: Atlases = None,
    join_runs: bool = False,
    on_bad: OnBad = "stop",
    progress: Progress | None = None,
) -> Cohort:
    """Read the subjects of participants.tsv with their series.

    `atlas` selects some of the atlases that dataset.toml names, by default all of them in the order of the file. If it names
    none, `atlas` may be the name of an included atlas, which then names the ROIs. A subject
    without a series (of the first atlas), or a series without a row, is an error unless `on_bad` is "exclude". `join_runs`
    (also a key of dataset.toml) puts the runs of a subject one after the other, in the order of their names; each run of every
    subject, also of one with a single run, is z-scored per ROI first. Columns of named files are matched by name, others by
    position.
    """
    dataset = _with_atlas(_dataset(path / "dataset.toml", join_runs), atlas)
    table = path / dataset.participants
    people = read_participants(
        table,
        columns=dataset.columns,
        patient=[str(word) for word in dataset.labels.patient],
        control=[str(word) for word in dataset.labels.control],
        missing=[str(word) for word in dataset.missing],
        inputs=dataset.inputs,
        site=dataset.site,
        advice=ADVICE,
    )
    _check_inputs(people, dataset, path / "dataset.toml")
    every = {name: _Source(path, each, people) for name, each in _by_atlas(dataset).items()}
    names = _chosen(path / "dataset.toml", atlas, tuple(every))
    sources = [every[name] for name in names]
    if sources[0].absent and not sources[0].listed:
        raise InputError(_none_present(path, table, sources[0]))
    excluded = [no_series(subject, site, names) for subject, site in sources[0].absent]
    if excluded and on_bad == "stop":
        subject, site = excluded[0][:2]
        raise InputError(f"{table}: subject {subject} has no series file{_expected(path, sources[0].dataset, subject, site)}.")
    for subject, file in _all_unlisted(path, sources, [each for name, each in every.items() if name not in names]):
        if on_bad == "stop":
            raise InputError(f"{file}: subject {subject} is not in {table}.")
        excluded.append(Exclusion(subject, "", NOT_LISTED))
    gathered, parcellations, notes = gather_atlases(
        sources[0].files(), lambda: [each.files() for each in sources[1:]], table, on_bad=on_bad, progress=progress
    )
    position = {subject: i for i, subject in enumerate(people.subjects)}
    rows = [position[each.subject] for each in gathered.files]
    return Cohort(
        series=gathered.series,
        subjects=np.array([each.subject for each in gathered.files]),
        sites=people.sites[rows],
        labels=people.labels[rows],
        rois=gathered.rois,
        phenotypes=people.phenotypes.iloc[rows],
        inputs=people.inputs,
        tr=_repetition_times(people, dataset)[rows],
        atlas=names[0],
        name=dataset.name or path.resolve().name,
        excluded=tuple(sorted(excluded + gathered.excluded)),
        notes=(
            *people.notes,
            *(note for each in sources for note in each.naming.notes),
            *((JOINED,) if dataset.join_runs else ()),
            *notes,
        ),
        allow_proxies=dataset.allow_proxies,
        parcellations=parcellations,
    )


class _Source:
    """The series files of one atlas, and how they are read; `dataset` has the keys of that atlas."""

    def __init__(self, path: Path, dataset: Dataset, people: Participants) -> None:
        self.path = path
        self.dataset = dataset
        self.runs: dict[Path, list[Path]] = {}
        self.listed: list[SeriesFile] = []
        self.absent: list[tuple[str, str]] = []  # subject and site
        for subject, site in zip(people.subjects, people.sites.tolist(), strict=True):
            series_files = _series_files(path, dataset, subject, site)
            if series_files:
                self.runs[series_files[0]] = series_files
                self.listed.append(SeriesFile(subject, site, series_files[0]))
            else:
                self.absent.append((subject, site))

    @cached_property
    def naming(self) -> _Naming:
        """Names of the ROIs."""
        return _Naming(self.path / "dataset.toml", _roi_names(self.path, self.dataset), self.dataset.atlas)

    @property
    def taken(self) -> set[Path]:
        """Every file of a listed subject."""
        return {file for each in self.runs.values() for file in each}

    def files(self) -> AtlasFiles:
        """What `gather_atlases` reads."""
        return AtlasFiles(self.dataset.atlas, self.listed, self._load, self.naming)

    def _load(self, file: Path) -> tuple[Rois, Series]:
        if self.dataset.join_runs:
            return joined(self.runs[file], lambda run: _load(run, self.dataset, self.naming))
        return _load(file, self.dataset, self.naming)


def _by_atlas(dataset: Dataset) -> dict[str, Dataset]:
    """The atlases of dataset.toml, each with its own keys."""
    every = {dataset.atlas: dataset}
    for name, further in dataset.atlases.items():
        given = {key: value for key, value in further.model_dump().items() if value is not None}
        every[name] = dataset.model_copy(update={"rois": None, **given, "atlas": name})
    return every


def _chosen(path: Path, atlas: Atlases, known: Sequence[str]) -> tuple[str, ...]:
    """Names of the requested atlases, or of all that dataset.toml names."""
    names = requested(atlas, known) or tuple(known)
    unknown = next((name for name in names if name not in known), None)
    if unknown is not None:
        advice = f"it has {', '.join(known)}" if known[0] else 'name the one of the files there: atlas = "..."'
        raise InputError(f"{path} has no atlas {unknown}; {advice}.")
    return names


def _all_unlisted(path: Path, sources: Sequence[_Source], others: Sequence[_Source]) -> list[tuple[str, Path]]:
    """Series files of subjects that are not listed, in any of the atlases that are read; `others` are not read.

    Atlases with a pattern come first: without one, every file in the folders of the series could be one of them.
    """
    if not others and len(sources) == 1:
        return _unlisted(path, sources[0].dataset, sources[0].taken)
    taken = {file for each in (*sources, *others) for file in each.taken}
    unlisted: dict[str, Path] = {}
    for each in sorted((*sources, *others), key=lambda one: one.dataset.pattern is None):
        for subject, file in _unlisted(path, each.dataset, taken):
            taken.add(file)
            if each in sources:
                unlisted.setdefault(subject, file)
    return sorted(unlisted.items())


class _Naming:
    """Names of `rois` or of AAL for files whose columns are named otherwise: by the position in their usual order.

    Without such names, columns whose own names are repeated are numbered in the same way, and columns that have only numbers
    get the names of the atlas if it is included with as many ROIs.
    """

    def __init__(self, path: Path, names: Rois | None, atlas: str) -> None:
        self.path = path
        self.names = names
        self.atlas = atlas
        self.repeated: set[Rois] = set()
        self.notes: list[str] = []

    def __call__(self, orders: Counter[Rois]) -> Mapping[Rois, Rois]:
        numbers = numbered_rois(len(next(iter(orders), ())))
        rois = self.names or numbers
        names = {order: self._by_number(numbers) for order in orders if set(order) == set(numbers)}
        foreign = Counter({one: n for one, n in orders.items() if self._is_foreign(one) and one not in names})
        if foreign:
            usual = self._usual(foreign)
            names |= {order: dict(zip(usual, rois, strict=False)) for order in foreign if set(order) == set(usual)}
            self.notes.append(
                f"ROIs named by position: column {usual[0]} of the files is {rois[0]}, column {usual[-1]} is {rois[-1]}"
            )
        return {order: tuple(name.get(column, column) for column in order) for order, name in names.items()}

    def _by_number(self, numbers: Rois) -> dict[str, str]:
        names = self.names or names_by_position(self.atlas, len(numbers))
        known = regions(self.atlas)
        if names is None and known is not None:
            counts = f"the included atlas {self.atlas} has {len(known)} ROIs, the files have {len(numbers)} columns"
            self.notes.append(f"ROIs without names: {counts}")
        return dict(zip(numbers, names or numbers, strict=False))

    def _is_foreign(self, order: Rois) -> bool:
        return set(order) != set(self.names) if self.names is not None else order in self.repeated

    def _usual(self, foreign: Counter[Rois]) -> Rois:
        """The order of most files, which must be more than half of those with the same columns."""
        usual, count = foreign.most_common(1)[0]
        same = [order for order in foreign if set(order) == set(usual)]
        if len(same) > 1 and 2 * count <= sum(foreign[order] for order in same):
            problem = "are in several orders, none of which most files have, and are not named as its ROIs"
            raise InputError(
                f"{self.path}: the columns of the series files ({usual[0]} ...) {problem}; "
                "give the ROIs the names of the columns, in a table: rois = ..."
            )
        return usual


def _dataset(path: Path, join_runs: bool) -> Dataset:
    dataset = _parsed(path) if path.exists() else Dataset()
    dataset = dataset.model_copy(update={"join_runs": dataset.join_runs or join_runs})
    for key, pattern in _patterns(dataset).items():
        if "{run}" in pattern and not dataset.join_runs:
            raise InputError(f"{path}, key {key}: {{run}} needs join_runs = true, which joins the runs of a subject.")
    return dataset


def _with_atlas(dataset: Dataset, atlas: Atlases) -> Dataset:
    """The dataset with the name of an included atlas that was requested, if dataset.toml names none."""
    names = requested(atlas, ())
    if dataset.atlas or dataset.atlases or len(names) != 1 or included(names[0]) is None:
        return dataset
    return dataset.model_copy(update={"atlas": names[0]})


def _patterns(dataset: Dataset) -> dict[str, str]:
    """Patterns of all atlases by their key in dataset.toml."""
    patterns = {"pattern": dataset.pattern} | {
        f"atlases.{name}.pattern": each.pattern for name, each in dataset.atlases.items()
    }
    return {key: pattern for key, pattern in patterns.items() if pattern}


def _check_pattern(path: Path, key: str, pattern: str) -> None:
    if "{subject}" not in pattern:
        raise InputError(f"{path}, key {key}: {pattern!r} does not contain {{subject}}.")
    if max(len(os.fsencode(part)) for part in Path(pattern).parts) > LONGEST_NAME:
        raise InputError(f"{path}, key {key}: a file or folder in it has a name of more than {LONGEST_NAME} characters.")
    if Path(pattern).is_absolute():
        raise InputError(f"{path}, key {key}: {pattern!r} is absolute; write it relative to {path.parent}.")


def _check_atlases(path: Path, dataset: Dataset) -> None:
    for name, each in dataset.atlases.items():
        if not dataset.atlas:
            raise InputError(f'{path}, key atlases.{name}: the first atlas needs a name, too: atlas = "...".')
        if name == dataset.atlas or not name.strip():
            raise InputError(f"{path}, key atlases.{name}: the name of a further atlas is not that of the first, nor empty.")
        if each.pattern is None and each.variable is None:
            raise InputError(f"{path}, key atlases.{name}: give the pattern of its files, or their variable.")


def _parsed(path: Path) -> Dataset:
    try:
        dataset = Dataset.model_validate(tomllib.loads(read_bytes(path, LARGEST_TABLE).decode("utf-8")))
    except RecursionError:
        raise InputError(f"{path} is not valid TOML (it is nested too deeply).") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is not valid TOML ({one_line(error)}).") from None
    except ValidationError as error:
        first = max(error.errors(), key=lambda one: len(one["loc"]))  # for a union of types, the deepest error
        key = ".".join(str(part) for part in first["loc"] if not UNION_PART.fullmatch(str(part)))[:100]
        keys = FurtherAtlas.model_fields if first["loc"][0] == "atlases" else Dataset.model_fields
        known = f"; known keys: {', '.join(keys)}" if first["type"] == "extra_forbidden" else ""
        raise InputError(f"{path}, key {key}: {first['msg'][0].lower()}{first['msg'][1:]}{known}.") from None
    unknown = set(dataset.columns) - set(ALIASES)
    if unknown:
        raise InputError(f"{path}, key columns.{min(unknown)[:100]}: not one of {', '.join(ALIASES)}.")
    need_distinct(list(map(str, dataset.labels.patient)), list(map(str, dataset.labels.control)), f"{path}, key labels")
    for pattern_key, pattern in _patterns(dataset).items():
        _check_pattern(path, pattern_key, pattern)
    _check_atlases(path, dataset)
    by_site = dataset.tr.items() if isinstance(dataset.tr, dict) else [("", dataset.tr or 0.0)]
    for site, seconds in by_site:
        need_seconds(seconds, f"{path}, key tr{site and '.'}{site}")
    return dataset


def _check_inputs(people: Participants, dataset: Dataset, path: Path) -> None:
    """Refuse inputs that reveal the diagnosis, judged by the name of their column in the table."""
    for name in people.inputs:
        column = dataset.columns.get(name, name)
        if is_proxy(column) and not dataset.allow_proxies:
            raise InputError(
                f"{path}: input {column} reveals the diagnosis, so a model could read the label from it; "
                "leave it out, or keep it with allow_proxies = true."
            )


def _candidates(path: Path, dataset: Dataset, subject: str, site: str) -> list[Path]:
    if dataset.pattern:
        return [path / dataset.pattern.replace("{subject}", subject).replace("{site}", site)]
    return [path / part / f"{subject}{suffix}" for part in PARTS for suffix in SUFFIXES]


def _is_file(file: Path) -> bool:
    try:
        return file.is_file()
    except OSError:  # a subject whose id is too long for a file name has no file
        return False


def _series_files(path: Path, dataset: Dataset, subject: str, site: str) -> list[Path]:
    """The series file of a subject, or its runs in the order of their names; none: the subject has no series."""
    present = [file for file in _candidates(path, dataset, subject, site) if _is_file(file)]
    if len(present) > 1:
        raise InputError(f"{present[1]}: subject {subject} has a second series file, {present[0].name}.")
    if not dataset.join_runs:
        return present
    patterns = (
        [dataset.pattern] if dataset.pattern else [f"{part}{{subject}}_run-{{run}}{end}" for part in PARTS for end in SUFFIXES]
    )
    runs = set(present)
    for one in patterns:
        full = one.replace("{subject}", subject).replace("{site}", site)
        if Path(full).is_absolute():  # a subject that is a path
            continue
        name = re.compile(re.escape(full).replace(r"\{run\}", RUN))
        files = path.glob(_wild(full))
        runs |= {file for file in files if name.fullmatch(file.relative_to(path).as_posix()) and file.is_file()}
    return sorted(runs, key=lambda file: natural_key(file.as_posix()))


def _expected(path: Path, dataset: Dataset, subject: str, site: str) -> str:
    files = _candidates(path, dataset, subject, site)
    return f" {files[0]}" if dataset.pattern else f" in {path} (expected {subject}{{{','.join(SUFFIXES)}}})"


def _none_present(path: Path, table: Path, source: _Source) -> str:
    """The message where no listed subject has a series file: most likely the ids are written in another way."""
    subject, site = source.absent[0]
    message = f"{table}: no listed subject has a series file; the first is {subject}"
    if source.dataset.pattern:
        return f"{message}, whose file would be{_expected(path, source.dataset, subject, site)}."
    folders = [path / part for part in PARTS if (path / part).is_dir()]
    files = sorted(file for folder in folders for file in folder.iterdir() if file.suffix in SUFFIXES and file != table)
    example = f", and a file is called {files[0].name}" if files else ""
    advice = "write the ids as in the names of the files, or set pattern in dataset.toml, such as pattern = "
    return f'{message}{example}; {advice}"sub-{{subject}}_aal.csv".'


def _unlisted(path: Path, dataset: Dataset, taken: set[Path]) -> list[tuple[str, Path]]:
    """Series files of subjects that are not listed, each with the subject in its name."""
    if dataset.pattern:
        return _unlisted_by_pattern(path, dataset.pattern, taken)
    tables = {path / name for name in (dataset.participants, "dataset.toml", dataset.rois) if name}
    folders = {file.parent for file in taken}
    suffixes = {file.suffix for file in taken}
    files = sorted(file for folder in folders for file in folder.iterdir() if file.suffix in suffixes and file.is_file())
    run = rf"_run-{RUN}$" if dataset.join_runs else r"$^"
    return [
        (re.sub(run, "", file.stem), file) for file in files if file not in {*taken, *tables} and file.stem != "participants"
    ]


def _unlisted_by_pattern(path: Path, pattern: str, taken: set[Path]) -> list[tuple[str, Path]]:
    wild = _wild(pattern)
    name = re.escape(pattern).replace(r"\{subject\}", "(?P<subject>.+)", 1).replace(r"\{site\}", ".+").replace(r"\{run\}", RUN)
    name = name.replace(r"\{subject\}", "(?P=subject)")
    files = ((re.fullmatch(name, file.relative_to(path).as_posix()), file) for file in sorted(path.glob(wild)))
    return [(match["subject"], file) for match, file in files if match and file not in taken and file.is_file()]


def _wild(pattern: str) -> str:
    """The pattern with a star for each placeholder; one for several in a row, since ** means folders of any depth."""
    stars = glob.escape(pattern).replace("{subject}", "*").replace("{site}", "*").replace("{run}", "*")
    return re.sub(r"\*{2,}", "*", stars)


def _roi_names(path: Path, dataset: Dataset) -> Rois | None:
    if dataset.rois:
        table = read_text_table(path / dataset.rois, "," if dataset.rois.endswith(".csv") else "\t")
        need_columns(table, ("name",), path / dataset.rois)
        repeated = table["name"][table["name"].duplicated()]
        if len(repeated):
            raise InputError(f"{path / dataset.rois}: ROI {repeated.iloc[0]} is listed twice.")
        return tuple(table["name"])
    if included(dataset.atlas) != POSITIONAL:
        return None
    known = regions(dataset.atlas)
    return None if known is None else tuple(known["name"])


def _load(file: Path, dataset: Dataset, naming: _Naming) -> tuple[Rois, Series]:
    header, series = load_array(file, dataset.variable)
    names = naming.names
    if dataset.orientation == "roi,time":
        header, series = None, np.ascontiguousarray(series.T)
    width = series.shape[1]
    if header is not None and len(header) != width:
        raise InputError(
            f"{file}: the header names {len(header)} columns but the lines have {width}; remove the first column if it is a "
            "row index, or name every column."
        )
    if names is not None and len(names) != width:
        turned = f"; its {len(series)} rows are as many, so {TRANSPOSE}" if len(series) == len(names) else ""
        raise InputError(f"{file}: {width} ROI columns, but {dataset.rois or dataset.atlas} names {len(names)}{turned}.")
    if header is not None:
        columns = _unique(header)
        if columns == tuple(header) and not dataset.rois:
            columns = roi_names(columns, dataset.atlas)  # codes of an included atlas
        elif columns != tuple(header):
            naming.repeated.add(columns)
        return columns, series
    return names or numbered_rois(width), series


def _unique(header: list[str]) -> Rois:
    """Column names, with the number of its occurrence added to each that is repeated, so that other orders are noticed."""
    total, seen = Counter(header), Counter[str]()
    names = []
    for name in header:
        seen[name] += 1
        names.append(f"{name} ({seen[name]})" if total[name] > 1 else name)
    return tuple(names)


def _repetition_times(people: Participants, dataset: Dataset) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    if isinstance(dataset.tr, dict):
        given = np.array([dataset.tr.get(site, np.nan) for site in people.sites.tolist()])
    else:
        given = np.full(len(people.subjects), np.nan if dataset.tr is None else dataset.tr)
    return np.where(np.isnan(people.tr), given, people.tr)
