"""The solvers of the linear methods against scikit-learn and against refits on the training subjects of each fold."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.linear_model import LogisticRegression
from sklearn.svm import SVC

from m2lgdg.methods import newton, solvers
from m2lgdg.methods.solvers import LEARNERS, Problem, Rows, adaptive_ridge, association, combine, ridge_coefficients, times

SUBJECTS = 60


def problem(features=150, penalties=(0.1, 1.0, 10.0), seed=0, balanced=True, shifted=True):
    """Subjects of four sites with a signal in some features; two folds of whole sites, one site in no fold."""
    rng = np.random.default_rng(seed)
    site = np.arange(SUBJECTS) % 4
    labels = rng.integers(0, 2, SUBJECTS).astype(np.int8)
    labels[:8] = [0, 0, 0, 0, 1, 1, 1, 1]
    x = rng.normal(size=(SUBJECTS, features)) * rng.uniform(0.5, 2, features)
    x[:, :5] += (labels[:, None] - 0.5) * 1.5
    shift = rng.normal(size=(4, features)) * 0.3 if shifted else np.zeros((4, features))
    weights = np.ones(SUBJECTS) if balanced else rng.uniform(0.3, 2, SUBJECTS)
    if not balanced:
        weights[site == 3] = 0.0
    folds = [(np.flatnonzero(site != k), np.flatnonzero(site == k)) for k in (0, 1)]
    rows = Rows(x.astype(np.float32), shift, site)
    return Problem(rows, labels, weights, folds, np.array(penalties) * rows.mean_square)


def refitted(asked, fit):
    """Held-out decisions by fitting the training subjects of each fold alone; then the fit on all subjects."""
    x = asked.rows.trained.astype(np.float64)
    scored = x + asked.rows.shift[asked.rows.site]
    coefficients, intercepts = fit(x, asked.labels, asked.weights, asked.penalties)
    held_out = coefficients @ scored.T + intercepts[:, None]
    for train, test in asked.folds:
        some, b = fit(x[train], asked.labels[train], asked.weights[train], asked.penalties)
        held_out[:, test] = some @ scored[test].T + b[:, None]
    return held_out, coefficients, intercepts


def plain_ridge(x, labels, weights, penalties):
    """The weighted normal equations, with the intercept as a column that is not penalised."""
    columns = np.concatenate([x, np.ones((len(x), 1))], axis=1)
    found = []
    for penalty in penalties:
        cost = penalty * np.eye(columns.shape[1])
        cost[-1, -1] = 0.0
        right = columns.T @ (weights * (2.0 * labels - 1))
        found.append(np.linalg.solve(columns.T @ (weights[:, None] * columns) + cost, right))
    return np.array(found)[:, :-1], np.array(found)[:, -1]


def plain_adaptive(x, labels, weights, penalties):
    scale = association(x, 2.0 * labels - 1, weights)
    coefficients, intercepts = plain_ridge(x * scale, labels, weights, penalties)
    return coefficients * scale, intercepts


def plain_logistic(x, labels, weights, penalties):
    found = [LogisticRegression(C=1 / penalty, tol=1e-12, max_iter=20000, solver="newton-cg") for penalty in penalties]
    used = weights > 0
    for model in found:
        model.fit(x[used], labels[used], sample_weight=weights[used])
    return np.array([model.coef_[0] for model in found]), np.array([model.intercept_[0] for model in found])


def plain_svm(x, labels, weights, penalties):
    found = [SVC(kernel="linear", C=1 / penalty).fit(x, labels, sample_weight=weights) for penalty in penalties]
    return np.array([model.coef_[0] for model in found]), np.array([model.intercept_[0] for model in found])


CASES = {
    "ridge": (LEARNERS["ridge"], plain_ridge, 1e-6),
    "adaptive": (adaptive_ridge, plain_adaptive, 2e-5),
    "logistic": (LEARNERS["logistic"], plain_logistic, 2e-5),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("features", [150, 12], ids=["more features than subjects", "fewer features"])
@pytest.mark.parametrize("balanced", [True, False], ids=["equal weights", "other weights, some of them 0"])
@pytest.mark.parametrize("penalties", [(0.1, 1.0, 10.0), (1.0,)], ids=["three penalties", "one penalty"])
def test_every_fold_is_that_of_a_fit_on_its_training_subjects(name, features, balanced, penalties):
    learner, plain, tolerance = CASES[name]
    asked = problem(features, penalties, balanced=balanced)
    found = learner(asked)
    held_out, coefficients, intercepts = refitted(asked, plain)
    np.testing.assert_allclose(found.held_out, held_out, atol=tolerance * np.abs(held_out).max())
    np.testing.assert_allclose(found.intercepts, intercepts, atol=tolerance)
    for i in range(len(penalties)):
        np.testing.assert_allclose(found.coefficients(i), coefficients[i], atol=tolerance * np.abs(coefficients).max())


def test_support_vector_machines_take_their_part_of_the_gram_matrix():
    asked = problem(150, (0.01, 0.1))
    found = LEARNERS["svm"](asked)
    held_out, coefficients, intercepts = refitted(asked, plain_svm)
    np.testing.assert_allclose(found.held_out, held_out, atol=2e-3 * np.abs(held_out).max())  # libsvm's own tolerance
    np.testing.assert_allclose(found.intercepts, intercepts, atol=2e-3)
    np.testing.assert_allclose(found.coefficients(1), coefficients[1], atol=2e-3 * np.abs(coefficients).max())


@given(seed=st.integers(0, 2**31), features=st.integers(2, 140), penalty=st.floats(0.01, 100))
@settings(max_examples=25, deadline=None)
def test_the_ways_to_an_adaptive_ridge_agree(seed, features, penalty):
    """One penalty is solved by conjugate gradients and several by Gram matrices, if there are many features."""
    alone, among = (adaptive_ridge(problem(features, penalties, seed)) for penalties in ((penalty,), (penalty, 3.0)))
    scale = np.abs(among.held_out[0]).max()
    np.testing.assert_allclose(alone.held_out[0], among.held_out[0], atol=1e-4 * scale)


@pytest.mark.parametrize("balanced", [True, False])
def test_more_subjects_than_features_have_the_same_adaptive_ridge_by_conjugate_gradients(monkeypatch, balanced):
    asked = problem(12, (1.0,), balanced=balanced)
    monkeypatch.setattr(solvers, "_adaptive_by_conjugate_gradients", None)  # of few features each fold is decomposed
    direct = adaptive_ridge(asked)
    monkeypatch.undo()
    monkeypatch.setattr(solvers, "FEW", 11)
    monkeypatch.setattr(solvers, "_by_fold", None)
    found = adaptive_ridge(asked)
    np.testing.assert_allclose(found.held_out, direct.held_out, atol=2e-5 * np.abs(direct.held_out).max())
    np.testing.assert_allclose(found.intercepts, direct.intercepts, atol=2e-5)
    np.testing.assert_allclose(found.coefficients(0), direct.coefficients(0), atol=2e-5 * np.abs(direct.coefficients(0)).max())


@pytest.mark.parametrize("converged", [1e-5, 1e-12])
def test_conjugate_gradients_reach_float64_although_products_are_in_float32(monkeypatch, converged):
    monkeypatch.setattr(solvers, "CONVERGED", converged)
    rng = np.random.default_rng(0)
    root = rng.normal(size=(80, 80))
    matrix, right = root @ root.T / 80 + np.eye(80), rng.normal(size=(80, 3))

    def fast(values):
        return (matrix.astype(np.float32) @ values.astype(np.float32)).astype(np.float64)

    found = solvers._refined(lambda values: matrix @ values, fast, right)
    residual = np.linalg.norm(matrix @ found - right, axis=0) / np.linalg.norm(right, axis=0)
    assert (residual <= converged).all()
    np.testing.assert_allclose(found, np.linalg.solve(matrix, right), atol=converged * np.linalg.norm(right))


def test_products_in_pieces(monkeypatch):
    monkeypatch.setattr(solvers, "CHUNK", 7)
    rng = np.random.default_rng(1)
    x, left, right = rng.normal(size=(9, 30)).astype(np.float32), rng.normal(size=(2, 9)), rng.normal(size=(30, 4))
    np.testing.assert_allclose(times(x, right), x.astype(np.float64) @ right)
    np.testing.assert_allclose(combine(left, x), left @ x.astype(np.float64))
    gram = x.astype(np.float64) @ x.T
    np.testing.assert_allclose(Rows(x, np.zeros((1, 30)), np.zeros(9, dtype=int)).gram, gram, atol=1e-6 * gram.max())


def test_ridge_with_many_features_is_that_with_few():
    """The same problem with as many columns of zeros as it takes to have more features than subjects."""
    few = problem(12, (0.5, 5.0))
    x = few.rows.trained.astype(np.float64)
    first, _ = ridge_coefficients(x, few.signs, few.weights, few.penalties)
    wide = np.concatenate([x, np.zeros((SUBJECTS, 80))], axis=1)
    second, _ = ridge_coefficients(wide, few.signs, few.weights, few.penalties)
    np.testing.assert_allclose(second[:, :12], first, atol=1e-10)
    assert not second[:, 12:].any()


@pytest.mark.parametrize("features", [150, 12], ids=["more features than subjects", "fewer features"])
@pytest.mark.parametrize("balanced", [True, False], ids=["equal weights", "other weights, some of them 0"])
@pytest.mark.parametrize("leading", [5, 192], ids=["few axes solved beforehand", "all axes"])
def test_logistic_regression_of_many_subjects_is_that_of_few(monkeypatch, features, balanced, leading):
    """Without the axes of the Gram matrix, which are not computed for many subjects; a small penalty takes the most steps."""
    asked = problem(features, (0.01, 0.1, 10.0), balanced=balanced)
    expected = LEARNERS["logistic"](asked)
    monkeypatch.setattr(solvers, "LARGE", 0)
    monkeypatch.setattr(newton, "LEADING", leading)
    monkeypatch.setattr(Rows, "axes", property(lambda self: pytest.fail("the axes were computed")))
    found = LEARNERS["logistic"](asked._replace(rows=Rows(asked.rows.trained, asked.rows.shift, asked.rows.site)))
    np.testing.assert_allclose(found.held_out, expected.held_out, atol=1e-6 * np.abs(expected.held_out).max())
    np.testing.assert_allclose(found.intercepts, expected.intercepts, atol=1e-6)
    for i in range(3):
        weights = expected.coefficients(i)
        np.testing.assert_allclose(found.coefficients(i), weights, atol=1e-6 * np.abs(weights).max())


def test_a_separable_logistic_regression_of_many_subjects_converges(monkeypatch):
    """Probabilities come near 0 and 1, where the loss has little curvature."""
    asked = problem(150, (1e-5, 1e-4))
    expected = LEARNERS["logistic"](asked).held_out
    assert np.abs(expected).max() > 10
    monkeypatch.setattr(solvers, "LARGE", 0)
    np.testing.assert_allclose(LEARNERS["logistic"](asked).held_out, expected, atol=1e-4 * np.abs(expected).max())


@pytest.mark.parametrize("subjects", [1, 7, 8, 21])
def test_the_gram_matrix_of_many_subjects_is_made_of_halves(monkeypatch, subjects):
    x = np.random.default_rng(2).normal(size=(subjects, 30)).astype(np.float32)
    monkeypatch.setattr(solvers, "CHUNK", 7)
    monkeypatch.setattr(solvers, "LARGE", 0)
    gram = x.astype(np.float64) @ x.T
    found = Rows(x, np.zeros((1, 30)), np.zeros(subjects, dtype=int)).gram
    np.testing.assert_allclose(found, gram, atol=1e-6 * gram.max())
    np.testing.assert_array_equal(found, found.T)


def svm_problem(weights, order=slice(None), penalty=1.0):
    """Three features of 40 subjects, some of which have no weight."""
    rng = np.random.default_rng(4)
    labels = (np.arange(40) % 2).astype(np.int8)
    rows = Rows(rng.normal(size=(40, 3)) + labels[:, None], np.zeros((1, 3)), np.zeros(40, dtype=int))
    return Problem(rows.take(order), labels[order], weights[order], [], np.array([penalty]))


def test_an_svm_is_that_of_the_subjects_with_weight():
    """scikit-learn numbers support vectors without the others."""
    weights = np.where(np.arange(40) < 9, 0.0, 1.0)
    x, labels = (problem := svm_problem(weights)).rows.trained, problem.labels
    found = solvers.svm(problem)
    expected = SVC(kernel="linear", C=1.0, tol=1e-8).fit(x[9:], labels[9:])
    np.testing.assert_allclose(found.coefficients(0), expected.coef_[0], atol=1e-2)
    np.testing.assert_allclose(found.held_out[0], expected.decision_function(x), atol=1e-2)


def test_the_intercept_of_an_svm_is_the_middle_of_those_that_are_optimal():
    """All coefficients are at their bound here, all but for rounding: each of a range of intercepts has the same loss."""
    rng = np.random.default_rng(0)
    weights = np.repeat(rng.uniform(0.5, 2.0, 20), 2)  # of the same sum in both classes, which rounding decides
    problem = svm_problem(weights, penalty=1000.0)
    found = solvers.svm(problem)
    decision = problem.rows.trained @ found.coefficients(0)

    def loss(intercept):
        return float(weights @ np.maximum(1 - problem.signs * (decision + intercept), 0))

    tried = np.linspace(-2, 2, 4001)
    losses = np.array([loss(one) for one in tried])
    optimal = tried[losses < losses.min() + 1e-9]
    assert np.ptp(optimal) > 0.5
    assert found.intercepts[0] == pytest.approx((optimal[0] + optimal[-1]) / 2, abs=2e-3)
    for seed in range(10):
        order = np.random.default_rng(seed).permutation(40)
        assert solvers.svm(svm_problem(weights, order, 1000.0)).intercepts[0] == pytest.approx(found.intercepts[0], abs=1e-9)
