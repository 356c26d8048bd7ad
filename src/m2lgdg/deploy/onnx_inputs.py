"""How the inputs of an ONNX graph are prepared, in words for its JSON file.

`onnx.py` writes them there; somebody without this package computes the inputs from them.
"""

from __future__ import annotations

from m2lgdg import scans
from m2lgdg.connectivity import CLIP, LARGEST_Z, LEAST_EIGENVALUE
from m2lgdg.preprocess import SERIES_EPSILON

RESAMPLED = (
    "each ROI resampled to the given length by a not-a-knot cubic spline through equally spaced points, first and last kept; "
    "then minus its mean"
)
FISHER = f"0 with a ROI that never changes; clipped to -{CLIP} ... {CLIP}; then Fisher z, arctanh"
CORRELATION = f"Pearson correlations of the (time, roi) series in double precision; {FISHER}"
DEFINITE = "at least 1e-6 of the mean variance added to its diagonal"
TRIANGLE = "its matrix logarithm; upper triangle with the diagonal, row by row, off-diagonal times sqrt 2"
TANGENT = f"{DEFINITE}; W C W with W the inverse square root of `reference`; {TRIANGLE}"
SHRUNK = "Ledoit-Wolf covariance of the series after each ROI was set to mean 0 and sd 1 (a ROI that never changes: 0)"
EDGES = "of the ROI pairs (i, j), i < j, row by row: (1,2), (1,3), ..., (2,3), ..."
LOG_EDGES = f"{DEFINITE}; its matrix logarithm; times sqrt 2; {EDGES}"
ROWS = (
    "Pearson correlations of the (time, roi) series; Ledoit-Wolf covariance with the rows of this matrix, minus their mean, as "
    "observations"
)
PREPARED = {  # by name and number of dimensions: (subject, value) or (subject, row, column)
    ("series", 3): f"{RESAMPLED}, divided by (its population sd + {SERIES_EPSILON:g}); transposed to (roi, time)",
    ("scaled_series", 3): (
        f"{RESAMPLED}; the whole scan divided by (the root mean square over all its ROIs and time points + "
        f"{SERIES_EPSILON:g}); transposed to (roi, time)"
    ),
    ("fc", 2): f"{CORRELATION}; {EDGES}",
    ("steady", 2): (
        "of the series after each ROI was set to mean 0 and sd 1: e, the mean square over ROIs at each time point; weights "
        "1 / (1 + (e / median of e)^2) of the time points; weighted Pearson correlations in double precision; "
        f"{FISHER}; {EDGES}"
    ),
    ("swings", 2): f"of the absolute values of the series after each ROI was set to mean 0 and sd 1: {CORRELATION}; {EDGES}",
    ("fc", 3): f"{CORRELATION}; the whole symmetric matrix, with 0 on the diagonal",
    ("partial", 3): f"absolute partial correlations from the inverse of the {SHRUNK}; 0 on the diagonal",
    ("tangent", 2): f"{SHRUNK}, {TANGENT}",
    ("tangent_pearson", 2): f"{ROWS}, {TANGENT}",
    ("log_edges", 2): f"{ROWS}, {LOG_EDGES}",
    ("log_euclidean", 2): f"{ROWS}, {DEFINITE}; {TRIANGLE}",
    ("correlation", 3): (
        "Pearson correlations of the (time, roi) series in double precision; 0 with a ROI that never changes; the whole "
        "symmetric matrix, with 1 on the diagonal"
    ),
    ("amplitude", 2): (
        "log of the population sd of each ROI of the series as it is, minus the mean of these logs over ROIs; ROIs that never "
        "change do not count and are 0. If a (slope of the values on `profile` without an intercept), b (their population sd "
        "over ROIs) or c (their root mean square distance from `profile`) is below `low` or above `high` (null: no bound), the "
        "series is scaled differently from the training data: then `mean` is used instead"
    ),
    ("phenotypes", 2): "missing values replaced by `fill`, minus `mean`, divided by `scale`; 0 where `scale` is null",
}
CORRELATIONS = {  # from a connectome, by its kind
    scans.CORRELATION: "the correlations of the connectome",
    scans.FISHER_Z: "tanh of the Fisher z of the connectome",
    scans.COVARIANCE: "the covariances of the connectome divided by the sds of both ROIs (an sd of 0 counts as 1)",
    scans.PARTIAL: "the partial correlations of the connectome",
}


def prepared_connectome(kind: str, name: str, dimensions: int) -> str | None:
    """How an input of the graph is prepared from a connectome; None if it is not made from one."""
    z = f"{CORRELATIONS[kind]}, clipped to -{CLIP} ... {CLIP}; then Fisher z, arctanh"
    if kind == scans.FISHER_Z:
        z = f"the Fisher z of the connectome, clipped to -{LARGEST_Z:.7g} ... {LARGEST_Z:.7g}"
    matrix, least = f"{CORRELATIONS[kind]}, with 1 on the diagonal", f"{LEAST_EIGENVALUE:g}"
    definite = f"R, {matrix}; C = (1 - a) R + a I, a at least {least} and so large that no eigenvalue of C is below {least}"
    rows = f"{matrix}; Ledoit-Wolf covariance C with the rows of this matrix, minus their mean, as observations"
    partial = f"absolute partial correlations from the inverse of C: {definite}; 0 on the diagonal"
    if kind == scans.PARTIAL:
        partial = f"absolute values of {CORRELATIONS[kind]}; 0 on the diagonal"
    return {
        ("fc", 2): f"{z}; {EDGES}",
        ("fc", 3): f"{z}; the whole symmetric matrix, with 0 on the diagonal",
        ("correlation", 3): f"{matrix}; the whole symmetric matrix",
        ("partial", 3): partial,
        ("tangent", 2): f"{definite}; {TANGENT}",
        ("tangent_pearson", 2): f"{rows}; {TANGENT}",
        ("log_edges", 2): f"{rows}; {LOG_EDGES}",
        ("log_euclidean", 2): f"{rows}; {DEFINITE}; {TRIANGLE}",
        ("phenotypes", 2): PREPARED["phenotypes", 2],
    }.get((name, dimensions))


RAW_TABLE = (
    "the values of the table in the unit of the training data, in the order of `columns`; NaN where one is missing, and all "
    "NaN for a subject without the table. The graph itself replaces single missing values by `fill`, regresses out `confounds` "
    "(age and sex come with the input `phenotypes`) and decides without the table where less than half of the values are given"
)
TABLE = (
    "single missing values replaced by `fill`; minus `confounds` @ `slopes`, minus `mean`, divided by `scale`; a subject "
    "without the table, or with less than half of its columns: 0 in all columns. `confounds` are listed in their order: "
    "phenotypes with missing values replaced by `fill`, minus `mean`, divided by `scale`; the square of the scaled age; and a "
    "column of the table, minus `mean`, divided by `scale`"
)
