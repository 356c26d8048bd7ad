"""Findings of `check` travel with the cohort file into run, table, report, fit, card, predict and calibrate."""

import json
import os
import shutil
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from m2lgdg import Cohort, InputError, check_cohort, leave_one_site_out, make, make_cohort, read
from m2lgdg.cohort import UNKNOWN
from m2lgdg.data.check import duplicate_flags, with_checks
from m2lgdg.data.duplicates import find_duplicates, without_duplicates
from m2lgdg.data.leakage import leakage_checks
from m2lgdg.findings import (
    BY_LIST,
    CONFLICT,
    DUPLICATE,
    UNUSABLE_FILE,
    Exclusion,
    Finding,
    anonymous_sentences,
    data_line,
    problems,
    read_note,
    summary,
    text_finding,
)
from m2lgdg.method import Method
from m2lgdg.report.card import NOT_CHECKED, OTHER_COHORT, ROIS_UNKNOWN, card
from m2lgdg.report.checklists import known_facts
from m2lgdg.report.contents import read_contents
from m2lgdg.report.data import findings_box
from m2lgdg.report.sharing import shared_model
from m2lgdg.storage import read_tensors, write_tensors
from m2lgdg.study import description

PAIR, UNLIKE = ("anna-k", "bert-l"), ("carl-m", "dora-n")  # one label; two labels


@pytest.fixture(scope="module")
def cohort():
    """Tiny, with a pair of equal scans at north (one label) and one at south (two labels)."""
    return with_pairs(make_cohort("tiny", seed=1))


def with_pairs(cohort):
    subjects, series = cohort.subjects.astype("U40"), list(cohort.series)
    labels = cohort.labels
    for site, names, wanted in (("north", PAIR, (1, 1)), ("south", UNLIKE, (0, 1))):
        first = np.flatnonzero((cohort.sites == site) & (labels == wanted[0]))[0]
        second = np.flatnonzero((cohort.sites == site) & (labels == wanted[1]))[-1]
        series[second] = series[first]
        subjects[[first, second]] = names
    return replace(cohort, subjects=subjects, series=series, phenotypes=cohort.phenotypes.set_axis(subjects, axis=0))


def pairs_in(findings):
    return {one.kind: one.subjects for one in findings if one.kind in (DUPLICATE, CONFLICT)}


def without(header, key):
    return {name: value for name, value in header.items() if name != key}


def rewritten(path, to, change):
    """A cohort file with another header."""
    meta, tensors = read_tensors(path, "m2lgdg-cohort-1")
    meta = dict(meta) | {"cohort": json.dumps(change(json.loads(meta["cohort"])))}
    return write_tensors(to, {name: np.array(value) for name, value in tensors.items()}, meta)


def test_a_file_has_the_findings_but_its_hash_has_not(cohort, tmp_path):
    checked = with_checks(cohort)
    assert pairs_in(checked.findings) == {DUPLICATE: PAIR, CONFLICT: UNLIKE}
    assert checked.findings == check_cohort(cohort).findings and checked.hash == cohort.hash
    loaded = Cohort.load(checked.save(tmp_path / "checked.cohort"))
    assert (loaded.findings, loaded.hash) == (checked.findings, cohort.hash)
    assert Cohort.load(cohort.save(tmp_path / "bare.cohort")).findings is None
    older = rewritten(tmp_path / "checked.cohort", tmp_path / "older.cohort", lambda head: without(head, "findings"))
    assert Cohort.load(older).findings is None


@pytest.mark.parametrize(
    "findings",
    [
        *(3, "x", [["finding"]], [["odd", "text", [], "", ""]], [["note", 5, [], "", ""]], [["note", "text", "abc", "", ""]]),
        *([{"kind": "odd", "subjects": []}], [{"kind": "motion", "subjects": [], "numbers": {}}], [{"kind": "note"}]),
    ],
)
def test_damaged_findings_are_refused(cohort, findings, tmp_path):
    cohort.save(tmp_path / "whole.cohort")
    path = rewritten(tmp_path / "whole.cohort", tmp_path / "bad.cohort", lambda head: head | {"findings": findings})
    with pytest.raises(InputError, match=r"bad.cohort is damaged and cannot be read as a cohort"):
        Cohort.load(path)


def test_other_content_has_no_findings(cohort):
    checked = with_checks(cohort)
    everyone = np.arange(len(checked))
    assert checked.select(everyone[::-1]).findings == checked.findings
    assert checked.with_inputs(checked.inputs).findings == checked.findings
    assert with_checks(checked) is checked
    changed = [
        checked.select(everyone[1:]),
        checked.select(sites=["north"]),
        checked.with_inputs(["sex"]),
        checked.unlabelled(),
        replace(checked, labels=1 - checked.labels),
        checked.in_order(),
        *(side for fold in leave_one_site_out(checked) for side in (fold.source, fold.target)),
    ]
    assert [one.findings for one in changed] == [None] * len(changed)
    assert pairs_in(with_checks(checked.select(sites=["north", "east"])).findings) == {DUPLICATE: PAIR}
    assert with_checks(checked.select(checked.labels == 5)).findings == ()


def test_a_line_counts_duplicates_and_others():
    pair, unlike = (Finding(kind, "", PAIR) for kind in (DUPLICATE, CONFLICT))
    other, note, small = Finding("flat ROI"), text_finding("x"), Finding("small site")
    assert summary([]) == "" and data_line([note], "m2lgdg check c") == ""
    assert summary([other]) == "1 finding"
    assert summary([pair]) == "1 pair of subjects with the same scan"
    assert summary([unlike, other]) == "1 pair of subjects with the same scan but different labels and 1 other finding"
    assert summary([pair, unlike]) == "2 pairs of subjects with the same scan (1 of them with different labels)"
    assert data_line([note, other, small], "m2lgdg check c", new_site=True) == "Data: 1 finding; m2lgdg check c lists it."
    assert problems([other, small, pair]) == [pair, other, small]


def test_one_of_each_pair_is_kept_unless_its_labels_differ(cohort):
    kept = without_duplicates(cohort)
    reasons = {one.subject: one.reason for one in kept.excluded}
    assert reasons == {
        PAIR[1]: f"duplicate (same scan as {PAIR[0]}, which is kept)",
        UNLIKE[0]: f"duplicate with different labels (same scan as {UNLIKE[1]})",
        UNLIKE[1]: f"duplicate with different labels (same scan as {UNLIKE[0]})",
    }
    assert set(cohort.subjects.tolist()) - set(kept.subjects.tolist()) == set(reasons)
    assert {one.site for one in kept.excluded} == {"north", "south"}
    assert find_duplicates(kept) == [] and without_duplicates(kept).hash == kept.hash
    inclusion = check_cohort(kept).inclusion.set_index("subject")
    assert inclusion.loc[UNLIKE[0], ["status", "reason"]].tolist() == ["excluded", reasons[UNLIKE[0]]]
    levels = {one.anonymous: one.severity for one in check_cohort(kept).findings if one.kind == "expected exclusion"}
    assert levels == {
        "2 subjects excluded: duplicate with different labels (south 2).": "note",
        "1 subject excluded: duplicate (north 1).": "note",
    }


def test_groups_of_copies_and_missing_labels(tiny):
    series, labels = list(tiny.series), tiny.labels.copy()
    for i in (1, 2, 5):
        series[i] = series[0]
    for first, second in ((8, 9), (10, 11)):
        series[second] = series[first]
    labels[[0, 1, 2, 5]] = 1
    labels[[8, 9, 10, 11]] = UNKNOWN, 0, UNKNOWN, UNKNOWN
    changed = replace(tiny, series=series, labels=labels)
    names = tiny.subjects.tolist()
    assert names == sorted(names)
    dropped = {one.subject for one in without_duplicates(changed).excluded}
    assert dropped == {names[i] for i in (1, 2, 5, 8, 11)}  # the first by id, and the one of 8 and 9 that has a label
    labels[5] = 0
    dropped = without_duplicates(replace(changed, labels=labels)).excluded
    assert {names[i] for i in (0, 1, 2, 5)} <= {one.subject for one in dropped}
    assert dropped[0].reason == f"duplicate with different labels (same scan as {names[1]}, {names[2]}, {names[5]})"
    kinds = {one.subjects: one.kind for one in check_cohort(replace(changed, labels=labels)).findings if len(one.subjects) == 2}
    assert kinds[names[8], names[9]] == DUPLICATE  # an unknown label does not differ


def test_anonymous_sentences_name_nobody(cohort):
    """With every check that names a subject."""
    table = cohort.phenotypes.assign(age=cohort.phenotypes["age"].where(np.arange(len(cohort)) != 4, 300.0))
    series, tr = list(cohort.series), cohort.tr.copy()
    tr[5] = 2000
    flat = np.array(series[6])
    flat[:, :4] = 1
    series[6], series[7] = flat, np.asarray(series[7]) * np.float32(1e-12)
    gone = [
        Exclusion("zoe-q", "north", UNUSABLE_FILE, detail="zoe-q.npy: NaN."),
        Exclusion("yan-p", "east", BY_LIST, "", "yan-p.csv"),
    ]
    numbers = {"column": "age", "value": -5.0, "oldest": 120.0}
    notes = (Finding("age", "", ("anna-k",), numbers), Finding("scrubbed", "", ("anna-k",), {"listed": {"anna-k": "3 of 90"}}))
    spoiled = replace(cohort, phenotypes=table, series=series, tr=tr, excluded=tuple(gone), notes=notes)
    findings = check_cohort(spoiled).findings
    kinds = {one.kind for one in findings if one.anonymous != one.text}
    others = {"empty scan", DUPLICATE, CONFLICT, "many flat ROIs", "long TR", "value", "age", "scrubbed"}
    assert kinds == {"exclusion", "expected exclusion"} | others
    names = [*spoiled.subjects.tolist(), "zoe-q", "yan-p"]
    named = {name for one in findings for name in names if name in one.text}
    assert {*PAIR, *UNLIKE, "zoe-q", spoiled.subjects[4], spoiled.subjects[5], spoiled.subjects[6]} <= named
    sentences = anonymous_sentences(one.shared() for one in findings)
    assert not [(name, text) for name in names for text in sentences if name in text]
    twice = [text_finding("A subject (x).")] * 2
    assert anonymous_sentences(one.shared() for one in twice) == ["A subject (x) (2 times)."]


def test_copies_on_one_side_qualify_the_leakage_check(cohort):
    identical = next(one for one in leakage_checks(cohort) if one["check"] == "no identical scan on both sides")
    assert identical["passed"]
    assert identical["remark"] == (
        "But 2 pairs of identical scans are on the same side (1 at north, 1 at south; `m2lgdg check` lists them)."
    )
    assert identical["detail"].endswith(identical["remark"])
    assert not any("remark" in one for one in leakage_checks(without_duplicates(cohort)))
    sites = np.where(cohort.subjects == PAIR[1], "west", cohort.sites)
    moved = next(one for one in leakage_checks(replace(cohort, sites=sites)) if one["check"] == identical["check"])
    assert not moved["passed"] and "1 pair of identical scans is on the same side (1 at south;" in moved["remark"]
    both = next(one for one in leakage_checks(replace(cohort, sites=sites), ["east"]) if one["check"] == identical["check"])
    assert both["passed"] and "(1 at north and west, 1 at south;" in both["remark"]


@pytest.fixture(scope="module")
def chain(cohort, tmp_path_factory):
    """A folder with the cohort and a study of it."""
    here = tmp_path_factory.mktemp("chain")
    with_checks(cohort).save(here / "pairs.cohort")
    (here / "study.toml").write_text('cohort = "pairs.cohort"\nmethods = ["prior", "fc-logistic"]\nseeds = [0]\n')
    return here


@pytest.mark.usefixtures("figures_painted_only")
def test_the_pairs_are_named_from_check_to_calibrate(chain, cohort, typed, monkeypatch):
    monkeypatch.chdir(chain)
    words = "Data: 2 pairs of subjects with the same scan (1 of them with different labels)"
    code, text, _ = typed("check", "pairs.cohort")
    assert code == 1 and "Next: m2lgdg convert pairs.cohort pairs-corrected.cohort --drop-duplicates\n" in text
    code, text, _ = typed("convert", "pairs.cohort", "copy.cohort")
    assert (code, words in text) == (0, True) and Cohort.load("copy.cohort").findings == with_checks(cohort).findings
    code, text, _ = typed("run", "study.toml", "--out", "out")
    assert code == 0 and f"{words} and " in text and "; m2lgdg check pairs.cohort lists them.\n" in text
    stored = json.loads((chain / "out" / "cohort.json").read_text())
    assert (stored["rois"], stored["atlas"]) == (list(cohort.rois), cohort.atlas)
    assert description.read_cohort_facts("out").findings == with_checks(cohort).findings
    assert words in typed("table", "out")[1]

    assert typed("report", "out")[0] == 0
    page = (chain / "out" / "report.html").read_text()
    box = page.split('data-section="data"')[1].partition("<table")[0]
    for finding in problems(with_checks(cohort).findings):
        assert finding.text in box
    assert page.count("passed, with a remark") == 1
    assert "2 pairs of identical scans are on the same side" in known_facts(read_contents(chain / "out"))["checks_duplicates"]

    assert typed("report", "out", "--share")[0] == 0
    shared = (chain / "out" / "share" / "report.html").read_text()
    assert "A subject (north) and another subject (north) have identical series" in shared
    assert not [name for name in (*PAIR, *UNLIKE) if name in shared]

    code, text, _ = typed("fit", "pairs.cohort", "--method", "fc-logistic", "--out", "model", "--no-new-site-calibration")
    assert code == 0 and words in text
    code, text, _ = typed("card", "model", "--study", "out")
    written = (chain / "model" / "card.md").read_text()
    assert "A subject (south) and another subject (south) have identical series, with different labels" in written
    everything = written + (chain / "model" / "method.json").read_text()
    assert not [name for name in (*PAIR, *UNLIKE) if name in everything]

    code, text, _ = typed("predict", "model", "pairs.cohort", "--out", "all.csv")
    assert code == 0 and words in text and "; m2lgdg check pairs.cohort --new-site lists them." in text
    flags = pd.read_csv("all.csv", keep_default_na=False).set_index("subject")["flags"]
    flagged = flags[flags.str.contains("duplicate: same scan as another subject")]
    assert set(flagged.index) == {*PAIR, *UNLIKE}
    text = typed("predict", "model", "pairs.cohort", "--only", "east", "--out", "east.csv")[1]
    assert "the same scan" not in text

    code, text, _ = typed("calibrate", "model", "pairs.cohort", "--out", "local")
    assert code == 0 and words in text
    kinds = [one["kind"] for one in Method.load("local").facts_["local"]["findings"]]
    assert kinds[:2] == [DUPLICATE, CONFLICT]
    assert "Subjects of the local calibration: A subject (north) and another" in (chain / "local" / "card.md").read_text()

    code, text, _ = typed("convert", "pairs.cohort", "unique.cohort", "--drop-duplicates")
    assert code == 0 and f"Dropped {PAIR[1]} (north): duplicate (same scan as {PAIR[0]}, which is kept).\n" in text
    unique = Cohort.load("unique.cohort")
    assert (len(unique), pairs_in(unique.findings)) == (len(cohort) - 3, {})
    assert "nothing was dropped" in typed("convert", "unique.cohort", "again.cohort", "--drop-duplicates")[1]
    assert Cohort.load("again.cohort").hash == unique.hash


def test_a_model_of_a_part_has_the_findings_of_that_part(chain, typed, monkeypatch):
    monkeypatch.chdir(chain)
    options = ("--method", "prior", "--out", "part", "--without", "south", "--no-new-site-calibration")
    text = typed("fit", "pairs.cohort", *options)[1]
    assert "Data: 1 pair of subjects with the same scan" in text
    assert Method.load("part").facts_["source"]["findings"][0]["kind"] == DUPLICATE


def test_an_unchecked_cohort_is_checked_on_the_way(cohort, typed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cohort.save("bare.cohort")
    (tmp_path / "study.toml").write_text('cohort = "bare.cohort"\nmethods = ["prior"]\nseeds = [0]\ninputs = []\n')
    assert "Data: 2 pairs of subjects with the same scan" in typed("run", "study.toml", "--out", "out")[1]
    # A folder of an earlier version has no such record, and says so until it is run again.
    (tmp_path / "out" / "cohort.json").unlink()
    assert f"Data: {description.NOT_CHECKED}" in typed("table", "out")[1]
    assert findings_box(read_contents("out")).summary == description.NOT_CHECKED
    assert typed("run", "study.toml", "--out", "out")[0] == 0
    assert findings_box(read_contents("out")).shown[0].startswith(f"{PAIR[0]} (north) and {PAIR[1]} (north)")
    (tmp_path / "out" / "cohort.json").write_text("{")
    code, _, errors = typed("table", "out")
    assert code == 2 and "cohort.json is damaged and cannot be read as facts about a cohort" in errors


def test_a_model_fitted_in_python_says_whether_it_was_checked(cohort, tmp_path):
    part = next(one for one in card(make("prior").fit(cohort).save(tmp_path / "bare")) if one.title == "Training data")
    assert part.sentences == [NOT_CHECKED]
    fitted = make("prior").fit(cohort.with_findings([text_finding("Copied from /home/jane/x.", kind="text")]))
    assert shared_model(fitted).facts_["source"]["findings"][0]["text"] != "Copied from /home/jane/x."
    fitted.facts_["source"]["findings"] = [{"level": "finding", "kind": 3, "text": "x"}]
    with pytest.raises(InputError, match=r"method.json is damaged \(findings is not a list of findings\)"):
        Method.load(fitted.save(tmp_path / "bad"))


def test_a_study_of_another_atlas_is_refused(chain, cohort, typed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    other = make_cohort("tiny", n_rois=10, seed=1)
    renamed = replace(cohort, rois=tuple(f"region {i}" for i in range(len(cohort.rois))))
    named = cohort.rois
    make("prior").fit(cohort).save("model")
    for name, changed in (("fewer", other), ("renamed", renamed)):
        changed.save(f"{name}.cohort")
        (tmp_path / "s.toml").write_text(f'cohort = "{name}.cohort"\nmethods = ["prior"]\nseeds = [0]\n')
        assert typed("run", "s.toml", "--out", name)[0] == 0
    code, _, errors = typed("card", "model", "--study", "fewer")
    assert code == 2 and f"the study has 10 ROIs ({other.atlas or 'atlas not named'}), the model {len(named)} ROIs" in errors
    code, _, errors = typed("card", "model", "--study", "renamed")
    assert code == 2 and f": ROI region 0 in place of {named[0]};" in errors
    (tmp_path / "renamed" / "cohort.json").unlink()
    assert typed("card", "model", "--study", "renamed")[0] == 2  # the cohort file has the ROIs too
    (tmp_path / "renamed.cohort").unlink()
    code, text, _ = typed("card", "model", "--study", "renamed")
    assert code == 0 and f"Note: {OTHER_COHORT} {ROIS_UNKNOWN}" in text


def test_numbered_rois_of_two_atlases_are_told_apart_by_their_names(tiny, tmp_path):
    numbered = replace(tiny, rois=tuple(map(str, range(1, len(tiny.rois) + 1))), atlas="first")
    model = make("prior").fit(numbered).save(tmp_path / "model")
    predictions = pd.DataFrame(
        [("prior", "", 0, "east", f"s{i}", i % 2, 0.5) for i in range(8)],
        columns=["method", "variant", "seed", "target", "subject", "label", "proba"],
    )
    for atlas, refused in (("second", True), ("first", False), ("", False)):
        folder = tmp_path / f"study {atlas}"
        folder.mkdir()
        predictions.to_csv(folder / "predictions.csv", index=False)
        (folder / "cohort.json").write_text(json.dumps({"atlas": atlas, "rois": numbered.rois, "findings": []}))
        if refused:
            with pytest.raises(InputError, match=r"12 ROIs \(second\), the model 12 ROIs \(first\)"):
                card(model, folder)
        else:
            assert card(model, folder)


def test_the_real_pairs_of_abide(abide_folder, tmp_path):
    defects = abide_folder.parent / "defects"
    if not defects.is_dir():
        pytest.skip("the files of the pairs are not there")
    folder = tmp_path / "ABIDE_pcp"
    shutil.copytree(abide_folder, folder, copy_function=os.symlink)
    files = next(folder.glob("**/*_rois_aal.1D")).parent
    for path in defects.glob("*.1D"):
        target = files / path.name
        if not target.exists():
            target.symlink_to(path)
    cohort = with_checks(read(folder))
    um, yale = ("UM_1_0050279", "UM_1_0050286"), ("Yale_0050578", "Yale_0050602")
    assert pairs_in(cohort.findings) == {DUPLICATE: um, CONFLICT: yale}
    flagged = [name for name, flag in zip(cohort.subjects.tolist(), duplicate_flags(cohort), strict=True) if flag]
    assert flagged == [*um, *yale]
    kept = without_duplicates(cohort)
    assert [one.subject for one in kept.excluded[len(cohort.excluded) :]] == [um[1], *yale]
    remarks = [one["remark"] for one in leakage_checks(cohort) if "remark" in one]
    assert [("(1 at UM_1;" in one, "(1 at YALE;" in one) for one in remarks] == [(True, False), (False, True)]


@pytest.mark.parametrize(
    ("stored", "severity", "text", "anonymous", "subjects"),
    [
        (
            "implausible value: subject s1, column AGE: age 200 is not between 0 and 120 years; it was set to missing",
            "finding",
            "Subject s1, column AGE: age 200 is not between 0 and 120 years; it was set to missing.",
            "A value is not plausible.",
            ("s1",),
        ),
        (
            "unusable series: subject s2, atlas ho: x.1D is empty",
            "finding",
            "Subject s2 has no series of atlas ho: x.1D is empty.",
            "A subject has no series of atlas ho, because its file is unusable.",
            ("s2",),
        ),
        ("scrubbed volumes: s3 12", "note", "scrubbed volumes: s3 12", "scrubbed volumes: of some subjects", ()),
        ("site and label from the id", "note", "site and label from the id", "site and label from the id", ()),
    ],
)
def test_notes_of_0_1_0_are_the_findings_they_were(stored, severity, text, anonymous, subjects):
    note = read_note(stored)
    assert (note.severity, note.text, note.anonymous, note.subjects) == (severity, text, anonymous, subjects)
