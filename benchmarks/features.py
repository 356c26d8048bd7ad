"""Series to one length, Fisher-z connectivity and tangent space of a cohort of REST-meta-MDD's size, beside scipy and nilearn.

The rulers: scipy's CubicSpline and z-scores ROI by ROI and nilearn's correlations subject by subject, on a sample of subjects
and scaled up to all; nilearn's `ConnectivityMeasure(kind="tangent")` on the same subjects as ours. Equality is shown as well.
Usage: python benchmarks/features.py [--subjects 2269] [--sample 30] [--tangent 150] [--repeats 3]; prints JSON lines.
"""

import argparse
import json
import warnings

import numpy as np
from nilearn.connectome import ConnectivityMeasure
from presets import preset
from scipy.interpolate import CubicSpline
from sklearn.covariance import EmpiricalCovariance
from threadpoolctl import threadpool_limits
from timing import by_turns, significant

from m2lgdg.connectivity import covariances, fc_features, geometric_mean, standardised, tangent_features
from m2lgdg.preprocess import standardised_series

LENGTH = 200


def series_by_roi(series):
    """One subject: (roi, time)."""
    rows = []
    for roi in series.T.astype(np.float64):
        resampled = CubicSpline(np.linspace(0, 1, len(roi)), roi)(np.linspace(0, 1, LENGTH))
        rows.append((resampled - resampled.mean()) / (resampled.std() + 1e-8))
    return np.array(rows, dtype=np.float32)


def correlations_by_nilearn(series):
    """Several subjects: (subject, edge)."""
    measure = ConnectivityMeasure(EmpiricalCovariance(), kind="correlation", vectorize=True, discard_diagonal=True)
    return np.arctanh(np.clip(measure.fit_transform([one.astype(np.float64) for one in series]), -0.999, 0.999))


def preprocessing(cohort, sample, repeats):
    """Ours on everybody, the loops on a sample."""
    everyone = list(cohort.series)
    some = everyone[:: -(-len(everyone) // sample)]
    share = len(everyone) / len(some)
    sides = {
        "series": (lambda: [series_by_roi(one) for one in some], lambda: standardised_series(everyone, LENGTH)),
        "connectivity": (lambda: correlations_by_nilearn(some), lambda: fc_features(everyone)),
    }
    result = {"subjects": len(everyone), "ruler_sample": len(some), "ruler_scaled_up_by": significant(share)}
    total = {"loops": 0.0, "ours": 0.0}
    for name, (loops, ours) in sides.items():
        taken = by_turns({"loops": loops, "ours": ours}, repeats)
        taken["loops"] *= share
        total = {side: total[side] + taken[side] for side in total}
        result[name] = {f"{side}_seconds": significant(value) for side, value in taken.items()}
        result[name]["times_faster"] = significant(taken["loops"] / taken["ours"])
    apart = np.abs(standardised_series(some, LENGTH) - np.array([series_by_roi(one) for one in some])).max()
    lower = np.tril_indices(len(cohort.rois), -1)
    upper = np.lexsort(lower)  # nilearn goes through the lower triangle row by row, that is the upper one column by column
    fisher = np.abs(fc_features(some) - correlations_by_nilearn(some)[:, upper]).max()
    result["largest_difference"] = {"series": significant(float(apart)), "connectivity": significant(float(fisher))}
    return result | {"times_faster": significant(total["loops"] / total["ours"])}


def tangent(cohort, subjects, repeats):
    """Reference and coordinates of the same standardised subjects."""
    some = list(cohort.series)[:: max(1, len(cohort) // subjects)][:subjects]
    wide = [standardised(one) for one in some]
    measure = ConnectivityMeasure(kind="tangent", vectorize=True, standardize=False)

    def ours():
        matrices = covariances(some)
        return tangent_features(matrices, geometric_mean(matrices))

    def nilearn():
        with threadpool_limits(1, "blas"):  # at this size threads of BLAS only slow it down; ours puts them to subjects
            return measure.fit_transform(wide)

    taken = by_turns({"nilearn": nilearn, "ours": ours}, repeats)
    matrices = covariances(some)
    at_theirs = tangent_features(matrices, measure.mean_)
    exact = tangent_features(matrices, geometric_mean(matrices, tolerance=1e-12))
    theirs = measure.transform(wide) * np.sqrt(2)  # theirs has the diagonal over sqrt 2, ours the rest times sqrt 2
    order = np.lexsort(np.tril_indices(len(cohort.rois)))
    return {
        "tangent_subjects": len(some),
        "nilearn_seconds": significant(taken["nilearn"]),
        "ours_seconds": significant(taken["ours"]),
        "times_faster": significant(taken["nilearn"] / taken["ours"]),
        "difference_at_the_same_reference": significant(float(np.abs(theirs[:, order] - at_theirs).max())),
        "ours_from_converged": significant(float(np.abs(ours() - exact).max())),
        "nilearn_from_converged": significant(float(np.abs(theirs[:, order] - exact).max())),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--subjects", type=int, default=2269)
    parser.add_argument("--sample", type=int, default=30)
    parser.add_argument("--tangent", type=int, default=150)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # nilearn's, of iterations that did not converge and of coming defaults
    cohort = preset().select(np.arange(options.subjects))
    print(json.dumps(preprocessing(cohort, options.sample, options.repeats)), flush=True)
    print(json.dumps(tangent(cohort, options.tangent, options.repeats)))


if __name__ == "__main__":
    main()
