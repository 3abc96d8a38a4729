"""XLNet's two streams and memory against transformers: outputs, losses and gradients of several segments."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_random_configurations import assert_equal_gradients, pair
from torch import Tensor
from zoo import Batch, Case, assert_close

from hf_ctxmodels.registry import FAMILIES

CASE = Case(FAMILIES["xlnet"], "AutoModelForPreTraining")
SEEDS = range(6)
OPTIONS: list[dict[str, Any]] = [
    {},
    {"mem_len": None, "clamp_len": 5},
    {"bi_data": True, "mem_len": 9},
    {"mem_len": 12, "reuse_len": 4},
    {"bi_data": True, "clamp_len": 3, "reuse_len": 6},
    {"mem_len": 0, "tie_word_embeddings": False},
]


def random_batch(seed: int, *, rows: int = 4, length: int = 9, targets: int = 4) -> Batch:
    """A batch in the form of transformers; each target has a visible token."""
    generator = torch.Generator().manual_seed(seed)
    positions = 1 + torch.rand(rows, length - 1, generator=generator).argsort(1)[:, :targets]
    ranks = torch.rand(rows, targets, generator=generator).argsort(1)
    order = torch.full((rows, length), -1).scatter(1, positions, ranks)
    hidden = (order[:, None, :] >= 0) & (order[:, :, None] <= order[:, None, :])
    words = torch.randint(5, 61, (rows, length), generator=generator)
    return {
        "input_ids": words,
        "token_type_ids": torch.randint(3, (rows, length), generator=generator),
        "perm_mask": hidden.float(),
        "target_mapping": torch.nn.functional.one_hot(positions, length).float(),
        "labels": words.gather(1, positions),
    }


def with_padding(batch: Batch, side: str) -> Batch:
    """The batch with padding in three of its examples."""
    mask = torch.ones_like(batch["input_ids"])
    for row, count in enumerate((0, 2, 3, 1)):
        if count:
            mask[row, slice(count) if side == "left" else slice(-count, None)] = 0
    padding = mask[:, None] == 0
    is_removed = (batch["target_mapping"] * padding).any(-1)
    return batch | {
        "attention_mask": mask,
        "target_mapping": batch["target_mapping"].masked_fill(is_removed[..., None], 0.0),
        "labels": batch["labels"].masked_fill(is_removed, -100),
    }


def compact(batch: Batch) -> Batch:
    """The same batch with `permutation_order` and `target_positions`."""
    mapping = batch["target_mapping"]
    present = mapping.any(-1)
    positions = mapping.argmax(-1).masked_fill(~present, -1)
    hidden_from = batch["perm_mask"].sum(1).long()  # number of positions that a key is hidden from grows with its rank
    order = torch.where(hidden_from > 0, hidden_from, -1)
    inputs = {name: value for name, value in batch.items() if name not in ("perm_mask", "target_mapping")}
    return inputs | {"permutation_order": order, "target_positions": positions}


def is_target(batch: Batch) -> Tensor:
    return batch["target_mapping"].any(-1)


@pytest.mark.parametrize("form", [dict, compact], ids=["transformers form", "compact form"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("seed", SEEDS)
def test_segments(seed: int, attention: str, form: Any, tmp_path: Path) -> None:
    """Three segments, each with the memory of the segments before it; the last one is padded."""
    reference, model = pair(CASE, seed, tmp_path, **OPTIONS[seed])
    model.set_attn_implementation(attention)
    reference_memory = memory = None
    for number in range(3):
        batch = random_batch(10 * seed + number, length=8 + number)
        if number == 2:
            batch = with_padding(batch, ("left", "right")[seed % 2])
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        expected = reference(**inputs, mems=reference_memory, use_mems=True, output_hidden_states=True)
        inputs = {name: value for name, value in form(batch).items() if name != "labels"}
        outputs = model(**inputs, mems=memory, use_mems=True, output_hidden_states=True)
        assert_close(outputs.logits[is_target(batch)], expected.logits[is_target(batch)], f"segment {number}")
        is_token = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
        for states, expected_states in zip(outputs.hidden_states, expected.hidden_states, strict=True):
            selected = is_token if states.shape[1] == is_token.shape[1] else is_target(batch)
            assert_close(states[selected], expected_states[selected], f"hidden states of segment {number}")
        if number < 2:
            for states, expected_states in zip(outputs.mems, expected.mems, strict=True):
                assert_close(states, expected_states.transpose(0, 1), f"memory of segment {number}")
        reference_memory, memory = expected.mems, outputs.mems


@pytest.mark.parametrize("seed", SEEDS)
def test_losses_and_gradients(seed: int, tmp_path: Path) -> None:
    """With memory."""
    reference, model = pair(CASE, seed, tmp_path / "reference", **OPTIONS[seed])
    batch = with_padding(random_batch(seed), ("left", "right")[seed % 2])
    length = int(np.random.default_rng(seed).integers(0, 9))
    memory = [torch.randn(length, 4, reference.config.d_model) for _ in range(reference.config.n_layer)]
    expected = reference(**batch, mems=memory).loss
    loss = model(**compact(batch), mems=[layer.transpose(0, 1) for layer in memory]).loss
    assert_close(loss, expected, "loss")
    expected.backward()
    loss.backward()
    assert_equal_gradients(model, reference, tmp_path / "gradients")


def test_attention_weights(tmp_path: Path) -> None:
    """Of both streams; transformers returns the query stream for all positions."""
    reference, model = pair(CASE, 1, tmp_path)
    model.set_attn_implementation("eager")
    batch = random_batch(1)
    columns = batch["target_mapping"].argmax(-1)
    expected = reference(**batch, output_attentions=True).attentions
    attentions = model(**batch, output_hidden_states=True, output_attentions=True).attentions
    for (content, query), (expected_content, expected_query) in zip(attentions, expected, strict=True):
        assert_close(content, expected_content)
        indices = columns[:, None, :, None].expand(-1, query.shape[1], -1, query.shape[3])
        assert_close(query, expected_query.gather(2, indices))


@pytest.mark.parametrize("same_length", [False, True])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_causal_segments(attention: str, same_length: bool, tmp_path: Path) -> None:
    """Without a mask, with which transformers fails in this mode."""
    case = Case(FAMILIES["xlnet"], "AutoModel")
    reference, model = pair(case, 2, tmp_path, attn_type="uni", same_length=same_length, mem_len=8)
    model.set_attn_implementation(attention)
    reference_memory = memory = None
    for number in range(3):
        words = torch.randint(5, 61, (3, 5 + number), generator=torch.Generator().manual_seed(number))
        expected, outputs = reference(words, mems=reference_memory), model(words, mems=memory)
        assert_close(outputs.last_hidden_state, expected.last_hidden_state, f"segment {number}")
        for states, expected_states in zip(outputs.mems, expected.mems, strict=True):
            assert_close(states, expected_states.transpose(0, 1), f"memory of segment {number}")
        reference_memory, memory = expected.mems, outputs.mems


@pytest.mark.parametrize("summary_type", ["last", "first", "mean", "cls_index"])
@pytest.mark.parametrize("options", [{}, {"summary_use_proj": False}, {"summary_activation": "gelu"}])
def test_summaries(summary_type: str, options: dict[str, Any], tmp_path: Path) -> None:
    case = Case(FAMILIES["xlnet"], "AutoModelForSequenceClassification")
    reference, model = pair(case, 3, tmp_path, summary_type=summary_type, **options)
    words = torch.randint(5, 61, (3, 7), generator=torch.Generator().manual_seed(0))
    assert_close(model(words).logits, reference(words).logits)
