"""Reader of REST-meta-MDD: `ROISignals_S<site>-<group>-<number>.mat` files and the consortium's phenotype workbook.

Called by `m2lgdg.read`. A file holds the columns of several atlases side by side; the subject id encodes site and label.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from m2lgdg.cohort import Cohort
from m2lgdg.data.atlases import names_by_position
from m2lgdg.data.readers import tables
from m2lgdg.data.readers.gather import Load, OnBad, Progress, Rois, Series, SeriesFile, load_mat, need_listed, numbered_rois
from m2lgdg.data.readers.several import Atlases, AtlasFiles, gather_atlases, is_all, no_series, requested
from m2lgdg.findings import NOT_LISTED, Exclusion, Finding
from m2lgdg.storage import InputError

SUBJECT = re.compile(r"(?P<site>S\d+)-(?P<group>[12])-\d+$")
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
PAPER_STRATEGY = "FunImgARCWF"
LEFT_OUT = {
    "S4": "its subjects duplicate those of S14",
    "S5": "no time courses",
    "S19": "no time courses",
}


def matches(path: Path) -> bool:
    """Whether a folder looks like this release."""
    return any(path.glob("**/ROISignals_S*.mat"))


def read(
    path: Path,
    *,
    atlas: Atlases = "aal",
    strategy: str | None = None,
    exclude_sites: Iterable[str] = tuple(LEFT_OUT),
    tr: float | None = None,
    on_bad: OnBad = "stop",
    progress: Progress | None = None,
) -> Cohort:
    """Read the subjects that have both a phenotype row and a series file; sites 4, 5 and 19 are left out by default.

    `strategy` selects the folder if there are several: FunImgARCWF (used by the paper, and the default), or FunImgARglobalCWF
    with global signal regression. Several atlases can be read at once; `"all"` stands for those that some file holds, without
    the two halves of harvard-oxford. A file of an older DPARSF lacks some of them (`several.gather_atlases`).
    """
    atlases = requested(atlas, set(COLUMNS) - set(HALVES)) or ("aal",)
    for name in atlases:
        if name not in COLUMNS:
            raise InputError(f"atlas {name} is not known; REST-meta-MDD has {', '.join(COLUMNS)}.")
    book = _workbook(path)
    if tr is not None:
        tables.need_seconds(tr, "option tr")
    table, implausible = _phenotypes(book)
    folder, files = _files(path, strategy)
    need_listed(files, table.index, book)
    left_out = _sites(exclude_sites)
    excluded = []
    for subject, row in table.iterrows():
        if row["site"] in left_out:
            excluded.append(Exclusion(subject, row["site"], "site left out", LEFT_OUT.get(row["site"], "by the user")))
        elif subject not in files:
            excluded.append(no_series(subject, row["site"], ()))  # a file holds every atlas
    for subject in sorted(set(files) - set(table.index)):
        site = subject.split("-")[0]
        if site in left_out:
            excluded.append(Exclusion(subject, site, "site left out", LEFT_OUT.get(site, "by the user")))
        elif on_bad == "stop":
            raise InputError(f"{files[subject]}: subject {subject} is not in column ID of {book}.")
        else:
            excluded.append(Exclusion(subject, site, NOT_LISTED))
    excluded_subjects = {each.subject for each in excluded}
    included = [SeriesFile(one, table.at[one, "site"], files[one]) for one in table.index if one not in excluded_subjects]
    columns = _Columns(atlases)
    gathered, parcellations, notes = gather_atlases(
        AtlasFiles(atlases[0], included, columns.load),
        lambda: columns.others(included, skip_absent=is_all(atlas)),
        book,
        on_bad=on_bad,
        progress=progress,
    )
    table = table.loc[[each.subject for each in gathered.files]]
    return Cohort(
        series=gathered.series,
        subjects=table.index.to_numpy(),
        sites=table["site"].to_numpy(),
        labels=table["label"].to_numpy(),
        rois=gathered.rois,
        phenotypes=table.drop(columns=["site", "label"]),
        inputs=tuple(INPUTS),
        tr=np.array(np.nan if tr is None else tr),
        atlas=atlases[0],
        name="rest-meta-mdd",
        excluded=tuple(sorted(excluded + gathered.excluded)),
        notes=(
            *(f"atlas {name}, folder {folder}" for name in (atlases[0], *parcellations)),
            Finding("label", numbers={"text": "site and label from the id: group 1 = patient, 2 = control"}),
            *implausible,
            *notes,
        ),
        parcellations=parcellations,
    )


def _sites(names: Iterable[str]) -> set[str]:
    sites = {names} if isinstance(names, str) else set(names)
    wrong = next((site for site in sorted(sites) if not re.fullmatch(r"S\d+", site)), None)
    if wrong is not None:
        raise InputError(f"exclude_sites: {wrong!r} is not a site of REST-meta-MDD; sites are named S1, S2 ...")
    return sites


def _workbook(path: Path) -> Path:
    books = sorted(file for file in path.glob("**/*.xlsx") if not file.name.startswith("~"))
    if not books:
        raise InputError(f"{path} has no phenotype workbook (REST-meta-MDD-PhenotypicData_WithHAMDSubItem_V4.xlsx).")
    if len(books) > 1:
        raise InputError(
            f"{path} has several workbooks: {', '.join(book.name for book in books)}; keep only the phenotype workbook."
        )
    return books[0]


def _phenotypes(book: Path) -> tuple[pd.DataFrame, list[Finding]]:
    """Both sheets as one table by subject (site, label, the three inputs and all other columns), and notes on odd values."""
    sheets, notes = [], []
    for sheet, label in SHEETS.items():
        table = tables.read_sheet(book, sheet)
        tables.need_columns(table, ("ID", *INPUTS.values()), book)
        table = tables.index_by_subject(table[table["ID"] != ""], "ID", book)
        parts = [_site_and_label(subject, book) for subject in table.index]
        wrong = next((one for one, part in zip(table.index, parts, strict=True) if part[1] != label), None)
        if wrong is not None:
            raise InputError(f"{book}, sheet {sheet}: the id of subject {wrong} has the group of the other sheet.")
        age, implausible = tables.ages(table, INPUTS["age"], book)
        education = tables.numeric(table, INPUTS["education"], book)
        notes += implausible
        columns: dict[str, object] = {
            "site": [site for site, _ in parts],
            "label": label,
            "sex": tables.sex(table, INPUTS["sex"], book),
            "age": age,
            "education": np.where(education >= 0, education, np.nan),  # zero years of education are valid
        }
        sheets.append(pd.DataFrame(columns | tables.other_columns(table, {"ID", *INPUTS.values()}), index=table.index))
    both = pd.concat(sheets)
    if both.index.has_duplicates:
        raise InputError(f"{book}: subject {both.index[both.index.duplicated()][0]} is listed on both sheets.")
    return both, notes


def _site_and_label(subject: str, where: Path) -> tuple[str, int]:
    match = SUBJECT.match(subject)
    if match is None:
        raise InputError(f"{where}: id {subject!r} is not of the form S<site>-<1 or 2>-<number>.")
    return match["site"], 1 if match["group"] == "1" else 0


def _files(path: Path, strategy: str | None) -> tuple[str, dict[str, Path]]:
    folders: dict[Path, dict[str, Path]] = {}
    for file in sorted(path.glob("**/ROISignals_S*.mat")):
        folders.setdefault(file.parent, {})[file.stem.removeprefix("ROISignals_")] = file
    if not folders:
        raise InputError(f"{path} has no series files (ROISignals_S<site>-<group>-<number>.mat).")
    ending = strategy or (PAPER_STRATEGY if len(folders) > 1 else "")
    wanted = [folder for folder in folders if folder.name.endswith(ending)]
    if len(wanted) != 1:
        available = ", ".join(str(folder.relative_to(path)) for folder in folders)
        raise InputError(f"{path}: strategy {ending} matches {len(wanted) or 'none'} of the folders {available}.")
    return wanted[0].name, folders[wanted[0]]


class _Columns:
    """Columns of the requested atlases. A file is read once; its series in further atlases are held until they are taken."""

    def __init__(self, atlases: Sequence[str]) -> None:
        self.first = atlases[0]
        self.held: dict[str, dict[Path, Series]] = {name: {} for name in atlases[1:]}

    def load(self, file: Path) -> tuple[Rois, Series]:
        """ROI names and series of the first atlas."""
        signals = load_mat(file, "ROISignals")
        first, last = COLUMNS[self.first]
        width = signals.shape[1]
        if width not in WIDTHS:
            raise InputError(f"{file}: {width} columns, but files of the release have {', '.join(map(str, WIDTHS))}.")
        if last > width:
            raise InputError(f"{file}: {width} columns, but atlas {self.first} needs columns {first} to {last}.")
        for name, series in self.held.items():
            if COLUMNS[name][1] <= width:
                series[file] = _columns(signals, name)
        return _rois(self.first), _columns(signals, self.first)

    def others(self, files: Sequence[SeriesFile], *, skip_absent: bool) -> Iterator[AtlasFiles]:
        """The further atlases with the files that hold them; with `skip_absent`, without those that no file holds."""
        for name, series in self.held.items():
            if series or not skip_absent:
                yield AtlasFiles(name, [each for each in files if each.path in series], self._take(name))

    def _take(self, atlas: str) -> Load:
        return lambda file: (_rois(atlas), self.held[atlas].pop(file))


def _rois(atlas: str) -> Rois:
    """Names of the ROIs of an atlas; a half of Harvard-Oxford has those of its columns."""
    first, last = COLUMNS[atlas]
    whole = "harvard-oxford" if atlas in HALVES else atlas
    start, end = COLUMNS[whole]
    names = names_by_position(whole, end - start + 1) or numbered_rois(end - start + 1)
    return names[first - start : last - start + 1] if atlas in HALVES else names


def _columns(signals: Series, atlas: str) -> Series:
    first, last = COLUMNS[atlas]
    return np.ascontiguousarray(signals[:, first - 1 : last])
