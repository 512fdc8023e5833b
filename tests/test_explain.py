"""Explain against programs of which we know what is wrong with them, and against right ones."""

import itertools
import json
import sys
from functools import partial
from xml.etree import ElementTree

import pytest
import typer
from typer.testing import CliRunner

import explain_faults as zoo
from explain_faults import batch, program
from samestep import explain
from samestep.cli.explain import explain as explain_command
from samestep.errors import SpecError

ALL, TOO = (0, 1, 2, 3), 22  # 22 samples fall on 4 ranks as 6, 6, 5, 5
by_hand = partial(zoo.reduce_by_hand)

# name: (build, batch), stage, tensor, ranks, cause, fragments of the sentence
FAULTS = {
    # the kinds of world_size_invariance.md, section 5
    "mean of means": (
        (partial(program, loss=zoo.mean_loss), batch(n_samples=TOO)),
        ("backward", "fc2", ALL, "mean of means"),
        ("loss weights 3.667, 3.667, 4.4, 4.4", "where 4 is right", "counts 6, 6, 5, 5", "forward is equal"),
    ),
    "token means with padding": (
        (partial(program, "tokens", loss=zoo.mean_loss), batch("tokens")),
        ("backward", "fc2", ALL, "mean of means"),
        ("exact multiples", "where 4 is right", "shares of the count"),
    ),
    "loss count off by 1e-6": (
        (partial(program, loss=partial(zoo.scaled_loss, factor=1 + 1e-6)), batch()),
        ("backward", "fc2", ALL, "loss count wrong"),
        ("4.000004 each", "where 4 is right", "off by 1e-06"),
    ),
    "loss count off by 1e-6 on one rank": (
        (partial(program, loss=partial(zoo.scaled_loss, factor=1 + 1e-6, rank=2)), batch(n_samples=TOO)),
        ("backward", "fc2", (2,), "loss count wrong"),
        ("4, 4, 4.000004, 4", "on rank 2"),
    ),
    "BatchNorm not synchronised": (
        (partial(program, "local batchnorm"), batch("local batchnorm")),
        ("forward", "n1", ALL, "BatchNorm not synchronised"),
        ("Forward parts at `n1` on all ranks", "not synchronised"),
    ),
    "one parameter not reduced": (
        (
            partial(program, wrapped=False, gradients=partial(zoo.reduce_by_hand, skip=["fc1.weight"])),
            batch(n_samples=TOO),
        ),
        ("reduction", "fc1.weight", ALL, "not reduced"),
        ("`fc1.weight` is not reduced", "weights 1, 0, 0, 0 on rank 0"),
    ),
    "one small parameter not reduced": (
        (
            partial(program, wrapped=False, gradients=partial(zoo.reduce_by_hand, skip=["fc2.bias"])),
            batch(),
        ),
        ("reduction", "fc2.bias", ALL, "not reduced"),
        ("`fc2.bias` is not reduced on all ranks",),
    ),
    "other initial values on rank 1": (
        (partial(program, wrapped=False, gradients=by_hand, fault="init"), batch()),
        ("initial values", "fc1.weight", (1,), "other initial values"),
        ("`fc1.weight` starts with other bits on rank 1",),
    ),
    "LR scaled by the world size": (
        (partial(program, fault="lr"), batch()),
        ("update", "fc1.weight", ALL, "learning rate scaled by the world size"),
        (
            "The update is 4 x the reference",
            "scaled by the world size",
            "lr is 0.2 where one worker has 0.05",
        ),
    ),
    "LR scaled by the world size, AdamW": (
        (partial(program, optimizer="adamw", fault="lr", after=3), batch()),
        ("update", "fc1.weight", ALL, "learning rate scaled by the world size"),
        ("4 x the reference",),
    ),
    "sum in place of mean": (
        (
            partial(program, wrapped=False, gradients=partial(zoo.reduce_by_hand, op="sum")),
            batch(n_samples=TOO),
        ),
        ("reduction", "fc1.weight", ALL, "sum in place of mean"),
        ("weights 1 each", "where 0.25 each is right", "a sum over ranks"),
    ),
    "sum in place of mean, hidden by AdamW": (
        (
            partial(
                program, optimizer="adamw", wrapped=False, gradients=partial(zoo.reduce_by_hand, op="sum")
            ),
            batch(),
        ),
        ("reduction", "fc1.weight", ALL, "sum in place of mean"),
        (),
    ),
    "accumulation not divided": (
        (partial(program, gradients=zoo.accumulate, loss=zoo.mean_loss), batch()),
        ("reduction", "fc1.weight", ALL, "accumulation not divided"),
        ("weights 0.25 each", "where 0.125 each is right", "not divided by their number, 2"),
    ),
    "clip before the reduction": (
        (zoo.clipped_before, batch(n_samples=TOO)),
        ("reduction", "fc1.weight", ALL, "clipped before reduction"),
        ("each rank clips its own gradient",),
    ),
    "duplicated sample": (
        (partial(program, split=zoo.duplicated), batch(n_samples=23)),
        ("samples", "sample 0", (0, 3), "duplicated samples"),
        ("sample 0 of the global batch is used more than once", "padding"),
    ),
    "bf16 compression": (
        (partial(program, fault="bf16"), batch(n_samples=TOO)),
        ("reduction", "fc1.weight", ALL, "lossy reduction"),
        ("no combination of the local gradients", "bf16"),
    ),
    "weight decay dropped": (
        (partial(program, fault="weight decay", after=2), batch()),
        ("update", "fc1.weight", ALL, "weight decay"),
        ("not a multiple of the reference", "weight_decay is 0.0 where one worker has 0.01"),
    ),
    "contrastive loss with local negatives": (
        (partial(program, loss=zoo.contrastive_loss), batch()),
        ("backward", "fc2", ALL, "loss couples samples of different ranks"),
        ("not a multiple", "couples samples of different ranks"),
    ),
    # data_parallel.md, section 4: the numbers are its own
    "loss times the world size (20)": (
        (partial(program, loss=partial(zoo.scaled_loss, factor=4.0)), batch(n_samples=TOO)),
        ("backward", "fc2", ALL, "loss times world size"),
        ("16 each", "where 4 is right", "once too often"),
    ),
    "averaged twice (20)": (
        (partial(program, loss=zoo.plain_loss), batch(n_samples=TOO)),
        ("reduction", "fc1.weight", ALL, "averaged twice"),
        ("weights 0.25 each", "where 1 each is right"),
    ),
    "forward inside no_sync (26)": (
        (partial(program, gradients=zoo.forward_without_sync), batch()),
        ("reduction", "fc1.weight", ALL, "not reduced"),
        ("weights 1, 0, 0, 0 on rank 0", "no parameter is reduced"),
    ),
    "no_sync off by one (27)": (
        (
            partial(program, gradients=partial(zoo.accumulate, divide=True, sync=(0,)), loss=zoo.mean_loss),
            batch(),
        ),
        ("reduction", "fc1.weight", ALL, "ranks disagree"),
        ("weights 0.25, 0.25, 0.25, 0.25, 1, 0, 0, 0 on rank 0",),
    ),
    "DDP bypassed (28)": (
        (partial(program, loss=zoo.bypassed), batch()),
        ("reduction", "fc1.weight", ALL, "not reduced"),
        ("no parameter is reduced",),
    ),
    "parameter added after wrapping (30)": (
        (partial(program, fault="late"), batch()),
        ("reduction", "late", ALL, "not reduced"),
        ("`late` is not reduced", "weights 1, 0, 0, 0"),
    ),
    "only the last micro-batch counts (24)": (
        (partial(program, wrapped=False, gradients=zoo.last_microbatch, loss=zoo.mean_loss), batch()),
        ("reduction", "fc1.weight", ALL, "micro-batches left out"),
        ("micro-batch 0 of 2 does not count",),
    ),
    "norm reduced again (25)": (
        (partial(program, clip=zoo.norm_summed_again), batch()),
        ("clipping", "fc1.weight", ALL, "norm summed over ranks again"),
        ("0.5", "summed over ranks once more"),
    ),
    "not clipped": (
        (partial(program, clip=zoo.not_clipped), batch()),
        ("clipping", "fc1.weight", ALL, "not clipped"),
        (),
    ),
    "zeros for an unused parameter (32)": (
        (partial(program, "unused", wrapped=False, gradients=zoo.zeros_for_none), batch()),
        ("reduction", "other.weight", ALL, "gradient of an unused parameter"),
        ("zeros in place of none",),
    ),
    "the same data on every rank (53)": (
        (partial(program, split=zoo.same_for_all), batch()),
        ("samples", "sample 6", ALL, "every rank has the same samples"),
        ("every rank draws the same ones",),
    ),
    "LR restored on rank 0 only (7)": (
        (partial(program, fault="lr on rank 0"), batch()),
        ("update", "fc1.weight", (1, 2, 3), "learning rate"),
        ("2 x the reference on ranks 1, 2, 3", "lr is 0.1"),
    ),
    "optimizer state on rank 0 only (9)": (
        (partial(program, optimizer="adamw", fault="optimizer state", after=2), batch()),
        ("initial values", "fc1.weight: step", (1, 2, 3), "other optimizer state"),
        ("on ranks 1, 2, 3",),
    ),
    "other structure on rank 1 (6)": (
        (partial(program, wrapped=False, fault="structure"), batch()),
        ("initial values", "fc2.bias", (1,), "other structure"),
        ("shape (4,), where one worker has shape (3,)",),
    ),
    "buffer of one rank (10)": (
        (partial(program, "ema"), batch()),
        ("buffers", "codebook", ALL, "buffers of one rank"),
        ("`codebook`",),
    ),
    "random numbers in forward (57)": (
        (partial(program, "noisy"), batch()),
        ("forward", "fc1", (1, 2, 3), "random numbers"),
        (),
    ),
    "whole step, summed": (
        (
            partial(
                program, wrapped=True, train_step=partial(zoo.whole_step, bound=None), loss=zoo.plain_loss
            ),
            batch(),
        ),
        ("reduction", "fc1.weight", ALL, "averaged twice"),
        ("weights 0.25 each on rank 0 where 1 each is right",),
    ),
    "another rule of clipping by 1e-6": (
        (partial(zoo.own_step, "exact", clip=zoo.clip), batch("tokens")),
        ("reduction", "fc1.weight", ALL, "reduction scaled"),
        ("x the reference's, where it enters the optimizer", "clipping"),
    ),
    "another rule of clipping by 1e-6, where DDP averages": (
        (partial(zoo.own_step, "fast", clip=zoo.clip), batch("tokens")),
        ("reduction", "fc1.weight", ALL, "reduction scaled"),
        ("x the reference's, where it enters the optimizer", "clipping"),
    ),
    "TrainStep's loss times the world size (20)": (
        (
            partial(zoo.own_step, "fast", loss=zoo.sum_times_world_size, clip_norm=None, clip=None),
            batch("tokens"),
        ),
        ("backward", "fc2", ALL, "loss times world size"),
        ("992 each", "where 248 is right", "once too often"),
    ),
    "a parameter that the optimizer does not hold": (
        (partial(program, fault="not in the optimizer"), batch()),
        ("update", "fc2.bias", ALL, "not updated"),
        ("`fc2.bias`",),
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found_where_it_was_planted(found, name):
    _, right, fragments = FAULTS[name]
    got = found[name]
    assert (got.stage, got.tensor, got.ranks, got.cause) == right, got.sentence
    for fragment in fragments:
        assert fragment in got.sentence
    assert got.findings[0].sentence == got.sentence
    assert not got.same


SINGLE = [
    "loss count off by 1e-6",
    "LR scaled by the world size",
    "sum in place of mean",
    "norm reduced again (25)",
]


@pytest.mark.parametrize("name", SINGLE)
def test_a_stage_that_was_given_right_values_is_not_blamed_for_the_one_before(found, name):
    assert len(found[name].findings) == 1


def test_faults_of_several_stages_are_all_named(found):
    assert [f.stage for f in found["clip before the reduction"].findings] == ["reduction", "clipping"]
    assert [f.stage for f in found["BatchNorm not synchronised"].findings] == [
        "forward",
        "backward",
        "buffers",
    ]


CLEAN = [
    (partial(program, model, optimizer, after), batch(model, n_samples))
    for model, optimizer, n_samples, after in itertools.product(
        ["mlp", "groupnorm", "batchnorm", "transformer"], ["sgd", "adamw"], [24, 22], [0, 50]
    )
]
OTHER_CLEAN = [
    (zoo.minimal, batch()),
    (partial(program, wrapped=False, gradients=by_hand), batch(n_samples=TOO)),
    (partial(program, split=zoo.interleaved, clip=zoo.clip), batch(n_samples=TOO)),
    (partial(program, train_step=zoo.whole_step, clip=zoo.clip), batch(n_samples=TOO)),
    (partial(program, gradients=partial(zoo.accumulate, divide=True), loss=zoo.mean_loss), batch()),
    (partial(program, "tokens"), batch("tokens")),
    (
        partial(program, wrapped=False, loss=zoo.plain_loss, gradients=partial(zoo.reduce_by_hand, op="sum")),
        batch(n_samples=TOO),
    ),
    (partial(program, "unused", wrapped=False, gradients=by_hand), batch()),
    (partial(zoo.own_step, "fast"), batch("tokens")),
    (partial(zoo.own_step, "exact"), batch("tokens")),
    (partial(program, loss=zoo.float_cast), batch()),
    (partial(program, wrapped=False, gradients=by_hand, fault="explicit float32"), batch()),
]


FEW_CLEAN = [*OTHER_CLEAN, *CLEAN[::5], CLEAN[19]]


@pytest.fixture(scope="module")
def explained():
    """All of them on workers that are started once."""
    cases = [*(case for case, _, _ in FAULTS.values()), *FEW_CLEAN]
    return explain.many(cases, 4, timeout_seconds=170)


@pytest.fixture
def found(explained):
    return dict(zip(FAULTS, explained))


def check_clean(explanations):
    for got in explanations:
        assert got.same, got.sentence
        assert got.findings == ()
        assert got.size < 1e-11
        assert not any("rounding explains" in warning for warning in got.warnings), got.warnings


def test_right_programs_of_many_forms_are_left_in_peace(explained):
    clean = explained[len(FAULTS) :]
    assert len(clean) == len(FEW_CLEAN)
    check_clean(clean)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 4])
def test_no_false_alarm_in_the_long_campaign(world_size):
    assert len(CLEAN) == 32
    check_clean(explain.many(CLEAN, world_size, timeout_seconds=900))


REFUSED = {
    "constant loss": (partial(program, loss=zoo.constant), batch(), "every gradient is 0"),
    "loss without the model": (partial(program, loss=zoo.independent), batch(), "depends on no trainable"),
    "equal samples": (
        zoo.minimal,
        tuple(t[:1].expand(8, *t.shape[1:]) for t in batch()),
        "samples are equal",
    ),
    "order of the samples": (partial(program, loss=zoo.ordered), batch(), "samples are put in another order"),
    "loss form": (
        partial(program, wrapped=False, loss=zoo.sum_and_count),
        batch(),
        "Program(train_step=...)",
    ),
    "explicit dtype in DDP": (
        partial(program, fault="explicit float32"),
        batch(),
        "`fc1.bias` to follow torch's",
    ),
    "no program": (dict, batch(), "an explain.Program, got dict"),
    "no samples": (zoo.minimal, (1, 2), "expected tensors with the samples on their first axis"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_could_not_fail_or_is_no_program_is_refused(name):
    build, samples, fragment = REFUSED[name]
    with pytest.raises(SpecError) as refusal:
        explain.one_step(build, samples, 2)
    assert fragment in str(refusal.value)
    assert refusal.value.exit_code == 2


def test_one_worker_is_no_comparison():
    with pytest.raises(ValueError, match="at least 2"):
        explain.one_step(zoo.minimal, batch(), 1)


def test_two_workers_and_dropout_are_said_aloud():
    got = explain.one_step(partial(program, "transformer"), batch("transformer"), 2)
    assert got.same
    assert got.warnings[0].startswith("2 workers only")
    assert "Dropout was set to 0 in `block.self_attn`" in got.warnings[1]
    assert got.as_built.dtype == "float32"
    assert 0 < got.as_built.ulps < 1000
    assert json.loads(json.dumps(got.to_dict()))["same"] is True


def command(folder, monkeypatch, *arguments):
    """Run ``samestep explain`` on a file of a user's in a folder."""
    text = """
import explain_faults as zoo
global_batch = zoo.batch(n_samples=22)
build = zoo.minimal
def right():
    return zoo.program()
def even():
    return zoo.batch()
"""
    (folder / "users_training.py").write_text(text)
    monkeypatch.chdir(folder)
    monkeypatch.setattr("sys.path", [*sys.path])
    monkeypatch.delitem(sys.modules, "users_training", raising=False)
    app = typer.Typer()
    app.command()(explain_command)
    return CliRunner().invoke(app, list(arguments))


def test_the_command_names_the_fault_and_ends_with_1(tmp_path, monkeypatch):
    done = command(tmp_path, monkeypatch, "users_training:build", "--junit", "result.xml")
    assert done.exit_code == 1, done.output
    assert done.stdout.startswith("backward: Backward parts at the last layer, `fc2`")
    assert "a mean of means, counts 6, 6, 5, 5" in done.stdout
    case = ElementTree.parse(tmp_path / "result.xml").getroot()
    assert case.get("failures") == "1"
    assert case.find("testcase/failure").get("type") == "mean of means"


def test_the_command_ends_with_0_and_speaks_json(tmp_path, monkeypatch, explained):
    asked = []

    def answer(*args, **kwargs):
        asked.extend(args)
        return explained[-1]

    monkeypatch.setattr(explain, "one_step", answer)
    options = ["--workers", "4", "--json", "--batch", "users_training:even"]
    done = command(tmp_path, monkeypatch, "users_training:right", *options)
    assert done.exit_code == 0, done.output
    assert asked[1][0].shape == (24, 6)
    assert asked[2] == 4
    said = json.loads(done.stdout)
    assert said["same"] is True
    assert said["world_size"] == 4
    assert said["findings"] == []


@pytest.mark.parametrize(
    ("words", "fragment"),
    [
        (["users_training"], "expected MODULE:NAME"),
        (["no_such_module:build"], "there is no module `no_such_module`"),
        (["users_training:nothing"], "has no `nothing`"),
        (["users_training:build", "--batch", "users_training:nothing"], "--batch"),
    ],
)
def test_wrong_usage_ends_with_2(tmp_path, monkeypatch, words, fragment):
    done = command(tmp_path, monkeypatch, *words)
    assert done.exit_code == 2
    assert fragment in done.stderr
