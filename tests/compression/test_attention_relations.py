"""MiniLM's losses of all families with attention scores; padding, packed sequences, equal models, and training."""

import copy
from typing import Any

import pytest
import torch
from distillation_models import LENGTHS, distillation_batch, features, gradients, new_model
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from zoo import Case, assert_close, make_batch

from hf_ctxmodels.compression.distillation import (
    AttentionScoreLoss,
    CtxDistillationModel,
    DistillationCollator,
    MiniLMLoss,
    MiniLMv2Loss,
    attention_relations,
)
from hf_ctxmodels.registry import FAMILIES

ENCODERS = ("bert", "ernie", "roberta", "xlm_roberta", "albert", "electra", "spanbert", "structbert", "unilm", "xlm")
RELATION_LOSSES = [MiniLMLoss(), MiniLMv2Loss(relation_heads=4)]


def last_attention(model: Any, input_ids: Tensor) -> tuple[Tensor, list[Tensor]]:
    """(heads, length, length) eager attention probabilities of the last layer for one sequence without padding, and its
    (length, width) queries, keys and values, recorded by a hook."""
    outputs: list[Tensor] = []
    layers = [*model.base_model.layers]
    hook = layers[-1].attention.qkv_proj.register_forward_hook(lambda module, inputs, output: outputs.append(output))
    attentions = model.base_model(input_ids=input_ids[None], output_attentions=True).attentions
    hook.remove()
    assert len(attentions) == len(layers)
    return attentions[-1][0], list(outputs[-1].reshape(len(input_ids), -1).chunk(3, 1))


def self_relations(vectors: Tensor, num_heads: int) -> Tensor:
    """(heads, length, length) softmax of scaled products of vectors with themselves."""
    size = vectors.shape[1] // num_heads
    heads = [vectors[:, head * size : (head + 1) * size] for head in range(num_heads)]
    return torch.stack([(x @ x.T / size**0.5).softmax(1) for x in heads])


def divergence(student: Tensor, teacher: Tensor) -> Tensor:
    """Sum over tokens of the mean over heads, of probabilities."""
    return (teacher * (teacher.log() - student.log())).sum() / len(student)


@pytest.mark.parametrize("name", ENCODERS)
def test_relations_equal_attention_of_families(name):
    case = Case(FAMILIES[name], "AutoModelForMaskedLM")
    student, teacher = case.model(), case.model(seed=1, num_hidden_layers=3)
    for model in (student, teacher):  # otherwise each query attends to one key
        for parameter in model.parameters():
            parameter.data *= 0.6
    batch = make_batch(case)
    rows = [ids[mask == 1] for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)]
    minilm: Any = 0.0
    minilm_v2: Any = 0.0
    for ids in rows:
        probabilities, vectors = last_attention(student, ids)
        target_probabilities, target_vectors = last_attention(teacher, ids)
        num_heads = len(probabilities)
        minilm += divergence(probabilities, target_probabilities)
        minilm += divergence(self_relations(vectors[2], num_heads), self_relations(target_vectors[2], num_heads))
        minilm_v2 += sum(
            divergence(self_relations(x, 4), self_relations(y, 4)) for x, y in zip(vectors, target_vectors, strict=True)
        )
    batch.pop("token_type_ids", None)
    batch = DistillationCollator(lambda _: batch)([{}])
    outputs = CtxDistillationModel(student, teacher, RELATION_LOSSES)(**batch)
    num_tokens = sum(map(len, rows))
    assert_close(outputs.minilm_loss, (minilm / num_tokens).detach(), "minilm", 1e-6)
    assert_close(outputs.minilmv2_loss, (minilm_v2 / num_tokens).detach(), "minilmv2", 1e-6)
    assert outputs.minilm_loss > 1e-3
    assert CtxDistillationModel(student, teacher, [AttentionScoreLoss(layers="1:3")])(**batch).loss > 0


@pytest.mark.parametrize("loss", RELATION_LOSSES, ids=lambda loss: loss.name)
def test_padding_packing_and_chunks_do_not_change_loss(loss, monkeypatch):
    student, teacher = new_model(2, hidden_size=4), new_model(4, seed=1)
    model = CtxDistillationModel(student, teacher, [loss])
    batch = distillation_batch(features())

    def loss_and_gradients(batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        output = model(**batch)
        output.loss.backward()
        return output.loss.detach(), gradients(model)

    expected = loss_and_gradients(batch)
    longest, total = max(LENGTHS), sum(LENGTHS)
    ids = [row["input_ids"] for row in features()]
    fills = {"input_ids": 0, "attention_mask": 0, "labels": -100}
    right = {name: torch.nn.functional.pad(batch[name], (0, 5), value=value) for name, value in fills.items()}
    left = [row.flip(0) for row in right["attention_mask"]]
    left_ids = pad_sequence([row.flip(0) for row in ids], batch_first=True, padding_value=0).flip(1)
    positions = (torch.stack([row[-longest:] for row in left]).cumsum(1) - 1).clamp(min=0)
    numbers = torch.cat([torch.full((length,), number + 1) for number, length in enumerate(LENGTHS)])
    batches = {
        "wider": right,
        "left": {
            "input_ids": left_ids,
            "attention_mask": torch.stack([row[-longest:] for row in left]),
            "position_ids": positions,
        },
        "packed": {"input_ids": torch.cat(ids)[None], "sequence_ids": numbers[None]},
    }
    assert batches["packed"]["input_ids"].shape == (1, total)
    for name, changed in batches.items():
        collated = DistillationCollator(lambda _, changed=changed: changed)([{}])
        assert_close(loss_and_gradients(collated), expected, name, 1e-6)
    assert_close(loss_and_gradients({**batch, "labels": torch.full_like(batch["labels"], -100)}), expected, "labels", 0)
    monkeypatch.setattr(attention_relations, "chunk_size", lambda *_: 1)
    assert_close(loss_and_gradients(batch), expected, "chunks", 1e-6)


@pytest.mark.parametrize("loss", RELATION_LOSSES, ids=lambda loss: loss.name)
def test_loss_of_copied_model_is_zero(loss):
    teacher = new_model(4, seed=1)
    model = CtxDistillationModel(copy.deepcopy(teacher), teacher, [loss])
    output = model(**distillation_batch(features()))
    output.loss.backward()
    assert abs(output.loss.item()) < 1e-7
    assert max(float(gradient.abs().max()) for gradient in gradients(model).values()) < 1e-6
    assert all(parameter.grad is None for parameter in teacher.parameters())


@pytest.mark.parametrize("loss", RELATION_LOSSES, ids=lambda loss: loss.name)
def test_training_lowers_loss_of_narrow_student(loss):
    model = CtxDistillationModel(new_model(2, hidden_size=4), new_model(4, seed=1), [loss])
    teacher_weights = copy.deepcopy(model.teacher.state_dict())
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    batch, losses = distillation_batch(features()), []
    for _ in range(60):
        optimizer.zero_grad()
        output = model(**batch)
        output.loss.backward()
        optimizer.step()
        losses.append(output.loss.item())
    assert losses[-1] < 0.5 * losses[0]
    assert all(torch.equal(tensor, teacher_weights[name]) for name, tensor in model.teacher.state_dict().items())
