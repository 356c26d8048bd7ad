"""Reader of a lab's folder: participants.tsv, one array file per subject, and an optional dataset.toml.

Called by `m2lgdg.read`. Without dataset.toml, series are expected as <subject>.npy/.csv/.tsv/.mat/.1D/.txt.
"""

from __future__ import annotations

import glob
import re
import tomllib
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from m2lgdg.cohort import Cohort, Exclusion, is_proxy
from m2lgdg.data.atlases import regions
from m2lgdg.data.readers.gather import OnBad, Progress, Rois, Series, SeriesFile, gather, load_array, numbered_rois
from m2lgdg.data.readers.participants import Participants, read_participants
from m2lgdg.data.readers.tables import ALIASES, need_columns, need_distinct, read_text_table
from m2lgdg.storage import InputError, one_line

ADVICE = 'give the words of each class in dataset.toml: [labels] patient = ["..."], control = ["..."]'
SUFFIXES = (".npy", ".csv", ".tsv", ".mat", ".1D", ".txt")
UNION_PART = re.compile(r"str|int|float|constrained-float|dict\[.*")  # inserted by pydantic into the location of an error
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Labels(_Strict):
    """The words of the label column for each class."""

    patient: list[str | int] = []
    control: list[str | int] = []


class Dataset(_Strict):
    """dataset.toml: every key is optional."""

    name: str | None = None
    participants: str = "participants.tsv"
    pattern: str | None = Field(
        default=None, description="path of a series with {subject} and {site}, such as 'ts/{subject}_aal.csv'"
    )
    orientation: Literal["time,roi", "roi,time"] = "time,roi"
    variable: str | None = Field(default=None, description="variable of a .mat file")
    atlas: str = ""
    rois: str | None = Field(default=None, description="table with a name column, one row per ROI")
    tr: Seconds | dict[str, Seconds] | None = Field(default=None, description="seconds per volume, for all sites or by site")
    site: str | None = Field(default=None, description="the site, if there is no site column")
    inputs: list[str] | None = None
    allow_proxies: bool = False
    missing: list[str | int | float] = []
    columns: dict[str, str] = {}
    labels: Labels = Labels()


def matches(path: Path) -> bool:
    """Whether a folder has this layout."""
    return (path / "participants.tsv").is_file() or (path / "dataset.toml").is_file()


def read(path: Path, *, on_bad: OnBad = "stop", progress: Progress | None = None) -> Cohort:
    """Read the subjects of participants.tsv with their series.

    A subject without a series, or a series without a row, is an error unless `on_bad` is "exclude".
    """
    dataset = _dataset(path / "dataset.toml")
    table = path / dataset.participants
    people = read_participants(
        table,
        columns=dataset.columns,
        patient=[str(word) for word in dataset.labels.patient],
        control=[str(word) for word in dataset.labels.control],
        missing=[str(word) for word in dataset.missing],
        inputs=dataset.inputs,
        site=dataset.site,
        advice=ADVICE,
    )
    _check_inputs(people, dataset, path / "dataset.toml")
    files, excluded = [], []
    for subject, site in zip(people.subjects, people.sites.tolist(), strict=True):
        file = _series_file(path, dataset, subject, site)
        if file is not None:
            files.append(SeriesFile(subject, site, file))
        elif on_bad == "stop":
            raise InputError(f"{table}: subject {subject} has no series file{_expected(path, dataset, subject, site)}.")
        else:
            excluded.append(Exclusion(subject, site, "listed but no series file"))
    for subject, file in _unlisted(path, dataset, {each.path for each in files}):
        if on_bad == "stop":
            raise InputError(f"{file}: subject {subject} is not in {table}.")
        excluded.append(Exclusion(subject, "", "series file but not listed"))
    names = _roi_names(path, dataset)
    gathered = gather(files, lambda file: _load(file, dataset, names), table, on_bad=on_bad, progress=progress)
    position = {subject: i for i, subject in enumerate(people.subjects)}
    rows = [position[each.subject] for each in gathered.files]
    return Cohort(
        series=gathered.series,
        subjects=np.array([each.subject for each in gathered.files]),
        sites=people.sites[rows],
        labels=people.labels[rows],
        rois=gathered.rois,
        phenotypes=people.phenotypes.iloc[rows],
        inputs=people.inputs,
        tr=_repetition_times(people, dataset)[rows],
        atlas=dataset.atlas,
        name=dataset.name or path.resolve().name,
        excluded=tuple(sorted(excluded + gathered.excluded)),
        notes=people.notes,
        allow_proxies=dataset.allow_proxies,
    )


def _dataset(path: Path) -> Dataset:
    if not path.exists():
        return Dataset()
    try:
        dataset = Dataset.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is not valid TOML ({one_line(error)}).") from None
    except ValidationError as error:
        first = max(error.errors(), key=lambda one: len(one["loc"]))  # for a union of types, the deepest error
        key = ".".join(str(part) for part in first["loc"] if not UNION_PART.fullmatch(str(part)))
        known = f"; known keys: {', '.join(Dataset.model_fields)}" if first["type"] == "extra_forbidden" else ""
        raise InputError(f"{path}, key {key}: {first['msg'][0].lower()}{first['msg'][1:]}{known}.") from None
    unknown = set(dataset.columns) - set(ALIASES)
    if unknown:
        raise InputError(f"{path}, key columns.{min(unknown)}: not one of {', '.join(ALIASES)}.")
    need_distinct(list(map(str, dataset.labels.patient)), list(map(str, dataset.labels.control)), f"{path}, key labels")
    if dataset.pattern and "{subject}" not in dataset.pattern:
        raise InputError(f"{path}, key pattern: {dataset.pattern!r} does not contain {{subject}}.")
    return dataset


def _check_inputs(people: Participants, dataset: Dataset, path: Path) -> None:
    """Refuse inputs that reveal the diagnosis, judged by the name of their column in the table."""
    for name in people.inputs:
        column = dataset.columns.get(name, name)
        if is_proxy(column) and not dataset.allow_proxies:
            raise InputError(
                f"{path}: input {column} reveals the diagnosis, so a model could read the label from it; "
                "leave it out, or keep it with allow_proxies = true."
            )


def _candidates(path: Path, dataset: Dataset, subject: str, site: str) -> list[Path]:
    if dataset.pattern:
        return [path / dataset.pattern.replace("{subject}", subject).replace("{site}", site)]
    return [path / part / f"{subject}{suffix}" for part in ("", "series", "timeseries") for suffix in SUFFIXES]


def _series_file(path: Path, dataset: Dataset, subject: str, site: str) -> Path | None:
    present = [file for file in _candidates(path, dataset, subject, site) if file.is_file()]
    if len(present) > 1:
        raise InputError(f"{present[1]}: subject {subject} has a second series file, {present[0].name}.")
    return present[0] if present else None


def _expected(path: Path, dataset: Dataset, subject: str, site: str) -> str:
    files = _candidates(path, dataset, subject, site)
    return f" {files[0]}" if dataset.pattern else f" in {path} (expected {subject}{{{','.join(SUFFIXES)}}})"


def _unlisted(path: Path, dataset: Dataset, taken: set[Path]) -> list[tuple[str, Path]]:
    """Series files of subjects that are not listed, each with the subject in its name."""
    if dataset.pattern:
        return _unlisted_by_pattern(path, dataset.pattern, taken)
    tables = {path / name for name in (dataset.participants, "dataset.toml", dataset.rois) if name}
    folders = {file.parent for file in taken}
    suffixes = {file.suffix for file in taken}
    files = sorted(file for folder in folders for file in folder.iterdir() if file.suffix in suffixes and file.is_file())
    return [(file.stem, file) for file in files if file not in {*taken, *tables} and file.stem != "participants"]


def _unlisted_by_pattern(path: Path, pattern: str, taken: set[Path]) -> list[tuple[str, Path]]:
    wild = glob.escape(pattern).replace("{subject}", "*").replace("{site}", "*")
    name = re.escape(pattern).replace(r"\{subject\}", "(?P<subject>.+)", 1).replace(r"\{site\}", ".+")
    name = name.replace(r"\{subject\}", "(?P=subject)")
    files = ((re.fullmatch(name, file.relative_to(path).as_posix()), file) for file in sorted(path.glob(wild)))
    return [(match["subject"], file) for match, file in files if match and file not in taken and file.is_file()]


def _roi_names(path: Path, dataset: Dataset) -> Rois | None:
    if dataset.rois:
        table = read_text_table(path / dataset.rois, "," if dataset.rois.endswith(".csv") else "\t")
        need_columns(table, ("name",), path / dataset.rois)
        repeated = table["name"][table["name"].duplicated()]
        if len(repeated):
            raise InputError(f"{path / dataset.rois}: ROI {repeated.iloc[0]} is listed twice.")
        return tuple(table["name"])
    known = regions(dataset.atlas) if dataset.atlas else None
    return None if known is None else tuple(known["name"])


def _load(file: Path, dataset: Dataset, names: Rois | None) -> tuple[Rois, Series]:
    header, series = load_array(file, dataset.variable)
    if dataset.orientation == "roi,time":
        header, series = None, np.ascontiguousarray(series.T)
    columns = tuple(header) if header is not None and len(header) == len(set(header)) == series.shape[1] else None
    if names is not None and len(names) != series.shape[1]:
        raise InputError(f"{file}: {series.shape[1]} ROI columns, but {dataset.rois or dataset.atlas} names {len(names)}.")
    if names is not None and (columns is None or set(columns) != set(names)):
        columns = names
    return columns or numbered_rois(series.shape[1]), series


def _repetition_times(people: Participants, dataset: Dataset) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    if isinstance(dataset.tr, dict):
        given = np.array([dataset.tr.get(site, np.nan) for site in people.sites.tolist()])
    else:
        given = np.full(len(people.subjects), np.nan if dataset.tr is None else dataset.tr)
    return np.where(np.isnan(people.tr), given, people.tr)
