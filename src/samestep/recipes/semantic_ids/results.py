"""The end of the job: codes of all items to the main worker, ids, files, figures, report, manifest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from samestep import report
from samestep.errors import CheckpointError, ReplicaMismatchError
from samestep.fingerprint import hexdigest
from samestep.group import Group
from samestep.recipes.display import Display
from samestep.recipes.folder import RunFolder
from samestep.recipes.outputs import manifest_head, write_model
from samestep.recipes.semantic_ids import ids, outputs, quality
from samestep.recipes.semantic_ids.data import Items, part_bounds
from samestep.recipes.semantic_ids.model import RQVAE
from samestep.recipes.semantic_ids.spec import SemanticIdsSpec
from samestep.reduce import gather_parts

__all__ = ["Learned", "write"]


@dataclass
class Learned:
    """What the job learned.

    Attributes:
        codes: (n_items, n_levels) int64, of this worker's items.
        levels: (n_centroids, dim) codebook of each level.
        offset: (dim,) taken off before level 0, or None.
        relative_errors: after each level, over all items.
        model: the autoencoder, or None for k-means.
    """

    codes: Tensor
    levels: list[Tensor]
    offset: Tensor | None
    relative_errors: list[float]
    model: RQVAE | None


def write(
    spec: SemanticIdsSpec, folder: RunFolder, group: Group, display: Display, items: Items, learned: Learned
) -> None:
    """Write the run's outputs and show the closing table.

    Collective: all ranks of `group`; only the main one writes.
    """
    digests = [hexdigest(level) for level in learned.levels]
    _prove_agreement(digests, group)
    codes = _all_codes(learned.codes, items.n_total, group)
    problem = ""
    if group.is_main:
        try:
            figures = _write_files(spec, folder, items, learned, codes)
            folder.finish(_manifest(spec, group, items, learned, digests))
            report.write(folder.path)
            display.table("semantic ids", _closing(figures, folder, group))
        except OSError as error:
            problem = (
                f"{folder.path}: cannot be written to ({error.strerror}). Free space there, then --resume."
            )
    group.agree(not problem, problem, CheckpointError)


def _prove_agreement(digests: list[str], group: Group) -> None:
    everywhere = group.gather_text(" ".join(digests))
    if len(set(everywhere)) > 1:
        raise ReplicaMismatchError(f"codebooks differ between workers: {everywhere}", name="codebooks")


def _all_codes(mine: Tensor, n_total: int, group: Group) -> NDArray[np.int64]:
    """Return the codes of all items, in the order of the files."""
    bounds = [part_bounds(n_total, rank, group.world_size) for rank in range(group.world_size)]
    padded = torch.zeros(max(stop - first for first, stop in bounds), mine.shape[1], dtype=torch.int64)
    padded[: len(mine)] = mine
    parts = gather_parts(padded, group)
    return torch.cat([part[: stop - first] for part, (first, stop) in zip(parts, bounds)]).numpy()


def _write_files(
    spec: SemanticIdsSpec, folder: RunFolder, items: Items, learned: Learned, codes: NDArray[np.int64]
) -> dict[str, Any]:
    digits = ids.resolve(codes, items.all_ids, rule=spec.clash_rule)
    facts = {"kind": spec.kind, "seed": spec.seed, "clash_rule": spec.clash_rule}
    outputs.write_codebooks(
        folder.path / "codebooks.safetensors", learned.levels, offset=learned.offset, metadata=facts
    )
    if learned.model is not None:
        write_model(folder, learned.model)
    outputs.write_parquet(
        folder.path / "semantic_ids.parquet", items.all_ids, codes, digits,
        n_centroids_per_level=spec.n_centroids if "offsets" in spec.also_write else None, metadata=facts,
    )  # fmt: skip
    if "npy" in spec.also_write:
        outputs.write_npy(folder.path / "semantic_ids.npy", codes, digits)
    if "lcrec" in spec.also_write:
        outputs.write_lcrec_json(folder.path / "semantic_ids.lcrec.json", items.all_ids, codes, digits)
    figures = quality.measure(codes, spec.n_centroids, learned.relative_errors, digits)
    outputs.write_json(folder.path / "quality.json", figures)
    return figures


def _manifest(
    spec: SemanticIdsSpec, group: Group, items: Items, learned: Learned, digests: list[str]
) -> dict[str, Any]:
    return {
        **manifest_head(spec, group),
        "kind": spec.kind,
        "steps": _steps(spec),
        "items": items.n_total,
        "dim": items.dim,
        "sample_size": spec.sample_size,
        "n_centroids": spec.n_centroids,
        "sources": list(items.sources),
        "codebooks": digests,
        "replicas": "agree",
    }


def _steps(spec: SemanticIdsSpec) -> int:
    """Return the updates that were applied: rvq takes its batches on every level, k-means takes none."""
    return spec.steps * {"rqvae": 1, "rvq": len(spec.n_centroids), "rkmeans": 0}[spec.kind]


def _closing(figures: dict[str, Any], folder: RunFolder, group: Group) -> list[tuple[str, Any]]:
    levels = figures["levels"]
    resolved = figures["after_resolving"]
    return [
        ("items", f"{figures['items']:,}"),
        ("distinct ids", f"{figures['distinct_ids']:,} ({1 - figures['collision_rate']:.2%})"),
        ("collisions after resolving", resolved["collisions"]),
        ("codes used per level", ", ".join(f"{level['used']}/{level['n_centroids']}" for level in levels)),
        ("perplexity per level", ", ".join(f"{level['perplexity']:.1f}" for level in levels)),
        ("reconstruction error per level", ", ".join(f"{level['relative_error']:.4f}" for level in levels)),
        ("replica agreement", _agreement(group.world_size)),
        (
            "files",
            f"{folder.path}/  (semantic_ids.parquet, codebooks.safetensors, quality.json, report.html)",
        ),
    ]


def _agreement(world_size: int) -> str:
    return f"{world_size} workers agree bit for bit" if world_size > 1 else "one worker: nothing to compare"
