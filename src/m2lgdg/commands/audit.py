"""`m2lgdg audit`: whether anything of a target reaches the methods of a study."""

from __future__ import annotations

from math import isnan
from typing import TYPE_CHECKING, Annotated

import typer

from m2lgdg.commands import options, terminal

if TYPE_CHECKING:
    from rich.table import Table

    from m2lgdg.study.no_brain import NoBrainScore


@terminal.app.command()
def audit(
    study: options.StudyFile,
    method: Annotated[list[str] | None, typer.Option(help="one method of the study (default: all); may be repeated")] = None,
    target: Annotated[str | None, typer.Option(help="the site to hold out (default: the study's first)")] = None,
    seed: Annotated[int | None, typer.Option(help="the seed to fit with (default: the study's first)")] = None,
    changes: Annotated[list[str] | None, typer.Option("--set", help="key=value, as in the file: --set device=cpu")] = None,
    plugin: options.Plugin = None,
) -> None:
    """Replace a target by noise and withhold its labels: do the fitted weights and the predictions stay the same?

    A second table tells what phenotypes, motion, missing values and the site get without any brain.
    Exit code 0: every method passed, 1: something of the target leaks, 2: the audit, or a method, cannot be run.
    """
    from rich.markup import escape
    from rich.table import Table

    from m2lgdg.study.audit import audit as audited
    from m2lgdg.study.audit import no_brain_scores
    from m2lgdg.study.config import read_study

    resolved = read_study(study, changes, [str(path.resolve()) for path in plugin or []])
    with terminal.stoppable(), terminal.err.status("fitting each method with the real target and without", spinner="line"):
        found = audited(resolved, methods=method, target=target, seed=seed)
    table = Table(title=f"Leak audit of {escape(resolved.name)}, target {escape(found[0].target)}", title_justify="left")
    for column in ("method", "passed", "what differs"):
        table.add_column(column, overflow="fold")
    for one in found:
        differs = [*one.differs, *([f"could not be run: {one.reason}"] if one.reason is not None else [])]
        passed = "yes" if one.passed else "no" if one.differs else "not run"
        table.add_row(escape(one.method), passed, escape("; ".join(differs) or "nothing"))
    terminal.out.print(table)
    with terminal.err.status("fitting what needs no brain", spinner="line"):
        terminal.out.print(_baseline_table(no_brain_scores(resolved, target=found[0].target)))
    if all(one.passed for one in found):
        terminal.out.print(f"Next: m2lgdg run {escape(str(study))} --out DIR", highlight=False, soft_wrap=True)
    raise typer.Exit(1 if any(one.differs for one in found) else 2 if any(one.reason is not None for one in found) else 0)


def _baseline_table(found: list[NoBrainScore]) -> Table:
    from rich.markup import escape
    from rich.table import Table

    table = Table(title="What needs no brain: AUC in percent (95 % interval)", title_justify="left")
    for column in ("baseline", "AUC", "chance", "what it knows"):
        table.add_column(column, overflow="fold")
    for one in found:
        interval = "" if isnan(one.low) else f" ({100 * one.low:.1f}-{100 * one.high:.1f})"
        scores = ("-", "-") if isnan(one.auc) else (f"{100 * one.auc:.1f}{interval}", f"{100 * one.chance:.1f}")
        table.add_row(one.name, *scores, escape(one.note))
    return table
