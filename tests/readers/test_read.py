"""What holds for every kind of release: it is guessed, a saved cohort comes back bit for bit, no order on disk matters."""

import re
from pathlib import Path

import miniature
import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from m2lgdg import Cohort, InputError, read
from m2lgdg.data.readers import guess
from m2lgdg.data.readers.selection import keep_included

SEEDS = st.integers(0, 2**32 - 1)
# Each example writes a whole release, so a few must do.
FEW = settings(max_examples=2, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def own_folder(suffix, dataset=None):
    return lambda folder, **how: miniature.own_folder(folder / "lab", suffix, dataset=dataset, **how).folder


MAKERS = {  # how to make a miniature, the kind it is, and the options its reading needs
    "rest-meta-mdd": (lambda folder, **how: miniature.rest_meta_mdd(folder / "rest", **how).folder, "rest-meta-mdd", {}),
    "xcpd": (lambda folder, **how: miniature.xcpd(folder / "xcpd", **how).folder, "bids", {"atlas": "4S156Parcels"}),
    "nifti": (
        lambda folder, **how: miniature.nifti(folder / "nifti", **how).folder,
        "bids",
        {"atlas_image": "../atlas.nii.gz"},
    ),
    "npy": (own_folder(".npy"), "folder", {}),
    "csv": (own_folder(".csv", "name = 'lab'\ntr = 1.8\ninputs = ['motion', 'age']"), "folder", {}),
    "1D": (own_folder("_rois_x.1D", "pattern = '{subject}_rois_x.1D'"), "folder", {}),
    "abide": (lambda folder, **how: miniature.abide(folder / "ABIDE_pcp", **how).folder, "abide-pcp", {}),
    "abide-flat": (lambda folder, **how: miniature.abide(folder / "ABIDE_pcp", layout="flat", **how).folder, "abide-pcp", {}),
}
every_kind = pytest.mark.parametrize("name", MAKERS)


def made(name, folder, **how):
    """The folder of a new miniature and the options to read it with."""
    make, _, options = MAKERS[name]
    path = make(folder, **how)
    return path, {key: path / value if key == "atlas_image" else value for key, value in options.items()}


def assert_same(one, other):
    """Everything of two cohorts is the same, bit for bit."""
    for name in ("rois", "inputs", "atlas", "name", "excluded", "notes", "truth", "allow_proxies", "hash"):
        assert getattr(one, name) == getattr(other, name), name
    for name in ("subjects", "sites", "labels", "lengths"):
        assert getattr(one, name).tolist() == getattr(other, name).tolist(), name
    assert one.labels.dtype == other.labels.dtype
    assert one.tr.tobytes() == other.tr.tobytes()
    for mine, yours in zip(one.series, other.series, strict=True):
        assert mine.dtype == yours.dtype == np.float32
        assert mine.shape == yours.shape
        assert mine.tobytes() == yours.tobytes()
    pd.testing.assert_frame_equal(one.phenotypes, other.phenotypes, check_exact=True)


@every_kind
def test_kind_is_guessed(name, tmp_path):
    path, options = made(name, tmp_path)
    assert guess(path) == MAKERS[name][1]
    assert_same(read(path, **options), read(path, MAKERS[name][1], **options))


@every_kind
@FEW
@given(seed=SEEDS, order=SEEDS)
def test_neither_order_on_disk_nor_a_cohort_file_changes_a_bit(name, tmp_path_factory, seed, order):
    """Rows of the tables and the making of the files are shuffled; the cohort, its hash and what it left out are the same."""
    folder = tmp_path_factory.mktemp("order")
    cohorts = []
    for part, how in (("plain", None), ("shuffled", order)):
        path, options = made(name, folder / part, seed=seed, order=how)
        cohorts.append(read(path, **options))
    assert len(cohorts[0]) > 1
    assert_same(*cohorts)
    assert_same(cohorts[0], read(cohorts[0].save(folder / "saved.cohort")))


@every_kind
def test_nothing_of_this_machine_is_in_the_cohort(name, tmp_path):
    """What was left out is listed by file name: cohorts are shared, and folders carry the names of people."""
    path, options = made(name, tmp_path)
    file = max(path.glob("**/*_timeseries.tsv"), default=None) or max(
        file for file in path.glob("**/*") if file.suffix in (".npy", ".mat", ".1D", ".gz") or file.name in ("12.csv", "12.tsv")
    )
    if name == "rest-meta-mdd":
        file = file.parents[1] / "ROISignals_FunImgARCWF" / "ROISignals_S2-1-0010.mat"
    file.write_bytes(b"\0")
    if name == "xcpd":
        options = {"atlas": re.search("atlas-([A-Za-z0-9]+)", file.name)[1]}
    cohort = read(path, on_bad="exclude", **options)
    reasons = [each.reason for each in cohort.excluded]
    assert any(file.name in reason for reason in reasons)
    saved = cohort.save(tmp_path.parent / f"{name}.cohort").read_bytes()
    assert str(tmp_path).encode() not in saved


def test_wrong_calls_say_what_would_be_right(tmp_path):
    folder, _ = made("npy", tmp_path)
    with pytest.raises(InputError, match=r"kind folder has no option strategy; available: atlas, header, index_column, join"):
        read(folder, strategy="x")
    with pytest.raises(
        InputError, match=r'dataset\.toml has no atlas other; name the one of the files there: atlas = "\.\.\."\.'
    ):
        read(folder, atlas="other")
    with pytest.raises(InputError, match=r"\.npy: 4 ROI columns, but aal names 116\."):
        read(folder, atlas="aal")
    with pytest.raises(InputError, match=r"kind abide-pcp has no option stratgy; did you mean strategy\?"):
        read(folder, "abide-pcp", stratgy="x")
    with pytest.raises(InputError, match=r"kind abide is not known; choose one of .*abide-pcp.*cohort"):
        read(folder, "abide")
    with pytest.raises(InputError, match=r"nowhere does not exist"):
        read(tmp_path / "nowhere")
    with pytest.raises(InputError, match=r"on_bad must be 'stop' or 'exclude', not 'ignore'"):
        read(folder, on_bad="ignore")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"empty is an empty folder"):
        read(tmp_path / "empty")
    (tmp_path / "empty" / "notes.md").write_text("nothing")
    with pytest.raises(InputError, match=r"is not of a supported kind"):
        read(tmp_path / "empty")
    file = read(folder).save(tmp_path / "x.cohort")
    with pytest.raises(InputError, match=r"a cohort file takes no option atlas"):
        read(file, atlas="aal")


def test_progress_counts_every_file(tmp_path):
    folder, _ = made("npy", tmp_path)
    seen = []
    read(folder, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_an_inclusion_list_is_followed(tmp_path):
    folder, _ = made("npy", tmp_path)
    cohort = read(folder)
    rows = [("0007", "included"), ("013", "included"), ("0010", "excluded")]
    miniature.write_rows(tmp_path / "inclusion.csv", ("subject", "status"), rows, ",")
    kept = keep_included(cohort, tmp_path / "inclusion.csv")
    assert isinstance(kept, Cohort)
    assert kept.subjects.tolist() == ["0007", "013"]
    assert [(each.subject, each.site, each.detail) for each in kept.excluded] == [
        ("0010", "Aarhus", "inclusion.csv"),
        ("12", "Bergen", "inclusion.csv"),
    ]
    rows += [("", "excluded"), ("", "excluded")]  # `check` lists scans of nobody too
    miniature.write_rows(tmp_path / "inclusion.csv", ("subject", "status"), rows, ",")
    assert keep_included(cohort, tmp_path / "inclusion.csv").hash == kept.hash
    miniature.write_rows(tmp_path / "inclusion.csv", ("subject", "status"), [("7", "included")], ",")
    with pytest.raises(InputError, match=r"subject 7 is listed as included but is not in the cohort"):
        keep_included(cohort, Path(tmp_path / "inclusion.csv"))
