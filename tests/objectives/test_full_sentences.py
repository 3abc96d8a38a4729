"""Rows of RoBERTa's masked language modelling: whole sentences across the ends of documents, masked dynamically."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numbered_text import numbered_documents, word

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.objectives.masked_lm import FullSentences, MaskedLM

FIRST_WORD = 5
shapes = st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=8), min_size=1, max_size=6)


def rows_of(tokenizer, documents, max_length, **options):
    """Text of each row without the special tokens around it: numbers of words, -1 for a separator."""
    objective = FullSentences(tokenizer, max_length=max_length, seed=0, **options)
    rows = [row["input_ids"] for row in objective.examples(documents)]
    assert all((row[0], row[-1]) == (tokenizer.cls_token_id, tokenizer.sep_token_id) for row in rows)
    return [np.where(row == tokenizer.sep_token_id, -1, row - FIRST_WORD)[1:-1] for row in rows]


@settings(deadline=None)
@given(shape=shapes, max_length=st.integers(3, 40))
def test_rows_hold_each_token_once_and_break_between_sentences(tokenizer, shape, max_length):
    documents, home = numbered_documents(shape)
    room = max_length - 2
    ends = {int(end) for end in np.cumsum([length for lengths in shape for length in lengths]) - 1}
    rows = rows_of(tokenizer, documents, max_length)
    text = np.concatenate(rows)
    assert text[text >= 0].tolist() == list(range(len(home))), "every token once, in order"
    for row in rows:
        assert 1 <= len(row) <= room
        if int(row[-1]) not in ends:  # broken inside a sentence: only one longer than a row, alone, at its limit
            assert len(row) == room
            assert not ends & set(row.tolist())


@settings(deadline=None)
@given(shape=shapes, max_length=st.integers(3, 40))
def test_a_separator_stands_where_a_document_ends_within_a_row_and_nowhere_else(tokenizer, shape, max_length):
    documents, home = numbered_documents(shape)
    for row in rows_of(tokenizer, documents, max_length):
        assert row[0] >= 0
        assert row[-1] >= 0
        for before, here, after in zip(row, row[1:], row[2:]):
            if here < 0:
                assert home[before] + 1 == home[after]
        inside = [(a, b) for a, b in zip(row.tolist(), row[1:].tolist()) if min(a, b) >= 0]
        assert all(home[a] == home[b] for a, b in inside)


@settings(deadline=None)
@given(shape=shapes, max_length=st.integers(3, 40))
def test_a_row_ends_only_where_the_next_sentence_does_not_fit(tokenizer, shape, max_length):
    documents, home = numbered_documents(shape)
    lengths = [length for document in shape for length in document]
    starts = dict(zip((np.cumsum(lengths) - lengths).tolist(), lengths))
    rows = rows_of(tokenizer, documents, max_length)
    for row, following in pairwise(rows):
        first = int(following[0])
        if first in starts:  # else a long sentence goes on, whose part before filled its row
            separator = home[first] != home[int(row[-1])]
            assert len(row) + separator + starts[first] > max_length - 2


@settings(deadline=None)
@given(shape=shapes, max_length=st.integers(3, 40))
def test_doc_sentences_are_the_rows_of_masked_lm(tokenizer, shape, max_length):
    documents, _ = numbered_documents(shape)
    rows = rows_of(tokenizer, documents, max_length, cross_documents=False)
    expected = [row["input_ids"] for row in MaskedLM(tokenizer, max_length=max_length, seed=0).examples(documents)]
    assert [row.tolist() for row in rows] == [(row[1:-1] - FIRST_WORD).tolist() for row in expected]


def batch_of(objective, rows, epoch):
    return objective.collate([{**row, "example_index": index, "epoch": epoch} for index, row in enumerate(rows)])


@settings(deadline=None, max_examples=30)
@given(shape=shapes, max_length=st.integers(8, 40), whole_word=st.booleans(), seed=st.integers(0, 5))
def test_masks_spare_special_tokens_and_are_drawn_anew_every_epoch(tokenizer, shape, max_length, whole_word, seed):
    documents, _ = numbered_documents(shape)
    options = {"max_length": max_length, "seed": seed, "whole_word": whole_word}
    objective, again = (FullSentences(tokenizer, **options) for _ in range(2))
    rows = list(objective.examples(documents))
    first, same = batch_of(objective, rows, 0), batch_of(again, list(again.examples(iter(documents))), 0)
    assert all((first[name] == same[name]).all() for name in first), "the same rows and masks for the same seed"
    special = np.isin(np.concatenate([row["input_ids"] for row in rows]), tokenizer.all_special_ids)
    tokens = first["attention_mask"].bool()
    assert (first["labels"][tokens][special] == -100).all()
    assert (first["input_ids"][tokens] == 4)[special].sum() == 0, "no mask token in a special one's place"
    originals = first["input_ids"].where(first["labels"] == -100, first["labels"])
    assert originals[tokens].tolist() == np.concatenate([row["input_ids"] for row in rows]).tolist()
    later = [batch_of(objective, rows, epoch)["labels"] for epoch in range(1, 5)]
    if len(special) - special.sum() > 20:
        assert any((labels != first["labels"]).any() for labels in later)


def test_static_masks_stay(tokenizer):
    documents, _ = numbered_documents([[12, 9], [20]])
    objective = FullSentences(tokenizer, max_length=64, seed=0, static=True)
    rows = list(objective.examples(documents))
    assert (batch_of(objective, rows, 0)["labels"] == batch_of(objective, rows, 3)["labels"]).all()


def test_word_ids_go_along_and_a_separator_is_no_word(tokenizer):
    objective = FullSentences(tokenizer, max_length=32, seed=0, whole_word=True)
    (row,) = objective.examples([["waxaxb wb", "wcxd"], ["we"]])
    tokens = ["[CLS]", "wa", "##xa", "##xb", "wb", "wc", "##xd", "[SEP]", "we", "[SEP]"]
    assert tokenizer.convert_ids_to_tokens(row["input_ids"]) == tokens
    assert row["word_ids"].tolist() == [-1, 0, 0, 0, 1, 2, 2, -1, 0, -1]


def test_statistics_and_documents_without_tokens(tokenizer):
    objective = FullSentences(tokenizer, max_length=32, seed=0)
    (row,) = objective.examples([["\u200b"], [word(1)], ["\u200b", word(2)]])
    assert row["input_ids"].tolist() == [2, FIRST_WORD + 1, 3, FIRST_WORD + 2, 3]
    assert objective.statistics == {"documents": 3, "sentences": 2, "tokens": 2}


def test_a_tokenizer_without_a_separator_is_refused(trailing_tokenizer):
    trailing_tokenizer = type(trailing_tokenizer)(vocab=[("<unk>", -1.0), ("<mask>", -1.0), ("▁a", -1.0)])
    trailing_tokenizer.sep_token = None
    trailing_tokenizer.backend_tokenizer.post_processor = None
    with pytest.raises(CtxError, match="no sep_token"):
        list(FullSentences(trailing_tokenizer, max_length=8, seed=0).examples([["a"]]))
