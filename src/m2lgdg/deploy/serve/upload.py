"""Parsing of an upload: the bytes of a file with a series or a connectome, and the form's fields, become a `Cohort` of one.

Called by the web application before the model. The readers' parsers work on bytes in memory, and no file is opened; `structure`
parses tables.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from m2lgdg import scans
from m2lgdg.cohort import UNKNOWN, Cohort, Parcellation, series_defect
from m2lgdg.data.atlases import roi_names
from m2lgdg.data.readers.arrays import numbered_rois, parse_array
from m2lgdg.data.readers.images import CONNECTOME, PARCELLATED, load_parcellated
from m2lgdg.data.readers.matrices import parse_matrix
from m2lgdg.data.readers.tables import FEMALE, MALE
from m2lgdg.deploy.serve.structure import Files, expected_tables, rows_of
from m2lgdg.fields import nearest
from m2lgdg.method import Method
from m2lgdg.model.model import Model
from m2lgdg.storage import InputError

ARRAYS = (".1D", ".txt", ".csv", ".tsv", ".npy")
SUFFIXES = {"series": (*ARRAYS, PARCELLATED), "connectome": (*ARRAYS, CONNECTOME)}  # by what a model takes
LARGEST = 20 * 2**20  # bytes of a file: 20 minutes of 1000 ROIs as text
MOST_VOLUMES, MOST_NUMBERS = 20_000, 5_000_000
REFUSED = {  # with the name of what a model takes
    ".mat": "damaged MATLAB files can crash their reader; save the {what} as .npy or .csv",
    ".npz": "archives are not supported; save the array as .npy",
}


class OtherRois(InputError):
    """A file has another number of ROIs than the model."""


class Field(NamedTuple):
    """A number in the form, with its limits."""

    label: str
    unit: str
    low: float
    high: float
    choices: tuple[tuple[str, str], ...] = ()  # value and label of a categorical field


TR = Field("TR", "seconds", 0.05, 30.0)
PHENOTYPES = {
    "sex": Field("Sex", "", MALE, FEMALE, ((f"{MALE:g}", "male"), (f"{FEMALE:g}", "female"))),
    "age": Field("Age", "years", 0.1, 120.0),
    "education": Field("Education", "years", 0.0, 60.0),
    "viq": Field("Verbal IQ", "", 1.0, 300.0),
    "piq": Field("Performance IQ", "", 1.0, 300.0),
    "fiq": Field("Full-scale IQ", "", 1.0, 300.0),
}


def field_of(name: str) -> Field:
    """Form field of a phenotype; an unknown phenotype accepts any number."""
    return PHENOTYPES.get(name) or Field(name, "as in the training data", -1e6, 1e6)


def number(field: Field, text: str) -> float:
    """Number typed into a field; NaN if it is empty."""
    text = text.strip()
    if not text:
        return math.nan
    try:
        value = float(text) if "_" not in text else math.nan  # Python reads 17_1 as 171
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise InputError(f"{field.label}: {text[:40]!r} is not a number.")
    if field.choices and f"{value:g}" not in dict(field.choices):
        words = " or ".join(f"{code} ({word})" for code, word in field.choices)
        raise InputError(f"{field.label}: {text[:40]} is not {words}.")
    if not field.low <= value <= field.high:
        allowed = f"{field.low:g} to {field.high:g}" + f" {field.unit}" * bool(field.unit)
        raise InputError(
            f"{field.label}: {value:g} is not in the range {allowed}; leave the field empty if the value is not known."
        )
    return value


def plain_name(given: str) -> str:
    """Last part of a file name in printable characters, for messages; it is never opened as a path."""
    last = given.replace("\\", "/").rsplit("/", 1)[-1]
    shown = "".join(letter for letter in last if letter.isprintable()).strip()
    return shown if len(shown) <= 60 else f"{shown[:40]}…{shown[-18:]}"


class Numbers(NamedTuple):
    """A scan that was sent as numbers, in place of the content of a file: (row, column), and the ROIs if they are named."""

    values: npt.NDArray[np.float64]
    rois: tuple[str, ...] | None = None


Content = bytes | Numbers


def example_file(rois: int) -> tuple[str, bytes]:
    """Name and content of a synthetic scan of 200 volumes, always the same: eight smooth courses, mixed, and noise."""
    rng = np.random.default_rng(0)
    courses = np.apply_along_axis(np.convolve, 0, rng.standard_normal((205, 8)), np.ones(6), "valid")  # (time, course)
    series = courses @ rng.standard_normal((8, rois)) + 4 * rng.standard_normal((len(courses), rois))  # (time, roi)
    return "synthetic.csv", "\n".join(",".join(f"{value:.4f}" for value in row) for row in series).encode()


def one_subject(
    fitted: Model,
    files: Mapping[str, tuple[str, Content]],
    phenotypes: Mapping[str, str],
    tr: str,
    tables: Files | None = None,
) -> Cohort:
    """Cohort of one subject from the name and content of one file for each atlas, and of those of each table.

    It is named after the first file.
    """
    name = plain_name(next(iter(files.values()))[0])
    values = {key: number(field_of(key), phenotypes.get(key, "")) for key in fitted.facts_["inputs"]}
    seconds = number(TR, tr)
    plain = {table: [(plain_name(file), content) for file, content in own] for table, own in (tables or {}).items()}
    given = {atlas: _scan(fitted.members[atlas], plain_name(file), content) for atlas, (file, content) in files.items()}
    (atlas, (rois, scan)), *others = given.items()
    return Cohort(
        series=scan,
        subjects=np.array([name]),
        sites=np.array([""]),
        labels=np.array([UNKNOWN]),
        rois=rois,
        phenotypes=pd.DataFrame({key: [value] for key, value in values.items()}, index=[name]),
        inputs=tuple(values),
        tr=np.array(seconds),
        atlas=atlas,
        name="of one",
        parcellations={other: Parcellation(names, one) for other, (names, one) in others},
        allow_proxies=True,  # the model's owner chose its inputs
        tables=rows_of(expected_tables(fitted), plain, name),
    )


def is_scan(name: str) -> bool:
    """Whether a file of this name can hold one scan."""
    return any(name.lower().endswith(suffix.lower()) for suffixes in SUFFIXES.values() for suffix in suffixes)


def one_file(fitted: Model, name: str, content: bytes, phenotypes: Mapping[str, str], tables: Files | None = None) -> Cohort:
    """As `one_subject` for one file, in the atlas of the model that has as many ROIs as it has columns, or the first."""
    for key in phenotypes:
        if key not in fitted.facts_["inputs"]:
            raise InputError(f"{key} is not a phenotype of the model{nearest(key, fitted.facts_['inputs'])}")
    expected = [one.name for one in expected_tables(fitted)]
    for key in tables or ():
        if key not in expected:
            raise InputError(f"{key} is not a table of the model{nearest(key, expected)}")
    atlases, refusals = list(fitted.members), []
    for atlas in atlases:
        try:
            return one_subject(fitted, {atlas: (name, content)}, phenotypes, "", tables)
        except OtherRois as error:
            refusals.append(error)
    raise refusals[0]


def taken(fitted: Method) -> str:
    """What a model of one atlas takes: a series, or a connectome."""
    return "series" if fitted.trained_on == scans.SERIES else "connectome"


def _scan(fitted: Method, name: str, content: Content) -> tuple[tuple[str, ...], scans.Scans]:
    """ROIs of a file, and its series or connectome."""
    if isinstance(content, Numbers):
        return (_series if taken(fitted) == "series" else _connectome)(fitted, Path(name), content)
    path = _known_kind(fitted, name)
    if not content:
        raise InputError(f"{name} is empty.")
    if path.suffix not in (".npy", ".nii"):
        _bounded(name, content)
    return (_series if taken(fitted) == "series" else _connectome)(fitted, path, content)


def _connectome(fitted: Method, path: Path, content: Content) -> tuple[tuple[str, ...], scans.Scans]:
    name, count = path.name, len(fitted.facts_["rois"])
    trained = f"the model was trained on connectomes ({fitted.trained_on}) of {count} ROIs"
    header, matrix = (content.rois, content.values) if isinstance(content, Numbers) else parse_matrix(path, content)
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
        raise InputError(f"{name} has shape {matrix.shape}, and {trained}; give the matrix of the subject, not a series.")
    if len(matrix) != count:
        raise OtherRois(f"{name} has {len(matrix)} ROIs, and {trained}.")
    rois = _named(fitted, header, count)
    try:
        return rois, scans.Connectomes.of([scans.in_kind(matrix, rois, fitted.trained_on)], fitted.trained_on, count)
    except InputError as error:
        raise InputError(f"{name}: {error}.") from None


def _named(fitted: Method, header: Sequence[str] | None, count: int) -> tuple[str, ...]:
    """Names of the ROIs of a file; without any in the file or in the model, they are matched by position."""
    wanted = tuple(fitted.facts_["rois"])
    return wanted if header is None or wanted == numbered_rois(count) else roi_names(tuple(header), fitted.facts_["atlas"])


def _series(fitted: Method, path: Path, content: Content) -> tuple[tuple[str, ...], scans.Scans]:
    name = path.name
    header: Sequence[str] | None
    if isinstance(content, Numbers):
        header, series = content.rois, scans.as_float32(content.values)
    elif path.name.endswith(PARCELLATED):
        header, series = load_parcellated(path, content)
        series = np.where(np.isnan(series).all(axis=0), np.float32(0), series)  # parcels without coverage
    else:
        header, series = parse_array(path, content)
    wanted, columns = tuple(fitted.facts_["rois"]), series.shape[1]
    if len(series) > MOST_VOLUMES:
        raise InputError(f"{name} has {len(series)} volumes; the limit is {MOST_VOLUMES}.")
    if header is not None and len(header) != columns:
        raise InputError(f"{name}: the header names {len(header)} ROIs but the lines have {columns} columns.")
    if columns != len(wanted):
        turned = "; it seems to have one row per ROI, so transpose it" if len(series) == len(wanted) else ""
        trained = f"the model was trained on {len(wanted)} ROIs ({fitted.facts_['atlas'] or 'atlas not named'})"
        raise OtherRois(f"{name} has {columns} columns, {trained}{turned}.")
    rois = _named(fitted, header, columns)
    if scans.is_connectome(series):
        raise InputError(f"{name} is a connectome, and the model was trained on time series; give the series of the ROIs.")
    if defect := series_defect(series, rois):
        raise InputError(f"{name}: {defect}.")
    return rois, (series,)


def _bounded(name: str, text: bytes) -> None:
    """Refuse text with more cells than a scan can have, before the readers spend memory and time on it."""
    if text.count(b"\n") > MOST_VOLUMES:
        raise InputError(f"{name} has more than {MOST_VOLUMES} lines.")
    blank = np.frombuffer(text, dtype=np.uint8) <= ord(" ")
    words = int(np.count_nonzero(blank[:-1] & ~blank[1:]))
    if words + sum(text.count(mark) for mark in (b",", b";", b"\t")) > MOST_NUMBERS:
        raise InputError(f"{name} has more than {MOST_NUMBERS} cells.")


def _known_kind(fitted: Method, name: str) -> Path:
    """Name as a path, with its suffix as the readers spell it; never opened."""
    what = taken(fitted)
    suffixes = SUFFIXES[what]
    suffix = next((known for known in suffixes if name.lower().endswith(known.lower()) and len(name) > len(known)), None)
    if suffix is None:
        reason = f"a {what} file ends in {', '.join(suffixes[:-1])} or {suffixes[-1]}"
        reason = REFUSED.get(Path(name or "-").suffix.lower(), reason).format(what=what)
        for other in SUFFIXES:
            if other != what and name.lower().endswith(SUFFIXES[other][-1]):
                reason = f"it holds a {other}, and the model takes a {what}"
        raise InputError(f"{name or 'the file'} cannot be read: {reason}.")
    return Path(name[: -len(suffix)] + suffix)
