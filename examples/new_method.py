"""A method of your own in one file, compared with a linear peer at every left-out site.

The same file is a plugin for studies: add `plugins = ["new_method.py"]` and the method's name to STUDY.toml, then run
`m2lgdg run STUDY.toml --out runs/own`. `m2lgdg audit STUDY.toml` tests that it leaks nothing of a target.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from m2lgdg.cohort import Cohort
from m2lgdg.connectivity import fc_features
from m2lgdg.method import Method, method


@method("nearest-neighbours")
class NearestNeighbours(Method):
    """Proportion of patients among the source subjects with the most similar connectivity."""

    neighbours: int = 9  # a field is a hyper-parameter: sweep it with [sweep.nearest-neighbours]

    stochastic = False  # the seed changes nothing
    remembers = ("features", "labels")  # features of subjects: such a model is never shared

    def learn(self, source: Cohort, *, seed: int, device: str, progress: Callable[..., None] | None) -> None:
        """Keep all source subjects; everything learned goes into `state_`."""
        self.state_["features"] = fc_features(source.series)  # (subject, edge)
        self.state_["labels"] = source.labels
        self.facts_["inputs"] = []  # no phenotype is used

    def score(self, target: Cohort) -> npt.NDArray[np.float64]:
        """One probability per subject, from that subject alone."""
        distance = ((fc_features(target.series)[:, None] - self.state_["features"]) ** 2).sum(axis=2)  # (target, source)
        nearest = np.argsort(distance, axis=1, kind="stable")[:, : self.neighbours]
        patients: npt.NDArray[np.float64] = self.state_["labels"][nearest].sum(axis=1)
        return (patients + 1) / (nearest.shape[1] + 2)


if __name__ == "__main__":
    import m2lgdg
    from m2lgdg.metrics import evaluate

    for fold in m2lgdg.leave_one_site_out(m2lgdg.make_cohort("tiny", seed=1)):
        for name in ("nearest-neighbours", "fc-logistic"):
            proba = m2lgdg.make(name).fit(fold.source).predict_proba(fold.target)[:, 1]
            print(f"left out {fold.site}: {name} AUC {evaluate(fold.target.labels, proba)['AUC']:.2f}")
