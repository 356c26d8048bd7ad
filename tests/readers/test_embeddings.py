"""Features by subject id in NumPy's files: the tables they give, and what is refused."""

import io
import zipfile

import numpy as np
import pytest

import m2lgdg
from m2lgdg.data.readers import embeddings
from m2lgdg.data.readers.structure import read_table, with_files
from m2lgdg.storage import InputError


@pytest.fixture
def cohort():
    return m2lgdg.make_cohort("tiny", seed=2)


def test_an_archive_by_id_in_any_order(cohort, tmp_path):
    rng = np.random.default_rng(0)
    numbers, order = rng.standard_normal((len(cohort), 5)), rng.permutation(len(cohort))
    numbers[3, 2] = np.nan
    np.savez_compressed(tmp_path / "a.npz", ids=cohort.subjects[order].astype(str), features=numbers[order])
    np.savez(tmp_path / "b.npz", X=numbers[order].astype("f4"), subjects=cohort.subjects[order].astype(str), names=[*"abcde"])
    np.testing.assert_array_equal(with_files(cohort, {"emb": tmp_path / "a.npz"}).tables["emb"], numbers)
    found = m2lgdg.read(cohort.save(tmp_path / "c.cohort") or tmp_path / "c.cohort", tables={"emb": tmp_path / "b.npz"})
    np.testing.assert_array_equal(found.tables["emb"], numbers.astype("f4").astype("f8"))
    assert found.tables["emb"].columns.tolist() == [*"abcde"]


def test_numbers_as_ids_and_ids_of_others(tmp_path):
    np.savez(tmp_path / "a.npz", ids=np.array([51456, 51007, 50003]), x=np.eye(3))
    table = read_table(tmp_path / "a.npz").table
    assert table.index.tolist() == ["51456", "51007", "50003"] and table.columns.tolist() == [f"feature_{i}" for i in (1, 2, 3)]
    with pytest.raises(InputError, match="none of its 3 rows is of a subject"):
        with_files(m2lgdg.make_cohort("tiny"), {"emb": tmp_path / "a.npz"})


def test_a_folder_of_vectors(cohort, tmp_path):
    rng = np.random.default_rng(0)
    numbers = rng.standard_normal((len(cohort) - 2, 4)).astype("f4")
    for subject, row in zip(cohort.subjects[2:], numbers, strict=True):
        np.save(tmp_path / f"sub-{str(subject).replace('-', '')}_desc-emb.npy", row)
    ids = read_table(tmp_path, "embedding").table.index
    assert all(one.startswith("sub-") for one in ids) and len(ids) == len(numbers)
    for file in list(tmp_path.iterdir()):
        file.unlink()
    for subject, row in zip(cohort.subjects[2:], numbers, strict=True):
        np.save(tmp_path / f"{subject}.npy", row)
    found = with_files(cohort, {"embedding": tmp_path}).tables["embedding"]
    np.testing.assert_array_equal(found[2:], numbers.astype("f8"))
    assert found[:2].isna().all(axis=None)
    np.save(tmp_path / f"{cohort.subjects[0]}.npy", np.ones(3))
    with pytest.raises(InputError, match=r"has 4 features, but .* has 3|has 3 features, but .* has 4"):
        read_table(tmp_path, "embedding")


@pytest.mark.parametrize(
    ("arrays", "problem"),
    [
        ({"x": np.eye(2)}, "has no list of ids"),
        ({"ids": ["a", "b"]}, "has 0 arrays of numbers beside its ids"),
        ({"ids": ["a", "b"], "x": np.eye(2), "y": np.eye(2)}, r"has 2 arrays of numbers beside its ids \(x, y\)"),
        ({"ids": ["a", "b"], "x": np.eye(3)}, r"shape \(3, 3\), not \(2, feature\)"),
        ({"ids": ["a", "a"], "x": np.eye(2)}, "id a has two rows"),
        ({"ids": ["a", " "], "x": np.eye(2)}, "an empty id"),
        ({"ids": ["a", "b"], "x": np.array([[1, np.inf], [0, 0]])}, "not all real numbers"),
        ({"ids": ["a", "b"], "x": np.eye(2) + 1j}, "not all real numbers"),
        ({"ids": ["a", "b"], "x": np.eye(2), "columns": ["u", "u"]}, "not as many different names"),
        ({"ids": ["a", "b"], "x": np.eye(2), "columns": ["u", "diagnosis"]}, "column diagnosis reveals the diagnosis"),
        ({"ids": np.array(["a", "b"], dtype=object), "x": np.eye(2)}, "only pickle could read"),
    ],
)
def test_refused(tmp_path, arrays, problem):
    np.savez(tmp_path / "a.npz", **{name: np.asarray(value) for name, value in arrays.items()})
    with pytest.raises(InputError, match=problem):
        read_table(tmp_path / "a.npz")


def test_an_array_without_ids_is_answered_with_what_to_save(tmp_path):
    np.save(tmp_path / "a.npy", np.eye(2))
    with pytest.raises(InputError, match=r"a\.npy has no ids of subjects; save a \.npz file with ids and numbers"):
        read_table(tmp_path / "a.npy")


def test_damaged_and_swollen_archives(tmp_path, monkeypatch):
    path = tmp_path / "a.npz"
    np.savez_compressed(path, ids=["a", "b"], x=np.random.default_rng(0).integers(9, size=(2, 40_000)))
    whole = path.read_bytes()
    for damaged in (
        b"",
        whole[:100],
        whole[: len(whole) // 2] + b"\0" * 40 + whole[len(whole) // 2 + 40 :],
        b"PK" + whole[2:50],
    ):
        path.write_bytes(damaged)
        with pytest.raises(InputError, match=r"a\.npz is not a readable"):
            read_table(path)
    path.write_bytes(whole)
    monkeypatch.setattr(embeddings, "LARGEST_TABLE", 100_000)
    with pytest.raises(InputError, match="holds more than"):
        read_table(path)
    other = io.BytesIO()
    with zipfile.ZipFile(other, "w") as archive:
        archive.writestr("ids.npy", b"not an array")
    path.write_bytes(other.getvalue())
    with pytest.raises(InputError, match="not a readable"):
        read_table(path)
