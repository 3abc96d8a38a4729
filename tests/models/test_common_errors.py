"""Every model says what is wrong with its input: which tensor, which value, which limit."""

import numpy as np
import pytest
import torch
from zoo import BASES, CHOICES, HEADS, TINY, Batch, Case, assert_same_outputs, each_forward, make_batch, make_targets

from hf_ctxmodels import CtxError

SPAN_HEADS = [case for case in HEADS if "start_positions" in case.model_class.loss_targets]
VOCABULARY_HEADS = [case for case in HEADS if case.predicts_where_labelled and not case.writes]
CHOICE_HEADS = [case for case in HEADS if case.has_choices]
COUNTING = [case for case in BASES if case.counts_positions]
SEGMENT_LIMITED = [case for case in BASES if getattr(case.config(), "type_vocab_size", 0)]


def assert_refused(case: Case, batch: Batch, *parts: str, attention: str = "sdpa", unpad: bool = True) -> None:
    """A `CtxError` whose message holds every part."""
    with pytest.raises(CtxError) as caught:
        case.model(attention=attention, unpad=unpad)(**batch)
    for part in parts:
        assert part in str(caught.value)


class TestInput:
    def test_id_out_of_range(self, base: Case) -> None:
        batch, limit = make_batch(base), getattr(base.config(), base.model_class.id_limit)
        for bad in (-1, limit, limit + 1000):
            batch["input_ids"][0, 3] = bad
            assert_refused(base, batch, "input_ids[0, 3", str(bad), f"{base.model_class.id_limit}={limit}", "tokenizer")

    @pytest.mark.parametrize("case", SEGMENT_LIMITED, ids=str)
    def test_token_type_out_of_range(self, case: Case) -> None:
        batch, limit = make_batch(case), case.config().type_vocab_size
        batch.setdefault("token_type_ids", torch.zeros_like(batch["input_ids"]))
        batch["token_type_ids"].flatten(0, -2)[0, 2] = limit
        assert_refused(case, batch, "token_type_ids[0, 2]", f"is {limit}", f"type_vocab_size={limit}")

    @pytest.mark.parametrize("case", COUNTING, ids=str)
    def test_position_out_of_range(self, case: Case) -> None:
        batch, limit = make_batch(case, side="left"), case.config().max_position_embeddings
        batch["position_ids"].flatten(0, -2)[0, 2] = limit
        assert_refused(case, batch, "position_ids[0, 2]", str(limit), "max_position_embeddings")

    @pytest.mark.parametrize("case", COUNTING, ids=str)
    def test_too_long(self, case: Case) -> None:
        limit = f"max_sequence_length={case.longest}"
        assert_refused(case, make_batch(case, width=case.longest + 1), str(case.longest + 1), limit, "truncat")

    def test_the_longest_is_allowed(self, base: Case) -> None:
        base.model()(**make_batch(base, (base.longest,)))

    def test_exactly_one_of_ids_and_embeddings(self, base: Case) -> None:
        assert_refused(base, {}, "input_ids", "inputs_embeds")
        batch = make_batch(base)
        batch["inputs_embeds"] = torch.zeros(*base.positions(batch).shape, TINY["hidden_size"])
        assert_refused(base, batch, "exactly one of input_ids and inputs_embeds")

    def test_ids_of_other_dimensions_or_type(self, base: Case) -> None:
        assert_refused(base, {"input_ids": torch.tensor([5, 6, 7])}, "(batch,", "(3,)")
        batch = make_batch(base)
        for dtype in (torch.float32, torch.bool, torch.int16, torch.uint8):
            assert_refused(base, batch | {"input_ids": batch["input_ids"].to(dtype)}, f"input_ids is {dtype}", "int64")
        assert_same_outputs(base.model()(**batch | {"input_ids": batch["input_ids"].int()}), base.model()(**batch))

    @pytest.mark.parametrize("base", [base for base in BASES if base.takes_embeddings], ids=str)
    def test_embeddings_of_another_type_or_width(self, base: Case) -> None:
        batch = make_batch(base)
        embeddings = base.embed(base.model(), batch.pop("input_ids"))
        assert_refused(base, batch | {"inputs_embeds": embeddings.long()}, "inputs_embeds is torch.int64")
        for wrong in (embeddings[..., :-1], torch.cat([embeddings, embeddings], -1)):
            parts = ("inputs_embeds", str(tuple(wrong.shape)), f"width {embeddings.shape[-1]}")
            assert_refused(base, batch | {"inputs_embeds": wrong}, *parts)

    def test_mask_of_other_values(self, base: Case) -> None:
        """Additive masks, and others that would be read inverted, or that say nothing."""
        batch = make_batch(base, side="right")
        tokens = batch["attention_mask"] == 1
        for value in (float("-inf"), -1e9, -1.0, -1, float("nan"), 0.5, 2):
            mask = torch.where(tokens, 0.0 if value < 0 else 1.0, value)
            mask = mask.long() if isinstance(value, int) else mask
            parts = (f"attention_mask[1, 7] is {mask[1, 7].item()}", "must be 1 (or True)")
            assert_refused(base, batch | {"attention_mask": mask}, *parts)

    def test_mask_of_other_dimensions(self, base: Case) -> None:
        batch = make_batch(base)
        mask = batch["attention_mask"]
        for wrong in (mask[0], mask[:, None].expand(-1, mask.shape[1], -1), mask[:, None, None]):
            assert_refused(base, batch | {"attention_mask": wrong}, "attention_mask", str(tuple(wrong.shape)), "batch")

    def test_sequence_ids_of_other_values(self, base: Case) -> None:
        batch = make_batch(base, side="right")
        mask = batch.pop("attention_mask")
        assert_refused(base, batch | {"sequence_ids": mask - 1}, "sequence_ids[1, 7] is -1", "0 at padding")
        assert_refused(base, batch | {"sequence_ids": mask.float()}, "sequence_ids is torch.float32")
        assert_refused(base, batch | {"attention_mask": mask, "output_mask": mask}, "output_mask is torch.int64")

    def test_what_is_no_tensor(self, base: Case) -> None:
        batch = make_batch(base)
        for name in ("input_ids", "attention_mask"):
            for wrong in (batch[name].tolist(), np.asarray(batch[name])):
                assert_refused(base, batch | {name: wrong}, f"{name} is a {type(wrong).__name__}", "torch.Tensor")

    @pytest.mark.parametrize("case", [case for case in HEADS if case.writes], ids=str)
    def test_what_is_read_beside_the_encoder_s_output(self, case: Case) -> None:
        """`generate` encodes by itself; the head reads the mask once more."""
        batch, model = make_batch(case), case.model()
        outputs = model.get_encoder()(batch["input_ids"], attention_mask=batch["attention_mask"])
        batch["encoder_outputs"] = outputs
        assert_refused(case, batch | {"attention_mask": batch["attention_mask"] - 1.0}, "attention_mask[1, 7] is -1.0")
        ids = batch["decoder_input_ids"]
        assert_refused(case, batch | {"decoder_input_ids": ids.float()}, "decoder_input_ids is torch.float32")
        assert_refused(case, batch | {"decoder_input_ids": ids.tolist()}, "decoder_input_ids is a list")

    def test_empty_batch(self, base: Case) -> None:
        for batch, length in ((0, 5), (2, 0)):
            shape = (batch, CHOICES, length) if base.has_choices else (batch, length)
            shape = (*shape, *[TINY["max_characters_per_token"]] * len(base.id_axes))
            assert_refused(base, {"input_ids": torch.zeros(shape, dtype=torch.long)}, "empty")

    def test_tensor_of_another_shape(self, base: Case) -> None:
        batch = make_batch(base, side="left")
        for name in {"attention_mask", "token_type_ids", "position_ids"} & batch.keys():
            for other in (batch[name][..., :-1], batch[name][:2]):
                assert_refused(base, batch | {name: other}, name, str(tuple(other.flatten(0, -2).shape)))
        batch = make_batch(base)
        for name, dtype in (("sequence_ids", torch.long), ("output_mask", torch.bool)):
            other = torch.ones(2, base.positions(batch).shape[1], dtype=dtype)
            assert_refused(base, batch | {name: other}, name, "(2, 12)", "(4, 12)")

    @each_forward
    def test_heads_refuse_what_their_encoder_refuses(self, head: Case) -> None:
        assert_refused(head, {}, "input_ids", "inputs_embeds")
        assert_refused(head, {"input_ids": torch.tensor([5, 6, 7])}, "(batch,", "(3,)")
        batch = make_batch(head)
        assert_refused(head, batch | {"input_ids": batch["input_ids"].tolist()}, "input_ids is a list", "torch.Tensor")
        shorter = batch | {"attention_mask": batch["attention_mask"][..., :-1]}
        assert_refused(head, shorter, "attention_mask", str(tuple(shorter["attention_mask"].flatten(0, -2).shape)))
        ids = batch["input_ids"].flatten(0, 1) if head.has_choices else batch["input_ids"]
        ids[0, 3] = -1
        assert_refused(head, batch, "input_ids[0, 3", "-1", head.model_class.id_limit)

    def test_row_without_tokens(self, base: Case) -> None:
        batch = make_batch(base)
        batch["attention_mask"].flatten(0, -2)[1] = 0
        for attention, unpad in (("eager", False), ("sdpa", False), ("sdpa", True)):
            assert_refused(base, batch, "Row 1", "attention_mask", attention=attention, unpad=unpad)


class TestTargets:
    @each_forward
    def test_label_out_of_range_or_of_another_batch(self, head: Case) -> None:
        batch = make_batch(head)
        targets = make_targets(head, batch)
        for name, target in targets.items():
            with pytest.raises(ValueError, match=r"\(2, (12|6)\)|batch_size"):
                head.model()(**batch | targets | {name: target[:2]})
            if name.endswith("_positions"):
                continue  # there, a place outside the window means the answer is not in it
            for bad in (10_000, -1):
                spoiled = targets[name].clone()
                spoiled[tuple((spoiled != -100).nonzero()[0])] = bad
                assert_refused(head, batch | targets | {name: spoiled}, name, str(bad), "outside [0, ")

    @pytest.mark.parametrize("case", SPAN_HEADS, ids=str)
    def test_position_outside_the_window_is_ignored(self, case: Case) -> None:
        batch = make_batch(case)
        targets = make_targets(case, batch)
        model = case.model()
        losses = []
        for absent in (-100, 500, -1):
            moved = {name: target.index_fill(0, torch.tensor([1]), absent) for name, target in targets.items()}
            losses.append(model(**batch, **moved).loss.item())
        assert len(set(losses)) == 1
        assert losses[0] != model(**batch, **targets).loss.item()

    @pytest.mark.parametrize("case", VOCABULARY_HEADS, ids=str)
    def test_vocabulary_label_on_padding(self, case: Case) -> None:
        batch = make_batch(case)
        targets = make_targets(case, batch)
        targets["labels"][2, 5 + case.shifts_labels] = 7
        for unpad in (True, False):
            assert_refused(case, batch | targets, "1 of the labels", "padding", "[2, 5]", unpad=unpad)

    @pytest.mark.parametrize("case", SPAN_HEADS, ids=str)
    def test_span_on_padding(self, case: Case) -> None:
        batch = make_batch(case)
        targets = make_targets(case, batch)
        targets["end_positions"][2] = int((batch["attention_mask"][2] == 0).nonzero()[-1])
        assert_refused(case, batch | targets, "end_positions[2]", "padding")

    @pytest.mark.parametrize("case", CHOICE_HEADS, ids=str)
    def test_choices_need_three_dimensions(self, case: Case) -> None:
        batch = {name: tensor[:, 0] for name, tensor in make_batch(case).items()}
        assert_refused(case, batch, "(batch, choices, length)", "(4, 12)")
