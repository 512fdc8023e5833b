"""The arithmetic of a digest: bytes times fixed keys, again and again, until one row is left."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["check", "digests", "mix", "on_device", "words_of"]

_ROW_BYTES = 4160
_COLUMNS = 16
_MIX = 0x1E3779B97F4A7C15  # odd multipliers below 2**63; products wrap around modulo 2**64 on every device
_REMIX = 0x3F58476D1CE4E5B9


def check(t: object, name: str = "t") -> None:
    got = type(t).__name__
    if isinstance(t, Tensor):
        if t.layout is torch.strided and not t.is_quantized and t.device.type != "meta":
            return
        got = f"layout {t.layout}, dtype {t.dtype}, device {t.device}"
    raise TypeError(f"`{name}`: expected a dense tensor with storage, got {got}. Pass its dense parts.")


def digests(tensors: Sequence[Tensor]) -> Tensor:
    """Return the digests (n, 2) of tensors that share a device; small ones share their kernel launches."""
    with torch.no_grad():
        sums = _row_sums([_bytes(t) for t in tensors])
        while any(len(rows) > 1 for rows in sums):
            again = [i for i, rows in enumerate(sums) if len(rows) > 1]
            for i, rows in zip(again, _row_sums([sums[i].view(torch.uint8).view(-1) for i in again])):
                sums[i] = rows
        last = torch.cat(sums).long()  # (n, 16)
        lanes = mix(last[:, None, :] ^ _lanes(last.device)).sum(2)  # (n, 2)
        headers = [words_of(f"{t.dtype} {tuple(t.shape)}".encode()) for t in tensors]
        return mix(lanes ^ on_device(last.device, headers))


def _bytes(t: Tensor) -> Tensor:
    """Return the values of a tensor as its bytes, in logical order; a view where that is possible."""
    check(t)
    flat = t.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
    # Matrix units of accelerators want aligned rows; a slice may begin anywhere.
    return flat.clone() if flat.data_ptr() % 16 else flat


def _row_sums(parts: Sequence[Tensor]) -> list[Tensor]:
    """Return, for each part (n_bytes,), its keyed row sums (n_rows, 16) int32; at least one row each."""
    cuts = [len(part) // _ROW_BYTES * _ROW_BYTES for part in parts]
    ragged = [i for i, part in enumerate(parts) if cuts[i] < len(part) or not len(part)]
    device = parts[0].device
    padded = torch.zeros(len(ragged), _ROW_BYTES, dtype=torch.uint8, device=device)
    for row, i in zip(padded, ragged):
        row[: len(parts[i]) - cuts[i]] = parts[i][cuts[i] :]
    sums: list[list[Tensor]] = [
        [_product(part[:cut])] if cut else [] for part, cut in zip(parts, cuts, strict=True)
    ]
    if ragged:
        for i, row in zip(ragged, _product(padded.view(-1))):
            sums[i].append(row[None])
    return [rows[0] if len(rows) == 1 else torch.cat(rows) for rows in sums]


def _product(flat: Tensor) -> Tensor:
    """Return rows x keys: (n_rows * 4160,) bytes -> (n_rows, 16) int32, exact whichever way it is computed."""
    rows = flat.view(torch.int8).view(-1, _ROW_BYTES)
    if _has_integer_product(rows.device):
        return _integer_product(rows)
    # Sums stay below 4160 * 128 * 63 < 2**26, so that float64 holds them exactly in any order.
    keys = _keys(rows.device).double()
    blocks = [rows[at : at + 128].double() @ keys for at in range(0, len(rows), 128)]
    return torch.cat(blocks).int()


def _integer_product(rows: Tensor) -> Tensor:
    n_rows = len(rows)
    if rows.is_cuda and n_rows < 32:  # its kernels refuse 16 rows and fewer
        rows = torch.cat([rows, rows.new_zeros(32 - n_rows, _ROW_BYTES)])
    return torch._int_mm(rows, _keys(rows.device))[:n_rows]


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
    names = [[b"lane %d column %d" % (lane, i) for i in range(_COLUMNS)] for lane in (0, 1)]
    return on_device(device, [[words_of(name)[0] for name in row] for row in names])


def mix(words: Tensor) -> Tensor:
    """Return int64 words with their bits well mixed; different words stay different."""
    words = words * _MIX
    words = (words ^ ((words >> 32) & 0xFFFFFFFF)) * _REMIX
    return words ^ ((words >> 29) & 0x7FFFFFFFF)


def words_of(text: bytes) -> list[int]:
    digest = hashlib.blake2b(text, digest_size=16).digest()
    return [int.from_bytes(digest[at : at + 8], "little", signed=True) for at in (0, 8)]


def on_device(device: torch.device, words: object) -> Tensor:
    return torch.tensor(words, dtype=torch.int64).to(device, non_blocking=True)
