"""Honest mistakes that leak from one target to another are found: state kept in a process, in attributes and on disk."""

import functools
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from m2lgdg import InputError, make_cohort
from m2lgdg.cohort import Cohort, is_proxy
from m2lgdg.data.leakage import leakage_checks
from m2lgdg.study.audit import LIMITS, NO_OTHERS, Audited, _after_others, _other_targets, audit
from m2lgdg.study.audit_watch import digest, is_of_library
from m2lgdg.study.checks import failed_checks
from m2lgdg.study.plan import Cell

PROXIES = "no label proxy among the inputs"
PLUGIN = '''
import functools
import gc
import os
import subprocess
import tempfile
from pathlib import Path
import numpy as np
from m2lgdg.cohort import Cohort
from m2lgdg.connectivity import fc_features
from m2lgdg.method import Method, method

BESIDE = Path(__file__).parent
TABLE = np.load(BESIDE / "table.npy")  # read at import: a part of the plugin


def whole():
    """The cohort with the target in it, found in memory."""
    return max((one for one in gc.get_objects() if type(one) is Cohort), key=len)


def strongest(source):
    features = fc_features(source.series)
    difference = features[source.labels == 1].mean(0) - features[source.labels == 0].mean(0)
    return np.argsort(-np.abs(difference))[:10]


@method("plain")
class Plain(Method):
    """Difference of the class means of selected features."""

    def select(self, source):
        return strongest(source)

    def learn(self, source, *, seed, device, progress):
        features = fc_features(source.series)
        self.state_["selected"] = self.select(source)
        self.state_["direction"] = features[source.labels == 1].mean(0) - features[source.labels == 0].mean(0)

    def project(self, target):
        selected = self.state_["selected"]
        return np.array([one[selected] @ self.state_["direction"][selected] for one in fc_features(target.series)])

    def score(self, target):
        return 1 / (1 + np.exp(-self.project(target)))


SELECTED = []

@method("selects-once")
class SelectsOnce(Plain):
    def select(self, source):
        if not SELECTED:
            SELECTED.append(strongest(source))
        return SELECTED[0]


@method("selects-once-in-class")
class SelectsOnceInClass(Plain):
    chosen = None

    def select(self, source):
        if SelectsOnceInClass.chosen is None:
            SelectsOnceInClass.chosen = strongest(source)
        return SelectsOnceInClass.chosen


@functools.lru_cache(maxsize=4)
def selection(name, holder):
    return strongest(holder.source)

class Holder:
    def __eq__(self, other):
        return True
    def __hash__(self):
        return 1

@method("selects-once-in-cache")
class SelectsOnceInCache(Plain):
    def select(self, source):
        holder = Holder()
        holder.source = source
        return selection("features", holder)


OFFSETS = {}

@method("predicts-as-before")
class PredictsAsBefore(Plain):
    """Centres scores as at the first target of the process."""

    def score(self, target):
        scores = self.project(target)
        return 1 / (1 + np.exp(OFFSETS.setdefault("mean", scores.mean()) - scores))


@method("keeps-target-mean")
class KeepsTargetMean(Plain):
    """Centres scores on the target that it predicts first."""

    def score(self, target):
        scores = self.project(target)
        if not hasattr(self, "mean_"):
            self.mean_ = scores.mean()
        return 1 / (1 + np.exp(self.mean_ - scores))


@method("attribute")
class Attribute(Plain):
    def learn(self, source, **how):
        super().learn(source, **how)
        self.patients_ = [int((whole().labels == 1).sum())]


STATISTICS = {}

@method("global")
class Global(Plain):
    def learn(self, source, **how):
        super().learn(source, **how)
        STATISTICS["mean"] = np.mean([one.mean() for one in whole().series])


@method("class-attribute")
class ClassAttribute(Plain):
    def learn(self, source, **how):
        super().learn(source, **how)
        type(self).everyone = whole()


@functools.cache
def count(site):
    return int((whole().labels == 1).sum())

@method("cached-function")
class CachedFunction(Plain):
    def learn(self, source, **how):
        super().learn(source, **how)
        count("all")


@method("variable")
class Variable(Plain):
    def learn(self, source, **how):
        super().learn(source, **how)
        os.environ["PATIENTS_OF_TEST"] = str((whole().labels == 1).sum())


@method("disk")
class Disk(Plain):
    """Selects features once and keeps them next to the plugin."""

    def select(self, source):
        path = BESIDE / "selected.npy"
        if not path.is_file():
            np.save(path, strongest(source))
        return np.load(path)


@method("safetensors")
class Safetensors(Plain):
    def select(self, source):
        from safetensors.numpy import load_file
        load_file(BESIDE / "tiny.cohort")
        return super().select(source)


@method("hard-link")
class HardLink(Plain):
    def select(self, source):
        (BESIDE / "link.bin").read_bytes()
        return super().select(source)


@method("process")
class Process(Plain):
    def select(self, source):
        subprocess.run(["true", "x"], check=True)
        return super().select(source)


@method("quits")
class Quits(Plain):
    def learn(self, source, **how):
        raise SystemExit(0)


@method("breaks-elsewhere")
class BreaksElsewhere(Plain):
    def learn(self, source, **how):
        if "west" in source.site_names:
            raise ValueError("no luck")
        super().learn(source, **how)


MEMORY = {}

@method("careful")
class Careful(Plain):
    """Caches by source, uses a temporary file, a library that starts a process, and an attribute that differs in each fit."""

    def select(self, source):
        from joblib.externals.loky.backend.context import cpu_count
        cpu_count(only_physical_cores=True)
        self.token_ = os.urandom(8)
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "inside").mkdir()
            np.save(Path(folder) / "a.npy", strongest(source))
            return MEMORY.setdefault(source.hash, np.load(Path(folder) / "a.npy"))
'''
FIRST = "fitting other targets first in the same process changes weights selected"
KEPT = "a target of noise changes {}, kept outside of state_ and facts_"
LEAKS = {
    "selects-once": [FIRST],
    "selects-once-in-class": [FIRST],
    "selects-once-in-cache": [FIRST],
    "predicts-as-before": ["predictions after other targets in the same process differ by up to "],
    "keeps-target-mean": ["predictions one subject at a time differ by up to "],
    "attribute": [KEPT.format("attribute patients_")],
    "global": [KEPT.format("global STATISTICS of plugin_of_trust.py")],
    "class-attribute": [KEPT.format("class attribute ClassAttribute.everyone")],
    "cached-function": [KEPT.format("global count of plugin_of_trust.py")],
    "variable": [KEPT.format("environment variable PATIENTS_OF_TEST")],
    "disk": ["the method uses {folder}/selected.npy, where data of one target can reach another"],
    "safetensors": ["tiny.cohort, which contains the target, is opened while the method runs, by compiled code or another"],
    "hard-link": [
        "tiny.cohort, which contains the target, is opened while the method runs, by compiled code or another process",
        "the method uses {folder}/link.bin, where data of one target can reach another",
    ],
    "process": ["the method starts true, whose files the audit cannot see"],
}
LINUX = ("safetensors", "hard-link")
FINE = ["plain", "careful"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = Path(os.path.realpath(tmp_path_factory.mktemp("trust")))
    # Two of three subjects of the target are patients, so that turned and withheld labels have other counts.
    cohort = make_cohort("tiny", seed=1)
    west = np.flatnonzero(cohort.sites == "west")
    labels = cohort.labels.copy()
    labels[west] = np.arange(len(west)) % 3 > 0
    replace(cohort, labels=labels).save(folder / "tiny.cohort")
    os.link(folder / "tiny.cohort", folder / "link.bin")
    np.save(folder / "table.npy", np.arange(3))
    (folder / "plugin_of_trust.py").write_text(PLUGIN)
    return folder


@pytest.fixture(scope="module")
def results(folder):
    study = {
        "cohort": str(folder / "tiny.cohort"),
        "plugins": [str(folder / "plugin_of_trust.py")],
        "methods": [*FINE, *LEAKS, "quits", "breaks-elsewhere"],
        "targets": ["west"],
        "seeds": [0],
    }
    return {one.method: one for one in audit(study)}


@pytest.mark.parametrize("name", FINE)
def test_caches_by_source_temporary_files_and_libraries_pass(results, name):
    assert results[name] == Audited(name, "west", 0)


@pytest.mark.parametrize("name", LEAKS)
def test_a_mistake_is_found(results, folder, name):
    if name in LINUX and not sys.platform.startswith("linux"):
        pytest.skip("needs inotify")
    sentences = [sentence.format(folder=folder) if "{folder}" in sentence else sentence for sentence in LEAKS[name]]
    assert results[name].reason is None
    assert len(results[name].differs) == len(sentences), results[name].differs
    for differs, sentence in zip(results[name].differs, sentences, strict=True):
        assert differs.startswith(sentence), differs


def test_a_method_that_ends_python_or_fails_elsewhere_is_not_run(results):
    assert results["quits"].reason.startswith("SystemExit")
    assert results["breaks-elsewhere"].reason.startswith("target ")
    assert "which is fitted first: ValueError: no luck" in results["breaks-elsewhere"].reason
    assert results["breaks-elsewhere"].differs == ()


def test_two_other_targets_come_first(tiny):
    cell = Cell("prior", "", "west", 3, {}, "key")
    assert tiny.site_names == ["east", "north", "south", "west"]
    assert _other_targets(tiny, "west", ["west", "south"]) == ["south", "east"]
    assert _other_targets(tiny, "west", []) == ["east", "north"]
    assert [(one.target, one.seed) for one in _after_others(cell, ["south", "east"])] == [
        ("south", 3),
        ("east", 3),
        ("west", 3),
    ]
    assert [(one.target, one.seed) for one in _after_others(cell, ["south"])] == [("south", 3), ("south", 4), ("west", 3)]
    labels = np.where(tiny.sites == "west", 0, np.where(tiny.sites == "east", tiny.labels, 1))
    assert _other_targets(replace(tiny, labels=labels), "north", []) == ["east", "south"]  # patients alone without west


def test_without_another_target_the_audit_cannot_be_run(tiny, tmp_path):
    two = tiny.select(sites=["north", "south"])
    two = replace(two, labels=np.where(two.sites == "south", 1, two.labels)).save(tmp_path / "two.cohort")
    (result,) = audit({"cohort": str(two), "methods": ["prior"], "targets": ["south"], "seeds": [0]})
    assert (result.reason, result.differs, result.passed) == (NO_OTHERS, (), False)


def test_the_command_states_what_the_audit_cannot_see(folder, typed, tmp_path):
    study = tmp_path / "study.toml"
    study.write_text(f'cohort = "{folder / "tiny.cohort"}"\nmethods = ["prior"]\nseeds = [0]\n')
    code, printed, _ = typed("audit", study)
    assert code == 0
    assert LIMITS in " ".join(printed.split())


def test_a_digest_is_of_the_content():
    class Thing:
        def __init__(self, value):
            self.value = value

    def function(start):
        def inner():
            return start

        return inner

    @functools.lru_cache(maxsize=2)
    def first(x):
        return x + 1

    @functools.cache
    def second(x):
        return x + 1

    pairs = [
        (np.arange(3), np.arange(3) + 1),
        (np.zeros(2), np.zeros((2, 1))),
        (torch.ones(2, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.bfloat16)),
        (pd.DataFrame({"a": [1.0]}), pd.DataFrame({"b": [1.0]})),
        (make_cohort("tiny", seed=1), make_cohort("tiny", seed=2)),
        ({"a": [1, 2]}, {"a": [1, 3]}),
        (Thing([1]), Thing([2])),
        (function(1), function(2)),
        (np.random.default_rng(1), np.random.default_rng(2)),
        (1, 1.0),
        ("1", 1),
    ]
    for one, other in pairs:
        assert digest(one) == digest(one) != digest(other)
    assert digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1})
    assert digest({3, 1, 2}) == digest({2, 3, 1})
    assert digest(Thing(np.ones(2))) == digest(Thing(np.ones(2)))
    for cached in (first, second):
        before = digest(cached)
        cached(1)
        assert digest(cached) != before
    endless = {"self": None}
    endless["self"] = endless
    assert digest(endless) == digest(endless)


def test_files_of_libraries_are_told_from_others(tmp_path):
    assert is_of_library(os.path.realpath(np.__file__))
    assert is_of_library("/proc/self/maps")
    assert is_of_library(os.path.realpath("/tmp") + "/joblib_memmapping_folder_1/a.pkl")
    assert not is_of_library("/dev/shm/cache.npy")
    assert not is_of_library(os.path.realpath(tmp_path / "cache.npy"))
    assert not is_of_library(os.path.realpath("/tmp") + "/cache.npy")
    assert not is_of_library(os.path.realpath(Path.home() / "cache.npy"))


def failing(result):
    return {one["check"]: one["detail"] for one in result if not one["passed"]}


@pytest.fixture(scope="module")
def large():
    """Sites with at least ten subjects of each class."""
    return make_cohort("tiny", seed=2, sizes={"north": 40, "south": 40, "west": 40}, lengths=(20, 20), phenotype_effect=0.0)


def with_column(cohort, name, values):
    return replace(cohort, phenotypes=cohort.phenotypes.assign(**{name: values})).with_inputs(["age", name])


def test_an_input_that_separates_the_classes_fails_whatever_its_name(large):
    draw = np.random.default_rng(0)
    questionnaire = with_column(large, "questionnaire", 10.0 * large.labels + draw.normal(size=len(large)))
    sentence = "questionnaire separates patients from controls almost perfectly, as a label proxy does"
    assert failing(leakage_checks(questionnaire)) == {PROXIES: f"Every target: {sentence} (leave it out of the inputs)."}
    harmless = with_column(large, "questionnaire", draw.normal(size=len(large)))
    assert failing(leakage_checks(harmless)) == {}
    related = with_column(large, "questionnaire", 1.0 * large.labels + draw.normal(size=len(large)))
    assert failing(leakage_checks(related)) == {}


def test_an_input_that_separates_the_classes_within_sites_only_fails_too(large):
    """Each site has its own units, so that the pooled values overlap."""
    offset = 100.0 * np.unique(large.sites, return_inverse=True)[1]
    shifted = with_column(large, "scale", offset + large.labels + 0.01 * np.random.default_rng(0).normal(size=len(large)))
    assert "scale separates patients from controls" in failing(leakage_checks(shifted))[PROXIES]
    missing = shifted.phenotypes["scale"].where(np.arange(len(large)) % 10 == 0)  # 12 subjects
    few = replace(shifted, phenotypes=shifted.phenotypes.assign(scale=missing))
    assert failing(leakage_checks(few)) == {}


@pytest.mark.parametrize(
    "column",
    [
        *("HDRS17", "HDRS", "hrsd", "hrsd_24", "qids", "QIDS-SR16", "qidsTotal", "CARS", "cars2_total", "SSRI", "on_ssris"),
        *("onSsri", "BDI", "BDI2", "bdi_ii", "bditotal", "MADRS", "PHQ9", "phq_9", "SCQ_TOTAL", "AQ", "AQ_TOTAL", "aq10"),
        *("AQ-50", "antidepressants", "Antidepressant use"),
    ],
)
def test_scales_and_drugs_are_proxies(column):
    assert is_proxy(column)


@pytest.mark.parametrize(
    "column",
    [
        *("age", "AGE_AT_SCAN", "sex", "site", "SITE_ID", "FIQ", "VIQ", "PIQ", "mean_fd", "func_mean_fd", "handedness"),
        *("education", "scars", "oscars_won", "subdivision", "aquisition", "aqueduct", "plaque", "Iraq", "cardiac", "bmi"),
    ],
)
def test_ordinary_columns_are_no_proxies(column):
    assert not is_proxy(column)


@pytest.fixture
def study_of(tmp_path):
    def write(cohort):
        cohort.save(tmp_path / "a.cohort")
        (tmp_path / "study.toml").write_text('cohort = "a.cohort"\nmethods = ["prior"]\nseeds = [0]\n')
        return tmp_path / "study.toml", tmp_path / "out"

    return write


def test_run_shows_failed_checks_and_ends_with_1(tiny, study_of, typed):
    north, south = (int(np.flatnonzero(tiny.sites == site)[0]) for site in ("north", "south"))
    series = [tiny.series[north] if i == south else one for i, one in enumerate(tiny.series)]
    study, out = study_of(replace(tiny, series=series))
    code, printed, said = typed("run", study, "--out", out)
    assert code == 1
    assert "4 of 4 cells done" in printed
    sentence = "Leakage check failed: no identical scan on both sides. Target north: source contains copies of its scans (1 at"
    assert [line for line in said.splitlines() if line.startswith(sentence)]
    assert failed_checks(out) == [line for line in said.splitlines() if line.startswith("Leakage check failed: ")]
    code, _, again = typed("run", study, "--out", out)  # also when every cell was done before
    assert (code, sentence in again) == (1, True)
    typed("report", out)
    assert sentence in (out / "report.html").read_text().partition("<main")[0]


def test_run_without_failed_checks_says_nothing_of_them(tiny, study_of, typed):
    study, out = study_of(tiny)
    code, printed, said = typed("run", study, "--out", out)
    assert code == 0
    assert "eakage" not in printed + said
    assert failed_checks(out) == []
    (out / "checks.json").unlink()
    assert failed_checks(out) == []


@pytest.mark.parametrize("text", ["{", "[1]", '{"check": 1}', "3", '[{"passed": false}]'])
def test_damaged_checks_are_an_error(tmp_path, text):
    (tmp_path / "checks.json").write_text(text)
    with pytest.raises(InputError, match=r"checks\.json is damaged and cannot be read as leakage checks; remove it"):
        failed_checks(tmp_path)


def test_failed_checks_are_sentences(tmp_path):
    checks = [{"check": "a", "passed": False, "detail": "B."}, {"check": "c", "passed": True, "detail": "D."}]
    (tmp_path / "checks.json").write_text(json.dumps(checks))
    assert failed_checks(tmp_path) == ["Leakage check failed: a. B."]


def test_a_saved_cohort_may_have_proxies_that_are_allowed(tiny, tmp_path):
    cohort = replace(tiny, phenotypes=tiny.phenotypes.assign(HDRS17=1.0)).with_inputs(["HDRS17"], allow_proxies=True)
    assert Cohort.load(cohort.save(tmp_path / "a.cohort")).inputs == ("HDRS17",)
