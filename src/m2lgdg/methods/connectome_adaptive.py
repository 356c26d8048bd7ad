"""Connectome-adaptive, the default: adaptive ridge on connectivity and amplitude, with tables of brain structure.

A linear method as those of `linear.py`, whose blocks and weights were chosen on three data sets (docs/connectome-adaptive.md).
"""

from __future__ import annotations

from m2lgdg.cohort import Cohort
from m2lgdg.method import method
from m2lgdg.methods.linear import LOG_EUCLIDEAN, Linear
from m2lgdg.methods.tables import ALL, NONE, chosen_tables
from m2lgdg.storage import InputError


@method("connectome-adaptive", role="default")
class ConnectomeAdaptive(Linear):
    """Adaptive ridge on site-centred frame-weighted FC, its log-Euclidean form, deviation FC and log regional amplitude.

    The decision is the sum of four ridge classifiers with weights 1, 0.5, 0.3 and 0.2, Platt-scaled on held-out source sites.
    Their features, from each ROI's z-scored series:
    `steady`: Fisher z of weighted correlations. A time point with mean square e over ROIs has weight 1 / (1 + (e / median e)²),
    so that frames of unusual amplitude, as in head motion, count less.
    `log_euclidean`: matrix logarithm of the Ledoit-Wolf covariance between rows of the correlation matrix, the matrix of
    `tangent-pearson-ridge`; without a reference, so that nothing is fitted.
    `swings`: Fisher z of the correlations between absolute deviations |z|, which are high where ROIs deviate from their means
    at the same time, in either direction.
    `amplitude`: log sd of each ROI's raw series minus the subject's mean over ROIs.
    Features are centred and scaled as in `fc-adaptive`; target subjects are centred by the mean of source. The penalty is fixed
    at 3 times the mean squared feature norm. Variant `phenotypes` adds a phenotype block.
    On connectomes, plain FC (`fc`) takes the place of `steady`, and the last two blocks, which need series, are left out.
    Tables of brain structure are blocks of their own (`methods/tables.py`), with weights learned on held-out source sites.
    """

    atlases: str | tuple[str, ...] = "all"  # a weak atlas does no harm: docs/atlases.md
    tables: str | tuple[str, ...] = ALL
    scan: bool = True  # otherwise it decides without any block of the scan
    penalties: tuple[float, ...] = (3.0,)  # choosing among several on held-out source sites cost half a point of AUC on ABIDE

    blocks = {"steady": 1.0, LOG_EUCLIDEAN: 0.5, "swings": 0.3, "amplitude": 0.2}
    learner = "ridge"
    within_sites = True
    adaptive = ("fc", "steady", LOG_EUCLIDEAN, "swings", "amplitude")
    variants = {
        **Linear.variants,
        "no-structure": {"tables": NONE},
        "structure": {"scan": False},
        "structure-phenotypes": {"scan": False, "phenotypes": True},
        "scan-phenotypes": {"tables": NONE, "phenotypes": True},
    }

    def weights_of(self, scans: str) -> dict[str, float]:
        every = super().weights_of(scans)
        return every if self.scan else {name: weight for name, weight in every.items() if name == "phenotypes"}

    def _weights(self) -> dict[str, float]:
        """Without the log-Euclidean block in a model of 0.1.0."""
        every, facts = super()._weights(), vars(self).get("facts_", {})
        former = "calibration" in vars(self).get("state_", {}) and LOG_EUCLIDEAN not in facts.get("penalties", {})
        return {name: weight for name, weight in every.items() if not former or name != LOG_EUCLIDEAN}

    def need_inputs(self, source: Cohort) -> None:
        if not self.scan and not self.phenotypes and not chosen_tables(self.tables, source):
            raise InputError(
                f"method {self.name} without the scan needs tables or phenotypes; cohort {source.name} has no tables."
            )
        super().need_inputs(source)
