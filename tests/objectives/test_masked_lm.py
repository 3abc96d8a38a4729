"""Rows of masked language modelling: whole sentences of one document, or several short rows packed."""

from collections import Counter
from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numbered_text import indexed, numbered_documents, word

from hf_ctxmodels.objectives import MaskedLM
from hf_ctxmodels.objectives.tokenized_documents import pack_sequences

shapes = st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=8), min_size=1, max_size=6)


@settings(deadline=None)
@given(shape=shapes, max_length=st.integers(3, 40))
def test_rows_hold_each_token_once_and_break_between_sentences(tokenizer, shape, max_length):
    documents, home = numbered_documents(shape)
    room = max_length - 2
    ends = {int(end) for end in np.cumsum([length for lengths in shape for length in lengths]) - 1}
    rows = [
        row["input_ids"][1:-1] - 5 for row in MaskedLM(tokenizer, max_length=max_length, seed=0).examples(documents)
    ]
    assert np.concatenate(rows).tolist() == list(range(len(home))), "every token once, in order"
    for row in rows:
        assert 1 <= len(row) <= room
        assert len({home[number] for number in row.tolist()}) == 1
        if int(row[-1]) not in ends:  # broken inside a sentence: only one longer than a row, and only at its limit
            assert len(row) == room
            assert not ends & set(row.tolist())


@settings(deadline=None)
@given(lengths=st.lists(st.integers(1, 20), min_size=1, max_size=200), max_length=st.integers(20, 50))
def test_packing_keeps_every_row_whole(lengths, max_length):
    rows = [{"input_ids": np.full(length, index)} for index, length in enumerate(lengths)]
    packed = list(pack_sequences(rows, max_length))
    seen = Counter()
    for bin_ in packed:
        ids, sequences = bin_["input_ids"], bin_["sequence_ids"]
        assert len(ids) == len(sequences) <= max_length
        assert (np.diff(sequences) >= 0).all()
        assert set(sequences.tolist()) == set(range(1, sequences.max() + 1))
        for sequence in range(1, sequences.max() + 1):
            (row,) = set(ids[sequences == sequence].tolist())
            assert (sequences == sequence).sum() == lengths[row]
            seen[row] += 1
    assert seen == Counter(range(len(lengths)))
    sizes = sorted(len(bin_["input_ids"]) for bin_ in packed)
    assert all(a + b > max_length for a, b in pairwise(sizes)) or len(packed) > 64, "two rows that fit into one"


def test_packed_rows_are_fuller_and_carry_their_special_tokens(tokenizer):
    documents, _ = numbered_documents([[7], [9], [5], [12], [3], [4], [8]])
    packed = list(MaskedLM(tokenizer, max_length=24, seed=0, packing=True).examples(documents))
    assert len(packed) < len(documents)
    for row in packed:
        for sequence in range(1, row["sequence_ids"].max() + 1):
            part = row["input_ids"][row["sequence_ids"] == sequence]
            assert (part[0], part[-1]) == (tokenizer.cls_token_id, tokenizer.sep_token_id)
    batch = MaskedLM(tokenizer, max_length=24, seed=0, packing=True).collate(indexed(packed))
    assert ((batch["sequence_ids"] > 0) == (batch["attention_mask"] > 0)).all()


def test_word_ids_number_the_words_of_a_row(tokenizer):
    objective = MaskedLM(tokenizer, max_length=32, seed=0, whole_word=True)
    (row,) = objective.examples([["waxaxb wb", "wcxd we"]])
    assert tokenizer.convert_ids_to_tokens(row["input_ids"][1:-1]) == ["wa", "##xa", "##xb", "wb", "wc", "##xd", "we"]
    assert row["word_ids"].tolist() == [-1, 0, 0, 0, 1, 2, 2, 3, -1]


def test_a_document_without_tokens_gives_no_row(tokenizer):
    objective = MaskedLM(tokenizer, max_length=32, seed=0)
    assert len(list(objective.examples([["\u200b"], [word(1)], ["\u200b", word(2)]]))) == 2


def test_the_options_explain_themselves(tokenizer):
    explained = MaskedLM.option_help()
    assert explained["packing"].startswith("Pack several short documents")
    assert explained["packing"].endswith("Default: False.")
    assert explained.keys() == MaskedLM(tokenizer, max_length=32, seed=0).options.keys()
    assert not {"tokenizer", "max_length", "seed"} & explained.keys()
