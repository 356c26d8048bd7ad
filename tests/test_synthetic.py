"""The synthetic cohort: sizes, determinism, and that what is said to be planted is there and nothing else is."""

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from m2lgdg import InputError, evaluate, leave_one_site_out, make, make_cohort
from m2lgdg.data.atlases import regions
from m2lgdg.data.check import check_cohort
from m2lgdg.data.duplicates import find_duplicates, without_duplicates
from m2lgdg.data.synthetic import DEMO_SITES, PRESETS

SIZES = {"Aarhus": 24, "Bergen": 20, "Cork": 16, "Delft": 16}


def log_amplitude(cohort):
    amplitude = np.log([one.std(axis=0) for one in cohort.series])  # (subject, roi)
    return amplitude - amplitude.mean(axis=1, keepdims=True)


def connectivity(cohort):
    return np.array([np.corrcoef(one.T) for one in cohort.series])  # (subject, roi, roi)


def effect(values, cohort):
    """Cohen's d of patients against controls after taking out each site's mean."""
    values = np.array(values)
    for site in cohort.site_names:
        values[cohort.sites == site] -= values[cohort.sites == site].mean(axis=0)
    patients, controls = values[cohort.labels == 1], values[cohort.labels == 0]
    return (patients.mean(axis=0) - controls.mean(axis=0)) / values.std(axis=0)


@pytest.fixture(scope="module")
def strong():
    return make_cohort("tiny", sizes={"a": 150, "b": 150, "c": 100}, edge_effect=1.5, roi_effect=1.5, seed=3)


def test_the_paper_sized_preset_has_the_papers_sites():
    sizes = PRESETS["rest-meta-mdd"].sizes
    assert (len(sizes), sum(sizes.values())) == (22, 2269)
    assert (sizes["S9"], sizes["S15"], sizes["S20"], sizes["S21"]) == (100, 100, 533, 156)
    assert not {"S4", "S5", "S19"} & set(sizes)
    assert PRESETS["rest-meta-mdd"].n_rois == 116


def test_same_seed_same_bits_other_seed_other_cohort():
    assert make_cohort("tiny", seed=5).hash == make_cohort("tiny", seed=5).hash
    assert make_cohort("tiny", seed=5).hash != make_cohort("tiny", seed=6).hash


def test_demo_has_the_aal_regions_and_differing_sites():
    demo = make_cohort("demo", sizes=dict.fromkeys(DEMO_SITES, 3))
    assert demo.atlas == "aal"
    assert demo.rois[0] == "Precentral_L"
    lengths = {site: set(demo.lengths[demo.sites == site].tolist()) for site in demo.site_names}
    assert all(len(each) == 1 for each in lengths.values())
    assert len(set(demo.lengths.tolist())) > 3
    assert set(demo.tr.tolist()) <= {1.5, 2.0, 2.5, 3.0}


@pytest.fixture(scope="module")
def mild():
    return make_cohort("mild", sizes=SIZES)


@pytest.mark.long
def test_the_cohort_of_the_demo_is_as_hard_as_real_ones():
    cohort = without_duplicates(make_cohort("mild"))
    areas = {name: [] for name in ("fc-logistic", "connectome-adaptive")}
    for fold in leave_one_site_out(cohort):
        for name, area in areas.items():
            proba = make(name).fit(fold.source).predict_proba(fold.target)[:, 1]
            area.append(evaluate(fold.target.labels, proba)["AUC"])
    assert 0.7 < np.mean(areas["fc-logistic"]) < 0.8
    assert 0.8 < np.mean(areas["connectome-adaptive"]) < 0.92
    assert all(max(area) - min(area) > 0.1 for area in areas.values())


def test_the_cohort_of_the_demo_has_flaws_that_a_check_reports(mild):
    (pair,) = find_duplicates(mild)
    assert [mild.subjects[i] for i in (pair.first, pair.second)] == ["Aarhus-0001", "Bergen-0021"]
    np.testing.assert_allclose(mild.series[pair.second], 1.3 * mild.series[pair.first], rtol=1e-6)
    motion = mild.phenotypes["mean_fd"]
    medians = motion.groupby(mild.sites).median()
    assert medians.idxmax() == "Delft" and medians["Delft"] > 0.3 > 2 * medians.drop("Delft").max()
    result = check_cohort(mild)
    assert {finding.kind for finding in result.findings if finding.severity == "finding"} == {
        "duplicate",
        "several TRs",
        "motion",
    }
    assert result.sites.set_index("site")["motion"].to_dict() == {site: f"{value:.2f}" for site, value in medians.items()}
    (restless,) = [finding.text for finding in result.findings if finding.kind == "motion" and finding.severity == "finding"]
    others = np.median(motion[mild.sites != "Delft"])
    assert restless.startswith("Delft") and f"{medians['Delft']:.2f} mm, other sites {others:.2f})" in restless
    areas = [roc_auc_score(mild.labels[mild.sites == site], motion[mild.sites == site]) for site in medians.index]
    (separates,) = [finding.text for finding in result.findings if finding.kind == "motion and label"]
    assert f"AUC of {100 * np.mean(areas):.0f} %" in separates


def test_jumps_of_a_restless_head_are_common_to_all_rois(mild):
    """The largest changes from one volume to the next concern the whole brain in restless subjects only."""
    largest = {"Delft": [], "Cork": []}
    for site, series in zip(mild.sites, mild.series, strict=True):
        if site in largest:
            change = np.abs(np.diff(series, axis=0)) / series.std(axis=0)  # (time, roi)
            largest[site].append(change.mean(axis=1).max())
    assert np.median(largest["Delft"]) > 1.5 * np.median(largest["Cork"])


def test_a_further_atlas_is_of_the_same_scans(mild):
    """Each of its ROIs follows the nearest ROI of the first atlas more than a distant one."""
    given, further = regions("aal"), regions("ho")
    points = [table[["x", "y", "z"]].to_numpy(dtype=float) for table in (further, given)]
    distance = np.linalg.norm(points[0][:, None] - points[1], axis=2)
    second = mild.parcellations["ho"]
    assert second.rois == tuple(further["name"])
    both = np.corrcoef(second.series[4].T, mild.series[4].T)[: len(further), len(further) :]  # (further roi, roi)
    rows = np.arange(len(further))
    assert np.median(both[rows, distance.argmin(axis=1)]) > 0.7 > 0.3 > np.median(both[rows, distance.argmax(axis=1)])
    with pytest.raises(InputError, match="synthetic and ho"):
        make_cohort("tiny", further_atlas="ho")


def test_planted_edges_and_rois_differ_and_others_do_not(strong):
    truth = strong.truth
    index = {name: i for i, name in enumerate(strong.rois)}
    edges = [(index[a], index[b]) for a, b in truth["edges"]]
    on_edges = effect(connectivity(strong), strong)
    planted = np.array([on_edges[i, j] for i, j in edges])
    assert (planted > 0.4).all()
    rois = [index[name] for name in truth["rois"]]
    on_rois = effect(log_amplitude(strong), strong)
    assert (on_rois[rois] > 0.5).all()
    untouched = [i for i in range(len(strong.rois)) if i not in rois and not any(i in edge for edge in edges)]
    assert np.abs(on_edges[np.ix_(untouched, untouched)][np.triu_indices(len(untouched), 1)]).max() < 0.4


def test_patients_are_older_with_less_schooling(strong):
    table = strong.phenotypes[["age", "education"]]
    shift = effect(table.fillna(table.mean()).to_numpy(), strong)
    assert shift[0] > 0.15
    assert shift[1] < -0.15


def test_without_effects_nothing_differs():
    null = make_cohort(
        "tiny", sizes={"a": 150, "b": 150, "c": 100}, edge_effect=0, roi_effect=0, phenotype_effect=0, missing=0, seed=4
    )
    upper = np.triu_indices(len(null.rois), 1)
    assert np.abs(effect(connectivity(null)[:, *upper], null)).max() < 0.4
    assert np.abs(effect(null.phenotypes[["age", "education"]].to_numpy(), null)).max() < 0.25


def test_sites_differ_in_spectrum_and_amplitude_unless_told_not_to():
    def spread(cohort):
        amplitude = [np.log(one.std()) for one in cohort.series]
        means = [np.mean([a for a, s in zip(amplitude, cohort.sites, strict=True) if s == site]) for site in cohort.site_names]
        return np.std(means)

    assert spread(make_cohort("tiny", site_effect=1.0)) > 5 * spread(make_cohort("tiny", site_effect=0.0))


def test_series_stay_in_the_band(tiny):
    one, tr = tiny.series[0], tiny.tr[0]
    power = np.abs(np.fft.rfft(one - one.mean(axis=0), axis=0)) ** 2
    frequency = np.fft.rfftfreq(len(one), tr)
    outside = (frequency > 0.1) | (frequency < 0.01)
    assert power[outside].sum() < 1e-6 * power.sum()


def test_bad_recipes_are_refused():
    with pytest.raises(InputError, match="preset huge is not known"):
        make_cohort("huge")
    with pytest.raises(InputError, match="no field edges"):
        make_cohort("tiny", edges=3)
    with pytest.raises(InputError, match="ROIs are too few for"):
        make_cohort("tiny", n_rois=2, n_disease_rois=3)


def test_a_table_has_the_planted_regions_and_changes_nothing_else(strong):
    sizes = {"a": 150, "b": 150, "c": 100}
    with_table = make_cohort(
        "tiny", sizes=sizes, edge_effect=1.5, roi_effect=1.5, seed=3, n_regions=12, structure_effect=1.5, without_table=0.1
    )
    table = with_table.tables["thickness"]
    assert with_table._changed(tables={}).hash == strong.hash
    assert 0.05 < table.isna().all(axis=1).mean() < 0.15 and not table.dropna(how="all").isna().any(axis=None)
    present = with_table.select(np.flatnonzero(table.notna().all(axis=1)))
    found = effect(present.tables["thickness"], present)
    planted = np.isin(table.columns, with_table.truth["regions"])
    assert planted.sum() == 2 and table.columns[-1] == "eTIV"
    assert (found[planted] < -0.7).all() and (np.abs(found[~planted]) < 0.35).all()


@pytest.mark.parametrize("changed", [{"n_regions": 149}, {"n_regions": 1}, {"n_regions": -1}])
def test_a_table_that_cannot_be_made_is_refused(changed):
    with pytest.raises(InputError, match="a table has at most 148 regions"):
        make_cohort("tiny", **changed)
