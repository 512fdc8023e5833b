"""Kinds without a network: the same codebooks for any number of workers, new items, settings that do not fit."""

from __future__ import annotations

import numpy as np
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from samestep import codebooks
from samestep.cli import app
from samestep.pooling import alone
from samestep.recipes.semantic_ids import rvq
from samestep.recipes.semantic_ids.data import read_embeddings
from samestep.recipes.semantic_ids.spec import SemanticIdsSpec


@pytest.fixture
def path(tmp_path):
    draw = np.random.default_rng(0)
    centers = draw.normal(size=(8, 6)) * 10
    rows = centers[draw.integers(8, size=300)] + draw.normal(size=(300, 6))
    np.savez(tmp_path / "items.npz", ids=np.arange(300) + 5, embeddings=rows.astype(np.float32))
    return tmp_path / "items.npz"


def call(*words):
    return CliRunner().invoke(app, [*map(str, words)])


SLOW = [["kind=rkmeans"], ["kind=rkmeans", "balanced=true"], ["kind=rkmeans", "normalize_residuals=true"]]


@pytest.mark.parametrize(
    "kind", [["kind=rvq"], *(pytest.param(kind, marks=pytest.mark.slow) for kind in SLOW)], ids=" ".join
)
def test_one_and_two_workers_then_encode(path, tmp_path, kind):
    settings = [f"data={path}", "n_centroids=[8,4]", "steps=6", "global_batch_size=64", "mode=exact", *kind]
    words = [word for setting in settings for word in ("--set", setting)]
    for workers in (1, 2):
        done = call("train", "semantic-ids", *words, "--workers", workers, "--out", tmp_path / f"w{workers}")
        assert done.exit_code == 0, done.output
    one, two = tmp_path / "w1", tmp_path / "w2"
    assert (one / "codebooks.safetensors").read_bytes() == (two / "codebooks.safetensors").read_bytes()
    assert (one / "quality.json").read_bytes() == (two / "quality.json").read_bytes()
    table = pq.read_table(one / "semantic_ids.parquet")
    assert table.equals(pq.read_table(two / "semantic_ids.parquet"))
    assert call("encode", one, path, "--out", tmp_path / "again.parquet").exit_code == 0
    said = call("encode", one, path, "--out", tmp_path / "b.parquet").output
    assert "with other codes" not in said
    assert pq.read_table(tmp_path / "again.parquet")["codes"].equals(table["codes"])


def test_errors_are_those_of_the_decoded_rows(path):
    spec = SemanticIdsSpec(data=str(path), kind="rvq", n_centroids=[8, 4], steps=6, global_batch_size=64)
    items = read_embeddings(path)
    books = rvq.fit(spec, items, alone)
    codes = codebooks.encode(items.embeddings, books)
    rows = items.embeddings.astype(np.float64)
    spread = ((rows - rows.mean(0)) ** 2).sum()
    left = [((rows - codebooks.decode(codes[:, :k], books).numpy()) ** 2).sum() / spread for k in (1, 2)]
    assert rvq.relative_errors(items, codes, books, alone) == pytest.approx(left, rel=1e-5)
    assert left[1] < left[0] < 0.2


@pytest.mark.parametrize("name", ["balanced", "normalize_residuals"])
def test_options_of_k_means_are_refused_elsewhere(name):
    with pytest.raises(ValueError, match=f"`{name}`: expected false with kind rvq"):
        SemanticIdsSpec(data="x.npy", kind="rvq", **{name: True})
