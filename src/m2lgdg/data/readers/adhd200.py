"""Reader of ADHD-200 from the Athena pipeline: `*_TCs.1D` files by site and subject, and one phenotype table for each site.

Called by `m2lgdg.read`. The tables may also be the one for all sites, `adhd200_preprocessed_phenotypics.tsv`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from m2lgdg.cohort import Cohort, natural_key
from m2lgdg.data.readers import tables
from m2lgdg.data.readers.arrays import LARGEST, Rois, Series, named_columns, parse_table
from m2lgdg.data.readers.runs import FIRST, FolderRuns, Runs, by_subject, read_runs, session_note
from m2lgdg.data.readers.series import Atlases, OnBad, Progress, chosen
from m2lgdg.findings import Finding, Note
from m2lgdg.storage import InputError, read_bytes

SERIES = re.compile(r"(?P<form>[a-z]+?)(?P<sub>\d+)_session_(?P<ses>\d+)_rest_(?P<run>\d+)_(?P<atlas>[A-Za-z0-9]+)_TCs\.1D$")
FORMS = {"filtered": "sfnwmrda", "unfiltered": "snwmrda"}  # start of the file names, by strategy
ALL_SITES, ONE_SITE = "**/*phenotypics.tsv", "**/*_phenotypic.csv"
NOT_ROIS = re.compile(rb"(?m)^[^\t\n]*\t[^\t\n]*\t")  # columns File and Sub-brick of AFNI's 3dROIstats
COLUMNS = ("ScanDir ID", "Site", "Gender", "Age", "DX")
SITES = {"1": "Peking", "2": "Brown", "3": "KKI", "4": "NeuroIMAGE", "5": "NYU", "6": "OHSU", "7": "Pittsburgh", "8": "WashU"}
SEXES = {"0": tables.FEMALE, "1": tables.MALE}
MISSING = (*tables.MISSING_CODES, "-999", "-999.0", "pending", "withheld")  # the last two: diagnoses of the test set
IQ = {"viq": ("Verbal IQ",), "piq": ("Performance IQ",), "fiq": ("Full4 IQ", "Full2 IQ")}
DIGITS = 7  # of a subject in file names; tables drop the leading zeros
# Repetition times from the scan protocols, in seconds; the files do not contain them. That of Brown is not included.
TR = {"Peking": 2.0, "KKI": 2.5, "NeuroIMAGE": 1.96, "NYU": 2.0, "OHSU": 2.5, "Pittsburgh": 1.5, "WashU": 2.5}


def matches(path: Path) -> bool:
    """Whether a folder looks like this release."""
    return any(SERIES.match(file.name) for file in path.glob("**/*_TCs.1D"))


def read(
    path: Path,
    *,
    atlas: Atlases = None,
    strategy: str | None = None,
    participants: str | Path | None = None,
    session: str | None = None,
    join_runs: bool = False,
    on_bad: OnBad = "stop",
    progress: Progress | None = None,
) -> Cohort:
    """Read the subjects that have both a phenotype row and a series file.

    `strategy` is filtered (the default) or unfiltered. The first run of the first session is read, or of that which `session`
    names; `join_runs` joins all runs, each z-scored per ROI. Subjects of the test set, whose DX is pending, have no label.
    """
    people = _people(path, Path(participants) if participants else None)
    form, groups = _files(path, atlas, strategy)
    by_atlas = {name: _runs(files, path, session, join_runs) for name, files in groups.items()}
    files = next(iter(groups.values()))
    choices: list[Note] = [f"strategy {form}", *session_note(files, session, join_runs)]
    several = sum(count > 1 for count in Counter(_match(file)["sub"].zfill(DIGITS) for file in files).values())
    if several and not join_runs:
        text = f"the first of the session ({several} subjects have several runs); --join-runs joins them"
        choices.append(Finding("run", numbers={"text": text}))
    runs = FolderRuns(by_atlas, _load, join_runs, choices=tuple(choices))
    return read_runs(runs, people, name="adhd-200", on_bad=on_bad, progress=progress)


def _match(file: Path) -> re.Match[str]:
    match = SERIES.match(file.name)
    assert match is not None  # only such files are listed
    return match


def _runs(files: Sequence[Path], path: Path, session: str | None, join_runs: bool) -> Runs:
    wanted = session if join_runs else session or FIRST
    runs = by_subject(files, path, wanted, join_runs=True, same=lambda subject: subject.zfill(DIGITS))
    return runs if join_runs else {subject: each[:1] for subject, each in runs.items()}


def _files(path: Path, atlas: Atlases, strategy: str | None) -> tuple[str, dict[str, list[Path]]]:
    """Strategy, and the files of the requested atlases or the only one, by atlas."""
    groups: dict[tuple[str, str], list[Path]] = {}
    for file in sorted(path.glob("**/*_TCs.1D"), key=lambda one: natural_key(one.name)):
        match = SERIES.match(file.name)
        if match:
            group = groups.setdefault((match["form"], match["atlas"]), [])
            if group and group[-1].name == file.name:
                raise InputError(f"{file}: the same series file is in another folder, {group[-1].parent}.")
            group.append(file)
    if strategy not in (None, *FORMS):
        raise InputError(f"option strategy: {strategy!r} is not one of {', '.join(FORMS)}.")
    present = {form for form, _ in groups}
    name = strategy or next((name for name, form in FORMS.items() if form in present), "filtered")
    form = FORMS[name]
    if form not in present:
        raise InputError(f"{path} has no {name} series files ({form}<id>_session_1_rest_1_<atlas>_TCs.1D).")
    available = [each for one, each in groups if one == form]
    return name, {each: groups[form, each] for each in chosen(path, atlas, available)}


def _load(file: Path) -> tuple[Rois, Series]:
    """ROI names and series of a table of 3dROIstats, whose first two columns name the scan and the volume."""
    text = read_bytes(file, LARGEST)
    names, series = parse_table(file, NOT_ROIS.sub(b"", text) if text.startswith(b"File\t") else text)
    names = None if names is None else [name.removeprefix("Mean_") for name in names]
    return named_columns(file, names, series, _match(file)["atlas"])


def _people(path: Path, given: Path | None) -> tables.Participants:
    found = [given] if given else sorted(path.glob(ALL_SITES))[:1] or sorted(path.glob(ONE_SITE))
    if not found:
        raise InputError(f"{path} has no phenotype table (KKI_phenotypic.csv ..., or adhd200_preprocessed_phenotypics.tsv).")
    where = found[0] if len(found) == 1 else path / "*_phenotypic.csv"
    every = []
    for file in found:
        every.append(tables.read_text_table(file, otherwise="latin-1"))
        tables.need_columns(every[-1], COLUMNS, file)
    rows = pd.concat(every, ignore_index=True).fillna("")
    rows["ScanDir ID"] = [cell.removesuffix(".0").zfill(DIGITS) if cell else "" for cell in rows["ScanDir ID"]]
    table = tables.SubjectTable.of(rows, "ScanDir ID", where, missing=MISSING)
    labels, note = table.labels("DX", patient=("1", "2", "3"), control=("0",))
    age, implausible = table.ages("Age")
    columns = {"sex": table.sex("Gender", SEXES, "0 nor 1"), "age": age}  # the tables have 1 for male and 0 for female
    columns |= {name: _first_score(table, each) for name, each in IQ.items() if set(each) & set(rows.columns)}
    scores = {name for each in IQ.values() for name in each}
    sites = _sites(table)
    return tables.Participants(
        table=where,
        subjects=table.subjects,
        sites=np.array(sites),
        labels=labels,
        tr=np.array([TR.get(site, np.nan) for site in sites]),
        phenotypes=table.with_others(columns, {"ScanDir ID", "Site", "Gender", "Age", *scores}),
        inputs=tuple(columns),
        notes=(note, "TR from the sites' scan protocols", *implausible),
    )


def _sites(table: tables.SubjectTable) -> list[str]:
    """Names of the sites, which the tables number."""
    numbers = [cell.removesuffix(".0") for cell in table.sites("Site").tolist()]
    for subject, cell in zip(table.subjects, numbers, strict=True):
        if cell.isdigit() and cell not in SITES:
            raise InputError(f"{table.path}: subject {subject}, column Site: {cell} is not a site of ADHD-200 (1 to 8).")
    return [SITES.get(cell, cell) for cell in numbers]


def _first_score(table: tables.SubjectTable, columns: Sequence[str]) -> tables.Floats:
    scores = [table.numeric(column, above=0) for column in columns if column in table.rows.columns]
    return np.where(np.isnan(scores[0]), scores[-1], scores[0])
