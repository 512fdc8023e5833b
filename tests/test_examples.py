"""Every script in examples/ is run as a user would run it."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(name, workers, *arguments):
    launcher = (
        ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(workers)]
        if workers > 1
        else []
    )
    done = subprocess.run(
        [sys.executable, *launcher, str(EXAMPLES / name), *arguments],
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


def test_the_guard_names_what_parted():
    said = run("guard_in_two_lines.py", 2, "--break")
    assert said.startswith("caught: 2.bias parted, rank 1")
    assert "(parameters after the step, step 30)" in said


@pytest.mark.slow
def test_the_guard_is_silent_about_a_good_program():
    assert run("guard_in_two_lines.py", 2).startswith("agree")


def test_any_module_is_initialized_from_all_rows():
    said = run("initialize_any_module.py", 2)
    assert said.startswith("shift [4.0, 12.0], mean afterwards ")  # the mean of -1 to 9, and three times that
    assert float(said.split()[5]) < 1e-6
    assert "needs it again: False" in said


def test_torch_sgd_follows_a_detectron_recipe():
    rates, difference = run("detectron_schedule.py", 2).splitlines()
    assert ast.literal_eval(rates.removeprefix("rates ")) == [0.006666, 0.013333, 0.02, 0.002, 0.0002]
    assert float(difference.split()[-1]) < 1e-13


def test_a_run_moved_to_other_workers_ends_with_the_same_bits(tmp_path):
    run("resume_elsewhere.py", 2, str(tmp_path / "moved"), "--stop-after", "7")
    moved = run("resume_elsewhere.py", 3, str(tmp_path / "moved"))
    whole = run("resume_elsewhere.py", 1, str(tmp_path / "whole"))
    assert moved.split(": ")[1] == whole.split(": ")[1]


@pytest.mark.slow
@pytest.mark.parametrize(("arguments", "code"), [([], 0), (["--mean-of-means"], 1)])
def test_a_ci_step_compares_a_script(arguments, code):
    script = [str(EXAMPLES / "compare_in_ci.py"), *arguments]
    done = subprocess.run(
        [sys.executable, "-m", "samestep", "compare", "--workers", "1,4", "--steps", "8", "--", *script],
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr


def test_no_example_is_left_untested():
    # Those on frameworks are run beside the other tests of their front doors.
    text = "".join(file.read_text() for file in Path(__file__).parent.glob("test_*.py"))
    assert all(script.name in text for script in EXAMPLES.glob("*.py"))
