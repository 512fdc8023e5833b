"""Seeds drawn in towards the mean: what they are for, and where they lie."""

import pytest
import torch

from samestep import codebooks, kmeans


def test_codes_are_used_evenly_where_rows_are_at_right_angles():
    """Rows of unlike norms in many dimensions: the shortest seed is nearest to nearly all of them."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(1200, 200, generator=generator) * torch.linspace(0.2, 1.2, 1200).unsqueeze(1)
    plain, drawn_in = (kmeans.fit(rows, 32, seed_scale=scale) for scale in (1.0, 0.25))
    assert int(drawn_in.counts.max()) < int(plain.counts.max()) / 2
    assert drawn_in.inertia < plain.inertia


def test_seeds_are_moved_towards_the_mean_of_all_rows():
    rows = torch.tensor([[99.0], [101.0]])
    # From 99.75 and 100.25, each row chooses its own.
    found = kmeans.fit(rows, 2, seed_scale=0.25)
    assert sorted(found.centroids[:, 0].tolist()) == [99.0, 101.0]


def test_given_seeds_stay_and_scales_out_of_range_are_refused():
    rows, seeds = torch.tensor([[0.0], [1.0], [10.0]]), torch.tensor([[0.5], [10.0]])
    given = [kmeans.fit(rows, 2, seeding=seeds, seed_scale=scale).centroids for scale in (0.25, 1.0)]
    assert torch.equal(*given)
    for scale in (0.0, 1.5):
        with pytest.raises(ValueError, match="`seed_scale`: expected above 0 and at most 1"):
            codebooks.fit(rows, [2, 2], seed_scale=scale)
