"""What attributions are of: the predicted class's logit, as in the paper, or the margin between the two logits."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from captum.attr import IntegratedGradients
from torch import nn

from m2lgdg import InputError, Model, leave_one_site_out, make, make_cohort, run_study
from m2lgdg.connectivity import fc_features
from m2lgdg.deep import Batch, DeepMethod
from m2lgdg.devices import fast_form, plain_form
from m2lgdg.explain.attribution import explain, explain_subject
from m2lgdg.explain.gradients import _matrices, integrated_gradients
from m2lgdg.preprocess import PhenotypeScaler
from m2lgdg.registry import METHODS

ERM = {"epochs": 1, "warmup": 0}


class Planes(nn.Module):
    """Each logit is linear in the edges and phenotypes, with weights of its own."""

    def __init__(self, n, inputs):
        super().__init__()
        draw = torch.Generator().manual_seed(3)
        self.edges = nn.Parameter(torch.randn(n * (n - 1) // 2, 2, generator=draw))
        self.phenotypes = nn.Parameter(torch.randn(inputs, 2, generator=draw))

    def forward(self, batch):
        return batch["fc"] @ self.edges + batch.phenotypes @ self.phenotypes


@dataclasses.dataclass
class Linear(DeepMethod):
    name = "planes"
    epochs: int = 1
    warmup: int = 0

    def features(self, cohort, device):
        return {"fc": torch.from_numpy(fc_features(cohort.series)).float()}

    def build(self, shape):
        return Planes(shape.n_rois, shape.n_inputs)


@pytest.fixture(scope="module")
def fold():
    return next(leave_one_site_out(make_cohort("tiny"), ["west"]))


@pytest.fixture(scope="module")
def planes(fold):
    return Model(Linear()).fit(fold.source, seed=0)


@pytest.fixture(scope="module")
def small(fold):
    fields = {**METHODS["m2lgdg"].variants["small"], "epochs": 2, "warmup": 1, "length": 24}
    return make("m2lgdg", **fields).fit(fold.source, seed=0)


def batch_of(fitted, cohort):
    scaler = PhenotypeScaler.restore(cohort.inputs, fitted.state_, "scaler")
    return fitted.make_batch(cohort.unlabelled(), scaler, torch.device("cpu"))


def test_tables_are_of_the_predicted_logit_and_signs_point_to_patient(planes, fold):
    batch, network = batch_of(planes, fold.target), planes.network()
    with torch.no_grad():
        logits = network(batch)
        classes = logits.argmax(dim=1).numpy()
        attributed = (batch.phenotypes * network.phenotypes.T[classes]).numpy()
        edges = (batch["fc"] * network.edges.T[classes]).numpy()
    explanation = explain(planes, fold.target, steps=2)
    assert (explanation.about["of"], explanation.about["scores"].split(";")[0]) == (
        *("logit", "integrated gradients of the predicted class's logit"),
    )
    sign = 2 * classes[:, None] - 1
    table = explanation.phenotypes.set_index("phenotype").loc[list(fold.target.inputs)]
    np.testing.assert_allclose(table["score"], np.abs(attributed).mean(axis=0), rtol=1e-4)
    np.testing.assert_allclose(table["direction"], (sign * attributed).mean(axis=0), rtol=1e-4, atol=1e-6)
    first, second = np.triu_indices(len(fold.target.rois), 1)
    pairs = explanation.edges.set_index(["roi", "other roi"])
    for k, (i, j) in enumerate(zip(first, second, strict=True)):
        row = pairs.loc[(fold.target.rois[i], fold.target.rois[j])]
        np.testing.assert_allclose(row["score"], np.abs(edges[:, k]).mean(), rtol=1e-4)
        np.testing.assert_allclose(row["direction"], (sign[:, 0] * edges[:, k]).mean(), rtol=1e-4, atol=1e-6)
    own = logits.numpy()[np.arange(len(classes)), classes]
    np.testing.assert_allclose(explanation.completeness["difference"], own, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(explanation.completeness["attributed"], own, rtol=1e-4, atol=1e-4)
    one = explain_subject(planes, fold.target.select([0]), steps=2)
    np.testing.assert_allclose(one.completeness["difference"], own[:1], rtol=1e-4, atol=1e-5)


def test_a_feature_with_the_diagonal_is_a_matrix_with_it():
    """Features of 4 ROIs row by row, as the logarithms of covariances are; without the diagonal, as edges are."""
    for diagonal in (0, 1):
        values = -1.0 - np.arange(6.0 + 4 * diagonal)[None]
        absolute, signed = _matrices("any", values, 4)
        place = iter(values[0])
        for i in range(4):
            for j in range(i + 1 - diagonal, 4):
                expected = next(place)
                assert signed[0, i, j] == signed[0, j, i] == expected and absolute[0, i, j] == -expected
        assert signed[0].trace() == (0 if not diagonal else -(1 + 5 + 8 + 10))


def test_the_framework_is_complete(small, fold):
    """For the margin, test_attribution.py has every network."""
    few = fold.target.select(np.arange(2))
    batch, network = batch_of(small, few), small.network()
    zeros = {name: torch.zeros_like(value) for name, value in batch.features.items()}
    nothing = Batch(zeros, torch.zeros_like(batch.phenotypes), batch.label, batch.site)
    with torch.no_grad():
        logits, before = network(batch).double(), network(nothing).double()
    change = (logits - before)[torch.arange(len(few)), logits.argmax(dim=1)]
    table = explain(small, few, steps=64).completeness
    np.testing.assert_allclose(table["difference"], change, atol=1e-5)
    assert table["absolute"].sum() < 0.05 * table["difference"].abs().sum()


def test_the_option_of_the_command(fold, tmp_path, monkeypatch, typed):
    monkeypatch.chdir(tmp_path)
    make("erm", **ERM).fit(fold.source, seed=0).save("model")
    fold.target.save("west.cohort")
    for of in ("logit", "margin"):
        assert typed("explain", "model", "west.cohort", "--out", of, "--of", of, "--steps", 2)[0] == 0
        assert json.loads((tmp_path / of / "explanation.json").read_text())["of"] == of
    assert (tmp_path / "logit" / "roi.csv").read_text() != (tmp_path / "margin" / "roi.csv").read_text()
    code, _, error = typed("explain", "model", "west.cohort", "--out", "no", "--of", "loss")
    assert code == 2 and "of the logit or the margin, not of 'loss'" in error


def test_a_study_explains_what_it_asks_for_and_older_folders_stay_usable(tmp_path):
    make_cohort("tiny").save(tmp_path / "tiny.cohort")
    study = {"cohort": str(tmp_path / "tiny.cohort"), "methods": ["erm"], "seeds": [0], "targets": ["east"], "explain": True}
    study |= {"explain_steps": 1, "method": {"erm": ERM}}
    run_study(study, tmp_path / "logit")
    run_study({**study, "explain_of": "margin"}, tmp_path / "margin")
    keys = set()
    for of in ("logit", "margin"):
        (folder,) = (tmp_path / of / "explanations").iterdir()
        assert json.loads((folder / "explanation.json").read_text())["of"] == of
        keys.add(folder.name)
    assert len(keys) == 2
    first, second = ((tmp_path / of / "predictions.csv").read_bytes() for of in ("logit", "margin"))
    assert first == second
    stored = tmp_path / "logit" / "study.json"
    about = json.loads(stored.read_text())
    assert about.pop("explain_of") == "logit"
    stored.write_text(json.dumps(about))  # as an earlier version wrote it
    assert run_study(study, tmp_path / "logit").reused == 1
    with pytest.raises(InputError, match="key explain_of differs"):
        run_study({**study, "explain_of": "margin"}, tmp_path / "logit")


def test_members_in_one_stack_are_explained_as_one_after_another_whatever_the_points_at_once(fold):
    fields = METHODS["m2lgdg-connectome"].variants["small"] | {"epochs": 1, "warmup": 0, "members": 3}
    method = make("m2lgdg-connectome", **fields).fit(fold.source, seed=0)
    scaler = PhenotypeScaler.restore(tuple(method.facts_["inputs"]), method.state_, "scaler")
    batch = method.make_batch(fold.target.select(np.arange(5)), scaler, torch.device("cpu"))
    found = []
    for form, points in ((fast_form, 1000), (fast_form, 7), (plain_form, 16)):
        network = form(method.network()).requires_grad_(False)
        network.points_at_once = points
        found.append(integrated_gradients(network, batch, 12))
    (expected, change), *others = found
    assert all(expected[name].abs().max() > 1e-5 for name in ("steady", "log_edges", "phenotypes"))
    for attributed, other_change in others:
        torch.testing.assert_close(other_change, change, rtol=1e-3, atol=1e-6)
        for name, value in expected.items():
            torch.testing.assert_close(attributed[name], value, rtol=1e-3, atol=1e-4 * float(value.abs().max()))


@pytest.mark.parametrize("variant", ["", "plus", "scan", "no-phenotypes", "M1"])
@pytest.mark.parametrize("of", ["logit", "margin"])
def test_attributions_are_those_of_captum_on_the_plain_network(fold, variant, of):
    # Trained so long that the slope of Platt scaling is of order one: after one epoch `plus` has decisions of hundreds, and
    # float32 rounds these by more than the bounds on their difference.
    fields = METHODS["m2lgdg-connectome"].variants["small"] | {"epochs": 5, "warmup": 0, "learning_rate": 1e-2}
    method = make("m2lgdg-connectome", **fields | METHODS["m2lgdg-connectome"].variants.get(variant, {})).fit(
        fold.source, seed=0
    )
    scaler = PhenotypeScaler.restore(tuple(method.facts_["inputs"]), method.state_, "scaler")
    batch = method.make_batch(fold.target.select(np.arange(3)), scaler, torch.device("cpu"))
    classes = torch.tensor([0, 1, 1]) if of == "logit" else None
    attributed, change = integrated_gradients(method.network(), batch, 9, classes)
    network, baselines = plain_form(method.network()), method.network().baselines()
    names = [*batch.features, *["phenotypes"] * bool(batch.phenotypes.shape[1])]
    given = [batch.phenotypes if name == "phenotypes" else batch[name] for name in names]
    start = [baselines[name].expand_as(one) if name in baselines else 0 * one for name, one in zip(names, given, strict=True)]

    def decision(*values):
        features = dict(zip(names, values, strict=True))
        phenotypes = features.pop("phenotypes", torch.empty(len(values[0]), 0))
        logits = network(Batch(features, phenotypes, batch.label[:1], batch.site[:1]))
        margin = logits[:, 1] - logits[:, 0]
        return (logits if of == "logit" else margin[:, None]) + 0 * sum(one.sum(1, keepdim=True) for one in values)

    target = 0 if classes is None else classes
    expected = IntegratedGradients(decision).attribute(tuple(given), tuple(start), target=target, n_steps=9)
    assert any(one.abs().max() > 1e-5 for one in expected)
    for name, one in zip(names, expected, strict=True):
        torch.testing.assert_close(attributed[name], one.detach(), rtol=1e-4, atol=1e-5 * float(one.abs().max()) + 1e-9)
    with torch.no_grad():
        both = (decision(*given) - decision(*start)).gather(1, torch.as_tensor(target).expand(3)[:, None])
    torch.testing.assert_close(change[:, :1], both, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(change[:, 1], sum(one.sum(1) for one in expected).detach(), rtol=1e-4, atol=1e-6)
