"""Segment pairs of documents: contents, random second segments, truncation and lengths."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from numbered_text import NUM_WORDS, assert_contiguous, numbered_documents, split_segments, with_index, word

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.data import build_training_set
from hf_ctxmodels.objectives import MaskedLMWithNextSentence, tokenized_documents
from hf_ctxmodels.objectives import sentence_pairs as pairs

shapes = st.lists(st.lists(st.integers(1, 12), min_size=1, max_size=12), min_size=2, max_size=6)


@given(shape=shapes, max_length=st.integers(5, 48), seed=st.integers(0, 10**6), short=st.sampled_from([0.0, 0.1, 1.0]))
def test_segments_are_contiguous(tokenizer, shape, max_length, seed, short):
    assume(sum(map(sum, shape)) < NUM_WORDS)
    documents, document_of = numbered_documents(shape)
    objective = MaskedLMWithNextSentence(tokenizer, max_length=max_length, seed=seed, short_seq_probability=short)
    word_counts = Counter()
    for example in objective.examples(documents):
        a, b = split_segments(example)
        assert len(example["input_ids"]) <= max_length
        assert_contiguous((a, b), document_of)
        word_counts.update(a.tolist())
        if example["next_sentence_label"] == pairs.CONTINUATION:
            assert document_of[int(a[0])] == document_of[int(b[0])]
            assert a[-1] < b[0], "B follows A"
            word_counts.update(b.tolist())
            if len(example["input_ids"]) < max_length:
                assert b[0] == a[-1] + 1, "without truncation, B starts where A ends"
        else:
            assert example["next_sentence_label"] == pairs.RANDOM
            assert document_of[int(a[0])] != document_of[int(b[0])], "a random segment is from another document"
    truncated = objective.statistics["truncated_tokens"]
    if not truncated:
        assert word_counts == Counter(document_of.keys()), "each sentence once; those replaced by a random B are reused"
    assert max(word_counts.values()) == 1
    assert objective.statistics["tokens"] == len(document_of)
    assert word_counts.total() + truncated == len(document_of), "truncated tokens of random segments are not counted"


def test_single_sentence_documents(tokenizer, capsys):
    """Documents of one sentence yield only random pairs, with a warning."""
    objective = MaskedLMWithNextSentence(tokenizer, max_length=24, seed=0)
    examples = build_training_set(numbered_documents([[3]] * 8)[0], objective)
    assert {example["next_sentence_label"] for example in examples} == {pairs.RANDOM}
    assert "every document is a single sentence" in capsys.readouterr().err


@given(a=st.integers(1, 60), b=st.integers(1, 60), room=st.integers(2, 60), seed=st.integers(0, 99))
def test_truncation_shortens_longer_segment(a, b, room, seed):
    assume(a + b > room)
    first, second = pairs.Segment(None, 0, a), pairs.Segment(None, 100, 100 + b)
    cut_a, cut_b = pairs._truncate((first, second), a + b - room, np.random.default_rng(seed))
    while a + b > room:  # as in the released data preparation, token by token
        if a > b:
            a -= 1
        else:
            b -= 1
    assert (len(cut_a), len(cut_b)) == (a, b)
    assert 0 <= cut_a.start <= cut_a.stop <= first.stop
    assert 100 <= cut_b.start <= cut_b.stop <= second.stop


def test_truncation_removes_tokens_at_both_ends():
    rng = np.random.default_rng(0)
    starts = [pairs.Segment(None, 0, 100).truncate(40, rng).start for _ in range(500)]
    assert np.mean(starts) == pytest.approx(20, abs=5 * 10**0.5 / 500**0.5)
    assert min(starts) >= 0
    assert max(starts) <= 40


def test_half_of_second_segments_are_random(tokenizer):
    documents, _ = numbered_documents([[3] * 240] * 4)
    objective = MaskedLMWithNextSentence(tokenizer, max_length=24, seed=0)
    rows = [row for epoch in range(20) for row in objective.examples(documents, epoch)]
    labels = [row["next_sentence_label"] for row in rows]
    assert np.mean(labels) == pytest.approx(0.5, abs=5 * 0.5 / len(labels) ** 0.5)
    batch = objective.collate(with_index(rows))
    assert batch["next_sentence_label"].tolist() == labels
    counts = objective.count_batch(batch)
    assert counts["examples"] == len(rows)
    assert objective.rates(counts)["random_next_share"] == np.mean(labels)


def test_single_sentence_gets_random_second_segment(tokenizer):
    documents, _ = numbered_documents([[5], [6], [7]])
    objective = MaskedLMWithNextSentence(tokenizer, max_length=32, seed=0)
    labels = [example["next_sentence_label"] for example in objective.examples(documents)]
    assert labels == [1] * 3, "1 is a random segment, as in BertForPreTraining of transformers"


def test_random_documents_are_uniform(tokenizer):
    documents, document_of = numbered_documents([[5]] * 5)
    objective = MaskedLMWithNextSentence(tokenizer, max_length=32, seed=0)
    pair_counts = Counter()
    for epoch in range(500):
        for example in objective.examples(documents, epoch):
            a, b = split_segments(example)
            pair_counts[document_of[int(a[0])], document_of[int(b[0])]] += 1
    assert len(pair_counts) == 20
    assert max(abs(count - 125) for count in pair_counts.values()) < 5 * (500 * 0.25 * 0.75) ** 0.5


def test_probability_of_short_rows(tokenizer):
    documents, _ = numbered_documents([[2] * 20] * 60)

    def share_of_short_documents(probability):
        objective = MaskedLMWithNextSentence(tokenizer, max_length=23, seed=0, short_seq_probability=probability)
        lengths = {}
        for epoch in range(10):
            for example in objective.examples(documents, epoch):
                a, b = split_segments(example)
                if example["next_sentence_label"] == pairs.CONTINUATION and b[-1] % 40 != 39:
                    lengths[epoch, int(a[0]) // 40] = len(a) + len(b)
        return np.mean([length < 20 for length in lengths.values()])

    never, seldom, always = map(share_of_short_documents, (0.0, 0.1, 1.0))
    assert never == 0
    assert 0.03 < seldom < 0.17
    assert always > 0.7


def test_pairing_across_batches_of_documents(tokenizer, monkeypatch):
    """With batches of three documents, the seventh document, alone in its batch, is paired with another one."""
    monkeypatch.setattr(tokenized_documents, "DOCUMENTS_PER_BATCH", 3)
    documents, document_of = numbered_documents([[4] * 3] * 7)
    objective = MaskedLMWithNextSentence(tokenizer, max_length=24, seed=0)
    first_documents = {document_of[int(split_segments(example)[0][0])] for example in objective.examples(documents)}
    assert first_documents == set(range(7))


def test_single_document_raises(tokenizer):
    objective = MaskedLMWithNextSentence(tokenizer, max_length=24, seed=0)
    for documents in ([[word(1)]], [[word(1)], ["\u200b"]]):
        with pytest.raises(CtxError, match="only one document"):
            list(objective.examples(documents))
