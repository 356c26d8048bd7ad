"""The search for the default: its fits are those of the package, its rules add up, and untouched sites are never scored."""

import sys

import numpy as np
import pandas as pd
import pytest
import search_default
from search_default import (
    DEFAULT,
    FORMER,
    RULES,
    SETTINGS,
    UNTOUCHED,
    Decisions,
    Part,
    Rule,
    Setting,
    areas_of,
    decision_of,
    discriminant,
)
from sklearn.linear_model import Ridge

from m2lgdg import Cohort, make, make_cohort
from m2lgdg.connectivity import amplitude_features, fc_features
from m2lgdg.methods.linear import standardised_block
from m2lgdg.methods.solvers import association
from m2lgdg.methods.within_sites import balance
from m2lgdg.metrics import auc
from m2lgdg.preprocess import PhenotypeScaler

SITES = {"a": 24, "b": 20, "c": 22, "NYU": 20}
SCANNED = ["series", "connectomes"]


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["search_default.py", *map(str, arguments)])
    search_default.main()


@pytest.fixture(scope="module")
def cohorts():
    series = make_cohort("tiny", sizes=SITES, seed=4, n_rois=10)
    matrices = np.stack([np.corrcoef(one.T) for one in series.series])
    given = {"phenotypes": series.phenotypes, "subjects": series.subjects, "inputs": series.inputs}
    return {"series": series, "connectomes": Cohort.from_connectomes(matrices, series.labels, series.sites, **given)}


@pytest.fixture(scope="module")
def files(cohorts, tmp_path_factory):
    folder = tmp_path_factory.mktemp("search")
    with pytest.MonkeyPatch.context() as patch:
        for name, cohort in cohorts.items():
            cohort.save(folder / f"{name}.cohort")
            run(patch, "blocks", folder / f"{name}.cohort", folder / f"{name}.npz")
    return folder


@pytest.mark.parametrize("scans", SCANNED)
def test_fits_are_those_of_the_package(cohorts, files, scans):
    cohort, kept = cohorts[scans], Decisions(files / f"{scans}.npz")
    assert kept.targets == ["a", "b", "c"]
    alone = Rule(DEFAULT.parts, phenotypes=False)
    for i, site in enumerate(kept.targets):
        here = cohort.sites == site
        source, target = cohort.select(~here), cohort.select(here)
        adaptive = make("fc-adaptive", penalties=(3.0,)).fit(source)
        own = kept.part("fc", [Setting(1, 3.0)], i)  # in units of the held-out decisions, as a method stores them
        np.testing.assert_allclose(own[~here], adaptive.held_out_, atol=1e-4)
        np.testing.assert_allclose(own[here], adaptive.decision(target), atol=1e-4)
        default = make("connectome-adaptive").fit(source)
        np.testing.assert_allclose(decision_of(alone, kept, i)[~here], default.held_out_, atol=1e-3)
        usual = np.ones(len(target), dtype=bool)
        if scans == "series":  # a fitted method does without amplitudes outside of the range of source
            usual = (default.amplitude_block(target) == amplitude_features(target.series)).all(axis=1)
        assert usual.sum() >= len(target) - 1
        np.testing.assert_allclose(decision_of(alone, kept, i)[here][usual], default.decision(target)[usual], atol=1e-3)
        if usual.all():
            assert areas_of(alone, kept)[i] == pytest.approx(100 * auc(target.labels, default.decision(target)))
        # Phenotypes are fitted by logistic regression in the search, and by ridge beside scans; under their penalty alike.
        default = make("connectome-adaptive", "phenotypes").fit(source)
        assert np.corrcoef(decision_of(DEFAULT, kept, i)[here], default.decision(target))[0, 1] > 0.999


@pytest.mark.parametrize("setting", [Setting(2, 1.0, True), Setting(0, 0.3, False, False)])
def test_other_settings_are_ridge_regressions_of_scaled_edges(cohorts, files, setting):
    cohort, kept = cohorts["series"], Decisions(files / "series.npz")
    here = cohort.sites == "b"
    source, edges = cohort.select(~here), fc_features(cohort.scans)
    scaler = PhenotypeScaler.fit(source, ("age", "sex") if setting.confounds else ())
    weights = balance(source) if setting.within else np.ones(len(source))
    rows, centre, scale, slopes = standardised_block(edges[~here], source, weights, setting.within, scaler.transform(source))
    unseen = edges[here] - (scaler.transform(cohort.select(here)) @ slopes if setting.confounds else 0) - centre
    signs = 2.0 * source.labels - 1
    scales = association(rows.trained, signs, weights) ** setting.power
    scales *= np.linalg.norm(rows.trained) / np.linalg.norm(rows.trained * scales)
    ridge = Ridge(alpha=setting.penalty * (rows.trained.astype(float) ** 2).sum(axis=1).mean())
    ridge.fit(rows.trained.astype(float) * scales, signs, weights)
    found = kept.blocks["fc"][setting][kept.targets.index("b")][here]
    np.testing.assert_allclose(found, ridge.predict(unseen / scale * scales), atol=1e-4)


def test_products_by_torch_are_those_without(cohorts):
    edges = fc_features(cohorts["series"].scans)
    here, there = (search_default.product(edges[:7], edges, device) for device in ("cpu", "cpu:0"))  # the latter is torch's
    assert here.dtype == there.dtype == np.float64 and here.shape == (7, len(edges))
    np.testing.assert_allclose(here, there, rtol=1e-4, atol=1e-5)


def test_rules_are_written_for_each_set(files, tmp_path, monkeypatch, capsys):
    names = [f"{name}={files / name}.npz" for name in SCANNED]
    monkeypatch.setattr(
        search_default, "RULES", (DEFAULT, Rule(FORMER, confounds=True), Rule((Part("swings"),), phenotypes=False))
    )
    run(monkeypatch, "rules", tmp_path / "out.csv", *names)
    table = pd.read_csv(tmp_path / "out.csv").set_index(["rule", "set"])
    assert table["sites"].tolist() == [3] * 5  # connectomes have no deviation FC
    for scans in SCANNED:
        mean = np.mean(areas_of(DEFAULT, Decisions(files / f"{scans}.npz")))
        assert table.loc[(DEFAULT.title, scans), "AUC"] == pytest.approx(mean, abs=0.006)
    assert DEFAULT.title in capsys.readouterr().out


def test_of_several_settings_the_best_at_left_out_source_sites_is_taken(files):
    kept = Decisions(files / "series.npz")
    settings = [one for one in SETTINGS["steady"] if not one.confounds and one.within]
    areas = [kept.area("steady", one, 0) for one in settings]
    assert max(areas) > min(areas)
    best = kept.blocks["steady"][settings[int(np.argmax(areas))]][0]
    np.testing.assert_allclose(kept.part("steady", settings, 0), best / best[kept.sources[0].own].std(), rtol=1e-5)


def test_weights_by_the_discriminant(files):
    """Of independent decisions, weights are differences of means; one that points away has none."""
    kept = Decisions(files / "series.npz")
    source, rng = kept.sources[0], np.random.default_rng(0)
    signs = 2.0 * source.labels - 1
    parts = rng.normal(size=(len(signs), 3)) + signs[:, None] * [1.0, 0.5, -1.0]
    whole, half = discriminant(parts, source, 0.0), discriminant(parts, source, 1.0)
    assert whole[2] == half[2] == 0
    assert whole[0] > whole[1] > 0
    own = [(parts[source.labels == 1, i].mean() - parts[source.labels == 0, i].mean()) / parts[:, i].var() for i in (0, 1)]
    assert half[0] / half[1] == pytest.approx(own[0] / own[1], rel=0.5)


def test_untouched_sites_are_refused(files, tmp_path, monkeypatch):
    assert len(UNTOUCHED) == 9
    with pytest.raises(SystemExit, match="NYU: kept for the end"):
        run(monkeypatch, "blocks", files / "series.cohort", tmp_path / "out.npz", "--targets", "a", "NYU")
    with pytest.raises(SystemExit, match="d: no site"):
        run(monkeypatch, "blocks", files / "series.cohort", tmp_path / "out.npz", "--targets", "d")
    stored = dict(np.load(files / "series.npz"))
    np.savez(tmp_path / "moved.npz", **stored | {"targets": np.array(["a", "b", "NYU"])})
    with pytest.raises(SystemExit, match="NYU: kept for the end"):
        run(monkeypatch, "rules", tmp_path / "out.csv", f"moved={tmp_path / 'moved.npz'}")
    assert not list(tmp_path.glob("out*"))


def test_titles_tell_rules_apart():
    assert len({rule.title for rule in RULES}) == len(RULES) == 481
    assert DEFAULT.title == "steady 1 + swings 0.3 + amplitude 0.2 + log_euclidean 0.5"
