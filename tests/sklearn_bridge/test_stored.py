"""Fitted estimators as bytes: bytes that were altered end in a sentence, not in memory that is not theirs."""

import io
import zipfile

import numpy as np
import pytest
import skops.io
from sklearn.base import clone
from sklearn.impute import KNNImputer
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC, NuSVC

from m2lgdg import InputError
from m2lgdg.sklearn_bridge.stored import packed, unpacked

X = np.random.default_rng(0).normal(size=(60, 6))
Y = (X[:, 0] > 0).astype(np.int64)
GOOD = (
    SVC(), SVC(kernel="linear"), NuSVC(), KNeighborsClassifier(algorithm="brute"),
    make_pipeline(StandardScaler(), SVC()), LogisticRegression(), make_pipeline(KNNImputer(), LogisticRegression()),
)  # fmt: skip


@pytest.mark.parametrize("estimator", GOOD, ids=str)
def test_the_same_predictions_after_reading(estimator):
    fitted = estimator.fit(X, Y)
    np.testing.assert_array_equal(unpacked(packed(fitted)).predict(X), fitted.predict(X))


def shorter(name):
    return lambda one: vars(one).update({name: getattr(one, name)[..., :-1].copy()})


def changed(name, value):
    return lambda one: vars(one).update({name: value})


ARRAYS = ("support_vectors_", "support_", "_dual_coef_", "_intercept_", "_n_support")
SVM = {f"{name} cut": shorter(name) for name in ARRAYS} | {
    "many support vectors": changed("_n_support", np.array([10**6, 10**6], dtype=np.int32)),
    "negative": lambda one: changed("_n_support", one._n_support + np.array([-(10**4), 10**4], dtype=np.int32))(one),
    "three classes": changed("classes_", np.arange(3)),
    "two weights": lambda one: changed("_probA", np.zeros(2))(one),
    "precomputed": changed("kernel", "precomputed"),
    "sparse": changed("_sparse", True),
    "support beyond": lambda one: changed("support_", one.support_ + 10**6)(one),
}
NEIGHBOURS = {
    "labels cut": shorter("_y"),
    "labels beyond": lambda one: changed("_y", one._y + 10**6)(one),
    "rows cut": lambda one: changed("_fit_X", one._fit_X[:-1].copy())(one),
    "columns cut": shorter("_fit_X"),
    "without a tree": lambda one: (vars(one).pop("_tree"), shorter("_y")(one)),
}
CASES = [
    *((SVC(), SVM[name], name) for name in SVM),
    *((KNeighborsClassifier(algorithm="brute"), NEIGHBOURS[name], name) for name in NEIGHBOURS),
]


@pytest.mark.parametrize("inside", [False, True], ids=["alone", "in a pipeline"])
@pytest.mark.parametrize(("estimator", "alter", "name"), CASES, ids=[name for *_, name in CASES])
def test_altered_arrays_are_refused(estimator, alter, name, inside):
    fitted = clone(estimator).fit(X, Y)
    alter(fitted)
    bad = make_pipeline("passthrough", fitted) if inside else fitted
    with pytest.raises(InputError, match="the estimator of the model cannot be read"):
        unpacked(packed(bad))


def archive(entries, compression=zipfile.ZIP_STORED):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as made:
        for name, content in entries.items():
            made.writestr(name, content)
    return buffer.getvalue()


def test_a_small_archive_stays_small(monkeypatch):
    with zipfile.ZipFile(io.BytesIO(skops.io.dumps(LogisticRegression().fit(X, Y)))) as given:
        entries = {name: given.read(name) for name in given.namelist()}
    bomb = archive(entries | {"zeros.npy": bytes(10**8)}, zipfile.ZIP_DEFLATED)
    lie = bytearray(archive(entries | {"zeros.npy": b"0123456789"}))
    at = lie.rindex(b"PK\x01\x02", 0, lie.rindex(b"zeros.npy"))
    lie[at + 20 : at + 28] = (2**31 - 1).to_bytes(4, "little") * 2  # sizes in the central directory
    monkeypatch.setattr(skops.io, "loads", lambda *_, **__: pytest.fail("was read"))
    for content in (bomb, bytes(lie)):
        assert len(content) < 10**6
        with pytest.raises(InputError, match="its archive is larger than it seems"):
            unpacked(np.frombuffer(content, dtype=np.uint8))
