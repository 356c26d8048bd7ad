"""What is given away names nobody: a study full of tell-tale words, and not one of them in any byte, packed bytes included."""

import base64
import dataclasses
import json
import os
import re
import shutil
import zlib
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from m2lgdg import InputError, make, make_cohort, run_study
from m2lgdg.data.pseudonyms import Pseudonyms, file_name, has_path, starts_path, without_paths
from m2lgdg.findings import Exclusion
from m2lgdg.method import Method
from m2lgdg.model.model import Model
from m2lgdg.registry import create
from m2lgdg.report.checklists import age_band
from m2lgdg.report.contents import read_contents
from m2lgdg.report.page import write_report
from m2lgdg.report.sharing import identifying_words_withheld, share_study, shared_model
from m2lgdg.study.description import NOT_CHECKED

USER, HOST, WARD = "janedoe77", "scanner-host-9", "secretward"
PERSON = "Zephyrine Quux"  # no text of the package has these words
PATHS = [
    f"/mnt/{PERSON}/scans/x.npy",
    f"/mnt/{PERSON}",
    f"/mnt/O'{PERSON}, PhD: lab/x.npy",
    rf"\\server\{PERSON}\x.csv",
    rf"D:\{PERSON}\y.mat",
    f"D:/{PERSON}/y.mat",
    f"file:///mnt/{PERSON}/x.nii.gz",
    "~Zephyrine_Quux/x.csv",
    "~Zephyrine_Quux",
    f"../{PERSON}/x.csv",
    f"{PERSON}/x.csv",
    rf"{PERSON}\x.csv",
    f"$HOME/{PERSON}/x",
    f"https://host/{PERSON}/x.html",
]
SENTENCES = [
    "{}",
    "cannot read {}: no such file",
    "cannot read '{}'.",
    'label from "{}", column 3',
    "a={} b",
    "1/2 of {}\nrest",
]
PLUGIN = f'''
from m2lgdg.method import Method, method

@method("tattler")
class Tattler(Method):
    """Fails with all it knows."""

    place: str = "/mnt/{PERSON}/weights"

    def learn(self, source, *, seed, device, progress):
        age = source.phenotypes["age"].iloc[0]
        raise ValueError(f"/mnt/{PERSON}/a.mat: subject {{source.subjects[0]}} of age {{age}} on {HOST}")
'''


@pytest.fixture(autouse=True)
def person(monkeypatch):
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.setenv(name, USER)
    monkeypatch.setattr("socket.gethostname", lambda: HOST)


@pytest.fixture(scope="module")
def cohort():
    """Ids that say a lot, ages with decimals that no other number has, paths in its notes, exclusions and atlas."""
    cohort = make_cohort("tiny", seed=1)
    ids = np.array([f"PATIENT-{name}-{7000 + i}" for i, name in enumerate(cohort.subjects)])
    table = cohort.phenotypes.set_axis(ids, axis=0).assign(age=[10 + (i / 8) ** 2 + 0.12345 for i in range(len(ids))])
    reasons = [*(f"{path}: subject PATIENT-gone-{i}: NaN." for i, path in enumerate(PATHS)), "no label", f"seen by {USER}"]
    return dataclasses.replace(
        cohort,
        subjects=ids,
        phenotypes=table,
        name=WARD,
        excluded=tuple(Exclusion.from_reason(f"PATIENT-gone-{i}", "north", reason) for i, reason in enumerate(reasons)),
        notes=tuple(f"label from {path}" for path in PATHS),
        atlas=f"/mnt/{PERSON}/atlas",
        truth=None,
    )


@pytest.fixture(scope="module")
def study(cohort, tmp_path_factory):
    """An explained linear method, one of phenotypes, a network and a method that fails, in a folder named after a person."""
    folder = tmp_path_factory.mktemp("lab") / PERSON
    cohort.save(folder / "data" / f"{WARD}.cohort")
    (folder / "tattler.py").write_text(PLUGIN)
    settings = {"name": f"study of {USER} in {PATHS[5]}", "cohort": str(folder / "data" / f"{WARD}.cohort")}
    settings |= {"methods": ["fc-logistic", "phenotype-logistic", "erm", "tattler"], "plugins": [str(folder / "tattler.py")]}
    settings |= {"method": {"erm": {"variant": "small", "epochs": 1, "warmup": 1}}, "targets": ["east", "north", "west"]}
    run_study(settings | {"seeds": [0], "explain": ["fc-logistic"]}, folder / "out")
    return folder / "out"


@pytest.fixture(scope="module")
def copy(study, tmp_path_factory):
    """The shared copy of the study, with its report."""
    folder = tmp_path_factory.mktemp("given") / "copy"
    share_study(study, folder)
    write_report(folder, three_d=True)
    return folder


@pytest.fixture(scope="module")
def model(cohort, tmp_path_factory):
    fitted = make("fc-logistic", phenotypes=True).fit(dataclasses.replace(cohort, atlas=""), source_distribution=True)
    fitted.facts_["notes"] = [f"not compiled (/home/{USER}/x)", "a note that may stay"]
    return fitted.save(tmp_path_factory.mktemp(USER) / "model")


def contents_of(folder):
    """(path, bytes) of every file, with what is packed in it: base64, text chunks of PNG, streams of zlib."""
    for path in sorted(path for path in folder.rglob("*") if path.is_file()) if folder.is_dir() else [folder]:
        content = path.read_bytes()
        for packed in [content, *map(base64.b64decode, re.findall(rb"base64,([A-Za-z0-9+/=]{8,})", content))]:
            yield path, packed
            for match in re.finditer(rb"\x78[\x01\x9c\xda]", packed):
                try:
                    yield path, zlib.decompressobj().decompress(packed[match.start() :])
                except zlib.error:
                    continue


def assert_no_path(folder):
    for path, content in contents_of(folder):
        assert not re.search(rb"Zephyrine|Quux|/mnt/|\\\\server|Traceback", content), path


def assert_silent(folder, cohort):
    """No path, and no word on a person either; returns the names of the files."""
    assert_no_path(folder)
    words = [USER, HOST, WARD, "PATIENT-", "/home/", "/tmp/", "tattler.py", "labels.csv"]
    words += [f"{age:.{n}f}" for age in cohort.phenotypes["age"] for n in (3, 5)]
    ages = (*cohort.phenotypes["age"], cohort.phenotypes["age"].median())
    for path, content in contents_of(folder):
        for word in words:
            assert word.encode() not in content, f"{word} in {path.name}"
        for age in ages if path.suffix == ".safetensors" else ():  # numbers, as they lie in memory
            assert np.float64(age).tobytes() not in content and np.float32(age).tobytes() not in content
    return {path.name for path, _ in contents_of(folder)}


def test_the_outputs_that_are_not_shared_do_tell(study, model, cohort, figures_painted_only):
    """Else the search would find nothing anywhere."""
    page = write_report(study).read_text()
    for word in (f"study of {USER}", f"/mnt/{PERSON}/a.mat", f"seen by {USER}", WARD, HOST):
        assert word in page
    for folder in (study / "report.html", model / "source_distribution.safetensors", model / "method.json"):
        with pytest.raises(AssertionError):
            assert_silent(folder, cohort)


def test_a_copy_gives_the_same_tables_and_a_report_without_the_cohort(study, copy, typed):
    before = typed("table", study)[1]
    assert "fc-logistic" in before and "erm (variant" not in before
    assert typed("table", copy)[1] == before
    original, shared = read_contents(study), read_contents(copy)
    assert original.cohort is not None and shared.cohort is None
    assert [one["seconds"] for one in shared.records] == [one["seconds"] for one in original.records]
    epochs = 0
    for one, other in zip(shared.records, original.records, strict=True):
        assert {**one["learned"], "history": None} == {**other["learned"], "history": None}
        for short, epoch in zip(one["learned"].get("history", []), other["learned"].get("history", []), strict=True):
            assert short == pytest.approx(epoch, rel=5.1e-6) and all(len(f"{value:.10g}") <= 13 for value in short.values())
            epochs += 1
    assert epochs > 2
    assert len(shared.explanations["fc-logistic"]) == 3
    page = (copy / "report.html").read_text()
    for title in ("Training curves", "Explanations: fc-logistic", "Leakage checks"):
        assert title in page
    assert "Subgroups" not in page  # they need the cohort


def test_a_copy_and_its_report_have_no_path(copy):
    assert_no_path(copy)
    files = {path.name for path in copy.iterdir() if path.is_file()} - {"report.html"}
    assert files == {
        *("predictions.csv", "inclusion.csv", "failures.csv", "study.json", "environment.json", "checks.json", "methods.json"),
        *("records.jsonl", "cohort.json", "connectomes.safetensors"),
    }
    kinds = {path.suffix for path, _ in contents_of(copy)}
    assert {".html", ".md", ".tex", ".csv", ".json", ".svg", ".png"} <= kinds
    about = json.loads((copy / "study.json").read_text())
    assert (about["cohort"], about["plugins"]) == (f"{WARD}.cohort", ["tattler.py"])
    assert "a.mat: subject PATIENT-" in (copy / "failures.csv").read_text()


def test_a_copy_can_be_repeated_where_the_cohort_is(study, copy, tmp_path):
    for path in (copy / "study.json", study.parent / "data" / f"{WARD}.cohort", study.parent / "tattler.py"):
        shutil.copy(path, tmp_path)
    run_study(tmp_path / "study.json", tmp_path / "again")
    assert (tmp_path / "again" / "predictions.csv").read_bytes() == (copy / "predictions.csv").read_bytes()


def test_predictions_and_study_alone_are_enough(linear_study, tmp_path, typed, figures_painted_only):
    before = typed("table", linear_study)[1]
    for name in ("predictions.csv", "study.json"):
        shutil.copy(linear_study / name, tmp_path)
    findings = "Data: 4 findings; m2lgdg report lists them."
    assert findings in before
    assert typed("table", tmp_path)[1] == before.replace(findings, f"Data: {NOT_CHECKED}")
    assert "fc-logistic" in write_report(tmp_path).read_text()


def test_a_copy_with_pseudonyms(study, copy, cohort, tmp_path, typed):
    """No id in any byte, the same tables, and the same pseudonyms in every copy of one secret."""
    code, text, _ = typed("share", study, "--out", tmp_path / "first", "--pseudonyms", tmp_path / "secret")
    assert code == 0 and "subject ids" not in text
    assert (tmp_path / "secret").stat().st_mode & 0o077 == 0
    typed("share", copy, "--out", tmp_path / "second", "--pseudonyms", tmp_path / "secret")  # a copy of the copy
    share_study(study, tmp_path / "other", Pseudonyms(b"another"))
    for name in ("first", "second", "other"):
        assert_no_path(tmp_path / name)
        assert all(b"PATIENT-" not in content for _, content in contents_of(tmp_path / name))
    assert typed("table", tmp_path / "first")[1] == typed("table", study)[1]
    tables = {name: pd.read_csv(tmp_path / name / "predictions.csv") for name in ("first", "second", "other")}
    pd.testing.assert_frame_equal(tables["first"], tables["second"])
    assert not set(tables["first"]["subject"]) & set(tables["other"]["subject"])
    renamed = Pseudonyms.of_file(tmp_path / "secret")
    before = pd.read_csv(copy / "predictions.csv").assign(subject=lambda table: table["subject"].map(renamed))
    cell = ["method", "variant", "seed", "target", "subject"]
    joined = before.merge(tables["first"], on=cell, suffixes=("", "_shared"))
    assert len(joined) == len(before) and (joined["proba"] == joined["proba_shared"]).all()
    for _, rows in tables["first"].groupby(cell[:-1], dropna=False):
        assert rows["subject"].is_monotonic_increasing
    inclusion = pd.read_csv(tmp_path / "first" / "inclusion.csv")
    assert set(inclusion["subject"]) >= {renamed(str(one)) for one in cohort.subjects}
    assert "Leakage checks" in write_report(tmp_path / "first").read_text()


@pytest.mark.parametrize("content", ["", "00ff", "not hexadecimal", "é" * 64])
def test_a_file_that_is_no_secret_is_refused(content, linear_study, tmp_path, typed):
    (tmp_path / "secret").write_text(content, encoding="utf-8")
    code, _, error = typed("share", linear_study, "--out", tmp_path / "copy", "--pseudonyms", tmp_path / "secret")
    assert code == 2 and "no secret of pseudonyms" in error and not (tmp_path / "copy").exists()
    assert (tmp_path / "secret").read_text(encoding="utf-8") == content


def test_an_id_that_would_stay_stops_the_copy(linear_study, tmp_path):
    """Keys of a dictionary are no texts that are replaced."""
    folder = shutil.copytree(linear_study, tmp_path / "study")
    subject = pd.read_csv(folder / "predictions.csv")["subject"].iloc[0]
    about = json.loads((folder / "cohort.json").read_text())
    (folder / "cohort.json").write_text(json.dumps(about | {"groups": about["groups"] | {subject: about["groups"]["all"]}}))
    with pytest.raises(InputError, match=r"cohort\.json names subjects"):
        share_study(folder, tmp_path / "copy", Pseudonyms())


def _renamed(folder, names):
    """Ids of a study folder replaced; `names` -> new names."""
    for name in ("predictions.csv", "inclusion.csv"):
        table = pd.read_csv(folder / name, dtype=str, keep_default_na=False)
        table.assign(subject=table["subject"].map(names)).to_csv(folder / name, index=False)


def test_results_of_code_that_is_in_no_commit(linear_study, tmp_path, typed):
    folder = shutil.copytree(linear_study, tmp_path / "study")
    versions = json.loads((folder / "environment.json").read_text())
    for tree, refused in (("changed", True), ("clean", False), ("unknown", False), ("named by M2LGDG_COMMIT", False)):
        (folder / "environment.json").write_text(json.dumps(versions | {"tree": tree}))
        code, _, error = typed("share", folder, "--out", tmp_path / tree)
        assert (code, (tmp_path / tree).exists()) == ((2, False) if refused else (0, True))
        if refused:
            assert error == (
                f"m2lgdg: {folder} was made with code that was changed after commit c0ffee000000, so that nobody can look it "
                "up; commit it and repeat m2lgdg run, or add --uncommitted to share the results all the same.\n"
            )
    (folder / "environment.json").write_text(json.dumps(versions | {"tree": "changed"}))
    assert typed("share", folder, "--out", tmp_path / "copy", "--uncommitted")[0] == 0
    copied = json.loads((tmp_path / "copy" / "environment.json").read_text())
    assert (copied["commit"], copied["tree"]) == (versions["commit"], "changed")  # and says so
    assert typed("share", tmp_path / "copy", "--out", tmp_path / "again")[0] == 2  # a copy is no way around


def test_ids_that_are_numbers(linear_study, tmp_path):
    """Seeds, labels, versions and sites with a number are no subjects; a site called as a subject is refused."""
    folder = shutil.copytree(linear_study, tmp_path / "study")
    subjects = sorted(set(pd.read_csv(folder / "inclusion.csv")["subject"]))
    numbers = {one: str(number) for number, one in enumerate(subjects)}
    _renamed(folder, numbers)
    secret = Pseudonyms(b"x" * 32)
    share_study(folder, tmp_path / "copy", secret)
    before, after = (pd.read_csv(one / "predictions.csv", dtype=str) for one in (folder, tmp_path / "copy"))
    after["proba"] = after["proba"].astype(float)
    joined = before.assign(subject=before["subject"].map(secret)).merge(
        after, on=["method", "variant", "seed", "target", "subject"]
    )
    assert len(joined) == len(before) and (joined["proba_x"].astype(float) == joined["proba_y"]).all()
    versions = [json.loads((one / "environment.json").read_text()) for one in (folder, tmp_path / "copy")]
    assert versions[0]["numpy"] == versions[1]["numpy"] and versions[0]["python"] == versions[1]["python"]
    _renamed(folder, {number: before["target"].iloc[0] if number == "0" else number for number in numbers.values()})
    with pytest.raises(InputError, match="give them other ids"):
        share_study(folder, tmp_path / "refused", secret)


def test_the_order_of_a_copy(linear_study, tmp_path):
    """Findings about subjects are sorted by pseudonyms; ROIs keep their order, also if one is withheld."""
    folder = shutil.copytree(linear_study, tmp_path / "study")
    subjects = sorted(set(pd.read_csv(folder / "predictions.csv")["subject"]))
    about = json.loads((folder / "cohort.json").read_text())
    rois = about["rois"][::-1]
    rois[1] = "L/R cuneus"
    findings = [{"kind": "note", "site": "", "subjects": [one], "numbers": {"text": "a", "anonymous": "a"}} for one in subjects]
    (folder / "cohort.json").write_text(json.dumps(about | {"rois": rois, "findings": findings}))
    for copy, secret in (("plain", None), ("hidden", Pseudonyms(b"x" * 32))):
        share_study(folder, tmp_path / copy, secret)
        found = json.loads((tmp_path / copy / "cohort.json").read_text())
        named = [finding["subjects"][0] for finding in found["findings"]]
        assert named == (subjects if secret is None else sorted(map(secret, subjects)))
        assert found["rois"][:1] + found["rois"][2:] == rois[:1] + rois[2:]


def test_only_tables_of_an_explanation_are_copied(study, tmp_path):
    folder = shutil.copytree(study, tmp_path / "study")
    explained = next((folder / "explanations").iterdir())
    (explained / "by_subject.csv").write_text("subject,score\nPATIENT-0001,1\n")
    share_study(folder, tmp_path / "copy", Pseudonyms())
    copied = {path.name for path in (tmp_path / "copy" / "explanations" / explained.name).iterdir()}
    assert copied == {path.name for path in explained.iterdir()} - {"by_subject.csv"}


@pytest.mark.parametrize("there", [False, True])
def test_a_secret_is_not_made_in_the_folder_that_is_given_away(there, linear_study, tmp_path, typed):
    copy = tmp_path / "copy"
    if there:
        copy.mkdir()
    code, _, error = typed("share", linear_study, "--out", copy, "--pseudonyms", copy / "deep" / ".." / "secret")
    assert code == 2 and "given away" in error
    assert copy.exists() == there and not list(copy.glob("*"))


def test_a_secret_that_another_process_has_just_made_is_used(tmp_path, monkeypatch):
    first = Pseudonyms.of_file(tmp_path / "new" / "secret")
    monkeypatch.setattr(Path, "exists", lambda path: path.name != "secret" and os.path.exists(path))  # as it was before
    assert Pseudonyms.of_file(tmp_path / "new" / "secret")("one") == first("one")
    (tmp_path / "file").touch()
    for path in (tmp_path / "file" / "secret", tmp_path / "new"):
        with pytest.raises(InputError, match=f"cannot read {re.escape(str(path))}: "):
            Pseudonyms.of_file(path)


def test_nothing_is_written_over(linear_study, tmp_path, typed):
    (tmp_path / "mine.txt").write_text("kept")
    with pytest.raises(InputError, match="already exists"):
        share_study(linear_study, tmp_path)
    with pytest.raises(InputError, match="not a study folder"):
        share_study(tmp_path, tmp_path / "copy")
    code, _, err = typed("report", linear_study, "--share", "--out", tmp_path)
    assert code == 2 and "has files other than a shared report" in err.replace("\n", " ")


def test_a_shared_report_appears_whole_or_not_at_all(linear_study, tmp_path, monkeypatch, figures_painted_only):
    from m2lgdg.report import page

    def full(path, text):
        raise InputError(f"cannot write {path}: No space left on device.")

    given, earlier = tmp_path / "given", tmp_path / "earlier"
    write_report(linear_study, share=earlier)
    (earlier / "tables" / "old.csv").write_text("of a study before")
    before = sorted(earlier.rglob("*"))
    with monkeypatch.context() as patch:
        patch.setattr(page, "write_bytes", full)
        for folder in (given, earlier):
            with pytest.raises(InputError, match="No space left"):
                write_report(linear_study, share=folder)
    assert not given.exists() and sorted(earlier.rglob("*")) == before
    (earlier / "next").mkdir()
    (earlier / "next" / "report.html").write_text("of a process that was killed")
    assert write_report(linear_study, share=earlier) == earlier / "report.html"
    assert sorted(path for path in earlier.rglob("*") if path.name != "old.csv") == [
        one for one in before if one.name != "old.csv"
    ]
    assert not (earlier / "tables" / "old.csv").exists()  # nothing of an earlier report stays


@pytest.mark.parametrize("site", [f"/mnt/{PERSON}", rf"\\server\{PERSON}", f"D:/{PERSON}", "~Zephyrine_Quux"])
def test_a_site_that_is_a_path_is_refused_and_nothing_is_written(site, linear_study, tmp_path):
    predictions = (linear_study / "predictions.csv").read_text().replace(",north,", f",{site},")
    (tmp_path / "predictions.csv").write_text(predictions)
    for attempt in (lambda: share_study(tmp_path, tmp_path / "a"), lambda: write_report(tmp_path, share=tmp_path / "b")):
        with pytest.raises(InputError, match="contains a path and cannot be shared"):
            attempt()
    assert not (tmp_path / "a").exists() and not (tmp_path / "b").exists()


def test_a_site_with_a_slash_is_shared_by_its_name(linear_study, tmp_path):
    (tmp_path / "study").mkdir()
    for name in ("predictions.csv", "inclusion.csv", "study.json"):
        text = (linear_study / name).read_text().replace(",east,", ",A/B,").replace('"east"', '"A/B"')
        (tmp_path / "study" / name).write_text(text)
    share_study(tmp_path / "study", tmp_path / "copy")
    assert "A/B" in json.loads((tmp_path / "copy" / "study.json").read_text())["targets"]
    assert "A/B" in (tmp_path / "copy" / "inclusion.csv").read_text()


def test_a_shared_report(study, cohort, tmp_path, typed):
    assert typed("report", study)[0] == 0
    assert typed("report", study, "--share", "--3d", "--out", tmp_path / "given")[0] == 0
    assert {"report.html", "predictions.csv", "roi.csv"} <= assert_silent(tmp_path / "given", cohort)
    page = (tmp_path / "given" / "report.html").read_text()
    assert "ValueError" in page  # that a cell failed is shown, its message is not
    assert f"unusable file ({len(PATHS)})" in page and "no label (1)" in page and "other reason (1)" in page
    low, middle, high = (age_band(age) for age in cohort.phenotypes["age"].quantile([0.25, 0.5, 0.75]))
    assert f"age median in {middle} (quartiles in {low} and {high})" in page
    assert "<h1>study</h1>" in page
    ours, theirs = (pd.read_csv(folder / "predictions.csv") for folder in (study, tmp_path / "given"))
    assert sorted(ours["proba"]) == sorted(theirs["proba"])
    assert theirs["subject"].nunique() == ours["subject"].nunique()
    counts = theirs.groupby(["subject", "target"])  # same subject, same hash in all cells
    assert (counts["method"].nunique() == 3).all() and (counts["label"].nunique() == 1).all()
    assert all(part["subject"].is_monotonic_increasing for _, part in theirs.groupby(["method", "target"]))
    own, shared = (next((folder / "tables").glob("Subgroups*.csv")).read_text() for folder in (study, tmp_path / "given"))
    assert not re.search("withheld|<10", own) and re.search("withheld|<10", shared)


def test_a_shared_model_folder(model, cohort, tmp_path, typed):
    assert typed("export", model, "--share", "--out", tmp_path / "given")[0] == 0
    files = {"card.md", "card.html", "method.json", "weights.safetensors", "source_distribution.safetensors"}
    assert assert_silent(tmp_path / "given", cohort) == files
    about = json.loads((tmp_path / "given" / "method.json").read_text())
    assert about["facts"]["source"]["cohort"] == "cohort"
    assert about["facts"]["notes"] == ["a note that may stay"]
    ours, theirs, known = Model.load(model), Model.load(tmp_path / "given"), dataclasses.replace(cohort, atlas="")
    assert (ours.predict_proba(known) == theirs.predict_proba(known)).all()  # ages are known, nothing else was touched
    age = ours.facts_["inputs"].index("age")
    typical = np.median(cohort.phenotypes["age"])
    assert ours.state_["phenotypes.scaler.fill"][age] == typical
    assert theirs.state_["phenotypes.scaler.fill"][age] == typical // 5 * 5 + 2.5
    low, middle, high = theirs.source_distribution_.ranges[3]
    own = ours.source_distribution_.ranges[3]
    assert (low % 5, middle % 5, high % 5) == (0, 2.5, 0) and low <= own[0] < low + 5 and high - 5 <= own[2] < high


def test_a_shared_graph(model, cohort, tmp_path, typed):
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package)
    assert typed("export", model, "--share", "--out", tmp_path / "given" / "model.onnx")[0] == 0
    assert_silent(tmp_path / "given", cohort)
    assert typed("export", model, "--share", "--prepared", "--out", tmp_path / "prepared" / "model.onnx")[0] == 0
    reported, described = (
        {one["name"]: one for one in json.loads((tmp_path / name / "model.json").read_text())["inputs"]}
        for name in ("prepared", "given")
    )
    (fill,) = (one["fill"] for one in reported["phenotypes"]["columns"] if one["name"] == "age")
    assert fill % 5 == 2.5
    import onnxruntime

    named = described["phenotypes"]["columns"]
    phenotypes = np.tile(cohort.phenotypes[named].median().to_numpy(dtype=float), (3, 1))  # (subject, column)
    phenotypes[:, named.index("age")] = np.nan, fill, np.median(cohort.phenotypes["age"])
    series = np.tile(np.asarray(cohort.series[0], dtype=np.float32), (3, 1, 1))  # (subject, time, roi)
    graph = onnxruntime.InferenceSession(tmp_path / "given" / "model.onnx")
    missing, coarse, exact = graph.run(["proba"], {"series": series, "phenotypes": phenotypes})[0]
    assert missing == coarse != exact  # the graph has not kept the median


def test_a_shared_table_of_predictions(model, cohort, tmp_path, typed):
    dataclasses.replace(cohort, atlas="").save(tmp_path / "new.cohort")
    for words in (("own.csv",), ("given.csv", "--share")):
        assert typed("predict", model, tmp_path / "new.cohort", "--out", tmp_path / words[0], *words[1:])[0] == 0
    assert_silent(tmp_path / "given.csv", cohort)
    own, given = (pd.read_csv(tmp_path / name) for name in ("own.csv", "given.csv"))
    assert given["subject"].is_monotonic_increasing and given["subject"].is_unique
    assert sorted(given["proba"]) == sorted(own["proba"])


@pytest.mark.parametrize("name", ["mm-gtunets", "genm"])
def test_models_that_remember_subjects_are_not_shared(name):
    fitted = create(name)
    fitted.state_, fitted.facts_ = {fitted.remembers[0]: np.zeros(3)}, {"atlas": ""}
    with pytest.raises(InputError, match=f"method {name} keeps features of its source subjects"):
        shared_model(Model(fitted))


def test_a_plugin_that_keeps_subjects_without_saying_so_is_not_shared():
    class Keeper(Method):
        """Of a lab's own file."""

    fitted = Keeper()
    fitted.state_ = {"mean": np.zeros(3), "one": np.array(1.0)}
    fitted.facts_ = {"source": {"cohort": "abide", "sites": {"A": {"patients": 4, "controls": 3}}}, "inputs": [], "atlas": ""}
    assert shared_model(Model(fitted)).state_.keys() == {"mean", "one"}
    fitted.state_["everybody"] = np.zeros((7, 3))
    with pytest.raises(InputError, match=r"keeps features of its source subjects \(everybody\) and cannot be shared"):
        shared_model(Model(fitted))


def test_words_are_withheld_whole():
    reported = identifying_words_withheld(["P1", "long-id-1"])
    assert reported("no label") == "no label"
    assert reported("subject P1 is short") == "withheld"
    assert reported("P11 is another") == "P11 is another"
    for text in ("a/b", "C:\\x", f"by {USER}", f"on {HOST}", "xlong-id-1x", "P1_rois.1D"):
        assert reported(text) == "withheld"


def test_bands_and_pseudonyms():
    assert [age_band(age) for age in (0, 4.99, 5, 17.25, 64)] == ["0 to 4", "0 to 4", "5 to 9", "15 to 19", "60 to 64"]
    names, other = Pseudonyms(), Pseudonyms()  # another salt for each output
    assert names("a") == names("a") != names("b") and names("a") != other("a")
    assert re.fullmatch("[0-9a-f]{16}", names("\udce9"))


def test_no_part_of_a_folder_is_left():
    for text in (sentence.format(path) for sentence in SENTENCES for path in PATHS):
        assert has_path(text)
        assert not re.search("Zephyrine|Quux", without_paths(text)), without_paths(text)
        assert ("\nrest" in without_paths(text)) == ("\nrest" in text)


@pytest.mark.parametrize("text", ["1/2 of 0.1/0.2", "n/a", "sex and/or age", "about ~5 mm", "file: none", "a: b", "mean ± sd"])
def test_other_text_stays(text):
    assert without_paths(text) == text
    assert not has_path(text) and not starts_path(text)


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("cannot read /home/me/lab/a.csv: no", "cannot read a.csv: no"),
        ("cannot read /srv/x y/a.tar.gz: empty", "cannot read a.tar.gz: empty"),
        ("No such file: '/home/jane doe/secret/x.py'", "No such file: 'x.py'"),
        ("no room in '/home/jane'", "no room in '[path]"),
        ("no room in /srv/j.smith", "no room in [path]"),
        ("C:\\Users\\jane doe\\x.py or /Users/jane", "[path]"),
        ("'~/lab/a.mat' and (/srv/x/b.mat)", "'b.mat)"),
        (r"C:\Users\me\a.csv", "a.csv"),
        ("1/2 of and/or 0.1/0.2, /root is no file", "1/2 of and/or 0.1/0.2, [path]"),
    ],
)
def test_of_a_path_the_name_of_a_file_may_stay(text, left):
    assert without_paths(text) == left


def test_names_of_files():
    assert file_name(rf"D:\{PERSON}\x.cohort") == file_name(f"/mnt/{PERSON}/x.cohort") == "x.cohort"
    assert file_name(f"/mnt/{PERSON}") == file_name(rf"\\host\{PERSON}") == "folder"
