"""Draw the pictures of the docs from real runs: `docs/pictures/*.svg`.

    python scripts/make_pictures.py [NAME ...]

pace       rates and momentum factor of a Caffe2-era recipe
drift      one flipped bit on one of four replicas: the losses, the distance it grows to, and when the audit says so
codebooks  how the codes of three levels are used, with k-means++ and 25 iterations, on the demo's embeddings
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch

from samestep import caffe2, codebooks, launch, momentum, scheduler
from samestep.audit import Audit
from samestep.errors import ReplicaMismatchError
from samestep.step import TrainStep

matplotlib.use("svg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).parents[1]
OUT = ROOT / "docs" / "pictures"
RECIPE = """
SOLVER: {LR_POLICY: steps_with_decay, BASE_LR: 0.02, GAMMA: 0.1, STEPS: [0, 6000, 8000], MAX_ITER: 9000,
         WARM_UP_ITERS: 500, WARM_UP_FACTOR: 0.1, WEIGHT_DECAY: 0.0001, MOMENTUM: 0.9}
"""
STEPS, PLANTED, EVERY = 300, 60, 50


def pace() -> Any:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "recipe.yaml")
        path.write_text(RECIPE)
        recipe = caffe2.read_recipe(path, family="detectron")
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = momentum.VelocitySGD([weight], lr=recipe.base_lr)
    rows = scheduler.LRScheduler(optimizer, recipe.schedule, momentum=recipe.momentum).preview(
        recipe.total_steps
    )
    figure, (above, below) = plt.subplots(2, 1, figsize=(7, 4), sharex=True, height_ratios=[2, 1])
    above.plot([row.lrs[0] for row in rows], color="#00897b")
    above.set_ylabel("learning rate")
    below.plot([row.momentum_factor for row in rows], color="#c0392b")
    below.set_ylabel("factor on the\nmomentum history")
    below.set_xlabel("step (applied updates)")
    for step in (6_000, 8_000):
        below.annotate(f"x {rows[step].momentum_factor:.3g}", (step, rows[step].momentum_factor), (4, 4),
                       textcoords="offset points", fontsize=8)  # fmt: skip
    return figure


def drifting(group: Any) -> tuple[list[float], list[list[float]], int]:
    """Train four replicas, flip one bit on rank 3; return losses, weights at each step, and when it was caught."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    step = TrainStep(model, optimizer, group=group)
    audit = Audit(group, every=0).watch(model, optimizer)
    losses, weights, caught = [], [], -1
    draw = torch.Generator().manual_seed(group.rank)
    for number in range(STEPS):
        inputs = torch.randn(32, 16, generator=draw)
        result = step.train_step([inputs], _loss)
        losses.append(result.loss)
        if number == PLANTED and group.rank == 3:
            optimizer.state[model[0].weight]["exp_avg"].view(torch.int32)[0, 0] ^= 1 << 22
        weights.append(model[0].weight.detach().flatten().tolist())
        if caught < 0 and result.step % EVERY == 0:
            try:
                audit.check(result.step)
            except ReplicaMismatchError:
                caught = result.step
    return losses, weights, caught


def _loss(model: torch.nn.Module, inputs: torch.Tensor) -> tuple[torch.Tensor, int]:
    return (model(inputs) - inputs[:, :1] * inputs[:, 1:2]).square().sum(), len(inputs)


def drift() -> Any:
    results = launch.run(drifting, 4)
    losses, first, caught = results[0]
    apart = np.abs(np.array(results[3][1]) - np.array(first)).max(1)
    figure, (above, below) = plt.subplots(2, 1, figsize=(7, 4), sharex=True)
    above.plot(losses, color="#00897b", linewidth=0.8)
    above.set_ylabel("loss")
    below.semilogy(np.maximum(apart, 1e-12), color="#c0392b")
    below.set_ylabel("largest distance\nrank 3 to rank 0")
    below.set_xlabel("step")
    below.axvline(PLANTED, color="#777", linestyle=":")
    below.annotate("one bit\nflips", (PLANTED, 1e-10), (6, 0), textcoords="offset points",
                   fontsize=8, ha="left")  # fmt: skip
    for axes in (above, below):
        axes.axvline(caught, color="#1f3a93")
    below.annotate(f"audit at step {caught}", (caught, 1e-10), (6, 0), textcoords="offset points", fontsize=8)
    return figure


def codebook_use() -> Any:
    with np.load(ROOT / "examples" / "data" / "esco_skills_minilm.npz") as archive:
        points = torch.from_numpy(archive["embeddings"].astype(np.float32))
    books = codebooks.fit(points, [256, 256, 256], max_iterations=25)
    codes = codebooks.encode(points, books)
    figure, axes = plt.subplots(1, 3, figsize=(9, 2.6), sharey=True)
    for level, place in enumerate(axes):
        counts = torch.bincount(codes[:, level], minlength=256).double()
        share = counts[counts > 0] / counts.sum()
        perplexity = torch.exp(-(share * share.log()).sum()).item()
        place.fill_between(range(256), sorted(counts.tolist(), reverse=True), step="mid", color="#00897b")
        place.set_title(
            f"level {level}: {int((counts > 0).sum())} of 256 used,\nperplexity {perplexity:.0f}", fontsize=9
        )
        place.set_xlabel("codes, most used first", fontsize=8)
    axes[0].set_ylabel("items")
    return figure


PICTURES: dict[str, Callable[[], Any]] = {"pace": pace, "drift": drift, "codebooks": codebook_use}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", choices=[*PICTURES, []], help="which; all by default")
    OUT.mkdir(exist_ok=True)
    plt.rcParams.update({"svg.hashsalt": "samestep", "svg.fonttype": "none", "font.family": "sans-serif",
                         "axes.spines.top": False, "axes.spines.right": False})  # fmt: skip
    for name in parser.parse_args().names or PICTURES:
        figure = PICTURES[name]()
        figure.tight_layout()
        figure.savefig(OUT / f"{name}.svg", metadata={"Date": None})
        print(OUT / f"{name}.svg")


if __name__ == "__main__":
    main()
