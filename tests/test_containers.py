"""The Dockerfiles without a builder: their instructions, the files that they copy, and their shell commands."""

import fnmatch
import json
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = [ROOT / "Dockerfile", ROOT / "Dockerfile.cuda"]
KNOWN = {"FROM", "RUN", "WORKDIR", "COPY", "ARG", "ENV", "ENTRYPOINT", "CMD", "USER", "HEALTHCHECK"}
SCRIPTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
IGNORED = (ROOT / ".dockerignore").read_text().split()


def instructions(path):
    """(instruction, its words) in the order of the file; continued lines are joined and comments left out."""
    text = "\n".join(line for line in path.read_text().splitlines() if not line.lstrip().startswith("#"))
    lines = [line for line in re.sub(r"\\\n\s*", "", text).splitlines() if line.strip()]
    return [tuple(line.split(maxsplit=1)) for line in lines]


def is_sent(name):
    """Whether a file reaches the builder: the last line of .dockerignore that matches decides."""
    sent = True
    for line in IGNORED:
        pattern = line.removeprefix("!").removeprefix("**/")
        if fnmatch.fnmatch(name, pattern) or fnmatch.fnmatch(Path(name).name, pattern):
            sent = line.startswith("!")
    return sent


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_instructions_and_copied_files(path):
    listed = instructions(path)
    assert listed[:2] == [("ARG", "PYTHON=python:3.12-slim"), ("FROM", listed[1][1])] and {name for name, _ in listed} <= KNOWN
    assert all(words.split()[0] == "${PYTHON}" for name, words in listed if name == "FROM")  # a digest pins every stage
    stages = [words.split(" AS ")[1] for name, words in listed if name == "FROM" and " AS " in words]
    for words in (words for name, words in listed if name == "COPY"):
        *sources, _ = words.split()
        if sources[0].startswith("--from="):
            assert sources[0].removeprefix("--from=") in stages
        else:
            assert all((ROOT / source).exists() and is_sent(source) for source in sources), words
    assert not is_sent("results") and not is_sent(".git")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_the_entry_point_is_a_script_of_the_package(path):
    listed = dict(instructions(path))
    (entry,) = json.loads(listed["ENTRYPOINT"])
    assert entry in SCRIPTS and json.loads(listed["CMD"]) == ["serve", "--host", "0.0.0.0"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_the_image_is_not_run_as_root_and_its_health_is_checked(path):
    listed = instructions(path)
    names = [name for name, _ in listed]
    user = dict(listed)["USER"]
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", user) and "RUN" not in names[names.index("USER") :]
    assert any(
        name == "RUN" and words == f"install -d -o {user.split(':')[0]} -g {user.split(':')[1]} /work" for name, words in listed
    )
    command = dict(listed)["HEALTHCHECK"].partition("CMD ")[2]
    assert "http://127.0.0.1:8765/health" in command  # the default port of serve, and the path that needs no token
    subprocess.run(["sh", "-n", "-c", command], check=True)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
@pytest.mark.skipif(shutil.which("sh") is None, reason="no POSIX shell")
def test_shell_commands_are_valid(path):
    for command in (words for name, words in instructions(path) if name == "RUN"):
        subprocess.run(["sh", "-n", "-c", command], check=True)
        assert "constraints.txt" in command or "pip install" not in command


@pytest.mark.parametrize(("extras", "installed"), [("", "m.whl"), ("networks,serve", "m.whl[networks,serve]")])
@pytest.mark.skipif(shutil.which("sh") is None, reason="no POSIX shell")
def test_extras_reach_pip(tmp_path, extras, installed):
    """The last RUN of the Dockerfile as the builder runs it, with pip and m2lgdg replaced by what they were called with."""
    command = [words for name, words in instructions(FILES[0]) if name == "RUN"][-1]
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels" / "m.whl").touch()
    script = f'python() {{ printf "%s\\n" "$@"; }}\nm2lgdg() {{ echo "m2lgdg $1"; }}\n{command}'.replace("/opt", str(tmp_path))
    environment = {"PATH": "/usr/bin:/bin", "EXTRAS": extras, "TORCH_INDEX": "https://example.org"}
    ended = subprocess.run(["sh", "-ec", script], env=environment, capture_output=True, text=True, check=True)
    lines = ended.stdout.splitlines()
    assert lines[:3] == ["-m", "pip", "install"] and lines[-2:] == [str(tmp_path / "wheels" / installed), "m2lgdg doctor"]
    assert not (tmp_path / "wheels").exists()
