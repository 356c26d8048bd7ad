"""The commit of a study's code: in a checkout, a copy of it, an environment inside another checkout, and over several runs."""

import itertools
import json
import os
import shutil
import subprocess

import pytest

import m2lgdg.study.folder
from m2lgdg import InputError, make_cohort, run_study
from m2lgdg.study import provenance as module
from m2lgdg.study.provenance import ORDER, provenance, says_more

UNKNOWN = {"commit": "unknown", "tree": "unknown"}
NAMES = {"GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@b", "GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "a@b"}


def git(folder, *words):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")} | NAMES
    return subprocess.run(
        ["git", "-C", str(folder), *words], check=True, capture_output=True, text=True, env=environment
    ).stdout


def committed(folder):
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", "x")
    return git(folder, "rev-parse", "HEAD").strip()


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package in a checkout with one commit; caches and local/ are ignored."""
    monkeypatch.delenv("M2LGDG_COMMIT", raising=False)
    folder = tmp_path / "repository" / "src" / "m2lgdg"
    (folder / "methods").mkdir(parents=True)
    git(tmp_path / "repository", "init", "--quiet")
    (tmp_path / "repository" / ".gitignore").write_text("__pycache__/\nlocal/\n*.log\n")
    for name in ("__init__.py", "methods/first.py"):
        (folder / name).write_text("x = 1\n")
    return folder


def test_a_checkout_tells_its_commit_and_whether_the_package_was_changed(package, monkeypatch):
    assert provenance(package) == UNKNOWN  # nothing is committed
    commit = committed(package)
    clean, changed = {"commit": commit, "tree": "clean"}, {"commit": commit, "tree": "changed"}
    assert provenance(package) == clean
    monkeypatch.setenv("M2LGDG_COMMIT", "f" * 40)
    assert provenance(package) == clean  # git knows better
    monkeypatch.setenv("GIT_DIR", "elsewhere")
    assert provenance(package) == clean  # as inside a hook of another repository
    (package / "__pycache__").mkdir()
    (package / "__pycache__" / "first.cpython-311.pyc").write_text("")
    (package / "training.log").write_text("")
    (package.parents[1] / "notes.txt").write_text("not of the package")
    assert provenance(package) == clean
    for name, before in (("methods/first.py", "x = 1\n"), ("methods/second.py", None), ("local/hidden.py", None)):
        path = package / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("x = 2\n")
        assert provenance(package) == changed, name
        path.unlink() if before is None else path.write_text(before)
    (package / "methods" / "first.py").unlink()
    assert provenance(package) == changed


def test_an_environment_inside_a_checkout_is_not_of_its_commit(package):
    installed = package.parents[1] / "local" / "site-packages" / "m2lgdg"
    shutil.copytree(package, installed)
    committed(package)
    assert provenance(installed) == UNKNOWN


def test_a_copy_is_of_the_commit_that_is_named(package, tmp_path, monkeypatch):
    commit = committed(package)
    copy = shutil.copytree(package, tmp_path / "copy" / "m2lgdg")
    assert provenance(copy) == UNKNOWN
    monkeypatch.setenv("M2LGDG_COMMIT", commit.upper() + "\n")
    assert provenance(copy) == {"commit": commit, "tree": "named by M2LGDG_COMMIT"}
    monkeypatch.setenv("PATH", "")  # no git on this machine
    assert provenance(package) == {"commit": commit, "tree": "named by M2LGDG_COMMIT"}
    for wrong in (commit[:10], "main", commit + "-dirty"):
        monkeypatch.setenv("M2LGDG_COMMIT", wrong)
        with pytest.raises(InputError, match=r"M2LGDG_COMMIT is .*, not the full hash of a commit; set it to"):
            provenance(copy)


def test_git_that_does_not_answer_is_no_answer(package, monkeypatch):
    committed(package)

    def slow(command, timeout, **_):
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(module.subprocess, "run", slow)
    assert provenance(package) == UNKNOWN


def test_what_a_later_run_may_replace():
    """A clean folder shows the commit of all cells; one that was changed is forgotten for nothing less."""
    better = {(a, b) for a, b in itertools.product(ORDER, ORDER) if says_more({"tree": a}, {"tree": b})}
    named = "named by M2LGDG_COMMIT"
    assert better == {
        *(("clean", other) for other in ("changed", named, "unknown")),
        *(("changed", other) for other in (named, "unknown")),
        (named, "unknown"),
    }
    assert (
        not says_more({"tree": "unknown"}, {}) and says_more({"tree": named}, {}) and says_more({"tree": named}, {"tree": "?"})
    )


def test_runs_of_one_folder(tmp_path, monkeypatch):
    """The folder names the commit of its predictions: that of the last code, and of the run that shows it best."""
    study = {"cohort": make_cohort("tiny", seed=1), "methods": ["prior"], "targets": ["east"]}

    def run(commit, tree, code="a" * 16):
        monkeypatch.setattr(m2lgdg.study.folder, "provenance", lambda: {"commit": commit, "tree": tree})
        monkeypatch.setattr(m2lgdg.study.folder, "code_version", lambda plugins: code)
        run_study(study, tmp_path / "out")
        stored = json.loads((tmp_path / "out" / "environment.json").read_text())
        assert list(stored)[:6] == ["python", "system", "code", "commit", "tree", "m2lgdg"]
        return stored["code"][0], stored["commit"], stored["tree"]

    assert run("1", "clean") == ("a", "1", "clean")
    assert run("2", "clean") == ("a", "1", "clean")  # the same code in another commit
    assert run("3", "changed") == ("a", "1", "clean")  # elsewhere than in this code
    assert run("4", "changed", "b" * 16) == ("b", "4", "changed")
    assert run("5", "named by M2LGDG_COMMIT", "b" * 16) == ("b", "4", "changed")
    assert run("6", "clean", "b" * 16) == ("b", "6", "clean")
    assert run("unknown", "unknown", "c" * 16) == ("c", "unknown", "unknown")
    (tmp_path / "out" / "environment.json").write_text("[]")
    assert run("7", "clean") == ("a", "7", "clean")


def test_a_folder_of_an_earlier_version_keeps_its_versions(tmp_path):
    study = {"cohort": make_cohort("tiny", seed=1), "methods": ["prior"], "targets": ["east"]}
    run_study(study, tmp_path / "out")
    path = tmp_path / "out" / "environment.json"
    now = json.loads(path.read_text())
    before = {name: value for name, value in now.items() if name not in ("commit", "tree")} | {"pandas": "0.1"}
    path.write_text(json.dumps(before))
    assert run_study(study, tmp_path / "out").reused == 1
    assert json.loads(path.read_text()) == before | {"commit": now["commit"], "tree": "clean"}


def test_a_wrong_variable_leaves_no_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(m2lgdg.study.folder, "provenance", lambda: provenance(tmp_path))
    monkeypatch.setenv("M2LGDG_COMMIT", "main")
    with pytest.raises(InputError, match="M2LGDG_COMMIT"):
        run_study({"cohort": make_cohort("tiny", seed=1), "methods": ["prior"], "targets": ["east"]}, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_this_package_is_of_a_commit():
    """In a checkout of the package itself; without one there is nothing to compare with."""
    root = module.PACKAGE.parents[1]
    if not (root / ".git").exists() or shutil.which("git") is None:
        pytest.skip("the package does not run from a git checkout")
    assert provenance()["commit"] == git(root, "rev-parse", "HEAD").strip()
