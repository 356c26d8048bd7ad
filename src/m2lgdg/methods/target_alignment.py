"""Peers of the adapted track: FC of source is aligned with a batch of unlabelled target subjects before a ridge is fitted.

In the strict track both are the ridge of `linear.py` on FC, because they have no batch to align with. They answer whether
more than the level of a site (`model.site_level`) can be learned from unlabelled subjects.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from m2lgdg.cohort import Cohort
from m2lgdg.method import method
from m2lgdg.methods.blocks import SMALLEST_SPREAD, Standardised
from m2lgdg.methods.linear import Linear
from m2lgdg.methods.solvers import Rows
from m2lgdg.methods.within_sites import source_folds
from m2lgdg.metrics import platt, sigmoid
from m2lgdg.storage import InputError

Floats = npt.NDArray[np.float64]


class Aligned(Linear):
    """Ridge on features that `aligned` computes from source, a batch of the target and the subjects to predict.

    Features of source stay in memory for this, and are not saved: a model from a folder predicts as in the strict track.
    """

    blocks = {"fc": 1.0}
    learner = "ridge"
    variants = {}
    unused = ("atlases", "phenotypes", "held_phenotypes")
    sees_batch = True

    def learn(self, source: Cohort, *, seed: int, device: str, progress: Callable[..., None] | None) -> None:
        super().learn(source, seed=seed, device=device, progress=progress)
        values = self._features("fc", source).astype(np.float64)
        centre, spread = values.mean(axis=0), values.std(axis=0)
        scale = np.where(spread > SMALLEST_SPREAD, spread, 1.0) * np.sqrt(values.shape[1])  # mean squared norm of about 1
        own = (values - centre) / scale
        self.source_ = source, own, self.prepared(own), centre, scale  # not saved with the model

    def score_adapted(self, target: Cohort, batch: Cohort) -> Floats:
        """(subject,) probability by a ridge on aligned features; penalty and Platt scaling are from held-out source sites."""
        if not hasattr(self, "source_"):
            raise InputError(f"method {self.name} can be aligned with a batch only in the process that fitted it.")
        source, own, prepared, centre, scale = self.source_
        other, wanted = ((self._features("fc", one) - centre) / scale for one in (batch, target))
        trained, scored = self.aligned(own, prepared, other, wanted, source.sites)
        middle = trained.mean(axis=0)
        names, site = np.unique(source.sites, return_inverse=True)
        rows = Rows(trained - middle, np.zeros((len(names), trained.shape[1])), site)
        block = self._solve(
            "fc",
            Standardised(rows, middle, np.ones(trained.shape[1])),
            source,
            source_folds(source, self.site_folds, self._subject_weights(source)),
        )
        slope, offset = platt(block.held_out, source.labels, source.sites)
        return sigmoid(slope * (scored @ block.weights + block.intercept) + offset)

    def prepared(self, source: Floats) -> Floats:
        """What `aligned` needs of source alone, computed once for all batches."""
        raise NotImplementedError

    def aligned(
        self, source: Floats, prepared: Floats, batch: Floats, target: Floats, sites: npt.NDArray[np.str_]
    ) -> tuple[Floats, Floats]:
        """(subject, component) of source and of the subjects to predict, from standardised features."""
        raise NotImplementedError


@method("mida")
class Mida(Aligned):
    """Maximum independence domain adaptation: components of FC that vary much and depend little on the site.

    W are the leading eigenvectors of K (mu H - H D D' H) K, where K is the linear kernel of source and batch, D marks the site
    of each subject (the batch is one site) and H centres. Differs from the publication: the features are Fisher-z FC,
    phenotypes are not among the domain factors, and predicted subjects are not in the kernel.
    """

    components: int = 100
    mu: float = 1.0

    reference = (
        "Kunda et al. 2022, IEEE Transactions on Medical Imaging 42(1): 55-65; Yan et al. 2018, IEEE Transactions on "
        "Cybernetics 48(1): 288-299"
    )
    bounds = {"components": (1, np.inf), "mu": (0, np.inf)}

    def prepared(self, source: Floats) -> Floats:
        return source @ source.T

    def aligned(
        self, source: Floats, prepared: Floats, batch: Floats, target: Floats, sites: npt.NDArray[np.str_]
    ) -> tuple[Floats, Floats]:
        known, between = np.concatenate([source, batch]), source @ batch.T
        kernel = np.block([[prepared, between], [between.T, batch @ batch.T]])  # (subject, subject)
        _, site = np.unique(sites, return_inverse=True)
        number = int(site.max()) + 1
        domain = np.eye(number + 1)[np.concatenate([site, np.full(len(batch), number)])]  # (subject, site)
        domain -= domain.mean(axis=0)
        centred = kernel - kernel.mean(axis=0)  # H K
        toward = domain.T @ kernel  # D' H K
        _, vectors = np.linalg.eigh(self.mu * centred.T @ centred - toward.T @ toward)
        weights = vectors[:, ::-1][:, : self.components]
        return kernel[: len(source)] @ weights, target @ (known.T @ weights)


@method("coral-target")
class CoralTarget(Aligned):
    """Correlation alignment: source gets mean and covariance of the batch, in the leading components of source FC.

    Both covariances are regularised by adding `ridge` times the mean variance of the components; the publication adds 1 to
    features of unit variance. Differs from the publication: components of FC instead of features of images, and a batch that
    does not contain the predicted subjects.
    """

    components: int = 100
    ridge: float = 1.0

    reference = "Sun et al. 2016, Return of frustratingly easy domain adaptation, AAAI"
    bounds = {"components": (1, np.inf), "ridge": (1e-6, np.inf)}

    def prepared(self, source: Floats) -> Floats:
        """(feature, component) leading axes of source."""
        values, vectors = np.linalg.eigh(source @ source.T)
        count = min(self.components, int((values > 1e-10 * values[-1]).sum()))
        return source.T @ (vectors[:, ::-1][:, :count] / np.sqrt(values[::-1][:count]))

    def aligned(
        self, source: Floats, prepared: Floats, batch: Floats, target: Floats, sites: npt.NDArray[np.str_]
    ) -> tuple[Floats, Floats]:
        own, other, scored = (one @ prepared for one in (source, batch, target))
        added = self.ridge * own.var(axis=0).mean() * np.eye(prepared.shape[1])
        whiten, colour = _power(np.cov(own.T) + added, -0.5), _power(np.cov(other.T) + added, 0.5)
        return (own - own.mean(axis=0)) @ whiten @ colour + other.mean(axis=0), scored


def _power(matrix: Floats, exponent: float) -> Floats:
    values, vectors = np.linalg.eigh(np.atleast_2d(matrix))
    return (vectors * values**exponent) @ vectors.T
