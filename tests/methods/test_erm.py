"""ERM and what the generalization methods share: the network against loops, source-only scaling, batches, an overfit."""

import numpy as np
import torch
from networks import EDGES, INPUTS, fc_network

from m2lgdg import make_cohort
from m2lgdg.connectivity import fc_features
from m2lgdg.deep import Batch
from m2lgdg.methods.erm import ERM
from m2lgdg.registry import create as make


def loops(state, fc, phenotypes):
    x = (fc - state["mean"]) / state["scale"]
    for place in (0, 4):
        weight, bias = state[f"encoder.{place}.weight"], state[f"encoder.{place}.bias"]
        x = np.array([sum(weight[o, i] * x[i] for i in range(len(x))) + bias[o] for o in range(len(bias))])
        middle = sum(x) / len(x)
        spread = (sum((one - middle) ** 2 for one in x) / len(x) + 1e-5) ** 0.5
        x = (x - middle) / spread * state[f"encoder.{place + 1}.weight"] + state[f"encoder.{place + 1}.bias"]
        x = np.maximum(x, 0)
    both = [*x, *phenotypes]
    weight, bias = state["classifier.weight"], state["classifier.bias"]
    return x, [sum(weight[o, i] * both[i] for i in range(len(both))) + bias[o] for o in range(2)]


def test_the_network_against_loops():
    built = fc_network(ERM(widths=(7, 4)))
    state = {name: value.double().numpy() for name, value in built.state_dict().items()}
    draw = torch.Generator().manual_seed(1)
    fc, inputs = torch.randn(6, EDGES, generator=draw), torch.randn(6, INPUTS, generator=draw)
    parts = built.parts(Batch({"fc": fc}, inputs, torch.zeros(6).long(), torch.zeros(6).long()))
    expected = [loops(state, *one) for one in zip(fc.double().numpy(), inputs.double().numpy(), strict=True)]
    np.testing.assert_allclose(parts["fused"].detach(), [one[0] for one in expected], atol=1e-5)
    np.testing.assert_allclose(parts["logits"].detach(), [one[1] for one in expected], atol=1e-5)


def test_edges_are_scaled_by_source_training_subjects_alone():
    cohort = make_cohort("tiny", seed=3)
    own = ERM()
    fc = own.features(cohort, torch.device("cpu"))
    np.testing.assert_array_equal(fc["fc"], fc_features(cohort.series).astype(np.float32))
    fc["fc"][:, 4] = 0.25
    rows = torch.arange(0, len(cohort), 2)
    fitted = own.prepare(cohort.select(rows.numpy()), {"fc": fc["fc"][rows]})
    some = fc["fc"][rows].double().numpy()
    np.testing.assert_allclose(fitted["mean"], some.mean(axis=0), atol=1e-6)
    expected = some.std(axis=0)
    expected[4] = 1.0  # never varies
    np.testing.assert_allclose(fitted["scale"], expected, atol=1e-6)


def test_batches_meet_sites_in_equal_parts_and_the_loss_has_no_class_weights():
    own = make("erm", sites_per_batch=3, per_site=4, label_smoothing=0.1)
    site, label = torch.arange(60) % 5, (torch.arange(60) % 10 == 0).long()
    for rows in own.batches(site, label, torch.Generator().manual_seed(0)):
        assert torch.bincount(site[rows], minlength=5).sort().values.tolist() == [0, 0, 4, 4, 4]
    logits = torch.tensor([[2.0, 0.0], [0.5, 1.5]])
    batch = Batch({}, torch.zeros(2, 0), torch.tensor([0, 1]), torch.tensor([0, 1]))
    own.class_weight = torch.tensor([5.0, 0.1])
    log = torch.log_softmax(logits, dim=1)
    expected = -(0.95 * log[0, 0] + 0.05 * log[0, 1] + 0.95 * log[1, 1] + 0.05 * log[1, 0]) / 2
    torch.testing.assert_close(own.cross_entropy(logits, batch), expected)
