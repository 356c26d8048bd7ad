"""`m2lgdg serve` as a user has it: the command, a real server and a real browser (`chromium`, driven by playwright)."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest
from test_serve_structure import BOTH, aseg, planted

from m2lgdg import Model, make, make_cohort

pytest.importorskip("uvicorn")
pytest.importorskip("starlette")
CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium (apt-get install chromium)")


@pytest.fixture(scope="module")
def cohort(atlas_cohort):
    return atlas_cohort


@pytest.fixture(scope="module")
def folder(served_model):
    return served_model


@pytest.fixture(scope="module")
def server(folder, tmp_path_factory):
    """The address of a running command, whose working and temporary folders must stay empty, and which Ctrl-C must end well."""
    with serving(folder, tmp_path_factory) as address:
        yield address


@contextlib.contextmanager
def serving(folder, tmp_path_factory):
    work, temp = tmp_path_factory.mktemp("work"), tmp_path_factory.mktemp("temp")
    command = [sys.executable, "-u", "-m", "m2lgdg.cli", "serve", str(folder), "--port", "0"]
    environment = os.environ | {"TMPDIR": str(temp)}
    running = subprocess.Popen(
        command, cwd=work, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, encoding="utf-8"
    )
    said = running.stdout.readline()
    found = re.search(r"http://127\.0\.0\.1:\d+/", said)
    assert found, said + running.communicate()[0]
    assert running.stdout.readline() == "Uploads are not stored. Research use; not a diagnostic device.\n"
    yield found[0]
    running.send_signal(signal.SIGINT)
    rest, _ = running.communicate(timeout=120)
    assert running.returncode == 0
    assert rest == "Stopped; nothing was written.\n"
    assert list(work.iterdir()) == []
    assert list(temp.iterdir()) == []


@pytest.fixture
def opened(browser, server):
    """Opens the page with eyes open: what the console says and what is asked of the network."""
    pages = []

    def open_page(width=1280, **options):
        page = browser.new_page(viewport={"width": width, "height": 900}, **options)
        page.wrong, page.asked = [], []
        page.on("console", lambda message: page.wrong.append(message.text))
        page.on("pageerror", lambda error: page.wrong.append(str(error)))
        page.on("request", lambda request: page.asked.append(request.url))
        page.goto(server)
        pages.append(page)
        return page

    yield open_page
    for page in pages:
        page.close()


@pytest.fixture
def scan(cohort, tmp_path):
    np.save(tmp_path / "scan.npy", cohort.series[5])
    return tmp_path / "scan.npy"


def expected(folder, cohort, **phenotypes):
    fitted, one = Model.load(folder), cohort.select([5])
    table = one.phenotypes.assign(**{name: phenotypes.get(name, np.nan) for name in one.inputs})
    return fitted.predict_proba(one._changed(phenotypes=table))[0, 1]


@pytest.mark.long
def test_tables_are_chosen_beside_the_scan(browser, tmp_path, tmp_path_factory):
    """Both hemispheres in one field, at three widths, with labels that stay inside of their boxes."""
    cohort = planted(make_cohort("tiny", seed=2, sizes=dict.fromkeys("abcd", 30)))
    folder = make("connectome-adaptive").fit(cohort, source_distribution=True).save(tmp_path / "model")
    np.save(tmp_path / "scan.npy", cohort.series[0])
    for name, content in (*BOTH, aseg()):
        (tmp_path / name).write_bytes(content)
    with serving(folder, tmp_path_factory) as address:
        for width in (390, 1280, 1600):
            page = browser.new_page(viewport={"width": width, "height": 900})
            page.goto(address)
            page.set_input_files("#series", tmp_path / "scan.npy")
            page.set_input_files("#table-2", [tmp_path / name for name, _ in BOTH])
            boxes = """[...document.querySelectorAll('.files')].map((one) => [one.querySelector('label'),
                one.querySelector('input')].map((part) => part.getBoundingClientRect()).map((box) => [box.top, box.bottom]))"""
            for label, field in page.evaluate(boxes):
                assert field[0] <= label[0] and label[1] <= field[1] - 30  # room for the button
            page.get_by_role("button", name="Predict").click()
            page.wait_for_selector(".big")
            assert "thickness\n9 of 9 values, from lh.aparc.stats and rh.aparc.stats." in page.locator("main").inner_text()
            assert "no aseg: decided without it" in page.locator(".flags").inner_text()
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            page.set_input_files("#series", tmp_path / "scan.npy")
            page.set_input_files("#table-0", tmp_path / BOTH[0][0])
            page.get_by_role("button", name="Predict").click()
            assert "does not fit table aseg of the model" in page.get_by_role("alert").inner_text()
            page.close()


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_subject_is_answered(width, scheme, opened, scan, folder, cohort, server):
    page = opened(width, color_scheme=scheme)
    page.set_input_files("#series", scan)
    page.get_by_label("Sex").select_option("female")
    page.get_by_label("Age").fill("31.5")
    page.get_by_label("TR").fill("2")
    page.get_by_role("button", name="Predict").click()
    page.wait_for_selector(".big")
    proba = expected(folder, cohort, sex=2.0, age=31.5)
    assert page.locator(".big strong").inner_text() == f"{proba:.2f}"
    assert page.get_by_label("Age").input_value() == "31.5"
    assert page.locator("figure img").evaluate("one => one.naturalWidth") > 600
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    outside = """(width) => [...document.querySelectorAll('body *')].filter((one) => !one.closest('.scroll, svg')
        && one.getBoundingClientRect().right > width + 1).map((one) => one.outerHTML.slice(0, 80))"""
    assert page.evaluate(outside, width) == []
    assert page.wrong == []
    assert {url for url in page.asked if not url.startswith("data:")} == {server}
    ink, paper = page.evaluate("[getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor]")
    bright = [sum(map(int, value[4:-1].split(","))) for value in (ink, paper)]
    assert (bright[0] < bright[1]) == (scheme == "light")
    ids = page.evaluate("[...document.querySelectorAll('[id]')].map((one) => one.id)")
    assert len(ids) == len(set(ids))


def test_the_keyboard_is_enough(opened, scan, folder, cohort):
    page = opened()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "series"
    page.set_input_files("#series", scan)
    for _ in range(2):
        page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.labels[0].textContent").startswith("Age")
    page.keyboard.type("20")
    page.keyboard.press("Enter")
    page.wait_for_selector(".big")
    assert page.locator(".big strong").inner_text() == f"{expected(folder, cohort, age=20.0):.2f}"
    assert page.evaluate("document.activeElement.id") == "answer"


def test_a_file_can_be_dropped(opened, scan):
    page = opened()
    box = page.locator("#series").bounding_box()
    dragged = {"items": [], "files": [str(scan)], "dragOperationsMask": 1}
    devtools = page.context.new_cdp_session(page)
    for kind in ("dragEnter", "dragOver", "drop"):
        where = {"x": box["x"] + box["width"] / 2, "y": box["y"] + 30}
        devtools.send("Input.dispatchDragEvent", {"type": kind, "data": dragged, **where})
    page.wait_for_function("document.querySelector('#series').files.length === 1")
    assert page.evaluate("document.querySelector('#series').files[0].name") == "scan.npy"
    page.get_by_role("button", name="Predict").click()
    page.wait_for_selector(".big")


def test_no_script_is_needed(opened, scan, folder, cohort):
    page = opened(java_script_enabled=False)
    page.set_input_files("#series", scan)
    page.get_by_role("button", name="Predict").click()
    page.wait_for_selector(".big")
    assert page.locator(".big strong").inner_text() == f"{expected(folder, cohort):.2f}"


def test_a_wrong_file_is_told_and_hostile_words_stay_text(opened):
    page = opened()
    name = "<img src=x onerror=window.stolen=1>.npy"
    page.set_input_files("#series", {"name": name, "mimeType": "text/html", "buffer": b"<script>window.stolen=1</script>"})
    page.get_by_label("Age").fill('"><script>window.stolen=1</script>'[:40])
    page.get_by_role("button", name="Predict").click()
    reported = page.get_by_role("alert")
    reported.wait_for()
    assert reported.inner_text() == "Age: '\"><script>window.stolen=1</script>' is not a number."
    assert page.evaluate("document.activeElement.id") == "series"
    page.get_by_label("Age").fill("")
    page.set_input_files("#series", {"name": name, "mimeType": "text/html", "buffer": b"<script>window.stolen=1</script>"})
    page.get_by_role("button", name="Predict").click()
    page.get_by_text(f"{name} is not a readable .npy file.").wait_for()
    assert page.evaluate("window.stolen") is None


def test_a_file_that_is_too_large_is_told_before_it_is_sent(opened, server):
    page = opened()
    page.evaluate("""() => { const all = new DataTransfer(); all.items.add(new File([new Uint8Array(20971521)], "big.npy"));
        const input = document.querySelector("#series"); input.files = all.files;
        input.dispatchEvent(new Event("change")); }""")
    assert page.evaluate("document.querySelector('#series').validationMessage") == "This file is larger than 20 MB."
    page.get_by_role("button", name="Predict").click()
    assert page.asked.count(server) == 1
