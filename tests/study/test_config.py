"""Study files: messages name what is wrong, where, and the nearest valid key; `m2lgdg run` then makes no folder."""

import os
from pathlib import Path

import pytest

from m2lgdg import InputError, make_cohort, run_study
from m2lgdg.study.config import check_study, read_study, with_only

GOOD = """
cohort = "c.cohort"
methods = ["fc-logistic", "prior"]
"""


def write(tmp_path, text):
    path = tmp_path / "study.toml"
    path.write_text(text)
    return path


def test_a_misspelt_key_of_methods_and_a_misspelt_phenotype_get_a_suggestion(tiny, tmp_path):
    with pytest.raises(InputError, match=r"key method is for the fields of a method, .*did you mean methods\?"):
        check_study({"cohort": "c", "method": ["fc-logistic"]}, "s")
    with pytest.raises(InputError, match=r"key inputs: agee is not a phenotype of cohort tiny; did you mean age\?"):
        run_study({"cohort": tiny, "methods": ["prior"], "inputs": ["agee"]}, tmp_path / "out")


def test_a_sweep_value_cannot_move_rows_to_the_other_track():
    with pytest.raises(InputError, match=r"\[sweep\.fc-logistic\]: .*, adapted is the name of rows of the adapted track"):
        check_study({"cohort": "c", "methods": ["fc-logistic"], "sweep": {"fc-logistic": {"atlases": ["x, adapted"]}}}, "s")


def test_defaults_and_paths_relative_to_the_file(tmp_path):
    study = read_study(write(tmp_path, GOOD))
    assert study.seeds == [0, 1, 2, 3, 4]
    assert study.targets is None
    assert study.cohort == str(tmp_path / "c.cohort")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (GOOD + "seeds = '1'", "key seeds: input should be a valid list (it is '1')"),
        (GOOD + "seeds = [1.5]", "key seeds.0: input should be a valid integer (it is 1.5)"),
        (GOOD + "seeds = [1, 1]", "a method or seed is listed twice"),
        (GOOD.replace("fc-logistic", "fc-logistics"), "method fc-logistics is not known; did you mean fc-logistic?"),
        (GOOD + "[method.fc-logistic]\nsite_fold = 3", "method fc-logistic has no field site_fold; did you mean site_folds?"),
        (GOOD + "[method.fc-logistic]\npenalties = [1, 'x']", "field penalties: (1, 'x') is not of type tuple"),
        (GOOD + "[method.fc-svm]\nsite_folds = 3", "[method.fc-svm]: fc-svm is not one of the study's methods"),
        (
            GOOD + "[method.fc-logistic]\nvariant = 'phenotype'",
            "method fc-logistic has no variant phenotype; did you mean phenotypes?",
        ),
        (GOOD + "variants = ['phenotype']", "no method of the study has a variant phenotype; did you mean phenotypes?"),
        (GOOD + "[variants]\nprior = ['x']", "method prior has no variant x"),
        (GOOD + "[sweep.fc-logistic]\nsite_folds = [3, 3]", "key sweep.fc-logistic.site_folds: 3 is listed twice"),
        (GOOD + "[variants]\nfc-logistic = ['phenotypes', 'phenotypes']", "variants.fc-logistic: phenotypes is listed twice"),
        (GOOD + "main = 'fc-logistics'", "key main: fc-logistics is not one of the study's methods; did you mean fc-logistic?"),
    ],
)
def test_mistakes_are_named(tmp_path, text, words):
    with pytest.raises(InputError) as caught:
        read_study(write(tmp_path, text))
    assert words in str(caught.value)
    assert "study.toml" in str(caught.value) or "plugin" in str(caught.value)


FULL = """
variants = ["phenotypes", "M1"]
explain = ["m2lgdg", "fc-logistic"]

[method.m2lgdg]
precision = "bf16"

[method.fc-logistic]
site_folds = 4

[sweep.m2lgdg]
dropout = [0.2]
"""


def test_only_some_methods_keep_what_the_study_says_of_them(tmp_path):
    text = GOOD.replace('"prior"', '"prior", "m2lgdg"') + FULL
    whole = read_study(write(tmp_path, text))
    linear = with_only(whole, ["prior", "fc-logistic"])
    assert linear.methods == ["fc-logistic", "prior"]  # in the order of the study
    assert (linear.method, linear.sweep) == ({"fc-logistic": {"site_folds": 4}}, {})
    assert (linear.variants, linear.explain) == (["phenotypes"], ["fc-logistic"])
    deep = with_only(whole, ["m2lgdg"])
    assert (deep.method, deep.sweep) == ({"m2lgdg": {"precision": "bf16"}}, {"m2lgdg": {"dropout": [0.2]}})
    assert (deep.variants, deep.explain) == (["M1"], ["m2lgdg"])
    for study in (linear, deep):  # what is left is a study that can be read again
        assert check_study(study.model_dump(), "x").methods == study.methods
    by_method = read_study(write(tmp_path, GOOD + "explain = true\n[variants]\nfc-logistic = ['phenotypes']\n"))
    assert with_only(by_method, ["prior"]).variants == {}
    assert with_only(by_method, ["fc-logistic"]).variants == {"fc-logistic": ["phenotypes"]}
    assert with_only(by_method, ["prior"]).explain is True
    with pytest.raises(InputError, match=r"--method fc-logistics: .*; did you mean fc-logistic\?"):
        with_only(whole, ["prior", "fc-logistics"])


def test_set_changes_one_key(tmp_path):
    path = write(tmp_path, GOOD)
    study = read_study(path, ["seeds=[7]", "method.fc-logistic.site_folds=3", "name=mine", "targets=['NYU']"])
    assert (study.seeds, study.method, study.name, study.targets) == ([7], {"fc-logistic": {"site_folds": 3}}, "mine", ["NYU"])
    with pytest.raises(InputError, match="--set seeds: expected key=value"):
        read_study(path, ["seeds"])
    with pytest.raises(InputError, match="key sedes is not known"):
        read_study(path, ["sedes=[1]"])


def test_a_method_may_begin_with_a_variant(tmp_path):
    study = read_study(write(tmp_path, GOOD + "[method.fc-logistic]\nsite_folds = 3\nvariant = 'phenotypes'"))
    assert study.method == {"fc-logistic": {"phenotypes": True, "site_folds": 3}}


def test_a_broken_plugin_is_told(tmp_path):
    (tmp_path / "broken_plugin.py").write_text("1 / 0")
    with pytest.raises(InputError, match=r"broken_plugin\.py cannot be imported \(ZeroDivisionError"):
        read_study(write(tmp_path, GOOD + "plugins = ['broken_plugin.py']"))


def test_atlases_of_a_study_are_those_of_the_methods_that_use_them():
    study = {
        "cohort": "x.cohort",
        "methods": ["fc-adaptive", "erm", "mida"],
        "atlases": "all",
        "method": {"erm": {"atlases": "ho"}},
    }
    fields = check_study(study, "study").method
    assert {name: fields.get(name, {}).get("atlases") for name in study["methods"]} == {
        "fc-adaptive": "all",
        "erm": "ho",
        "mida": None,
    }


def test_a_misspelt_key_of_a_study(tmp_path):
    study = tmp_path / "study.toml"
    study.write_text('cohort = "a.cohort"\nmetods = ["fc-svm"]')
    with pytest.raises(InputError, match=r"study\.toml: key metods is not known; did you mean methods\?"):
        read_study(study)
    study.write_text('cohort = "a.cohort"')
    with pytest.raises(InputError, match=r"study\.toml: key methods is missing\."):
        read_study(study)


def test_a_folder_in_place_of_a_study(tmp_path):
    with pytest.raises(InputError, match=r"is a folder; m2lgdg convert .* writes a file that can be run\."):
        read_study(tmp_path)
    (tmp_path / "study.json").write_text("{}")
    with pytest.raises(InputError, match=r"is a folder; to repeat its study, give .*study\.json\."):
        read_study(tmp_path)


RUNNABLE = """cohort = "tiny.cohort"
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
    ("UTF-16", RUNNABLE.encode("utf-16"), ("study.toml",)),
    ("NUL", b"\x00" * 64, ("not valid TOML",)),
    ("a file cut in a string", RUNNABLE[:-8], ("not valid TOML",)),
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
    ("a study of 20 MB", RUNNABLE + "# " + "x" * 20_000_000, ("study.toml has", "more than")),
]


@pytest.fixture
def run(tmp_path, monkeypatch, typed, tiny):
    """Runs a study file beside a cohort, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    tiny.save("tiny.cohort")
    Path("exits.py").write_text("raise SystemExit(0)")
    return lambda *words: sentence(*typed("run", *words))


def sentence(code, _, err):
    assert code == 2, err
    assert err.startswith("m2lgdg: ") and err.count("\n") == 1 and "Traceback" not in err, err
    assert len(err) < 1500
    return err


@pytest.mark.parametrize(("name", "text", "says"), CASES, ids=[case[0].replace(" ", "-") for case in CASES])
def test_a_bad_study_ends_in_a_sentence(name, text, says, run):
    content = text if isinstance(text, bytes) else (RUNNABLE + text[1:] if text.startswith("+") else text).encode()
    Path("study.toml").write_bytes(content)
    said = run("study.toml", "--out", "new/out")
    for part in says:
        assert part in said
    assert not Path("new").exists()


@pytest.mark.parametrize("text", ["", "[]", "3", '{"cohort": NaN}', "[" * 100_000, '{"cohort": 1, "cohort": 2', "\ufeff{}"])
def test_a_bad_study_json_ends_in_a_sentence(text, run):
    Path("study.json").write_text(text)
    assert "study.json" in run("study.json", "--out", "new")
    assert not Path("new").exists()


def test_a_study_that_is_no_file(run):
    os.mkfifo("pipe.toml")
    Path("folder.toml").mkdir()
    Path("zero.toml").symlink_to("/dev/zero")
    for name, part in (("none", "does not exist"), ("pipe", "regular file"), ("folder", "a folder"), ("zero", "regular file")):
        said = run(f"{name}.toml", "--out", "new")
        assert part in said and f"{name}.toml" in said


@pytest.mark.parametrize("change", ["seeds", "=3", "seeds.x=1", "seeds=" + "[" * 5000, f"threads={HUGE}", "a.b.c=1"])
def test_a_bad_set_ends_in_a_sentence(change, run):
    Path("study.toml").write_text(RUNNABLE + "seeds = [0]\n")
    run("study.toml", "--out", "new", "--set", change)
    assert not Path("new").exists()


def test_a_cohort_file_is_the_study_of_the_default_and_its_peers(tmp_path):
    make_cohort("tiny").save(tmp_path / "lab.cohort")
    study = read_study(tmp_path / "lab.cohort", ["seeds=[1]"])
    assert study.methods == ["prior", "phenotype-logistic", "fc-logistic", "connectome-adaptive"]
    assert study.main == "connectome-adaptive"
    assert (study.name, study.seeds, Path(study.cohort)) == ("lab", [1], tmp_path / "lab.cohort")
    with pytest.raises(InputError, match="gone"):
        read_study(tmp_path / "gone.cohort")
