"""`Cohort`: ROI time series with phenotypes, sites and labels, and the single-file format that stores them.

Readers create a cohort, `splits` selects subjects from it, and methods are fitted on it.
"""

from __future__ import annotations

import copy
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pandas as pd

from m2lgdg.findings import Exclusion, Finding, Note, read_finding, read_note
from m2lgdg.notebook.arrays import ArrayAccess
from m2lgdg.storage import InputError, one_line, pack, read_tensors, series_tensors, stored_series, unpack, write_tensors

FORMAT = "m2lgdg-cohort-1"
FURTHER = "atlas-{}."  # starts the names of the tensors of a further atlas in a cohort file, numbered from 0
UNKNOWN = -1  # label of a subject whose diagnosis is unknown or hidden from a method
MASKED_SITE = ""

# Columns that reveal the diagnosis: clinical scales, interviews, medication, course of illness. Short names of scales and drugs
# must stand alone (digits and underscores around them are fine), since longer words contain them (subdivision).
PROXY = re.compile(
    r"ham[-_ ]?[ad]|ados|adi[-_ ]?r|srs|scq|vineland|dsm|^dx|diagnos|^group$|medic|[-_ ]med[-_ ]|stimulant|antidepress|"
    r"episode|illness|comorbid|onset|severity|phq|madrs|panss|ymrs|adhd|inattent|hyper.?impuls|secondary.?dx|"
    r"(?<![a-z])(hdrs|hrsd|qids|cars|bdi|aq|ssris?)(ii|sr|total|score|sum)?(?![a-z])",
    re.IGNORECASE,
)
CAMEL = re.compile(r"(?<=[a-z])(?=[A-Z])")  # between the words of onSsri


@dataclass(frozen=True, eq=False)
class Parcellation:
    """The scans of a cohort in a further atlas: one (time, roi) series per subject, None where a subject has none."""

    rois: tuple[str, ...]
    series: Sequence[npt.NDArray[np.float32] | None]

    def __post_init__(self) -> None:
        object.__setattr__(self, "rois", tuple(map(str, self.rois)))
        object.__setattr__(self, "series", tuple(None if one is None else _read_only(one) for one in self.series))

    @property
    def present(self) -> npt.NDArray[np.bool_]:
        """(subject,) mask of the subjects that have this atlas."""
        return np.array([one is not None for one in self.series], dtype=bool)

    def select(self, keep: Sequence[int]) -> Parcellation:
        """The subjects at these positions."""
        return Parcellation(self.rois, tuple(self.series[i] for i in keep))


@dataclass(frozen=True, eq=False)
class Cohort(ArrayAccess):
    """Subjects of several sites: one (time, roi) series each, phenotypes, site and label (1 patient, 0 control, -1 unknown).

    `from_arrays` makes one with fewer words, `m2lgdg.read` from files.

    Parameters
    ----------
    series : sequence of arrays of shape (time, ROI)
    subjects, sites : sequences of str
    labels : array of int
    rois : sequence of str
    phenotypes : DataFrame, optional
    inputs : sequence of str, optional
    tr : float or array, optional
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
    `phenotypes` holds every column of the release, indexed by subject: numbers with NaN where missing, or text with "".
    `inputs` names the columns that a method may use. `tr` is the repetition time in seconds, NaN where unknown.
    `excluded` and `notes` record how the cohort was made. `truth` holds the planted effects of a synthetic cohort.
    `findings` are those of `m2lgdg check`, None if this very cohort was not checked: any other content, such as a part of its
    subjects, has findings of its own. They are stored with the cohort but are not part of its hash.

    A cohort may hold its scans in several atlases. `series`, `rois` and `atlas` are those of the first; `parcellations` holds
    the others by name, and `parcellation` gives a cohort of one atlas alone.
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
    findings: tuple[Finding, ...] | None = field(default=None, init=False)  # so that dataclasses.replace drops them

    def __post_init__(self) -> None:
        def put(name: str, value: object) -> None:
            object.__setattr__(self, name, value)

        put("subjects", np.asarray(self.subjects, dtype=np.str_))
        put("sites", np.asarray(self.sites, dtype=np.str_))
        put("labels", _labels(self.labels))
        put("rois", tuple(map(str, self.rois)))
        put("inputs", tuple(self.inputs))
        put("tr", np.broadcast_to(np.asarray(self.tr, dtype=np.float64), (len(self.subjects),)).copy())
        put("truth", None if self.truth is None else json.loads(json.dumps(self.truth)))
        put("series", tuple(_read_only(one) for one in self.series))
        table = self.phenotypes if len(self.phenotypes.columns) else pd.DataFrame(index=self.subjects)
        self._check_counts(table)
        put("phenotypes", _canonical_table(table, self.subjects))
        _check_series(f"cohort {self.name}", self.subjects, self.series, self.rois)
        put("parcellations", dict(self.parcellations))
        self._check_parcellations()
        self._check_inputs()

    def _check_counts(self, table: pd.DataFrame) -> None:
        n = len(self.subjects)
        for what, size in (
            ("series", len(self.series)),
            ("sites", len(self.sites)),
            ("labels", len(self.labels)),
            ("phenotype rows", len(table)),
        ):
            if size != n:
                raise InputError(f"cohort {self.name}: {n} subjects but {size} {what}.")
        wrong = np.flatnonzero((self.tr <= 0) | np.isinf(self.tr))
        if len(wrong):
            raise InputError(f"cohort {self.name}: subject {self.subjects[wrong[0]]} has a TR of {self.tr[wrong[0]]:g} s.")
        _check_unique(f"cohort {self.name}", "subject", self.subjects)
        _check_unique(f"cohort {self.name}", "ROI", np.asarray(self.rois))

    def _check_parcellations(self) -> None:
        for name, other in self.parcellations.items():
            if not isinstance(name, str) or not name.strip():
                raise InputError(f"cohort {self.name}: one of its atlases has no name.")
            if not self.atlas:
                raise InputError(f"cohort {self.name}: its first atlas has no name, so it cannot hold atlas {name} too.")
            if name == self.atlas:
                raise InputError(f"cohort {self.name}: atlas {name} appears 2 times.")
            where = f"cohort {self.name}, atlas {name}"
            if len(other.series) != len(self):
                raise InputError(f"{where}: {len(self)} subjects but {len(other.series)} series.")
            _check_unique(where, "ROI", np.asarray(other.rois))
            _check_series(where, self.subjects, other.series, other.rois)
            for subject, first, one in zip(self.subjects, self.series, other.series, strict=True):
                if one is not None and len(one) != len(first):
                    raise InputError(
                        f"{where}: subject {subject} has {len(one)} volumes, but {len(first)} in atlas {self.atlas}."
                    )

    def _check_inputs(self) -> None:
        for column in self.inputs:
            if column not in self.phenotypes.columns:
                raise InputError(f"cohort {self.name}: input {column} is not a phenotype column.")
            if self.phenotypes[column].dtype != np.float64:
                raise InputError(f"cohort {self.name}: input {column} holds text; inputs must be numeric.")
            if is_proxy(column) and not self.allow_proxies:
                raise InputError(
                    f"cohort {self.name}: input {column} reveals the diagnosis, so a model could read the label from it; "
                    "leave it out, or keep it with allow_proxies=True."
                )

    def __len__(self) -> int:
        return len(self.subjects)

    def __repr__(self) -> str:
        patients, controls = int((self.labels == 1).sum()), int((self.labels == 0).sum())
        atlas = f" ({self.atlas})" if self.atlas else ""
        others = "".join(f", {len(each.rois)} ROIs ({name})" for name, each in self.parcellations.items())
        return (
            f"Cohort {self.name}: {len(self)} subjects ({patients} patients, {controls} controls) "
            f"of {(n := len(self.site_names))} site{'s' * (n != 1)}, {len(self.rois)} ROIs{atlas}{others}"
        )

    @property
    def site_names(self) -> list[str]:
        """Site names in natural order (S2 before S10)."""
        return sorted(set(self.sites.tolist()), key=natural_key)

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
        series = tuple(one for one in other.series if one is not None)
        chosen = self.select(other.present)
        return chosen._changed(series=series, rois=other.rois, atlas=atlas, parcellations={}, truth=None)

    def each_atlas(self) -> list[Cohort]:
        """The cohort in each of its atlases (`parcellation`)."""
        return [self.parcellation(name) for name in self.atlases]

    @cached_property
    def hash(self) -> str:
        """SHA-256 of the content; it does not depend on subject order, folder or file format."""
        head: list[object] = [self.rois, self.inputs, sorted(map(str, self.phenotypes.columns))]
        if self.parcellations:
            head += [self.atlas, [(name, each.rois) for name, each in self.parcellations.items()]]
        return hashlib.sha256(json.dumps(head).encode() + b"".join(sorted(self._digests))).hexdigest()

    @cached_property
    def _digests(self) -> tuple[bytes, ...]:
        """SHA-256 of each subject's data; a selection of subjects takes them over."""
        columns = self._columns()
        names = sorted(columns)
        digests = []
        for i, one in enumerate(self.series):
            values = [columns[name][i] for name in names]
            text = [str(self.subjects[i]), str(self.sites[i]), int(self.labels[i]), _json_value(self.tr[i]), values]
            others = {name: each.series[i] for name, each in self.parcellations.items()}
            if others:
                text.append([name for name, other in others.items() if other is not None])
            digest = hashlib.sha256(json.dumps(text).encode())
            for each in (one, *(other for other in others.values() if other is not None)):
                digest.update(np.ascontiguousarray(each, dtype="<f4").data)
            digests.append(digest.digest())
        return tuple(digests)

    def select(
        self,
        which: npt.ArrayLike | None = None,
        *,
        sites: Iterable[str] | None = None,
        subjects: Iterable[str] | None = None,
    ) -> Cohort:
        """Select the subjects that meet every given condition.

        Parameters
        ----------
        which : array of bool or int, optional
            A mask, or positions.
        sites, subjects : str or sequence of str, optional
            Names of sites, of subjects.

        Returns
        -------
        Cohort

        Examples
        --------
        >>> import m2lgdg
        >>> m2lgdg.make_cohort("tiny").select(sites=["east"])
        Cohort tiny: 10 subjects (6 patients, 4 controls) of 1 site, 12 ROIs (synthetic)
        """
        keep = np.arange(len(self))
        if which is not None:
            keep = keep[np.asarray(which)]
        if sites is not None:
            keep = keep[np.isin(self.sites[keep], self._known(sites, self.sites, "site"))]
        if subjects is not None:
            keep = keep[np.isin(self.subjects[keep], self._known(subjects, self.subjects, "subject"))]
        chosen = self._changed(
            series=tuple(self.series[i] for i in keep.tolist()),
            subjects=self.subjects[keep],
            sites=self.sites[keep],
            labels=self.labels[keep],
            tr=self.tr[keep],
            phenotypes=self.phenotypes.iloc[keep],
            parcellations={name: each.select(keep.tolist()) for name, each in self.parcellations.items()},
            findings=self.findings if np.array_equal(np.sort(keep), np.arange(len(self))) else None,
        )
        if "_digests" in self.__dict__:
            chosen.__dict__["_digests"] = tuple(self._digests[i] for i in keep.tolist())
        return chosen

    def _known(self, names: Iterable[str], values: npt.NDArray[np.str_], what: str) -> list[str]:
        wanted = [names] if isinstance(names, str) else list(names)
        unknown = sorted(set(wanted) - set(values.tolist()))
        if unknown:
            raise InputError(f"cohort {self.name} has no {what} {unknown[0]}.")
        return wanted

    def unlabelled(self) -> Cohort:
        """The cohort as methods see a target: labels and sites masked, ids replaced, only input phenotypes kept.

        Ids are replaced because they often encode site and label.
        """
        subjects = np.array([f"subject-{i + 1}" for i in range(len(self))], dtype=np.str_)
        phenotypes = self.phenotypes[list(self.inputs)].set_axis(subjects, axis=0)
        return self._changed(
            subjects=subjects,
            sites=np.full(len(self), MASKED_SITE, dtype=np.str_),
            labels=np.full(len(self), UNKNOWN, dtype=np.int8),
            phenotypes=phenotypes,
            excluded=(),
            notes=(),
            truth=None,
        )

    def with_inputs(self, inputs: Iterable[str], *, allow_proxies: bool = False) -> Cohort:
        """A copy of the cohort with other phenotype columns as inputs."""
        inputs = tuple(inputs)
        findings = self.findings if inputs == self.inputs else None
        changed = self._changed(inputs=inputs, allow_proxies=allow_proxies, findings=findings)
        if "_digests" in self.__dict__:  # inputs are not part of a subject's data
            changed.__dict__["_digests"] = self._digests
        changed._check_inputs()
        return changed

    def with_findings(self, findings: Iterable[Finding]) -> Cohort:
        """A copy of the cohort that carries the findings of its check."""
        return self._changed(findings=tuple(findings))

    def _changed(self, **values: object) -> Cohort:
        # A subset of a valid cohort is valid, so the costly checks of __post_init__ are skipped.
        other = copy.copy(self)
        for kept in ("hash", "_digests"):
            other.__dict__.pop(kept, None)
        object.__setattr__(other, "findings", None)
        for key, value in values.items():
            object.__setattr__(other, key, value)
        return other

    def _each_series(self, change: Callable[[npt.NDArray[np.float32]], npt.NDArray[np.float32]]) -> Cohort:
        """A copy of the cohort with every series of every atlas changed."""
        return self._changed(
            series=tuple(change(one) for one in self.series),
            parcellations={
                name: Parcellation(each.rois, tuple(None if one is None else change(one) for one in each.series))
                for name, each in self.parcellations.items()
            },
        )

    def save(self, path: str | Path, dtype: Literal["float32", "float16"] = "float32") -> Path:
        """Write the cohort atomically to one safetensors file with the series and a JSON header.

        float16 halves the file size. Each ROI is stored as offset + scale * half, so the error is below 0.05 % of its largest
        deviation from its mean, whatever its units.
        """
        if dtype not in ("float32", "float16"):
            raise InputError(f"cohort files hold float32 or float16 series, not {dtype}.")
        tensors: dict[str, npt.NDArray[Any]] = {
            "lengths": self.lengths,
            "labels": self.labels,
            "tr": np.asarray(self.tr),
        }
        content = self
        if dtype == "float16":
            with np.errstate(over="ignore", invalid="ignore"):
                content = self._each_series(lambda one: unpack(*pack(one)))
            self._check_range(content)
        tensors |= series_tensors("", self.series, len(self.rois), dtype)
        for i, each in enumerate(self.parcellations.values()):
            present = [one for one in each.series if one is not None]
            tensors |= series_tensors(FURTHER.format(i), present, len(each.rois), dtype)
        header = {"format": FORMAT, "hash": content.hash, "cohort": json.dumps(self._header())}
        return write_tensors(path, tensors, header)

    def _check_range(self, rounded: Cohort) -> None:
        """Refuse series that float16 cannot hold."""
        for series in (rounded.series, *(each.series for each in rounded.parcellations.values())):
            for subject, one in zip(self.subjects, series, strict=True):
                if one is not None and not np.isfinite(one).all():
                    raise InputError(
                        f"cohort {self.name}: the series of subject {subject} is out of range for float16; save it as float32."
                    )

    def _columns(self) -> dict[str, list[float | str | None]]:
        return {str(name): [_json_value(value) for value in self.phenotypes[name].tolist()] for name in self.phenotypes}

    def _header(self) -> dict[str, Any]:
        text = [str(name) for name in self.phenotypes.columns if self.phenotypes[name].dtype != np.float64]
        further = [
            {"name": name, "rois": each.rois, "lacking": np.flatnonzero(~each.present).tolist()}
            for name, each in self.parcellations.items()
        ]
        header = {
            "name": self.name,
            "atlas": self.atlas,
            "rois": self.rois,
            "subjects": self.subjects.tolist(),
            "sites": self.sites.tolist(),
            "phenotypes": self._columns(),
            "text_columns": text,
            "inputs": self.inputs,
            "allow_proxies": self.allow_proxies,
            "excluded": self.excluded,
            "notes": [note if isinstance(note, str) else note._asdict() for note in self.notes],
            "truth": self.truth,
            "findings": None if self.findings is None else [one._asdict() for one in self.findings],
        }
        return header | {"parcellations": further} if further else header

    @classmethod
    def load(cls, path: str | Path) -> Cohort:
        """Read a cohort file; float32 series are memory-mapped and read from disk when first used."""
        meta, tensors = read_tensors(path, FORMAT)
        try:
            cohort = cls._from_parts(json.loads(meta["cohort"]), tensors)
        except (InputError, ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:
            raise InputError(f"{path} is damaged and cannot be read as a cohort ({one_line(error)}).") from None
        if cohort.hash != meta.get("hash"):
            raise InputError(f"{path} was altered after it was written: its content does not match its hash.")
        return cohort

    @classmethod
    def _from_parts(cls, head: dict[str, Any], tensors: dict[str, npt.NDArray[Any]]) -> Cohort:
        columns = {
            name: values if name in head["text_columns"] else np.array(values, dtype=np.float64)
            for name, values in head["phenotypes"].items()
        }
        cohort = cls(
            series=stored_series("", tensors, tensors["lengths"]),
            subjects=head["subjects"],
            sites=head["sites"],
            labels=tensors["labels"],
            rois=head["rois"],
            phenotypes=pd.DataFrame(columns, index=head["subjects"]),
            inputs=head["inputs"],
            tr=tensors["tr"],
            atlas=head["atlas"],
            name=head["name"],
            excluded=tuple((Exclusion if len(each) > 3 else Exclusion.from_reason)(*each) for each in head["excluded"]),
            notes=tuple(map(read_note, head["notes"])),
            truth=head["truth"],
            allow_proxies=head["allow_proxies"],
            parcellations=_stored_parcellations(head.get("parcellations", []), tensors),
        )
        findings = head.get("findings")  # absent in files of earlier versions
        return cohort if findings is None else cohort.with_findings(map(read_finding, findings))


def is_proxy(column: str) -> bool:
    """Whether a phenotype column reveals the diagnosis (a label proxy), judged by its name."""
    return any(PROXY.search(text) is not None for text in (column, CAMEL.sub("_", column)))


def series_defect(series: npt.NDArray[Any], rois: Sequence[str]) -> str | None:
    """Why a (time, roi) series is unusable, in words, or None. Single flat ROIs are reported by `check` instead."""
    if len(series) < 2:
        return f"the series has {len(series)} volume{'s' * (len(series) != 1)}"
    if not np.isfinite(series).all():
        bad = ~np.isfinite(series)
        count = int(bad.sum())
        volume, roi = np.argwhere(bad)[0]
        kind = "NaN" if np.isnan(series[volume, roi]) else "infinite value"
        return f"{kind} at volume {volume + 1} of ROI {rois[roi]} ({count} such value{'s' * (count != 1)})"
    if (series[1:] == series[0]).all():
        return "every ROI is constant" if series.any() else "the series is zero everywhere"
    return None


def natural_key(text: str) -> list[tuple[int, int, str]]:
    """Sort key that puts S2 before S10."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.findall(r"[0-9]+|[^0-9]+", text)]


def _check_unique(where: str, what: str, values: npt.NDArray[np.str_]) -> None:
    names, counts = np.unique(values, return_counts=True)
    if (counts > 1).any():
        raise InputError(f"{where}: {what} {names[counts > 1][0]} appears {counts.max()} times.")


def _check_series(
    where: str, subjects: npt.NDArray[np.str_], series: Iterable[npt.NDArray[np.float32] | None], rois: tuple[str, ...]
) -> None:
    for subject, one in zip(subjects, series, strict=True):
        if one is None:
            continue
        if one.ndim != 2 or one.shape[1] != len(rois):
            raise InputError(f"{where}: the series of subject {subject} has shape {one.shape}, not (time, {len(rois)}).")
        defect = series_defect(one, rois)
        if defect:
            raise InputError(f"{where}: subject {subject}: {defect}.")


def _stored_parcellations(
    entries: Sequence[Mapping[str, Any]], tensors: Mapping[str, npt.NDArray[Any]]
) -> dict[str, Parcellation]:
    """Further atlases of a cohort file; `entries` are those of its header."""
    lengths = tensors["lengths"]
    parcellations: dict[str, Parcellation] = {}
    for i, entry in enumerate(entries):
        name, lacking = entry["name"], set(entry["lacking"])
        if name in parcellations or not lacking <= set(range(len(lengths))):
            raise ValueError(f"atlas {name} is listed twice, or for subjects that the file does not have")
        stored = lengths[[position not in lacking for position in range(len(lengths))]]
        if int(stored.sum()) != len(tensors[f"{FURTHER.format(i)}series"]):
            raise ValueError(f"the series of atlas {name} do not have the volumes of its subjects")
        parts = iter(stored_series(FURTHER.format(i), tensors, stored))
        series = [None if position in lacking else next(parts) for position in range(len(lengths))]
        parcellations[name] = Parcellation(entry["rois"], series)
    return parcellations


def _read_only(series: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    array = np.asarray(series)
    if array.dtype != np.float32 or not array.flags.c_contiguous or array.flags.writeable:
        array = np.array(array, dtype=np.float32, order="C")
        array.flags.writeable = False
    return array


def _labels(labels: npt.ArrayLike) -> npt.NDArray[np.int8]:
    values = np.asarray(labels)
    if values.size and not np.isin(values, (UNKNOWN, 0, 1)).all():
        invalid = values[~np.isin(values, (UNKNOWN, 0, 1))][0]
        raise InputError(f"label {invalid} is neither 1 (patient), 0 (control) nor -1 (unknown).")
    return values.astype(np.int8)


def _canonical_table(table: pd.DataFrame, subjects: npt.NDArray[np.str_]) -> pd.DataFrame:
    """Convert each column to float64 with NaN, or to text with "", so that a saved table is read back unchanged."""
    columns = {}
    for name in table.columns:
        column = table[name]
        if pd.api.types.is_numeric_dtype(column.dtype):
            columns[str(name)] = column.to_numpy(dtype=np.float64, na_value=np.nan)
        else:
            columns[str(name)] = np.array(["" if pd.isna(value) else str(value) for value in column], dtype=object)
    return pd.DataFrame(columns, index=pd.Index(subjects.tolist(), dtype=object))


def _json_value(value: object) -> float | str | None:
    if isinstance(value, str):
        return value
    number = float(value)  # type: ignore[arg-type]
    return None if np.isnan(number) else number
