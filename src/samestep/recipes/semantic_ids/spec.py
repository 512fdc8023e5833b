"""Settings of the `semantic-ids` recipe."""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from samestep.recipes.spec import RunSpec

__all__ = ["SemanticIdsSpec", "Spec"]


class SemanticIdsSpec(RunSpec):
    """Embeddings in, residual codebooks and one semantic id per item out."""

    recipe: ClassVar[str] = "semantic-ids"
    paths: ClassVar[frozenset[str]] = frozenset({"data"})

    data: str | list[str] = Field(
        description="embeddings: .npy, .npz, .parquet, .safetensors or .pt; globs, or a list"
    )
    id_column: str | None = Field(
        None, description="column or key of the ids; found when there is one candidate"
    )
    embedding_column: str | None = Field(None, description="column or key of the matrix; found likewise")
    kind: Literal["rqvae", "rkmeans", "rvq"] = Field(
        "rqvae", description="autoencoder with codebooks, k-means per level, or codebooks that follow batches"
    )
    n_centroids: list[int] = Field([256, 256, 256], min_length=1, description="codes of each level")
    kmeans_iterations: int = Field(25, ge=1, description="passes of k-means per level, at most")
    balanced: bool = Field(False, description="rkmeans: cells of equal size while fitting")
    normalize_residuals: bool = Field(False, description="rkmeans: divide each level's input by its norm")
    clash_rule: Literal["digit", "count"] = Field(
        "digit", description="how items with the same codes are told apart"
    )

    sample_size: int | None = Field(
        None, ge=1, description="rows, drawn evenly, for k-means to fit on; all by default (rvq: 32 per code)"
    )

    also_write: list[Literal["npy", "lcrec", "offsets"]] = Field(
        [],
        description="semantic_ids.npy, .lcrec.json; column offset_codes for one vocabulary over all levels",
    )

    steps: int = Field(400, ge=0, description="applied updates (rqvae), batches per level (rvq)")
    decay: float = Field(0.95, ge=0, lt=1, description="rvq: what a batch leaves of the averages before it")
    dead_share: float = Field(
        0.03, ge=0, lt=1, description="rvq: of a code's fair share of rows, below which it starts anew"
    )
    latent_dim: int = Field(64, ge=1, description="columns of the latents")
    hidden: list[int] = Field([512], description="widths of the encoder's layers; the decoder mirrors them")
    beta: float = Field(0.15, ge=0, description="weight of the commitment error")
    optimizer: Literal["adamw", "sgd"] = "adamw"
    lr: float = Field(3e-3, gt=0, description="base learning rate")
    momentum: float = Field(0.9, ge=0, lt=1, description="of sgd")
    weight_decay: float = Field(0.01, ge=0)
    warmup_steps: int = Field(100, ge=0, description="linear warm-up")
    clip_norm: float | None = Field(1.0, gt=0, description="bound on the norm of the mean gradient")

    @model_validator(mode="after")
    def _can_be_made(self) -> Self:
        if any(n < 1 for n in self.n_centroids):
            raise ValueError(f"`n_centroids`: expected at least 1 code per level, got {self.n_centroids}")
        if self.kind == "rvq" and not self.steps:
            raise ValueError("`steps`: expected at least 1 batch per level with kind rvq, got 0")
        if self.sample_size is not None and self.sample_size < max(self.n_centroids):
            raise ValueError(
                f"`sample_size`: expected at least {max(self.n_centroids)}, the most codes of a level, "
                f"got {self.sample_size}"
            )
        for name in ("balanced", "normalize_residuals"):
            if getattr(self, name) and self.kind != "rkmeans":
                raise ValueError(
                    f"`{name}`: expected false with kind {self.kind}, got true; it is for rkmeans"
                )
        if self.kind == "rqvae" and self.warmup_steps > self.steps:
            raise ValueError(
                f"`warmup_steps`: expected at most steps={self.steps}, got {self.warmup_steps}; shorten the warm-up"
            )
        return self


Spec = SemanticIdsSpec
