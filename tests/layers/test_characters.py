"""Character encoders on distinct, trimmed words; scalar mixes; word vectors looked up by characters."""

import math

import pytest
import torch
from torch import Tensor

from hf_ctxmodels.architectures.character_models import CharacterVectors
from hf_ctxmodels.layers import characters
from hf_ctxmodels.layers.characters import CharacterEncoder, unique_rows
from hf_ctxmodels.layers.common import ScalarMix

PADDING = 30


def make_words(max_length: int, number: int = 40, width: int = 16) -> Tensor:
    """Random words, half of which are repeated, and a word of zeros."""
    generator = torch.Generator().manual_seed(max_length)
    ids = torch.randint(1, PADDING, (number, width), generator=generator)
    lengths = torch.randint(1, max_length + 1, (number, 1), generator=generator)
    lengths[0] = max_length
    ids = ids.where(torch.arange(width) < lengths, PADDING)
    return torch.cat([ids, ids[::2], torch.zeros(1, width, dtype=torch.long)])


@pytest.mark.parametrize("max_length", [1, 4, 11, 12, 16])
def test_deduplicated_trimmed_words_equal_all_words(max_length: int) -> None:
    torch.manual_seed(0)
    filters = [[1, 8], [3, 8], [5, 8]]
    options = {"highway_layers": 2, "projection_size": 7, "padding_character": PADDING, "activation": "relu"}
    model, ids = CharacterEncoder(31, 6, filters, **options).double(), make_words(max_length)
    results = []
    for encode in (model, model.plain):
        outputs = encode(ids)
        results.append([outputs, *torch.autograd.grad(outputs.sin().sum(), list(model.parameters()))])
    torch.testing.assert_close(*results)
    assert model.trim_padding(ids[:-1]).shape[1] == min(16, max_length + 5)


@pytest.mark.parametrize("multiplier", [characters._MULTIPLIER, 0], ids=["hash", "sum"])
def test_unique_rows(multiplier: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with hash collisions: with the multiplier 0 the hash is the sum of a row."""
    monkeypatch.setattr(characters, "_MULTIPLIER", multiplier)
    for ids in (make_words(9), torch.tensor([[1, 2], [2, 1], [1, 2], [3, 0]])):
        unique, indices = unique_rows(ids)
        assert torch.equal(unique[indices], ids)
        assert len(unique) == len(ids.unique(dim=0))


def test_scalar_mix() -> None:
    states = [torch.randn(2, 3, 4) for _ in range(3)]
    mix = ScalarMix(3)
    torch.testing.assert_close(mix(states), sum(states) / 3)
    mix.weights.data = torch.tensor([0.0, math.log(2), 0.0])
    mix.gamma.data.fill_(2)
    torch.testing.assert_close(mix(states), 2 * (0.25 * states[0] + 0.5 * states[1] + 0.25 * states[2]))


def test_scalar_mix_normalizes_over_tokens_only() -> None:
    token_mask, states = torch.tensor([[True, True, False]]), torch.randn(1, 3, 50) * 7 + 3
    mixed = ScalarMix(1, layer_norm=True)([states], token_mask)
    torch.testing.assert_close(mixed[0, :2].mean(), torch.tensor(0.0), atol=1e-5, rtol=0)
    torch.testing.assert_close(mixed[0, :2].var(correction=0), torch.tensor(1.0))
    states[0, 2] = 1e4
    torch.testing.assert_close(ScalarMix(1, layer_norm=True)([states], token_mask), mixed)


class TestCharacterVectors:
    """Word vectors, looked up by the characters of the words."""

    FILLER = 260
    WORDS = ["cat", "Cat", "a", "the", "cats"]
    VECTORS = torch.arange(1.0, 16.0).view(5, 3)

    def characters_of(self, words: list[str], width: int = 8) -> Tensor:
        rows = [[258, *[byte + 1 for byte in word.encode()], 259] for word in words]
        return torch.tensor([row + [self.FILLER] * (width - len(row)) for row in rows])

    def make_layer(self, **overrides: bool) -> CharacterVectors:
        options = {"padding_character": self.FILLER, "lower_case": False, "trainable": False, **overrides}
        layer = CharacterVectors(7, 3, **options)
        layer.fill(self.characters_of(self.WORDS), self.VECTORS)
        return layer

    def test_lookup(self) -> None:
        """Unknown words and padding have zero vectors; the batch width has no effect; all vectors are saved."""
        layer = self.make_layer()
        for width in (6, 8, 20):
            assert torch.equal(layer(self.characters_of(self.WORDS, width)), self.VECTORS)
        batch = self.characters_of(["the", "dog", "Cat", "The"]).view(2, 2, -1)
        expected = torch.tensor([[[10.0, 11, 12], [0, 0, 0]], [[4, 5, 6], [0, 0, 0]]])
        assert torch.equal(layer(batch), expected)
        assert not layer(torch.zeros(2, 8, dtype=torch.long)).any()
        loaded = CharacterVectors(7, 3, padding_character=self.FILLER, lower_case=False, trainable=False)
        loaded.load_state_dict(layer.state_dict())
        assert torch.equal(loaded(batch), expected)

    def test_lower_case(self) -> None:
        """Words that differ only in case get the vector of the first one."""
        vectors = self.make_layer(lower_case=True)(self.characters_of(["THE", "the", "A", "cAtS", "Z", "CAT"]))
        assert vectors[:, 0].tolist() == [10, 10, 7, 13, 0, 1]

    @pytest.mark.parametrize("trainable", [False, True])
    def test_gradient(self, trainable: bool) -> None:
        layer = self.make_layer(trainable=trainable)
        total = layer(self.characters_of(["the", "the", "dog"])).sum()
        assert total.requires_grad == trainable
        if trainable:
            total.backward()
            assert sorted(layer.table.grad[:, 0].tolist()) == [0, 0, 0, 0, 0, 0, 1, 2]
