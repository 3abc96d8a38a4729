"""GPT: auxiliary language modeling loss, text pairs in both orders, activations."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import OpenAIGPTConfig
from zoo import Batch, Case, assert_close, assert_same_gradients, gradients, make_batch, make_targets

from hf_ctxmodels import CtxGptConfig, CtxGptForSequenceClassification
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.registry import FAMILIES

GPT = FAMILIES["gpt"]
CLASSIFIER = Case(GPT, "AutoModelForSequenceClassification")
AUXILIARY_LM_CASES = [
    Case(family, name)
    for family in FAMILIES.values()
    for name, model in family.models.items()
    if getattr(model, "has_auxiliary_lm_loss", False)
]
LENGTHS = (9, 3, 7, 5)


def sequence_losses(model: nn.Module, batch: Batch) -> Tensor:
    """(sequences,) mean next-token cross-entropy of each sequence, computed in a loop."""
    sequences = {name: tensor.flatten(0, -2) for name, tensor in batch.items()}
    embeddings = model.get_input_embeddings().weight
    losses = []
    for ids, mask in zip(sequences["input_ids"], sequences["attention_mask"]):
        tokens = ids[mask == 1][None]
        logits = model.base_model(tokens).last_hidden_state[0] @ embeddings.T
        # a sequence of one token has no target
        losses.append(F.cross_entropy(logits[:-1], tokens[0, 1:]) if tokens.shape[1] > 1 else logits.sum() * 0)
    return torch.stack(losses)


def expected_lm_loss(model: nn.Module, batch: Batch, labels: Tensor) -> Tensor:
    """Mean over targets of the losses of their examples; losses of choices are averaged."""
    losses = sequence_losses(model, batch)
    losses = losses.view(len(labels), -1).mean(1)
    counts = (labels != -100).reshape(len(labels), -1).sum(1)
    return (losses * counts).sum() / counts.sum()


@pytest.mark.parametrize("case", AUXILIARY_LM_CASES, ids=str)
@pytest.mark.parametrize("side", ["left", "right"])
def test_auxiliary_loss_is_mean_over_examples(case: Case, side: str) -> None:
    """In training only, with padding on either side; also with microbatches."""
    model = case.model(lm_loss_weight=0.3).train()
    batch = make_batch(case, LENGTHS, side=side)
    labels = make_targets(case, batch, ignore_some=True)
    task_loss = model.eval()(**batch, **labels).loss
    loss = model.train()(**batch, **labels).loss
    expected = task_loss + 0.3 * expected_lm_loss(model, batch, labels["labels"])
    assert_close(loss, expected, "loss")
    expected_gradients = gradients(model, expected)
    assert_same_gradients(gradients(model, loss), expected_gradients)
    num_items, losses = (labels["labels"] != -100).sum(), []
    for rows in (slice(0, 2), slice(2, 4)):
        microbatch = {name: value[rows] for name, value in (batch | labels).items()}
        losses.append(model(**microbatch, num_items_in_batch=num_items).loss)
    assert_close(sum(losses), expected, "loss of microbatches")
    assert_same_gradients(gradients(model, sum(losses)), expected_gradients)
    model.config.lm_loss_weight = 0
    assert_close(model(**batch, **labels).loss, task_loss)


def test_auxiliary_loss_with_multi_label_and_regression_targets() -> None:
    batch = make_batch(CLASSIFIER, LENGTHS)
    for problem_type, labels in (("regression", torch.randn(4, 3)), ("multi_label_classification", torch.ones(4, 3))):
        model = CLASSIFIER.model(problem_type=problem_type)
        task_loss = model(**batch, labels=labels).loss
        expected = task_loss + 0.5 * sequence_losses(model, batch).mean()
        assert_close(model.train()(**batch, labels=labels).loss, expected, problem_type)


def test_auxiliary_loss_requires_tied_embeddings() -> None:
    model, batch = CLASSIFIER.model(tie_word_embeddings=False).train(), make_batch(CLASSIFIER)
    with pytest.raises(CtxError, match="lm_loss_weight=0"):
        model(**batch, labels=torch.zeros(4, dtype=torch.long))


def test_text_pairs_in_both_orders() -> None:
    """The classifier input is the sum of both orders' states; both orders have an auxiliary loss."""
    model, single_texts = CLASSIFIER.model(), make_batch(CLASSIFIER, (9, 7, 5, 4, 8, 6))
    pairs = {name: tensor.unflatten(0, (3, 2)) for name, tensor in single_texts.items()}
    labels = torch.tensor([0, 2, 1])
    states = model.base_model(**single_texts).last_hidden_state
    last_states = states[torch.arange(6), single_texts["attention_mask"].sum(1) - 1]
    expected = model.classifier(last_states.view(3, 2, -1).sum(1))
    assert_close(model(**pairs).logits, expected)
    swapped = {name: tensor.flip(1) for name, tensor in pairs.items()}
    assert_close(model(**swapped).logits, expected)
    lm_loss = sequence_losses(model, single_texts).mean()
    assert_close(model.train()(**pairs, labels=labels).loss, F.cross_entropy(expected, labels) + 0.5 * lm_loss)


def test_choices_share_dropout_mask() -> None:
    """Equal choices have equal logits in training with dropout before the classifier."""
    case = Case(GPT, "AutoModelForMultipleChoice")
    model = case.model(classifier_dropout=0.5).train()
    ids = torch.randint(5, 61, (6, 1, 8), generator=torch.Generator().manual_seed(0)).expand(-1, 4, -1)
    torch.manual_seed(0)
    logits = model(ids).logits
    assert_close(logits, logits[:, :1].expand(-1, 4))
    assert not torch.allclose(logits, model.eval()(ids).logits)


@pytest.mark.parametrize(
    ("name", "hidden_act"), [("gelu", "gelu_new"), ("relu", "relu"), ("silu", "silu"), ("swish", "silu")]
)
def test_activation_names_of_transformers(name: str, hidden_act: str, tmp_path: Any) -> None:
    """In transformers' GPT, "gelu" is the tanh approximation."""
    OpenAIGPTConfig(afn=name).save_pretrained(tmp_path)
    assert CtxGptConfig.from_pretrained(tmp_path).hidden_act == hidden_act
    assert CtxGptConfig(afn=name).hidden_act == hidden_act
    model = CtxGptForSequenceClassification(CtxGptConfig(n_embd=16, n_layer=1, n_head=2, vocab_size=20, afn=name))
    assert model.reference_config()["afn"] == ("silu" if name == "swish" else name)


def test_values_unsupported_by_transformers(tmp_path: Any) -> None:
    with pytest.raises(ValueError, match="afn='tanh'"):
        CtxGptConfig(afn="tanh")
    for overrides, message in (
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"intermediate_size": 40}, "this model 40"),
        ({"both_orders": True}, "both_orders=True"),
    ):
        with pytest.raises(CtxError, match=message):
            CLASSIFIER.model(**overrides).export_reference(tmp_path)
