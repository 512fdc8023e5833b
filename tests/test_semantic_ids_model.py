"""The autoencoder of the semantic-ids recipe: shapes, sums over samples, gradients, codes and back."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from samestep.recipes.semantic_ids.model import RQVAE, as_tensor, loss_sums


def _model(dtype: torch.dtype = torch.float32) -> RQVAE:
    """A small model in no special state: curves bent, standardization not trivial."""
    torch.manual_seed(0)
    model = RQVAE(dim=6, n_centroids=(8, 4), latent_dim=3, hidden=(10, 5), beta=0.5).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
        model.center.normal_()
        model.scale.fill_(1.7)
    return model


def _items(n: int = 20, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(n, 6, generator=torch.Generator().manual_seed(5)).to(dtype)


def test_shapes() -> None:
    model, x = _model(), _items()
    output = model(x)
    assert output.reconstruction.shape == x.shape
    assert output.codes.shape == (20, 2)
    assert output.loss.shape == output.reconstruction_error.shape == output.commitment_error.shape == ()
    assert model.latents(x).shape == (20, 3)
    assert [tuple(p.shape) for p in model.quantizer.codebooks] == [(8, 3), (4, 3)]
    assert RQVAE(dim=6, latent_dim=2, hidden=())(x).reconstruction.shape == x.shape


def test_the_loss_is_the_sum_over_samples_of_the_methods_three_terms() -> None:
    model, x = _model(torch.float64), _items(dtype=torch.float64)
    loss, count, sums = loss_sums(model, x)
    total = reconstruction = commitment = 0.0
    with torch.no_grad():
        for row in x:
            u = (row - model.center) * model.scale
            latent = residual = model.encoder(u[None])[0]
            quantized = torch.zeros_like(latent)
            for codebook in model.quantizer.codebooks:
                centroid = min(codebook, key=lambda c: float((c - residual).square().sum()))
                residual, quantized = residual - centroid, quantized + centroid
                commitment += float(residual.square().sum()) / 6
            reconstruction += float((model.decoder(quantized[None])[0] - u).square().sum()) / 6
        total = reconstruction + (1 + 0.5) * commitment
    assert count == 20
    assert float(loss.detach()) == pytest.approx(total, rel=1e-12)
    assert float(sums["reconstruction_error"]) == pytest.approx(reconstruction, rel=1e-12)
    assert float(sums["commitment_error"]) == pytest.approx(commitment, rel=1e-12)
    assert not any(value.requires_grad for value in sums.values())


@pytest.mark.parametrize("cuts", [(0, 20), (7, 20), (1, 2, 20), (20,)])
def test_shards_of_any_size_give_the_same_sums_and_gradients(cuts: tuple[int, ...]) -> None:
    model, x = _model(torch.float64), _items(dtype=torch.float64)
    loss_sums(model, x)[0].backward()
    whole = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    assert set(whole) == {name for name, _ in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    loss, count = 0.0, 0
    for start, stop in zip((0, *cuts), cuts):
        part, n, _ = loss_sums(model, x[start:stop])
        part.backward()
        loss, count = loss + float(part.detach()), count + n
    assert count == 20
    assert loss == pytest.approx(float(loss_sums(model, x)[0].detach()), rel=1e-12)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, whole[name], msg=name)


def test_encoder_gradient_is_that_of_the_decoder_at_the_quantized_latent() -> None:
    model, x = _model(torch.float64), _items(dtype=torch.float64)
    model(x).reconstruction_error.backward()
    standard = model.standardize(x)
    latents = model.encoder(standard)
    quantized = model.quantizer.decode(model.encode(x)).requires_grad_()
    ((model.decoder(quantized) - standard).square().sum() / 6).backward()
    expected = torch.autograd.grad(latents, model.encoder.line.weight, quantized.grad)[0]
    torch.testing.assert_close(model.encoder.line.weight.grad, expected)


def test_codes_decode_to_the_reconstruction() -> None:
    model, x = _model(), _items()
    output = model(x)
    assert torch.equal(model.encode(x), output.codes)
    torch.testing.assert_close(model.decode(output.codes), output.reconstruction)
    assert model.decode(output.codes[:, :1]).shape == x.shape


def test_a_rows_code_and_latent_do_not_depend_on_the_rows_around_it() -> None:
    model, x = _model(), _items(2050)
    latents, codes = model.latents(x), model.encode(x)
    for start, stop in [(0, 1), (1, 4), (1020, 1030), (5, 2050), (7, 7)]:
        assert torch.equal(model.latents(x[start:stop]), latents[start:stop])
        assert torch.equal(model.encode(x[start:stop]), codes[start:stop])


def test_arrays_and_memory_maps_are_encoded_as_tensors_are(tmp_path: object) -> None:
    model = _model()
    array = _items(30).numpy().astype(np.float16)
    path = f"{tmp_path}/items.npy"
    np.save(path, array)
    mapped = np.load(path, mmap_mode="r")
    expected = model.encode(torch.from_numpy(array).float())
    assert torch.equal(model.encode(mapped), expected)
    assert torch.equal(model.encode(array), expected)


def test_float16_rows_are_standardized_in_the_models_precision() -> None:
    model = _model()
    x = _items().half()
    assert torch.equal(model(x).codes, model(x.float()).codes)
    assert as_tensor(x, model.center).dtype == torch.float32


def test_at_the_start_the_curves_are_zero() -> None:
    model = RQVAE(dim=6, n_centroids=(4,), latent_dim=2, hidden=(5,))
    x = _items()
    assert torch.equal(model.latents(x[:3]), model._in_blocks(x[:3], model.encoder.line))
    assert all(bool((part.curve[-1].weight == 0).all()) for part in (model.encoder, model.decoder))


def test_loss_sums_work_through_a_wrapper() -> None:
    class Wrapper(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

        def forward(self, x: Tensor) -> object:
            return self.module(x)

    model, x = _model(), _items()
    assert torch.equal(loss_sums(Wrapper(model), x)[0], loss_sums(model, x)[0])


def test_latent_dim_must_fit() -> None:
    for latent_dim in (0, 7):
        with pytest.raises(ValueError, match="`latent_dim`: expected 1 to 6"):
            RQVAE(dim=6, latent_dim=latent_dim)
