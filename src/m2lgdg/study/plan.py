"""The plan of a study: its cells, each with a hash key of all that can change its result, and what its methods declare.

Made from a study file and a cohort before anything runs. A stored record with the same key is not run again. Tables and reports
read the declarations from `methods.json` of the study folder, so that they need neither PyTorch nor a plugin.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import numpy as np

from m2lgdg.cohort import Cohort
from m2lgdg.method import Method, chosen_atlases, need_scans
from m2lgdg.own_code import PACKAGE, PREDICTS, code_of_objects, is_only_here, memory_of_objects, package_files
from m2lgdg.registry import Declaration, create, load_methods
from m2lgdg.splits import leave_one_site_out
from m2lgdg.storage import InputError, write_text
from m2lgdg.study.config import Study
from m2lgdg.study.predictions import ADAPTED, STRICT, sweep_variant
from m2lgdg.study.tune import Tune

LIBRARIES = ("torch", "numpy", "scipy", "scikit-learn")  # their versions can change a prediction
METHODS_FILE = "methods.json"


@dataclass(frozen=True)
class Cell:
    """One training and its target; `fields` are all hyper-parameters, `key` is the hash of everything that matters.

    `code` stands for code and libraries in the key: the process that runs the cell must have the same.
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
    tune: Tune | None = None  # fields that are searched in source
    tracks: tuple[str, ...] = (STRICT,)  # whose rows `predictions.csv` has; one fit serves both

    def __str__(self) -> str:
        return f"{self.method}{f' ({self.variant})' if self.variant else ''}, target {self.target}, seed {self.seed}"


_AGREED: set[str] = set()  # code of cells that this process has planned or run


def make_cells(study: Study, cohort: Cohort) -> list[Cell]:
    """All cells of a study, in the order of `predictions.csv`."""
    targets = [fold.site for fold in leave_one_site_out(cohort, study.targets)]
    plugins = tuple(study.plugins)
    classes = load_methods(plugins)
    common = [cohort.hash, study.device.split(":")[0], study.threads, code_version(plugins)]
    batch = study.adapt_subjects if ADAPTED in study.tracks else 0
    cells = []
    labelled = cohort.select(np.flatnonzero(cohort.labels >= 0))
    for name in study.methods:
        seeds = study.seeds if classes[name].stochastic else study.seeds[:1]
        explained = study.explain if isinstance(study.explain, bool) else name in study.explain
        for variant, changes in _variants(study, name):
            made = create(name, **(study.method.get(name, {}) | changes))
            fields = made.fields()
            chosen_atlases(fields["atlases"], cohort)  # refuses an atlas that the cohort lacks
            need_scans(made, cohort)
            made.need_inputs(labelled)
            steps = study.explain_steps if explained and not variant else 0
            extra: list[Any] = [steps, study.explain_of, explaining_code_version()] if steps else []
            extra += [[ADAPTED, batch]] if batch else []
            tune = study.tune.get(name)
            extra += [["tune", tune.model_dump(), installed_version("optuna") if tune.ranges else ""]] if tune else []
            own = own_code(made)
            extra += [own] if own else []
            code = cell_code(plugins, steps) + own
            _AGREED.add(code)
            for target in targets:
                for seed in seeds:
                    identity = json.dumps([name, fields, target, seed, *common, *extra], sort_keys=True)
                    key = hashlib.sha256(identity.encode()).hexdigest()[:24]
                    shown = (steps, code, study.explain_of)
                    cells.append(Cell(name, variant, target, seed, fields, key, *shown, batch, tune, study.tracks))
    return cells


def distinct(cells: list[Cell]) -> list[Cell]:
    """Cells with distinct keys: a variant that changes nothing and a sweep's default value equal the method itself."""
    first: dict[str, Cell] = {}
    for cell in cells:
        first.setdefault(cell.key, cell)
    return list(first.values())


def _variants(study: Study, name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The method itself, its requested variants, and one variant per value of a sweep."""
    yield "", {}
    known = load_methods()[name].variants
    requested = study.variants if isinstance(study.variants, list) else study.variants.get(name, [])
    yield from ((variant, dict(known[variant])) for variant in requested if variant in known)
    for key, values in study.sweep.get(name, {}).items():
        yield from ((sweep_variant(key, value), {key: value}) for value in values)


def code_version(plugins: tuple[str, ...] = (), package: Path = PACKAGE) -> str:
    """Hash of all that can change a prediction: root modules, `methods/`, `fast/`, `model/`, `sklearn_bridge/`, `study/`,
    plugins with what they import, numerical libraries.

    Plugins count as they are loaded in this process, the package as it was when this was first called.
    """
    files, versions = package_code(package)
    loaded = [(Path(plugin).name, load_methods().plugin_hash(plugin)) for plugin in plugins]
    return _digest([*files, *loaded, *versions])


@cache
def package_code(package: Path = PACKAGE) -> tuple[list[tuple[str, str]], list[str]]:
    """Name and hash of the package's files that can change a prediction, and the versions of numerical libraries."""
    return package_files(*PREDICTS, "study", package=package), [
        f"{library} {installed_version(library)}" for library in LIBRARIES
    ]


@cache
def explaining_code_version(package: Path = PACKAGE) -> str:
    """Hash of the code that makes explanations."""
    return _digest(package_files("explain", package=package))


def cell_code(plugins: tuple[str, ...], explain: int) -> str:
    """Hash of the code that runs a cell in this process, and of the code that explains it if it is explained."""
    return code_version(plugins) + (f"-{explaining_code_version()}" if explain else "")


def own_code(made: Method) -> str:
    """Hashes of the code of a method that is neither of the package, of a plugin nor installed; empty without any.

    The first is of its files, the second of what this process has in memory.
    """
    values = _objects(made)
    hashes = code_of_objects(values, f"method {made.name}")
    return f"-{_digest(hashes)}-{memory_of_objects(values)[:16]}" if hashes else ""


def _objects(made: Method) -> list[Any]:
    return [type(made), *getattr(made, "given_code", list)()]


def is_code(cell: Cell, now: str) -> bool:
    """Whether code of this process is that of a cell; memory is compared once, since a method may change its own globals."""
    same = now == cell.code or (cell.code in _AGREED and now.rpartition("-")[0] == cell.code.rpartition("-")[0])
    if same:
        _AGREED.add(cell.code)
    return same


def refuse_only_here(cells: Iterable[Cell]) -> None:
    """Refuse methods that other processes do not have, before these are started."""
    for cell in {cell.code: cell for cell in cells}.values():
        made = load_methods()[cell.method](**cell.fields)
        if getattr(made, "only_here", False) or is_only_here(_objects(made)):
            raise InputError(
                f"method {cell.method} is defined in the script itself or in a module of it, which other processes do not "
                "import; put it into a plugin file, or run with one job."
            )


def installed_version(library: str) -> str:
    """Version of an installed package, without importing it."""
    try:
        return version(library)
    except PackageNotFoundError:
        return "not installed"


def _digest(content: object) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def write_declarations(folder: Path, names: Iterable[str]) -> None:
    """Write the declarations of these methods, unless the folder has them as they are now."""
    known, path = load_methods(), folder / METHODS_FILE
    declared = {name: asdict(known.declaration(name)) for name in names}
    text = json.dumps(declared, indent=1, ensure_ascii=False, default=str) + "\n"
    if not path.is_file() or path.read_text(encoding="utf-8") != text:
        write_text(path, text)


def declarations(folder: str | Path) -> dict[str, Declaration]:
    """Declarations of a study's methods as they were when it ran.

    A folder of version 0.1.0 has no such file. Its methods are declared by their classes as they are now, with the variants
    that they had then; a plugin is left out, and without PyTorch a network.
    """
    path = Path(folder) / METHODS_FILE
    if not path.is_file():
        return _of_classes(Path(folder) / "study.json")
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        return {str(name): _checked(Declaration(**one)) for name, one in stored.items()}
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        raise InputError(f"{path} is damaged; remove it, and repeat m2lgdg run to write it again.") from None


def _checked(declared: Declaration) -> Declaration:
    """The declaration; TypeError if a damaged file has anything else in it."""
    tables = [declared.fields, declared.variants, *dict(declared.variants).values()]
    texts = [declared.summary, declared.reference, declared.role]
    if not all(isinstance(one, dict) for one in tables) or not all(isinstance(text, str) for text in (*texts, *declared.takes)):
        raise TypeError("a declaration has other types")
    return declared


def _of_classes(path: Path) -> dict[str, Declaration]:
    """Declarations of the methods that study.json names."""
    try:
        fields = {
            str(name): dict(recorded) for name, recorded in json.loads(path.read_text(encoding="utf-8"))["method"].items()
        }
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return {}
    known = load_methods()
    found = {}
    for name, recorded in fields.items():
        with contextlib.suppress(InputError, LookupError):  # a network without PyTorch, and a plugin
            declared = known.declaration(name)
            then = {variant: changes for variant, changes in declared.variants.items() if changes.keys() <= {*recorded}}
            found[name] = replace(declared, variants=then)
    return found
