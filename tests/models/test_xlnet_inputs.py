"""Errors of XLNet for invalid memory, permutations and targets; memory of the task heads."""

from pathlib import Path
from typing import Any

import pytest
import torch
from commands import tiny_pair
from test_xlnet import ENCODER, LAYERS, MODEL, WIDTH, make_batch, make_memory, without
from torch import Tensor
from transformers import DynamicCache, XLNetLMHeadModel, pipeline
from zoo import CASES, Batch, Case, assert_close
from zoo import make_batch as make_common_batch

from hf_ctxmodels import CtxError

XLNET_CASES = [case for case in CASES if case.family.name == "xlnet"]
MEMORY_CASES = [case for case in CASES if case.family.name in ("xlnet", "transformer_xl")]
TASK_CASES = [case for case in XLNET_CASES if not case.is_base and not case.computes_logits_of_labels_only]
BATCH = make_batch()
ORDER, TARGET = BATCH["permutation_order"], int(BATCH["target_positions"][0, 0])
WITHOUT_TARGETS = dict.fromkeys(("labels", "target_positions", "permutation_order"))
SINGLE_STREAM = without(BATCH, *WITHOUT_TARGETS)


def changed_tensor(name: str, index: Any, value: int) -> Batch:
    """A tensor of the batch with one changed element."""
    tensor = BATCH[name].clone()
    tensor[index] = value
    return {name: tensor}


def assert_error(model: torch.nn.Module, fragments: tuple[str, ...], **inputs: Any) -> None:
    with pytest.raises(CtxError) as error:
        model(**inputs)
    for fragment in fragments:
        assert fragment in str(error.value)


@pytest.mark.parametrize(
    ("mems", "fragments"),
    [
        (make_memory(2, 4), ("mems[0] is (2, 4, 32)", "batch=3", "hidden=32")),
        ([memory.transpose(0, 1) for memory in make_memory(3, 4)], ("mems[0] is (4, 3, 32)", "mem.transpose(0, 1)")),
        ([*make_memory(3, 4)[:-1], torch.randn(3, 4, WIDTH + 2)], ("mems[2] is (3, 4, 34)", "hidden=32")),
        ([*make_memory(3, 4)[:-1], torch.randn(3, 5, WIDTH)], ("mems[2]", "5 positions", "4")),
        (make_memory(3, 9), ("9 positions", "mem_len=8")),
        (make_memory(3, 4)[:2], ("mems has 2 tensors", f"{LAYERS} layers")),
        (torch.randn(5, 3, 4, WIDTH), ("mems has 5 tensors",)),
        (DynamicCache(), ("mems is a DynamicCache", "as returned by the model")),
        ([(memory, memory) for memory in make_memory(3, 4)], ("mems is a list", "tuple of tensors")),
    ],
)
def test_invalid_memory(mems: Any, fragments: tuple[str, ...]) -> None:
    assert_error(MODEL.model(mem_len=8), fragments, **BATCH, mems=mems)


@pytest.mark.parametrize("case", MEMORY_CASES, ids=str)
def test_caches_of_keys_and_values_raise(case: Case) -> None:
    """The models have a memory instead of a cache, and `generate` computes it."""
    model, batch = case.model(), make_common_batch(case)
    cache = DynamicCache()
    cache.update(torch.zeros(4, 4, 3, 8), torch.zeros(4, 4, 3, 8), 0)
    assert_error(model, ("past_key_values",), **batch, past_key_values=cache)
    if model.can_generate():
        for name in ("past_key_values", "mems"):
            with pytest.raises(CtxError, match=f"does not accept {name}"):
                model.generate(batch["input_ids"], max_new_tokens=2, **{name: cache})


def test_generation_recomputes_two_tokens() -> None:
    """As in transformers: the inputs of a step are the last two tokens and the unknown next one."""
    (case,) = [case for case in XLNET_CASES if case.auto_name == "AutoModelForCausalLM"]
    model, ids = case.model(), torch.arange(5, 15).view(2, 5)
    inputs = model.prepare_inputs_for_generation(ids, attention_mask=torch.ones_like(ids))
    assert inputs["input_ids"].tolist() == [[5, 6, 7, 8, 9, 0], [10, 11, 12, 13, 14, 0]]
    inputs = model.prepare_inputs_for_generation(ids, [torch.zeros(2, 5, WIDTH)], torch.ones_like(ids))
    assert inputs["input_ids"].tolist() == [[8, 9, 0], [13, 14, 0]]
    assert inputs["attention_mask"].shape == (2, 3)
    assert [memory.shape for memory in inputs["mems"]] == [(2, 3, WIDTH)]


@pytest.mark.parametrize("prefix", [{}, {"prefix": ""}, {"prefix": "a dog ran"}])
def test_text_generation_pipeline_equals_transformers(tmp_path: Path, prefix: dict[str, str]) -> None:
    """The pipeline adds a text before the prompts of XLNet unless it has another prefix."""
    model, tokenizer = tiny_pair("xlnet", "AutoModelForCausalLM", ["the cat sat on the mat", "a dog ran home"], 60)
    model.export_reference(tmp_path)
    options = {"max_new_tokens": 4, "do_sample": False, "suppress_tokens": tokenizer.all_special_ids}
    inputs, texts = [], []
    for any_model in (model, XLNetLMHeadModel.from_pretrained(tmp_path)):
        generator = pipeline("text-generation", model=any_model, tokenizer=tokenizer, **prefix)
        inputs.append(generator.preprocess("the cat", **generator._preprocess_params)["input_ids"].tolist())
        texts.append(generator("the cat", **options)[0]["generated_text"])
    assert inputs[0] == inputs[1]
    assert (len(inputs[0][0]) > 100) == (not prefix)
    assert texts[0] == texts[1]
    assert len(texts[0]) > len("the cat")


@pytest.mark.parametrize("case", TASK_CASES, ids=str)
def test_memory_of_task_heads(case: Case) -> None:
    """Memory is returned on request, equals the encoder's memory, and changes outputs of the next segment."""
    model, batch = case.model(mem_len=8), make_common_batch(case)
    without_memory = model(**batch)
    assert without_memory.get("mems") is None
    first_segment = model(**batch, use_mems=True)
    flat_batch = {name: tensor.flatten(0, -2) for name, tensor in batch.items()}
    assert len(first_segment.mems) == LAYERS
    assert_close(first_segment.mems, model.base_model(**flat_batch, use_mems=True).mems, tolerance=0)
    assert not torch.equal(model(**batch, mems=first_segment.mems)[0], first_segment[0])


def target_mapping(*values: float) -> Tensor:
    """(3, 3, 11) mapping with the given values for the second target of the first example."""
    mapping = torch.zeros(3, 3, 11)
    mapping[0, 1, 3 : 3 + len(values)] = torch.tensor(values)
    return mapping


@pytest.mark.parametrize(
    ("overrides", "fragments"),
    [
        ({"permutation_order": ORDER[:, 1:]}, ("permutation_order is (3, 10)", "(3, 11)")),
        (changed_tensor("permutation_order", (1, 2), -2), ("permutation_order[1, 2] is -2",)),
        ({"permutation_order": None}, ("target_positions", "permutation_order")),
        ({"perm_mask": torch.zeros(3, 11, 11)}, ("permutation_order and perm_mask",)),
        *(
            ({"permutation_order": None, "perm_mask": torch.zeros(shape)}, (f"perm_mask is {shape}", "(3, 11, 11)"))
            for shape in [(3, 11), (3, 10, 11), (2, 11, 11)]
        ),
        ({"target_mapping": target_mapping()}, ("target_positions and target_mapping",)),
        (changed_tensor("target_positions", (0, 1), 11), ("target_positions[0, 1] is 11", "length=11")),
        (changed_tensor("target_positions", (0, 1), -2), ("target_positions[0, 1] is -2", "length=11")),
        (
            changed_tensor("target_positions", (2, 0), 0) | changed_tensor("permutation_order", (2, 0), 5),
            ("target_positions[2, 0] is 0", "padding"),
        ),
        (changed_tensor("permutation_order", (0, TARGET), -1), (f"target_positions[0, 0] is {TARGET}", "rank -1")),
        (WITHOUT_TARGETS | {"target_mapping": target_mapping(1, 1)}, ("target_mapping[0, 1]", "one-hot")),
        (WITHOUT_TARGETS | {"target_mapping": target_mapping(0.5)}, ("target_mapping[0, 1]", "one-hot")),
        (
            {"labels": None, "target_positions": torch.zeros(2, 3).long()},
            ("target_positions is (2, 3)", "(3, targets)"),
        ),
        (
            {"labels": None, "target_positions": None, "target_mapping": target_mapping()[:, :, 2:]},
            ("target_mapping is (3, 3, 9)", "(3, targets, 11)"),
        ),
        ({"labels": BATCH["labels"][:, 1:]}, ("labels is (3, 2)", "(3, 3)")),
        (changed_tensor("labels", (1, 2), 7), ("labels[1, 2] is 7", "target_positions is -1")),
        (changed_tensor("labels", (0, 0), 61), ("labels", "61", "vocab_size=61")),
        ({"attention_mask": torch.ones(3, 1, 11, 11)}, ("attention_mask is (3, 1, 11, 11)", "perm_mask")),
    ],
)
def test_invalid_permutations_and_targets(overrides: dict[str, Tensor | None], fragments: tuple[str, ...]) -> None:
    assert_error(MODEL.model(), fragments, **BATCH | overrides)


@pytest.mark.parametrize("case", XLNET_CASES, ids=str)
def test_input_mask_raises(case: Case) -> None:
    batch = make_common_batch(case)
    batch["input_mask"] = 1.0 - batch.pop("attention_mask")
    assert_error(case.model(), ("input_mask", "attention_mask = 1 - input_mask"), **batch)


def test_unsupported_argument_combinations() -> None:
    mask, model = SINGLE_STREAM["attention_mask"], ENCODER.model()
    assert_error(model, ("mems", "sequence_ids"), **SINGLE_STREAM, sequence_ids=mask, mems=make_memory(3, 4))
    assert_error(model, ("output_mask",), **without(BATCH, "labels"), output_mask=mask.bool())
    assert_error(model, ("position_ids",), **SINGLE_STREAM, position_ids=torch.arange(11)[None])
    assert_error(MODEL.model(bi_data=True), ("bi_data", "3"), **BATCH)
