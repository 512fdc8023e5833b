"""`samestep verify`: the same bits on one and two workers in exact mode; a difference is named."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from samestep.cli import app

SMALL = [
    "n_centroids=[8,8]",
    "latent_dim=4",
    "hidden=[16]",
    "global_batch_size=32",
    "shards=4",
    "warmup_steps=2",
]


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "items.npy"
    np.save(path, np.random.default_rng(0).normal(size=(200, 6)).astype(np.float32))
    return [word for text in (*SMALL, f"data={path}") for word in ("--set", text)]


def verify(*arguments):
    return CliRunner().invoke(app, ["verify", *map(str, arguments)])


@pytest.mark.slow
def test_exact_mode_is_verified(settings):
    done = verify("semantic-ids", *settings, "--set", "mode=exact", "--workers", 2)
    assert done.exit_code == 0, done.output
    assert "1 and 2 workers: the same bits" in done.output


@pytest.mark.slow
def test_fast_mode_is_not_promised(settings):
    fast = verify("semantic-ids", *settings, "--workers", 3, "--steps", 40, "--json")
    assert fast.exit_code == 1, fast.output
    verdict = json.loads(fast.stdout)
    assert verdict["workers"] == [1, 3]
    assert any(name.startswith("model.") for name in verdict["different"])


def test_mistakes(settings, tmp_path):
    for arguments, fragment in [
        (["semantic-ids", *settings, "--workers", 5], "expected at most shards=4"),
        (["nothing"], "semantic-ids"),
        ([tmp_path], "config.yaml"),
    ]:
        done = verify(*arguments)
        assert done.exit_code == 2, done.output
        assert fragment in done.stderr
