"""Packaged models: which folder a name is, what the models hold, and their predictions for ten synthetic subjects."""

import hashlib
import json
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from packaged_models import LARGEST, PREDICTIONS, synthetic

import m2lgdg
from m2lgdg.model import packaged
from m2lgdg.model.packaged import model_folder
from m2lgdg.storage import InputError


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A package with one model, `small`, and an empty working directory."""
    trained = tmp_path / "trained"
    m2lgdg.make("fc-logistic").fit(m2lgdg.make_cohort("tiny")).save(trained / "small")
    about = dict.fromkeys(packaged.Packaged._fields, "")
    (trained / "models.json").write_text(json.dumps({"small": about}))
    monkeypatch.setattr(packaged, "TRAINED", trained)
    monkeypatch.setattr(packaged, "INDEX", trained / "models.json")
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return trained / "small"


def test_a_name_is_the_folder_in_the_package_and_a_path_is_itself(own, tmp_path):
    assert model_folder("small") == own
    assert model_folder(own) == own
    assert model_folder(tmp_path / "elsewhere") == tmp_path / "elsewhere"  # told by Model.load
    assert m2lgdg.load("small").name == m2lgdg.load(own).name == "fc-logistic"
    assert packaged.is_packaged(model_folder("small")) and not packaged.is_packaged(tmp_path)


def test_what_a_packaged_model_tells_apart(tmp_path):
    assert packaged.told(model_folder("abide-aal")).startswith("abide-aal: autism or control, ")
    assert packaged.told(tmp_path) == packaged.told(None) == ""


def test_a_name_in_use_twice_is_refused(own, tmp_path):
    """Else the same command would use another model in another directory, and nothing would say so."""
    (tmp_path / "work" / "small").mkdir()
    assert model_folder("small") == own  # a folder of scans, perhaps
    shutil.copytree(own, tmp_path / "work" / "small", dirs_exist_ok=True)
    with pytest.raises(InputError, match="small is a model of the package and a model folder in the working directory"):
        model_folder("small")
    full = tmp_path / "work" / "small"
    assert model_folder(full) == full


def test_an_unknown_name_is_answered_with_the_nearest(own):
    with pytest.raises(InputError, match=r"smal is not a model folder \(no method.json\), nor .*; did you mean small\?"):
        model_folder("smal")
    with pytest.raises(InputError, match=r"folder/smal is not a model folder \(no method.json\)\.$"):
        m2lgdg.load("folder/smal")


@pytest.mark.parametrize("name", packaged.packaged())
def test_predictions_are_those_that_were_stored(name):
    """On every platform; the tolerance is for other libraries of linear algebra."""
    stored = pd.read_csv(PREDICTIONS).query("model == @name")
    fitted = m2lgdg.load(name)
    subjects = synthetic(fitted)
    assert stored["subject"].tolist() == subjects.subjects.tolist() and len(stored) == 10
    proba = fitted.predict_proba(subjects)[:, 1]
    np.testing.assert_allclose(proba, stored["proba"], rtol=0, atol=1e-5)
    assert np.ptp(proba) > 0.05  # synthetic subjects are not all the same to it
    assert any("phenotypes missing" in flag for flags in fitted.flags(subjects) for flag in flags)


def test_models_are_small_and_what_models_json_says():
    files = [path for path in packaged.TRAINED.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < LARGEST
    assert {path.name for path in packaged.TRAINED.iterdir()} == {*packaged.packaged(), "models.json", "LICENCE.md"}
    for name, about in packaged.packaged().items():
        folder = packaged.TRAINED / name
        fitted = m2lgdg.load(name)
        assert about.sha256 == hashlib.sha256((folder / "method.json").read_bytes()).hexdigest()
        assert list(fitted.members) == about.atlases and fitted.facts_["inputs"] == about.phenotypes
        tables = next(iter(fitted.members.values())).facts_.get("tables", {})
        assert list(tables) == about.tables and (packaged.TRAINED / name / "card.md").is_file()
        areas = [site.auc for site in fitted.new_site_.sites.values()]
        assert about.auc == pytest.approx(np.mean(areas), abs=1e-4) and len(areas) == about.sites == 20
        assert (min(areas), max(areas)) == (about.auc_lowest, about.auc_highest)
        assert (
            about.subjects == 1035
            and "CC BY-NC-SA" in about.licence
            and "Research use only" in (folder / "card.md").read_text()
        )


def test_no_subject_is_in_a_model():
    """Ids of ABIDE are a site and 00, then five digits that start with 5; an array has no row for each of 1,035 subjects."""
    for name in packaged.packaged():
        for path in (packaged.TRAINED / name).iterdir():
            assert not re.search(rb"_00[0-9]{5}(?![0-9])|(?<![0-9a-f.])005[01][0-9]{3}(?![0-9a-f])", path.read_bytes()), path
        fitted = m2lgdg.load(name)
        assert not any({505, 530, 1035} & set(value.shape) for value in fitted.state_.values())
        ages = [one.ranges[3] for one in fitted.source_distributions.values()]
        assert all((age / 2.5 % 1 == 0).all() for age in ages)  # of a band


def test_the_commit_has_the_code_that_fitted():
    """method.json has the hash of the code, which is computed again from the commit in models.json."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists() or shutil.which("git") is None:
        pytest.skip("this is not a clone")

    def git(*words):
        return subprocess.run(["git", "-C", str(root), *words], capture_output=True, check=True).stdout

    if git("rev-parse", "--is-shallow-repository") != b"false\n":
        pytest.skip("the history is not there")
    for commit in {about.commit for about in packaged.packaged().values()}:
        git("merge-base", "--is-ancestor", commit, "HEAD")
        paths = git("ls-tree", "-r", "--name-only", "--full-tree", commit, "src/m2lgdg").decode().split()
        rooms = [Path(path).relative_to("src/m2lgdg") for path in paths if path.endswith(".py")]
        folders = ("methods", "fast", "model", "sklearn_bridge")
        hashes = [
            (one.name, hashlib.sha256(git("show", f"{commit}:src/m2lgdg/{one.as_posix()}")).hexdigest())
            for one in sorted(rooms)
            if len(one.parts) == 1 or one.parts[0] in folders
        ]
        names = [name for name, about in packaged.packaged().items() if about.commit == commit]
        code = hashlib.sha256(json.dumps(hashes).encode()).hexdigest()[:16]
        assert {name: m2lgdg.load(name).code_ for name in names} == dict.fromkeys(names, code)


def test_the_page_has_the_numbers_of_models_json():
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    for name, one in packaged.packaged().items():
        row = next(line for line in page.splitlines() if line.startswith(f"| `{name}` |"))
        cells = [cell.strip() for cell in row.split("|")[1:-1]]
        assert cells[-1] == f"{100 * one.auc:.1f} ({100 * one.auc_lowest:.0f} to {100 * one.auc_highest:.0f})"
