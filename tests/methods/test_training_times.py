"""How long a training takes on one core: measured for every network, and printed by `m2lgdg methods NAME`."""

import json
import sys
from importlib.resources import files

import pytest

from m2lgdg.cli import main
from m2lgdg.commands.methods import training_time
from m2lgdg.registry import METHODS, load_methods

MEASURED = json.loads(files("m2lgdg.methods").joinpath("training_times.json").read_text(encoding="utf-8"))
UNMEASURED = {"m2dc"}  # too long to measure


def test_every_network_was_measured():
    networks = {name for name, cls in load_methods().items() if "epochs" in cls.__dataclass_fields__}
    assert set(MEASURED["minutes"]) == networks - UNMEASURED
    assert all(0 < minutes < 1e5 for minutes in MEASURED["minutes"].values())
    assert MEASURED["subjects"] == 1035 and MEASURED["rois"] == 116


@pytest.mark.parametrize(("minutes", "text"), [(0.4, "24 s"), (1.99, "119 s"), (2.0, "2 minutes"), (150.0, "2 hours")])
def test_a_time_is_given_in_its_unit(monkeypatch, tmp_path, minutes, text):
    (tmp_path / "training_times.json").write_text(json.dumps({"subjects": 1234, "rois": 7, "minutes": {"erm": minutes}}))
    monkeypatch.setattr("importlib.resources.files", lambda package: tmp_path)
    sentence = training_time("erm")
    assert f"about {text} " in sentence and "1,234 subjects" in sentence and " 7 ROIs" in sentence


def test_methods_prints_it_for_networks_only(monkeypatch, capsys):
    def printed(name):
        monkeypatch.setattr(sys, "argv", ["m2lgdg", "methods", name])
        with pytest.raises(SystemExit) as ended:
            main()
        assert not ended.value.code
        return " ".join(capsys.readouterr().out.split())

    assert training_time("fc-svm") is None
    assert training_time("erm") in printed("erm")
    assert "on one CPU core" not in printed(METHODS.default)
