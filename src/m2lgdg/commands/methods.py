"""`m2lgdg methods`: all methods with their references, or everything about one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from m2lgdg.commands import options, terminal

if TYPE_CHECKING:
    from m2lgdg.method import Method


@terminal.app.command()
def methods(
    name: Annotated[str | None, typer.Argument(help="one method, with its fields, variants and sweeps")] = None,
    plugin: options.Plugin = None,
) -> None:
    """List the methods with their references: the paper's, the simple peers, the others; or tell all of one."""
    from rich.markup import escape

    from m2lgdg.method import find
    from m2lgdg.registry import PAPER, SIMPLE, load_methods

    known = load_methods(tuple(map(str, plugin or [])))
    if name is not None:
        _describe(name, find(name))
        return
    peers = known.with_role(*SIMPLE)
    others = [one for one in known if one not in PAPER and one not in peers]
    groups = {"The paper's method and those it is compared with": PAPER, "Simple peers": peers, "Others": others}
    for title, names in groups.items():
        terminal.out.print(f"[bold]{title}[/]")
        for one in (one for one in names if one in known):
            cls = known[one]
            terminal.out.print(f"  [bold]{escape(one)}[/]  {escape((cls.__doc__ or '').splitlines()[0])}", soft_wrap=True)
            if cls.reference:
                terminal.out.print(f"    {escape(cls.reference)}", style="dim", soft_wrap=True)
    terminal.out.print("Next: m2lgdg methods NAME for the fields and variants of one.")


def _describe(name: str, cls: type[Method]) -> None:
    """All there is to know of a method."""
    from dataclasses import fields
    from inspect import getdoc

    from rich.markup import escape

    terminal.out.print(f"[bold]{escape(name)}[/]  {escape(getdoc(cls) or '')}", soft_wrap=True)
    if cls.reference:
        terminal.out.print(f"\n{escape(cls.reference)}", style="dim", soft_wrap=True)
    variants = {
        one: ", ".join(f"{field} = {value!r}" for field, value in changed.items()) for one, changed in cls.variants.items()
    }
    tables = {
        "fields and their defaults": {field.name: repr(field.default) for field in fields(cls) if field.name not in cls.unused},
        "variants and what they change": {one: changes or "nothing" for one, changes in variants.items()},
        "fields to sweep and their values": {field: ", ".join(map(repr, values)) for field, values in cls.space.items()},
    }
    for title, table in tables.items():
        if table:
            terminal.out.print(f"\n[bold]{title}[/]")
        for key, told in table.items():
            terminal.out.print(f"  {escape(key)}: {escape(told)}", soft_wrap=True)
    if cls.unused:
        terminal.out.print(f"\nnot used by this method: {escape(', '.join(cls.unused))}", soft_wrap=True)
