"""Permutation language model of XLNet: two streams, memory, training; see also tests/parity/test_xlnet_streams.py."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from zoo import Batch, Case, LowRank, assert_close, assert_same_gradients, gradients

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.models.xlnet import streams
from hf_ctxmodels.registry import FAMILIES

MODEL = Case(FAMILIES["xlnet"], "AutoModelForPreTraining")
ENCODER = Case(FAMILIES["xlnet"], "AutoModel")
WIDTH, LAYERS, WORDS = 32, 3, 61
PATHS = ["eager", "dense", "per sequence", "flex_attention"]


@pytest.fixture(params=PATHS)
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The attention implementation: eager, SDPA with a bias, per sequence on the CPU, or FlexAttention."""
    if request.param == "dense":
        monkeypatch.setattr(streams, "runs_per_sequence", lambda tensor: False)
    if request.param == "flex_attention":
        request.getfixturevalue("uncompiled_flex")
    return request.param if request.param in ("eager", "flex_attention") else "sdpa"


def make_batch(
    lengths: tuple[int, ...] = (11, 7, 4), targets: int = 3, *, side: str = "left", seed: int = 0, width: int = 0
) -> Batch:
    """Examples padded on one side; the first has `targets` targets, each following one has one fewer, at least one.

    Tokens, targets and order depend only on the example's index and the seed.
    """
    width = width or max(lengths)
    shape = (len(lengths), width)
    batch = {name: torch.zeros(shape, dtype=torch.long) for name in ("input_ids", "attention_mask", "token_type_ids")}
    batch["permutation_order"] = torch.full(shape, -1)
    batch["target_positions"] = torch.full((len(lengths), targets), -1)
    batch["labels"] = torch.full((len(lengths), targets), -100)
    for row, length in enumerate(lengths):
        generator = torch.Generator().manual_seed(100 * seed + row)
        offset = width - length if side == "left" else 0
        columns = slice(offset, offset + length)
        count = max(1, targets - row)
        positions = offset + torch.randperm(length, generator=generator)[:count].sort().values
        batch["input_ids"][row, columns] = torch.randint(5, WORDS, (length,), generator=generator)
        batch["attention_mask"][row, columns] = 1
        batch["token_type_ids"][row, columns] = (torch.arange(length) > length // 2).long()
        batch["permutation_order"][row, positions] = torch.randperm(count, generator=generator)
        batch["target_positions"][row, :count] = positions
        batch["labels"][row, :count] = batch["input_ids"][row, positions]
    return batch


def make_memory(rows: int, length: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(rows, length, WIDTH, generator=generator) for _ in range(LAYERS)]


def without(batch: Batch, *names: str) -> Batch:
    return {name: value for name, value in batch.items() if name not in names}


class TestPaths:
    @pytest.mark.parametrize("memory", [0, 6])
    @pytest.mark.parametrize("side", ["left", "right"])
    def test_losses_and_gradients(self, path: str, side: str, memory: int) -> None:
        batch = make_batch(side=side)
        mems = make_memory(3, memory) if memory else None
        reference, model = MODEL.model(attention="eager"), MODEL.model(attention=path)
        expected, outputs = reference(**batch, mems=mems), model(**batch, mems=mems)
        assert_close(outputs.loss, expected.loss, "loss")
        assert_close(outputs.mems, expected.mems, "memory")
        assert_same_gradients(gradients(model, outputs.loss), gradients(reference, expected.loss))
        assert model.xlnet.mask_embedding.grad.any()

    def test_flex_attention_rejects_dropout(self) -> None:
        model = MODEL.model(attention="flex_attention", attention_probs_dropout_prob=0.1).train()
        with pytest.raises(CtxError, match="FlexAttention has no dropout"):
            model(**make_batch())

    @pytest.mark.slow
    def test_compiles_without_graph_breaks(self) -> None:
        model = MODEL.model(num_hidden_layers=2)
        batch = without(make_batch(), "labels")
        mems = make_memory(3, 6)[:2]
        torch._dynamo.reset()
        compiled = torch.compile(model.xlnet, fullgraph=True, backend="aot_eager")
        with torch.no_grad():
            outputs, expected = compiled(**batch, mems=mems), model.xlnet(**batch, mems=mems)
        assert_close(outputs.last_hidden_state, expected.last_hidden_state)
        assert_close(outputs.mems[-1], expected.mems[-1])

    @pytest.mark.slow
    def test_two_graphs_for_all_lengths(self) -> None:
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("aot_eager")
        model = MODEL.model(num_hidden_layers=1)
        compiled = torch.compile(model, backend=counter)
        for length in (11, 8, 14, 9):
            batch = make_batch((length, length, length))
            expected = gradients(model, model(**batch).loss)
            assert_same_gradients(gradients(model, compiled(**batch).loss), expected)
        assert counter.frame_count == 2

    def test_gradient_checkpointing_preserves_gradients(self) -> None:
        results = []
        for checkpointing in (False, True):
            model = MODEL.model(hidden_dropout_prob=0.2, attention_probs_dropout_prob=0.1).train()
            if checkpointing:
                model.activation_checkpointing_enable()
            torch.manual_seed(7)
            results.append(gradients(model, model(**make_batch(), mems=make_memory(3, 4)).loss))
        assert_close(*results, tolerance=0)


class TestAdapters:
    """Modules that replace the linear layers take effect."""

    @pytest.mark.parametrize("memory", [0, 5])
    @pytest.mark.parametrize("num_streams", [1, 2])
    def test_adapters_equal_merged_weights(self, path: str, num_streams: int, memory: int) -> None:
        batch = make_batch()
        if num_streams == 1:
            labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
            labels[:, ::2] = -100
            batch = without(batch, "permutation_order", "target_positions") | {"labels": labels}
        mems = make_memory(3, memory) if memory else None
        model = MODEL.model(attention=path)
        torch.manual_seed(0)
        attentions = [layer.attention for layer in model.xlnet.layers]
        linear_layers = list(product(attentions, ("qkv_proj", "position_proj", "out_proj")))
        for attention, name in linear_layers:
            setattr(attention, name, LowRank(getattr(attention, name)))
        loss = model(**batch, mems=mems).loss
        loss.backward()
        for attention, name in linear_layers:
            adapter = getattr(attention, name)
            assert adapter.down.weight.grad.any()
            assert adapter.up.weight.grad.any(-1).all()
            setattr(attention, name, adapter.merged())
        assert_close(loss, model(**batch, mems=mems).loss)


class TestNoLeak:
    """A prediction depends only on the tokens before it in the factorization order."""

    def _changed_logits(self, model: Any, batch: Batch, row: int, position: int, **inputs: Any) -> Tensor:
        """(targets,) bool: whether the logits of an example change with the token at a position."""
        changed = {name: value.clone() for name, value in batch.items()}
        changed["input_ids"][row, position] = 5 + (batch["input_ids"][row, position] - 4) % (WORDS - 5)
        assert changed["input_ids"][row, position] != batch["input_ids"][row, position]
        with torch.no_grad():
            before, after = model(**batch, **inputs).logits[row], model(**changed, **inputs).logits[row]
        return (before != after).any(-1)

    @pytest.mark.parametrize("memory", [0, 5])
    def test_targets_attend_only_to_earlier_targets(self, path: str, memory: int) -> None:
        batch = without(make_batch((12, 9), targets=5), "labels")
        model = MODEL.model(attention=path)
        mems = make_memory(2, memory) if memory else None
        for row, count in ((0, 5), (1, 4)):
            targets = batch["target_positions"][row, :count]
            ranks = batch["permutation_order"][row, targets]
            for position, rank in zip(targets.tolist(), ranks.tolist(), strict=True):
                is_changed = self._changed_logits(model, batch, row, position, mems=mems)[:count]
                assert is_changed.tolist() == (ranks > rank).tolist()


class TestMemory:
    def test_memory_is_returned_as_configured_or_requested(self) -> None:
        words = torch.randint(5, WORDS, (2, 5), generator=torch.Generator().manual_seed(0))
        model = MODEL.model()
        assert model(input_ids=words).mems is not None
        assert model(input_ids=words, use_mems=False).mems is None
        assert model.train()(input_ids=words).mems is None
        assert not any(memory.requires_grad for memory in model(input_ids=words, use_mems=True).mems)
        model.config.use_mems_train = True
        assert model(input_ids=words).mems is not None

    def test_padding_in_memory_is_masked(self, path: str) -> None:
        """Outputs after a padded segment equal those after a segment without padding."""
        model = MODEL.model(attention=path)
        first_segment, second_segment = make_batch((8, 5), seed=1), make_batch((6, 6), seed=2)
        memories = model(**first_segment).mems
        logits = model(**without(second_segment, "labels"), mems=memories).logits
        for row, length in enumerate((8, 5)):
            first_example = {name: value[row : row + 1] for name, value in first_segment.items()}
            memory = model(**first_example).mems
            assert not memory[-1][0, : 8 - length].any()
            memory = [layer[:, 8 - length :] for layer in memory]
            second_example = {name: value[row : row + 1] for name, value in without(second_segment, "labels").items()}
            assert_close(model(**second_example, mems=memory).logits[0], logits[row])

    def test_packed_and_padded_memory_agree(self) -> None:
        batch = without(make_batch(), "labels", "permutation_order", "target_positions")
        packed, padded = ENCODER.model()(**batch), ENCODER.model(unpad=False)(**batch)
        assert_close(packed.mems, padded.mems)


class TestTraining:
    def test_loss_is_mean_cross_entropy_of_targets(self) -> None:
        """Losses of microbatches add up to the loss of the batch."""
        model, batch = MODEL.model(), make_batch((9, 8, 7, 6), targets=4)
        logits, loss = model(**without(batch, "labels")).logits, model(**batch).loss
        assert_close(loss, torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()))
        assert model(**batch, shift_labels=None).loss == loss
        count = (batch["labels"] != -100).sum()
        examples = [{name: value[row : row + 1] for name, value in batch.items()} for row in range(4)]
        losses = [model(**example, num_items_in_batch=count).loss for example in examples]
        assert_close(torch.stack(losses).sum(), loss)
        batch["labels"][:] = -100
        assert model(**batch).loss == 0

    @pytest.mark.parametrize("auto_name", FAMILIES["xlnet"].models)
    def test_all_parameters_have_gradients(self, auto_name: str) -> None:
        """Including those that a single stream or an input without segments does not use, as DDP expects."""
        case = Case(FAMILIES["xlnet"], auto_name)
        model = case.model().train()
        outputs = model(input_ids=torch.randint(5, WORDS, (2, 3, 5) if case.has_choices else (2, 5)))
        sum(value.sum() for value in outputs.values() if torch.is_tensor(value)).backward()
        assert not [name for name, parameter in model.named_parameters() if parameter.grad is None]
