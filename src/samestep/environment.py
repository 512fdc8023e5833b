"""What a worker's surroundings say: torchrun's variables, and the device to compute on."""

from __future__ import annotations

import os

import torch

from samestep.errors import GroupError, SpecError

__all__ = ["pick_device", "read_env"]


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
