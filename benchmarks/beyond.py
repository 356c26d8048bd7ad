"""What was tried on the way to a better model: linear and kernel ridge on many readings of a scan, each site left out in turn.

Features are centred by site in source, classes balanced inside sites, the penalty is relative to the mean squared norm. NYU and
USM are never a target here: choices are made on the other sites, and these two are looked at once, by the studies.
Usage: python benchmarks/beyond.py COHORT [IDEA ...] [--motion COLUMN]; a JSON line an idea: mean AUC over targets by penalty.
"""

import argparse
import json

import numpy as np
from scipy.linalg import eigh
from scipy.signal import hilbert
from scipy.stats import rankdata

from m2lgdg import Cohort
from m2lgdg.connectivity import amplitude_features, correlations, fc_features, standardised, steady, swings
from m2lgdg.metrics import auc

KEPT = ("NYU", "USM")
PENALTIES = (1.0, 3.0, 10.0)


class Folds:
    """The targets with what does not depend on features."""

    def __init__(self, cohort, motion=None):
        self.cohort, self.sites = cohort, np.asarray(cohort.sites)
        self.y = 2.0 * cohort.labels - 1
        age, sex = (np.asarray(cohort.phenotypes[name], dtype=float) for name in ("age", "sex"))
        moved = [np.log(np.asarray(cohort.phenotypes[motion], dtype=float) + 0.01)] if motion else []
        self.confounds = np.stack([age, sex, *moved], axis=1)
        self.targets = [site for site in cohort.site_names if site not in KEPT]

    def source(self, target):
        return np.flatnonzero(self.sites != target)

    def weights(self, rows):
        """The same weight for both classes inside each site."""
        weights = np.zeros(len(rows))
        for site in np.unique(self.sites[rows]):
            for label in (-1, 1):
                here = (self.sites[rows] == site) & (self.y[rows] == label)
                weights[here] = (self.sites[rows] == site).sum() / (2 * max(here.sum(), 1))
        return weights / weights.mean()

    def design(self, rows, confounds):
        """Columns that are taken out of features: sites, and age and sex where asked."""
        own = (self.sites[rows][:, None] == np.unique(self.sites[rows])).astype(float)
        if not confounds:
            return own, None
        middle, spread = self.confounds[rows].mean(axis=0), self.confounds[rows].std(axis=0)
        return own, (self.confounds - middle) / spread

    def mean_auc(self, kernel_of, confounds=False):
        """{penalty: mean AUC over targets} of kernel ridge."""
        scores = self.scores(kernel_of, confounds)
        return {str(strength): self.mean_of(found) for strength, found in scores.items()}

    def mean_of(self, scores):
        """Mean AUC over targets of {target: scores}."""
        each = [auc(self.cohort.labels[self.sites == target], found) for target, found in scores.items()]
        return round(float(np.mean(each)), 4)

    def scores(self, kernel_of, confounds=False):
        """{penalty: {target: scores}} of kernel ridge; `kernel_of(target)` is the (subject, subject) kernel."""
        found = {strength: {} for strength in PENALTIES}
        for target in self.targets:
            rows, new = self.source(target), np.flatnonzero(self.sites == target)
            kernel, root = kernel_of(target), np.sqrt(self.weights(rows))
            own, extra = self.design(rows, confounds)
            whole = own if extra is None else np.concatenate([own, extra[rows]], axis=1)
            back = np.linalg.pinv(whole)
            rest = np.eye(len(rows)) - whole @ back
            inner = kernel[np.ix_(rows, rows)]
            centred = rest @ inner @ rest
            seen = kernel[np.ix_(new, rows)] @ rest
            if extra is not None:
                seen -= extra[new] @ (back[own.shape[1] :] @ (inner @ rest))
            size, axes = eigh(root[:, None] * centred * root)
            turned = axes.T @ (root * self.y[rows])
            for strength in PENALTIES:
                dual = root * (axes @ (turned / (size + strength * np.diag(centred).mean())))
                found[strength][target] = seen @ dual
        return found


def gram(features):
    features = features - features.mean(axis=0)
    kernel = features @ features.T
    return kernel / np.diag(kernel).mean()


def association(folds, features, target, confounds):
    """(feature,) |correlation| with the label in source, sites (and age and sex) taken out."""
    rows = folds.source(target)
    own, extra = folds.design(rows, confounds)
    axes, _ = np.linalg.qr(own if extra is None else np.concatenate([own, extra[rows]], axis=1))
    left = features[rows] - axes @ (axes.T @ features[rows])
    weighted = folds.weights(rows) * folds.y[rows]
    return np.abs(weighted @ left) / np.sqrt((left**2).sum(axis=0) * len(rows))


def adapted(folds, features, power=1.0, floor=0.0, confounds=False):
    """Kernels of features scaled by their association above `floor` times chance, to some power."""

    def kernel_of(target):
        r = association(folds, features, target, confounds)
        r = np.sqrt(np.maximum(r**2 - floor / len(folds.source(target)), 0)) + (0.05 * r.mean() if floor else 0.0)
        return gram(features * (r / r.mean()) ** power)

    return kernel_of


def band(series, tr, low, high):
    frequency, spectrum = np.fft.rfftfreq(len(series), tr), np.fft.rfft(series - series.mean(axis=0), axis=0)
    spectrum[(frequency < low) | (frequency >= high)] = 0
    return np.fft.irfft(spectrum, len(series), axis=0).astype(np.float32)


def lagged(series, tr, seconds=4.0):
    steps = max(1, round(seconds / tr))
    unit = (series - series.mean(axis=0)) / np.where(series.std(axis=0) > 0, series.std(axis=0), np.inf)
    return (unit[:-steps].T @ unit[steps:] / (len(unit) - steps)).ravel()


def mirrored(cohort, fc):
    """FC averaged with that of the other hemisphere's ROIs."""
    names, other = list(cohort.rois), {"L": "R", "R": "L"}
    pair = [names.index(name[:-1] + other[name[-1]]) if name[-2:] in ("_L", "_R") else i for i, name in enumerate(names)]
    upper = np.triu_indices(len(names), 1)
    whole = np.zeros((len(fc), len(names), len(names)))
    whole[:, upper[0], upper[1]] = fc
    whole += whole.transpose(0, 2, 1)
    return ((whole + whole[:, pair][:, :, pair]) / 2)[:, upper[0], upper[1]]


def radial(features, width):
    square = (features**2).sum(axis=1)
    apart = np.maximum(square[:, None] + square - 2 * features @ features.T, 0)
    return np.exp(-width * apart / np.median(apart))


def tangent(folds, shrinkage):
    """Kernels of logarithms of shrunken correlations, whitened by the log-Euclidean mean of source."""
    matrices = (1 - shrinkage) * correlations(folds.cohort.series) + shrinkage * np.eye(len(folds.cohort.rois))

    def logs(given):
        size, axes = np.linalg.eigh(given)
        return (axes * np.log(np.maximum(size, 1e-8))[:, None, :]) @ axes.transpose(0, 2, 1)

    plain, upper = logs(matrices), np.triu_indices(matrices.shape[1])

    def kernel_of(target):
        size, axes = np.linalg.eigh(plain[folds.source(target)].mean(axis=0))
        white = (axes * np.exp(-size / 2)) @ axes.T
        return gram(logs(white @ matrices @ white)[:, upper[0], upper[1]] * np.where(upper[0] == upper[1], 1, np.sqrt(2)))

    return kernel_of


def views():
    """{name: what is correlated}: readings of a series other than its values."""

    def envelope(series):
        return standardised(np.abs(hilbert(standardised(series), axis=0)))

    return {
        "steady time points": steady,
        "ranks": lambda series: standardised(rankdata(series, axis=0)),
        "swings": swings,
        "squares": lambda series: standardised(np.minimum(standardised(series) ** 2, 9)),
        "Hilbert envelope": envelope,
        "upward swings": lambda series: standardised(np.maximum(standardised(series), 0)),
        "signs": lambda series: standardised(np.sign(standardised(series))),
    }


def fused(folds, parts, confounds):
    """Mean AUC of the sum of several blocks' scores, each with its weight, all with the middle penalty."""
    total = {target: 0.0 for target in folds.targets}
    for weight, kernel_of, taken in parts:
        for target, found in folds.scores(kernel_of, confounds and taken)[PENALTIES[1]].items():
            total[target] = total[target] + weight * found / found.std()
    return {str(PENALTIES[1]): folds.mean_of(total)}


def ideas(folds):
    """{name: function without arguments that gives mean AUC by penalty}"""
    cohort = folds.cohort
    fc, amplitude = fc_features(cohort.series), amplitude_features(cohort.series)
    scans = list(zip(cohort.series, np.where(np.isnan(cohort.tr), 2.0, cohort.tr), strict=True))
    plain, loud = gram(fc), gram(amplitude / amplitude.std(axis=0))

    def one(kernel, confounds=False):
        return lambda: folds.mean_auc(lambda target: kernel, confounds)

    def many(kernel_of, confounds=False):
        return lambda: folds.mean_auc(kernel_of, confounds)

    def bands():
        cuts = ((0.01, 0.03), (0.03, 0.06), (0.06, 0.1))
        parts = [gram(fc_features([band(scan, tr, *cut) for scan, tr in scans])) for cut in cuts]
        return folds.mean_auc(lambda target: plain + sum(parts) / 3)

    found = {
        "fc": one(plain),
        "fc, age and sex out": one(plain, True),
        "amplitude": one(loud),
        "fc + 0.3 amplitude": one(plain + 0.3 * loud),
    }
    found["fc + three bands"] = bands
    found["fc + half lagged by 4 s"] = lambda: one(plain + 0.5 * gram(np.stack([lagged(*scan) for scan in scans])))()
    found["mirrored"], found["fc + mirrored"] = one(gram(mirrored(cohort, fc))), one(plain + gram(mirrored(cohort, fc)))
    found |= {f"radial {width}": one(radial(fc, width)) for width in (0.3, 1.0)}
    found |= {f"tangent, shrinkage {shrinkage}": many(tangent(folds, shrinkage)) for shrinkage in (0.1, 0.3)}
    found |= {f"adaptive, power {power}": many(adapted(folds, fc, power)) for power in (0.5, 1.0, 1.5, 2.0, 3.0)}
    found["adaptive, above chance"] = many(adapted(folds, fc, floor=1.0))
    found |= {
        f"adaptive, above {floor} chance, age and sex out": many(adapted(folds, fc, floor=floor, confounds=True), True)
        for floor in (0.5, 1.0, 2.0)
    }
    seen = {name: fc_features(cohort.series, view) for name, view in views().items()}
    for name, features in seen.items():
        found[f"adaptive, {name}, age and sex out"] = many(adapted(folds, features, floor=1.0, confounds=True), True)

    def beside(name, share=0.3):
        first, second = (adapted(folds, one, floor=1.0, confounds=True) for one in (fc, seen[name]))
        return lambda: folds.mean_auc(lambda target: first(target) + share * second(target), True)

    found |= {f"adaptive, fc + 0.3 {name}, age and sex out": beside(name) for name in seen}
    given = np.array(cohort.phenotypes[list(cohort.inputs)], dtype=float)
    given = np.where(np.isnan(given), np.nanmean(given, axis=0), given)
    phenotypes = gram((given - given.mean(axis=0)) / given.std(axis=0))
    for reported, confounds in (("", False), (", age and sex out", True)):
        blocks = ((1.0, seen["steady time points"]), (0.3, seen["swings"]), (0.2, amplitude / amplitude.std(axis=0)))
        parts = [(weight, adapted(folds, one, floor=1.0, confounds=confounds), True) for weight, one in blocks]
        with_ = [*parts, (0.3, lambda target: phenotypes, False)]
        found[f"steady | 0.3 swings | 0.2 amplitude{reported}"] = lambda parts=parts, out=confounds: fused(folds, parts, out)
        found[f"the same | 0.3 phenotypes{reported}"] = lambda parts=with_, out=confounds: fused(folds, parts, out)
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cohort")
    parser.add_argument("names", nargs="*", help="ideas to try; all without")
    parser.add_argument("--motion", help="a column of head motion that is taken out with age and sex, as func_mean_fd")
    options = parser.parse_args()
    for name, tried in ideas(Folds(Cohort.load(options.cohort), options.motion)).items():
        if not options.names or name in options.names:
            print(json.dumps({"idea": name, "mean_auc": tried()}), flush=True)


if __name__ == "__main__":
    main()
