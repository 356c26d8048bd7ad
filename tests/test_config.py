"""Study files: messages name what is wrong, where, and the nearest valid key."""

import pytest

from m2lgdg import InputError
from m2lgdg.study.config import check_study, read_study, with_only

GOOD = """
cohort = "c.cohort"
methods = ["fc-logistic", "prior"]
"""


def write(tmp_path, text):
    path = tmp_path / "study.toml"
    path.write_text(text)
    return path


def test_defaults_and_paths_relative_to_the_file(tmp_path):
    study = read_study(write(tmp_path, GOOD))
    assert study.seeds == [0, 1, 2, 3, 4]
    assert study.targets is None
    assert study.cohort == str(tmp_path / "c.cohort")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("methods = ['prior']", "key cohort is missing"),
        (GOOD + "sedes = [1]", "key sedes is not known; did you mean seeds?"),
        (GOOD + "seeds = '1'", "key seeds: input should be a valid list (it is '1')"),
        (GOOD + "seeds = [1.5]", "key seeds.0: input should be a valid integer (it is 1.5)"),
        (GOOD + "seeds = []", "key seeds: list should have at least 1 item"),
        (GOOD + "seeds = [1, 1]", "a method or seed is listed twice"),
        (GOOD.replace("fc-logistic", "fc-logistics"), "method fc-logistics is not known; did you mean fc-logistic?"),
        (GOOD + "[method.fc-logistic]\nsite_fold = 3", "method fc-logistic has no field site_fold; did you mean site_folds?"),
        (GOOD + "[method.fc-logistic]\nsite_folds = 'x'", "field site_folds: 'x' is not of type int"),
        (GOOD + "[method.fc-logistic]\npenalties = [1, 'x']", "field penalties: (1, 'x') is not of type tuple"),
        (GOOD + "[method.fc-svm]\nsite_folds = 3", "[method.fc-svm]: fc-svm is not one of the study's methods"),
        (
            GOOD + "[method.fc-logistic]\nvariant = 'phenotype'",
            "method fc-logistic has no variant phenotype; did you mean phenotypes?",
        ),
        (GOOD + "[sweep.prior]\nx = [1]", "method prior has no field x"),
        (GOOD + "variants = ['phenotype']", "no method of the study has a variant phenotype; did you mean phenotypes?"),
        (GOOD + "[variants]\nprior = ['x']", "method prior has no variant x"),
        (GOOD + "[sweep.fc-logistic]\nsite_folds = [3, 3]", "key sweep.fc-logistic.site_folds: 3 is listed twice"),
        (GOOD + "[variants]\nfc-logistic = ['phenotypes', 'phenotypes']", "variants.fc-logistic: phenotypes is listed twice"),
        (GOOD + "main = 'fc-logistics'", "key main: fc-logistics is not one of the study's methods; did you mean fc-logistic?"),
        (GOOD + "threads = 0", "key threads: input should be greater than or equal to 1"),
        (GOOD + "seeds = [", "is not valid TOML"),
        (GOOD + "plugins = ['nothing.py']", "nothing.py is not a Python file"),
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
    with pytest.raises(InputError, match=r"is a folder; a study is a TOML file with cohort and methods\."):
        read_study(tmp_path)
    (tmp_path / "study.json").write_text("{}")
    with pytest.raises(InputError, match=r"is a folder; to repeat its study, give .*study\.json\."):
        read_study(tmp_path)
