"""Makes the models that come with the package: `make models COHORT=abide.cohort`, five minutes on one core.

    m2lgdg convert ABIDE_pcp abide.cohort --atlas aal --atlas ho --table aseg=FS/aseg_table.tsv \
        --table thickness=FS/aparc.a2009s/lh.aparc.a2009s_table_thickness.tsv \
        --table thickness=FS/aparc.a2009s/rh.aparc.a2009s_table_thickness.tsv
    python benchmarks/packaged_models.py abide.cohort [--out FOLDER]

FS is the folder `stats` of github.com/dfsp-spirit/abide_preproc_smri_freesurfer6. Models are written as `m2lgdg export --share`
writes them, with `models.json` about them; their predictions for ten synthetic subjects are written for the tests. The same
cohort, code, libraries and kind of processor give the same bytes. Models that hold a subject's id, or together are too large,
are not written.
"""

import argparse
import hashlib
import json
import math
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import numpy as np
import pandas as pd

from m2lgdg import Cohort, InputError, Model, make, read
from m2lgdg.cohort import UNKNOWN, Parcellation
from m2lgdg.data.check import with_checks
from m2lgdg.model.folder import ABOUT
from m2lgdg.model.packaged import INDEX, TRAINED, Packaged
from m2lgdg.registry import METHODS
from m2lgdg.report.card import write_card
from m2lgdg.report.sharing import shared_model

ROOT = Path(__file__).parents[1]
PREDICTIONS = ROOT / "tests" / "model" / "packaged.csv"
LARGEST = 6_000_000  # bytes of all models together
ATLASES = {"": ["aal"], "-ho": ["aal", "ho"]}
TABLES = {"": [], "-structure": ["aseg", "thickness"]}
NAMES = {"aal": "AAL, 116 ROIs", "ho": "Harvard-Oxford, 111 ROIs"}
LICENCE = (
    "trained on ABIDE I, which is shared under CC BY-NC-SA: use it non-commercially, with attribution (Di Martino et al. 2014; "
    "Craddock et al. 2013), and share it under the same terms"
)
DATA = "ABIDE I, Preprocessed Connectomes Project: C-PAC, filt_global (0.01 to 0.1 Hz, global signal regressed)"
SUBJECTS, VOLUMES = 10, 150


def synthetic(fitted: Model) -> Cohort:
    """Ten subjects of noise with the ROIs, phenotypes and tables of a model; some values and one table are missing."""
    draw = np.random.default_rng(46)
    names = np.array([f"synthetic-{i}" for i in range(SUBJECTS)])
    parts = {}
    for atlas, member in fitted.members.items():
        rois = tuple(member.facts_["rois"])
        common = draw.normal(size=(SUBJECTS, VOLUMES, 4)) @ draw.normal(size=(4, len(rois)))  # (subject, time, roi)
        noise = draw.normal(size=(SUBJECTS, VOLUMES + 2, len(rois)))
        smooth = noise[:, :-2] + noise[:, 1:-1] + noise[:, 2:]
        parts[atlas] = Parcellation(rois, tuple((10 * (common + smooth)).astype(np.float32)))
    known = draw.normal([100, 100, 100, 16], [15, 15, 15, 4], size=(SUBJECTS, 4))
    phenotypes = pd.DataFrame(known, index=names, columns=["viq", "piq", "fiq", "age"]).assign(sex=[1.0, 2.0] * 5)
    phenotypes = phenotypes.mask(draw.random((SUBJECTS, 5)) < 0.2)
    tables = {}
    member = next(iter(fitted.members.values()))
    for name, one in member.facts_.get("tables", {}).items():
        mean = member.state_[f"table.{name}.fill"]
        rows = mean * (1 + 0.05 * draw.normal(size=(SUBJECTS, len(mean))))
        rows[-1] = np.nan  # decided without it
        tables[name] = pd.DataFrame(rows, index=names, columns=one["columns"])
    (atlas, first), *others = parts.items()
    return Cohort(
        series=first.series,
        subjects=names,
        sites=np.array([""] * SUBJECTS),
        labels=np.full(SUBJECTS, UNKNOWN),
        rois=first.rois,
        phenotypes=phenotypes[["sex", "age", "viq", "piq", "fiq"]],
        inputs=("sex", "age", "viq", "piq", "fiq"),
        tr=np.array(2.0),
        atlas=atlas,
        name="synthetic",
        parcellations=dict(others),
        tables=tables,
    )


def commit() -> str:
    """The last commit that changed the package, whose code must be as it is there; models themselves do not count."""
    code = ["--", "src/m2lgdg", f":!{TRAINED.relative_to(ROOT)}"]
    changed = subprocess.run(["git", "-C", ROOT, "status", "--porcelain", *code], capture_output=True, check=True, text=True)
    if changed.stdout:
        raise InputError(f"the package has changes that are not committed ({changed.stdout.split()[1]}); commit them first.")
    last = subprocess.run(["git", "-C", ROOT, "log", "-1", "--format=%H", *code], capture_output=True, check=True, text=True)
    return last.stdout.strip()


def need_no_subject(folder: Path, cohort: Cohort) -> None:
    """Refuse a folder with a subject's id in a file, or an array with a row or column for each subject."""
    ids = {str(one) for one in cohort.subjects} | {number for one in cohort.subjects for number in re.findall(r"\d{6,}", one)}
    for path in folder.iterdir():
        words = set(re.findall(r"[A-Za-z0-9_.-]+", path.read_bytes().decode("latin-1")))
        if found := {word for word in words if word in ids or {*re.findall(r"(?<![0-9a-f])\d{6,}(?![0-9a-f])", word)} & ids}:
            raise InputError(f"{path} names a subject ({min(found)}).")
    fitted = Model.load(folder)
    if rows := [name for name, value in fitted.state_.items() if len(cohort) in value.shape]:
        raise InputError(f"{folder}: {rows[0]} has as many rows as there are subjects.")


def part(cohort: Cohort, atlases: list[str], tables: list[str]) -> Cohort:
    """The labelled subjects, with these atlases and tables, and what the checks find in them."""
    missing = {*atlases} - {*cohort.atlases} | {*tables} - {*cohort.tables}
    if missing or cohort.atlas != atlases[0]:
        lacks = f"has no {min(missing)}" if missing else f"starts with atlas {cohort.atlas}"
        raise InputError(f"the cohort {lacks}; convert it with --atlas aal --atlas ho and the tables aseg and thickness.")
    others = {name: one for name, one in cohort.parcellations.items() if name in atlases}
    held = {name: one for name, one in cohort.tables.items() if name in tables}
    labelled = cohort._changed(parcellations=others, tables=held, findings=None).select(cohort.labels >= 0)
    return with_checks(labelled)


def about(fitted: Model, folder: Path, made_by: str, atlases: list[str], tables: list[str]) -> Packaged:
    """What `m2lgdg models` tells of a model."""
    sites = fitted.facts_["source"]["sites"]
    areas = [one.auc for one in fitted.new_site_.sites.values() if not math.isnan(one.auc)]
    scans = " and ".join(NAMES[name] for name in atlases)
    structure = ", and FreeSurfer's volumes (aseg) and thickness (aparc.a2009s)" if tables else ""
    return Packaged(
        summary=f"autism or control, from resting-state series ({scans}), sex, age and IQ{structure}",
        atlases=atlases,
        tables=tables,
        phenotypes=list(fitted.facts_["inputs"]),
        data=DATA,
        licence=LICENCE,
        subjects=sum(sum(one.values()) for one in sites.values()),
        sites=len(sites),
        auc=round(float(np.mean(areas)), 4),
        auc_lowest=min(areas),
        auc_highest=max(areas),
        commit=made_by,
        sha256=hashlib.sha256((folder / ABOUT).read_bytes()).hexdigest(),
    )


def main(path: Path, out: Path) -> None:
    """Fit all models, write them to a folder beside `out` and put it in its place."""
    made_by, cohort = commit(), read(path)
    index, rows = {}, []
    with tempfile.TemporaryDirectory(dir=out.parent) as temporary:
        draft = Path(temporary) / "trained"
        for atlas, atlases in ATLASES.items():
            for table, tables in TABLES.items():
                name, source = f"abide-aal{atlas}{table}", part(cohort, atlases, tables)
                fitted = make(METHODS.default, phenotypes=True).fit(source, source_distribution=True, new_site_calibration=True)
                folder = write_card(shared_model(fitted).save(draft / name))
                need_no_subject(folder, source)
                index[name] = about(fitted, folder, made_by, atlases, tables)._asdict()
                stored = Model.load(folder)
                subjects = synthetic(stored)
                proba = stored.predict_proba(subjects)[:, 1]
                rows += [(name, one, f"{p:.9f}") for one, p in zip(subjects.subjects, proba, strict=True)]
                print(f"{name}: mean AUC {index[name]['auc']:.3f} at {len(fitted.new_site_.sites)} left-out sites", flush=True)
        (draft / INDEX.name).write_text(json.dumps(index, indent=1) + "\n")
        shutil.copy(TRAINED / "LICENCE.md", draft)
        size = sum(file.stat().st_size for file in draft.rglob("*") if file.is_file())
        if size > LARGEST:
            raise InputError(f"the models have {size} bytes, more than {LARGEST}.")
        shutil.rmtree(out, ignore_errors=True)
        shutil.move(draft, out)
    if out == TRAINED:
        pd.DataFrame(rows, columns=["model", "subject", "proba"]).to_csv(PREDICTIONS, index=False, lineterminator="\n")
    print(f"Wrote {out}: {len(index)} models, {size / 1e6:.1f} MB.")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cohort", type=Path)
    parser.add_argument("--out", type=Path, default=TRAINED, help="Folder to write (default: that of the package).")
    given = parser.parse_args()
    main(given.cohort, given.out.absolute())
