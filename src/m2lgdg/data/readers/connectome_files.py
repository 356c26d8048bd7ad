"""Where the connectomes of a folder are: its tables of subjects, and which rows of which file are whose.

Used by the reader of connectomes. Files are named by their subject or by a pattern of dataset.toml, or are stacks in the
order of a table: one for all, or one a folder, whose name is then the site; or they have BIDS names.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from m2lgdg import scans
from m2lgdg.data.atlases import bids_atlas
from m2lgdg.data.readers import bids, folder, images, matrices, runs, tables
from m2lgdg.data.readers.dataset_toml import Dataset, read_dataset
from m2lgdg.data.readers.series import Atlases, chosen, requested
from m2lgdg.findings import Exclusion, Note
from m2lgdg.storage import InputError

RELMAT, PCONN = "**/sub-*_relmat.tsv", f"**/*{images.CONNECTOME}"
SERIES_OF_BIDS = (bids.PARCELLATED, bids.DENSE, bids.NIFTI)
OWN = ("dataset.toml", "participants.tsv", "participants.csv", "participants.json", "README.txt")  # no connectomes
PROBED = 3  # files by which a folder is guessed
DEPTH = 3  # folders, the given one among them, in which files are looked for
NOT_FOR_MATRICES = ("join_runs", "header", "index_column")  # keys of dataset.toml
ADVICE = f"{folder.ADVICE}, or by --patient and --control"
NONE_IN_RELEASE = "no scan in the release"
UNNAMED = "connectomes"  # atlas of BIDS derivatives whose names have none
SITE = {"site": "name it by --site-name, or put the files and the table of each site into a folder of its own"}


class Wanted(NamedTuple):
    """The options that say which files to read."""

    path: Path
    atlas: Atlases = None
    participants: str | Path | None = None
    only: str = ""
    session: str | None = None
    site: str | None = None
    patient: str = ""
    control: str = ""

    def has(self, file: Path) -> bool:
        """Whether the name of a file, or of its folders, has the words of `only`."""
        if not self.only:
            return True
        name = file.relative_to(self.path).as_posix() if file.is_relative_to(self.path) else file.name
        return all(word in name for word in self.only.split())


class AtlasMatrices(NamedTuple):
    """The files of one atlas, each with the subjects of its matrices in their order, and the keys of the atlas."""

    atlas: str
    files: dict[Path, list[str]]
    dataset: Dataset


class Layout(NamedTuple):
    """People, files and how they were found; `complete` if everybody who is listed should have a file."""

    people: tables.Participants
    atlases: list[AtlasMatrices]
    notes: list[Note]
    complete: bool = True


def matches(path: Path) -> bool:
    """Whether a folder holds connectomes and no series."""
    if is_bids(path):
        series = any(runs.entities(file).keys() & {"atlas", "seg"} for file in path.glob(bids.TABLES))
        return not series and not any(any(path.glob(pattern)) for pattern in SERIES_OF_BIDS)
    dataset = _dataset(path / "dataset.toml")
    if dataset.values is not None or dataset.triangle is not None:  # keys that only connectomes have
        return True
    names = str(path / (dataset.rois or "."))
    files = [one for one in _array_names(path) if one != names and not folder.is_table_of_subjects(Path(one))]
    probed = files[:: max(1, len(files) // PROBED)]
    return bool(probed) and all(_is_of_connectomes(Path(one)) for one in probed)


def _dataset(toml: Path) -> Dataset:
    """What dataset.toml says; nothing, if there is none or if it is wrong, which the reader that is chosen tells."""
    try:
        return read_dataset(toml, {"join_runs": True}, ())
    except InputError:
        return Dataset()


def is_bids(path: Path) -> bool:
    """Whether a folder has connectomes with BIDS names."""
    return any(
        name.endswith(images.CONNECTOME) or (name.endswith("_relmat.tsv") and name.startswith("sub-"))
        for _, _, names in os.walk(path)
        for name in names
    )


def _is_of_connectomes(file: Path) -> bool:
    """Whether a file holds a connectome or a stack of them. Triangles as rows look like a series and are not recognised."""
    try:
        numbers = matrices.load_content(file).numbers
        if numbers.dtype.kind not in "fiu":
            return False
        one = matrices.subjects_first(file, numbers)[0] if numbers.ndim == 3 else numbers
        return one.ndim == 2 and scans.is_connectome(one)
    except InputError:
        return False


def array_files(path: Path) -> list[Path]:
    """Files that may hold connectomes, in the folder and up to two levels below, in the order of their names."""
    return [Path(one) for one in _array_names(path)]


def _array_names(path: Path) -> list[str]:
    found = []
    for place, folders, names in os.walk(path):
        level = len(Path(place).relative_to(path).parts)
        folders[:] = sorted(name for name in folders if level + 1 < DEPTH and not name.startswith("."))
        for name in names:
            if name.endswith(matrices.SUFFIXES) and name not in OWN and not name.startswith("."):
                found.append(os.path.join(place, name))
    return sorted(found)


def find(wanted: Wanted, dataset: Dataset) -> Layout:
    """People and files of a folder."""
    for key in NOT_FOR_MATRICES:
        if getattr(dataset, key) not in (None, False):
            raise InputError(f"{wanted.path / 'dataset.toml'}, key {key}: it is about series, and these are connectomes.")
    if is_bids(wanted.path) and not dataset.pattern:
        return _bids(wanted, dataset)
    patient, control = ([word.strip() for word in text.split(",") if word.strip()] for text in (wanted.patient, wanted.control))
    tables.need_distinct(patient, control, "options patient and control")
    words = {"patient": patient or dataset.labels.patient, "control": control or dataset.labels.control}
    labels = dataset.labels.model_copy(update=words)
    dataset = dataset.model_copy(update={"labels": labels, "site": wanted.site or dataset.site})
    found = _tables(wanted, dataset)
    other = {*found, wanted.path / (dataset.rois or "")}
    beside = {file for some in dataset.table_files(wanted.path).values() for file in some}  # tables, or folders of them
    files = [one for one in array_files(wanted.path) if one not in other and beside.isdisjoint((one, *one.parents))]
    files = [one for one in files if wanted.has(one) and not folder.is_table_of_subjects(one)]
    if len(found) > 1 or (found[0].parent != wanted.path and wanted.participants is None):
        return _by_folder(wanted, dataset, found, files)
    people = folder.people_of(found[0], dataset, wanted.path / "dataset.toml", advice=ADVICE, where=tables.NAMED | SITE)
    if dataset.patterns():
        return _by_pattern(wanted, dataset, people)
    owned = _by_name(files, people.subjects) or _stacks(wanted, people, files)
    return Layout(people, [AtlasMatrices(dataset.atlas, owned, dataset)], [])


def _tables(wanted: Wanted, dataset: Dataset) -> list[Path]:
    """The table of subjects of the folder, or those of its folders; several in one folder are an error."""
    path = wanted.path
    if wanted.participants:
        return [Path(wanted.participants)]
    usual = [path / dataset.participants, path / "participants.csv"]
    given = [file for file in usual if file.exists()][:1]
    if given or dataset.participants != "participants.tsv":
        return given or usual[:1]  # a missing one is an error that names it
    found = [file for file in array_files(path) if folder.is_table_of_subjects(file)]
    for level in range(DEPTH):
        here = [file for file in found if len(file.relative_to(path).parts) == level + 1]
        for one, other in pairwise(here):
            if one.parent == other.parent:
                places = f"{one.relative_to(path)} and {other.relative_to(path)}"
                raise InputError(
                    f"{path} has two tables of subjects in one folder, {places}; name one with --participants FILE."
                )
        if here:
            return here
    raise InputError(
        f"{path} has no table of subjects: participants.tsv, or another .csv or .tsv file with a column of ids (such as "
        f"{', '.join(tables.ALIASES['subject'][:3])}) and one of labels, sites or ages; name it with --participants FILE."
    )


# One table


def _by_pattern(wanted: Wanted, dataset: Dataset, people: tables.Participants) -> Layout:
    every = dataset.by_atlas()
    names = folder.chosen_atlases(wanted.path / "dataset.toml", wanted.atlas, tuple(every))
    sources = {name: folder.AtlasFolder(wanted.path, every[name], people) for name in names}
    if not sources[names[0]].runs:
        site = str(people.sites[0])
        raise InputError(folder.none_present(people.table, sources[names[0]], people.subjects[0], site))
    found = {name: {run: [subject] for subject, files in each.runs.items() for run in files} for name, each in sources.items()}
    for subject, file in folder.unlisted_files({name: sources[name] for name in names}, names).items():
        found[names[0]] |= {file[0]: [subject]}
    return Layout(people, [AtlasMatrices(name, found[name], every[name]) for name in names], [])


def _by_name(files: Sequence[Path], subjects: Sequence[str]) -> dict[Path, list[str]]:
    """Files named by their subject, or by it with the same words around it; nothing if no file is."""
    listed = set(subjects)
    around = ("", "") if any(file.stem in listed for file in files) else folder.words_around(files, listed)
    if around is None:
        return {}
    before, after = around
    found: dict[str, Path] = {}
    for file in files:
        if file.stem.startswith(before) and file.stem.endswith(after) and len(file.stem) > len(before) + len(after):
            subject = file.stem[len(before) : len(file.stem) - len(after)]
            if subject in found:
                raise InputError(f"{file}: subject {subject} has a second file, {found[subject]}; select one with --only WORD.")
            found[subject] = file
    named = set(found.values())
    rest = {file.stem: file for file in files if file not in named}
    before, after = folder.words_around(list(rest.values()), listed) or ("", "")
    again = [subject for subject in found if subject in listed and before + subject + after in rest]
    if len(again) > 1:  # a single file may contain a short id by chance
        file = rest[before + again[0] + after]
        raise InputError(f"{file}: subject {again[0]} has a second file, {found[again[0]]}; select one with --only WORD.")
    return {file: [subject] for subject, file in found.items()}


def _stacks(wanted: Wanted, people: tables.Participants, files: Sequence[Path]) -> dict[Path, list[str]]:
    """The stack of all subjects, or that of each site in the folder of its name."""
    if not files:
        raise InputError(f"{wanted.path} has no file of connectomes ({', '.join(matrices.SUFFIXES)}) beside {people.table}.")
    if len(files) == 1:
        return {files[0]: list(people.subjects)}
    by_site: dict[str, list[str]] = {}
    for subject, site in zip(people.subjects, people.sites.tolist(), strict=True):
        by_site.setdefault(site, []).append(subject)
    places: dict[str, Path] = {}
    for file in files:
        other = places.setdefault(file.parent.name, file)
        if other != file or file.parent.name not in by_site:
            raise InputError(_two_stacks(people.table, *files[:2]))
    return {file: by_site[site] for site, file in places.items()}


def _two_stacks(table: Path, one: Path, other: Path) -> str:
    return (
        f"{table}: no file is named by its subjects, and there are two that may be a stack of matrices in its order, "
        f"{one.name} and {other.name}; select one with --only {one.stem}."
    )


# One table a folder


def _by_folder(wanted: Wanted, dataset: Dataset, found: Sequence[Path], files: Sequence[Path]) -> Layout:
    """People of all tables, and the files in the folder of each. A folder without files is one that was not released."""
    beside: dict[Path, list[Path]] = {table: [] for table in found}
    by_place = {table.parent: table for table in found}
    for file in files:
        table = next((by_place[place] for place in file.parents if place in by_place), None)
        if table is not None:
            beside[table].append(file)
    if not any(beside.values()):
        raise InputError(f"{wanted.path} has no file of connectomes ({', '.join(matrices.SUFFIXES)}) beside {found[0]}.")
    rows = {table: tables.read_text_table(table) for table in found}
    siteless = [table for table, each in rows.items() if not (dataset.site or _column(each, dataset, "site"))]
    rows |= {table: rows[table].assign(site=table.parent.name) for table in siteless}
    every: dict[str, Path] = {}
    owned: dict[Path, list[str]] = {}
    left_out: list[Exclusion] = []
    for table, each in rows.items():
        part = folder.people_of(table, dataset, wanted.path / "dataset.toml", rows=each, advice=ADVICE)
        for subject in part.subjects:
            if subject in every:
                raise InputError(f"{table}: subject {subject} is also in {every[subject]}; an id is that of one subject.")
            every[subject] = table
        if beside[table]:
            owned |= _by_name(beside[table], part.subjects) or _only_stack(table, beside[table], part.subjects)
        else:
            sites = zip(part.subjects, part.sites.tolist(), strict=True)
            left_out += [Exclusion(subject, site, NONE_IN_RELEASE) for subject, site in sites]
    present = _together([each for table, each in rows.items() if beside[table]], dataset)
    people = folder.people_of(wanted.path, dataset, wanted.path / "dataset.toml", rows=present, advice=ADVICE)
    notes: list[Note] = []
    if siteless:
        people = people._replace(notes=tuple(note for note in people.notes if note != "site from column site"))
        notes.append(f"site from the name of the folder of {siteless[0].name}")
    return Layout(people._replace(excluded=left_out), [AtlasMatrices(dataset.atlas, owned, dataset)], notes)


def _only_stack(table: Path, files: Sequence[Path], subjects: Sequence[str]) -> dict[Path, list[str]]:
    if len(files) > 1:
        raise InputError(_two_stacks(table, *files[:2]))
    return {files[0]: list(subjects)}


def _column(rows: pd.DataFrame, dataset: Dataset, role: str) -> str | None:
    return dataset.columns.get(role) or tables.find_column(rows, role)


def _together(parts: Sequence[pd.DataFrame], dataset: Dataset) -> pd.DataFrame:
    """The rows of several tables, in which the column of a role has the name that it has in the first."""

    def roles(rows: pd.DataFrame) -> dict[str, str]:
        return {role: name for role in tables.ALIASES if (name := _column(rows, dataset, role))}

    first = roles(parts[0])
    renamed = [part.rename(columns={name: first.get(role, name) for role, name in roles(part).items()}) for part in parts]
    return pd.concat(renamed, ignore_index=True).fillna("")


# BIDS derivatives


def _bids(wanted: Wanted, dataset: Dataset) -> Layout:
    """Connectomes of the requested atlases; XCP-D writes a table next to each CIFTI-2 file, of which the table is read."""
    path = wanted.path
    people = bids.people_of(path, wanted.participants, wanted.site, wanted.patient, wanted.control)
    groups: dict[str, dict[tuple[str | None, ...], list[Path]]] = {}
    for file in (*sorted(path.glob(RELMAT)), *sorted(path.glob(PCONN))):
        entities = runs.entities(file)
        if runs.has(file, wanted.only):
            scan = groups.setdefault(bids_atlas.name_of(entities) or UNNAMED, {})
            same = scan.setdefault(runs.scan_of(file), [])
            if file.suffix == ".tsv" or not any(other.suffix == ".tsv" for other in same):
                same.append(file)
    if not groups:
        raise InputError(f"{path} has no connectome with the requested entities ({wanted.only}).")
    given = requested(wanted.atlas, groups)
    if list(groups) == [UNNAMED] and len(given) == 1:
        groups = {given[0]: groups[UNNAMED]}
    ids = {runs.label(one): one for one in people.subjects}
    atlases: list[AtlasMatrices] = []
    main: runs.Runs = {}
    for name in chosen(path, wanted.atlas, groups):
        files = [file for same in groups[name].values() for file in same]
        by_subject = runs.by_subject(files, path, wanted.session, join_runs=False, joinable=False)
        main = main or by_subject
        for subject, (file,) in by_subject.items():
            if subject in main and runs.scan_of(main[subject][0]) != runs.scan_of(file):
                raise InputError(f"{file}: subject sub-{subject}: it is not of the same run as {main[subject][0].name}.")
        owned = {file: [ids.get(subject, f"sub-{subject}")] for subject, (file,) in by_subject.items()}
        alone = "" if list(groups) == [UNNAMED] else name
        atlases.append(AtlasMatrices(alone, owned, dataset.model_copy(update={"atlas": alone})))
    every = (file for same in groups[chosen(path, wanted.atlas, groups)[0]].values() for file in same)
    notes = list(runs.session_note(every, wanted.session, join_runs=False, joinable=False))
    return Layout(people, atlases, notes, complete=False)
