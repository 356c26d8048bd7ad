"""`m2lgdg methods`: all methods with their references, or the details of one."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from m2lgdg.commands import options, suggestions, terminal

if TYPE_CHECKING:
    from m2lgdg.method import Method
    from m2lgdg.registry import Registry


@terminal.command()
def methods(
    context: typer.Context,
    name: Annotated[str | None, typer.Argument(help="Show the fields, variants and sweeps of this method.")] = None,
    cohort: Annotated[
        Path | None, typer.Option(help="List the methods that run on this cohort, and why others do not.", show_default=False)
    ] = None,
    plugin: options.Plugin = None,
    as_json: options.Json = False,
) -> None:
    """List all methods with their references, or show the fields and variants of one."""
    from m2lgdg.registry import PAPER, SIMPLE, find, load_methods

    known = load_methods(tuple(map(str, plugin or [])))
    cls = None if name is None else find(name)  # refuses a name that is not known
    reasons = None if cohort is None else _reasons(known, cohort)
    if as_json:
        shown = [_values(known, one) for one in ([name] if name is not None else known)]
        terminal.print_json([one | ({"refused": reasons[1][one["name"]] or None} if reasons else {}) for one in shown])
        return
    if name is not None and cls is not None:
        _describe(name, cls)
        if reasons:
            seen = of_tables(known.declaration(name).fields, reasons[2])
            terminal.say(f"\nOn cohort {reasons[0]}: {reasons[1][name] or f'runs{seen}'}.")
        given, model = cohort or suggestions.Fill("COHORT"), suggestions.free(f"{name}-model")
        if not reasons or not reasons[1][name]:
            suggestions.print_next(context, "fit", given, "--method", name, "--out", model)
        return
    peers = known.with_role(*SIMPLE)
    groups = {
        "The paper's method and the methods it is compared with": PAPER,
        "Simple peers": peers,
        "Other methods": [one for one in known if one not in PAPER and one not in peers],
    }
    for title, names in groups.items():
        terminal.say(title, style="bold")
        for method in (method for method in names if method in known and not (reasons and reasons[1][method])):
            values = _values(known, method)
            mark = "[default of `m2lgdg fit`] " if values["default"] else ""
            terminal.say(f"  {method}  {mark}{values['summary']}")
            takes = f"{taken(values['takes'])}{of_tables(values['fields'], reasons[2] if reasons else None)}"
            terminal.say(f"    takes {takes}; {values['reference']}".rstrip("; "), style="dim")
    if reasons and any(reasons[1].values()):
        terminal.say(f"Not on cohort {reasons[0]}", style="bold")
        terminal.say(*(f"  {method}: {reason}" for method, reason in reasons[1].items() if reason))
    terminal.say("With the name of a method, the command prints its fields and variants.")
    suggestions.print_next(context, "methods", known.default)


def _reasons(known: Registry, path: Path) -> tuple[str, dict[str, str], list[str]]:
    """A cohort in words, by method why it does not run there (empty if it does), and the tables of the cohort."""
    from m2lgdg.data.readers import read
    from m2lgdg.method import holds_connectomes, series_needed
    from m2lgdg.storage import InputError

    cohort, reasons = read(path), {}
    for name in known:
        try:
            needed = series_needed(name) and holds_connectomes(cohort, known.declaration(name).fields["atlases"])
            reasons[name] = "needs time series" if needed else ""
        except InputError as error:  # a network without PyTorch
            reasons[name] = str(error).rstrip(".")
    scans = "time series" if cohort.values == "series" else f"connectomes: {cohort.values}"
    tables = list(cohort.tables)
    return f"{cohort.name} ({scans}{'; tables: ' * bool(tables)}{', '.join(tables)})", reasons, tables


def taken(kinds: Sequence[str]) -> str:
    """What a method takes, in words."""
    return "series or connectomes" if "connectomes" in kinds else "series"


def of_tables(fields: Mapping[str, Any], tables: list[str] | None) -> str:
    """Words on the tables of brain structure that a method takes by default or on request; those of a cohort, if given."""
    if "tables" not in fields or tables == []:
        return ""
    named = "tables of brain structure" if tables is None else f"tables {', '.join(tables)}"
    return f", with {named}" if fields["tables"] == "all" else f', with {named} on request (tables = "all")'


def _values(known: Registry, name: str) -> dict[str, Any]:
    """A method as plain values; of a network without PyTorch, that it needs it."""
    from m2lgdg.registry import PAPER, Declaration
    from m2lgdg.storage import InputError

    try:
        declaration = known.declaration(name)
    except InputError as error:
        declaration = Declaration({}, {}, True, str(error))  # what it takes is not known either
    values = dataclasses.asdict(declaration) | {"paper": name in PAPER, "default": name == known.default}
    return {"name": name} | {key: values[key] for key in sorted(values)}


def _describe(name: str, cls: type[Method]) -> None:
    """Print description, fields, variants and sweeps of a method."""
    from inspect import getdoc

    terminal.say(f"{name}  {getdoc(cls) or ''}")
    if cls.reference:
        terminal.say(f"\n{cls.reference}", style="dim")
    terminal.say(f"\nscans: {taken(cls.takes)}")
    fields = {field.name: repr(field.default) for field in dataclasses.fields(cls) if field.name not in cls.unused}
    variants = {
        variant: ", ".join(f"{field} = {value!r}" for field, value in changed.items()) or "none"
        for variant, changed in cls.variants.items()
    }
    sweeps = {field: ", ".join(map(repr, values)) for field, values in cls.space.items()}
    tables = {
        "fields and their defaults": fields,
        "variants and the fields they change": variants,
        "sensitivity sweeps": sweeps,
    }
    for title, table in tables.items():
        if table:
            terminal.say(f"\n{title}", style="bold")
            terminal.say(*(f"  {key}: {text}" for key, text in table.items()))
    if time := training_time(name):
        terminal.say(f"\n{time}")
    if cls.unused:
        terminal.say(f"\nfields without effect here: {', '.join(cls.unused)}")


def training_time(name: str) -> str | None:
    """A sentence on how long a training takes on one core; None for methods whose time was not measured."""
    import json
    from importlib.resources import files

    measured = json.loads(files("m2lgdg.methods").joinpath("training_times.json").read_text(encoding="utf-8"))
    minutes = measured["minutes"].get(name)
    if minutes is None:
        return None
    amount = (
        f"{60 * minutes:.0f} s" if minutes < 2 else f"{minutes:.0f} minutes" if minutes < 120 else f"{minutes / 60:.0f} hours"
    )
    size = f"{measured['subjects']:,} subjects with {measured['rois']} ROIs"
    return f"A training on {size} takes at most about {amount} on one CPU core."
