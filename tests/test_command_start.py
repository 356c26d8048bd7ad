"""A typed command imports itself and no other, and converts its words as typer would."""

import subprocess
import sys
from pathlib import Path

import pytest
import typer

from m2lgdg.commands import terminal


def test_predict_imports_neither_other_commands_nor_pydantic(tmp_path):
    code = (
        "import sys\nfrom m2lgdg.cli import main\nsys.argv = ['m2lgdg', 'predict', 'none', 'none.cohort', '--out', 'p.csv']\n"
        "try:\n    main()\nexcept SystemExit as ended:\n    print(ended.code)\n"
        "print(sorted(name for name in sys.modules if name.split('.')[0] == 'pydantic' or name == 'm2lgdg.commands.demo'))"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=True)
    assert ended.stdout == "2\n[]\n" and "none" in ended.stderr


def test_every_command_is_listed_and_built_once():
    group = typer.main.get_command(terminal.app)
    assert list(group.commands) == list(terminal.COMMANDS) == group.list_commands(None)
    assert [command.name for command in group.commands.values()] == list(terminal.COMMANDS)
    assert group.commands["fit"] is group.commands["fit"] and "fitt" not in group.commands


@pytest.mark.parametrize("words", [["m", "c", "--out", "t.csv"], ["./m/", "", "--out", "a b", "--site", "x", "--site", "y"]])
def test_words_are_converted_as_by_typer(words):
    command = typer.main.get_command(terminal.app).commands["predict"]
    ours = command.make_context("predict", list(words)).params
    for parameter in command.params:  # as typer does it
        vars(parameter).pop("process_value")
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(terminal.Plain, "get_params")
        theirs = command.make_context("predict", list(words)).params
    assert ours == theirs and {name: type(value) for name, value in ours.items()} == {
        name: type(value) for name, value in theirs.items()
    }
    assert isinstance(ours["model"], Path)


def test_what_cannot_be_converted_is_refused_by_typer(capsys):
    group = typer.main.get_command(terminal.app)
    for words in (["predict", "m"], ["predict", "m", "c", "--out", "t.csv", "--coverage", "much"], ["demo", "--jobs", "0"]):
        with pytest.raises(SystemExit) as ended:
            group.main(words, prog_name="m2lgdg")
        assert ended.value.code == 2 and "Error" in capsys.readouterr().err
