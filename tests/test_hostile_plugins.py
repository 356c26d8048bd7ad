"""Package methods in a study beside hostile plugins give what each gives alone, bit for bit.

Whatever is kept between fits (features, blocks, tangents) must not let a plugin's work into a package method, nor that of one
plugin into another. A study runs plugins first, then package methods, in one process; every method also runs alone in a process
that has only imported the package.
"""

import json
import os
import subprocess
import sys

import pandas as pd
import pytest

from m2lgdg import METHODS, InputError, make_cohort, run_study
from m2lgdg.deep import DeepMethod

HEAD = """
import functools
import numpy as np
from m2lgdg.connectivity import fc_features, standardised
from m2lgdg.method import Method, method
from m2lgdg.methods.connectome_adaptive import ConnectomeAdaptive
from m2lgdg.methods.linear import VIEWS, FCAdaptive, FCLogistic, TangentRidge
"""
VIEWED = """
class Viewed(FCLogistic):
    def _features(self, block, cohort):
        return fc_features(cohort.series, self.view()) if block == "fc" else super()._features(block, cohort)
"""
ATTACKS = {  # name -> plugin, its methods
    "lambda views": (
        VIEWED
        + """
@method("rectified")
class Rectified(Viewed):
    def view(self):
        return lambda series: standardised(np.abs(series))

@method("squared")
class Squared(Viewed):
    def view(self):
        return lambda series: standardised(series**2)
""",
        ["rectified", "squared"],
    ),
    "views with names of the package": (
        VIEWED
        + """
def imitation(of):
    def view(series):
        return standardised(np.sign(series) + 0.1 * series)
    view.__name__, view.__qualname__, view.__module__ = of.__name__, of.__qualname__, of.__module__
    return view

@method("first-imitation")
class First(Viewed):
    def view(self):
        return imitation(VIEWS["fc"])

@method("second-imitation")
class Second(Viewed):
    def view(self):
        return imitation(VIEWS["steady"])
""",
        ["first-imitation", "second-imitation"],
    ),
    "a view with a field": (
        VIEWED
        + """
def power(series, exponent):
    return standardised(np.sign(series) * np.abs(series) ** exponent)

@method("root")
class Root(Viewed):
    exponent: float = 0.5
    def view(self):
        return functools.partial(power, exponent=self.exponent)

@method("cube")
class Cube(Root):
    exponent: float = 3.0
""",
        ["root", "cube"],
    ),
    "subclasses with weights of their own": (
        """
@method("reweighted")
class Reweighted(ConnectomeAdaptive):
    def _subject_weights(self, source):
        return super()._subject_weights(source) * np.linspace(0.2, 3, len(source))

@method("reweighted-fc")
class ReweightedFC(FCLogistic):
    def _subject_weights(self, source):
        return np.linspace(0.2, 3, len(source))
""",
        ["reweighted", "reweighted-fc"],
    ),
    "subclasses with amplitudes of their own": (
        """
@method("louder")
class Louder(ConnectomeAdaptive):
    def amplitude_block(self, cohort):
        return super().amplitude_block(cohort) ** 3
""",
        ["louder"],
    ),
    "subclasses whose features read a field": (
        """
@method("gamma")
class Gamma(FCLogistic):
    exponent: float = 2.0
    def _features(self, block, cohort):
        values = super()._features(block, cohort)
        return np.sign(values) * np.abs(values) ** self.exponent

@method("more-gamma")
class MoreGamma(Gamma):
    exponent: float = 0.5

@method("bent-tangent")
class BentTangent(TangentRidge):
    exponent: float = 2.0
    def _features(self, block, cohort):
        return super()._features(block, cohort) * self.exponent + 1.0
""",
        ["gamma", "more-gamma", "bent-tangent"],
    ),
    "subclasses with source features of their own": (
        """
@method("noisy")
class Noisy(FCAdaptive):
    def _source_features(self, name, source):
        values = super()._source_features(name, source)
        return values + np.random.default_rng(0).normal(size=values.shape).astype(values.dtype)
""",
        ["noisy"],
    ),
    "a class with the name of a package class": (
        """
@method("own-adaptive")
class ConnectomeAdaptive(ConnectomeAdaptive):
    def _features(self, block, cohort):
        return super()._features(block, cohort)[:, ::-1] ** 2

ConnectomeAdaptive.__module__ = "m2lgdg.methods.connectome_adaptive"

@method("own-logistic")
class FCLogistic(FCLogistic):
    def _features(self, block, cohort):
        return super()._features(block, cohort) ** 2

FCLogistic.__module__ = "m2lgdg.methods.linear"
""",
        ["own-adaptive", "own-logistic"],
    ),
    "edits of the cohort": (
        """
def spoil(cohort):
    for array in (*cohort.series, cohort.labels, cohort.sites, cohort.subjects):
        try:
            array[:] = array[::-1].copy()
        except ValueError:  # read-only
            pass
    try:
        cohort.phenotypes["age"] = 0.0
        cohort.phenotypes.loc[:, "sex"] = 1.0
    except (ValueError, TypeError):
        pass

@method("spoils")
class Spoils(Method):
    def learn(self, source, *, seed, device, progress):
        self.state_["x"] = np.zeros(1)
        spoil(source)
    def score(self, target):
        spoil(target)
        return np.full(len(target), 0.5)
""",
        ["spoils"],
    ),
    "edits of the package": (
        """
@method("meddles")
class Meddles(Method):
    def learn(self, source, *, seed, device, progress):
        from m2lgdg import connectivity
        from m2lgdg.methods import connectome_adaptive, linear, solvers
        connectivity.CLIP, solvers.LEAST_SCALE, linear.REFERENCE_TOLERANCE = 0.2, 5.0, 1e9
        linear.VIEWS["steady"], connectome_adaptive.ConnectomeAdaptive.adaptive = standardised, ()
        linear.Linear._subject_weights = lambda self, source: np.linspace(0.1, 2, len(source))
        self.state_["x"] = np.zeros(1)
    def score(self, target):
        return np.full(len(target), 0.5)
""",
        ["meddles"],
    ),
    "settings of the libraries": (
        """
@method("resets")
class Resets(Method):
    def learn(self, source, *, seed, device, progress):
        import torch
        np.random.seed(seed)
        torch.manual_seed(1)
        torch.set_default_dtype(torch.float64)
        torch.use_deterministic_algorithms(True)
        np.seterr(all="raise")
        self.state_["x"] = np.zeros(1)
    def score(self, target):
        return np.full(len(target), 0.5)
""",
        ["resets"],
    ),
}
LINEAR = [name for name in sorted(METHODS) if not issubclass(METHODS[name], DeepMethod) and name != "average"]
NETWORKS = [name for name in sorted(METHODS) if issubclass(METHODS[name], DeepMethod)]
QUICK = ["erm", "genm", "m2lgdg-connectome"]
FIELDS = {
    **{name: {"variant": "small", "epochs": 1, "warmup": 0} for name in NETWORKS},
    "average": {"methods": ["fc-logistic", "connectome-adaptive"]},
}
PACKAGE = [*LINEAR, "average", *QUICK]
SERVER = """
import importlib, json, os, pkgutil, sys
import m2lgdg.study, sklearn.svm, torch, torch._dynamo
from m2lgdg import run_study
for module in pkgutil.iter_modules(m2lgdg.study.__path__, "m2lgdg.study."):
    importlib.import_module(module.name)
torch.set_num_threads(1)
list(m2lgdg.METHODS.values())
for study, out in json.load(open(sys.argv[1])):
    child = os.fork()
    if not child:  # has the package and nothing else
        try:
            run_study(study, out, engine="serial")
        except BaseException as error:
            open(out + ".error", "w").write(f"{type(error).__name__}: {error}")
        os._exit(0)
    os.waitpid(child, 0)
"""


def run(folder, jobs):
    """Run studies by name, each in a process of its own that has only imported the package; what each found."""
    (folder / "jobs.json").write_text(json.dumps([(study, str(folder / name)) for name, study in jobs.items()]))
    (folder / "server.py").write_text(SERVER)
    with (folder / "printed.txt").open("w") as printed:
        command = [sys.executable, "server.py", "jobs.json"]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=folder, stdin=subprocess.DEVNULL, stdout=printed, stderr=printed, env=environment)
    assert done.returncode == 0, (folder / "printed.txt").read_text()
    return {name: read(folder / name) for name in jobs}


def read(out):
    """method -> probabilities as they are stored, or the error that ended the study."""
    error = out.with_name(f"{out.name}.error")
    if error.exists():
        return error.read_text()
    table = pd.read_csv(out / "predictions.csv", dtype=str)
    return {method: rows["proba"].tolist() for method, rows in table.groupby("method")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hostile")
    make_cohort("tiny", sizes={"east": 10, "north": 14, "south": 12, "west": 16}, seed=1).save(folder / "tiny.cohort")
    for attack, (plugin, _) in ATTACKS.items():
        (folder / f"{attack}.py").write_text(HEAD + plugin)
    return folder


def study(folder, methods, *attacks):
    fields = {method: FIELDS[method] for method in methods if method in FIELDS}
    plugins = [str(folder / f"{attack}.py") for attack in attacks]
    own = {"cohort": str(folder / "tiny.cohort"), "methods": methods, "plugins": plugins, "method": fields}
    return own | {"seeds": [0], "targets": ["east"]}


OWN = {method: attack for attack, (_, methods) in ATTACKS.items() for method in methods}


@pytest.fixture(scope="module")
def found(folder):
    """Every method alone, and package methods after the methods of each plugin, and of all of them."""
    jobs = {f"alone {method}": study(folder, [method]) for method in PACKAGE}
    jobs |= {f"alone {method}": study(folder, [method], attack) for method, attack in OWN.items()}
    jobs |= {attack: study(folder, [*own, *PACKAGE], attack) for attack, (_, own) in ATTACKS.items()}
    return run(folder, jobs | {"all": study(folder, [*OWN, *PACKAGE], *ATTACKS)})


def differing(methods, together, found):
    """Methods that failed, or that differ in a study from what they are alone."""
    assert isinstance(together, dict), together
    return [one for one in methods if one not in together or found[f"alone {one}"] != {one: together[one]}]


@pytest.mark.long
@pytest.mark.parametrize("attack", [*ATTACKS, "all"])
def test_methods_are_the_same_beside_a_hostile_plugin(found, attack):
    own = OWN if attack == "all" else ATTACKS[attack][1]
    assert differing([*own, *PACKAGE], found[attack], found) == []


@pytest.mark.long
def test_every_network_is_the_same_beside_all_plugins(folder):
    jobs = {f"alone {method}": study(folder, [method]) for method in NETWORKS}
    found = run(folder, jobs | {"networks": study(folder, [*OWN, *NETWORKS], *ATTACKS)})
    assert differing(NETWORKS, found["networks"], found) == []


def test_a_plugin_cannot_take_the_name_of_a_package_method(folder):
    (folder / "taken.py").write_text(HEAD + '\n@method("fc-logistic")\nclass Mine(FCLogistic):\n    pass\n')
    with pytest.raises(InputError, match="fc-logistic"):
        run_study(study(folder, ["fc-logistic"], "taken"), folder / "taken")
