"""`m2lgdg models`: the models that come with the package; and what the commands about models share.

Shared are reading a model and a cohort, writing a model, and what is said of both.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from m2lgdg.commands import options, suggestions, terminal

if TYPE_CHECKING:
    from m2lgdg.cohort import Cohort
    from m2lgdg.model.model import Model
    from m2lgdg.model.packaged import Packaged

RESEARCH = "Research use; not a diagnostic device."


@terminal.command()
def models(
    context: typer.Context,
    name: Annotated[str | None, typer.Argument(help="Show what this model is and where it comes from.")] = None,
    as_json: options.Json = False,
) -> None:
    """List the models that come with the package; their names work where a model folder does."""
    from m2lgdg.fields import nearest
    from m2lgdg.model.packaged import TRAINED, packaged
    from m2lgdg.storage import InputError

    known = packaged()
    if name is not None and name not in known:
        raise InputError(f"{name} is not a model of the package{nearest(name, known)}")
    if as_json:
        terminal.print_json([{"name": one} | known[one]._asdict() for one in ([name] if name else known)])
        return
    for one, about in known.items() if name is None else [(name, known[name])]:
        terminal.say(f"{one}  {about.summary}")
        terminal.say(f"    {about.subjects:,} subjects of {about.sites} sites; {_performance(about)}", style="dim")
    if name is None:
        terminal.say(f"All take scans as these: {', or '.join({about.data: None for about in known.values()})}.", RESEARCH)
        suggestions.print_next(context, "models", next(iter(known)))
        return
    terminal.say(*(f"  {key}: {text}" for key, text in _origin(known[name]).items()))
    terminal.say(f"  card: {TRAINED / name / 'card.md'}", RESEARCH)
    tables = [word for table in known[name].tables for word in ("--table", f"{table}=STATS")]
    scans = suggestions.Fill("SCANS")
    suggestions.print_next(context, "predict", name, scans, *tables, "--out", suggestions.free("predictions.csv"))


def _performance(about: Packaged) -> str:
    rates = f"{100 * about.auc:.1f} % (lowest site {100 * about.auc_lowest:.0f}, highest {100 * about.auc_highest:.0f})"
    return f"mean AUC over left-out sites {rates}"


def _origin(about: Packaged) -> dict[str, str]:
    return {
        "scans": about.data,
        "atlases": f"{' and '.join(about.atlases)}{'; a subject may lack one' * (len(about.atlases) > 1)}",
        "phenotypes": f"{', '.join(about.phenotypes)}; missing ones are replaced and flagged",
        **({"tables": f"{', '.join(about.tables)}; a subject without one is decided without it"} if about.tables else {}),
        "licence": about.licence,
        "commit": about.commit,
        "SHA-256 of method.json": about.sha256,
    }


def load_plugins(plugin: Sequence[Path] | None) -> None:
    """Load the files of --plugin."""
    from m2lgdg.registry import load_methods

    load_methods(tuple(map(str, plugin or [])))


def load_model(model: Path, plugin: Sequence[Path] | None) -> Model:
    """The model of a folder or of a packaged name, after the plugins that it may need."""
    from m2lgdg.model.model import load

    load_plugins(plugin)
    return load(model)


def read_for(
    fitted: Model,
    path: Path,
    site: Sequence[str] | None,
    kind: str | None,
    table: Sequence[str] | None,
    phenotype: Sequence[str] | None,
) -> Cohort:
    """The cohort of a path, or the one subject whose scan a file holds, with the phenotypes of --phenotype."""
    from m2lgdg.deploy.serve.upload import LARGEST, one_file
    from m2lgdg.storage import InputError, read_bytes

    if not is_one_scan(path, kind):
        if phenotype:
            raise InputError(f"--phenotype: {path} is not the file of one scan; give phenotypes in the table of the cohort.")
        return read_subjects(path, site, kind, table)
    if site:
        raise InputError(f"--site: {path} is the file of one scan, which has no site.")
    files = {name: [(one.name, _content(one)) for one in paths] for name, paths in options.table_files(table).items()}
    return one_file(fitted, path.name, read_bytes(path, LARGEST), options.values_of(phenotype), files)


def is_one_scan(path: Path, kind: str | None) -> bool:
    """Whether a path is the file of one scan, and not a cohort."""
    from m2lgdg.deploy.serve.upload import is_scan

    return kind is None and path.is_file() and is_scan(path.name)


def _content(path: Path) -> bytes:
    from m2lgdg.deploy.serve.upload import LARGEST
    from m2lgdg.storage import InputError, read_bytes

    if path.is_dir():
        raise InputError(f"--table: {path} is a folder; of one scan, give the files of its subject, such as stats/aseg.stats.")
    return read_bytes(path, LARGEST)


def read_subjects(
    path: Path,
    site: Sequence[str] | None = None,
    kind: str | None = None,
    table: Sequence[str] | None = None,
    *,
    in_memory: bool = False,
) -> Cohort:
    """The cohort of a path with the tables of --table, or its subjects of these sites, with a progress bar."""
    from m2lgdg.data.readers import read

    files = options.table_files(table)
    with terminal.progress(f"reading {path.name}") as progress:
        cohort = read(path, kind, progress=progress, tables=files, in_memory=in_memory)
    for note in cohort.notes:
        if not isinstance(note, str) and note.kind == "table" and note.numbers["table"] in files:
            terminal.say(f"{note.text.removesuffix('.')}.")
    return options.with_sites(cohort, site)


def need_own_name(to: Path) -> None:
    """Refuse to write a model where its name would be taken for that of a packaged model."""
    from m2lgdg.model.packaged import packaged
    from m2lgdg.storage import InputError

    if str(to) in packaged():
        raise InputError(f"--out {to}: a model of the package has this name; choose another one.")


def write_model(fitted: Model, to: Path) -> None:
    """Write a model folder with its card, whole or not at all."""
    from m2lgdg.report.card import write_card
    from m2lgdg.storage import new_folder

    need_own_name(to)
    with new_folder(to) as folder:
        write_card(fitted.save(folder))


def print_data_line(cohort: Cohort, path: Path, tables: Sequence[str] | None, *, new_site: bool = False) -> None:
    """Print one line on the findings about the subjects that were used, if there are any."""
    from m2lgdg.data.check import with_checks
    from m2lgdg.findings import check_command, data_line

    command = check_command(path, new_site=new_site, tables=tables or ())
    if line := data_line(with_checks(cohort).findings or (), command, new_site=new_site):
        terminal.say(line)


def print_tables(fitted: Model) -> None:
    """Print a line on each table that the model takes: its size, who has it, and how much it counts."""
    facts = next(iter(fitted.members.values())).facts_
    of_methods = facts.get("members", {"": facts})  # of an average
    every = sum(sum(one.values()) for one in facts["source"]["sites"].values())
    for method, own in of_methods.items():
        for name, about in own.get("tables", {}).items():
            having = about.get("subjects", every)
            who = f"all {every} subjects have it" if having == every else f"{every - having} of {every} subjects lack it"
            counts = ""
            if "relative" in about:
                counts = f", and it counts {about['relative']:.2g} times as much as scan and phenotypes (sd of decisions)"
            if about.get("weight") == 0:
                counts = ", and it is not used, as it adds nothing at left-out sites"
            of_method = f" in {method}" if method else ""
            terminal.say(f"Table {name}{of_method}: {len(about['columns'])} columns; {who}{counts}.")


def print_notes(fitted: Model, cohort: Cohort) -> None:
    """Warn if sites have the names of training sites, ROIs may be those of another atlas, or connectomes were converted."""
    from m2lgdg.data.atlases import are_identified
    from m2lgdg.data.site_names import spelled_alike

    targets = fitted._targets(cohort)
    first = [one for one in targets if 0 in one.rows]  # of the first subject
    if not all(are_identified(one.target.rois, one.member.facts_["atlas"], one.target.atlas) for one in first):
        terminal.say(
            f"Note: ROIs were matched by their numbers (atlas of the model: {fitted.facts_['atlas'] or 'not named'}, of the "
            f"cohort: {cohort.atlas or 'not named'}). Predictions are wrong if it is another atlas; name it when files are "
            "converted (--atlas, or atlas in dataset.toml)."
        )
    for _, member, _, target in targets:
        if target.values != (trained_on := member.trained_on):  # others than correlation and Fisher z are refused
            terminal.say(
                f"Note: the connectomes were read as {target.values} and converted to {trained_on}, that of the training data. "
                f"If they hold {trained_on}, say so with m2lgdg convert --values {trained_on}."
            )
    trained = set(map(spelled_alike, fitted.facts_["source"]["sites"]))
    seen = [site for site in cohort.site_names if site and spelled_alike(site) in trained]
    if seen:
        names = f"{'a site of this name' if len(seen) == 1 else 'sites of these names'}: {', '.join(seen)}"
        terminal.say(
            f"Note: the model was trained on {names}. Predictions for training subjects are optimistic; do not report them."
        )


def warn_of_other_code(fitted: Model) -> None:
    """Say so if the code has changed since the model was fitted; folders of 0.1.0 do not name theirs.

    Not of a packaged model: each version is tested to give its stored predictions.
    """
    from m2lgdg.model.model import code_of_model
    from m2lgdg.model.packaged import is_packaged

    if is_packaged(fitted.method._folder):
        return
    if fitted.code_ and fitted.code_ != code_of_model(fitted.name):
        terminal.say(
            "Note: the code of m2lgdg or of the plugin has changed since this model was fitted, so its predictions may have "
            "changed, too; fit it again, or install the version in its method.json."
        )
