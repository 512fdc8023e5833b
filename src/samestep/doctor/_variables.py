"""Environment variables that make runs fail, slow or different."""

from __future__ import annotations

import errno
import os
import re
import socket
from collections.abc import Mapping

from samestep import environment
from samestep.doctor._finding import Finding, note, ok, problem
from samestep.errors import GroupError

__all__ = ["cublas", "launcher", "local_workers", "network", "others", "port", "threads"]

_LAUNCHED = "TORCHELASTIC_RUN_ID"  # torchrun sets it in its workers
_CUBLAS_VALUES = (":4096:8", ":16:8")

_WORTH_KNOWING = {
    "CUDA_LAUNCH_BLOCKING": (
        "every kernel is waited for: slow",
        "Unset it when you do not look for an error.",
    ),
    "TORCH_DISTRIBUTED_DEBUG": ("collectives are checked one by one: slow", "Unset it when all works."),
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": ("it changes the precision of matrix products", "Unset it."),
    "NVIDIA_TF32_OVERRIDE": (
        "it changes the precision of matrix products, whatever the program asks",
        "Unset it.",
    ),
    "ATEN_CPU_CAPABILITY": (
        "it picks the CPU kernels, and so the bits",
        "Keep it the same in all your runs.",
    ),
    "ONEDNN_MAX_CPU_ISA": ("it picks the CPU kernels, and so the bits", "Keep it the same in all your runs."),
}
_NCCL_WORTH_KNOWING = {
    "NCCL_ALGO": (
        "it fixes how sums are added, and so the bits",
        "Keep it the same on all workers and runs.",
    ),
    "NCCL_PROTO": ("it fixes how sums are sent", "Keep it the same on all workers and runs."),
    "NCCL_P2P_DISABLE": ("devices talk through the host: slow", "Unset it unless it cures a hang."),
    "NCCL_SHM_DISABLE": ("devices talk through the network: slow", "Unset it unless it cures a hang."),
    "NCCL_IB_DISABLE": ("InfiniBand is not used: slow across machines", "Unset it unless it cures a hang."),
}


def local_workers(environ: Mapping[str, str]) -> int:
    """Return how many workers this machine is to run: as the launcher's variables say, else 2."""
    for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"):
        text = environ.get(name, "")
        if text.isdigit() and int(text) > 0:
            return int(text)
    return 2


def threads(environ: Mapping[str, str], cores: int, workers: int) -> Finding:
    """Compare the threads of each worker with the cores that it has.

    Args:
        environ: the variables.
        cores: that this process may use.
        workers: on this machine.
    """
    name = "threads"
    share = max(1, cores // workers)
    text = environ.get("OMP_NUM_THREADS")
    have = f"{workers} workers on {cores} core{'s' * (cores > 1)}"
    if text is None:
        return note(
            name,
            f"OMP_NUM_THREADS is not set: samestep gives each worker 1 thread, other programs {cores} to each of "
            f"{have}; torchrun sets it for several workers but not for one, which alone changes bits",
            f"Set OMP_NUM_THREADS to 1, or to at most {share}, and keep it.",
        )
    first = text.split(",")[0].strip()
    if not first.isdigit() or int(first) < 1:
        return problem(
            name,
            f"OMP_NUM_THREADS: expected a whole number of at least 1, got {text!r}",
            f"Set it to at most {share}.",
        )
    number = int(first)
    if number > cores:
        return problem(
            name,
            f"OMP_NUM_THREADS={number} threads in each process, but only {cores} core{'s' * (cores > 1)}: threads "
            "wait for each other and steps take many times as long",
            f"Set it to at most {share} for {workers} workers.",
        )
    if number > share:
        return note(
            name,
            f"OMP_NUM_THREADS={number} threads in each of {have}: workers take each other's cores",
            f"Set it to at most {share}, or start fewer workers.",
        )
    return ok(name, f"{number} in each of {have}")


def launcher() -> Finding:
    """Look at the variables by which workers find each other."""
    name, environ = "launcher", os.environ
    try:
        rank, world_size, _ = environment.read_env()
    except GroupError as error:
        return problem(name, error.message, "Unset what a former run left: unset RANK WORLD_SIZE LOCAL_RANK.")
    if world_size == 1:
        return ok(name, "no launcher's variables are set: a plain start is one worker")
    missing = [key for key in ("MASTER_ADDR", "MASTER_PORT") if key not in environ]
    if missing:
        return problem(
            name,
            f"RANK={rank} and WORLD_SIZE={world_size} are set but {' and '.join(missing)} not: workers cannot meet",
            "Start with torchrun or with `samestep train --workers N`, or unset RANK and WORLD_SIZE.",
        )
    text = f"rank {rank} of {world_size}, meeting at {environ['MASTER_ADDR']}:{environ['MASTER_PORT']}"
    if _LAUNCHED in environ:
        return ok(name, f"{text}, started by torchrun")
    return note(
        name,
        f"{text}: a plain start in this shell would wait for {world_size - 1} more",
        "Unset RANK and WORLD_SIZE unless a scheduler set them on purpose.",
    )


def port(environ: Mapping[str, str]) -> Finding:
    """See whether the port at which workers would meet is free."""
    name = "port"
    text = environ.get("MASTER_PORT")
    if text is None:
        return ok(name, "MASTER_PORT is not set: torchrun takes 29500, or a free one with --standalone")
    if not text.isdigit() or not 0 < int(text) < 2**16:
        return problem(
            name,
            f"MASTER_PORT: expected a number from 1 to 65535, got {text!r}",
            "Set another one, or unset it.",
        )
    if _LAUNCHED in environ or environ.get("RANK", "0") != "0":
        return ok(name, f"MASTER_PORT={text}, in use by the run that this process belongs to")
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("", int(text)))
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        why = "another program uses it" if taken else (error.strerror or str(error))
        return problem(
            name, f"MASTER_PORT={text}: {why}", "Choose another one (MASTER_PORT, or torchrun --master-port)."
        )
    return ok(name, f"MASTER_PORT={text} is free")


def network(environ: Mapping[str, str], n_devices: int) -> list[Finding]:
    """Look at the variables that tell gloo and NCCL which network to use."""
    name = "network"
    there = [card for _, card in socket.if_nameindex()]
    checks = {"GLOO_SOCKET_IFNAME": False} | ({"NCCL_SOCKET_IFNAME": True} if n_devices else {})
    found = []
    for key, by_prefix in checks.items():
        missing = _missing(environ.get(key, ""), there, by_prefix)
        if missing:
            found.append(
                problem(
                    name,
                    f"{key}={environ[key]}: there is no network device {', '.join(missing)}; there are "
                    f"{', '.join(there)}",
                    f"Unset {key}, or name one of these.",
                )
            )
    if n_devices:
        if environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING") == "0":
            text = (
                "TORCH_NCCL_ASYNC_ERROR_HANDLING=0: when a worker is lost, the others hang instead of ending"
            )
            found.append(note(name, text, "Unset it."))
        found += _worth_knowing(environ, name, _NCCL_WORTH_KNOWING)
    if found:
        return found
    chosen = [f"{key}={environ[key]}" for key in checks if environ.get(key)]
    return [ok(name, ", ".join(chosen) or "no variable narrows it: local workers use the loopback device")]


def others(environ: Mapping[str, str]) -> list[Finding]:
    """Name what else is set that changes speed or bits."""
    found = _worth_knowing(environ, "variables", _WORTH_KNOWING)
    return found or [ok("variables", "none is set that is known to slow runs down or to change their bits")]


def cublas(environ: Mapping[str, str]) -> Finding:
    """Look at the variable without which cuBLAS may give other bits in every run."""
    key = "CUBLAS_WORKSPACE_CONFIG"
    text = environ.get(key)
    if text in _CUBLAS_VALUES:
        return ok("cuBLAS", f"{key}={text}: matrix products can be deterministic")
    if text is None:
        return note(
            "cuBLAS",
            f"{key} is not set: matrix products may have other bits in every run, and torch refuses them under "
            "deterministic algorithms",
            f"Set {key}=:4096:8 before the start.",
        )
    return problem(
        "cuBLAS",
        f"{key}: expected {' or '.join(_CUBLAS_VALUES)}, got {text!r}: matrix products are not deterministic",
        f"Set {key}=:4096:8.",
    )


def _worth_knowing(
    environ: Mapping[str, str], name: str, known: Mapping[str, tuple[str, str]]
) -> list[Finding]:
    off = ("", "0", "OFF", "INFO") if name == "variables" else ("", "0")
    return [
        note(name, f"{key}={environ[key]}: {meaning}", advice)
        for key, (meaning, advice) in known.items()
        if environ.get(key, "") not in off
    ]


def _missing(value: str, there: list[str], by_prefix: bool) -> list[str]:
    """Return the network devices that a variable names and that are not there."""
    if by_prefix and value.startswith("^"):
        return []
    exact = not by_prefix or value.startswith("=")
    names = [part.strip() for part in re.sub(r"^=", "", value).split(",") if part.strip()]
    return [
        name for name in names if not any(card == name if exact else card.startswith(name) for card in there)
    ]
