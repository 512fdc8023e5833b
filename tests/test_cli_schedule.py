"""`samestep schedule` as a user runs it: expressions, recipes of both kinds, options, and ways to get it wrong."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from samestep import schedules as S
from samestep.cli import app

ROOT = Path(__file__).parents[1]
RECIPES = ROOT.parent / "shared" / "data" / "caffe2_recipes"
MULTISTEP = "multistep([30,60,80],0.1)*linear_warmup(5,0.1)"

DETECTRON = """
NUM_GPUS: 8
FPN: {FPN_ON: true}
SOLVER:
  LR_POLICY: steps_with_decay
  BASE_LR: 0.02
  GAMMA: 0.1
  MAX_ITER: 90000
  STEPS: [0, 60000, 80000]
"""


def call(*words):
    return CliRunner().invoke(app, ["schedule", *map(str, words)])


def data(*words):
    result = call(*words, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.fixture
def detectron(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(DETECTRON)
    return path


# -- expressions


def test_an_expression_is_shown_around_every_boundary():
    shown = data(MULTISTEP, "--lr", 0.1, "--momentum", "threshold")
    assert [row["step"] for row in shown["rows"]] == [0, 1, 4, 5, 6, 29, 30, 31, 59, 60, 61, 79, 80, 81, 89]
    assert [row["step"] for row in shown["rows"] if row["boundary"]] == [5, 30, 60, 80] == shown["boundaries"]
    by_step = {row["step"]: row for row in shown["rows"]}
    for step, lr in (
        (0, 0.01),
        (1, 0.028),
        (4, 0.082),
        (5, 0.1),
        (29, 0.1),
        (30, 0.01),
        (60, 0.001),
        (80, 0.0001),
    ):
        assert by_step[step]["lrs"] == pytest.approx([lr], rel=1e-12)
    # Table D1: a tenth of the LR is the float32 quotient, and nothing on a flat stretch.
    assert by_step[30]["momentum_factors"] == pytest.approx([0.1], rel=1e-6)
    assert by_step[29]["momentum_factors"] == by_step[31]["momentum_factors"] == [1.0]
    assert shown["kind"] == "expression"
    assert S.parse(shown["schedule"]) == S.parse(MULTISTEP)


def test_the_table_says_the_same_in_columns():
    lines = call(MULTISTEP, "--lr", 0.1, "--momentum", "threshold").stdout.splitlines()
    rows = {line.split()[0]: line.split()[1:] for line in lines if line[:4].strip().isdigit()}
    assert rows["0"] == ["0.01", "-", "first"]
    assert rows["30"] == ["0.01", "x", "0.1", "boundary"]
    assert rows["89"] == ["0.0001", "-", "last"]


def test_several_base_lrs_are_several_param_groups():
    shown = data("linear(10)", "--lr", 1, "--lr", 0.5, "--at", 5)
    assert [row["lrs"] for row in shown["rows"]] == [[0.5, 0.25]]
    assert "lr group 1" in call("linear(10)", "--lr", 1, "--lr", 0.5).stdout


def test_param_groups_with_other_factors_get_columns_of_their_own():
    # Table D8: 1.0 -> 1.1 is corrected and 0.1 -> 0.11 is not, under one schedule.
    out = call(
        "piecewise([1, 1.1], [5])", "--lr", 1, "--lr", 0.1, "--momentum", "threshold", "--at", 5
    ).stdout
    assert "momentum factor group 0" in out
    assert out.splitlines()[-1].split() == ["5", "1.1", "0.11", "x", "1.1", "-", "boundary"]


def test_at_shows_these_steps_only_even_past_the_end():
    shown = data(MULTISTEP, "--at", 7, "--at", 10**12)
    assert [row["step"] for row in shown["rows"]] == [7, 10**12]
    assert shown["rows"][1]["factor"] == pytest.approx(1e-3, rel=1e-12)
    assert "after the last update" in call(MULTISTEP, "--at", 10**12).stdout


def test_steps_sets_the_length():
    assert data("warm_restarts(100)", "--steps", 350)["boundaries"] == [100, 200, 300]
    assert data("constant(1)", "--steps", 1)["rows"][0]["step"] == 0
    long = data("multistep([500_000_000_000], 0.1)", "--steps", 10**12)
    assert [row["step"] for row in long["rows"]][-4:] == [
        499999999999,
        500000000000,
        500000000001,
        999999999999,
    ]


def test_a_table_with_too_many_rows_says_how_many_it_leaves_out():
    out = call("step(3, 0.5)", "--steps", 300).stdout
    assert "240 rows left out" in out
    assert len(out.splitlines()) < 80


# -- recipes of the Caffe2 era


def test_a_detectron_recipe_gives_table_d1(detectron):
    shown = data(detectron)
    assert (shown["kind"], shown["steps"], shown["global_batch_size"]) == ("detectron", 90000, 16)
    assert shown["boundaries"] == [500, 60000, 80000]
    names = [group["name"] for group in shown["groups"]]
    table = {
        499: 0.0199733339,
        500: 0.0199999996,
        59999: 0.0199999996,
        60000: 0.00200000009,
        80000: 0.000199999995,
    }
    by_step = {row["step"]: row for row in shown["rows"]}
    for step, lr in table.items():
        assert by_step[step]["lrs"][names.index("weights")] == pytest.approx(lr, rel=1e-7)
        assert by_step[step]["lrs"][names.index("biases")] == pytest.approx(2 * lr, rel=1e-7)
    assert by_step[60000]["momentum_factors"][0] == pytest.approx(0.100000009, rel=1e-9)
    assert by_step[80000]["momentum_factors"][0] == pytest.approx(0.099999994, rel=1e-9)
    assert by_step[500]["momentum_factors"] == [1.0] * len(names)


def test_groups_with_the_same_lr_share_a_column(detectron):
    out = call(detectron).stdout
    assert "lr weights, norms" in out
    assert "60,000" in out
    assert "biases x 2" in out


def test_a_file_takes_another_base_lr_and_length(detectron):
    shown = data(detectron, "--lr", 0.01, "--steps", 60001)
    assert shown["rows"][-1]["step"] == 60000
    assert shown["rows"][-1]["lrs"][0] == pytest.approx(0.001)


@pytest.mark.skipif(not RECIPES.exists(), reason="needs the recipes beside the checkout")
@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.stem[:24])
def test_the_originals_own_recipes_are_shown_as_they_ran(path):
    from samestep import caffe2

    recipe, shown = caffe2.read_recipe(path), data(path)
    weights = [group["name"] for group in shown["groups"]].index("weights")
    for row in shown["rows"]:
        # The rate in the original's own order of operations, in float32.
        assert math.isclose(row["lrs"][weights], recipe.lr(row["step"]), rel_tol=1e-7), row
    assert shown["rows"][-1]["step"] == recipe.total_steps - 1


@pytest.mark.skipif(not RECIPES.exists(), reason="needs the recipes beside the checkout")
def test_the_family_can_be_given():
    path = RECIPES / "vrd_VGG16_softmaxed_triplet_8gpu.yaml"
    assert data(path, "--family", "vrd") == data(path)
    refused(call(path, "--family", "nonlocal"), "NUM_ITERATIONS")


# -- our own recipes


def test_one_of_our_recipes_shows_the_schedule_of_its_job():
    path = ROOT / "examples" / "semantic_ids.yaml"
    shown = data(path, "--set", "steps=200", "--set", "warmup_steps=9", "--lr", 0.5)
    assert (shown["kind"], shown["steps"], shown["boundaries"]) == ("semantic-ids", 200, [9])
    assert shown["momentum"] is None
    by_step = {row["step"]: row for row in shown["rows"]}
    for step, warm in ((0, 0.1), (1, 0.2), (8, 0.9), (9, 1.0), (199, 1.0)):
        right = 0.5 * warm * (1 + math.cos(math.pi * step / 200)) / 2
        assert by_step[step]["lrs"] == pytest.approx([right], rel=1e-12)


def test_a_run_folder_is_its_config(tmp_path):
    shutil.copy(ROOT / "examples" / "semantic_ids.yaml", tmp_path / "config.yaml")
    assert data(tmp_path)["kind"] == "semantic-ids"


# -- pictures


@pytest.mark.parametrize(
    "words",
    [
        (MULTISTEP, "--momentum", "threshold"),
        ("cosine(50)*linear_warmup(5)", "--momentum", "every_change"),
        ("constant(0)",),
        ("constant(1)", "--steps", 1),
        ("warm_restarts(1000)", "--steps", 200_000, "--lr", 1, "--lr", 0.5),
        ("multistep([500_000_000_000], 0.1)", "--steps", 10**12),
    ],
    ids=lambda words: words[0][:24],
)
@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_pictures_are_written(words, suffix, tmp_path):
    path = tmp_path / f"lr.{suffix}"
    result = call(*words, "--plot", path)
    assert result.exit_code == 0, result.output
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG") if suffix == "png" else b"</svg>" in content
    assert str(path) in result.stdout


def test_the_picture_names_groups_boundaries_and_factors(detectron, tmp_path):
    path = tmp_path / "lr.svg"
    assert data(detectron, "--plot", path)["kind"] == "detectron"
    text = path.read_text()
    for word in ("weights, norms", "biases", "60,000", "80,000", "x 0.1", "momentum factor", "LR, log scale"):
        assert word in text, word
    first = path.read_bytes()
    call(detectron, "--plot", path)
    assert path.read_bytes() == first


# -- wrong input: exit code 2 and one message


def refused(result, *words):
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.count("samestep: ") == 1
    assert "Traceback" not in result.stderr
    for word in words:
        assert word in result.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["multistep([30,60"], ["multistep([30,60"]),
        (["cosin(10)"], ["cosin", "cosine"]),
        (["__import__('os').getcwd()"], ["character"]),
        (["cosine(-5)"], ["steps", "-5"]),
        (["not_there"], ["not_there", "neither a file"]),
        (["not_there.yaml"], ["not_there.yaml", "cannot be read"]),
        (["step(1, 10)", "--steps", "1000"], ["finite"]),
        (["cosine(5)", "--lr", "nan"], ["--lr"]),
        (["cosine(5)", "--momentum", "sometimes"], ["--momentum", "every_change"]),
        (["cosine(5)", "--family", "vrd"], ["--family"]),
        (["cosine(5)", "--set", "steps=5"], ["--set"]),
        (["cosine(5)", "--plot", "lr.bmp"], ["--plot", ".svg"]),
        (["cosine(5)", "--plot", "no/such/folder/lr.png"], ["--plot", "no/such/folder"]),
    ],
    ids=lambda value: value[0][:20] if value else "",
)
def test_wrong_words_are_refused(words, said):
    refused(call(*words), *said)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("GAMMA", "GAMA"), ["GAMA"]),
        (("90000", "ninety"), ["MAX_ITER"]),
        (("SOLVER", "SLOVER"), ["SOLVER"]),
        (("[0, 60000, 80000]", "[0, 80000, 60000]"), ["STEPS"]),
        (("NUM_GPUS: 8", "NUM_GPUS: [8"), ["YAML"]),
    ],
    ids=lambda value: value[0],
)
def test_wrong_recipes_are_refused_by_the_key(change, said, tmp_path):
    path = tmp_path / "wrong.yaml"
    path.write_text(DETECTRON.replace(*change))
    refused(call(path), *said)


def test_wrong_settings_of_our_recipes_are_refused(detectron, tmp_path):
    path = ROOT / "examples" / "semantic_ids.yaml"
    refused(call(path, "--set", "warmup_step=3"), "warmup_step", "warmup_steps")
    refused(call(path, "--set", "kind=rkmeans"), "learning rate")
    refused(call(detectron, "--set", "steps=3"), "--set")
    refused(call(detectron, "--lr", 1, "--lr", 2), "--lr")
    other = tmp_path / "other.yaml"
    other.write_text("recipe: image-net\n")
    refused(call(other), "image-net", "semantic-ids")
    other.write_text("- 1\n")
    refused(call(other), "keys and values")


def test_negative_steps_are_wrong_usage():
    assert call("cosine(5)", "--at", "-1").exit_code == 2
    assert call("cosine(5)", "--steps", "0").exit_code == 2


def test_help_imports_no_torch():
    code = (
        "import sys; from typer.testing import CliRunner; from samestep.cli import app; "
        "result = CliRunner().invoke(app, ['schedule', '--help']); "
        "assert result.exit_code == 0 and '--plot' in result.output; "
        "heavy = {'torch', 'matplotlib', 'numpy', 'yaml'} & set(sys.modules); assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
