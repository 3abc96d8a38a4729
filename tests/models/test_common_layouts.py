"""Every family, every Auto class: the same numbers whatever the attention, the layout and the padding."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from transformers import masking_utils
from transformers.integrations.flex_attention import WrappedFlexAttention
from zoo import (
    ARCHETYPE_FAMILIES,
    BASES,
    CASES,
    LENGTHS,
    Case,
    assert_close,
    assert_same_gradients,
    assert_same_outputs,
    at_tokens,
    each_forward,
    gradients,
    make_batch,
    make_targets,
    objective,
    tensors_of,
)

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.layers.attention.layouts import PackedLayout

# How a model can be told to compute; the first is the plain formula on padded rows.
PATHS = {
    "eager": {"attention": "eager", "unpad": False},
    "padded": {"attention": "sdpa", "unpad": False},
    "unpadded": {"attention": "sdpa", "unpad": True},
}
FAST_PATHS = ["padded", "unpadded"]
# Without attention the padded path is the plain formula itself.
PATHS_OF_ENCODERS = [(base, path) for base in BASES for path in PATHS if base.attends or path != "padded"]
ATTENDING = [base for base in BASES if base.attends]
FAST_PATHS_OF_ENCODERS = [(base, path) for base, path in PATHS_OF_ENCODERS if path != "eager"]

# Tracing the backward pass takes four seconds each: one encoder of each kind is quick.
TRAINED_COMPILED = [
    pytest.param(base, marks=() if base.family in ARCHETYPE_FAMILIES else pytest.mark.slow) for base in BASES
]


@pytest.fixture
def uncompiled_flex(monkeypatch: pytest.MonkeyPatch) -> None:
    """flex attention as torch's own Python reference, its mask too: compiling takes half a minute per shape."""

    def block_mask(*args: Any, **kwargs: Any) -> BlockMask:
        return create_block_mask(*args, **kwargs | {"_compile": False})

    monkeypatch.setattr(masking_utils, "create_block_mask", block_mask)
    monkeypatch.setattr(WrappedFlexAttention, "__init__", lambda self, training: None)
    monkeypatch.setattr(WrappedFlexAttention, "__call__", lambda self: flex_attention)


@pytest.fixture
def packed_layouts(monkeypatch: pytest.MonkeyPatch) -> list[PackedLayout]:
    """The layouts built without padding, in order: shows which path a forward took."""
    built: list[PackedLayout] = []
    build = PackedLayout.build.__func__

    def spy(cls: type[PackedLayout], *args: object) -> PackedLayout:
        built.append(build(cls, *args))
        return built[-1]

    monkeypatch.setattr(PackedLayout, "build", classmethod(spy))
    return built


def _assert_same_objective(case: Case, path: str, side: str) -> None:
    """The loss (of an encoder a number made of its outputs) and all gradients by a fast path and by the formula."""
    batch = make_batch(case, side=side)
    batch |= make_targets(case, batch)
    slow, fast = case.model(**PATHS["eager"]), case.model(**PATHS[path])
    expected, got = objective(case, slow, batch), objective(case, fast, batch)
    assert_close(got, expected, "loss")
    assert_same_gradients(gradients(fast, got), gradients(slow, expected))


def _needs_flex(case: Case) -> None:
    if not case.model_class._supports_flex_attn:
        pytest.skip(f"{case} has no flex attention")


class TestAttentionPaths:
    @pytest.mark.parametrize("side", ["right", "left"])
    @pytest.mark.parametrize(("base", "path"), FAST_PATHS_OF_ENCODERS, ids=str)
    def test_outputs(self, base: Case, path: str, side: str) -> None:
        batch = make_batch(base, side=side)
        expected = base.model(**PATHS["eager"])(**batch)
        assert_same_outputs(base.model(**PATHS[path])(**batch), expected, batch["attention_mask"])

    @pytest.mark.parametrize("side", ["right", "left"])
    @pytest.mark.parametrize(("base", "path"), FAST_PATHS_OF_ENCODERS, ids=str)
    def test_gradients_of_the_encoder(self, base: Case, path: str, side: str) -> None:
        _assert_same_objective(base, path, side)

    @each_forward
    def test_losses_and_gradients(self, head: Case) -> None:
        """Paths are the encoder's: a head is tested on the one that differs most from the plain formula."""
        _assert_same_objective(head, "unpadded", "left")

    @pytest.mark.usefixtures("uncompiled_flex")
    def test_flex(self, base: Case) -> None:
        _needs_flex(base)
        batch = make_batch(base)
        with torch.no_grad():
            got = base.model(attention="flex_attention")(**batch)
            assert_same_outputs(got, base.model(**PATHS["eager"])(**batch), batch["attention_mask"])

    @pytest.mark.slow
    def test_flex_compiled(self, base: Case) -> None:
        """As above with the compiled kernel: half a minute of C++."""
        _needs_flex(base)
        batch = make_batch(base)
        with torch.no_grad():
            got = base.model(attention="flex_attention")(**batch)
            assert_same_outputs(got, base.model(**PATHS["eager"])(**batch), batch["attention_mask"])

    def test_the_unpadded_path_is_taken_where_it_is_exact(
        self, attentive: Case, packed_layouts: list[PackedLayout]
    ) -> None:
        batch = make_batch(attentive)
        model = attentive.model()
        model(**batch)
        assert [layout.num_tokens for layout in packed_layouts] == [sum(LENGTHS)]
        model(**batch, output_attentions=True)
        attentive.model(unpad=False)(**batch)
        attentive.model(attention="eager")(**batch)
        assert len(packed_layouts) == 1

    @pytest.mark.parametrize(("base", "path"), FAST_PATHS_OF_ENCODERS, ids=str)
    def test_any_type_of_mask(self, base: Case, path: str) -> None:
        batch = make_batch(base)
        model = base.model(**PATHS[path])
        expected = model(**batch)
        for dtype in (torch.bool, torch.int32, torch.float32):
            got = model(**batch | {"attention_mask": batch["attention_mask"].to(dtype)})
            assert_same_outputs(got, expected, batch["attention_mask"])

    @pytest.mark.parametrize(("base", "path"), FAST_PATHS_OF_ENCODERS, ids=str)
    def test_mask_with_holes(self, base: Case, path: str) -> None:
        batch = make_batch(base, masked=False)
        batch["attention_mask"] = torch.ones_like(base.positions(batch))
        batch["attention_mask"][0, 3:6] = 0
        batch["attention_mask"][1, ::2] = 0
        expected = base.model(**PATHS["eager"])(**batch)
        assert_same_outputs(base.model(**PATHS[path])(**batch), expected, batch["attention_mask"])

    def test_embeddings_instead_of_ids(self, sample: Case) -> None:
        model = sample.model(**PATHS["unpadded" if sample.is_base else "padded"])
        batch = make_batch(sample)
        expected = model(**batch)
        if not sample.takes_embeddings:
            pytest.skip(f"{sample} takes ids only")
        embeddings = sample.embed(model, batch.pop("input_ids"))
        assert_same_outputs(model(**batch, inputs_embeds=embeddings), expected, batch["attention_mask"])

    @pytest.mark.parametrize(
        ("base", "path"), [each for each in PATHS_OF_ENCODERS if each[0].takes_embeddings], ids=str
    )
    def test_embeddings_at_padding_do_not_matter(self, base: Case, path: str) -> None:
        """Not even where they are no numbers."""
        model, batch = base.model(**PATHS[path]), make_batch(base)
        mask = batch["attention_mask"]
        embeddings = base.embed(model, batch.pop("input_ids")).detach()
        expected = model(**batch, inputs_embeds=embeddings)
        for spoiled in (float("nan"), float("inf"), 1e30):
            given = embeddings.masked_fill((mask == 0)[..., None], spoiled).requires_grad_()
            got = model(**batch, inputs_embeds=given)
            assert_same_outputs(got, expected, mask)
            (gradient,) = torch.autograd.grad(got.last_hidden_state[mask == 1].sum(), given)
            assert gradient.isfinite().all()

    def test_tuple_output(self, sample: Case) -> None:
        batch = make_batch(sample)
        model = sample.model()
        with_names = model(**batch)
        as_tuple = model(**batch, return_dict=False)
        assert isinstance(as_tuple, tuple)
        assert len(as_tuple) == len(with_names.to_tuple())
        for got, expected in zip(as_tuple, with_names.to_tuple(), strict=True):
            assert_close(got, expected)


class TestPadding:
    @pytest.mark.parametrize(("base", "path"), FAST_PATHS_OF_ENCODERS, ids=str)
    def test_sides_and_amount_do_not_matter(self, base: Case, path: str) -> None:
        model = base.model(**PATHS[path])
        plain = make_batch(base)
        expected = {name: at_tokens(value, plain["attention_mask"]) for name, value in _logits(model, plain).items()}
        for options in ({"width": 20}, {"side": "right"}, {"side": "left"}, {"side": "left", "width": 20}):
            batch = make_batch(base, **options)
            for name, value in _logits(model, batch).items():
                assert_close(at_tokens(value, batch["attention_mask"]), expected[name], f"{name} with {options}")

    def test_losses_do_not_depend_on_padding(self, archetype: Case) -> None:
        head = archetype
        model = head.model()
        plain = make_batch(head, side="right")
        targets = make_targets(head, plain)
        wide = make_batch(head, width=20, side="right")
        for batch in (plain, wide):
            batch.pop("decoder_input_ids", None)  # the head makes them of its targets
        for name, target in targets.items():
            wide[name] = target
            if target.dim() > 1:
                wide[name] = target.new_full((len(target), 20, *target.shape[2:]), -100)
                wide[name][:, : target.shape[1]] = target
        assert_close(model(**wide).loss, model(**plain, **targets).loss)

    @pytest.mark.parametrize(("base", "path"), FAST_PATHS_OF_ENCODERS, ids=str)
    def test_no_mask_is_a_mask_of_ones(self, base: Case, path: str) -> None:
        model = base.model(**PATHS[path])
        batch = make_batch(base, masked=False)
        ones = torch.ones_like(base.positions(batch))
        assert_same_outputs(model(**batch), model(**batch, attention_mask=ones))

    @pytest.mark.parametrize(("base", "path"), FAST_PATHS_OF_ENCODERS, ids=str)
    def test_batch_of_one_is_a_row_of_many(self, base: Case, path: str) -> None:
        model = base.model(**PATHS[path])
        many = make_batch(base)
        together = _logits(model, many)
        for row in range(len(LENGTHS)):
            one = {name: tensor[row : row + 1] for name, tensor in many.items()}
            mask = one["attention_mask"]
            for name, value in _logits(model, one).items():
                assert_close(at_tokens(value, mask), at_tokens(together[name][row : row + 1], mask), f"{name}[{row}]")

    def test_what_leaves_the_unpadded_encoder_is_zero_at_padding(self, base: Case) -> None:
        batch = make_batch(base)
        states = base.model()(**batch).last_hidden_state
        assert not states[batch["attention_mask"] == 0].any()
        assert states[batch["attention_mask"] == 1].all(-1).all()


def _logits(model: Callable, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    with torch.no_grad():
        return tensors_of(model(**batch))


class TestRecordedOutputs:
    @pytest.mark.parametrize("side", ["right", "left"])
    def test_hidden_states(self, base: Case, side: str) -> None:
        batch = make_batch(base, side=side)
        mask = batch["attention_mask"].flatten(0, -2)
        states = base.model()(**batch, output_hidden_states=True).hidden_states
        expected = base.model(unpad=False)(**batch, output_hidden_states=True).hidden_states
        assert len(states) == len(expected) == base.config().num_hidden_layers + 1
        widths = getattr(base.config(), "layer_sizes", [base.config().hidden_size] * len(states))
        for number, (got, output_mask) in enumerate(zip(states, expected, strict=True)):
            assert got.shape == (*mask.shape, widths[number])
            assert_close(got[mask == 1], output_mask[mask == 1], f"hidden state {number}")
            assert not got[mask == 0].any()

    def test_last_hidden_state_is_the_last_recorded(self, base: Case) -> None:
        outputs = base.model()(**make_batch(base), output_hidden_states=True)
        assert torch.equal(outputs.hidden_states[-1], outputs.last_hidden_state)

    def test_output_is_computed_from_them(self) -> None:
        """Attribution methods differentiate with respect to hidden states: also where padding is not computed, they
        are no copies beside the way to the output."""
        beside = {}
        for base in [case for case in BASES if case.config().num_hidden_layers > 1]:
            outputs = base.model()(**make_batch(base), output_hidden_states=True)
            pooled = outputs.get("pooler_output")
            target = outputs.last_hidden_state.square().sum() if pooled is None else pooled.square().sum()
            states = [each for each in outputs.hidden_states if each.requires_grad]
            found = torch.autograd.grad(target, states, allow_unused=True)
            beside[str(base)] = [number for number, each in enumerate(found) if each is None or not each.any()]
        assert len(beside) > 10
        assert not any(beside.values()), beside

    def test_hidden_states_by_configuration(self, base: Case) -> None:
        model = base.model()
        batch = make_batch(base)
        expected = model(**batch, output_hidden_states=True).hidden_states
        model.config.output_hidden_states = True
        for got, output_mask in zip(model(**batch).hidden_states, expected, strict=True):
            assert torch.equal(got, output_mask)

    def test_selected_hidden_states(self, attentive: Case) -> None:
        model = attentive.model()
        batch = make_batch(attentive)
        every = model(**batch, output_hidden_states=True).hidden_states
        for number in (1, -2):
            selected = model(**batch, output_hidden_states=[number]).hidden_states
            assert torch.equal(selected[number], every[number])
            assert sum(states is not None for states in selected) == 1

    def test_attention_weights_with_eager(self, attentive: Case) -> None:
        batch = make_batch(attentive)
        mask = batch["attention_mask"].flatten(0, -2)
        config = attentive.config()
        weights = attentive.model(attention="eager")(**batch, output_attentions=True).attentions
        assert len(weights) == config.num_hidden_layers
        for layer in weights:
            assert layer.shape == (mask.shape[0], config.num_attention_heads, mask.shape[1], mask.shape[1])
            assert_close(layer.sum(-1), torch.ones(layer.shape[:-1]))
            assert not layer.masked_select(mask[:, None, None, :] == 0).any()

    @pytest.mark.parametrize("path", FAST_PATHS)
    @pytest.mark.parametrize("base", ATTENDING, ids=str)
    def test_attention_weights_of_fast_paths_are_those_of_eager(self, base: Case, path: str) -> None:
        """sdpa gives none, so that eager attention runs in its place."""
        batch = make_batch(base)
        expected = base.model(**PATHS["eager"])(**batch, output_attentions=True)
        model = base.model(**PATHS[path])
        got = model(**batch, output_attentions=True)
        assert_same_outputs(got, expected, batch["attention_mask"])
        assert len(got.attentions) == len(expected.attentions) == base.config().num_hidden_layers
        for number, (ours, theirs) in enumerate(zip(got.attentions, expected.attentions, strict=True)):
            assert_close(ours, theirs, f"attention weights {number}")
        assert model(**batch).attentions is None
        model.config._output_attentions = True  # transformers refuses to set it under sdpa
        assert len(model(**batch).attentions) == len(model(**batch, output_attentions=None).attentions) > 0
        assert model(**batch, output_attentions=False).attentions is None

    @pytest.mark.parametrize("case", [case for case in CASES if case.attends and not case.is_base], ids=str)
    def test_heads_give_attention_weights(self, case: Case) -> None:
        batch = make_batch(case)
        rows = len(batch["input_ids"].flatten(0, -2))
        for targets in ({}, make_targets(case, batch)):
            attentions = case.model()(**batch, **targets, output_attentions=True).attentions
            assert len(attentions) == case.config().num_hidden_layers
            assert all(len(layer) == rows for layer in attentions)

    @pytest.mark.usefixtures("uncompiled_flex")
    @pytest.mark.parametrize("base", [base for base in ATTENDING if base.model_class._supports_flex_attn], ids=str)
    def test_implementations_without_attention_weights_say_so(self, base: Case) -> None:
        with pytest.raises(CtxError, match='attn_implementation="eager"'), torch.no_grad():
            base.model(attention="flex_attention")(**make_batch(base), output_attentions=True)

    @pytest.mark.parametrize("path", PATHS)
    @pytest.mark.parametrize("base", [base for base in BASES if base.model_class.takes_ready_masks], ids=str)
    def test_ready_masks(self, base: Case, path: str) -> None:
        """(batch, 1, queries, keys), bool or additive, with attention weights and without."""
        model, batch = base.model(**PATHS[path]), make_batch(base)
        expected, mask = model(**batch), batch["attention_mask"]
        seen = mask.bool()[:, None, None].expand(-1, 1, mask.shape[1], -1)
        seen = seen.tril() if base.is_causal else seen
        for given in (seen, torch.where(seen, 0.0, -1e9)):
            for options in ({}, {"output_attentions": True}):
                assert_same_outputs(model(**batch | {"attention_mask": given}, **options), expected, mask)

    @pytest.mark.parametrize(("base", "path"), PATHS_OF_ENCODERS, ids=str)
    def test_wanted_rows_equal_the_full_output(self, base: Case, path: str) -> None:
        model = base.model(**PATHS[path])
        batch = make_batch(base)
        generator = torch.Generator().manual_seed(5)
        output_mask = (torch.rand(base.positions(batch).shape, generator=generator) < 0.4) & batch[
            "attention_mask"
        ].bool()
        output_mask[1] = False  # a row without any
        assert output_mask.any()
        full, some = model(**batch), model(**batch, output_mask=output_mask)
        assert_close(some.last_hidden_state, full.last_hidden_state[output_mask])
        if full.get("pooler_output") is not None:
            assert_close(some.pooler_output, full.pooler_output)


def _packing(case: Case, lengths: list[int], seed: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Short sequences as rows of their own, and the same two to a row with `sequence_ids`."""
    apart = make_batch(case, lengths, seed=seed, side="right")
    pairs = [lengths[i : i + 2] for i in range(0, len(lengths), 2)]
    shape = (len(pairs), max(map(sum, pairs)) + 2)
    together = {
        name: tensor.new_zeros(*shape, *tensor.shape[2:]) for name, tensor in apart.items() if name != "attention_mask"
    }
    together["sequence_ids"] = torch.zeros(shape, dtype=torch.long)
    for number, length in enumerate(lengths):
        row, second = divmod(number, 2)
        start = pairs[row][0] if second else 0
        together["sequence_ids"][row, start : start + length] = 1 + second
        for name in together.keys() & apart.keys():
            together[name][row, start : start + length] = apart[name][number, :length]
    return apart, together


class TestSequenceIds:
    LENGTHS = [5, 8, 1, 4, 7, 7]

    @pytest.mark.parametrize(("base", "path"), PATHS_OF_ENCODERS, ids=str)
    def test_packed_sequences_equal_separate_ones(self, base: Case, path: str) -> None:
        model = base.model(**PATHS[path])
        apart, together = _packing(base, self.LENGTHS, seed=1)
        expected = model(**apart).last_hidden_state[apart["attention_mask"] == 1]
        states = model(**together).last_hidden_state
        assert_close(states[together["sequence_ids"] != 0], expected)

    def test_losses_and_gradients(self, token_head: Case) -> None:
        apart, together = _packing(token_head, self.LENGTHS, seed=1)
        labels = make_targets(token_head, apart)["labels"]
        model = token_head.model(**PATHS["unpadded"])
        packed_labels = torch.full(token_head.positions(together).shape, -100)
        packed_labels[together["sequence_ids"] != 0] = labels[apart["attention_mask"] == 1]
        expected, got = model(**apart, labels=labels).loss, model(**together, labels=packed_labels).loss
        assert_close(got, expected, "loss")
        assert_same_gradients(gradients(model, got), gradients(model, expected))

    @pytest.mark.parametrize(("base", "path"), FAST_PATHS_OF_ENCODERS, ids=str)
    def test_one_sequence_per_row_is_a_mask(self, base: Case, path: str) -> None:
        model = base.model(**PATHS[path])
        batch = make_batch(base)
        expected = model(**batch)
        ids = batch.pop("attention_mask") * 3
        assert_same_outputs(model(**batch, sequence_ids=ids), expected, ids != 0)

    @pytest.mark.parametrize(("base", "path"), FAST_PATHS_OF_ENCODERS, ids=str)
    def test_a_number_that_comes_again_is_another_sequence(self, base: Case, path: str) -> None:
        model = base.model(**PATHS[path])
        batch = make_batch(base, (9, 9), masked=False)
        again, fresh = (
            torch.tensor([numbers] * 2) for numbers in ([1, 1, 2, 2, 2, 1, 1, 1, 1], [1, 1, 2, 2, 2, 3, 3, 3, 3])
        )
        assert_same_outputs(model(**batch, sequence_ids=again), model(**batch, sequence_ids=fresh))

    def test_neighbouring_rows_with_the_same_number_stay_apart(self, base: Case) -> None:
        batch = make_batch(base, (6, 6, 6), masked=False)
        ids = torch.ones_like(base.positions(batch))
        model = base.model()
        assert_same_outputs(model(**batch, sequence_ids=ids), model(**batch))


class TestCompile:
    """Mostly with ahead-of-time tracing instead of the code generator: the same graph and guards, in less time."""

    SHAPES = ((12, 7, 3, 9), (15, 4, 6), (8, 20, 5, 6, 7), (9, 9))

    def _run_over_shapes(self, case: Case, backend: str) -> None:
        torch._dynamo.reset()
        counter = CompileCounterWithBackend(backend)
        model = case.model(num_hidden_layers=1)
        compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=counter)
        graphs = set()
        with torch.no_grad():
            for lengths in self.SHAPES:
                batch = make_batch(case, lengths)
                assert_same_outputs(compiled(**batch), model(**batch), batch["attention_mask"])
                graphs.add(counter.frame_count)
        assert len(graphs) == 1, "another shape made torch compile again"

    def test_encoder_is_one_graph_for_all_shapes(self, base: Case) -> None:
        self._run_over_shapes(base, "aot_eager")

    @pytest.mark.slow
    def test_head_is_one_graph_for_all_shapes(self, head: Case) -> None:
        """Some seconds of tracing for each head."""
        self._run_over_shapes(head, "aot_eager")

    @pytest.mark.slow
    def test_code_generation(self, base: Case) -> None:
        """A minute of C++."""
        self._run_over_shapes(base, "inductor")

    def _train_one_step(self, case: Case) -> None:
        torch._dynamo.reset()
        batch = make_batch(case)
        batch |= make_targets(case, batch)
        model = case.model(num_hidden_layers=1)
        compiled = torch.compile(model, dynamic=True, backend="aot_eager")
        expected = gradients(model, objective(case, model, batch))
        assert_same_gradients(gradients(model, objective(case, compiled, batch)), expected)

    @pytest.mark.parametrize("base", TRAINED_COMPILED, ids=str)
    def test_training_step_of_the_encoder(self, base: Case) -> None:
        self._train_one_step(base)

    @pytest.mark.slow
    def test_training_step(self, head: Case) -> None:
        """Tracing the backward pass of every head takes minutes in all."""
        self._train_one_step(head)


class TestPrecision:
    def test_bfloat16_weights_are_close(self, base: Case) -> None:
        batch = make_batch(base)
        expected = base.model(initializer_range=0.02)(**batch)
        got = base.model(initializer_range=0.02).to(torch.bfloat16)(**batch)
        for name, value in tensors_of(expected).items():
            assert tensors_of(got)[name].dtype is torch.bfloat16
            _assert_roughly(tensors_of(got)[name], value, batch["attention_mask"], name)

    def test_bfloat16_autocast_is_close(self, sample: Case) -> None:
        batch = make_batch(sample)
        batch |= make_targets(sample, batch)
        model = sample.model(initializer_range=0.02)
        expected = objective(sample, model, batch)
        with torch.autocast("cpu", torch.bfloat16):
            got = objective(sample, model, batch)
        assert got.dtype is torch.float32
        assert_close(got, expected, "loss", tolerance=0.03)
        expected, got = gradients(model, expected), gradients(model, got)
        rough = sample.teaches_itself or sample.takes_extremes
        for name in expected:
            assert got[name].dtype is torch.float32
            _assert_roughly(got[name], expected[name], None, name, share=0.25 if rough else 0.1)

    @pytest.mark.parametrize(("base", "path"), FAST_PATHS_OF_ENCODERS, ids=str)
    def test_bfloat16_paths_agree(self, base: Case, path: str) -> None:
        batch = make_batch(base)
        expected = base.model(**PATHS["eager"], initializer_range=0.02).to(torch.bfloat16)(**batch)
        got = base.model(**PATHS[path], initializer_range=0.02).to(torch.bfloat16)(**batch)
        for name, value in tensors_of(expected).items():
            _assert_roughly(tensors_of(got)[name], value, batch["attention_mask"], name)


def _assert_roughly(got: Tensor, expected: Tensor, mask: Tensor | None, name: str, share: float = 0.05) -> None:
    """Within a share of the expected values' own size (bfloat16 has 8 bits), or nearly zero like them."""
    got, expected = at_tokens(got, mask).float(), at_tokens(expected, mask).float()
    error, size = (got - expected).norm(), expected.norm()
    assert error <= share * size + 1e-3, f"{name}: off by {float(error / size):.1%}"
