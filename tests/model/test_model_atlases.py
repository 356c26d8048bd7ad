"""Methods fitted in several atlases: the mean of their logits, and every use of such a model."""

import dataclasses
import json

import miniature
import numpy as np
import pandas as pd
import pytest
from scipy.io import savemat

from m2lgdg import InputError, Model, leave_one_site_out, make, make_cohort, read
from m2lgdg.cohort import Parcellation
from m2lgdg.method import has_atlas
from m2lgdg.methods.connectome_adaptive import ConnectomeAdaptive
from m2lgdg.methods.tables import table_weights
from m2lgdg.metrics import logit, platt, sigmoid
from m2lgdg.model.new_site import NewSiteCalibration
from m2lgdg.study.audit import NOISE, WITHHELD, digests, other_target
from m2lgdg.study.runner import run_study

ROIS = 9  # of the second atlas
LACKING = 3  # every so many subjects, one lacks it


@pytest.fixture(scope="module")
def cohort():
    return miniature.with_two_atlases(make_cohort("tiny", seed=1))


@pytest.fixture(scope="module")
def fold(cohort):
    return next(leave_one_site_out(cohort, ["west"]))


@pytest.fixture(scope="module")
def gappy(cohort):
    """A fold in which a third of the subjects lack the second atlas."""
    return next(leave_one_site_out(miniature.with_two_atlases(cohort, LACKING), ["west"]))


@pytest.fixture(scope="module")
def fitted(fold):
    return make("connectome-adaptive", phenotypes=True).fit(fold.source, source_distribution=True)


@pytest.mark.parametrize("name", ["mida", "coral-target"])
def test_a_method_that_sees_the_target_has_one_atlas(name):
    with pytest.raises(InputError, match="field atlases: this method does not use it"):
        make(name, atlases="all")


@pytest.mark.parametrize(("name", "fields"), [("connectome-adaptive", {}), ("erm", {"epochs": 1, "warmup": 1, "widths": (8,)})])
def test_a_model_is_the_mean_of_its_members(name, fields, gappy, tmp_path):
    whole = make(name, atlases="all", **fields).fit(gappy.source, seed=3)
    members = {
        atlas: make(name, **fields | {"atlases": "first"}).fit(gappy.source.parcellation(atlas), seed=3)
        for atlas in ("first-one", "mixed")
    }
    slope, offset = whole.state_["calibration"]
    both = gappy.target.parcellations["mixed"].present
    first, second = (logit(one.predict_proba(gappy.target.parcellation(atlas))[:, 1]) for atlas, one in members.items())
    mean = first.copy()
    mean[both] = (first[both] + second) / 2
    proba = whole.predict_proba(gappy.target)
    np.testing.assert_allclose(proba[:, 1], sigmoid(slope * mean + offset), rtol=0, atol=1e-9)
    loaded = Model.load(whole.save(tmp_path / "model"))
    np.testing.assert_array_equal(loaded.predict_proba(gappy.target), proba)
    alone = np.concatenate([whole.predict_proba(gappy.target.select([i])) for i in range(len(gappy.target))])
    np.testing.assert_allclose(alone, proba, rtol=0, atol=1e-4)


def test_the_mean_is_calibrated_on_held_out_sites(fold, fitted):
    parts = {
        atlas: make("connectome-adaptive", phenotypes=True).fit(fold.source.parcellation(atlas))
        for atlas in ("first-one", "mixed")
    }
    mean = np.mean([part.held_out_logits() for part in parts.values()], axis=0)
    np.testing.assert_allclose(fitted.state_["calibration"], platt(mean, fold.source.labels, fold.source.sites), rtol=1e-9)


def test_which_atlases(fold):
    first = make("connectome-adaptive", atlases="first").fit(fold.source)
    assert len(first.members) == 1 and first.facts_["atlas"] == "first-one"
    alone = make("connectome-adaptive").fit(fold.source.parcellation("first-one"))
    assert len(alone.members) == 1  # a cohort of one atlas
    for name, value in alone.state_.items():
        np.testing.assert_array_equal(first.state_[name], value)
    second = make("connectome-adaptive", atlases="mixed").fit(fold.source)
    assert second.facts_["rois"] == [f"mixed-{i}" for i in range(ROIS)]
    np.testing.assert_array_equal(second.predict_proba(fold.target), second.predict_proba(fold.target.parcellation("mixed")))
    both = make("connectome-adaptive", atlases=("mixed", "first-one")).fit(fold.source)
    assert list(both.members) == ["mixed", "first-one"]
    with pytest.raises(InputError, match="has no atlas ho; it has first-one, mixed"):
        make("connectome-adaptive", atlases="ho").fit(fold.source)
    with pytest.raises(InputError, match="mixed is listed twice"):
        make("connectome-adaptive", atlases=("mixed", "mixed")).fit(fold.source)
    assert len(make("fc-adaptive").fit(fold.source).members) == 1  # the first atlas, unless asked for more


def test_a_target_may_lack_an_atlas(fold, fitted):
    only = fitted.predict_proba(fold.target.parcellation("mixed"))[:, 1]
    slope, offset = fitted.state_["calibration"]
    part = logit(fitted.members["mixed"].predict_proba(fold.target.parcellation("mixed"))[:, 1])
    np.testing.assert_allclose(only, sigmoid(slope * part + offset), atol=1e-12)
    assert all("atlas missing: first-one" in flags for flags in fitted.flags(fold.target.parcellation("mixed")))
    unnamed = dataclasses.replace(fold.target.parcellation("first-one"), atlas="")
    np.testing.assert_array_equal(fitted.predict_proba(unnamed), fitted.predict_proba(fold.target.parcellation("first-one")))
    other = dataclasses.replace(fold.target.parcellation("first-one"), atlas="ho")
    with pytest.raises(InputError, match="trained on the atlases first-one, mixed; the cohort has ho"):
        fitted.predict_proba(other)


def test_a_model_of_one_atlas_refuses_subjects_without_it(gappy):
    second = make("fc-adaptive", atlases="mixed").fit(gappy.source)
    absent = gappy.target.subjects[~gappy.target.parcellations["mixed"].present][0]
    with pytest.raises(InputError, match=f"subject {absent} has no scan in atlas mixed"):
        second.predict_proba(gappy.target)


def test_scores_and_flags_by_atlas(fold, fitted, gappy):
    scores = fitted.ood_scores(gappy.target)
    assert list(scores) == ["connectivity_first-one", "phenotypes", "connectivity_mixed"]
    lacking = ~gappy.target.parcellations["mixed"].present
    np.testing.assert_array_equal(np.isnan(scores["connectivity_mixed"]), lacking)
    assert not np.isnan(scores["connectivity_first-one"]).any()
    for flags, missing in zip(fitted.flags(gappy.target), lacking, strict=True):
        assert ("atlas missing: mixed" in flags) == missing
    series = list(fold.target.parcellations["mixed"].series)
    flat = np.array(series[0])
    flat[:, :2] = 7.0
    changed = dataclasses.replace(
        fold.target, parcellations={"mixed": Parcellation(fold.target.parcellations["mixed"].rois, [flat, *series[1:]])}
    )
    assert "flat rois: 2 (mixed)" in fitted.flags(changed)[0]
    assert fitted.compare(fold.target) == fitted.source_distributions["first-one"].compare(
        fold.target.parcellation("first-one")
    )


def test_labels_sites_and_ids_do_not_matter(fold, fitted):
    disguised = dataclasses.replace(
        fold.target,
        labels=1 - fold.target.labels,
        sites=np.array(["north"] * len(fold.target)),
        subjects=np.array([f"x{i}" for i in range(len(fold.target))]),
    )
    np.testing.assert_array_equal(fitted.predict_proba(disguised), fitted.predict_proba(fold.target))


def test_damaged_members_are_refused(fitted, tmp_path):
    from m2lgdg.model.folder import digest

    folder = fitted.save(tmp_path / "model")
    about = json.loads((folder / "method.json").read_text())
    hashes = about.pop("hashes")
    for change in (
        lambda parts: parts["mixed"].update(rois=3),
        lambda parts: parts["mixed"].update(parts={"mixed": parts["first-one"]}),
        lambda parts: parts["mixed"].update(local={"slope": 1, "offset": 0, "threshold": 0.5}),
    ):
        altered = json.loads(json.dumps(about))
        change(altered["facts"]["parts"])
        altered["hashes"] = hashes | {"method.json": digest({key: altered[key] for key in about})}
        (folder / "method.json").write_text(json.dumps(altered))
        with pytest.raises(InputError, match="is damaged"):
            Model.load(folder)


def test_new_site_calibration_leaves_sites_out_of_all_members(fold):
    calibrated = make("fc-adaptive", atlases="all").fit(fold.source, new_site_calibration=True)
    proba = np.empty(len(fold.source))
    for site in fold.source.site_names:
        here = fold.source.sites == site
        refitted = make("fc-adaptive", atlases="all").fit(fold.source.select(~here))
        proba[here] = refitted.predict_proba(fold.source.select(here))[:, 1]
    expected = NewSiteCalibration.from_scores(proba, fold.source.labels, fold.source.sites, len(fold.source.site_names))
    assert calibrated.new_site_.slope == pytest.approx(expected.slope, rel=1e-6)
    assert calibrated.new_site_.threshold == pytest.approx(expected.threshold, rel=1e-6)


def test_explanations_by_atlas(fold, fitted, tmp_path):
    from m2lgdg.explain.attribution import explain, explain_subject
    from m2lgdg.explain.explanation import Explanation, mean_over

    explanation = explain(fitted, fold.target)
    parts = explanation.by_atlas()
    for atlas, part in parts.items():
        single = explain(Model(fitted.members[atlas]), fold.target.parcellation(atlas))
        pd.testing.assert_frame_equal(part.rois, single.rois)
        pd.testing.assert_frame_equal(part.edges, single.edges)
    loaded = Explanation.load(explanation.save(tmp_path / "explained"))
    assert list(loaded.by_atlas()) == ["first-one", "mixed"]
    mean = mean_over([loaded, loaded])
    np.testing.assert_allclose(mean.by_atlas()["mixed"].rois["score"], parts["mixed"].rois["score"])
    # Contributions are those of the parts, times the slope of the mean logit, divided by the number of atlases.
    one = fold.target.select([0])
    contributions = explain_subject(fitted, one)
    factor = fitted.state_["calibration"][0] / 2
    singles = {atlas: explain_subject(Model(member), one.parcellation(atlas)) for atlas, member in fitted.members.items()}
    for atlas, part in contributions.by_atlas().items():
        np.testing.assert_allclose(part.rois["score"], factor * singles[atlas].rois["score"])
    directions = [single.phenotypes.set_index("phenotype")["direction"] for single in singles.values()]
    total = contributions.phenotypes.set_index("phenotype")["direction"]
    pd.testing.assert_series_equal(total, factor * (directions[0] + directions[1]).loc[total.index], check_names=False)


@pytest.mark.onnx
def test_onnx(fold, fitted, tmp_path):
    pytest.importorskip("onnxruntime")
    from m2lgdg.deploy.onnx import export_onnx, prepared, run_onnx

    path = export_onnx(fitted, tmp_path / "model.onnx", takes_prepared=True)
    np.testing.assert_allclose(
        run_onnx(path, prepared(fitted, fold.target)), fitted.predict_proba(fold.target)[:, 1], rtol=0, atol=1e-6
    )
    described = json.loads((tmp_path / "model.json").read_text())
    assert {row["atlas"] for row in described["inputs"]} == {"first-one", "mixed"}
    assert described["atlases"]["mixed"] == [f"mixed-{i}" for i in range(ROIS)]
    with pytest.raises(InputError, match="needs all atlases"):
        prepared(fitted, fold.target.parcellation("mixed"))


@pytest.mark.onnx
def test_onnx_with_a_table(fold, gappy, tmp_path):
    """A column that does not vary among the subjects of one atlas is an input of the other only."""
    pytest.importorskip("onnxruntime")
    from m2lgdg.deploy.onnx import export_onnx, prepared, run_onnx

    def with_table(cohort):
        draw = np.random.default_rng(len(cohort))
        table = pd.DataFrame(draw.normal(size=(len(cohort), 4)), index=cohort.subjects, columns=list("abcd"))
        table.loc[:, ["a", "b"]] += np.maximum(cohort.labels, 0)[:, None]
        table.loc[has_atlas(cohort, "mixed"), "d"] = 1.0
        return cohort.with_tables({"volume": table})

    source, target = with_table(gappy.source), with_table(fold.target)
    fitted = make("connectome-adaptive").fit(source)
    path = export_onnx(fitted, tmp_path / "model.onnx", takes_prepared=True)
    columns = {row["name"]: row.get("columns") for row in json.loads((tmp_path / "model.json").read_text())["inputs"]}
    assert columns["atlas-0.table.volume"] == list("abcd") and columns["atlas-1.table.volume"] == list("abc")
    np.testing.assert_allclose(run_onnx(path, prepared(fitted, target)), fitted.predict_proba(target)[:, 1], rtol=0, atol=1e-6)


def test_commands(cohort, tmp_path, monkeypatch, typed):
    monkeypatch.chdir(tmp_path)
    cohort.save("two.cohort")

    def cli(*words):
        code, printed, problem = typed(*words)
        assert code == 0, printed + problem

    cli("fit", "two.cohort", "--out", "model", "--without", "west")
    assert list(Model.load("model").members) == ["first-one", "mixed"]
    card = (tmp_path / "model" / "card.md").read_text()
    assert "first-one, mixed" in card and "12 ROIs and 9 ROIs" in card
    cli("predict", "model", "two.cohort", "--site", "west", "--out", "west.csv")
    table = pd.read_csv("west.csv")
    assert {"connectivity_first-one_ood", "connectivity_mixed_ood", "phenotypes_ood"} <= set(table.columns)
    cli("explain", "model", "two.cohort", "--site", "west", "--out", "explained")
    assert set(pd.read_csv("explained/roi.csv")["atlas"]) == {"first-one", "mixed"}
    cli("fit", "two.cohort", "--out", "one", "--atlas", "mixed", "--no-new-site-calibration")
    assert Model.load("one").facts_["atlas"] == "mixed"
    cli("export", "model", "--out", "shared", "--share")
    shared = Model.load("shared")
    west = cohort.select((cohort.sites == "west") & cohort.phenotypes["age"].notna().to_numpy())
    np.testing.assert_array_equal(shared.predict_proba(west), Model.load("model").predict_proba(west))
    ages = shared.members["mixed"].state_["phenotypes.scaler.fill"][list(cohort.inputs).index("age")]
    assert ages % 5 == 2.5  # the middle of a band


def test_studies(cohort, tmp_path):
    cohort.save(tmp_path / "two.cohort")
    study = {"cohort": str(tmp_path / "two.cohort"), "methods": ["connectome-adaptive", "fc-adaptive"], "targets": ["west"]}
    sweep = {"connectome-adaptive": {"atlases": ["first", ["mixed", "first-one"]]}}
    run_study(study | {"sweep": sweep, "atlases": "all", "explain": True}, tmp_path / "out")
    table = pd.read_csv(tmp_path / "out" / "predictions.csv", keep_default_na=False)
    variants = {(row.method, row.variant) for row in table.itertuples()}
    swept = ("atlases=first", "atlases=mixed+first-one")
    assert variants == {("connectome-adaptive", ""), ("fc-adaptive", ""), *(("connectome-adaptive", name) for name in swept)}
    (fold,) = leave_one_site_out(cohort, ["west"])
    for name in ("connectome-adaptive", "fc-adaptive"):
        rows = table[(table["method"] == name) & (table["variant"] == "")].set_index("subject")
        expected = make(name, atlases="all").fit(fold.source).predict_proba(fold.target)[:, 1]
        np.testing.assert_allclose(rows.loc[fold.target.subjects, "proba"], expected, atol=1e-6)
    run_study(study | {"atlas": "mixed"}, tmp_path / "second")
    rows = pd.read_csv(tmp_path / "second" / "predictions.csv", keep_default_na=False)
    rows = rows[rows["method"] == "fc-adaptive"].set_index("subject")
    expected = make("fc-adaptive", atlases="mixed").fit(fold.source).predict_proba(fold.target)[:, 1]
    np.testing.assert_allclose(rows.loc[fold.target.subjects, "proba"], expected, atol=1e-6)
    with pytest.raises(InputError, match="has no atlas ho"):
        run_study(study | {"atlases": ["first-one", "ho"]}, tmp_path / "third")


@pytest.mark.long
def test_the_report_draws_each_atlas(cohort, tmp_path):
    from m2lgdg.report.page import write_report

    cohort.save(tmp_path / "two.cohort")
    study = {"cohort": str(tmp_path / "two.cohort"), "methods": ["connectome-adaptive"], "targets": ["west", "east"]}
    run_study(study | {"explain": True}, tmp_path / "out")
    write_report(tmp_path / "out")
    scores = pd.read_csv(tmp_path / "out" / "explained" / "connectome-adaptive" / "roi.csv")
    assert scores.groupby("atlas").size().to_dict() == {"first-one": 12, "mixed": ROIS}
    figures = {path.name for path in (tmp_path / "out" / "figures").glob("rois-*.png")}
    assert len(figures) == 2


@pytest.mark.parametrize("world", [NOISE, WITHHELD])
def test_nothing_of_the_target_reaches_the_fit(world, cohort, fold, fitted):
    """In the worlds of the leak audit, in which all atlases of the target are noise or its labels are withheld."""
    (other,) = leave_one_site_out(other_target(cohort, "west", world), ["west"])
    refitted = make("connectome-adaptive", phenotypes=True).fit(other.source)
    assert digests(refitted) == digests(fitted)
    if world == NOISE:
        first, second = (target.parcellations["mixed"].series[0] for target in (fold.target, other.target))
        assert not np.allclose(first, second)


@pytest.mark.long
def test_six_atlases_of_rest_meta_mdd(tmp_path):
    """The columns of one release file as six atlases, in one study."""
    rng = np.random.default_rng(5)
    place = tmp_path / "mdd" / "Results" / "ROISignals_FunImgARCWF"
    place.mkdir(parents=True)
    sheets = {"MDD": [], "Controls": []}
    for site in (1, 2, 3):
        for group, sheet in ((1, "MDD"), (2, "Controls")):
            for number in range(4):
                subject = f"S{site}-{group}-{number:04d}"
                savemat(place / f"ROISignals_{subject}.mat", {"ROISignals": miniature.signals(rng, 40, 2233)})
                sheets[sheet].append((subject, 1 + number % 2, 30 + number, 12))
    with pd.ExcelWriter(tmp_path / "mdd" / miniature.REST_BOOK, engine="openpyxl") as book:
        for sheet, rows in sheets.items():
            pd.DataFrame(rows, columns=list(miniature.REST_COLUMNS)).to_excel(book, sheet_name=sheet, index=False)
    names = ("aal", "craddock200", "dosenbach160", "harvard-oxford", "power264", "schaefer400")
    cohort = read(tmp_path / "mdd", atlas=names)
    cohort.save(tmp_path / "mdd.cohort")
    study = {"cohort": str(tmp_path / "mdd.cohort"), "methods": ["connectome-adaptive"], "targets": ["S1"]}
    summary = run_study(study | {"sweep": {"connectome-adaptive": {"atlases": [*names]}}}, tmp_path / "out")
    assert (summary.done, summary.failed) == (7, [])
    table = pd.read_csv(tmp_path / "out" / "predictions.csv", keep_default_na=False)
    logits = table.assign(logit=logit(table["proba"].to_numpy())).pivot(index="subject", columns="variant", values="logit")
    mean = logits[[f"atlases={name}" for name in names]].mean(axis=1)
    (fold,) = leave_one_site_out(cohort, ["S1"])
    slope, offset = make("connectome-adaptive").fit(fold.source).state_["calibration"]
    np.testing.assert_allclose(logits[""], slope * mean + offset, rtol=0, atol=1e-5)


def test_lobes_over_atlases(fold, fitted):
    """Each atlas counts as a whole: a lobe has the mean of its proportions, 0 in an atlas that does not have it."""
    from m2lgdg.explain.attribution import explain
    from m2lgdg.explain.explanation import joined

    single = explain(Model(fitted.members["mixed"]), fold.target.parcellation("mixed"))
    known = {"aal": ("Precentral_L", "Insula_L", "Insula_R"), "ez": ("Precentral_Gyrus_L", "Precentral_Gyrus_R")}
    scores = {"aal": (3.0, 0.5, 0.5), "ez": (2.0, 2.0)}
    parts = {
        atlas: dataclasses.replace(
            single,
            rois=pd.DataFrame({"roi": names, "score": scores[atlas]}),
            edges=single.edges.iloc[:0],
            about=single.about | {"atlas": atlas},
        )
        for atlas, names in known.items()
    }
    table = joined(parts).over_atlases().set_index("lobe")
    assert table.loc["frontal"].to_dict() == pytest.approx({"score": 0.875, "aal": 0.75, "ez": 1.0})
    assert table.loc["insula"].to_dict() == pytest.approx({"score": 0.125, "aal": 0.25, "ez": 0.0})
    assert not len(parts["aal"].over_atlases())


# Tables of brain structure.


@pytest.fixture(scope="module")
def brains():
    cohort = miniature.with_two_atlases(make_cohort("tiny", sizes=dict.fromkeys("abcde", 24), n_regions=30, seed=3), LACKING)
    return next(leave_one_site_out(cohort, ["e"]))


def test_tables_add_the_same_to_each_atlas_and_are_weighed_beside_the_mean(brains, tmp_path):
    model = make("connectome-adaptive").fit(brains.source)
    without = make("connectome-adaptive", tables="none").fit(brains.source)
    source = brains.source
    rows = {name: np.flatnonzero(has_atlas(source, name)) for name in model.members}
    scans, tables, number = np.zeros(len(source)), np.zeros(len(source)), np.zeros(len(source))
    for name, member in model.members.items():
        plain = without.members[name].held_out_logits()
        np.testing.assert_allclose(member.state_["calibration"], without.members[name].state_["calibration"])
        scans[rows[name]] += plain
        tables[rows[name]] += member.table_fits_["thickness"].held_out
        number[rows[name]] += 1
    factor = table_weights(scans / number, [tables / number], source)[0]
    assert factor > 0
    for name, member in model.members.items():
        added = member.held_out_logits() - without.members[name].held_out_logits()
        np.testing.assert_allclose(added, factor * member.table_fits_["thickness"].held_out, atol=1e-9)
    mean = scans / number + factor * tables / number  # decisions at source sites that the blocks were not fitted on
    np.testing.assert_allclose(model.mean_recalibration, platt(mean, source.labels, source.sites), rtol=1e-6)
    saved = Model.load(model.save(tmp_path / "model"))
    np.testing.assert_array_equal(saved.predict_proba(brains.target), model.predict_proba(brains.target))


def test_a_table_is_fitted_once_for_all_atlases_with_the_same_subjects(brains, monkeypatch):
    whole = brains.source.select(has_atlas(brains.source, "mixed"))
    solved = []
    plain = ConnectomeAdaptive._solve
    counted = lambda self, name, *rest: solved.append(name) or plain(self, name, *rest)  # noqa: E731
    monkeypatch.setattr(ConnectomeAdaptive, "_solve", counted)
    make("connectome-adaptive").fit(whole)
    assert solved.count("table") == 1 and solved.count("steady") == 2


def test_flags_of_tables_are_raised_once(brains):
    model = make("connectome-adaptive").fit(brains.source, source_distribution=True)
    table = brains.target.tables["thickness"]
    table.iloc[0], table.iloc[1] = np.nan, 0.6 * table.iloc[1]
    target = brains.target.with_tables({"thickness": table})
    flags = model.flags(target)
    assert flags[0].count("no thickness: decided without it") == 1
    assert sum("thickness" in flag for flag in flags[0]) == 1
    assert sum("failed segmentation" in flag for flag in flags[1]) == 1
    assert [name for name in model.ood_scores(target) if "table" in name] == ["table_thickness"]
    assert model.having_tables(target) == {"thickness": len(target) - 1}


def test_tables_alone_and_tables_that_differ_by_atlas(brains):
    alone = make("connectome-adaptive", scan=False).fit(brains.source)
    assert np.isfinite(alone.predict_proba(brains.target)).all()
    has = has_atlas(brains.source, "mixed")
    table = brains.source.tables["thickness"]
    table[has & (brains.source.labels == 1)] = np.nan  # in the second atlas, only controls have it
    told = make("connectome-adaptive").fit(brains.source.with_tables({"thickness": table}))
    first, second = told.members.values()
    assert "tables" in first.facts_ and not second.facts_.get("tables")
    assert "mixed: Table thickness is not used: only controls have it." in told.facts_["notes"]
    assert np.isfinite(told.predict_proba(brains.target)).all()
