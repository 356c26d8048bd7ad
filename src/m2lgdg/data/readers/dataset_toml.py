"""dataset.toml of a lab's folder: its keys, and what is wrong with one that cannot be used.

The folder reader asks for it first. Every key is optional, and so is the file.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from m2lgdg.cohort_arrays import need_seconds
from m2lgdg.data.atlases import included
from m2lgdg.data.readers import tables
from m2lgdg.storage import InputError, one_line, read_bytes

IN_UNION = re.compile(
    r"str|int|float|constrained-float|dict\[.*|list\[.*"
)  # inserted by pydantic into the location of an error
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Labels(_Strict):
    """The words of the label column for each class."""

    patient: list[str | int] = []
    control: list[str | int] = []


class FurtherAtlas(_Strict):
    """[atlases.NAME] of dataset.toml: the same scans in another atlas; what is not given is as in the first."""

    pattern: str | None = Field(default=None, description="path of a series, as the pattern of the first atlas")
    variable: str | None = None
    orientation: Literal["time,roi", "roi,time"] | None = None
    rois: str | None = Field(default=None, description="table with a name column, one row per ROI")


class Dataset(_Strict):
    """dataset.toml: every key is optional."""

    name: str | None = None
    participants: str = "participants.tsv"
    pattern: str | None = Field(
        default=None, description="path of a series with {subject}, {site} and {run}, such as 'ts/{subject}_aal.csv'"
    )
    join_runs: bool = Field(default=False, description="join the runs of a subject, each z-scored per ROI")
    orientation: Literal["time,roi", "roi,time"] = "time,roi"
    header: bool | None = Field(default=None, description="whether the first row names the columns; told from it by default")
    index_column: Literal["drop", "keep"] | None = Field(
        default=None, description="what becomes of a column that counts volumes; refused by default"
    )
    variable: str | None = Field(default=None, description="variable of a .mat file")
    atlas: str = ""
    rois: str | None = Field(default=None, description="table with a name column, one row per ROI")
    values: Literal["correlation", "fisher-z", "covariance", "partial-correlation"] | None = Field(
        default=None, description="what connectomes hold; told from their range and diagonal by default"
    )
    triangle: Literal["upper", "lower"] | None = Field(default=None, description="half of a connectome that a row holds")
    tr: Seconds | dict[str, Seconds] | None = Field(default=None, description="seconds per volume, for all sites or by site")
    site: str | None = Field(default=None, description="the site, if there is no site column")
    inputs: list[str] | None = None
    allow_proxies: bool = False
    missing: list[str | int | float] = []
    columns: dict[str, str] = {}
    labels: Labels = Labels()
    atlases: dict[str, FurtherAtlas] = Field(default={}, description="further atlases of the same scans, by name")
    tables: dict[str, str | list[str]] = Field(default={}, description="tables of brain structure, by name")

    def table_files(self, folder: Path) -> dict[str, list[Path]]:
        """Files of each table, in the folder of dataset.toml."""
        files = {name: [given] if isinstance(given, str) else given for name, given in self.tables.items()}
        return {name: [folder / one for one in given] for name, given in files.items()}

    def by_atlas(self) -> dict[str, Dataset]:
        """The atlases of dataset.toml, each with its own keys."""
        every = {self.atlas: self}
        for name, further in self.atlases.items():
            given = {key: value for key, value in further.model_dump().items() if value is not None}
            every[name] = self.model_copy(update={"rois": None, **given, "atlas": name})
        return every

    def patterns(self) -> dict[str, str]:
        """Patterns of all atlases by their key in dataset.toml."""
        further = {f"atlases.{name}.pattern": each.pattern for name, each in self.atlases.items()}
        return {key: pattern for key, pattern in {"pattern": self.pattern, **further}.items() if pattern}


def read_dataset(path: Path, options: Mapping[str, object], atlas: Sequence[str]) -> Dataset:
    """Content of dataset.toml, with the options that were given; an included atlas that was requested is that of the files."""
    dataset = _parsed(path) if path.exists() else Dataset()
    dataset = dataset.model_copy(update={key: value for key, value in options.items() if value is not None})
    for key, pattern in dataset.patterns().items():
        if "{run}" in pattern and not dataset.join_runs:
            raise InputError(f"{path}, key {key}: {{run}} needs join_runs = true, which joins the runs of a subject.")
    if dataset.atlas or dataset.atlases or len(atlas) != 1 or included(atlas[0]) is None:
        return dataset
    return dataset.model_copy(update={"atlas": atlas[0]})


def _parsed(path: Path) -> Dataset:
    try:
        dataset = Dataset.model_validate(tomllib.loads(read_bytes(path, tables.LARGEST_TABLE).decode("utf-8")))
    except RecursionError:
        raise InputError(f"{path} is not valid TOML (it is nested too deeply).") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is not valid TOML ({one_line(error)}).") from None
    except ValidationError as error:
        first = max(error.errors(), key=lambda one: len(one["loc"]))  # for a union of types, the deepest error
        key = ".".join(str(name) for name in first["loc"] if not IN_UNION.fullmatch(str(name)))[:100]
        keys = FurtherAtlas.model_fields if first["loc"][0] == "atlases" else Dataset.model_fields
        known = f"; known keys: {', '.join(keys)}" if first["type"] == "extra_forbidden" else ""
        raise InputError(f"{path}, key {key}: {first['msg'][0].lower()}{first['msg'][1:]}{known}.") from None
    unknown = set(dataset.columns) - set(tables.ALIASES)
    if unknown:
        raise InputError(f"{path}, key columns.{min(unknown)[:100]}: not one of {', '.join(tables.ALIASES)}.")
    tables.need_distinct(list(map(str, dataset.labels.patient)), list(map(str, dataset.labels.control)), f"{path}, key labels")
    for pattern_key, pattern in dataset.patterns().items():
        if "{subject}" not in pattern:
            raise InputError(f"{path}, key {pattern_key}: {pattern!r} does not contain {{subject}}.")
        if ".." in Path(pattern).parts:
            raise InputError(f"{path}, key {pattern_key}: {pattern!r} leads out of {path.parent}; put the files there.")
        if Path(pattern).is_absolute():
            raise InputError(f"{path}, key {pattern_key}: {pattern!r} is absolute; write it relative to {path.parent}.")
    _check_atlases(path, dataset)
    _check_tables(path, dataset)
    for site, seconds in dataset.tr.items() if isinstance(dataset.tr, dict) else [("", dataset.tr or 0.0)]:
        need_seconds(seconds, f"{path}, key tr{site and '.'}{site}")
    return dataset


def _check_atlases(path: Path, dataset: Dataset) -> None:
    for name, each in dataset.atlases.items():
        if not dataset.atlas:
            raise InputError(f'{path}, key atlases.{name}: the first atlas needs a name, too: atlas = "...".')
        if name == dataset.atlas or not name.strip():
            raise InputError(f"{path}, key atlases.{name}: the name of a further atlas is not that of the first, nor empty.")
        if each.pattern is None and each.variable is None:
            raise InputError(f"{path}, key atlases.{name}: give the pattern of its files, or their variable.")


def _check_tables(path: Path, dataset: Dataset) -> None:
    for name, given in dataset.tables.items():
        for file in [given] if isinstance(given, str) else given:
            if Path(file).is_absolute() or ".." in Path(file).parts:
                advice = f"put it there, or give it with --table {name}=FILE"
                raise InputError(f"{path}, key tables.{name}: {file!r} is not in {path.parent}; {advice}.")
