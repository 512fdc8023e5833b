"""Ids for new items from a finished run, without moving an id that is already published."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from samestep import codebooks
from samestep.errors import SpecError
from samestep.recipes.folder import RunFolder
from samestep.recipes.semantic_ids import ids, outputs
from samestep.recipes.semantic_ids.data import Items, read_embeddings
from samestep.recipes.semantic_ids.model import RQVAE
from samestep.recipes.semantic_ids.spec import SemanticIdsSpec
from samestep.recipes.spec import load

__all__ = ["Encoded", "encode_file"]


class Encoded(NamedTuple):
    """What `encode_file` did.

    Attributes:
        n_items: items of the file.
        n_known: of these, items that the run had published; they keep their ids.
        n_changed: of these, items whose embedding gives other codes now; they keep their ids all the same.
    """

    n_items: int
    n_known: int
    n_changed: int


def encode_file(run: Path, embeddings: str | Sequence[str], out: Path) -> Encoded:
    """Write the ids of a file's items as Parquet or ``.npy``, by the ending of `out`.

    Args:
        run: folder of a finished semantic-ids run.
        embeddings: file, glob or several of these, of the dimensions that the run was trained on.
        out: file to write, ``.parquet`` or ``.npy``; replaced if it is there.

    Raises:
        SpecError: the run is unfinished or damaged, the embeddings do not fit it, or `out` has another ending.
    """
    if out.suffix not in (".parquet", ".npy"):
        raise SpecError(f"--out {out}: expected a name ending in .parquet or .npy.", name="out")
    if not RunFolder(run).is_complete:
        raise SpecError(
            f"{run}: expected a finished run, got no manifest.json there. "
            "Finish it with `samestep train --resume`.",
            name="run",
        )
    spec = load(SemanticIdsSpec, run / "config.yaml", ['data=""'])
    items = read_embeddings(embeddings, id_column=spec.id_column, embedding_column=spec.embedding_column)
    codes = _codes(run, spec, items)
    published = outputs.read_parquet(run / "semantic_ids.parquet")
    extension = ids.extend(published, codes, items.all_ids, rule=spec.clash_rule)
    if out.suffix == ".npy":
        outputs.write_npy(out, extension.codes, extension.unique_digit)
    else:
        outputs.write_parquet(
            out,
            items.all_ids,
            extension.codes,
            extension.unique_digit,
            n_centroids_per_level=spec.n_centroids if "offsets" in spec.also_write else None,
        )
    return Encoded(items.n_total, int(np.sum(extension.known)), int(np.sum(extension.changed)))


def _codes(run: Path, spec: SemanticIdsSpec, items: Items) -> NDArray[np.int64]:
    book = outputs.read_codebooks(run / "codebooks.safetensors")
    model = _model(run, spec) if spec.kind == "rqvae" else None
    dim = model.dim if model is not None else book.levels[0].shape[1]
    if items.dim != dim:
        raise SpecError(
            f"embeddings: expected {dim} dimensions, as the run has, got {items.dim}.", name="embeddings"
        )
    if model is not None:
        return _as_array(model.encode(items.embeddings))
    offset = torch.zeros(dim) if book.offset is None else book.offset
    books = codebooks.Codebooks(tuple(book.levels), offset, spec.normalize_residuals)
    return _as_array(codebooks.encode(items.embeddings, books))


def _model(run: Path, spec: SemanticIdsSpec) -> RQVAE:
    import safetensors.torch

    path = run / "model.safetensors"
    try:
        tensors = safetensors.torch.load(path.read_bytes())
        model = RQVAE(len(tensors["center"]), spec.n_centroids, spec.latent_dim, spec.hidden, spec.beta)
        model.load_state_dict({name: tensors[name] for name in model.state_dict()})
    except (OSError, KeyError, RuntimeError, ValueError) as error:
        raise SpecError(
            f"{path}: missing or damaged ({error}). Train again.", name="model.safetensors"
        ) from None
    return model


def _as_array(codes: Any) -> NDArray[np.int64]:
    array: NDArray[np.int64] = codes.numpy()
    return array
