"""XLNet's two streams and memory against transformers: outputs, losses and gradients of several segments."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from models.test_xlnet import make_batch
from test_random_configurations import assert_equal_gradients, pair
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


def random_batch(seed: int, length: int = 9, side: str | None = None) -> Batch:
    """Four examples with up to four targets, with `permutation_order` and `target_positions`; padded on one side."""
    lengths = (length, length - 2, length - 3, length - 1) if side else (length,) * 4
    return make_batch(lengths, targets=4, side=side or "left", seed=seed)


def to_transformers(batch: Batch) -> Batch:
    """The same batch with `perm_mask` and `target_mapping`."""
    inputs = dict(batch)
    order, positions = inputs.pop("permutation_order"), inputs.pop("target_positions")
    length = order.shape[1]
    hidden = (order[:, None, :] > order[:, :, None]) | (torch.eye(length).bool() & (order >= 0)[:, None, :])
    mapping = torch.nn.functional.one_hot(positions.clamp(min=0), length) * (positions >= 0)[..., None]
    return inputs | {"perm_mask": hidden.float(), "target_mapping": mapping.float()}


@pytest.mark.parametrize("convert", [to_transformers, dict], ids=["transformers form", "compact form"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("seed", SEEDS)
def test_segments_with_memory(seed: int, attention: str, convert: Any, tmp_path: Path) -> None:
    """Three segments, each with the memory of the previous ones; the last one is padded."""
    reference, model = pair(CASE, seed, tmp_path, **OPTIONS[seed])
    model.set_attn_implementation(attention)
    reference_memory = memory = None
    for number in range(3):
        batch = random_batch(10 * seed + number, 8 + number, ("left", "right")[seed % 2] if number == 2 else None)
        is_target, is_token = batch["target_positions"] >= 0, batch["attention_mask"].bool()
        del batch["labels"]
        expected = reference(**to_transformers(batch), mems=reference_memory, use_mems=True, output_hidden_states=True)
        outputs = model(**convert(batch), mems=memory, use_mems=True, output_hidden_states=True)
        assert_close(outputs.logits[is_target], expected.logits[is_target], f"segment {number}")
        for states, expected_states in zip(outputs.hidden_states, expected.hidden_states, strict=True):
            selected = is_token if states.shape[1] == is_token.shape[1] else is_target
            assert_close(states[selected], expected_states[selected], f"hidden states of segment {number}")
        if number < 2:
            expected_memory = [states.transpose(0, 1) for states in expected.mems]
            assert_close(outputs.mems, expected_memory, f"memory of segment {number}")
        reference_memory, memory = expected.mems, outputs.mems


@pytest.mark.parametrize("seed", SEEDS)
def test_losses_and_gradients_with_memory(seed: int, tmp_path: Path) -> None:
    reference, model = pair(CASE, seed, tmp_path / "reference", **OPTIONS[seed])
    batch = random_batch(seed, side=("left", "right")[seed % 2])
    length = int(np.random.default_rng(seed).integers(0, 9))
    memory = [torch.randn(length, 4, reference.config.d_model) for _ in range(reference.config.n_layer)]
    expected = reference(**to_transformers(batch), mems=memory).loss
    loss = model(**batch, mems=[layer.transpose(0, 1) for layer in memory]).loss
    assert_close(loss, expected, "loss")
    expected.backward()
    loss.backward()
    assert_equal_gradients(model, reference, tmp_path / "gradients")


def test_attention_weights(tmp_path: Path) -> None:
    """For both streams; transformers returns the query stream for all positions."""
    reference, model = pair(CASE, 1, tmp_path)
    model.set_attn_implementation("eager")
    batch = random_batch(1)
    targets = batch["target_positions"]
    expected = reference(**to_transformers(batch), output_attentions=True).attentions
    attentions = model(**batch, output_hidden_states=True, output_attentions=True).attentions
    rows, numbers = (targets >= 0).nonzero(as_tuple=True)
    for (content, query), (expected_content, expected_query) in zip(attentions, expected, strict=True):
        assert_close(content, expected_content)
        assert_close(query[rows, :, numbers], expected_query[rows, :, targets[rows, numbers]])


@pytest.mark.parametrize("same_length", [False, True])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_causal_segments(attention: str, same_length: bool, tmp_path: Path) -> None:
    """Without a mask: in this mode transformers fails with one."""
    case = Case(FAMILIES["xlnet"], "AutoModel")
    reference, model = pair(case, 2, tmp_path, attn_type="uni", same_length=same_length, mem_len=8)
    model.set_attn_implementation(attention)
    reference_memory = memory = None
    for number in range(3):
        input_ids = torch.randint(5, 61, (3, 5 + number), generator=torch.Generator().manual_seed(number))
        expected, outputs = reference(input_ids, mems=reference_memory), model(input_ids, mems=memory)
        assert_close(outputs.last_hidden_state, expected.last_hidden_state, f"segment {number}")
        assert_close(outputs.mems, [states.transpose(0, 1) for states in expected.mems], f"memory of segment {number}")
        reference_memory, memory = expected.mems, outputs.mems


@pytest.mark.parametrize("summary_type", ["last", "first", "mean", "cls_index"])
@pytest.mark.parametrize("options", [{}, {"summary_use_proj": False}, {"summary_activation": "gelu"}])
def test_summary_types(summary_type: str, options: dict[str, Any], tmp_path: Path) -> None:
    case = Case(FAMILIES["xlnet"], "AutoModelForSequenceClassification")
    reference, model = pair(case, 3, tmp_path, summary_type=summary_type, **options)
    input_ids = torch.randint(5, 61, (3, 7), generator=torch.Generator().manual_seed(0))
    assert_close(model(input_ids).logits, reference(input_ids).logits)
