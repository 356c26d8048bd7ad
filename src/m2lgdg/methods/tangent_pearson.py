"""Tangent-Pearson ridge: a ridge classifier on the tangent space of covariances between rows of the correlation matrix.

A linear peer, trained as those of `linear.py`; only its features are different.
"""

from __future__ import annotations

from collections.abc import Callable

from m2lgdg.cohort import Cohort
from m2lgdg.connectivity import row_covariances
from m2lgdg.method import method
from m2lgdg.methods.linear import REFERENCE_TOLERANCE, Linear
from m2lgdg.methods.solvers import Features
from m2lgdg.tangent import geometric_mean, tangent_features

BLOCK = "tangent_pearson"


@method("tangent-pearson-ridge", role="peer")
class TangentPearsonRidge(Linear):
    """Ridge classifier on the tangent space of Pearson matrices, whose rows are taken as observations; no site adaptation.

    As published, the rows of a subject's correlation matrix are the observations of a Ledoit-Wolf covariance, and this is
    projected to the tangent space, diagonal included; `tangent-ridge` projects the correlations themselves.
    Differs from the publication (made inductive): the reference is the geometric mean of source subjects alone, and features
    are not adapted to the target site (its MIDA uses all subjects, those of the target included). The penalty is chosen on
    held-out source sites.
    """

    reference = "Kunda et al. 2022, IEEE Transactions on Medical Imaging 42(1): 55-65"
    blocks = {BLOCK: 1.0}
    learner = "ridge"

    def learn(self, source: Cohort, *, seed: int, device: str, progress: Callable[..., None] | None) -> None:
        reference = geometric_mean(row_covariances(source.scans), tolerance=REFERENCE_TOLERANCE)
        self.state_[f"{BLOCK}.reference"] = reference
        super().learn(source, seed=seed, device=device, progress=progress)

    def _features(self, block: str, cohort: Cohort) -> Features:
        if block == BLOCK:
            return tangent_features(row_covariances(cohort.scans), self.state_[f"{BLOCK}.reference"])
        return super()._features(block, cohort)
