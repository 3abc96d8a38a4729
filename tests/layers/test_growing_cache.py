"""The cache of `generate` holds what transformers' `DynamicCache` holds, whatever is done to it."""

import copy
import random

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from hf_ctxmodels import CtxGpt2Config, CtxGpt2ForCausalLM
from hf_ctxmodels.core.generation_cache import BeamSearchCache, PreallocatedCache, PreallocatedLayer, SharedSourceCache

ROWS, HEADS, SIZE, LAYERS = 6, 2, 3, 2
CONFIG = CtxGpt2Config(vocab_size=40, hidden_size=16, num_hidden_layers=LAYERS, num_attention_heads=2)


def both() -> tuple[PreallocatedCache, DynamicCache]:
    return PreallocatedCache(config=CONFIG), DynamicCache(config=CONFIG)


def assert_equal(ours: DynamicCache, theirs: DynamicCache) -> None:
    assert ours.get_seq_length() == theirs.get_seq_length()
    for got, expected in zip(ours.layers, theirs.layers, strict=True):
        assert torch.equal(got.keys, expected.keys)
        assert torch.equal(got.values, expected.values)


def extend(caches: list[DynamicCache], rows: int, length: int) -> None:
    for layer in range(LAYERS):
        keys, values = torch.randn(2, rows, HEADS, length, SIZE)
        for cache in caches:
            found = cache.update(keys, values, layer)
            assert torch.equal(found[0][:, :, -length:], keys)


@pytest.mark.parametrize("seed", range(5))
def test_any_sequence_of_operations(seed: int) -> None:
    """Beams that share a beginning, rejected candidates, other rows."""
    torch.manual_seed(seed)
    draw = random.Random(seed)
    ours, theirs = both()
    extend([ours, theirs], ROWS, 5)
    rows = ROWS
    for _ in range(80):
        match draw.choice(["extend", "extend", "reorder", "reorder", "crop", "select", "repeat", "copy"]):
            case "extend":
                extend([ours, theirs], rows, draw.choice([1, 1, 2, 40]))
            case "reorder":
                order = torch.tensor([draw.randrange(rows) for _ in range(rows)])
                ours.reorder_cache(order), theirs.reorder_cache(order)
            case "crop" if theirs.get_seq_length() > 3:
                ours.crop(-2), theirs.crop(-2)
            case "select" if rows > ROWS:
                kept = torch.arange(0, rows, rows // ROWS)
                ours.batch_select_indices(kept), theirs.batch_select_indices(kept)
                rows = len(kept)
            case "repeat" if rows == ROWS:
                ours.batch_repeat_interleave(2), theirs.batch_repeat_interleave(2)
                rows *= 2
            case "copy":
                before, ours = ours, copy.deepcopy(ours)
                extend([before], rows, 1)  # which the copy must not see
        assert_equal(ours, theirs)
    ours.reset(), theirs.reset()
    extend([ours, theirs], 3, 2)
    assert_equal(ours, theirs)


def test_tokens_in_place_of_rejected_ones_are_not_shared() -> None:
    """Assisted generation removes candidates, and others follow in their columns."""
    caches = both()
    extend([*caches], 4, 3)
    for cache in caches:
        cache.reorder_cache(torch.tensor([0, 0, 0, 0]))
        cache.crop(-1)
    extend([*caches], 4, 1)
    for cache in caches:
        cache.reorder_cache(torch.tensor([1, 0, 2, 3]))
    assert_equal(*caches)


def test_selected_rows_of_a_full_buffer_are_not_taken_for_it() -> None:
    caches = both()
    extend([*caches], 3, 4)
    buffer, _ = caches[0].layers[0]._buffers
    extend([*caches], 3, buffer.shape[2] - 4)
    assert caches[0].layers[0].keys.stride() == buffer.stride()
    for cache in caches:
        cache.batch_select_indices(torch.tensor([2, 0, 1]))
        cache.crop(-1)
    extend([*caches], 3, 1)
    assert_equal(*caches)


def test_beams_move_only_what_they_do_not_share(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, firsts = PreallocatedCache(config=CONFIG), []
    copy_rows = PreallocatedLayer.copy_rows

    def spy(self: PreallocatedLayer, rows: Tensor, sources: Tensor, first: int) -> None:
        firsts.append((rows.tolist(), sources.tolist(), first))
        copy_rows(self, rows, sources, first)

    monkeypatch.setattr(PreallocatedLayer, "copy_rows", spy)
    extend([cache], 4, 7)
    cache.reorder_cache(torch.tensor([0, 0, 2, 2]))  # the prompt, once
    extend([cache], 4, 2)
    cache.reorder_cache(torch.tensor([1, 0, 2, 3]))  # from where rows 0 and 1 differ
    cache.reorder_cache(torch.tensor([0, 1, 2, 3]))
    assert firsts[::LAYERS] == [([1, 3], [0, 2], 0), ([0, 1], [1, 0], 7), ([], [], 9)]


def test_new_tokens_are_written_in_place() -> None:
    cache = PreallocatedCache(config=CONFIG)
    extend([cache], 2, 4)
    places = [cache.layers[0].keys.data_ptr()]
    for _ in range(30):
        extend([cache], 2, 1)
        places.append(cache.layers[0].keys.data_ptr())
    assert len(set(places)) == 1


def test_gradients_reach_cached_keys() -> None:
    cache = PreallocatedCache(config=CONFIG)
    keys = torch.randn(2, HEADS, 3, SIZE, requires_grad=True)
    cache.update(keys, keys, 0)
    cache.update(torch.randn(2, HEADS, 1, SIZE), torch.randn(2, HEADS, 1, SIZE), 0)
    cache.layers[0].reorder_cache(torch.tensor([1, 1]))
    cache.layers[0].keys.sum().backward()
    assert keys.grad is not None
    assert (keys.grad[0] == 0).all()
    assert (keys.grad[1] == 2).all()


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"num_beams": 3, "num_return_sequences": 2}], ids=str)
def test_generate_uses_it_and_writes_the_same(options: dict[str, int]) -> None:
    torch.manual_seed(0)
    model = CtxGpt2ForCausalLM(CtxGpt2Config(**{**CONFIG.to_diff_dict(), "initializer_range": 0.5})).eval()
    ids = torch.randint(1, 40, (3, 6))
    given = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 40, "do_sample": False, **options}
    found = model.generate(ids, **given, return_dict_in_generate=True)
    assert type(found.past_key_values) is PreallocatedCache
    expected = model.generate(ids, **given, past_key_values=DynamicCache(config=model.config))
    assert torch.equal(found.sequences, expected)
    assert len(set(found.sequences[:, 6:].flatten().tolist())) > 5


def test_sources_of_beams_are_kept_once() -> None:
    """Beams of one source change places without a copy; rows of other sources get keys and values of their own."""
    shared, expanded = SharedSourceCache(config=CONFIG, targets_per_source=3), DynamicCache(config=CONFIG)
    extend([shared, expanded], ROWS // 3, 4)
    expanded.batch_repeat_interleave(3)
    keys = shared.layers[0].keys
    shared.reorder_cache(torch.tensor([2, 0, 1, 5, 5, 3]))
    assert shared.layers[0].keys is keys
    for places in (torch.tensor([1, 1, 4, 0, 5, 2]), torch.tensor([3, 0])):
        for cache in (shared, expanded):
            cache.reorder_cache(places)
        assert shared.targets_per_source == 1
        assert_equal(shared, expanded)

    shared, expanded = SharedSourceCache(config=CONFIG), DynamicCache(config=CONFIG)
    extend([shared, expanded], 2, 4)
    for cache in (shared, expanded):
        cache.batch_repeat_interleave(3)
    assert (shared.targets_per_source, len(shared.layers[0].keys)) == (3, 2)
    for cache in (shared, expanded):
        cache.batch_select_indices(torch.tensor([4, 0]))
    assert_equal(shared, expanded)


class OnDevice(Tensor):
    """A tensor that counts how often it leaves its device."""

    moves = 0

    def cpu(self) -> Tensor:  # type: ignore[override]
        OnDevice.moves += 1
        return self.as_subclass(Tensor)


def test_places_of_beams_leave_their_device_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the target's cache and the source's; both have what `DynamicCache` has, also where beams change sources."""
    caches = [
        BeamSearchCache(PreallocatedCache(config=CONFIG), SharedSourceCache(config=CONFIG, targets_per_source=3)),
        both()[1],
        both()[1],
    ]
    extend([caches[0].cross_attention_cache, caches[2]], ROWS // 3, 4)
    extend([caches[0].self_attention_cache, caches[1]], ROWS, 2)
    caches[2].batch_repeat_interleave(3)
    for places in ([2, 0, 1, 5, 5, 3], [1, 1, 4, 0, 5, 2]):
        monkeypatch.setattr(OnDevice, "moves", 0)
        for cache in caches[1:]:
            cache.reorder_cache(torch.tensor(places))
        caches[0].reorder_cache(torch.tensor(places).as_subclass(OnDevice))
        assert OnDevice.moves == 1
    assert_equal(caches[0].self_attention_cache, caches[1])
    assert_equal(caches[0].cross_attention_cache, caches[2])
