"""The recipe as people use it: the same bits on 1, 2 and 4 workers, resume, files, and one message per mistake."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from samestep import launch
from samestep.cli import app
from samestep.group import Group
from samestep.recipes.folder import RunFolder
from samestep.recipes.image_classification import job
from samestep.recipes.image_classification.spec import Spec

FASHION = Path(__file__).parents[2] / "shared" / "data" / "fashion_mnist"
EXAMPLE = Path(__file__).parents[1] / "examples" / "image_classification.yaml"
FILES = ("model.safetensors", "quality.json")
# Batch 128 is twice the reference, so that there is a warm-up; 11 steps are an epoch.
SMALL = {
    "width": 4,
    "blocks": [1, 1],
    "steps": 14,
    "global_batch_size": 128,
    "warmup_epochs": 0.5,
    "shards": 4,
}


def in_process(*arguments: object):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def train(
    group: Group, settings: dict, folder: str, resume: bool = False, stop_after: int | None = None
) -> None:
    job.run(Spec(**settings), RunFolder(Path(folder)), group, resume, stop_after)


def bits(folder: Path) -> list[bytes]:
    return [(folder / name).read_bytes() for name in FILES]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A run on one worker, with BatchNorm, augmentation and the second rate."""
    folder = tmp_path_factory.mktemp("runs") / "one"
    train(Group.single(), settings_of(), str(folder))
    return folder


def settings_of() -> dict:
    return {
        **SMALL,
        "mode": "exact",
        "shift": 1,
        "flip": True,
        "second_lr_factor": 2.0,
        "bias_lr_factor": 2.0,
    }


# Two workers take part in the resumed run below as well.
@pytest.mark.parametrize("workers", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_the_same_bits_on_any_number_of_workers(whole: Path, tmp_path: Path, workers: int) -> None:
    launch.run(train, workers, settings_of(), str(tmp_path / "run"), timeout_seconds=120)
    assert bits(tmp_path / "run") == bits(whole)
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    alone = json.loads((whole / "manifest.json").read_text())
    assert (manifest["workers"], manifest["digest"]) == (workers, alone["digest"])


def test_a_run_that_is_stopped_goes_on_with_other_workers_to_the_same_bits(
    whole: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    launch.run(train, 2, settings_of(), str(run), False, 5, timeout_seconds=120)
    assert not (run / "manifest.json").exists()
    train(Group.single(), settings_of(), str(run), True, None)
    assert bits(run) == bits(whole)
    rows, wanted = ((folder / "metrics.jsonl").read_text().splitlines() for folder in (run, whole))
    assert [_figures(row) for row in rows] == [_figures(row) for row in wanted]


def _figures(line: str) -> dict:
    return {key: value for key, value in json.loads(line).items() if key != "samples_per_second"}


def test_what_a_run_leaves(whole: Path) -> None:
    rows = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 15))
    assert all({"loss", "accuracy", "lr", "grad_norm"} <= row.keys() for row in rows)
    assert [row["step"] for row in rows if "test_accuracy" in row] == [11]  # once an epoch
    # From 0.05, the reference rate, to 0.1 over 6 steps (half an epoch, rounded), times the cosine.
    assert rows[0]["lr"] == pytest.approx(0.05)
    assert max(row["lr"] for row in rows) < 0.1
    quality = json.loads((whole / "quality.json").read_text())
    assert sum(map(sum, quality["confusion_matrix"])) == quality["test_samples"] == 359
    assert quality["train_samples"] == 1438
    assert "On the test set" in (whole / "report.html").read_text()
    manifest = json.loads((whole / "manifest.json").read_text())
    assert manifest["steps"] == 14
    assert "steps: 14" in (whole / "config.yaml").read_text()


def test_a_newcomers_run_learns_the_digits(tmp_path: Path) -> None:
    settings = ["--set", "model=mlp", "--set", "epochs=6", "--set", "checkpoint_every=50"]
    done = in_process("train", "image-classification", *settings, "--out", tmp_path / "run")
    assert done.exit_code == 0, done.output
    assert (
        "1,438 images to train on, 359 for the test, 10 classes; 132 steps of 64, peak LR 0.05" in done.stderr
    )
    assert "test accuracy" in done.stderr
    assert json.loads((tmp_path / "run" / "quality.json").read_text())["test_accuracy"] > 0.9
    again = in_process("train", "image-classification", *settings, "--out", tmp_path / "run")
    assert again.exit_code == 2
    assert "--resume" in again.stderr


def test_a_solver_file_and_the_command_schedule(tmp_path: Path) -> None:
    (tmp_path / "solver.yaml").write_text(
        "TRAIN: {IMS_PER_BATCH: 64, DATASETS: [x]}\nSOLVER: {BASE_LR: 0.01, MAX_ITER: 8, STEPS: [0, 4],"
        " LR_POLICY: steps_with_decay, WARM_UP_ITERS: 0, WARM_UP_FACTOR: 1.0}\n"
    )
    config = tmp_path / "mine.yaml"
    config.write_text("recipe: image-classification\nsolver: solver.yaml\nmodel: mlp\nhidden: [8]\n")
    done = in_process("train", "image-classification", "--config", config, "--out", tmp_path / "run")
    assert done.exit_code == 0, done.output
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["lr"] for row in rows] == pytest.approx([0.01] * 4 + [0.001] * 4)
    shown = json.loads(in_process("schedule", config, "--json").stdout)
    assert (shown["steps"], shown["boundaries"]) == (8, [4])
    table = in_process("schedule", tmp_path / "run").stdout
    assert "VelocitySGD, momentum 0.9" in table
    assert "biases" in table


MISTAKES = {
    "an unknown key": (["epoch=3"], "Did you mean `epochs`?"),
    "missing data": (["data=/nowhere"], "/nowhere"),
    "a batch larger than the data": (["global_batch_size=4096"], "at most the 1,438 training samples"),
    "milestones without multistep": (["milestones=[3]"], "`milestones`"),
    "a warm-up longer than the run": (["global_batch_size=128", "epochs=2"], "`warmup_epochs`"),
    "a pattern that matches nothing": (["second_lr_factor=2", "second_lr_params=[x]"], "`second_lr_params`"),
    "a policy that does not fit": (
        ["momentum_form=velocity", "momentum_policy=sometimes"],
        "`momentum_policy`",
    ),
    "a solver for another batch": (["solver={solver}"], "`global_batch_size`: expected 2"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_message_and_nothing_is_written(mistake: str, tmp_path: Path) -> None:
    (tmp_path / "solver.yaml").write_text("TRAIN: {DATASETS: [x]}\nSOLVER: {BASE_LR: 0.01, STEP_SIZE: 10}\n")
    settings, fragment = MISTAKES[mistake]
    words = [
        w for text in settings for w in ("--set", text.replace("{solver}", str(tmp_path / "solver.yaml")))
    ]
    done = in_process("train", "image-classification", *words, "--out", tmp_path / "run")
    assert done.exit_code == 2, done.output
    assert fragment in done.stderr
    assert done.stderr.count("samestep:") == 1
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()


def test_the_example_is_for_fashion_mnist_and_its_settings_hold() -> None:
    settings = ["--set", f"data={FASHION}"] if FASHION.exists() else ["--set", "data=null"]
    done = in_process("schedule", EXAMPLE, *settings)
    assert done.exit_code == 0, done.output


@pytest.mark.slow
def test_verify_and_two_workers_from_the_shell(tmp_path: Path) -> None:
    words = [word for key, value in SMALL.items() for word in ("--set", f"{key}={value}")]
    done = in_process("verify", "image-classification", *words, "--set", "mode=exact", "--workers", 2)
    assert done.exit_code == 0, done.output
    assert "1 and 2 workers: the same bits" in done.output
    command = [sys.executable, "-m", "samestep", "train", "image-classification", *words, "--workers", "2"]
    told = subprocess.run(
        [*command, "--out", str(tmp_path / "run")], capture_output=True, text=True, check=False
    )
    assert told.returncode == 0, told.stderr
    assert "2 workers agree bit for bit" in told.stderr


@pytest.mark.slow
@pytest.mark.skipif(not FASHION.exists(), reason="no Fashion-MNIST beside the checkout")
def test_fashion_mnist_gives_the_same_bits_on_one_two_and_four_workers(tmp_path: Path) -> None:
    settings = {
        "data": str(FASHION), "mode": "exact", "shards": 4, "steps": 20, "global_batch_size": 1024, "shift": 2,
        "warmup_epochs": 0.2, "width": 4, "blocks": [1, 1], "evaluate_every": 0,
    }  # fmt: skip
    for workers in (1, 2, 4):
        launch.run(train, workers, settings, str(tmp_path / str(workers)), timeout_seconds=170)
    assert bits(tmp_path / "1") == bits(tmp_path / "2") == bits(tmp_path / "4")
