"""Sentence order prediction: segment pairs in order or swapped, documents of one segment, and labels."""

from collections import Counter
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from numbered_text import NUM_WORDS, assert_contiguous, make_examples, split_segments, with_index
from transformers import AlbertConfig, AlbertForPreTraining

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.objectives import MaskedLMWithNextSentence, MaskedLMWithSentenceOrder
from hf_ctxmodels.objectives.masking import IGNORE_INDEX
from hf_ctxmodels.objectives.sentence_pairs import SWAPPED, OneSegment, SentenceTask
from hf_ctxmodels.objectives.tokenized_documents import sentence_chunks

shapes = st.lists(st.lists(st.integers(1, 12), min_size=1, max_size=12), min_size=2, max_size=6)


@given(
    shape=shapes,
    max_length=st.integers(5, 48),
    seed=st.integers(0, 10**6),
    one_segment=st.sampled_from(get_args(OneSegment)),
    short=st.sampled_from([0.0, 0.1, 1.0]),
)
def test_segments_are_adjacent(tokenizer, shape, max_length, seed, one_segment, short):
    assume(sum(map(sum, shape)) < NUM_WORDS)
    options = {"one_segment": one_segment, "short_seq_probability": short}
    objective, document_of, examples = make_examples(
        MaskedLMWithSentenceOrder, tokenizer, shape, 1, max_length, seed, **options
    )
    word_counts, num_unpaired = Counter(), 0
    for example in examples:
        pair, label = split_segments(example), example["sentence_order_label"]
        assert len(example["input_ids"]) <= max_length
        assert_contiguous(pair, document_of)
        word_counts.update(pair[0].tolist())
        document_ids = [document_of[int(part[0])] for part in pair]
        if len(pair) == 1:
            assert (label, one_segment) == (IGNORE_INDEX, "unlabeled")
            num_unpaired += 1
        elif document_ids[0] != document_ids[1]:
            assert (label, one_segment) == (SWAPPED, "random")
            num_unpaired += 1
        else:
            first, second = pair[::-1] if label == SWAPPED else pair
            assert label in (0, SWAPPED)
            assert first[-1] < second[0]
            if len(example["input_ids"]) < max_length:
                assert second[0] == first[-1] + 1, "without truncation, the segments are adjacent"
            word_counts.update(pair[1].tolist())
    statistics = objective.statistics
    assert word_counts.total() <= len(document_of)
    assert max(word_counts.values(), default=1) == 1, "no token is used twice"
    excluded = statistics["truncated_tokens"] + statistics["dropped_tokens"]
    assert word_counts.total() + excluded == len(document_of), "each token once, truncated or dropped"
    if one_segment == "drop":
        assert bool(statistics["dropped_tokens"]) == bool(statistics["one_segment_chunks"])
    else:
        assert statistics["one_segment_chunks"] == num_unpaired
        assert not statistics["dropped_tokens"]


def test_half_of_pairs_are_swapped(tokenizer):
    _, _, examples = make_examples(MaskedLMWithSentenceOrder, tokenizer, [[3] * 240] * 4, passes=20)
    labels = [row["sentence_order_label"] for row in examples if row["sentence_order_label"] != IGNORE_INDEX]
    assert len(labels) > 2500
    assert np.mean(labels) == pytest.approx(0.5, abs=5 * 0.5 / len(labels) ** 0.5)


def test_segment_lengths_do_not_reveal_order(tokenizer):
    """Sentences at the length limit are long; always assigning them to the second segment would reveal the order."""
    lengths = np.random.default_rng(0).integers(2, 12, size=(20, 20)).tolist()
    _, _, examples = make_examples(MaskedLMWithSentenceOrder, tokenizer, lengths, passes=60)
    rows = [(row["sentence_order_label"], *map(len, split_segments(row))) for row in examples]
    labeled = [(label, first > second) for label, first, second in (row for row in rows if row[0] != IGNORE_INDEX)]
    accuracy = np.mean([label == first_is_longer for label, first_is_longer in labeled])
    assert len(labeled) > 8000
    assert accuracy == pytest.approx(0.5, abs=0.025)


@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=40), target=st.integers(2, 60), from_end=st.booleans())
def test_sentence_chunks(lengths, target, from_end):
    bounds = np.concatenate([[0], np.cumsum(lengths)])
    chunks = sentence_chunks(bounds, target, from_end)
    assert [sentence for first, last in chunks for sentence in range(first, last)] == list(range(len(lengths)))
    single = [index for index, (first, last) in enumerate(chunks) if last - first == 1]
    assert single in ([], [0 if from_end else len(chunks) - 1]), "only the remainder may have one sentence"
    for first, last in chunks:
        assert last - first <= 2 or sum(lengths[first:last]) <= target
        following = first - 1 if from_end else last
        if 0 <= following < len(lengths):
            assert last - first >= 2
            assert sum(lengths[first:last]) + lengths[following] > target, "one more sentence would have fit"


@pytest.mark.parametrize(
    ("one_segment", "labels", "rates"),
    [("unlabeled", [IGNORE_INDEX] * 3, (0.0, 0.0)), ("random", [1] * 3, (1.0, 1.0)), ("drop", [], None)],
)
def test_documents_of_one_segment(tokenizer, one_segment, labels, rates):
    objective, _, examples = make_examples(
        MaskedLMWithSentenceOrder, tokenizer, [[5], [6], [7]], one_segment=one_segment
    )
    assert [row["sentence_order_label"] for row in examples] == labels
    assert objective.statistics["one_segment_chunks"] == 3
    assert objective.statistics["dropped_tokens"] == (18 if one_segment == "drop" else 0)
    if rates is not None:
        batch = objective.collate(with_index(examples))
        actual = objective.rates(objective.count_batch(batch))
        assert (actual["swapped_share"], actual["labeled_share"]) == rates


def test_random_segments_require_two_documents(tokenizer):
    assert len(make_examples(MaskedLMWithSentenceOrder, tokenizer, [[5, 6, 7]])[2]) >= 1
    with pytest.raises(CtxError, match="only one document"):
        make_examples(MaskedLMWithSentenceOrder, tokenizer, [[5, 6, 7]], one_segment="random")


@pytest.mark.parametrize("ngram", [1, 3])
def test_batch_matches_transformers_head(tokenizer, ngram):
    shape = [[4] * 6, [3], [5, 5, 9]]
    objective, _, examples = make_examples(MaskedLMWithSentenceOrder, tokenizer, shape, ngram=ngram, max_predictions=20)
    batch = objective.collate(with_index(examples))
    assert batch["sentence_order_label"].tolist() == [row["sentence_order_label"] for row in examples]
    counts = objective.count_batch(batch)
    labeled = batch["sentence_order_label"] != IGNORE_INDEX
    assert counts["labeled_pairs"] == labeled.sum() < counts["examples"] == len(examples)
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    reference = AlbertForPreTraining(AlbertConfig(vocab_size=len(tokenizer), embedding_size=8, **shape))
    assert torch.isfinite(reference(**batch).loss)


def without_label(objective, example):
    return {name: np.asarray(value).tolist() for name, value in example.items() if name != objective.label}


@pytest.mark.parametrize("task", get_args(SentenceTask))
def test_objectives_yield_same_pairs_for_each_task(tokenizer, task):
    """BERT can be trained on the pairs of ALBERT and vice versa; only the name of the label differs."""
    shape = [[4] * 30, [5], [3] * 17]
    results = [
        make_examples(objective_class, tokenizer, shape, passes=3, sentence_task=task)
        for objective_class in (MaskedLMWithNextSentence, MaskedLMWithSentenceOrder)
    ]
    (first, document_of, first_examples), (second, _, second_examples) = results
    assert len(first_examples) >= 30
    assert [without_label(first, row) for row in first_examples] == [
        without_label(second, row) for row in second_examples
    ]
    labels = [row[first.label] for row in first_examples]
    assert labels == [row[second.label] for row in second_examples]
    for row, label in zip(first_examples, labels, strict=True):
        pair = split_segments(row)
        same_document = len({document_of[int(part[0])] for part in pair}) == 1
        if task == "none" or len(pair) == 1:
            assert (label, same_document) == (IGNORE_INDEX, True)
        elif task == "next":
            assert label == int(not same_document)
        else:
            assert same_document
            assert label == int(pair[0][0] > pair[1][0])
    features = with_index(second_examples)
    rates = second.rates(second.count_batch(second.collate(features)))
    names = {"next": "random_next_share", "order": "swapped_share", "none": None}
    assert {name for name in rates if name in ("random_next_share", "swapped_share")} == {names[task]} - {None}
    assert rates["labeled_share"] == pytest.approx(np.mean([label != IGNORE_INDEX for label in labels]))


def test_unlabeled_task_uses_text_of_order_task(tokenizer):
    shape = [[4] * 30, [5], [3] * 17]
    texts = []
    for task in ("order", "none"):
        _, _, examples = make_examples(MaskedLMWithSentenceOrder, tokenizer, shape, sentence_task=task)
        texts.append([sorted(np.concatenate(split_segments(row)).tolist()) for row in examples])
    assert texts[0] == texts[1]
