"""Features of the methods as scikit-learn transformers, to be put into pipelines of one's own.

They compute with the functions of `connectivity`, `tangent` and `methods.linear`, so that their numbers are those of the
methods. `inputs` reads X.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt
from sklearn.base import BaseEstimator, OneToOneFeatureMixin, TransformerMixin
from sklearn.utils.validation import check_is_fitted, column_or_1d, validate_data

from m2lgdg.cohort import Cohort
from m2lgdg.connectivity import View, covariances, fc_features, frame_weighted, standardised
from m2lgdg.method import interchangeable
from m2lgdg.methods.blocks import standardised_block
from m2lgdg.methods.linear import REFERENCE_SUBJECTS, REFERENCE_TOLERANCE
from m2lgdg.methods.within_sites import balance
from m2lgdg.scans import SERIES, Scans
from m2lgdg.sklearn_bridge.inputs import InvalidInput, Subjects, as_cohort, read_groups, read_x
from m2lgdg.tangent import geometric_mean, tangent_features

Floats = npt.NDArray[np.float64]
BETWEEN = "--"  # the names of two ROIs in the name of an edge


class _OfScans(TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """A transformer of scans to (subject, feature), each row of its own subject and of what was fitted."""

    diagonal: ClassVar[bool] = False  # whether there are features of an ROI with itself
    needs_series: ClassVar[bool] = False

    def __init__(self, rois: Sequence[str] | None = None) -> None:
        self.rois = rois

    def fit(self, X: Any, y: Any = None) -> Self:
        """Learn the ROIs and the kind of the scans, and of `TangentConnectivity` the reference.

        Parameters
        ----------
        X : list of arrays of shape (time, ROI), or array of shape (subject, time, ROI)
            Series, which may differ in length; or connectomes, matrices of shape (ROI, ROI); or a `Cohort` of one atlas.
        y : ignored

        Returns
        -------
        self
        """
        self._fitted(X)
        return self

    def fit_transform(self, X: Any, y: Any = None) -> Floats:
        """`fit`, then `transform` of the same X, which is read once."""
        return self._features(self._fitted(X))

    def transform(self, X: Any) -> Floats:
        """(subject, feature) float64; X as in `fit`, of the same ROIs and the same kind of scans."""
        check_is_fitted(self, "rois_")
        name, subjects = type(self).__name__, self._read(X)
        held = subjects.cohort.values if subjects.cohort is not None else SERIES if subjects.kind == SERIES else self.scans_
        if not interchangeable(held, self.scans_) or (subjects.kind == SERIES) != (self.scans_ == SERIES):
            raise InvalidInput(f"{name} was fitted on scans that are {self.scans_}, but X holds {subjects.kind} ({held}).")
        cohort = as_cohort(subjects, fitted_on=self.scans_)
        if len(cohort.rois) != self.n_features_in_:
            raise InvalidInput(f"X has {len(cohort.rois)} ROIs, but {name} was fitted on {self.n_features_in_}.")
        given = subjects.cohort is not None and self.of_cohort_
        for i, (known, now) in enumerate(zip(self.rois_, cohort.rois, strict=True) if given else ()):
            if known != now:
                raise InvalidInput(f"ROI {i + 1} is {known} in the fit but {now} in X: another atlas or order.")
        return self._features(cohort)

    def get_feature_names_out(self, input_features: Any = None) -> npt.NDArray[Any]:
        """Name of each feature: the names of two ROIs, as in Precentral_L--Precentral_R.

        Parameters
        ----------
        input_features : array of shape (ROI,), optional
            Names of ROIs, in place of those of the fit.
        """
        check_is_fitted(self, "rois_")
        names = self.rois_ if input_features is None else np.asarray(input_features, dtype=object)
        if names.shape != self.rois_.shape:
            raise ValueError(f"input_features should have length equal to the number of ROIs ({len(self.rois_)}).")
        rows, columns = np.triu_indices(len(names), 0 if self.diagonal else 1)
        return np.array([f"{names[i]}{BETWEEN}{names[j]}" for i, j in zip(rows, columns, strict=True)], dtype=object)

    def _fitted(self, X: Any) -> Cohort:
        name, subjects = type(self).__name__, self._read(X)
        if self.needs_series and subjects.kind != SERIES:
            raise InvalidInput(f"{name} is computed from time series, and X holds connectomes.")
        cohort = as_cohort(subjects)
        names = list(cohort.rois if self.rois is None else map(str, self.rois))
        if len(names) != len(cohort.rois) or len(set(names)) < len(names):
            raise InvalidInput(f"rois has {len(set(names))} different names, but X has {len(cohort.rois)} ROIs.")
        if len(names) < 2:
            raise InvalidInput(f"X has 1 feature(s), a single ROI; {name} needs two.")
        self.n_features_in_, self.rois_ = len(names), np.array(names, dtype=object)
        self.scans_, self.of_cohort_ = cohort.values, subjects.cohort is not None and self.rois is None
        self._learn(cohort.scans)
        return cohort

    def _read(self, X: Any) -> Subjects:
        subjects = read_x(X)
        if subjects.kind == "vectors":
            needs = "series of shape (time, ROI) or matrices of shape (ROI, ROI) for each subject"
            raise InvalidInput(f"{type(self).__name__} needs {needs}, but X is a table; give (subject, time, ROI).")
        return subjects

    def _learn(self, scans: Scans) -> None:
        """Fit what is fitted; nothing for features of one subject alone."""

    def _features(self, cohort: Cohort) -> Floats:
        return np.asarray(self._compute(cohort.scans), dtype=np.float64)

    def _compute(self, scans: Scans) -> npt.NDArray[Any]:
        raise NotImplementedError

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.two_d_array, tags.input_tags.three_d_array = False, True
        return tags


class Connectivity(_OfScans):
    """Fisher z of the correlations between ROIs, the features of `fc-logistic` and the like.

    Parameters
    ----------
    rois : sequence of str, optional
        Names of the ROIs, for the names of the features; by default those of a cohort, or numbers from 1.

    Attributes
    ----------
    rois_ : ndarray of shape (ROI,)
    n_features_in_ : int
        Number of ROIs.
    scans_ : str
        Kind of the scans of the fit: series, correlation, fisher-z, covariance or partial-correlation.

    Examples
    --------
    >>> import m2lgdg
    >>> cohort = m2lgdg.make_cohort("tiny")
    >>> edges = m2lgdg.Connectivity().set_output(transform="pandas").fit_transform(cohort)
    >>> edges.shape == (len(cohort), len(cohort.rois) * (len(cohort.rois) - 1) // 2)
    True
    """

    views: ClassVar[tuple[View, ...]] = (standardised,)  # a bare function would be a method

    def _compute(self, scans: Scans) -> npt.NDArray[Any]:
        return fc_features(scans, self.views[0])


class FrameWeightedConnectivity(Connectivity):
    """Fisher z of correlations in which time points of unusual amplitude count less: block `steady` of the default method.

    It needs time series.

    Parameters
    ----------
    rois : sequence of str, optional
        Names of the ROIs, for the names of the features; by default those of a cohort, or numbers from 1.

    Examples
    --------
    >>> import m2lgdg
    >>> cohort = m2lgdg.make_cohort("tiny")
    >>> m2lgdg.FrameWeightedConnectivity().fit(cohort).get_feature_names_out()[0] == "--".join(cohort.rois[:2])
    True
    """

    views = (frame_weighted,)
    needs_series = True


class TangentConnectivity(_OfScans):
    """Tangent-space covariances at the geometric mean of the fit, the features of `tangent-logistic` and `tangent-ridge`.

    Off-diagonal features are times the square root of 2. Of a connectome, the correlations are made positive definite.

    Parameters
    ----------
    rois : sequence of str, optional
        Names of the ROIs, for the names of the features; by default those of a cohort, or numbers from 1.

    Attributes
    ----------
    reference_ : ndarray of shape (ROI, ROI)
        Geometric mean of the covariances, as precise as the methods need it.

    Examples
    --------
    >>> import m2lgdg
    >>> fold = next(iter(m2lgdg.leave_one_site_out(m2lgdg.make_cohort("tiny"))))
    >>> tangent = m2lgdg.TangentConnectivity().fit(fold.source)
    >>> len(tangent.transform(fold.target)) == len(fold.target)
    True
    """

    diagonal = True

    def _learn(self, scans: Scans) -> None:
        matrices = covariances(scans)
        self.reference_ = geometric_mean(matrices, tolerance=REFERENCE_TOLERANCE, first_step=REFERENCE_SUBJECTS)

    def _compute(self, scans: Scans) -> npt.NDArray[Any]:
        return tangent_features(covariances(scans), self.reference_)


@dataclass(frozen=True)
class _Labelled:
    """What `balance` and `standardised_block` need of a cohort."""

    sites: npt.NDArray[np.str_]
    labels: npt.NDArray[np.intp]

    def __len__(self) -> int:
        return len(self.sites)

    @property
    def site_names(self) -> list[str]:
        """Each site once."""
        return sorted(set(self.sites.tolist()))


class SiteCentring(OneToOneFeatureMixin, TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """Features minus the mean of their site, as the linear methods that learn within sites have them.

    A subject without a site, or of one that was not in the fit, is centred by the mean of all of the fit: what a subject of a
    new hospital can have. So `fit_transform` with sites differs from `transform` without.

    Parameters
    ----------
    balanced : bool
        Whether the two classes of y count alike in the mean of a site; a site with one class does not count in that of all.
        Without y, or with other than two classes, each subject counts alike.
    scale : bool
        Whether to divide by the sd within sites, too. The result is then what the linear methods are fitted on.

    Attributes
    ----------
    sites_ : ndarray of shape (site,)
    site_means_ : ndarray of shape (site, feature)
    mean_ : ndarray of shape (feature,)
    scale_ : ndarray of shape (feature,)
        Sd within sites; 1 for a constant feature.

    Examples
    --------
    >>> import m2lgdg
    >>> cohort = m2lgdg.make_cohort("tiny")
    >>> edges = m2lgdg.Connectivity().fit_transform(cohort)
    >>> centred = m2lgdg.SiteCentring(balanced=False).fit_transform(edges, groups=cohort.sites)
    >>> bool(abs(centred[cohort.sites == cohort.sites[0]].mean(axis=0)).max() < 1e-9)
    True
    """

    def __init__(self, balanced: bool = True, scale: bool = False) -> None:
        self.balanced, self.scale = balanced, scale

    def fit(self, X: Any, y: Any = None, groups: Any = None) -> Self:
        """Learn the means.

        Parameters
        ----------
        X : array of shape (subject, feature)
        y : array of shape (subject,), optional
            Labels.
        groups : array of shape (subject,), optional
            Site of each subject; without, all subjects count as one site.

        Returns
        -------
        self
        """
        values = validate_data(self, X, dtype=np.float64)
        source = _Labelled(read_groups(groups, Subjects("vectors", vectors=values)), self._labels(y, len(values)))
        weights = balance(source) if source.labels.any() else np.ones(len(values))
        block = standardised_block(values, source, weights, within_sites=True)
        self.sites_, self.mean_, self.scale_ = np.unique(source.sites), block.centre, block.scale
        self.site_means_ = block.centre + block.rows.shift * block.scale
        return self

    def fit_transform(self, X: Any, y: Any = None, groups: Any = None) -> Floats:
        """`fit`, then `transform` with the same sites."""
        return self.fit(X, y, groups).transform(X, groups)

    def transform(self, X: Any, groups: Any = None) -> Floats:
        """(subject, feature) centred features; groups are sites, and those that the fit did not have count as none."""
        check_is_fitted(self, "mean_")
        values = validate_data(self, X, dtype=np.float64, reset=False)
        means: Floats = self.mean_[None]
        if groups is not None:
            sites = np.asarray(groups).astype(np.str_)
            if sites.shape != (len(values),):
                raise InvalidInput(f"groups has shape {sites.shape}, but X has {len(values)} subjects.")
            known = dict(zip(self.sites_.tolist(), self.site_means_, strict=True))
            means = np.stack([known.get(site, self.mean_) for site in sites.tolist()])  # (subject, feature)
        return np.asarray((values - means) / (self.scale_ if self.scale else 1.0))

    def _labels(self, y: Any, count: int) -> npt.NDArray[np.intp]:
        """(subject,) 0 and 1 for two classes; otherwise 0 for all."""
        if y is None or not self.balanced:
            return np.zeros(count, dtype=np.intp)
        values = column_or_1d(y)
        if len(values) != count:
            raise InvalidInput(f"y has {len(values)} labels, but X has {count} subjects.")
        classes, labels = np.unique(values, return_inverse=True)
        return np.asarray(labels if len(classes) == 2 else np.zeros(count), dtype=np.intp)
