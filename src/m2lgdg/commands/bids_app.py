"""`m2lgdg-bids BIDS_DIR OUT {participant,group}`: the command line of a BIDS-App.

BIDS-Apps share their arguments, which are not those of `m2lgdg`; `cli.bids` turns an input error into a message here, too.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from m2lgdg.commands import options as shared
from m2lgdg.commands import reading, terminal

READER = (  # the options of `m2lgdg check` that this command has, too
    *("participants", "atlas", "atlas_image", "atlas_labels", "only", "session", "confounds", "join_runs"),
    *("site_name", "patient", "control", "table"),
)


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Parsed arguments; wrong ones end with a message and exit code 2."""
    from m2lgdg import __version__

    parser = argparse.ArgumentParser(
        "m2lgdg-bids",
        description="Read ROI series of BIDS derivatives (participant level), then test classifiers at left-out sites (group).",
    )
    add = parser.add_argument
    add("bids_dir", type=Path, help="folder with BIDS derivatives: XCP-D tables, or fMRIPrep runs with --atlas-image")
    add("output_dir", type=Path, help="folder to write")
    add("analysis_level", choices=["participant", "group"], help="read participants, or build the cohort and run its study")
    labels = {"nargs": "+", "default": [], "metavar": "LABEL", "help": "participants to read (default: all)"}
    add("--participant_label", "--participant-label", **labels)  # type: ignore[arg-type]
    for name in READER:
        option = reading.OPTIONS[name]
        kind, about = get_args(option.annotation)
        how: dict[str, Any] = {"type": Path} if Path in get_args(kind) else {}
        how = {"action": "append"} if name in ("atlas", "table") else {"action": "store_true"} if kind is bool else how
        add(f"--{name.replace('_', '-')}", default=None, help=re.sub("^[a-z0-9, -]+: ", "", about.help), **how)
    add("--jobs", "--n_cpus", type=int, default=1, help="parallel processes of the study")
    add("--skip_bids_validation", "--skip-bids-validation", action="store_true", help="accepted; nothing is validated")
    add("-v", "--version", action="version", version=f"m2lgdg {__version__}")
    return parser.parse_args(words)


def bids_app(words: Sequence[str] | None = None) -> None:
    """Run one level. Exit code 0: done, 1: some participants or trainings failed, 2: bad input."""
    given = arguments(words)
    options = {
        reading.READER_NAMES.get(name, name): getattr(given, name) for name in READER if getattr(given, name) is not None
    }
    if "table" in options:
        options["tables"] = shared.table_files(options.pop("table"))
    if len(options.get("atlas", ())) == 1:
        options["atlas"] = options["atlas"][0]
    sys.exit(_participants(given, options) if given.analysis_level == "participant" else _group(given, options))


def _participants(given: argparse.Namespace, options: dict[str, Any]) -> int:
    from m2lgdg.deploy.bids_app import participant_level

    with terminal.progress("reading participants") as progress:
        written, failed = participant_level(given.bids_dir, given.output_dir, given.participant_label, options, progress)
    for subject, reason in failed.items():
        terminal.warn(f"{subject}: {reason.rstrip('.')}.", style=None)
    terminal.say(f"Wrote series and quality of {len(written)} participants to {given.output_dir}.")
    return 1 if failed else 0


def _group(given: argparse.Namespace, options: dict[str, Any]) -> int:
    from m2lgdg.commands.check import show_check, write_check
    from m2lgdg.commands.run import watched
    from m2lgdg.deploy.bids_app import COHORT, group_cohort, no_study, write_study
    from m2lgdg.report.page import write_report
    from m2lgdg.study.runner import run_study

    out = given.output_dir
    with terminal.progress("reading participants") as progress:
        cohort, check = group_cohort(given.bids_dir, out, options, progress)
    write_check(check, out / "check")
    show_check(check)
    files = [out / COHORT, out / "check"]
    if reason := no_study(cohort, check):
        terminal.say(f"No study was run: {reason}.\nWrote {', '.join(map(str, files))}.")
        return 0
    study = write_study(cohort, out)
    with watched(given.jobs) as watch:
        summary = run_study(study, out / "results", jobs=given.jobs, watch=watch)
    for cell, reason in summary.failed:
        terminal.warn(f"failed: {cell}: {reason}", style=None)
    terminal.say(f"Wrote {', '.join(map(str, [*files, study, write_report(out / 'results')]))}.")
    return 1 if summary.failed else 0
