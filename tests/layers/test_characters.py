"""Character encoders: distinct, trimmed words equal the naive computation; mixes of layers."""

import math

import pytest
import torch

from hf_ctxmodels.layers import characters
from hf_ctxmodels.layers.characters import CharacterEncoder, unique_rows
from hf_ctxmodels.layers.common import ScalarMix

PADDING = 30


def make_words(max_length: int, number: int = 40, width: int = 16) -> torch.Tensor:
    """Random words, half of which are repeated, and a word of zeros."""
    generator = torch.Generator().manual_seed(max_length)
    ids = torch.randint(1, PADDING, (number, width), generator=generator)
    lengths = torch.randint(1, max_length + 1, (number, 1), generator=generator)
    lengths[0] = max_length
    ids = ids.where(torch.arange(width) < lengths, PADDING)
    return torch.cat([ids, ids[::2], torch.zeros(1, width, dtype=torch.long)])


@pytest.mark.parametrize("max_length", [1, 4, 11, 12, 16])
def test_distinct_trimmed_words_equal_all_words(max_length: int) -> None:
    torch.manual_seed(0)
    filters = [[1, 8], [3, 8], [5, 8]]
    options = {"highway_layers": 2, "projection_size": 7, "padding_character": PADDING, "activation": "relu"}
    model, ids = CharacterEncoder(31, 6, filters, **options).double(), make_words(max_length)
    results = []
    for encode in (model, model.plain):
        outputs = encode(ids)
        results.append([outputs, *torch.autograd.grad(outputs.sin().sum(), list(model.parameters()))])
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected)
    assert model.trim_padding(ids[:-1]).shape[1] == min(16, max_length + 5)


def test_unique_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if hashes of different rows are equal."""
    ids = make_words(9)
    unique, indices = unique_rows(ids)
    assert torch.equal(unique[indices], ids)
    assert len(unique) == len(ids.unique(dim=0))
    monkeypatch.setattr(characters, "_MULTIPLIER", 0)  # the hash is then the sum of a row
    ids = torch.tensor([[1, 2], [2, 1], [1, 2], [3, 0]])
    unique, indices = unique_rows(ids)
    assert torch.equal(unique[indices], ids)
    assert len(unique) == 3


def test_scalar_mix() -> None:
    states = [torch.randn(2, 3, 4) for _ in range(3)]
    mix = ScalarMix(3)
    torch.testing.assert_close(mix(states), sum(states) / 3)
    mix.weights.data = torch.tensor([0.0, math.log(2), 0.0])
    mix.gamma.data.fill_(2)
    torch.testing.assert_close(mix(states), 2 * (0.25 * states[0] + 0.5 * states[1] + 0.25 * states[2]))


def test_scalar_mix_normalises_over_tokens_only() -> None:
    tokens, states = torch.tensor([[True, True, False]]), torch.randn(1, 3, 50) * 7 + 3
    mixed = ScalarMix(1, layer_norm=True)([states], tokens)
    torch.testing.assert_close(mixed[0, :2].mean(), torch.tensor(0.0), atol=1e-5, rtol=0)
    torch.testing.assert_close(mixed[0, :2].var(correction=0), torch.tensor(1.0))
    states[0, 2] = 1e4
    torch.testing.assert_close(ScalarMix(1, layer_norm=True)([states], tokens), mixed)
