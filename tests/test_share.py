"""Results given away: tables and report from a committed copy, where no cohort is, telling nothing of the first."""

import json
import re
import shutil
import sys

import pytest

from m2lgdg import InputError, make_cohort, run_study
from m2lgdg.cli import main
from m2lgdg.report.contents import read_contents
from m2lgdg.report.paths import without_paths
from m2lgdg.report.sharing import share_study
from m2lgdg.study.description import NOT_CHECKED

LOST = '''
from m2lgdg.method import Method, method

@method("lost-file")
class LostFile(Method):
    """Fails at each target with a path in its message."""
    def learn(self, source, *, seed, device, progress):
        open("/secret/place/of mine/weights.bin")
    def score(self, target):
        return []
'''


def said(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["m2lgdg", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        main()
    streams = capsys.readouterr()
    assert not ended.value.code, streams.err
    return streams.out


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """A study with an explained linear method, a small network and a method that fails; the cohort in another folder."""
    here = tmp_path_factory.mktemp("machine")
    make_cohort("tiny", seed=1).save(here / "data" / "tiny.cohort")
    (here / "lost.py").write_text(LOST)
    study = {"cohort": str(here / "data" / "tiny.cohort"), "methods": ["fc-logistic", "erm", "lost-file"], "seeds": [0]}
    study |= {"targets": ["east", "west"], "explain": ["fc-logistic"], "plugins": [str(here / "lost.py")]}
    run_study(study | {"method": {"erm": {"variant": "small", "epochs": 3, "warmup": 1}}}, here / "deep" / "out")
    return here


def test_a_copy_gives_the_same_tables_and_a_report_without_the_cohort(ran, tmp_path, monkeypatch, capsys):
    before = said(monkeypatch, capsys, "table", ran / "deep" / "out")
    assert "fc-logistic" in before and "erm (variant" not in before
    share_study(ran / "deep" / "out", tmp_path / "copy")
    assert said(monkeypatch, capsys, "table", tmp_path / "copy") == before
    original, copy = read_contents(ran / "deep" / "out"), read_contents(tmp_path / "copy")
    assert original.cohort is not None and copy.cohort is None
    assert [one["learned"] for one in copy.records] == [one["learned"] for one in original.records]
    assert [one["seconds"] for one in copy.records] == [one["seconds"] for one in original.records]
    assert len(copy.explanations["fc-logistic"]) == 2
    said(monkeypatch, capsys, "report", tmp_path / "copy")
    page = (tmp_path / "copy" / "report.html").read_text()
    for title in ("Training curves", "Explanations: fc-logistic", "Leakage checks"):
        assert title in page
    assert "Subgroups" not in page  # they need the cohort


def test_a_copy_tells_nothing_of_the_machine(ran, tmp_path, monkeypatch, capsys):
    files = share_study(ran / "deep" / "out", tmp_path / "copy")
    said(monkeypatch, capsys, "report", tmp_path / "copy")
    names = {path.name for path in files if path.parent == tmp_path / "copy"}
    tables, texts = (
        {"predictions.csv", "inclusion.csv", "failures.csv"},
        {"study.json", "methods.json", "environment.json", "checks.json"},
    )
    assert names == tables | texts | {"records.jsonl", "cohort.json", "connectomes.safetensors"}
    for path in (tmp_path / "copy").rglob("*"):
        text = path.read_bytes().decode(errors="replace") if path.is_file() else ""
        assert not re.search(rf"{re.escape(str(ran))}|{ran.name}|/secret|Traceback", text), path
    study = json.loads((tmp_path / "copy" / "study.json").read_text())
    assert (study["cohort"], study["plugins"]) == ("tiny.cohort", ["lost.py"])
    assert "No such file or directory" in (tmp_path / "copy" / "failures.csv").read_text()


def test_a_copy_can_be_repeated_where_the_cohort_is(ran, tmp_path):
    share_study(ran / "deep" / "out", tmp_path / "copy")
    for name in ("data/tiny.cohort", "lost.py"):
        shutil.copy(ran / name, tmp_path / "copy")
    run_study(tmp_path / "copy" / "study.json", tmp_path / "again")
    again = (tmp_path / "again" / "predictions.csv").read_bytes()
    assert again == (tmp_path / "copy" / "predictions.csv").read_bytes()


def test_predictions_and_study_alone_are_enough(ran, tmp_path, monkeypatch, capsys):
    before = said(monkeypatch, capsys, "table", ran / "deep" / "out")
    for name in ("predictions.csv", "study.json"):
        shutil.copy(ran / "deep" / "out" / name, tmp_path)
    findings, unknown = "Data: 4 findings; m2lgdg report lists them.", f"Data: {NOT_CHECKED}"
    assert findings in before
    assert said(monkeypatch, capsys, "table", tmp_path) == before.replace(findings, unknown)
    said(monkeypatch, capsys, "report", tmp_path)
    assert "fc-logistic" in (tmp_path / "report.html").read_text()


def test_nothing_is_written_over(ran, tmp_path):
    (tmp_path / "mine.txt").write_text("kept")
    with pytest.raises(InputError, match="already exists"):
        share_study(ran / "deep" / "out", tmp_path)
    with pytest.raises(InputError, match="not a study folder"):
        share_study(tmp_path, tmp_path / "copy")


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("cannot read /home/me/lab/a.csv: no", "cannot read a.csv: no"),
        ("No such file: '/home/jane doe/secret/x.py'", "No such file: 'x.py'"),
        ("cannot read /home/jane doe/secret/x.py.", "cannot read x.py."),
        ("no room in '/home/jane'", "no room in '[path]"),
        ("C:\\Users\\jane doe\\x.py or /Users/jane", "[path]"),
        ("'~/lab/a.mat' and (/srv/x/b.mat)", "'b.mat)"),
        (r"C:\Users\me\a.csv", "a.csv"),
        ("1/2 of and/or 0.1/0.2, /root is no file", "1/2 of and/or 0.1/0.2, [path]"),
    ],
)
def test_folders_are_taken_out_of_sentences(text, left):
    assert without_paths(text) == left
