"""Study files: cohort, targets, seeds and methods, with their fields, variants and sweeps; TOML in, resolved JSON out.

Every value is validated here before the runner uses it, and an unknown name gets the nearest valid one as a suggestion.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError

from m2lgdg.cohort import Cohort
from m2lgdg.fields import checked_fields, nearest, shown, variant_fields
from m2lgdg.model.site_level import ADAPT_SUBJECTS
from m2lgdg.registry import METHODS, find, load_methods
from m2lgdg.storage import InputError, one_line, read_bytes
from m2lgdg.study.predictions import ADAPTED, STRICT, is_adapted, sweep_variant
from m2lgdg.study.stats import MIN_PER_CLASS
from m2lgdg.study.tune import Tune

Scalar = bool | int | float | str
Seed = Annotated[int, Field(ge=0, lt=2**32)]  # the range that every random generator accepts
LARGEST = 2**20  # bytes of a study file
FIRST_METHODS = ("prior", "phenotype-logistic", "fc-logistic", "connectome-adaptive")  # of a cohort file instead of a study


class Study(BaseModel):
    """Keys of a study file."""

    model_config = ConfigDict(extra="forbid", strict=True)

    cohort: str = Field(description="cohort file or release folder, relative to the study file")
    methods: list[str] = Field(min_length=1, description="names, as `m2lgdg methods` lists them")
    name: str = Field(default="study", description="shown in tables and the report")
    main: str | None = Field(
        default=None, description="method that the report is about; by default m2lgdg, else the one with the highest AUC"
    )
    kind: str | None = Field(default=None, description="kind of the release folder; guessed by default")
    options: dict[str, Scalar] = Field(default={}, description="options of the reader of the cohort")
    exclude_sites: list[str] = Field(default=[], description="sites that are left out, of source and of targets")
    targets: list[str] | None = Field(default=None, min_length=1, description="target sites; all by default")
    seeds: list[Seed] = Field(
        default=[0, 1, 2, 3, 4], min_length=1, description="one training each; methods without randomness use the first"
    )
    atlas: str | None = Field(default=None, description="the only atlas of the cohort to use, for all methods")
    atlases: str | list[str] | None = Field(
        default=None, description="field `atlases` of all methods that do not set their own"
    )
    inputs: list[str] | None = Field(default=None, description="phenotype columns; those of the cohort by default")
    allow_proxies: bool = Field(default=False, description="allow inputs that reveal the diagnosis, such as ADOS scores")
    track: Literal["strict", "adapted"] | list[Literal["strict", "adapted"]] = Field(
        default="strict", description="strict: nothing of the target is seen; adapted: a batch of its unlabelled subjects is"
    )
    adapt_subjects: int = Field(default=ADAPT_SUBJECTS, ge=2, le=100000, description="subjects of a batch in the adapted track")
    method: dict[str, dict[str, Any]] = Field(default={}, description="[method.NAME]: changed fields")
    variants: list[str] | dict[str, list[str]] = Field(
        default=[], description="for every method with such a variant, or by method"
    )
    sweep: dict[str, dict[str, list[Any]]] = Field(default={}, description="[sweep.NAME]: field = values")
    tune: dict[str, Tune] = Field(
        default={}, description="[tune.NAME]: fields that are searched inside the source of each cell, and the number of trials"
    )
    min_per_class: int = Field(
        default=MIN_PER_CLASS,
        ge=1,
        description="patients, and controls, that a target site needs to count in means and tests",
    )
    explain: bool | list[str] = Field(default=False, description="methods explained at each target; true: all")
    explain_steps: int = Field(default=64, ge=1, description="steps of integrated gradients")
    explain_of: Literal["logit", "margin"] = Field(default="logit", description="what attributions of networks are of")
    plugins: list[str] = Field(default=[], description="Python files with methods of your own")
    device: str = Field(default="cpu", description="of networks: cpu, cuda, cuda:1, mps or auto")
    threads: int = Field(default=1, ge=1, le=4096, description="threads per cell; the same number gives identical results")
    cohort_hash: str | None = Field(default=None, description="refuse a cohort with other content")

    _held: Cohort | None = PrivateAttr(default=None)  # a cohort in memory, which is used instead of the path

    @property
    def tracks(self) -> tuple[str, ...]:
        """Tracks of the study, the strict one first."""
        given = [self.track] if isinstance(self.track, str) else self.track
        return tuple(track for track in (STRICT, ADAPTED) if track in given)


def read_study(path: str | Path, changes: list[str] | None = None, plugins: list[str] | None = None) -> Study:
    """Read a study file (.toml, or study.json of an earlier run), apply `--set key=value` changes and add plugins.

    A cohort file stands for the study of the default model and its simple peers at all sites of it.
    """
    path = Path(path)
    kind = "JSON" if path.suffix == ".json" else "TOML"
    if path.is_dir():
        stored = path / "study.json"
        advice = (
            f"to repeat its study, give {stored}"
            if stored.is_file()
            else f"m2lgdg convert {path.name} {path.name}.cohort writes a file that can be run"
        )
        raise InputError(f"{path} is a folder; {advice}.")
    try:
        text = "" if path.suffix == ".cohort" and path.is_file() else read_bytes(path, LARGEST).decode()
        content = json.loads(text) if kind == "JSON" else tomllib.loads(text)
    except UnicodeDecodeError as error:
        raise InputError(f"cannot read {path}: {one_line(error)}.") from None
    except (ValueError, RecursionError) as error:  # from the parsers, or from Python for a number with too many digits
        raise InputError(f"{path} is not valid {kind} ({one_line(error)[:200]}).") from None
    if not isinstance(content, dict):
        raise InputError(f"{path} does not contain a study (a table of keys).")
    if path.suffix == ".cohort":
        content = {"name": path.stem, "cohort": path.name, "methods": list(FIRST_METHODS), "main": FIRST_METHODS[-1]}
    for change in changes or []:
        _apply(content, change)
    if plugins and isinstance(content.get("plugins", []), list):  # otherwise check_study reports it
        content["plugins"] = [*content.get("plugins", []), *plugins]
    return check_study(content, str(path), path.parent)


def study_of(content: Mapping[str, Any]) -> Study:
    """Validate a study given in Python: its cohort may be a `Cohort`, and its methods may be `Method` objects."""
    given = dict(content)
    held = given.get("cohort")
    if isinstance(held, Cohort):
        given["cohort"] = held.name
    methods = given.get("methods")
    if isinstance(methods, list | tuple):
        tables = {one.name: one.fields() for one in methods if not isinstance(one, str)}
        given["methods"] = [one if isinstance(one, str) else one.name for one in methods]
        given["method"] = dict(given.get("method", {})) | tables
    study = check_study(given, "study")
    study._held = held if isinstance(held, Cohort) else None
    return study


def check_study(content: dict[str, Any], where: str, folder: Path = Path()) -> Study:
    """Validate a study given as plain values; its paths are relative to `folder`."""
    try:
        study = Study.model_validate(content)
    except ValidationError as error:
        raise InputError(_sentence(error, where)) from None
    plugins = [str(folder / plugin) for plugin in study.plugins]
    study = study.model_copy(update={"plugins": plugins, "cohort": str(folder / study.cohort)})
    known = load_methods(tuple(plugins))
    for name in study.methods:
        with _naming(f"{where}, [method.{name}]"):
            METHODS.define_estimator(name, study.method.get(name, {}))
        if name not in known:
            raise InputError(f"{where}, key methods: method {name} is not known{nearest(name, known)}")
        plugin = known.plugin_of(name)
        if plugin not in (None, *map(os.path.realpath, plugins)):  # loaded for another study of this process
            raise InputError(f"{where}, key methods: method {name} is defined in {plugin}; add this file to the key plugins.")
    _check_once(study, where)
    _check_names(study, where)
    study = study.model_copy(update={"method": _method_fields(study, where)})
    with _naming(where):
        for name in filter(usable, study.methods):
            checked_fields(known[name], study.method.get(name, {}))
            for field, values in study.sweep.get(name, {}).items():
                for value in values:
                    checked_fields(known[name], {field: value})
    for name in filter(usable, study.tune):
        _check_tune(study, name, f"{where}, [tune.{name}]")
    _check_variants(study, where)
    return study


def _check_tune(study: Study, name: str, where: str) -> None:
    space, variants = study.tune[name], find(name).variants
    requested = study.variants if isinstance(study.variants, list) else study.variants.get(name, [])
    for variant in (one for one in requested if one in variants):
        if both := sorted(variants[variant].keys() & space.fields.keys()):
            raise InputError(f"{where}: variant {variant} sets field {both[0]}, which is searched; drop one of the two.")
    if both := sorted(study.sweep.get(name, {}).keys() & space.fields.keys()):
        raise InputError(f"{where}: field {both[0]} is in [sweep.{name}], too; drop one of the two.")
    with _naming(where):
        space.check(name, study.method.get(name, {}))


@contextmanager
def _naming(where: str) -> Iterator[None]:
    """Put the place of a mistake before its sentence."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{where}: {error}") from None


def _check_names(study: Study, where: str) -> None:
    """Refuse sections and keys about methods that the study does not have."""
    named = [
        (f"[{section}.{name}]", name, f"{section}={{}}")
        for section in ("method", "sweep", "tune")
        for name in getattr(study, section)
    ]
    named += [("key explain", name, "explain=[]") for name in study.explain] if isinstance(study.explain, list) else []
    named += [("[variants]", name, "variants=[]") for name in study.variants] if isinstance(study.variants, dict) else []
    named += [("key main", study.main, "")] if study.main is not None else []
    for place, name, change in named:
        if name not in study.methods:
            hint = nearest(name, study.methods)
            hint = f"{hint.rstrip('.')} (--set {change} drops all)." if change else hint
            raise InputError(f"{where}, {place}: {name} is not one of the study's methods{hint}")


def with_only(study: Study, names: list[str] | None, sites: list[str] | None = None) -> Study:
    """Study with some of its methods and the sections that concern them, and with some of its target sites."""
    if sites:
        for site in sites:
            if study.targets is not None and site not in study.targets:
                raise InputError(f"--site {site}: not one of the study's targets{nearest(site, study.targets)}")
        study = study.model_copy(update={"targets": list(dict.fromkeys(sites))})
    if not names:
        return study
    for name in names:
        if name not in study.methods:
            raise InputError(f"--method {name}: not one of the study's methods{nearest(name, study.methods)}")
    methods = [name for name in study.methods if name in names]
    changed: dict[str, Any] = {"methods": methods, "main": study.main if study.main in methods else None}
    for key in ("method", "sweep", "tune", "explain", "variants"):
        value = getattr(study, key)
        if isinstance(value, dict):
            changed[key] = {name: own for name, own in value.items() if name in methods}
        elif isinstance(value, list):
            known = {variant for name in methods for variant in load_methods()[name].variants} if key == "variants" else methods
            changed[key] = [name for name in value if name in known]
    return study.model_copy(update=changed)


def _check_once(study: Study, where: str) -> None:
    if len(set(study.methods)) < len(study.methods) or len(set(study.seeds)) < len(study.seeds):
        raise InputError(f"{where}: a method or seed is listed twice.")
    lists = {
        key: getattr(study, key) for key in ("exclude_sites", "targets", "inputs", "explain", "variants", "atlases", "track")
    }
    if isinstance(study.variants, dict):
        lists |= {f"variants.{name}": variants for name, variants in study.variants.items()}
    lists |= {f"sweep.{name}.{field}": values for name, axes in study.sweep.items() for field, values in axes.items()}
    for key, listed in lists.items():
        for value in listed if isinstance(listed, list) else []:
            if listed.count(value) > 1:
                raise InputError(f"{where}, key {key}: {value} is listed twice.")


def _method_fields(study: Study, where: str) -> dict[str, dict[str, Any]]:
    """Changed fields of the methods: those of their sections, which may begin with a variant, and `atlases` of the study."""
    fields = {name: dict(changed) for name, changed in study.method.items()}
    for name, changed in fields.items():
        if "variant" in changed:
            with _naming(f"{where}, [method.{name}]"):
                fields[name] = method_fields(name, str(changed.pop("variant")), []) | changed
    if study.atlases is None:
        return fields
    using = [name for name in study.methods if not usable(name) or "atlases" not in find(name).unused]
    return fields | {name: {"atlases": study.atlases} | fields.get(name, {}) for name in using}


def method_fields(name: str, variant: str | None, changes: list[str]) -> dict[str, Any]:
    """Changed fields of one method: those of a variant, then `--set field=value` changes."""
    changed: dict[str, Any] = {}
    for change in changes:
        _apply(changed, change)
    METHODS.define_estimator(name, changed)
    variants = find(name).variants
    return (variant_fields(name, variants, variant) if variant is not None else {}) | changed


def usable(name: str) -> bool:
    """Whether a known method can be used here. A network without PyTorch cannot; a study is refused only if it runs one."""
    try:
        return find(name) is not None
    except InputError:
        return False


def _check_variants(study: Study, where: str) -> None:
    if not study.tracks:
        raise InputError(f"{where}, key track: the list is empty; choose strict, adapted or both.")
    listed = study.variants if isinstance(study.variants, dict) else {"": study.variants}
    named = [("key variants", variant) for variants in listed.values() for variant in variants]
    named += [
        (f"[sweep.{name}]", sweep_variant(field, value))
        for name, axes in study.sweep.items()
        for field, values in axes.items()
        for value in values
    ]
    for place, variant in named:
        if is_adapted(variant):
            raise InputError(f"{where}, {place}: {variant} is the name of rows of the adapted track; choose another name.")
    declared = {name: find(name).variants for name in study.methods if usable(name)}
    every = {variant for variants in declared.values() for variant in variants}
    for name, variants in listed.items():
        for variant in variants:
            if name in declared and variant not in declared[name]:
                hint = nearest(variant, declared[name])
                raise InputError(f"{where}, [variants]: method {name} has no variant {variant}{hint}")
            if not name and variant not in every and len(declared) == len(study.methods):
                hint = f"{nearest(variant, every).rstrip('.')} (--set variants=[] drops all)"
                raise InputError(f"{where}, key variants: no method of the study has a variant {variant}{hint}.")


def _apply(content: dict[str, Any], change: str) -> None:
    """Apply `--set a.b=value`; the value is TOML, and text needs no quotes."""
    key, equals, text = change.partition("=")
    if not equals or not key.strip():
        raise InputError(f"--set {change}: expected key=value.")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except RecursionError:
        raise InputError(f"--set {change[:60]}…: the value is nested too deeply.") from None
    except ValueError:  # not TOML, or a number with too many digits
        value = text
    *path, last = key.strip().split(".")
    for section in path:
        content = content.setdefault(section, {})
        if not isinstance(content, dict):
            raise InputError(f"--set {change}: {section} is not a section.")
    content[last] = value


def _sentence(error: ValidationError, where: str) -> str:
    first, *others = error.errors()
    if any(each["loc"] == ("method",) and isinstance(each["input"], list) for each in error.errors()):
        return f"{where}: key method is for the fields of a method, as [method.NAME]; did you mean methods?"
    if first["type"] == "missing":  # a misspelt key is reported as the one that is not known
        first = next((each for each in others if each["type"] == "extra_forbidden"), first)
    kinds = ("str", "list[str]", "dict[str,list[str]]")  # of a value that may have several types
    key = " ".join(".".join(str(name) for name in first["loc"] if name not in kinds).split())[:100]
    if first["type"] == "extra_forbidden":
        return f"{where}: key {key} is not known{nearest(key, list(Study.model_fields))}"
    if first["type"] == "missing":
        return f"{where}: key {key} is missing."
    message = first["msg"][0].lower() + first["msg"][1:]
    return f"{where}, key {key}: {message} (it is {shown(first['input'])})."
