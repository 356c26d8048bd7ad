"""`edge_weights`: the weights of a fitted linear method by the names of two ROIs, as `coef_` of scikit-learn's linear models.

`explain` says what is important; these are the numbers that decide.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from sklearn.utils.validation import check_is_fitted

from m2lgdg.methods.linear import LOG_EUCLIDEAN, TANGENTS, VIEWS, Linear
from m2lgdg.model.model import Model
from m2lgdg.sklearn_bridge.estimator import MethodEstimator, OnVectors
from m2lgdg.storage import InputError

COLUMNS = ("atlas", "block", "roi", "other roi", "weight")


def edge_weights(fitted: Any) -> pd.DataFrame:
    """Weight of every edge in the logit of a fitted linear method.

    The logit of a subject is the sum of weights times features, plus the parts of amplitude, phenotypes and tables where the
    method has them, plus a constant. A large weight may be there to cancel noise: `m2lgdg explain` shows activation patterns.

    Parameters
    ----------
    fitted : Model, Method or estimator of `as_estimator`
        A fitted linear method, such as `fc-logistic` or `connectome-adaptive`.

    Returns
    -------
    pandas.DataFrame
        Columns atlas, block (fc, steady, log_euclidean, swings, tangent or tangent_pearson), roi, other roi and weight, in the
        order of the features. Tangent and log-Euclidean blocks also have each ROI with itself.

    Examples
    --------
    >>> import m2lgdg
    >>> cohort = m2lgdg.make_cohort("tiny")
    >>> weights = m2lgdg.edge_weights(m2lgdg.make("fc-logistic").fit(cohort))
    >>> list(weights.columns)
    ['atlas', 'block', 'roi', 'other roi', 'weight']
    >>> len(weights) == len(cohort.rois) * (len(cohort.rois) - 1) // 2
    True
    """
    if isinstance(fitted, MethodEstimator):
        check_is_fitted(fitted, "method_")
        fitted = fitted.method_
    if isinstance(fitted, OnVectors):
        raise InputError("the estimator was fitted on vectors, so the ROIs of its edges are not known.")
    model = fitted if isinstance(fitted, Model) else Model(fitted)
    if not isinstance(model.method, Linear):
        raise InputError(f"method {model.name} is not linear, so its edges have no weights; m2lgdg explain shows importance.")
    if not model.members:
        raise InputError(f"method {model.name} is not fitted yet.")
    scale = (model.recalibration or (1.0, 0.0))[0]
    scale *= model.mean_recalibration[0] / len(model.members) if len(model.members) > 1 else 1.0
    return pd.concat([_of_member(atlas, member, scale) for atlas, member in model.members.items()], ignore_index=True)


def _of_member(atlas: str, member: Any, scale: float) -> pd.DataFrame:
    """Weights of the method in one atlas."""
    rois, slope = np.array(member.facts_["rois"], dtype=object), scale * member.state_["calibration"][0]
    tables = [pd.DataFrame(columns=COLUMNS)]
    for block in member._weights():
        weights = slope * member.state_[f"{block}.weights"]
        if block not in (*VIEWS, *TANGENTS, LOG_EUCLIDEAN):  # amplitude and phenotypes
            continue
        rows, columns = np.triu_indices(len(rois), 1 if block in VIEWS else 0)
        tables.append(pd.DataFrame(dict(zip(COLUMNS, (atlas, block, rois[rows], rois[columns], weights), strict=True))))
    return pd.concat(tables[1:] or tables, ignore_index=True)
