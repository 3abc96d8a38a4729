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
def test_rows_are_whole_sentences_with_separators_between_documents(tokenizer, shape, max_length):
    """Each token once, a separator where a document ends within a row, and no sentence left that would have fitted."""
    documents, home = numbered_documents(shape)
    lengths = [length for document in shape for length in document]
    starts = dict(zip((np.cumsum(lengths) - lengths).tolist(), lengths))
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
        assert min(row[0], row[-1]) >= 0
        for before, here, after in zip(row, row[1:], row[2:]):
            if here < 0:
                assert home[before] + 1 == home[after]
        assert all(home[a] == home[b] for a, b in pairwise(row.tolist()) if min(a, b) >= 0)
    for row, following in pairwise(rows):
        first = int(following[0])
        if first in starts:  # else a long sentence goes on, whose part before filled its row
            separator = home[first] != home[int(row[-1])]
            assert len(row) + separator + starts[first] > room
    alone = rows_of(tokenizer, documents, max_length, cross_documents=False)
    expected = [row["input_ids"] for row in MaskedLM(tokenizer, max_length=max_length, seed=0).examples(documents)]
    assert [row.tolist() for row in alone] == [(row[1:-1] - FIRST_WORD).tolist() for row in expected]


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
