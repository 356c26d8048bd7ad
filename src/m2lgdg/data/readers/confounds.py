"""Confounds and head motion of a run, from the tables that fMRIPrep and XCP-D write into its folder.

The BIDS reader regresses the confounds out of NIfTI runs and dense series, and adds the motion to the phenotypes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from m2lgdg.data.readers.tables import MOTION, read_text_table
from m2lgdg.data.readers.text import MISSING
from m2lgdg.findings import Finding
from m2lgdg.storage import InputError, one_line

STRATEGIES = ("simple", "scrubbing", "compcor")  # by their names in nilearn
FMRIPREP = "_desc-confounds_timeseries.tsv"
XCPD = ("_motion.tsv", "_desc-filtered_motion.tsv")
DISPLACEMENT = "framewise_displacement"
MEAN_FD, REMOVED = "mean_fd", "scrubbed_volumes"  # phenotype columns
AFTER_SCAN = re.compile(r"_(?:space|desc|atlas|seg|res|den)-|_bold[_.]|_timeseries[_.]")  # what follows the entities of a scan


class Confounds(NamedTuple):
    """Regressors of a run, and the volumes to keep; None where there are none, and where all are kept."""

    regressors: Any
    sample_mask: npt.NDArray[np.int_] | None


def need_strategy(strategy: str | None) -> None:
    """Refuse a strategy that is not known."""
    if strategy is not None and strategy not in STRATEGIES:
        raise InputError(f"option confounds: {strategy!r} is not a strategy; choose one of {', '.join(STRATEGIES)}.")


def confounds_table(run: Path) -> Path | None:
    """fMRIPrep's table of confounds in the folder of a run."""
    return _next_to(run, (FMRIPREP,))


def load_confounds(run: Path, strategy: str | None) -> Confounds:
    """Confounds of a run by a strategy of nilearn, `simple` by default (motion, white matter, CSF).

    A run without a table has none, unless a strategy was given.
    """
    table = confounds_table(run)
    if table is None:
        if strategy is not None:
            raise InputError(f"{run}: no {_scan(run)}{FMRIPREP} in its folder, which option confounds ({strategy}) needs.")
        return Confounds(None, None)
    from nilearn.interfaces.fmriprep import load_confounds_strategy

    strategy = strategy or STRATEGIES[0]
    try:
        confounds = Confounds(*load_confounds_strategy(str(run), denoise_strategy=strategy))
    except Exception as error:  # nilearn raises errors of its own for missing columns and sidecar files
        raise InputError(f"{table}: confounds of strategy {strategy} cannot be loaded ({one_line(error)}).") from None
    if confounds.sample_mask is not None and not len(confounds.sample_mask):
        raise InputError(f"{table}: confounds of strategy {strategy} leave no volume.")
    return confounds


def mean_displacement(runs: Sequence[Path]) -> float:
    """Mean framewise displacement over all volumes of all runs, also of those that are scrubbed; NaN if a run has none."""
    tables = [_next_to(run, (FMRIPREP, *XCPD)) for run in runs]
    values = [_displacement(table) for table in tables if table is not None]
    if len(values) < len(runs) or not any(map(len, values)):
        return math.nan
    return float(np.concatenate(values).mean())


def add_motion(
    phenotypes: pd.DataFrame, displacement: Sequence[float], volumes: Sequence[tuple[int, int] | None], strategy: str | None
) -> tuple[pd.DataFrame, list[Finding]]:
    """Phenotypes with the head motion and the number of scrubbed volumes, and a note on the latter for each subject.

    `volumes` holds the removed and all volumes of each subject. A column of motion in participants.tsv is left as it is.
    """
    added: dict[str, object] = {}
    notes: list[Finding] = []
    if not np.isnan(displacement).all() and not {str(name).lower() for name in phenotypes.columns} & set(MOTION):
        added[MEAN_FD] = np.asarray(displacement, dtype=np.float64)
    counts = {subject: each for subject, each in zip(phenotypes.index, volumes, strict=True) if each is not None}
    removed = {subject: each for subject, each in counts.items() if each[0]}
    if removed or (strategy == "scrubbing" and counts):
        added[REMOVED] = np.array([np.nan if each is None else each[0] for each in volumes], dtype=np.float64)
        listed = {subject: f"{lost} of {every}" for subject, (lost, every) in removed.items()}
        notes = [Finding("scrubbed", "", tuple(removed), {"listed": listed or "none"})]
    return phenotypes.assign(**added), notes


def _scan(run: Path) -> str:
    """Start of the name of a run, with the entities of the scan alone."""
    return AFTER_SCAN.split(run.name)[0]


def _next_to(run: Path, endings: Sequence[str]) -> Path | None:
    return next((file for end in endings if (file := run.with_name(f"{_scan(run)}{end}")).is_file()), None)


def _displacement(path: Path) -> npt.NDArray[np.float64]:
    """Framewise displacement of the volumes that have one (the first volume has none)."""
    table = read_text_table(path, "\t")
    if DISPLACEMENT not in table.columns:
        return np.empty(0)
    values = []
    for line, cell in table[DISPLACEMENT].items():
        try:
            values.append(math.nan if cell.lower() in MISSING else float(cell))
        except ValueError:
            raise InputError(f"{path}, line {line}, column {DISPLACEMENT}: {cell[:40]!r} is not a number.") from None
    displacement = np.array(values, dtype=np.float64)
    return displacement[np.isfinite(displacement)]
