"""Error messages of all models for invalid inputs: the tensor, the value and the limit.

Cases and fixtures: tests/zoo/matrix.py, tests/models/conftest.py.
"""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput
from zoo import (
    HEADS,
    NETWORKS,
    REPRESENTATIVES,
    TINY,
    Batch,
    Case,
    as_subtests,
    assert_same_outputs,
    make_batch,
    make_targets,
    models_by_path,
)

from hf_ctxmodels import CtxError
from hf_ctxmodels.architectures.query_generation import QueryForConditionalGeneration
from hf_ctxmodels.architectures.transformer_encoder import TransformerEncoder
from hf_ctxmodels.registry import FAMILIES

SPAN_HEADS = [case for case in REPRESENTATIVES if "start_positions" in case.model_class.loss_targets]
VOCABULARY_HEADS = [case for case in HEADS if case.computes_logits_of_labels_only and not case.is_seq2seq]
CHOICE_HEADS = [case for case in REPRESENTATIVES if case.has_choices]


def assert_error(model: PreTrainedModel, batch: Batch, *fragments: str) -> None:
    """The forward pass raises a `CtxError` whose message contains all fragments."""
    with pytest.raises(CtxError) as error:
        model(**batch)
    assert [fragment for fragment in fragments if fragment not in str(error.value)] == []


def with_value(tensor: Tensor, index: Any, value: float) -> Tensor:
    """A copy of the tensor with `value` at `index`."""
    tensor = tensor.clone()
    tensor[index] = value
    return tensor


class TestInput:
    @as_subtests(NETWORKS, "network_case")
    def test_invalid_input_ids(self, network_case: Case) -> None:
        """Out of range, wrong dtype or number of dimensions, not a tensor, missing or empty."""
        batch, model, limit = make_batch(network_case), network_case.model(), network_case.model_class.id_limit_field
        ids, size = batch["input_ids"], getattr(network_case.config(), limit)
        for value in (-1, size, size + 1000):
            wrong = {"input_ids": with_value(ids, (0, 3), value)}
            assert_error(model, batch | wrong, "input_ids[0, 3", str(value), f"{limit}={size}", "tokenizer")
        for dtype in (torch.float32, torch.bool, torch.int16, torch.uint8):
            assert_error(model, batch | {"input_ids": ids.to(dtype)}, f"input_ids is {dtype}", "int64")
        assert_same_outputs(model(**batch | {"input_ids": ids.int()}), model(**batch))
        assert_error(model, {"input_ids": torch.tensor([5, 6, 7])}, "(batch,", "(3,)")
        for wrong in (ids.tolist(), np.asarray(ids)):
            fragments = (f"input_ids is a {type(wrong).__name__}", "torch.Tensor")
            assert_error(model, batch | {"input_ids": wrong}, *fragments)
        assert_error(model, {}, "input_ids", "inputs_embeds")
        for shape in ((0, 5), (2, 0)):
            characters = [TINY["max_characters_per_token"]] * len(network_case.token_id_axes)
            problem = "texts are empty" if shape[0] else "no sequence"
            empty = torch.zeros(*shape, *characters, dtype=torch.long)
            assert_error(model, {"input_ids": empty}, f"The batch is empty: input_ids is {tuple(empty.shape)}", problem)

    @as_subtests([case for case in NETWORKS if case.accepts_inputs_embeds], "network_case")
    def test_invalid_inputs_embeds(self, network_case: Case) -> None:
        """Combined with ids, or of the wrong dtype or width."""
        batch, model = make_batch(network_case), network_case.model()
        inputs = batch | {"inputs_embeds": torch.zeros(*network_case.first_token_ids(batch).shape, TINY["hidden_size"])}
        assert_error(model, inputs, "exactly one of input_ids and inputs_embeds")
        embeddings = network_case.embed_ids(model, batch.pop("input_ids"))
        assert_error(model, batch | {"inputs_embeds": embeddings.long()}, "inputs_embeds is torch.int64")
        for dtype in (torch.float64, torch.float16):
            fragments = (f"inputs_embeds is {dtype}", "the model is torch.float32")
            assert_error(model, batch | {"inputs_embeds": embeddings.to(dtype)}, *fragments)
        with torch.autocast("cpu", torch.bfloat16):  # does not convert float64
            assert_error(model, batch | {"inputs_embeds": embeddings.double()}, "inputs_embeds is torch.float64")
        for wrong in (embeddings[..., :-1], torch.cat([embeddings, embeddings], -1)):
            fragments = ("inputs_embeds", str(tuple(wrong.shape)), f"width {embeddings.shape[-1]}")
            assert_error(model, batch | {"inputs_embeds": wrong}, *fragments)

    @as_subtests(NETWORKS, "network_case")
    def test_invalid_attention_mask(self, network_case: Case) -> None:
        """Additive or inverted mask, invalid values, wrong shape, not a tensor, or an example without tokens."""
        batch, model = make_batch(network_case, side="right"), network_case.model()
        mask = batch["attention_mask"]
        for value in (float("-inf"), -1e9, -1.0, -1, float("nan"), 0.5, 2):
            wrong = torch.where(mask == 1, 0.0 if value < 0 else 1.0, value)
            wrong = wrong.long() if isinstance(value, int) else wrong
            fragments = (f"attention_mask[1, 7] is {wrong[1, 7].item()}", "must be 1 (or True)")
            assert_error(model, batch | {"attention_mask": wrong}, *fragments)
        square = mask[:, None].expand(-1, mask.shape[1], -1)
        for wrong in (mask[0], square, mask[:, None, None]):
            assert_error(model, batch | {"attention_mask": wrong}, "attention_mask", str(tuple(wrong.shape)), "batch")
        for wrong in (mask[:, :-1], mask[:2]):
            assert_error(model, batch | {"attention_mask": wrong}, "attention_mask", str(tuple(wrong.shape)))
        for wrong in (mask.tolist(), np.asarray(mask)):
            fragments = (f"attention_mask is a {type(wrong).__name__}", "torch.Tensor")
            assert_error(model, batch | {"attention_mask": wrong}, *fragments)
        for path_model in models_by_path(network_case).values():
            assert_error(path_model, batch | {"attention_mask": with_value(mask, 1, 0)}, "Row 1", "attention_mask")

    @as_subtests(NETWORKS, "network_case")
    def test_invalid_sequence_ids_and_output_mask(self, network_case: Case) -> None:
        """Invalid values, wrong dtype or shape; unknown arguments."""
        batch, model = make_batch(network_case, side="right"), network_case.model()
        unmasked = {name: tensor for name, tensor in batch.items() if name != "attention_mask"}
        mask = batch["attention_mask"]
        assert_error(model, unmasked | {"sequence_ids": mask - 1}, "sequence_ids[1, 7] is -1", "0 at padding")
        assert_error(model, unmasked | {"sequence_ids": mask.float()}, "sequence_ids is torch.float32")
        assert_error(model, batch | {"output_mask": mask}, "output_mask is torch.int64")
        if network_case.has_attention:  # `lengths` is an argument of XLM in transformers
            for name in ("lengths", "token_type_idss", "labels"):
                assert_error(model, batch | {name: mask.sum(1)}, f"does not accept the argument {name}")
        if isinstance(model, TransformerEncoder):
            assert_error(model, batch | {"past_key_values": DynamicCache()}, "does not support past_key_values")
        for name, dtype in (("sequence_ids", torch.long), ("output_mask", torch.bool)):
            mismatched = torch.ones(2, mask.shape[1], dtype=dtype)
            assert_error(model, batch | {name: mismatched}, name, "(2, 12)", "(4, 12)")

    @as_subtests(NETWORKS, "network_case")
    def test_invalid_segments_positions_and_lengths(self, network_case: Case) -> None:
        """Out of range or wrong shape; a sequence of the maximal length is valid."""
        batch, model = make_batch(network_case, side="left"), network_case.model()
        for name in {"token_type_ids", "position_ids"} & batch.keys():
            for wrong in (batch[name][:, :-1], batch[name][:2]):
                assert_error(model, batch | {name: wrong}, name, str(tuple(wrong.shape)))
        if limit := getattr(model.config, "type_vocab_size", 0):
            segments = batch.get("token_type_ids", torch.zeros_like(batch["input_ids"]))
            wrong = {"token_type_ids": with_value(segments, (0, 2), limit)}
            assert_error(model, batch | wrong, "token_type_ids[0, 2]", f"is {limit}", f"type_vocab_size={limit}")
        if network_case.has_position_limit:
            limit = model.config.max_position_embeddings
            wrong = {"position_ids": with_value(batch["position_ids"], (0, 2), limit)}
            assert_error(model, batch | wrong, "position_ids[0, 2]", str(limit), "max_position_embeddings")
            limit = f"max_sequence_length={network_case.max_sequence_length}"
            too_long = make_batch(network_case, width=network_case.max_sequence_length + 1)
            assert_error(model, too_long, str(network_case.max_sequence_length + 1), limit, "truncat")
        model(**make_batch(network_case, (network_case.max_sequence_length,)))

    @as_subtests([case for case in NETWORKS if case.family.traits.is_recurrent], "network_case")
    def test_positions_of_packed_sequences_without_positions(self, network_case: Case) -> None:
        """A model without positions ignores them in rows of one sequence, and does not ignore packed sequences."""
        batch, model = make_batch(network_case, side="left"), network_case.model()
        positions = batch["attention_mask"].cumsum(1) - 1
        positions = positions.masked_fill(batch["attention_mask"] == 0, 1)  # as in `generate`
        assert_same_outputs(model(**batch, position_ids=positions), model(**batch))
        packed = {"position_ids": with_value(positions, (1, -1), 0)}
        assert_error(model, batch | packed, "Row 1 of position_ids", "sequence_ids")
        unmasked = {name: tensor for name, tensor in batch.items() if name != "attention_mask"}
        assert_error(model, unmasked | packed, "of position_ids", "sequence_ids")
        model(**unmasked, **packed, sequence_ids=batch["attention_mask"])
        assert_error(model, batch | {"position_ids": positions[:, 1:]}, "position_ids is (4, 11)")

    @as_subtests([case for case in HEADS if case.is_seq2seq])
    def test_invalid_inputs_with_encoder_outputs(self, case: Case) -> None:
        """`generate` passes the encoder outputs and the mask to the head."""
        batch, model = make_batch(case), case.model()
        outputs = model.get_encoder()(batch["input_ids"], attention_mask=batch["attention_mask"])
        batch["encoder_outputs"] = outputs
        assert_error(model, batch | {"attention_mask": batch["attention_mask"] - 1.0}, "attention_mask[1, 7] is -1.0")
        ids = batch["decoder_input_ids"]
        assert_error(model, batch | {"decoder_input_ids": ids.float()}, "decoder_input_ids is torch.float32")
        assert_error(model, batch | {"decoder_input_ids": ids.tolist()}, "decoder_input_ids is a list")
        required = getattr(model, "required_encoder_outputs", ("last_hidden_state",))
        if isinstance(model, QueryForConditionalGeneration) or required != ("last_hidden_state",):
            for incomplete in (BaseModelOutput(outputs.last_hidden_state), (outputs.last_hidden_state,)):
                assert_error(model, batch | {"encoder_outputs": incomplete}, "encoder_outputs has no ")

    @as_subtests(REPRESENTATIVES, "head_case")
    def test_invalid_head_inputs(self, head_case: Case) -> None:
        model = head_case.model()
        assert_error(model, {}, "input_ids", "inputs_embeds")
        assert_error(model, {"input_ids": torch.tensor([5, 6, 7])}, "(batch,", "(3,)")
        batch = make_batch(head_case)
        assert_error(model, batch | {"input_ids": batch["input_ids"].tolist()}, "input_ids is a list", "torch.Tensor")
        shorter = batch | {"attention_mask": batch["attention_mask"][..., :-1]}
        assert_error(model, shorter, "attention_mask", str(tuple(shorter["attention_mask"].flatten(0, -2).shape)))
        ids = batch["input_ids"].flatten(0, 1) if head_case.has_choices else batch["input_ids"]
        ids[0, 3] = -1
        assert_error(model, batch, "input_ids[0, 3", "-1", head_case.model_class.id_limit_field)


class TestTargets:
    @pytest.mark.fast_families("bert", "gpt2", "t5", "glove")
    @as_subtests(REPRESENTATIVES, "head_case")
    def test_labels_out_of_range_or_of_wrong_shape(self, head_case: Case) -> None:
        batch = make_batch(head_case)
        targets, model = make_targets(head_case, batch), head_case.model()
        assert targets
        for name, target in targets.items():
            for wrong in (target[:2], target[0], target[None], target[..., None, None], target.flatten()[0]):
                assert_error(model, batch | targets | {name: wrong}, f"{name} is {tuple(wrong.shape)}, expected")
            if name.endswith("_positions"):
                continue  # a position outside the window means that it does not contain the answer
            for value in (10_000, -1):
                wrong = with_value(target, tuple((target != -100).nonzero()[0]), value)
                assert_error(model, batch | targets | {name: wrong}, name, str(value), "outside [0, ")

    @pytest.mark.fast_families("bert", "gpt2", "t5", "glove")
    @as_subtests(REPRESENTATIVES, "head_case")
    def test_invalid_target_types(self, head_case: Case) -> None:
        """Not a tensor or wrong dtype; int32 gives the same outputs as int64."""
        batch = make_batch(head_case)
        targets, model = make_targets(head_case, batch), head_case.model()
        assert targets
        for name, target in targets.items():
            for wrong in (target.tolist(), np.asarray(target), 3):
                fragments = (f"{name} is a {type(wrong).__name__}", "torch.Tensor")
                assert_error(model, batch | targets | {name: wrong}, *fragments)
            for dtype in (torch.bool, torch.int16, torch.uint8):
                assert_error(model, batch | targets | {name: target.to(dtype)}, f"{name} is {dtype}", "torch.int64")
            for dtype in (torch.float16, torch.float32):
                assert_error(model, batch | targets | {name: target.to(dtype)}, name)
        int32_inputs = {name: tensor.int() for name, tensor in (batch | targets).items()}
        assert_same_outputs(model(**int32_inputs), model(**batch, **targets))

    @as_subtests(SPAN_HEADS)
    def test_spans_outside_window_or_on_padding(self, case: Case) -> None:
        """A position outside the window is ignored; a position on padding is an error."""
        batch, model = make_batch(case), case.model()
        targets = make_targets(case, batch)
        losses = []
        for outside in (-100, 500, -1):
            changed = {name: target.index_fill(0, torch.tensor([1]), outside) for name, target in targets.items()}
            losses.append(model(**batch, **changed).loss.item())
        assert len(set(losses)) == 1
        assert losses[0] != model(**batch, **targets).loss.item()
        padding = int((batch["attention_mask"][2] == 0).nonzero()[-1])
        wrong = {"end_positions": with_value(targets["end_positions"], 2, padding)}
        assert_error(model, batch | targets | wrong, "end_positions[2]", "padding")

    @as_subtests(VOCABULARY_HEADS)
    def test_vocabulary_label_on_padding_raises(self, case: Case) -> None:
        batch = make_batch(case)
        targets = make_targets(case, batch)
        targets["labels"][2, 5 + case.shifts_labels] = 7
        for unpad in (True, False):
            assert_error(case.model(unpad=unpad), batch | targets, "1 of the labels", "padding", "[2, 5]")

    @as_subtests(CHOICE_HEADS)
    def test_choices_require_three_dimensions(self, case: Case) -> None:
        batch = {name: tensor[:, 0] for name, tensor in make_batch(case).items()}
        assert_error(case.model(), batch, "(batch, choices, length)", "(4, 12)")


def test_is_causal_raises() -> None:
    ids = torch.ones(1, 3, dtype=torch.long)
    for family in ("bert", "gpt2"):
        model_class = FAMILIES[family].models["AutoModel"]
        model = model_class(model_class.config_class(**FAMILIES[family].sizes["tiny"], vocab_size=8))
        with pytest.raises(CtxError, match="is_causal is not an argument"):
            model(ids, is_causal=True)
