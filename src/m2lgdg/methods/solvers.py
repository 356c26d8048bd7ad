"""Solvers of the linear methods: ridge, adaptive ridge, logistic regression and support vector machine.

`linear.py` asks for the solutions of all folds and penalties at once. Features are float32, sums float64. With more features
than subjects, solutions go through the Gram matrix of the subjects, or conjugate gradients if each fold has its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from m2lgdg.methods.newton import conjugate_gradients, newton_logistic, newton_logistic_by_gram
from m2lgdg.splits import Indices

Floats = npt.NDArray[np.float64]
Features = npt.NDArray[np.floating[Any]]  # float32 where there are many
CHUNK = 1024  # features converted to float64 at once
LEAST_SCALE = 0.05  # least scale of an adaptive feature, relative to the mean association
CONVERGED = 1e-6  # residual of conjugate gradients, relative to the right-hand side
CHECKED = 1e-3  # relative residual at which products in float32 are followed by one in float64
MULTIPLE = 8  # columns of a product in float32: BLAS is slower with 6 than with 8
SVM_TOLERANCE = 1e-6  # of margins; with more subjects than features libsvm needs millions of steps for it, and has its own
FEW = 1000  # features, with more subjects than these, up to which an eigendecomposition for each fold takes less time
LARGE = 5000  # subjects and features, beyond which a logistic regression goes without the axes of the Gram matrix


@dataclass(frozen=True)
class Rows:
    """Standardised features of source subjects: as in training (centred by site, if asked), and as at an unseen site."""

    trained: Features  # (subject, feature)
    shift: Floats  # (site, feature): features at an unseen site are trained + shift[site]
    site: npt.NDArray[np.intp]  # (subject,) row of `shift`

    @cached_property
    def gram(self) -> Floats:
        """`products`, kept for the next fit on these rows."""
        return self.products()

    def products(self) -> Floats:
        """(subject, subject) products of training features; those of `CHUNK` features in their precision, sums in float64."""
        n = len(self.trained)
        total = np.zeros((n, n))
        for start in range(0, self.trained.shape[1], CHUNK):
            chunk = self.trained[:, start : start + CHUNK]
            if n <= LARGE:
                total += chunk @ chunk.T
                continue
            for first in range(0, n, CHUNK):  # one half, without a second matrix of this size
                last = first + CHUNK
                total[first:last, :last] += chunk[first:last] @ chunk[:last].T
        for first in range(0, n, CHUNK) if n > LARGE else ():
            total[:first, first : first + CHUNK] = total[first : first + CHUNK, :first].T
        return total

    @cached_property
    def scored_gram(self) -> Floats:
        """(subject, subject) products of features at an unseen site (rows) and training features (columns)."""
        return self.gram + times(self.trained, self.shift.T).T[self.site] if self.shift.any() else self.gram

    @cached_property
    def axes(self) -> tuple[Floats, Floats]:
        values, vectors = np.linalg.eigh(self.gram)
        nonzero = values > 1e-10 * max(float(values[-1]), 1e-300)
        return values[nonzero], vectors[:, nonzero]

    @cached_property
    def mean_square(self) -> float:
        """Mean squared norm of a subject's training features, the unit of penalties."""
        return float(sum(np.einsum("ij,ij->", values, values) for _, values in _chunks(self.trained)) / len(self.trained))

    @property
    def wide(self) -> bool:
        return bool(self.trained.shape[1] > len(self.trained))

    def take(self, subjects: Any) -> Rows:
        return Rows(self.trained[subjects], self.shift, self.site[subjects])

    def decisions(self, coefficients: Floats) -> Floats:
        """(penalty, subject) products of coefficients (penalty, feature) and features at an unseen site."""
        return times(self.trained, coefficients.T).T + (coefficients @ self.shift.T)[:, self.site]


class Solutions(NamedTuple):
    """Solutions for all penalties: decisions of subjects whose fold was left out (NaN if in no fold), and fits on all."""

    held_out: Floats  # (penalty, subject)
    intercepts: Floats  # (penalty,)
    coefficients: Callable[[int], Floats]  # index of a penalty -> (feature,)


class Problem(NamedTuple):
    """A block to be fitted: features, labels, subject weights, (train, test) folds and l2 penalties."""

    rows: Rows
    labels: npt.NDArray[np.int8]
    weights: Floats
    folds: list[tuple[Indices, Indices]]
    penalties: Floats

    @property
    def signs(self) -> Floats:
        return np.where(self.labels == 1, 1.0, -1.0)

    def fits(self) -> list[tuple[Indices, Indices]]:
        """Training and test subjects of each fit: those of each fold, then all subjects and none."""
        return [*self.folds, (np.arange(len(self.labels)), np.arange(0))]

    def trained(self) -> Floats:
        """(subject, fit) 1 for training subjects, 0 for those left out."""
        result = np.zeros((len(self.labels), len(self.folds) + 1))
        for i, (train, _) in enumerate(self.fits()):
            result[train, i] = 1.0
        return result

    def fit_weights(self) -> Floats:
        """(subject, fit) weights, 0 for subjects left out."""
        return self.trained() * self.weights[:, None]

    def held_out(self, decisions: Floats) -> Floats:
        """(penalty, subject) decisions of the fit without a subject's fold, from (fit, penalty, subject) decisions."""
        result: Floats = decisions[-1].copy()
        for i, (_, test) in enumerate(self.folds):
            result[:, test] = decisions[i][:, test]
        return result


def _chunks(features: Features) -> Iterator[tuple[slice, Floats]]:
    for start in range(0, features.shape[1], CHUNK):
        chunk = slice(start, start + CHUNK)
        yield chunk, features[:, chunk].astype(np.float64)


def times(features: Features, vectors: Floats) -> Floats:
    """features (subject, feature) @ vectors (feature, k), summed in float64."""
    total = np.zeros((len(features), vectors.shape[1]))
    for chunk, values in _chunks(features):
        total += values @ vectors[chunk]
    return total


def combine(vectors: Floats, features: Features) -> Floats:
    """vectors (k, subject) @ features (subject, feature), summed in float64."""
    total = np.empty((len(vectors), features.shape[1]))
    for chunk, values in _chunks(features):
        total[:, chunk] = vectors @ values
    return total


def ridge(problem: Problem) -> Solutions:
    """Ridge regression on labels -1 / 1."""
    return _ridge_by_gram(problem) if problem.rows.wide else _by_fold(problem, ridge_coefficients)


def adaptive_ridge(problem: Problem) -> Solutions:
    """Ridge on features scaled by their association with the label in the training subjects of each fold."""
    wide, alone = problem.rows.wide, len(problem.penalties) == 1
    if not wide and not (alone and problem.rows.trained.shape[1] > FEW):
        return _by_fold(problem, _adaptive_coefficients)
    return _adaptive_by_conjugate_gradients(problem) if alone else _adaptive_by_gram(problem)


def _by_fold(problem: Problem, learn: Callable[[Floats, Floats, Floats, Floats], tuple[Floats, Floats]]) -> Solutions:
    signs, rows = problem.signs, problem.rows
    each = [
        learn(rows.trained[train].astype(np.float64), signs[train], problem.weights[train], problem.penalties)
        for train, _ in problem.fits()
    ]
    return _solutions(problem, each)


def _solutions(problem: Problem, each: Sequence[tuple[Floats, Floats]]) -> Solutions:
    coefficients, intercepts = each[-1]
    held_out = np.full((len(problem.penalties), len(problem.labels)), np.nan)
    for (_, test), (own, offsets) in zip(problem.folds, each[:-1], strict=True):
        held_out[:, test] = problem.rows.take(test).decisions(own) + offsets[:, None]
    untested = np.isnan(held_out).any(axis=0)
    if untested.any():
        held_out[:, untested] = problem.rows.take(untested).decisions(coefficients) + intercepts[:, None]
    return Solutions(held_out, intercepts, lambda best: coefficients[best])


def ridge_coefficients(x: Floats, signs: Floats, weights: Floats, penalties: Floats) -> tuple[Floats, Floats]:
    """(penalty, feature) coefficients and (penalty,) intercepts; one eigendecomposition serves all penalties."""
    mean, mean_sign = np.average(x, axis=0, weights=weights), float(np.average(signs, weights=weights))
    root = np.sqrt(weights)
    z, t = (x - mean) * root[:, None], (signs - mean_sign) * root
    if len(z) < z.shape[1]:
        values, vectors = np.linalg.eigh(z @ z.T)
        coefficients = ((vectors.T @ t) / (values + penalties[:, None])) @ vectors.T @ z
    else:
        values, vectors = np.linalg.eigh(z.T @ z)
        coefficients = ((vectors.T @ (z.T @ t)) / (values + penalties[:, None])) @ vectors.T
    return coefficients, mean_sign - coefficients @ mean


def _adaptive_coefficients(x: Floats, signs: Floats, weights: Floats, penalties: Floats) -> tuple[Floats, Floats]:
    scale = association(x, signs, weights)
    coefficients, intercepts = ridge_coefficients(x * scale, signs, weights, penalties)
    return coefficients * scale, intercepts


def association(x: Floats, signs: Floats, weights: Floats) -> Floats:
    """(feature,) scales: each feature's absolute correlation with the label, less its chance level, rescaled to keep the norm.

    With r the correlation over n subjects: sqrt(max(r² - 1 / n, 0)) + 0.05 mean |r|.
    """
    squares = (x**2).sum(axis=0)
    sums = ((weights * signs) @ x)[None], squares[None], np.array([weights.sum()]), np.array([len(x)])
    return adaptive_scales(*sums)[0]


def adaptive_scales(products: Floats, squares: Floats, totals: Floats, counts: npt.NDArray[Any]) -> Floats:
    """(fit, feature) scales from weighted products with the label, sums of squares, summed weights and subject counts."""
    totals = np.where(totals > 0, totals, 1.0)[:, None]
    r = np.abs(products) / np.sqrt(np.where(squares > 0, squares, 1.0) * totals)
    # No feature is dropped: the chance level is an estimate.
    r = np.sqrt(np.maximum(r**2 - 1 / counts[:, None], 0.0)) + LEAST_SCALE * r.mean(axis=1, keepdims=True)
    norm = np.sqrt((squares * r**2).sum(axis=1, keepdims=True))
    whole = np.sqrt(squares.sum(axis=1, keepdims=True))
    return np.where(norm > 0, r * whole / np.where(norm > 0, norm, 1.0), 1.0)


def _ridge_by_gram(problem: Problem) -> Solutions:
    """One eigendecomposition of the weighted Gram matrix; folds are left out by block inversion.

    In the units of root weights r, the coefficients a of subjects and the intercept b solve (K + penalty) a + b r = r y with
    r' a = 0. With N the inverse of this system restricted to a, the solution without subjects t is a - N[:, t] N[t, t]^-1 a[t].
    """
    r = np.sqrt(problem.weights)
    values, vectors = np.linalg.eigh(problem.rows.gram * r[:, None] * r)
    along_r, along_y = vectors.T @ r, vectors.T @ (r * problem.signs)
    held_out = np.full((len(problem.penalties), len(r)), np.nan)
    dual, intercepts = np.empty_like(held_out), np.empty(len(problem.penalties))
    for i, penalty in enumerate(problem.penalties):
        inverse = 1 / (np.maximum(values, 0.0) + penalty)
        hr = vectors @ (inverse * along_r)
        size = float(r @ hr)
        b = float(r @ (vectors @ (inverse * along_y))) / size
        a = vectors @ (inverse * (along_y - b * along_r))
        dual[i], intercepts[i] = r * a, b
        for _, test in problem.folds:
            tested = vectors[test] * inverse  # (test, axis)
            block = tested @ vectors[test].T - np.outer(hr[test], hr[test]) / size
            removed = np.linalg.solve(block, a[test])
            drop = float(hr[test] @ removed) / size
            without = a - (vectors @ (tested.T @ removed) - hr * drop)
            without[test] = 0.0  # in exact arithmetic already
            held_out[i, test] = problem.rows.scored_gram[test] @ (r * without) + b - drop
    return _from_dual(problem, held_out, dual, intercepts)


def _from_dual(problem: Problem, held_out: Floats, dual: Floats, intercepts: Floats) -> Solutions:
    untested = np.isnan(held_out).any(axis=0)
    held_out[:, untested] = (problem.rows.scored_gram[untested] @ dual.T).T + intercepts[:, None]
    return Solutions(held_out, intercepts, lambda best: combine(dual[best][None], problem.rows.trained)[0])


def _adaptive_scales(problem: Problem) -> Floats:
    trained, weights = problem.trained(), problem.fit_weights()
    signed = weights * problem.signs[:, None]
    squares = np.empty((trained.shape[1], problem.rows.trained.shape[1]))
    products = np.empty_like(squares)
    for chunk, values in _chunks(problem.rows.trained):
        products[:, chunk] = signed.T @ values
        squares[:, chunk] = trained.T @ np.square(values, out=values)
    return adaptive_scales(products, squares, weights.sum(axis=0), trained.sum(axis=0))


def _adaptive_by_gram(problem: Problem) -> Solutions:
    """With several penalties: one Gram matrix (in float32) for each fit."""
    each = []
    for (train, _), scale in zip(problem.fits(), _adaptive_scales(problem), strict=True):
        weights, signs = problem.weights[train], problem.signs[train]
        root, relative, mean_sign = np.sqrt(weights), weights / weights.sum(), float(np.average(signs, weights=weights))
        scaled = problem.rows.trained[train] * scale.astype(np.float32)
        gram = (scaled @ scaled.T).astype(np.float64)
        along = gram @ relative  # products with the weighted mean
        gram += float(relative @ along) - along - along[:, None]
        gram *= root * root[:, None]
        right = root * (signs - mean_sign)
        # A Cholesky factor for each of eight penalties takes half the time of one eigendecomposition.
        dual = root * np.array([_solve_positive(gram, penalty, right) for penalty in problem.penalties])  # (penalty, subject)
        centred = dual - dual.sum(axis=1, keepdims=True) * relative
        coefficients = combine(centred, scaled) * scale  # (penalty, feature)
        each.append((coefficients, mean_sign - (coefficients / scale) @ combine(relative[None], scaled)[0]))
    return _solutions(problem, each)


def _solve_positive(matrix: Floats, penalty: float, right: Floats) -> Floats:
    """Solution x of (matrix + penalty) x = right, for a positive semi-definite matrix."""
    from scipy.linalg.lapack import dposv

    shifted = matrix.copy()
    shifted[np.diag_indices(len(matrix))] += penalty
    _, solution, failed = dposv(shifted.T, right, lower=1, overwrite_a=1)  # the transpose is in LAPACK's order
    return np.asarray(np.linalg.solve(matrix + penalty * np.eye(len(matrix)), right) if failed else solution)


def _adaptive_by_conjugate_gradients(problem: Problem) -> Solutions:
    """With one penalty, all folds together."""
    features, weights = problem.rows.trained, problem.fit_weights()  # (subject, feature), (subject, fit)
    penalties = np.repeat(problem.penalties, weights.shape[1])
    coefficients, products = scaled_ridge(features, _adaptive_scales(problem) ** 2, weights, problem.signs, penalties)
    relative = weights / weights.sum(axis=0)
    means = combine(relative.T, features)  # (fit, feature)
    intercepts = problem.signs @ relative - (means * coefficients).sum(axis=1)
    decisions = products + (coefficients @ problem.rows.shift.T)[:, problem.rows.site] + intercepts[:, None]  # (fit, subject)
    return Solutions(problem.held_out(decisions[:, None]), intercepts[-1:], lambda _: coefficients[-1].copy())


def scaled_ridge(
    features: Features, squared_scales: Floats, weights: Floats, signs: Floats, penalties: Floats
) -> tuple[Floats, Floats]:
    """Ridge regressions, each with its own scale of the features (fit, feature), subject weights (subject, fit) and penalty.

    (fit, feature) coefficients, in the units of the features, and their (fit, subject) products with all subjects. Conjugate
    gradients: every step reads the features twice, whatever the number of fits. Products are in float32; the residual is
    computed again in float64 until it is `CONVERGED`. No number of one fit enters another, and subjects of weight 0 enter none.
    """
    root = np.sqrt(weights)
    unit = root / np.sqrt(np.maximum(weights.sum(axis=0), 1e-300))  # a fit may have no subject
    count = len(penalties)
    padded = -(-count // MULTIPLE) * MULTIPLE
    single = np.zeros((padded, features.shape[1]), dtype=np.float32)  # (fit, feature)
    single[:count] = squared_scales
    coefficients, products = np.zeros_like(squared_scales), np.zeros((count, len(features)))

    def project(values: Floats) -> Floats:  # subtracts the weighted mean of the training features
        return values - unit * (unit * values).sum(axis=0)

    def fast(values: Floats) -> Floats:
        inner = np.zeros((padded, len(values)), dtype=np.float32)  # (fit, subject)
        inner[:count] = (root * project(values)).T
        product = (features @ (single * (inner @ features)).T)[:, :count]
        return project(root * product) + penalties * values

    def exact(values: Floats) -> Floats:
        inner = (root * project(values)).T  # (fit, subject)
        products[:] = 0.0
        for chunk, block in _chunks(features):
            coefficients[:, chunk] = squared_scales[:, chunk] * (inner @ block)
            products[:] += coefficients[:, chunk] @ block.T
        return project(root * products.T) + penalties * values

    _refined(exact, fast, project(root * signs[:, None]))  # the last solution is that of the last exact product
    return coefficients, products


def _refined(exact: Callable[[Floats], Floats], fast: Callable[[Floats], Floats], right: Floats) -> Floats:
    """Solution of exact(x) = right, column by column; `fast` is a cheaper product with small errors."""
    solution, residual = np.zeros_like(right), right
    goal = CONVERGED * np.maximum(np.sqrt((right**2).sum(axis=0)), 1e-300)
    for _ in range(20):
        size = np.sqrt((residual**2).sum(axis=0))
        left = size > goal  # (column,): a solved one is not improved by the steps of others
        if not left.any():
            break
        # Half of the goal, since the products of the correction have errors.
        relative = np.maximum(CHECKED, 0.5 * goal / np.maximum(size, 1e-300))
        solution = solution + conjugate_gradients(fast, np.where(left, residual, 0.0), relative**2)
        residual = right - exact(solution)
    return solution


def logistic(problem: Problem) -> Solutions:
    """l2-penalised logistic regression, for all penalties and folds at once."""
    rows, n, count = problem.rows, len(problem.labels), len(problem.penalties)
    if min(rows.trained.shape) > LARGE:
        return _logistic_by_gram(problem)
    if rows.wide:  # with an l2 penalty the solution lies in the span of the training rows: rotating into it is exact
        values, vectors = rows.axes
        x = vectors * np.sqrt(values)  # (subject, axis)
        scored = x if rows.scored_gram is rows.gram else rows.scored_gram @ (vectors / np.sqrt(values))
    else:
        x = rows.trained.astype(np.float64)
        scored = x + rows.shift[rows.site]
    each = problem.fit_weights()  # (subject, fit)
    weights = np.repeat(each, count, axis=1)  # (subject, fit and penalty)
    coefficients, intercepts = newton_logistic(x, problem.labels, weights, np.tile(problem.penalties, each.shape[1]))
    decisions = (scored @ coefficients + intercepts).T.reshape(each.shape[1], count, n)
    own = coefficients[:, -count:]  # of the fit on all subjects

    def primal(best: int) -> Floats:
        return combine((vectors @ (own[:, best] / np.sqrt(values)))[None], rows.trained)[0] if rows.wide else own[:, best]

    return Solutions(problem.held_out(decisions), intercepts[-count:], primal)


def _logistic_by_gram(problem: Problem) -> Solutions:
    rows, count = problem.rows, len(problem.penalties)
    each = problem.fit_weights()  # (subject, fit)
    weights = np.repeat(each, count, axis=1)  # (subject, fit and penalty)
    penalties = np.tile(problem.penalties, each.shape[1])
    gram = rows.products()  # freed at the end, as it is as large as the cohort
    dual, intercepts = newton_logistic_by_gram(gram, problem.labels, weights, penalties)
    decisions = (gram @ dual + intercepts).T  # (fit and penalty, subject)
    if rows.shift.any():
        decisions += (combine(dual.T, rows.trained) @ rows.shift.T)[:, rows.site]
    decisions = decisions.reshape(each.shape[1], count, -1)
    own = dual[:, -count:].T  # of the fit on all subjects
    return Solutions(problem.held_out(decisions), intercepts[-count:], lambda best: combine(own[best][None], rows.trained)[0])


def svm(problem: Problem) -> Solutions:
    """Linear support vector machine; all penalties and folds take their block of one Gram matrix."""
    from sklearn.svm import SVC

    rows, tolerance = problem.rows, SVM_TOLERANCE if problem.rows.wide else 1e-3
    held_out = np.full((len(problem.penalties), len(problem.labels)), np.nan)
    dual, intercepts = np.zeros_like(held_out), np.empty(len(problem.penalties))
    for train, test in problem.fits():
        train = train[problem.weights[train] > 0]  # SVC counts support vectors without the subjects of no weight
        gram, scored = np.ascontiguousarray(rows.gram[np.ix_(train, train)]), rows.scored_gram[np.ix_(test, train)]
        weights = problem.weights[train]
        for i, penalty in enumerate(problem.penalties):
            model = SVC(kernel="precomputed", C=1 / penalty, tol=tolerance).fit(gram, problem.labels[train], weights)
            own = np.zeros(len(train))
            own[model.support_] = model.dual_coef_[0]
            offset = _svm_intercept(gram @ own, problem.signs[train], own, weights / penalty)
            held_out[i, test] = scored @ own + offset
            if not len(test):  # the fit on all subjects
                dual[i, train], intercepts[i] = own, offset
    return _from_dual(problem, held_out, dual, intercepts)


def _svm_intercept(decision: Floats, signs: Floats, dual: Floats, most: Floats) -> float:
    """Middle of the intercepts that are optimal beside decisions without one; `most` are the bounds of |dual|.

    Under a strong penalty, all coefficients of classes of the same weight are at their bound, and a range of intercepts is
    optimal. Rounding would choose from it: libsvm takes an end of the range if it leaves one coefficient off its bound.
    """
    part = np.abs(dual) / most
    needed, inside = signs - decision, 1e-9  # the intercept with which a subject is on its margin
    grows, shrinks = part < 1 - inside, part > inside
    least = needed[np.where(signs > 0, grows, shrinks)].max(initial=-np.inf)
    largest = needed[np.where(signs > 0, shrinks, grows)].min(initial=np.inf)
    return float((least + largest) / 2)


LEARNERS: dict[str, Callable[[Problem], Solutions]] = {
    "ridge": ridge,
    "adaptive": adaptive_ridge,
    "logistic": logistic,
    "svm": svm,
}


def solved(problem: Problem, learner: str) -> Solutions:
    """By one of `LEARNERS`; decisions of 0 where no feature varies, as intercepts of folds would be taken for decisions."""
    if problem.rows.mean_square > 0:
        return LEARNERS[learner](problem)
    nothing = np.zeros(problem.rows.trained.shape[1])
    shape = len(problem.penalties), len(problem.labels)
    return Solutions(np.zeros(shape), np.zeros(len(problem.penalties)), lambda _: nothing)
