"""What the permutation language model says of memory, permutations and targets that do not fit."""

from typing import Any

import pytest
import torch
from test_xlnet import ENCODER, LAYERS, MODEL, WIDTH, make_batch, make_memory, without
from zoo import CASES, Case
from zoo import make_batch as common_batch

from hf_ctxmodels import CtxError, CtxXLNetConfig

OURS = [case for case in CASES if case.family.name == "xlnet"]
TASKS = [case for case in OURS if not case.is_base and not case.predicts_where_labelled]


def refused(*parts: str, changes: dict[str, Any] | None = None, **inputs: Any) -> None:
    """A `CtxError` whose message holds every part."""
    with pytest.raises(CtxError) as caught:
        MODEL.model(**changes or {})(**inputs)
    for part in parts:
        assert part in str(caught.value)


class TestMemory:
    def test_another_batch_size(self) -> None:
        refused("mems[0] is (2, 4, 32)", "batch=3", "hidden=32", **make_batch(), mems=make_memory(2, 4))

    def test_the_references_order_of_dimensions(self) -> None:
        mems = [memory.transpose(0, 1) for memory in make_memory(3, 4)]
        refused("mems[0] is (4, 3, 32)", "mem.transpose(0, 1)", **make_batch(), mems=mems)

    def test_another_width(self) -> None:
        mems = [*make_memory(3, 4)[:-1], torch.randn(3, 4, WIDTH + 2)]
        refused("mems[2] is (3, 4, 34)", "hidden=32", **make_batch(), mems=mems)

    def test_layers_of_different_length(self) -> None:
        mems = [*make_memory(3, 4)[:-1], torch.randn(3, 5, WIDTH)]
        refused("mems[2] holds 5 positions, mems[0] 4", **make_batch(), mems=mems)

    def test_too_long(self) -> None:
        refused("9 positions", "mem_len=8", changes={"mem_len": 8}, **make_batch(), mems=make_memory(3, 9))

    def test_another_number_of_layers(self) -> None:
        refused("mems has 2 tensors", f"{LAYERS} layers", **make_batch(), mems=make_memory(3, 4)[:2])

    def test_a_tensor_in_place_of_a_list(self) -> None:
        refused("mems has 5 tensors", **make_batch(), mems=torch.randn(5, 3, 4, WIDTH))

    def test_several_texts_in_a_row(self) -> None:
        batch = without(make_batch(), "labels", "target_positions", "permutation_order")
        ids = batch["attention_mask"]
        with pytest.raises(CtxError, match="sequence_ids"):
            ENCODER.model()(**batch, sequence_ids=ids, mems=make_memory(3, 4))

    @pytest.mark.parametrize("case", TASKS, ids=str)
    def test_of_tasks(self, case: Case) -> None:
        """It is returned where asked for, as by the encoder, and read by the next segment."""
        model, batch = case.model(mem_len=8), common_batch(case)
        assert "mems" not in model(**batch)
        first = model(**batch, use_mems=True)
        rows = {name: tensor.flatten(0, -2) for name, tensor in batch.items()}
        expected = model.base_model(**rows, use_mems=True).mems
        assert [torch.equal(ours, theirs) for ours, theirs in zip(first.mems, expected, strict=True)] == [True] * LAYERS
        assert isinstance(first, type(model(**batch)))
        second = model(**batch, mems=first.mems)
        name = next(iter(model(**batch)))
        assert not torch.equal(second[name], first[name])


class TestPermutation:
    @pytest.mark.parametrize("shape", [(3, 11), (3, 10, 11), (2, 11, 11)])
    def test_mask_of_another_shape(self, shape: tuple[int, ...]) -> None:
        batch = without(make_batch(), "permutation_order")
        refused(f"perm_mask is {shape}", "(3, 11, 11)", **batch, perm_mask=torch.zeros(shape))

    def test_order_of_another_shape(self) -> None:
        batch = make_batch()
        batch["permutation_order"] = batch["permutation_order"][:, 1:]
        refused("permutation_order is (3, 10)", "(3, 11)", **batch)

    def test_rank_out_of_range(self) -> None:
        batch = make_batch()
        batch["permutation_order"][1, 2] = -2
        refused("permutation_order[1, 2] is -2", "-1", **batch)

    def test_both_forms(self) -> None:
        refused("permutation_order and perm_mask", **make_batch(), perm_mask=torch.zeros(3, 11, 11))
        mapping = torch.zeros(3, 3, 11)
        refused("target_positions and target_mapping", **make_batch(), target_mapping=mapping)


class TestTargets:
    @pytest.mark.parametrize("bad", [11, -2])
    def test_position_out_of_range(self, bad: int) -> None:
        batch = make_batch()
        batch["target_positions"][0, 1] = bad
        refused(f"target_positions[0, 1] is {bad}", "length=11", **batch)

    def test_position_of_padding(self) -> None:
        batch = make_batch()
        batch["target_positions"][2, 0] = 0
        batch["permutation_order"][2, 0] = 5
        refused("target_positions[2, 0] is 0", "padding", **batch)

    def test_position_all_see(self) -> None:
        batch = make_batch()
        place = int(batch["target_positions"][0, 0])
        batch["permutation_order"][0, place] = -1
        refused(f"target_positions[0, 0] is {place}", "rank -1", **batch)

    def test_without_a_permutation(self) -> None:
        refused("every prediction would see", "permutation_order", **without(make_batch(), "permutation_order"))

    def test_mapping_that_is_not_one_hot(self) -> None:
        batch = without(make_batch(), "target_positions", "permutation_order")
        mapping = torch.zeros(3, 3, 11)
        mapping[0, 1, [3, 4]] = 1
        refused("target_mapping[0, 1]", "one-hot", **batch, target_mapping=mapping)
        mapping[0, 1] = 0.5 * (torch.arange(11) == 3)
        refused("target_mapping[0, 1]", "one-hot", **batch, target_mapping=mapping)

    def test_of_another_shape(self) -> None:
        batch = without(make_batch(), "labels")
        refused("target_positions is (2, 3)", "(3, targets)", **batch | {"target_positions": torch.zeros(2, 3).long()})
        batch = without(batch, "target_positions")
        refused("target_mapping is (3, 3, 9)", "(3, targets, 11)", **batch, target_mapping=torch.zeros(3, 3, 9))

    def test_labels_of_another_shape(self) -> None:
        batch = make_batch()
        refused("labels is (3, 2)", "(3, 3) targets", **batch | {"labels": batch["labels"][:, 1:]})

    def test_label_without_a_target(self) -> None:
        batch = make_batch()
        assert batch["target_positions"][1, 2] == -1
        batch["labels"][1, 2] = 7
        refused("labels[1, 2] is 7", "no target", **batch)

    def test_label_out_of_range(self) -> None:
        batch = make_batch()
        batch["labels"][0, 0] = 61
        refused("labels holds 61", "vocab_size=61", **batch)

    def test_output_mask_beside_targets(self) -> None:
        batch = without(make_batch(), "labels")
        with pytest.raises(CtxError, match="output_mask"):
            ENCODER.model()(**batch, output_mask=batch["attention_mask"].bool())


class TestOther:
    def test_odd_batch_of_two_directions(self) -> None:
        refused("3 rows", "even", changes={"bi_data": True}, **make_batch())

    def test_mask_of_more_dimensions(self) -> None:
        batch = make_batch() | {"attention_mask": torch.ones(3, 1, 11, 11)}
        refused("attention_mask is (3, 1, 11, 11)", "perm_mask", **batch)

    @pytest.mark.parametrize("case", OURS, ids=str)
    def test_the_references_input_mask(self, case: Case) -> None:
        """1 at padding; ignored, padding would be read."""
        batch = common_batch(case)
        batch["input_mask"] = 1.0 - batch.pop("attention_mask")
        with pytest.raises(CtxError, match="give attention_mask = 1 - input_mask"):
            case.model()(**batch)

    def test_numbered_positions(self) -> None:
        batch = without(make_batch(), "labels", "target_positions", "permutation_order")
        with pytest.raises(CtxError, match="relative"):
            ENCODER.model()(**batch, position_ids=torch.arange(11)[None])

    @pytest.mark.parametrize(
        ("field", "value"),
        [("attn_type", "both"), ("summary_type", "attn"), ("mem_len", -1), ("hidden_size", 33), ("hidden_size", 32)],
    )
    def test_configuration(self, field: str, value: object) -> None:
        with pytest.raises(Exception, match=f"{field}={value!r}"):
            CtxXLNetConfig(**{"hidden_size": 36, "num_attention_heads": 3, field: value})
