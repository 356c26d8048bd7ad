"""What a method class declares (defaults of its fields, variants, whether the seed matters), read from its source file.

The registry uses it to describe networks in tables and reports without importing PyTorch. Only the text of the package's own
files is parsed; no code is run.
"""

from __future__ import annotations

import ast
import functools
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

PACKAGE = __name__.partition(".")[0]


@dataclass(frozen=True)
class Declaration:
    """Default of each field, fields changed by each variant, and whether the seed matters (`Method.stochastic`)."""

    fields: Mapping[str, Any]
    variants: Mapping[str, Mapping[str, Any]]
    stochastic: bool


@functools.cache
def declared(module: str, method: str) -> Declaration:
    """Declaration of the class that a module registers as `@method("name")`; ValueError if it is not plain enough to read."""
    for node in _tree(module).body:
        if isinstance(node, ast.ClassDef) and any(_registers(decorator, method) for decorator in node.decorator_list):
            fields, attributes = _members(module, node.name)
            return Declaration(fields, attributes["variants"], attributes["stochastic"])
    raise ValueError(f"{module} has no class of method {method}")


def _registers(decorator: ast.expr, method: str) -> bool:
    if not isinstance(decorator, ast.Call) or not decorator.args:
        return False
    first = decorator.args[0]
    return isinstance(first, ast.Constant) and first.value == method


@functools.cache
def _tree(module: str) -> ast.Module:
    folder, _, name = module.rpartition(".")
    return ast.parse(pkgutil.get_data(folder, f"{name}.py") or b"")


@functools.cache
def _members(module: str, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Dataclass fields of a class with their defaults, and its other attributes that are needed, inherited ones included."""
    node = next((one for one in _tree(module).body if isinstance(one, ast.ClassDef) and one.name == name), None)
    if node is None:
        origin = _origin(module, name)
        return _members(origin, name) if origin else ({}, {})
    fields: dict[str, Any] = {}
    attributes: dict[str, Any] = {}
    for base in reversed(node.bases):  # the first base comes first in the order of lookup
        if isinstance(base, ast.Name):
            for known, more in zip((fields, attributes), _members(module, base.id), strict=True):
                known.update(more)
    for line in node.body:
        if not isinstance(line, ast.AnnAssign) or not isinstance(line.target, ast.Name) or line.value is None:
            continue
        shared = ast.unparse(line.annotation).startswith("ClassVar")
        if shared and line.target.id in ("variants", "stochastic"):
            attributes[line.target.id] = _value(line.value, module)
        elif not shared and node.decorator_list:  # only a dataclass has fields
            fields[line.target.id] = _value(line.value, module)
    return fields, attributes


def _origin(module: str, name: str) -> str | None:
    """Module of the package that a name is imported from."""
    for node in _tree(module).body:
        if isinstance(node, ast.ImportFrom) and any(alias.name == name for alias in node.names):
            return node.module if node.module and node.module.partition(".")[0] == PACKAGE else None
    return None


def _value(node: ast.expr, module: str) -> Any:
    """Value of a literal, in which attributes of other classes may occur, such as `{**ERM.variants, "narrow": {}}`."""
    if isinstance(node, ast.Dict):
        value: dict[Any, Any] = {}
        for key, item in zip(node.keys, node.values, strict=True):
            value |= _value(item, module) if key is None else {_value(key, module): _value(item, module)}
        return value
    if isinstance(node, ast.Subscript):
        return _value(node.value, module)[_value(node.slice, module)]
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return _members(module, node.value.id)[1][node.attr]
    return ast.literal_eval(node)
