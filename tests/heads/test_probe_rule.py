"""When another reading of a head is taken: much better, or better at so many places that it is no chance."""

import pytest
import torch

from specexport.heads.probe import DEVIATIONS, _compute_z_score


def places(wins, losses, both, neither):
    other = torch.tensor([True] * wins + [False] * losses + [True] * both + [False] * neither)
    first = torch.tensor([False] * wins + [True] * losses + [True] * both + [False] * neither)
    return other, first


def test_places_where_both_are_right_say_nothing():
    assert (
        _compute_z_score(*places(40, 10, 0, 0))
        == _compute_z_score(*places(40, 10, 500, 300))
        == pytest.approx(30 / 50**0.5)
    )
    assert _compute_z_score(*places(0, 0, 20, 20)) == 0.0
    assert _compute_z_score(*places(10, 40, 5, 5)) < 0


def test_a_sure_difference_may_be_smaller_than_a_quarter():
    """416 right of 1000 against 336, as a head gave a layer up; one by chance is not taken."""
    assert _compute_z_score(*places(160, 80, 256, 504)) > DEVIATIONS
    generator = torch.Generator().manual_seed(3)
    for _ in range(300):
        first, other = torch.rand((2, 760), generator=generator) < 0.42
        assert abs(_compute_z_score(other, first)) < DEVIATIONS + 0.5
