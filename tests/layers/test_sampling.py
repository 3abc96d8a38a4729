"""Sampling distributions, random numbers that depend only on seed and index, and sampled softmax."""

import pytest
import torch
from torch.nn import functional as F

from hf_ctxmodels.layers.lm_loss import sampling
from hf_ctxmodels.layers.lm_loss.sampling import (
    log_uniform_probability,
    sample_categorical,
    sampled_softmax_loss,
    uniforms,
)
from hf_ctxmodels.objectives.bidirectional_lm import log_uniform_samples

COUNT = 1 << 16


@pytest.mark.parametrize("varied", ["seeds", "indices"])
def test_uniform_numbers_are_uniform(varied: str) -> None:
    """Mean, variance, chi-square of sixteen bins, and correlation of neighbors."""
    counter, fixed = torch.arange(COUNT), torch.full((COUNT,), 7)
    numbers = uniforms(counter, fixed) if varied == "seeds" else uniforms(fixed, counter)
    assert numbers.dtype is torch.float32
    assert numbers.min() >= 0
    assert numbers.max() < 1
    assert abs(numbers.mean() - 0.5) < 5 * (12 * COUNT) ** -0.5
    assert abs(numbers.var() * 12 - 1) < 0.02
    bins = torch.histc(numbers, 16, 0, 1)
    assert ((bins - COUNT / 16) ** 2 / (COUNT / 16)).sum() < 38  # 0.1% of a chi-square with 15 degrees of freedom
    assert abs(torch.corrcoef(torch.stack([numbers[1:], numbers[:-1]]))[0, 1]) < 0.02


@pytest.mark.parametrize("index", [0, 5])
def test_uniform_numbers_depend_on_seed_and_index(index: int) -> None:
    seeds, state = torch.tensor([-(2**63), -1, 0, 1, 2**62]), torch.get_rng_state()
    numbers = uniforms(seeds, torch.full((5,), index))
    assert torch.equal(numbers, torch.cat([uniforms(seed[None], torch.tensor([index])) for seed in seeds]))
    assert len(numbers.unique()) == 5
    assert torch.equal(torch.get_rng_state(), state)


def test_scramble_equals_splitmix64() -> None:
    """The first outputs of the published generator for the seed 1234567."""
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    state = torch.tensor(1234567) + torch.arange(1, 4) * sampling._STEP
    assert [int(value) % 2**64 for value in sampling._scramble(state)] == expected


@pytest.mark.parametrize("columns", [1, 5, 255, 256, 257, 512, 1000])
def test_sampling_inverts_cumulative_sum(columns: int) -> None:
    generator = torch.Generator().manual_seed(columns)
    probabilities = torch.rand(300, columns, generator=generator) ** 4
    probabilities[:, 1:][torch.rand(300, columns - 1, generator=generator) < 0.3] = 0
    numbers = torch.rand(300, generator=generator)
    exact = probabilities.double()
    level = numbers.double()[:, None] * exact.sum(1, keepdim=True)
    expected = (exact.cumsum(1) <= level).sum(1)
    samples = sample_categorical(probabilities, numbers)
    assert (samples == expected).float().mean() > 0.99  # rounding matters where the level equals a sum
    assert bool((probabilities.gather(1, samples[:, None]) > 0).all())


@pytest.mark.parametrize("number", [0.0, 1 - 2.0**-24])
def test_zero_probability_is_never_sampled(number: float) -> None:
    probabilities = torch.zeros(1, 700)
    for column in (0, 3, 256, 300, 699):
        probabilities.zero_()[0, column] = 1e-3
        assert sample_categorical(probabilities, torch.tensor([number])).item() == column


def test_samples_follow_distribution() -> None:
    probabilities = torch.softmax(torch.randn(300, generator=torch.Generator().manual_seed(0)), 0)
    numbers = uniforms(torch.arange(COUNT), torch.zeros(COUNT).long())
    counts = torch.bincount(sample_categorical(probabilities.expand(COUNT, -1), numbers), minlength=300)
    expected = probabilities * COUNT
    assert ((counts - expected) ** 2 / expected).sum() < 380  # 0.1% of a chi-square with 299 degrees of freedom


def test_log_uniform_samples() -> None:
    probabilities = log_uniform_probability(torch.arange(100), 100)
    torch.testing.assert_close(probabilities.sum(), torch.tensor(1.0))
    samples = log_uniform_samples(torch.rand(200_000, generator=torch.Generator().manual_seed(0)), 100)
    torch.testing.assert_close(samples.bincount(minlength=100) / 200_000, probabilities, atol=4e-3, rtol=0)


def test_sampled_softmax_approaches_full_softmax() -> None:
    torch.manual_seed(0)
    states = torch.randn(30, 8, requires_grad=True)
    weight, bias = torch.randn(60, 8, requires_grad=True), torch.randn(60, requires_grad=True)
    targets = torch.randint(60, (30,))
    losses = [F.cross_entropy(states @ weight.T + bias, targets, reduction="sum")]
    for num_negatives in (100_000, 40):
        negatives = log_uniform_samples(torch.rand(num_negatives), 60)
        losses.append(sampled_softmax_loss(states, weight, bias, targets, negatives))
    full, many, few = ([loss, *torch.autograd.grad(loss, [states, weight, bias])] for loss in losses)
    torch.testing.assert_close(many, full, rtol=1e-4, atol=1e-4)
    assert 0 < abs(few[0] / full[0] - 1) < 0.3
