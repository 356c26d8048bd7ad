"""A cohort from arrays and data frames, and back: `from_arrays`, slices, masks, `query`, `to_frame` and its HTML.

`Cohort` inherits from `ArrayAccess`. Readers do not need it; people in a notebook do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt
import pandas as pd

from m2lgdg.notebook.html import shown_table
from m2lgdg.storage import InputError, one_line

INPUTS = ("sex", "age", "education")  # phenotypes that are inputs unless others are chosen, as in data folders
COLUMNS = ("site", "label", "tr", "volumes")  # of a data frame of a cohort, before the phenotypes
CONTROL, PATIENT = 0, 1
UNKNOWN = -1


class ArrayAccess:
    """The part of `Cohort` that works with arrays, data frames and notebooks."""

    if TYPE_CHECKING:
        name: str
        atlas: str
        series: Sequence[npt.NDArray[np.float32]]
        subjects: npt.NDArray[np.str_]
        sites: npt.NDArray[np.str_]
        labels: npt.NDArray[np.int8]
        rois: tuple[str, ...]
        phenotypes: pd.DataFrame
        tr: npt.NDArray[np.float64]

        @property
        def site_names(self) -> list[str]:
            """As in `Cohort`."""

        @property
        def lengths(self) -> npt.NDArray[np.int64]:
            """As in `Cohort`."""

        def __len__(self) -> int: ...

        def select(self, which: npt.ArrayLike | None = None) -> Self:
            """As in `Cohort`."""

    @classmethod
    def from_arrays(
        cls,
        series: Any,
        y: Any,
        sites: Any,
        phenotypes: pd.DataFrame | Mapping[str, Any] | None = None,
        rois: Iterable[str] | None = None,
        *,
        subjects: Iterable[Any] | None = None,
        patient: Any = None,
        inputs: Iterable[str] | None = None,
        tr: Any = np.nan,
        atlas: str = "",
        name: str = "cohort",
    ) -> Self:
        """A cohort from arrays in memory.

        Parameters
        ----------
        series : list of arrays of shape (time, ROI), or array of shape (subject, time, ROI)
            Series of each subject; lengths may differ.
        y : array of shape (subject,)
            Labels: 1 patient, 0 control, -1 or missing unknown; or any two values, with `patient` naming one of them.
        sites : array of shape (subject,), or str
            Site of each subject; a single text if all are of one site.
        phenotypes : DataFrame or mapping of columns, optional
            One row for each subject, in the same order; if its index holds the given `subjects`, rows are found by it.
        rois : sequence of str, optional
            Names of the ROIs; numbers by default.
        subjects : sequence, optional
            Names of the subjects; by default the index of `phenotypes` if it has names, else sub-0001 and so on.
        patient : optional
            Value of y that means patient.
        inputs : sequence of str, optional
            Phenotypes that methods may use; by default sex, age and education, if they are numeric columns.
        tr : float or array of shape (subject,)
            Repetition time in seconds.
        atlas, name : str
            Name of the atlas and of the cohort.

        Returns
        -------
        Cohort

        Examples
        --------
        >>> import numpy as np
        >>> import m2lgdg
        >>> series = np.random.default_rng(0).normal(size=(6, 100, 4))
        >>> m2lgdg.Cohort.from_arrays(series, [0, 1, 0, 1, 0, 1], ["Oslo", "Oslo", "Rome", "Rome", "Lima", "Lima"])
        Cohort cohort: 6 subjects (3 patients, 3 controls) of 3 sites, 4 ROIs
        """
        given = [np.asarray(one) for one in series]
        if not given:
            raise InputError(f"cohort {name}: series is empty.")
        if given[0].ndim != 2:
            raise InputError(f"cohort {name}: series holds arrays of shape (time, ROI), but the first has {given[0].shape}.")
        count = len(given)
        table = _table(phenotypes, name)
        names = _subject_names(subjects, table, count)
        table = _in_order(table, names, name)
        return cls(  # type: ignore[call-arg]
            series=given,
            subjects=names,
            sites=np.full(count, sites) if isinstance(sites, str) else np.asarray([_site(one, name) for one in sites]),
            labels=_labels(y, patient, name),
            rois=tuple(str(i + 1) for i in range(given[0].shape[1])) if rois is None else tuple(rois),
            phenotypes=table,
            inputs=_default_inputs(table) if inputs is None else tuple(inputs),
            tr=tr,
            atlas=atlas,
            name=name,
        )

    def __getitem__(self, which: Any) -> Self:
        """Subjects by position, slice, mask or positions, as in numpy; always a cohort.

        Examples
        --------
        >>> import m2lgdg
        >>> cohort = m2lgdg.make_cohort("tiny")
        >>> len(cohort[:10]), len(cohort[cohort.labels == 1])
        (10, 28)
        """
        if isinstance(which, str):
            raise InputError(f"cohort {self.name}: select subjects by position or mask, by select(subjects=[...]) or by query.")
        positions: Any = np.arange(len(self))
        try:
            mask = np.asarray(which) if not isinstance(which, slice) else None
            if mask is not None and mask.dtype == bool and mask.shape != (len(self),):
                raise IndexError(f"the mask has shape {mask.shape}, but there are {len(self)} subjects")
            chosen = positions[which if mask is None else mask if mask.size else []]
        except IndexError as error:
            if isinstance(which, int | np.integer):  # ends a loop over the cohort
                raise IndexError(f"cohort {self.name} has {len(self)} subjects, so there is no position {which}") from None
            raise InputError(f"cohort {self.name}: {one_line(error)}.") from None
        return self.select(np.atleast_1d(chosen))

    def query(self, expression: str) -> Self:
        """Subjects that meet a condition on the columns of `to_frame`.

        Parameters
        ----------
        expression : str
            As in `pandas.DataFrame.query`: columns are site, label, tr, volumes and the phenotypes.

        Returns
        -------
        Cohort

        Examples
        --------
        >>> import m2lgdg
        >>> cohort = m2lgdg.make_cohort("tiny")
        >>> cohort.query("site == 'east' and age > 20")
        Cohort tiny: 9 subjects (5 patients, 4 controls) of 1 site, 12 ROIs (synthetic)
        """
        frame = self.to_frame()
        frame["_position"] = np.arange(len(self))
        try:
            chosen = frame.query(expression)["_position"]
        except Exception as error:  # pandas raises many kinds for an expression that it cannot evaluate
            columns = ", ".join(map(str, frame.columns[:-1]))
            raise InputError(
                f"cohort {self.name}: cannot evaluate the query {expression[:100]!r} ({one_line(error)[:150]}); "
                f"its columns are {columns}."
            ) from None
        return self.select(chosen.to_numpy(dtype=np.int64))

    def to_frame(self) -> pd.DataFrame:
        """Site, label, TR, number of volumes and phenotypes of each subject.

        Returns
        -------
        DataFrame
            Indexed by subject. A phenotype that has the name of another column is called `phenotype_NAME`.

        Examples
        --------
        >>> import m2lgdg
        >>> m2lgdg.make_cohort("tiny").to_frame().columns.tolist()
        ['site', 'label', 'tr', 'volumes', 'sex', 'age', 'education']
        """
        own = pd.DataFrame(
            {"site": self.sites.astype(object), "label": self.labels.astype(np.int64), "tr": self.tr, "volumes": self.lengths},
            index=pd.Index(self.subjects.tolist(), name="subject", dtype=object),
        )
        renamed = {column: f"phenotype_{column}" for column in self.phenotypes.columns if column in COLUMNS}
        return pd.concat([own, self.phenotypes.rename(columns=renamed).set_axis(own.index, axis=0)], axis=1)

    def _repr_html_(self) -> str:
        """Sites with their subjects, for notebooks."""
        rows = []
        for site in self.site_names:
            here = self.sites == site
            counts = [int((self.labels[here] == label).sum()) for label in (PATIENT, CONTROL, UNKNOWN)]
            lengths = self.lengths[here]
            span = str(lengths.min()) if lengths.min() == lengths.max() else f"{lengths.min()} to {lengths.max()}"
            rows.append((site, int(here.sum()), *counts, span))
        columns = ", ".join(map(str, self.phenotypes.columns[:12])) + (", ..." if len(self.phenotypes.columns) > 12 else "")
        lines = [f"Phenotypes: {columns}."] if columns else []
        return shown_table(repr(self), ("site", "subjects", "patients", "controls", "unlabelled", "volumes"), rows, lines)


def _table(phenotypes: pd.DataFrame | Mapping[str, Any] | None, name: str) -> pd.DataFrame:
    if phenotypes is None:
        return pd.DataFrame()
    try:
        return pd.DataFrame(phenotypes)
    except ValueError as error:
        raise InputError(f"cohort {name}: phenotypes are not a table ({one_line(error)[:150]}).") from None


def _subject_names(subjects: Iterable[Any] | None, table: pd.DataFrame, count: int) -> npt.NDArray[np.str_]:
    if subjects is not None:
        return np.array([str(one) for one in subjects], dtype=np.str_)
    if len(table) == count and not pd.api.types.is_integer_dtype(table.index.dtype):
        return np.array(table.index.astype(str), dtype=np.str_)
    return np.array([f"sub-{i + 1:04d}" for i in range(count)], dtype=np.str_)


def _in_order(table: pd.DataFrame, names: npt.NDArray[np.str_], name: str) -> pd.DataFrame:
    """Rows of the subjects, by the index if it holds their names, else as they are."""
    index = table.index.astype(str)
    if not len(table.columns) or index.has_duplicates or not set(names.tolist()) <= set(index):
        if len(table.columns) and len(set(names.tolist()) & set(index)):
            missing = next(one for one in names.tolist() if one not in set(index))
            raise InputError(f"cohort {name}: subject {missing} has no row in phenotypes, although others have.")
        return table.set_axis(names, axis=0) if len(table) == len(names) and len(table.columns) else table
    return table.set_axis(index, axis=0).loc[names.tolist()]


def _default_inputs(table: pd.DataFrame) -> tuple[str, ...]:
    return tuple(name for name in INPUTS if name in table.columns and pd.api.types.is_numeric_dtype(table[name].dtype))


def _site(value: Any, name: str) -> str:
    if pd.isna(value) or not str(value).strip():
        raise InputError(f"cohort {name}: sites has a missing value; name the site of every subject.")
    return str(value)


def _labels(y: Any, patient: Any, name: str) -> npt.NDArray[np.int8]:
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
    for position, value in known.items():
        labels[position] = PATIENT if value == (1 if patient is None else patient) else CONTROL
    return labels
