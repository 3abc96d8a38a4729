"""InferSent: features of text pairs, single texts and unknown words."""

import pytest
import torch
from torch import Tensor, nn
from zoo import FIRST_WORD, UNKNOWN, Case, make_batch

from hf_ctxmodels import CtxError
from hf_ctxmodels.registry import FAMILIES

BASE = Case(FAMILIES["infersent"], "AutoModel")
CLASSIFIER = Case(FAMILIES["infersent"], "AutoModelForSequenceClassification")
TOKEN_TYPES = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1, 1]])


def random_ids(*lengths: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(FIRST_WORD, 61, (1, length), generator=generator) for length in lengths]


@pytest.mark.parametrize("unpad", [True, False])
@torch.no_grad()
def test_pair_logits_match_formula(unpad: bool) -> None:
    """Separately encoded texts, features of section 3.1 of the paper, and layers of the released code."""
    model, (first, second) = CLASSIFIER.model(unpad=unpad), random_ids(4, 5)
    u, v = (model.infersent(input_ids=text).pooler_output for text in (first, second))
    features = torch.cat([u, v, (u - v).abs(), u * v], 1)
    assert [type(layer) for layer in model.classifier] == [type(model.classifier[0])] * 3
    for layer in model.classifier:
        features = features @ layer.weight.T + layer.bias
    logits = model(input_ids=torch.cat([first, second], 1), token_type_ids=TOKEN_TYPES).logits
    torch.testing.assert_close(logits, features, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_hidden_states_of_text_pairs() -> None:
    model, (first, second) = CLASSIFIER.model(), random_ids(4, 5)
    inputs = {"input_ids": torch.cat([first, second], 1), "token_type_ids": TOKEN_TYPES}
    hidden_states = model(**inputs, output_hidden_states=True).hidden_states
    separate = [model.infersent(input_ids=text, output_hidden_states=True).hidden_states for text in (first, second)]
    expected = tuple(torch.cat(states, 1) for states in zip(*separate, strict=True))
    torch.testing.assert_close(hidden_states, expected, atol=1e-6, rtol=1e-6)


@torch.no_grad()
def test_single_text_is_paired_with_itself() -> None:
    model, (text,) = CLASSIFIER.model(), random_ids(4)
    expected = model(input_ids=torch.cat([text, text], 1), token_type_ids=torch.tensor([[0] * 4 + [1] * 4])).logits
    for types in (None, torch.zeros_like(text), torch.ones_like(text)):
        torch.testing.assert_close(model(input_ids=text, token_type_ids=types).logits, expected, atol=1e-6, rtol=1e-6)


@torch.no_grad()
def test_linear_classifier_of_single_texts() -> None:
    model, batch = CLASSIFIER.model(text_pairs=False), make_batch(CLASSIFIER)
    with pytest.raises(CtxError, match="text_pairs=true"):
        model(**batch)
    batch["token_type_ids"].zero_()
    expected = model.infersent(**batch).pooler_output @ model.classifier.weight.T + model.classifier.bias
    torch.testing.assert_close(model(**batch).logits, expected, atol=1e-6, rtol=1e-6)


def test_classifier_nonlinear() -> None:
    features = torch.randn(3, 4 * CLASSIFIER.config().hidden_size)
    zero = torch.zeros_like(features)
    linear, nonlinear = (CLASSIFIER.model(classifier_nonlinear=value).classifier for value in (False, True))
    torch.testing.assert_close(linear(2 * features) - linear(zero), 2 * (linear(features) - linear(zero)))
    assert not torch.allclose(nonlinear(2 * features) - nonlinear(zero), 2 * (nonlinear(features) - nonlinear(zero)))
    assert sum(isinstance(layer, nn.Tanh) for layer in nonlinear) == 2


@torch.no_grad()
def test_unknown_words_are_skipped() -> None:
    (text,) = random_ids(5)
    with_unknown = torch.cat([text[:, :2], torch.full((1, 2), UNKNOWN), text[:, 2:]], 1)
    model = BASE.model()
    torch.testing.assert_close(model(input_ids=with_unknown).pooler_output, model(input_ids=text).pooler_output)
    only_unknown = torch.full((1, 3), UNKNOWN)
    assert model(input_ids=only_unknown).pooler_output.isfinite().all(), "a text of unknown words must be encoded"
    no_skip_model = BASE.model(skip_unknown=False)
    with_unknown, text = (no_skip_model(input_ids=ids).pooler_output for ids in (with_unknown, text))
    assert not torch.allclose(with_unknown, text)
    assert torch.equal(no_skip_model(only_unknown).pooler_output, model(only_unknown).pooler_output)
