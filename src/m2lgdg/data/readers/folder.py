"""Reader of a lab's folder: participants.tsv, one array file per subject, and an optional dataset.toml.

Called by `m2lgdg.read`. Without dataset.toml, series are expected as <subject>.npy/.csv/.tsv/.mat/.1D/.txt, and runs to be
joined as <subject>_run-<number>.npy (...).
"""

from __future__ import annotations

import bisect
import glob
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from m2lgdg.cohort import Cohort, is_proxy, natural_key
from m2lgdg.data.atlases import included, names_by_position, regions, roi_names
from m2lgdg.data.readers import tables
from m2lgdg.data.readers.arrays import Rois, Said, Series, cells_of, load_array, numbered_rois
from m2lgdg.data.readers.dataset_toml import Dataset, read_dataset
from m2lgdg.data.readers.series import (
    JOINED,
    TRANSPOSE,
    Atlases,
    AtlasFiles,
    OnBad,
    Progress,
    Scan,
    joined,
    read_series,
    requested,
)
from m2lgdg.data.readers.structure import with_files
from m2lgdg.storage import InputError

RUN = "[A-Za-z0-9]+"  # the name of a run
HEADER_BYTES = 1 << 16  # in which the header of a table lies
SOME = 50  # files by whose names the words around the id are told
FOLDERS = ("", "series/", "timeseries/")
SUFFIXES = (".npy", ".csv", ".tsv", ".mat", ".1D", ".txt")
HEADER = {"yes": True, "no": False, True: True, False: False}
POSITIONAL = "aal"  # its files have one order: columns of any names are named by position, and another number is refused
ADVICE = 'give the words of each class in dataset.toml: [labels] patient = ["..."], control = ["..."]'


def matches(path: Path) -> bool:
    """Whether a folder has this layout."""
    return (path / "dataset.toml").is_file() or table_of(path, Dataset()).is_file()


def table_of(path: Path, dataset: Dataset) -> Path:
    """The table of subjects: that of dataset.toml, or participants.tsv, or the only other one with ids in the folder."""
    given = path / dataset.participants
    if given.exists() or dataset.participants != Dataset().participants:
        return given
    found = [file for file in sorted(path.iterdir()) if is_table_of_subjects(file)]
    return found[0] if len(found) == 1 else given


def is_table_of_subjects(file: Path) -> bool:
    """Whether a file is a table of subjects: a header with a column of ids, and with one of another role."""
    if file.suffix not in (".csv", ".tsv"):
        return False
    try:
        with file.open("rb") as opened:
            first = opened.readline(HEADER_BYTES)
    except OSError:
        return False
    header = pd.DataFrame(columns=cells_of(first, b"," if file.suffix == ".csv" else b"\t"))
    roles = [role for role in tables.ALIASES if tables.find_column(header, role)]
    return "subject" in roles and len(roles) > 1


def read(
    path: Path,
    *,
    atlas: Atlases = None,
    header: str | bool | None = None,
    index_column: str | None = None,
    join_runs: bool = False,
    on_bad: OnBad = "stop",
    progress: Progress | None = None,
) -> Cohort:
    """Read the subjects of participants.tsv with their series.

    `atlas` selects some of the atlases that dataset.toml names (default: all); if it names none, an included atlas, which then
    names the ROIs. `join_runs` (also a key of dataset.toml) joins the runs of a subject in the order of their names, each
    z-scored per ROI. `header` (yes or no) says whether the first row of each file names its columns, `index_column` (drop or
    keep) what becomes of a column that counts volumes; both are keys of dataset.toml, too.
    """
    options = {"join_runs": join_runs or None, "header": _choice("header", header, HEADER)}
    options["index_column"] = _choice("index_column", index_column, {"drop": "drop", "keep": "keep"})
    dataset = read_dataset(path / "dataset.toml", options, requested(atlas, ()))
    for key in ("values", "triangle"):
        if getattr(dataset, key) is not None:
            raise InputError(f"{path / 'dataset.toml'}, key {key}: it is about connectomes; read them with --kind connectomes.")
    people = people_of(table_of(path, dataset), dataset, path / "dataset.toml")
    every = {name: AtlasFolder(path, each, people) for name, each in dataset.by_atlas().items()}
    names = chosen_atlases(path / "dataset.toml", atlas, tuple(every))
    first = every[names[0]]
    absent = [each for each in zip(people.subjects, people.sites.tolist(), strict=True) if each[0] not in first.runs]
    if absent and not first.runs:
        raise InputError(none_present(people.table, first, *absent[0]))
    if absent and on_bad == "stop":
        raise InputError(f"{people.table}: subject {absent[0][0]} has no series file{first.expected(*absent[0])}.")
    unlisted = unlisted_files(every, names)
    sources = [
        AtlasFiles(name, every[name].runs | (unlisted if name == names[0] else {}), every[name].load, every[name].rename)
        for name in names
    ]
    joining = (JOINED,) if dataset.join_runs else ()
    cohort = read_series(
        people,
        sources,
        name=dataset.name or path.resolve().name,
        on_bad=on_bad,
        progress=progress,
        complete=lambda present: present._replace(
            notes=(*present.notes, *(note for name in names for note in every[name].notes), *joining)
        ),
        allow_proxies=dataset.allow_proxies,
    )
    return with_files(cohort, dataset.table_files(path))


def _choice(name: str, given: object, known: Mapping[Any, Any]) -> Any:
    if given is not None and given not in known:
        raise InputError(f"option {name}: {given!r} is not one of {', '.join(key for key in known if isinstance(key, str))}.")
    return None if given is None else known[given]


def people_of(
    table: Path,
    dataset: Dataset,
    toml: Path,
    *,
    rows: pd.DataFrame | None = None,
    advice: str = ADVICE,
    where: Mapping[str, str] = tables.NAMED,
) -> tables.Participants:
    """People of a table by the keys of dataset.toml; `rows` is its content, if it has been read."""
    people = tables.read_participants(
        table,
        columns=dataset.columns,
        patient=[str(word) for word in dataset.labels.patient],
        control=[str(word) for word in dataset.labels.control],
        missing=[str(word) for word in dataset.missing],
        inputs=dataset.inputs,
        site=dataset.site,
        advice=advice,
        where=where,
        rows=rows,
    )
    for name in people.inputs:
        column = dataset.columns.get(name, name)
        if is_proxy(column) and not dataset.allow_proxies:
            raise InputError(
                f"{toml}: input {column} reveals the diagnosis, so a model could read the label from it; "
                "leave it out, or keep it with allow_proxies = true."
            )
    by_site = dataset.tr if isinstance(dataset.tr, dict) else dict.fromkeys(people.sites.tolist(), dataset.tr)
    given = np.array([by_site.get(site) for site in people.sites.tolist()], dtype=np.float64)  # None becomes NaN
    return people._replace(tr=np.where(np.isnan(people.tr), given, people.tr))


def chosen_atlases(path: Path, atlas: Atlases, known: Sequence[str]) -> tuple[str, ...]:
    """The requested ones of the atlases of dataset.toml, or all of them."""
    names = requested(atlas, known) or tuple(known)
    unknown = next((name for name in names if name not in known), None)
    if unknown is not None:
        advice = f"it has {', '.join(known)}" if known[0] else 'name the one of the files there: atlas = "..."'
        raise InputError(f"{path} has no atlas {unknown}; {advice}.")
    return names


def unlisted_files(every: Mapping[str, AtlasFolder], names: Sequence[str]) -> dict[str, list[Path]]:
    """Series files of subjects that are not listed, in any of the atlases that are read."""
    taken = {file for each in every.values() for runs in each.runs.values() for file in runs}
    unlisted: dict[str, list[Path]] = {}
    # Atlases with a pattern first: without one, every file in the folders of the series could be one of them.
    for name, each in sorted(every.items(), key=lambda one: one[1].dataset.pattern is None):
        for subject, file in each.unlisted(taken):
            taken.add(file)
            if name in names:
                unlisted.setdefault(subject, [file])
    return unlisted


class AtlasFolder:
    """The series files of one atlas, and how they are read; `dataset` has the keys of that atlas."""

    def __init__(self, path: Path, dataset: Dataset, people: tables.Participants) -> None:
        self.path, self.dataset = path, dataset
        self.repeated: set[Rois] = set()  # headers in which names occur several times
        self.notes: list[str] = []
        self.patterns = [f"{folder}{{subject}}{suffix}" for folder in FOLDERS for suffix in SUFFIXES]
        if dataset.join_runs:
            self.patterns += [f"{folder}{{subject}}_run-{{run}}{suffix}" for folder in FOLDERS for suffix in SUFFIXES]
        if dataset.pattern:
            self.patterns = [Path(dataset.pattern).as_posix()]
        others = {path / name for name in ("participants.tsv", "participants.csv", dataset.rois) if name} | {people.table}
        others |= {file for some in dataset.table_files(path).values() for file in some}
        self.runs = self._find(people, others)
        if not self.runs and not dataset.pattern and not dataset.join_runs:
            self._guess(people, others)

    def _find(self, people: tables.Participants, others: set[Path]) -> dict[str, list[Path]]:
        """The series of each listed subject who has one, by the patterns; files of tables are none."""
        files = {file for one in self.patterns for file in self.path.glob(_wild(one)) if file not in others and file.is_file()}
        self.files = {file.relative_to(self.path).as_posix(): file for file in sorted(files)}
        self.names_of_files = sorted(self.files)
        listed = zip(people.subjects, people.sites.tolist(), strict=True)
        runs = {subject: self._files_of(subject, site) for subject, site in listed}
        return {subject: found for subject, found in runs.items() if found}

    def _guess(self, people: tables.Participants, others: set[Path]) -> None:
        """The pattern by which every file of series in the folder, or in one below, has the name of a listed subject."""
        every = [file for where in ("*", "*/*") for file in sorted(self.path.glob(where)) if file not in others]
        every = [file for file in every if file.suffix in SUFFIXES and file.is_file()]
        around = words_around(every, set(people.subjects))
        if around is None or around[0][-1:].isalnum() or around[1][:1].isalnum():  # 1 in p1 or 1a may be part of an id
            return
        alike = all(file.stem.startswith(around[0]) and file.stem.endswith(around[1]) for file in every)
        if not alike or len({(file.parent, file.suffix) for file in every}) > 1:
            return
        place = every[0].parent.relative_to(self.path)
        pattern = (place / f"{around[0]}{{subject}}{around[1]}{every[0].suffix}").as_posix()
        self.dataset = self.dataset.model_copy(update={"pattern": pattern})
        self.patterns = [pattern]
        self.runs = self._find(people, others)
        self.notes.append(f"series are named {pattern}")

    def _files_of(self, subject: str, site: str) -> list[Path]:
        if ".." in (*Path(subject).parts, *Path(site).parts):
            raise InputError(f"{self.path}: subject {subject} of site {site} is no name of a file in this folder.")
        names = [one.replace("{subject}", subject).replace("{site}", site) for one in self.patterns]
        found = [self.files[name] for name in names if name in self.files]
        if len(found) > 1:
            raise InputError(f"{found[1]}: subject {subject} has a second series file, {found[0].name}.")
        for name in names:
            start, placeholder, _ = name.partition("{run}")
            if placeholder:
                run = re.compile(re.escape(name).replace(r"\{run\}", RUN))
                after = bisect.bisect_left(self.names_of_files, start)
                before = bisect.bisect_left(self.names_of_files, f"{start}\U0010ffff")
                found += [self.files[one] for one in self.names_of_files[after:before] if run.fullmatch(one)]
        return sorted(set(found), key=lambda file: natural_key(file.as_posix()))

    def unlisted(self, taken: set[Path]) -> list[tuple[str, Path]]:
        """Series files that nobody has taken, each with the subject in its name."""
        free = {name: file for name, file in self.files.items() if file not in taken}
        if not self.dataset.pattern:
            folders, suffixes = {file.parent for file in taken}, {file.suffix for file in taken}
            free = {name: file for name, file in free.items() if file.parent in folders and file.suffix in suffixes}
            run = rf"_run-{RUN}$" if self.dataset.join_runs else r"$^"
            return [(re.sub(run, "", file.stem), file) for file in free.values()]
        name = re.escape(self.patterns[0]).replace(r"\{subject\}", "(?P<subject>.+)", 1).replace(r"\{subject\}", "(?P=subject)")
        name = name.replace(r"\{site\}", ".+").replace(r"\{run\}", RUN)
        found = ((re.fullmatch(name, one), file) for one, file in free.items())
        return [(match["subject"], file) for match, file in found if match]

    def expected(self, subject: str, site: str) -> str:
        """Where the series of a subject is looked for."""
        if not self.dataset.pattern:
            return f" in {self.path} (expected {subject}{{{','.join(SUFFIXES)}}})"
        return f" {self.path / self.patterns[0].replace('{subject}', subject).replace('{site}', site)}"

    @cached_property
    def names(self) -> Rois | None:
        """Names of the ROIs by position: those of the table `rois`, or of AAL."""
        if not self.dataset.rois:
            known = regions(self.dataset.atlas) if included(self.dataset.atlas) == POSITIONAL else None
            return None if known is None else tuple(known["name"])
        path = self.path / self.dataset.rois
        table = tables.read_text_table(path)
        tables.need_columns(table, ("name",), path)
        repeated = table["name"][table["name"].duplicated()]
        if len(repeated):
            raise InputError(f"{path}: ROI {repeated.iloc[0]} is listed twice.")
        return tuple(table["name"])

    def load(self, scan: Scan) -> tuple[Rois, Series]:
        """Column names and series of a scan."""
        return joined(scan.runs, self._load) if self.dataset.join_runs else self._load(scan.runs[0])

    def _load(self, file: Path) -> tuple[Rois, Series]:
        said = Said(self.dataset.header, self.dataset.index_column, self.dataset.orientation == "roi,time")
        header, series = load_array(file, self.dataset.variable, said)
        rows, width = series.shape
        if header is not None and len(header) != width:
            raise InputError(
                f"{file}: the header names {len(header)} columns but the lines have {width}; remove the first column if it "
                "is a row index, or name every column."
            )
        if self.names is not None and len(self.names) != width:
            turned = f"; its {rows} rows are as many, so {TRANSPOSE}" if rows == len(self.names) else ""
            by = self.dataset.rois or self.dataset.atlas
            raise InputError(f"{file}: {width} ROI columns, but {by} names {len(self.names)}{turned}.")
        if header is None:
            return self.names or numbered_rois(width), series
        columns = _unique(header)
        if columns != tuple(header):
            self.repeated.add(columns)
        elif not self.dataset.rois:
            columns = roi_names(columns, self.dataset.atlas)  # codes of an included atlas
        return columns, series

    def rename(self, orders: Counter[Rois]) -> Mapping[Rois, Rois]:
        """Names of the ROIs for files whose columns are named otherwise, or repeatedly, or only by numbers."""
        numbers = numbered_rois(len(next(iter(orders), ())))
        rois = self.names or numbers
        names = {order: self._by_number(numbers) for order in orders if set(order) == set(numbers)}
        ours = None if self.names is None else set(self.names)
        foreign = {one: n for one, n in orders.items() if one not in names}
        foreign = {one: n for one, n in foreign.items() if (one in self.repeated if ours is None else set(one) != ours)}
        if foreign:
            usual = self._usual(Counter(foreign))
            names |= {order: dict(zip(usual, rois, strict=False)) for order in foreign if set(order) == set(usual)}
            self.notes.append(
                f"ROIs named by position: column {usual[0]} of the files is {rois[0]}, column {usual[-1]} is {rois[-1]}"
            )
        return {order: tuple(name.get(column, column) for column in order) for order, name in names.items()}

    def _by_number(self, numbers: Rois) -> dict[str, str]:
        atlas = self.dataset.atlas
        names = self.names or names_by_position(atlas, len(numbers))
        known = regions(atlas)
        if names is None and known is not None:
            counts = f"the included atlas {atlas} has {len(known)} ROIs, the files have {len(numbers)} columns"
            self.notes.append(f"ROIs without names: {counts}")
        return dict(zip(numbers, names or numbers, strict=False))

    def _usual(self, foreign: Counter[Rois]) -> Rois:
        usual, count = foreign.most_common(1)[0]
        same = [order for order in foreign if set(order) == set(usual)]
        if len(same) > 1 and 2 * count <= sum(foreign[order] for order in same):
            problem = "are in several orders, none of which most files have, and are not named as its ROIs"
            raise InputError(
                f"{self.path / 'dataset.toml'}: the columns of the series files ({usual[0]} ...) {problem}; "
                "give the ROIs the names of the columns, in a table: rois = ..."
            )
        return usual


def _unique(header: list[str]) -> Rois:
    """Column names, with the number of its occurrence added to each that is repeated, so that other orders are noticed."""
    total = Counter(header)
    return tuple(f"{name} ({header[: i + 1].count(name)})" if total[name] > 1 else name for i, name in enumerate(header))


def _wild(pattern: str) -> str:
    """The pattern with a star for each placeholder; one for several in a row, since ** means folders of any depth."""
    stars = glob.escape(pattern).replace("{subject}", "*").replace("{site}", "*").replace("{run}", "*")
    return re.sub(r"\*{2,}", "*", stars)


def words_around(files: Sequence[Path], listed: set[str]) -> tuple[str, str] | None:
    """What stands before and after the id in the names of most files, such as ROICorrelation_ and _aal."""
    some = [file.stem for file in files[:: max(1, len(files) // SOME)]]
    fitting: Counter[tuple[str, str]] = Counter()
    for stem in some:
        inside = ((start, end) for end in range(1, len(stem) + 1) for start in range(end) if stem[start:end] in listed)
        fitting.update((stem[:start], stem[end:]) for start, end in inside)
    # Of words around a part of the id, 1 in 10 or 01 in 001, there are as many: those around the longest id count.
    best = max(fitting.items(), key=lambda one: (one[1], -len(one[0][0]) - len(one[0][1])), default=None)
    return None if best is None else best[0]


def none_present(table: Path, source: AtlasFolder, subject: str, site: str) -> str:
    """The message where no listed subject has a series file: most likely the ids are written in another way."""
    message = f"{table}: no listed subject has a series file; the first is {subject}"
    if source.dataset.pattern:
        return f"{message}, whose file would be{source.expected(subject, site)}."
    example = f", and a file is called {next(iter(source.files.values())).name}" if source.files else ""
    advice = "write the ids as in the names of the files, or set pattern in dataset.toml, such as pattern = "
    return f'{message}{example}; {advice}"sub-{{subject}}_aal.csv".'
