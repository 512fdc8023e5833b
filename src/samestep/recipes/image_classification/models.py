"""The networks of the recipe, in plain torch: a small ResNet and an MLP.

::

    pixels ─ standardize ─ features ─> (n, n_features) ─ head ─> (n, n_classes)

Both start as Goyal et al. 2017 (section 5.1) start theirs: weights by He's rule, the last normalisation of every
residual block at 0, so that a block begins as its shortcut, and the head from a narrow Gaussian.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from samestep.recipes.image_classification.spec import ImageClassificationSpec

__all__ = ["Classifier", "loss_sums", "mlp", "of_spec", "resnet"]

Norm = Callable[[int], nn.Module]


class Classifier(nn.Module):
    """Standardized pixels, features, one linear head.

    Args:
        features: from (n, channels, height, width) to (n, n_features).
        n_features: columns of the features.
        n_classes: columns of the output.
        channels: of the images; their mean and deviation are buffers, 0 and 1 until they are set.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, features: nn.Module, n_features: int, n_classes: int, channels: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(channels))
        self.register_buffer("std", torch.ones(channels))
        self.features = features
        self.head = nn.Linear(n_features, n_classes)
        nn.init.normal_(self.head.weight, std=0.01)
        nn.init.zeros_(self.head.bias)

    @torch.no_grad()
    def set_pixels(self, mean: Tensor, std: Tensor) -> None:
        """Take the mean and deviation of every channel; a channel that is constant is only centred."""
        self.mean.copy_(mean)
        self.std.copy_(torch.where(std > 0, std, torch.ones_like(std)))

    def forward(self, pixels: Tensor) -> Tensor:
        """Return the score of every class.

        Args:
            pixels: (n, channels, height, width) uint8 or float, as in the data.

        Returns:
            (n, n_classes) float tensor; softmax makes probabilities of a row.
        """
        shape = (1, -1, 1, 1)
        standard = (pixels.to(self.mean.dtype) - self.mean.view(shape)) / self.std.view(shape)
        scores: Tensor = self.head(self.features(standard))
        return scores


def mlp(shape: tuple[int, int, int], n_classes: int, hidden: Sequence[int] = (256,)) -> Classifier:
    """Return a multi-layer perceptron with ReLU; without hidden layers, a linear classifier.

    Args:
        shape: channels, height, width of the images.
        n_classes: columns of the output.
        hidden: widths of the hidden layers.

    Example:
        >>> tuple(mlp((1, 8, 8), 10, hidden=(16,))(torch.zeros(3, 1, 8, 8)).shape)
        (3, 10)
    """
    widths = [math.prod(shape), *hidden]
    layers: list[nn.Module] = [nn.Flatten()]
    for n_in, n_out in pairwise(widths):
        linear = nn.Linear(n_in, n_out)
        nn.init.kaiming_normal_(linear.weight, nonlinearity="relu")
        nn.init.zeros_(linear.bias)
        layers += [linear, nn.ReLU()]
    return Classifier(nn.Sequential(*layers), widths[-1], n_classes, shape[0])


def resnet(
    shape: tuple[int, int, int],
    n_classes: int,
    width: int = 16,
    blocks: Sequence[int] = (1, 1, 1),
    norm: str = "batch",
) -> Classifier:
    """Return a residual network for small images.

    Every stage but the first halves height and width and doubles the channels.

    Args:
        shape: channels, height, width of the images.
        n_classes: columns of the output.
        width: channels of the first stage.
        blocks: blocks of each stage, of two 3 x 3 convolutions each.
        norm: "batch" normalises over the samples of a shard; "group" within each sample, over groups of channels.

    Example:
        >>> tuple(resnet((3, 8, 8), 10, width=4)(torch.zeros(2, 3, 8, 8)).shape)
        (2, 10)

    Reference: He et al., Deep residual learning for image recognition, 2016, section 4.2, shortcuts A.
    """
    make_norm: Norm = nn.BatchNorm2d if norm == "batch" else _group_norm
    layers: list[nn.Module] = [_convolution(shape[0], width), make_norm(width), nn.ReLU()]
    n_in = width
    for stage, n_blocks in enumerate(blocks):
        n_out = width * 2**stage
        for block in range(n_blocks):
            layers.append(_Block(n_in, n_out, 2 if stage and not block else 1, make_norm))
            n_in = n_out
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return Classifier(nn.Sequential(*layers), n_in, n_classes, shape[0])


def of_spec(spec: ImageClassificationSpec, shape: tuple[int, int, int], n_classes: int) -> Classifier:
    """Return the network that the settings ask for; its values come from torch's generator.

    Args:
        spec: settings.
        shape: channels, height, width of the images.
        n_classes: columns of the output.
    """
    if spec.model == "mlp":
        return mlp(shape, n_classes, spec.hidden)
    return resnet(shape, n_classes, spec.width, spec.blocks, spec.norm)


def loss_sums(
    model: nn.Module, pixels: Tensor, labels: Tensor, label_smoothing: float = 0.0
) -> tuple[Tensor, int, dict[str, Tensor]]:
    """Return the loss of one shard as a sum over its samples, for `step.TrainStep`.

    Args:
        model: gives the scores.
        pixels: (n, channels, height, width).
        labels: (n,) int64 class numbers.
        label_smoothing: share of the target that goes to all classes alike.

    Returns:
        loss_sum: cross entropy in nats, a scalar with gradient.
        count: n.
        sums: "accuracy", the number of samples whose class has the highest score.

    Example:
        >>> loss_sum, count, sums = loss_sums(nn.Flatten(), torch.zeros(3, 1, 1, 2), torch.tensor([0, 0, 1]))
        >>> round(float(loss_sum), 4), count, int(sums["accuracy"])
        (2.0794, 3, 2)
    """
    scores = model(pixels)
    loss = nn.functional.cross_entropy(scores, labels, reduction="sum", label_smoothing=label_smoothing)
    return loss, len(labels), {"accuracy": (scores.argmax(1) == labels).sum()}


class _Block(nn.Module):
    """Two convolutions beside a shortcut, which leaves out pixels and adds empty channels where shapes change."""

    def __init__(self, n_in: int, n_out: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.curve = nn.Sequential(
            _convolution(n_in, n_out, stride), norm(n_out), nn.ReLU(), _convolution(n_out, n_out), norm(n_out)
        )
        nn.init.zeros_(self.curve[-1].weight)  # type: ignore[arg-type]
        self.stride, self.n_new = stride, n_out - n_in

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x[:, :, :: self.stride, :: self.stride]
        if self.n_new:
            shortcut = nn.functional.pad(shortcut, (0, 0, 0, 0, 0, self.n_new))
        return nn.functional.relu(self.curve(x) + shortcut)


def _convolution(n_in: int, n_out: int, stride: int = 1) -> nn.Conv2d:
    convolution = nn.Conv2d(n_in, n_out, 3, stride, padding=1, bias=False)
    nn.init.kaiming_normal_(convolution.weight, mode="fan_out", nonlinearity="relu")
    return convolution


def _group_norm(channels: int) -> nn.Module:
    return nn.GroupNorm(math.gcd(channels, 8), channels)
