"""Permutation language modeling: targets, orders, what may be seen, and the rows."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numbered_text import indexed, numbered_documents, word

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.objectives import DataCollatorForPermutationLM, PermutationLM, expand_permutation, tokenized_documents
from hf_ctxmodels.objectives.masking import IGNORE_INDEX

FIRST_WORD, SEP, CLS, EOD = 9, 4, 3, 7
lengths_of_rows = st.lists(st.integers(1, 60), min_size=1, max_size=5)
options = st.fixed_dictionaries(
    {
        "partial_prediction": st.floats(1, 10),
        "max_span": st.integers(1, 6),
        "num_predictions": st.none() | st.integers(1, 20),
        "whole_word": st.booleans(),
        "reuse_length": st.none() | st.integers(1, 40),
        "seed": st.integers(0, 10**6),
    }
)


def features_of(lengths, epoch=0):
    """Rows of words, with special tokens in the middle and at the end of those that are long enough."""
    rng = np.random.default_rng(sum(lengths))
    features = []
    for index, length in enumerate(lengths):
        ids, words = rng.integers(FIRST_WORD, 3000, size=length), np.cumsum(rng.integers(0, 2, size=length))
        if length > 5:
            for offset, token in ((length // 2, EOD), (-2, SEP), (-1, CLS)):
                ids[offset], words[offset] = token, -1
        features.append({"input_ids": ids, "word_ids": words, "example_index": index, "epoch": epoch})
    return features


def unpadded(batch):
    """Per row: order, targets (counted from the row's first token), labels, without padding."""
    for row in range(len(batch["input_ids"])):
        order, targets, labels = (batch[n][row].numpy() for n in ("permutation_order", "target_positions", "labels"))
        tokens = np.flatnonzero(batch["attention_mask"][row])
        yield order[tokens], targets[targets != -1] - tokens[0], labels[targets != -1]


@given(lengths=lengths_of_rows, chosen=options)
def test_targets_and_ranks(trailing_tokenizer, lengths, chosen):
    features = features_of(lengths)
    batch = DataCollatorForPermutationLM(trailing_tokenizer, **chosen)(features)
    assert {value.dtype for value in batch.values()} == {torch.int64}
    assert ((batch["labels"] == IGNORE_INDEX) == (batch["target_positions"] == -1)).all()
    for row, (feature, (order, targets, labels)) in enumerate(zip(features, unpadded(batch), strict=True)):
        ids = feature["input_ids"]
        there = batch["attention_mask"][row].bool()
        assert batch["input_ids"][row][there].tolist() == ids.tolist(), "the content stream has the real tokens"
        assert there.sum() == len(ids)
        assert (batch["permutation_order"][row][~there] == -1).all()

        assert (np.diff(targets) > 0).all(), "each target once, in order"
        assert labels.tolist() == ids[targets].tolist()
        non_special = ids >= FIRST_WORD
        assert non_special[targets].all(), "no special token is a target"
        assert len(targets) >= non_special.any()
        if chosen["num_predictions"] is not None:
            assert len(targets) == min(chosen["num_predictions"], non_special.sum())

        is_target = np.isin(np.arange(len(ids)), targets)
        reuse = min(chosen["reuse_length"] or len(ids), len(ids))
        first, new_columns = slice(0, reuse), slice(reuse, None)
        assert (order[first][~is_target[first]] == -1).all(), "not predicted: seen by all"
        assert sorted(order[first][is_target[first]]) == list(range(is_target[first].sum())), "ranks are distinct"
        after = is_target[first].sum()
        assert (order[new_columns][~is_target[new_columns]] == after).all()
        assert sorted(order[new_columns][is_target[new_columns]]) == list(
            range(after + 1, after + 1 + is_target[new_columns].sum())
        )
    if batch["target_positions"].shape[1] > 1:
        assert (batch["target_positions"][:, -1] != -1).any(), "no column of the targets is only padding"


@given(length=st.integers(1, 60), chosen=options)
def test_nothing_a_query_sees_depends_on_its_target_or_a_later_one(trailing_tokenizer, length, chosen):
    """Through any number of layers, whatever the query sees; and the reused part sees nothing of the rest."""
    batch = DataCollatorForPermutationLM(trailing_tokenizer, **chosen)(features_of([length]))
    ((order, targets, _),) = unpadded(batch)
    content = order[None, :] <= order[:, None]
    assert content.diagonal().all()
    reached = np.linalg.matrix_power(content.astype(float), length) > 0  # content i depends on token j
    assert (reached == content).all(), "seeing what another position sees adds nothing"
    for target in targets:
        visible = order < order[target]
        depends = reached[visible].any(axis=0)
        assert not visible[target]
        assert not depends[target]
        later = targets[order[targets] > order[target]]
        assert not depends[later].any()
        earlier = targets[order[targets] < order[target]]
        assert visible[earlier].all()
    reuse = chosen["reuse_length"] or length
    assert not reached[:reuse, reuse:].any()
    assert reached[reuse:, :reuse].all()


def test_expanded_padding_targets_map_to_nothing():
    perm_mask, target_mapping = expand_permutation(torch.tensor([[-1, 0, 1]]), torch.tensor([[1, 2, -1]]))
    assert target_mapping.tolist() == [[[0, 1, 0], [0, 0, 1], [0, 0, 0]]]
    assert perm_mask.tolist() == [[[0, 1, 1], [0, 1, 1], [0, 0, 1]]]


@pytest.mark.parametrize(("whole_word", "context"), [(False, 6.0), (True, 6.5)])
def test_one_token_in_context_is_predicted_and_spans_are_as_long_as_drawn(trailing_tokenizer, whole_word, context):
    documents, _ = numbered_documents([[20] * 50] * 3)
    options = {"whole_word": whole_word, "partial_prediction": context}
    objective = PermutationLM(trailing_tokenizer, max_length=512, seed=0, **options)
    rows = list(objective.examples(documents)) * 40
    batch = objective.collate(indexed(rows))
    rates = objective.rates(objective.count_batch(batch))
    assert rates["selected_share"] == pytest.approx(1 / context, rel=0.03)
    assert rates["predictions_per_example"] == pytest.approx((batch["labels"] != IGNORE_INDEX).sum() / len(rows))
    assert rates["tokens_per_span"] == pytest.approx(5 / (1 + 1 / 2 + 1 / 3 + 1 / 4 + 1 / 5), rel=0.07)


@pytest.mark.parametrize("side", ["left", "right"])
def test_targets_move_with_their_tokens_and_padding_is_a_segment_of_its_own(trailing_tokenizer, monkeypatch, side):
    monkeypatch.setattr(trailing_tokenizer, "padding_side", side)
    features = [{**row, "token_type_ids": np.zeros(length)} for row, length in zip(features_of([3, 9]), (3, 9))]
    batch = DataCollatorForPermutationLM(trailing_tokenizer, pad_to_multiple_of=8)(features)
    tokens, padding = slice(-3, None) if side == "left" else slice(3), batch["attention_mask"][0] == 0
    assert not padding[tokens].any()
    assert padding.sum() == 13
    assert set(batch["token_type_ids"][0, padding].tolist()) == {3}
    assert not batch["token_type_ids"][0, tokens].any()
    for name in ("input_ids", "attention_mask", "permutation_order", "token_type_ids"):
        assert batch[name].shape == (2, 16)
    for ids, targets, labels in zip(batch["input_ids"], batch["target_positions"], batch["labels"], strict=True):
        assert ids[targets[targets != -1]].tolist() == labels[targets != -1].tolist()


shapes = st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=8), min_size=1, max_size=6)


def pieces_of(row):
    """Segment A with what is reused before it, and segment B; checks the special tokens."""
    ids, types = row["input_ids"], row["token_type_ids"]
    first, last = np.flatnonzero(ids == SEP)
    assert last == len(ids) - 2
    assert ids[-1] == CLS
    assert (types[: first + 1] == 0).all()
    assert (types[first + 1 : last + 1] == 1).all()
    assert types[-1] == 2
    assert 0 < first < last - 1, "no segment is empty"
    return ids[:first], ids[first + 1 : last]


def running_text(documents):
    """Token ids of all documents, each with its end."""
    number, ids = FIRST_WORD, []
    for sentences in documents:
        words = sum(len(sentence.split()) for sentence in sentences)
        ids += [*range(number, number + words), EOD]
        number += words
    return ids


def sentence_ends(shape):
    """Where sentences end in the running text; a document's end belongs to its last sentence."""
    ends, number = set(), 0
    for lengths in shape:
        for index, length in enumerate(lengths):
            number += length + (index == len(lengths) - 1)
            ends.add(number)
    return ends


@given(shape=shapes, max_length=st.integers(5, 40), seed=st.integers(0, 1000), at_once=st.sampled_from([2, 1000]))
def test_rows_on_their_own_hold_all_of_the_text_in_order(trailing_tokenizer, shape, max_length, seed, at_once):
    documents, _ = numbered_documents(shape)
    text, ends = running_text(documents), sentence_ends(shape)
    objective = PermutationLM(trailing_tokenizer, max_length=max_length, seed=seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenized_documents, "DOCUMENTS_PER_BATCH", at_once)
        rows = list(objective.examples(documents))
    places = {0}  # where this row may begin, by what the rows before it hold
    for row in rows:
        a, b = map(np.ndarray.tolist, pieces_of(row))
        assert len(row["input_ids"]) <= max_length
        (offset,) = [offset for offset in places if a == text[offset : offset + len(a)]][:1]
        middle = offset + len(a)
        assert middle in ends or not ends & set(range(offset + 1, min(offset + max_length - 3, len(text))))
        continues = b == text[middle : middle + len(b)]
        assert continues or any(b == text[start : start + len(b)] for start in range(len(text)))
        places = {middle, middle + len(b)} if continues else {middle}
    assert len(text) in places, "no token is lost"
    assert objective.statistics["tokens"] == len(text) - len(documents)


@given(
    shape=shapes,
    max_length=st.integers(8, 40),
    reuse=st.floats(0.1, 0.9),
    seed=st.integers(0, 1000),
    at_once=st.sampled_from([2, 1000]),
)
def test_rows_with_a_memory_continue_each_other(trailing_tokenizer, shape, max_length, reuse, seed, at_once):
    documents, _ = numbered_documents(shape)
    text, ends, room = running_text(documents), sentence_ends(shape), max_length - 3
    reuse_length = max(1, min(round(reuse * room), room - 2))
    given_options = {"memory_length": 20, "reuse_length": reuse_length}
    objective = PermutationLM(trailing_tokenizer, max_length=max_length, seed=seed, **given_options)
    assert objective.sampling.contiguous
    assert objective.config_fields == {"mem_len": 20, "reuse_len": reuse_length, "use_mems_train": True}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenized_documents, "DOCUMENTS_PER_BATCH", at_once)
        if len(text) < room:
            with pytest.raises(CtxError, match="with a memory every example has"):
                list(objective.examples(documents))
            return
        rows = list(objective.examples(documents))
    assert len(rows) == (len(text) - room) // reuse_length + 1, "as many as the text fills"
    for number, row in enumerate(rows):
        a, b = map(np.ndarray.tolist, pieces_of(row))
        start = number * reuse_length
        assert len(row["input_ids"]) == max_length
        assert len(a) > reuse_length
        assert a == text[start : start + len(a)]
        inner = ends & set(range(start + reuse_length + 1, start + room))
        assert start + len(a) in inner or not inner
        assert any(b == text[offset : offset + len(b)] for offset in range(len(text)))
    assert objective.statistics["truncated_tokens"] == len(text) - len(rows) * reuse_length


def test_segment_b_continues_a_in_half_of_the_rows(trailing_tokenizer):
    documents, _ = numbered_documents([[10] * 30] * 9)
    text = running_text(documents)
    objective = PermutationLM(trailing_tokenizer, max_length=32, seed=0, memory_length=8, reuse_length=4)
    continuing = 0
    rows = list(objective.examples(documents))
    for number, row in enumerate(rows):
        a, b = pieces_of(row)
        middle = 4 * number + len(a)
        continuing += b.tolist() == text[middle : middle + len(b)]
    assert len(rows) > 600
    assert continuing / len(rows) == pytest.approx(0.5, abs=0.08)


@pytest.mark.parametrize("document_end", ["<eod>", "none"])
def test_a_text_of_one_token_is_a_target_in_every_row(trailing_tokenizer, document_end):
    objective = PermutationLM(trailing_tokenizer, max_length=12, seed=0, document_end=document_end)
    rows = list(objective.examples([[word(1)]]))
    for index, row in enumerate(rows):
        batch = objective.collate([{**row, "example_index": index, "epoch": 0}])
        assert set(batch["labels"].flatten().tolist()) == {FIRST_WORD + 1}
    assert FIRST_WORD + 1 in pieces_of(rows[0])[0]


def test_a_row_of_special_tokens_alone_has_no_target(trailing_tokenizer):
    batch = DataCollatorForPermutationLM(trailing_tokenizer)(indexed([{"input_ids": [EOD, SEP, CLS]}]))
    assert batch["target_positions"].tolist() == [[-1]]
    assert batch["labels"].tolist() == [[IGNORE_INDEX]]
    assert batch["permutation_order"].tolist() == [[-1, -1, -1]]


def test_words_of_two_documents_stay_two_words(trailing_tokenizer):
    objective = PermutationLM(trailing_tokenizer, max_length=12, seed=0, document_end="none")
    row = next(objective.examples([[word(1)], [word(2)], [word(3)]]))
    words = row["word_ids"][row["word_ids"] != -1]
    assert all(left != right for left, right in pairwise(words.tolist()))


def test_special_tokens_before_the_text_allow_rows_but_no_memory(tokenizer):
    documents, _ = numbered_documents([[10] * 5])
    objective = PermutationLM(tokenizer, max_length=24, seed=0, document_end="none")
    assert all(row["input_ids"][0] == tokenizer.cls_token_id for row in objective.examples(documents))
    with pytest.raises(CtxError, match="begins examples with special tokens"):
        PermutationLM(tokenizer, max_length=24, seed=0, document_end="none", memory_length=8)
