"""What the data give the network: principal axes and codebooks, the same however the rows are split."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from samestep import launch, reduce
from samestep.errors import SpecError
from samestep.group import Group
from samestep.recipes.semantic_ids.initial import compute_axes, compute_codebooks
from samestep.recipes.semantic_ids.model import RQVAE

_ESCO = Path(__file__).parents[2] / "shared" / "data" / "esco_skills_minilm.npz"


def _points(n: int = 600) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    spread = torch.tensor([5.0, 3.0, 2.0, 1.0, 0.5, 0.2])
    turn = torch.linalg.qr(torch.randn(6, 6, generator=generator))[0]
    return torch.randn(n, 6, generator=generator) * spread @ turn + 10.0


def _model() -> RQVAE:
    torch.manual_seed(0)
    return RQVAE(dim=6, n_centroids=(16, 8), latent_dim=3, hidden=(7,))


def _start(model: RQVAE, points: Tensor) -> dict[str, Tensor]:
    axes = compute_axes(model, points)
    model.load_state_dict({**model.state_dict(), **axes})
    return axes


def test_axes_make_the_best_linear_autoencoder() -> None:
    points, model = _points(), _model()
    start = _start(model, points)
    exact = points.double()
    centered = exact - exact.mean(0)
    values, axes = np.linalg.eigh((centered.T @ centered).numpy())
    torch.testing.assert_close(start["center"].double(), exact.mean(0), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(
        start["encoder.line.weight"].double().abs(),
        torch.from_numpy(axes[:, ::-1][:, :3].T.copy()).abs(),
        rtol=1e-4,
        atol=1e-5,
    )
    assert torch.equal(start["decoder.line.weight"], start["encoder.line.weight"].T)
    standard = model.standardize(points)
    assert float(standard.square().mean()) == pytest.approx(1.0, rel=1e-5)
    with torch.no_grad():
        left = (model.decoder(model.encoder(standard)) - standard).square().sum() / standard.square().sum()
    assert float(left) == pytest.approx(values[:3].sum() / values.sum(), rel=1e-4)


def test_the_largest_entry_of_every_axis_is_positive() -> None:
    line = compute_axes(_model(), _points())["encoder.line.weight"]
    assert bool((line.gather(1, line.abs().argmax(1, keepdim=True)) > 0).all())


def test_axes_do_not_depend_on_order_or_container() -> None:
    points = _points()
    expected = compute_axes(_model(), points)
    shuffled = points[torch.randperm(600, generator=torch.Generator().manual_seed(1))]
    for other in (shuffled, points.numpy()):
        found = compute_axes(_model(), other)
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_codebooks_fit_the_latents_and_use_every_code() -> None:
    points, model = _points(), _model()
    _start(model, points)
    tables = compute_codebooks(model, points)
    assert {name: tuple(table.shape) for name, table in tables.items()} == {
        "quantizer.codebooks.0": (16, 3),
        "quantizer.codebooks.1": (8, 3),
    }
    model.load_state_dict({**model.state_dict(), **tables})
    codes = model.encode(points)
    assert [len(column.unique()) for column in codes.T] == [16, 8]
    latents = model.latents(points)
    means = torch.stack([latents[codes[:, 0] == code].mean(0) for code in range(16)])
    # Lloyd's fixed point up to its tolerance: each centroid is the mean of the latents that choose it.
    torch.testing.assert_close(tables["quantizer.codebooks.0"], means, rtol=0.0, atol=0.1)


def test_codebooks_hold_the_mean_of_latents_that_are_off_centre() -> None:
    points, model = _points(), _model()
    _start(model, points)
    with torch.no_grad():
        model.encoder.curve[-1].bias.fill_(50.0)
    tables = compute_codebooks(model, points)
    model.load_state_dict({**model.state_dict(), **tables})
    left = model.latents(points) - model.quantizer.decode(model.encode(points))
    torch.testing.assert_close(left.mean(0), torch.zeros(3), rtol=0.0, atol=0.5)


@pytest.mark.parametrize("points", [torch.zeros(0, 6), torch.ones(5, 6)], ids=["none", "equal"])
def test_data_without_spread_are_refused(points: Tensor) -> None:
    with pytest.raises(SpecError, match="`points`: expected"):
        compute_axes(_model(), points)


def _in_worker(group: Group, bounds: list[int]) -> dict[str, Tensor]:
    part = _points()[bounds[group.rank] : bounds[group.rank + 1]]
    model, pool = _model(), reduce.pool(group)
    axes = compute_axes(model, part, pool)
    model.load_state_dict({**model.state_dict(), **axes})
    return {**axes, **compute_codebooks(model, part, pool)}


@pytest.mark.parametrize("bounds", [[0, 250, 600], [0, 0, 7, 600]], ids=["2-workers", "3-workers-one-empty"])
def test_workers_find_bit_for_bit_what_one_finds(bounds: list[int]) -> None:
    model = _model()
    expected = _start(model, _points())
    expected |= compute_codebooks(model, _points())
    for found in launch.run(_in_worker, len(bounds) - 1, bounds, timeout_seconds=120):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.skipif(not _ESCO.exists(), reason="the ESCO embeddings are not beside the checkout")
def test_on_real_embeddings_the_start_alone_fills_the_codes() -> None:
    with np.load(_ESCO) as file:
        rows = file["embeddings"]
    torch.manual_seed(0)
    model = RQVAE(dim=384)
    _start(model, rows)
    model.load_state_dict({**model.state_dict(), **compute_codebooks(model, rows, max_iterations=10)})
    codes = model.encode(rows)
    assert len(codes.unique(dim=0)) / len(rows) > 0.949  # residual k-means in the input space, by a peer
    assert [len(column.unique()) for column in codes.T] == [256, 256, 256]
