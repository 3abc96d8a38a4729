"""Span corruption against reference loops: counts, uniform masks, sentinels, rows and the other variants."""

from collections import Counter
from math import comb

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numbered_text import word

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.models.t5.tokenization_t5 import CtxT5Tokenizer
from hf_ctxmodels.objectives import SpanCorruption
from hf_ctxmodels.objectives.features import feature_generator
from hf_ctxmodels.objectives.span_corruption import alternating_spans, max_text_length, noise_counts

NUM_WORDS = 2000
FIRST = 3  # id of word 0
END = 1


@pytest.fixture(scope="module")
def t5_tokenizer() -> CtxT5Tokenizer:
    """2000 words of one token each, with the ids 3 ... 2002, followed by the sentinels."""
    special = [(token, 0.0) for token in ("<pad>", "</s>", "<unk>")]
    vocab = CtxT5Tokenizer.reorder_vocabulary([*special, *((f"▁{word(number)}", -1.0) for number in range(NUM_WORDS))])
    return CtxT5Tokenizer(vocab=vocab, model_max_length=512)


def feature(length: int, index: int = 0, epoch: int = 0) -> dict:
    return {"input_ids": FIRST + np.arange(length), "example_index": index, "epoch": epoch}


def reference_input_and_target(ids: list[int], noise: list[bool], sentinel: int) -> tuple[list[int], list[int]]:
    """Input and target, token by token: `noise_span_to_unique_sentinel` and its counterpart."""
    sides: tuple[list[int], list[int]] = ([], [])
    for side, hidden in enumerate((True, False)):
        number, before = sentinel, None
        for token, is_noise in zip(ids, noise, strict=True):
            if is_noise is not hidden:
                sides[side].append(token)
            elif before is not hidden:
                sides[side].append(number)
                number -= 1
            before = is_noise
    return sides[0] + [END], sides[1] + [END]


@given(length=st.integers(2, 700), density=st.floats(0.01, 0.99), mean=st.floats(1, 20), seed=st.integers(0, 10**6))
def test_noise_counts_match_release(length: int, density: float, mean: float, seed: int) -> None:
    mask = alternating_spans(length, density, mean, np.random.default_rng(seed))
    rounded = int(torch.round(torch.tensor(length, dtype=torch.float32) * torch.tensor(density, dtype=torch.float32)))
    noise = min(max(rounded, 1), length - 1)
    spans = int(torch.round(torch.tensor(noise, dtype=torch.float32) / torch.tensor(mean, dtype=torch.float32)))
    starts = int((mask & ~np.append(False, mask[:-1])).sum())
    assert (mask.sum(), starts) == (noise, min(max(spans, 1), noise, length - noise))
    assert not mask[0]
    assert mask[-1]


def test_all_masks_are_equally_likely() -> None:
    """Nine tokens, four of them noise in two spans: 3 x 4 masks."""
    rng, num_samples = np.random.default_rng(0), 12_000
    assert noise_counts(9, 0.45, 2.0) == (4, 2)
    counts = Counter(tuple(alternating_spans(9, 0.45, 2.0, rng).tolist()) for _ in range(num_samples))
    masks = comb(3, 1) * comb(4, 1)
    assert len(counts) == masks
    assert max(abs(count - num_samples / masks) for count in counts.values()) < 5 * (num_samples / masks) ** 0.5


@pytest.mark.parametrize(("density", "mean", "row", "target"), [(0.15, 3.0, 568, 114), (0.15, 10.0, 591, 99)])
def test_row_lengths(t5_tokenizer: CtxT5Tokenizer, density: float, mean: float, row: int, target: int) -> None:
    """512 input tokens and 114 target tokens, as in the release."""
    assert max_text_length(512, density, mean) == row
    objective = SpanCorruption(t5_tokenizer, max_length=512, seed=0, noise_density=density, mean_span_length=mean)
    assert objective.text_length == row
    batch = objective.collate([feature(row, index) for index in range(4)])
    assert batch["input_ids"].shape == (4, 512)
    assert batch["labels"].shape == (4, target)
    assert batch["attention_mask"].all()
    assert (batch["labels"] != -100).all()


def test_more_spans_than_sentinels(t5_tokenizer: CtxT5Tokenizer) -> None:
    assert max_text_length(512, 0.5, 3.0) == 766
    with pytest.raises(CtxError, match=r"128 spans, but there are 100 sentinels"):
        SpanCorruption(t5_tokenizer, max_length=512, seed=0, noise_density=0.5, mean_span_length=3.0)


KEEPING_FIRST_TOKEN: list[dict] = [{}, {"noise_density": 0.4, "mean_span_length": 1.5}]


@pytest.mark.parametrize("options", [*KEEPING_FIRST_TOKEN, {"random_roll": True}, {"variant": "iid"}])
def test_inputs_and_targets_match_reference_loop(t5_tokenizer: CtxT5Tokenizer, options: dict) -> None:
    objective = SpanCorruption(t5_tokenizer, max_length=64, seed=3, **options)
    lengths = [1, 2, 5, 30, *[objective.text_length] * 20]
    features = [feature(length, index, epoch=2) for index, length in enumerate(lengths)]
    batch = objective.collate(features)
    num_rolled, sentinel = 0, t5_tokenizer.convert_tokens_to_ids("<extra_id_0>")
    for row, example in enumerate(features):
        inputs = batch["input_ids"][row][batch["attention_mask"][row] == 1].tolist()
        targets = batch["labels"][row][batch["labels"][row] != -100].tolist()
        input_set = set(inputs)
        noise = [token not in input_set for token in example["input_ids"].tolist()]
        assert (inputs, targets) == reference_input_and_target(example["input_ids"].tolist(), noise, sentinel)
        num_rolled += noise[0]
        if options in KEEPING_FIRST_TOKEN:
            assert not noise[0]
            assert noise[-1] or len(noise) == 1
        assert objective.collate([example])["input_ids"][0].tolist() == inputs
    assert sentinel == len(t5_tokenizer) - 1
    assert bool(num_rolled) == (options not in KEEPING_FIRST_TOKEN)
    next_epoch = objective.collate([{**example, "epoch": 3} for example in features])
    assert not torch.equal(batch["input_ids"][-1], next_epoch["input_ids"][-1])


def test_denoising_and_prefix_lm(t5_tokenizer: CtxT5Tokenizer) -> None:
    length, first = 40, t5_tokenizer.convert_tokens_to_ids("<extra_id_0>")
    features = [feature(length, index) for index in range(300)]
    batch = SpanCorruption(t5_tokenizer, max_length=length + 1, seed=0, variant="denoise").collate(features)
    row = torch.cat([torch.from_numpy(features[0]["input_ids"]), torch.tensor([END])])
    assert (batch["labels"] == row).all()
    hidden = batch["input_ids"] == first
    assert torch.equal(batch["input_ids"][~hidden], batch["labels"][~hidden])
    assert float(hidden.float().mean()) == pytest.approx(0.15, abs=0.015)

    batch = SpanCorruption(t5_tokenizer, max_length=length, seed=0, variant="prefix-lm").collate(features)
    cuts = batch["attention_mask"].sum(1) - 1
    for inputs, labels, cut in zip(batch["input_ids"], batch["labels"], cuts.tolist(), strict=True):
        assert inputs[: cut + 1].tolist() == [*row[:cut].tolist(), END]
        assert labels[labels != -100].tolist() == row[cut:].tolist()
    assert (int(cuts.min()), int(cuts.max())) == (1, length - 1)


def test_rows_join_documents(t5_tokenizer: CtxT5Tokenizer) -> None:
    """128 documents at a time are joined without separator; a prefix LM has rows of one document."""
    documents = [[word(number), word(number + 1000)] for number in range(130)]
    text = [FIRST + number for pair in ((n, n + 1000) for n in range(130)) for number in pair]
    objective = SpanCorruption(t5_tokenizer, max_length=20, seed=0)
    rows = [row["input_ids"].tolist() for row in objective.examples(documents)]
    assert [token for row in rows for token in row] == text
    size = objective.text_length
    assert [len(row) for row in rows] == [size] * (256 // size) + [256 % size, 4]
    assert objective.statistics["documents"] == 130
    prefix_rows = SpanCorruption(t5_tokenizer, max_length=20, seed=0, variant="prefix-lm").examples(documents)
    assert [row["input_ids"].tolist() for row in prefix_rows] == [text[start : start + 2] for start in range(0, 260, 2)]


@pytest.mark.parametrize(
    ("variant", "share", "length"),
    [("spans", 0.15, 3.04), ("iid", 0.15, 1.18), ("denoise", 0.15, 1.0), ("prefix-lm", 0.5, 64.0)],
)
def test_realized_rates(t5_tokenizer: CtxT5Tokenizer, variant: str, share: float, length: float) -> None:
    objective = SpanCorruption(t5_tokenizer, max_length=128, seed=0, variant=variant)
    features = [feature(objective.text_length, index) for index in range(200)]
    counts = Counter()
    for start in range(0, 200, 8):
        counts.update(objective.count_batch(objective.collate(features[start : start + 8])))
    rates = objective.rates(counts)
    assert rates["noise_share"] == pytest.approx(share, rel=0.1)
    assert rates["span_length"] == pytest.approx(length, rel=0.1 if variant == "prefix-lm" else 0.03)
    assert (rates["spans_per_example"] == 1) == (variant == "prefix-lm")
    assert rates["target_fill_share"] == (1 if variant in ("spans", "denoise") else pytest.approx(0.75, abs=0.2))


def test_invalid_options_and_examples(t5_tokenizer: CtxT5Tokenizer, tokenizer) -> None:
    with pytest.raises(CtxError, match=r"(?s)CtxBertTokenizer has no eos_token"):
        SpanCorruption(tokenizer, max_length=64, seed=0)
    plain = CtxT5Tokenizer(vocab=[(token, 0.0) for token in ("<pad>", "</s>", "<unk>", "▁a")])
    with pytest.raises(CtxError, match=r"no sentinel <extra_id_0>"):
        SpanCorruption(plain, max_length=64, seed=0)
    objective = SpanCorruption(t5_tokenizer, max_length=64, seed=0)
    with pytest.raises(CtxError, match=r"sentinel <extra_id_7>, at token 1"):
        list(objective.examples([["w1 <extra_id_7> w2"]]))
    with pytest.raises(CtxError, match=r"no token to predict"):
        objective.collate([feature(0)])
    with pytest.raises(CtxError, match=r"example_index"):
        objective.collate([{"input_ids": [5, 6, 7]}])
    for options, message in (
        ({"max_length": 2}, "max_length=2"),
        ({"noise_density": 1.0}, "noise_density=1.0"),
        ({"mean_span_length": 0.5}, "out of range"),
        ({"variant": "span"}, r"(?s)variant='span' is unknown.*spans, iid, denoise, prefix-lm"),
    ):
        with pytest.raises(CtxError, match=message):
            SpanCorruption(t5_tokenizer, **{"max_length": 64, "seed": 0, **options})
    with pytest.raises(CtxError, match=r"has \d+ spans, but there are 100 sentinels"):
        SpanCorruption(t5_tokenizer, max_length=64, seed=0, variant="iid", noise_density=0.5).collate([feature(1000)])


def test_number_of_sentinels_limits_spans(t5_tokenizer: CtxT5Tokenizer) -> None:
    """The number of spans is checked before training; rare masks of single tokens with too many spans are resampled."""
    with pytest.raises(CtxError, match=r"499 tokens has 149 spans, but there are 100 sentinels"):
        SpanCorruption(t5_tokenizer, max_length=500, seed=0, variant="iid", noise_density=0.5)
    options = {"seed": 0, "noise_density": 0.5, "mean_span_length": 2.0}
    spans = {length: noise_counts(max_text_length(length, 0.5, 2.0), 0.5, 2.0)[1] for length in range(300, 500)}
    full = next(length for length in spans if spans[length] == 100)
    assert SpanCorruption(t5_tokenizer, max_length=full, **options).text_length == max_text_length(full, 0.5, 2.0)
    with pytest.raises(CtxError, match=r"101 spans, but there are 100"):  # a rotation may split a span
        SpanCorruption(t5_tokenizer, max_length=full, random_roll=True, **options)

    objective = SpanCorruption(t5_tokenizer, max_length=64, seed=0, variant="iid", noise_density=0.5)
    length, num_resampled = 390, 0
    for index in range(200):
        first_mask = feature_generator(feature(length, index), 0).random(length) < 0.5
        noise = objective.sample_noise_mask(length, feature_generator(feature(length, index), 0))
        runs = [sum(mask & ~np.append(False, mask[:-1])) for mask in (noise, ~noise)]
        assert max(runs) <= 100
        is_resampled = max(sum(mask & ~np.append(False, mask[:-1])) for mask in (first_mask, ~first_mask)) > 100
        assert (noise != first_mask).any() == is_resampled
        num_resampled += is_resampled
    assert 20 < num_resampled < 120
    assert len(objective.collate([feature(length, index) for index in range(200)])["input_ids"]) == 200
