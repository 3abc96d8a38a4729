"""Rows of masked language modeling: sentences of one or several documents, and packed rows."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numbered_text import numbered_documents, with_index, word

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.objectives import FullSentences, MaskedLM
from hf_ctxmodels.objectives.tokenized_documents import pack_sequences

FIRST_WORD = 5
shapes = st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=8), min_size=1, max_size=6)


@given(shape=shapes, max_length=st.integers(3, 40))
def test_rows_of_whole_sentences(tokenizer, shape, max_length):
    documents, document_of = numbered_documents(shape)
    max_words = max_length - 2
    sentence_ends = {int(end) for end in np.cumsum([length for lengths in shape for length in lengths]) - 1}
    examples = MaskedLM(tokenizer, max_length=max_length, seed=0).examples(documents)
    rows = [row["input_ids"][1:-1] - FIRST_WORD for row in examples]
    assert np.concatenate(rows).tolist() == list(range(len(document_of))), "every token once, in order"
    for row in rows:
        assert 1 <= len(row) <= max_words
        assert len({document_of[number] for number in row.tolist()}) == 1
        if int(row[-1]) not in sentence_ends:  # only a sentence longer than a row is split, and it fills the row
            assert len(row) == max_words
            assert not sentence_ends & set(row.tolist())


@given(lengths=st.lists(st.integers(1, 20), min_size=1, max_size=200), max_length=st.integers(20, 50))
def test_packing_keeps_rows_intact(lengths, max_length):
    rows = [{"input_ids": np.full(length, index)} for index, length in enumerate(lengths)]
    packed = list(pack_sequences(rows, max_length))
    counts = Counter()
    for bin_ in packed:
        ids, sequences = bin_["input_ids"], bin_["sequence_ids"]
        assert len(ids) == len(sequences) <= max_length
        assert (np.diff(sequences) >= 0).all()
        assert set(sequences.tolist()) == set(range(1, sequences.max() + 1))
        for sequence in range(1, sequences.max() + 1):
            (row,) = set(ids[sequences == sequence].tolist())
            assert (sequences == sequence).sum() == lengths[row]
            counts[row] += 1
    assert counts == Counter(range(len(lengths)))
    sizes = sorted(len(bin_["input_ids"]) for bin_ in packed)
    assert all(a + b > max_length for a, b in pairwise(sizes)) or len(packed) > 64, "two rows would fit into one"


def test_packing_closes_fullest_bin_at_limit():
    """64 bins wait for sequences that fill them; the fullest one is returned when another bin is needed."""
    for count, sizes in ((64, [10] * 64), (65, [6, *[10] * 64, 4])):
        rows = [{"input_ids": np.zeros(length)} for length in [6] * count + [4] * count]
        assert [len(packed["input_ids"]) for packed in pack_sequences(rows, 10)] == sizes


def test_packed_rows_keep_special_tokens(tokenizer):
    documents, _ = numbered_documents([[7], [9], [5], [12], [3], [4], [8]])
    packed = list(MaskedLM(tokenizer, max_length=24, seed=0, packing=True).examples(documents))
    assert len(packed) < len(documents)
    for row in packed:
        for sequence in range(1, row["sequence_ids"].max() + 1):
            sequence_tokens = row["input_ids"][row["sequence_ids"] == sequence]
            assert (sequence_tokens[0], sequence_tokens[-1]) == (tokenizer.cls_token_id, tokenizer.sep_token_id)
    batch = MaskedLM(tokenizer, max_length=24, seed=0, packing=True).collate(with_index(packed))
    assert ((batch["sequence_ids"] > 0) == (batch["attention_mask"] > 0)).all()


@pytest.mark.parametrize(
    ("objective_class", "tokens", "word_ids"),
    [
        (MaskedLM, "[CLS] wa ##xa ##xb wb wc ##xd [SEP]", [-1, 0, 0, 0, 1, 2, 2, -1]),
        (FullSentences, "[CLS] wa ##xa ##xb wb wc ##xd [SEP] we [SEP]", [-1, 0, 0, 0, 1, 2, 2, -1, 0, -1]),
    ],
)
def test_word_ids(tokenizer, objective_class, tokens, word_ids):
    """A separator has no word id."""
    objective = objective_class(tokenizer, max_length=32, seed=0, whole_word=True)
    row = next(objective.examples([["waxaxb wb", "wcxd"], ["we"]]))
    assert tokenizer.convert_ids_to_tokens(row["input_ids"]) == tokens.split()
    assert row["word_ids"].tolist() == word_ids


def test_empty_documents_are_skipped(tokenizer):
    documents = [["\u200b"], [word(1)], ["\u200b", word(2)]]
    assert len(list(MaskedLM(tokenizer, max_length=32, seed=0).examples(documents))) == 2
    objective = FullSentences(tokenizer, max_length=32, seed=0)
    (row,) = objective.examples(documents)
    assert row["input_ids"].tolist() == [2, FIRST_WORD + 1, 3, FIRST_WORD + 2, 3]
    assert objective.statistics == {"documents": 3, "sentences": 2, "tokens": 2}


def test_option_help(tokenizer):
    help_texts = MaskedLM.option_help()
    assert help_texts["packing"].startswith("Pack several short documents")
    assert help_texts["packing"].endswith("Default: False.")
    assert help_texts.keys() == MaskedLM(tokenizer, max_length=32, seed=0).options.keys()
    assert not {"tokenizer", "max_length", "seed"} & help_texts.keys()


def full_sentences(tokenizer, documents, max_length, **options):
    """Word numbers of each row without its first and last special token; -1 for a separator."""
    objective = FullSentences(tokenizer, max_length=max_length, seed=0, **options)
    rows = [row["input_ids"] for row in objective.examples(documents)]
    assert all((row[0], row[-1]) == (tokenizer.cls_token_id, tokenizer.sep_token_id) for row in rows)
    return [np.where(row == tokenizer.sep_token_id, -1, row - FIRST_WORD)[1:-1] for row in rows]


@given(shape=shapes, max_length=st.integers(3, 40))
def test_full_sentences_across_documents(tokenizer, shape, max_length):
    """Each token once, separators between documents, and rows filled with as many sentences as fit."""
    documents, document_of = numbered_documents(shape)
    lengths = [length for document in shape for length in document]
    sentence_lengths = dict(zip((np.cumsum(lengths) - lengths).tolist(), lengths))
    max_words = max_length - 2
    sentence_ends = {int(end) for end in np.cumsum(lengths) - 1}
    rows = full_sentences(tokenizer, documents, max_length)
    text = np.concatenate(rows)
    assert text[text >= 0].tolist() == list(range(len(document_of))), "every token once, in order"
    for row in rows:
        assert 1 <= len(row) <= max_words
        if int(row[-1]) not in sentence_ends:  # only a sentence longer than a row is split, and it fills the row
            assert len(row) == max_words
            assert not sentence_ends & set(row.tolist())
        assert min(row[0], row[-1]) >= 0
        for previous, current, following_word in zip(row, row[1:], row[2:]):
            if current < 0:
                assert document_of[previous] + 1 == document_of[following_word]
        assert all(document_of[a] == document_of[b] for a, b in pairwise(row.tolist()) if min(a, b) >= 0)
    for row, next_row in pairwise(rows):
        first = int(next_row[0])
        if first in sentence_lengths:  # otherwise a split sentence continues, which filled the row before
            separator = document_of[first] != document_of[int(row[-1])]
            assert len(row) + separator + sentence_lengths[first] > max_words
    single_document_rows = full_sentences(tokenizer, documents, max_length, cross_documents=False)
    expected = [row["input_ids"] for row in MaskedLM(tokenizer, max_length=max_length, seed=0).examples(documents)]
    assert [row.tolist() for row in single_document_rows] == [(row[1:-1] - FIRST_WORD).tolist() for row in expected]


def test_tokenizer_without_separator_raises(trailing_tokenizer):
    trailing_tokenizer = type(trailing_tokenizer)(vocab=[("<unk>", -1.0), ("<mask>", -1.0), ("▁a", -1.0)])
    trailing_tokenizer.sep_token = None
    trailing_tokenizer.backend_tokenizer.post_processor = None
    with pytest.raises(CtxError, match="no sep_token"):
        list(FullSentences(trailing_tokenizer, max_length=8, seed=0).examples([["a"]]))


@pytest.mark.parametrize(("options", "message"), [({"static": True}, "exclude each other"), ({}, "static_masks=-1")])
def test_invalid_static_masks(tokenizer, options, message):
    with pytest.raises(CtxError, match=message):
        MaskedLM(tokenizer, max_length=24, seed=0, static_masks=-1 if not options else 10, **options)


def test_ten_static_masks_over_forty_epochs(tokenizer):
    """BERT's static masking: each mask is used in four of forty epochs (Liu et al. 2019, section 4.1)."""
    documents, _ = numbered_documents([[50]])
    objective = MaskedLM(tokenizer, max_length=60, seed=0, static_masks=10)
    (example,) = objective.examples(documents)
    masks = Counter(
        tuple(objective.collate([{**example, "example_index": 0, "epoch": epoch}])["input_ids"][0].tolist())
        for epoch in range(40)
    )
    assert list(masks.values()) == [4] * 10
