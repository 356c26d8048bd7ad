"""Tangent-Pearson ridge: a ridge classifier on the tangent space of covariances between rows of the correlation matrix.

A linear peer, trained as those of `linear.py`; only its features are different.
"""

from __future__ import annotations

from m2lgdg.method import method
from m2lgdg.methods.linear import Linear


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
    blocks = {"tangent_pearson": 1.0}
    learner = "ridge"
