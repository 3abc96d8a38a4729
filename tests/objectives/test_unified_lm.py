"""UniLM's rows of four kinds and its selection of tokens, and targets that are masked or noisy, against plain loops."""

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numbered_text import indexed, numbered_documents

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


def test_rows_are_what_their_segments_say_and_have_their_shares(tokenizer):
    documents, home = numbered_documents([[3] * 24] * 40)  # rows of whole sentences
    counts, kinds = Counter(), Counter()
    for seed in range(8):
        objective = UnifiedLM(tokenizer, max_length=30, seed=seed, short_seq_probability=0.0)
        rows = list(objective.examples([*documents, ["wa"]]))
        for row in rows:
            types, ids, label = set(row["token_type_ids"].tolist()), row["input_ids"], row["next_sentence_label"]
            ends = np.flatnonzero(ids == SEP)
            parts = [part[part >= FIRST] - FIRST for part in np.split(ids, ends)[: len(ends)]]
            follows = len(parts) == 2 and parts[1][0] == parts[0][-1] + 1
            kind = {(0, 1): 0, (4, 5): 1, (2,): 2, (3,): 3}[tuple(sorted(types))]
            kinds[ATTENTION_PATTERNS[kind]] += 1
            assert len(parts) == (2 if kind < 2 else 1)
            if kind == 0:
                assert label == (0 if follows else 1)
                assert follows == (home[int(parts[0][0])] == home[int(parts[1][0])])
            else:
                assert label == IGNORE_INDEX, "there is no pair to judge"
                assert follows or len(parts) == 1
            if kind == 1:
                assert row["token_type_ids"].tolist() == [4] * (ends[0] + 1) + [5] * (ends[1] - ends[0])
        counts.update(objective.count_batch(objective.collate(indexed(rows))))
    rates = objective.rates(counts)
    total = sum(kinds.values())
    for kind, share in zip(ATTENTION_PATTERNS, (1 / 3, 1 / 3, 1 / 6, 1 / 6)):
        assert rates[f"{kind}_share"] == pytest.approx(kinds[kind] / total)
        # a pair of which only the first sentences are used leaves more rows
        assert kinds[kind] / total == pytest.approx(share, abs=0.04), kind
    assert rates["random_next_share"] == pytest.approx(0.5, abs=0.08)
    assert rates["selected_share"] == pytest.approx(0.15, abs=0.02)


@settings(max_examples=80)
@given(
    free=st.lists(st.booleans(), min_size=1, max_size=60),
    probability=st.floats(0.05, 1),
    skipgram=st.floats(0, 1),
    size=st.integers(1, 4),
    limit=st.one_of(st.none(), st.integers(1, 9)),
    seed=st.integers(0, 10**6),
)
def test_selection_is_the_released_loop(free, probability, skipgram, size, limit, seed):
    """By the draws of the rule, token by token; as many as the budget."""
    rule = SkipgramRule(
        probability=probability, skipgram_probability=skipgram, skipgram_size=size, max_predictions=limit
    )
    candidates = np.array(free)
    got = rule.select(candidates, None, generator(seed, 0, 0))
    rng = generator(seed, 0, 0)
    order = rng.permutation(np.flatnonzero(candidates)).tolist()
    lengths = [1] * len(order)
    if size > 1:
        several = rng.random(len(order)) < skipgram
        sampled_lengths = rng.integers(2, size, size=len(order), endpoint=True)
        lengths = [int(length) if many else 1 for many, length in zip(several, sampled_lengths)]
    budget = min(max(1, round(probability * len(order))), limit or 99) if order else 0
    chosen = set()
    for position, length in zip(order, lengths):
        if len(chosen) >= budget:
            break
        if position in chosen:
            continue
        for index in range(position, position + length):
            if index >= len(free) or not free[index]:
                break
            chosen.add(index)
    if len(chosen) > budget:
        chosen = set(rng.choice(sorted(chosen), budget, replace=False).tolist())
    assert got.tolist() == sorted(chosen)
    assert len(got) == budget


def test_runs_of_whole_words():
    words = np.repeat(np.arange(30), 3)
    rule = SkipgramRule(probability=0.5, whole_word=True)
    selected = rule.select(np.ones(90, dtype=bool), words, generator(0, 0, 0))
    whole = SkipgramRule(probability=0.5, whole_word=True, skipgram_size=1)
    words_only = whole.select(np.ones(90, dtype=bool), words, generator(0, 0, 0))
    assert len(selected) == len(words_only) == 45
    assert set(np.bincount(words[words_only]).tolist()) == {0, 3}, "words of three tokens fill the budget exactly"


@pytest.mark.parametrize("side", ["right", "left"])
def test_masked_targets(tokenizer, monkeypatch, side):
    monkeypatch.setattr(tokenizer, "padding_side", side)
    counts, ends = Counter(), 0
    for epoch in range(12):
        objective = MaskedSequenceToSequence(tokenizer, max_length=14, seed=1, max_target_length=5)
        rows = list(objective.examples([*pairs(), TranslatedText(["wa", ""])]))
        assert objective.statistics["left_out"] == 1
        batch = objective.collate(indexed(rows, epoch))
        for number, row in enumerate(rows):
            source, target = row["input_ids"].tolist(), row["target_ids"].tolist()
            assert (source[0], source[-1], target[-1]) == (CLS, SEP, SEP)
            assert len(target) == 5, "cut, its end kept"
            assert len(source) == min(8, 14 - 5 - 2) + 2
            real = batch["attention_mask"][number] == 1
            assert batch["input_ids"][number][real].tolist() == source, "nothing of the source is changed"
            labels, ids = batch["labels"][number].tolist(), batch["masked_target_ids"][number].tolist()
            assert all(label in (IGNORE_INDEX, original) for label, original in zip(labels, target))
            assert all(label != IGNORE_INDEX or new == old for label, new, old in zip(labels, ids, target))
            assert sum(label != IGNORE_INDEX for label in labels) == round(0.7 * 4)
            ends += labels[4] == SEP
        counts.update(objective.count_batch(batch))
    rates = objective.rates(counts)
    assert rates["predicted_end_share"] == pytest.approx(ends / (12 * 40))
    assert rates["predicted_end_share"] == pytest.approx(3 / 5, abs=0.08)
    assert rates["mask_token_share"] == pytest.approx(0.8, abs=0.04)


def test_noisy_targets(tokenizer):
    counts = Counter()
    for epoch in range(10):
        objective = NoisySequenceToSequence(tokenizer, max_length=40, seed=1, noise_probability=0.7)
        rows = list(objective.examples(pairs()))
        batch = objective.collate(indexed(rows, epoch))
        for number, row in enumerate(rows):
            assert batch["labels"][number].tolist() == row["target_ids"].tolist(), "labels are clean"
            assert batch["decoder_input_ids"][number, 0] == CLS
        counts.update(objective.count_batch(batch))
    assert objective.rates(counts)["changed_share"] == pytest.approx(0.7, abs=0.04)
    clean = NoisySequenceToSequence(tokenizer, max_length=40, seed=1, noise_probability=0.0)
    batch = clean.collate(indexed(rows))
    assert torch.equal(batch["decoder_input_ids"][:, 1:], batch["labels"][:, :-1])
    assert "span_ids" not in batch
    whole = NoisySequenceToSequence(tokenizer, max_length=40, seed=1, max_span=2)
    rows = list(whole.examples([TranslatedText(["wa wb", "wcxaxb wdxa we wfxc wg"])] * 50))
    words, sizes = [0, 0, 0, 1, 1, 2, 3, 3, 4, 5], Counter()
    for spans in whole.collate(indexed(rows))["span_ids"].tolist():
        members = {
            span: {word for word, word_span in zip(words, spans, strict=True) if word_span == span} for span in spans
        }
        assert sum(map(len, members.values())) == 6, "a word is in one span"
        assert members[spans[-1]] == {5}, "the end is a span of its own"
        assert spans == sorted(spans)
        sizes.update(map(len, members.values()))
    assert sizes.keys() == {1, 2}
    with pytest.raises(CtxError, match="no translation"):
        list(clean.examples([["wa wb"]]))


def test_infilling_takes_fragments_out(tokenizer):
    documents, _ = numbered_documents([[12] * 8] * 20)
    objective = Infilling(tokenizer, max_length=64, seed=0, noise_probability=0.0)
    rows = list(objective.examples([*documents, ["wa"]]))
    assert objective.statistics["left_out"] == 1
    batch, lengths, shares = objective.collate(indexed(rows)), Counter(), []
    for number, row in enumerate(rows):
        text = row["text_ids"].tolist()
        source = batch["input_ids"][number][batch["attention_mask"][number] == 1].tolist()[1:-1]
        labels = [label for label in batch["labels"][number].tolist() if label != IGNORE_INDEX]
        spans = batch["span_ids"][number].tolist()[: len(labels)]
        assert labels[-1] == SEP
        assert spans[-1] == spans[-2] + 1, "the end is a span of its own"
        assert sorted(source + labels[:-1]) == text, "numbers ascend: nothing is lost, and both keep their order"
        assert source == sorted(source)
        assert labels[:-1] == sorted(labels[:-1])
        assert set(batch["span_ids"][number].tolist()[len(labels) :]) <= {-1}
        for span in set(spans[:-1]):
            members = [label for label, number in zip(labels, spans) if number == span]
            assert members == list(range(members[0], members[0] + len(members))), "a span lies in one fragment"
            assert len(members) <= 3
        shares.append((len(labels) - 1) / len(text))
        runs = np.split(labels[:-1], np.flatnonzero(np.diff(labels[:-1]) != 1) + 1)
        lengths.update(map(len, runs))
    assert np.mean(shares) == pytest.approx(0.25, abs=0.01)
    assert max(lengths) > 4
    assert torch.equal(
        batch["decoder_input_ids"][:, 1:], batch["labels"][:, :-1].where(batch["labels"][:, 1:] != -100, 0)
    )
