"""Every command that can take more than two seconds shows its progress."""

from contextlib import contextmanager

import pytest

from m2lgdg import make
from m2lgdg.commands import terminal


@pytest.fixture
def shown(monkeypatch, tmp_path, tiny):
    """Descriptions of the progress that was shown; a cohort, a model and a study file are there."""
    descriptions = []

    @contextmanager
    def recorded(description):
        descriptions.append(description)
        yield lambda *_, **__: None

    monkeypatch.chdir(tmp_path)
    tiny.save("tiny.cohort")
    make("fc-logistic").fit(tiny).save("model")
    (tmp_path / "study.toml").write_text('cohort = "tiny.cohort"\nmethods = ["prior"]\nseeds = [0]\n')
    monkeypatch.setattr(terminal, "shown", recorded)
    return descriptions


@pytest.mark.parametrize(
    ("words", "lines"),
    [
        (("check", "tiny.cohort"), ["reading tiny.cohort", "checking the cohort"]),
        (("convert", "tiny.cohort", "other.cohort"), ["reading tiny.cohort", "checking the cohort", "writing other.cohort"]),
        (
            ("fit", "tiny.cohort", "--method", "prior", "--out", "new"),
            ["reading tiny.cohort", "checking the cohort", "fitting"],
        ),
        (("predict", "model", "tiny.cohort", "--out", "p.csv"), ["reading tiny.cohort", "predicting"]),
        (("calibrate", "model", "tiny.cohort", "--out", "local"), ["reading tiny.cohort", "calibrating"]),
        (("card", "model"), ["writing the model card"]),
    ],
)
def test_it_is_shown(typed, shown, words, lines):
    code, _, errors = typed(*words)
    assert code in (0, 1), errors
    assert shown == lines


def test_it_is_shown_for_what_reads_a_study(typed, shown):
    assert typed("run", "study.toml", "--out", "out")[0] == 0
    shown.clear()
    for words, line in (
        (("table", "out"), "computing the tables"),
        (("report", "out"), "writing the report"),
        (("share", "out", "--out", "copy"), "copying the study"),
    ):
        assert typed(*words)[0] == 0
        assert shown.pop() == line
