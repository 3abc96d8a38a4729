"""The caches of `generate` have the same content as transformers' `DynamicCache` after any operations."""

import copy
import random

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache

from hf_ctxmodels import CtxGpt2Config, CtxGpt2ForCausalLM
from hf_ctxmodels.core.caches import PreallocatedCache, PreallocatedLayer, SharedSourceCache

ROWS, HEADS, SIZE, LAYERS = 6, 2, 3, 2
CONFIG = CtxGpt2Config(vocab_size=40, hidden_size=16, num_hidden_layers=LAYERS, num_attention_heads=2)


def make_caches() -> tuple[PreallocatedCache, DynamicCache]:
    return PreallocatedCache(config=CONFIG), DynamicCache(config=CONFIG)


def assert_equal(cache_under_test: DynamicCache, reference: DynamicCache) -> None:
    assert cache_under_test.get_seq_length() == reference.get_seq_length()
    for actual, expected in zip(cache_under_test.layers, reference.layers, strict=True):
        assert torch.equal(actual.keys, expected.keys)
        assert torch.equal(actual.values, expected.values)


def extend(caches: list[DynamicCache], rows: int, length: int) -> None:
    for layer in range(LAYERS):
        keys, values = torch.randn(2, rows, HEADS, length, SIZE)
        for cache in caches:
            cached_keys, _ = cache.update(keys, values, layer)
            assert torch.equal(cached_keys[:, :, -length:], keys)


@pytest.mark.parametrize("seed", range(8))
def test_random_operations_equal_dynamic_cache(seed: int) -> None:
    """Beams with a common prefix, rejected candidates, selected and repeated rows."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    cache_under_test, reference = make_caches()
    extend([cache_under_test, reference], ROWS, 5)
    rows = ROWS
    for _ in range(80):
        match rng.choice(["extend", "extend", "reorder", "reorder", "crop", "select", "repeat", "copy"]):
            case "extend":
                extend([cache_under_test, reference], rows, rng.choice([1, 1, 2, 40]))
            case "reorder":
                order = torch.tensor([rng.randrange(rows) for _ in range(rows)])
                cache_under_test.reorder_cache(order), reference.reorder_cache(order)
            case "crop" if reference.get_seq_length() > 3:
                cache_under_test.crop(-2), reference.crop(-2)
            case "select" if rows > ROWS:
                indices = torch.arange(0, rows, rows // ROWS)
                cache_under_test.batch_select_indices(indices), reference.batch_select_indices(indices)
                rows = len(indices)
            case "repeat" if rows == ROWS:
                cache_under_test.batch_repeat_interleave(2), reference.batch_repeat_interleave(2)
                rows *= 2
            case "copy":
                original, cache_under_test = cache_under_test, copy.deepcopy(cache_under_test)
                extend([original], rows, 1)  # must not change the copy
        assert_equal(cache_under_test, reference)
    cache_under_test.reset(), reference.reset()
    extend([cache_under_test, reference], 3, 2)
    assert_equal(cache_under_test, reference)


def test_reordering_copies_only_different_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, copies = PreallocatedCache(config=CONFIG), []
    copy_rows = PreallocatedLayer.copy_rows

    def record_copy(self: PreallocatedLayer, rows: Tensor, sources: Tensor, first: int) -> None:
        copies.append((rows.tolist(), sources.tolist(), first))
        copy_rows(self, rows, sources, first)

    monkeypatch.setattr(PreallocatedLayer, "copy_rows", record_copy)
    extend([cache], 4, 7)
    cache.reorder_cache(torch.tensor([0, 0, 2, 2]))  # the prompt
    extend([cache], 4, 2)
    cache.reorder_cache(torch.tensor([1, 0, 2, 3]))  # from the first column at which rows 0 and 1 differ
    cache.reorder_cache(torch.tensor([0, 1, 2, 3]))
    assert copies[::LAYERS] == [([1, 3], [0, 2], 0), ([0, 1], [1, 0], 7), ([], [], 9)]


def test_new_tokens_are_written_in_place() -> None:
    cache = PreallocatedCache(config=CONFIG)
    extend([cache], 2, 4)
    pointers = [cache.layers[0].keys.data_ptr()]
    for _ in range(30):
        extend([cache], 2, 1)
        pointers.append(cache.layers[0].keys.data_ptr())
    assert len(set(pointers)) == 1


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
def test_generate_output_equals_dynamic_cache(options: dict[str, int]) -> None:
    torch.manual_seed(0)
    model = CtxGpt2ForCausalLM(CtxGpt2Config(**{**CONFIG.to_diff_dict(), "initializer_range": 0.5})).eval()
    ids = torch.randint(1, 40, (3, 6))
    generate_kwargs = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 40, "do_sample": False, **options}
    generated = model.generate(ids, **generate_kwargs, return_dict_in_generate=True)
    assert type(generated.past_key_values) is PreallocatedCache
    expected = model.generate(ids, **generate_kwargs, past_key_values=DynamicCache(config=model.config))
    assert torch.equal(generated.sequences, expected)
    assert len(set(generated.sequences[:, 6:].flatten().tolist())) > 5


def test_beams_share_source_keys_and_values() -> None:
    """Reordering beams within a source copies nothing; across sources, rows get separate keys and values."""
    shared, expanded = SharedSourceCache(config=CONFIG, targets_per_source=3), DynamicCache(config=CONFIG)
    extend([shared, expanded], ROWS // 3, 4)
    expanded.batch_repeat_interleave(3)
    keys = shared.layers[0].keys
    shared.reorder_cache(torch.tensor([2, 0, 1, 5, 5, 3]))
    assert shared.layers[0].keys is keys
    for beam_idx in (torch.tensor([1, 1, 4, 0, 5, 2]), torch.tensor([3, 0])):
        for cache in (shared, expanded):
            cache.reorder_cache(beam_idx)
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


def test_encoder_decoder_cache_equals_dynamic_caches() -> None:
    """Also if beams move to other sources."""
    caches = [
        EncoderDecoderCache(PreallocatedCache(config=CONFIG), SharedSourceCache(config=CONFIG, targets_per_source=3)),
        make_caches()[1],
        make_caches()[1],
    ]
    extend([caches[0].cross_attention_cache, caches[2]], ROWS // 3, 4)
    extend([caches[0].self_attention_cache, caches[1]], ROWS, 2)
    caches[2].batch_repeat_interleave(3)
    for beam_idx in ([2, 0, 1, 5, 5, 3], [1, 1, 4, 0, 5, 2]):
        for cache in caches:
            cache.reorder_cache(torch.tensor(beam_idx))
    assert_equal(caches[0].self_attention_cache, caches[1])
    assert_equal(caches[0].cross_attention_cache, caches[2])
