"""Smoothed labels: the loss of a plain loop, exact under accumulation, and evaluation as it was."""

import copy
import inspect
import math

import pytest
import torch
from accelerate import Accelerator
from transformers import T5Config, T5ForConditionalGeneration
from zoo import Case, make_batch, make_targets

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.downstream.finetuning.label_smoothing import smooth_labels, smoothed_loss
from hf_ctxmodels.downstream.finetuning.loss_normalization import count_loss_targets
from hf_ctxmodels.registry import FAMILIES
from hf_ctxmodels.training.batches import INDEX_KEY
from hf_ctxmodels.training.recurrent_state import RecurrentStateCarrier
from hf_ctxmodels.training.steps import Stepper

SMOOTHING = 0.2


def ours(head="AutoModelForSeq2SeqLM"):
    return Case(FAMILIES["cove"], head).model(hidden_dropout_prob=0.0)


def peers():
    torch.manual_seed(0)
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_decoder_layers": 1, "num_heads": 2}
    config = T5Config(vocab_size=61, dropout_rate=0.0, decoder_start_token_id=0, **sizes)
    return T5ForConditionalGeneration(config)


def rows(lengths):
    """A batch with as many targets in each row as `lengths` says."""
    case = Case(FAMILIES["cove"], "AutoModelForSeq2SeqLM")
    batch = make_batch(case, tuple(3 + number % 4 for number in range(len(lengths))))
    batch |= make_targets(case, batch)
    for row, length in enumerate(lengths):
        batch["labels"][row, length:] = -100
    return {name: batch[name] for name in ("input_ids", "attention_mask", "labels")}


def by_hand(model, batch):
    """The mean over targets of -sum of p log q, p with the label and all words."""
    with torch.no_grad():
        every = model.eval()(**batch, return_logits=True) if isinstance(model, type(ours())) else model.eval()(**batch)
    total, count = 0.0, 0
    for logits, labels in zip(every.logits.double(), batch["labels"], strict=True):
        for row, label in zip(logits.tolist(), labels.tolist(), strict=True):
            if label == -100:
                continue
            norm = math.log(sum(math.exp(each) for each in row))
            share = [SMOOTHING / len(row) + (1 - SMOOTHING) * (word == label) for word in range(len(row))]
            total += sum(part * (norm - each) for part, each in zip(share, row, strict=True))
            count += 1
    return total / count, float(every.loss)


@pytest.mark.parametrize("make", [ours, peers])
def test_training_loss_of_a_plain_loop_and_plain_evaluation(make):
    batch = rows([4, 1, 3])
    expected, plain = by_hand(make(), batch)
    assert abs(expected - plain) > 1e-3
    model = make()
    count_loss_targets(model, ("labels",))
    smooth_labels(model, SMOOTHING)
    loss, of_sixteen = model.train()(**batch).loss, model(**batch, num_items_in_batch={"labels": 16}).loss
    assert loss.item() == pytest.approx(expected, abs=1e-5)
    count = int((batch["labels"] != -100).sum())
    assert of_sixteen.item() == pytest.approx(expected * count / 16, abs=1e-5)
    with torch.no_grad():
        assert model.eval()(**batch).loss.item() == pytest.approx(plain, abs=1e-5)
        assert model.generate(batch["input_ids"], max_new_tokens=2, do_sample=False).shape[0] == 3


@pytest.mark.parametrize("make", [ours, peers])
def test_one_batch_of_16_equals_four_of_4(make):
    batch = rows([1, 4, 2, 4, 1, 1, 1, 2, 3, 4, 4, 4, 1, 2, 1, 1])
    gradients = []
    for parts in (1, 4):
        model = make().train()
        count_loss_targets(model, ("labels",))
        smooth_labels(model, SMOOTHING)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        before = {name: each.detach().clone() for name, each in model.named_parameters()}
        accelerator = Accelerator(cpu=True)
        stepper = Stepper(accelerator, model, accelerator.prepare(optimizer), 0.0, RecurrentStateCarrier((), parts))
        split = {name: each.chunk(parts) for name, each in batch.items()}
        batches = [
            {**{name: each[part] for name, each in split.items()}, INDEX_KEY: torch.arange(16 // parts)}
            for part in range(parts)
        ]
        stepper.step(batches)
        gradients.append({name: before[name] - each.detach() for name, each in model.named_parameters()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=0, atol=1e-5, msg=name)
    assert any(gradient.abs().max() > 1e-3 for gradient in gradients[0].values())


@pytest.mark.parametrize("make", [ours, peers])
def test_a_copy_computes_with_its_own_weights(make):
    batch, model = rows([4, 1, 3]), make().train()
    names = list(inspect.signature(model.forward).parameters)
    count_loss_targets(model, ("labels",))
    smooth_labels(model, SMOOTHING)
    assert list(inspect.signature(model.forward).parameters) == names
    loss, twin = model(**batch).loss, copy.deepcopy(model)
    torch.testing.assert_close(twin(**batch).loss, loss)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(2)
    assert abs(twin(**batch).loss - loss) > 1e-2
    assert twin(**batch, num_items_in_batch={"labels": 16}).loss < twin(**batch).loss
    torch.testing.assert_close(model(**batch).loss, loss)
    twin.eval()  # which leaves the other in training
    torch.testing.assert_close(model(**batch).loss, loss)


def test_what_cannot_be_smoothed_is_refused():
    with pytest.raises(CtxError, match=r"(?s)from 0 to below 1.*--label_smoothing 1"):
        smooth_labels(ours(), 1.0)
    with pytest.raises(CtxError, match="has other terms"):
        smooth_labels(Case(FAMILIES["lmseq2seq"], "AutoModelForPreTraining").model(), 0.1)
    with pytest.raises(CtxError, match="is no encoder-decoder"):
        smooth_labels(Case(FAMILIES["gpt2"], "AutoModelForCausalLM").model(), 0.1)
    with pytest.raises(CtxError, match="no logits at the positions"):
        smoothed_loss(torch.zeros(2, 3, 5), torch.zeros(2, 4, dtype=torch.int64), 0.1)
