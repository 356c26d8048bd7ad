"""Names of packaged models: which folder a name is, and names that are in use twice or not at all."""

import json
import shutil

import pytest

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
