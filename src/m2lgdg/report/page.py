"""`report.html`: the results, tables and figures of a study on one self-contained page that needs no network.

Made from the files of a study folder; the tables and figures are also written as files for a paper.
"""

from __future__ import annotations

import base64
import hashlib
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path

from m2lgdg.data.spreadsheets import csv_text
from m2lgdg.report.answer import Answer, answer
from m2lgdg.report.contents import Contents
from m2lgdg.report.joined import joined_contents, together
from m2lgdg.report.paper_tables import label, main_method
from m2lgdg.report.published import read_published
from m2lgdg.report.sections import Section, facts, sections
from m2lgdg.report.sharing import shared_contents
from m2lgdg.report.tables import Table, plain, render, wide_csv
from m2lgdg.storage import InputError, new_folder, remove_abandoned, write_bytes, write_text, write_texts

MOST_ROWS = 10  # of a table that are not collapsed
NEXT = "next"  # of a shared report that is written beside an earlier one
SHARED = ("predictions.csv", "report.html", "tables", "figures", "explained", NEXT)


def write_report(
    folder: str | Path,
    *,
    three_d: bool = False,
    centroids: str | Path | None = None,
    published: str | Path | None = None,
    best: str | None = None,
    rivals: Sequence[str] = (),
    share: str | Path | None = None,
    also: Sequence[str | Path] = (),
) -> Path:
    """Write report.html, tables/ (CSV, Markdown, LaTeX), figures/ (SVG, PNG) and explained/ (CSV) into a study folder.

    Parameters
    ----------
    folder : str or Path
        Study folder.
    three_d : bool
        Whether to add a page with the top ROIs on a rotatable brain for each explained method.
    centroids : str or Path, optional
        Table (name, x, y, z) or atlas image with the MNI centroids of the ROIs, for atlases that are not included.
    published : str or Path, optional
        Table (method, target, metric, value) of values to show in brackets.
    best, rivals : str, sequence of str
        Methods of the paired tests over all target sites, as in `m2lgdg.table`.
    share : str or Path, optional
        Another folder, for a de-identified report with a predictions.csv in which subject ids are salted hashes.
    also : sequence of str or Path
        Other studies of the same subjects, whose methods are shown in the same tables and figures.

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
    """
    if also and share is not None:
        raise InputError("a report for sharing is of one study; leave out --share or --also.")
    contents = joined_contents(folder, also, centroids)
    names, targets = {label(*key) for key in contents.keys}, set(contents.predictions["target"])
    beside = None if published is None else read_published(published, names, targets)
    contents = contents if share is None else shared_contents(contents)
    summary = answer(contents)
    best = best or main_method(contents.study, contents.predictions, rivals)
    made = sections(contents, summary, best=best, rivals=rivals, published=beside, three_d=three_d)
    if share is None:
        return _write(contents, summary, made, contents.folder)
    with _shared_folder(Path(share)) as to:
        write_text(to / "predictions.csv", csv_text(contents.all_predictions))
        _write(contents, summary, made, to)
    return Path(share) / "report.html"


def _write(contents: Contents, summary: Answer, made: Sequence[Section], to: Path) -> Path:
    for section in made:
        _write_tables([*section.tables, *section.folded], to / "tables")
        write_texts(to / "figures", section.pages)
        for figure in filter(None, (section.first, *section.figures)):
            write_bytes(to / "figures" / f"{figure.name}.svg", figure.svg)
            if figure.png:
                write_bytes(to / "figures" / f"{figure.name}.png", figure.png)
    for method, explanation in contents.mean_explanations.items():
        explanation.save(to / "explained" / plain(method))  # all ROIs and edges; the page has only the highest
    script = (files("m2lgdg.report") / "page.js").read_text(encoding="utf-8")
    # The policy allows this script, embedded styles and images, and no requests.
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    page = rendered(
        "page.html",
        policy=f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{digest}'",
        script=script,
        label=label,
        most=MOST_ROWS,
        study={"name": contents.study.get("name", "study")},
        received="scans and tables" if contents.tables else "scans",
        summary=summary,
        failures=contents.failures,
        sections=made,
        facts=[*together(contents), *facts(contents)],
    )
    return write_text(to / "report.html", page)


@contextmanager
def _shared_folder(to: Path) -> Iterator[Path]:
    """A folder that takes the place of `to`, which has at most an earlier shared report, when it is whole."""
    if to.exists() and not to.is_dir():
        raise InputError(f"{to} is not a folder.")
    remove_abandoned(to)
    earlier = list(to.iterdir()) if to.is_dir() else []
    if any(path.name not in SHARED for path in earlier):  # they could be shared by mistake
        raise InputError(f"{to} has files other than a shared report; choose an empty folder with --out.")
    shutil.rmtree(to / NEXT, ignore_errors=True)  # of a process that was killed
    with new_folder(to / NEXT if earlier else to) as draft:
        yield draft
    if earlier:
        for path in (path for path in earlier if path.name != NEXT):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        for path in list((to / NEXT).iterdir()):
            path.rename(to / path.name)
        (to / NEXT).rmdir()


def rendered(template: str, **values: object) -> str:
    """A template of this folder with values in it, escaped unless the template calls them `drawn`."""
    from jinja2 import Environment
    from markupsafe import Markup

    here = files("m2lgdg.report")
    style = (here / "page.css").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    page = environment.from_string((here / template).read_text(encoding="utf-8"))
    return page.render(style=Markup(style), drawn=Markup, **values)


def _write_tables(tables: list[Table], to: Path) -> None:
    for table in tables:
        name = plain(table.title.replace(" ", "-").replace(",", ""))
        markdown, latex = render([table], "markdown"), render([table], "latex")
        write_texts(to, {f"{name}.csv": wide_csv(table), f"{name}.md": markdown, f"{name}.tex": latex})
