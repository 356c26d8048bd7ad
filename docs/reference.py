"""The generated parts of the pages: commands, keys of a study file, methods, and the Python names from their docstrings.

A page of docs/ holds a line `<!-- generated: NAME -->`; the build of the site puts the text of `PARTS[NAME]` there, so the
reference cannot differ from the package.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

ITEM = re.compile(r"^(?=Differs from|As published|As released|Interpretation|Variant |The publication's|`\w+`:)", re.M)
PLACE = re.compile(r"^<!-- generated: ([\w-]+) -->$", re.M)


def filled(text: str) -> str:
    """A page with its generated parts."""
    return PLACE.sub(lambda match: "\n".join(PARTS[match[1]]()), text)


def commands() -> Iterator[str]:
    """Every command with its arguments and options."""
    import typer

    from m2lgdg.cli import terminal

    group = typer.main.get_command(terminal.app)
    known = {name: group.get_command(typer.Context(group), name) for name in group.list_commands(typer.Context(group))}
    for name, command in _flat(known):
        context = typer.Context(command, info_name=f"m2lgdg {name}")
        yield from [f"{'###' if ' ' in name else '##'} {name}", "", *_paragraphs(command.help or ""), ""]
        if hasattr(command, "commands"):
            continue
        yield from ["```text", " ".join(command.get_usage(context).replace("Usage: ", "").split()), "```", ""]
        yield from ["| | | default |", "|---|---|---|"]
        yield from (_row(parameter, context) for parameter in command.get_params(context) if parameter.name != "help")
        yield ""


def _flat(commands: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Commands by name; after a group, its commands by two words."""
    for name, command in commands.items():
        yield before + name, command
        yield from _flat(getattr(command, "commands", {}), f"{name} ")


def _row(parameter: Any, context: Any) -> str:
    """An option or argument as a row of a table."""
    option = parameter.param_type_name == "option"
    names = [*parameter.opts, *parameter.secondary_opts] if option else [parameter.name.upper()]
    shown = ", ".join(f"`{name}`" for name in names)
    value = parameter.default
    empty = value is None or value is False or callable(value) or value in ((), "") or parameter.required
    default = "required" if parameter.required else "" if empty else f"`{value}`"
    return f"| {shown} | {_cell(parameter.help or '')} | {default} |"


def study_file() -> Iterator[str]:
    """Every key of a study file."""
    from m2lgdg.study.config import Study

    yield from ["| key | values | default | |", "|---|---|---|---|"]
    schema = Study.model_json_schema()
    for name, key in schema["properties"].items():
        default = (
            "required"
            if name in schema["required"]
            else ""
            if key.get("default") is None
            else f"`{json.dumps(key['default'])}`"
        )
        yield f"| `{name}` | {_values(key)} | {default} | {_cell(key.get('description', ''))} |"


def _values(schema: dict[str, Any]) -> str:
    """The values of a key in words."""
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(_values(each) for each in schema["anyOf"] if each.get("type") != "null"))
    if "enum" in schema:
        return " or ".join(f'`"{value}"`' for value in schema["enum"])
    if schema.get("type") == "array":
        return f"list of {_values(schema.get('items', {}))}"
    words = {"string": "text", "integer": "integer", "number": "number", "boolean": "true or false", "object": "table"}
    return words.get(schema.get("type", ""), "values")


def methods() -> Iterator[str]:
    """Every method in the groups of `m2lgdg methods`: sentence, reference, variants, differences from its publication."""
    from m2lgdg.registry import PAPER, SIMPLE, load_methods

    known = load_methods()
    peers = known.with_role(*SIMPLE)
    groups = {
        "The paper's method and the methods it is compared with": PAPER,
        "Simple peers": peers,
        "Other methods": [name for name in known.modules if name not in PAPER and name not in peers],
    }
    for title, names in groups.items():
        yield from [f"### {title}", ""]
        for name in names:
            declared = known.declaration(name)
            yield from [f"#### {name}", "", _text(declared.summary), ""]
            facts = [f"Reference: {_text(declared.reference).rstrip('.')}."] if declared.reference else []
            facts += [f"Variants: {', '.join(f'`{variant}`' for variant in declared.variants)}."] if declared.variants else []
            facts += [] if "connectomes" in declared.takes else ["Needs time series."]
            yield from [" ".join(facts), ""]
            for paragraph in (inspect.getdoc(known[name]) or "").partition("\n")[2].split("\n\n"):
                yield from [ITEM.sub("\n- ", _text(paragraph)).strip(), ""]


def layout() -> Iterator[str]:
    """Every module of the root, then every folder with its modules, each with the first sentence of its docstring."""
    root = Path(__file__).resolve().parents[1] / "src" / "m2lgdg"
    folders = [root, *sorted(path.parent for path in root.glob("*/__init__.py"))]
    for folder in folders:
        own = "" if folder == root else f"{folder.name}/"
        yield from [f"**`m2lgdg/{own}`** {_text(_first(folder / '__init__.py'))}", "", "| module | |", "|---|---|"]
        modules = [*folder.glob("*.py"), *(path / "__init__.py" for path in folder.iterdir() if own and path.is_dir())]
        for path in sorted(path for path in modules if path.is_file() and path != folder / "__init__.py"):
            name = path.stem if path.stem != "__init__" else f"{path.parent.name}/"
            yield f"| `{name}` | {_cell(_first(path))} |"
        yield ""


def _first(path: Path) -> str:
    """First paragraph of the docstring of a file."""
    return (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").split("\n\n")[0]


def api() -> Iterator[str]:
    """Every public name of the package, then the public names of its public modules."""
    import importlib

    import m2lgdg

    yield from ["## Names of the package", ""]
    for name in m2lgdg._HOMES:
        yield from _described(f"m2lgdg.{name}", getattr(m2lgdg, name))
    for name in m2lgdg._MODULES:
        module = importlib.import_module(f"m2lgdg.{name}")
        yield from [f"## m2lgdg.{name}", "", *_paragraphs(inspect.getdoc(module) or ""), ""]
        for key, value in vars(module).items():
            ours = getattr(value, "__module__", None) == module.__name__ and not key.startswith("_")
            if ours and callable(value) and key not in m2lgdg._HOMES and inspect.getdoc(value):
                yield from _described(key, value)


def _described(name: str, value: Any) -> Iterator[str]:
    """A heading, the signature and the docstring of a function or class, and of the methods of a class."""
    yield from [f"### {name}", ""]
    if isinstance(value, type | types.FunctionType):
        yield from ["```python", f"{name.rpartition('.')[2]}{_signature(value)}", "```", ""]
    yield from [*_paragraphs(inspect.getdoc(value) or ""), ""]
    for key, member in vars(value).items() if isinstance(value, type) else ():
        function = member.__func__ if isinstance(member, classmethod | staticmethod) else member
        text = inspect.getdoc(function)
        if key.startswith("_") or not text or not isinstance(function, types.FunctionType | property):
            continue
        signature = "" if isinstance(function, property) else _signature(function, width=10**6)
        yield from [f"`.{key}{signature}`", "", ":   " + " ".join(text.split("\n\n")[0].split()), ""]


def _signature(value: Any, width: int = 88) -> str:
    """Parameters and result, on one line if they fit."""
    try:
        signature = inspect.signature(value)
    except ValueError:
        return "(...)"
    marks = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    shown, named = [], False
    for parameter in signature.parameters.values():
        if parameter.name in ("self", "cls"):
            continue
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and not named:
            shown.append("*")
        named = named or parameter.kind in (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_POSITIONAL)
        known = parameter.annotation is not inspect.Parameter.empty
        text = marks.get(parameter.kind, "") + parameter.name + (f": {_short(parameter.annotation)}" if known else "")
        if parameter.default is not inspect.Parameter.empty:
            plain = isinstance(parameter.default, str | int | float | tuple | None)
            text += f" = {parameter.default!r}" if plain else " = ..."
        shown.append(text)
    result = signature.return_annotation
    arrow = "" if isinstance(value, type) or result is inspect.Signature.empty else f" -> {_short(result)}"
    line = f"({', '.join(shown)}){arrow}"
    return line if len(line) <= width else "(\n    " + ",\n    ".join(shown) + f",\n){arrow}"


def _short(annotation: Any) -> str:
    text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))
    return re.sub(r"\b(np|npt|pd|collections\.abc|typing)\.", "", text).replace("Floats", "NDArray[float64]")


def _paragraphs(text: str) -> list[str]:
    """A docstring as Markdown: its paragraphs, then the sections of numpydoc as lists and code."""
    lines: list[str] = []
    section = ""
    rows = inspect.cleandoc(text).replace("\b", "").splitlines()
    for row, below in zip(rows, [*rows[1:], ""], strict=True):
        if row and re.fullmatch("-{3,}", below):
            lines += ["```", ""] * (section == "Examples")
            section = row.strip()
            lines += [f"**{section}**", "", *["```pycon"] * (section == "Examples")]
        elif section == "Examples":
            lines += [row] * (not re.fullmatch("-{3,}", row))
        elif section in ("", "Notes") and not re.fullmatch("-{3,}", row):
            lines.append(_text(row))
        elif row.startswith(" "):
            lines.append(f"    {_text(row.strip())}")
        elif row and not re.fullmatch("-{3,}", row):
            name, _, kind = row.partition(" : ")
            lines.append(f"- `{name}`{': ' + _text(kind) if kind else ''}{'<br>' if below.startswith(' ') else ''}")
        elif not row:
            lines.append("")
    return [*lines, *["```"] * (section == "Examples")]


def _text(row: str) -> str:
    return row.replace("&", "&amp;").replace("<", "&lt;").replace("*", "\\*")


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


PARTS: dict[str, Callable[[], Iterator[str]]] = {
    "commands": commands,
    "study-file": study_file,
    "methods": methods,
    "layout": layout,
    "api": api,
}
