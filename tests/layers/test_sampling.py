"""Draws: the right distribution, from numbers that depend on nothing but their seed and place."""

import pytest
import torch

from hf_ctxmodels.layers.lm_loss import sampling
from hf_ctxmodels.layers.lm_loss.sampling import sample_categorical, uniforms

COUNT = 1 << 16


@pytest.mark.parametrize("varied", ["seeds", "places"])
def test_uniform_numbers_are_uniform(varied: str) -> None:
    """Mean, variance, sixteen bins, and no correlation between neighbours, along seeds and along places."""
    running, fixed = torch.arange(COUNT), torch.full((COUNT,), 7)
    numbers = uniforms(running, fixed) if varied == "seeds" else uniforms(fixed, running)
    assert numbers.dtype is torch.float32
    assert numbers.min() >= 0
    assert numbers.max() < 1
    assert abs(numbers.mean() - 0.5) < 5 * (12 * COUNT) ** -0.5
    assert abs(numbers.var() * 12 - 1) < 0.02
    bins = torch.histc(numbers, 16, 0, 1)
    assert ((bins - COUNT / 16) ** 2 / (COUNT / 16)).sum() < 38  # 0.1% of a chi-square with 15 degrees of freedom
    assert abs(torch.corrcoef(torch.stack([numbers[1:], numbers[:-1]]))[0, 1]) < 0.02


def test_uniform_numbers_belong_to_seed_and_place() -> None:
    seeds = torch.tensor([-(2**63), -1, 0, 1, 2**62])
    for place in (0, 5):
        together = uniforms(seeds, torch.full((5,), place))
        apart = torch.cat([uniforms(seed[None], torch.tensor([place])) for seed in seeds])
        assert torch.equal(together, apart)
        assert len(together.unique()) == 5
    state = torch.get_rng_state()
    uniforms(seeds, torch.zeros(5, dtype=torch.int64))
    assert torch.equal(torch.get_rng_state(), state)


def test_scrambling_is_splitmix64() -> None:
    """The first outputs of the published generator for the seed 1234567, whose state the places walk along."""
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    state = torch.tensor(1234567) + torch.arange(1, 4) * sampling._STEP
    assert [int(value) % 2**64 for value in sampling._scramble(state)] == expected


@pytest.mark.parametrize("columns", [1, 5, 255, 256, 257, 512, 1000])
def test_sampling_is_inversion_of_the_cumulative_sum(columns: int) -> None:
    generator = torch.Generator().manual_seed(columns)
    probabilities = torch.rand(300, columns, generator=generator) ** 4
    probabilities[:, 1:][torch.rand(300, columns - 1, generator=generator) < 0.3] = 0
    numbers = torch.rand(300, generator=generator)
    exact = probabilities.double()
    level = numbers.double()[:, None] * exact.sum(1, keepdim=True)
    expected = (exact.cumsum(1) <= level).sum(1)
    drawn = sample_categorical(probabilities, numbers)
    assert (drawn == expected).float().mean() > 0.99  # rounding decides where the level meets a step
    assert bool((probabilities.gather(1, drawn[:, None]) > 0).all())


@pytest.mark.parametrize("number", [0.0, 1 - 2.0**-24])
def test_the_ends_never_hit_what_has_no_probability(number: float) -> None:
    probabilities = torch.zeros(1, 700)
    for place in (0, 3, 256, 300, 699):
        probabilities.zero_()[0, place] = 1e-3
        assert sample_categorical(probabilities, torch.tensor([number])).item() == place


def test_draws_follow_the_distribution() -> None:
    probabilities = torch.softmax(torch.randn(300, generator=torch.Generator().manual_seed(0)), 0)
    draws = sample_categorical(
        probabilities.expand(COUNT, -1), uniforms(torch.arange(COUNT), torch.zeros(COUNT).long())
    )
    counts = torch.bincount(draws, minlength=300)
    expected = probabilities * COUNT
    assert ((counts - expected) ** 2 / expected).sum() < 380  # 0.1% of a chi-square with 299 degrees of freedom
