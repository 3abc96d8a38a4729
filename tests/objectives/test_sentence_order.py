"""Pairs in order and swapped: what they hold, what becomes of text without a pair, and what is drawn."""

from collections import Counter
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numbered_text import WORDS, check_runs, examples_of, indexed, segments
from transformers import AlbertConfig, AlbertForPreTraining

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.objectives import MaskedLMWithNextSentence, MaskedLMWithSentenceOrder
from hf_ctxmodels.objectives.masking import IGNORE_INDEX
from hf_ctxmodels.objectives.sentence_pairs import SWAPPED, OneSegment, SentenceTask
from hf_ctxmodels.objectives.tokenized_documents import sentence_chunks

shapes = st.lists(st.lists(st.integers(1, 12), min_size=1, max_size=12), min_size=2, max_size=6)


@settings(max_examples=150)
@given(
    shape=shapes,
    max_length=st.integers(5, 48),
    seed=st.integers(0, 10**6),
    one_segment=st.sampled_from(get_args(OneSegment)),
    short=st.sampled_from([0.0, 0.1, 1.0]),
)
def test_segments_are_neighbors_of_one_document(tokenizer, shape, max_length, seed, one_segment, short):
    assume(sum(map(sum, shape)) < WORDS)
    options = {"one_segment": one_segment, "short_seq_probability": short}
    objective, home, examples = examples_of(MaskedLMWithSentenceOrder, tokenizer, shape, 1, max_length, seed, **options)
    used, alone = Counter(), 0
    for example in examples:
        parts, label = segments(example), example["sentence_order_label"]
        assert len(example["input_ids"]) <= max_length
        check_runs(parts, home)
        used.update(parts[0].tolist())
        homes = [home[int(part[0])] for part in parts]
        if len(parts) == 1:
            assert (label, one_segment) == (IGNORE_INDEX, "unlabeled")
            alone += 1
        elif homes[0] != homes[1]:
            assert (label, one_segment) == (SWAPPED, "random")
            alone += 1
        else:
            first, second = parts[::-1] if label == SWAPPED else parts
            assert label in (0, SWAPPED)
            assert first[-1] < second[0]
            if len(example["input_ids"]) < max_length:
                assert second[0] == first[-1] + 1, "nothing was cut, so the segments are neighbors"
            used.update(parts[1].tolist())
    statistics = objective.statistics
    assert used.total() <= len(home)
    assert max(used.values(), default=1) == 1, "no token of the text twice"
    if not statistics["truncated_tokens"]:
        assert used.total() + statistics["dropped_tokens"] == len(home), "every token once, or dropped and counted"
    if one_segment == "drop":
        assert bool(statistics["dropped_tokens"]) == bool(statistics["one_segment_chunks"])
    else:
        assert statistics["one_segment_chunks"] == alone
        assert not statistics["dropped_tokens"]


def test_half_of_the_pairs_are_swapped(tokenizer):
    _, _, examples = examples_of(MaskedLMWithSentenceOrder, tokenizer, [[3] * 240] * 4, passes=20)
    labels = [row["sentence_order_label"] for row in examples if row["sentence_order_label"] != IGNORE_INDEX]
    assert len(labels) > 2500
    assert np.mean(labels) == pytest.approx(0.5, abs=5 * 0.5 / len(labels) ** 0.5)


def test_the_longer_segment_does_not_betray_the_order(tokenizer):
    """A sentence at a limit is longer than others; a rule that puts it always into the second segment would tell."""
    lengths = np.random.default_rng(0).integers(2, 12, size=(20, 20)).tolist()
    _, _, examples = examples_of(MaskedLMWithSentenceOrder, tokenizer, lengths, passes=60)
    rows = [(row["sentence_order_label"], *map(len, segments(row))) for row in examples]
    differing = [(label, first > second) for label, first, second in (row for row in rows if row[0] != IGNORE_INDEX)]
    guessed = np.mean([label == longer for label, longer in differing])
    assert len(differing) > 8000
    assert guessed == pytest.approx(0.5, abs=0.025)


@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=40), target=st.integers(2, 60), from_end=st.booleans())
def test_chunks_are_as_many_sentences_as_fit_but_two(lengths, target, from_end):
    bounds = np.concatenate([[0], np.cumsum(lengths)])
    chunks = sentence_chunks(bounds, target, from_end)
    assert [sentence for first, last in chunks for sentence in range(first, last)] == list(range(len(lengths)))
    alone = [index for index, (first, last) in enumerate(chunks) if last - first == 1]
    assert alone in ([], [0 if from_end else len(chunks) - 1]), "only what is left over may be one sentence"
    for first, last in chunks:
        assert last - first <= 2 or sum(lengths[first:last]) <= target
        following = first - 1 if from_end else last
        if 0 <= following < len(lengths):
            assert last - first >= 2
            assert sum(lengths[first:last]) + lengths[following] > target, "one more would have fitted"


@pytest.mark.parametrize(
    ("one_segment", "labels", "rates"),
    [("unlabeled", [IGNORE_INDEX] * 3, (0.0, 0.0)), ("random", [1] * 3, (1.0, 1.0)), ("drop", [], None)],
)
def test_documents_of_one_segment_are_treated_as_asked_and_counted(tokenizer, one_segment, labels, rates):
    objective, _, examples = examples_of(MaskedLMWithSentenceOrder, tokenizer, [[5], [6], [7]], one_segment=one_segment)
    assert [row["sentence_order_label"] for row in examples] == labels
    assert objective.statistics["one_segment_chunks"] == 3
    assert objective.statistics["dropped_tokens"] == (18 if one_segment == "drop" else 0)
    if rates is not None:
        batch = objective.collate(indexed(examples))
        realized = objective.rates(objective.count_batch(batch))
        assert (realized["swapped_share"], realized["labeled_share"]) == rates


def test_only_random_segments_need_a_second_document(tokenizer):
    assert len(examples_of(MaskedLMWithSentenceOrder, tokenizer, [[5, 6, 7]])[2]) >= 1
    with pytest.raises(CtxError, match="only one document"):
        examples_of(MaskedLMWithSentenceOrder, tokenizer, [[5, 6, 7]], one_segment="random")


@pytest.mark.parametrize("ngram", [1, 3])
def test_batches_name_what_the_head_takes(tokenizer, ngram):
    shape = [[4] * 6, [3], [5, 5, 9]]
    objective, _, examples = examples_of(MaskedLMWithSentenceOrder, tokenizer, shape, ngram=ngram, max_predictions=20)
    batch = objective.collate(indexed(examples))
    assert batch["sentence_order_label"].tolist() == [row["sentence_order_label"] for row in examples]
    counts = objective.count_batch(batch)
    labeled = batch["sentence_order_label"] != IGNORE_INDEX
    assert counts["labeled_pairs"] == labeled.sum() < counts["examples"] == len(examples)
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    upstream = AlbertForPreTraining(AlbertConfig(vocab_size=len(tokenizer), embedding_size=8, **shape))
    assert torch.isfinite(upstream(**batch).loss)


def without_label(objective, example):
    return {name: np.asarray(value).tolist() for name, value in example.items() if name != objective.label}


@pytest.mark.parametrize("task", get_args(SentenceTask))
def test_both_objectives_make_the_pairs_of_either_task(tokenizer, task):
    """The network of BERT can be trained on the pairs of ALBERT, and the reverse; only the label's name differs."""
    shape = [[4] * 30, [5], [3] * 17]
    both = [
        examples_of(objective_class, tokenizer, shape, passes=3, sentence_task=task)
        for objective_class in (MaskedLMWithNextSentence, MaskedLMWithSentenceOrder)
    ]
    (first, home, first_examples), (second, _, second_examples) = both
    assert len(first_examples) >= 30
    assert [without_label(first, row) for row in first_examples] == [
        without_label(second, row) for row in second_examples
    ]
    labels = [row[first.label] for row in first_examples]
    assert labels == [row[second.label] for row in second_examples]
    for row, label in zip(first_examples, labels, strict=True):
        parts = segments(row)
        is_one_document = len({home[int(part[0])] for part in parts}) == 1
        if task == "none" or len(parts) == 1:
            assert (label, is_one_document) == (IGNORE_INDEX, True)
        elif task == "next":
            assert label == int(not is_one_document)
        else:
            assert is_one_document
            assert label == int(parts[0][0] > parts[1][0])
    features = indexed(second_examples)
    rates = second.rates(second.count_batch(second.collate(features)))
    names = {"next": "random_next_share", "order": "swapped_share", "none": None}
    assert {name for name in rates if name in ("random_next_share", "swapped_share")} == {names[task]} - {None}
    assert rates["labeled_share"] == pytest.approx(np.mean([label != IGNORE_INDEX for label in labels]))


def test_the_task_without_a_label_takes_the_text_of_the_order_task(tokenizer):
    shape = [[4] * 30, [5], [3] * 17]
    texts = []
    for task in ("order", "none"):
        _, _, examples = examples_of(MaskedLMWithSentenceOrder, tokenizer, shape, sentence_task=task)
        texts.append([sorted(np.concatenate(segments(row)).tolist()) for row in examples])
    assert texts[0] == texts[1]
