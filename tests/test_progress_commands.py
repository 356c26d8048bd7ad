"""Every command that can take more than two seconds shows its progress."""

import re

import pytest

from m2lgdg import make
from m2lgdg.commands import terminal


@pytest.fixture
def often(monkeypatch, tmp_path, tiny):
    """A line of progress every thousandth of a second; a cohort and a model."""
    monkeypatch.chdir(tmp_path)
    tiny.save("tiny.cohort")
    make("fc-logistic").fit(tiny).save("model")
    monkeypatch.setattr(terminal, "EVERY", 0.001)


@pytest.mark.parametrize(
    ("words", "lines"),
    [
        (("check", "tiny.cohort"), ["checking the cohort"]),
        (("convert", "tiny.cohort", "other.cohort"), ["checking the cohort", "writing other.cohort"]),
        (("predict", "model", "tiny.cohort", "--out", "p.csv"), ["predicting"]),
        (("calibrate", "model", "tiny.cohort", "--out", "local"), ["calibrating"]),
        (("card", "model"), ["writing the model card"]),
    ],
)
def test_it_is_shown(typed, often, words, lines):
    code, _, errors = typed(*words)
    assert code in (0, 1), errors
    for line in lines:
        assert re.search(rf"^{line}: 0 min since the start$", errors, re.M), errors[:500]
