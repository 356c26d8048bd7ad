"""methods.json of a study folder: what tables and reports know of its methods without their classes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import m2lgdg
from m2lgdg.registry import METHODS
from m2lgdg.storage import InputError
from m2lgdg.study.plan import METHODS_FILE, declarations, write_declarations

RESULTS = Path(__file__).parents[1] / "results"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    study = {"cohort": m2lgdg.make_cohort("tiny"), "methods": ["prior", "fc-logistic"], "targets": ["east"]}
    m2lgdg.run_study(study, tmp_path / "out")
    return tmp_path / "out"


def test_a_run_writes_what_its_methods_declare(folder: Path) -> None:
    found = declarations(folder)
    assert list(found) == ["prior", "fc-logistic"]
    cls = METHODS["fc-logistic"]
    assert found["fc-logistic"].fields == json.loads(json.dumps(cls().fields()))
    assert found["fc-logistic"].variants == json.loads(json.dumps(cls.variants))
    assert (found["prior"].stochastic, found["prior"].role) == (False, METHODS["prior"].role)


def test_a_folder_of_0_1_0_is_declared_by_the_classes(folder: Path) -> None:
    stored = declarations(folder)
    (folder / METHODS_FILE).unlink()
    fallback = declarations(folder)
    assert {name: one.stochastic for name, one in fallback.items()} == {name: one.stochastic for name, one in stored.items()}
    study = json.loads((folder / "study.json").read_text())
    del study["method"]["fc-logistic"]["phenotypes"]  # a field that the method did not have then
    (folder / "study.json").write_text(json.dumps(study))
    assert "phenotypes" not in declarations(folder)["fc-logistic"].variants


def test_a_changed_declaration_is_written_again_and_a_damaged_one_is_refused(folder: Path) -> None:
    path = folder / METHODS_FILE
    for text in ("{", "[]", '{"prior": {"fields": 1}}', '{"prior": {"fields": {}, "variants": {"a": 1}, "stochastic": true}}'):
        path.write_text(text)
        with pytest.raises(InputError, match=r"methods.json is damaged"):
            declarations(folder)
    write_declarations(folder, ["prior"])
    assert list(declarations(folder)) == ["prior"]


@pytest.mark.parametrize("folder", sorted(str(path.parent.relative_to(RESULTS)) for path in RESULTS.rglob("study.json")))
def test_committed_results_declare_their_methods(folder: str) -> None:
    study = json.loads((RESULTS / folder / "study.json").read_text())
    assert set(study["methods"]) == set(declarations(RESULTS / folder))
    assert (RESULTS / folder / METHODS_FILE).is_file()
