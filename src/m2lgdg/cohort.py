"""`Cohort`: scans of subjects with phenotypes, sites and labels, from files, arrays or data frames.

Readers create a cohort, `splits` selects subjects from it, and methods are fitted on it. `cohort_file` stores it.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pandas as pd

from m2lgdg import cohort_file
from m2lgdg.cohort_arrays import INPUTS as INPUTS
from m2lgdg.cohort_arrays import UNKNOWN as UNKNOWN
from m2lgdg.cohort_arrays import connectome_fields, given_fields, matched_tables
from m2lgdg.cohort_arrays import natural_key as natural_key
from m2lgdg.cohort_file import Parcellation as Parcellation
from m2lgdg.findings import Exclusion, Finding, Note
from m2lgdg.findings import is_proxy as is_proxy
from m2lgdg.notebook import cohort_html, cohort_line
from m2lgdg.scans import SERIES, Absent, Connectomes, Scans, fisher_connectomes, frozen, kind_of, some_of
from m2lgdg.scans import series_defect as series_defect
from m2lgdg.storage import DAMAGED, InputError, one_line

MASKED_SITE = ""
ARRAYS = ("subjects", "sites", "labels", "tr")
KNOWN = "_known_digests"  # attribute with what was computed for the hash


@dataclass(frozen=True, eq=False)
class Cohort:
    """Subjects of several sites; `from_arrays` and `from_connectomes` need fewer words, `m2lgdg.read` reads files.

    Parameters
    ----------
    series : sequence of arrays of shape (time, ROI), or `Connectomes`
    subjects, sites : sequences of str
    labels : array of int
        1 patient, 0 control, -1 unknown.
    rois : sequence of str
    phenotypes : DataFrame, optional
        Every column of the release, indexed by subject: numbers with NaN where missing, or text with "".
    inputs : sequence of str, optional
        Columns that a method may use.
    tr : float or array, optional
        Repetition time in seconds, NaN where unknown.
    atlas, name : str, optional

    Examples
    --------
    >>> import m2lgdg
    >>> cohort = m2lgdg.make_cohort("tiny")
    >>> cohort
    Cohort tiny: 52 subjects (28 patients, 24 controls) of 4 sites, 12 ROIs (synthetic)
    >>> len(cohort), cohort.site_names, cohort.series[0].shape
    (52, ['east', 'north', 'south', 'west'], (89, 12))

    Notes
    -----
    A cohort does not change: its arrays are read-only copies, and `phenotypes` is read as a copy. `dataclasses.replace` makes a
    cohort with other content. `scans` are its series or its connectomes, `values` says which. `series`, `rois` and `atlas` are
    those of the first of several atlases; `parcellations` holds the others by name. `tables` holds further features by name,
    such as cortical thickness, with NaN where one is missing. `excluded` and `notes` record how the cohort was made, `truth`
    the planted effects of a synthetic one. `findings` are those of `m2lgdg check`, None if this very
    content was not checked; they are not part of the hash.
    """

    series: Sequence[npt.NDArray[np.float32]]
    subjects: npt.NDArray[np.str_]
    sites: npt.NDArray[np.str_]
    labels: npt.NDArray[np.int8]
    rois: tuple[str, ...]
    phenotypes: pd.DataFrame = field(default_factory=pd.DataFrame)
    inputs: tuple[str, ...] = ()
    tr: npt.NDArray[np.float64] = field(default_factory=lambda: np.array(np.nan))
    atlas: str = ""
    name: str = "cohort"
    excluded: tuple[Exclusion, ...] = ()
    notes: tuple[Note, ...] = ()
    truth: dict[str, Any] | None = None
    allow_proxies: bool = False
    parcellations: Mapping[str, Parcellation] = field(default_factory=dict)
    tables: Mapping[str, pd.DataFrame] = field(default_factory=dict)
    findings: tuple[Finding, ...] | None = field(default=None, init=False)  # so that dataclasses.replace drops them

    def __post_init__(self) -> None:
        labels = np.asarray(self.labels)
        self._put(
            subjects=np.asarray(self.subjects, dtype=np.str_),
            sites=np.asarray(self.sites, dtype=np.str_),
            rois=tuple(map(str, self.rois)),
            inputs=tuple(self.inputs),
            tr=np.broadcast_to(np.asarray(self.tr, dtype=np.float64), (len(self.subjects),)),
            truth=json.loads(json.dumps(self.truth)),
            series=self.series,
        )
        table = self.phenotypes if len(self.phenotypes.columns) else pd.DataFrame(index=self.subjects)
        cohort_file.check_counts(self._fields() | {"labels": labels, "phenotypes": table})
        tables = matched_tables(self.tables, self.subjects.tolist(), self.name)
        phenotypes = cohort_file.canonical_table(table, self.subjects)
        self._put(labels=labels.astype(np.int8), phenotypes=phenotypes, tables=tables)
        cohort_file.check_scans(f"cohort {self.name}", self.subjects, self.scans, self.rois)
        cohort_file.check_parcellations(self._fields())
        cohort_file.check_inputs(self)
        cohort_file.check_tables(self)

    def _put(self, **values: Any) -> None:
        """Set fields; arrays become frozen ones."""
        for name, value in values.items():
            if name in ARRAYS:
                value = frozen(np.asarray(value))
            elif name == "parcellations":
                value = {atlas: Parcellation(each.rois, each.scans) for atlas, each in value.items()}
            object.__setattr__(self, name, value)

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self._put(**{name: value for name, value in state.items() if name != KNOWN})  # an unpickled array can be written to

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
        tables: Mapping[str, Any] | None = None,
        atlas: str = "",
        name: str = "cohort",
    ) -> Cohort:
        """A cohort from arrays in memory.

        Parameters
        ----------
        series : list of arrays of shape (time, ROI), or array of shape (subject, time, ROI)
        y : array of shape (subject,)
            Labels: 1 patient, 0 control, -1 or missing unknown; or any two values, with `patient` naming one of them.
        sites : array of shape (subject,), or one str
        phenotypes : DataFrame or mapping of columns, optional
            One row for each subject, in the same order; a DataFrame whose index holds the given `subjects` is matched by it.
            The same holds for `y`, `sites` and `tr` given as a Series.
        rois : sequence of str, optional
            By default, numbers.
        subjects : sequence, optional
            By default the index of `phenotypes` if it has names, else sub-0001 and so on.
        patient : optional
            Value of y that means patient.
        inputs : sequence of str, optional
            Phenotypes that methods may use; by default sex, age and education, if they are numeric columns.
        tr : float or array of shape (subject,)
            Repetition time in seconds.
        tables : mapping of names to DataFrames, optional
            Further features of subjects, such as cortical thickness; see `with_tables`.
        atlas, name : str

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
        named = dict(y=y, sites=sites, phenotypes=phenotypes, rois=rois, subjects=subjects, patient=patient, name=name)
        fields = given_fields(given[0].shape[1], len(given), **named, inputs=inputs, tr=tr)
        return cls(series=given, atlas=atlas, tables=tables or {}, **fields)

    @classmethod
    def from_connectomes(cls, matrices: Any, y: Any, sites: Any, *, values: str | None = None, **given: Any) -> Cohort:
        """A cohort from connectomes in memory.

        Parameters
        ----------
        matrices : array of shape (subject, ROI, ROI), or list of arrays of shape (ROI, ROI)
            Symmetric, all of one kind.
        y, sites
            As in `from_arrays`.
        values : {"correlation", "fisher-z", "covariance", "partial-correlation"}, optional
            What the matrices hold; by default, correlation, Fisher z or covariance is recognised by range and diagonal.
        **given
            phenotypes, rois, subjects, patient, inputs, tr, tables, atlas and name, as in `from_arrays`.

        Returns
        -------
        Cohort

        Examples
        --------
        >>> import numpy as np
        >>> import m2lgdg
        >>> series = np.random.default_rng(0).normal(size=(4, 100, 5))
        >>> matrices = [np.corrcoef(one.T) for one in series]
        >>> m2lgdg.Cohort.from_connectomes(matrices, [0, 1, 0, 1], ["Oslo", "Oslo", "Rome", "Rome"])
        Cohort cohort: 4 subjects (2 patients, 2 controls) of 2 sites, 5 ROIs, connectomes (correlation)
        """
        return cls(**connectome_fields(matrices, values, y=y, sites=sites, **given))

    def to_connectomes(self) -> Cohort:
        """The cohort with the Fisher z of the correlations of each scan instead of its series, in every atlas."""

        def made(holder: Cohort | Parcellation) -> Connectomes:
            return fisher_connectomes(holder.scans, len(holder.rois))

        others = {name: Parcellation(each.rois, made(each)) for name, each in self.parcellations.items()}
        return self._changed(series=made(self), parcellations=others)

    def __len__(self) -> int:
        return len(self.subjects)

    def __repr__(self) -> str:
        return cohort_line(self)

    @property
    def site_names(self) -> list[str]:
        """Site names in natural order (S2 before S10)."""
        return sorted(np.unique(self.sites).tolist(), key=natural_key)

    @property
    def scans(self) -> Scans:
        """The series, or the connectomes, of the first atlas."""
        held: Scans = self.__dict__["series"]
        return held

    @property
    def values(self) -> str:
        """What the scans are: "series", or the kind of the connectomes."""
        return kind_of(self.scans)

    @property
    def connectomes(self) -> Sequence[npt.NDArray[np.float32]]:
        """Symmetric (roi, roi) matrices of the subjects; an error if the cohort holds series."""
        if isinstance(self.scans, Connectomes):
            return self.scans
        return Absent(self.scans, f"cohort {self.name} holds time series; to_connectomes() computes connectomes from them.")

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Number of volumes of each subject."""
        return np.array([len(one) for one in self.series], dtype=np.int64)

    @property
    def atlases(self) -> tuple[str, ...]:
        """Names of the atlases, that of `series` first; a single atlas may have an empty name."""
        return (self.atlas, *self.parcellations)

    def parcellation(self, atlas: str) -> Cohort:
        """Cohort of one atlas alone, with the subjects that have it; planted effects are known in the first atlas only."""
        if atlas not in self.atlases:
            known = f"it has {', '.join(self.atlases)}" if self.atlas else "its only atlas has no name"
            raise InputError(f"cohort {self.name} has no atlas {atlas}; {known}.")
        if atlas == self.atlas:
            return self._changed(parcellations={}) if self.parcellations else self
        other = self.parcellations[atlas]
        rows = np.flatnonzero(other.present)  # of int, also if there are none
        scans = some_of(other.scans, rows.tolist())
        return self.select(rows)._changed(series=scans, rois=other.rois, atlas=atlas, parcellations={}, truth=None)

    def each_atlas(self) -> list[Cohort]:
        """The cohort in each of its atlases (`parcellation`)."""
        return [self.parcellation(name) for name in self.atlases]

    @property
    def hash(self) -> str:
        """SHA-256 of the content; it does not depend on subject order, folder or file format."""
        return cohort_file.content_hash(self._fields(), self._digests)

    @property
    def _digests(self) -> tuple[bytes, ...]:
        """SHA-256 of each subject's data; of series that are maps of a file, computed anew, as the file may be overwritten."""
        known: tuple[bytes, ...] | None = self.__dict__.get(KNOWN)
        mapped = cohort_file.mapped_files([self.scans, *(each.scans for each in self.parcellations.values())])
        if known is None or mapped:
            digests = cohort_file.subject_digests(self._fields())
            if known not in (None, digests):
                raise cohort_file.overwritten(mapped[0])
            self.__dict__[KNOWN] = known = digests
        return known

    def _with_digests_of(self, other: Cohort, rows: Sequence[int]) -> Cohort:
        """Take over what another cohort with the same data of these subjects has computed."""
        if KNOWN in other.__dict__:
            self.__dict__[KNOWN] = tuple(other.__dict__[KNOWN][i] for i in rows)
        return self

    def _fields(self) -> dict[str, Any]:
        return {each.name: self.__dict__.get(each.name, each.default) for each in fields(self)}  # as held, to read from

    def select(
        self, which: npt.ArrayLike | None = None, *, sites: Iterable[str] | None = None, subjects: Iterable[str] | None = None
    ) -> Cohort:
        """Select the subjects that meet every given condition.

        Parameters
        ----------
        which : array of bool (a mask) or int (positions), optional
        sites, subjects : str or sequence of str, optional

        Returns
        -------
        Cohort

        Examples
        --------
        >>> import m2lgdg
        >>> m2lgdg.make_cohort("tiny").select(sites=["east"])
        Cohort tiny: 10 subjects (6 patients, 4 controls) of 1 site, 12 ROIs (synthetic)
        >>> len(m2lgdg.make_cohort("tiny")[:10])
        10
        """
        keep = np.arange(len(self))
        if which is not None:
            keep = keep[np.asarray(which)]
        for what, names, values in (("site", sites, self.sites), ("subject", subjects, self.subjects)):
            if names is not None:
                wanted = [names] if isinstance(names, str) else list(names)
                if unknown := sorted(set(wanted) - set(values.tolist())):
                    raise InputError(f"cohort {self.name} has no {what} {unknown[0]}.")
                keep = keep[np.isin(values[keep], wanted)]
        rows = keep.tolist()
        cohort_file.check_unique(f"cohort {self.name}: selection", "subject", self.subjects[keep])
        others = {name: Parcellation(each.rois, some_of(each.scans, rows)) for name, each in self.parcellations.items()}
        chosen = self._changed(
            **{name: getattr(self, name)[keep] for name in ("subjects", "sites", "labels", "tr")} | {"rows": rows},
            phenotypes=self.__dict__["phenotypes"].iloc[keep],
            parcellations=others,
            tables={name: table.iloc[keep] for name, table in self.__dict__["tables"].items()},
            findings=self.findings if sorted(rows) == list(range(len(self))) else None,
        )
        return chosen._with_digests_of(self, rows)

    def __getitem__(self, which: Any) -> Cohort:
        """Subjects by position, slice, mask or positions, as in numpy; always a cohort."""
        if isinstance(which, str):
            raise InputError(f"cohort {self.name}: select subjects by position or mask, by select(subjects=[...]) or by query.")
        try:
            if not isinstance(which, slice):
                which = np.asarray(which if np.size(which) else np.zeros(0, dtype=int))
            return self.select(np.atleast_1d(np.arange(len(self))[which]))
        except IndexError as error:
            if np.ndim(which) == 0:  # ends a loop over the cohort
                raise IndexError(f"cohort {self.name} has {len(self)} subjects, so there is no position {which}") from None
            raise InputError(f"cohort {self.name}: {one_line(error)}.") from None

    def query(self, expression: str) -> Cohort:
        """Subjects that meet a condition on the columns of `to_frame`.

        Parameters
        ----------
        expression : str
            As in `pandas.DataFrame.query`.

        Returns
        -------
        Cohort

        Examples
        --------
        >>> import m2lgdg
        >>> m2lgdg.make_cohort("tiny").query("site == 'east' and age > 20")
        Cohort tiny: 9 subjects (5 patients, 4 controls) of 1 site, 12 ROIs (synthetic)
        """
        frame = self.to_frame()
        frame["_position"] = np.arange(len(self))
        try:
            chosen = frame.query(expression)["_position"]
        except Exception as error:  # pandas raises many kinds for an expression that it cannot evaluate
            why = f"cannot evaluate the query {expression[:100]!r} ({one_line(error)[:150]})"
            raise InputError(f"cohort {self.name}: {why}; its columns are {', '.join(map(str, frame.columns[:-1]))}.") from None
        return self.select(chosen.to_numpy(dtype=np.int64))

    def to_frame(self) -> pd.DataFrame:
        """Site, label, TR, number of volumes (of series) and phenotypes of each subject.

        Returns
        -------
        DataFrame
            Indexed by subject. A phenotype with the name of another column is called `phenotype_NAME`.

        Examples
        --------
        >>> import m2lgdg
        >>> m2lgdg.make_cohort("tiny").to_frame().columns.tolist()
        ['site', 'label', 'tr', 'volumes', 'sex', 'age', 'education']
        """
        columns = {"site": self.sites.astype(object), "label": self.labels.astype(np.int64), "tr": self.tr}
        if self.values == SERIES:
            columns["volumes"] = self.lengths
        own = pd.DataFrame(columns, index=pd.Index(self.subjects.tolist(), name="subject", dtype=object))
        renamed = {column: f"phenotype_{column}" for column in self.phenotypes.columns if column in own.columns}
        return pd.concat([own, self.phenotypes.rename(columns=renamed).set_axis(own.index, axis=0)], axis=1)

    def _repr_html_(self) -> str:
        """Sites with their subjects, for notebooks."""
        return cohort_html(self)

    def unlabelled(self) -> Cohort:
        """The cohort as methods see a target: labels, sites and ids (which often tell both) masked, only input phenotypes."""
        subjects = np.array([f"subject-{i + 1}" for i in range(len(self))], dtype=np.str_)
        return self._changed(
            subjects=subjects,
            sites=np.full(len(self), MASKED_SITE, dtype=np.str_),
            labels=np.full(len(self), UNKNOWN, dtype=np.int8),
            phenotypes=self.phenotypes[list(self.inputs)].set_axis(subjects, axis=0),
            excluded=(),
            notes=(),
            truth=None,
        )

    def with_inputs(self, inputs: Iterable[str], *, allow_proxies: bool = False) -> Cohort:
        """A copy of the cohort with other phenotype columns as inputs."""
        inputs = tuple(inputs)
        findings = self.findings if inputs == self.inputs else None
        changed = self._changed(inputs=inputs, allow_proxies=allow_proxies, findings=findings)
        cohort_file.check_inputs(changed)
        return changed._with_digests_of(self, range(len(self)))  # inputs are not part of a subject's data

    def with_tables(self, tables: Mapping[str, Any]) -> Cohort:
        """A copy of the cohort with named tables of features, such as cortical thickness, beside those it has.

        A DataFrame is matched by its index, which holds subjects; those that it lacks have missing values. An array has one
        row for each subject, in their order.
        """
        changed = self._changed(tables={**self.tables, **matched_tables(tables, self.subjects.tolist(), self.name)})
        cohort_file.check_tables(changed)
        return changed

    def with_findings(self, findings: Iterable[Finding]) -> Cohort:
        """A copy of the cohort that carries the findings of its check."""
        return self._changed(findings=tuple(findings))

    def _changed(self, rows: Sequence[int] | None = None, **values: Any) -> Cohort:
        # A subset of a valid cohort is valid, so the costly checks of __post_init__ are skipped; its scans are frozen already.
        if "subjects" in values and "tables" not in values:  # other names for the same rows
            values["tables"] = {name: table.set_axis(values["subjects"], axis=0) for name, table in self.tables.items()}
        held = {name: one for name, one in self.__dict__.items() if name not in (KNOWN, "series")}
        other = object.__new__(type(self))
        other._put(**held | {"findings": None} | values)
        if "series" not in values:
            other.__dict__["series"] = some_of(self.scans, range(len(self)) if rows is None else rows)
        return other

    def in_order(self) -> Cohort:
        """The cohort with subjects sorted by id, phenotypes and tables by name: the hash does not depend on their order."""
        ordered = self.select(np.argsort(self.subjects, kind="stable"))
        tables = {name: ordered.tables[name] for name in sorted(self.tables)}
        return ordered._changed(phenotypes=ordered.phenotypes[sorted(ordered.phenotypes.columns)], tables=tables)

    def save(self, path: str | Path, dtype: Literal["float32", "float16"] = "float32") -> Path:
        """Write the cohort atomically to one safetensors file with the scans and a JSON header.

        float16 halves the file size. Each ROI is stored as offset + scale * half, so the error is below 0.05 % of its largest
        deviation from its mean, whatever its units; that of an edge is below 0.05 % of the connectome's largest, or of its sds.
        """
        if dtype not in ("float32", "float16"):
            raise InputError(f"cohort files hold float32 or float16 series, not {dtype}.")
        return cohort_file.write_cohort(path, self._fields(), (self if dtype == "float32" else self._rounded()).hash, dtype)

    def _rounded(self) -> Cohort:
        """The cohort as a float16 file gives it back."""
        return self._changed(**cohort_file.rounded_scans(self._fields()))

    @classmethod
    def load(cls, path: str | Path, *, in_memory: bool = False) -> Cohort:
        """Read a cohort file; float32 series are memory-mapped and read from disk when first used, unless `in_memory`."""
        given, findings, digest = cohort_file.read_cohort(path, in_memory=in_memory)
        try:
            cohort = cls(**given)
        except (InputError, *DAMAGED) as error:
            raise cohort_file.damaged(path, error) from None
        if cohort.hash != digest:
            raise InputError(f"{path} was altered after it was written: its content does not match its hash.")
        return cohort if findings is None else cohort.with_findings(findings)


Cohort.series = cohort_file.scan_field(lambda cohort: f"cohort {cohort.name}")
Cohort.phenotypes = cohort_file.copied_field("phenotypes", cohort_file.copied_table)
Cohort.parcellations = cohort_file.copied_field("parcellations", dict)
Cohort.tables = cohort_file.copied_field("tables", cohort_file.copied_tables)
Cohort.truth = cohort_file.copied_field("truth", copy.deepcopy)
