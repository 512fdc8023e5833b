"""Every script in examples/ is run as a user would run it."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(name, workers):
    launcher = (
        ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(workers)]
        if workers > 1
        else []
    )
    done = subprocess.run(
        [sys.executable, *launcher, str(EXAMPLES / name)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_uneven_workers_give_the_model_of_one():
    one, two = (ast.literal_eval(run("ddp_weighted_mean.py", n).removeprefix("weight ")) for n in (1, 2))
    assert two == pytest.approx(one, rel=1e-5)


def test_no_example_is_left_untested():
    text = Path(__file__).read_text()
    assert all(script.name in text for script in EXAMPLES.glob("*.py"))
