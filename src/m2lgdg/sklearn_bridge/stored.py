"""Fitted estimators as bytes, by skops: types and arrays without pickle, so that reading a model runs no code of its author.

`from_sklearn` keeps the bytes with the weights of a model. Types that skops does not trust are refused.
"""

from __future__ import annotations

import copy
import io
import json
import types
import zipfile
from typing import Any

import numpy as np
import numpy.typing as npt

from m2lgdg.storage import InputError, needing, one_line

SCHEMA = "schema.json"
EPOCH = (1980, 1, 1, 0, 0, 0)  # date of files in the archive
SPLITTERS = ("KFold", "StratifiedKFold", "GroupKFold", "StratifiedGroupKFold", "LeaveOneGroupOut", "LeaveOneOut")
# Plain Python classes that hold numbers and settings only; compiled ones, such as trees, trust the arrays that they are given.
TRUSTED = [
    "m2lgdg.sklearn_bridge.routing.SiteFolds",
    *(f"sklearn.model_selection._split.{name}" for name in SPLITTERS),
    *(f"sklearn.calibration.{name}" for name in ("_CalibratedClassifier", "_SigmoidCalibration", "_TemperatureScaling")),
    *(f"sklearn.neural_network._stochastic_optimizers.{name}" for name in ("AdamOptimizer", "SGDOptimizer")),
    "sklearn.utils._bunch.Bunch",
]


def lean(value: Any) -> Any:
    """A fitted estimator without what it does not need to predict: a search becomes its best estimator."""
    from sklearn.base import BaseEstimator

    if hasattr(value, "best_estimator_"):
        return lean(value.best_estimator_)
    if type(value) in (list, tuple):
        return type(value)(lean(one) for one in value)
    if isinstance(value, dict):  # or a Bunch
        made = copy.copy(value)
        made.update({name: lean(one) for name, one in value.items()})
        return made
    if isinstance(value, BaseEstimator) or type(value).__module__ == "sklearn.calibration":
        made = copy.copy(value)
        vars(made).update({name: lean(one) for name, one in vars(value).items()})
        return made
    return value


def packed(estimator: Any) -> npt.NDArray[np.uint8]:
    """Bytes of a fitted estimator, the same for equal content; InputError if it cannot be stored, or read again."""
    skops = _skops()
    try:
        content = skops.dumps(estimator)
    except Exception as error:  # skops raises many kinds
        raise InputError(f"skops cannot store {type(estimator).__name__} ({one_line(error)[:150]}).") from None
    untrusted = [name for name in skops.get_untrusted_types(data=content) if name not in TRUSTED]
    if untrusted:
        raise InputError(
            f"{type(estimator).__name__} cannot be saved, because it holds {untrusted[0]}, a type that skops does not trust."
        )
    return np.frombuffer(_canonical(content), dtype=np.uint8)


def unpacked(content: npt.NDArray[np.uint8]) -> Any:
    """The estimator of these bytes, of which compiled code gets no array that it would read beyond its end."""
    skops = _skops()
    data = np.asarray(content, dtype=np.uint8).tobytes()
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            entries = archive.infolist()
        packed_ones = [entry for entry in entries if entry.compress_type != zipfile.ZIP_STORED]
        if packed_ones or sum(entry.file_size for entry in entries) > len(data):  # `packed` compresses nothing
            raise ValueError("its archive is larger than it seems")
        untrusted = [name for name in skops.get_untrusted_types(data=data) if name not in TRUSTED]
        if untrusted:
            raise InputError(f"the estimator of the model is refused: skops does not trust its type {untrusted[0][:200]}.")
        estimator = skops.loads(data, trusted=TRUSTED)
        _check(estimator)
        return estimator
    except InputError:
        raise
    except Exception as error:  # of zipfile, json, numpy or scikit-learn
        raise InputError(f"the estimator of the model cannot be read ({one_line(error)[:200]}).") from None


def _check(value: Any) -> None:
    """Refuse arrays that do not fit together where compiled code relies on it: those of libsvm and of neighbours."""
    if isinstance(value, list | tuple | dict):
        for one in value.values() if isinstance(value, dict) else value:
            _check(one)
    elif hasattr(value, "__dict__") and not isinstance(value, type | types.FunctionType):
        neighbours = type(value).__module__.startswith("sklearn.neighbors") and "_fit_X" in vars(value)
        if ("_n_support" in vars(value) and not _fits_libsvm(value)) or (neighbours and not _fits_neighbours(value)):
            raise ValueError(f"the arrays of {type(value).__name__} do not fit together")
        _check(vars(value))


def _fits_libsvm(one: Any) -> bool:
    count, classes, rows = int(np.sum(one._n_support)), len(one.classes_), one.shape_fit_[0]
    pairs = (classes * (classes - 1) // 2,)
    shapes = {"_n_support": (classes,), "support_": (count,), "_dual_coef_": (classes - 1, count), "_intercept_": pairs}
    shapes["support_vectors_"] = (0, 0) if one.kernel == "precomputed" else (count, one.n_features_in_)
    shapes |= {name: pairs for name in ("_probA", "_probB") if getattr(one, name).size}
    same = all(np.shape(getattr(one, name)) == shape for name, shape in shapes.items())
    inside = np.min(one._n_support) >= 0 and np.all(one.support_ >= 0) and np.all(one.support_ < rows)
    return bool(same and inside and not one._sparse and not callable(one.kernel))


def _fits_neighbours(one: Any) -> bool:
    labels, rows = getattr(one, "_y", np.zeros(len(one._fit_X))), len(one._fit_X)
    same = (
        np.shape(one._fit_X) == (rows, one.n_features_in_)
        and np.shape(labels) == (rows,)
        and getattr(one, "_tree", None) is None
    )
    return bool(same and np.min(labels) >= 0 and np.max(labels) < len(getattr(one, "classes_", [0])))


def _skops() -> Any:
    """The module skops.io, which takes seconds to import: it loads all of scikit-learn."""
    with needing("skops", "a model of a scikit-learn estimator"):  # studies run without
        import skops.io
    return skops.io


def _canonical(content: bytes) -> bytes:
    """The same archive without addresses of objects and dates, so that two fits with the same result are the same bytes."""
    numbers: dict[int, int] = {}
    files: dict[str, str] = {}

    def renumbered(node: Any) -> Any:
        if isinstance(node, list):
            return [renumbered(one) for one in node]
        if not isinstance(node, dict):
            return node
        changed = {key: renumbered(value) for key, value in node.items()}
        if isinstance(node.get("__id__"), int):
            changed["__id__"] = numbers.setdefault(node["__id__"], len(numbers))
        if isinstance(node.get("file"), str) and "__loader__" in node:
            end = node["file"].rpartition(".")[2]
            changed["file"] = files.setdefault(node["file"], f"{len(files)}.{end}")
        return changed

    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as given, zipfile.ZipFile(buffer, "w") as archive:
        schema = json.dumps(renumbered(json.loads(given.read(SCHEMA))))
        for old, new in files.items():
            archive.writestr(zipfile.ZipInfo(new, EPOCH), given.read(old))
        archive.writestr(zipfile.ZipInfo(SCHEMA, EPOCH), schema)
    return buffer.getvalue()
