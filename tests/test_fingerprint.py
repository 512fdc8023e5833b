"""Fingerprints: every bit, its place, dtype and shape count; strides, device and threads do not."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn, optim

from samestep import fingerprint
from samestep.fingerprint import _digest

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]
# Around the row of 4160 bytes, its multiples, and 65 rows of sums in a row of the next level.
SIZES = [0, 1, 3, 7, 8, 63, 64, 65, 4159, 4160, 4161, 8320, 65 * 4160 - 1, 65 * 4160, 65 * 4160 + 1, 300_000]


def random_bytes(n_bytes: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (n_bytes,), dtype=torch.uint8, generator=generator)


def flip(data: Tensor, *bits: int) -> Tensor:
    changed = data.clone()
    for bit in bits:
        changed[bit // 8] ^= 1 << (bit % 8)
    return changed


def digest_by_hand(t: Tensor) -> str:
    """The definition in Python integers: rows times keys until one row is left, then two mixed words."""
    raw = t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    keys = _digest._keys(torch.device("cpu")).to(torch.int64).tolist()
    while True:
        rows = [raw[at : at + 4160] for at in range(0, max(len(raw), 1), 4160)]
        sums = [
            [sum(((b + 128) % 256 - 128) * k[c] for b, k in zip(row, keys, strict=False)) for c in range(16)]
            for row in rows
        ]
        if len(sums) == 1:
            break
        raw = b"".join(value.to_bytes(4, "little", signed=True) for row in sums for value in row)
    mask = 2**64 - 1

    def mix(word: int) -> int:
        word = word * 0x1E3779B97F4A7C15 & mask
        word = (word ^ word >> 32) * 0x3F58476D1CE4E5B9 & mask
        return word ^ word >> 29

    words = []
    header = _digest.words_of(f"{t.dtype} {tuple(t.shape)}")
    for lane in (0, 1):
        lanes = [_digest.words_of(f"lane {lane} column {i}")[0] for i in range(16)]
        total = sum(mix((value ^ key) & mask) for value, key in zip(sums[0], lanes, strict=True))
        words.append(mix((total ^ header[lane]) & mask))
    return "".join(f"{word:016x}" for word in words)


@pytest.mark.parametrize("n_bytes", [0, 1, 4160, 4161, 65 * 4160 + 9])
def test_digest_is_the_definition(n_bytes: int) -> None:
    data = random_bytes(n_bytes)
    assert fingerprint.hexdigest(data) == digest_by_hand(data)


@pytest.mark.parametrize("n_bytes", SIZES)
def test_portable_path_gives_the_same_digest(n_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    data = random_bytes(n_bytes)
    fast = fingerprint.hexdigest(data)
    monkeypatch.setattr(_digest, "_kernel", lambda: None)
    assert fingerprint.hexdigest(data) == fast
    monkeypatch.setattr(_digest, "_has_integer_product", lambda device: False)
    assert fingerprint.hexdigest(data) == fast


@pytest.mark.parametrize("threads", [1, 2])
def test_the_native_kernel_gives_the_digests_of_torch(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of many tensors share a product there: empty ones, tails, unaligned starts, three levels."""
    if _digest._kernel() is None:
        pytest.skip("no compiler, or a processor without AVX-512 VNNI")
    data = random_bytes(9_000_000)
    sizes = [*SIZES, 1, 0, 12 * 4160, 13 * 4160 + 5, 8_999_000, 2, 4159]
    parts = [data[i : i + size] for i, size in enumerate(sizes)] + [data[: 4160 * 60].view(60, 4160).t()]
    torch.set_num_threads(threads)
    native = _digest.digests(parts)
    monkeypatch.setattr(_digest, "_kernel", lambda: None)
    assert torch.equal(native, _digest.digests(parts))


def test_no_two_keys_can_cancel() -> None:
    """Two changed bytes of a row cancel only where one row of keys is a multiple of another: none is."""
    keys = _digest._keys(torch.device("cpu")).tolist()
    assert len(keys) == 4160
    assert all(1 <= abs(value) <= 63 for row in keys for value in row)
    lines = set()
    for row in keys:
        unit = math.gcd(*row) * (1 if row[0] > 0 else -1)
        lines.add(tuple(value // unit for value in row))
    assert len(lines) == 4160


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_one_or_two_flipped_bits_show(data: st.DataObject) -> None:
    n_bytes = data.draw(st.sampled_from(SIZES[1:]))
    bits = data.draw(st.sets(st.integers(0, 8 * n_bytes - 1), min_size=1, max_size=2))
    before = random_bytes(n_bytes)
    assert fingerprint.hexdigest(before) != fingerprint.hexdigest(flip(before, *bits))


def test_every_bit_of_a_small_tensor_has_its_own_digest() -> None:
    before = torch.zeros(40, dtype=torch.uint8)
    named = {str(bit): flip(before, bit) for bit in range(320)} | {"none": before}
    assert len(set(fingerprint.state(named).values())) == 321


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_paired_flips_of_the_same_bit_show(dtype: torch.dtype) -> None:
    """What an exclusive-or misses, and a plain sum misses for top bits."""
    width = torch.empty(0, dtype=dtype).element_size()
    n = 4160 * 3 // width
    places = [0, 1, 2, 7, n // 3 - 1, n // 3, n // 2, n - 1]
    for bit in [0] if dtype is torch.bool else sorted({0, 8 * width - 1, 8 * width // 2 - 1}):
        found = set()
        for i in places:
            for j in places:
                if i < j:
                    changed = flip(
                        torch.zeros(n * width, dtype=torch.uint8), *(8 * width * p + bit for p in (i, j))
                    )
                    found.add(fingerprint.hexdigest(changed.view(dtype)))
        assert len(found) == 28


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(2, 40),
    columns=st.sampled_from([1, 2, 3, 64, 65, 128, 1040]),
    structured=st.sampled_from(["eye", "ones", "random"]),
    data=st.data(),
)
def test_swapped_rows_and_columns_show(rows: int, columns: int, structured: str, data: st.DataObject) -> None:
    if structured == "eye":  # all row sums and all column sums stay the same when its rows are swapped
        matrix = torch.eye(rows, columns)
    elif structured == "ones":
        matrix = torch.ones(rows, columns) * torch.arange(rows)[:, None]
    else:
        matrix = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows))
    i, j = data.draw(st.lists(st.integers(0, rows - 1), min_size=2, max_size=2, unique=True))
    swapped = matrix.clone()
    swapped[[i, j]] = matrix[[j, i]]
    same = torch.equal(swapped, matrix)
    assert (fingerprint.hexdigest(swapped) == fingerprint.hexdigest(matrix)) is same
    turned, before = swapped.t().contiguous(), matrix.t().contiguous()
    assert (fingerprint.hexdigest(turned) == fingerprint.hexdigest(before)) is same


@settings(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from([1, 2, 3, 4, 5]), min_size=0, max_size=4))
def test_reshapes_show(shape: list[int]) -> None:
    t = torch.zeros(shape)
    others = [t.unsqueeze(0), t.unsqueeze(-1), t.reshape(-1, 1), torch.zeros(t.numel() + 1)]
    ours = fingerprint.hexdigest(t)
    assert all(fingerprint.hexdigest(other) != ours for other in others if other.shape != t.shape)


def test_dtypes_with_the_same_bytes_differ() -> None:
    data = random_bytes(4160 * 2) & 1
    digests = {fingerprint.hexdigest(data.view(dtype)) for dtype in DTYPES}
    assert len(digests) == len(DTYPES)
    assert len({fingerprint.hexdigest(torch.empty(0, dtype=dtype)) for dtype in DTYPES}) == len(DTYPES)
    empty = [(0,), (0, 1), (1, 0), (0, 0), (2, 0)]
    assert len({fingerprint.hexdigest(torch.empty(shape)) for shape in empty}) == len(empty)


def test_signed_zero_and_nan_payloads_show() -> None:
    patterns = [0, -(2**31), 0x7FC00000, 0x7FC00001, 0x7F800001, -0x400000]  # 0.0, -0.0 and four NaNs
    values = [torch.tensor([pattern], dtype=torch.int32).view(torch.float32) for pattern in patterns]
    assert len({fingerprint.hexdigest(value) for value in values}) == len(patterns)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strides_offset_and_source_do_not_count(dtype: torch.dtype) -> None:
    base = (random_bytes(64 * 130 * torch.empty(0, dtype=dtype).element_size()) & 1).view(dtype).view(64, 130)
    whole = base[1:, 3:99]
    plain = whole.contiguous()
    ours = fingerprint.hexdigest(plain)
    assert fingerprint.hexdigest(whole) == ours
    assert fingerprint.hexdigest(plain.t().contiguous().t()) == ours
    assert fingerprint.hexdigest(base.reshape(-1)[1:]) == fingerprint.hexdigest(base.reshape(-1)[1:].clone())


def test_views_that_only_mark_conjugate_or_negative_are_resolved() -> None:
    z = torch.complex(torch.randn(9), torch.randn(9))
    assert fingerprint.hexdigest(z.conj()) == fingerprint.hexdigest(z.conj().resolve_conj())
    assert fingerprint.hexdigest(z.conj()) != fingerprint.hexdigest(z)
    assert fingerprint.hexdigest(z.conj().imag) == fingerprint.hexdigest(-z.imag)


def test_expanded_and_channels_last() -> None:
    row = torch.randn(5)
    assert fingerprint.hexdigest(row.expand(4, 5)) == fingerprint.hexdigest(row.repeat(4, 1))
    image = torch.randn(2, 3, 4, 5)
    assert fingerprint.hexdigest(image.to(memory_format=torch.channels_last)) == fingerprint.hexdigest(image)


def test_tensor_is_two_words_and_leaves_its_argument_alone() -> None:
    parameter = nn.Parameter(torch.randn(7, 3))
    before = parameter.detach().clone()
    words = fingerprint.tensor(parameter)
    assert (words.shape, words.dtype, words.requires_grad) == ((2,), torch.int64, False)
    assert torch.equal(parameter, before)
    assert fingerprint.hexdigest(parameter) == "".join(f"{w % 2**64:016x}" for w in words.tolist())


def test_autocast_and_threads_do_not_count() -> None:
    data = torch.randn(70_001)
    ours = fingerprint.hexdigest(data)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.inference_mode():
        assert fingerprint.hexdigest(data) == ours
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2 if threads == 1 else 1)
        assert fingerprint.hexdigest(data) == ours
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(
    "bad",
    [torch.eye(2).to_sparse(), torch.empty(2, device="meta"), [1.0], None],
    ids=["sparse", "meta", "list", "None"],
)
def test_what_has_no_plain_bytes_is_refused_by_name(bad: object) -> None:
    with pytest.raises(TypeError, match="`bad`: expected a dense tensor"):
        fingerprint.state({"good": torch.zeros(1), "bad": bad})


def test_state_equals_the_digests_one_by_one_in_order() -> None:
    named = {f"t{n}": random_bytes(n, n) for n in reversed(SIZES)}
    found = fingerprint.state(named)
    assert list(found) == list(named)
    assert found == {name: fingerprint.hexdigest(t) for name, t in named.items()}
    assert fingerprint.state({}) == {}


def test_word_counts_names_and_values_but_not_order() -> None:
    named = {f"t{n}": random_bytes(n, n) for n in SIZES}
    ours = fingerprint.word(named)
    assert 0 <= ours < 2**63
    assert fingerprint.word(dict(reversed(named.items()))) == ours
    others = [
        {**named, "t7": flip(named["t7"], 55)},
        {**named, "t0": torch.zeros(0)},
        {**{k: v for k, v in named.items() if k != "t7"}, "T7": named["t7"]},
        {**named, "t7": named["t8"], "t8": named["t7"]},
        {**named, "more": torch.zeros(0)},
        {},
    ]
    assert len({ours, *map(fingerprint.word, others)}) == 1 + len(others)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.second = nn.Linear(3, 3, bias=False)
        self.first = nn.Linear(3, 3)
        self.first.weight = self.second.weight
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("hidden", torch.zeros(2), persistent=False)
        self.alpha = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.first(self.second(x))) * self.alpha


def test_named_tensors_in_registration_order_with_hidden_buffers_and_ties_once() -> None:
    model = Tied()
    assert list(fingerprint.named_tensors(model)) == [
        "alpha",
        "second.weight",
        "first.bias",
        "norm.weight",
        "norm.bias",
        "hidden",
        "norm.running_mean",
        "norm.running_var",
        "norm.num_batches_tracked",
    ]
    before = fingerprint.word(model)
    model.hidden[1] = -0.0
    assert fingerprint.word(model) != before


@pytest.mark.parametrize(
    "build",
    [
        lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
        lambda p: optim.AdamW(p, lr=torch.tensor(0.1), betas=(0.8, 0.99), amsgrad=True, foreach=False),
        lambda p: optim.Adafactor(p),
        lambda p: optim.LBFGS(p, max_iter=2, history_size=2),
    ],
    ids=["sgd", "adamw", "adafactor", "lbfgs"],
)
def test_every_part_of_an_optimizer_counts(build) -> None:  # type: ignore[no-untyped-def]
    model = Tied()
    optimizer = build(model.parameters())
    for _ in range(2):

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = model(torch.randn(8, 3, generator=torch.Generator().manual_seed(1))).square().sum()
            loss.backward()
            return loss

        optimizer.step(closure)
    ours = fingerprint.named_state(optimizer, model)
    assert all(key.startswith(("state.", "options.0.")) for key in ours)
    assert "options.0.lr" in ours
    for key, value in ours.items():
        if value.numel():
            changed = value.clone().contiguous()
            changed.view(-1).view(torch.uint8)[0] ^= 1
            assert fingerprint.word({**ours, key: changed}) != fingerprint.word(ours), key
    twin = copy.deepcopy(optimizer)
    assert fingerprint.state(twin) == fingerprint.state(optimizer)
    twin.param_groups[0]["lr"] = twin.param_groups[0]["lr"] * 2
    differing = {k for k, v in fingerprint.state(twin).items() if fingerprint.state(optimizer)[k] != v}
    assert differing == {"options.0.lr"}


def test_named_state_names_and_order() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1, bias=False))
    optimizer = optim.AdamW([{"params": model[1].parameters()}, {"params": model[0].parameters(), "lr": 1.0}])
    assert not any(name.startswith("state.") for name in fingerprint.named_state(optimizer, model))
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    named = fingerprint.named_state(optimizer, model)
    parts = ("step", "exp_avg", "exp_avg_sq")
    owners = ("1.weight", "0.weight", "0.bias")
    assert list(named)[:9] == [f"state.{owner}.{part}" for owner in owners for part in parts]
    assert named["state.0.bias.exp_avg"] is optimizer.state[model[0].bias]["exp_avg"]
    assert named["options.1.lr"].item() == 1.0
    assert bytes(named["options.1.params.1"].tolist()) == b"0.bias"
    without = fingerprint.named_state(optimizer)
    assert list(without)[:9] == [f"state.{owner}.{part}" for owner in ("0.0", "1.0", "1.1") for part in parts]
    by_map = fingerprint.named_state(optimizer, dict(model.named_parameters()))
    assert list(by_map) == list(named)


def test_named_values_tells_kinds_apart() -> None:
    values = [
        None,
        (),
        True,
        1,
        1.0,
        1 + 0j,
        "1",
        2**70,
        False,
        0,
        0.0,
        -0.0,
        "",
        "0",
        b"\x00",
        [0],
        {"a": 0},
        [None],
    ]
    words = {fingerprint.word(fingerprint.named_values(value, "v")) for value in values}
    assert len(words) == len(values)
    with pytest.raises(TypeError, match=r"`v\.x\.1`: expected a tensor, .* got object"):
        fingerprint.named_values({"x": [1, object()]}, "v")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_gpu_gives_the_same_digests(dtype: torch.dtype) -> None:
    width = torch.empty(0, dtype=dtype).element_size()
    named = {str(n): (random_bytes(n // width * width, n) & 1).view(dtype) for n in SIZES}
    moved = {name: t.cuda() for name, t in named.items()}
    assert fingerprint.state(moved) == fingerprint.state(named)
    assert fingerprint.word(moved) == fingerprint.word(named)
    assert fingerprint.hexdigest(moved["300000"][1:]) == fingerprint.hexdigest(named["300000"][1:])
