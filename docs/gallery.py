"""The pictures of docs/gallery.md: parts of the report of the demo, as a browser shows them.

Usage: python docs/gallery.py [REPORT.html]. Without a report, `m2lgdg demo` makes one first. Needs the extra `dev` and
Chromium; every picture is written to docs/images with at most 300 kB.
"""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, sync_playwright

IMAGES = Path(__file__).resolve().parent / "images"
PARTS = ("top", "overall", "sites", "curves", "explained")  # the start of the page, then sections by their data-section
LARGEST = 300_000  # bytes


def picture(page: Page, name: str, height: int = 860) -> bytes:
    """What the browser shows from the start of a section on."""
    start = 0 if name == "top" else page.evaluate(f"document.querySelector('[data-section={name}]').offsetTop") - 12
    end = page.evaluate("document.documentElement.scrollHeight")
    clip = {"x": 0, "y": start, "width": page.viewport_size["width"], "height": min(height, end - start)}  # type: ignore[index]
    return page.screenshot(full_page=True, clip=clip)  # type: ignore[arg-type]


def small(png: bytes) -> bytes:
    """The picture with as many colours as 300 kB allow."""
    image = Image.open(io.BytesIO(png)).convert("RGB")
    for colours in (256, 128, 64, 32):
        buffer = io.BytesIO()
        image.quantize(colours, dither=Image.Dither.NONE).save(buffer, "PNG", optimize=True)
        if buffer.tell() <= LARGEST:
            break
    return buffer.getvalue()


def main() -> None:
    """Write all pictures."""
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        if len(sys.argv) > 1:
            report = Path(sys.argv[1]).resolve()
        else:
            subprocess.run([sys.executable, "-m", "m2lgdg", "demo", "--out", "demo"], cwd=folder, check=True)
            report = Path(folder) / "demo" / "results" / "report.html"
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 1100, "height": 860}, color_scheme="light")
        page.goto(report.as_uri())
        known = {"top", *page.evaluate("[...document.querySelectorAll('[data-section]')].map(each => each.dataset.section)")}
        print(f"Sections of the report: {', '.join(sorted(known))}")
        page.evaluate("document.querySelectorAll('details.section').forEach(each => { each.open = true; })")
        for name in PARTS:
            if name not in known:
                sys.exit(f"The report has no section {name}.")
            (IMAGES / f"report-{name}.png").write_bytes(small(picture(page, name)))
        browser.close()


if __name__ == "__main__":
    main()
