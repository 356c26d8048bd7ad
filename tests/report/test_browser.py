"""The report in a real browser: nothing is fetched, no error, tables sort, nothing overflows, hostile names stay text.

Needs Debian's `chromium`; playwright drives it.
"""

import re
import shutil

import numpy as np
import pandas as pd
import pytest
from test_contract import small

from m2lgdg import make_cohort, run_study
from m2lgdg.report.page import write_report

CHROMIUM = shutil.which("chromium")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="needs chromium (apt-get install chromium)"),
]
HOSTILE = ["<script>window.stolen = 1</script>", "\"quoted' & </td></table>", "x" * 200, "東京 – Ωmega ‮kcab", "$a$ {{ 7*7 }}"]


@pytest.fixture(scope="module")
def explained(tmp_path_factory):
    """A study with all a report can show: explanations, ablations, sweeps, two seeds."""
    folder = tmp_path_factory.mktemp("explained")
    make_cohort("tiny", n_rois=116, seed=3).save(folder / "tiny.cohort")
    few = {"epochs": 2, "warmup": 0, "length": 16, "hidden": 8, "global_channels": (2,), "global_kernels": (3,)}
    few |= {"local_channels": (4,), "local_strides": (2,)}  # the page is the same for a network of any size
    study = {"name": "all of it", "cohort": str(folder / "tiny.cohort"), "seeds": [0, 1], "explain": True, "explain_steps": 2}
    study |= {"methods": ["prior", "fc-logistic", "phenotype-logistic", "m2lgdg"], "variants": {"m2lgdg": ["M1"]}}
    study |= {"targets": ["west", "east"]}
    study |= {"method": {"m2lgdg": small("m2lgdg") | few}, "sweep": {"m2lgdg": {"dropout": [0.0, 0.3]}}}
    assert not run_study(study, folder / "out").failed
    return write_report(folder / "out", three_d=True)


@pytest.fixture(scope="module")
def failed(tmp_path_factory):
    """A study with a failed cell and one that was not run."""
    folder = tmp_path_factory.mktemp("failed")
    make_cohort("tiny", seed=3).save(folder / "tiny.cohort")
    plugin = 'from m2lgdg.method import Method, method\n\n@method("broken")\nclass Broken(Method):\n    """Fails."""\n'
    plugin += '    def learn(self, source, **_):\n        raise RuntimeError("<b>no</b> luck")\n'
    (folder / "broken.py").write_text(plugin)
    study = {"cohort": str(folder / "tiny.cohort"), "seeds": [0], "methods": ["fc-logistic", "broken"]}
    assert run_study(study | {"plugins": [str(folder / "broken.py")]}, folder / "out", shard="1/2").failed
    return write_report(folder / "out")


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    """A study whose methods, sites and subjects have the worst of names."""
    rng, rows = np.random.default_rng(0), []
    for method in ("good", *HOSTILE):
        for target in HOSTILE:
            labels = np.array([0, 1] * 8)
            rows += [
                (method, "", 0, target, f"{name}{i}", labels[i], rng.random()) for i, name in enumerate(HOSTILE * 3 + ["s"])
            ]
    columns = ["method", "variant", "seed", "target", "subject", "label", "proba"]
    folder = tmp_path_factory.mktemp("hostile")
    pd.DataFrame(rows, columns=columns).to_csv(folder / "predictions.csv", index=False)
    return write_report(folder)


@pytest.fixture(scope="module")
def structured(tmp_path_factory):
    """A study of tables of brain structure, some with the worst of names, which not everybody has."""
    cohort = make_cohort("tiny", n_regions=8, without_table=0.2)
    table = cohort.tables["thickness"]
    cohort = cohort.with_tables({name: table.add_prefix(name) for name in (HOSTILE[0], HOSTILE[2])})
    study = {"cohort": cohort, "seeds": [0], "methods": ["phenotype-logistic", "connectome-adaptive"], "min_per_class": 4}
    study |= {"variants": ["phenotypes", "no-structure", "structure", "scan-phenotypes"]}
    summary = run_study(study, tmp_path_factory.mktemp("structured") / "out")
    assert not summary.failed
    return write_report(summary.folder)


def opened(browser, page_file, width=1280, **options):
    """A page that was loaded with its eyes open: (page, what went wrong, what was asked of the network)."""
    page = browser.new_page(viewport={"width": width, "height": 900}, **options)
    wrong, asked = [], []
    page.on("console", lambda message: wrong.append(message.text))
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(page_file.as_uri())
    return page, wrong, asked


@pytest.mark.parametrize("study", ["explained", "failed", "hostile", "structured"])
@pytest.mark.parametrize("width", [1600, 1280, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_error_no_request_no_overflow(study, width, scheme, browser, request):
    report = request.getfixturevalue(study)
    page, wrong, asked = opened(browser, report, width, color_scheme=scheme)
    page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    # Whatever is wider than the page scrolls inside its own frame.
    outside = """(width) => [...document.querySelectorAll('body *')].filter((one) => !one.closest('.scroll, nav, svg')
        && one.getBoundingClientRect().right > width + 1).map((one) => one.outerHTML.slice(0, 80))"""
    assert page.evaluate(outside, width) == []
    assert not wrong
    assert [url for url in asked if not url.startswith("data:")] == [report.as_uri()]
    ink, paper = page.evaluate("[getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor]")
    bright = [sum(map(int, value[4:-1].split(","))) for value in (ink, paper)]
    assert (bright[0] < bright[1]) == (scheme == "light")
    page.close()


def column(page, table, i):
    return [row.split("\t")[i] for row in page.locator(table).locator("tbody").inner_text().splitlines() if row.strip()]


def test_tables_sort_by_click_and_by_key(browser, explained):
    page, _, _ = opened(browser, explained)
    table = "[data-section=overall] > .scroll table"
    heading = page.locator(f"{table} thead th", has_text="AUC").first
    i = page.locator(f"{table} thead th").all_inner_texts().index("AUC")
    before = column(page, table, i)
    heading.locator("button").click()
    down = [float(cell.split(" ")[0]) for cell in column(page, table, i)]
    assert down == sorted((float(cell.split(" ")[0]) for cell in before), reverse=True)
    assert heading.get_attribute("aria-sort") == "descending"
    heading.locator("button").press("Enter")
    assert [float(cell.split(" ")[0]) for cell in column(page, table, i)] == down[::-1]
    assert heading.get_attribute("aria-sort") == "ascending"
    page.locator(f"{table} thead th button").first.click()
    names = column(page, table, 0)
    assert names == sorted(names, key=str.lower, reverse=True)
    assert heading.get_attribute("aria-sort") is None
    page.close()


def test_every_part_is_there_and_can_be_reached(browser, explained):
    page, _, _ = opened(browser, explained)
    ids = [one.get_attribute("data-section") for one in page.locator("section").all()]
    assert ids == [
        *("answer", "trust", "data", "overall", "sites", "tables", "connectomes", "curves", "operating", "motion", "subgroups"),
        *("ablations", "sensitivity", "training", "planted", *("explained",) * 3),
        *("readability", "methods", "leakage", "checklists", "run"),
    ]
    for link in page.locator("nav a").all():
        assert page.locator(link.get_attribute("href")).count() == 1
    curves = page.locator("section[data-section=curves] svg").first
    assert not curves.is_visible()
    page.locator("nav a", has_text="ROC").click()
    curves.wait_for(state="visible")  # a link opens its section
    assert len(page.evaluate("[...document.querySelectorAll('[id]')].map((one) => one.id)")) == len(
        set(page.evaluate("[...document.querySelectorAll('[id]')].map((one) => one.id)"))
    )
    for figure in page.locator("figure svg, figure img").all():
        assert figure.get_attribute("aria-label") or figure.get_attribute("alt")
    tips = page.locator("figure svg title").all_text_contents()
    assert any(tip.startswith("fc-logistic, ") and "AUC" in tip for tip in tips)
    assert any(tip.startswith("1. ") for tip in tips)
    assert any("(default)" in tip for tip in tips)
    assert any(re.fullmatch(r"dropout = 0\.3: AUC [\d.]+ ± [\d.]+", tip) for tip in tips)
    summaries = page.locator("summary").all_text_contents()
    assert any("Sweeps of m2lgdg, paired by site and seed" in one for one in summaries)
    assert "Ablations of m2lgdg, paired by site and seed" in page.locator("section[data-section=ablations]").text_content()
    page.emulate_media(media="print")
    assert page.locator("nav").is_hidden()
    page.close()


def test_long_tables_show_ten_rows_until_opened_and_all_in_print(browser, tmp_path):
    rng = np.random.default_rng(0)
    people = [(site, f"{site}{i}", i % 2) for site in "AB" for i in range(12)]
    rows = [(f"m{k:02d}", "", 0, *person, rng.random()) for k in range(15) for person in people]
    columns = ["method", "variant", "seed", "target", "subject", "label", "proba"]
    pd.DataFrame(rows, columns=columns).to_csv(tmp_path / "predictions.csv", index=False)
    page, _, _ = opened(browser, write_report(tmp_path), 390)
    rows = page.locator("[data-section=overall] > .scroll tbody tr")
    assert sum(row.is_visible() for row in rows.all()) == 10
    page.emulate_media(media="print")
    assert sum(row.is_visible() for row in rows.all()) == 15
    page.emulate_media(media="screen")
    page.locator("[data-section=overall] > details.rest summary").click()
    assert sum(row.is_visible() for row in rows.all()) == 15
    widths = page.evaluate("[...document.querySelectorAll('figure svg')].map((one) => one.getBoundingClientRect().width)")
    assert widths and max(widths) <= 390  # no figure has to be scrolled on a phone
    page.close()


def test_failed_and_missing_cells_are_told(browser, failed):
    page, _, _ = opened(browser, failed)
    reported = page.locator("header").inner_text()
    assert "<b>no</b> luck" in reported
    assert "failed" in reported
    assert "Not run yet" in reported
    page.close()


def test_hostile_names_are_shown_as_they_are(browser, hostile):
    page, _, _ = opened(browser, hostile)
    assert page.evaluate("window.stolen") is None
    text = page.locator("body").text_content()
    for name in HOSTILE:
        assert name in text
    assert "49" not in page.locator("header").text_content().replace("{{ 7*7 }}", "")
    assert page.locator("script").count() == 1
    page.close()


def test_all_rois_are_in_a_file_with_their_intervals(explained):
    table = pd.read_csv(explained.parent / "explained" / "m2lgdg" / "roi.csv")
    assert len(table) == 116
    assert (table["low"] <= table["score"]).all()
    assert (table["score"] <= table["high"]).all()
    assert table["rank"].tolist() == list(range(1, 117))


def test_brains_that_turn_need_no_network(browser, explained):
    pages = sorted((explained.parent / "figures").glob("*-3d.html"))
    assert len(pages) == 2  # phenotypes alone have no ROIs
    page, _, asked = opened(browser, pages[0])
    assert [url for url in asked if url.startswith("http")] == []
    page.close()


def test_the_page_stays_small(explained):
    assert explained.stat().st_size < 8e6
