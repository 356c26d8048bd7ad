"""The leak audit: honest methods pass, and each way to leak that a plugin can try is caught by name."""

import dataclasses
import sys

import numpy as np
import pytest

import m2lgdg.study.audit
from m2lgdg import InputError, make_cohort
from m2lgdg.cli import main
from m2lgdg.cohort import Parcellation
from m2lgdg.study.audit import Audited, audit, other_target

# What honest methods do, and a family of leaks; each differs from the first in one place.
PLUGIN = '''
import gc
import os
import numpy as np
from m2lgdg.cohort import Cohort
from m2lgdg.connectivity import fc_features
from m2lgdg.method import Method, method


def whole():
    """The cohort with the target in it, found in memory."""
    return max((one for one in gc.get_objects() if type(one) is Cohort), key=len)


@method("honest")
class Honest(Method):
    """Difference of the class means."""

    def learn(self, source, *, seed, device, progress):
        features = fc_features(source.series)
        self.state_["direction"] = features[source.labels == 1].mean(0) - features[source.labels == 0].mean(0)

    def project(self, target):
        return np.array([features @ self.state_["direction"] for features in fc_features(target.series)])

    def score(self, target):
        return 1 / (1 + np.exp(-self.project(target)))


@method("reads-memory")
class ReadsMemory(Honest):
    """Learns from the whole cohort that it finds in memory."""

    def learn(self, source, *, seed, device, progress):
        super().learn(whole(), seed=seed, device=device, progress=progress)


@method("counts-labels")
class CountsLabels(Honest):
    """Keeps how many patients the whole cohort has, as a fact."""

    def learn(self, source, *, seed, device, progress):
        super().learn(source, seed=seed, device=device, progress=progress)
        self.facts_["patients"] = int((whole().labels == 1).sum())


@method("looks-up-labels")
class LooksUpLabels(Honest):
    """Fits on source alone, and finds each target subject's label in memory when it predicts."""

    def score(self, target):
        everyone = whole()
        found = {one.tobytes(): label for one, label in zip(everyone.series, everyone.labels)}
        return np.array([0.9 if found[one.tobytes()] == 1 else 0.1 for one in target.series])


@method("opens-cohort")
class OpensCohort(Honest):
    """Reads the file of the study, by a path that it knows."""

    def learn(self, source, *, seed, device, progress):
        super().learn(Cohort.load(os.environ["COHORT_OF_TEST"]), seed=seed, device=device, progress=progress)


@method("normalises")
class Normalises(Honest):
    """Centres its scores on the mean of the target."""

    def score(self, target):
        scores = self.project(target)
        return 1 / (1 + np.exp(np.sort(scores).mean() - scores))  # sorted: rounding is the same in any order


@method("ranks-order")
class RanksOrder(Honest):
    """Believes that patients come first."""

    def score(self, target):
        return np.linspace(0.9, 0.1, len(target))


CACHE = []

@method("remembers")
class Remembers(Honest):
    """Adds what it predicted before to what it learns next."""

    def learn(self, source, *, seed, device, progress):
        super().learn(source, seed=seed, device=device, progress=progress)
        for features in CACHE:
            self.state_["direction"] = self.state_["direction"] + 1e-6 * features

    def score(self, target):
        CACHE.append(fc_features(target.series).mean(0))
        return super().score(target)


@method("unseeded")
class Unseeded(Honest):
    """Draws from no seed."""

    def learn(self, source, *, seed, device, progress):
        self.state_["direction"] = np.random.default_rng().normal(size=fc_features(source.series[:1]).shape[1])


@method("breaks")
class Breaks(Honest):
    """Cannot be fitted."""

    def learn(self, source, *, seed, device, progress):
        raise RuntimeError("out of luck")
'''
QUICK = {"erm": {"variant": "small", "epochs": 2, "warmup": 1}}
HONEST = ["prior", "fc-logistic", "tangent-ridge", "erm", "honest"]
LEAKING = ["reads-memory", "counts-labels", "looks-up-labels", "opens-cohort", "normalises", "ranks-order", "remembers"]


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    folder = tmp_path_factory.mktemp("audit")
    make_cohort("tiny", seed=1).save(folder / "tiny.cohort")
    (folder / "plugin_of_audit.py").write_text(PLUGIN)
    (folder / "study.toml").write_text(
        f'cohort = "tiny.cohort"\nplugins = ["plugin_of_audit.py"]\nmethods = {[*HONEST, *LEAKING, "unseeded", "breaks"]}\n'
        "targets = ['west', 'east']\nseeds = [3, 4]\nvariants = ['phenotypes']\n[method.erm]\n"
        + "\n".join(f"{key} = {value!r}" for key, value in QUICK["erm"].items())
    )
    return folder / "study.toml"


@pytest.fixture(scope="module")
def found(study):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COHORT_OF_TEST", str(study.parent / "tiny.cohort"))
        return {one.method: one for one in audit(study)}


@pytest.mark.parametrize("name", HONEST)
def test_an_honest_method_passes(found, name):
    assert found[name].differs == ()
    assert found[name].passed
    assert (found[name].target, found[name].seed) == ("west", 3)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("reads-memory", {"a target of noise changes", "a target without labels changes weights direction"}),
        # Half of the target are patients, so that turned labels have the same count.
        ("counts-labels", {"a target without labels changes fact patients"}),
        ("looks-up-labels", {"predictions with labels withheld differ by up to 0.8"}),
        ("opens-cohort", {"the method opens tiny.cohort, which contains the target"}),
        ("normalises", {"predictions one subject at a time differ by up to"}),
        (
            "ranks-order",
            {"predictions in another order differ by up to", "predictions one subject at a time differ by up to 0.8"},
        ),
        ("remembers", {"fitting again after the target was predicted changes weights direction"}),
    ],
)
def test_a_leak_is_caught_and_said(found, name, said):
    assert not found[name].passed
    assert found[name].reason is None
    for sentence in said:
        assert any(one.startswith(sentence) for one in found[name].differs), found[name].differs


def test_only_what_leaks_is_said(found):
    assert [one.split(" differ")[0] for one in found["normalises"].differs] == ["predictions one subject at a time"]
    assert [one.split(" changes")[0] for one in found["remembers"].differs] == [
        "fitting again after the target was predicted",
        "fitting other targets first in the same process",
    ]
    assert len(found["opens-cohort"].differs) == 1  # the file is the same in every world: nothing else can tell


def test_what_cannot_be_shown_is_no_leak_and_no_pass(found):
    assert not found["unseeded"].passed
    assert found["unseeded"].differs == ()
    assert found["unseeded"].reason.startswith("two fits of the same source differ")
    assert found["breaks"].reason == "RuntimeError: out of luck"


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


def test_the_command_tells_a_table_and_ends_with_a_code(study, monkeypatch, capsys):
    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["m2lgdg", "audit", str(study), *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        streams = capsys.readouterr()
        return ended.value.code or 0, " ".join(streams.out.split()), streams.err

    code, text, _ = run("--method", "honest", "--target", "east", "--seed", "7", "--set", "name=mine")
    assert code == 0
    assert "Leakage audit of mine, target east" in text
    assert "honest │ yes │ none" in text
    assert "Baselines without brain data: AUC in percent (95 % interval)" in text
    printed = {one.name: one for one in m2lgdg.study.audit.no_brain_scores(study, target="east")}
    one, site = printed["phenotype-only"], printed["site-only"]
    assert f"│ phenotype-only │ {100 * one.auc:.1f} ({100 * one.low:.1f}-{100 * one.high:.1f}) │ 50.0 │ sex, age" in text
    assert "│ motion-only │ - │ - │ not reported: no" in text
    assert f"│ site-only │ {100 * site.auc:.1f} │ {100 * site.chance:.1f} │ pooled AUC" in text
    code, _, error = run("--method", "honset")
    assert (code, error) == (2, "m2lgdg: honset is not one of the study's methods; did you mean honest?\n")
    code, _, error = run("--target", "nowhere")
    assert (code, error[:53]) == (2, "m2lgdg: target nowhere is not a site of cohort tiny (")
    fine, leaks = Audited("a", "east", 0), Audited("b", "east", 0, differs=("weights w",))
    broken = Audited("c", "east", 0, reason="no luck")
    for given, wanted in (([fine, leaks, broken], 1), ([fine, broken], 2), ([fine], 0)):
        monkeypatch.setattr(m2lgdg.study.audit, "audit", lambda *_, given=given, **__: given)
        code, text, _ = run()
        assert code == wanted
        assert ("b │ no │ weights w" in text) == (leaks in given)
        assert ("c │ not run │ could not be run: no luck" in text) == (broken in given)


def test_a_process_that_dies_is_a_sentence(study):
    plugin = study.parent / "dies_of_audit.py"
    plugin.write_text(
        PLUGIN.split("@method")[0]
        + "@method('dies')\nclass Dies(Method):\n    def learn(self, source, **how):\n        os._exit(3)\n"
    )
    content = {"cohort": str(study.parent / "tiny.cohort"), "methods": ["dies"], "plugins": [str(plugin)], "seeds": [0]}
    with pytest.raises(InputError, match="the audit's worker process died"):
        audit(content)
