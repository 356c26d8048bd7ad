"""A corpus of study files that cannot be run: `m2lgdg run` ends each in one sentence with its place, and makes no folder."""

import os
from pathlib import Path

import pytest

from m2lgdg import make_cohort
from m2lgdg.cli import main

GOOD = """cohort = "tiny.cohort"
methods = ["fc-logistic", "prior"]
"""
FIELDS = "[method.fc-logistic]\n"
DEEP = "[" * 5000
HUGE = "9" * 400

# name, text (or bytes), parts of the sentence; a text that begins with + goes below a good study.
CASES = [
    ("an empty file", "", ("key cohort is missing",)),
    ("no TOML", "cohort: tiny", ("not valid TOML", "line 1")),
    ("no text", b"cohort = '\xff\xfe'", ("study.toml", "cannot read")),
    ("UTF-16", GOOD.encode("utf-16"), ("study.toml",)),
    ("NUL", b"\x00" * 64, ("not valid TOML",)),
    ("a file cut in a string", GOOD[:-8], ("not valid TOML",)),
    ("nesting", f"+x = {DEEP}", ("study.toml",)),
    ("nesting that closes", f"+x = {DEEP}{']' * 5000}", ("study.toml",)),
    ("nested tables", f"+[{'.'.join(['a'] * 3000)}]\nb = 1", ("study.toml",)),
    ("a key twice", "+seeds = [0]\nseeds = [1]", ("not valid TOML",)),
    ("a table twice", f"+{FIELDS}{FIELDS}", ("not valid TOML",)),
    ("an unknown key", "+sedes = [0]", ("key sedes is not known; did you mean seeds?",)),
    ("an unknown key of 10,000 letters", f"+{'x' * 10_000} = 1", ("is not known",)),
    ("no methods", 'cohort = "tiny.cohort"', ("key methods is missing",)),
    ("an empty list of methods", 'cohort = "tiny.cohort"\nmethods = []', ("key methods", "at least 1 item")),
    ("a method that is a number", 'cohort = "tiny.cohort"\nmethods = [3]', ("key methods.0", "string")),
    ("an unknown method", 'cohort = "tiny.cohort"\nmethods = ["../evil"]', ("../evil is not known",)),
    ("a method twice", 'cohort = "tiny.cohort"\nmethods = ["prior", "prior"]', ("listed twice",)),
    ("a cohort that is a list", 'cohort = []\nmethods = ["prior"]', ("key cohort", "string")),
    ("a cohort of nobody", 'cohort = "none.cohort"\nmethods = ["prior"]', ("none.cohort", "does not exist")),
    ("a cohort with a NUL", 'cohort = "a\\u0000b"\nmethods = ["prior"]', ("a\\x00b does not exist",)),
    ("a cohort that is the study", 'cohort = "study.toml"\nmethods = ["prior"]', ("study.toml",)),
    ("a cohort of another hash", "+cohort_hash = 'abc'", ("tiny.cohort", "has changed since the study was run")),
    ("an unknown kind", "+kind = 'dicom'", ("dicom",)),
    ("an option of no reader", "+[options]\natlas = 'aal'", ("atlas",)),
    ("an option that is a list", "+[options]\natlas = ['aal']", ("key options.atlas",)),
    ("a target of nobody", "+targets = ['Atlantis']", ("Atlantis",)),
    ("no target", "+targets = []", ("target",)),
    ("a target twice", "+targets = ['east', 'east']", ("east", "twice")),
    ("seeds in words", "+seeds = ['one']", ("key seeds.0", "integer")),
    ("a seed below zero", "+seeds = [-1]", ("key seeds.0", "greater than or equal to 0")),
    ("a seed of 400 digits", f"+seeds = [{HUGE}]", ("key seeds.0",)),
    ("a seed of 10,000 digits", f"+seeds = [{'9' * 10_000}]", ("study.toml",)),
    ("a seed that is true", "+seeds = [true]", ("key seeds.0", "integer")),
    ("a seed that is NaN", "+seeds = [nan]", ("key seeds.0", "integer")),
    ("an input of nobody", "+inputs = ['height']", ("height",)),
    ("inputs that are a word", "+inputs = 'age'", ("key inputs", "list")),
    ("an input twice", "+inputs = ['age', 'age']", ("age", "twice")),
    ("threads below one", "+threads = 0", ("key threads",)),
    ("threads without end", f"+threads = {HUGE}", ("key threads",)),
    ("a device of nobody", 'cohort = "tiny.cohort"\nmethods = ["erm"]\ndevice = "tpu"', ("tpu",)),
    ("no plugin", "+plugins = ['none.py']", ("none.py is not a Python file",)),
    ("a plugin that is a folder", "+plugins = ['.']", ("is not a Python file",)),
    ("a plugin that is no Python", "+plugins = ['tiny.cohort']", ("tiny.cohort",)),
    ("a plugin that exits", "+plugins = ['exits.py']", ("exits.py cannot be imported", "SystemExit")),
    ("a section of no method", "+[method.fc-svm]\nsite_folds = 3", ("[method.fc-svm]", "not one of the study's methods")),
    ("a section that is a number", "+[method]\nfc-logistic = 3", ("key method.fc-logistic", "dictionary")),
    ("a field of nobody", f"+{FIELDS}colour = 1", ("no field colour",)),
    ("a field in words", f"+{FIELDS}site_folds = 'x'", ("field site_folds: 'x' is not of type int",)),
    ("a field of none", f"+{FIELDS}site_folds = 0", ("field site_folds: 0 is too small",)),
    ("a field that is NaN", f"+{FIELDS}penalties = [nan]", ("penalties", "not a finite number")),
    ("a field of 400 digits", f"+{FIELDS}penalties = [{HUGE}]", ("penalties",)),
    ("a field that is a date", f"+{FIELDS}site_folds = 2020-01-01", ("site_folds", "not of type int")),
    ("a variant of nobody", f"+{FIELDS}variant = 'x'", ("no variant x",)),
    ("a variant that is a list", f"+{FIELDS}variant = [1]", ("no variant",)),
    ("variants of no method", "+variants = ['x']", ("variant x",)),
    ("a sweep of no field", "+[sweep.prior]\nx = [1]", ("no field x",)),
    ("a sweep that is no list", "+[sweep.fc-logistic]\nsite_folds = 3", ("key sweep.fc-logistic.site_folds", "list")),
    ("a sweep in words", "+[sweep.fc-logistic]\nsite_folds = ['x']", ("site_folds",)),
    ("a sweep that cannot be", "+[sweep.fc-logistic]\nsite_folds = [0]", ("site_folds: 0 is too small",)),
    ("explain of nobody", "+explain = ['fc-svm']", ("key explain: fc-svm", "--set explain=[] drops all")),
    ("explain in no steps", "+explain = true\nexplain_steps = 0", ("key explain_steps",)),
    ("a name that is a list", "+name = []", ("key name", "string")),
    ("a study of 20 MB", GOOD + "# " + "x" * 20_000_000, ("study.toml has", "more than")),
]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_cohort("tiny", seed=1).save("tiny.cohort")
    Path("exits.py").write_text("raise SystemExit(0)")


def ended(monkeypatch, capsys, *words):
    monkeypatch.setattr("sys.argv", ["m2lgdg", *map(str, words)])
    with pytest.raises(SystemExit) as stop:
        main()
    return stop.value.code, capsys.readouterr().err


def sentence(code, err):
    assert code == 2, err
    assert err.startswith("m2lgdg: ") and err.count("\n") == 1 and "Traceback" not in err, err
    assert len(err) < 1500
    return err


@pytest.mark.parametrize(("name", "text", "says"), CASES, ids=[case[0].replace(" ", "-") for case in CASES])
def test_a_bad_study_ends_in_a_sentence(name, text, says, monkeypatch, capsys):
    content = text if isinstance(text, bytes) else (GOOD + text[1:] if text.startswith("+") else text).encode()
    Path("study.toml").write_bytes(content)
    said = sentence(*ended(monkeypatch, capsys, "run", "study.toml", "--out", "new/out"))
    for part in says:
        assert part in said
    assert not Path("new").exists()


@pytest.mark.parametrize("text", ["", "[]", "3", '{"cohort": NaN}', "[" * 100_000, '{"cohort": 1, "cohort": 2', "\ufeff{}"])
def test_a_bad_study_json_ends_in_a_sentence(text, monkeypatch, capsys):
    Path("study.json").write_text(text)
    assert "study.json" in sentence(*ended(monkeypatch, capsys, "run", "study.json", "--out", "new"))
    assert not Path("new").exists()


def test_a_study_that_is_no_file(monkeypatch, capsys):
    os.mkfifo("pipe.toml")
    Path("folder.toml").mkdir()
    Path("zero.toml").symlink_to("/dev/zero")
    for name, part in (("none", "does not exist"), ("pipe", "regular file"), ("folder", "a folder"), ("zero", "regular file")):
        said = sentence(*ended(monkeypatch, capsys, "run", f"{name}.toml", "--out", "new"))
        assert part in said and f"{name}.toml" in said


@pytest.mark.parametrize("change", ["seeds", "=3", "seeds.x=1", "seeds=" + "[" * 5000, f"threads={HUGE}", "a.b.c=1"])
def test_a_bad_set_ends_in_a_sentence(change, monkeypatch, capsys):
    Path("study.toml").write_text(GOOD + "seeds = [0]\n")
    sentence(*ended(monkeypatch, capsys, "run", "study.toml", "--out", "new", "--set", change))
    assert not Path("new").exists()
