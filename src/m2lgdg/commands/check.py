"""`m2lgdg check`: problems of a cohort, and which subjects are included."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from m2lgdg.commands import options, reading, suggestions, terminal

if TYPE_CHECKING:
    from m2lgdg.cohort import Cohort
    from m2lgdg.data.check import Check

VERDICTS = {0: "usable", 1: "usable, with findings", 2: "unusable"}  # by exit code


def show_check(result: Check) -> None:
    """Print the table of sites and the findings."""
    from rich.markup import escape

    prefix = _common_prefix(result.sites["site"].tolist())
    first = f"site ({prefix}...)" if prefix else "site"
    table = result.sites.assign(site=result.sites["site"].str.removeprefix(prefix)).rename(columns={"site": first}).astype(str)
    widths = {name: max(len(name), *map(len, table[name])) for name in table.columns}
    lines = [{name: name for name in table.columns}, *table.to_dict(orient="records")]
    for number, line in enumerate(lines):
        cells = [line[name].ljust(width) if name == first else line[name].rjust(width) for name, width in widths.items()]
        terminal.say("  ".join(cells).rstrip(), style=None if number else "bold")
    terminal.say("")
    style = {"unusable": "bold red", "finding": "yellow", "note": "dim"}
    for finding in result.findings:
        terminal.out.print(f"[{style[finding.severity]}]{finding.severity:>8}[/] {escape(finding.text)}", soft_wrap=True)


def _common_prefix(sites: list[str]) -> str:
    """What the names of all sites begin with, such as the name of the release, up to a separator."""
    first, last = min(sites), max(sites)
    shared = next((i for i, pair in enumerate(zip(first, last, strict=False)) if len(set(pair)) > 1), len(first))
    start = re.match(r".*[-_ ]|", first[:shared])
    return start[0] if start and len(sites) > 1 and start[0] not in sites else ""


def check_values(result: Check, cohort: Cohort) -> dict[str, Any]:
    """Result of a check as plain values, for --json; `scans` are series or the kind of connectomes, by atlas."""
    from m2lgdg.scans import kind_of

    return {
        "cohort": cohort.name,
        "hash": cohort.hash,
        "atlases": list(cohort.atlases),
        "scans": [cohort.values, *(kind_of(each.scans) for each in cohort.parcellations.values())],
        "subjects": len(cohort),
        "excluded": len(cohort.excluded),
        "sites": json.loads(result.sites.to_json(orient="records")),
        "findings": [{"level": finding.severity, "text": finding.text} for finding in result.findings],
        "verdict": VERDICTS[result.exit_code],
        "exit_code": result.exit_code,
    }


def write_check(result: Check, folder: Path) -> Path | None:
    """Write the tables of included and excluded subjects, of sites and of findings.

    An inclusion list of other content may have been edited for `convert --keep`: it is kept under the path that is returned.
    """
    import pandas as pd

    from m2lgdg.data.spreadsheets import csv_text
    from m2lgdg.storage import write_texts

    findings = pd.DataFrame([(finding.severity, finding.text) for finding in result.findings], columns=["level", "text"])
    tables = {"inclusion": result.inclusion, "sites": result.sites, "findings": findings}
    texts = {f"{name}.csv": csv_text(table).encode("utf-8", "backslashreplace") for name, table in tables.items()}
    listed, kept = folder / "inclusion.csv", None
    if listed.is_file() and (before := listed.read_bytes()) != texts[listed.name]:
        kept = suggestions.free(listed)
        texts[kept.name] = before
    write_texts(folder, texts)
    return kept


@terminal.command(cls=reading.Brief)
@reading.with_options
def check(
    context: typer.Context,
    path: reading.Source,
    new_site: Annotated[
        bool, typer.Option("--new-site", help="The cohort is only to be predicted, so that a single site is enough.")
    ] = False,
    to: Annotated[Path | None, typer.Option("--out", help="Folder for the tables (default: NAME-check).")] = None,
    as_json: options.Json = False,
) -> None:
    """Check a cohort: print a table of its sites and one sentence per finding.

    Included and excluded subjects are written with reasons. Exit code 0: usable, 1: usable with findings, 2: unusable.
    """
    from m2lgdg.data.check import atlas_line, check_cohort

    cohort = reading.read_cohort(context, path, "exclude")
    with terminal.progress("checking the cohort"):
        result = check_cohort(cohort, new_site=new_site)
    folder = to or Path(f"{reading.file_name(cohort)}-check")
    kept = write_check(result, folder)
    if as_json:
        terminal.print_json(check_values(result, cohort))
        raise typer.Exit(result.exit_code)
    terminal.say(repr(cohort), style="bold")
    terminal.say(*filter(None, [atlas_line(cohort)]), "")
    show_check(result)
    verdict = VERDICTS[result.exit_code]
    terminal.say("", f"The cohort is {verdict}. Wrote inclusion.csv, sites.csv and findings.csv to {folder}.")
    if kept is not None:
        terminal.say(f"The inclusion.csv that was there is kept as {kept.name}.")
    if result.exit_code == 2:
        terminal.say("Correct what is marked unusable, then run the check again.")
    else:
        corrections = _corrections(result, cohort, path, context.params["kind"])
        if path.is_dir() or corrections or context.params["max_motion"] is not None or context.params["table"]:
            name = f"{reading.file_name(cohort)}.cohort" if path.is_dir() else path.with_name(f"{path.stem}-corrected.cohort")
            suggestions.print_next(context, "convert", path, suggestions.free(name), *corrections)
        else:
            reading.suggest_for_file(context, cohort, path)
    raise typer.Exit(result.exit_code)


def _corrections(result: Check, cohort: Cohort, path: Path, kind: str | None) -> list[str]:
    """Options of `m2lgdg convert` that correct what was found; without --drop-bad, it stops at a defective subject."""
    from m2lgdg.data.check import empty_scans
    from m2lgdg.data.readers import stops_reading
    from m2lgdg.findings import is_duplicate

    defective = path.is_dir() and stops_reading(path, kind, cohort.excluded)
    needed = {
        "--drop-bad": defective or bool(empty_scans(cohort)),
        "--drop-duplicates": any(is_duplicate(finding) for finding in result.findings),
    }
    return [option for option, is_needed in needed.items() if is_needed]
