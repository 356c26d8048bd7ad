"""Workflows, hooks and links of the repository."""

import importlib.util
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
spec = importlib.util.spec_from_file_location("links", ROOT / "docs" / "links.py")
links = importlib.util.module_from_spec(spec)
spec.loader.exec_module(links)


@pytest.mark.parametrize("page", links.pages(), ids=lambda page: page.name)
def test_links_of_the_docs(page):
    assert links.broken(page) == []


def test_broken_links_are_found(tmp_path):
    (tmp_path / "other.md").write_text("# One `thing`\n\n```\n# no heading\n```\n## How many? Two!\n")
    page = tmp_path / "page.md"
    page.write_text(
        "[a](other.md) [b](other.md#one-thing) [c](other.md#how-many-two) [d](https://example.org/x) `[e](gone.md)`\n"
        "[f](gone.md) [g](other.md#no-heading) [h](#here)\n\n# Here\n"
    )
    assert links.broken(page, tmp_path) == ["page.md: gone.md", "page.md: other.md#no-heading"]


def test_workflows_test_every_python_of_the_classifiers():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    versions = [line.rpartition(" ")[2] for line in project["classifiers"] if "Python :: 3." in line]
    jobs = {path.stem: yaml.safe_load(path.read_text())["jobs"] for path in (ROOT / ".github" / "workflows").glob("*.yml")}
    tests = jobs["tests"]["tests"]
    assert tests["strategy"]["matrix"]["python"] == versions
    commands = [step["run"] for job in jobs.values() for each in job.values() for step in each["steps"] if "run" in step]
    assert ".ci/run" in commands and "make wheel-check" in commands and "python docs/links.py" in commands
    makefile = (ROOT / "Makefile").read_text()
    for command in commands:
        if command.startswith("make "):
            assert f"\n{command.removeprefix('make ')}:" in makefile


def test_hooks_and_templates_are_readable():
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert {hook["id"] for repository in hooks for hook in repository["hooks"]} >= {"ruff-check", "ruff-format", "links"}
    for template in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.md"):
        _, head, body = template.read_text().split("---\n", 2)
        assert set(yaml.safe_load(head)) == {"name", "about"} and body.strip()
    assert (ROOT / "SECURITY.md").is_file()
