"""What a worker's surroundings say: torchrun's variables, the device to compute on, and what decides the bits.

The same sums in the same order have the same bits only on like machines: `fingerprint` writes down what is known to
change them, and `differences` says in words where two of them part.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping

import torch

from samestep.errors import GroupError, SpecError

__all__ = ["backends", "differences", "fingerprint", "pick_device", "read_env"]

# Seen to change bits: ATEN_CPU_CAPABILITY and the oneDNN limits pick other kernels; the CUDA ones other algorithms.
_VARIABLES = (
    "ATEN_CPU_CAPABILITY",
    "ONEDNN_MAX_CPU_ISA",
    "DNNL_MAX_CPU_ISA",
    "MKL_CBWR",
    "CUBLAS_WORKSPACE_CONFIG",
)
_WORDS = {
    "threads": "intra-op threads",
    "torch": "torch version",
    "torch_commit": "torch build",
    "cpu_capability": "instruction set of torch's CPU kernels",
    "machine": "processor architecture",
    "onednn": "oneDNN",
    "device": "device",
    "deterministic": "deterministic algorithms",
    "matmul_precision": "precision of float32 matrix products",
}


def backends() -> dict[str, bool] | None:
    """Return by which ways this build of torch lets workers talk; None when it was built without any.

    Example:
        >>> sorted(backends() or {})
        ['gloo', 'nccl']
    """
    ways = torch.distributed
    if not ways.is_available():
        return None
    return {"gloo": ways.is_gloo_available(), "nccl": ways.is_nccl_available()}


def pick_device(device: str, local_rank: int) -> torch.device:
    """Return the device of a worker.

    Args:
        device: "auto", "cpu" or "cuda".
        local_rank: number of the worker on its machine.

    Raises:
        SpecError: unknown name, no CUDA device, or more workers than CUDA devices on this machine.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise SpecError(f"`device`: expected 'auto', 'cpu' or 'cuda', got {device!r}.", name="device")
    if device == "cpu" or (device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    n_devices = torch.cuda.device_count()
    if local_rank >= n_devices:
        raise SpecError(
            f"`device`: expected a CUDA device for local rank {local_rank}, got {n_devices} on this machine. "
            "Start fewer workers or use device='cpu'.",
            name="device",
            rank=local_rank,
        )
    return torch.device("cuda", local_rank)


def read_env() -> tuple[int, int, int]:
    """Return (rank, world size, local rank) as torchrun's variables give them; (0, 1, 0) where none is set.

    Raises:
        GroupError: when only some are set, or they contradict each other.
    """
    names = ("RANK", "WORLD_SIZE")
    given = [name for name in names if name in os.environ]
    if not given:
        return 0, 1, 0
    if len(given) == 1:
        missing = next(name for name in names if name not in os.environ)
        raise GroupError(
            f"environment: {given[0]} is set but {missing} is not. Start with torchrun or with "
            "`samestep train --workers N`, or unset it for a single process."
        )
    values = {}
    for name in (*names, "LOCAL_RANK"):
        text = os.environ.get(name, "0")
        if not text.isdigit():
            raise GroupError(f"environment: {name}: expected a whole number, got {text!r}.")
        values[name] = int(text)
    if not values["RANK"] < values["WORLD_SIZE"]:
        raise GroupError(
            f"environment: RANK={values['RANK']} does not fit WORLD_SIZE={values['WORLD_SIZE']}: "
            "ranks go from 0 to WORLD_SIZE - 1."
        )
    return values["RANK"], values["WORLD_SIZE"], values["LOCAL_RANK"]


def fingerprint(device: torch.device | str = "cpu") -> dict[str, str]:
    """Return what decides the bits of this process's results, beside the program: names and values.

    Two processes whose fingerprints are equal are expected to give the same bits for the same work. It is small and
    goes into checkpoints and traces. The number of workers is not part of it.

    Args:
        device: that computes, such as `group.device`.

    Returns:
        Plain texts by name, as JSON data.

    Example:
        >>> fingerprint()["device"]
        'cpu'
    """
    where = torch.device(device)
    found = {
        "threads": str(torch.get_num_threads()),
        "torch": str(torch.__version__),  # of a class of its own, which is no plain text
        "torch_commit": str(torch.version.git_version),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "machine": platform.machine(),
        "mkl": str(torch.backends.mkl.is_available()),  # type: ignore[no-untyped-call]
        "onednn": str(torch.backends.mkldnn.enabled and "mkldnn" in torch.__config__.show().lower()),
        "deterministic": str(torch.are_deterministic_algorithms_enabled()),
        "matmul_precision": torch.get_float32_matmul_precision(),
        "device": where.type,
    }
    if where.type == "cuda":
        found |= {
            "device": torch.cuda.get_device_name(where),
            "cuda": str(torch.version.cuda),
            "cudnn": str(torch.backends.cudnn.version()),  # type: ignore[no-untyped-call]
            "cudnn_deterministic": str(torch.backends.cudnn.deterministic),
            "cudnn_benchmark": str(torch.backends.cudnn.benchmark),
            "cudnn_tf32": str(torch.backends.cudnn.allow_tf32),
        }
    return found | {name: os.environ[name] for name in _VARIABLES if name in os.environ}


def differences(
    a: Mapping[str, str], b: Mapping[str, str], sides: tuple[str, str] = ("then", "now")
) -> list[str]:
    """Return in words how two fingerprints differ; empty when they do not.

    Args:
        a: from `fingerprint`, of the run before.
        b: of now.
        sides: what to call the two.

    Returns:
        One line for each name whose value differs or is missing on one side, `a`'s value first.

    Example:
        >>> differences({"threads": "1", "device": "cpu"}, {"threads": "2", "device": "cpu"})
        ['intra-op threads: 1 then, 2 now']
    """
    return [
        f"{_WORDS.get(name, name)}: {a.get(name, 'unset')} {sides[0]}, {b.get(name, 'unset')} {sides[1]}"
        for name in [*a, *(name for name in b if name not in a)]
        if a.get(name) != b.get(name)
    ]
