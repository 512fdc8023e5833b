"""Kill a run anywhere, move it to another number of workers, compare every bit: ``python benchmarks/faults.py``.

Each run of the campaign trains the semantic-ids recipe on a small data set until it is complete, through one to
three faults. A fault has a victim (a random worker, all workers, the agent, or the agent by SIGTERM) and a moment
(any time, a random step, inside a save, inside the initialization; near the end where that did not come). After a
fault the agent may start the workers again; else the run is started again with ``--resume``, in exact mode on
another random number of workers. What is left must be the undisturbed run's, bit for bit: parameters, optimizer
state and loader state (the digests in the last checkpoint), codebooks, semantic ids, quality, the whole curve of
every logged figure, and the samples that each step read. No process may be left behind. In fast mode the number of
workers stays, and so must the bits.

Nine runs of ten fork agent and workers from this process, which has loaded torch already; every tenth starts them
from the command line as a user does. Run ``i`` depends on ``--seed`` and ``i`` only, so a campaign may be cut in
slices (``--first``).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

STEPS, BATCH, SHARDS, ITEMS, EVERY = 40, 48, 4, 240, 4
VICTIMS = ("worker", "worker", "all workers", "agent", "agent by SIGTERM")
MOMENTS = ("any time", "at a step", "at a step", "during a save", "during a save", "during initialization")
FILES = ("model.safetensors", "codebooks.safetensors", "semantic_ids.parquet", "quality.json")
LIMIT_SECONDS = 90.0


@dataclass
class Fault:
    """What was done, and when."""

    victim: str
    moment: str
    world_size: int
    steps_logged: int = 0


@dataclass
class Result:
    """A run of the campaign; good when `differences` is empty."""

    index: int
    mode: str
    real_command: bool
    faults: list[Fault] = field(default_factory=list)
    world_sizes: list[int] = field(default_factory=list)
    restarts_by_agent: int = 0
    differences: list[str] = field(default_factory=list)
    seconds: float = 0.0


def make_items(path: Path) -> None:
    generator = np.random.default_rng(0)
    centers = generator.normal(size=(12, 8))
    rows = centers[generator.integers(0, 12, ITEMS)] + 0.2 * generator.normal(size=(ITEMS, 8))
    np.save(path, rows.astype(np.float32))


def arguments_of(work: Path, run: Path, mode: str, resume: bool) -> list[str]:
    settings = {
        "data": work / "items.npy", "n_centroids": "[8,8]", "latent_dim": 4, "hidden": "[16]", "steps": STEPS,
        "warmup_steps": 4, "global_batch_size": BATCH, "shards": SHARDS, "mode": mode, "checkpoint_every": EVERY,
        "audit_every": 10,
    }  # fmt: skip
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    return ["train", "semantic-ids", "--out", str(run), *words, *(["--resume"] if resume else [])]


def worker(record: str, arguments: list[str]) -> None:
    """Run the command in a forked worker that writes down which samples each of its steps reads."""
    from samestep.cli import app, train
    from samestep.recipes.loop import Loop

    plain, leave = Loop._lazily, train._leave

    def lazily(loop: Loop, shards: Iterator[list[Any]]) -> Iterator[Any]:
        def seen() -> Iterator[list[Any]]:
            mine = next(shards)
            rows = [[loop.step.step, shard.index, shard.sample_ids.tolist()] for shard in mine]
            os.write(file, "".join(json.dumps(row) + "\n" for row in rows).encode())
            yield mine

        return plain(loop, seen())

    def leave_at_once(guard: Any) -> None:
        leave(guard)
        if (
            guard.was_asked
        ):  # a forked worker's end is else its agent's to allow, which waits for it after a signal
            sys.stderr.flush()
            os._exit(0)

    file = os.open(record, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    Loop._lazily = lazily  # type: ignore[method-assign]
    train._leave = leave_at_once
    app(arguments)


class Launch:
    """An agent with its workers, from its start to its end."""

    def __init__(
        self, run: Path, arguments: list[str], world_size: int, max_restarts: int, real: bool
    ) -> None:
        self.run, self.world_size = run, world_size
        self.log = run.with_suffix(".log")
        self.seen: set[int] = set()
        self.code: int | None = None
        self._start = self.log.stat().st_size if self.log.exists() else 0
        with self.log.open("a") as log:
            if real:
                command = [sys.executable, "-m", "samestep", *arguments, "--workers", str(world_size)]
                command += ["--max-restarts", str(max_restarts)]
                self._process = subprocess.Popen(command, stdout=log, stderr=log)
                self.pid = self._process.pid
                return
            self.pid = os.fork()
            if self.pid:
                return
            code = 3
            try:
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
                code = agent_main(run, arguments, world_size, max_restarts)
            finally:
                os._exit(code)

    def poll(self) -> int | None:
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
        return self.code

    def workers(self) -> list[int]:
        try:
            text = "".join(p.read_text() for p in Path(f"/proc/{self.pid}/task").glob("*/children"))
        except OSError:
            return []
        found = [int(word) for word in text.split()]
        self.seen.update(found)
        return found

    def said(self) -> str:
        return self.log.read_bytes()[self._start :].decode(errors="replace")


def agent_main(run: Path, arguments: list[str], world_size: int, max_restarts: int) -> int:
    from samestep import agent
    from samestep.errors import SamestepError

    def tell(text: str) -> None:
        print(f"samestep: {text}", file=sys.stderr, flush=True)

    try:
        code = agent.run_command(
            [str(run.with_suffix(".samples")), arguments], world_size, max_restarts=max_restarts,
            final_codes=(1, 2), tell=tell, entrypoint=worker,
        )  # fmt: skip
    except SamestepError as error:
        tell(str(error))
        return error.exit_code
    return code


def steps_logged(run: Path) -> int:
    path = run / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def trigger(moment: str, launch: Launch, dice: random.Random, seconds: float) -> Callable[[], bool]:
    """Return a function that tells whether the moment has come."""
    start, run = time.monotonic(), launch.run
    if moment == "any time":
        wait = dice.uniform(0.0, seconds)
        return lambda: time.monotonic() - start >= wait
    if moment == "at a step":
        step = dice.randrange(1, STEPS)
        return lambda: steps_logged(run) >= step
    if moment == "during a save":
        nth = dice.randrange(1, 6)
        seen: set[str] = set()

        def saving() -> bool:
            folder = run / "checkpoints"
            aside = [p.name for p in folder.glob(".saving-*")] if folder.exists() else []
            seen.update(aside)
            return len(seen) >= nth and bool(aside)

        return saving
    return lambda: "initialization:" in launch.said()


def strike(victim: str, launch: Launch, dice: random.Random) -> None:
    if victim.startswith("agent"):
        os.kill(launch.pid, signal.SIGTERM if victim.endswith("SIGTERM") else signal.SIGKILL)
        return
    workers = launch.workers()
    for pid in workers if victim == "all workers" else dice.sample(workers, min(1, len(workers))):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def wait_or_strike(launch: Launch, fault: Fault | None, dice: random.Random, seconds: float) -> bool:
    """Wait until the launch has ended or the fault was done; return whether it was done."""
    due = None if fault is None else trigger(fault.moment, launch, dice, seconds)
    delay = dice.uniform(0.0, 0.02) if fault is not None and fault.moment.startswith("during") else 0.0
    deadline = time.monotonic() + LIMIT_SECONDS
    while launch.poll() is None and time.monotonic() < deadline:
        workers = launch.workers()
        if fault is None or due is None or not (workers or fault.victim.startswith("agent")):
            time.sleep(0.01)
            continue
        late = steps_logged(launch.run) >= STEPS - 3
        if due() or late:
            fault.moment = "near the end" if late else fault.moment
            time.sleep(0.0 if late else delay)
            fault.steps_logged = steps_logged(launch.run)
            strike(fault.victim, launch, dice)
            return True
        time.sleep(0.002)
    return False


def one_run(work: Path, index: int, seed: int, seconds: float) -> Result:
    dice = random.Random(f"{seed}/{index}")
    mode = "fast" if index % 5 == 4 else "exact"
    real = index % 10 == 9
    result = Result(index, mode, real)
    run = work / f"run-{index}"
    faults = [(dice.choice(VICTIMS), dice.choice(MOMENTS)) for _ in range(dice.randrange(1, 4))]
    fixed = dice.randrange(1, 5)
    began = time.monotonic()
    while not (run / "manifest.json").exists():
        if len(result.world_sizes) > 12:
            result.differences.append(f"not complete after {len(result.world_sizes)} launches")
            return result
        world_size = fixed if mode == "fast" else dice.randrange(1, 5)
        result.world_sizes.append(world_size)
        words = arguments_of(work, run, mode, (run / "config.yaml").exists())
        launch = Launch(run, words, world_size, dice.randrange(0, 3), real)
        while launch.poll() is None:
            fault = Fault(*faults[0], world_size) if faults else None
            if wait_or_strike(launch, fault, dice, seconds):
                result.faults.append(fault)  # type: ignore[arg-type]
                faults.pop(0)
            elif launch.poll() is None:
                result.differences.append(f"hangs after {result.faults}: {launch.said()[-2000:]}")
                os.kill(launch.pid, signal.SIGKILL)
        result.restarts_by_agent += launch.said().count("samestep: restart ")
        result.differences += orphans(launch)
        # 143: SIGTERM before any worker had begun, which the command line turns into 0.
        if launch.code not in (0, 3, 143, -signal.SIGKILL):
            result.differences.append(f"launch ended with {launch.code}: {launch.said()[-1500:]}")
    result.seconds = round(time.monotonic() - began, 1)
    result.differences += compare(run, reference(work, mode, fixed), real)
    return result


def matrix(work: Path) -> list[Result]:
    """Stop a run on a workers and finish it on b, for all a and b of 1 to 4."""
    results = []
    for a in range(1, 5):
        begun = work / f"begun-on-{a}"
        finish(Launch(begun, [*arguments_of(work, begun, "exact", False), "--stop-after", "17"], a, 0, False))
        for b in range(1, 5):
            run = work / f"moved-{a}-{b}"
            shutil.copytree(begun, run)
            shutil.copy(begun.with_suffix(".samples"), run.with_suffix(".samples"))
            start = time.monotonic()
            result = Result(len(results), "exact", False, world_sizes=[a, b])
            finish(Launch(run, arguments_of(work, run, "exact", True), b, 0, False))
            result.differences = compare(run, reference(work, "exact", 2), False)
            result.seconds = round(time.monotonic() - start, 1)
            results.append(result)
            print(f"{a} -> {b}:", result.differences or "identical", flush=True)
    return results


def finish(launch: Launch) -> None:
    while launch.poll() is None:
        launch.workers()
        time.sleep(0.01)
    if launch.code:
        raise SystemExit(f"a run failed:\n{launch.said()}")


def orphans(launch: Launch) -> list[str]:
    deadline = time.monotonic() + 5.0
    left = set(launch.seen)
    while left and time.monotonic() < deadline:
        left = {pid for pid in left if alive(pid)}
        time.sleep(0.01)
    return [f"process {pid} outlived its agent" for pid in sorted(left)]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def reference(work: Path, mode: str, world_size: int) -> Path:
    """Return the undisturbed run: on 2 workers in exact mode, on as many as the disturbed one in fast mode."""
    world_size = 2 if mode == "exact" else world_size
    run = work / f"reference-{mode}-{world_size}"
    if not (run / "manifest.json").exists():
        shutil.rmtree(run, ignore_errors=True)
        finish(Launch(run, arguments_of(work, run, mode, False), world_size, 0, False))
    return run


def last_state(run: Path) -> dict[str, Any]:
    """Return the digests of all tensors of the last checkpoint, and every other state in it."""
    last = max((run / "checkpoints").glob("step-*"))
    manifest = json.loads((last / "manifest.json").read_text())
    digests = {name: entry["digest"] for name, entry in manifest["tensors"].items()}
    return {"step": manifest["step"], "tensors": digests, "states": manifest["states"]}


def curve(run: Path, name: str) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (run / name).read_text().splitlines()]
    return [{key: value for key, value in row.items() if key != "samples_per_second"} for row in rows]


def samples(run: Path) -> dict[tuple[int, int], set[tuple[int, ...]]]:
    found: dict[tuple[int, int], set[tuple[int, ...]]] = {}
    for line in run.with_suffix(".samples").read_text().splitlines():
        step, shard, ids = json.loads(line)
        found.setdefault((step, shard), set()).add(tuple(ids))
    return found


def compare(run: Path, other: Path, real: bool) -> list[str]:
    """Return in words where a run differs from the undisturbed one."""
    found = []
    for key, value in last_state(run).items():
        if value != last_state(other)[key]:
            found.append(f"last checkpoint: {key}")
    found += [name for name in FILES if (run / name).read_bytes() != (other / name).read_bytes()]
    found += [name for name in ("metrics.jsonl",) if curve(run, name) != curve(other, name)]
    left = [str(p.relative_to(run)) for p in run.rglob("*") if p.name.startswith((".", "stacks-"))]
    found += [f"left behind: {name}" for name in left]
    if real:  # a worker of the command line writes no samples down
        return found
    mine = samples(run)
    if mine != samples(other):
        found.append("samples of a step")
    per_epoch = -(-ITEMS // BATCH)
    for epoch in range(STEPS // per_epoch):
        steps = range(epoch * per_epoch, (epoch + 1) * per_epoch)
        ids = [i for (step, _), each in mine.items() if step in steps for i in next(iter(each))]
        if sorted(ids) != list(range(ITEMS)):
            found.append(f"epoch {epoch}: not every sample once")
    return found


def preload() -> None:
    """Load what agent and workers need, so that forked ones begin at once."""
    import torch
    import torch.distributed.checkpoint.default_planner
    import torch.distributed.elastic.agent.server.local_elastic_agent
    from torch import nn

    import samestep.agent._elastic
    import samestep.cli
    import samestep.recipes.semantic_ids.job
    import samestep.report  # noqa: F401

    torch.set_num_threads(1)
    torch.optim.AdamW([nn.Parameter(torch.zeros(1))]).zero_grad()  # brings half of torch with it


def write(path: Path, results: list[dict[str, Any]], arguments: argparse.Namespace) -> None:
    import torch

    good = [row for row in results if not row["differences"]]
    content = {
        "command": "python benchmarks/faults.py "
        + ("--matrix" if arguments.matrix else f"--runs {arguments.runs} --seed {arguments.seed}"),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
        "runs": len(results),
        "identical": len(good),
        "faults": sum(len(row["faults"]) for row in results),
        "launches": sum(len(row["world_sizes"]) for row in results),
        "restarts_by_agent": sum(row["restarts_by_agent"] for row in results),
        "results": results,
    }
    path.write_text(json.dumps(content, indent=1) + "\n")
    path.with_suffix(".md").write_text(as_table(content))


def as_table(content: dict[str, Any]) -> str:
    """Return a campaign's figures as a page: how many faults of each kind, and what came of them."""
    faults = [(row, fault) for row in content["results"] for fault in row["faults"]]
    moments = sorted({fault["moment"] for _, fault in faults})
    numbers = [row["index"] for row in content["results"]]
    lines = [
        f"# {content['identical']} of {content['runs']} runs end with the bits of the undisturbed run",
        "",
        f"`{content['command']}` (numbers {numbers[0]} to {numbers[-1]}), {content['date']}, "
        f"{content['machine']}, torch {content['torch']}. "
        f"{content['launches']} starts by hand, {content['restarts_by_agent']} by the agent; "
        f"{sum(row['mode'] == 'fast' for row in content['results'])} runs in fast mode, the others in exact mode "
        "on 1 to 4 workers.",
    ]
    if faults:
        lines += ["", f"| faults | {' | '.join(moments)} |", "|---" * (len(moments) + 1) + "|"]
        for victim in sorted({fault["victim"] for _, fault in faults}):
            hits = [sum(f["victim"] == victim and f["moment"] == m for _, f in faults) for m in moments]
            lines.append(f"| {victim} | {' | '.join(map(str, hits))} |")
    else:
        moved = [f"{a} to {b}" for a, b in (row["world_sizes"] for row in content["results"])]
        lines += ["", f"Stopped on a workers, finished on b: {', '.join(moved)}."]
    lines += [
        f"- run {row['index']}: {row['differences']}" for row in content["results"] if row["differences"]
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument(
        "--first", type=int, default=0, help="number of the first run, to go on with a campaign"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--matrix", action="store_true", help="move runs from every a to every b of 1 to 4 workers"
    )
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no run after so long")
    parser.add_argument(
        "--work", type=Path, default=None, help="folder to work in; a temporary one by default"
    )
    parser.add_argument(
        "--out", type=Path, default=None, help="JSON file for the results; added to when there"
    )
    arguments = parser.parse_args()
    began = time.monotonic()
    os.environ["OMP_NUM_THREADS"] = "1"
    preload()
    work = arguments.work or Path(tempfile.mkdtemp(prefix="samestep-faults-"))
    work.mkdir(parents=True, exist_ok=True)
    make_items(work / "items.npy")
    if arguments.matrix:
        moved = matrix(work)
        if arguments.out is not None:
            write(arguments.out, [asdict(result) for result in moved], arguments)
        raise SystemExit(1 if any(result.differences for result in moved) else 0)
    results = []
    if arguments.out is not None and arguments.out.exists():
        results = [
            r for r in json.loads(arguments.out.read_text())["results"] if r["index"] < arguments.first
        ]
    start = time.monotonic()
    reference(work, "exact", 2)
    usual = max(0.5, time.monotonic() - start)
    bad = 0
    for index in range(arguments.first, arguments.runs):
        if time.monotonic() - began > arguments.seconds:
            print(f"go on with --first {index}")
            break
        shutil.rmtree(work / f"run-{index}", ignore_errors=True)
        result = one_run(work, index, arguments.seed, usual)
        bad += bool(result.differences)
        faults = "; ".join(f"{f.victim}, {f.moment}, step {f.steps_logged}" for f in result.faults)
        print(f"run {index} ({result.mode}) on {result.world_sizes}: {faults or 'no fault'}: ", end="")
        print(result.differences or "identical", f"{result.seconds} s", flush=True)
        results.append(asdict(result))
        if arguments.out is not None:
            write(arguments.out, results, arguments)
    if arguments.work is None and not bad:
        shutil.rmtree(work)
    raise SystemExit(1 if bad else 0)


if __name__ == "__main__":
    main()
