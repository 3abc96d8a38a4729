"""Errors of XLNet for memory, permutations and targets that do not match the input; memory of the task heads."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_xlnet import ENCODER, LAYERS, MODEL, WIDTH, make_batch, make_memory, without
from zoo import CASES, Batch, Case
from zoo import make_batch as make_common_batch

from hf_ctxmodels import CtxError, CtxXLNetConfig

XLNET_CASES = [case for case in CASES if case.family.name == "xlnet"]
TASK_CASES = [case for case in XLNET_CASES if not case.is_base and not case.computes_logits_of_labels_only]
SINGLE_STREAM = without(make_batch(), "labels", "target_positions", "permutation_order")


def changed(name: str, index: Any, value: int, **other_values: torch.Tensor) -> Batch:
    """The batch with one changed element of a tensor."""
    batch = make_batch() | other_values
    batch[name] = batch[name].clone()
    batch[name][index] = value
    return batch


def assert_error(model: torch.nn.Module, facts: tuple[str, ...], **inputs: Any) -> None:
    with pytest.raises(CtxError) as error:
        model(**inputs)
    for fact in facts:
        assert fact in str(error.value)


@pytest.mark.parametrize(
    ("mems", "facts"),
    [
        (make_memory(2, 4), ("mems[0] is (2, 4, 32)", "batch=3", "hidden=32")),
        ([memory.transpose(0, 1) for memory in make_memory(3, 4)], ("mems[0] is (4, 3, 32)", "mem.transpose(0, 1)")),
        ([*make_memory(3, 4)[:-1], torch.randn(3, 4, WIDTH + 2)], ("mems[2] is (3, 4, 34)", "hidden=32")),
        ([*make_memory(3, 4)[:-1], torch.randn(3, 5, WIDTH)], ("mems[2]", "5 positions", "4")),
        (make_memory(3, 9), ("9 positions", "mem_len=8")),
        (make_memory(3, 4)[:2], ("mems has 2 tensors", f"{LAYERS} layers")),
        (torch.randn(5, 3, 4, WIDTH), ("mems has 5 tensors",)),
    ],
)
def test_memory_errors(mems: Any, facts: tuple[str, ...]) -> None:
    assert_error(MODEL.model(mem_len=8), facts, **make_batch(), mems=mems)


def test_memory_cannot_be_combined_with_packed_sequences() -> None:
    ids = SINGLE_STREAM["attention_mask"]
    assert_error(ENCODER.model(), ("mems", "sequence_ids"), **SINGLE_STREAM, sequence_ids=ids, mems=make_memory(3, 4))


@pytest.mark.parametrize("case", TASK_CASES, ids=str)
def test_memory_of_task_heads(case: Case) -> None:
    """It is returned on request, equals the encoder's memory, and changes the outputs of the next segment."""
    model, batch = case.model(mem_len=8), make_common_batch(case)
    without_memory = model(**batch)
    assert without_memory.get("mems") is None
    first = model(**batch, use_mems=True)
    rows = {name: tensor.flatten(0, -2) for name, tensor in batch.items()}
    expected = model.base_model(**rows, use_mems=True).mems
    assert len(first.mems) == LAYERS
    assert all(torch.equal(memory, encoder_memory) for memory, encoder_memory in zip(first.mems, expected, strict=True))
    second = model(**batch, mems=first.mems)
    name = next(iter(without_memory))
    assert not torch.equal(second[name], first[name])


@pytest.mark.parametrize("shape", [(3, 11), (3, 10, 11), (2, 11, 11)])
def test_shape_of_perm_mask(shape: tuple[int, ...]) -> None:
    batch = without(make_batch(), "permutation_order")
    assert_error(MODEL.model(), (f"perm_mask is {shape}", "(3, 11, 11)"), **batch, perm_mask=torch.zeros(shape))


def target_mapping(*values: float) -> torch.Tensor:
    """(3, 3, 11) with these values of the second target of the first example."""
    mapping = torch.zeros(3, 3, 11)
    mapping[0, 1, 3 : 3 + len(values)] = torch.tensor(values)
    return mapping


@pytest.mark.parametrize(
    ("make_inputs", "facts"),
    [
        (
            lambda: make_batch() | {"permutation_order": make_batch()["permutation_order"][:, 1:]},
            ("permutation_order is (3, 10)", "(3, 11)"),
        ),
        (lambda: changed("permutation_order", (1, 2), -2), ("permutation_order[1, 2] is -2",)),
        (lambda: make_batch() | {"perm_mask": torch.zeros(3, 11, 11)}, ("permutation_order and perm_mask",)),
        (lambda: make_batch() | {"target_mapping": target_mapping()}, ("target_positions and target_mapping",)),
        (lambda: changed("target_positions", (0, 1), 11), ("target_positions[0, 1] is 11", "length=11")),
        (lambda: changed("target_positions", (0, 1), -2), ("target_positions[0, 1] is -2", "length=11")),
        (
            lambda: changed(
                "target_positions",
                (2, 0),
                0,
                permutation_order=changed("permutation_order", (2, 0), 5)["permutation_order"],
            ),
            ("target_positions[2, 0] is 0", "padding"),
        ),
        (
            lambda: changed("permutation_order", (0, int(make_batch()["target_positions"][0, 0])), -1),
            (f"target_positions[0, 0] is {int(make_batch()['target_positions'][0, 0])}", "rank -1"),
        ),
        (lambda: without(make_batch(), "permutation_order"), ("target_positions", "permutation_order")),
        (
            lambda: SINGLE_STREAM | {"target_mapping": target_mapping(1, 1)},
            ("target_mapping[0, 1]", "one-hot"),
        ),
        (lambda: SINGLE_STREAM | {"target_mapping": target_mapping(0.5)}, ("target_mapping[0, 1]", "one-hot")),
        (
            lambda: without(make_batch(), "labels") | {"target_positions": torch.zeros(2, 3).long()},
            ("target_positions is (2, 3)", "(3, targets)"),
        ),
        (
            lambda: (
                without(make_batch(), "labels", "target_positions") | {"target_mapping": target_mapping()[:, :, 2:]}
            ),
            ("target_mapping is (3, 3, 9)", "(3, targets, 11)"),
        ),
        (lambda: make_batch() | {"labels": make_batch()["labels"][:, 1:]}, ("labels is (3, 2)", "(3, 3)")),
        (lambda: changed("labels", (1, 2), 7), ("labels[1, 2] is 7", "target_positions is -1")),
        (lambda: changed("labels", (0, 0), 61), ("labels", "61", "vocab_size=61")),
        (
            lambda: make_batch() | {"attention_mask": torch.ones(3, 1, 11, 11)},
            ("attention_mask is (3, 1, 11, 11)", "perm_mask"),
        ),
    ],
)
def test_permutation_and_target_errors(make_inputs: Callable[[], Batch], facts: tuple[str, ...]) -> None:
    assert_error(MODEL.model(), facts, **make_inputs())


def test_output_mask_cannot_be_combined_with_targets() -> None:
    batch = without(make_batch(), "labels")
    assert_error(ENCODER.model(), ("output_mask",), **batch, output_mask=batch["attention_mask"].bool())


def test_odd_batch_size_with_bi_data() -> None:
    assert_error(MODEL.model(bi_data=True), ("bi_data", "3"), **make_batch())


@pytest.mark.parametrize("case", XLNET_CASES, ids=str)
def test_input_mask_of_transformers(case: Case) -> None:
    batch = make_common_batch(case)
    batch["input_mask"] = 1.0 - batch.pop("attention_mask")
    assert_error(case.model(), ("input_mask", "attention_mask = 1 - input_mask"), **batch)


def test_position_ids_are_not_supported() -> None:
    assert_error(ENCODER.model(), ("position_ids",), **SINGLE_STREAM, position_ids=torch.arange(11)[None])


@pytest.mark.parametrize(
    ("field", "value"),
    [("attn_type", "both"), ("summary_type", "attn"), ("mem_len", -1), ("hidden_size", 33), ("hidden_size", 32)],
)
def test_configuration_errors(field: str, value: object) -> None:
    with pytest.raises(Exception, match=f"{field}={value!r}"):
        CtxXLNetConfig(**{"hidden_size": 36, "num_attention_heads": 3, field: value})
