"""Reader of REST-meta-MDD: `ROISignals_S<site>-<group>-<number>.mat` files and the consortium's phenotype workbook.

Called by `m2lgdg.read`. A file holds the columns of several atlases side by side; the subject id encodes site and label.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from m2lgdg.cohort import Cohort
from m2lgdg.cohort_arrays import need_seconds
from m2lgdg.data.atlases import names_by_position
from m2lgdg.data.readers import tables
from m2lgdg.data.readers.arrays import Rois, Series, load_mat, numbered_rois
from m2lgdg.data.readers.series import ALL, Atlases, AtlasFiles, OnBad, Progress, Scan, read_series, requested
from m2lgdg.findings import Exclusion, Finding, Note, counted
from m2lgdg.storage import InputError

SUBJECT = re.compile(r"(?P<site>S\d+)-(?P<group>[12])-\d+$")
CODES = "site and label from the id: group 1 = patient, 2 = control"
SHEETS = {"MDD": 1, "Controls": 0}
INPUTS = {"sex": "Sex", "age": "Age", "education": "Education (years)"}
WIDTHS = (1568, 1833, 2233)  # number of columns in files of the older, the released and the newer DPARSF
COLUMNS = {  # first and last column of each atlas, from 1
    "aal": (1, 116),
    "harvard-oxford-cortical": (117, 212),
    "harvard-oxford-subcortical": (213, 228),
    "harvard-oxford": (117, 228),
    "craddock200": (229, 428),
    "zalesky980": (429, 1408),
    "dosenbach160": (1409, 1568),
    "power264": (1570, 1833),
    "schaefer400": (1834, 2233),
}
HALVES = ("harvard-oxford-cortical", "harvard-oxford-subcortical")  # of harvard-oxford, so not read with all atlases
GLOBAL_SIGNAL = 1569  # its column
# sd of the global signal, relative to that of a ROI: 0.02 in files after its regression. Without, it is about the root of the
# mean FC, which is 0.08 or more in 597 scans of the release.
REGRESSED = 0.1
PAPER_STRATEGY, REGRESSION = "FunImgARCWF", "FunImgARglobalCWF"
LEFT_OUT = {"S4": "its subjects duplicate those of S14"}
LEFT_OUT |= dict.fromkeys(("S5", "S19"), "not used by the paper, for lack of time courses")


def matches(path: Path) -> bool:
    """Whether a folder looks like this release."""
    return any(path.glob("**/ROISignals_S*.mat"))


def read(
    path: Path,
    *,
    participants: str | Path | None = None,
    atlas: Atlases = "aal",
    strategy: str | None = None,
    exclude_sites: Iterable[str] = tuple(LEFT_OUT),
    tr: float | None = None,
    on_bad: OnBad = "stop",
    progress: Progress | None = None,
) -> Cohort:
    """Read the subjects that have both a phenotype row and a series file; sites 4, 5 and 19 are left out by default.

    `participants` is the workbook, if it is not in the folder. `strategy` selects the folder if there are several: FunImgARCWF
    (used by the paper, and the default), or FunImgARglobalCWF with global signal regression. `atlas="all"` stands for those
    that some file holds, without the halves of harvard-oxford.
    """
    atlases = requested(atlas, set(COLUMNS) - set(HALVES)) or ("aal",)
    for name in atlases:
        if name not in COLUMNS:
            raise InputError(f"atlas {name} is not known; REST-meta-MDD has {', '.join(COLUMNS)}.")
    if tr is not None:
        need_seconds(tr, "option tr")
    book = Path(participants) if participants else _workbook(path)
    table, notes = _phenotypes(book)
    place, files = _files(path, strategy)
    left_out = _sites(exclude_sites)
    excluded = [
        Exclusion(one, site_of(one), "site left out", LEFT_OUT.get(site_of(one), "by the user"))
        for one in sorted({*table.index, *files})
        if site_of(one) in left_out
    ]
    table = table[~table["site"].isin(list(left_out))]
    files = {one: runs for one, runs in files.items() if site_of(one) not in left_out}
    people = tables.Participants(
        table=book,
        subjects=[str(one) for one in table.index],
        sites=table["site"].to_numpy(dtype=np.str_),
        labels=table["label"].to_numpy(dtype=np.int8),
        tr=np.full(len(table), np.nan if tr is None else tr),
        phenotypes=table.drop(columns=["site", "label"]),
        inputs=tuple(INPUTS),
        notes=(
            Finding("label", numbers={"text": "site and label from the id: group 1 = patient, 2 = control"}),
            *_of_subjects(notes, files),
        ),
        column="ID",
        excluded=excluded,
        site_of=site_of,
    )
    columns = _Columns(atlases)
    sources = [
        AtlasFiles(name, files, columns.loader(name), optional=ALL in (atlas or ()), note=f"atlas {name}, {place}")
        for name in atlases
    ]
    cohort = read_series(people, sources, name="rest-meta-mdd", on_bad=on_bad, progress=progress)
    return cohort._changed(notes=(*cohort.notes, *columns.global_signal(cohort.subjects.tolist(), place)))


def site_of(subject: str) -> str:
    """Site in the id of a subject."""
    return subject.split("-")[0]


def _sites(names: Iterable[str]) -> set[str]:
    sites = {names} if isinstance(names, str) else set(names)
    wrong = next((site for site in sorted(sites) if not re.fullmatch(r"S\d+", site)), None)
    if wrong is not None:
        raise InputError(f"exclude_sites: {wrong!r} is not a site of REST-meta-MDD; sites are named S1, S2 ...")
    return sites


def with_workbook(people: tables.Participants, book: Path) -> tables.Participants:
    """People of connectomes of this release with the phenotypes of the workbook, which are matched by id."""
    table, notes = _phenotypes(book)
    for subject, site, label in zip(people.subjects, people.sites.tolist(), people.labels.tolist(), strict=True):
        if subject not in table.index:
            raise InputError(f"{people.table}: subject {subject} is not in column ID of {book}.")
        if (site, label) != (site_of(subject), table["label"][subject]):
            raise InputError(f"{people.table}: the site or label of subject {subject} is not that of its id.")
    phenotypes = table.loc[people.subjects].drop(columns=["site", "label"])
    added: list[Note] = [f"phenotypes from {book.name}, in place of the columns beside the connectomes"]
    added += _of_subjects(notes, people.subjects)
    return people._replace(phenotypes=phenotypes, inputs=tuple(INPUTS), notes=(*people.notes, *added))


def _of_subjects(notes: Iterable[Finding], subjects: Iterable[str]) -> list[Finding]:
    """The notes on the sites of these subjects: a workbook lists more sites than a folder has."""
    sites = {site_of(one) for one in subjects}
    return [one for one in notes if (one.site or site_of(one.subjects[0])) in sites]


def _workbook(path: Path) -> Path:
    books = sorted(file for file in path.glob("**/*.xlsx") if not file.name.startswith("~"))
    if not books:
        raise InputError(
            f"{path} has no phenotype workbook (REST-meta-MDD-PhenotypicData_WithHAMDSubItem_V4.xlsx); put it there, or name "
            "it with --participants FILE."
        )
    if len(books) > 1:
        listed = ", ".join(str(book.relative_to(path)) for book in books)
        raise InputError(f"{path} has several workbooks: {listed}; name that of the phenotypes with --participants FILE.")
    return books[0]


def _phenotypes(book: Path) -> tuple[pd.DataFrame, list[Finding]]:
    """Both sheets as one table by subject (site, label, the three inputs and all other columns), and notes on odd values."""
    sheets, notes = [], []
    for sheet, label in SHEETS.items():
        rows = tables.read_sheet(book, sheet)
        tables.need_columns(rows, ("ID", *INPUTS.values()), book)
        table = tables.SubjectTable.of(rows[rows["ID"] != ""], "ID", book)
        for subject in table.subjects:
            match = SUBJECT.match(subject)
            if match is None:
                raise InputError(f"{book}: id {subject!r} is not of the form S<site>-<1 or 2>-<number>.")
            if (match["group"] == "1") != label:
                raise InputError(f"{book}, sheet {sheet}: the id of subject {subject} has the group of the other sheet.")
        age, implausible = table.ages(INPUTS["age"])
        notes += implausible
        columns: dict[str, object] = {
            "site": [site_of(subject) for subject in table.subjects],
            "label": label,
            "sex": table.sex(INPUTS["sex"]),
            "age": age,
            "education": _years(table.years_of_education(INPUTS["education"]), age),
        }
        sheets.append(table.with_others(columns, {"ID", *INPUTS.values()}))
    both = pd.concat(sheets)
    if both.index.has_duplicates:
        raise InputError(f"{book}: subject {both.index[both.index.duplicated()][0]} is listed on both sheets.")
    years, zeros = tables.recorded_education(*(both[name].to_numpy() for name in ("education", "site", "label")))
    return both.assign(education=years), [*notes, *zeros]


def _years(education: tables.Floats, age: tables.Floats) -> tables.Floats:
    """Years of education; 0 is missing where the age is, since the release writes 0 for a subject of whom nothing is known."""
    return np.where((education == 0) & np.isnan(age), np.nan, education)


def _files(path: Path, strategy: str | None) -> tuple[str, dict[str, list[Path]]]:
    folders: dict[Path, dict[str, list[Path]]] = {}
    for file in sorted(path.glob("**/ROISignals_S*.mat")):
        folders.setdefault(file.parent, {})[file.stem.removeprefix("ROISignals_")] = [file]
    if not folders:
        raise InputError(f"{path} has no series files (ROISignals_S<site>-<group>-<number>.mat).")
    named = [folder for folder in folders if folder.name.endswith((PAPER_STRATEGY, REGRESSION))]
    ending = strategy or (PAPER_STRATEGY if len(folders) > 1 and named else "")
    wanted = [folder for folder in folders if folder.name.endswith(ending)]
    if not wanted:
        available = ", ".join(str(folder.relative_to(path)) for folder in folders)
        raise InputError(f"{path}: strategy {ending} matches none of the folders {available}.")
    together: dict[str, list[Path]] = {}  # the files of a site may be in a folder of their own
    for folder in wanted:
        for subject, runs in folders[folder].items():
            if subject in together:
                raise InputError(f"{path} has two series of subject {subject}, {together[subject][0]} and {runs[0]}; keep one.")
            together[subject] = runs
    names = {folder.name for folder in wanted}
    return f"folder {names.pop()}" if len(names) == 1 else counted(len(names), "folder"), together


class _Columns:
    """Columns of the requested atlases. A file is read once; its series in further atlases are held until they are taken."""

    def __init__(self, atlases: Sequence[str]) -> None:
        self.first = atlases[0]
        self.held: dict[str, dict[str, Series]] = {name: {} for name in atlases[1:]}  # by subject
        self.signal: dict[str, float] = {}  # sd of the global signal, relative to that of the ROIs, by subject

    def loader(self, atlas: str) -> Callable[[Scan], tuple[Rois, Series] | None]:
        """Reads the first atlas from a file, and takes a further one, which is None if the file did not hold it."""
        if atlas == self.first:
            return self._read
        series = self.held[atlas]
        return lambda scan: (_rois(atlas), series.pop(scan.subject)) if scan.subject in series else None

    def _read(self, scan: Scan) -> tuple[Rois, Series]:
        (file,) = scan.runs
        signals = load_mat(file, "ROISignals")
        first, last = COLUMNS[self.first]
        width = signals.shape[1]
        if width not in WIDTHS:
            raise InputError(f"{file}: {width} columns, but files of the release have {', '.join(map(str, WIDTHS))}.")
        if last > width:
            raise InputError(f"{file}: {width} columns, but atlas {self.first} needs columns {first} to {last}.")
        if width >= GLOBAL_SIGNAL and (typical := np.median(signals[:, : COLUMNS["aal"][1]].std(axis=0))) > 0:
            self.signal[scan.subject] = float(signals[:, GLOBAL_SIGNAL - 1].std() / typical)
        for name, series in self.held.items():
            if COLUMNS[name][1] <= width:
                series[scan.subject] = _columns(signals, name)
        return _rois(self.first), _columns(signals, self.first)

    def global_signal(self, subjects: Sequence[str], place: str) -> Iterator[Note]:
        """Whether the files have the global signal, and a finding if the name of their folder says otherwise."""
        known = [self.signal[one] for one in subjects if one in self.signal]
        if not known:
            return
        level = float(np.median(known))
        seen = "regressed out" if level < REGRESSED else "kept"
        yield f"global signal {seen}: its standard deviation is {100 * level:.0f} % of that of the ROIs"
        for strategy, said in ((PAPER_STRATEGY, "kept"), (REGRESSION, "regressed out")):
            if place.endswith(strategy) and said != seen:
                numbers = {"strategy": strategy, "said": said, "seen": seen, "percent": 100 * level}
                yield Finding("another pipeline", numbers=numbers)


def _rois(atlas: str) -> Rois:
    first, last = COLUMNS[atlas]
    whole = "harvard-oxford" if atlas in HALVES else atlas
    start, end = COLUMNS[whole]
    names = names_by_position(whole, end - start + 1) or numbered_rois(end - start + 1)
    return names[first - start : last - start + 1] if atlas in HALVES else names


def _columns(signals: Series, atlas: str) -> Series:
    first, last = COLUMNS[atlas]
    return np.ascontiguousarray(signals[:, first - 1 : last])
