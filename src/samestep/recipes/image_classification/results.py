"""The end of the job: the model, its figures on the test set, report, manifest."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from samestep import report
from samestep.errors import CheckpointError, ReplicaMismatchError
from samestep.fingerprint import hexdigest
from samestep.group import Group
from samestep.recipes.atomic import replacing
from samestep.recipes.display import Display
from samestep.recipes.folder import RunFolder
from samestep.recipes.image_classification.data import Data
from samestep.recipes.image_classification.evaluate import Figures
from samestep.recipes.image_classification.models import Classifier
from samestep.recipes.image_classification.schedule import Plan
from samestep.recipes.image_classification.spec import ImageClassificationSpec
from samestep.recipes.outputs import manifest_head, write_model

__all__ = ["write"]


def write(
    spec: ImageClassificationSpec,
    folder: RunFolder,
    group: Group,
    display: Display,
    data: Data,
    plan: Plan,
    model: Classifier,
    figures: Figures,
) -> None:
    """Write the run's outputs, the manifest last, and show the closing table.

    Collective: all ranks of `group`; only the main one writes.
    """
    digests = {name: hexdigest(tensor) for name, tensor in model.state_dict().items()}
    everywhere = group.gather_text(json.dumps(digests))
    if len(set(everywhere)) > 1:
        raise ReplicaMismatchError(f"models differ between workers: {everywhere}", name="model")
    problem = ""
    if group.is_main:
        try:
            write_model(folder, model)
            quality = {"train_samples": len(data.train), **figures.to_dict(data.classes)}
            with replacing(folder.path / "quality.json") as file:
                file.write((json.dumps(quality, indent=2) + "\n").encode())
            folder.finish(_manifest(spec, group, data, plan, digests))
            report.write(folder.path)
            display.table("image classification", _closing(figures, data, folder, group))
        except OSError as error:
            problem = (
                f"{folder.path}: cannot be written to ({error.strerror}). Free space there, then --resume."
            )
    group.agree(not problem, problem, CheckpointError)


def _manifest(
    spec: ImageClassificationSpec, group: Group, data: Data, plan: Plan, digests: dict[str, str]
) -> dict[str, Any]:
    return {
        **manifest_head(spec, group),
        "model": spec.model,
        "steps": plan.steps,
        "steps_per_epoch": plan.steps_per_epoch,
        "global_batch_size": spec.global_batch_size,
        "peak_lr": plan.peak_lr,
        "schedule": plan.schedule.describe(),
        "train_samples": len(data.train),
        "test_samples": len(data.test),
        "classes": list(data.classes),
        "sources": list(data.sources),
        "digest": hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest(),
        "replicas": "agree",
    }


def _closing(figures: Figures, data: Data, folder: RunFolder, group: Group) -> list[tuple[str, Any]]:
    agreement = f"{group.world_size} workers agree bit for bit"
    return [
        ("test accuracy", f"{figures.accuracy:.2%} ({figures.n_correct:,} of {figures.n_samples:,})"),
        ("test loss", f"{figures.loss:.4f}"),
        *_confused(figures, data),
        ("replica agreement", agreement if group.world_size > 1 else "one worker: nothing to compare"),
        ("files", f"{folder.path}/  (model.safetensors, quality.json, metrics.jsonl, report.html)"),
    ]


def _confused(figures: Figures, data: Data) -> list[tuple[str, str]]:
    """Return the most frequent confusion, if there is one."""
    wrong = figures.confusion.clone()
    wrong.fill_diagonal_(0)
    place = int(wrong.argmax())
    n_wrong = int(wrong.max())
    if not n_wrong:
        return []
    true, said = (data.classes[i] for i in divmod(place, len(data.classes)))
    return [("most confused", f"{true} called {said}, {n_wrong:,} times")]
