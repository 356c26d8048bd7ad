"""Explanations: what is planted comes out on top, and only after honest training; completeness; tables by slow loops."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from test_contract import small
from torch import nn

from m2lgdg import METHODS, InputError, leave_one_site_out, make, make_cohort
from m2lgdg.connectivity import amplitude_features, covariances, fc_features, fisher_matrices
from m2lgdg.deep import Batch, DeepMethod
from m2lgdg.explain.attribution import explain
from m2lgdg.explain.explanation import Explanation, mean_over
from m2lgdg.explain.patterns import activation_pattern
from m2lgdg.preprocess import PhenotypeScaler, standardised_series
from m2lgdg.tangent import tangent_features

# Of the methods that train the network of `erm` in other ways, it stands for all.
ALIKE = {"cdann", "coral", "group-dro", "iib", "irm", "mixup", "mldg"}
DEEP = sorted(name for name in METHODS if issubclass(METHODS[name], DeepMethod) and name not in ALIKE)
# Hard choices (the strongest nodes or edges, agreeing phenotypes) make jumps along the path that gradients do not see.
JUMPS = {"braingnn", "m2dc", "mm-gtunets", "msstan"}


def hits(table, columns, planted):
    """Share of the planted among as many at the top, and what chance would give."""
    wanted = {tuple(np.atleast_1d(one)) for one in planted}
    top = table[columns].head(len(wanted)).itertuples(index=False, name=None)
    return sum(one in wanted for one in top) / len(wanted), len(wanted) / len(table)


def with_state(model, state):
    """The same fitted method with other arrays."""
    other = type(model.method)(**model.fields())
    other.facts_, other.state_ = model.facts_, state
    return other


def shuffled(cohort, seed):
    return dataclasses.replace(cohort, labels=np.random.default_rng(seed).permutation(cohort.labels))


@pytest.fixture(scope="module")
def fold():
    return next(leave_one_site_out(make_cohort("tiny", seed=1), ["west"]))


@pytest.fixture(scope="module")
def fitted(fold):
    class Fits(dict):
        def __missing__(self, name):
            self[name] = make(name, **small(name)).fit(fold.source, seed=0)
            return self[name]

    return Fits()


# What is planted is found.


@pytest.fixture(scope="module")
def connected():
    sizes = dict.fromkeys("abcd", 50)
    planted = {"n_disease_rois": 4, "n_disease_edges": 12, "roi_effect": 1.2, "edge_effect": 1.2}
    return make_cohort("tiny", sizes=sizes, n_rois=24, seed=3, **planted)


@pytest.mark.parametrize("name", ["fc-logistic", "connectome-ensemble"])
def test_patterns_find_what_is_planted_and_only_after_honest_training(name, connected):
    fold = next(leave_one_site_out(connected, ["d"]))

    def precision(method):
        found = explain(method, fold.target)
        edges, by_chance = hits(found.edges, ["roi", "other roi"], connected.truth["edges"])
        rois, roi_chance = hits(found.rois, ["roi"], connected.truth["rois"])
        assert (by_chance, roi_chance) == (12 / 276, 4 / 24)
        return edges, rois

    honest = make(name).fit(fold.source)
    edges, rois = precision(honest)
    assert edges >= 3 / 12  # chance is one in 23
    assert rois >= 3 / 4  # chance is one in six
    draw = np.random.default_rng(0)
    blind = [
        with_state(honest, {k: draw.normal(size=v.shape) if k.endswith("weights") else v for k, v in honest.state_.items()})
        for _ in range(5)
    ]
    taught_nonsense = [make(name).fit(shuffled(fold.source, seed)) for seed in range(3)]
    for lost in (blind, taught_nonsense):
        edges, rois = np.mean([precision(one) for one in lost], axis=0)
        assert edges < 2 * 12 / 276
        assert rois < 2 * 4 / 24


@pytest.mark.long
def test_gradients_find_planted_rois_and_only_after_honest_training():
    """Patients are slow in three of twelve ROIs, in a cohort where nothing else varies."""
    alike = {"lengths": (160, 160), "trs": (2.0,), "site_effect": 0.0, "subject_effect": 0.0, "phenotype_effect": 0.0}
    planted = {"n_disease_rois": 3, "n_disease_edges": 1, "roi_effect": 6.0, "edge_effect": 0.0}
    cohort = make_cohort("tiny", sizes={"a": 40, "b": 40, "c": 40, "d": 12}, seed=2, **alike, **planted)
    fold = next(leave_one_site_out(cohort, ["d"]))
    quick = {"length": 40, "epochs": 9, "warmup": 1, "label_smoothing": 0.0, "learning_rate": 3e-3, "weight_decay": 0.01}
    fields = METHODS["m2lgdg"].variants["small"] | METHODS["m2lgdg"].variants["M2"] | quick

    def precision(method):
        return hits(explain(method, fold.target, steps=16).rois, ["roi"], cohort.truth["rois"])[0]

    honest = make("m2lgdg", **fields).fit(fold.source, seed=0)
    assert precision(honest) >= 2 / 3  # chance is one in four
    assert precision(make("m2lgdg", **fields).fit(shuffled(fold.source, 0), seed=0)) <= 1 / 3
    weights = {f"network.{name}" for name, _ in honest.network().named_parameters()}
    draw = np.random.default_rng(0)
    state = {k: draw.permuted(v.ravel()).reshape(v.shape) if k in weights else v for k, v in honest.state_.items()}
    assert precision(with_state(honest, state)) <= 1 / 3


# Integrated gradients.


@pytest.mark.parametrize("name", DEEP)
def test_attributions_sum_to_the_change_of_the_decision(name, fold, fitted):
    few = fold.target.select(np.arange(2))
    steps = 64 if name in JUMPS or "m2lgdg" in name else 512  # without phenotypes paths are less even
    found = explain(fitted[name], few, of="margin", steps=steps)
    table, network = found.completeness, fitted[name].network()
    scaler = PhenotypeScaler.restore(tuple(fitted[name].facts_["inputs"]), fitted[name].state_, "scaler")
    batch = fitted[name].make_batch(few.unlabelled(), scaler, torch.device("cpu"))
    start = network.baselines() if hasattr(network, "baselines") else {}
    nothing = Batch(
        {key: start.get(key, torch.zeros(())).expand_as(value) for key, value in batch.features.items()},
        torch.zeros_like(batch.phenotypes),
        batch.label,
        batch.site,
    )
    with torch.no_grad():
        change = (network(batch) - network(nothing)).double()
    np.testing.assert_allclose(table["difference"], change[:, 1] - change[:, 0], atol=1e-5)
    np.testing.assert_allclose(table["absolute"], (table["attributed"] - table["difference"]).abs())
    np.testing.assert_allclose(table["relative"] * table["difference"].abs(), table["absolute"])
    assert table["subject"].tolist() == few.subjects.tolist()
    missed = table["absolute"].sum() / table["difference"].abs().sum()
    # Correlations do not change along the path: all of the change is in the jump at its beginning.
    if name in ("msstan", "m2dc"):
        assert missed == pytest.approx(1, abs=0.01)
    else:
        assert missed < (0.5 if name in JUMPS else 0.05)
    for scores in (found.rois["score"], found.phenotypes["score"]):
        assert np.isfinite(scores).all()
    # Without a clock M2DC sees nothing of a scan but graphs without weights.
    assert (found.rois["score"] > 0).all() if name != "m2dc" else not found.rois["score"].any()
    assert found.phenotypes["score"].any() == (name in {"m2lgdg", "m2lgdg-connectome", "mm-gtunets"})


class Plane(nn.Module):
    """A linear decision on everything."""

    def __init__(self, n):
        super().__init__()
        self.series = nn.Parameter(torch.randn(n, n))
        self.square = nn.Parameter(torch.randn(n, n))
        self.edges = nn.Parameter(torch.randn(n * (n - 1) // 2))
        self.level = nn.Parameter(torch.randn(n))
        self.phenotypes = nn.Parameter(torch.randn(3))

    def forward(self, batch):
        terms = [(batch[name] * getattr(self, name)).flatten(1).sum(1) for name in ("series", "square", "edges", "level")]
        decision = sum(terms) + batch.phenotypes @ self.phenotypes
        return torch.stack([0.25 * decision, 1.25 * decision], dim=1)


@dataclasses.dataclass
class Flat(DeepMethod):
    """Series as long as there are ROIs, a connectivity matrix, its upper half, a value for each ROI."""

    name = "flat"
    length: int = 12
    epochs: int = 1
    warmup: int = 0
    learning_rate: float = 1e-3

    def features(self, cohort, place):
        square = torch.from_numpy(fisher_matrices(cohort.series))
        edges = torch.from_numpy(fc_features(cohort.series)).float()
        level = torch.from_numpy(amplitude_features(cohort.series)).float()
        return super().features(cohort, place) | {"square": square, "edges": edges, "level": level}

    def build(self, shape):
        return Plane(shape.n_rois)


def test_tables_of_a_network_against_slow_loops(fold):
    method = Flat().fit(fold.source, seed=0)
    found = explain(method, fold.target, of="margin", steps=2)
    n, rois, series = 12, fold.target.rois, fold.target.series
    weight = {
        name: method.state_[f"network.{name}"].astype(float) for name in ("series", "square", "edges", "level", "phenotypes")
    }
    course = standardised_series(series, 12) * weight["series"]
    square = fisher_matrices(series) * weight["square"]
    edges, level = fc_features(series) * weight["edges"], amplitude_features(series) * weight["level"]
    parts = {name: np.zeros((len(series), n)) for name in ("series", "square", "edges", "level")}
    pairs = {(i, j): [] for i in range(n) for j in range(i + 1, n)}
    for s in range(len(series)):
        place = 0
        for i in range(n):
            parts["series"][s, i] = np.mean(np.abs(course[s, i]))
            parts["level"][s, i] = abs(level[s, i])
            for j in range(i + 1, n):
                there, back, both = square[s, i, j], square[s, j, i], edges[s, place]
                for name, size in (("square", (abs(there) + abs(back)) / 2), ("edges", abs(both))):
                    parts[name][s, i] += size / (n - 1)
                    parts[name][s, j] += size / (n - 1)
                pairs[i, j].append([(abs(there) + abs(back)) / 2, abs(both), (there + back) / 2 + both])
                place += 1
    near = {"rtol": 1e-4, "atol": 1e-6}
    table = found.rois.set_index("roi").loc[list(rois)]
    for name, each in parts.items():
        np.testing.assert_allclose(table[name], each.mean(axis=0), **near)
    whole = sum(parts.values())
    np.testing.assert_allclose(table["score"], whole.mean(axis=0), **near)
    np.testing.assert_allclose(table["sd"], whole.std(axis=0, ddof=1), **near)
    assert found.rois["rank"].tolist() == list(range(1, n + 1))
    assert found.rois["roi"].tolist() == [rois[i] for i in np.argsort(-whole.mean(axis=0))]
    assert not {"code", "x"} & set(found.rois)
    table = found.edges.set_index(["roi", "other roi"])
    assert len(table) == 66
    assert (np.diff(found.edges["score"]) <= 0).all()
    by_square, by_edges, direction = np.mean(list(pairs.values()), axis=1).T
    expected = np.stack([by_square + by_edges, direction, by_square, by_edges], axis=1)
    np.testing.assert_allclose(table.loc[[(rois[i], rois[j]) for i, j in pairs]], expected, **near)
    scaler = PhenotypeScaler.restore(fold.target.inputs, method.state_, "scaler")
    signed = scaler.transform(fold.target.unlabelled()) * weight["phenotypes"]
    table = found.phenotypes.set_index("phenotype").loc[list(fold.target.inputs)]
    np.testing.assert_allclose(table["score"], np.abs(signed).mean(axis=0), **near)
    np.testing.assert_allclose(table["sd"], np.abs(signed).std(axis=0, ddof=1), **near)
    np.testing.assert_allclose(table["direction"], signed.mean(axis=0), **near)
    assert found.gate.empty


def test_one_by_one_equals_together_in_any_order_and_labels_do_not_matter(fold, fitted):
    few = fold.target.select(np.arange(3))
    together = explain(fitted["m2lgdg"], few, steps=4)
    alone = [explain(fitted["m2lgdg"], few.select([i]), steps=4) for i in range(3)]
    turned = explain(fitted["m2lgdg"], few.select([1, 0, 2]), steps=4)
    unknown = explain(fitted["m2lgdg"], few._changed(labels=-np.ones(3, dtype=np.int8)), steps=4)
    for other in (mean_over(alone), turned, unknown):
        for one, two, key in (
            (other.rois, together.rois, "roi"),
            (other.phenotypes, together.phenotypes, "phenotype"),
            (other.completeness, together.completeness, "subject"),
        ):
            value = "difference" if key == "subject" else "score"
            np.testing.assert_allclose(
                one.set_index(key)[value].sort_index(), two.set_index(key)[value].sort_index(), rtol=2e-3, atol=1e-6
            )
    assert np.isnan(alone[0].rois["sd"]).all()
    assert unknown.gate[["site", "label", "subjects"]].values.tolist() == [["west", -1, 3]]


def test_gate_weights_are_means_by_site_and_label(fitted):
    cohort = make_cohort("tiny", seed=1).select(np.arange(24))
    cohort = cohort._changed(sites=np.char.add("S", (np.arange(len(cohort)) % 3 * 9 + 1).astype(str)))  # S1, S10, S19
    method = fitted["m2lgdg"]
    gate = explain(method, cohort, steps=1).gate
    assert gate.columns.tolist() == ["site", "label", "subjects", "imaging", "phenotypes"]
    assert gate["site"].tolist() == ["S1", "S1", "S10", "S10", "S19", "S19"]
    assert gate["label"].tolist() == [0, 1] * 3
    np.testing.assert_allclose(gate["imaging"] + gate["phenotypes"], 1, atol=1e-6)
    scaler = PhenotypeScaler.restore(cohort.inputs, method.state_, "scaler")
    with torch.no_grad():
        each = method.network().parts(method.make_batch(cohort.unlabelled(), scaler, torch.device("cpu")))["gate"].numpy()
    for row in gate.itertuples():
        here = (cohort.sites == row.site) & (cohort.labels == row.label)
        assert row.subjects == here.sum()
        np.testing.assert_allclose([row.imaging, row.phenotypes], each[here].mean(axis=0), atol=1e-5)


# Activation patterns.


def test_a_constant_feature_has_no_pattern():
    features, decision = np.stack([np.arange(9.0), np.ones(9)], axis=1), np.arange(9.0) + 3
    assert activation_pattern(features, decision).tolist() == [pytest.approx(1 / np.arange(9).std()), 0]


def test_patterns_of_all_blocks_against_slow_loops(fold):
    method = make("connectome-ensemble", phenotypes=True).fit(fold.source)
    target, n = fold.target, 12
    found = explain(method, target)
    state, scaler = method.state_, PhenotypeScaler.restore(target.inputs, method.state_, "phenotypes.scaler")
    blocks = {
        "fc": fc_features(target.series),
        "tangent": tangent_features(covariances(target.series), state["tangent.reference"]),
        "amplitude": amplitude_features(target.series),
        "phenotypes": scaler.transform(target.unlabelled()),
    }
    decision = method.decision(target)
    scores, edges, total = {}, {(i, j): np.zeros(2) for i in range(n) for j in range(i + 1, n)}, 0.0
    for name, features in blocks.items():
        own = features @ state[f"{name}.weights"]
        share = np.mean((own - own.mean()) * (decision - decision.mean())) / decision.var()
        total += share
        pattern = [np.corrcoef(column, decision)[0, 1] for column in features.T]  # up to a factor that the mean takes away
        if name in ("fc", "tangent"):
            matrix, place = np.full((n, n), np.nan), 0
            for i in range(n):
                for j in range(i if name == "tangent" else i + 1, n):
                    matrix[i, j] = matrix[j, i] = pattern[place]
                    place += 1
            np.fill_diagonal(matrix, np.nan)
            matrix *= share / np.nanmean(np.abs(matrix))
            scores[name] = np.nanmean(np.abs(matrix), axis=1)
            for i, j in edges:
                edges[i, j] += (abs(matrix[i, j]), matrix[i, j])
        else:
            scores[name] = share * np.array(pattern) / np.mean(np.abs(pattern))
    assert total == pytest.approx(1)
    table = found.rois.set_index("roi").loc[list(target.rois)]
    for name in ("fc", "tangent", "amplitude"):
        np.testing.assert_allclose(table[name], np.abs(scores[name]))
    np.testing.assert_allclose(table["score"], sum(np.abs(scores[name]) for name in ("fc", "tangent", "amplitude")))
    assert table["sd"].isna().all()
    table = found.edges.set_index(["roi", "other roi"])
    for (i, j), expected in edges.items():
        np.testing.assert_allclose(table.loc[(target.rois[i], target.rois[j]), ["score", "direction"]], expected)
    table = found.phenotypes.set_index("phenotype").loc[list(target.inputs)]
    np.testing.assert_allclose(table["direction"], scores["phenotypes"])
    np.testing.assert_allclose(table["score"], np.abs(scores["phenotypes"]))
    turned = explain(method, target.select(np.arange(len(target))[::-1]))
    pd.testing.assert_frame_equal(turned.rois, found.rois)
    assert found.error() is None


def test_a_method_without_a_brain_has_phenotype_scores_only(fold):
    found = explain(make("phenotype-logistic").fit(fold.source), fold.target)
    assert (found.rois["score"] == 0).all()
    assert found.edges.empty
    assert found.phenotypes["score"].mean() == pytest.approx(1)


# Tables, means, refusals, the command.


def test_saved_tables_come_back_with_codes_and_centroids(tmp_path):
    cohort = make_cohort("demo", sizes={"a": 14, "b": 12}, seed=0)
    found = explain(make("fc-logistic").fit(cohort), cohort)
    row = found.rois.set_index("roi").loc["Precentral_R"]
    assert row[["code", "x", "y", "z"]].tolist() == ["2002", 41.5, -10.0, 53.6]
    found.save(tmp_path / "new" / "folder")
    names = {"roi": found.rois, "edges": found.edges}  # no phenotypes, gate and representation
    folder = tmp_path / "new" / "folder"
    assert {file.name for file in folder.iterdir()} == {"explanation.json", *(f"{name}.csv" for name in names)}
    for name, table in names.items():
        back = pd.read_csv(folder / f"{name}.csv", dtype={"code": str})
        assert back.columns.tolist() == table.columns.tolist()
        if len(table):
            pd.testing.assert_frame_equal(back, table, check_dtype=False)
    about = json.loads((folder / "explanation.json").read_text())
    assert (about["method"], about["cohort"], about["subjects"]) == ("fc-logistic", cohort.hash, 26)
    assert about["completeness"] is None
    for file, text in (("roi.csv", "rank,roi\n1,a\n"), ("explanation.json", "[]")):
        kept = (folder / file).read_text()
        (folder / file).write_text(text)
        with pytest.raises(InputError, match="has no readable explanation"):
            Explanation.load(folder)
        (folder / file).write_text(kept)
    assert len(Explanation.load(folder).rois) == 116


def explanation(scores, gate=0.5, method="flat", names=("a", "b", "c")):
    """A small one with these ROI scores."""
    scores = np.array(scores)
    rois = pd.DataFrame({"rank": 0, "roi": names, "score": scores, "sd": 1.0, "fc": scores})
    edges = pd.DataFrame({"roi": ["a"], "other roi": ["b"], "score": scores[:1], "direction": -scores[:1], "fc": scores[:1]})
    phenotypes = pd.DataFrame({"phenotype": ["age"], "score": scores[1:2], "sd": np.nan, "direction": 0.0})
    gates = pd.DataFrame({"site": ["S10", "S2"], "label": [1, 1], "subjects": [3, 4], "imaging": gate, "phenotypes": 1 - gate})
    missed = pd.DataFrame({"subject": ["s"], "difference": 1.0, "attributed": 0.9, "absolute": 0.1, "relative": 0.1})
    about = {"method": method, "cohort": "hash", "subjects": 7}
    points = pd.DataFrame(columns=["site", "label", "part", "x", "y"])
    return Explanation(rois.sample(frac=1, random_state=int(scores[0])), edges, phenotypes, gates, missed, points, about)


def test_mean_over_folds_has_an_interval(tmp_path):
    few = mean_over([explanation([1, 2, 3], 0.2), explanation([5, 4, 3], 0.4), explanation([0, 9, 3], 0.6)])
    assert few.rois["rank"].tolist() == [1, 2, 3]
    assert few.rois["roi"].tolist() == ["b", "c", "a"]
    assert few.rois[["score", "low", "high", "fc"]].values.tolist() == [[5, 2, 9, 5], [3, 3, 3, 3], [2, 0, 5, 2]]
    assert few.edges.iloc[0].tolist() == ["a", "b", 2, 0, 5, -2, 2]
    assert few.phenotypes["score"].tolist() == [5]
    assert few.gate["site"].tolist() == ["S2", "S10"] and few.gate["subjects"].tolist() == [4, 3]
    assert few.gate["imaging"].tolist() == pytest.approx([0.4, 0.4])
    assert few.about["interval"] == "smallest and largest"
    names = ["mean_absolute", "max_absolute", "median_relative", "max_relative"]
    assert few.error() == pytest.approx(dict.fromkeys(names, 0.1))
    many = mean_over(explanation([i, 2, 3]) for i in range(41))
    assert many.rois[["low", "high"]].iloc[0].tolist() == [1, 39]
    assert "percentiles" in many.about["interval"]
    assert json.loads((many.save(tmp_path) / "explanation.json").read_text())["explanations"] == 41
    with pytest.raises(InputError, match="explanations with different ROIs cannot be averaged"):
        mean_over([explanation([1, 2, 3]), explanation([1, 2, 3], names=("a", "b", "x"))])
    # Orders 1 2 3 and 3 2 1 and 1 3 2: rank correlations -1, 0.5 and -0.5.
    three = [explanation([1, 2, 3]), explanation([6, 5, 4]), explanation([1, 9, 8])]
    assert mean_over(three).about["agreement"] == pytest.approx((-1 + 0.5 - 0.5) / 3)
    assert mean_over(three[:1]).about["agreement"] is None
    assert mean_over([explanation([2, 2, 2])] * 2).about["agreement"] is None
    with pytest.raises(InputError, match="explanations of one method can be averaged, not of flat, other"):
        mean_over([explanation([1, 2, 3]), explanation([1, 2, 3], method="other")])
    with pytest.raises(InputError, match="explanations of one method can be averaged, not of none"):
        mean_over([])


def test_the_mean_over_real_explanations_keeps_their_columns(fold, fitted):
    linear = [explain(make("fc-svm").fit(fold.source), fold.target.select(np.arange(i, i + 8))) for i in range(3)]
    whole = mean_over(linear)
    assert len(whole.edges) == 66
    assert whole.rois.columns.tolist() == ["rank", "roi", "score", "sd", "low", "high", "fc"]
    assert whole.gate.empty
    deep = mean_over([explain(fitted["m2lgdg"], fold.target, steps=1)] * 2)
    assert deep.edges.empty
    assert len(deep.gate) == 2


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda method, target: (make("prior").fit(method), target), "method prior cannot be explained"),
        (lambda source, target: (make("erm"), target), "method erm is not fitted yet"),
        (lambda source, target: (make("fc-svm").fit(source), target.select(target.sites == "")), "has no subjects"),
        (lambda source, target: (make("fc-svm").fit(source), target.select([0, 1])), "needs at least three subjects"),
    ],
)
def test_what_cannot_be_explained(change, words, fold):
    with pytest.raises(InputError, match=words):
        explain(*change(fold.source, fold.target))


def test_odd_features_and_steps_are_refused(fold, fitted):
    class Odd(Flat):
        def features(self, cohort, place):
            return super().features(cohort, place) | {"odd": torch.ones(len(cohort), 5, 12)}

    with pytest.raises(InputError, match=r"feature odd of shape \(5, 12\) cannot be explained: it does not map to 12 ROIs"):
        explain(Odd().fit(fold.source), fold.target, steps=1)
    with pytest.raises(InputError, match="at least one step, not 0"):
        explain(fitted["erm"], fold.target, steps=0)


def test_without_phenotypes_there_are_none_to_explain(fold):
    bare = fold.source.with_inputs([])
    found = explain(make("erm", **small("erm")).fit(bare), fold.target, steps=8)
    assert found.phenotypes.empty
    assert found.phenotypes.columns.tolist() == ["phenotype", "score", "sd", "direction"]
    assert found.rois["score"].gt(0).all()


@pytest.fixture
def command(monkeypatch, typed, tmp_path, fold):
    monkeypatch.chdir(tmp_path)
    fold.target.save("new.cohort")
    return typed


def test_the_command_writes_tables_and_says_the_top(command, fold, fitted):
    fitted["m2lgdg"].save("model")
    code, text, _ = command("explain", "model", "new.cohort", "--out", "why", "--steps", 8)
    assert code == 0
    table = pd.read_csv("why/roi.csv")
    lines = text.splitlines()
    start = lines.index("ROIs") + 1
    assert [line.split()[1] for line in lines[start : start + 10]] == table["roi"].head(10).tolist()
    names = pd.read_csv("why/phenotypes.csv")["phenotype"].tolist()
    assert [line.split()[1] for line in lines[start + 11 : start + 14]] == names
    assert "Completeness: attributions miss" in text
    assert "This is a large error" not in text
    assert "Wrote why" in text
    assert "`explain = true`" in text
    about = json.loads(Path("why/explanation.json").read_text())
    assert (about["steps"], about["cohort"]) == (8, fold.target.hash)
    assert about["baseline"].startswith("zero: ")
    assert about["completeness"]["median_relative"] < 0.1
    assert "west-0" not in "".join(Path(f"why/{name}.csv").read_text() for name in ("roi", "phenotypes", "gate"))
    assert not Path("why/edges.csv").exists()


def test_the_command_warns_of_attributions_that_are_not_complete(command, fitted):
    fitted["msstan"].save("model")
    code, text, _ = command("explain", "model", "new.cohort", "--out", "why", "--steps", 4)
    assert code == 0
    assert "This is a large error" in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("model", "other.cohort"), "the model was trained on 12 ROIs (synthetic), the cohort has 13."),
        (("model", "new.cohort", "--device", "toaster"), "device toaster is not available on this machine."),
        (("model", "new.cohort", "--out", "new.cohort"), "new.cohort is not a folder; choose another --out."),
    ],
)
def test_bad_input_ends_in_one_sentence(command, fold, fitted, arguments, words, tmp_path):
    fitted["erm"].save("model")
    make_cohort("tiny", n_rois=13).save("other.cohort")
    before = sorted(path.name for path in tmp_path.iterdir())
    code, _, errors = command("explain", "--out", "why", *arguments)
    assert code == 2
    (line,) = [line for line in errors.splitlines() if line.strip()]
    assert words in line
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_places_of_a_users_own_atlas(command, fold, fitted):
    fitted["m2lgdg"].save("model")
    rows = [f"{roi}\t{i}\t{i}.5\t0\t-1" for i, roi in enumerate(fold.target.rois)]
    Path("rois.tsv").write_text("\n".join(["name\tcode\tx\ty\tz", *rows]) + "\n")
    assert command("explain", "model", "new.cohort", "--out", "why", "--steps", 2, "--rois", "rois.tsv")[0] == 0
    table = pd.read_csv("why/roi.csv").set_index("roi")
    assert table.loc[list(fold.target.rois), "x"].tolist() == [i + 0.5 for i in range(len(fold.target.rois))]
    assert table["rank"].tolist() == list(range(1, len(table) + 1))
    code, _, errors = command("explain", "model", "new.cohort", "--out", "why", "--rois", "none.tsv")
    assert code == 2
    assert "none.tsv cannot be read" in errors


def test_errors_and_readability_of_saved_explanations_are_joined(tmp_path):
    """The largest error stays the largest, what is a mean or a share is averaged, what is unknown is left out."""
    for i, (absolute, site) in enumerate(((0.1, 0.4), (0.3, 0.6))):
        one = explanation([1, 2, 3])
        one.completeness["absolute"] = absolute
        one.about["readability"] = {"site": site, "label": None, "probed": "source"}
        one.save(tmp_path / str(i))
    whole = mean_over(Explanation.load(tmp_path / str(i)) for i in range(2))
    wanted = {"mean_absolute": 0.2, "max_absolute": 0.3, "median_relative": 0.1, "max_relative": 0.1}
    assert whole.error() == pytest.approx(wanted)
    assert whole.about["readability"] == {"site": pytest.approx(0.5)}
