"""The two levels of the BIDS-App `m2lgdg-bids`: a series and a quality file of each participant, then the cohort and its study.

Both read derivatives (XCP-D, fMRIPrep) with the reader of kind `bids`. The group level reads what the participant level wrote,
or the derivatives themselves if it was not run. Derivatives with connectomes alone are read by the group level only.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from m2lgdg.cohort import Cohort
from m2lgdg.data.check import Check, check_cohort
from m2lgdg.data.readers import connectomes, read
from m2lgdg.data.readers.runs import MEAN_FD, REMOVED, label
from m2lgdg.data.readers.tables import find_column, read_text_table
from m2lgdg.fields import nearest
from m2lgdg.storage import InputError, read_bytes, write_text, write_texts

BIDS_VERSION = "1.9.0"
COHORT = "group.cohort"
QUALITY = "desc-quality.json"
MOTION = (MEAN_FD, REMOVED)  # phenotype columns of the reader
LARGEST = 1 << 20  # bytes of a quality file
METHODS = ("phenotype-logistic", "fc-logistic", "connectome-adaptive")  # of the default study
Progress = Callable[[int, int], None]


def participant_level(
    derivatives: Path,
    out: Path,
    labels: Sequence[str] = (),
    options: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> tuple[list[str], dict[str, str]]:
    """Write series and quality of some participants (default: all); returns those written, and the others with reasons."""
    options = dict(options or {})
    if connectomes.matches(derivatives):
        raise InputError(
            f"{derivatives} has connectomes and no series, of which the participant level has nothing to write; run the group "
            "level."
        )
    options.pop("tables", None)  # of the cohort, which the group level builds
    table = Path(options.pop("participants", None) or derivatives / "participants.tsv")
    options.setdefault("site", "unknown")  # used if the table has no column of sites, which this level does not need
    wanted = _chosen(table, labels)
    cohort = read(derivatives, "bids", on_bad="exclude", progress=progress, participants=table, subjects=wanted, **options)
    describe(out)
    for i in range(len(cohort)):
        _write_participant(cohort.select(np.array([i])), out)
    failed = {each.subject: each.reason for each in cohort.excluded if each.subject in wanted}
    return cohort.subjects.tolist(), failed


def group_cohort(
    derivatives: Path, out: Path, options: Mapping[str, Any] | None = None, progress: Progress | None = None
) -> tuple[Cohort, Check]:
    """Write the cohort of all participants, and return it with its check."""
    options = {"site": "unknown"} | dict(options or {})
    if any(out.glob("sub-*/func/*_timeseries.tsv")):
        table = options.get("participants") or derivatives / "participants.tsv"
        options = {name: options[name] for name in ("site", "patient", "control", "tables") if name in options}
        options |= {"participants": table, "atlas": "all"}
        derivatives = out
    kind = "connectomes" if connectomes.matches(derivatives) else "bids"
    cohort = read(derivatives, kind, on_bad="exclude", progress=progress, **options)._changed(name="group")
    cohort = _with_motion(cohort, out)
    check = check_cohort(cohort)
    describe(out)
    cohort.with_findings(check.findings).save(out / COHORT)
    return cohort, check


def _with_motion(cohort: Cohort, out: Path) -> Cohort:
    """The cohort with the head motion that the participant level found, whose tables of motion are not copied."""
    columns: dict[str, list[float]] = {name: [] for name in MOTION if name not in cohort.phenotypes}
    for subject in cohort.subjects.tolist():
        path = _folder(subject, out) / f"sub-{_name(subject)}_{QUALITY}"
        try:
            content = json.loads(read_bytes(path, LARGEST)) if path.is_file() else {}
            numbers = {name: float(content.get(name, np.nan)) for name in columns}
        except (ValueError, TypeError, AttributeError, RecursionError):
            raise InputError(f"{path} is damaged; run the participant level for {subject} again.") from None
        for name, value in numbers.items():
            columns[name].append(value)
    known = {name: values for name, values in columns.items() if not np.isnan(values).all()}
    return cohort._changed(phenotypes=cohort.phenotypes.assign(**known)) if known else cohort


def no_study(cohort: Cohort, check: Check) -> str:
    """Why the default study cannot be run, or nothing."""
    if not {0, 1} <= set(cohort.labels.tolist()):
        return "the participants have no labels of both classes"
    if len(cohort.site_names) < 2:
        return "the participants are of one site, and leave-one-site-out needs at least two"
    return next((finding.text for finding in check.findings if finding.severity == "unusable"), "").rstrip(".")


def write_study(cohort: Cohort, out: Path) -> Path:
    """Write the file of the default study, with the phenotypes alone as a peer if there are any."""
    methods = [name for name in METHODS if cohort.inputs or name != "phenotype-logistic"]
    listed = ", ".join(f'"{name}"' for name in methods)
    return write_text(out / "study.toml", f'name = "group"\ncohort = "{COHORT}"\nseeds = [0]\nmethods = [{listed}]\n')


def describe(out: Path) -> Path:
    """Write dataset_description.json of the output folder, which BIDS requires of derivatives."""
    from m2lgdg import __version__

    content = {
        "Name": "m2lgdg: ROI series, quality and leave-one-site-out results",
        "BIDSVersion": BIDS_VERSION,
        "DatasetType": "derivative",
        "GeneratedBy": [{"Name": "m2lgdg", "Version": __version__}],
    }
    return write_text(out / "dataset_description.json", json.dumps(content, indent=1) + "\n")


def _chosen(table: Path, labels: Sequence[str]) -> list[str]:
    """Participants with these labels, with or without sub- (default: all)."""
    rows = read_text_table(table)
    column = find_column(rows, "subject")
    if column is None:
        raise InputError(f"{table} has no column participant_id.")
    listed = {label(subject): subject for subject in rows[column]}
    for one in labels:
        if label(one) not in listed:
            raise InputError(f"{table} does not list participant {one}{nearest(label(one), listed)}")
    return [listed[label(one)] for one in dict.fromkeys(labels)] or list(listed.values())


def _write_participant(one: Cohort, out: Path) -> None:
    """Series of each atlas as a table with a JSON sidecar, and the quality file."""
    name = _name(str(one.subjects[0]))
    texts: dict[str, str | bytes] = {}
    quality: dict[str, Any] = {"findings": [finding.text for finding in check_cohort(one, new_site=True).findings]}
    motion = {name: float(one.phenotypes[name].iloc[0]) for name in MOTION if name in one.phenotypes}
    quality |= {name: value for name, value in motion.items() if np.isfinite(value)}
    tr = float(one.tr[0]) if np.isfinite(one.tr[0]) else None
    for atlas in one.atlases:
        scan = one.parcellation(atlas)
        stem = f"sub-{name}_atlas-{re.sub(r'[^A-Za-z0-9]', '', atlas) or 'unknown'}"
        series = np.asarray(scan.series[0])
        texts[f"{stem}_timeseries.tsv"] = _series_text(scan.rois, series)
        texts[f"{stem}_timeseries.json"] = json.dumps({"RepetitionTime": tr} if tr else {}, indent=1) + "\n"
        minutes = None if tr is None else round(len(series) * tr / 60, 2)
        flat = [scan.rois[i] for i in np.flatnonzero(np.ptp(series, axis=0) == 0)]
        quality[atlas] = {"volumes": len(series), "rois": len(scan.rois), "minutes": minutes, "flat_rois": flat}
    texts[f"sub-{name}_{QUALITY}"] = json.dumps(quality, indent=1, ensure_ascii=False) + "\n"
    write_texts(_folder(name, out), texts)


def _name(subject: str) -> str:
    return re.sub(r"[^A-Za-z0-9]", "", label(subject))


def _folder(subject: str, out: Path) -> Path:
    return out / f"sub-{_name(subject)}" / "func"


def _series_text(rois: Sequence[str], series: npt.NDArray[np.float32]) -> str:
    """Table with nine digits, which give every float32 back exactly."""
    lines = ["\t".join(rois), *("\t".join(f"{value:.9g}" for value in row) for row in series.tolist())]
    return "\n".join(lines) + "\n"
