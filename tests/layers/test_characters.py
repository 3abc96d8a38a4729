"""Words by their characters: the short way is the plain one; mixes of layers; the sampled softmax."""

import math

import pytest
import torch
from torch.nn import functional as F

from hf_ctxmodels.layers import characters
from hf_ctxmodels.layers.characters import CharacterEncoder, unique_rows
from hf_ctxmodels.layers.common import ScalarMix
from hf_ctxmodels.layers.lm_loss.sampling import log_uniform_probability, sampled_softmax_loss
from hf_ctxmodels.objectives.autoregressive.bidirectional_lm import log_uniform_samples

FILLER = 30


def words(longest: int, number: int = 40, width: int = 16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(longest)
    ids = torch.randint(1, FILLER, (number, width), generator=generator)
    lengths = torch.randint(1, longest + 1, (number, 1), generator=generator)
    lengths[0] = longest
    ids = ids.where(torch.arange(width) < lengths, FILLER)
    return torch.cat([ids, ids[::2], torch.zeros(1, width, dtype=torch.long)])


def encoder() -> CharacterEncoder:
    torch.manual_seed(0)
    return CharacterEncoder(
        31,
        6,
        [[1, 8], [3, 8], [5, 8]],
        highway_layers=2,
        projection_size=7,
        padding_character=FILLER,
        activation="relu",
    ).double()


@pytest.mark.parametrize("longest", [1, 4, 11, 12, 16])
def test_unique_and_trimmed_is_exact(longest: int) -> None:
    model, ids = encoder(), words(longest)
    results = []
    for run in (model, model.plain):
        found = run(ids)
        results.append([found, *torch.autograd.grad(found.sin().sum(), list(model.parameters()))])
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected)
    real = ids[:-1]
    assert model.trim_padding(real).shape[1] == min(16, longest + 5)


def test_unique_rows_also_when_two_share_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = words(9)
    different, which = unique_rows(ids)
    assert torch.equal(different[which], ids)
    assert len(different) == len(ids.unique(dim=0))
    monkeypatch.setattr(characters, "_MULTIPLIER", 0)  # then only the sums of the rows tell them apart
    clashing = torch.tensor([[1, 2], [2, 1], [1, 2], [3, 0]])
    different, which = unique_rows(clashing)
    assert torch.equal(different[which], clashing)
    assert len(different) == 3


def test_scalar_mix() -> None:
    states = [torch.randn(2, 3, 4) for _ in range(3)]
    mix = ScalarMix(3)
    torch.testing.assert_close(mix(states), sum(states) / 3)
    mix.weights.data = torch.tensor([0.0, math.log(2), 0.0])
    mix.gamma.data.fill_(2)
    torch.testing.assert_close(mix(states), 2 * (0.25 * states[0] + 0.5 * states[1] + 0.25 * states[2]))


def test_scalar_mix_normalises_over_tokens_alone() -> None:
    tokens = torch.tensor([[True, True, False]])
    states = torch.randn(1, 3, 50) * 7 + 3
    mixed = ScalarMix(1, layer_norm=True)([states], tokens)
    inside = mixed[0, :2]
    torch.testing.assert_close(inside.mean(), torch.tensor(0.0), atol=1e-5, rtol=0)
    torch.testing.assert_close(inside.var(correction=0), torch.tensor(1.0))
    states[0, 2] = 1e4
    torch.testing.assert_close(ScalarMix(1, layer_norm=True)([states], tokens), mixed)


def test_log_uniform() -> None:
    shares = log_uniform_probability(torch.arange(100), 100)
    torch.testing.assert_close(shares.sum(), torch.tensor(1.0, dtype=torch.double))
    drawn = log_uniform_samples(torch.rand(200_000, generator=torch.Generator().manual_seed(0)), 100)
    torch.testing.assert_close(drawn.bincount(minlength=100).double() / 200_000, shares, atol=4e-3, rtol=0)


def test_sampled_softmax_becomes_the_whole_one() -> None:
    torch.manual_seed(0)
    states = torch.randn(30, 8, requires_grad=True)
    weight, bias = torch.randn(60, 8, requires_grad=True), torch.randn(60, requires_grad=True)
    targets = torch.randint(60, (30,))
    losses = [F.cross_entropy(states @ weight.T + bias, targets, reduction="sum")]
    for number in (100_000, 40):
        negatives = log_uniform_samples(torch.rand(number), 60)
        losses.append(sampled_softmax_loss(states, weight, bias, targets, negatives))
    expected, got, few = ([loss, *torch.autograd.grad(loss, [states, weight, bias])] for loss in losses)
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    assert 0 < abs(few[0] / expected[0] - 1) < 0.3
