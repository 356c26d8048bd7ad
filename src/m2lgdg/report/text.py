"""The tables of a study folder as one text: what `m2lgdg table` prints, and `m2lgdg.table` in Python."""

from __future__ import annotations

from pathlib import Path

from m2lgdg.report.published import read_published, with_published
from m2lgdg.report.tables import Format, render, study_tables, training_tables
from m2lgdg.study.predictions import read_predictions
from m2lgdg.study.stats import cell_scores


def table(folder: str | Path, form: Format = "text", *, best: str | None = None, published: str | Path | None = None) -> str:
    """Scores at each target site, the macro average with paired tests, and variants paired by site and seed.

    `form` is text, markdown, latex or csv. `best` is the method to test against the others, by default the highest AUC.
    `published` is a table (method, target, metric, value) of values to show in brackets.
    """
    predictions = read_predictions(folder)
    scores = cell_scores(predictions)
    tables = study_tables(predictions, best, scores=scores) + training_tables(scores)
    if published is not None:
        tables = with_published(tables, read_published(published, predictions))
    return render(tables, form)
