"""Kinds without a network: the same codebooks for any number of workers, new items, settings that do not fit."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from typer.testing import CliRunner

from samestep import codebooks
from samestep.cli import app
from samestep.pooling import alone
from samestep.recipes.semantic_ids import ids, outputs, quality, residues, rvq
from samestep.recipes.semantic_ids.data import read_embeddings
from samestep.recipes.semantic_ids.spec import SemanticIdsSpec

ESCO = Path(__file__).parents[2] / "shared" / "data" / "esco_skills_minilm.npz"


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


def follow(path, n_batches=None, **settings):
    spec = SemanticIdsSpec(data=str(path), kind="rvq", n_centroids=[8, 4], global_batch_size=64, **settings)
    items = read_embeddings(path)
    follower = rvq.Follower(spec, items, alone)
    for _ in range(follower.total if n_batches is None else n_batches):
        follower.advance()
    return items, follower


def test_errors_are_those_of_the_decoded_rows(path):
    items, follower = follow(path, steps=6)
    books = follower.books()
    codes = codebooks.encode(items.embeddings, books)
    rows = items.embeddings.astype(np.float64)
    spread = ((rows - rows.mean(0)) ** 2).sum()
    left = [((rows - codebooks.decode(codes[:, :k], books).numpy()) ** 2).sum() / spread for k in (1, 2)]
    assert residues.of_books(items, codes, books, alone) == pytest.approx(left, rel=1e-5)
    assert left[1] < left[0] < 0.2


@pytest.mark.parametrize("n_batches", [0, 3, 6, 11])
def test_a_follower_goes_on_from_its_state(path, n_batches):
    whole, parted = follow(path, steps=6)[1], follow(path, n_batches, steps=6)[1]
    later = follow(path, 0, steps=6)[1]
    later.load_state_dict(parted.state_dict())
    while later.step < later.total:
        later.advance()
    for ours, theirs in zip(later.books().levels, whole.books().levels, strict=True):
        assert torch.equal(ours, theirs)


def test_a_stopped_run_goes_on_from_its_checkpoint_on_other_workers(path, tmp_path):
    settings = [
        f"data={path}",
        "kind=rvq",
        "n_centroids=[8,4]",
        "steps=6",
        "global_batch_size=64",
        "mode=exact",
    ]
    words = [word for setting in settings for word in ("--set", setting)]
    assert call("train", "semantic-ids", *words, "--out", tmp_path / "whole").exit_code == 0
    run = tmp_path / "run"
    done = call("train", "semantic-ids", *words, "--out", run, "--stop-after", 8)
    assert "stopped after 8 of 12 steps; go on with --resume" in done.stderr
    assert [folder.name for folder in (run / "checkpoints").iterdir()] == ["step-0000000008"]
    assert not (run / "manifest.json").exists()
    assert call("train", "semantic-ids", *words, "--out", run, "--resume", "--workers", 2).exit_code == 0
    for name in ("codebooks.safetensors", "semantic_ids.parquet", "quality.json"):
        assert (run / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name
    assert json.loads((run / "manifest.json").read_text())["steps"] == 12


def test_the_start_is_not_thrown_away_by_the_first_batch(path):
    """With counts from zero it was: a code that one row of the batch chose became that row."""
    items, follower = follow(path, 1, steps=6, decay=0.5)
    start = follow(path, 0, steps=6)[1]
    table = start._start(0, rvq._Left(items, start.books()))["codebook"]
    counts = follower._running["counts"]
    assert float(counts.sum()) == pytest.approx(64)
    # Half the way at most, for a code whose share of the batch is what it was in the sample.
    moved = (follower._running["codebook"] - table).norm(dim=1)
    assert float(moved.max()) < 2.0


@pytest.mark.slow
@pytest.mark.skipif(not ESCO.exists(), reason="the ESCO embeddings are not beside the checkout")
@pytest.mark.parametrize("kind", ["rkmeans", "rvq"])
def test_real_embeddings_reach_the_bars(tmp_path, kind):
    spec = SemanticIdsSpec(data=str(ESCO), kind=kind)
    items = read_embeddings(ESCO)
    if kind == "rkmeans":
        books = codebooks.fit(items.embeddings, spec.n_centroids)
    else:
        follower = rvq.Follower(spec, items, alone)
        while follower.step < follower.total:
            follower.advance()
        books = follower.books()
    codes = codebooks.encode(items.embeddings, books)
    errors = residues.of_books(items, codes, books, alone)
    figures = quality.measure(codes.numpy(), spec.n_centroids, errors, ids.resolve(codes, items.all_ids))
    assert [level["used"] for level in figures["levels"]] == [256, 256, 256]
    assert min(level["perplexity"] for level in figures["levels"]) >= 200
    assert figures["collision_rate"] < 0.05
    assert figures["after_resolving"]["collisions"] == 0
    # Of scikit-learn 1.9.1 and faiss 1.15.1, fed all rows, 25 iterations per level: 0.4900 and 0.5174.
    assert errors[-1] <= 0.49


@pytest.mark.slow
@pytest.mark.skipif(not ESCO.exists(), reason="the ESCO embeddings are not beside the checkout")
def test_two_workers_give_real_embeddings_the_ids_of_one(tmp_path):
    words = [word for setting in (f"data={ESCO}", "kind=rvq", "steps=8") for word in ("--set", setting)]
    for workers in (1, 2):
        done = call("train", "semantic-ids", *words, "--workers", workers, "--out", tmp_path / f"w{workers}")
        assert done.exit_code == 0, done.output
    for name in ("codebooks.safetensors", "semantic_ids.parquet", "quality.json"):
        assert (tmp_path / "w1" / name).read_bytes() == (tmp_path / "w2" / name).read_bytes(), name


@pytest.mark.parametrize("name", ["balanced", "normalize_residuals"])
def test_options_of_k_means_are_refused_elsewhere(name):
    with pytest.raises(ValueError, match=f"`{name}`: expected false with kind rvq"):
        SemanticIdsSpec(data="x.npy", kind="rvq", **{name: True})


def test_settings_that_cannot_work_are_refused():
    with pytest.raises(ValueError, match="`steps`: expected at least 1 batch"):
        SemanticIdsSpec(data="x.npy", kind="rvq", steps=0)
    with pytest.raises(
        ValueError, match="`sample_size`: expected at least 8, the most codes of a level, got 7"
    ):
        SemanticIdsSpec(data="x.npy", kind="rkmeans", n_centroids=[4, 8], sample_size=7)


def test_a_sample_is_fitted_all_is_encoded_and_offsets_come_on_request(path, tmp_path):
    settings = [f"data={path}", "kind=rkmeans", "n_centroids=[8,4]", "sample_size=50", "also_write=[offsets]"]
    words = [word for setting in settings for word in ("--set", setting)]
    for workers in (1, 2):
        done = call("train", "semantic-ids", *words, "--workers", workers, "--out", tmp_path / f"w{workers}")
        assert done.exit_code == 0, done.output
    one, table = tmp_path / "w1", pq.read_table(tmp_path / "w1" / "semantic_ids.parquet")
    assert (one / "codebooks.safetensors").read_bytes() == (
        tmp_path / "w2/codebooks.safetensors"
    ).read_bytes()
    expected = codebooks.fit(read_embeddings(path).embeddings, [8, 4], sample_size=50)
    found = outputs.read_codebooks(one / "codebooks.safetensors")
    assert all(torch.equal(ours, level) for ours, level in zip(found.levels, expected.levels, strict=True))
    assert table.num_rows == 300
    shifted = [[first, 8 + second] for first, second in table["codes"].to_pylist()]
    assert table["offset_codes"].to_pylist() == shifted
    assert json.loads((one / "manifest.json").read_text())["sample_size"] == 50
    assert call("encode", one, path, "--out", tmp_path / "new.parquet").exit_code == 0
    assert pq.read_table(tmp_path / "new.parquet")["offset_codes"].to_pylist() == shifted


def test_other_dimensions_are_refused_with_both_named(path, tmp_path):
    words = [
        "--set",
        f"data={path}",
        "--set",
        "kind=rkmeans",
        "--set",
        "n_centroids=[4]",
        "--out",
        tmp_path / "run",
    ]
    assert call("train", "semantic-ids", *words).exit_code == 0
    assert "offset_codes" not in pq.read_table(tmp_path / "run" / "semantic_ids.parquet").column_names
    np.save(tmp_path / "other.npy", np.ones((3, 5), dtype=np.float32))
    done = call("encode", tmp_path / "run", tmp_path / "other.npy", "--out", tmp_path / "new.parquet")
    assert done.exit_code == 2
    assert "expected 6 dimensions, as the run has, got 5" in done.stderr
    assert not (tmp_path / "new.parquet").exists()
