"""The commits that committed results name: the hash of their files, and the key of every cell, computed again from git."""

import hashlib
import json
import shutil
import subprocess
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).parents[1]
LIBRARIES = ("torch", "numpy", "scipy", "scikit-learn")
# Folders beside the root whose files the hash of the code has covered, in the order in which they were added.
COVERED = [("methods", "fast"), ("model",), ("sklearn_bridge",), ("study",)]
FOLDERS = sorted(path.parent for path in (ROOT / "results").glob("*/*/environment.json"))
VERSIONS = {folder: json.loads((folder / "environment.json").read_text()) for folder in FOLDERS}


def git(*words, given=""):
    return subprocess.run(["git", "-C", str(ROOT), *words], input=given.encode(), capture_output=True, check=True).stdout


def digest(content):
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


@pytest.fixture(scope="module")
def files():
    """(path in the package, hash of its content) of all modules of a commit."""
    if not (ROOT / ".git").exists() or shutil.which("git") is None or git("rev-parse", "--is-shallow-repository") != b"false\n":
        pytest.skip("this is not a clone with the history")
    known = {}

    def of(commit):
        if commit not in known:
            listed = git("ls-tree", "-r", "--full-tree", commit, "src/m2lgdg").decode().splitlines()
            blobs = {line.split("\t")[1]: line.split()[2] for line in listed if line.endswith(".py")}
            contents = git("cat-file", "--batch", given="\n".join(blobs.values()))
            known[commit] = []
            for path in blobs:  # each is its header, its bytes and a line end
                header, _, contents = contents.partition(b"\n")
                size = int(header.split()[2])
                place = PurePosixPath(path).relative_to("src/m2lgdg")
                known[commit].append((place, hashlib.sha256(contents[:size]).hexdigest()))
                contents = contents[size + 1 :]
            known[commit].sort()
        return known[commit]

    return of


def hashes_of(modules, versions):
    """Hash of the code by each rule that there has been, without plugins."""
    found, covered = [], ()
    for more in COVERED:
        covered += more
        counted = [(place.name, one) for place, one in modules if len(place.parts) == 1 or place.parts[0] in covered]
        found.append(digest([*counted, *(f"{name} {versions[name]}" for name in LIBRARIES)]))
    return found


def swept(study, method):
    """Fields of each value of a sweep by the name of its variant."""
    for key, values in study.get("sweep", {}).get(method, {}).items():
        for value in values:
            yield f"{key}={'+'.join(value) if isinstance(value, list) else value}", {key: value}


def keys(study, declared, record, code, explaining):
    """Keys that a record can have: on either device, explained or not; the folder does not tell what `auto` was."""
    method, variant = record["method"], record["variant"]
    changes = declared.get(method, {}).get("variants", {}) | dict(swept(study, method))
    usual = study["method"][method]
    changed = changes[variant] if variant else {}  # a whole number in the study file can be a field with decimals
    fields = usual | {key: float(value) if isinstance(usual[key], float) else value for key, value in changed.items()}
    explained = [study.get("explain_steps"), *([study["explain_of"]] if "explain_of" in study else []), explaining]
    tracks = study.get("track", study.get("tracks", []))
    adapted = [["adapted", study["adapt_subjects"]]] if "adapted" in tracks else []
    for device in ("cpu", "cuda"):
        for extra in (adapted, [*explained, *adapted]):
            common = [study["cohort_hash"], device, study["threads"], code]
            content = json.dumps([method, fields, record["target"], record["seed"], *common, *extra], sort_keys=True)
            yield hashlib.sha256(content.encode()).hexdigest()[:24]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: str(folder.relative_to(ROOT / "results")))
def test_results_are_of_the_commit_that_they_name(folder, files):
    versions = VERSIONS[folder]
    assert versions["tree"] != "changed"
    study = json.loads((folder / "study.json").read_text())
    assert not study.get("plugins")  # whose files no commit has
    assert git("merge-base", versions["commit"], "HEAD").decode().strip() == versions["commit"]  # a reader has it
    modules = files(versions["commit"])
    assert versions["code"] in hashes_of(modules, versions)
    explaining = digest([(place.name, one) for place, one in modules if place.parts[0] == "explain"])
    declared = json.loads((folder / "methods.json").read_text())
    records = [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]
    assert records
    for record in records:
        named = (record["method"], record["variant"], record["target"], record["seed"])
        assert record["key"] in keys(study, declared, record, versions["code"], explaining), named


def test_another_commit_or_version_is_found_out(files):
    """The oracle tells commits apart: that of one folder is not that of the next code, nor of other libraries."""
    folder = FOLDERS[0]
    versions = VERSIONS[folder]
    modules = files(versions["commit"])
    assert versions["code"] not in hashes_of(modules[1:], versions)
    assert versions["code"] not in hashes_of(modules, versions | {"numpy": "0.1"})
