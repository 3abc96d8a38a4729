"""`RecurrentCache`: what generation, beam search and the training loop do with the states of every recurrent family."""

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
from hf_ctxmodels.core.recurrent_cache import RecurrentCache
from hf_ctxmodels.heads import ForConditionalGeneration
from hf_ctxmodels.training.recurrent_state import RecurrentStateCarrier

WRITERS = [
    case
    for case in HEADS
    if issubclass(case.model_class, LSTMForCausalLM | ForConditionalGeneration) and not case.attends
]
CARRIERS = [case for case in HEADS if getattr(case.model_class, "state_outputs", ()) == ("past_key_values",)]
ROWS = torch.tensor([2, 0, 0, 1])  # what beam search may choose: a row twice, another order


def a_cache() -> RecurrentCache:
    """Two layers of different form, three rows."""
    values = torch.arange(24.0)
    return RecurrentCache([(values[:6].view(3, 2), values[6:12].view(3, 1, 2)), (values[12:].view(3, 4),)], 7)


def equal(first: RecurrentCache, second: RecurrentCache) -> bool:
    pairs = zip(first.states, second.states, strict=True)
    same = all(torch.equal(one, other) for states in pairs for one, other in zip(*states, strict=True))
    return same and first.seen_tokens == second.seen_tokens


class TestOperations:
    def test_rows(self) -> None:
        cache, other = a_cache(), a_cache()
        assert isinstance(cache, Cache)
        assert (len(cache), cache.batch_size, cache.get_seq_length()) == (2, 3, 7)
        other.reorder_cache(ROWS)
        assert equal(other, cache.select(ROWS))
        for before, after in zip(cache.states, other.states, strict=True):
            assert all(torch.equal(two[i], one[row]) for one, two in zip(before, after) for i, row in enumerate(ROWS))
        other = a_cache()
        other.batch_repeat_interleave(2)
        assert equal(other, cache.select(torch.tensor([0, 0, 1, 1, 2, 2])))
        other.batch_select_indices(torch.tensor([0, 2, 4]))
        assert equal(other, cache)

    def test_rows_that_start_anew_are_zero(self) -> None:
        kept = a_cache().mask_rows(torch.tensor([True, False, True]))
        assert not any(part[1].any() for state in kept.states for part in state)
        assert equal(kept.select(torch.tensor([0, 2])), a_cache().select(torch.tensor([0, 2])))

    def test_reset(self) -> None:
        cache = a_cache()
        cache.reset()
        assert equal(cache, RecurrentCache([torch.zeros_like(part) for part in state] for state in a_cache().states))

    def test_gradients_end_at_a_detached_cache(self) -> None:
        cache = a_cache().map(lambda part: part.requires_grad_())
        assert cache.states[0][0].requires_grad
        assert not any(part.requires_grad for state in cache.detach().states for part in state)

    def test_no_token_can_be_removed(self) -> None:
        assert not a_cache().is_croppable
        with pytest.raises(CtxError, match="cannot be removed"):
            a_cache().crop(-1)

    def test_a_file_holds_it_whole(self, tmp_path: Path) -> None:
        """Also twelve layers, in their order."""
        many = RecurrentCache(([torch.full((3, 2), float(layer))] for layer in range(12)), 4)
        for cache in (a_cache(), many):
            save_file(cache.state_dict(), tmp_path / "cache.safetensors")
            assert equal(RecurrentCache.from_state_dict(load_file(tmp_path / "cache.safetensors")), cache)


@pytest.fixture(params=WRITERS, ids=str)
def case(request: pytest.FixtureRequest) -> Case:
    return request.param


def prompts(case: Case, model: PreTrainedModel) -> tuple[str, dict[str, Any], torch.Tensor]:
    """Name of the ids that a cache continues, other inputs of every step, and (3, 6) such ids."""
    ids = torch.randint(5, 30, (3, 6), generator=torch.Generator().manual_seed(2))
    if not model.config.is_encoder_decoder:
        return "input_ids", {}, ids
    batch = make_batch(case, (5, 3, 7))
    with torch.no_grad():
        encoded = model.encode(**batch)
    return "decoder_input_ids", {"encoder_outputs": encoded, "attention_mask": batch["attention_mask"]}, ids


def select(inputs: dict[str, Any], rows: torch.Tensor) -> dict[str, Any]:
    """The rows of a step's inputs."""
    return {
        name: type(value)(**{key: each[rows] for key, each in value.items() if torch.is_tensor(each)})
        if isinstance(value, ModelOutput)
        else value[rows]
        for name, value in inputs.items()
    }


@torch.no_grad()
def test_reordered_beams_continue_as_each_would_alone(case: Case) -> None:
    model = case.model(3, initializer_range=0.5)
    name, fixed, ids = prompts(case, model)
    before = model(**{name: ids[:, :4]}, **fixed, use_cache=True).past_key_values
    assert isinstance(before, RecurrentCache)
    assert before.get_seq_length() == 4
    copy = before.select(torch.arange(3))
    cache = before.select(torch.arange(3))
    cache.reorder_cache(ROWS)
    got = model(**{name: ids[ROWS, 4:]}, **select(fixed, ROWS), past_key_values=cache, use_cache=True)
    assert got.past_key_values.get_seq_length() == 6
    for place, row in enumerate(ROWS):
        alone = model(**{name: ids[row : row + 1]}, **select(fixed, row[None]), use_cache=True)
        torch.testing.assert_close(got.logits[place], alone.logits[0, 4:])
    model(**{name: ids[:, 4:]}, **fixed, past_key_values=before, use_cache=True)
    assert equal(before, copy), "a forward pass changed the cache that it was given"


def test_generate_continues_a_cache(case: Case) -> None:
    """A text that is written in two calls, the second with the first's cache, is the text written in one."""
    model = case.model(3, initializer_range=0.5)
    options = {"eos_token_id": None, "pad_token_id": 0, "do_sample": False, "return_dict_in_generate": True}
    name, fixed, ids = prompts(case, model)
    inputs = {**(make_batch(case, (5, 3, 7)) if fixed else {}), name: ids[:, :4]}
    if fixed:
        inputs[name][:, 0] = model.config.decoder_start_token_id
    whole = model.generate(**inputs, **options, max_new_tokens=6)
    first = model.generate(**inputs, **options, max_new_tokens=2)
    assert first.past_key_values.get_seq_length() == 5, "all tokens but the last"
    inputs = {**inputs, name: first.sequences, "past_key_values": first.past_key_values}
    second = model.generate(**inputs, **options, max_new_tokens=4)
    assert torch.equal(second.sequences, whole.sequences)


def test_assisted_generation_is_refused(case: Case) -> None:
    model = case.model()
    ids = make_batch(case, (5,))["input_ids"]
    with pytest.raises(ValueError, match="stateful"):
        model.generate(ids, assistant_model=model, max_new_tokens=3)


def test_other_caches_are_refused() -> None:
    case = next(case for case in WRITERS if issubclass(case.model_class, LSTMForCausalLM))
    with pytest.raises(CtxError, match="is a DynamicCache, expected a RecurrentCache"):
        case.model()(input_ids=torch.ones(2, 3, dtype=torch.long), past_key_values=DynamicCache())


@pytest.mark.parametrize("case", CARRIERS, ids=str)
@torch.no_grad()
def test_a_checkpoint_holds_what_is_carried(case: Case, tmp_path: Path) -> None:
    """The next batch is read from the restored states as from the original ones, also by another number of processes;
    a row whose text does not continue starts from zero."""
    model = case.model(stateful=True)
    first, second = make_batch(case, (7, 7, 7, 7)), make_batch(case, (7, 7, 7, 7), seed=1)
    carrier = RecurrentStateCarrier(("past_key_values",), 1)
    indices = torch.tensor([0, 10, 20, 30])
    carrier.update(0, indices, model(**first))
    carrier.save(tmp_path, 0)
    following = torch.tensor([1, 11, 25, 31])
    expected = model(**second, **carrier.inputs(0, following)).logits
    torch.testing.assert_close(expected[2], model(**second).logits[2])
    assert not torch.allclose(expected[0], model(**second).logits[0])
    for processes in (1, 2):
        parts = []
        for process, rows in enumerate(torch.arange(4).chunk(processes)):
            restored = RecurrentStateCarrier(("past_key_values",), 1)
            restored.load(tmp_path, process, processes, torch.device("cpu"))
            batch = {name: value[rows] for name, value in second.items()}
            parts.append(model(**batch, **restored.inputs(0, following[rows])).logits)
        torch.testing.assert_close(torch.cat(parts), expected)
