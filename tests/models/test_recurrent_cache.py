"""`RecurrentCache`: operations, generation, beam search and stateful training of all recurrent families."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.utils import ModelOutput
from zoo import HEADS, Case, make_batch

from hf_ctxmodels import CtxError
from hf_ctxmodels.architectures.lstm_language_model import LSTMForCausalLM
from hf_ctxmodels.core.caches import RecurrentCache
from hf_ctxmodels.heads import RecurrentForConditionalGeneration
from hf_ctxmodels.training.recurrent_state import RecurrentStateCarrier

GENERATIVE = [
    case
    for case in HEADS
    if issubclass(case.model_class, LSTMForCausalLM | RecurrentForConditionalGeneration) and not case.has_attention
]
STATEFUL = [case for case in HEADS if getattr(case.model_class, "state_outputs", ()) == ("past_key_values",)]
ROWS = torch.tensor([2, 0, 0, 1])  # as selected by beam search: repeated and reordered rows


def build_cache() -> RecurrentCache:
    """Two layers with states of different shapes, batch size 3."""
    values = torch.arange(24.0)
    return RecurrentCache([(values[:6].view(3, 2), values[6:12].view(3, 1, 2)), (values[12:].view(3, 4),)], 7)


def assert_equal(cache: RecurrentCache, expected: RecurrentCache) -> None:
    torch.testing.assert_close(cache.states, expected.states, rtol=0, atol=0)
    assert cache.seen_tokens == expected.seen_tokens


class TestOperations:
    def test_row_selection(self) -> None:
        cache, reordered = build_cache(), build_cache()
        assert isinstance(cache, Cache)
        assert (len(cache), cache.batch_size, cache.get_seq_length()) == (2, 3, 7)
        reordered.reorder_cache(ROWS)
        assert_equal(reordered, cache.select(ROWS))
        assert_equal(reordered, RecurrentCache(([tensor[ROWS] for tensor in state] for state in cache.states), 7))
        repeated = build_cache()
        repeated.batch_repeat_interleave(2)
        assert_equal(repeated, cache.select(torch.tensor([0, 0, 1, 1, 2, 2])))
        repeated.batch_select_indices(torch.tensor([0, 2, 4]))
        assert_equal(repeated, cache)

    def test_state_operations(self) -> None:
        masked = build_cache().mask_rows(torch.tensor([True, False, True]))
        assert not any(tensor[1].any() for state in masked.states for tensor in state)
        assert_equal(masked.select(torch.tensor([0, 2])), build_cache().select(torch.tensor([0, 2])))
        cache = build_cache().map(lambda tensor: tensor.requires_grad_())
        assert cache.states[0][0].requires_grad
        assert not any(tensor.requires_grad for state in cache.detach().states for tensor in state)
        cache = build_cache()
        cache.reset()
        assert_equal(cache, RecurrentCache(map(torch.zeros_like, state) for state in build_cache().states))
        assert not cache.is_croppable
        with pytest.raises(CtxError, match="cannot be removed"):
            cache.crop(-1)

    def test_save_and_load(self, tmp_path: Path) -> None:
        """With several states per layer, and with twelve layers in order."""
        twelve_layers = RecurrentCache(([torch.full((3, 2), float(layer))] for layer in range(12)), 4)
        for cache in (build_cache(), twelve_layers):
            save_file(cache.state_dict(), tmp_path / "cache.safetensors")
            assert_equal(RecurrentCache.from_state_dict(load_file(tmp_path / "cache.safetensors")), cache)


@pytest.fixture(params=GENERATIVE, ids=str)
def case(request: pytest.FixtureRequest) -> Case:
    return request.param


def prompts(case: Case, model: PreTrainedModel) -> tuple[str, dict[str, Any], torch.Tensor]:
    """Name of the ids argument, other inputs of each step, and (3, 6) ids."""
    ids = torch.randint(5, 30, (3, 6), generator=torch.Generator().manual_seed(2))
    if not model.config.is_encoder_decoder:
        return "input_ids", {}, ids
    batch = make_batch(case, (5, 3, 7))
    with torch.no_grad():
        encoded = model.encode(**batch)
    return "decoder_input_ids", {"encoder_outputs": encoded, "attention_mask": batch["attention_mask"]}, ids


def select(inputs: dict[str, Any], rows: torch.Tensor) -> dict[str, Any]:
    return {
        name: type(value)(**{key: tensor[rows] for key, tensor in value.items() if torch.is_tensor(tensor)})
        if isinstance(value, ModelOutput)
        else value[rows]
        for name, value in inputs.items()
    }


@torch.no_grad()
def test_reordered_cache_continues_sequences(case: Case) -> None:
    model = case.model(3, initializer_range=0.5)
    ids_name, inputs, ids = prompts(case, model)
    initial = model(**{ids_name: ids[:, :4]}, **inputs, use_cache=True).past_key_values
    assert isinstance(initial, RecurrentCache)
    assert initial.get_seq_length() == 4
    initial_copy = initial.select(torch.arange(3))
    cache = initial.select(torch.arange(3))
    cache.reorder_cache(ROWS)
    outputs = model(**{ids_name: ids[ROWS, 4:]}, **select(inputs, ROWS), past_key_values=cache, use_cache=True)
    assert outputs.past_key_values.get_seq_length() == 6
    for index, row in enumerate(ROWS):
        expected = model(**{ids_name: ids[row : row + 1]}, **select(inputs, row[None]), use_cache=True)
        torch.testing.assert_close(outputs.logits[index], expected.logits[0, 4:])
    model(**{ids_name: ids[:, 4:]}, **inputs, past_key_values=initial, use_cache=True)
    assert_equal(initial, initial_copy)  # a forward pass does not modify its input cache


def test_generate_continues_from_cache(case: Case) -> None:
    """Two calls, the second with the cache of the first, equal one call."""
    model = case.model(3, initializer_range=0.5)
    options = {"eos_token_id": None, "pad_token_id": 0, "do_sample": False, "return_dict_in_generate": True}
    ids_name, encoder_inputs, ids = prompts(case, model)
    inputs = {**(make_batch(case, (5, 3, 7)) if encoder_inputs else {}), ids_name: ids[:, :4]}
    if encoder_inputs:
        inputs[ids_name][:, 0] = model.config.decoder_start_token_id
    expected = model.generate(**inputs, **options, max_new_tokens=6)
    first_outputs = model.generate(**inputs, **options, max_new_tokens=2)
    assert first_outputs.past_key_values.get_seq_length() == 5, "all tokens except the last"
    inputs = {**inputs, ids_name: first_outputs.sequences, "past_key_values": first_outputs.past_key_values}
    second_outputs = model.generate(**inputs, **options, max_new_tokens=4)
    assert torch.equal(second_outputs.sequences, expected.sequences)


def test_assisted_generation_raises(case: Case) -> None:
    model = case.model()
    ids = make_batch(case, (5,))["input_ids"]
    with pytest.raises(ValueError, match="stateful"):
        model.generate(ids, assistant_model=model, max_new_tokens=3)


def test_unsupported_cache_raises() -> None:
    case = next(case for case in GENERATIVE if issubclass(case.model_class, LSTMForCausalLM))
    with pytest.raises(CtxError, match="is a DynamicCache, expected a RecurrentCache"):
        case.model()(input_ids=torch.ones(2, 3, dtype=torch.long), past_key_values=DynamicCache())


@pytest.mark.parametrize("case", STATEFUL, ids=str)
@torch.no_grad()
def test_restored_states_continue_texts(case: Case, tmp_path: Path) -> None:
    """Restored states continue the texts with any number of processes; new texts start from zero states."""
    model = case.model(stateful=True)
    first_batch, second_batch = make_batch(case, (7, 7, 7, 7)), make_batch(case, (7, 7, 7, 7), seed=1)
    carrier = RecurrentStateCarrier(model, 1)
    indices = torch.tensor([0, 10, 20, 30])
    carrier.update(0, indices, model(**first_batch))
    carrier.save(tmp_path, 0)
    next_indices = torch.tensor([1, 11, 25, 31])
    expected = model(**second_batch, **carrier.inputs(0, next_indices)).logits
    torch.testing.assert_close(expected[2], model(**second_batch).logits[2])
    assert not torch.allclose(expected[0], model(**second_batch).logits[0])
    for num_processes in (1, 2):
        logits = []
        for process, rows in enumerate(torch.arange(4).chunk(num_processes)):
            restored = RecurrentStateCarrier(model, 1)
            restored.load(tmp_path, process, num_processes, torch.device("cpu"))
            batch = {name: value[rows] for name, value in second_batch.items()}
            logits.append(model(**batch, **restored.inputs(0, next_indices[rows])).logits)
        torch.testing.assert_close(torch.cat(logits), expected)
