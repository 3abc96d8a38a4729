"""Label smoothing: a naive loss, exact gradient accumulation, and evaluation without smoothing."""

import math

import pytest
import torch
from accelerate import Accelerator
from training_runs import trainer_arguments, unbatch
from transformers import BertConfig, BertForTokenClassification, T5Config, T5ForConditionalGeneration
from zoo import Case, labeled_batch

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.downstream.finetuning.task_loss import TaskLoss, smoothed_cross_entropy
from hf_ctxmodels.registry import FAMILIES
from hf_ctxmodels.training.trainer import CtxTrainer
from hf_ctxmodels.training.training_step import INDEX_KEY, TrainingStep

SMOOTHING = 0.2


def cove_model(head="AutoModelForSeq2SeqLM"):
    return Case(FAMILIES["cove"], head).model(hidden_dropout_prob=0.0)


def t5_model():
    torch.manual_seed(0)
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_decoder_layers": 1, "num_heads": 2}
    config = T5Config(vocab_size=61, dropout_rate=0.0, decoder_start_token_id=0, **sizes)
    return T5ForConditionalGeneration(config)


def make_batch(lengths):
    """A batch whose rows have `lengths` targets."""
    case = Case(FAMILIES["cove"], "AutoModelForSeq2SeqLM")
    batch = labeled_batch(case, tuple(3 + number % 4 for number in range(len(lengths))))
    for row, length in enumerate(lengths):
        batch["labels"][row, length:] = -100
    return {name: batch[name] for name in ("input_ids", "attention_mask", "labels")}


def naive_losses(model, batch):
    """Mean of the smoothed cross-entropy over the targets, and the loss of the model."""
    with torch.no_grad():
        options = {"return_logits": True} if isinstance(model, type(cove_model())) else {}
        output = model.eval()(**batch, **options)
    total_loss, count = 0.0, 0
    for logits, labels in zip(output.logits.double(), batch["labels"], strict=True):
        for row, label in zip(logits.tolist(), labels.tolist(), strict=True):
            if label == -100:
                continue
            norm = math.log(sum(math.exp(logit) for logit in row))
            target = [SMOOTHING / len(row) + (1 - SMOOTHING) * (word == label) for word in range(len(row))]
            total_loss += sum(p * (norm - logit) for p, logit in zip(target, row, strict=True))
            count += 1
    return total_loss / count, float(output.loss)


@pytest.mark.parametrize("make_model", [cove_model, t5_model])
def test_smoothed_training_loss_and_plain_evaluation_loss(make_model):
    batch = make_batch([4, 1, 3])
    expected, plain = naive_losses(make_model(), batch)
    assert abs(expected - plain) > 1e-3
    model = make_model().train()
    loss_function = TaskLoss(model, ["labels"], SMOOTHING)
    assert loss_function.targets == ("labels",)
    loss, loss_of_16 = loss_function(model, batch, None).loss, loss_function(model, batch, {"labels": 16}).loss
    assert loss.item() == pytest.approx(expected, abs=1e-5)
    count = int((batch["labels"] != -100).sum())
    assert loss_of_16.item() == pytest.approx(expected * count / 16, abs=1e-5)
    with torch.no_grad():
        assert model.eval()(**batch).loss.item() == pytest.approx(plain, abs=1e-5)


@pytest.mark.parametrize("make_model", [cove_model, t5_model])
def test_accumulated_gradients_equal_one_batch(make_model):
    batch = make_batch([1, 4, 2, 4, 1, 1, 1, 2, 3, 4, 4, 4, 1, 2, 1, 1])
    gradients = []
    for accumulation in (1, 4):
        model = make_model().train()
        loss_function = TaskLoss(model, ["labels"], SMOOTHING)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        accelerator = Accelerator(cpu=True)
        training_step = TrainingStep(
            accelerator, model, accelerator.prepare(optimizer), 0.0, loss_function=loss_function
        )
        chunks = {name: tensor.chunk(accumulation) for name, tensor in batch.items()}
        indices = {INDEX_KEY: torch.arange(16 // accumulation)}
        training_step(
            [{name: tensors[number] for name, tensors in chunks.items()} | indices for number in range(accumulation)]
        )
        gradients.append({name: before[name] - parameter.detach() for name, parameter in model.named_parameters()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=0, atol=1e-5, msg=name)
    assert any(gradient.abs().max() > 1e-3 for gradient in gradients[0].values())


@pytest.mark.filterwarnings("ignore")
def test_trainer_uses_smoothed_loss(tmp_path):
    """One SGD step of 2 x 2 examples equals the gradient of the smoothed loss of all 4."""
    batch, model = make_batch([4, 1, 3, 2]), cove_model().train()
    loss_function = TaskLoss(model, ["labels"], SMOOTHING)
    loss_function(model, batch, None).loss.backward()
    expected = {name: -parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    sizes = {"max_steps": 1, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    sgd = {"optim": "sgd", "learning_rate": 1.0, "lr_scheduler_type": "constant", "max_grad_norm": 0.0}
    arguments = trainer_arguments(tmp_path, **sizes, **sgd)
    CtxTrainer(model, arguments, train_dataset=unbatch(batch), loss_function=loss_function).train()
    for name, update in expected.items():
        torch.testing.assert_close(model.get_parameter(name) - before[name], update, rtol=0, atol=1e-5, msg=name)


def test_trainer_rejects_smoothing_of_other_losses(tmp_path):
    """Trainer would train with the cross-entropy of the logits, or evaluate another loss than it trains."""
    arguments = trainer_arguments(tmp_path, label_smoothing_factor=SMOOTHING)
    heads = ("AutoModelForPreTraining", "AutoModelForQuestionAnswering")
    models = [Case(FAMILIES["bert"], head).model() for head in heads]
    models += [Case(FAMILIES[name], "AutoModelForPreTraining").model() for name in ("word2vec", "glove")]
    lstm = Case(FAMILIES["ulmfit"], "AutoModelForCausalLM")
    no_penalty = {"activation_penalty": 0, "slowness_penalty": 0}
    models += [lstm.model(backward=True, **no_penalty), lstm.model(slowness_penalty=0)]
    classifier = Case(FAMILIES["gpt"], "AutoModelForSequenceClassification")
    models += [classifier.model(lm_loss_weight=0.5)]
    loss_function = TaskLoss(cove_model(), ["labels"], SMOOTHING)
    for model, loss in [*((model, None) for model in models), (cove_model(), loss_function)]:
        with pytest.raises(CtxError, match=rf"label_smoothing_factor={SMOOTHING}, .*{type(loss or model).__name__}\."):
            CtxTrainer(model, arguments, loss_function=loss)
    for model in (cove_model(), t5_model(), lstm.model(**no_penalty), classifier.model(lm_loss_weight=0.0)):
        CtxTrainer(model, arguments)


def test_transformers_losses_add_up_over_micro_batches():
    """Heads of transformers return batch means; the micro-batches have 1 and 18 targets."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    model = BertForTokenClassification(BertConfig(vocab_size=20, num_labels=3, **sizes)).eval()
    loss_function = TaskLoss(model, ["labels"])
    ids, labels = torch.randint(5, 20, (4, 6)), torch.randint(3, (4, 6))
    labels[0, 1:] = -100
    total = loss_function(model, {"input_ids": ids, "labels": labels}, None).loss
    micro_losses = [
        loss_function(model, {"input_ids": ids[examples], "labels": labels[examples]}, {"labels": 19}).loss
        for examples in (slice(0, 1), slice(1, 4))
    ]
    torch.testing.assert_close(sum(micro_losses), total)


def test_unsupported_models_and_values_raise():
    with pytest.raises(CtxError, match=r"(?s)0 to below 1.*--label_smoothing 1"):
        TaskLoss(cove_model(), ["labels"], 1.0)
    with pytest.raises(CtxError, match="several terms"):
        TaskLoss(Case(FAMILIES["lmseq2seq"], "AutoModelForPreTraining").model(), ["labels"], 0.1)
    with pytest.raises(CtxError, match="not an encoder-decoder"):
        TaskLoss(Case(FAMILIES["gpt2"], "AutoModelForCausalLM").model(), ["labels"], 0.1)
    with pytest.raises(CtxError, match="no logits at the positions"):
        smoothed_cross_entropy(torch.zeros(2, 3, 5), torch.zeros(2, 4, dtype=torch.int64), 0.1)
