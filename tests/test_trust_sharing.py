"""Shared copies have no folder of any path, whatever it is called; a lab's own report keeps its small groups."""

import base64
import dataclasses
import json
import re
import zlib

import numpy as np
import pytest

from m2lgdg import InputError, make_cohort, run_study
from m2lgdg.findings import Exclusion
from m2lgdg.report.page import write_report
from m2lgdg.report.paths import file_name, has_path, starts_path, without_paths
from m2lgdg.report.sharing import share_study

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
    "1/2 of {}\nsecond line",
]


@pytest.mark.parametrize("sentence", SENTENCES)
@pytest.mark.parametrize("path", PATHS)
def test_no_part_of_a_folder_is_left(path, sentence):
    text = sentence.format(path)
    assert has_path(text)
    assert not re.search("Zephyrine|Quux", without_paths(text)), without_paths(text)
    assert "second line" in without_paths(text) or "second line" not in text


@pytest.mark.parametrize("text", ["1/2 of 0.1/0.2", "n/a", "sex and/or age", "about ~5 mm", "file: none", "a: b", "mean ± sd"])
def test_other_text_stays(text):
    assert without_paths(text) == text
    assert not has_path(text) and not starts_path(text)


def test_of_a_path_the_name_of_a_file_may_stay():
    assert without_paths("cannot read /srv/x y/a.tar.gz: empty") == "cannot read a.tar.gz: empty"
    assert without_paths("/srv/x y/sub-01.npy: subject S1: NaN.") == "sub-01.npy: subject S1: NaN."
    assert without_paths("no room in /srv/j.smith") == "no room in [path]"
    assert file_name(rf"D:\{PERSON}\x.cohort") == file_name(f"/mnt/{PERSON}/x.cohort") == "x.cohort"
    assert file_name(f"/mnt/{PERSON}") == file_name(rf"\\host\{PERSON}") == "folder"


PLUGIN = """
from m2lgdg.method import Method, method

@method("teller")
class Teller(Method):
    \"\"\"Fails with a path.\"\"\"

    place: str = {place!r}

    def learn(self, source, *, seed, device, progress):
        raise OSError({message!r})
"""


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """A study in a folder named after a person, with paths in its name, notes, fields, exclusions and failures."""
    folder = tmp_path_factory.mktemp("lab") / PERSON
    folder.mkdir()
    cohort = make_cohort("tiny", seed=1)
    gone = tuple(Exclusion.from_reason(f"gone{i}", "north", f"{path}: subject gone{i}: NaN.") for i, path in enumerate(PATHS))
    notes = tuple(f"label from {path}" for path in PATHS)
    cohort = dataclasses.replace(cohort, excluded=gone, notes=notes, atlas=f"/mnt/{PERSON}/atlas", truth=None)
    cohort.save(folder / "tiny.cohort")
    (folder / "teller.py").write_text(PLUGIN.format(place=PATHS[3], message=f"cannot open {PATHS[0]} and {PATHS[4]}"))
    settings = {"name": f"study of {PATHS[5]}", "cohort": str(folder / "tiny.cohort"), "plugins": [str(folder / "teller.py")]}
    chosen = {"methods": ["fc-logistic", "phenotype-logistic", "erm", "teller"], "seeds": [0], "explain": ["fc-logistic"]}
    fields = {"method": {"erm": {"variant": "small", "epochs": 1, "warmup": 1}}}
    run_study(settings | chosen | fields, folder / "out")
    return folder / "out"


def contents_of(folder):
    """(path, bytes) of every file, with what is packed in it: base64, text chunks of PNG, streams of PDF."""
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        content = path.read_bytes()
        yield path, content
        for packed in re.findall(rb"base64,([A-Za-z0-9+/=]{8,})", content):
            yield path, base64.b64decode(packed)
        for match in re.finditer(rb"\x78[\x01\x9c\xda]", content):
            try:
                yield path, zlib.decompressobj().decompress(content[match.start() :])
            except zlib.error:
                continue


def assert_no_person(folder):
    for path, content in contents_of(folder):
        assert not re.search(rb"Zephyrine|Quux|/mnt/|\\\\server", content), path


def test_a_shared_copy_and_its_report_name_nobody(study, tmp_path):
    files = share_study(study, tmp_path / "copy")
    assert_no_person(tmp_path / "copy")
    assert {".csv", ".json", ".jsonl"} <= {file.suffix for file in files}
    about = json.loads((tmp_path / "copy" / "study.json").read_text())
    assert (about["cohort"], about["plugins"]) == ("tiny.cohort", ["teller.py"])
    write_report(tmp_path / "copy", three_d=True)
    kinds = {path.suffix for path, _ in contents_of(tmp_path / "copy")}
    assert {".html", ".md", ".tex", ".csv", ".json", ".svg", ".png"} <= kinds
    assert_no_person(tmp_path / "copy")


def test_a_report_for_sharing_names_nobody(study, tmp_path):
    write_report(study, share=tmp_path / "given", three_d=True)
    assert_no_person(tmp_path / "given")


@pytest.mark.parametrize("site", [f"/mnt/{PERSON}", rf"\\server\{PERSON}", f"D:/{PERSON}", "~Zephyrine_Quux"])
def test_a_site_that_is_a_path_is_refused_and_nothing_is_written(site, study, tmp_path):
    for path in study.glob("*.*"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    predictions = (tmp_path / "predictions.csv").read_text().replace(",north,", f",{site},")
    (tmp_path / "predictions.csv").write_text(predictions)
    for attempt in (lambda: share_study(tmp_path, tmp_path / "a"), lambda: write_report(tmp_path, share=tmp_path / "b")):
        with pytest.raises(InputError, match="contains a path and cannot be shared"):
            attempt()
    assert not (tmp_path / "a").exists() and not (tmp_path / "b").exists()


def test_a_site_with_a_slash_is_shared_by_its_name(tmp_path):
    cohort = make_cohort("tiny", seed=1)
    cohort = dataclasses.replace(cohort, sites=np.where(cohort.sites == "east", "A/B", cohort.sites), truth=None)
    cohort.save(tmp_path / "tiny.cohort")
    study = {"cohort": str(tmp_path / "tiny.cohort"), "methods": ["fc-svm"], "targets": ["A/B"], "seeds": [0]}
    run_study(study, tmp_path / "out")
    share_study(tmp_path / "out", tmp_path / "copy")
    assert json.loads((tmp_path / "copy" / "study.json").read_text())["targets"] == ["A/B"]
    assert "A/B" in (tmp_path / "copy" / "inclusion.csv").read_text()


def test_small_groups_are_hidden_only_where_the_report_is_shared(study, tmp_path):
    write_report(study)
    write_report(study, share=tmp_path / "given")
    name = "Subgroups*fc-logistic*.csv"
    own, shared = (next((folder / "tables").glob(name)).read_text() for folder in (study, tmp_path / "given"))
    assert "withheld" not in own and "<10" not in own
    assert "withheld" in shared or "<10" in shared
