"""The compiled kernels of k-means.

Nothing depends on them but speed: `_search.py` and `_update.py` come to the same bits without.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from samestep.native import load

__all__ = ["Kernels", "address", "kernels", "zeros"]

_POINTER, _NUMBER = ctypes.c_void_p, ctypes.c_int64
_ARGUMENTS: dict[str, tuple[list[Any], Any]] = {
    "ss_has_tiles": ([], ctypes.c_int32),
    "ss_row_bytes": ([], _NUMBER),
    "ss_scratch": ([_NUMBER], _NUMBER),
    "ss_pack": ([_POINTER, _NUMBER, _NUMBER, _NUMBER, _POINTER, _POINTER], None),
    "ss_search": (
        [_POINTER, _NUMBER, _NUMBER, _NUMBER, _POINTER, _NUMBER, *[_POINTER] * 6],
        None,
    ),
    "ss_scan": ([_POINTER, _NUMBER, _NUMBER, _NUMBER, _POINTER, _POINTER], None),
    "ss_settle": ([_POINTER, _NUMBER, _NUMBER, _POINTER, _NUMBER, *[_POINTER] * 3], None),
    "ss_move": ([_POINTER, _NUMBER, _NUMBER, *[_POINTER] * 3, ctypes.c_double, _POINTER], _NUMBER),
}


class Kernels:
    """The loaded library; each C function is an attribute of the same name.

    Attributes:
        has_tiles: whether the processor multiplies bfloat16 matrices in tiles.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        for name, (arguments, result) in _ARGUMENTS.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, result
        self._library = library
        self.has_tiles = bool(library.ss_has_tiles())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._library, name)


def kernels() -> Kernels | None:
    """Return the kernels, built now if need be, or None where there are none."""
    return None if os.environ.get("SAMESTEP_NATIVE", "1") == "0" else _loaded()


def address(data: Tensor | npt.NDArray[Any] | None) -> int:
    """Return where contiguous data begin, 0 for None."""
    if data is None:
        return 0
    return data.data_ptr() if isinstance(data, Tensor) else int(data.ctypes.data)


@cache
def _loaded() -> Kernels | None:
    # Contraction would change the rounding of sums that must come out as without the kernels. A cache may be shared
    # by machines of several kinds, so the name of the library hangs on what this processor can do.
    flags = ("-march=native", "-ffp-contract=off", "-fno-math-errno", f"-DPROCESSOR={_processor()}")
    library = load("kmeans", Path(__file__).with_name("native.c").read_text(), flags)
    return None if library is None else Kernels(library)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    known = next((line for line in lines if line.startswith(("flags", "Features"))), " ".join(os.uname()))
    return "p" + hashlib.sha256(known.encode()).hexdigest()[:12]


def zeros(n_bytes: int) -> npt.NDArray[np.uint8]:
    """Return room for a kernel to work in."""
    return np.zeros(max(n_bytes, 1), dtype=np.uint8)
