"""The bug zoo: every script is run, and samestep says what is wrong; the page of the docs is what was said."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SAID = {
    "accumulation_not_divided": "weights 0.25 each on rank 0 where 0.125 each is right",
    "batch_norm_not_synchronised": "Forward parts at `1` on all ranks",
    "buffers_never_broadcast": "`directions` (buffers, step 0)",
    "clipped_before_the_reduction": "each rank clips its own gradient",
    "codebook_of_each_worker": "`codebook` (buffers, step 0)",
    "contrastive_with_local_negatives": "The loss couples samples of different ranks",
    "ddp_bypassed": "no parameter is reduced",
    "flipped_bit": "`state.weight.exp_avg` (optimizer state, step 4)",
    "forward_in_no_sync": "not reduced on all ranks",
    "last_micro_batch_only": "micro-batch 0 of 2 does not count",
    "learning_rate_times_world_size": "The update is 4 x the reference",
    "mean_of_means": "a mean of means, counts 6, 6, 5, 5",
    "mean_over_local_tokens": "shares of the count 0.2308, 0.2692, 0.2308, 0.2692",
    "no_sync_off_by_one": "the ranks do not hold the same gradient",
    "padding_repeats_samples": "samples 0, 1 of the global batch are used more than once",
    "parameter_added_after_wrapping": "`temperature` is not reduced",
    "ranks_build_other_models": "rank 1 of 4: `0.weight` parameter (8, 6)",
    "rate_restored_on_rank_0": "`options.0.lr` (LR, step 3)",
    "reduced_in_bfloat16": "a bf16 or fp16 reduction",
    "scheduler_stepped_per_process": "samestep's LRScheduler: [1.0, 0.875, 0.75, 0.625]",
    "second_optimizer_inside_forward": "`centroids` (parameters at start, step 0)",
    "step_skipped_on_one_worker": "`applied updates` (step count, step 4)",
    "sum_in_place_of_mean": "multiplied by the world size once too often",
    "unseen_low_precision": "No stage",
    "unseen_wrong_labels": "No stage",
}


@pytest.fixture(scope="module")
def make_docs():
    found = importlib.util.spec_from_file_location("make_docs", ROOT / "scripts" / "make_docs.py")
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def said(make_docs):
    import sys

    sys.modules["make_docs"] = make_docs  # so that its worker function can be found by name
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        return make_docs.run_zoo()
    finally:
        sys.path.remove(str(ROOT / "scripts"))
        del sys.modules["make_docs"]


def test_every_script_is_told_what_it_does_wrong(said):
    assert said.keys() == SAID.keys()
    for name, part in SAID.items():
        assert part in said[name], name


def test_the_page_shows_what_was_said(said, make_docs):
    assert (ROOT / "docs" / "zoo.md").read_text() == make_docs.zoo_page(said)


def test_scripts_are_short():
    for script in (ROOT / "examples" / "zoo").glob("*.py"):
        assert len(script.read_text().splitlines()) < 50, script.name


def test_the_page_of_the_command_line_is_its_help(make_docs):
    assert (ROOT / "docs" / "cli.md").read_text() == make_docs.cli_page()
