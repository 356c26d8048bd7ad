"""Variables of MATLAB files: up to version 7 by scipy, 7.3, which is HDF5, by h5py.

Used by `arrays.py` for series and by `matrices.py` for connectomes. Size and type of a variable are judged before its numbers
are read, and nothing outside the file is followed.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from m2lgdg.storage import InputError, needing, read_bytes

LARGEST = 512 << 20  # bytes of a file, and of one of its variables
NUMERIC = ("double", "single", "logical", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)))


class Variable(NamedTuple):
    """Name, shape and MATLAB class of a variable."""

    name: str
    shape: tuple[int, ...]
    kind: str


Fits = Callable[[Variable], bool]


def load_variable(path: Path, wanted: str | None, fits: Fits = lambda variable: True) -> npt.NDArray[Any]:
    """Variable of a MATLAB file: that of this name, else the only one, else the only one that `fits`."""
    from scipy.io import loadmat, whosmat

    content = read_bytes(path, LARGEST)
    try:
        known = [Variable(*each) for each in whosmat(io.BytesIO(content))]
        name = _chosen(path, known, wanted, fits)
        return np.asarray(loadmat(io.BytesIO(content), variable_names=[name])[name])
    except InputError:
        raise
    except NotImplementedError:
        pass  # 7.3
    except Exception as error:  # damaged files raise errors of any type in scipy and zlib
        raise InputError(f"{path} is not a readable MATLAB file ({type(error).__name__}).") from None
    return _load_hdf5(path, content, wanted, fits)


def _load_hdf5(path: Path, content: bytes, wanted: str | None, fits: Fits) -> npt.NDArray[Any]:
    with needing("matlab", f"{path}: a MATLAB 7.3 file (one that was not saved with -v7)"):
        import h5py
    try:
        with h5py.File(io.BytesIO(content), "r") as file:
            # A link may lead to another file, and so may a dataset whose numbers are stored elsewhere.
            links = [name for name in file if isinstance(file.get(name, getlink=True), h5py.HardLink)]
            found = {name: file[name] for name in links if isinstance(file[name], h5py.Dataset)}
            found = {name: one for name, one in found.items() if one.external is None and not one.is_virtual}
            known = [Variable(name, tuple(reversed(one.shape or ())), _matlab_class(one)) for name, one in found.items()]
            name = _chosen(path, known, wanted, fits)
            return np.asarray(found[name]).T  # HDF5 has the axes of MATLAB in reverse
    except InputError:
        raise
    except Exception as error:  # as above
        raise InputError(f"{path} is not a readable MATLAB 7.3 file ({type(error).__name__}); save it with -v7.") from None


def _matlab_class(dataset: Any) -> str:
    """Class that MATLAB writes into an attribute; a file of another program has only the type of the numbers."""
    stored = dataset.attrs.get("MATLAB_class", b"")
    text = stored.decode(errors="replace") if isinstance(stored, bytes) else str(stored)
    if dataset.dtype.kind not in "fiu":
        return {"V": "complex", "c": "complex", "O": "cell"}.get(dataset.dtype.kind, str(dataset.dtype))
    return text or "double"


def _chosen(path: Path, variables: Sequence[Variable], wanted: str | None, fits: Fits) -> str:
    known = {one.name: one for one in variables if not one.name.startswith("__")}
    if wanted is not None and wanted not in known:
        raise InputError(f"{path} has no variable {wanted}.")
    some = list(known) if len(known) == 1 else [name for name, one in known.items() if fits(one)]
    if wanted is None and len(some) != 1:
        listed = ", ".join(some or known)
        raise InputError(f"{path} has {len(some or known)} variables ({listed}); name one in dataset.toml: variable = ...")
    name, shape, kind = known[wanted or some[0]]
    if kind == "unknown":
        raise ValueError("no class of MATLAB has this number")
    if kind not in NUMERIC:
        raise InputError(f"{path}: variable {name} contains {kind} values, not real numbers.")
    if 8 * math.prod(shape) > LARGEST:
        raise InputError(f"{path}: variable {name} would take {8 * math.prod(shape)} bytes, more than the limit of {LARGEST}.")
    return name
