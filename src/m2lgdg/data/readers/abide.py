"""Reader of ABIDE I from the Preprocessed Connectomes Project: `<FILE_ID>_rois_<atlas>.1D` files and a phenotype table.

Called by `m2lgdg.read`. The files may be in one folder, in pipeline/strategy folders or in one folder per subject.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pandas as pd

from m2lgdg.cohort import UNKNOWN, Cohort
from m2lgdg.data.readers import tables
from m2lgdg.data.readers.arrays import Rois, Series, named_columns, read_table
from m2lgdg.data.readers.series import Atlases, AtlasFiles, OnBad, Progress, read_series, requested
from m2lgdg.findings import Exclusion, Finding
from m2lgdg.storage import InputError

SERIES = re.compile(r"(?P<id>.+)_rois_(?P<atlas>[A-Za-z0-9]+)\.1D$")
PIPELINES = ("cpac", "ccs", "dparsf", "niak")
STRATEGIES = ("filt_global", "filt_noglobal", "nofilt_global", "nofilt_noglobal")
# Ratings that pass for each rater. They keep 871 of the release's 1,035 subjects, the subset that most papers use.
RATINGS = {"qc_rater_1": ("OK",), "qc_anat_rater_2": ("OK", "maybe"), "qc_func_rater_2": ("OK", "maybe")}
RATINGS |= {"qc_anat_rater_3": ("OK",), "qc_func_rater_3": ("OK",)}
Files = dict[str, list[Path]]  # series file by FILE_ID, alone in a list
INPUTS = {"sex": "SEX", "age": "AGE_AT_SCAN", "viq": "VIQ", "piq": "PIQ", "fiq": "FIQ"}
NEEDED = ("FILE_ID", "SITE_ID", "DX_GROUP", *INPUTS.values())

# Repetition times from the scan protocols, in seconds; the files do not contain them. The upper edge of the 0.01-0.1 Hz band in
# the filtered series confirms each (tests/readers/test_abide.py). CMU has two protocols, which only the FILE_ID distinguishes.
TR = {"LEUVEN": 5 / 3, "KKI": 2.5, "MAX_MUN": 3.0, "OHSU": 2.5, "OLIN": 1.5, "PITT": 1.5, "SBL": 2.2, "UCLA": 3.0}
TR |= dict.fromkeys(("CALTECH", "CMU", "NYU", "SDSU", "STANFORD", "TRINITY", "UM", "USM", "YALE"), 2.0)


def matches(path: Path) -> bool:
    """Whether a folder looks like this release."""
    return _table_path(path) is not None or any(path.glob("**/*_rois_*.1D"))


def read(
    path: Path,
    *,
    atlas: Atlases = None,
    strategy: str | None = None,
    quality_checked: bool = False,
    on_bad: OnBad = "stop",
    progress: Progress | None = None,
) -> Cohort:
    """Read the subjects that have both a phenotype row and a series file.

    `atlas` (aal, cc200 ...; one or more, or "all") and `strategy` (cpac/filt_global ...) are needed if the folder has several.
    `quality_checked` keeps only subjects that passed all quality raters of the release.
    """
    table_path = _table_path(path)
    if table_path is None:
        raise InputError(
            f"{path} has no phenotype table (Phenotypic_V1_0b_preprocessed1.csv), neither in the folder nor up to two levels "
            "below; copy it there."
        )
    rows = tables.read_text_table(table_path)
    tables.need_columns(rows, NEEDED, table_path)
    without_file = rows[rows["FILE_ID"].isin(("", "no_filename"))]
    table = tables.SubjectTable.of(rows.drop(without_file.index), "FILE_ID", table_path)
    excluded = [
        Exclusion(str(row.get("SUB_ID", "")), row["SITE_ID"], "no scan in the release") for _, row in without_file.iterrows()
    ]
    strategy, by_atlas = choose_files(path, atlas, strategy)
    if quality_checked:
        tables.need_columns(rows, RATINGS, table_path)
        present = table.rows[table.rows.index.isin(list(next(iter(by_atlas.values()))))]
        failed = present[~present[list(RATINGS)].isin(RATINGS).all(axis=1)]
        excluded += [Exclusion(one, failed.at[one, "SITE_ID"], "failed by the quality raters") for one in failed.index]
        table.rows = table.rows.drop(failed.index)
        by_atlas = {
            name: {one: file for one, file in files.items() if one not in failed.index} for name, files in by_atlas.items()
        }
    subjects, sites = table.subjects, table.sites("SITE_ID")
    people = tables.Participants(
        table=table_path,
        subjects=subjects,
        sites=sites,
        labels=np.full(len(subjects), UNKNOWN, dtype=np.int8),
        tr=np.array([_repetition_time(*each) for each in zip(subjects, sites.tolist(), strict=True)]),
        phenotypes=table.rows,
        inputs=tuple(INPUTS),
        notes=(),
        column="FILE_ID",
        excluded=excluded,
    )
    atlases = [
        AtlasFiles(name, files, lambda scan: load_1d(scan.runs[0]), note=f"atlas {name}, strategy {strategy}")
        for name, files in by_atlas.items()
    ]
    return read_series(people, atlases, name="abide", on_bad=on_bad, progress=progress, complete=_complete)


def _complete(people: tables.Participants) -> tables.Participants:
    """The people who have a series with their labels and phenotypes; other rows of the table are not interpreted."""
    table = tables.SubjectTable(people.phenotypes, people.table)
    labels, note = table.labels("DX_GROUP", patient=("1",), control=("2",))
    phenotypes, implausible = phenotypes_of(table, ("X", "subject", "FILE_ID", "SITE_ID"))
    return people._replace(
        labels=labels, phenotypes=phenotypes, notes=(note, "TR from the sites' scan protocols", *implausible)
    )


def _repetition_time(subject: str, site: str) -> float:
    return 1.5 if subject.startswith("CMU_b_") else TR.get(re.sub(r"_[12]$", "", site), np.nan)


def _table_path(path: Path) -> Path | None:
    return tables.find_table(path, "Phenotypic_V1_0b*.csv")


def choose_files(path: Path, atlas: Atlases, strategy: str | None) -> tuple[str, dict[str, Files]]:
    """Strategy, and the series files of the requested atlases or the only one, by atlas."""
    groups = _groups(path)
    available = [name for name, each in groups if _is_strategy(each, strategy)] or [name for name, _ in groups]
    keys = [_one_group(path, groups, name, strategy) for name in requested(atlas, available) or (None,)]
    for name, other in keys[1:]:
        if other != keys[0][1]:
            different = f"atlas {keys[0][0]} has the strategy {keys[0][1] or '(flat)'}, atlas {name} {other or '(flat)'}"
            raise InputError(f"{path}: {different}; atlases that are read together must have the same.")
    return keys[0][1] or "not known", {key[0]: groups[key] for key in keys}


def _groups(path: Path) -> dict[tuple[str, str], Files]:
    groups: dict[tuple[str, str], Files] = {}
    for file in sorted(path.glob("**/*_rois_*.1D")):
        match = SERIES.match(file.name)
        if match:
            strategy = "/".join(name for name in file.parent.relative_to(path).parts if name in PIPELINES + STRATEGIES)
            group = groups.setdefault((match["atlas"], strategy), {})
            if match["id"] in group:
                raise InputError(f"{file}: subject {match['id']} has a second series file, {group[match['id']][0]}.")
            group[match["id"]] = [file]
    if not groups:
        raise InputError(f"{path} has no series files (<FILE_ID>_rois_<atlas>.1D).")
    return groups


def _one_group(path: Path, groups: Iterable[tuple[str, str]], atlas: str | None, strategy: str | None) -> tuple[str, str]:
    """Atlas and strategy of the requested or the only group."""
    wanted = [key for key in groups if atlas in (None, key[0]) and _is_strategy(key[1], strategy)]
    if len(wanted) != 1:
        available = "; ".join(f"atlas {each[0]}, strategy {each[1] or '(flat)'}" for each in sorted(wanted or groups))
        if wanted:
            raise InputError(f"{path} has several kinds of series; choose one with --atlas and --strategy: {available}.")
        request = ", ".join(f"{name} {value}" for name, value in (("atlas", atlas), ("strategy", strategy)) if value)
        raise InputError(f"{path} has no series of {request}; available: {available}.")
    return wanted[0]


def _is_strategy(present: str, wanted: str | None) -> bool:
    return wanted is None or f"/{present}".endswith(f"/{wanted}")


def load_1d(file: Path) -> tuple[Rois, Series]:
    """ROI names and series of a .1D file, whose name has the atlas."""
    match = SERIES.match(file.name)
    return named_columns(file, *read_table(file), match["atlas"] if match else "")


def phenotypes_of(table: tables.SubjectTable, skip: Iterable[str]) -> tuple[pd.DataFrame, list[Finding]]:
    """Phenotypes without some columns, and notes on implausible values."""
    age, notes = table.ages(INPUTS["age"])
    columns = {"sex": table.sex("SEX"), "age": age}
    columns |= {name: table.numeric(INPUTS[name], above=0) for name in ("viq", "piq", "fiq")}
    unnamed = [name for name in table.rows.columns if name.startswith("Unnamed")]
    return table.with_others(columns, {*INPUTS.values(), *unnamed, *skip}), notes
