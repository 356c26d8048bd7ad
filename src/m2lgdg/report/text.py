"""The tables of a study folder as one text: what `m2lgdg table` prints, and `m2lgdg.table` in Python."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from m2lgdg.fields import nearest
from m2lgdg.metrics import PAPER_METRICS
from m2lgdg.report.contents import read_json
from m2lgdg.report.published import read_published, with_published
from m2lgdg.report.tables import Format, main_method, one_panel, paired_tables, render, study_tables, training_tables
from m2lgdg.report.tracks import in_track, level_table
from m2lgdg.storage import InputError
from m2lgdg.study.predictions import ADAPTED, STRICT, by_track, read_joined_predictions
from m2lgdg.study.stats import cell_scores


def table(
    folder: str | Path,
    form: Format = "text",
    *,
    best: str | None = None,
    rivals: Sequence[str] = (),
    tests: bool = False,
    also: str | Path | Sequence[str | Path] = (),
    published: str | Path | None = None,
    sites: Sequence[str] | None = None,
    predictions: pd.DataFrame | None = None,
) -> str:
    """Scores at each target site, the macro average with paired tests, and variants paired by site and seed.

    Parameters
    ----------
    folder : str or Path
        Study folder.
    form : {"text", "markdown", "latex", "csv"}
    best, rivals : str, sequence of str
        Methods of the paired tests.
    tests : bool
        Whether to add the tests of all five metrics.
    also : str or Path, or a sequence of them
        Further study folders with the same subjects and target sites; their methods are in the same tables.
    published : str or Path, optional
    sites : sequence of str, optional
    predictions : DataFrame, optional

    Returns
    -------
    str

    Examples
    --------
    >>> import tempfile
    >>> import m2lgdg
    >>> study = {"cohort": m2lgdg.make_cohort("tiny"), "methods": ["prior"], "targets": ["east"]}
    >>> print(m2lgdg.table(m2lgdg.run_study(study, tempfile.mkdtemp()).folder).splitlines()[0])
    Target east

    Notes
    -----
    `form` is text, markdown, latex or csv. `best` is the method to test against the others, by default the main method of
    the study, else the one with the highest AUC, and `rivals` are those it is tested against, by default all others. With
    `tests` or `rivals`, the tests of all five metrics follow (Panel B of the paper): one table per metric as
    text, one wide table in the other formats.
    `published` is a table (method, target, metric, value) of values to show in brackets.
    `sites` are the target sites whose tables are wanted; averages and tests are over all targets, and left out then.
    `predictions` are those of all folders, if they were already read. A study with both tracks has the tables of each, and one
    with both next to each other.
    """
    folders = [folder, *([also] if isinstance(also, str | Path) else also)]
    predictions = read_joined_predictions(folders) if predictions is None else predictions
    tracks = by_track(predictions)
    studies = [read_json(Path(one) / "study.json", {}) for one in folders]
    batch = _adapted_subjects(studies)
    if published is not None and STRICT not in tracks:
        raise InputError(f"{folder} has the adapted track only; published values are compared with the strict track.")
    tables = []
    for track, part in tracks.items():
        scores = cell_scores(part, PAPER_METRICS)
        tested = best or main_method(studies[0], part, rivals)
        of_track = study_tables(part, tested, rivals=rivals, scores=scores)
        if tests or rivals:
            panels = paired_tables(part, tested, rivals=rivals, scores=scores)
            if not panels:
                raise InputError(f"{folder}: paired tests need at least two target sites and two methods.")
            of_track += panels if form == "text" else one_panel(panels)
        of_track += training_tables(scores)
        if published is not None and track == STRICT:
            of_track = with_published(of_track, read_published(published, part))
        tables += in_track(of_track, track, batch)
    if len(tracks) > 1:
        tables.append(level_table(tracks[STRICT], tracks[ADAPTED], batch))
    if sites:
        targets = predictions["target"].unique().tolist()
        for site in sites:
            if site not in targets:
                raise InputError(f"--site {site}: not a target of {folder}{nearest(site, targets)}")
        tables = [table for table in tables if table.target in sites]
    return render(tables, form)


def _adapted_subjects(studies: Sequence[dict[str, Any]]) -> int:
    """Number of target subjects that the adapted track of these studies sees; 0 if none has that track."""
    sizes = {int(study.get("adapt_subjects") or 0) for study in studies if ADAPTED in (study.get("track") or [])}
    if len(sizes) > 1:
        raise InputError("the studies have different adapt_subjects, so their adapted tracks cannot be compared.")
    return sizes.pop() if sizes else 0
