"""What is fuzzed: functions from bytes to nothing, that end well or in an InputError of one line; anything else is a defect.

Used by run.py (atheris, or a loop of its own) and by tests/test_fuzz.py, which runs the seeds that once broke something.
"""

import dataclasses
import functools
import json
import shutil
import tempfile
from pathlib import Path

import numpy as np

from m2lgdg import Cohort, InputError, make, make_cohort
from m2lgdg.cohort import Parcellation
from m2lgdg.data.readers import read, text
from m2lgdg.data.readers.gather import load_array
from m2lgdg.method import Method
from m2lgdg.model.folder import LARGEST, digest
from m2lgdg.report.card import card
from m2lgdg.storage import file_hash
from m2lgdg.study.config import read_study

HELD = tempfile.TemporaryDirectory(prefix="m2lgdg-fuzz-")  # gone with the process
PLACE = Path(HELD.name)
MODEL_FILES = ("method.json", "weights.safetensors", "source_distribution.safetensors")


def refused(load):
    """Whether what was loaded is refused as it must be."""
    try:
        load()
    except InputError as error:
        assert "\n" not in str(error) and len(str(error)) < 3000, error
        return True
    return False


@functools.cache
def cohort():
    return make_cohort("tiny", seed=1)


@functools.cache
def model():
    return make("fc-logistic", phenotypes=True).fit(cohort(), source_distribution=True).save(PLACE / "model")


@functools.cache
def people():
    """A folder of three subjects."""
    folder = PLACE / "people"
    folder.mkdir()
    for i in range(3):
        np.save(folder / f"P{i}.npy", np.random.default_rng(i).normal(size=(30, 4)).astype(np.float32))
    return folder


def series_text(data):
    """The compiled parser and numpy agree on every text, and the number of values is that of the cells."""
    path = PLACE / f"a{('.csv', '.tsv', '.1D')[data[0] % 3 if data else 0]}"
    path.write_bytes(data[1:])
    found = []
    for compiled in (text.compiled, lambda: None):
        before, text.compiled = text.compiled, compiled
        try:
            found.append(text.read_table(path))
        except InputError as error:
            assert "\n" not in str(error)
            found.append(str(error))
        finally:
            text.compiled = before
    (one, other) = found
    assert isinstance(one, str) == isinstance(other, str), found
    if isinstance(one, str):
        assert one == other, found
    else:
        assert one[0] == other[0], found
        np.testing.assert_array_equal(one[1], other[1])


def npy(data):
    """An array file."""
    (PLACE / "a.npy").write_bytes(data)
    refused(lambda: load_array(PLACE / "a.npy"))


def table(data):
    """participants.tsv of a folder."""
    (people() / "participants.tsv").write_bytes(data)
    refused(lambda: read(people(), "folder", on_bad="exclude"))


def dataset(data):
    """dataset.toml of a folder."""
    (people() / "participants.tsv").write_bytes(PEOPLE)
    (people() / "dataset.toml").write_bytes(data)
    try:
        refused(lambda: read(people(), "folder", on_bad="exclude"))
    finally:
        (people() / "dataset.toml").unlink()


def cohort_file(data):
    """A cohort file."""
    path = PLACE / "a.cohort"
    path.unlink(missing_ok=True)  # an earlier one may be mapped still
    path.write_bytes(data)
    refused(lambda: Cohort.load(path).hash)


def study(data):
    """A study file."""
    (PLACE / "study.toml").write_bytes(data)
    refused(lambda: read_study(PLACE / "study.toml"))


def model_file(name, data):
    """A model folder with one file changed; hashes are made true, so that what lies behind them is reached."""
    folder = PLACE / "changed"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(model(), folder)
    (folder / name).write_bytes(data)
    about = folder / "method.json"
    try:
        said = json.loads(about.read_bytes())
        hashes = {one: file_hash(folder / one, LARGEST) for one in MODEL_FILES[1:]}
        rest = {key: value for key, value in said.items() if key != "hashes"}
        about.write_text(json.dumps(rest | {"hashes": hashes | {"method.json": digest(rest)}}))
    except (ValueError, AttributeError, RecursionError):
        pass  # no JSON object: the loader must say so

    def use():
        fitted = Method.load(folder)
        some = cohort().select(np.arange(2))
        proba = fitted.predict_proba(some)
        assert ((proba >= 0) & (proba <= 1)).all()
        fitted.flags(some)
        if fitted.source_distribution_:
            fitted.source_distribution_.compare(some)
        card(folder)

    refused(use)


PEOPLE = (
    b"participant_id\tsite\tlabel\tsex\tage\n"
    b"P0\tnorth\tpatient\tM\t20\nP1\tnorth\tcontrol\tF\t31.5\nP2\tsouth\tcontrol\tF\tn/a\n"
)
STUDY = b"""cohort = "c.cohort"
methods = ["fc-logistic", "prior", "erm"]
seeds = [0, 1]
targets = ["north"]
variants = ["phenotypes"]
explain = ["fc-logistic"]
[method.fc-logistic]
site_folds = 3
penalties = [0.1, 1.0]
[sweep.erm]
learning_rate = [1e-3, 1e-4]
"""


def _array():
    np.save(PLACE / "seed.npy", np.arange(12, dtype=np.float32).reshape(4, 3))
    return (PLACE / "seed.npy").read_bytes()


def _cohort_bytes(*parcellations):
    """A cohort file with further atlases of these names, which the first subject lacks."""
    some = dataclasses.replace(cohort().select(np.arange(4)), atlas="first")
    halves = Parcellation(some.rois[:3], [None, *(np.asarray(one)[:, :3] for one in some.series[1:])])
    path = dataclasses.replace(some, parcellations=dict.fromkeys(parcellations, halves)).save(PLACE / "seed.cohort")
    return path.read_bytes()


TARGETS = {
    "series_text": series_text,
    "npy": npy,
    "table": table,
    "dataset": dataset,
    "cohort_file": cohort_file,
    "study": study,
    **{f"model_{name.split('.')[0]}": functools.partial(model_file, name) for name in MODEL_FILES},
}
SEEDS = {
    "series_text": lambda: [
        b"\0" + b"a,b\n1.5,2e3\n-3,nan\n",
        b"\1#x\t#y\n1\t2\n\t3\n",
        b"\2 1 2 3\n4 5 6\n",
        b"\x021e22 1e-300\n",
    ],
    "npy": lambda: [_array()],
    "table": lambda: [PEOPLE, PEOPLE.replace(b"\t", b","), b"\xef\xbb\xbf" + PEOPLE],
    "dataset": lambda: [
        b'name = "x"\ntr = 2.0\ninputs = ["age"]\npattern = "{subject}.npy"\n[columns]\nage = "age"\n',
        b'atlas = "x"\n[atlases.y]\npattern = "{subject}.npy"\norientation = "time,roi"\n',
    ],
    "cohort_file": lambda: [_cohort_bytes(), _cohort_bytes("ho", "cc")],
    "study": lambda: [STUDY],
    **{
        f"model_{name.split('.')[0]}": functools.partial(lambda name: [(model() / name).read_bytes()], name)
        for name in MODEL_FILES
    },
}
