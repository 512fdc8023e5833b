"""The arithmetic of a digest: bytes times fixed keys, again and again, until one row is left."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from samestep.fingerprint._native import Kernel, kernel

__all__ = ["check", "digests", "labels", "mix"]

_ROW_BYTES = 4160
_COLUMNS = 16
_SMALL_BYTES = 32 * _ROW_BYTES  # below this, one product for many parts is faster than one each
_PACK = 256  # parts in one product: bounds the copy that it needs to some 34 MB
_MIX = 0x1E3779B97F4A7C15  # odd multipliers below 2**63; products wrap around modulo 2**64 on every device
_REMIX = 0x3F58476D1CE4E5B9


def check(t: object, name: str = "t") -> None:
    # Called for every tensor of every audit: `t.device` alone would cost more than all that is asked here.
    if isinstance(t, Tensor) and t.layout is torch.strided and not t.is_quantized and not t.is_meta:
        return
    got = type(t).__name__
    if isinstance(t, Tensor):
        got = f"layout {t.layout}, dtype {t.dtype}, device {t.device}"
    raise TypeError(f"`{name}`: expected a dense tensor with storage, got {got}. Pass its dense parts.")


def digests(tensors: Sequence[Tensor]) -> Tensor:
    """Return the digests (n, 2) of tensors that share a device and passed `check`."""
    with torch.no_grad():
        native = _kernel() if tensors and tensors[0].is_cpu else None
        if native is not None:
            # Asked in place: for small tensors a call each costs as much as the digest.
            ready = [
                t if t.is_contiguous() and not t.is_neg() and not t.is_conj() else _plain(t) for t in tensors
            ]
            return native(ready, [_header(t.dtype, t.shape) for t in tensors])
        sums = _row_sums([_bytes(t) for t in tensors])
        return _folded(sums, [_header(t.dtype, t.shape) for t in tensors])


def _folded(sums: list[Tensor], headers: Sequence[tuple[int, int]]) -> Tensor:
    """Return digests (n, 2) from the first row sums (n_rows, 16) of each part."""
    while again := [i for i, rows in enumerate(sums) if rows.shape[0] > 1]:
        for i, rows in zip(again, _row_sums([sums[i].view(torch.uint8).view(-1) for i in again])):
            sums[i] = rows
    last = torch.cat(sums).long()  # (n, 16)
    lanes = mix(last[:, None, :] ^ _lanes(last.device)).sum(2)  # (n, 2)
    return mix(lanes ^ on_device(last.device, headers))


def _plain(t: Tensor) -> Tensor:
    """Return a tensor whose memory holds the values in logical order; itself where that is so."""
    if t.is_contiguous() and not t.is_neg() and not t.is_conj():
        return t
    return t.detach().resolve_conj().resolve_neg().contiguous()


def _bytes(t: Tensor) -> Tensor:
    """Return the values of a tensor as its bytes, in logical order; a view where that is possible."""
    flat = _plain(t).detach().view(-1).view(torch.uint8)
    # Matrix units of accelerators want aligned rows; a slice may begin anywhere.
    return flat.clone() if flat.data_ptr() % 16 else flat


def _row_sums(parts: Sequence[Tensor]) -> list[Tensor]:
    """Return, for each part (n_bytes,), its keyed row sums (n_rows, 16) int32; at least one row each."""
    sums: list[list[Tensor]] = [[] for _ in parts]
    small: list[tuple[int, Tensor, int]] = []  # part number, its bytes outside whole rows, their number
    for i, part in enumerate(parts):
        n_bytes = part.numel()
        n_whole = n_bytes // _ROW_BYTES if n_bytes >= _SMALL_BYTES else 0
        if n_whole:
            sums[i].append(_product(part[: n_whole * _ROW_BYTES]))
        if not n_whole or n_bytes > n_whole * _ROW_BYTES:
            rest = part[n_whole * _ROW_BYTES :] if n_whole else part
            small.append((i, rest, n_bytes - n_whole * _ROW_BYTES))
    for at in range(0, len(small), _PACK):
        group = small[at : at + _PACK]
        for (i, _, _), rows in zip(group, _packed_product(group), strict=True):
            sums[i].append(rows)
    return [rows[0] if len(rows) == 1 else torch.cat(rows) for rows in sums]


def _packed_product(small: Sequence[tuple[int, Tensor, int]]) -> Sequence[Tensor]:
    """Return the row sums of many small parts from one product, each part padded with zeros to whole rows."""
    n_rows = [max(1, -(-n_bytes // _ROW_BYTES)) for _, _, n_bytes in small]
    zeros = small[0][1].new_zeros(_ROW_BYTES)
    pieces: list[Tensor] = []
    for (_, part, n_bytes), n in zip(small, n_rows, strict=True):
        pieces += [part, zeros[: n * _ROW_BYTES - n_bytes]]
    return torch.split_with_sizes(_product(torch.cat(pieces)), n_rows)


def _product(flat: Tensor) -> Tensor:
    """Return rows x keys: (n_rows * 4160,) bytes -> (n_rows, 16) int32, exact whichever way it is computed."""
    rows = flat.view(torch.int8).view(-1, _ROW_BYTES)
    if _has_integer_product(rows.device):
        return _integer_product(rows)
    # Sums stay below 4160 * 128 * 63 < 2**26, so that float64 holds them exactly in any order.
    keys = _keys(rows.device).double()
    blocks = [rows[at : at + 128].double() @ keys for at in range(0, rows.shape[0], 128)]
    return torch.cat(blocks).int()


def _integer_product(rows: Tensor) -> Tensor:
    n_rows = rows.shape[0]
    if rows.is_cuda and n_rows < 32:  # its kernels refuse 16 rows and fewer
        rows = torch.cat([rows, rows.new_zeros(32 - n_rows, _ROW_BYTES)])
    return torch._int_mm(rows, _keys(rows.device))[:n_rows]


@functools.cache
def _kernel() -> Kernel | None:
    """Return the C kernel where it works and agrees with torch."""
    found = kernel(_keys(torch.device("cpu")), _lanes(torch.device("cpu")))
    if found is None:
        return None
    raw = hashlib.shake_256(b"samestep kernel").digest(70 * _ROW_BYTES)
    probe = [torch.frombuffer(bytearray(raw[:n]), dtype=torch.uint8) for n in (1, 4161, 70 * _ROW_BYTES)]
    headers = [(0, 0)] * len(probe)
    rows = [_product(torch.cat([part, part.new_zeros(-len(part) % _ROW_BYTES)])) for part in probe]
    return found if torch.equal(found(probe, headers), _folded(rows, headers)) else None


@functools.cache
def _has_integer_product(device: torch.device) -> bool:
    """Tell whether torch's int8 product works and is exact here; some builds lack it, some chips saturate."""
    raw = hashlib.shake_256(b"samestep probe").digest(30 * _ROW_BYTES)
    # 30 rows that look random, and two where every product has its largest size.
    extremes = b"\x80" * _ROW_BYTES + b"\x7f" * _ROW_BYTES
    rows = torch.frombuffer(bytearray(raw + extremes), dtype=torch.int8).view(-1, _ROW_BYTES)
    expected = (rows.double() @ _keys(torch.device("cpu")).double()).int()
    try:
        return torch.equal(_integer_product(rows.to(device)).cpu(), expected)
    except (RuntimeError, AttributeError, NotImplementedError):
        return False


@functools.cache
def _keys(device: torch.device) -> Tensor:
    """Return the keys (4160, 16) int8: -63..63 without 0, laid out by column.

    7 bits, because products of 8 by 8 bits saturate on x86 chips without VNNI.
    """
    raw = hashlib.shake_256(b"samestep fingerprint 1").digest(_ROW_BYTES * _COLUMNS)
    keys = bytes((1 + byte % 63) if byte < 128 else (255 - byte % 63) for byte in raw)
    table = torch.frombuffer(bytearray(keys), dtype=torch.int8).view(_COLUMNS, _ROW_BYTES)
    return table.to(device).t()


@functools.cache
def _lanes(device: torch.device) -> Tensor:
    """Return two sets of 16 words (2, 16), one for each word of a digest."""
    names = [[f"lane {lane} column {i}" for i in range(_COLUMNS)] for lane in (0, 1)]
    return on_device(device, [[words_of(name)[0] for name in row] for row in names])


def mix(words: Tensor) -> Tensor:
    """Return int64 words with their bits well mixed; different words stay different."""
    words = words * _MIX
    words = (words ^ ((words >> 32) & 0xFFFFFFFF)) * _REMIX
    return words ^ ((words >> 29) & 0x7FFFFFFFF)


@functools.lru_cache(1 << 16)
def words_of(text: str) -> tuple[int, int]:
    digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
    first, second = (int.from_bytes(digest[at : at + 8], "little", signed=True) for at in (0, 8))
    return first, second


@functools.lru_cache(1 << 16)
def _header(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[int, int]:
    return words_of(f"{dtype} {tuple(shape)}")


@functools.lru_cache(64)
def labels(device: torch.device, names: tuple[str, ...]) -> Tensor:
    """Return the words (n, 2) of names; the same tensor each time, to be read only."""
    return on_device(device, [words_of(name) for name in names])


def on_device(device: torch.device, words: object) -> Tensor:
    return torch.tensor(words, dtype=torch.int64).to(device, non_blocking=True)
