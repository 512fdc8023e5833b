"""Open one embedding file of a known format, without reading its matrix yet.

=================  =====================================  ==========================================
suffix             holds                                  reading some rows costs
=================  =====================================  ==========================================
``.npy``           one matrix                             those rows (memory-mapped)
``.npz``           arrays by name                         those rows, unpacking those before
``.parquet``       an id column and a list column         the row groups that hold those rows
``.safetensors``   tensors by name                        those rows (memory-mapped)
``.pt``, ``.pth``  a tensor, or a dict with tensors       those rows (memory-mapped where torch can)
=================  =====================================  ==========================================

A file that holds one matrix and nothing else has the row number as its ids. In any other file the ids and the
matrix are found by name, or by being the only candidates. Pickled objects are refused, as loading them runs code.
"""

from __future__ import annotations

import glob
import pickle
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch

from samestep.errors import SpecError
from samestep.recipes.semantic_ids.archive import Member
from samestep.recipes.semantic_ids.source import (
    EMBEDDING_NAMES,
    ID_NAMES,
    Source,
    check_shape,
    checked_ids,
    pick_name,
    refuse,
    refuse_dtype,
)
from samestep.recipes.semantic_ids.tables import open_table

__all__ = ["SUFFIXES", "PathLike", "find_files", "open_source"]

PathLike = str | Path

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# What the libraries raise on a damaged file; pyarrow's own errors are subclasses of these.
_DAMAGED = (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile, zlib.error)


def open_source(path: Path, id_column: str | None = None, embedding_column: str | None = None) -> Source:
    """Return the opened file; its matrix is not read yet where the format allows that.

    Args:
        path: a file with one of `SUFFIXES`.
        id_column: column or key of the ids; None to find it.
        embedding_column: column or key of the matrix; None to find it.

    Returns:
        The file as a `Source`.

    Raises:
        SpecError: wrong suffix, damaged file, no such column, a matrix that is not two-dimensional, empty or not
            of floats, ids that are neither integers nor strings or not as many as rows; names the file.
    """
    opener = SUFFIXES.get(path.suffix)
    if opener is None:
        refuse(
            path,
            f"expected a name that ends in one of {', '.join(SUFFIXES)}, got {path.suffix!r}. Convert it",
        )
    try:
        return opener(path, id_column, embedding_column)
    except SpecError:
        raise
    except _DAMAGED as error:
        _refuse_damaged(path, error)


def find_files(paths: PathLike | Sequence[PathLike]) -> list[Path]:
    """Return the files that are meant by paths and globs.

    Args:
        paths: a file, a glob (its matches in sorted order), or several of these.

    Returns:
        At least one path; every file once, in the order given.

    Raises:
        SpecError: a file or a match is missing, a folder is given, or a file is named twice.
    """
    found: list[Path] = []
    for given in [paths] if isinstance(paths, str | Path) else paths:
        path = Path(given).expanduser()
        if path.is_dir():
            refuse(
                given,
                f"expected a file or a glob, got a folder. Give {str(path / '*.parquet')!r} or the like",
            )
        if path.exists():
            found.append(path)
        elif glob.has_magic(str(path)):
            matches = sorted(Path(match) for match in glob.glob(str(path), recursive=True))
            if not matches:
                refuse(
                    given,
                    "expected at least one file that matches, got none. Check the folder and the pattern",
                )
            found.extend(match for match in matches if match.is_file())
        else:
            refuse(
                given, f"expected a file, got none of that name in {path.parent.resolve()}. Check the path"
            )
    if not found:
        refuse("paths", "expected at least one file, got none. Name the embedding files")
    seen: set[Path] = set()
    for path in found:
        if path.resolve() in seen:
            refuse(path, "expected every file once, got it twice. Name it once, and let globs not overlap")
        seen.add(path.resolve())
    return found


def _open_npy(path: Path, id_column: str | None, embedding_column: str | None) -> Source:
    _refuse_names(path, id_column, embedding_column)
    # Small files are read whole, because an empty array cannot be mapped.
    mapped = path.stat().st_size > 4096
    return _from_matrix(path, np.load(path, mmap_mode="r" if mapped else None, allow_pickle=False))


def _open_npz(path: Path, id_column: str | None, embedding_column: str | None) -> Source:
    if not zipfile.is_zipfile(path):
        raise ValueError("it is no zip archive")
    with np.load(path, allow_pickle=False) as archive:
        names = list(archive.files)
    arrays = {name: Member(path, name) for name in names}
    return _from_named(path, arrays, id_column, embedding_column)


def _open_safetensors(path: Path, id_column: str | None, embedding_column: str | None) -> Source:
    import safetensors

    try:
        with safetensors.safe_open(path, framework="pt") as file:
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except safetensors.SafetensorError as error:
        _refuse_damaged(path, error)
    return _from_named(path, arrays, id_column, embedding_column)


def _open_torch(path: Path, id_column: str | None, embedding_column: str | None) -> Source:
    try:
        content = torch.load(str(path), map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError:
        # torch's own text advises to load without the safeguard, which is no advice for a file of others.
        refuse(
            path,
            "expected a torch file with tensors, lists and dicts only, got other content. Save plain tensors",
        )
    except Exception as error:  # torch runs its unpickler on any bytes, and that can fail in any way
        _refuse_damaged(path, error)
    if isinstance(content, torch.Tensor):
        _refuse_names(path, id_column, embedding_column)
        return _from_matrix(path, content)
    if not isinstance(content, Mapping):
        refuse(
            path, f"expected a tensor or a dict with tensors, got {type(content).__name__}. Save one of these"
        )
    arrays = {
        str(name): value if isinstance(value, torch.Tensor) else np.asarray(value)
        for name, value in content.items()
        if isinstance(value, torch.Tensor | list | tuple)
    }
    return _from_named(path, arrays, id_column, embedding_column)


SUFFIXES: dict[str, Callable[[Path, str | None, str | None], Source]] = {
    ".npy": _open_npy,
    ".npz": _open_npz,
    ".parquet": open_table,
    ".safetensors": _open_safetensors,
    ".pt": _open_torch,
    ".pth": _open_torch,
}


def _from_named(
    path: Path, arrays: Mapping[str, Any], id_column: str | None, embedding_column: str | None
) -> Source:
    names = list(arrays)
    matrices = [name for name in names if arrays[name].ndim == 2]
    vectors = [name for name in names if arrays[name].ndim == 1]
    try:
        matrix_name = pick_name("embedding_column", embedding_column, matrices, EMBEDDING_NAMES, names)
        id_name = None
        if id_column is not None or len(names) > 1:
            id_name = pick_name("id_column", id_column, vectors, ID_NAMES, names)
    except ValueError as error:
        refuse(path, str(error))
    return _from_matrix(path, arrays[matrix_name], matrix_name, id_name, arrays.get(id_name or ""))


def _from_matrix(
    path: Path, matrix: Any, name: str | None = None, id_name: str | None = None, ids: Any = None
) -> Source:
    note = ""
    if isinstance(matrix, torch.Tensor):
        if matrix.dtype not in _FLOATS:
            refuse_dtype(path, str(matrix.dtype).removeprefix("torch."))
        if matrix.dtype == torch.bfloat16:
            # Every bfloat16 number is a float32 number, so nothing is rounded.
            matrix, note = matrix.float(), "bfloat16 read as float32"
        matrix = matrix.detach().numpy()
    if matrix.dtype.name not in ("float16", "float32", "float64"):
        refuse_dtype(path, str(matrix.dtype))
    check_shape(path, matrix.shape)
    n_rows, dim = matrix.shape
    found = None if ids is None else checked_ids(path, id_name, np.asarray(ids), n_rows)
    return Source(
        path=path,
        n_rows=n_rows,
        dim=dim,
        dtype=matrix.dtype.name,
        id_name=id_name,
        embedding_name=name,
        read_ids=None if found is None else lambda: found,
        read_rows=lambda start, stop: matrix[start:stop],
        note=note,
    )


def _refuse_names(path: Path, id_column: str | None, embedding_column: str | None) -> None:
    for what, wanted in (("id_column", id_column), ("embedding_column", embedding_column)):
        if wanted is not None:
            refuse(
                path,
                f"`{what}`: expected none, as the file is one matrix without names, got {wanted!r}. Leave it out",
            )


def _refuse_damaged(path: Path, error: Exception) -> NoReturn:
    reason = str(error).strip().split("\n")[0].rstrip(".") or type(error).__name__
    if "Object arrays" in reason:
        refuse(path, "expected plain arrays, got Python objects. Save ids as text, with ids.astype(str)")
    refuse(path, f"expected a readable {path.suffix} file, got: {reason}. Write the file again")
