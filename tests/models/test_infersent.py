"""InferSent's own: the features of a pair, texts alone, unknown words."""

import pytest
import torch
from huggingface_hub.errors import StrictDataclassClassValidationError
from torch import Tensor, nn
from zoo import FIRST_WORD, UNKNOWN, Case, make_batch

from hf_ctxmodels import CtxError, CtxInferSentConfig
from hf_ctxmodels.registry import FAMILIES

BASE = Case(FAMILIES["infersent"], "AutoModel")
CLASSIFIER = Case(FAMILIES["infersent"], "AutoModelForSequenceClassification")
TYPES = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1, 1]])


def words(*lengths: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(FIRST_WORD, 61, (1, length), generator=generator) for length in lengths]


@pytest.mark.parametrize("unpad", [True, False])
@torch.no_grad()
def test_logits_are_those_of_the_features(unpad: bool) -> None:
    """Each text encoded by itself, the formula of section 3.1, and the released code's layers."""
    model, (first, second) = CLASSIFIER.model(unpad=unpad), words(4, 5)
    u, v = (model.infersent(input_ids=part).pooler_output for part in (first, second))
    features = torch.cat([u, v, (u - v).abs(), u * v], 1)
    assert [type(layer) for layer in model.classifier] == [type(model.classifier[0])] * 3
    for layer in model.classifier:
        features = features @ layer.weight.T + layer.bias
    got = model(input_ids=torch.cat([first, second], 1), token_type_ids=TYPES).logits
    torch.testing.assert_close(got, features, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_hidden_states_are_those_of_both_texts() -> None:
    model, (first, second) = CLASSIFIER.model(), words(4, 5)
    inputs = {"input_ids": torch.cat([first, second], 1), "token_type_ids": TYPES}
    got = model(**inputs, output_hidden_states=True).hidden_states
    apart = [model.infersent(input_ids=part, output_hidden_states=True).hidden_states for part in (first, second)]
    for states, one, other in zip(got, *apart, strict=True):
        torch.testing.assert_close(states, torch.cat([one, other], 1), atol=1e-6, rtol=1e-6)


@torch.no_grad()
def test_a_text_alone_is_compared_with_itself() -> None:
    model, (text,) = CLASSIFIER.model(), words(4)
    twice = model(input_ids=torch.cat([text, text], 1), token_type_ids=torch.tensor([[0] * 4 + [1] * 4])).logits
    for types in (None, torch.zeros_like(text), torch.ones_like(text)):
        torch.testing.assert_close(model(input_ids=text, token_type_ids=types).logits, twice, atol=1e-6, rtol=1e-6)


@torch.no_grad()
def test_a_linear_classifier_of_one_text() -> None:
    model, batch = CLASSIFIER.model(text_pairs=False), make_batch(CLASSIFIER)
    with pytest.raises(CtxError, match="text_pairs=true"):
        model(**batch)
    batch["token_type_ids"].zero_()
    expected = nn.functional.linear(
        model.infersent(**batch).pooler_output, model.classifier.weight, model.classifier.bias
    )
    torch.testing.assert_close(model(**batch).logits, expected, atol=1e-6, rtol=1e-6)


def test_the_classifier_that_is_not_linear() -> None:
    """Two tanh layers: what is twice as large is not twice as much."""
    features = torch.randn(3, 4 * CLASSIFIER.config().hidden_size)
    zero = torch.zeros_like(features)
    linear, other = (CLASSIFIER.model(classifier_nonlinear=each).classifier for each in (False, True))
    torch.testing.assert_close(linear(2 * features) - linear(zero), 2 * (linear(features) - linear(zero)))
    assert not torch.allclose(other(2 * features) - other(zero), 2 * (other(features) - other(zero)))
    assert sum(isinstance(layer, nn.Tanh) for layer in other) == 2


@torch.no_grad()
def test_unknown_words() -> None:
    (text,) = words(5)
    holed = torch.cat([text[:, :2], torch.full((1, 2), UNKNOWN), text[:, 2:]], 1)
    model = BASE.model()
    torch.testing.assert_close(model(input_ids=holed).pooler_output, model(input_ids=text).pooler_output)
    unknown = torch.full((1, 3), UNKNOWN)
    assert model(input_ids=unknown).pooler_output.isfinite().all(), "where there is no other word, they are read"
    reading = BASE.model(skip_unknown=False)
    assert not torch.allclose(reading(input_ids=holed).pooler_output, reading(input_ids=text).pooler_output)
    assert torch.equal(reading(input_ids=unknown).pooler_output, model(input_ids=unknown).pooler_output)


def test_sizes_that_do_not_fit() -> None:
    with pytest.raises(StrictDataclassClassValidationError, match="must be even"):
        CtxInferSentConfig(hidden_size=7)
    with pytest.raises(StrictDataclassClassValidationError, match="classifier_size=0"):
        CtxInferSentConfig(classifier_size=0)
