"""Features that the cells of a study share: computed once, in files of the study folder that every worker maps.

Before each cell, `study.runner` tells `connectivity` where they are. They hold nothing that is fitted, so a cell gives the same
result with and without them, and they are removed at the end of a run.
"""

from __future__ import annotations

import contextlib
import hashlib
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from m2lgdg.cohort import Cohort
from m2lgdg.connectivity import Compute, KeptFeatures, keep_features
from m2lgdg.storage import InputError, writing
from m2lgdg.study.folder import one_at_a_time

FOLDER = ".features"  # in the study folder


class SharedFeatures(KeptFeatures):
    """Features of a cohort of one atlas in memory-mapped files; the first process that asks for a kind writes its file."""

    def __init__(self, cohort: Cohort, folder: Path, code: str) -> None:
        super().__init__(cohort.series)
        self.folder = folder
        # Rows are in the order of the subjects, which is not part of the cohort's hash.
        self.key = hashlib.sha256("\n".join([cohort.hash, code, *cohort.subjects.tolist()]).encode()).hexdigest()[:16]

    def compute(self, name: str, shape: tuple[int, ...], compute: Compute, dtype: type) -> npt.NDArray[Any]:
        """Map the file of this kind, after writing it if there is none; on a full disk, this process computes its own."""
        path = self.folder / f"{name}-{self.key}.npy"
        try:
            return self._mapped(path, shape, compute, dtype)
        except InputError:
            return super().compute(name, shape, compute, dtype)

    def _mapped(self, path: Path, shape: tuple[int, ...], compute: Compute, dtype: type) -> npt.NDArray[Any]:
        with one_at_a_time(self.folder):
            if not path.exists():
                # Written, not mapped: a map that meets a full disk ends the process without a word.
                with writing(path) as part, part.open("wb") as file:
                    kind = {"descr": np.dtype(dtype).str, "fortran_order": False, "shape": (len(self.series), *shape)}
                    np.lib.format.write_array_header_1_0(file, kind)
                    for values in compute(self.series):
                        file.write(np.asarray(values, dtype=dtype, order="C").tobytes())
            return np.asarray(np.load(path, mmap_mode="r"))


_SHARED: dict[str, tuple[Cohort, list[SharedFeatures]]] = {}  # by study folder: the cohort that this process holds; at most one


def share_features(cohort: Cohort, out: str, code: str) -> None:
    """Use the shared features of this cohort, or start them, for the next fits of this process."""
    if out not in _SHARED or _SHARED[out][0] is not cohort:
        _SHARED.clear()
        _SHARED[out] = cohort, [SharedFeatures(one, Path(out) / FOLDER, code) for one in cohort.each_atlas()]
    keep_features(*_SHARED[out][1])


def forget_features(out: str | Path) -> None:
    """Remove the files of a study; processes that still use them keep their maps."""
    _SHARED.pop(str(out), None)
    keep_features()
    with contextlib.suppress(OSError):  # some systems keep files that are in use
        shutil.rmtree(Path(out) / FOLDER)
