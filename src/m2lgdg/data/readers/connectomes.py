"""Reader of connectomes: one file a subject, one stack a site or for all beside a table, or BIDS derivatives.

Called by `m2lgdg.read`. `connectome_files.py` finds the tables and files, `matrices.py` reads a file; what the values are is
decided here, on all of them, and noted.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from m2lgdg import scans
from m2lgdg.cohort import Cohort, Parcellation
from m2lgdg.data.atlases import included, names_by_position, regions, roi_names
from m2lgdg.data.readers import connectome_files, matrices, rest_meta_mdd, tables
from m2lgdg.data.readers.arrays import Rois, numbered_rois
from m2lgdg.data.readers.connectome_files import AtlasMatrices
from m2lgdg.data.readers.dataset_toml import Dataset, read_dataset
from m2lgdg.data.readers.folder import POSITIONAL
from m2lgdg.data.readers.matrices import Matrices
from m2lgdg.data.readers.series import Atlases, OnBad, Progress, Scan, excluded_file, requested, unlisted
from m2lgdg.data.readers.structure import with_files
from m2lgdg.findings import CONNECTOME_NOT_LISTED, NO_CONNECTOME, Exclusion, Finding, Note, counted
from m2lgdg.storage import InputError, read_bytes

AT_ONCE = 64  # files between two reports of the progress
LINES = (".txt", ".1D")  # a file of names, one a line
NAMED = {  # what names say that range and diagonal may leave open
    scans.PARTIAL: re.compile("partial[-_ ]?corr", re.IGNORECASE),
    scans.FISHER_Z: re.compile("fisher[-_ ]?z", re.IGNORECASE),
}
WORDS = dict(zip(scans.KINDS, ("correlations", "Fisher z", "covariances", "partial correlations"), strict=True))

matches = connectome_files.matches


def read(
    path: Path,
    *,
    atlas: Atlases = None,
    values: str | None = None,
    participants: str | Path | None = None,
    atlas_labels: str | Path | None = None,
    triangle: str | None = None,
    only: str = "",
    session: str | None = None,
    site: str | None = None,
    patient: str = "",
    control: str = "",
    on_bad: OnBad = "stop",
    progress: Progress | None = None,
) -> Cohort:
    """Read the subjects of a table, or of one table a site, who have a connectome.

    `values` says what the matrices hold (correlation, fisher-z, covariance or partial-correlation); by default it is told from
    the range and the diagonal of all of them. `atlas` selects atlases of BIDS derivatives or of dataset.toml, or names the
    included one of the files; `atlas_labels` is a table with a name column, or a text file with one name a line. `triangle`
    (upper or lower) is the half that rows of triangles hold. `only` lists words that the name of a file must have. `session`,
    `site`, `patient` and `control` are as for BIDS derivatives of series. `participants` is a table of subjects, or the
    workbook of REST-meta-MDD, of which the phenotypes are taken.
    """
    _need_known("values", values, scans.KINDS)
    _need_known("triangle", triangle, matrices.ORDERS)
    rois = None if atlas_labels is None else str(Path(atlas_labels).absolute())
    options = {"values": values, "triangle": triangle, "rois": rois}
    dataset = read_dataset(path / "dataset.toml", options, requested(atlas, ()))
    book = Path(participants) if participants and Path(participants).suffix == ".xlsx" else None  # of REST-meta-MDD
    wanted = connectome_files.Wanted(path, atlas, None if book else participants, only, session, site, patient, control)
    layout = connectome_files.find(wanted, dataset)
    people = rest_meta_mdd.with_workbook(layout.people, book) if book else layout.people
    sites = dict(zip(people.subjects, people.sites.tolist(), strict=True))
    found = [_gathered(path, each, sites, on_bad, progress) for each in layout.atlases]
    main, others = found[0], dict(zip([each.atlas for each in layout.atlases[1:]], found[1:], strict=True))
    excluded = [*people.excluded, *unlisted(people, main.present, on_bad, "connectome", CONNECTOME_NOT_LISTED)]
    absent = [Exclusion(one, sites[one], NO_CONNECTOME) for one in people.subjects if one not in main.present]
    if absent and layout.complete and on_bad == "stop":
        raise InputError(f"{people.table}: subject {absent[0].subject} has no connectome in {path}.")
    kept = [i for i, one in enumerate(people.subjects) if one in main.triangles]
    if not kept:
        raise InputError(f"{people.table}: no listed subject has a connectome in {path}.")
    chosen = people.rows(kept)
    unusable = [
        Finding("unusable series", one.site, (one.subject,), {"lacking": name, "reason": one.reason.rstrip(".")})
        for name, other in others.items()
        for one in other.excluded
    ]
    notes: list[Note] = [*layout.notes, *(note for each in found for note in each.notes)]
    cohort = Cohort(
        series=main.connectomes(chosen.subjects),
        subjects=np.array(chosen.subjects),
        sites=chosen.sites,
        labels=chosen.labels,
        rois=main.rois,
        phenotypes=chosen.phenotypes,
        inputs=chosen.inputs,
        tr=chosen.tr,
        atlas=layout.atlases[0].atlas,
        name=dataset.name or path.resolve().name,
        excluded=tuple(sorted([*excluded, *absent, *main.excluded])),
        notes=(*notes, *chosen.notes, *unusable),
        allow_proxies=dataset.allow_proxies,
        parcellations={name: Parcellation(each.rois, each.connectomes(chosen.subjects)) for name, each in others.items()},
    )
    return with_files(cohort, dataset.table_files(path))


def _need_known(name: str, given: str | None, known: Iterable[str]) -> None:
    if given is not None and given not in known:
        raise InputError(f"option {name}: {given!r} is not one of {', '.join(known)}.")


class _One(NamedTuple):
    """The connectome of a subject: the matrix at `row` of a file."""

    subject: str
    file: Path
    matrices: Matrices
    row: int

    def error(self, defect: str) -> InputError:
        return InputError(f"{self.file}: subject {self.subject}: {defect}.")


class _Found(NamedTuple):
    """The usable connectomes of an atlas by subject, and everybody's file (`present`)."""

    rois: Rois
    kind: str
    triangles: dict[str, npt.NDArray[np.float32]]
    present: dict[str, Path]
    excluded: list[Exclusion]
    notes: list[Note]

    def connectomes(self, subjects: Sequence[str]) -> scans.Connectomes:
        return scans.Connectomes((self.triangles.get(one) for one in subjects), self.kind, len(self.rois))


class _Bad:
    """The subjects whose connectome is unusable: the first stops the reading, or all are excluded."""

    def __init__(self, sites: Mapping[str, str], on_bad: OnBad) -> None:
        self.sites, self.on_bad = sites, on_bad
        self.first: InputError | None = None
        self.excluded: list[Exclusion] = []

    def add(self, subject: str, file: Path, error: InputError) -> None:
        if subject not in self.sites:
            return  # reported as not listed
        self.first = self.first or error
        if self.on_bad == "stop":
            raise error
        self.excluded.append(excluded_file(Scan(subject, self.sites[subject], [file]), error))


def _gathered(path: Path, source: AtlasMatrices, sites: Mapping[str, str], on_bad: OnBad, progress: Progress | None) -> _Found:
    """The connectomes of one atlas, of one kind and in one order of ROIs."""
    dataset = source.dataset
    given = _given_names(path, dataset)
    bad = _Bad(sites, on_bad)
    sound = _assigned(source, _loaded(source, _counts(given, dataset), progress), sites, bad)
    present = {one.subject: one.file for one in sound} | {one: file for file, some in source.files.items() for one in some}
    sound = [one for one in sound if one.subject in sites]
    sound = _without(sound, bad, lambda one: one.matrices.defects.get(one.row))
    size = Counter(one.matrices.n_rois for one in sound).most_common(1)[0][0] if sound else 0
    sound = _without(sound, bad, lambda one: _other_size(one.matrices.n_rois, size))
    if not sound:
        raise bad.first or InputError(f"{path}: no listed subject has a connectome.")
    naming = _Naming(path, dataset, given, size, sound)
    sound = _without(sound, bad, naming.defect)
    kind, note = _kind(path, sound, dataset.values)
    usual = next((one for one in sound if one.matrices.kinds[one.row] == (kind,)), None)
    sound = _without(sound, bad, lambda one: _unlike(one, kind, usual) or _kind_defect(one, naming.rois_of(one), kind))
    if not sound:
        raise bad.first or InputError(f"{path}: no listed subject has a connectome.")
    notes: list[Note] = [Finding("values", numbers={"text": note}, atlas=source.atlas), *naming.notes, *_changes(sound)]
    usual = None
    triangles = {}
    while sound:  # one after the other, so that the memory of one is used again for the next
        one = sound.pop()
        triangles[one.subject] = scans.frozen(naming.ordered(one, _finished(one, kind)))
    return _Found(naming.rois, kind, triangles, present, bad.excluded, notes)


def _without(every: Sequence[_One], bad: _Bad, defect: Callable[[_One], str | None]) -> list[_One]:
    """Those without a defect."""
    kept = []
    for one in every:
        if words := defect(one):
            bad.add(one.subject, one.file, one.error(words))
        else:
            kept.append(one)
    return kept


def _other_size(count: int, usual: int) -> str | None:
    return None if count == usual else f"{count} ROIs, but the other subjects have {usual}"


# Files


def _loaded(source: AtlasMatrices, counts: Sequence[int], progress: Progress | None) -> dict[Path, Matrices | InputError]:
    """Connectomes of each file, or why it cannot be read."""
    files = list(source.files)
    order: str | None = source.dataset.triangle
    variable = source.dataset.variable

    found: dict[Path, Matrices | InputError] = {}
    for file in files:  # not in threads: a file takes so little time that they would wait for each other
        result = found[file] = _load(file, variable, order, counts)
        if isinstance(result, Matrices) and result.order and order is None:
            order, counts = result.order, [result.n_rois]  # all files of triangles are read as the first one
        if progress and (len(found) % AT_ONCE == 0 or len(found) == len(files)):
            progress(len(found), len(files))
    return found


def _load(file: Path, variable: str | None, order: str | None, counts: Sequence[int]) -> Matrices | InputError:
    try:
        return matrices.load_matrices(file, variable, order, counts)
    except InputError as error:
        return error


def _assigned(
    source: AtlasMatrices, loaded: Mapping[Path, Matrices | InputError], sites: Mapping[str, str], bad: _Bad
) -> list[_One]:
    """The matrices of each subject: by the names of the rows of a file, else in the order of the table."""
    found: dict[str, _One] = {}
    for file, subjects in source.files.items():
        result = loaded[file]
        if isinstance(result, InputError):
            for subject in subjects:
                bad.add(subject, file, result if len(subjects) > 1 else _naming_subject(result, file, subject))
            continue
        owners, count = result.rows or subjects, len(result.kinds)
        if result.rows and not set(result.rows) & set(sites):
            raise InputError(
                f"{file}: its first row is named {result.rows[0][:40]!r}, and no row is named by a listed subject."
            )
        if count != len(owners) and len(subjects) == 1:
            bad.add(subjects[0], file, InputError(f"{file}: subject {subjects[0]}: it holds {count} matrices, not one."))
            continue
        if count != len(owners):
            listed = f"its table lists {len(owners)} subjects ({owners[0]} to {owners[-1]})"
            raise InputError(f"{file}: {count} matrices, but {listed}; both must hold the same subjects in the same order.")
        for row, subject in enumerate(owners):
            if subject in found:
                raise InputError(f"{file}: subject {subject} has a second connectome, in {found[subject].file.name}.")
            found[subject] = _One(subject, file, result, row)
    return list(found.values())


def _naming_subject(error: InputError, file: Path, subject: str) -> InputError:
    text = str(error)
    return InputError(f"{file}: subject {subject}: {text.removeprefix(str(file)).lstrip(' :,')}")


def _changes(sound: Sequence[_One]) -> list[Note]:
    """Notes on what was completed or set to zero, and on how triangles were read."""
    halves = [one.subject for one in sound if one.row in one.matrices.halves]
    absent = [one.subject for one in sound if one.row in one.matrices.absent]
    notes: list[Note] = []
    if halves:
        notes.append(f"completed: of {counted(len(halves), 'subject')} the file holds one half of a symmetric matrix")
    if absent:
        notes.append(f"ROIs that are NaN throughout were set to zero: of {counted(len(absent), 'subject')}")
    first = sound[0].matrices
    if first.order:
        notes.append(f"rows are {matrices.ORDERS[first.order]}, of {first.n_rois} ROIs")
    return notes


# Names of ROIs


def _given_names(path: Path, dataset: Dataset) -> Rois | None:
    """Names by position: of a file, or those of an included atlas with one order of ROIs."""
    if not dataset.rois:
        known = regions(dataset.atlas) if included(dataset.atlas) == POSITIONAL else None
        return None if known is None else tuple(known["name"])
    file = path / dataset.rois
    if file.suffix in LINES:
        text = read_bytes(file, tables.LARGEST_TABLE).decode("utf-8-sig", errors="replace")
        names = [line.strip() for line in text.splitlines() if line.strip()]
    else:
        table = tables.read_text_table(file)
        tables.need_columns(table, ("name",), file)
        names = table["name"].tolist()
    for i, name in enumerate(names):
        if name in names[:i]:
            raise InputError(f"{file}: ROI {name} is listed twice.")
    return tuple(names)


def _counts(given: Rois | None, dataset: Dataset) -> list[int]:
    """Possible numbers of ROIs, where names or an included atlas tell them."""
    if given is not None:
        return [len(given)]
    known = regions(dataset.atlas)
    return [] if known is None else [n for n in range(2, len(known) + 1) if names_by_position(dataset.atlas, n) is not None]


class _Naming:
    """The ROIs of an atlas: named by the files, by a list, by an included atlas, or by numbers."""

    def __init__(self, path: Path, dataset: Dataset, given: Rois | None, size: int, sound: Sequence[_One]) -> None:
        self.dataset, self.size, self.notes = dataset, size, list[Note]()
        by = dataset.rois or dataset.atlas
        if given is not None and len(given) != size:
            raise InputError(f"{sound[0].file}: subject {sound[0].subject}: {size} ROIs, but {by} names {len(given)}.")
        orders = Counter(one.matrices.rois for one in sound if one.matrices.rois is not None)
        self.usual = self._translated(orders.most_common(1)[0][0]) if orders else None
        self.rois = given or self.usual or names_by_position(dataset.atlas, size) or numbered_rois(size)
        if self.usual is not None and given is not None and set(self.usual) != set(given):
            first, last = f"{self.usual[0]} of the files is {given[0]}", f"{self.usual[-1]} is {given[-1]}"
            self.notes.append(f"ROIs named by position: {first}, {last}")
        elif self.usual is not None:
            self.rois = self.usual
        known = regions(dataset.atlas)
        if known is not None and self.rois == numbered_rois(size) and self.usual is None:
            counts = f"the included atlas {dataset.atlas} has {len(known)} ROIs, the files have {size}"
            self.notes.append(f"ROIs without names: {counts}")

    def _translated(self, names: Rois) -> Rois:
        return names if self.dataset.rois else roi_names(names, self.dataset.atlas)  # codes of an included atlas

    def rois_of(self, one: _One) -> Rois:
        """Names of the ROIs in the order of a file."""
        if one.matrices.rois is None or self.usual is None:
            return self.rois
        own = self._translated(one.matrices.rois)
        return self.rois if own == self.usual else own

    def defect(self, one: _One) -> str | None:
        """Why the ROIs of a file are not those of the others."""
        if self.usual is None:
            return None
        if one.matrices.rois is None:
            return f"its ROIs have no names, which the other files have ({self.usual[0]} ...)"
        own = self._translated(one.matrices.rois)
        other = next((name for name in self.usual if name not in set(own)), None) if own != self.usual else None
        return None if other is None else f"it has no ROI {other}, which the other subjects have"

    def ordered(self, one: _One, triangle: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """The triangle in the order of the other files."""
        if one.matrices.rois is None or self.usual is None:
            return triangle
        own = self._translated(one.matrices.rois)
        if own == self.usual:
            return triangle
        position = {name: i for i, name in enumerate(own)}
        places = np.array([position[name] for name in self.usual])
        rows, columns, _ = scans.triangle(self.size)
        return np.asarray(scans.unpacked(triangle, self.size)[places[rows], places[columns]], dtype=np.float32)


# What the values are


def _kind(path: Path, sound: Sequence[_One], given: str | None) -> tuple[str, str]:
    """Kind of the values, by all matrices unless it is given, and in words why."""
    if given is not None:
        return given, f"{WORDS[given]}, as given"
    possible = [one.matrices.kinds[one.row] for one in sound]
    names = [f"{one.file} (subject {one.subject})" for one in sound]
    kind = scans.common_kind(possible, names, str(path))
    named = {kind: all(words.search(one.file.name) for one in sound) for kind, words in NAMED.items()}
    if kind == scans.CORRELATION and named[scans.PARTIAL]:
        return scans.PARTIAL, f"{WORDS[scans.PARTIAL]}, by the names of the files; --values says otherwise"
    if named[scans.FISHER_Z] and all(scans.FISHER_Z in kinds for kinds in possible):
        return scans.FISHER_Z, f"{WORDS[scans.FISHER_Z]}, by the names of the files; --values says otherwise"
    beyond = sum(float(one.matrices.largest[one.row]) > 1 + scans.OVER_ONE for one in sound)
    if kind == scans.FISHER_Z:
        where = f"beyond 1 in {beyond} of {len(sound)} matrices" if beyond else "with a large diagonal"
        return kind, f"{WORDS[kind]}, since values are {where}; --values says otherwise"
    if kind == scans.COVARIANCE:
        return kind, f"{WORDS[kind]}, since the diagonal is positive and not 1; --values says otherwise"
    if any(kinds == (kind,) for kinds in possible):
        return kind, f"{WORDS[kind]}, since the diagonal is 1; --values says otherwise (partial correlations look alike)"
    reason = f"since no value of {len(sound)} matrices is beyond 1; their diagonal is 0, which Fisher z may have too"
    return kind, f"{WORDS[kind]}, {reason}: then give --values fisher-z"


def _unlike(one: _One, kind: str, usual: _One | None) -> str | None:
    """Why a matrix is not of the kind that was given, where others certainly are."""
    kinds = one.matrices.kinds[one.row]
    alike = scans.CORRELATION if kind == scans.PARTIAL else kind
    if usual is None or alike in kinds:
        return None
    return f"by its range and diagonal it holds {WORDS[kinds[0]]}, not {WORDS[kind]} as {usual.file.name} does"


def _kind_defect(one: _One, rois: Rois, kind: str) -> str | None:
    """What is wrong with the diagonal or the range for this kind. Most have a plain diagonal and a plain range."""
    diagonal, largest = one.matrices.diagonals[one.row], float(one.matrices.largest[one.row])
    plain = (0.0,) if kind == scans.FISHER_Z else (0.0, 1.0)
    if kind == scans.COVARIANCE or diagonal[0] not in plain or not (diagonal == diagonal[0]).all():
        defect = scans.diagonal_defect(diagonal, rois, kind)
        if defect:
            return f"{defect}{_advice(one, kind)}"
    most = scans.LARGEST_Z if kind == scans.FISHER_Z else 1 + scans.OVER_ONE
    if kind != scans.COVARIANCE and 0 < largest <= most:
        return None
    values = one.matrices.triangles[one.row].copy()
    values[scans.triangle(len(rois))[2]] = diagonal if kind == scans.COVARIANCE else 0
    defect = scans.triangle_defect(values, rois, kind)
    return None if defect is None else f"{defect}{_advice(one, kind) if largest else ''}"


def _advice(one: _One, kind: str) -> str:
    others = [other for other in one.matrices.kinds[one.row] if other != kind]
    return f"; if it holds {WORDS[others[0]]}, give --values {others[0]}" if others else ""


def _finished(one: _One, kind: str) -> npt.NDArray[np.float32]:
    """(roi (roi + 1) / 2,) triangle with the diagonal of its kind."""
    values: npt.NDArray[np.float32] = one.matrices.triangles[one.row]
    if kind == scans.FISHER_Z:
        return values
    diagonal = matrices.diagonal_places(one.matrices.n_rois)
    values[diagonal] = one.matrices.diagonals[one.row] if kind == scans.COVARIANCE else 1
    return values if kind == scans.COVARIANCE or one.matrices.largest[one.row] <= 1 else np.clip(values, -1, 1)
