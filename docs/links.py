"""Checks the links of all Markdown pages: each file and heading that a link names must exist; otherwise exit code 1."""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub forms them."""
    titles = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.S | re.M), re.M)
    names = set()
    for title in titles:
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).replace("`", "").lower()
        name = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
        names.add(name if name not in names else f"{name}-1")
    return names


def broken(page: Path, root: Path = ROOT) -> list[str]:
    """Links of a page to files or headings that do not exist; links to other sites are not followed."""
    wrong = []
    for link in LINK.findall(CODE.sub("", page.read_text(encoding="utf-8"))):
        target, _, anchor = link.partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        file = page if not target else (page.parent / target).resolve()
        if not file.exists() or (anchor and file.suffix == ".md" and anchor not in anchors(file)):
            wrong.append(f"{page.relative_to(root)}: {link}")
    return wrong


def pages(root: Path = ROOT) -> list[Path]:
    """Markdown pages of the project."""
    return [*sorted(root.glob("*.md")), *sorted((root / "docs").glob("*.md")), *sorted((root / ".github").rglob("*.md"))]


if __name__ == "__main__":
    wrong = [line for page in pages() for line in broken(page)]
    print("\n".join(wrong) or "All links work.")
    sys.exit(bool(wrong))
