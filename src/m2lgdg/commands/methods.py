"""`m2lgdg methods`: all methods with their references, or the details of one."""

from __future__ import annotations

import dataclasses
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
    plugin: options.Plugin = None,
    as_json: options.Json = False,
) -> None:
    """List all methods with their references, or show the fields and variants of one."""
    from rich.markup import escape

    from m2lgdg.registry import PAPER, SIMPLE, find, load_methods

    known = load_methods(tuple(map(str, plugin or [])))
    if as_json:
        if name is not None and name not in known:
            find(name)  # refuses it
        listed = [name] if name is not None else list(known)
        terminal.print_json([_values(known, each) for each in listed])
        return
    if name is not None:
        _describe(name, find(name))
        cohort, model = suggestions.Fill("COHORT"), suggestions.free(f"{name}-model")
        suggestions.print_next(context, "fit", cohort, "--method", name, "--out", model)
        return
    peers = known.with_role(*SIMPLE)
    others = [name for name in known if name not in PAPER and name not in peers]
    groups = {
        "The paper's method and the methods it is compared with": PAPER,
        "Simple peers": peers,
        "Other methods": others,
    }
    for title, names in groups.items():
        terminal.out.print(f"[bold]{title}[/]")
        for method in (method for method in names if method in known):
            declaration = known.declaration(method)
            mark = "[default of `m2lgdg fit`] " if method == known.default else ""
            terminal.out.print(f"  [bold]{escape(method)}[/]  {escape(mark + declaration.summary)}", soft_wrap=True)
            if declaration.reference:
                terminal.out.print(f"    {escape(declaration.reference)}", style="dim", soft_wrap=True)
    terminal.out.print("With the name of a method, the command prints its fields and variants.")
    suggestions.print_next(context, "methods", known.default)


def _values(known: Registry, name: str) -> dict[str, Any]:
    """A method as plain values, for --json; a network is not imported."""
    from m2lgdg.registry import PAPER

    declaration = known.declaration(name)
    values = dataclasses.asdict(declaration) | {"paper": name in PAPER, "default": name == known.default}
    return {"name": name} | {key: values[key] for key in sorted(values)}


def _describe(name: str, cls: type[Method]) -> None:
    """Print description, fields, variants and sweeps of a method."""
    from dataclasses import fields
    from inspect import getdoc

    from rich.markup import escape

    terminal.out.print(f"[bold]{escape(name)}[/]  {escape(getdoc(cls) or '')}", soft_wrap=True)
    if cls.reference:
        terminal.out.print(f"\n{escape(cls.reference)}", style="dim", soft_wrap=True)
    variants = {
        variant: ", ".join(f"{field} = {value!r}" for field, value in changed.items())
        for variant, changed in cls.variants.items()
    }
    tables = {
        "fields and their defaults": {field.name: repr(field.default) for field in fields(cls) if field.name not in cls.unused},
        "variants and the fields they change": {variant: changes or "none" for variant, changes in variants.items()},
        "sensitivity sweeps": {field: ", ".join(map(repr, values)) for field, values in cls.space.items()},
    }
    for title, table in tables.items():
        if table:
            terminal.out.print(f"\n[bold]{title}[/]")
        for key, text in table.items():
            terminal.out.print(f"  {escape(key)}: {escape(text)}", soft_wrap=True)
    if time := training_time(name):
        terminal.out.print(f"\n{time}", soft_wrap=True)
    if cls.unused:
        terminal.out.print(f"\nfields without effect here: {escape(', '.join(cls.unused))}", soft_wrap=True)


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
