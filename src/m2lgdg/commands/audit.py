"""`m2lgdg audit`: test whether data of a target site leak into the methods of a study."""

from __future__ import annotations

from math import isnan
from typing import TYPE_CHECKING, Annotated

import typer

from m2lgdg.commands import options, suggestions, terminal
from m2lgdg.commands.run import study_file

if TYPE_CHECKING:
    from rich.table import Table

    from m2lgdg.study.baselines import NoBrainScore


@terminal.command()
def audit(
    context: typer.Context,
    study: options.StudyFile,
    method: Annotated[
        list[str] | None, typer.Option(help="Method of the study to audit (default: all); may be repeated.")
    ] = None,
    site: Annotated[str | None, typer.Option(help="Target site to hold out (default: the first of the study).")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the fits (default: the first of the study).")] = None,
    changes: options.Changes = None,
    without: options.Without = None,
    plugin: options.Plugin = None,
) -> None:
    """Test for leakage: replace a target site by noise or withhold its labels, and compare fitted weights and predictions.

    The target is also fitted after other targets in one process, and files that a method uses are reported.
    A second table shows how well phenotypes, head motion, missing values and the site classify without imaging.
    Leakage checks of the cohort that fail are listed too.
    Exit code 0: all methods passed, 1: a method or the cohort leaks, 2: the audit or a method could not be run.
    """
    from rich.markup import escape
    from rich.table import Table

    from m2lgdg.data.leakage import failure_sentences, leakage_checks
    from m2lgdg.study.audit import LIMITS, no_brain_scores
    from m2lgdg.study.audit import audit as audit_study
    from m2lgdg.study.runner import study_cohort

    resolved = study_file(study, changes, plugin, without)
    with terminal.progress("fitting each method with the real and with altered targets") as progress:
        results = audit_study(resolved, methods=method, target=site, seed=seed, progress=progress)
    table = Table(title=f"Leakage audit of {escape(resolved.name)}, target {escape(results[0].target)}", title_justify="left")
    for column in ("method", "passed", "differences"):
        table.add_column(column, overflow="fold")
    for result in results:
        differs = [*result.differs, *([f"could not be run: {result.reason}"] if result.reason is not None else [])]
        passed = "yes" if result.passed else "no" if result.differs else "not run"
        table.add_row(escape(result.method), passed, escape("; ".join(differs) or result.note or "none"))
    terminal.out.print(table)
    terminal.say(LIMITS)
    with terminal.progress("fitting baselines without imaging"):
        scores = no_brain_scores(resolved, target=results[0].target)
    terminal.out.print(_baseline_table(scores))
    of_cohort = failure_sentences(leakage_checks(study_cohort(resolved), resolved.targets))
    terminal.warn(*of_cohort)
    leaks, failed = any(result.differs for result in results), any(result.reason is not None for result in results)
    terminal.say("Nothing was written.")
    if leaks or failed or of_cohort:
        what = "methods that did not pass" if leaks or failed else "cohort"
        terminal.say(f"Correct the {what}, then audit the study again.")
    else:
        suggestions.print_next(context, "run", study, "--out", suggestions.free(f"{study.stem}-results"))
    raise typer.Exit(1 if leaks or of_cohort else 2 if failed else 0)


def _baseline_table(scores: list[NoBrainScore]) -> Table:
    from rich.markup import escape
    from rich.table import Table

    table = Table(title="Baselines without imaging: AUC in percent (95 % interval)", title_justify="left")
    for column in ("baseline", "AUC", "chance", "uses"):
        table.add_column(column, overflow="fold")
    for score in scores:
        interval = "" if isnan(score.low) else f" ({100 * score.low:.1f}-{100 * score.high:.1f})"
        cells = ("-", "-") if isnan(score.auc) else (f"{100 * score.auc:.1f}{interval}", f"{100 * score.chance:.1f}")
        table.add_row(score.name, *cells, escape(score.note))
    return table
