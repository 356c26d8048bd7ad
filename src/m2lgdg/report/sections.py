"""The sections of the report, each with a title, text, tables and figures, in the order in which they are read.

Made from the contents of a study, which has data for some of them, and put on the page by `page`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from m2lgdg.data.readers.tables import MOTION
from m2lgdg.metrics import FLAT_NOTE
from m2lgdg.registry import PAPER
from m2lgdg.report import brains, figures
from m2lgdg.report.answer import Answer
from m2lgdg.report.answer_figure import answer_figure
from m2lgdg.report.checklists import MethodsText, checklist_tables, methods_text
from m2lgdg.report.contents import Contents, changed_fields
from m2lgdg.report.curve import learning_figure, sentences, stored_curve
from m2lgdg.report.data import Data, connectomes, findings_box, flow_diagram, site_connectomes, site_table, structure_table, who
from m2lgdg.report.drawing import Figure
from m2lgdg.report.inputs import ADDED, input_tables, missing_variant, parts_table, structure_sentence, tables_taken
from m2lgdg.report.operating import (
    comparison_table,
    motion_of,
    motion_table,
    operating_table,
    predictive_table,
)
from m2lgdg.report.paper_tables import (
    Comparison,
    Key,
    both_tracks,
    in_track,
    label,
    named_key,
    one_panel,
    training_table,
    what_was_seen,
)
from m2lgdg.report.phenotypes import phenotype_slopes
from m2lgdg.report.published import Published
from m2lgdg.report.sharing import few_of_a_class, few_of_a_site
from m2lgdg.report.subgroups import subgroup_table
from m2lgdg.report.tables import Table, columns
from m2lgdg.report.training import loss_terms, training_curves
from m2lgdg.report.trust import Check, checks
from m2lgdg.scans import SERIES
from m2lgdg.study.predictions import ADAPTED, STRICT
from m2lgdg.study.stats import min_per_class


@dataclass
class Section:
    """A section of the page; `folded` tables are collapsed, `link` is its name in the table of contents.

    `first` is a figure above its tables, `data` a box of findings, `answer` the main result, `checks` are lines on whether to
    believe it, `paste` is a text to copy, `pages` are further HTML files.
    """

    id: str
    title: str
    text: str = ""
    tables: Sequence[Table] = ()
    figures: Sequence[Figure] = ()
    folded: Sequence[Table] = ()
    link: str = ""
    first: Figure | None = None
    data: Data | None = None
    answer: Answer | None = None
    checks: Sequence[Check] = ()
    paste: MethodsText | None = None
    pages: Mapping[str, str] = field(default_factory=dict)

    @property
    def closed(self) -> bool:
        """Whether it is collapsed, so that the first screens have the answer, its checks, the data and all methods."""
        return self.id not in OPEN


@dataclass(frozen=True)
class Shown:
    """What all sections share: the methods that are shown, those in focus, their colours, and the methods of the tests."""

    contents: Contents
    summary: Answer
    best: str | None = None
    rivals: Sequence[str] = ()
    published: Published | None = None
    keys: list[Key] = field(default_factory=list)
    focus: list[Key] = field(default_factory=list)
    hues: Mapping[Key, int] = field(default_factory=dict)
    three_d: bool = False

    def compared(self, contents: Contents, best: str | None = None) -> Comparison:
        """The comparison of the methods of some contents, by default that of the whole report."""
        tests = {"best": best} if best else {"best": self.best, "rivals": self.rivals}
        least = min_per_class(contents.study)
        return Comparison(contents.predictions, **tests, scores=contents.cell_scores, declared=contents.declared, least=least)

    def titled(self, contents: Contents, tables: list[Table]) -> list[Table]:
        """Tables of some contents, with published values or, of the adapted track, with that track in their titles."""
        if contents.track == ADAPTED:  # published values are of sites that nothing was seen of
            return in_track(tables, ADAPTED, contents.batch)
        return tables if self.published is None else self.published.beside(tables, contents.counted)


def sections(
    contents: Contents,
    summary: Answer,
    *,
    best: str | None = None,
    rivals: Sequence[str] = (),
    published: Published | None = None,
    three_d: bool = False,
) -> list[Section]:
    """All sections, in the order of the page; `best` and `rivals` are those of the paired tests."""
    tested = [named_key(contents.keys, name) for name in (best, *rivals) if name is not None]
    usual = [key for key in contents.keys if not contents.is_sweep(key) and not (key[0] in PAPER and key[1])] or contents.keys
    keys = [key for key in contents.keys if key in (*usual, *tested)]
    phenotypes = [(name, "") for name in contents.with_role("phenotypes")]
    focus = [key for key in dict.fromkeys([summary.main, summary.peer, *phenotypes]) if key in contents.keys]
    hues = {key: i for i, key in enumerate(dict.fromkeys([*focus, *keys, *contents.keys]))}  # in all figures
    shown = Shown(contents, summary, best, rivals, published, keys, focus, hues, three_d)
    made = [
        _answer(shown),
        Section("trust", "Can it be trusted?", checks=checks(contents, summary), link="Trust"),
        _data(shown),
        (results := _results(shown))[0],
        _inputs(shown),
        *results[1:],
        _connectomes(shown),
        _discrimination(shown),
        _operating(shown),
        motion := _motion(shown),
        _subgroups(shown),
        _adapted(shown),
        _ablations(shown),
        _sweeps(shown),
        _learning(shown),
        _training(shown),
        _planted(shown),
        *_explanations(shown),
        Section(
            "methods", "Methods, to paste", PASTE, paste=methods_text(contents, motion=bool(motion.tables)), link="Methods"
        ),
        _leakage(shown),
        Section("checklists", "Reporting checklists", CHECKLISTS, folded=checklist_tables(contents)),
    ]
    return [section for section in made if section is not None]


OPEN = ("answer", "trust", "data", "overall", "inputs")
THRESHOLD_RULE = (
    "A subject is classified as a patient if the probability, averaged over seeds, is at least 0.5. The threshold is fixed, "
    "and calibration is fitted on source subjects only. Patients are rarer in a clinic than in a case-control cohort: the "
    "table of predictive values shows what the same sensitivity and specificity mean at other prevalences."
)
NO_MOTION = f"Not adjusted: the phenotypes have no column of head motion ({', '.join(MOTION)})."
NO_COHORT = "Not adjusted: the cohort file of the study is not here, or it has changed."
FEW_MOTION = "Not adjusted: too few subjects have a value of head motion."
MOTION_RULE = (
    "Patients often move more than controls, and motion changes connectivity, so part of an AUC can be motion. The adjusted "
    "AUC compares each patient with controls of the same site who moved as much."
)
READABILITY = (
    "Accuracy of a cross-validated linear probe that predicts site or label from the classifier's input, for source subjects. "
    "A probe finds more of any information in more dimensions, so the table includes the effective number of dimensions."
)
PASTE = "A draft from the files of this study. A click selects it."
CHECKLISTS = 'Filled in from the files of the study; the rest reads "authors to complete".'


def _answer(shown: Shown) -> Section:
    contents, summary = shown.contents, shown.summary
    figure = answer_figure(summary, shown.hues) if summary.sites else None
    structure = structure_sentence(contents.additions, summary.main)
    return Section("answer", "Answer", answer=replace(summary, structure=structure), first=figure)


def _inputs(shown: Shown) -> Section | None:
    """Only of a study in which a method takes a table of brain structure."""
    contents = shown.contents
    tables = input_tables(contents.seen, contents.averaged, contents.additions)
    text = "Each row of the second table compares a method with itself: with an input, and without it."
    if tables and (hint := missing_variant(contents.seen, contents.declared, shown.summary.main)):
        text = hint
    parts = parts_table(contents.records)
    return Section("inputs", ADDED, text, tables, folded=[parts] if parts else [], link="Inputs") if tables else None


def _data(shown: Shown) -> Section:
    contents = shown.contents
    table, structure = site_table(contents), structure_table(contents)
    first, data = flow_diagram(contents), findings_box(contents)
    folded, drawn = [structure] if structure else [], [slopes] if (slopes := phenotype_slopes(contents)) else []
    return Section("data", "Data", who(contents), [table] if table else [], drawn, folded, first=first, data=data)


def _connectomes(shown: Shown) -> Section | None:
    contents, few = shown.contents, shown.contents.description
    figure, edges = (None, None) if contents.shared and few_of_a_class(few) else connectomes(contents)
    by_site = None if contents.shared and few_of_a_site(few) else site_connectomes(contents)
    drawn = [each for each in (figure, by_site) if each is not None]
    title = "Mean connectomes of classes and sites"
    return Section("connectomes", title, figures=drawn, folded=[edges] if edges else [], link="Connectomes") if drawn else None


def _on_connectomes(contents: Contents) -> str:
    """Notes that all trainings of a method have, such as the parts that need series; of a flat decision the tables tell."""
    notes: dict[str, list[str]] = {}
    for record in contents.records if contents.scans != SERIES else []:
        own = [note for note in (record.get("learned") or {}).get("notes", []) if note != FLAT_NOTE]
        notes[record["method"]] = [note for note in notes.get(record["method"], own) if note in own]
    by_note: dict[str, list[str]] = {}
    for method, each in notes.items():
        for note in each:
            by_note.setdefault(note, []).append(method)
    return " ".join(f"{', '.join(methods)}: {note}" for note, methods in by_note.items())


def _results(shown: Shown) -> list[Section]:
    """Ablations and values of sweeps are only in a folded macro table, because they would fill the first page."""
    contents = shown.contents
    whole = shown.compared(contents)
    *sites, overall = shown.titled(contents, whole.tables())
    text, first, folded = _on_connectomes(contents), overall, one_panel(whole.panels())
    if len(shown.keys) < len(contents.keys):
        more = len(contents.keys) - len(shown.keys)
        text = f"{text} The folded table below also has the {more} ablations and sweep values of this study.".lstrip()
        methods = contents.of_methods(shown.keys)
        compared = shown.compared(methods)
        *_, first = shown.titled(methods, compared.tables())
        first, folded = replace(first, title="Methods over all target sites"), [overall, *one_panel(compared.panels())]
    peer = shown.summary.peer
    comparison = None if peer is None else comparison_table(contents.mean, shown.summary.main, peer)
    forest = figures.forest(contents.mean, contents.site_scores, shown.keys, hues=shown.hues, counted=contents.counted)
    tables = [*([] if comparison is None else [comparison]), *sites]
    return [
        Section("overall", "All methods", text, [first.highest_first("AUC")], folded=folded),
        Section("sites", "All methods by target site", figures=[forest], link="By site"),
        Section("tables", "Tables of the target sites", folded=tables, link="Tables by site"),
    ]


def _discrimination(shown: Shown) -> Section | None:
    mean, keys, focus, hues = shown.contents.mean, shown.keys, shown.focus, shown.hues
    curves = (figures.roc_by_target(mean, keys, focus, hues), figures.calibration_by_target(mean, focus, hues))
    drawn = [figure for figure in curves if figure is not None]
    return Section("curves", "ROC and calibration", figures=drawn) if drawn else None


def _operating(shown: Shown) -> Section:
    mean, focus = shown.contents.counted_mean, shown.focus
    curve = figures.decision_curves(mean, focus, shown.hues)
    tables, folded = [predictive_table(mean, focus)], [operating_table(shown.contents.mean)]
    return Section("operating", "Operating point", THRESHOLD_RULE, tables, [curve] if curve else [], folded)


def _motion(shown: Shown) -> Section:
    contents = shown.contents
    table = motion_table(contents.counted_mean, shown.keys, motion_of(contents.cohort))
    if table is not None:
        return Section("motion", "Head motion", MOTION_RULE, [table])
    why = NO_COHORT if contents.cohort is None else NO_MOTION if motion_of(contents.cohort) is None else FEW_MOTION
    return Section("motion", "Head motion", f"{why} Part of any AUC here may be motion.")


def _subgroups(shown: Shown) -> Section | None:
    contents = shown.contents
    if contents.cohort is None:
        return None
    keys = [key for key in (shown.summary.main, shown.summary.peer) if key is not None]
    tables = [subgroup_table(contents.mean, contents.cohort, key, hide_small=contents.shared) for key in keys]
    return Section("subgroups", "Subgroups", tables=tables[:1], folded=tables[1:])


def _adapted(shown: Shown) -> Section | None:
    adapted = shown.contents.of_adapted_track()
    if adapted is None:
        return None
    chosen = adapted.of_methods(shown.keys)
    compared = shown.compared(chosen)
    *sites, overall = shown.titled(adapted, compared.tables())
    folded = shown.titled(adapted, [*one_panel(compared.panels()), operating_table(adapted.mean)])
    first = f"Adapted track: {what_was_seen(adapted.batch)}. "
    forest = figures.forest(
        adapted.mean, adapted.site_scores, chosen.keys, "forest-adapted", first, hues=shown.hues, counted=adapted.counted
    )
    both = both_tracks(shown.contents.predictions, adapted.predictions, adapted.batch, min_per_class(adapted.study))
    text = (
        f"In this track {what_was_seen(adapted.batch)}. All other sections are of the strict track, which sees nothing of it."
    )
    tables = [overall.highest_first("AUC"), both]
    return Section("adapted", "Adapted track", text, tables, [forest], [*sites, *folded])


def _ablations(shown: Shown) -> Section | None:
    tables, contents = [], shown.contents
    for method in dict.fromkeys(key[0] for key in contents.keys if key[0] in PAPER):
        keys = [key for key in contents.keys if key[0] == method and not contents.is_sweep(key)]
        if len(keys) > 1:
            variants = contents.of_methods(keys)
            *_, table = shown.titled(variants, shown.compared(variants, label(*keys[0])).tables())
            pairs = training_table(contents.counted_scores, method, [variant for _, variant in keys], "Ablations")
            tables += [replace(table, title=f"Ablations of {method}"), *([pairs] if pairs is not None else [])]
    text = "The first row is the full method; each other row leaves out or changes one part."
    return Section("ablations", "Ablations", text, tables) if tables else None


def _sweeps(shown: Shown) -> Section | None:
    drawn, folded, contents = [], [], shown.contents
    for method, axes in contents.swept.items():
        variants = [key[1] for key in contents.keys if key[0] == method and contents.is_sweep(key)]
        if axes and variants:
            scores = contents.counted_scores[contents.counted_scores["method"] == method]
            default = (contents.study.get("method") or {}).get(method, {})
            drawn.append(figures.sensitivity_curves(method, scores, axes, default, shown.hues.get((method, ""), 0)))
            folded.append(training_table(scores, method, variants, "Sweeps"))
    text = "Effect of changing one field (hyper-parameter) while all others are unchanged."
    tables = [table for table in folded if table is not None]
    return Section("sensitivity", "Sensitivity", text, figures=drawn, folded=tables) if drawn else None


def _learning(shown: Shown) -> Section | None:
    curve = stored_curve(shown.contents.folder)
    if curve is None:
        return None
    return Section("learning", "Learning curve", " ".join(sentences(curve, None)), figures=[learning_figure(curve, shown.hues)])


def _training(shown: Shown) -> Section | None:
    runs: dict[str, list[list[dict[str, float]]]] = {}
    for record in shown.contents.records:
        history = (record.get("learned") or {}).get("history")
        if history and not record["variant"]:
            runs.setdefault(record["method"], []).append(history)
    drawn = training_curves(runs, shown.hues)
    text = "Early stopping: the epoch with the highest AUC on source-validation subjects is used."
    table, idle = loss_terms(shown.contents.records)
    if idle:
        text += f" Terms of the loss that did not act, so that their weight changed nothing: {'; '.join(idle)}."
    tables = [] if table is None else [table]
    return Section("training", "Training curves", text, figures=[drawn], folded=tables) if drawn else None


def _planted(shown: Shown) -> Section | None:
    table = brains.planted_table(shown.contents)
    text = "This cohort is synthetic, so the ROIs and edges that differ between patients and controls are known."
    return None if table is None else Section("planted", "Planted and found", text, [table])


def _explanations(shown: Shown) -> Iterator[Section]:
    means = shown.contents.mean_explanations
    for method, cells in shown.contents.explanations.items():
        text, drawn = brains.explained_text(means[method], len(cells)), brains.explained_figures(method, means[method], cells)
        tables = brains.explained_tables(method, means[method])
        pages = brains.three_dimensional(method, means[method]) if shown.three_d else {}
        yield Section("explained", f"Explanations: {method}", text, figures=drawn, folded=tables, pages=pages)
    title = "Site information in the representations"
    table = brains.readability_table(title, means)
    if table is not None:
        yield Section("readability", title, READABILITY, [table], link="Site information")


def _leakage(shown: Shown) -> Section | None:
    rows = []
    for row in shown.contents.checks:
        passed = "passed, with a remark" if row.get("remark") else "passed"
        rows.append([str(row["check"]), passed if row["passed"] else "FAILED", str(row["detail"])])
    rows.append(["target labels, site names and ids hidden from methods", "by construction", "not passed by the interface"])
    header = columns("text", "Check", "Result", "Detail")
    table = Table("Leakage checks", header, rows, "checked in every fold before the study began")
    return Section("leakage", "Leakage checks", tables=[table]) if shown.contents.checks else None


def facts(contents: Contents) -> list[tuple[str, str]]:
    """Settings, versions and training time of the study."""
    study, seconds = contents.study, sum(float(record.get("seconds") or 0) for record in contents.records)
    both = contents.track if contents.adapted is None else f"{STRICT} and {ADAPTED}"
    threads = study.get("threads", 1)
    devices = f"{study.get('device', 'cpu')}, {threads} thread{'s' * (threads != 1)} per cell"
    return [
        ("targets", ", ".join(contents.predictions["target"].unique())),
        *([("tracks", f"{both}; in the adapted one {what_was_seen(contents.batch)}")] if both != STRICT else []),
        ("seeds", ", ".join(map(str, study.get("seeds", [])))),
        ("phenotype inputs", ", ".join(study.get("inputs") or []) or "none"),
        *([("tables of brain structure", tables_taken(contents.seen))] if contents.tables else []),
        ("selection", "penalties, calibration and early stopping on source subjects only"),
        ("fields changed from their defaults", changed_fields(study, contents.declared) or "none"),
        ("decision threshold", "0.5"),
        ("cells", f"{len(contents.records)} finished, {seconds / 60:.1f} minutes of training and prediction; {devices}"),
        ("cohort hash", str(study.get("cohort_hash", ""))[:16] or "unknown"),
        ("versions", ", ".join(f"{name} {version}" for name, version in contents.environment.items())),
    ]
