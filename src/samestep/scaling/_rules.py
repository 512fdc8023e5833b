"""The settings of an optimizer at another global batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, get_args

from samestep.scaling._check import check_count, check_number

__all__ = ["Rule", "Scaled", "adascale_gain", "noise_scale", "scale"]

Rule = Literal["linear", "sqrt", "sde", "legw", "beta2", "constant"]


@dataclass(frozen=True)
class Scaled:
    """The settings at the new batch; `float()` of it is the rate. What was not given stays None."""

    lr: float
    kappa: float
    rule: Rule
    betas: tuple[float, ...] | None = None
    eps: float | None = None
    weight_decay: float | None = None
    ema_decay: float | None = None
    warmup_steps: int | None = None

    def __float__(self) -> float:
        return self.lr


def scale(
    reference_lr: float,
    reference_batch_size: int,
    global_batch_size: int,
    rule: Rule = "linear",
    *,
    betas: Sequence[float] | None = None,
    eps: float | None = None,
    weight_decay: float | None = None,
    ema_decay: float | None = None,
    warmup_steps: int | None = None,
) -> Scaled:
    """Return the settings for another global batch; kappa is new batch / reference batch.

    ========== ============ ==========================================================================
    rule       rate         the rest
    ========== ============ ==========================================================================
    linear     kappa        betas, eps, weight decay stay (SGD)
    sqrt       sqrt(kappa)  betas, eps, weight decay stay
    sde        sqrt(kappa)  beta -> 1 - kappa (1 - beta), eps / sqrt(kappa), weight decay x sqrt(kappa) (AdamW)
    legw       sqrt(kappa)  betas, eps, weight decay stay; warm-up epochs x kappa, so its steps stay
    beta2      1            the second beta -> beta ** kappa
    constant   1            nothing (a larger batch in place of a lower rate)
    ========== ============ ==========================================================================

    With every rule, an average of weights keeps its length in samples (decay -> decay ** kappa), and with all but
    legw so does a warm-up (steps / kappa, rounded to the nearest, and at least 1 if there was one).

    Args:
        reference_lr: rate tuned at the reference batch, > 0.
        reference_batch_size: samples per update, over all workers and micro-batches.
        global_batch_size: samples per update to scale to.
        rule: see the table.
        betas: decay rates of the gradient statistics, each in [0, 1).
        eps: the optimizer's epsilon, >= 0.
        weight_decay: >= 0.
        ema_decay: decay of averaged weights per update, in [0, 1].
        warmup_steps: length of the warm-up in updates, >= 0.

    Raises:
        ValueError: when a value is out of its range, the rule is unknown, or kappa makes a beta negative.

    Numerics: the linear rate and the sde betas are computed in exact fractions of the decimals given.

    Example:
        >>> float(scale(0.1, 256, 8192))
        3.2
        >>> scale(1e-3, 256, 512, "sde", betas=(0.9, 0.999)).betas
        (0.8, 0.998)

    Reference: Goyal et al., Accurate, Large Minibatch SGD, 2017 (linear); Malladi et al., On the SDEs and Scaling
    Rules for Adaptive Gradient Algorithms, 2022 (sde); You et al., Large-Batch Training for LSTM and Beyond, 2019
    (legw).
    """
    if rule not in get_args(Rule):
        raise ValueError(f"`rule`: expected one of {', '.join(get_args(Rule))}, got {rule!r}.")
    check_number("reference_lr", reference_lr, low=0.0, open_low=True)
    check_count("reference_batch_size", reference_batch_size, 1)
    check_count("global_batch_size", global_batch_size, 1)
    for name, value in (("eps", eps), ("weight_decay", weight_decay)):
        if value is not None:
            check_number(name, value, low=0.0)
    if ema_decay is not None:
        check_number("ema_decay", ema_decay, low=0.0, high=1.0)
    for index, beta in enumerate(betas or ()):
        check_number(f"betas[{index}]", beta, low=0.0, high=1.0, open_high=True)
    kappa = Fraction(global_batch_size, reference_batch_size)
    root = math.sqrt(kappa)
    on_sde = rule == "sde"
    return Scaled(
        lr=_scaled_lr(reference_lr, kappa, rule),
        kappa=float(kappa),
        rule=rule,
        betas=None if betas is None else _scaled_betas(betas, kappa, rule),
        eps=None if eps is None else (eps / root if on_sde else eps),
        weight_decay=None if weight_decay is None else (weight_decay * root if on_sde else weight_decay),
        ema_decay=None if ema_decay is None else ema_decay ** float(kappa),
        warmup_steps=None if warmup_steps is None else _scaled_warmup(warmup_steps, kappa, rule),
    )


def adascale_gain(gradient_variance: float, squared_norm: float, kappa: float) -> float:
    """Return AdaScale's gain in [1, kappa]: by how much the rate and the clock advance at kappa times the batch.

    ``(variance + squared_norm) / (variance / kappa + squared_norm)``.

    Args:
        gradient_variance: of the gradient at the reference batch, summed over elements; >= 0.
        squared_norm: of the true gradient; >= 0, not 0 together with the variance.
        kappa: new batch / reference batch, >= 1.

    Raises:
        ValueError: when a value is out of its range.

    Example:
        >>> adascale_gain(8.0, 0.0, 8.0), adascale_gain(0.0, 1.0, 8.0)
        (8.0, 1.0)

    Reference: Johnson et al., AdaScale SGD, 2020.
    """
    check_number("gradient_variance", gradient_variance, low=0.0)
    check_number("squared_norm", squared_norm, low=0.0)
    check_number("kappa", kappa, low=1.0)
    if gradient_variance == squared_norm == 0.0:
        raise ValueError("`squared_norm`: expected a value above 0 with a variance of 0, got 0.0.")
    return (gradient_variance + squared_norm) / (gradient_variance / kappa + squared_norm)


def noise_scale(n_samples: int, lr: float, global_batch_size: int, momentum: float = 0.0) -> float:
    """Return the noise of SGD, ``n_samples lr / (global_batch_size (1 - momentum))``.

    Two settings with the same value follow each other: a batch times 10 in place of a rate divided by 10.

    Args:
        n_samples: size of the data set.
        lr: learning rate, >= 0.
        global_batch_size: samples per update.
        momentum: in [0, 1).

    Raises:
        ValueError: when a value is out of its range.

    Example:
        >>> noise_scale(1000, 0.5, 10)
        50.0

    Reference: Smith et al., Don't Decay the Learning Rate, Increase the Batch Size, 2017.
    """
    check_count("n_samples", n_samples, 1)
    check_count("global_batch_size", global_batch_size, 1)
    check_number("lr", lr, low=0.0)
    check_number("momentum", momentum, low=0.0, high=1.0, open_high=True)
    return n_samples * lr / (global_batch_size * (1.0 - momentum))


def _scaled_lr(reference_lr: float, kappa: Fraction, rule: Rule) -> float:
    if rule == "linear":
        return float(Fraction(repr(float(reference_lr))) * kappa)
    if rule in ("sqrt", "sde", "legw"):
        return reference_lr * math.sqrt(kappa)
    return float(reference_lr)


def _scaled_betas(betas: Sequence[float], kappa: Fraction, rule: Rule) -> tuple[float, ...]:
    if rule == "beta2":
        return tuple(beta ** float(kappa) if index == 1 else beta for index, beta in enumerate(betas))
    if rule != "sde":
        return tuple(betas)
    # As decimals, so that 1 - 100 (1 - 0.99) is 0 and not -9e-16.
    exact = [Fraction(repr(float(beta))) for beta in betas]
    scaled = [1 - kappa * (1 - beta) for beta in exact]
    if any(beta < 0 for beta in scaled):
        index = min(range(len(scaled)), key=scaled.__getitem__)
        largest = 1 / (1 - exact[index])
        raise ValueError(
            f"`global_batch_size`: expected at most {float(largest):.6g} times the reference batch with "
            f"betas[{index}]={betas[index]!r} and the rule sde, got {float(kappa):.6g} times, where it would "
            f"become {float(scaled[index]):.6g}. Use a smaller batch, a smaller beta or another rule."
        )
    return tuple(float(beta) for beta in scaled)


def _scaled_warmup(warmup_steps: int, kappa: Fraction, rule: Rule) -> int:
    check_count("warmup_steps", warmup_steps, 0)
    if rule == "legw" or warmup_steps == 0:
        return warmup_steps
    return max(1, math.floor(warmup_steps / kappa + Fraction(1, 2)))
