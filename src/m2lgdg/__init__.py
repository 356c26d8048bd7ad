"""m2lgdg: does a brain-imaging classifier work at a hospital it has never seen?

The root holds what a method author writes with; each folder answers one question of a lab.

cohort, cohort_file, findings, splits, preprocess, connectivity, tangent, graph, losses, sampler, metrics
            subjects, folds, features, the paper's equations as pure functions, scores
method, fields, registry, own_code, deep, devices, storage
            `Method` and its two verbs, names, the code that is hashed, the training loop of networks, where it runs, files
data        what do I have, and what is wrong with it: readers, atlases, checks
methods     which classifier: one file an idea
fast        the same networks in less time
model       can I trust it at a new site: `Model`, its folder, out-of-distribution scores, calibration
study       does it work at a site never seen: study files, runner, statistics, audit
sklearn_bridge
            scikit-learn in both directions: our methods as estimators, and estimators as methods
explain     which ROIs, edges, phenotypes and regions decide
report      tables, figures, the page, the model card
deploy      ONNX, calibration to a site, the local page for one subject
federated   one linear model of hospitals that keep their subjects
commands    the command line

`docs/architecture.md` has the whole picture.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from m2lgdg.cohort import Cohort as Cohort
    from m2lgdg.data.check import check_cohort as check_cohort
    from m2lgdg.data.readers import read as read
    from m2lgdg.data.synthetic import make_cohort as make_cohort
    from m2lgdg.method import Method as Method
    from m2lgdg.methods.from_torch import from_torch as from_torch
    from m2lgdg.metrics import evaluate as evaluate
    from m2lgdg.model.model import Model as Model
    from m2lgdg.model.model import load as load
    from m2lgdg.model.model import make as make
    from m2lgdg.registry import METHODS as METHODS
    from m2lgdg.report.page import write_report as write_report
    from m2lgdg.report.paper_tables import table as table
    from m2lgdg.sklearn_bridge.edges import edge_weights as edge_weights
    from m2lgdg.sklearn_bridge.estimator import as_estimator as as_estimator
    from m2lgdg.sklearn_bridge.from_sklearn import from_sklearn as from_sklearn
    from m2lgdg.sklearn_bridge.transformers import Connectivity as Connectivity
    from m2lgdg.sklearn_bridge.transformers import FrameWeightedConnectivity as FrameWeightedConnectivity
    from m2lgdg.sklearn_bridge.transformers import SiteCentring as SiteCentring
    from m2lgdg.sklearn_bridge.transformers import TangentConnectivity as TangentConnectivity
    from m2lgdg.splits import leave_one_site_out as leave_one_site_out
    from m2lgdg.storage import InputError as InputError
    from m2lgdg.study.runner import run_study as run_study

__version__ = "0.2.0"

# Loaded when first used, so that `m2lgdg --help` does not wait for numpy, pandas or torch.
_HOMES = {
    "Cohort": "cohort",
    "Connectivity": "sklearn_bridge.transformers",
    "FrameWeightedConnectivity": "sklearn_bridge.transformers",
    "InputError": "storage",
    "METHODS": "registry",
    "Method": "method",
    "Model": "model.model",
    "SiteCentring": "sklearn_bridge.transformers",
    "TangentConnectivity": "sklearn_bridge.transformers",
    "as_estimator": "sklearn_bridge.estimator",
    "check_cohort": "data.check",
    "edge_weights": "sklearn_bridge.edges",
    "evaluate": "metrics",
    "from_sklearn": "sklearn_bridge.from_sklearn",
    "from_torch": "methods.from_torch",
    "leave_one_site_out": "splits",
    "load": "model.model",
    "make": "model.model",
    "make_cohort": "data.synthetic",
    "read": "data.readers",
    "run_study": "study.runner",
    "table": "report.paper_tables",
    "write_report": "report.page",
}
_MODULES = ("cohort", "connectivity", "deep", "graph", "losses", "metrics", "method")
__all__ = [*_HOMES, *_MODULES]


def __getattr__(name: str) -> object:
    if name not in (*_MODULES, *_HOMES):
        raise AttributeError(f"module 'm2lgdg' has no attribute {name!r}")
    from m2lgdg.storage import needing

    with needing("networks", f"m2lgdg.{name}"):
        home = importlib.import_module(f"m2lgdg.{_HOMES.get(name, name)}")
    if name == "METHODS":
        return home.load_methods()
    return home if name in _MODULES else getattr(home, name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
