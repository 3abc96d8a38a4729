"""Vectors that are found by a word's characters."""

import pytest
import torch
from torch import Tensor

from hf_ctxmodels.architectures.character_models import CharacterVectors

FILLER = 260
WORDS = ["cat", "Cat", "a", "the", "cats"]


def spelled(words: list[str], width: int = 8) -> Tensor:
    rows = [[258, *[byte + 1 for byte in word.encode()], 259] for word in words]
    return torch.tensor([row + [FILLER] * (width - len(row)) for row in rows])


def layer(**changes: bool) -> CharacterVectors:
    options = {"padding_character": FILLER, "lower_case": False, "trainable": False, **changes}
    module = CharacterVectors(7, 3, **options)
    module.fill(spelled(WORDS), torch.arange(1.0, 16.0).view(5, 3))
    return module


def test_each_word_has_its_own() -> None:
    module = layer()
    torch.testing.assert_close(module(spelled(WORDS)), torch.arange(1.0, 16.0).view(5, 3))
    asked = spelled(["the", "dog", "Cat", "The"]).view(2, 2, -1)
    expected = torch.tensor([[[10.0, 11, 12], [0, 0, 0]], [[4, 5, 6], [0, 0, 0]]])
    assert torch.equal(module(asked), expected)


def test_whatever_the_words_are_filled_up_to() -> None:
    module = layer()
    assert torch.equal(module(spelled(WORDS, 6)), module(spelled(WORDS, 20)))
    assert not module(torch.zeros(2, 8, dtype=torch.long)).any(), "padding has none"


def test_lower_case_finds_words_by_their_small_letters() -> None:
    module = layer(lower_case=True)
    got = module(spelled(["THE", "the", "A", "cAtS", "Z"]))
    assert got[:, 0].tolist() == [10, 10, 7, 13, 0]
    assert module(spelled(["CAT"]))[0, 0] == 1, "of two words that are alike, the first"


@pytest.mark.parametrize("trainable", [False, True])
def test_gradient(trainable: bool) -> None:
    module = layer(trainable=trainable)
    out = module(spelled(["the", "the", "dog"])).sum()
    assert out.requires_grad == trainable
    if trainable:
        out.backward()
        assert sorted(module.table.grad[:, 0].tolist()) == [0, 0, 0, 0, 0, 0, 1, 2]


def test_its_state_is_saved_whole() -> None:
    module, again = layer(), CharacterVectors(7, 3, padding_character=FILLER, lower_case=False, trainable=False)
    again.load_state_dict(module.state_dict())
    assert torch.equal(again(spelled(WORDS)), module(spelled(WORDS)))
