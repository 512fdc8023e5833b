"""The residual quantizer: nearest codes, the straight-through gradient, sums over samples."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from samestep.recipes.semantic_ids.quantizer import ResidualQuantizer


def _quantizer(n_centroids: tuple[int, ...] = (7, 5, 3), latent_dim: int = 4) -> ResidualQuantizer:
    torch.manual_seed(0)
    quantizer = ResidualQuantizer(n_centroids, latent_dim)
    with torch.no_grad():
        for level, codebook in enumerate(quantizer.codebooks):
            codebook.normal_(std=2.0**-level)
    return quantizer


def _slow_encode(latents: Tensor, quantizer: ResidualQuantizer) -> Tensor:
    """Residual coding, one row and one centroid at a time, in float64."""
    rows = []
    for latent in latents.double():
        residual, codes = latent, []
        for codebook in quantizer.codebooks:
            distances = [
                float((residual - centroid).square().sum()) for centroid in codebook.detach().double()
            ]
            codes.append(distances.index(min(distances)))
            residual = residual - codebook[codes[-1]].detach().double()
        rows.append(codes)
    return torch.tensor(rows)


def test_codes_are_the_nearest_of_each_residual() -> None:
    quantizer = _quantizer()
    latents = torch.randn(50, 4)
    assert torch.equal(quantizer.encode(latents), _slow_encode(latents, quantizer))
    assert torch.equal(quantizer(latents).codes, _slow_encode(latents, quantizer))


def test_ties_go_to_the_lowest_code() -> None:
    quantizer = ResidualQuantizer((4,), 1)
    with torch.no_grad():
        quantizer.codebooks[0].copy_(torch.tensor([[5.0], [1.0], [-1.0], [1.0]]))
    assert quantizer.encode(torch.tensor([[0.0], [1.0]])).tolist() == [[1], [1]]


def test_the_gradient_goes_straight_through() -> None:
    quantizer = _quantizer()
    latents = torch.randn(6, 4, requires_grad=True)
    weight = torch.randn(6, 4)
    (quantizer(latents).latents * weight).sum().backward()
    assert latents.grad is not None
    assert torch.equal(latents.grad, weight)
    assert all(codebook.grad is None for codebook in quantizer.codebooks)


def test_each_error_moves_only_its_side() -> None:
    quantizer = _quantizer((3, 2), 2)
    latents = torch.randn(5, 2, requires_grad=True)
    output = quantizer(latents)
    output.codebook_error.backward()
    assert latents.grad is None
    # Level 0: d/dc sum |r - c|^2 = 2 * (count * c - sum of the rows that chose c).
    first = quantizer.codebooks[0]
    chosen = torch.nn.functional.one_hot(output.codes[:, 0], 3).float()
    expected = 2 * (chosen.sum(0)[:, None] * first.detach() - chosen.T @ latents.detach())
    torch.testing.assert_close(first.grad, expected)

    quantizer.zero_grad(set_to_none=True)
    quantizer(latents).commitment_error.backward()
    assert all(codebook.grad is None for codebook in quantizer.codebooks)
    # Each level's residual is the latent minus constants, so each adds twice its own remainder.
    table = [codebook.detach() for codebook in quantizer.codebooks]
    after_first = latents.detach() - table[0][output.codes[:, 0]]
    after_second = after_first - table[1][output.codes[:, 1]]
    torch.testing.assert_close(latents.grad, 2 * (after_first + after_second))


def test_the_quantized_latent_is_what_its_codes_decode_to() -> None:
    quantizer = _quantizer()
    output = quantizer(torch.randn(9, 4))
    torch.testing.assert_close(output.latents, quantizer.decode(output.codes))
    torch.testing.assert_close(output.codebook_error, output.commitment_error)


@given(cut=st.integers(0, 12))
@settings(max_examples=13, deadline=None)
def test_errors_are_sums_so_that_parts_add_up(cut: int) -> None:
    quantizer = _quantizer()
    latents = torch.randn(12, 4, generator=torch.Generator().manual_seed(1))
    whole, parts = quantizer(latents), [quantizer(latents[:cut]), quantizer(latents[cut:])]
    torch.testing.assert_close(sum(part.codebook_error for part in parts), whole.codebook_error)
    torch.testing.assert_close(sum(part.commitment_error for part in parts), whole.commitment_error)
    assert torch.equal(torch.cat([part.codes for part in parts]), whole.codes)


def test_decoding_more_levels_comes_nearer_when_centroids_fit() -> None:
    latents = torch.tensor([[-3.0], [-1.0], [1.0], [3.0]])
    quantizer = ResidualQuantizer((2, 2), 1)
    with torch.no_grad():
        quantizer.codebooks[0].copy_(torch.tensor([[-2.0], [2.0]]))
        quantizer.codebooks[1].copy_(torch.tensor([[-1.0], [1.0]]))
    codes = quantizer.encode(latents)
    assert codes.tolist() == [[0, 0], [0, 1], [1, 0], [1, 1]]
    assert quantizer.decode(codes[:, :1]).flatten().tolist() == [-2.0, -2.0, 2.0, 2.0]
    assert torch.equal(quantizer.decode(codes), latents)


def test_half_precision_latents_are_compared_in_float32() -> None:
    quantizer = ResidualQuantizer((2,), 64)
    with torch.no_grad():
        quantizer.codebooks[0][0].fill_(0.0)
        quantizer.codebooks[0][1].fill_(30.0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = quantizer(torch.full((1, 64), 32.0, dtype=torch.float16))
    assert output.codes.tolist() == [[1]]
    assert output.commitment_error.dtype == torch.float32
    assert float(output.commitment_error) == 64 * 4.0


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="n_centroids"):
        ResidualQuantizer((), 4)
    with pytest.raises(ValueError, match="n_centroids"):
        ResidualQuantizer((4, 0), 4)
    with pytest.raises(ValueError, match="expected at most 3 columns"):
        _quantizer().decode(torch.zeros(2, 4, dtype=torch.int64))
