"""The networks: shapes, how they start, and a loss that is a sum over samples."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from samestep.recipes.image_classification import models
from samestep.recipes.image_classification.spec import Spec


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 7, 5), (1, 1, 1)])
@pytest.mark.parametrize("norm", ["batch", "group"])
def test_shapes(shape: tuple[int, int, int], norm: str) -> None:
    pixels = torch.randint(256, (5, *shape), dtype=torch.uint8)
    for model in (
        models.resnet(shape, 4, width=6, blocks=(1, 2), norm=norm),
        models.mlp(shape, 4, hidden=(5, 6)),
        models.mlp(shape, 4, hidden=()),
    ):
        assert model(pixels).shape == (5, 4)
        assert model(pixels.float()).equal(model(pixels))


def test_pixels_are_standardized_and_a_constant_channel_is_only_centred() -> None:
    model = models.mlp((2, 1, 1), 3, hidden=())
    model.set_pixels(torch.tensor([10.0, 7.0]), torch.tensor([2.0, 0.0]))
    seen = []
    model.features.register_forward_hook(lambda module, inputs, output: seen.append(output))
    model(torch.tensor([[[[14]], [[8]]]], dtype=torch.uint8))
    assert seen[0].tolist() == [[2.0, 1.0]]
    assert {"mean", "std"} <= model.state_dict().keys()


def test_a_block_begins_as_its_shortcut_and_the_head_narrow() -> None:
    torch.manual_seed(0)
    model = models.resnet((1, 8, 8), 10, width=8, blocks=(2,))
    x = torch.rand(4, 8, 8, 8)
    blocks = [module for module in model.features if type(module).__name__ == "_Block"]
    assert len(blocks) == 2
    assert all(torch.equal(block(x), x) for block in blocks)
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    assert sorted(module.weight.mean().item() for module in norms) == [0.0, 0.0, 1.0, 1.0, 1.0]
    assert model.head.weight.std().item() == pytest.approx(0.01, rel=0.2)
    assert model.head.bias.eq(0).all()
    convolutions = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    assert convolutions[1].weight.std().item() == pytest.approx((2 / (9 * 8)) ** 0.5, rel=0.2)


def test_group_norm_takes_each_sample_by_itself_and_batch_norm_does_not() -> None:
    pixels = torch.randint(256, (6, 1, 8, 8), dtype=torch.uint8)
    for norm, alone in (("group", True), ("batch", False)):
        torch.manual_seed(0)
        model = models.resnet((1, 8, 8), 10, width=8, norm=norm)
        # Not bit for bit: a convolution may add in another order for another number of samples.
        assert torch.allclose(model(pixels)[:3], model(pixels[:3]), atol=1e-6) == alone


def test_the_loss_is_the_sum_of_cross_entropies_and_accuracy_counts() -> None:
    torch.manual_seed(0)
    model = models.mlp((1, 2, 2), 3, hidden=(4,)).double()
    pixels, labels = torch.rand(5, 1, 2, 2, dtype=torch.float64), torch.tensor([0, 1, 2, 1, 0])
    for smoothing in (0.0, 0.25):
        loss, count, sums = models.loss_sums(model, pixels, labels, smoothing)
        shares = torch.softmax(model(pixels), 1).detach()
        wanted = 0.0
        for row, label in zip(shares, labels.tolist()):
            target = [smoothing / 3 + (1 - smoothing) * (i == label) for i in range(3)]
            wanted -= sum(t * float(p.log()) for t, p in zip(target, row))
        assert float(loss.detach()) == pytest.approx(wanted, rel=1e-12)
        assert count == 5
        assert int(sums["accuracy"]) == int((shares.argmax(1) == labels).sum())


def test_the_settings_decide() -> None:
    small = models.of_spec(Spec(model="resnet", width=4, blocks=[1, 1], norm="group"), (3, 8, 8), 7)
    assert [tuple(p.shape) for p in small.head.parameters()] == [(7, 8), (7,)]
    assert any(isinstance(module, nn.GroupNorm) for module in small.modules())
    flat = models.of_spec(Spec(model="mlp", hidden=[9]), (3, 8, 8), 7)
    assert flat.head.in_features == 9
