"""Every settings file in examples/ loads, and those of the semantic ids give ids for small data."""

from pathlib import Path

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

from samestep.cli import app
from samestep.recipes.image_classification.spec import ImageClassificationSpec
from samestep.recipes.semantic_ids.spec import SemanticIdsSpec
from samestep.recipes.spec import load

FILES = sorted((Path(__file__).parents[1] / "examples").glob("*.yaml"))
KINDS = {kind.recipe: kind for kind in (SemanticIdsSpec, ImageClassificationSpec)}


def test_every_settings_file_loads():
    specs = {path.name: load(KINDS[yaml.safe_load(path.read_text())["recipe"]], path) for path in FILES}
    ids = [spec for spec in specs.values() if isinstance(spec, SemanticIdsSpec)]
    assert {(spec.kind, spec.balanced) for spec in ids} == {
        ("rqvae", False),
        ("rkmeans", False),
        ("rkmeans", True),
        ("rvq", False),
    }
    assert {Path(spec.data).resolve() for spec in ids} == {
        FILES[0].parent / "data" / "esco_skills_minilm.npz"
    }
    assert Path(ids[0].data).exists()


@pytest.mark.parametrize(
    "path", [p for p in FILES if p.name.startswith("semantic")], ids=lambda path: path.stem
)
def test_those_of_semantic_ids_run(path, tmp_path):
    rows = np.random.default_rng(0).normal(size=(200, 6)).astype(np.float32)
    np.savez(tmp_path / "small.npz", ids=np.arange(200), embeddings=rows)
    small = [f"data={tmp_path}/small.npz", "n_centroids=[8,4]", "global_batch_size=64", "steps=4"]
    small += ["warmup_steps=1", "latent_dim=4", "hidden=[8]"]
    words = [word for setting in small for word in ("--set", setting)]
    done = CliRunner().invoke(
        app, ["train", "semantic-ids", "--config", str(path), *words, "--out", str(tmp_path / "run")]
    )
    assert done.exit_code == 0, done.output
    assert (tmp_path / "run" / "manifest.json").exists()
