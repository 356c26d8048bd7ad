"""The terminal of all commands: a typed command imports itself and no other, and long work shows how far it is."""

import re
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest
import typer

from m2lgdg import make, make_cohort
from m2lgdg.commands import reading, terminal
from m2lgdg.commands.terminal import Lines


def test_a_command_imports_no_other(tmp_path):
    """Nor pydantic, which typer takes for the conversion of its options."""
    code = (
        "import sys\nfrom m2lgdg.cli import main\nsys.argv = ['m2lgdg', 'predict', 'none', 'none.cohort', '--out', 'p.csv']\n"
        "try:\n    main()\nexcept SystemExit as ended:\n"
        "    print(ended.code, [name for name in ('m2lgdg.commands.demo', 'pydantic', 'sklearn') if name in sys.modules])"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=True)
    assert ended.stdout == "2 []\n" and "none" in ended.stderr


def test_plain_values_are_converted_as_typer_does(monkeypatch):
    """Absent values, texts, paths, several values, numbers and flags, by each of the two conversions."""
    command = typer.main.get_command(terminal.app).get_command(None, "fit")
    words = ["c.cohort", "--out", "m", "--variant", "scan", "--set", "a=1", "--set", "b=2", "--seed", "3"]
    words.append("--no-new-site-calibration")
    given = command.make_context("fit", list(words)).params
    assert given["path"] == Path("c.cohort") and given["to"] == Path("m") and given["variant"] == "scan"
    assert list(given["changes"]) == ["a=1", "b=2"] and given["seed"] == 3 and given["kind"] is None
    monkeypatch.setattr(terminal, "_plainly", lambda get_params: get_params)
    by_typer = typer.main.get_command(terminal.app).get_command(None, "fit")
    assert by_typer is not command and by_typer.make_context("fit", list(words)).params == given


def test_every_command_is_listed_and_built_once():
    group = typer.main.get_command(terminal.app)
    assert group.list_commands(None) == list(terminal.COMMANDS)
    assert [group.get_command(None, name).name for name in terminal.COMMANDS] == list(terminal.COMMANDS)
    assert group.get_command(None, "fit") is group.get_command(None, "fit") and group.get_command(None, "fitt") is None


def test_what_cannot_be_converted_is_refused(capsys):
    group = typer.main.get_command(terminal.app)
    for words in (["predict", "m"], ["predict", "m", "c", "--out", "t.csv", "--coverage", "much"], ["demo", "--jobs", "0"]):
        with pytest.raises(SystemExit) as ended:
            group.main(words, prog_name="m2lgdg")
        assert ended.value.code == 2 and "Error" in capsys.readouterr().err


def test_a_line_every_minute(capsys, monkeypatch):
    """The clock goes on by a minute with every wait, and the work ends after four of them."""
    lines, clock = Lines("cells"), [0.0]
    steps = [(0, None), (3, 24, "2 running"), (9, 24), (0, 5, "", "refits")]

    def wait(seconds):
        assert seconds == 60.0
        if steps:
            clock[0] += seconds
            lines.update(*steps.pop(0))
            return False
        return True

    monkeypatch.setattr(terminal.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(lines.ended, "wait", wait)
    lines.start = 0.0
    lines._print_lines()
    assert capsys.readouterr().err.splitlines() == [
        "cells: 1 min since the start",
        "cells: 3 of 24 done, 2 running, 2 min since the start",
        "cells: 9 of 24 done, 3 min since the start",
        "refits: 0 of 5 done, 4 min since the start",
    ]


def test_a_failure_ends_the_lines():
    lines = Lines("work")
    with pytest.raises(ZeroDivisionError), lines:
        raise ZeroDivisionError
    assert not lines.thread.is_alive()
    assert lines.thread not in threading.enumerate()


@pytest.fixture(scope="module")
def work(tmp_path_factory, tiny):
    """A cohort, a model and a study file."""
    folder = tmp_path_factory.mktemp("work")
    tiny.save(folder / "tiny.cohort")
    make("fc-logistic").fit(tiny).save(folder / "model")
    (folder / "study.toml").write_text('cohort = "tiny.cohort"\nmethods = ["fc-logistic"]\nseeds = [0]\n')
    return folder


def test_long_commands_print_lines(typed, work, tmp_path, monkeypatch):
    monkeypatch.chdir(work)
    assert typed("fit", "tiny.cohort", "--method", "prior", "--out", tmp_path / "quick")[2] == ""  # less than a minute
    reported = {
        ("fit", "tiny.cohort", "--method", "fc-logistic"): r"refits for new-site calibration: \d of 4 done, ",
        ("run", "study.toml"): r"cells: \d of 4 done, 1 running, 0 failed, ",
        ("explain", "model", "tiny.cohort"): r"explaining fc-logistic: ",
    }
    monkeypatch.setattr(Lines, "every", 0.001)
    for words, line in reported.items():
        code, _, errors = typed(*words, "--out", tmp_path / words[0])
        assert code == 0, errors
        assert re.search(rf"^{line}.*0 min since the start$", errors, re.M), (words, errors[:500])


def test_every_long_command_shows_its_progress(typed, work, tmp_path, monkeypatch):
    descriptions = []

    @contextmanager
    def recorded(description):
        descriptions.append(description)
        yield lambda *_, **__: None

    monkeypatch.setattr(terminal, "shown", recorded)
    for name in ("tiny.cohort", "model", "study.toml"):
        Path(tmp_path / name).symlink_to(work / name)
    monkeypatch.chdir(tmp_path)
    reading, checking = "reading tiny.cohort", "checking the cohort"
    for words, lines in (
        (("check", "tiny.cohort"), [reading, checking]),
        (("convert", "tiny.cohort", "other.cohort"), [reading, checking, "writing other.cohort"]),
        (("fit", "tiny.cohort", "--method", "prior", "--out", "new"), [reading, checking, "fitting"]),
        (("predict", "model", "tiny.cohort", "--out", "p.csv"), [reading, "predicting"]),
        (("calibrate", "model", "tiny.cohort", "--out", "local"), [reading, "calibrating"]),
        (("card", "model", "--out", "card"), ["writing the model card"]),
        (("run", "study.toml", "--out", "out"), ["cells"]),
        (("table", "out"), ["computing the tables"]),
        (("report", "out"), ["writing the report"]),
        (("share", "out", "--out", "copy"), ["copying the study"]),
    ):
        descriptions.clear()
        code, _, errors = typed(*words)
        assert code in (0, 1), errors
        assert descriptions == lines


def helped(*words):
    from typer.testing import CliRunner

    result = CliRunner().invoke(terminal.app, [*words, "--help"], prog_name="m2lgdg", terminal_width=80)
    assert result.exit_code == 0
    return result.output


def test_help_has_every_command_once_in_a_group_and_imports_none():
    lines = helped().splitlines()
    for name in terminal.COMMANDS:
        assert sum(line.startswith(f"  {name} ") for line in lines) == 1
    order = [lines.index(f"{title}:") for title in terminal.GROUPS]
    assert order == sorted(order) and max(map(len, lines)) <= 80 and len(lines) <= 55


@pytest.mark.parametrize("name", terminal.COMMANDS)
def test_help_of_a_command_is_whole_in_80_columns(name):
    text = helped(name)
    assert max(map(len, text.splitlines())) <= 80 and "…" not in text and "list[" not in text


def test_help_of_check_fits_on_a_screen_and_the_rest_is_in_a_table():
    text, every = helped("check"), helped("convert")
    assert len(text.splitlines()) <= 42 and "docs/data.md#options-by-kind" in " ".join(text.split()).replace("- kind", "-kind")
    table = (Path(__file__).parents[2] / "docs" / "data.md").read_text().split("## Options by kind")[1].split("\n## ")[0]
    for name in reading.BY_KIND:
        flag = f"--{name.replace('_', '-')}"
        assert f"\n  {flag} " not in text and f"\n  {flag} " in every and f"| `{flag}" in table


def test_options_that_help_leaves_out_are_taken(typed, tmp_path):
    make_cohort("tiny").save(tmp_path / "tiny.cohort")
    code, _, said = typed("check", tmp_path / "tiny.cohort", "--session", "02")
    assert code == 2 and "no option --session" in said
