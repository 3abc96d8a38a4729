"""What is GPT's own: names of activations, the auxiliary language modelling loss, pairs in both orders, and what it
shares with GPT-2: choices with a language model, generation after padding."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import OpenAIGPTConfig
from zoo import Batch, Case, assert_close, assert_same_gradients, gradients, make_batch, make_targets

from hf_ctxmodels import CtxGptConfig, CtxGptForSequenceClassification
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.heads import WithLanguageModeling
from hf_ctxmodels.registry import FAMILIES

GPT = FAMILIES["gpt"]
CLASSIFIER = Case(GPT, "AutoModelForSequenceClassification")
WITH_LM = [
    Case(family, name)
    for family in FAMILIES.values()
    for name, model in family.models.items()
    if issubclass(model, WithLanguageModeling)
]
GENERATORS = [Case(FAMILIES[name], "AutoModelForCausalLM") for name in ("gpt", "gpt2")]
LENGTHS = (9, 3, 7, 5)


def row_losses(model: nn.Module, batch: Batch) -> Tensor:
    """(rows,) the mean cross-entropy of each row's tokens given those before them, by a plain loop."""
    flat = {name: tensor.flatten(0, -2) for name, tensor in batch.items()}
    table = model.get_input_embeddings().weight
    losses = []
    for ids, mask in zip(flat["input_ids"], flat["attention_mask"]):
        row = ids[mask == 1][None]
        logits = model.base_model(row).last_hidden_state[0] @ table.T
        # The first token of a row of one has nothing before it.
        losses.append(F.cross_entropy(logits[:-1], row[0, 1:]) if row.shape[1] > 1 else logits.sum() * 0)
    return torch.stack(losses)


def expected_term(model: nn.Module, batch: Batch, labels: Tensor) -> Tensor:
    """The mean over targets of their rows' losses, choices averaged."""
    losses = row_losses(model, batch)
    losses = losses.view(len(labels), -1).mean(1)
    counts = (labels != -100).reshape(len(labels), -1).sum(1)
    return (losses * counts).sum() / counts.sum()


@pytest.mark.parametrize("case", WITH_LM, ids=str)
@pytest.mark.parametrize("side", ["left", "right"])
def test_the_auxiliary_loss_is_a_mean_over_rows(case: Case, side: str) -> None:
    """In training only, of real tokens, wherever the padding is."""
    model = case.model(lm_loss_weight=0.3).train()
    batch = make_batch(case, LENGTHS, side=side)
    labels = make_targets(case, batch, ignore_some=True)
    task = model.eval()(**batch, **labels).loss
    got = model.train()(**batch, **labels).loss
    expected = task + 0.3 * expected_term(model, batch, labels["labels"])
    assert_close(got, expected, "loss")
    assert_same_gradients(gradients(model, got), gradients(model, expected))
    model.config.lm_loss_weight = 0
    assert_close(model(**batch, **labels).loss, task)


@pytest.mark.parametrize("case", WITH_LM, ids=str)
def test_the_auxiliary_loss_is_exact_under_accumulation(case: Case) -> None:
    """1 x 8 rows equals 4 x 2 rows of other lengths and numbers of targets, with one number as Trainer passes it."""
    model = case.model().train()
    assert model.accepts_loss_kwargs
    batch = make_batch(case, (9, 3, 7, 5, 1, 2, 4, 8))
    labels = make_targets(case, batch)["labels"]
    labels[[0, 5]] = -100
    whole = model(**batch, labels=labels).loss
    number = (labels != -100).sum()
    parts = []
    for start in range(0, 8, 2):
        rows = slice(start, start + 2)
        part = {name: tensor[rows] for name, tensor in batch.items()}
        parts.append(model(**part, labels=labels[rows], num_items_in_batch=number).loss)
    assert_close(sum(parts), whole, "loss")
    assert_same_gradients(gradients(model, sum(parts)), gradients(model, whole))


def test_multi_label_targets_and_numbers_carry_the_loss_of_their_row() -> None:
    batch = make_batch(CLASSIFIER, LENGTHS)
    for problem, labels in (("regression", torch.randn(4, 3)), ("multi_label_classification", torch.ones(4, 3))):
        model = CLASSIFIER.model(problem_type=problem)
        task = model(**batch, labels=labels).loss
        expected = task + 0.5 * row_losses(model, batch).mean()
        assert_close(model.train()(**batch, labels=labels).loss, expected, problem)


def test_without_tied_embeddings_there_is_no_output_layer() -> None:
    model, batch = CLASSIFIER.model(tie_word_embeddings=False).train(), make_batch(CLASSIFIER)
    with pytest.raises(CtxError, match="set lm_loss_weight=0"):
        model(**batch, labels=torch.zeros(4, dtype=torch.long))


def test_both_orders_of_a_pair() -> None:
    """The sum of the states of both rows is classified, and both rows are language modelling."""
    model, single = CLASSIFIER.model(), make_batch(CLASSIFIER, (9, 7, 5, 4, 8, 6))
    pairs = {name: tensor.unflatten(0, (3, 2)) for name, tensor in single.items()}
    labels = torch.tensor([0, 2, 1])
    states = model.base_model(**single).last_hidden_state
    last = states[torch.arange(6), single["attention_mask"].sum(1) - 1]
    expected = model.classifier(last.view(3, 2, -1).sum(1))
    assert_close(model(**pairs).logits, expected)
    exchanged = {name: tensor.flip(1) for name, tensor in pairs.items()}
    assert_close(model(**exchanged).logits, expected)
    term = 0.5 * row_losses(model, single).mean()
    assert_close(model.train()(**pairs, labels=labels).loss, F.cross_entropy(expected, labels) + term)


def test_choices_share_their_dropout() -> None:
    """Equal choices have equal logits in training, where the classifier's dropout alone is at work."""
    case = Case(GPT, "AutoModelForMultipleChoice")
    model = case.model(classifier_dropout=0.5).train()
    ids = torch.randint(5, 61, (6, 1, 8), generator=torch.Generator().manual_seed(0)).expand(-1, 4, -1)
    torch.manual_seed(0)
    logits = model(ids).logits
    assert_close(logits, logits[:, :1].expand(-1, 4))
    assert not torch.allclose(logits, model.eval()(ids).logits)


@pytest.mark.parametrize(("name", "own"), [("gelu", "gelu_new"), ("relu", "relu"), ("silu", "silu"), ("swish", "silu")])
def test_activations_of_reference_files(name: str, own: str, tmp_path: Any) -> None:
    """The reference's "gelu" is the tanh approximation."""
    OpenAIGPTConfig(afn=name).save_pretrained(tmp_path)
    assert CtxGptConfig.from_pretrained(tmp_path).hidden_act == own
    assert CtxGptConfig(afn=name).hidden_act == own
    model = CtxGptForSequenceClassification(CtxGptConfig(n_embd=16, n_layer=1, n_head=2, vocab_size=20, afn=name))
    assert model.reference_config()["afn"] == ("silu" if name == "swish" else name)


def test_what_the_reference_cannot_hold_is_an_error(tmp_path: Any) -> None:
    with pytest.raises(ValueError, match="afn='tanh' is none of"):
        CtxGptConfig(afn="tanh")
    with pytest.raises(Exception, match="lm_loss_weight=-1"):
        CtxGptConfig(lm_loss_weight=-1)
    for changes, says in (
        ({"hidden_act": "gelu"}, "no hidden_act='gelu'"),
        ({"intermediate_size": 40}, "this one of 40"),
    ):
        with pytest.raises(CtxError, match=says):
            CLASSIFIER.model(**changes).export_reference(tmp_path)


@pytest.mark.parametrize("case", GENERATORS, ids=str)
@pytest.mark.filterwarnings("ignore")
def test_text_goes_on_alike_with_a_cache_and_any_padding(case: Case) -> None:
    """Token for token as one by one; prompts are returned as they were given."""
    model, lengths = case.model(bos_token_id=None, eos_token_id=None), (6, 3, 1)
    options = {"max_new_tokens": 12, "pad_token_id": 0}
    ids = torch.randint(5, 61, (3, 6), generator=torch.Generator().manual_seed(2))
    hows = ({"do_sample": False}, {"do_sample": False, "num_beams": 3, "num_return_sequences": 2})
    for how in hows:
        alone = [model.generate(row[None, :n], **options, **how)[:, n:] for row, n in zip(ids, lengths)]
        for side in ("left", "right"):
            mask = torch.zeros_like(ids)
            for row, length in enumerate(lengths):
                mask[row, 6 - length :] = int(side == "left")
                mask[row, :length] |= int(side == "right")
            padded = torch.zeros_like(ids)
            padded[mask == 1] = torch.cat([row[:n] for row, n in zip(ids, lengths)])
            for cache in (True, False):
                found = model.generate(padded, attention_mask=mask, use_cache=cache, **options, **how)
                assert torch.equal(found[:, 6:], torch.cat(alone)), f"{side} padding, cache={cache}, {how}"
                assert torch.equal(found[:, :6], padded.repeat_interleave(len(alone[0]), 0))
    assert len(torch.cat(alone).unique()) > 4, "too dull a text to tell anything"


def test_compiled_training_gives_the_same_loss() -> None:
    model = CLASSIFIER.model(num_hidden_layers=1).train()
    batch = make_batch(CLASSIFIER)
    batch |= make_targets(CLASSIFIER, batch)
    torch._dynamo.reset()
    assert_close(torch.compile(model, backend="eager")(**batch).loss, model(**batch).loss)
