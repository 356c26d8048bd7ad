"""One subject from a form: the bytes of a series file and a few words become a `Cohort` of one, or a sentence.

Stands between the web and the model. The readers' parsers do the work on bytes in memory; no file is opened here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from m2lgdg.cohort import UNKNOWN, Cohort, series_defect
from m2lgdg.data.atlases import roi_names
from m2lgdg.data.readers.gather import numbered_rois, parse_array
from m2lgdg.data.readers.tables import FEMALE, MALE
from m2lgdg.method import Method
from m2lgdg.storage import InputError

SUFFIXES = (".1D", ".txt", ".csv", ".tsv", ".npy")
LARGEST = 20 * 2**20  # bytes of a file: 20 minutes of 1000 ROIs as text
MOST_VOLUMES, MOST_NUMBERS = 20_000, 5_000_000
REFUSED = {
    ".mat": "a damaged MATLAB file can crash its reader; save the numbers as .npy or .csv",
    ".npz": "archives are not opened here; save one array as .npy",
}


class Field(NamedTuple):
    """A number that the form asks for, with what it may be."""

    label: str
    unit: str
    low: float
    high: float
    choices: tuple[tuple[str, str], ...] = ()  # value and word, where it is a code


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
    """How a phenotype is asked for; of one that only a lab knows, as any number in that lab's unit."""
    return PHENOTYPES.get(name) or Field(name, "as in the training data", -1e6, 1e6)


def number(field: Field, text: str) -> float:
    """What was typed into a field; NaN where nothing was."""
    text = text.strip()
    if not text:
        return math.nan
    try:
        value = float(text) if "_" not in text else math.nan  # Python takes 17_1 for 171
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise InputError(f"{field.label}: {text[:40]!r} is not a number.")
    if field.choices and f"{value:g}" not in dict(field.choices):
        words = " or ".join(f"{code} ({word})" for code, word in field.choices)
        raise InputError(f"{field.label}: {text[:40]} is not {words}.")
    if not field.low <= value <= field.high:
        allowed = f"{field.low:g} to {field.high:g}" + f" {field.unit}" * bool(field.unit)
        raise InputError(f"{field.label}: {value:g} is not in {allowed}; leave it empty where it is not known.")
    return value


def plain_name(given: str) -> str:
    """The last part of a file name in printable letters, for sentences; it never becomes a path that is opened."""
    last = given.replace("\\", "/").rsplit("/", 1)[-1]
    shown = "".join(letter for letter in last if letter.isprintable()).strip()
    return shown if len(shown) <= 60 else f"{shown[:40]}…{shown[-18:]}"


def one_subject(fitted: Method, file_name: str, content: bytes, phenotypes: Mapping[str, str], tr: str) -> Cohort:
    """The cohort of one that a model is asked about; its subject is called after the file."""
    name = plain_name(file_name)
    values = {key: number(field_of(key), phenotypes.get(key, "")) for key in fitted.facts_["inputs"]}
    seconds = number(TR, tr)
    rois, series = _series(fitted, name, content)
    return Cohort(
        series=[series],
        subjects=np.array([name]),
        sites=np.array([""]),
        labels=np.array([UNKNOWN]),
        rois=rois,
        phenotypes=pd.DataFrame({key: [value] for key, value in values.items()}, index=[name]),
        inputs=tuple(values),
        tr=np.array(seconds),
        atlas=fitted.facts_["atlas"],
        name="of one",
        allow_proxies=True,  # the model's owner chose its inputs
    )


def _series(
    fitted: Method, name: str, content: bytes
) -> tuple[tuple[str, ...], np.ndarray[tuple[int, int], np.dtype[np.float32]]]:
    path = _known_kind(name)
    if not content:
        raise InputError(f"{name} is empty.")
    if path.suffix != ".npy":
        _bounded(name, content)
    header, series = parse_array(path, content)
    wanted, columns = tuple(fitted.facts_["rois"]), series.shape[1]
    if len(series) > MOST_VOLUMES:
        raise InputError(f"{name} has {len(series)} volumes, more than the {MOST_VOLUMES} that are taken.")
    if header is not None and len(header) != columns:
        raise InputError(f"{name}: the header names {len(header)} ROIs but the lines have {columns} columns.")
    if columns != len(wanted):
        turned = "; it seems to have a row for each ROI, so transpose it" if len(series) == len(wanted) else ""
        trained = f"the model was trained on {len(wanted)} ROIs ({fitted.facts_['atlas'] or 'atlas not named'})"
        raise InputError(f"{name} has {columns} columns, {trained}{turned}.")
    # A file without names, or a model without, is taken by position.
    own = wanted if header is None or wanted == numbered_rois(columns) else roi_names(tuple(header), fitted.facts_["atlas"])
    defect = series_defect(series, own)
    if defect:
        raise InputError(f"{name}: {defect}.")
    return own, series


def _bounded(name: str, text: bytes) -> None:
    """Refuse a text with more than a scan can have, before the readers take memory and time for each cell."""
    if text.count(b"\n") > MOST_VOLUMES:
        raise InputError(f"{name} has more than {MOST_VOLUMES} lines.")
    blank = np.frombuffer(text, dtype=np.uint8) <= ord(" ")
    words = int(np.count_nonzero(blank[:-1] & ~blank[1:]))
    if words + sum(text.count(mark) for mark in (b",", b";", b"\t")) > MOST_NUMBERS:
        raise InputError(f"{name} has more than {MOST_NUMBERS} cells.")


def _known_kind(name: str) -> Path:
    """The name as a path with the suffix as the readers spell it; never opened."""
    given = Path(name or "-")
    suffix = next((one for one in SUFFIXES if one.lower() == given.suffix.lower()), None)
    if suffix is None:
        why = REFUSED.get(given.suffix.lower(), f"a series is a file of {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}")
        raise InputError(f"{name or 'the file'} is not read: {why}.")
    return given.with_suffix(suffix)
