"""Fields of a cohort from arrays, data frames and mappings in memory, matched by subject where they have names.

`Cohort.from_arrays` and `Cohort.from_connectomes` call `given_fields`; readers check repetition times here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from m2lgdg.scans import Connectomes, common_kind, connectome_defect, possible_kinds
from m2lgdg.storage import InputError, one_line

UNKNOWN = -1  # label of a subject whose diagnosis is unknown or hidden from a method
INPUTS = ("sex", "age", "education")  # phenotypes that are inputs unless others are chosen, as in data folders
LARGEST = 1e100  # of a value in a table; a larger one is a code, and its square would overflow
FASTEST, SLOWEST = 0.05, 20.0  # seconds; a shorter or longer TR is in another unit


def given_fields(
    n_rois: int,
    count: int,
    *,
    y: Any,
    sites: Any,
    phenotypes: pd.DataFrame | Mapping[str, Any] | None,
    rois: Iterable[str] | None,
    subjects: Iterable[Any] | None,
    patient: Any,
    inputs: Iterable[str] | None,
    tr: Any,
    name: str,
) -> dict[str, Any]:
    """All fields but the scans, for `count` scans of `n_rois` ROIs; `Cohort.from_arrays` describes the parameters."""
    try:
        table = pd.DataFrame() if phenotypes is None else pd.DataFrame(phenotypes)
    except ValueError as error:
        raise InputError(f"cohort {name}: phenotypes are not a table ({one_line(error)[:150]}).") from None
    names = subject_names(subjects, count, table)
    if not isinstance(phenotypes, pd.DataFrame) and isinstance(table.index, pd.RangeIndex) and len(table) == len(names):
        table.index = pd.Index(names)  # plain columns are in the order of the scans, whatever the subjects are called
    table = rows_of(names, table, name)
    y, sites, tr = (in_order(v, names, name, what) for what, v in {"y": y, "sites": sites, "tr": tr}.items())
    sites = [sites] * count if isinstance(sites, str) else list(sites)
    if any(pd.isna(site) or not str(site).strip() for site in sites):
        raise InputError(f"cohort {name}: sites has a missing value; name the site of every subject.")
    numeric = [each for each in INPUTS if each in table.columns and pd.api.types.is_numeric_dtype(table[each].dtype)]
    return {
        "subjects": np.array(names, dtype=np.str_),
        "sites": np.array([str(site) for site in sites], dtype=np.str_),
        "labels": coded_labels(y, patient, name),
        "rois": tuple(str(i + 1) for i in range(n_rois)) if rois is None else tuple(rois),
        "phenotypes": table,
        "inputs": tuple(numeric if inputs is None else inputs),
        "tr": checked_tr(tr, f"cohort {name}"),
        "name": name,
    }


def connectome_fields(matrices: Any, values: str | None, **given: Any) -> dict[str, Any]:
    """All fields of a cohort of connectomes; `Cohort.from_connectomes` describes the parameters."""
    absent: dict[str, Any] = dict.fromkeys(("phenotypes", "rois", "subjects", "patient", "inputs"))
    absent |= {"tr": np.nan, "name": "cohort", "atlas": "", "tables": None}
    if unknown := sorted(set(given) - {"y", "sites", *absent}):
        raise TypeError(f"from_connectomes() got an unexpected keyword argument {unknown[0]!r}")
    given = absent | given
    atlas, tables, arrays = given.pop("atlas"), given.pop("tables"), [np.asarray(one) for one in matrices]
    name = given["name"]
    if not arrays:
        raise InputError(f"cohort {name}: there are no matrices.")
    first = arrays[0]
    if first.ndim != 2 or first.shape[0] != first.shape[1] or first.dtype.kind not in "fiu":
        found = f"the first has shape {first.shape} and type {first.dtype}"
        raise InputError(f"cohort {name}: connectomes are arrays of numbers of shape (ROI, ROI), but {found}.")
    fields = given_fields(len(first), len(arrays), **given)
    names = [f"subject {one}" for one in fields["subjects"]] if len(fields["subjects"]) == len(arrays) else []
    names = names or [f"matrix {i + 1}" for i in range(len(arrays))]
    kind = values or common_kind(map(possible_kinds, arrays), names, f"cohort {name}")
    for named, one in zip(names, arrays, strict=True):
        if defect := connectome_defect(one, fields["rois"], kind):
            raise InputError(f"cohort {name}: {named}: {defect}.")
    return {"series": Connectomes.of(arrays, kind, len(first)), "atlas": atlas, "tables": tables or {}, **fields}


def subject_names(subjects: Iterable[Any] | None, count: int, table: pd.DataFrame | None = None) -> list[str]:
    """The given names, those of the rows of a table, or sub-0001 and so on."""
    if subjects is None and table is not None and len(table) == count:
        subjects = None if pd.api.types.is_integer_dtype(table.index.dtype) else table.index
    return [f"sub-{i + 1:04d}" for i in range(count)] if subjects is None else [str(one) for one in subjects]


def matched_tables(tables: Mapping[str, Any], subjects: Sequence[str], cohort: str) -> dict[str, pd.DataFrame]:
    """Tables of numbers with one row for each subject, matched by the index of a DataFrame; missing where it has none."""
    if not isinstance(tables, Mapping):  # a DataFrame would pass for a table of each column
        raise InputError(f"cohort {cohort}: tables are given by name, such as tables={{'thickness': frame}}.")
    matched = {}
    for name, given in tables.items():
        if not isinstance(name, str) or not name.strip():
            raise InputError(f"cohort {cohort}: one of its tables has no name.")
        if not name.isprintable():
            raise InputError(f"cohort {cohort}: the name of table {name!r} has a character that cannot be printed.")
        where = f"cohort {cohort}, table {name}"
        table = _by_subject(given, subjects, where)
        with np.errstate(over="ignore"):  # of a wider type than float64
            values = table.reindex(list(subjects)).to_numpy(dtype=np.float64, na_value=np.nan)
        if (np.abs(values) > LARGEST).any():
            row, column = np.argwhere(np.abs(values) > LARGEST)[0]
            what = "an infinite value" if np.isinf(values[row, column]) else f"the value {values[row, column]:g}"
            raise InputError(f"{where}: subject {subjects[row]} has {what} in column {table.columns[column]}.")
        index = pd.Index(list(subjects), dtype=object)
        matched[name] = pd.DataFrame(values, index=index, columns=table.columns.astype(object))
    return matched


def _by_subject(given: Any, subjects: Sequence[str], where: str) -> pd.DataFrame:
    """A table of numbers with subjects as its index; refused if it is none, or of other subjects."""
    try:
        table = pd.DataFrame(given)
    except ValueError as error:
        raise InputError(f"{where} is not a table ({one_line(error)[:150]}).") from None
    for what, names in {"rows": table.index, "columns": table.columns}.items():
        if names.nlevels > 1:
            raise InputError(f"{where} has {names.nlevels} levels of names of {what}; give it one, such as with reset_index.")
    table = table.set_axis(table.columns.astype(str), axis=1)
    if not len(table.columns) or not table.columns.is_unique:
        raise InputError(f"{where} has {'a column name twice' if len(table.columns) else 'no columns'}.")
    if isinstance(table.index, pd.RangeIndex):
        table.index = _numbered_rows(table.index, subjects, isinstance(given, pd.DataFrame), where)
    table = table.set_axis(table.index.astype(str), axis=0)
    if table.index.has_duplicates:
        raise InputError(f"{where}: subject {table.index[table.index.duplicated()][0]} has two rows.")
    if len(subjects) and not table.index.isin(list(subjects)).any():
        raise InputError(f"{where}: none of its rows is of a subject of the cohort, such as {subjects[0]}.")
    for column in table.columns:
        kind = table[column].dtype
        if not pd.api.types.is_numeric_dtype(kind) or pd.api.types.is_complex_dtype(kind):
            what = "text" if pd.api.types.is_object_dtype(kind) or pd.api.types.is_string_dtype(kind) else kind
            raise InputError(f"{where}: column {column} holds {what}; a table holds numbers.")
    return table


def _numbered_rows(index: pd.RangeIndex, subjects: Sequence[str], may_be_names: bool, where: str) -> pd.Index:
    """Subjects of rows that are in their order; refused if the numbers of the rows may be names of others."""
    numbers, own = index.astype(str).tolist(), set(subjects)
    plain = index.equals(pd.RangeIndex(len(index)))  # 0, 1, 2 ... are no names, unless they are those of all
    named = set(numbers) == own if plain else not own.isdisjoint(numbers)
    if may_be_names and named and numbers != list(subjects):
        like = "the subjects are in another order" if set(numbers) == own else "some subjects are"
        both = f"its rows are numbered {numbers[0]} to {numbers[-1]}, as {like}"
        raise InputError(f"{where}: {both}; set its index to the subjects of its rows, as text, or give an array.")
    if len(index) != len(subjects):
        raise InputError(f"{where} has {len(index)} rows for {len(subjects)} subjects, and no subjects in its index.")
    return pd.Index(list(subjects), dtype=object)


def rows_of(names: Sequence[str], table: pd.DataFrame, where: str, what: str = "phenotypes") -> pd.DataFrame:
    """Rows of the subjects, by the index if it holds their names, else as they are; 0, 1, 2 ... are no names."""
    index = table.index.astype(str)
    missing = sorted(set(names) - set(index))
    if not len(table.columns):
        return table
    if isinstance(table.index, pd.RangeIndex):
        if not missing and len(names) == len(index) and list(names) != list(index):
            raise InputError(
                f"cohort {where}: the rows of {what} are numbered {index[0]} to {index[-1]}, and the subjects are these "
                f"numbers in another order; set {what}.index to the subjects of its rows, or give arrays (of phenotypes a "
                "dict of columns), which are in the order of the series."
            )
        return table.set_axis(names, axis=0) if len(table) == len(names) else table
    if missing and len(missing) < len(set(names)):
        raise InputError(f"cohort {where}: subject {missing[0]} has no row in {what}, although others have.")
    if missing or index.has_duplicates:
        return table.set_axis(names, axis=0) if len(table) == len(names) else table
    return table.set_axis(index, axis=0).loc[list(names)]


def in_order(values: Any, names: Sequence[str], where: str, what: str) -> Any:
    """Values of the subjects; a pandas Series is put into their order, as the rows of phenotypes are."""
    return rows_of(names, values.to_frame(), where, what).iloc[:, 0] if isinstance(values, pd.Series) else values


def need_seconds(seconds: float, where: str) -> float:
    """A repetition time; one above 20 s or below 0.05 s is refused, because milliseconds are meant."""
    if 0 < seconds < FASTEST:
        raise InputError(
            f"{where}: a TR of {seconds:g} s is below {FASTEST:g} s, and no scanner is so fast; milliseconds may have been "
            f"divided by 1000 twice: give it in seconds ({seconds * 1000:g})."
        )
    if seconds > SLOWEST:
        raise InputError(
            f"{where}: a TR of {seconds:g} s is above {SLOWEST:g} s and looks like milliseconds; "
            f"give it in seconds ({seconds / 1000:g})."
        )
    return seconds


def checked_tr(tr: Any, where: str) -> npt.NDArray[np.float64]:
    """Repetition times of subjects, or of all of them, in seconds; NaN is unknown."""
    seconds = np.asarray(tr, dtype=np.float64)
    for one in np.unique(seconds[np.isfinite(seconds)]):
        need_seconds(float(one), where)
    return seconds


def coded_labels(y: Any, patient: Any, name: str) -> npt.NDArray[np.int8]:
    """Labels of 1, 0 and -1 from y."""
    values = pd.Series(np.asarray(y).tolist(), dtype=object)
    known = values[~values.isna() & ~values.isin([UNKNOWN])] if patient is None else values[~values.isna()]
    classes = list(dict.fromkeys(known.tolist()))
    listed = ", ".join(map(str, classes[:5]))
    if len(classes) > 2:
        raise InputError(f"cohort {name}: y has {len(classes)} classes ({listed}); a cohort has patients and controls.")
    if patient is None and not set(classes) <= {0, 1}:
        raise InputError(f"cohort {name}: y holds {listed}; name the value of patients, such as patient={classes[-1]!r}.")
    if patient is not None and patient not in classes:
        raise InputError(f"cohort {name}: patient={patient!r} does not occur in y, which holds {listed}.")
    labels = np.full(len(values), UNKNOWN, dtype=np.int8)
    labels[known.index] = (known == (1 if patient is None else patient)).to_numpy(dtype=np.int8)
    return labels


def natural_key(text: str) -> list[tuple[int, int, str]]:
    """Sort key that puts S2 before S10."""
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in re.findall(r"[0-9]+|[^0-9]+", text)]
