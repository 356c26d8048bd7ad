"""Progress without a terminal: a plain line every minute on standard error, whatever the command."""

import re

import pytest

from m2lgdg import make
from m2lgdg.commands import terminal
from m2lgdg.commands.terminal import Lines


class Minutes:
    """A clock that goes on by a minute with every wait, and work that ends after some of them."""

    def __init__(self, lines, steps):
        self.now, self.steps = 0.0, list(steps)
        self.lines = lines

    def wait(self, seconds):
        assert seconds == 60.0
        if not self.steps:
            return True
        self.now += seconds
        self.lines.update(*self.steps.pop(0))
        return False


def test_a_line_every_minute(capsys):
    lines = Lines("cells")
    clock = Minutes(lines, [(0, None), (3, 24, "2 running"), (9, 24), (0, 5, "", "refits")])
    lines.clock, lines.wait, lines.start = (lambda: clock.now), clock.wait, 0.0
    with lines as show:
        assert show == lines.update
        lines.thread.join()
    assert capsys.readouterr().err.splitlines() == [
        "cells: 1 min since the start",
        "cells: 3 of 24 done, 2 running, 2 min since the start",
        "cells: 9 of 24 done, 3 min since the start",
        "refits: 0 of 5 done, 4 min since the start",
    ]


def test_work_of_less_than_a_minute_prints_nothing(typed, tmp_path, tiny, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny.save("tiny.cohort")
    assert typed("fit", "tiny.cohort", "--method", "prior", "--out", "model")[2] == ""


def test_a_failure_ends_the_lines():
    lines = Lines("work", every=3600.0)
    with pytest.raises(ZeroDivisionError), lines:
        raise ZeroDivisionError
    assert not lines.thread.is_alive()


@pytest.fixture
def often(monkeypatch, tmp_path, tiny):
    """The interval is a thousandth of a second; a cohort, a model and a study file."""
    monkeypatch.chdir(tmp_path)
    tiny.save("tiny.cohort")
    make("fc-logistic").fit(tiny).save("model")
    (tmp_path / "study.toml").write_text('cohort = "tiny.cohort"\nmethods = ["fc-logistic"]\nseeds = [0]\n')
    monkeypatch.setattr(terminal, "EVERY", 0.001)


def test_every_long_command_has_them(typed, often, monkeypatch):
    pytest.importorskip("onnxruntime")
    reported = {
        (
            "fit",
            "tiny.cohort",
            "--method",
            "fc-logistic",
            "--out",
            "fitted",
        ): r"refits for new-site calibration: \d of 4 done, ",
        ("run", "study.toml", "--out", "out"): r"cells: \d of 4 done, 1 running, 0 failed, ",
        ("report", "out"): r"writing the report:",
        ("explain", "model", "tiny.cohort", "--out", "explained"): r"explaining fc-logistic: ",
        ("export", "model", "--out", "model.onnx"): r"exporting fc-logistic: ",
        ("audit", "study.toml"): r"fitting each method with the real and with altered targets: \d of 4 done, ",
    }
    for words, line in reported.items():
        # Commands that take seconds would spend them on printing thousands of lines.
        monkeypatch.setattr(terminal, "EVERY", 0.05 if words[0] in ("report", "export", "audit") else 0.001)
        code, _, errors = typed(*words)
        assert code == 0, errors
        assert re.search(rf"^{line}.*0 min since the start$", errors, re.M), (words, errors[:500])
