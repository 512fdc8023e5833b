"""What a script calls to leave a trace. No collective, no change of any number; nothing at all when off."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from samestep import environment, fingerprint
from samestep.compare import _bounds, _sketch
from samestep.compare._trace import FORMAT_VERSION, log_file, tensor_file
from samestep.environment import read_env
from samestep.errors import SpecError
from samestep.group import Group

__all__ = ["STEPS_VARIABLE", "TRACE_VARIABLE", "Recorder", "record"]

TRACE_VARIABLE = "SAMESTEP_TRACE"
STEPS_VARIABLE = "SAMESTEP_TRACE_STEPS"

_current: dict[str, Recorder] = {}

Whole = Literal["powers", "all", "none"] | Collection[int]


def record(
    step: int,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    loss: float | Tensor | None = None,
    samples: Tensor | None = None,
    group: Group | None = None,
    compute_dtype: torch.dtype | None = None,
) -> None:
    """Add this worker's state after `step` updates to the trace that ``samestep compare`` asked for, if it did.

    Call it once before the first step, ``record(0, model, optimizer)``, and then after every ``optimizer.step()``
    before gradients are cleared, on every worker. Without ``SAMESTEP_TRACE`` in the environment it returns at once.

    Args:
        step: updates applied so far.
        model: plain, or wrapped by DDP.
        optimizer: its state and options are recorded too.
        loss: of the step, on this worker or over all; serves to see that it moves.
        samples: (n_samples, ...) what this worker's samples of this step are: their ids, or the batch itself.
        group: the workers; torchrun's variables when None.
        compute_dtype: the least exact dtype that the forward computes in, such as bfloat16 under autocast; that of
            the parameters when None.

    Raises:
        SpecError: when the folder already holds a trace, or a step is not after the last one.
        SystemExit: with code 0, after the last step that ``samestep compare --steps`` asked for.
    """
    folder = os.environ.get(TRACE_VARIABLE)
    if not folder:
        return
    if folder not in _current:
        limit = os.environ.get(STEPS_VARIABLE)
        _current[folder] = Recorder(
            folder, group=group, compute_dtype=compute_dtype, last_step=int(limit) if limit else None
        )
    _current[folder].record(step, model, optimizer, loss=loss, samples=samples)


class Recorder:
    """Writes the trace of one worker into a folder.

    Args:
        folder: of the trace; the same for all workers of the run.
        group: the workers; torchrun's variables when None.
        whole: at which steps the tensors themselves are kept beside their digests: 0, 1, 2, 4, 8, ... ("powers"),
            "all", "none", or some steps.
        compute_dtype: as for `record`.
        last_step: leave the process with code 0 after this one; None goes on.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        group: Group | None = None,
        whole: Whole = "powers",
        compute_dtype: torch.dtype | None = None,
        last_step: int | None = None,
    ) -> None:
        self.folder = Path(folder)
        self.rank, self.world_size = (group.rank, group.world_size) if group is not None else read_env()[:2]
        self._whole, self._dtype, self._last_step = whole, compute_dtype, last_step
        self._step: int | None = None
        self._kinds: dict[str, Any] = {}
        self._largest = 0.0  # norm of the model's gradient so far
        self._local: list[Tensor] = []

    def record(
        self,
        step: int,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        *,
        loss: float | Tensor | None = None,
        samples: Tensor | None = None,
    ) -> None:
        """Add this worker's state after `step` updates; arguments as for the function `record`.

        Raises:
            SpecError: when the folder already holds a trace, or a step is not after the last one.
            SystemExit: with code 0, after `last_step`.
        """
        model = _unwrapped(model)
        if self._step is None:
            self._open(model)
        elif step <= self._step:
            raise SpecError(
                f"`step`: expected more than {self._step}, the last one recorded, got {step}. Pass the number of "
                "updates applied, once each.",
                name="step",
                rank=self.rank,
            )
        self._step = step
        with torch.no_grad():
            tensors = _tensors(model, optimizer)
            line = self._line(step, tensors, model, optimizer)
        line["loss"] = _number(loss)
        line["samples"] = None if samples is None else _rows(samples)
        line["local"], self._local = _sum(self._local), []
        if line["whole"]:
            self._keep(step, tensors)
        self._write(line)
        if self._last_step is not None and step >= self._last_step:
            raise SystemExit(0)

    def _open(self, model: nn.Module) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        if log_file(self.folder, self.rank).exists():
            raise SpecError(
                f"`trace`: expected a new folder, got {self.folder}, which holds a trace. Remove it or name "
                "another one.",
                name="trace",
                rank=self.rank,
            )
        trainable = [p for p in model.parameters() if p.requires_grad]
        if self._dtype is None:
            floats = [p.dtype for p in model.parameters() if p.is_floating_point()]
            self._dtype = max(floats, key=_bounds.unit_roundoff, default=torch.float32)
        if trainable:
            # The smallest will do: what is asked is only whether all workers have the same one.
            watched = min(trainable, key=lambda p: p.numel())
            watched.register_hook(_watch(self._local_append))  # type: ignore[no-untyped-call]
        self._write(
            {
                "format_version": FORMAT_VERSION,
                "rank": self.rank,
                "world_size": self.world_size,
                "compute_dtype": _name(self._dtype),
                "environment": environment.fingerprint(next((p.device for p in model.parameters()), "cpu")),
            }
        )

    def _local_append(self, digest: Tensor) -> None:
        self._local.append(digest)

    def _line(
        self, step: int, tensors: dict[str, Tensor], model: nn.Module, optimizer: Optimizer | None
    ) -> dict[str, Any]:
        digests = fingerprint.state(tensors)
        sketches = dict(zip(tensors, _sketch.sketches(list(tensors.values())), strict=True))
        kinds = {key: [_name(t.dtype), list(t.shape)] for key, t in tensors.items() if key not in self._kinds}
        self._kinds |= kinds
        norms = [row[_sketch.WIDTH] for key, row in sketches.items() if key.startswith("gradients/")]
        self._largest = max(self._largest, float(sum(n * n for n in norms) ** 0.5))
        groups = [] if optimizer is None else optimizer.param_groups
        return {
            "step": step,
            "lr": max((float(g["lr"]) for g in groups), default=0.0),
            "momentum": max((_momentum(g) for g in groups), default=0.0),
            "spread": self._spread(model, optimizer),
            "whole": _is_whole(step, self._whole),
            "tensors": {key: [digests[key], _sketch.encode(sketches[key])] for key in tensors},
            "kinds": kinds,
        }

    def _spread(self, model: nn.Module, optimizer: Optimizer | None) -> dict[str, float]:
        """Return how far rounding of the gradients may move an update that is divided by its own size."""
        found: dict[str, float] = {}
        if optimizer is None or not self._largest or self._dtype is None:
            return found
        shapes = [tuple(p.shape) for p in model.parameters()]
        noise = _bounds.rounding(self._dtype, shapes, None) * self._largest
        names = {id(p): name for name, p in model.named_parameters()}
        for group in optimizer.param_groups:
            for p in group["params"]:
                state = optimizer.state.get(p, {})
                square = state.get("exp_avg_sq", state.get("square_avg"))
                if not isinstance(square, Tensor) or square.numel() == 0:
                    continue
                beta, count = float(group.get("betas", (0, 0.0))[1]), float(state.get("step", 1))
                scale = (square.double() / (1 - beta**count)).sqrt_().add_(group.get("eps", 0.0))
                moved = (2 * noise / scale).clamp_(max=2.0).norm()
                found[names.get(id(p), "")] = float(group["lr"]) * float(moved)
        return found

    def _keep(self, step: int, tensors: dict[str, Tensor]) -> None:
        from safetensors.torch import save_file

        whole = {key: t.detach().cpu().contiguous().clone() for key, t in tensors.items()}
        save_file(whole, tensor_file(self.folder, self.rank, step))

    def _write(self, line: dict[str, Any]) -> None:
        with open(log_file(self.folder, self.rank), "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def _tensors(model: nn.Module, optimizer: Optimizer | None) -> dict[str, Tensor]:
    """Return all that is recorded, by ``<phase>/<name>``."""
    found = {f"gradients/{name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    state = {} if optimizer is None else fingerprint.named_state(optimizer, model)
    for name, value in state.items():
        kind, rest = name.split(".", 1)
        found[f"{'options' if kind == 'options' else 'optimizer'}/{rest}"] = value
    found |= {f"parameters/{name}": p for name, p in model.named_parameters()}
    found |= {f"buffers/{name}": b for name, b in model.named_buffers()}
    return {key: t.detach() for key, t in found.items()}


def _unwrapped(model: nn.Module) -> nn.Module:
    from torch.nn.parallel import DistributedDataParallel

    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):  # torch.compile
            model = inner
        else:
            return model


def _watch(append: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
    def digest(grad: Tensor) -> None:
        append(fingerprint.tensor(grad))

    return digest


def _sum(digests: list[Tensor]) -> str | None:
    if not digests:
        return None
    return "".join(f"{word & (2**64 - 1):016x}" for word in torch.stack(digests).sum(0).tolist())


def _rows(samples: Tensor) -> list[str]:
    """Return a digest of each sample; equal samples have equal ones, on any worker and in any batch."""
    rows = samples.detach().cpu().contiguous()
    rows = rows.reshape(rows.shape[0], -1) if rows.numel() else rows.reshape(rows.shape[0], 0)
    raw = rows.view(torch.uint8).reshape(rows.shape[0], -1).numpy() if rows.numel() else None
    if raw is None:
        return [""] * rows.shape[0]
    return [hashlib.blake2b(row.tobytes(), digest_size=8).hexdigest() for row in raw]


def _is_whole(step: int, whole: Whole) -> bool:
    if isinstance(whole, str):
        return whole == "all" or (whole == "powers" and step & (step - 1) == 0)
    return step in whole


def _momentum(group: dict[str, Any]) -> float:
    betas = group.get("betas")
    return float(betas[0]) if betas else float(group.get("momentum", 0.0))


def _number(loss: float | Tensor | None) -> float | None:
    return None if loss is None else float(loss.detach() if isinstance(loss, Tensor) else loss)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
