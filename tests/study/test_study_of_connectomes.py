"""A whole study on connectomes: the results of the series, killed and continued, audited, explained, reported and shared."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from m2lgdg import Cohort, InputError, run_study
from m2lgdg.cohort import Parcellation
from m2lgdg.explain.attribution import explain
from m2lgdg.model.model import make
from m2lgdg.report.checklists import known_facts, methods_text
from m2lgdg.report.contents import read_contents
from m2lgdg.report.data import connectomes, site_connectomes, site_table, who
from m2lgdg.report.page import write_report
from m2lgdg.report.sharing import share_study
from m2lgdg.scans import KINDS, connectome_defect
from m2lgdg.study.audit import other_target
from m2lgdg.study.baselines import no_brain_scores
from m2lgdg.study.cells import cohort_in_memory
from m2lgdg.study.description import mean_connectomes, read_cohort_facts, read_connectomes
from m2lgdg.study.predictions import read_predictions

METHODS = ["prior", "fc-logistic", "fc-svm"]


@pytest.fixture(scope="module")
def matrices(tiny):
    """The tiny cohort as matrices between its ROIs, which have no volumes and no TR."""
    given = {"subjects": tiny.subjects, "phenotypes": tiny.phenotypes, "rois": tiny.rois, "atlas": tiny.atlas}
    return Cohort.from_connectomes([np.corrcoef(one.T) for one in tiny.series], tiny.labels, tiny.sites, **given)


@pytest.fixture(scope="module")
def study(tiny, tmp_path_factory):
    """`linear_study` on the connectomes of its series, in two processes, after a run that ended in the middle."""
    folder = tmp_path_factory.mktemp("connectomes")
    tiny.to_connectomes().save(folder / "tiny.cohort")
    content = {"cohort": str(folder / "tiny.cohort"), "name": "linear", "methods": METHODS, "seeds": [0]}
    content |= {"explain": ["fc-logistic"]}

    def die(summary):
        if summary.done == 5:
            raise RuntimeError("the power is cut")

    with pytest.raises(RuntimeError, match="power"):
        run_study(content, folder / "out", watch=die)
    summary = run_study(content, folder / "out", jobs=2)
    assert (summary.reused, summary.done, summary.failed) == (5, 7, [])
    return folder / "out"


def matrix_of(cohort, kind, rng):
    """One matrix of each subject of a kind, of plain numpy."""
    noise = rng.normal(size=(len(cohort), 60, 5)) @ rng.normal(size=(5, 5))
    covariance = np.stack([np.cov(one.T) for one in noise])
    spread = np.sqrt(np.einsum("sii->si", covariance))
    correlation = covariance / spread[:, :, None] / spread[:, None]
    if kind == "fisher-z":
        return np.arctanh(correlation * (1 - np.eye(5)))
    if kind == "partial-correlation":
        precision = np.linalg.inv(covariance)
        scale = np.sqrt(np.einsum("sii->si", precision))
        return -precision / scale[:, :, None] / scale[:, None] + 2 * np.eye(5)
    return covariance if kind == "covariance" else correlation


def test_the_results_are_those_of_the_series(study, linear_study):
    one, other = read_predictions(linear_study), read_predictions(study)
    pd.testing.assert_frame_equal(one, other, check_exact=True)
    edges = [read_contents(folder).mean_explanations["fc-logistic"].edges for folder in (linear_study, study)]
    pd.testing.assert_frame_equal(*edges, check_exact=True)
    assert not {json.loads(path.read_text())["key"] for path in (study / "cells").iterdir()} & {
        json.loads(path.read_text())["key"] for path in (linear_study / "cells").iterdir()
    }


def test_so_are_those_of_a_network(tiny, tmp_path):
    small = {"erm": {"variant": "small", "epochs": 2, "warmup": 1}}
    tables = []
    for name, cohort in {"series": tiny, "connectomes": tiny.to_connectomes()}.items():
        study = {"cohort": cohort, "methods": ["erm"], "method": small, "targets": ["north"], "seeds": [0]}
        assert not run_study(study | {"explain": True, "explain_steps": 4}, tmp_path / name).failed
        explained = read_contents(tmp_path / name).mean_explanations["erm"]
        tables.append([read_predictions(tmp_path / name), explained.edges, explained.rois])
        assert ("series" in explained.about["baseline"]) == (name == "series")
    for one, other in zip(*tables, strict=True):
        pd.testing.assert_frame_equal(one, other, check_exact=True)
    assert explained.edges["score"].any()


def test_what_a_folder_says_of_its_cohort(study, linear_study):
    facts = json.loads((study / "cohort.json").read_text())
    assert facts["scans"] == "fisher-z" and read_cohort_facts(study).scans == "fisher-z"
    assert not [group for name in ("groups", "sites") for group in facts[name].values() if "volumes" in group]
    assert read_cohort_facts(linear_study).scans == "series"
    one, other = read_connectomes(linear_study), read_connectomes(study)
    assert all(np.array_equal(one[name], other[name]) for name in ("patients", "controls", "difference"))


def test_a_folder_of_an_earlier_version_is_of_series(study, tmp_path):
    shutil.copytree(study, tmp_path / "old")
    facts = json.loads((study / "cohort.json").read_text())
    (tmp_path / "old/cohort.json").write_text(json.dumps({name: facts[name] for name in facts if name != "scans"}))
    assert read_cohort_facts(tmp_path / "old").scans == "series"
    (tmp_path / "old/cohort.json").write_text(json.dumps(facts | {"scans": ["correlation"]}))
    with pytest.raises(InputError, match=r"cohort\.json is damaged"):
        read_cohort_facts(tmp_path / "old")


@pytest.mark.parametrize("kind", KINDS)
def test_means_are_those_of_the_given_matrices(tiny, kind):
    given = matrix_of(tiny, kind, np.random.default_rng(1))
    cohort = Cohort.from_connectomes(given, tiny.labels, tiny.sites, values=kind, phenotypes=tiny.phenotypes)
    above = np.triu_indices(5, 1)
    spread = np.sqrt(np.einsum("sii->si", given)) if kind == "covariance" else np.ones((len(given), 5))
    unit = given / spread[:, :, None] / spread[:, None]
    z = np.array([(one if kind == "fisher-z" else np.arctanh(one - np.eye(5)))[above] for one in unit])  # (subject, edge)
    means = mean_connectomes(cohort)
    sites = np.array(tiny.site_names)
    for name, chosen in (("patients", tiny.labels == 1), ("controls", tiny.labels == 0)):
        np.testing.assert_allclose(means[name], z[chosen].mean(axis=0), atol=1e-6)
    np.testing.assert_allclose(means["sites"], [z[tiny.sites == site].mean(axis=0) for site in sites], atol=1e-6)
    difference, weights = 0.0, 0.0
    for site in sites:
        sick, well = (z[(tiny.sites == site) & (tiny.labels == k)] for k in (1, 0))
        weight = len(sick) * len(well) / (len(sick) + len(well))
        difference, weights = difference + weight * (sick.mean(axis=0) - well.mean(axis=0)), weights + weight
    np.testing.assert_allclose(means["difference"], difference / weights, atol=1e-6)


def test_a_study_in_two_atlases(tiny, tmp_path):
    """One person has no matrix in the second atlas, where the model is fitted without it and predicts by the first alone."""
    z = tiny.to_connectomes()
    second = type(z.scans)([None if i == 3 else one for i, one in enumerate(z.scans.triangles)], "fisher-z", 12)
    cohort = replace(z, atlas="first", parcellations={"second": Parcellation(z.rois, second)})
    study = {"cohort": cohort, "methods": ["fc-logistic"], "targets": ["east"], "seeds": [0], "explain": True}
    assert not run_study(study | {"method": {"fc-logistic": {"atlases": "all"}}}, tmp_path / "both").failed
    assert not run_study(study, tmp_path / "one").failed
    both, one = read_predictions(tmp_path / "both"), read_predictions(tmp_path / "one")
    np.testing.assert_allclose(np.log(both["proba"] / (1 - both["proba"])).rank(), np.log(one["proba"]).rank())
    assert list(read_contents(tmp_path / "both").mean_explanations["fc-logistic"].by_atlas()) == ["first", "second"]


@pytest.mark.parametrize("command", ["run", "curve", "audit"])
def test_a_method_of_series_is_refused_before_anything_is_written(command, matrices, tmp_path, typed):
    matrices.save(tmp_path / "a.cohort")
    (tmp_path / "study.toml").write_text('cohort = "a.cohort"\nmethods = ["fc-logistic", "ufa-net"]\nseeds = [0]\n')
    words = ["--method", "ufa-net"] + (["--out", tmp_path / "out"] if command != "audit" else [])
    code, _, said = typed(command, tmp_path / "study.toml", *words)
    assert code == 2 and said.count("\n") == 1
    assert "method ufa-net needs time series, and cohort cohort holds connectomes" in said and "fc-logistic" in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.cohort", "study.toml"]


def test_workers_cannot_write_to_a_connectome(study):
    held = cohort_in_memory(str(study.parent / "tiny.cohort"), (), False, None)
    for one in held.scans.triangles:
        with pytest.raises(ValueError, match="WRITEABLE"):
            one.setflags(write=True)


@pytest.mark.parametrize("kind", KINDS)
def test_noise_of_the_audit_is_a_connectome_of_the_same_kind(tiny, kind):
    given = matrix_of(tiny, kind, np.random.default_rng(1))
    cohort = Cohort.from_connectomes(given, tiny.labels, tiny.sites, values=kind, atlas="first")
    lacking = [None if i % 5 == 0 else one for i, one in enumerate(cohort.scans.triangles)]
    further = Parcellation(cohort.rois, type(cohort.scans)(lacking, kind, 5))
    cohort = cohort._changed(parcellations={"second": further})
    noise = other_target(cohort, "west", "noise")
    assert noise.values == kind and noise.parcellations["second"].scans.kind == kind
    for real, other in ((cohort.scans, noise.scans), (further.scans, noise.parcellations["second"].scans)):
        for i, (before, after) in enumerate(zip(real, other, strict=True)):
            if before is None:
                assert after is None
            elif tiny.sites[i] != "west":
                np.testing.assert_array_equal(before, after)
            else:
                assert connectome_defect(after, cohort.rois, kind) is None
                assert np.array_equal(after, after.T)
                off = ~np.eye(5, dtype=bool)
                assert (before[off] != after[off]).all() and abs(np.corrcoef(before[off], after[off])[0, 1]) < 1
    drawn = np.array([noise.scans[i] for i in np.flatnonzero(tiny.sites == "west")])
    assert len(np.unique(drawn[:, 0, 1])) == len(drawn)
    assert (np.linalg.eigvalsh(drawn if kind != "fisher-z" else np.tanh(drawn) + np.eye(5)) > -1e-5).all()


PLUGIN = '''
import gc
import numpy as np
from m2lgdg.cohort import Cohort
from m2lgdg.connectivity import fc_features
from m2lgdg.method import Method, method


def difference(cohort):
    features = fc_features(cohort.scans)
    return features[cohort.labels == 1].mean(0) - features[cohort.labels == 0].mean(0)


@method("mean-difference")
class MeanDifference(Method):
    """Difference of the class means."""

    takes = ("series", "connectomes")

    def learn(self, source, *, seed, device, progress):
        self.state_["direction"] = difference(source)

    def score(self, target):
        scores = np.array([one @ self.state_["direction"] for one in fc_features(target.scans)])
        return 1 / (1 + np.exp(-scores))


@method("edges-of-all")
class EdgesOfAll(MeanDifference):
    """Takes the edges that vary most in all subjects, those of the target among them."""

    def learn(self, source, **how):
        super().learn(source, **how)
        everybody = max((one for one in gc.get_objects() if type(one) is Cohort), key=len)
        varies = fc_features(everybody.scans).std(axis=0)
        self.state_["direction"] = self.state_["direction"] * (varies > np.median(varies))
'''


@pytest.mark.long
def test_the_audit_catches_a_leak_and_passes_an_honest_method(matrices, tmp_path, typed):
    matrices.save(tmp_path / "a.cohort")
    (tmp_path / "plugin_of_matrices.py").write_text(PLUGIN)
    (tmp_path / "study.toml").write_text(
        'cohort = "a.cohort"\nplugins = ["plugin_of_matrices.py"]\nmethods = ["mean-difference", "edges-of-all"]\n'
        'targets = ["west"]\nseeds = [0]\n'
    )
    code, printed, _ = typed("audit", tmp_path / "study.toml")
    assert code == 1
    honest, leak = (next(line for line in printed.splitlines() if name in line) for name in ("mean-difference", "edges-of-all"))
    assert "yes" in honest and "none" in honest
    assert "no" in leak and "a target of noise changes weights direction" in " ".join(printed.split())
    assert "phenotype-only" in printed


def test_baselines_without_imaging_do_not_look_at_the_scans(matrices, tiny):
    scores = [no_brain_scores({"cohort": one, "methods": ["prior"]}, target="west") for one in (matrices, tiny)]
    assert [(one.name, one.auc) for one in scores[0]] == [(one.name, one.auc) for one in scores[1]]
    assert scores[0][0].auc > 0


def test_the_curve(matrices, tmp_path, typed):
    matrices.save(tmp_path / "a.cohort")
    (tmp_path / "study.toml").write_text('cohort = "a.cohort"\nmethods = ["fc-logistic"]\ntargets = ["north"]\nseeds = [0]\n')
    words = ("curve", tmp_path / "study.toml", "--out", tmp_path / "curve", "--sizes", "0.5,1", "--repeats", "1")
    code, printed, _ = typed(*words)
    assert (code, "2 of 2 trainings done" in printed) == (0, True)
    assert len(pd.read_csv(tmp_path / "curve/curve.csv")) == 2


def test_explanations_are_those_of_the_series(tiny):
    source, target = tiny.select(tiny.sites != "west"), tiny.select(tiny.sites == "west")
    both = []
    for as_given in (lambda cohort: cohort, Cohort.to_connectomes):
        fitted = make("fc-logistic", phenotypes=True).fit(as_given(source))
        both.append(explain(fitted, as_given(target)))
    for name in ("rois", "edges", "phenotypes"):
        pd.testing.assert_frame_equal(getattr(both[0], name), getattr(both[1], name), check_exact=True)
    with pytest.raises(InputError, match=r"trained on connectomes \(fisher-z\), and cohort tiny holds time series"):
        explain(fitted, target)


def test_the_report_says_what_the_scans_are(matrices, tmp_path, figures_painted_only, typed):
    matrices.save(tmp_path / "a.cohort")
    study = {"cohort": str(tmp_path / "a.cohort"), "methods": ["prior", "fc-logistic", "connectome-adaptive"], "seeds": [0]}
    assert not run_study(study | {"variants": ["phenotypes"], "explain": ["fc-logistic"]}, tmp_path / "out").failed
    contents = read_contents(tmp_path / "out")
    assert who(contents).endswith("The scans are connectomes (correlations between 12 ROIs), not time series.")
    assert not {"TR, s", "volumes"} & {column.name for column in site_table(contents).columns}
    known = known_facts(contents)
    assert known["imaging"] == "Connectomes (correlations) of 12 ROIs of atlas synthetic"
    assert "series" not in known["transformations"]
    text = " ".join(methods_text(contents, motion=False).paragraphs)
    what = "its connectome, computed beforehand: the correlations between 12 regions of interest (atlas: synthetic)."
    assert f"Each scan was represented by {what}" in text and "how the connectomes were computed" in text
    assert connectomes(contents)[0].caption.startswith("Mean functional connectivity (Fisher z).")
    page = write_report(tmp_path / "out").read_text()
    note = "connectome-adaptive: Trained on connectomes: plain FC takes the place of frame-weighted FC; deviation FC and"
    assert page.count(note) == 1 and "fc-logistic: Trained" not in page
    assert "time series of" not in page and "volumes" not in page and "ROI series" not in page
    code, *_ = typed("table", tmp_path / "out")
    assert code == 0


def test_partial_correlations_are_called_so(study, tmp_path):
    shutil.copytree(study, tmp_path / "out")
    facts = json.loads((study / "cohort.json").read_text())
    (tmp_path / "out/cohort.json").write_text(json.dumps(facts | {"scans": "partial-correlation"}))
    contents = read_contents(tmp_path / "out")
    figure, table = connectomes(contents)
    assert figure.caption.startswith("Mean partial correlation (Fisher z).")
    assert "mean Fisher-z partial correlation, patients minus controls" in table.note
    assert site_connectomes(contents).caption.startswith("Mean partial correlation of each site")
    assert "partial correlations between 12 ROIs" in who(contents)


def test_a_copy_says_the_same_without_ids_in_its_report(study, tmp_path, figures_painted_only):
    subjects = Cohort.load(shutil.copy(study.parent / "tiny.cohort", tmp_path)).subjects
    study = shutil.copytree(study, tmp_path / "out")
    for path in (study / "cells").iterdir():  # a note of a training that names a subject, as that of a plugin may
        record = json.loads(path.read_text())
        record["learned"]["notes"] = ["All is well.", f"{subjects[0]} was odd."]
        path.write_text(json.dumps(record))
    assert f"{subjects[0]} was odd." in write_report(study).read_text()
    share_study(study, tmp_path / "copy")
    assert not list((tmp_path / "copy").rglob("*.cohort"))
    assert "The scans are connectomes (Fisher z of correlations" in who(read_contents(tmp_path / "copy"))
    page = write_report(study, share=tmp_path / "given")
    text = page.read_text()
    assert "fc-svm: All is well." in text
    assert "connectomes (Fisher z of correlations between 12 ROIs)" in text
    assert not [subject for subject in subjects if subject in text]
