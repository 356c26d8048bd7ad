"""The cells of a study: every method, variant, target and seed, each with a hash key of all that can change its result.

Made from a study file and a cohort, and run by `study.runner`. A stored record with the same key is not run again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from m2lgdg.cohort import Cohort
from m2lgdg.method import make
from m2lgdg.model.over_atlases import chosen_atlases
from m2lgdg.registry import load_methods
from m2lgdg.splits import leave_one_site_out
from m2lgdg.study.config import Study
from m2lgdg.study.predictions import ADAPTED, STRICT, sweep_variant

PACKAGE = Path(__file__).parents[1]
LIBRARIES = ("torch", "numpy", "scipy", "scikit-learn")  # their versions can change a prediction


@dataclass(frozen=True)
class Cell:
    """One training and its target; `fields` are all hyper-parameters, `key` is the hash of everything that matters.

    `code` is the part of the key that stands for code and libraries: the process that runs the cell must have the same.
    """

    method: str
    variant: str
    target: str
    seed: int
    fields: dict[str, Any]
    key: str
    explain: int = 0  # steps of integrated gradients; 0: not explained
    code: str = ""
    explain_of: Literal["logit", "margin"] = "logit"  # what attributions of a network are of
    adapt: int = 0  # subjects of a batch in the adapted track; 0: the cell is of the strict track only
    tracks: tuple[str, ...] = (STRICT,)  # whose rows `predictions.csv` has; one fit serves both

    def __str__(self) -> str:
        return f"{self.method}{f' ({self.variant})' if self.variant else ''}, target {self.target}, seed {self.seed}"


def make_cells(study: Study, cohort: Cohort) -> list[Cell]:
    """All cells of a study, in the order of `predictions.csv`."""
    targets = [fold.site for fold in leave_one_site_out(cohort, study.targets)]
    plugins = tuple(study.plugins)
    classes = load_methods(plugins)
    common = [cohort.hash, study.device.split(":")[0], study.threads, code_version(plugins)]
    cells = []
    for name in study.methods:
        seeds = study.seeds if classes[name].stochastic else study.seeds[:1]
        for variant, changes in _variants(study, name):
            fields = make(name, **(study.method.get(name, {}) | changes)).fields()
            chosen_atlases(fields["atlases"], cohort)  # refuses an atlas that the cohort lacks
            steps = 0 if variant else _explained(study, name)
            explained = [steps, study.explain_of, explaining_code_version()] if steps else []
            code = cell_code(plugins, steps)
            batch = study.adapt_subjects if ADAPTED in study.tracks else 0
            adapted = [[ADAPTED, batch]] if batch else []
            for target in targets:
                for seed in seeds:
                    identity = json.dumps([name, fields, target, seed, *common, *explained, *adapted], sort_keys=True)
                    key = hashlib.sha256(identity.encode()).hexdigest()[:24]
                    shown = (steps, code, study.explain_of)
                    cells.append(Cell(name, variant, target, seed, fields, key, *shown, batch, study.tracks))
    return cells


def distinct(cells: list[Cell]) -> list[Cell]:
    """Cells with distinct keys: a variant that changes nothing and a sweep's default value equal the method itself."""
    first: dict[str, Cell] = {}
    for cell in cells:
        first.setdefault(cell.key, cell)
    return list(first.values())


def _explained(study: Study, name: str) -> int:
    """Steps of a method's explanation, or 0; variants and sweeps are never explained."""
    requested = study.explain if isinstance(study.explain, bool) else name in study.explain
    return study.explain_steps if requested else 0


def _variants(study: Study, name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The method itself, its requested variants, and one variant per value of a sweep."""
    yield "", {}
    known = load_methods()[name].variants
    requested = study.variants if isinstance(study.variants, list) else study.variants.get(name, [])
    for variant in requested:
        if variant in known:
            yield variant, dict(known[variant])
    for key, values in study.sweep.get(name, {}).items():
        for value in values:
            yield sweep_variant(key, value), {key: value}


def code_version(plugins: tuple[str, ...] = (), package: Path = PACKAGE) -> str:
    """Hash of all that can change a prediction: root modules, `methods/`, `fast/`, `model/`, `sklearn_bridge/`,
    plugins, numerical libraries.

    Plugins count as they are loaded in this process, the package as it was when this was first called.
    """
    files, versions = package_code(package)
    loaded = [(Path(plugin).name, load_methods().plugin_hash(plugin)) for plugin in plugins]
    return _digest([*files, *loaded, *versions])


@cache
def package_code(package: Path = PACKAGE) -> tuple[list[tuple[str, str]], list[str]]:
    """Name and hash of the package's files that can change a prediction, and the versions of numerical libraries."""
    folders = (package / name for name in ("methods", "fast", "model", "sklearn_bridge"))
    files = [*package.glob("*.py"), *(file for folder in folders for file in folder.rglob("*.py"))]
    return _hashes(files), [f"{library} {installed_version(library)}" for library in LIBRARIES]


@cache
def explaining_code_version(package: Path = PACKAGE) -> str:
    """Hash of the code that makes explanations."""
    return _digest(_hashes((package / "explain").rglob("*.py")))


def cell_code(plugins: tuple[str, ...], explain: int) -> str:
    """Hash of the code that runs a cell in this process, and of the code that explains it if it is explained."""
    return code_version(plugins) + (f"-{explaining_code_version()}" if explain else "")


def installed_version(library: str) -> str:
    """Version of an installed package, without importing it."""
    try:
        return version(library)
    except PackageNotFoundError:
        return "not installed"


def _hashes(files: Iterable[Path]) -> list[tuple[str, str]]:
    return [(file.name, hashlib.sha256(file.read_bytes()).hexdigest()) for file in sorted(files)]


def _digest(parts: Sequence[tuple[str, str] | str]) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]
