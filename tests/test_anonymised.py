"""`--share`: a cohort full of tell-tale words, not one of them in any byte of what is given away, packed bytes included."""

import base64
import dataclasses
import json
import re
import zlib

import numpy as np
import pandas as pd
import pytest

from m2lgdg import InputError, make, make_cohort
from m2lgdg.cli import main
from m2lgdg.data.pseudonyms import Pseudonyms
from m2lgdg.findings import Exclusion
from m2lgdg.method import Method
from m2lgdg.model.model import Model
from m2lgdg.registry import create
from m2lgdg.report.checklists import age_band
from m2lgdg.report.sharing import identifying_words_withheld, shared_model
from m2lgdg.study.runner import run_study

USER, HOST, WARD = "janedoe77", "scanner-host-9", "secretward"
PLUGIN = f'''
from m2lgdg.method import Method, method

@method("tattler")
class Tattler(Method):
    """Fails with all it knows."""

    place: str = "/home/{USER}/weights"

    def learn(self, source, *, seed, device, progress):
        age = source.phenotypes["age"].iloc[0]
        raise ValueError(f"/home/{USER}/x: subject {{source.subjects[0]}} of age {{age}} on {HOST}")
'''


@pytest.fixture(autouse=True)
def person(monkeypatch):
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.setenv(name, USER)
    monkeypatch.setattr("socket.gethostname", lambda: HOST)


@pytest.fixture(scope="module")
def cohort():
    """Ids that say a lot, ages with decimals that no other number has, a cohort named after a folder."""
    cohort = make_cohort("tiny", seed=1)
    ids = np.array([f"PATIENT-{name}-{7000 + i}" for i, name in enumerate(cohort.subjects)])
    table = cohort.phenotypes.set_axis(ids, axis=0).assign(age=[10 + (i / 8) ** 2 + 0.12345 for i in range(len(ids))])
    out = (
        Exclusion.from_reason("PATIENT-gone-1", "north", f"/home/{USER}/data/PATIENT-gone-1.npy: subject PATIENT-gone-1: NaN."),
        Exclusion.from_reason("PATIENT-gone-2", "north", "no label"),
        Exclusion.from_reason("PATIENT-gone-3", "north", f"seen by {USER}"),
    )
    return dataclasses.replace(
        cohort, subjects=ids, phenotypes=table, name=WARD, excluded=out, notes=(f"label from /data/{WARD}/labels.csv",)
    )


@pytest.fixture(scope="module")
def study(cohort, tmp_path_factory):
    folder = tmp_path_factory.mktemp(USER)
    cohort.save(folder / f"{WARD}.cohort")
    (folder / "tattler.py").write_text(PLUGIN)
    settings = {"name": f"study of {USER}", "cohort": str(folder / f"{WARD}.cohort"), "plugins": [str(folder / "tattler.py")]}
    chosen = {"methods": ["fc-logistic", "phenotype-logistic", "tattler"], "seeds": [0], "explain": ["fc-logistic"]}
    run_study(settings | chosen, folder / "out")
    return folder / "out"


@pytest.fixture(scope="module")
def model(cohort, tmp_path_factory):
    fitted = make("fc-logistic", phenotypes=True).fit(cohort, source_distribution=True)
    fitted.facts_["notes"] = [f"not compiled (/home/{USER}/x)", "a note that may stay"]
    return fitted.save(tmp_path_factory.mktemp(USER) / "model")


def command(*words):
    with pytest.raises(SystemExit) as ended, pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["m2lgdg", *map(str, words)])
        main()
    assert not ended.value.code


def unpacked(content):
    """A file's bytes, and what is packed in them: base64, text chunks of PNG, streams of zlib."""
    yield content
    for found in re.findall(rb"base64,([A-Za-z0-9+/=]{8,})", content):
        yield from unpacked(base64.b64decode(found))
    for start in (match.start() for match in re.finditer(rb"\x78[\x01\x9c\xda]", content)):
        try:
            yield zlib.decompressobj().decompress(content[start:])
        except zlib.error:
            continue


def tell_tales(cohort):
    words = [USER, HOST, WARD, "PATIENT-", *cohort.subjects.tolist(), "/home/", "/tmp/", "tattler.py", "labels.csv"]
    return [word.encode() for word in words] + [f"{age:.{n}f}".encode() for age in cohort.phenotypes["age"] for n in (3, 5)]


def assert_silent(folder, cohort):
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()] if folder.is_dir() else [folder]
    assert files
    for path in files:
        for content in unpacked(path.read_bytes()):
            for word in tell_tales(cohort):
                assert word not in content, f"{word} in {path.name}"
        if path.suffix == ".safetensors":  # numbers, as they lie in memory
            for age in (*cohort.phenotypes["age"], cohort.phenotypes["age"].median()):
                assert np.float64(age).tobytes() not in path.read_bytes()
                assert np.float32(age).tobytes() not in path.read_bytes()
    return files


def test_the_unshared_outputs_do_tell(study, model, cohort):
    """Else the search below would find nothing anywhere."""
    command("report", study)
    page = (study / "report.html").read_text()
    for word in (f"study of {USER}", f"/home/{USER}/x", "PATIENT-gone-1", f"seen by {USER}", WARD, HOST):
        assert word in page
    with pytest.raises(AssertionError):
        assert_silent(study / "report.html", cohort)
    with pytest.raises(AssertionError):
        assert_silent(model / "source_distribution.safetensors", cohort)
    with pytest.raises(AssertionError):
        assert_silent(model / "method.json", cohort)


def test_a_shared_report(study, cohort, tmp_path):
    command("report", study, "--share", "--3d", "--out", tmp_path / "given")
    files = assert_silent(tmp_path / "given", cohort)
    assert {"report.html", "predictions.csv", "roi.csv"} <= {path.name for path in files}
    page = (tmp_path / "given" / "report.html").read_text()
    assert "ValueError" in page  # that a cell failed is shown, its message is not
    assert "unusable file (1)" in page and "no label (1)" in page and "other reason (1)" in page
    low, middle, high = (age_band(age) for age in cohort.phenotypes["age"].quantile([0.25, 0.5, 0.75]))
    assert f"age median in {middle} (quartiles in {low} and {high})" in page
    assert "<h1>study</h1>" in page
    ours, theirs = (pd.read_csv(folder / "predictions.csv") for folder in (study, tmp_path / "given"))
    assert sorted(ours["proba"]) == sorted(theirs["proba"])
    assert theirs["subject"].nunique() == ours["subject"].nunique() == len(cohort)
    for method, part in theirs.groupby("method"):  # same subject, same hash in all cells; and in an order that tells nothing
        joined = part.merge(theirs[theirs["method"] != method], on=["subject", "target"])
        assert len(joined) == len(part) and (joined["label_x"] == joined["label_y"]).all()
    assert all(part["subject"].is_monotonic_increasing for _, part in theirs.groupby(["method", "target"]))
    command("report", study, "--share", "--out", tmp_path / "again")
    again = pd.read_csv(tmp_path / "again" / "predictions.csv")
    assert not set(again["subject"]) & set(theirs["subject"])  # another salt


def test_a_shared_report_goes_where_nothing_else_is(study, tmp_path, capsys):
    (tmp_path / "ids.csv").write_text("all of them")
    with pytest.raises(SystemExit) as ended, pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["m2lgdg", "report", str(study), "--share", "--out", str(tmp_path)])
        main()
    assert ended.value.code == 2
    assert "has files other than a shared report" in capsys.readouterr().err.replace("\n", " ")


def test_a_shared_model_folder(model, cohort, tmp_path):
    command("export", model, "--share", "--out", tmp_path / "given")
    files = assert_silent(tmp_path / "given", cohort)
    assert {"card.md", "card.html", "method.json", "weights.safetensors", "source_distribution.safetensors"} == {
        path.name for path in files
    }
    about = json.loads((tmp_path / "given" / "method.json").read_text())
    assert about["facts"]["source"]["cohort"] == "cohort"
    assert about["facts"]["notes"] == ["a note that may stay"]
    ours, theirs = Method.load(model), Method.load(tmp_path / "given")
    assert (ours.predict_proba(cohort) == theirs.predict_proba(cohort)).all()  # ages are known, nothing else was touched
    age = ours.facts_["inputs"].index("age")
    typical = np.median(cohort.phenotypes["age"])
    assert ours.state_["phenotypes.scaler.fill"][age] == typical
    assert theirs.state_["phenotypes.scaler.fill"][age] == typical // 5 * 5 + 2.5
    low, middle, high = theirs.source_distribution_.ranges[3]
    own = ours.source_distribution_.ranges[3]
    assert (low % 5, middle % 5, high % 5) == (0, 2.5, 0) and low <= own[0] < low + 5 and high - 5 <= own[2] < high


def test_a_shared_graph(model, cohort, tmp_path):
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package)
    command("export", model, "--share", "--out", tmp_path / "given" / "model.onnx")
    assert_silent(tmp_path / "given", cohort)
    reported = json.loads((tmp_path / "given" / "model.json").read_text())
    (columns,) = (one["columns"] for one in reported["inputs"] if one["name"] == "phenotypes")
    assert {one["name"]: one["fill"] for one in columns}["age"] % 5 == 2.5


def test_a_shared_table_of_predictions(model, cohort, tmp_path):
    cohort.save(tmp_path / "new.cohort")
    for words in (("own.csv",), ("given.csv", "--share")):
        command("predict", model, tmp_path / "new.cohort", "--out", tmp_path / words[0], *words[1:])
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


def test_words_are_withheld_whole():
    reported = identifying_words_withheld(["P1", "long-id-1"])
    assert reported("no label") == "no label"
    assert reported("subject P1 is short") == "withheld"
    assert reported("P11 is another") == "P11 is another"
    for text in ("a/b", "C:\\x", f"by {USER}", f"on {HOST}", "xlong-id-1x", "P1_rois.1D"):
        assert reported(text) == "withheld"


def test_bands_and_pseudonyms():
    assert [age_band(age) for age in (0, 4.99, 5, 17.25, 64)] == ["0 to 4", "0 to 4", "5 to 9", "15 to 19", "60 to 64"]
    names = Pseudonyms()
    assert names("a") == names("a") != names("b")
    assert names("a") != Pseudonyms()("a")
    assert re.fullmatch("[0-9a-f]{16}", names("\udce9"))


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
