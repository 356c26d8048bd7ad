"""The ruler of the benchmarks is the package's M²LG-DG: the same weights give the same losses, gradients and training."""

import plain
import pytest
import step
import torch

from m2lgdg.methods.m2lgdg import M2LGDG

torch.set_num_threads(1)
ROIS, LENGTH, BATCH = 12, 40, 12
SIZES = {
    **M2LGDG.variants["small"],
    "length": LENGTH,
    "local_channels": (8, 16, 16),
    "local_strides": (1, 2, 1),
    "dropout": 0.0,
}


def sides(**fields):
    everyone = step.made_up(4 * BATCH, ROIS, LENGTH)
    ours = step.Ours(M2LGDG(**SIZES | fields), everyone)
    return ours, step.Plain(ours)


@pytest.mark.parametrize("fields", [{}, {"chebyshev_order": 4}, {"layers": 2, "fusion_layers": 2}], ids=str)
def test_the_same_weights_give_the_same_loss_and_gradients(fields):
    found = step.differences(M2LGDG(**SIZES | fields), step.made_up(BATCH, ROIS, LENGTH), torch.arange(BATCH))
    assert found["loss"] < 1e-5
    assert found["gradient"] < 1e-4


def test_ten_training_steps_give_the_same_losses():
    ours, ruler = sides()
    rows = [torch.arange(BATCH) + BATCH * (i % 4) for i in range(10)]
    losses = torch.tensor([[float(side.step(each)) for side in (ours, ruler)] for each in rows])
    torch.testing.assert_close(losses[:, 0], losses[:, 1], rtol=0, atol=1e-4)
    assert (losses[0] - losses[-1]).abs().min() > 0.02  # both did learn


def test_a_parameter_that_one_side_lacks_is_not_passed_over():
    ours, _ = sides()
    with pytest.raises(KeyError, match=r"blocks\.2"):
        other = M2LGDG(**SIZES | {"local_channels": (8, 16), "local_strides": (1, 2)})
        plain.copy_weights(ours.network, plain.PlainNetwork(ROIS, LENGTH, step.INPUTS, other))


def test_the_ruler_is_sensitive_to_every_term_of_the_loss():
    everyone, rows = step.made_up(BATCH, ROIS, LENGTH), torch.arange(BATCH)
    others = {"decomposition_weight": 0.5, "contrastive_weight": 0.5, "margin": 3.0, "temperature": 0.5}
    for field, other in others.items():
        ours = step.Ours(M2LGDG(**SIZES), everyone)
        ruler = step.Plain(ours)
        ruler.own = M2LGDG(**SIZES | {field: other})
        ruler.own.class_weight = ours.own.class_weight
        assert (ours.gradients(rows) - ruler.gradients(rows)).abs() > 1e-3, field
