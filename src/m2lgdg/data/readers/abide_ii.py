"""Reader of ABIDE II: the composite phenotype table, and series of any pipeline that name the subject by its SUB_ID.

Called by `m2lgdg.read`. The series have BIDS names (fMRIPrep, XCP-D, DCAN) or are `<name>_rois_<atlas>.1D` files as in ABIDE I.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from m2lgdg.cohort import Cohort
from m2lgdg.data.readers import abide, bids, tables
from m2lgdg.data.readers.runs import FolderRuns, Runs, read_runs
from m2lgdg.data.readers.series import Atlases, OnBad, Progress
from m2lgdg.storage import InputError

TABLE = "ABIDEII_Composite_Phenotypic.csv"
ENCODING = "latin-1"  # of copies of the table that are not UTF-8
SUBJECT = re.compile(r"(?:^|[_-])0*(\d{5})$")  # at the end of a name before _rois_
SITE = re.compile(r"ABIDEII-([A-Za-z]+(?:_[A-Za-z]+)*_\d)")
FOLDER_NAMES = {"ETHZ_1": "ETH_1", "ONRC_2": "OILH_2", "UMIA_1": "U_MIA_1"}  # files of these sites have another name
PREFIX = "ABIDEII-"
# Repetition times from the scan protocols, in seconds, for series without one. Those of OILH_2 and SU_2 are not included.
TR = {"BNI_1": 3.0, "IP_1": 2.7, "IU_1": 0.813, "KKI_1": 2.5, "KUL_3": 2.5, "OHSU_1": 2.5, "UCLA_1": 3.0}
TR |= dict.fromkeys(("EMC_1", "ETH_1", "GU_1", "NYU_1", "NYU_2", "SDSU_1", "TCD_1", "UCD_1", "U_MIA_1", "USM_1"), 2.0)


def matches(path: Path) -> bool:
    """Whether a folder has the composite table of this release."""
    return _table_path(path) is not None


def read(
    path: Path,
    *,
    atlas: Atlases = None,
    strategy: str | None = None,
    participants: str | Path | None = None,
    atlas_image: str | Path | None = None,
    atlas_labels: str | Path | None = None,
    only: str = "",
    session: str | None = None,
    confounds: str | None = None,
    join_runs: bool = False,
    on_bad: OnBad = "stop",
    progress: Progress | None = None,
) -> Cohort:
    """Read the subjects of the composite table that have a series.

    Series with BIDS names have the options of kind bids; .1D files have `atlas` and `strategy`, as in kind abide-pcp. A file
    that names another site than the table is an error.
    """
    table_path = Path(participants) if participants else _table_path(path)
    if table_path is None:
        raise InputError(
            f"{path} has no composite phenotype table ({TABLE}), neither in the folder nor up to two levels below; name it: "
            f"m2lgdg check {path} --kind abide-ii --participants FILE."
        )
    people = _people(table_path)
    if any(path.glob("**/*_rois_*.1D")):
        given = dict(atlas_image=atlas_image, atlas_labels=atlas_labels, only=only, session=session, confounds=confounds)
        wrong = next((name for name, value in given.items() if value), "join_runs" if join_runs else None)
        if wrong is not None:
            raise InputError(f"{path} has .1D files, for which there is no option {wrong}.")
        runs = _files_1d(path, atlas, strategy)
    else:
        if strategy is not None:
            raise InputError(f"{path} has no .1D files, for which option strategy is.")
        runs = bids.find_runs(
            path, atlas, atlas_image, atlas_labels, only, session, confounds, join_runs, lambda subject: subject.lstrip("0")
        )
    _need_same_sites(path, runs.first, people)
    return read_runs(runs, people, name="abide-ii", on_bad=on_bad, progress=progress)


def _table_path(path: Path) -> Path | None:
    return tables.find_table(path, "ABIDEII*Composite_Phenotypic*.csv", skip="_Long_")


def _people(path: Path) -> tables.Participants:
    rows = tables.read_text_table(path, otherwise=ENCODING)
    table = tables.SubjectTable.of(rows, "SUB_ID", path, needed=abide.NEEDED[1:])
    sites = table.sites("SITE_ID")
    labels, note = table.labels("DX_GROUP", patient=("1",), control=("2",))
    phenotypes, implausible = abide.phenotypes_of(table, ("SUB_ID", "SITE_ID", "NDAR_GUID"))
    return tables.Participants(
        table=path,
        subjects=table.subjects,
        sites=sites,
        labels=labels,
        tr=np.array([TR.get(_site(site), np.nan) for site in sites.tolist()]),
        phenotypes=phenotypes,
        inputs=tuple(abide.INPUTS),
        notes=(note, "TR from the files, else from the sites' scan protocols", *implausible),
    )


def _files_1d(path: Path, atlas: Atlases, strategy: str | None) -> FolderRuns:
    strategy, by_atlas = abide.choose_files(path, atlas, strategy)
    runs: dict[str, Runs] = {name: {} for name in by_atlas}
    for name, files in by_atlas.items():
        for one, (file,) in files.items():
            match = SUBJECT.search(one)
            if match is None:
                raise InputError(f"{file}: {one} does not end in a SUB_ID of five digits, such as {PREFIX}NYU_1_29177.")
            if match[1] in runs[name]:
                raise InputError(f"{file}: subject {match[1]} has a second series file, {runs[name][match[1]][0]}.")
            runs[name][match[1]] = [file]
    return FolderRuns(runs, abide.load_1d, choices=(f"strategy {strategy}",))


def _site(name: str) -> str:
    """Site in the spelling of the table, without the prefix of the release."""
    bare = name.removeprefix(PREFIX)
    return FOLDER_NAMES.get(bare, bare)


def _need_same_sites(path: Path, runs: Runs, people: tables.Participants) -> None:
    listed = dict(zip(people.subjects, people.sites.tolist(), strict=True))
    for subject, (file, *_) in runs.items():
        for site in SITE.findall(file.relative_to(path).as_posix()):
            if subject in listed and _site(site) != _site(listed[subject]):
                raise InputError(f"{file}: site {PREFIX}{site}, but {people.table} has subject {subject} at {listed[subject]}.")
