"""Search of fields inside source: what is chosen and recorded, that nothing else reaches it, and what is refused."""

import json
from typing import ClassVar

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

import m2lgdg
from m2lgdg.method import Method, method
from m2lgdg.report.contents import changed_fields
from m2lgdg.splits import leave_one_site_out
from m2lgdg.storage import InputError
from m2lgdg.study.audit import audit
from m2lgdg.study.config import check_study, read_study, with_only
from m2lgdg.study.plan import make_cells
from m2lgdg.study.runner import expected_time
from m2lgdg.study.tune import Range, Tune, mean_area, search

pytestmark = pytest.mark.usefixtures("methods_forgotten")
PENALTIES = [[0.03], [1.0], [100.0]]
SPACE = {"fields": {"penalties": PENALTIES}, "folds": 3}


@pytest.fixture(scope="module")
def cohort():
    return m2lgdg.make_cohort("tiny", seed=3, edge_effect=1.2)


def study_of(folder, cohort, tune, **more):
    if not (folder / "tiny.cohort").exists():
        cohort.save(folder / "tiny.cohort")
    base = {
        "cohort": str(folder / "tiny.cohort"),
        "methods": ["prior", "fc-logistic"],
        "seeds": [4],
        "targets": ["east", "west"],
    }
    return base | {"tune": {"fc-logistic": tune} if tune else {}} | more


def records(out):
    cells = [json.loads(path.read_text()) for path in (out / "cells").iterdir()]
    return {(cell["method"], cell["target"]): cell for cell in cells}


def test_the_best_at_left_out_source_sites_is_fitted_on_all_of_source(cohort, tmp_path):
    assert not m2lgdg.run_study(study_of(tmp_path, cohort, SPACE), tmp_path / "out").failed
    found = records(tmp_path / "out")
    assert "tuned" not in found["prior", "east"]["learned"]
    for fold in leave_one_site_out(cohort, ["east", "west"]):
        areas = []
        for penalties in PENALTIES:  # three source sites, so that each is a fold
            own = []
            for site in fold.source.site_names:
                here = fold.source.sites == site
                fitted = m2lgdg.make("fc-logistic", penalties=tuple(penalties)).fit(fold.source.select(~here), seed=4)
                own.append(roc_auc_score(fold.source.labels[here], fitted.predict_proba(fold.source.select(here))[:, 1]))
            areas.append(np.mean(own))
        kept = found["fc-logistic", fold.site]["learned"]["tuned"]
        assert (kept["trials"], kept["folds"], kept["best"]) == (3, 3, int(np.argmax(areas)))
        np.testing.assert_allclose([one["AUC"] for one in kept["tried"]], areas, atol=1e-12)
        assert [one["fields"] for one in kept["tried"]] == [{"penalties": one} for one in PENALTIES]
        chosen = m2lgdg.make("fc-logistic", penalties=tuple(PENALTIES[kept["best"]])).fit(fold.source, seed=4)
        np.testing.assert_array_equal(
            found["fc-logistic", fold.site]["proba"], chosen.predict_proba(fold.target.in_order())[:, 1]
        )


def test_the_number_of_trials_is_shown_in_tables_and_report(cohort, tmp_path, typed, figures_painted_only):
    assert not m2lgdg.run_study(study_of(tmp_path, cohort, SPACE), tmp_path / "out").failed
    sentence = "fc-logistic (penalties searched in 3 trials at left-out source sites of each cell)"
    assert changed_fields({"tune": {"fc-logistic": SPACE | {"trials": 1}}}, {}) == sentence.replace("3 trials", "1 trial")
    code, out, _ = typed("table", tmp_path / "out")
    assert code == 0 and sentence in " ".join(out.split())
    assert sentence in (m2lgdg.write_report(tmp_path / "out")).read_text()


def test_same_bits_for_another_engine_and_another_order_of_subjects(cohort, tmp_path):
    space = {"fields": {"penalties": PENALTIES, "site_folds": [2, 3]}, "trials": 3}
    assert not m2lgdg.run_study(study_of(tmp_path, cohort, space), tmp_path / "one").failed
    assert not m2lgdg.run_study(study_of(tmp_path, cohort, space), tmp_path / "two", jobs=2).failed
    assert (tmp_path / "one" / "predictions.csv").read_bytes() == (tmp_path / "two" / "predictions.csv").read_bytes()
    (tmp_path / "other").mkdir()
    turned = cohort.select(np.random.default_rng(1).permutation(len(cohort)))
    assert not m2lgdg.run_study(study_of(tmp_path / "other", turned, space), tmp_path / "other" / "out").failed
    assert (tmp_path / "one" / "predictions.csv").read_bytes() == (tmp_path / "other" / "out" / "predictions.csv").read_bytes()
    first, second = records(tmp_path / "one"), records(tmp_path / "other" / "out")
    assert all(first[one]["learned"].get("tuned") == second[one]["learned"].get("tuned") for one in first)


def test_the_target_does_not_reach_the_search(cohort, tmp_path):
    """Labels, scans and all of the target are changed by the audit, too, which compares what was fitted."""
    found = {}
    for name, labels in (("as it is", None), ("turned", 1)):
        held = (
            cohort
            if labels is None
            else cohort._changed(labels=np.where(cohort.sites == "east", 1 - cohort.labels, cohort.labels))
        )
        (fold,) = leave_one_site_out(held, ["east"])
        found[name] = search(Tune(**SPACE), "fc-logistic", {}, fold.source, seed=4, device="cpu")
    assert found["as it is"] == found["turned"]
    results = audit(study_of(tmp_path, cohort, SPACE, methods=["fc-logistic"]))
    assert results and all(one.passed for one in results), [one for one in results if not one.passed]


def test_the_key_covers_the_search(cohort, tmp_path):
    def keys(tune):
        study = check_study(study_of(tmp_path, cohort, tune), "study")
        return {cell.method: cell.key for cell in make_cells(study, cohort) if cell.target == "east"}

    plain, tuned = keys(None), keys(SPACE)
    assert plain["prior"] == tuned["prior"] and plain["fc-logistic"] != tuned["fc-logistic"]
    others = [SPACE | {"folds": 4}, SPACE | {"trials": 2}, {"fields": {"penalties": PENALTIES[:2]}, "folds": 3}]
    assert len({plain["fc-logistic"], tuned["fc-logistic"], *(keys(one)["fc-logistic"] for one in others)}) == 5


@pytest.fixture
def slider():
    """A method whose best fields are known."""

    @method("slider")
    class Slider(Method):
        """The closer its fields are to 3, 7 and b, the less noise is in its scores."""

        place: float = 0.0
        count: int = 1
        word: str = "a"
        fits: ClassVar[list] = []

        def learn(self, source, *, seed, device, progress):
            self.fits.append((self.place, self.count, self.word, seed, tuple(source.site_names)))
            off = abs(self.place - 3) + abs(self.count - 7) + (self.word != "b")
            self.state_["noise"] = np.array([off])

        def score(self, target):
            noise = np.tanh([series[0, 0] for series in target.series])
            return 1 / (1 + np.exp(-(np.tanh([one.mean() for one in target.series]) + self.state_["noise"][0] * noise)))

    return Slider


def test_ranges_are_searched_by_optuna(cohort, slider):
    (fold,) = leave_one_site_out(cohort, ["east"])
    space = Tune(
        fields={"place": Range(low=0, high=6), "count": Range(low=1, high=64, log=True), "word": ["a", "b"]}, trials=6, folds=3
    )
    first = search(space, "slider", {}, fold.source, seed=1, device="cpu")
    assert first.facts["trials"] == 6 and len(slider.fits) == 18 and all("east" not in fit[4] for fit in slider.fits)
    tried = [one["fields"] for one in first.facts["tried"]]
    assert all(type(one["place"]) is float and type(one["count"]) is int and one["word"] in "ab" for one in tried)
    assert all(0 <= one["place"] <= 6 and 1 <= one["count"] <= 64 for one in tried)
    assert search(space, "slider", {}, fold.source, seed=1, device="cpu") == first
    assert [one["fields"] for one in search(space, "slider", {}, fold.source, seed=2, device="cpu").facts["tried"]] != tried
    assert first.fields == tried[first.facts["best"]]


def test_a_part_of_all_combinations_is_drawn_by_the_seed(cohort, slider):
    (fold,) = leave_one_site_out(cohort, ["east"])
    space = Tune(fields={"place": [1.0, 2.0, 3.0], "count": [1, 5, 7]}, trials=4)
    drawn = [
        [
            tuple(one["fields"].values())
            for one in search(space, "slider", {}, fold.source, seed=seed, device="cpu").facts["tried"]
        ]
        for seed in (0, 0, 1)
    ]
    assert drawn[0] == drawn[1] != drawn[2] and len(set(drawn[0])) == 4
    every = search(space.model_copy(update={"trials": 50}), "slider", {}, fold.source, seed=0, device="cpu").facts
    assert every["trials"] == 9 and every["tried"][5]["fields"] == {"place": 2.0, "count": 7}


def test_mean_area_is_of_sites_with_both_classes(cohort):
    score = np.random.default_rng(0).random(len(cohort))
    cut = cohort._changed(labels=np.where(cohort.sites == "west", 0, cohort.labels))
    own = [roc_auc_score(cut.labels[cut.sites == site], score[cut.sites == site]) for site in cut.site_names if site != "west"]
    assert mean_area(cut, score) == pytest.approx(np.mean(own))
    alternate = cohort._changed(labels=np.isin(cohort.sites, ["west", "east"]).astype(np.int8))
    assert mean_area(alternate, score) == pytest.approx(roc_auc_score(alternate.labels, score))
    with pytest.raises(InputError, match="only one class is held out"):
        mean_area(cohort, np.where(cohort.labels == 1, score, np.nan))


@pytest.mark.parametrize(
    ("tune", "problem"),
    [
        ({"fields": {}}, "key tune.fc-logistic.fields"),
        (
            {"fields": {"penaltys": [[1.0]]}},
            r"\[tune.fc-logistic\]: method fc-logistic has no field penaltys; did you mean penalties",
        ),
        ({"fields": {"site_folds": []}}, "field site_folds: the list is empty"),
        ({"fields": {"site_folds": [3, 3]}}, "listed twice"),
        ({"fields": {"site_folds": [3, 1]}}, "field site_folds: 1 is too small"),
        ({"fields": {"site_folds": {"low": 2, "high": 5}}}, "key trials is missing"),
        ({"fields": {"site_folds": {"low": 5, "high": 5}}, "trials": 2}, "low must be below high"),
        ({"fields": {"site_folds": {"low": 0, "high": 5, "log": True}}, "trials": 2}, "low must be above 0"),
        ({"fields": {"site_folds": {"low": 1, "high": 5}}, "trials": 2}, "1 is too small"),
        ({"fields": {"site_folds": [2, 3]}, "trials": 0}, "key tune.fc-logistic.trials"),
        ({"fields": {"site_folds": [2, 3]}, "trail": 3}, "tune.fc-logistic.trail is not known"),
        ({"fields": {"site_folds": list(range(2, 1502)), "seed_": [1]}}, "has no field seed_"),
    ],
)
def test_refused(cohort, tmp_path, tune, problem):
    with pytest.raises(InputError, match=problem):
        check_study(study_of(tmp_path, cohort, tune), "study.toml")


def test_refused_with_sweeps_variants_and_other_methods(cohort, tmp_path, monkeypatch):
    space = {"fields": {"phenotypes": [True, False]}}
    with pytest.raises(InputError, match=r"field phenotypes is in \[sweep.fc-logistic\], too"):
        check_study(study_of(tmp_path, cohort, space, sweep={"fc-logistic": {"phenotypes": [True]}}), "s")
    with pytest.raises(InputError, match="variant phenotypes sets field phenotypes, which is searched"):
        check_study(study_of(tmp_path, cohort, space, variants=["phenotypes"]), "s")
    with pytest.raises(InputError, match="fc-svm is not one of the study's methods"):
        check_study(study_of(tmp_path, cohort, None) | {"tune": {"fc-svm": space}}, "s")
    monkeypatch.setattr("m2lgdg.study.tune.missing_libraries", lambda extra: [extra])
    with pytest.raises(InputError, match=r"a range needs optuna; list values, or install it with: .*m2lgdg\[optuna\]"):
        check_study(study_of(tmp_path, cohort, {"fields": {"site_folds": {"low": 2, "high": 5}}, "trials": 2}), "s")


def test_a_study_file(cohort, tmp_path):
    cohort.save(tmp_path / "tiny.cohort")
    (tmp_path / "study.toml").write_text(
        'cohort = "tiny.cohort"\nmethods = ["fc-logistic", "erm"]\n'
        "[tune.fc-logistic]\ntrials = 5\nfields.site_folds = { low = 2, high = 5 }\nfields.phenotypes = [true, false]\n"
        "[tune.erm]\nfields.learning_rate = [1e-3, 1e-4]\n"
    )
    study = read_study(tmp_path / "study.toml")
    assert study.tune["fc-logistic"].count == 5 and study.tune["erm"].count == 2
    assert set(with_only(study, ["erm"]).tune) == {"erm"}
    cells = make_cells(study, cohort)
    plain = make_cells(study.model_copy(update={"tune": {}}), cohort)
    assert expected_time(cells, cohort, 1)[1] == pytest.approx(11 * expected_time(plain, cohort, 1)[1])


def test_a_learning_curve_searches_in_its_part_of_source(cohort, tmp_path):
    from m2lgdg.study.curve import learning_curve

    study = check_study(study_of(tmp_path, cohort, SPACE, methods=["fc-logistic"], targets=["east"]), "study")
    curve, summary = learning_curve(study, tmp_path / "out", sizes=[0.7, 1.0], repeats=1)
    assert not summary.failed and len(curve.table) == 2


@pytest.mark.parametrize("broken", ["raises", "gives NaN"])
def test_a_trial_that_fails_is_named(cohort, slider, tmp_path, broken, monkeypatch):
    def score(self, target):
        if self.count == 2 and broken == "raises":
            raise ZeroDivisionError("two")
        return np.full(len(target), np.nan if self.count == 2 else 0.5)

    monkeypatch.setattr(slider, "score", score)
    tune = {"slider": {"fields": {"count": [1, 2]}, "folds": 2}}
    study = study_of(tmp_path, cohort, None, methods=["prior", "slider"], targets=["east"]) | {"tune": tune}
    assert m2lgdg.run_study(study, tmp_path / "out").failed
    (cell,) = [one for (name, _), one in records(tmp_path / "out").items() if name == "slider"]
    not_numbers = "ValueError: method slider did not give one probability between 0 and 1 for each subject"
    said = {"raises": "ZeroDivisionError: two", "gives NaN": not_numbers}[broken]
    assert cell["reason"] == f"{said} (in a trial of tune: {{'count': 2}})"
