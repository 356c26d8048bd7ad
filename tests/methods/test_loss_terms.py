"""The terms of a network's loss: in the record of a cell, in the report, and what is said of one that did not act."""

import csv
import io
import json

import pytest

from m2lgdg import InputError, make, make_cohort, run_study
from m2lgdg.report.page import write_report
from m2lgdg.report.training import loss_terms

SMALL = {"variant": "small", "epochs": 3, "warmup": 1, "length": 20}


def record(history, kept, method="net", variant="", **losses):
    return {"method": method, "variant": variant, "learned": {"history": history, "best_epoch": kept, "losses": losses}}


def test_values_at_the_first_and_the_kept_epoch():
    one = [{"ce": 0.7, "pull": 0.0, "val_auc": 0.5}, {"ce": 0.5, "pull": 0.0, "val_auc": 0.6}, {"ce": 0.3, "pull": 0.0}]
    two = [{"ce": 0.9, "pull": 0.0}, {"ce": 0.1, "pull": 0.0}]
    weights = {"ce": {"weight": None}, "pull": {"weight": 0.25}}
    table, idle = loss_terms([record(one, 2, **weights), record(two, 2, **weights), record([{"ce": 1.0}] * 2, 1, "plain")])
    assert table.shown == [
        ["net", "ce", "-", "0.8", "0.3", "0.1", "0.9", ""],
        ["net", "pull", "0.25", "0", "0", "0", "0", "did not act (zero)"],
    ]
    assert idle == ["pull of net (zero in every epoch of all 2 trainings)"]
    assert loss_terms([record([{"ce": 1.0}] * 2, 1)]) == (None, [])  # a single term is in the curves
    assert loss_terms([{"method": "prior", "variant": "", "learned": {}}]) == (None, [])


@pytest.mark.parametrize(
    ("values", "remark"),
    [
        (([0.100, 0.1019], [0.2, 0.2]), "did not act (constant within 2 %)"),  # within each training, not between them
        (([0.100, 0.103], [0.2, 0.2]), ""),
        (([0.0, 0.0], [0.0, 1e-9]), ""),
        (([-0.100, -0.1019], [-0.2]), "did not act (constant within 2 %)"),
        (([0.0], [0.0]), ""),  # one epoch shows nothing
    ],
)
def test_constant_is_judged_within_each_training(values, remark):
    table, _ = loss_terms([record([{"ce": i, "pull": value} for i, value in enumerate(each)], 1) for each in values])
    assert table.shown[1][-1] == remark


def test_terms_of_a_later_stage_and_many_variants():
    history = [{"ce": 1.0}, {"ce": 0.5, "late": 2.0}, {"ce": 0.2, "late": 1.0}]
    table, _ = loss_terms([record(history, 1)])
    assert table.shown[1][3:5] == ["2", "-"]  # the kept epoch came before it
    flat = [{"ce": 1.0, "pull": 0.0}, {"ce": 0.5, "pull": 0.0}]
    _, idle = loss_terms([record(flat, 1, variant=variant) for variant in ("", "a", "b", "c")])
    assert idle == ["pull of net and 3 variants (zero in every epoch of all 4 trainings)"]


def test_a_fitted_network_keeps_them():
    fitted = make("m2lgdg", **{**dict(make("m2lgdg").variants["small"]), "epochs": 3, "warmup": 1, "length": 20}).fit(
        make_cohort("tiny"), seed=0
    )
    history, kept = fitted.facts_["history"], fitted.facts_["best_epoch"] - 1
    losses = fitted.facts_["losses"]
    assert list(losses) == ["ce", "similarity", "orthogonality", "difference", "contrast"]
    for name, numbers in losses.items():
        assert (numbers["first"], numbers["kept"]) == (history[0][name], history[kept][name])
    assert {name: numbers["weight"] for name, numbers in losses.items()} == {
        **{"ce": None, "similarity": 0.1, "orthogonality": 0.1, "difference": 0.1, "contrast": 0.1},
    }


def test_a_margin_of_two_acts_where_one_does_not(tmp_path):
    """In the record, in the table and on the page of a sweep; the record of the sweep's default is that of the method."""
    make_cohort("tiny", sizes={"east": 10, "west": 14, "south": 14}).save(tmp_path / "tiny.cohort")
    study = {"cohort": str(tmp_path / "tiny.cohort"), "methods": ["m2lgdg"], "seeds": [0], "targets": ["east"]}
    study |= {"method": {"m2lgdg": SMALL}, "sweep": {"m2lgdg": {"margin": [1.0, 2.5]}}}
    run_study(study, tmp_path / "out")
    stored = [json.loads(path.read_text()) for path in (tmp_path / "out" / "cells").glob("*.json")]
    difference = {one["variant"]: one["learned"]["losses"]["difference"] for one in stored}
    assert difference[""]["first"] == difference[""]["kept"] == 0.0
    assert difference["margin=2.5"]["first"] > 0 and difference["margin=2.5"]["weight"] == 0.1
    page = write_report(tmp_path / "out").read_text()
    assert "Terms of the loss that did not act" in page and "difference of m2lgdg" in page
    rows = list(csv.DictReader(io.StringIO((tmp_path / "out" / "tables" / "Terms-of-the-training-loss.csv").read_text())))
    remarks = {row["Method"]: row["remark"] for row in rows if row["term"] == "difference"}
    assert remarks["m2lgdg"] == "did not act (zero)" and remarks["m2lgdg: margin=2.5"] == ""


def test_a_negative_margin_is_refused():
    with pytest.raises(InputError, match=r"field margin: -0\.5 is too small"):
        make("m2lgdg", margin=-0.5)
