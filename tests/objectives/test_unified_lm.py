"""UniLM: attention patterns, token selection against a reference loop, masked and noisy targets, and infilling."""

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numbered_text import numbered_documents, with_index

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.data.documents import TranslatedText
from hf_ctxmodels.data.seeding import generator
from hf_ctxmodels.objectives import Infilling, MaskedSequenceToSequence, NoisySequenceToSequence, UnifiedLM
from hf_ctxmodels.objectives.masking import IGNORE_INDEX, SkipgramRule
from hf_ctxmodels.objectives.unified_lm import ATTENTION_PATTERNS

CLS, SEP, MASK, FIRST = 2, 3, 4, 5


def pairs(count=40):
    documents, _ = numbered_documents([[8, 5]] * count)
    return [TranslatedText(document) for document in documents]


def test_rows_of_each_attention_pattern(tokenizer):
    documents, document_of = numbered_documents([[3] * 24] * 40)  # rows of whole sentences
    counts, pattern_counts = Counter(), Counter()
    for seed in range(8):
        objective = UnifiedLM(tokenizer, max_length=30, seed=seed, short_seq_probability=0.0)
        rows = list(objective.examples([*documents, ["wa"]]))
        for row in rows:
            types, ids, label = set(row["token_type_ids"].tolist()), row["input_ids"], row["next_sentence_label"]
            ends = np.flatnonzero(ids == SEP)
            word_segments = [segment[segment >= FIRST] - FIRST for segment in np.split(ids, ends)[: len(ends)]]
            follows = len(word_segments) == 2 and word_segments[1][0] == word_segments[0][-1] + 1
            pattern = {(0, 1): 0, (4, 5): 1, (2,): 2, (3,): 3}[tuple(sorted(types))]
            pattern_counts[ATTENTION_PATTERNS[pattern]] += 1
            assert len(word_segments) == (2 if pattern < 2 else 1)
            if pattern == 0:
                assert label == (0 if follows else 1)
                assert follows == (document_of[int(word_segments[0][0])] == document_of[int(word_segments[1][0])])
            else:
                assert label == IGNORE_INDEX, "no next-sentence label"
                assert follows or len(word_segments) == 1
            if pattern == 1:
                assert row["token_type_ids"].tolist() == [4] * (ends[0] + 1) + [5] * (ends[1] - ends[0])
        counts.update(objective.count_batch(objective.collate(with_index(rows))))
    rates = objective.rates(counts)
    total = sum(pattern_counts.values())
    for pattern, share in zip(ATTENTION_PATTERNS, (1 / 3, 1 / 3, 1 / 6, 1 / 6)):
        assert rates[f"{pattern}_share"] == pytest.approx(pattern_counts[pattern] / total)
        # pairs that use only the first sentences yield more rows
        assert pattern_counts[pattern] / total == pytest.approx(share, abs=0.04), pattern
    assert rates["random_next_share"] == pytest.approx(0.5, abs=0.08)
    assert rates["selected_share"] == pytest.approx(0.15, abs=0.02)


@given(
    is_candidate=st.lists(st.booleans(), min_size=1, max_size=60),
    probability=st.floats(0.05, 1),
    skipgram=st.floats(0, 1),
    size=st.integers(1, 4),
    limit=st.one_of(st.none(), st.integers(1, 9)),
    seed=st.integers(0, 10**6),
)
def test_skipgram_selection_matches_released_loop(is_candidate, probability, skipgram, size, limit, seed):
    """Token by token, with the random numbers of the rule; the budget is used exactly."""
    rule = SkipgramRule(
        probability=probability, skipgram_probability=skipgram, skipgram_size=size, max_predictions=limit
    )
    candidates = np.array(is_candidate)
    selected = rule.select(candidates, None, generator(seed, 0, 0))
    rng = generator(seed, 0, 0)
    order = rng.permutation(np.flatnonzero(candidates)).tolist()
    lengths = [1] * len(order)
    if size > 1:
        is_skipgram = rng.random(len(order)) < skipgram
        sampled_lengths = rng.integers(2, size, size=len(order), endpoint=True)
        lengths = [int(length) if multiple else 1 for multiple, length in zip(is_skipgram, sampled_lengths)]
    budget = min(max(1, round(probability * len(order))), limit or 99) if order else 0
    expected = set()
    for position, length in zip(order, lengths):
        if len(expected) >= budget:
            break
        if position in expected:
            continue
        for index in range(position, position + length):
            if index >= len(is_candidate) or not is_candidate[index]:
                break
            expected.add(index)
    if len(expected) > budget:
        expected = set(rng.choice(sorted(expected), budget, replace=False).tolist())
    assert selected.tolist() == sorted(expected)
    assert len(selected) == budget


def test_skipgrams_of_whole_words():
    words = np.repeat(np.arange(30), 3)
    rule = SkipgramRule(probability=0.5, whole_word=True)
    selected = rule.select(np.ones(90, dtype=bool), words, generator(0, 0, 0))
    word_rule = SkipgramRule(probability=0.5, whole_word=True, skipgram_size=1)
    selected_words = word_rule.select(np.ones(90, dtype=bool), words, generator(0, 0, 0))
    assert len(selected) == len(selected_words) == 45
    assert set(np.bincount(words[selected_words]).tolist()) == {0, 3}, "words of three tokens fill the budget exactly"


@pytest.mark.parametrize("side", ["right", "left"])
def test_masked_targets(tokenizer, monkeypatch, side):
    monkeypatch.setattr(tokenizer, "padding_side", side)
    counts, num_ends = Counter(), 0
    for epoch in range(12):
        objective = MaskedSequenceToSequence(tokenizer, max_length=14, seed=1, max_target_length=5)
        rows = list(objective.examples([*pairs(), TranslatedText(["wa", ""])]))
        statistics = objective.statistics
        assert statistics["left_out"] == 1
        num_text_tokens = sum(len(row["input_ids"]) - 2 + len(row["target_ids"]) - 1 for row in rows)
        assert num_text_tokens + statistics["truncated_tokens"] == statistics["tokens"] + statistics["target_tokens"]
        batch = objective.collate(with_index(rows, epoch))
        for number, row in enumerate(rows):
            source, target = row["input_ids"].tolist(), row["target_ids"].tolist()
            assert (source[0], source[-1], target[-1]) == (CLS, SEP, SEP)
            assert len(target) == 5, "truncated, with the end token"
            assert len(source) == min(8, 14 - 5 - 2) + 2
            is_token = batch["attention_mask"][number] == 1
            assert batch["input_ids"][number][is_token].tolist() == source, "the source is unchanged"
            labels, ids = batch["labels"][number].tolist(), batch["masked_target_ids"][number].tolist()
            assert all(label in (IGNORE_INDEX, original) for label, original in zip(labels, target, strict=True))
            assert all(label != IGNORE_INDEX or new == old for label, new, old in zip(labels, ids, target, strict=True))
            assert sum(label != IGNORE_INDEX for label in labels) == round(0.7 * 4)
            num_ends += labels[4] == SEP
        counts.update(objective.count_batch(batch))
    rates = objective.rates(counts)
    assert rates["predicted_end_share"] == pytest.approx(num_ends / (12 * 40))
    assert rates["predicted_end_share"] == pytest.approx(3 / 5, abs=0.08)
    assert rates["mask_token_share"] == pytest.approx(0.8, abs=0.04)


def test_noisy_targets(tokenizer):
    counts = Counter()
    for epoch in range(10):
        objective = NoisySequenceToSequence(tokenizer, max_length=40, seed=1, noise_probability=0.7)
        rows = list(objective.examples(pairs()))
        batch = objective.collate(with_index(rows, epoch))
        for number, row in enumerate(rows):
            assert batch["labels"][number].tolist() == row["target_ids"].tolist(), "labels are clean"
            assert batch["decoder_input_ids"][number, 0] == CLS
        counts.update(objective.count_batch(batch))
    assert objective.rates(counts)["changed_share"] == pytest.approx(0.7, abs=0.04)
    clean = NoisySequenceToSequence(tokenizer, max_length=40, seed=1, noise_probability=0.0)
    batch = clean.collate(with_index(rows))
    assert torch.equal(batch["decoder_input_ids"][:, 1:], batch["labels"][:, :-1])
    assert "span_ids" not in batch
    span_objective = NoisySequenceToSequence(tokenizer, max_length=40, seed=1, max_span=2)
    rows = list(span_objective.examples([TranslatedText(["wa wb", "wcxaxb wdxa we wfxc wg"])] * 50))
    words, sizes = [0, 0, 0, 1, 1, 2, 3, 3, 4, 5], Counter()
    for spans in span_objective.collate(with_index(rows))["span_ids"].tolist():
        members = {
            span: {word for word, word_span in zip(words, spans, strict=True) if word_span == span} for span in spans
        }
        assert sum(map(len, members.values())) == 6, "a word is in one span"
        assert members[spans[-1]] == {5}, "the end token is a span"
        assert spans == sorted(spans)
        sizes.update(map(len, members.values()))
    assert sizes.keys() == {1, 2}
    with pytest.raises(CtxError, match="no translation"):
        list(clean.examples([["wa wb"]]))


def test_infilling_of_fragments(tokenizer):
    documents, _ = numbered_documents([[12] * 8] * 20)
    objective = Infilling(tokenizer, max_length=64, seed=0, noise_probability=0.0)
    rows = list(objective.examples([*documents, ["wa"]]))
    assert objective.statistics["left_out"] == 1
    batch, run_lengths, shares = objective.collate(with_index(rows)), Counter(), []
    for number, row in enumerate(rows):
        text = row["text_ids"].tolist()
        source = batch["input_ids"][number][batch["attention_mask"][number] == 1].tolist()[1:-1]
        labels = [label for label in batch["labels"][number].tolist() if label != IGNORE_INDEX]
        spans = batch["span_ids"][number].tolist()[: len(labels)]
        assert labels[-1] == SEP
        assert spans[-1] == spans[-2] + 1, "the end token is a span"
        assert sorted(source + labels[:-1]) == text, "no token is lost"
        assert source == sorted(source)
        assert labels[:-1] == sorted(labels[:-1])
        assert set(batch["span_ids"][number].tolist()[len(labels) :]) <= {-1}
        for span in set(spans[:-1]):
            members = [label for label, number in zip(labels, spans) if number == span]
            assert members == list(range(members[0], members[0] + len(members))), "a span lies in one fragment"
            assert len(members) <= 3
        shares.append((len(labels) - 1) / len(text))
        runs = np.split(labels[:-1], np.flatnonzero(np.diff(labels[:-1]) != 1) + 1)
        run_lengths.update(map(len, runs))
    assert np.mean(shares) == pytest.approx(0.25, abs=0.01)
    assert max(run_lengths) > 4
    assert torch.equal(
        batch["decoder_input_ids"][:, 1:], batch["labels"][:, :-1].where(batch["labels"][:, 1:] != -100, 0)
    )
