"""The adapted track of studies: its probabilities, its rows, and that tables and report keep it apart from the strict one."""

import json

import numpy as np
import pandas as pd
import pytest

from m2lgdg import InputError, read
from m2lgdg.metrics import logit, sigmoid
from m2lgdg.model.site_level import cross_batches, site_shift
from m2lgdg.report.card import card
from m2lgdg.report.contents import read_contents
from m2lgdg.report.page import write_report
from m2lgdg.report.paper_tables import table
from m2lgdg.report.sharing import share_study
from m2lgdg.study.audit import ALONE, AS_IS, RELABELLED, REORDERED, Seen, _compare_predictions, audit
from m2lgdg.study.config import check_study
from m2lgdg.study.plan import make_cells
from m2lgdg.study.predictions import (
    ADAPTED,
    STRICT,
    adapted_variant,
    by_track,
    is_adapted,
    joined_tracks,
    read_predictions,
    without_track,
)
from m2lgdg.study.runner import run_study, study_cohort

pytestmark = pytest.mark.usefixtures("figures_painted_only")

METHODS = ["prior", "fc-logistic"]


@pytest.fixture(scope="module")
def both(two_track_study):
    return two_track_study


@pytest.fixture(scope="module")
def cohort_file(both):
    return both.parent / "tracks.cohort"


def content(cohort_file, **more):
    base = {"cohort": str(cohort_file), "methods": METHODS, "seeds": [3], "variants": ["phenotypes"], "name": "tracks"}
    return base | {"track": ["strict", "adapted"], "adapt_subjects": 8} | more


@pytest.mark.parametrize("variant", ["", "phenotypes", "field=1", "a, b"])
def test_names_of_the_track(variant):
    assert not is_adapted(variant)
    assert is_adapted(adapted_variant(variant))
    assert without_track(adapted_variant(variant)) == without_track(variant) == variant


def test_one_record_has_both_tracks(both):
    records = [json.loads(path.read_text()) for path in (both / "cells").glob("*.json")]
    assert len(records) == 3 * 4
    for record in records:
        assert len(record["proba"]) == len(record["adapted"]) == len(record["subjects"])
        assert "adapted" not in record["variant"]


def test_probabilities_are_those_of_the_levels(both, cohort_file):
    cohort = read(cohort_file)
    tracks = by_track(read_predictions(both))
    chosen = [part[(part["method"] == "fc-logistic") & (part["variant"] == "phenotypes")] for part in tracks.values()]
    strict, adapted = (part.set_index(["target", "subject"]).sort_index()["proba"] for part in chosen)
    assert list(strict.index) == list(adapted.index)
    for site in ("a", "b", "c"):
        here = strict.loc[site]
        share = float((cohort.labels[cohort.sites != site] == 1).mean())
        expected = here.copy()
        for scored, batch in cross_batches(here.index.tolist(), 3, 8):
            x = logit(here.to_numpy())
            expected.iloc[scored] = sigmoid(x[scored] + site_shift(x[batch], share))
        np.testing.assert_allclose(adapted.loc[site], expected, atol=1e-12)
        assert not np.allclose(here, expected)


def test_a_site_without_a_batch_is_strict(both):
    tracks = by_track(read_predictions(both))
    strict, adapted = (part[part["target"] == "d"]["proba"] for part in tracks.values())
    np.testing.assert_array_equal(strict, adapted)


def test_strict_predictions_do_not_depend_on_the_track(both, cohort_file, tmp_path):
    run_study(content(cohort_file, track="strict"), tmp_path / "strict")
    strict = read_predictions(tmp_path / "strict")
    pd.testing.assert_frame_equal(by_track(read_predictions(both))["strict"], strict)
    assert by_track(strict)["strict"] is strict


def test_the_adapted_track_alone_takes_its_cells_from_both(both, cohort_file, tmp_path):
    summary = run_study(content(cohort_file, track="adapted"), tmp_path / "adapted", reuse=[both])
    assert (summary.done, summary.taken) == (0, 12)
    alone = read_predictions(tmp_path / "adapted")
    assert set(alone["variant"]) == {"adapted", "phenotypes, adapted"}
    tracks = by_track(alone)
    assert list(tracks) == ["adapted"]
    pd.testing.assert_frame_equal(joined_tracks(tracks), alone)
    contents = read_contents(tmp_path / "adapted")
    assert contents.track == "adapted"
    assert len(contents.records) == 12
    assert contents.missing() == []
    text = table(tmp_path / "adapted")
    assert text.count("intercept for its site, from up to 8 other subjects") == 5
    page = write_report(tmp_path / "adapted").read_text()
    assert "Adapted track only" in page
    values = tmp_path / "values.csv"
    values.write_text("method,target,metric,value\nprior,a,AUC,50\n")
    with pytest.raises(InputError, match="adapted track only"):
        table(tmp_path / "adapted", published=values)


def test_the_key_has_the_track(cohort_file):
    def keys(**more):
        study = check_study(content(cohort_file, **more), "study")
        return [cell.key for cell in make_cells(study, study_cohort(study))]

    strict, adapted, larger = keys(track="strict"), keys(), keys(adapt_subjects=9)
    assert not set(strict) & set(adapted)
    assert not set(larger) & set(adapted)
    assert keys(track="adapted") == adapted
    assert keys(track="strict", adapt_subjects=9) == strict
    assert keys(track=["adapted", "strict"]) == adapted


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"track": []}, "key track: the list is empty"),
        ({"track": ["strict", "strict"]}, "key track: strict is listed twice"),
        ({"track": "transductive"}, "key track"),
        ({"adapt_subjects": 1}, "key adapt_subjects"),
        ({"variants": ["phenotypes, adapted"]}, "name of rows of the adapted track"),
        ({"variants": {"prior": ["adapted"]}}, "name of rows of the adapted track"),
    ],
)
def test_what_a_study_file_may_not_have(cohort_file, more, words):
    with pytest.raises(InputError, match=words):
        check_study(content(cohort_file, **more), "study")


def test_tables_keep_the_tracks_apart(both):
    text = table(both, "markdown", tests=True)
    titles = [line[4:] for line in text.splitlines() if line.startswith("### ")]
    sites = [f"Target {site}" for site in "abcd"]
    one = [*sites, "Macro average over target sites", "Paired tests over target sites"]
    assert titles == [*one, *(f"{title}, adapted track" for title in one), "Strict and adapted track"]
    first, last = text.index("### Target a"), text.index("### Strict and adapted track")
    assert "adapted" not in text[first : text.index("adapted track")].replace("Target a, ", "")
    for part in text[:last].split("### ")[1:]:
        assert ("adapted track: each subject" in part) == ("adapted track" in part.splitlines()[0])
        names = [line.split("|")[1].strip(" *_") for line in part.splitlines() if line.startswith("| ")]
        assert not any("adapted" in name for name in names)  # no row of one track in a table of the other
    assert "**" not in text[last:]
    assert "neither ranked nor tested" in text[last:]
    only = table(both, sites=["b"])
    assert only.count("Target b") == 2


def test_scores_of_both_tracks(both):
    tracks = by_track(read_predictions(both))
    text = table(both, "csv")
    rows = pd.read_csv(pd.io.common.StringIO(text))
    rows = rows[(rows["table"] == "Strict and adapted track") & (rows["method"] == "fc-logistic + phenotypes")]
    sensitivities = [float(value) for value in rows[rows["metric"] == "SEN"]["mean"]]
    for part, shown in zip(tracks.values(), sensitivities, strict=True):
        chosen = part[(part["method"] == "fc-logistic") & (part["variant"] == "phenotypes") & (part["label"] == 1)]
        expected = (chosen["proba"] >= 0.5).groupby(chosen["target"]).mean().drop("d").mean()  # d is too small to count
        assert shown == pytest.approx(100 * expected, abs=0.051)


def test_the_report_has_a_section_of_its_own(both, tmp_path):
    copy = tmp_path / "copy"
    share_study(both, copy)
    pd.testing.assert_frame_equal(
        read_predictions(copy).sort_values(["method", "variant", "target", "subject"], ignore_index=True),
        read_predictions(both).sort_values(["method", "variant", "target", "subject"], ignore_index=True),
    )
    page = write_report(copy).read_text()
    assert page.count('data-section="adapted"') == 1
    inside = page[page.index('data-section="adapted"') :]
    before = page[: page.index('data-section="adapted"')]
    assert "Macro average over target sites, adapted track" in inside
    assert ", adapted track" not in before.replace("Macro average over target sites, adapted track", "")
    assert (copy / "figures" / "forest-adapted.svg").is_file()
    assert (copy / "tables" / "Strict-and-adapted-track.csv").is_file()
    assert "prior, adapted" not in page
    shared = write_report(both, share=tmp_path / "shared").parent
    assert by_track(read_predictions(shared)).keys() == {"strict", "adapted"}


def test_a_card_uses_the_strict_track(both, cohort_file, tmp_path):
    from m2lgdg import make

    cohort = read(cohort_file)
    make("fc-logistic").fit(cohort).save(tmp_path / "model")
    parts = {part.title: part for part in card(tmp_path / "model", both)}
    strict = by_track(read_predictions(both))["strict"]
    chosen = strict[(strict["method"] == "fc-logistic") & (strict["variant"] == "") & (strict["label"] == 1)]
    expected = (chosen["proba"] >= 0.5).groupby(chosen["target"]).mean().drop("d").mean()
    assert dict(parts["Performance at left-out sites of a study"].facts)["SEN"].startswith(f"{100 * expected:.1f} ")


def test_a_damaged_adapted_record_is_run_again(cohort_file, tmp_path):
    small = content(cohort_file, methods=["prior"], variants=[], targets=["a"])
    run_study(small, tmp_path / "out")
    (path,) = (tmp_path / "out" / "cells").glob("*.json")
    before = (tmp_path / "out" / "predictions.csv").read_bytes()
    record = json.loads(path.read_text())
    record["adapted"][0] = 2.0
    path.write_text(json.dumps(record))
    assert run_study(small, tmp_path / "out").done == 1
    assert (tmp_path / "out" / "predictions.csv").read_bytes() == before


@pytest.mark.long
def test_the_audit_covers_the_track(cohort_file):
    (result,) = audit(content(cohort_file, methods=["fc-logistic"], targets=["a"], variants=[]))
    assert result.passed


def test_the_audit_reports_what_reaches_the_track():
    base = np.array([0.2, 0.6, 0.7])
    batch = dict.fromkeys(((ADAPTED, AS_IS), (ADAPTED, RELABELLED), (ADAPTED, REORDERED)), base + 0.1)
    real = {(STRICT, AS_IS): base, **batch, (ADAPTED, ALONE): base}
    withheld = Seen(proba={(STRICT, AS_IS): base, (ADAPTED, AS_IS): base + 0.1})
    assert _compare_predictions(Seen(proba=real), withheld) == []
    for how in (RELABELLED, REORDERED, ALONE):
        changed = real | {(ADAPTED, how): real[ADAPTED, how] + 0.01}
        (sentence,) = _compare_predictions(Seen(proba=changed), withheld)
        assert sentence == f"predictions of the adapted track {how} differ by up to 0.01"
    (sentence,) = _compare_predictions(Seen(proba=real), Seen(proba={(STRICT, AS_IS): base, (ADAPTED, AS_IS): base}))
    assert sentence == "predictions of the adapted track with labels withheld differ by up to 0.1"
