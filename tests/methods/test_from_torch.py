"""Modules of the user as methods: our training loop, seeds, shapes, other processes, model folders, studies and audit."""

import copy
import pickle
import subprocess
import sys
from pathlib import Path

import miniature
import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn
from torch.nn import functional

import m2lgdg
from m2lgdg.connectivity import fc_features, fisher_matrices
from m2lgdg.deep import DeepMethod
from m2lgdg.explain.attribution import explain
from m2lgdg.method import ANY_SCAN, method
from m2lgdg.methods import from_torch as bridge
from m2lgdg.splits import leave_one_site_out
from m2lgdg.storage import InputError
from m2lgdg.study.audit import audit
from m2lgdg.study.predictions import read_predictions

SHORT = {"epochs": 4, "warmup": 1, "learning_rate": 1e-2}
EDGES = 66
pytestmark = pytest.mark.usefixtures("methods_forgotten")


@pytest.fixture(scope="module")
def cohort():
    return m2lgdg.make_cohort("tiny", seed=3, edge_effect=3.0)


@pytest.fixture(scope="module")
def fold(cohort):
    return next(iter(leave_one_site_out(cohort)))


def small(shape, width=8, dropout=0.2):
    return nn.Sequential(nn.Linear(*shape, width), nn.ReLU(), nn.Dropout(dropout), nn.Linear(width, 2))


class WithPhenotypes(nn.Module):
    def __init__(self, shape, n_inputs, width=4):
        super().__init__()
        self.scan, self.both = nn.Linear(*shape, width), nn.Linear(width + n_inputs, 1)

    def forward(self, fc, phenotypes):
        return self.both(torch.cat([torch.relu(self.scan(fc)), phenotypes], dim=1))


class Out(nn.Module):
    """Gives its output another shape, or another form."""

    def __init__(self, change, width=1):
        super().__init__()
        self.linear, self.change = nn.Linear(EDGES, width), change

    def forward(self, fc):
        return self.change(self.linear(fc))


def proba(model, fold, seed=0):
    return model.fit(fold.source, seed=seed).predict_proba(fold.target)[:, 1]


def test_it_is_trained_by_our_loop(fold):
    """Bit by bit what a method with the same network gives."""

    class Same(nn.Module):
        def __init__(self, shape, config):
            super().__init__()
            self.module = small((shape.n_rois * (shape.n_rois - 1) // 2,), dropout=config.dropout)

        def forward(self, batch):
            return self.module(batch["fc"])

    @method("the-same")
    class TheSame(DeepMethod):
        dropout: float = 0.2
        phenotypes: bool = False
        network_class, takes = Same, ANY_SCAN

        def features(self, cohort, device):
            return {"fc": torch.from_numpy(fc_features(cohort.scans))}

    ours = proba(m2lgdg.from_torch(small, "fc", "mine", **SHORT), fold, seed=2)
    np.testing.assert_array_equal(ours, proba(m2lgdg.make("the-same", **SHORT), fold, seed=2))


def test_it_learns(fold):
    made = m2lgdg.from_torch(small, "fc", epochs=30, warmup=2, learning_rate=1e-2)
    assert m2lgdg.evaluate(fold.target.labels, proba(made, fold))["AUC"] > 0.85


def test_inputs(cohort):
    seen = {}

    class Sees(nn.Module):
        def __init__(self, shape):
            super().__init__()
            self.linear = nn.Linear(int(np.prod(shape)), 1)

        def forward(self, x):
            seen[x.ndim, len(x)] = x.detach().clone()
            return self.linear(x.flatten(1))

    source = cohort.select(np.arange(20))
    for name, expected in (("fc", fc_features(source.series)), ("rows", fisher_matrices(source.series))):
        seen.clear()
        m2lgdg.from_torch(Sees, name, epochs=1, warmup=0, validation_share=0.0).fit(source).predict_proba(source)
        np.testing.assert_array_equal(seen[expected.ndim, 20].numpy(), expected)
    m2lgdg.from_torch(Sees, "series", length=50, epochs=1, warmup=0).fit(source).predict_proba(source)
    assert seen[3, 20].shape == (20, len(cohort.rois), 50)
    np.testing.assert_allclose(seen[3, 20].std(dim=2, correction=0), 1, atol=1e-3)


def test_one_logit_or_two(fold):
    """(subject,), (subject, 1) and the two logits 0 and z are the same classifier."""
    changes = (lambda z: z, lambda z: z[:, 0], lambda z: torch.cat([torch.zeros_like(z), z], dim=1))
    found = [proba(m2lgdg.from_torch(Out(change), "fc", "out", **SHORT), fold) for change in changes]
    np.testing.assert_allclose(found[0], found[1], atol=1e-5)
    np.testing.assert_allclose(found[0], found[2], atol=1e-5)
    assert found[0].std() > 0.01


@pytest.mark.parametrize(
    ("change", "width", "message"),
    [
        (lambda z: z, 3, r"returned shape \(2, 3\) for 2 subject\(s\); return one logit for each subject"),
        (lambda z: z.squeeze(), 2, r"returned shape \(2,\) for 1 subject"),
        (lambda z: z.mean(), 1, r"returned shape \(\) for 2 subject"),
        (lambda z: (z, z), 1, "returned tuple, not a tensor"),
        (lambda z: z - z.mean(dim=0), 2, "changes from call to call or with the other subjects of a batch"),
        (lambda z: functional.dropout(z), 2, "functional.dropout needs training=self.training"),
        (lambda z: z @ torch.zeros(7, 2), 2, r"cannot take input of shape \(2, 66\) \(mat1 and mat2"),
    ],
)
def test_a_wrong_output_is_one_sentence(change, width, message, fold):
    with pytest.raises(InputError, match=message):
        m2lgdg.from_torch(Out(change, width), "fc", "wrong", **SHORT).fit(fold.source)


def test_bad_input_is_one_sentence(fold, cohort):
    def fails(message, *given, **fields):
        with pytest.raises(InputError, match=message):
            m2lgdg.from_torch(*given, **fields).fit(fold.source)

    wrong = nn.Linear(10, 2)
    fails(r'cannot take input of shape \(2, 66\) \(mat1.*\); with input="fc" a subject has the shape \(edge,\)', wrong)
    fails(r"cannot take input of shape \(2, 12, 12\)", wrong, "rows")
    fails(r"and phenotypes of shape \(2, \d\)", nn.Linear(EDGES, 2), phenotypes=True)
    fails("input 'edges' is not known; available: fc, rows, series", small, "edges")
    fails("3 is not a torch.nn.Module, nor a class or function", 3)
    fails("has no field epoch; did you mean epochs", small, epoch=3)
    fails("field epochs: 'x' is not of type int", small, epochs="x")
    fails("field length: this method does not use it", small, length=100)
    fails("field dropout: this method does not use it", nn.Linear(EDGES, 2), dropout=0.3)
    fails("there is another method fc-svm", small, name="fc-svm")
    fails("cannot be the name of a method", small, name="a b")
    fails("keep_weights=True is for an object", small, keep_weights=True)
    fails("made int, not a torch.nn.Module", lambda shape: 3)
    fails("no weights to train", nn.Flatten())
    fails("argument third without a default", lambda shape, n_inputs, third: None)
    fails("<lambda> has the argument key without", lambda shape, *, key: None)
    double = nn.Linear(EDGES, 2).double()
    fails(r"cannot take input .*dtype", double)
    with pytest.raises(InputError, match=r"input series needs time series, and cohort .* holds connectomes"):
        m2lgdg.from_torch(nn.Conv1d(12, 2, 3), "series").fit(cohort.to_connectomes())


def test_seeds_and_the_object_that_was_given(fold):
    given = nn.Sequential(
        nn.Linear(EDGES, 12),
        nn.Unflatten(1, (3, 4)),
        nn.TransformerEncoderLayer(4, 2, 8, batch_first=True),
        nn.Flatten(),
        nn.BatchNorm1d(12),
        nn.Linear(12, 2),
    )
    before = copy.deepcopy(given.state_dict())
    made = m2lgdg.from_torch(given, **SHORT)
    first, again, other = proba(made, fold), proba(made, fold), proba(made, fold, seed=1)
    np.testing.assert_array_equal(first, again)
    assert np.abs(first - other).max() > 1e-3
    assert all(torch.equal(value, before[name]) for name, value in given.state_dict().items())
    with torch.no_grad():
        given[0].weight.fill_(9.0)  # without effect, as weights are drawn anew
    np.testing.assert_array_equal(proba(made, fold), first)


def test_new_weights_are_those_of_a_new_object():
    """As if the layers were made with the seed, for layers whose own reset leaves something to their parents, too."""

    def make():
        return nn.Sequential(nn.LSTM(9, 9), nn.MultiheadAttention(16, 2), nn.LayerNorm(9), nn.PReLU(), nn.Conv1d(9, 30, 3))

    given = make()
    for value in given.parameters():
        nn.init.constant_(value, 7.0)
    bridge.renew(given, "x")
    fresh = make()
    for name, value in given.state_dict().items():
        wanted = fresh.state_dict()[name]
        assert value.std(correction=0) == pytest.approx(wanted.std(correction=0).item(), rel=0.5), name
        assert (value == wanted).all() == (wanted.std(correction=0) == 0), name  # ones and zeros are the same


def test_weights_that_are_kept(fold):
    given = nn.Sequential(nn.Linear(EDGES, 4), nn.ReLU(), nn.Linear(4, 2))
    given[0].requires_grad_(False)
    with pytest.raises(InputError, match=r"weights of 0 \(Linear\) are frozen, but would be drawn anew; give the class"):
        m2lgdg.from_torch(given, **SHORT).fit(fold.source)
    made = m2lgdg.from_torch(given, name="kept", keep_weights=True, **SHORT).fit(fold.source)
    np.testing.assert_array_equal(made.state_["network.module.0.weight"], given[0].weight.numpy())
    assert not np.array_equal(made.state_["network.module.2.weight"], given[2].weight.detach().numpy())
    loaded, expected = pickle.loads(pickle.dumps(made)), made.predict_proba(fold.target)
    given[0].weight.data.add_(1.0)
    with pytest.raises(InputError, match="is not the one that from_torch was given, whose weights are kept"):
        made.fit(fold.source)
    np.testing.assert_array_equal(loaded.predict_proba(fold.target), expected)
    own = nn.Linear(EDGES, 2)
    own.bare = nn.ParameterList([nn.Parameter(torch.zeros(2))])
    with pytest.raises(InputError, match=r"no seed can draw the weights of bare \(ParameterList\)"):
        m2lgdg.from_torch(own, **SHORT).fit(fold.source)


def test_lazy_layers_have_the_shape_of_the_cohort(fold, tmp_path):
    def lazy():
        return nn.Sequential(nn.Flatten(), nn.LazyLinear(4), nn.LazyBatchNorm1d(), nn.ReLU(), nn.LazyLinear(1))

    with pytest.raises(InputError, match=r"cannot be copied .*; give the class or a function that makes it"):
        m2lgdg.from_torch(lazy(), "rows", "lazy").fit(fold.source)
    given = nn.Sequential(nn.Flatten(), nn.LazyLinear(4), nn.ReLU(), nn.LazyLinear(1))
    assert m2lgdg.from_torch(given, "rows", "lazy-object", **SHORT).fit(fold.source).facts_["parameters"] == 585
    made = m2lgdg.from_torch(lazy, "rows", "lazy", **SHORT)
    expected = proba(made, fold)
    np.testing.assert_array_equal(proba(made, fold), expected)
    loaded = m2lgdg.Model.load(made.save(tmp_path / "model"))
    np.testing.assert_array_equal(loaded.predict_proba(fold.target)[:, 1], expected)


def test_arguments_are_fields(fold):
    made = m2lgdg.from_torch(small, name="mine", width=5, **SHORT)
    assert (made.fields()["width"], made.fields()["dropout"]) == (5, 0.2)
    assert made.fit(fold.source).state_["network.module.0.weight"].shape == (5, EDGES)
    changed = m2lgdg.make("mine", width=3).fit(fold.source)
    assert changed.state_["network.module.0.weight"].shape == (3, EDGES)
    with pytest.raises(InputError, match=r"field width: 0 is too small; it must be at least 1"):
        m2lgdg.make("mine", width=0)
    assert m2lgdg.METHODS["mine"]().fields()["epochs"] == 4


def test_phenotypes(fold):
    made = m2lgdg.from_torch(WithPhenotypes, phenotypes=True, **SHORT)
    with_them = proba(made, fold)
    assert made.facts_["inputs"] == list(fold.source.inputs) and made.facts_["inputs"]
    older = fold.target._changed(phenotypes=fold.target.phenotypes.assign(age=fold.target.phenotypes["age"] + 30))
    assert np.abs(made.predict_proba(older)[:, 1] - with_them).max() > 1e-6
    without = fold.source.with_inputs([])
    assert made.fit(without).state_["network.module.both.weight"].shape == (1, 4)
    alone = m2lgdg.from_torch(small, **SHORT).fit(fold.source)
    assert alone.facts_["inputs"] == []
    np.testing.assert_array_equal(alone.predict_proba(older), alone.predict_proba(fold.target))


@pytest.mark.parametrize("form", ["fc", "rows"])
def test_connectomes_and_atlases(form, cohort, tmp_path):
    def flat(shape):
        return nn.Sequential(nn.Flatten(), nn.Linear(int(np.prod(shape)), 2))

    made = m2lgdg.from_torch(flat, form, "flat", **SHORT)
    expected = made.fit(cohort).predict_proba(cohort)
    np.testing.assert_allclose(made.fit(cohort.to_connectomes()).predict_proba(cohort.to_connectomes()), expected, atol=1e-4)
    both = miniature.with_two_atlases(cohort)
    two = m2lgdg.make("flat", atlases="all").fit(both)
    assert len(two.members) == 2
    loaded = m2lgdg.Model.load(two.save(tmp_path / "model"))
    np.testing.assert_array_equal(loaded.predict_proba(both), two.predict_proba(both))


def test_explanation_estimator_and_card(fold):
    for form, module in (("fc", nn.Linear(EDGES, 2)), ("rows", nn.Sequential(nn.Flatten(), nn.Linear(144, 1)))):
        fitted = m2lgdg.from_torch(module, form, "explained", **SHORT).fit(fold.source)
        found = explain(fitted, fold.target, steps=8)
        assert len(found.edges) == EDGES and found.error()["max_absolute"] < 1e-3
    linear = m2lgdg.from_torch(nn.Linear(EDGES, 1), "fc", "linear", **SHORT).fit(fold.source)
    edges = explain(linear, fold.target, of="margin", steps=4).edges.set_index(["roi", "other roi"])["direction"]
    weights = linear.state_["network.module.weight"][0] * fc_features(fold.target.series).mean(axis=0)
    rows, columns = np.triu_indices(len(fold.target.rois), 1)
    names = list(zip(np.array(fold.target.rois)[rows], np.array(fold.target.rois)[columns], strict=True))
    np.testing.assert_allclose(edges.loc[names].to_numpy(), weights, atol=1e-4)
    estimator = m2lgdg.as_estimator("linear", random_state=0).fit(fold.source, fold.source.labels)
    np.testing.assert_array_equal(estimator.predict_proba(fold.target), linear.predict_proba(fold.target))


@pytest.mark.onnx
def test_onnx(fold, tmp_path):
    from m2lgdg.deploy.onnx import export_onnx

    fitted = m2lgdg.from_torch(small, "fc", "exported", **SHORT).fit(fold.source)
    assert export_onnx(fitted, tmp_path / "model.onnx").is_file()


PLUGIN = """
import m2lgdg
from torch import nn

class Net(nn.Module):
    def __init__(self, shape, width=4):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(*shape, width), nn.ReLU(), nn.Linear(width, 1))

    def forward(self, fc):
        return self.layers(fc)

m2lgdg.from_torch(Net, "fc", "by-class", epochs=3, warmup=1)
m2lgdg.from_torch(nn.Sequential(nn.Linear(66, 4), nn.ReLU(), nn.Linear(4, 2)), "fc", "by-object", epochs=3, warmup=1)
"""


@pytest.fixture
def study(cohort, tmp_path):
    cohort.save(tmp_path / "tiny.cohort")
    (tmp_path / "lab.py").write_text(PLUGIN)
    lines = ('cohort = "tiny.cohort"', "seeds = [0, 1]", 'targets = ["east", "west"]', 'plugins = ["lab.py"]')
    (tmp_path / "study.toml").write_text("\n".join((*lines, 'methods = ["by-class", "by-object"]\n')))
    return tmp_path / "study.toml"


@pytest.mark.long
def test_study_of_several_processes(study, fold):
    out = study.parent / "out"
    summary = m2lgdg.run_study(study, out, jobs=2)
    assert summary.failed == [] and summary.done == 8
    here = m2lgdg.run_study(study, study.parent / "here")
    assert here.failed == []
    pairs = [read_predictions(one) for one in (out, study.parent / "here")]
    assert pairs[0].equals(pairs[1])
    assert pairs[0].groupby(["method", "seed"])["proba"].mean().nunique() == 4
    assert m2lgdg.run_study(study, out, jobs=2).reused == 8  # the weights of an object made anew are no part of the key


def test_a_method_of_this_process_alone(cohort, tmp_path):
    cohort.save(tmp_path / "tiny.cohort")
    content = {"cohort": str(tmp_path / "tiny.cohort"), "targets": ["east"], "seeds": [0]}

    def run(width, out, **how):
        module = nn.Sequential(nn.Linear(EDGES, width), nn.ReLU(), nn.Linear(width, 2))
        study = content | {"methods": [m2lgdg.from_torch(module, "fc", "here", **SHORT)]}
        return m2lgdg.run_study(study, tmp_path / out, **how)

    assert run(4, "a").done == 1
    assert run(4, "a").reused == 1
    assert run(4, "b", reuse=[tmp_path / "a"]).reused == 1
    assert run(5, "c", reuse=[tmp_path / "a"]).reused == 0  # another module is another cell, though no file says so
    with pytest.raises(InputError, match="other processes do not import; put it into a plugin file, or run with one job"):
        run(6, "d", jobs=2)


@pytest.mark.long
def test_model_folder_in_another_process(study, cohort, typed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fit = ("fit", "tiny.cohort", "--out", "model", "--method", "by-object", "--plugin", "lab.py", "--no-new-site-calibration")
    code, out, err = typed(*fit, "--device", "cpu")
    assert (code, err) == (0, "") and "by-object trained on 52 subjects" in out
    command = [sys.executable, "-m", "m2lgdg", "predict", "model", "tiny.cohort", "--plugin", "lab.py", "--out", "p.csv"]
    subprocess.run(command, check=True, capture_output=True)  # the plugin is the first there to import PyTorch
    found = pd.read_csv("p.csv")["proba"]
    expected = m2lgdg.Model.load("model").predict_proba(m2lgdg.read("tiny.cohort"))[:, 1]
    np.testing.assert_allclose(found, expected, atol=1e-6)
    Path("lab.py").write_text(PLUGIN.replace("nn.Linear(66, 4), nn.ReLU()", "nn.Linear(66, 4), nn.Tanh()"))
    code, _, err = typed("predict", "model", "tiny.cohort", "--plugin", "lab.py", "--out", "q.csv")
    assert code == 2 and "is not the one that the model was fitted with" in err and not Path("q.csv").exists()
    for name in ("by-object", "by-class"):
        m2lgdg.METHODS.pop(name)
    code, _, err = typed("predict", "model", "tiny.cohort", "--out", "q.csv")
    assert code == 2 and "method by-object is not known; pass the file that defines it with --plugin" in err


@pytest.mark.long
def test_a_pickle_brings_the_method_with_it(fold, tmp_path):
    fitted = m2lgdg.from_torch(nn.Sequential(nn.Linear(EDGES, 2)), "fc", "travels", **SHORT).fit(fold.source)
    expected = fitted.predict_proba(fold.target)
    (tmp_path / "all.pkl").write_bytes(pickle.dumps((fitted, fold.target)))
    code = (
        "import pickle, sys; model, target = pickle.load(open(sys.argv[1], 'rb')); print(model.predict_proba(target).tolist())"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "all.pkl")], check=True, capture_output=True, text=True)
    np.testing.assert_array_equal(np.array(eval(done.stdout)), expected)
    known = m2lgdg.METHODS["travels"]
    assert type(pickle.loads(pickle.dumps(fitted)).method).definition.given is known.definition.given
    np.testing.assert_array_equal(copy.deepcopy(fitted).predict_proba(fold.target), expected)


@pytest.mark.long
def test_audit(study):
    assert all(one.passed for one in audit(study, methods=["by-class", "by-object"]))
