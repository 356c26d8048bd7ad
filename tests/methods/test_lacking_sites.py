"""Methods that compare sites, where sites are too few or too small: the fit goes on, and says what it was."""

import json
import sys

import numpy as np
import pytest
import torch

from m2lgdg import make, make_cohort, run_study
from m2lgdg.cli import main

QUICK = {"widths": (8, 4), "epochs": 3, "warmup": 1, "calibration": "none"}
SIZES = {"a": 20, "b": 20, "c": 20}


def subjects(*counts):
    """Site and label of subjects; a pair (controls, patients) for each site."""
    site = [i for i, pair in enumerate(counts) for _ in range(sum(pair))]
    label = [one for controls, patients in counts for one in [0] * controls + [1] * patients]
    return torch.tensor(site), torch.tensor(label)


LARGE, SMALL, PAIRS, ONE_CLASS = (9, 9), (3, 3), (1, 1), (0, 9)
GROUPS = {
    "two": (LARGE, LARGE),
    "one": (LARGE,),
    "large-and-small": (LARGE, SMALL),
    "small": (SMALL, SMALL),
    "pairs": (PAIRS, PAIRS),
    "large-and-one-class": (LARGE, ONE_CLASS),
}
LACKING = {
    "erm": set(),
    "brainnetcnn": set(),
    "coral": {"one", "large-and-small", "small", "pairs", "large-and-one-class"},
    "irm": {"small", "pairs"},
    "mldg": {"one", "small", "pairs"},
    "mixup": {"one"},
    "group-dro": {"one"},
    "iib": {"one"},
    "cdann": {"one", "large-and-one-class"},
    "genm": {"one", "pairs", "large-and-one-class"},
    "m2dc": {"one"},
    "metaexplainer": {"one"},
    "ufa-net": {"one"},
    "m2lgdg": {"one"},
}


@pytest.mark.parametrize("name", LACKING)
def test_which_sites_are_too_few_or_too_small(name):
    assert {group for group, counts in GROUPS.items() if make(name).lacks_sites(*subjects(*counts))} == LACKING[name]


@pytest.mark.parametrize(
    ("name", "change"),
    [("ufa-net", {"alignment_weight": 0.0}), ("m2lgdg", {"contrastive_weight": 0.0}), ("coral", {"sites_per_batch": 1})],
)
def test_fields_decide_as_well(name, change):
    given = [make(name, **change).lacks_sites(*subjects(*GROUPS[group])) for group in ("one", "two")]
    assert given == ([True, True] if name == "coral" else [False, False])


@pytest.mark.parametrize("name", ["coral", "group-dro", "mixup", "mldg"])
def test_it_is_erm_where_the_note_says_so_and_only_there(name):
    cohort = make_cohort("tiny", sizes=SIZES, seed=0)
    for sites, reported in ((["a"], 1), (["a", "b", "c"], 0)):
        source = cohort.select(sites=sites)
        own, plain = (make(one, **QUICK).fit(source, seed=0) for one in (name, "erm"))
        weights = [one.state_["network.encoder.0.weight"] for one in (own, plain)]
        assert len(own.facts_["notes"]) == reported
        assert np.allclose(*weights, atol=1e-6) == bool(reported)
    assert not plain.facts_["notes"]


def test_fit_tells_it_and_a_record_keeps_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    make_cohort("tiny", sizes={"a": 20, "b": 20}, seed=0).save("two.cohort")
    fields = {"variant": "small", "epochs": 2, "warmup": 1}
    run_study({"cohort": "two.cohort", "methods": ["coral"], "seeds": [0], "method": {"coral": fields}}, "out")
    for file in (tmp_path / "out" / "cells").iterdir():
        assert "the cross-site part of coral was not used" in json.loads(file.read_text())["learned"]["notes"][0]
    make_cohort("tiny", sizes={"a": 20}, seed=0).save("one.cohort")
    options = ["--method", "coral", "--variant", "small", "--set", "epochs=2", "--set", "warmup=1", "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", ["m2lgdg", "fit", "one.cohort", *options, "--out", "model"])
    with pytest.raises(SystemExit):
        main()
    assert "Note: Source-training subjects come from 1 site(s)" in capsys.readouterr().out
