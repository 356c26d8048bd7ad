"""The leak audit: honest methods pass, and each way to leak that a plugin can try is caught by name."""

import dataclasses
import functools
import os
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

import m2lgdg.study.audit
from m2lgdg import InputError, make_cohort
from m2lgdg.cohort import Parcellation
from m2lgdg.study.audit import LIMITS, NO_OTHERS, Audited, _after_others, _other_targets, audit, other_target
from m2lgdg.study.audit_watch import digest, is_of_library
from m2lgdg.study.plan import Cell

# What honest methods do, and a family of leaks; each differs from the first in one place.
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


@method("reads-memory")
class ReadsMemory(Plain):
    """Learns from the whole cohort that it finds in memory."""

    def learn(self, source, **how):
        super().learn(whole(), **how)


@method("counts-labels")
class CountsLabels(Plain):
    """Keeps how many patients the whole cohort has, as a fact."""

    def learn(self, source, **how):
        super().learn(source, **how)
        self.facts_["patients"] = int((whole().labels == 1).sum())


@method("looks-up-labels")
class LooksUpLabels(Plain):
    """Fits on source alone, and finds each target subject's label in memory when it predicts."""

    def score(self, target):
        everyone = whole()
        found = {one.tobytes(): label for one, label in zip(everyone.series, everyone.labels)}
        return np.array([0.9 if found[one.tobytes()] == 1 else 0.1 for one in target.series])


@method("opens-cohort")
class OpensCohort(Plain):
    """Reads the file of the study, by a path that it knows."""

    def learn(self, source, **how):
        super().learn(Cohort.load(os.environ["COHORT_OF_TEST"]), **how)


@method("normalises")
class Normalises(Plain):
    """Centres its scores on the mean of the target."""

    def score(self, target):
        scores = self.project(target)
        return 1 / (1 + np.exp(np.sort(scores).mean() - scores))  # sorted: rounding is the same in any order


@method("ranks-order")
class RanksOrder(Plain):
    """Believes that patients come first."""

    def score(self, target):
        return np.linspace(0.9, 0.1, len(target))


@method("structure")
class Structure(Plain):
    """Difference of the class means of a table."""

    def learn(self, source, **how):
        table = source.tables["thickness"].to_numpy()
        self.state_["direction"] = table[source.labels == 1].mean(0) - table[source.labels == 0].mean(0)

    def rows(self, target):
        return target.tables["thickness"].to_numpy()

    def project(self, target):
        return np.array([row @ self.state_["direction"] for row in self.rows(target)])


@method("centres-structure")
class CentresStructure(Structure):
    """Takes the mean of the target's table out of it."""

    def rows(self, target):
        return super().rows(target) - super().rows(target).mean(0)


@method("knows-structure")
class KnowsStructure(Structure):
    """Learns from the table of the whole cohort."""

    def learn(self, source, **how):
        super().learn(source, **how)
        self.state_["direction"] = self.state_["direction"] / whole().tables["thickness"].std().to_numpy()


CACHE = []

@method("remembers")
class Remembers(Plain):
    """Adds what it predicted before to what it learns next."""

    def learn(self, source, **how):
        super().learn(source, **how)
        for features in CACHE:
            self.state_["direction"] = self.state_["direction"] + 1e-6 * features

    def score(self, target):
        CACHE.append(fc_features(target.series).mean(0))
        return super().score(target)


WAITING = []

@method("outwaits")
class Outwaits(Plain):
    """From its fourth fit on, uses what it learned in the other fits of the process, whose source had the target."""

    def learn(self, source, **how):
        super().learn(source, **how)
        if len(WAITING) >= 3:
            self.state_["direction"] = self.state_["direction"] + 0.1 * np.mean(WAITING, axis=0)
        WAITING.append(self.state_["direction"])


@method("waits-for-long")
class WaitsForLong(Plain):
    """The same from its hundredth fit on."""

    def learn(self, source, **how):
        super().learn(source, **how)
        if len(PATIENT) >= 100:
            self.state_["direction"] = self.state_["direction"] + 0.1 * np.mean(PATIENT, axis=0)
        PATIENT.append(self.state_["direction"])

PATIENT = []


@method("unseeded")
class Unseeded(Plain):
    """Draws from no seed."""

    def learn(self, source, **how):
        super().learn(source, **how)
        self.state_["direction"] = np.random.default_rng().normal(size=self.state_["direction"].shape)


@method("breaks")
class Breaks(Plain):
    """Cannot be fitted."""

    def learn(self, source, **how):
        raise RuntimeError("out of luck")
'''
FIRST = "fitting other targets first in the same process changes weights selected"
KEPT = "a target of noise changes {}, kept outside of state_ and facts_"
LEAKS = {
    "selects-once": [FIRST],
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
    "reads-memory": ["a target of noise changes ", "a target without labels changes "],
    "counts-labels": ["a target of noise changes fact patients", "a target without labels changes fact patients"],
    "looks-up-labels": ["predictions with labels withheld differ by up to 0.8"],
    "opens-cohort": ["the method opens tiny.cohort, which contains the target"],  # the same in every world: nothing else tells
    "normalises": ["predictions one subject at a time differ by up to "],
    "centres-structure": ["predictions one subject at a time differ by up to "],
    "knows-structure": ["a target of noise changes weights direction"],
    "ranks-order": ["predictions in another order differ by up to ", "predictions one subject at a time differ by up to 0.8"],
    "outwaits": ["fitting more targets first in the same process changes weights direction"],
    "remembers": [
        "fitting again after the target was predicted changes weights direction",
        "fitting other targets first in the same process changes weights direction",
    ],
}
LINUX = ("safetensors", "hard-link")
HONEST = ["plain", "careful", "prior", "fc-logistic", "structure", "connectome-adaptive"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = Path(os.path.realpath(tmp_path_factory.mktemp("trust")))
    # Two of three subjects of the target are patients, so that turned and withheld labels have other counts.
    cohort = make_cohort("tiny", sizes=dict.fromkeys(("east", "north", "south", "west"), 8), seed=1)
    west = np.flatnonzero(cohort.sites == "west")
    labels = cohort.labels.copy()
    labels[west] = np.arange(len(west)) % 3 > 0
    table = np.random.default_rng(0).normal(2.5, 0.2, (len(cohort), 5))
    dataclasses.replace(cohort, labels=labels, tables={"thickness": table}).save(folder / "tiny.cohort")
    os.link(folder / "tiny.cohort", folder / "link.bin")
    np.save(folder / "table.npy", np.arange(3))
    (folder / "plugin_of_trust.py").write_text(PLUGIN)
    return folder


@pytest.fixture(scope="module")
def study(folder):
    return {
        "cohort": str(folder / "tiny.cohort"),
        "plugins": [str(folder / "plugin_of_trust.py")],
        "methods": [*HONEST, *LEAKS, "waits-for-long", "unseeded", "breaks", "quits", "breaks-elsewhere"],
        "targets": ["west", "east"],
        "seeds": [3, 4],
        "variants": ["phenotypes"],
    }


@pytest.fixture(scope="module")
def results(study):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COHORT_OF_TEST", study["cohort"])
        return {one.method: one for one in audit(study)}


@pytest.mark.parametrize("name", HONEST)
def test_an_honest_method_passes(results, name):
    """Caches by source, temporary files and libraries are no leak; what is kept from other fits is named."""
    kept = "it keeps global MEMORY of plugin_of_trust.py from fits of other targets, which have seen this one; the audit"
    assert results[name] == Audited(name, "west", 3, note=results[name].note)
    assert results[name].note.startswith(kept) if name == "careful" else results[name].note == ""


def test_what_waits_longer_than_the_audit_is_named(results):
    assert results["waits-for-long"].passed
    assert results["waits-for-long"].note.startswith("it keeps global PATIENT of plugin_of_trust.py from fits of other targets")


@pytest.mark.long
def test_an_honest_network_passes(study):
    small = {"erm": {"variant": "small", "epochs": 2, "warmup": 1}}
    assert audit(study | {"methods": ["erm"], "method": small}) == [Audited("erm", "west", 3)]


@pytest.mark.parametrize("name", LEAKS)
def test_a_leak_is_caught_and_said(results, folder, name):
    if name in LINUX and not sys.platform.startswith("linux"):
        pytest.skip("needs inotify")
    sentences = [sentence.format(folder=folder) if "{folder}" in sentence else sentence for sentence in LEAKS[name]]
    assert results[name].reason is None and not results[name].passed
    found = results[name].differs[: len(sentences)] if name == "reads-memory" else results[name].differs
    assert len(found) == len(sentences), found
    for differs, sentence in zip(found, sentences, strict=True):
        assert differs.startswith(sentence), differs


def test_what_cannot_be_shown_is_no_leak_and_no_pass(results):
    reasons = {
        "unseeded": "two fits of the same source differ",
        "breaks": "RuntimeError: out of luck",
        "quits": "SystemExit",
        "breaks-elsewhere": "target ",
    }
    for name, reason in reasons.items():
        assert (results[name].passed, results[name].differs) == (False, ())
        assert results[name].reason.startswith(reason)
    assert results["breaks-elsewhere"].reason.endswith("which is fitted first: ValueError: no luck")


def test_noise_is_at_the_target_and_nowhere_else():
    cohort = make_cohort("tiny", seed=1)
    west = cohort.sites == "west"
    for world in ("noise", "withheld"):
        other = other_target(cohort, "west", world)
        assert other.select(~west).hash == cohort.select(~west).hash
        assert other.subjects.tolist() == cohort.subjects.tolist()
        assert other.sites.tolist() == cohort.sites.tolist()
        assert other.lengths.tolist() == cohort.lengths.tolist()
    assert other.labels[west].tolist() == [-1] * west.sum()
    assert dataclasses.replace(other, labels=cohort.labels).hash == cohort.hash
    noise = other_target(cohort, "west", "noise")
    assert (noise.labels[west] == 1 - cohort.labels[west]).all()
    assert (
        noise.phenotypes[list(cohort.inputs)].to_numpy()[west] != cohort.phenotypes[list(cohort.inputs)].to_numpy()[west]
    ).all()
    for i in np.flatnonzero(west):
        assert abs(np.corrcoef(noise.series[i].ravel(), cohort.series[i].ravel())[0, 1]) < 0.1


def test_noise_is_in_every_atlas():
    cohort = make_cohort("tiny", seed=1)
    series = [one[:, :5] for one in cohort.series]
    series[int(np.flatnonzero(cohort.sites == "west")[0])] = None  # a target subject that lacks the atlas
    cohort = dataclasses.replace(cohort, parcellations={"other": Parcellation(tuple("abcde"), series)})
    noise = other_target(cohort, "west", "noise").parcellations["other"]
    for i, (one, before) in enumerate(zip(noise.series, series, strict=True)):
        if before is None:
            assert one is None
        elif cohort.sites[i] == "west":
            assert abs(np.corrcoef(one.ravel(), before.ravel())[0, 1]) < 0.2
        else:
            assert np.array_equal(one, before)


def test_noise_is_in_every_table():
    cohort = make_cohort("tiny", seed=1)
    west = cohort.sites == "west"
    values = np.random.default_rng(0).normal(2.5, 0.2, (len(cohort), 4))
    values[np.flatnonzero(west)[0]] = np.nan  # a target subject that lacks the table
    cohort = cohort.with_tables({"thickness": values})
    noise = other_target(cohort, "west", "noise").tables["thickness"].to_numpy()
    np.testing.assert_array_equal(noise[~west], values[~west])
    np.testing.assert_array_equal(np.isnan(noise), np.isnan(values))
    assert (noise[west][1:] != values[west][1:]).all()


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
    assert _other_targets(dataclasses.replace(tiny, labels=labels), "north", []) == [
        "east",
        "south",
    ]


def test_without_another_target_the_audit_cannot_be_run(tiny, tmp_path):
    two = tiny.select(sites=["north", "south"])
    two = dataclasses.replace(two, labels=np.where(two.sites == "south", 1, two.labels)).save(tmp_path / "two.cohort")
    (result,) = audit({"cohort": str(two), "methods": ["prior"], "targets": ["south"], "seeds": [0]})
    assert (result.reason, result.differs, result.passed) == (NO_OTHERS, (), False)


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


def test_the_command_prints_two_tables_and_ends_with_a_code(folder, typed, monkeypatch, tmp_path):
    study = tmp_path / "study.toml"
    plugin = folder / "plugin_of_trust.py"
    study.write_text(
        f'cohort = "{folder / "tiny.cohort"}"\nmethods = ["prior", "plain"]\nplugins = ["{plugin}"]\nseeds = [0]\n'
    )
    asked = []

    def audited(given, **how):
        asked.append((given.name, how["methods"], how["target"], how["seed"]))
        return [Audited("plain", how["target"], how["seed"])]

    with monkeypatch.context() as patch:
        patch.setattr(m2lgdg.study.audit, "audit", audited)
        code, text, _ = typed("audit", study, "--method", "plain", "--site", "east", "--seed", "7", "--set", "name=mine")
    text = " ".join(text.split())
    assert code == 0 and asked == [("mine", ["plain"], "east", 7)]
    assert "Leakage audit of mine, target east" in text and "plain │ yes │ none" in text and LIMITS in text
    printed = {one.name: one for one in m2lgdg.study.audit.no_brain_scores(study, target="east")}
    one, site = printed["phenotype-only"], printed["site-only"]
    assert f"│ phenotype-only │ {100 * one.auc:.1f} ({100 * one.low:.1f}-{100 * one.high:.1f}) │ 50.0 │ sex, age" in text
    assert "│ motion-only │ - │ - │ not reported: no" in text
    assert f"│ site-only │ {100 * site.auc:.1f} │ {100 * site.chance:.1f} │ pooled AUC" in text
    code, _, error = typed("audit", study, "--method", "plian")
    assert (code, error) == (2, "m2lgdg: plian is not one of the study's methods; did you mean plain?\n")
    code, _, error = typed("audit", study, "--site", "nowhere")
    assert (code, error[:53]) == (2, "m2lgdg: target nowhere is not a site of cohort tiny (")
    fine, leaks = Audited("a", "east", 0, note="it keeps x"), Audited("b", "east", 0, differs=("weights w",))
    broken = Audited("c", "east", 0, reason="no luck")
    for given, wanted in (([fine, leaks, broken], 1), ([fine, broken], 2), ([fine], 0)):
        monkeypatch.setattr(m2lgdg.study.audit, "audit", lambda *_, given=given, **__: given)
        code, text, _ = typed("audit", study)
        assert code == wanted
        text = " ".join(text.split())
        assert "a │ yes │ it keeps x" in text
        assert ("b │ no │ weights w" in text) == (leaks in given)
        assert ("c │ not run │ could not be run: no luck" in text) == (broken in given)


def test_a_process_that_dies_is_a_sentence(folder):
    plugin = folder / "dies_of_audit.py"
    plugin.write_text(
        "import os, signal\nfrom m2lgdg.method import Method, method\n"
        "@method('dies')\nclass Dies(Method):\n"
        "    def learn(self, source, **how):\n        os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    content = {"cohort": str(folder / "tiny.cohort"), "methods": ["dies"], "plugins": [str(plugin)], "seeds": [0]}
    with pytest.raises(InputError, match="the audit's worker process died"):
        audit(content)
