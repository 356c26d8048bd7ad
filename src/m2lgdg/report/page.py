"""`report.html`: the results, tables and figures of a study on one self-contained page that needs no network.

Made from the files of a study folder; the tables and figures are also written as files for a paper.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from m2lgdg.data.spreadsheets import csv_rows, csv_text
from m2lgdg.report.anonymised import shared_contents
from m2lgdg.report.answer import answer
from m2lgdg.report.brains import three_dimensional
from m2lgdg.report.contents import read_contents
from m2lgdg.report.drawing import plain
from m2lgdg.report.sections import Section, facts, named_parts, sections
from m2lgdg.report.tables import Format, Table, label, main_method, render
from m2lgdg.storage import InputError, remove_abandoned, write_bytes, write_text, write_texts

MOST_ROWS = 10  # of a table that are not collapsed
SHARED = ("predictions.csv", "report.html", "tables", "figures", "explained")


def write_report(
    folder: str | Path,
    *,
    three_d: bool = False,
    centroids: str | Path | None = None,
    published: str | Path | None = None,
    best: str | None = None,
    rivals: Sequence[str] = (),
    share: str | Path | None = None,
) -> Path:
    """Write report.html, tables/ (CSV, Markdown, LaTeX), figures/ (SVG, PNG) and explained/ (CSV) into a study folder.

    Parameters
    ----------
    folder : str or Path
        Study folder.
    three_d : bool
    centroids, published, share : str or Path, optional
    best, rivals : str, sequence of str

    Returns
    -------
    Path
        report.html.

    Examples
    --------
    >>> import tempfile
    >>> import m2lgdg
    >>> study = {"cohort": m2lgdg.make_cohort("tiny"), "methods": ["prior", "fc-logistic"], "targets": ["east", "west"]}
    >>> m2lgdg.write_report(m2lgdg.run_study(study, tempfile.mkdtemp()).folder).name
    'report.html'

    Notes
    -----
    `three_d` adds a page with the top ROIs on a rotatable brain for each explained method. `centroids` is a table
    (name, x, y, z) or an atlas image with the MNI centroids of the ROIs, for atlases that are not included. `published` is a
    table (method, target, metric, value) of values to show in brackets. `best` and `rivals` are the methods of the paired
    tests over all target sites, as in `m2lgdg.table`. `share` is another folder, for a de-identified
    report with a predictions.csv in which subject ids are salted hashes.
    """
    contents = read_contents(folder, centroids, published)
    to = contents.folder
    if share is not None:
        contents, to = shared_contents(contents), _new_folder(share)
        write_text(to / "predictions.csv", csv_text(contents.all_predictions))
    summary = answer(contents)
    best = best or main_method(contents.study, contents.predictions, rivals)
    parts = sections(contents, summary, share is not None, best=best, rivals=rivals)
    _write_tables([table for part in parts for table in (*part.tables, *part.folded)], to / "tables")
    _write_figures(parts, to / "figures")
    for method, explanation in contents.mean_explanations.items():
        explanation.save(to / "explained" / plain(method))  # all ROIs and edges; the page has only the highest
        if three_d:
            for name, part in named_parts(method, explanation).items():
                three_dimensional(part.rois, to / "figures" / f"{plain(f'brain-{name}')}-3d.html")
    text = _page(
        study={"name": contents.study.get("name", "study")},
        summary=summary,
        failures=contents.failures,
        sections=parts,
        facts=facts(contents),
    )
    return write_text(to / "report.html", text)


def _new_folder(path: str | Path) -> Path:
    """A folder without other files, which could be shared by mistake; an earlier shared report is overwritten."""
    to = Path(path)
    if to.exists() and not to.is_dir():
        raise InputError(f"{to} is not a folder.")
    remove_abandoned(to)
    if to.is_dir() and any(path.name not in SHARED for path in to.iterdir()):
        raise InputError(f"{to} has files other than a shared report; choose an empty folder with --out.")
    return to


def _page(**values: object) -> str:
    from jinja2 import Environment
    from markupsafe import Markup

    here = files("m2lgdg.report")
    style, script = ((here / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    # The policy allows this script, embedded styles and images, and no requests.
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{digest}'"
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    page = environment.from_string((here / "page.html").read_text(encoding="utf-8"))
    values |= {"style": Markup(style), "script": Markup(script), "drawn": Markup}
    return page.render(policy=policy, label=label, most=MOST_ROWS, **values)


def _write_tables(tables: list[Table], to: Path) -> None:
    """Write each table as CSV, Markdown and LaTeX, named after its title."""
    for table in tables:
        name = plain(table.title.replace(" ", "-").replace(",", ""))
        write_texts(
            to,
            {
                f"{name}.csv": csv_rows([table.header, *table.rows]),
                f"{name}.md": _as(table, "markdown"),
                f"{name}.tex": _as(table, "latex"),
            },
        )


def _as(table: Table, form: Format) -> str:
    return render([table], form)


def _write_figures(parts: list[Section], to: Path) -> None:
    for figure in (figure for part in parts for figure in (part.first, *part.figures) if figure is not None):
        write_bytes(to / f"{figure.name}.svg", figure.svg)
        if figure.png:
            write_bytes(to / f"{figure.name}.png", figure.png)
