"""All families: outputs are independent of the attention implementation, the layout and the padding.

Cases and fixtures: tests/zoo/matrix.py, tests/models/conftest.py.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask
from zoo import (
    ARCHETYPES,
    LENGTHS,
    NETWORKS,
    PATHS,
    REPRESENTATIVES,
    SIDES,
    TOKEN_HEADS,
    Case,
    as_subtests,
    assert_close,
    assert_nonzero_gradients,
    assert_same_gradients,
    assert_same_outputs,
    gradients,
    labeled_batch,
    make_batch,
    make_targets,
    models_by_fast_path,
    models_by_path,
    parametrize_forwards,
    scalar_loss_of,
    select_non_padding,
    tensors_of,
)

import hf_ctxmodels
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.layers.attention.layouts import PackedLayout

ATTENTION_NETWORKS = [case for case in NETWORKS if case.has_attention]
FLEX_NETWORKS = [case for case in ATTENTION_NETWORKS if case.model_class._supports_flex_attn]


def _assert_same_training(case: Case, sides: Sequence[str], paths: Sequence[str]) -> None:
    """All paths have the outputs and gradients of eager attention, and all parameters have gradients."""
    models = models_by_path(case)
    eager_model = models["eager"]
    for side in sides:
        batch = labeled_batch(case, side=side)
        expected = eager_model(**batch)
        expected_gradients = gradients(eager_model, scalar_loss_of(case, expected, batch))
        assert_nonzero_gradients(eager_model, expected_gradients)
        for path in [path for path in paths if path in models]:
            where, model = f"by the {path} path, padding at the {side}", models[path]
            actual = model(**batch)
            assert_same_outputs(actual, expected, batch["attention_mask"], where=where)
            assert_same_gradients(
                gradients(model, scalar_loss_of(case, actual, batch)), expected_gradients, where=where
            )


class TestAttentionPaths:
    def test_outputs_and_gradients_of_encoder(self, network_case: Case) -> None:
        _assert_same_training(network_case, SIDES, ("padded", "unpadded"))

    @parametrize_forwards
    def test_losses_and_gradients(self, head_case: Case) -> None:
        """Only on the path that differs most from eager attention; base models are tested on all paths."""
        _assert_same_training(head_case, ("left",), ("unpadded",))

    @pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
    @pytest.mark.parametrize("network_case", FLEX_NETWORKS, ids=str)
    def test_flex_attention(self, network_case: Case, compiled: bool, request: pytest.FixtureRequest) -> None:
        """Equal outputs; `output_attentions` raises. The compiled kernel takes half a minute to build."""
        if not compiled:
            request.getfixturevalue("uncompiled_flex")
        batch, model = make_batch(network_case), network_case.model(attention="flex_attention")
        with torch.no_grad():
            expected = network_case.model(**PATHS["eager"])(**batch)
            assert_same_outputs(model(**batch), expected, batch["attention_mask"])
            with pytest.raises(CtxError, match='attn_implementation="eager"'):
                model(**batch, output_attentions=True)

    def test_conditions_for_packed_layout(self, attention_case: Case, packed_layouts: list[PackedLayout]) -> None:
        batch = make_batch(attention_case)
        model = attention_case.model()
        if getattr(model.config, "attn_type", "bi") == "uni":
            pytest.skip("causal attention with relative positions uses the padded layout")
        model(**batch)
        # encoder-decoders: self-attention of both stacks and cross-attention
        num_layouts = 3 if attention_case.is_encoder_decoder else 1
        assert [layout.num_tokens for layout in packed_layouts] == [sum(LENGTHS)] * num_layouts
        model(**batch, output_attentions=True)
        attention_case.model(unpad=False)(**batch)
        attention_case.model(attention="eager")(**batch)
        assert len(packed_layouts) == num_layouts

    def test_attention_mask_dtypes_gaps_and_default(self, network_case: Case) -> None:
        """Without a mask all positions are tokens, except in families that infer padding from the ids."""
        batch, unmasked = make_batch(network_case), make_batch(network_case, masked=False)
        mask, ones = batch["attention_mask"], torch.ones_like(network_case.first_token_ids(unmasked))
        gaps = ones.clone()
        gaps[0, 3:6] = gaps[1, ::2] = 0
        expected_with_gaps = network_case.model(**PATHS["eager"])(**unmasked, attention_mask=gaps)
        ones = mask if network_case.family.traits.infers_padding else ones
        for path, model in models_by_fast_path(network_case).items():
            actual = model(**unmasked, attention_mask=gaps)
            assert_same_outputs(actual, expected_with_gaps, gaps, where=f"by the {path} path with gaps")
            with torch.no_grad():
                expected = model(**batch)
                for dtype in (torch.bool, torch.int32, torch.float32):
                    actual = model(**batch | {"attention_mask": mask.to(dtype)})
                    assert_same_outputs(actual, expected, mask, where=f"by the {path} path with {dtype}")
                expected = model(**unmasked, attention_mask=ones)
                assert_same_outputs(model(**unmasked), expected, where=f"by the {path} path without a mask")

    @pytest.mark.parametrize("network_case", [case for case in NETWORKS if case.model_class.accepts_4d_masks], ids=str)
    def test_4d_masks(self, network_case: Case) -> None:
        """(batch, 1, queries, keys), bool or additive, with attention weights and without."""
        batch = make_batch(network_case)
        mask = batch["attention_mask"]
        visible = mask.bool()[:, None, None].expand(-1, 1, mask.shape[1], -1)
        visible = visible.tril() if network_case.is_causal else visible
        for path, model in models_by_path(network_case).items():
            expected = model(**batch)
            for full_mask in (visible, torch.where(visible, 0.0, -1e9)):
                for options in ({}, {"output_attentions": True}):
                    actual = model(**batch | {"attention_mask": full_mask}, **options)
                    assert_same_outputs(
                        actual, expected, mask, where=f"by the {path} path, {full_mask.dtype}, {options}"
                    )

    @pytest.mark.parametrize("network_case", [case for case in NETWORKS if case.accepts_inputs_embeds], ids=str)
    def test_inputs_embeds_match_input_ids(self, network_case: Case) -> None:
        """Embeddings at padding have no effect on outputs and gradients, even if they are not finite."""
        batch = make_batch(network_case)
        mask, ids = batch["attention_mask"], batch.pop("input_ids")
        for path, model in models_by_path(network_case).items():
            expected = model(**batch, input_ids=ids)
            embeddings = network_case.embed_ids(model, ids).detach()
            for value in (None, float("nan"), float("inf"), 1e30):
                inputs = embeddings.clone() if value is None else embeddings.masked_fill((mask == 0)[..., None], value)
                actual = model(**batch, inputs_embeds=inputs.requires_grad_())
                assert_same_outputs(actual, expected, mask, where=f"by the {path} path with {value}")
                (gradient,) = torch.autograd.grad(actual.last_hidden_state[mask == 1].sum(), inputs)
                assert gradient.isfinite().all(), f"by the {path} path with {value}"

    @pytest.mark.parametrize("head_case", [case for case in ARCHETYPES if case.accepts_inputs_embeds], ids=str)
    def test_inputs_embeds_in_heads(self, head_case: Case) -> None:
        model, batch = head_case.model(), make_batch(head_case)
        expected = model(**batch)
        embeddings = head_case.embed_ids(model, batch.pop("input_ids"))
        assert_same_outputs(model(**batch, inputs_embeds=embeddings), expected, batch["attention_mask"])


class TestPadding:
    def test_outputs_are_independent_of_padding_and_batch(self, network_case: Case) -> None:
        default = make_batch(network_case)
        for path, model in models_by_fast_path(network_case).items():
            batched = _logits(model, default)
            expected = {name: select_non_padding(value, default["attention_mask"]) for name, value in batched.items()}
            for options in ({"width": 20}, {"side": "right"}, {"side": "left"}, {"side": "left", "width": 20}):
                batch = make_batch(network_case, **options)
                for name, value in _logits(model, batch).items():
                    where = f"{name} by the {path} path with {options}"
                    assert_close(select_non_padding(value, batch["attention_mask"]), expected[name], where)
            for row in range(len(LENGTHS)):
                single = {name: tensor[row : row + 1] for name, tensor in default.items()}
                mask = single["attention_mask"]
                for name, value in _logits(model, single).items():
                    expected_states = select_non_padding(batched[name][row : row + 1], mask)
                    assert_close(select_non_padding(value, mask), expected_states, f"{name}[{row}] by the {path} path")

    def test_losses_are_independent_of_padding(self, archetype_case: Case) -> None:
        model = archetype_case.model()
        narrow = make_batch(archetype_case, side="right")
        targets = make_targets(archetype_case, narrow)
        wide = make_batch(archetype_case, width=20, side="right")
        for batch in (narrow, wide):
            batch.pop("decoder_input_ids", None)  # the head derives them from its targets
        for name, target in targets.items():
            wide[name] = target
            if target.dim() > 1:
                wide[name] = target.new_full((len(target), 20, *target.shape[2:]), -100)
                wide[name][:, : target.shape[1]] = target
        assert_close(model(**wide).loss, model(**narrow, **targets).loss)


def _logits(model: Callable, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    with torch.no_grad():
        return tensors_of(model(**batch))


class TestRecordedOutputs:
    def test_hidden_states(self, network_case: Case) -> None:
        """Zero at padding; the last one equals the output; requested by argument or configuration."""
        model, padded = network_case.model(), network_case.model(unpad=False)
        for side in SIDES:
            batch = make_batch(network_case, side=side)
            mask = batch["attention_mask"]
            outputs = model(**batch, output_hidden_states=True)
            states = outputs.hidden_states
            expected = padded(**batch, output_hidden_states=True).hidden_states
            assert len(states) == len(expected) == network_case.config().num_hidden_layers + 1
            widths = getattr(network_case.config(), "layer_sizes", [network_case.config().hidden_size] * len(states))
            for number, (actual, expected_states) in enumerate(zip(states, expected, strict=True)):
                assert actual.shape == (*mask.shape, widths[number])
                assert_close(
                    actual[mask == 1], expected_states[mask == 1], f"hidden state {number}, padding at the {side}"
                )
                assert not actual[mask == 0].any()
            assert torch.equal(states[-1], outputs.last_hidden_state)
            assert states[-1][mask == 1].all(-1).all()
        model.config.output_hidden_states = True
        assert_close(model(**batch).hidden_states, states, tolerance=0)

    @pytest.mark.parametrize("case", [case for case in NETWORKS if case.config().num_hidden_layers > 1], ids=str)
    def test_gradients_of_hidden_states(self, case: Case) -> None:
        """Gradients with respect to all hidden states are nonzero, as attribution methods require: the states are not
        copies, even in the unpadded layout."""
        outputs = case.model()(**make_batch(case), output_hidden_states=True)
        pooled = outputs.get("pooler_output")
        target = outputs.last_hidden_state.square().sum() if pooled is None else pooled.square().sum()
        states = [state for state in outputs.hidden_states if state.requires_grad]
        assert len(states) > 1
        state_gradients = torch.autograd.grad(target, states, allow_unused=True)
        for layer, gradient in enumerate(state_gradients):
            assert gradient is not None, f"layer {layer}"
            assert gradient.any(), f"layer {layer}"

    def test_selected_hidden_states(self, attention_case: Case) -> None:
        model = attention_case.model()
        batch = make_batch(attention_case)
        all_states = model(**batch, output_hidden_states=True).hidden_states
        for number in (1, -2):
            selected = model(**batch, output_hidden_states=[number]).hidden_states
            assert torch.equal(selected[number], all_states[number])
            assert sum(states is not None for states in selected) == 1

    def test_attention_weights(self, attention_case: Case) -> None:
        """Equal to eager attention, which `output_attentions` selects for all implementations."""
        batch = make_batch(attention_case)
        mask, models = batch["attention_mask"], models_by_path(attention_case)
        expected = models.pop("eager")(**batch, output_attentions=True)
        config = attention_case.config()
        heads = getattr(config, "decoder_attention_heads", config.num_attention_heads)  # the decoder's, if there is one
        assert len(expected.attentions) == config.num_hidden_layers
        for layer in expected.attentions:
            assert layer.shape == (mask.shape[0], heads, mask.shape[1], mask.shape[1])
            assert_close(layer.sum(-1), torch.ones(layer.shape[:-1]))
            assert not layer.masked_select(mask[:, None, None, :] == 0).any()
        for path, model in models.items():
            actual = model(**batch, output_attentions=True)
            assert_same_outputs(actual, expected, mask, where=f"by the {path} path")
            assert_close(actual.attentions, expected.attentions, f"attention weights by the {path} path")
            assert model(**batch).attentions is None
            model.config._output_attentions = True  # transformers refuses to set it under sdpa
            assert len(model(**batch).attentions) == len(model(**batch, output_attentions=None).attentions) > 0
            assert model(**batch, output_attentions=False).attentions is None

    @pytest.mark.parametrize("head_case", [case for case in REPRESENTATIVES if case.has_attention], ids=str)
    def test_attention_weights_of_heads(self, head_case: Case) -> None:
        batch, model = make_batch(head_case), head_case.model()
        rows = len(batch["input_ids"].flatten(0, -2))
        for targets in ({}, make_targets(head_case, batch)):
            outputs = model(**batch, **targets, output_attentions=True)
            attentions = outputs.encoder_attentions if head_case.is_seq2seq else outputs.attentions
            assert len(attentions) == head_case.config().num_hidden_layers
            assert all(len(layer) == rows for layer in attentions)

    def test_output_mask(self, network_case: Case) -> None:
        batch = make_batch(network_case)
        generator = torch.Generator().manual_seed(5)
        output_mask = torch.rand(network_case.first_token_ids(batch).shape, generator=generator) < 0.4
        output_mask &= batch["attention_mask"].bool()
        output_mask[1] = False  # an example without outputs
        assert output_mask.any()
        for path, model in models_by_path(network_case).items():
            full, selected = model(**batch), model(**batch, output_mask=output_mask)
            assert_close(selected.last_hidden_state, full.last_hidden_state[output_mask], f"states by the {path} path")
            if full.get("pooler_output") is not None:
                assert_close(selected.pooler_output, full.pooler_output, f"pooled by the {path} path")

    def test_tuple_output(self, trained_case: Case) -> None:
        model, batch = trained_case.model(), make_batch(trained_case)
        outputs = model(**batch, return_dict=False)
        assert isinstance(outputs, tuple)
        assert_close(outputs, model(**batch).to_tuple())


def _pack_in_pairs(case: Case, lengths: list[int], seed: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A batch with one sequence per row, and the same sequences packed in pairs with `sequence_ids`."""
    separate = make_batch(case, lengths, seed=seed, side="right")
    row_lengths = [lengths[i : i + 2] for i in range(0, len(lengths), 2)]
    shape = (len(row_lengths), max(map(sum, row_lengths)) + 2)
    packed = {name: tensor.new_zeros(*shape, *tensor.shape[2:]) for name, tensor in separate.items()}
    packed["sequence_ids"] = packed.pop("attention_mask")
    for number, length in enumerate(lengths):
        row, index = divmod(number, 2)
        start = row_lengths[row][0] if index else 0
        packed["sequence_ids"][row, start : start + length] = 1 + index
        for name in packed.keys() & separate.keys():
            packed[name][row, start : start + length] = separate[name][number, :length]
    return separate, packed


class TestSequenceIds:
    LENGTHS = [5, 8, 1, 4, 7, 7]

    def test_packed_sequences_match_separate_sequences(self, network_case: Case) -> None:
        separate, packed = _pack_in_pairs(network_case, self.LENGTHS, seed=1)
        for path, model in models_by_path(network_case).items():
            expected = model(**separate).last_hidden_state[separate["attention_mask"] == 1]
            states = model(**packed).last_hidden_state
            assert_close(states[packed["sequence_ids"] != 0], expected, f"by the {path} path")

    @pytest.mark.parametrize("case", TOKEN_HEADS, ids=str)
    def test_losses_and_gradients(self, case: Case) -> None:
        separate, packed = _pack_in_pairs(case, self.LENGTHS, seed=1)
        labels = make_targets(case, separate)["labels"]
        model = case.model(**PATHS["unpadded"])
        packed_labels = torch.full(case.first_token_ids(packed).shape, -100)
        packed_labels[packed["sequence_ids"] != 0] = labels[separate["attention_mask"] == 1]
        expected, actual = model(**separate, labels=labels).loss, model(**packed, labels=packed_labels).loss
        assert_close(actual, expected, "loss")
        assert_same_gradients(gradients(model, actual), gradients(model, expected))

    def test_sequence_ids_separate_sequences(self, network_case: Case) -> None:
        """One id per row is a padding mask; a repeated id starts a new sequence; rows are always separate."""
        batch = make_batch(network_case)
        mask = batch["attention_mask"]
        unmasked = {name: tensor for name, tensor in batch.items() if name != "attention_mask"}
        pair, rows = make_batch(network_case, (9, 9), masked=False), make_batch(network_case, (6, 6, 6), masked=False)
        repeated_ids = torch.tensor([[1, 1, 2, 2, 2, 1, 1, 1, 1], [1, 1, 0, 1, 1, 2, 2, 2, 2]])
        distinct_ids = torch.tensor([[1, 1, 2, 2, 2, 3, 3, 3, 3], [1, 1, 0, 2, 2, 3, 3, 3, 3]])
        for path, model in models_by_fast_path(network_case).items():
            where = f"by the {path} path"
            actual = model(**unmasked, sequence_ids=mask * 3)
            assert_same_outputs(actual, model(**batch), mask, where=f"with one id per row {where}")
            actual = model(**pair, sequence_ids=repeated_ids)
            assert_same_outputs(
                actual, model(**pair, sequence_ids=distinct_ids), distinct_ids, where=f"with a repeated id {where}"
            )
            actual = model(**rows, sequence_ids=torch.ones_like(network_case.first_token_ids(rows)))
            assert_same_outputs(actual, model(**rows), where=f"with one id for all rows {where}")


@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("CtxBertForQuestionAnswering", {"start_positions": (2,), "end_positions": (2,)}),
        ("CtxRobertaForMaskedLM", {"labels": (2, 7)}),
        ("CtxElectraForReplacedTokenDetection", {"labels": (2, 7)}),
        ("CtxGpt2ForCausalLM", {"labels": (2, 7)}),
    ],
)
def test_block_masks_of_heads(name: str, targets: dict[str, tuple[int, ...]], uncompiled_flex: None) -> None:
    """A block mask that allows all attention equals no mask."""
    model_class: Any = getattr(hf_ctxmodels, name)
    sizes = {"vocab_size": 20, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = model_class(model_class.config_class(**sizes, intermediate_size=16)).eval()
    model.set_attn_implementation("flex_attention")
    batch = {"input_ids": torch.randint(5, 20, (2, 7))} | {
        key: torch.ones(*shape).long() for key, shape in targets.items()
    }
    causal = "Gpt2" in name
    mask = create_block_mask(
        lambda b, h, query, key: (query >= key) | (not causal), 2, None, 7, 7, device="cpu", _compile=False
    )
    with torch.no_grad():
        torch.testing.assert_close(model(**batch, attention_mask=mask).loss, model(**batch).loss)


# UniLM and ERNIE-GEN derive their masks and queries from the values of the segments
@as_subtests([case for case in [*NETWORKS, *REPRESENTATIVES] if case.family.name not in ("unilm", "ernie_gen")])
@torch.no_grad()
def test_shapes_on_the_meta_device(case: Case) -> None:
    """With and without a mask, as tools that count operations or memory call models."""
    batch = make_batch(case)
    batches = [batch, {name: tensor for name, tensor in batch.items() if "mask" not in name}]
    model = case.model()
    expected = [tensors_of(model(**tensors)) for tensors in batches]
    model = model.to("meta")
    for tensors, outputs in zip(batches, expected, strict=True):
        actual = tensors_of(model(**{name: tensor.to("meta") for name, tensor in tensors.items()}))
        assert {name: tensor.shape for name, tensor in actual.items()} == {
            name: tensor.shape for name, tensor in outputs.items()
        }
