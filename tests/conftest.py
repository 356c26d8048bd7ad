"""Cohorts that many tests share, and the real ABIDE files where they are at hand."""

import gc
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch

import m2lgdg
from m2lgdg.cli import main

FLAGS = ["--disable-gpu", "--no-sandbox", "--disable-background-networking", "--disable-component-update", "--disable-sync"]

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before any kernel of m2lgdg.fast is defined


def pytest_collection_modifyitems(items):
    for item in items:
        if "browser" in item.fixturenames:
            item.add_marker("browser")


def pytest_collection_finish():
    """Leave what was imported to no later search for garbage: with PyTorch that is more than half a million objects."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure():
    gc.unfreeze()  # otherwise extensions report leaks when Python ends


@pytest.fixture(scope="session", autouse=True)
def no_waiting_for_the_disk():
    """Files of tests need not survive a power failure."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fsync", lambda handle: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def code_of_a_commit():
    """Studies of tests are of one commit, whatever is being changed in the checkout; `study/test_provenance.py` asks git."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("m2lgdg.study.folder.provenance", lambda: {"commit": "c0ffee" + 34 * "0", "tree": "clean"})
        yield


@pytest.fixture(scope="session")
def tiny():
    return m2lgdg.make_cohort("tiny")


@pytest.fixture(scope="session")
def linear_study(tiny, tmp_path_factory):
    """Folder of a finished study of linear methods on `tiny`, one of them explained; a test that changes it works on a copy."""
    folder = tmp_path_factory.mktemp("linear")
    tiny.save(folder / "tiny.cohort")
    study = {"cohort": str(folder / "tiny.cohort"), "name": "linear", "methods": ["prior", "fc-logistic", "fc-svm"]}
    assert not m2lgdg.run_study(study | {"seeds": [0], "explain": ["fc-logistic"]}, folder / "out").failed
    return folder / "out"


@pytest.fixture(scope="session")
def two_track_study(tmp_path_factory):
    """Folder of a finished study with phenotypes and both tracks; the last of its sites has two subjects, one of each class."""
    folder = tmp_path_factory.mktemp("tracks")
    cohort = m2lgdg.make_cohort("tiny", sizes={"a": 24, "b": 24, "c": 24, "d": 2}, roi_effect=2.0, edge_effect=2.5, seed=4)
    cohort.save(folder / "tracks.cohort")
    study = {"cohort": str(folder / "tracks.cohort"), "name": "tracks", "methods": ["prior", "fc-logistic"], "seeds": [3]}
    study |= {"variants": ["phenotypes"], "track": ["strict", "adapted"], "adapt_subjects": 8}
    assert not m2lgdg.run_study(study, folder / "out").failed
    return folder / "out"


@pytest.fixture(scope="session")
def abide_folder():
    """The real release folder named by M2LGDG_ABIDE."""
    folder = os.environ.get("M2LGDG_ABIDE")
    if not folder or not Path(folder).is_dir():
        pytest.skip("M2LGDG_ABIDE does not name an ABIDE_pcp folder")
    return Path(folder)


@pytest.fixture(scope="session")
def mdd_folder():
    """The real files named by M2LGDG_REST_META_MDD: the workbook and series of some sites."""
    folder = os.environ.get("M2LGDG_REST_META_MDD")
    if not folder or not any(Path(folder).glob("**/ROISignals_S*.mat")):
        pytest.skip("M2LGDG_REST_META_MDD does not name a folder with files ROISignals_S*.mat")
    return Path(folder)


@pytest.fixture
def methods_forgotten():
    """Methods that a test registers are no longer known after it."""
    before = set(m2lgdg.METHODS)
    yield
    for name in set(m2lgdg.METHODS) - before:
        del m2lgdg.METHODS[name]


@pytest.fixture
def typed(monkeypatch, capsys):
    """Run `m2lgdg` with some words as if they were typed: exit code, what was printed, what was said of errors."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["m2lgdg", *map(str, arguments)])
        code = 0
        try:
            main()
        except SystemExit as ended:
            code = ended.code or 0
        streams = capsys.readouterr()
        return code, streams.out, streams.err

    return run


@pytest.fixture
def figures_painted_only(monkeypatch):
    """For tests of a report but for its pictures: figures are painted and have their texts and tips, but are not rendered."""
    from html import escape

    from matplotlib.figure import Figure as Canvas
    from matplotlib.text import Text

    from m2lgdg.report import brains, curve, data, drawing, figures, training

    def draw(name, caption, alt, size, paint, **_):
        sheet = drawing.Sheet(Canvas(figsize=size, layout="constrained"))
        paint(sheet)
        words = [text.get_text() for text in sheet.canvas.findobj(Text)]
        texts = "".join(f"<text>{escape(word)}</text>" for word in words)
        tips = "".join(f"<title>{escape(tip)}</title>" for tip in sheet.tips.values())
        page = f'<svg role="img" aria-label="{escape(alt)}">{texts}{tips}</svg>'
        return drawing.Figure(drawing.plain(name), caption, alt, page.encode(), page.encode(), page)

    for module in (brains, curve, data, figures, training):
        monkeypatch.setattr(module, "draw", draw)


@pytest.fixture(scope="module")
def browser():
    """Debian's Chromium without a window; tests that need it are marked, so that they are skipped where it is not."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=shutil.which("chromium"), args=FLAGS)
        yield started
        started.close()


@pytest.fixture(scope="session")
def atlas_cohort():
    """A tiny cohort with as many ROIs as AAL has, so that they have places in a brain."""
    return m2lgdg.make_cohort("tiny", n_rois=116, seed=3)


@pytest.fixture(scope="session")
def served_model(atlas_cohort, tmp_path_factory):
    """The folder of a linear model with all that `m2lgdg serve` can show."""
    path = tmp_path_factory.mktemp("model")
    m2lgdg.make("fc-logistic", phenotypes=True).fit(atlas_cohort, source_distribution=True, new_site_calibration=True).save(
        path
    )
    return path
