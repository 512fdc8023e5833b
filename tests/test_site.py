"""The docs site: built strictly, nothing missing; the tutorial's steps say what the tutorial shows."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import samestep

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    pytest.importorskip("mkdocs")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)],
        cwd=ROOT,
        env={"PATH": "", "NO_MKDOCS_2_WARNING": "1", "HOME": str(folder)},
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert not done.stderr.strip(), done.stderr
    return folder


def test_the_site_is_built_without_a_warning(site):
    page = re.sub(r"<[^>]*>", "", (site / "tutorial.html").read_text())
    assert (
        "sampler = DistributedSampler(data, shuffle=False)" in page
    )  # the scripts themselves, not their names


def test_the_reference_has_every_public_name(site):
    pages = "".join(page.read_text() for page in (site / "reference").glob("*.html"))
    named = set(re.findall(r'id="samestep\.([\w.]+)"', pages))
    inner = {
        "bulk",
        "carrier",
        "cli",
        "compiled",
        "forward",
        "gradients",
        "lossfn",
        "native",
        "partials",
        "recipes",
        "tally",
        "transport",
        "tree",
        "trial",
        "watch",
    }
    missing = {name for name in samestep.__all__ if name not in named} - inner
    assert not missing, f"docs/reference lacks {sorted(missing)}"


STEPS = {
    "0_broken": (1, "options: `0.lr` of 4-workers parts from 1-worker by 3 of its size"),
    "1_pace": (1, "0 of the 12 samples of 4-workers are not among the 14 of 1-worker"),
    "2_samples": (1, "gradients: `0.weight` of 4-workers parts from 1-worker by 0.106 of its size"),
    "3_mean": (0, "within: rounding only"),
    "4_exact": (0, "exact: the same bits at every step"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", STEPS)
def test_the_tutorial_shows_what_compare_says(name):
    code, said = STEPS[name]
    script = ROOT / "examples" / "tutorial" / f"{name}.py"
    done = subprocess.run(
        [sys.executable, "-m", "samestep", "compare", "--workers", "1,4", "--steps", "8", "--", str(script)],
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    flat = " ".join((done.stdout + done.stderr).split())
    assert done.returncode == code, flat
    assert said in flat
    assert said in " ".join((ROOT / "docs" / "tutorial.md").read_text().split())
