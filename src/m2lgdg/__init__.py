"""m2lgdg: does a brain-imaging classifier work at a hospital it has never seen?

storage     files that appear whole or not at all; `InputError`
cohort      `Cohort`: series, phenotypes, sites, labels of many subjects
readers     `read`: every release we know, into a `Cohort`
duplicates  the same scan twice
check       what is wrong with a cohort, in sentences
synthetic   `make_cohort`: a multi-site cohort whose truth is known
splits      who trains and who tests: `leave_one_site_out`
preprocess, connectivity   phenotypes and series into features, fitted on source only
metrics, stats             scores of one site; per site, macro, paired tests
losses, graph              M²LG-DG's losses, its brain graph
shift       how far a new subject is from source, flags
promise     what scores mean at an unseen site, by sites of source left out
registry    `METHODS`: every method by its name
method      `Method`, `make`: two verbs, models on disk
deep        `DeepMethod`: the only training loop
methods     one file an idea
config      study files
claim       whose a study's folder is, and its lock
engines, study             `run_study`: every cell once, resumable, on any engine
baselines   what phenotypes, motion and the site tell without any brain
audit       whether anything of a target reaches a method
report      tables and pages from predictions
commands, cli              the commands
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
    from m2lgdg.method import make as make
    from m2lgdg.registry import METHODS as METHODS
    from m2lgdg.splits import leave_one_site_out as leave_one_site_out
    from m2lgdg.storage import InputError as InputError
    from m2lgdg.study.runner import run_study as run_study

__version__ = "0.1.0"

# Loaded when first used, so that `m2lgdg --help` does not wait for numpy, pandas or torch.
_HOMES = {
    "Cohort": "cohort",
    "InputError": "storage",
    "METHODS": "registry",
    "Method": "method",
    "check_cohort": "data.check",
    "leave_one_site_out": "splits",
    "make": "method",
    "make_cohort": "data.synthetic",
    "read": "data.readers",
    "run_study": "study.runner",
}
__all__ = [
    "METHODS",
    "Cohort",
    "InputError",
    "Method",
    "check_cohort",
    "graph",
    "leave_one_site_out",
    "losses",
    "make",
    "make_cohort",
    "read",
    "run_study",
]


def __getattr__(name: str) -> object:
    if name in ("graph", "losses"):
        return importlib.import_module(f"m2lgdg.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'm2lgdg' has no attribute {name!r}")
    home = importlib.import_module(f"m2lgdg.{_HOMES[name]}")
    if name == "METHODS":
        return home.load_methods()
    return getattr(home, name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
