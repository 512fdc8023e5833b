"""What this machine and this build of torch have."""

from __future__ import annotations

import os
import platform
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch

import samestep
from samestep import environment
from samestep.doctor._finding import Finding, note, ok, problem

__all__ = ["Devices", "backends", "bits", "build", "count_cores", "devices", "folder_is_writable", "versions"]

_LOW_BYTES = 2**30


@dataclass(frozen=True)
class Devices:
    """How many CUDA devices this process can use, and what to say of devices."""

    count: int
    finding: Finding


def versions() -> Finding:
    """Say what is installed."""
    return ok(
        "versions",
        f"samestep {samestep.__version__}, torch {torch.__version__}, Python {platform.python_version()}, "
        f"{platform.system()} on {platform.machine()}",
    )


def build() -> Finding:
    """Say for what torch was built."""
    if torch.version.cuda:
        kind = f"CUDA {torch.version.cuda}"
    elif torch.version.hip:
        kind = f"ROCm {torch.version.hip}"
    else:
        kind = "CPU only"
    capability = torch.backends.cpu.get_cpu_capability()
    text = f"built for {kind}, CPU kernels {capability}, source {str(torch.version.git_version)[:10]}"
    if torch.version.debug:
        return note("torch build", f"{text}, a debug build", "It is slow; install a release build.")
    return ok("torch build", text)


def backends(n_devices: int) -> Finding:
    """Say by which ways workers can talk; gloo is needed, and NCCL beside it for several CUDA devices."""
    there = environment.backends()
    if there is None:
        return problem(
            "backends",
            "this torch was built without torch.distributed: one worker is all that it can run",
            "Install torch from its own packages.",
        )
    text = ", ".join(name for name, found in there.items() if found) or "none"
    if not there["gloo"]:
        return problem(
            "backends",
            f"gloo is missing (there: {text}); decisions between workers need it",
            "Install a torch that was built with gloo.",
        )
    if n_devices and not there["nccl"]:
        return problem(
            "backends",
            f"NCCL is missing (there: {text}), but there are CUDA devices",
            "Install a torch that was built with NCCL, or train with device='cpu'.",
        )
    return ok("backends", text)


def devices() -> Devices:
    """Count cores and CUDA devices; what a driver complains of becomes a note."""
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        names = [torch.cuda.get_device_name(i) for i in range(count)]
    cores = count_cores()
    text = f"{cores} CPU core{'s' * (cores > 1)} for this process, "
    if count:
        kinds = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
        return Devices(count, ok("devices", f"{text}{kinds}"))
    text += "no CUDA device"
    if not (torch.version.cuda or torch.version.hip):
        return Devices(0, ok("devices", text))
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        hidden = f"{text}: CUDA_VISIBLE_DEVICES={os.environ['CUDA_VISIBLE_DEVICES']!r} hides them all"
        return Devices(0, note("devices", hidden, "Unset it to use them."))
    said = f" ({str(heard[0].message).splitlines()[0]})" if heard else ""
    advice = "This torch is built for them: if there should be one, see whether its driver is installed."
    return Devices(0, note("devices", f"{text}{said}", advice))


def bits(device: str) -> Finding:
    """Say what a rerun must keep for the same bits here."""
    found = environment.fingerprint(device)
    names = ("threads", "cpu_capability", "machine", "mkl", "onednn", "device", "matmul_precision")
    facts = ", ".join(f"{name} {found[name]}" for name in names)
    if device == "cpu":
        return ok(
            "same bits",
            "a rerun here has the same bits, and so has any number of workers in mode exact; another machine has "
            f"them where this is the same: {facts}, and the torch build",
        )
    if found["deterministic"] == "True" and found["cudnn_benchmark"] == "False":
        return ok(
            "same bits", f"deterministic algorithms are on; the rest to keep: {facts}, and the torch build"
        )
    return note(
        "same bits",
        f"on CUDA, torch may take algorithms whose bits change from run to run; to keep besides: {facts}",
        "For the same bits call torch.use_deterministic_algorithms(True) and leave cudnn.benchmark off.",
    )


def folder_is_writable(folder: Path) -> Finding:
    """Write a file into the folder of the runs and into that of temporary files, and remove it again."""
    name = "folder"
    for place, advice in (
        (folder, "Change to a folder of yours, or name one with --out."),
        (None, "Set TMPDIR to a folder of yours: workers meet at a file there."),
    ):
        try:
            where = str(folder.resolve()) if place is not None else tempfile.gettempdir()
            with tempfile.TemporaryFile(dir=where, prefix=".samestep-doctor-") as file:
                file.write(b"samestep")
                file.flush()
        except OSError as error:
            what = f"`{folder}`" if place is not None else "the folder of temporary files"
            return problem(name, f"{what} cannot be written: {error.strerror or error}", advice)
    disk = os.statvfs(folder)
    free = disk.f_bavail * disk.f_frsize
    text = f"`{folder}` can be written, {free / 2**30:,.1f} GiB free"
    if free < _LOW_BYTES:
        return note(name, text, "Make room: a checkpoint that does not fit ends the run.")
    return ok(name, text)


def count_cores() -> int:
    """Return how many CPU cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
