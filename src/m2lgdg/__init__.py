"""m2lgdg: does a brain-imaging classifier work at a hospital it has never seen?

storage     files that appear whole or not at all; `InputError`
cohort      `Cohort`: series, phenotypes, sites, labels of many subjects
readers     `read`: every release we know, into a `Cohort`
check       what is wrong with a cohort, in sentences
synthetic   `make_cohort`: a multi-site cohort whose truth is known
cli         the commands
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from m2lgdg.check import check as check
    from m2lgdg.cohort import Cohort as Cohort
    from m2lgdg.readers import read as read
    from m2lgdg.storage import InputError as InputError
    from m2lgdg.synthetic import make_cohort as make_cohort

__version__ = "0.1.0"

# Loaded when first used, so that `m2lgdg --help` does not wait for numpy, pandas or torch.
_HOMES = {
    "Cohort": "m2lgdg.cohort",
    "InputError": "m2lgdg.storage",
    "check": "m2lgdg.check",
    "make_cohort": "m2lgdg.synthetic",
    "read": "m2lgdg.readers",
}
__all__ = ["Cohort", "InputError", "check", "make_cohort", "read"]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'm2lgdg' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
