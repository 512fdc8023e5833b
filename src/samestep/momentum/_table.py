"""The optimizers whose form is known: what their histories hold, as found by running or reading each of them.

Test used: one fixed gradient sequence, a rate of 0.01 that drops to 0.001, against a run at 0.001 all along. Where
the first step after the drop has the size of the LR-free one, the history does not carry the rate.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from samestep.momentum._forms import _BY_NAME, Form, Group, register
from samestep.momentum._velocity_sgd import VelocitySGD

__all__: list[str] = []

_GRADIENT = Form("gradient", (("momentum_buffer", 0),))
_VELOCITY = Form("velocity", (("momentum_buffer", 1),))
_STATISTICS = Form("statistics")
_CLIPPED = Form(
    "unsafe",
    reason="where its trust ratio is clipped the buffer holds gradient over learning rate, elsewhere the gradient, "
    "and it does not record which",
)


def _set_asgd_eta(optimizer: torch.optim.Optimizer, index: int, old_lr: float, new_lr: float) -> None:
    """Make the next ASGD update use the new rate, not the one stored at the end of the last update."""
    group = optimizer.param_groups[index]
    states = [optimizer.state[param] for param in group["params"] if "eta" in optimizer.state.get(param, {})]
    if not states:
        return
    etas = [cast(Tensor, state["eta"]) for state in states]
    steps = [cast(Tensor, state["step"]) for state in states]
    # eta = lr / (1 + lambd lr step)^alpha, on the device of `step`.
    fresh = torch._foreach_mul(steps, group["lambd"] * new_lr)
    torch._foreach_add_(fresh, 1.0)
    torch._foreach_pow_(fresh, -group["alpha"])
    torch._foreach_mul_(fresh, new_lr)
    torch._foreach_copy_(etas, fresh)


def _rmsprop_tf(optimizer: torch.optim.Optimizer, group: Group) -> Form:
    return _VELOCITY if group.get("lr_in_momentum", True) else _GRADIENT


def _adafactor_with_momentum(optimizer: torch.optim.Optimizer, group: Group) -> Form:
    return Form("velocity", (("exp_avg", 1),)) if group.get("beta1") is not None else _STATISTICS


def _timm_lars(optimizer: torch.optim.Optimizer, group: Group) -> Form:
    return _CLIPPED if group.get("trust_clip") else _GRADIENT


def _apex_larc(optimizer: torch.optim.Optimizer, group: Group) -> Form:
    return _CLIPPED if getattr(optimizer, "clip", True) else _GRADIENT


def _fill_torch() -> None:
    for kind in (torch.optim.SGD, torch.optim.RMSprop, torch.optim.Muon):
        register(kind, {"momentum_buffer": 0})
    normalised: tuple[type, ...] = (
        torch.optim.Adadelta,
        torch.optim.Adafactor,
        torch.optim.Adagrad,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adamax,
        torch.optim.LBFGS,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.SparseAdam,
    )
    for each in normalised:
        register(each, {})
    register(torch.optim.ASGD, {}, also=_set_asgd_eta)
    register(
        torch.optim.Rprop,
        "unsafe",
        refuses="schedule",
        reason="it reads the learning rate once, as its first step size, so that a schedule has no effect",
    )
    register(VelocitySGD, {"momentum_buffer": 1})


# The names below were checked against timm 1.0.31, pytorch_optimizer 4.1.0, dadaptation 3.2, prodigyopt 1.1.2 and
# schedulefree 1.4.1; apex, fairseq, torchlars and transformers by reading.
_LR_FREE = """
timm: AdaBelief AdafactorBigVision Adahessian AdamP AdamWLegacy Adan Adopt Lamb Lion Mars NAdamLegacy NAdamW
timm: NvNovoGrad RAdamLegacy
apex: FusedAdagrad FusedAdam FusedLAMB FusedNovoGrad
pytorch_optimizer: ADOPT AdaBelief AdamP Adan Lamb Lion MARS NovoGrad PNM QHAdam SignSGD SophiaH StableAdamW Tiger
dadaptation: DAdaptLion
"""
# fairseq's NAG is in velocity form but corrects itself by its own record of the old rate, like the gradient form.
_MOMENTUM_BUFFER = """
apex: FusedSGD
fairseq: NAG
pytorch_optimizer: AggMo LARS QHM SGDW
timm: Muon SGDW
torchlars: LARS
"""
_UNSAFE = {
    "the learning rate is inside its average, which it normalises by itself, up to a few per cent": """
timm: LaProp
pytorch_optimizer: LaProp
""",
    "it sums gradients weighted by the learning rate from the first step on (dual averaging)": """
timm: MADGRAD
pytorch_optimizer: MADGRAD
madgrad: MADGRAD
""",
    "it keeps a second copy of the weights that moved with the large learning rate": """
pytorch_optimizer: AccSGD
""",
    "it averages step sizes that contain the learning rate, so that a drop is late on purpose": """
pytorch_optimizer: AdaMod
""",
    "its sum of gradients estimates the step size and must not be rescaled": """
dadaptation: DAdaptAdaGrad DAdaptSGD
pytorch_optimizer: DAdaptAdaGrad DAdaptSGD
""",
}
_REFUSES_DECAY = {
    "its estimate of the step size is weighted by the learning rate, and a decay shifts it": """
prodigyopt: Prodigy
pytorch_optimizer: Prodigy
""",
    "it averages the weights in place of a decay, by the largest learning rate seen; only a warm-up fits": """
schedulefree: AdamWScheduleFree RAdamScheduleFree SGDScheduleFree
pytorch_optimizer: ScheduleFreeAdamW ScheduleFreeRAdam ScheduleFreeSGD
""",
}


def _names(text: str) -> list[str]:
    lines = [line.split(": ") for line in text.strip().splitlines()]
    return [f"{package}.{name}" for package, names in lines for name in names.split()]


def _fill_packages() -> None:
    for name in _names(_LR_FREE):
        register(name, {})
    for name in _names(_MOMENTUM_BUFFER):
        register(name, {"momentum_buffer": 0})
    for package in ("timm", "pytorch_optimizer"):
        register(f"{package}.SGDP", {"momentum": 0})
    for package in ("dadaptation", "pytorch_optimizer"):
        register(f"{package}.DAdaptAdam", {"exp_avg": 1})
        register(f"{package}.DAdaptAdan", {"exp_avg": 1, "exp_avg_diff": 1})
    register("pytorch_optimizer.DeMo", {"delta": 1})
    _BY_NAME["timm.RMSpropTF"] = _rmsprop_tf
    _BY_NAME["timm.Lars"] = _timm_lars
    _BY_NAME["apex.LARC"] = _apex_larc
    for package in ("timm", "transformers", "fairseq"):
        _BY_NAME[f"{package}.Adafactor"] = _adafactor_with_momentum


def _fill_unsafe() -> None:
    for reason, text in _UNSAFE.items():
        for name in _names(text):
            register(name, "unsafe", reason=reason)
    for reason, text in _REFUSES_DECAY.items():
        for name in _names(text):
            register(name, "unsafe", refuses="decay", reason=reason)
    ftrl = "its sum holds weights over the learning rate, so that any change of the rate breaks it"
    register("pytorch_optimizer.FTRL", "unsafe", refuses="schedule", reason=ftrl)


_fill_torch()
_fill_packages()
_fill_unsafe()
