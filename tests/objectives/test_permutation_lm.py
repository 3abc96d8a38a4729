"""Permutation language modeling: targets, permutation orders, visibility and rows."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numbered_text import numbered_documents, with_index, word

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
    """Rows of words; rows of more than five tokens have special tokens in the middle and at the end."""
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
    """Order, targets (relative to the first token) and labels of each row, without padding."""
    for row in range(len(batch["input_ids"])):
        order, targets, labels = (batch[n][row].numpy() for n in ("permutation_order", "target_positions", "labels"))
        tokens = np.flatnonzero(batch["attention_mask"][row])
        yield order[tokens], targets[targets != -1] - tokens[0], labels[targets != -1]


@given(lengths=lengths_of_rows, collator_options=options)
def test_targets_and_ranks(trailing_tokenizer, lengths, collator_options):
    features = features_of(lengths)
    batch = DataCollatorForPermutationLM(trailing_tokenizer, **collator_options)(features)
    assert {value.dtype for value in batch.values()} == {torch.int64}
    assert ((batch["labels"] == IGNORE_INDEX) == (batch["target_positions"] == -1)).all()
    for row, (feature, (order, targets, labels)) in enumerate(zip(features, unpadded(batch), strict=True)):
        ids = feature["input_ids"]
        is_token = batch["attention_mask"][row].bool()
        assert batch["input_ids"][row][is_token].tolist() == ids.tolist(), "the content stream has the original tokens"
        assert is_token.sum() == len(ids)
        assert (batch["permutation_order"][row][~is_token] == -1).all()

        assert (np.diff(targets) > 0).all(), "each target once, in order"
        assert labels.tolist() == ids[targets].tolist()
        is_word = ids >= FIRST_WORD
        assert is_word[targets].all(), "no special token is a target"
        assert len(targets) >= is_word.any()
        if collator_options["num_predictions"] is not None:
            assert len(targets) == min(collator_options["num_predictions"], is_word.sum())

        is_target = np.isin(np.arange(len(ids)), targets)
        reuse_length = min(collator_options["reuse_length"] or len(ids), len(ids))
        reused, new = slice(0, reuse_length), slice(reuse_length, None)
        assert (order[reused][~is_target[reused]] == -1).all(), "tokens that are not targets are visible to all"
        assert sorted(order[reused][is_target[reused]]) == list(range(is_target[reused].sum())), "ranks are distinct"
        num_reused_targets = is_target[reused].sum()
        assert (order[new][~is_target[new]] == num_reused_targets).all()
        assert sorted(order[new][is_target[new]]) == list(
            range(num_reused_targets + 1, num_reused_targets + 1 + is_target[new].sum())
        )
    if batch["target_positions"].shape[1] > 1:
        assert (batch["target_positions"][:, -1] != -1).any(), "no column of targets is only padding"


@given(length=st.integers(1, 60), collator_options=options)
def test_query_does_not_depend_on_its_target_or_later_ones(trailing_tokenizer, length, collator_options):
    """Through any number of layers; and the reused part does not depend on the new part."""
    batch = DataCollatorForPermutationLM(trailing_tokenizer, **collator_options)(features_of([length]))
    ((order, targets, _),) = unpadded(batch)
    content = order[None, :] <= order[:, None]
    assert content.diagonal().all()
    depends_on = np.linalg.matrix_power(content.astype(float), length) > 0  # content stream at i depends on token j
    assert (depends_on == content).all(), "visibility is transitive"
    for target in targets:
        visible = order < order[target]
        visible_dependencies = depends_on[visible].any(axis=0)
        assert not visible[target]
        assert not visible_dependencies[target]
        later = targets[order[targets] > order[target]]
        assert not visible_dependencies[later].any()
        earlier = targets[order[targets] < order[target]]
        assert visible[earlier].all()
    reuse_length = collator_options["reuse_length"] or length
    assert not depends_on[:reuse_length, reuse_length:].any()
    assert depends_on[reuse_length:, :reuse_length].all()


def test_padded_targets_have_no_mapping():
    perm_mask, target_mapping = expand_permutation(torch.tensor([[-1, 0, 1]]), torch.tensor([[1, 2, -1]]))
    assert target_mapping.tolist() == [[[0, 1, 0], [0, 0, 1], [0, 0, 0]]]
    assert perm_mask.tolist() == [[[0, 1, 1], [0, 1, 1], [0, 0, 1]]]


@pytest.mark.parametrize(("whole_word", "context"), [(False, 6.0), (True, 6.5)])
def test_realized_rates(trailing_tokenizer, whole_word, context):
    documents, _ = numbered_documents([[20] * 50] * 3)
    options = {"whole_word": whole_word, "partial_prediction": context}
    objective = PermutationLM(trailing_tokenizer, max_length=512, seed=0, **options)
    rows = list(objective.examples(documents)) * 40
    batch = objective.collate(with_index(rows))
    rates = objective.rates(objective.count_batch(batch))
    assert rates["selected_share"] == pytest.approx(1 / context, rel=0.03)
    assert rates["predictions_per_example"] == pytest.approx((batch["labels"] != IGNORE_INDEX).sum() / len(rows))
    assert rates["tokens_per_span"] == pytest.approx(5 / (1 + 1 / 2 + 1 / 3 + 1 / 4 + 1 / 5), rel=0.07)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_shifts_targets_and_has_own_token_type(trailing_tokenizer, monkeypatch, side):
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


def split_segments(row):
    """Segment A, including the reused tokens before it, and segment B; checks the special tokens."""
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
    """Token ids of all documents, each with an end-of-document token."""
    number, ids = FIRST_WORD, []
    for sentences in documents:
        words = sum(len(sentence.split()) for sentence in sentences)
        ids += [*range(number, number + words), EOD]
        number += words
    return ids


def sentence_ends(shape):
    """Ends of the sentences in the running text; the end-of-document token belongs to the last sentence."""
    ends, number = set(), 0
    for lengths in shape:
        for index, length in enumerate(lengths):
            number += length + (index == len(lengths) - 1)
            ends.add(number)
    return ends


@given(shape=shapes, max_length=st.integers(5, 40), seed=st.integers(0, 1000), batch_size=st.sampled_from([2, 1000]))
def test_rows_without_memory_cover_text(trailing_tokenizer, shape, max_length, seed, batch_size):
    documents, _ = numbered_documents(shape)
    text, ends = running_text(documents), sentence_ends(shape)
    objective = PermutationLM(trailing_tokenizer, max_length=max_length, seed=seed)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(tokenized_documents, "DOCUMENTS_PER_BATCH", batch_size)
        rows = list(objective.examples(documents))
    offsets = {0}  # possible offsets of the next row
    for row in rows:
        a, b = map(np.ndarray.tolist, split_segments(row))
        assert len(row["input_ids"]) <= max_length
        (offset,) = [offset for offset in offsets if a == text[offset : offset + len(a)]][:1]
        middle = offset + len(a)
        assert middle in ends or not ends & set(range(offset + 1, min(offset + max_length - 3, len(text))))
        continues = b == text[middle : middle + len(b)]
        assert continues or any(b == text[start : start + len(b)] for start in range(len(text)))
        offsets = {middle, middle + len(b)} if continues else {middle}
    assert len(text) in offsets, "no token is lost"
    assert objective.statistics["tokens"] == len(text) - len(documents)


@given(
    shape=shapes,
    max_length=st.integers(8, 40),
    reuse=st.floats(0.1, 0.9),
    seed=st.integers(0, 1000),
    batch_size=st.sampled_from([2, 1000]),
)
def test_rows_with_memory_are_contiguous(trailing_tokenizer, shape, max_length, reuse, seed, batch_size):
    documents, _ = numbered_documents(shape)
    text, ends, row_length = running_text(documents), sentence_ends(shape), max_length - 3
    reuse_length = max(1, min(round(reuse * row_length), row_length - 2))
    memory_options = {"memory_length": 20, "reuse_length": reuse_length}
    objective = PermutationLM(trailing_tokenizer, max_length=max_length, seed=seed, **memory_options)
    assert objective.sampling.contiguous
    assert objective.config_fields == {"mem_len": 20, "reuse_len": reuse_length, "use_mems_train": True}
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(tokenized_documents, "DOCUMENTS_PER_BATCH", batch_size)
        if len(text) < row_length:
            with pytest.raises(CtxError, match="with a memory every example has"):
                list(objective.examples(documents))
            return
        rows = list(objective.examples(documents))
    assert len(rows) == (len(text) - row_length) // reuse_length + 1, "as many rows as the text fills"
    for number, row in enumerate(rows):
        a, b = map(np.ndarray.tolist, split_segments(row))
        start = number * reuse_length
        assert len(row["input_ids"]) == max_length
        assert len(a) > reuse_length
        assert a == text[start : start + len(a)]
        inner_ends = ends & set(range(start + reuse_length + 1, start + row_length))
        assert start + len(a) in inner_ends or not inner_ends
        assert any(b == text[offset : offset + len(b)] for offset in range(len(text)))
    assert objective.statistics["truncated_tokens"] == len(text) - len(rows) * reuse_length


def test_half_of_second_segments_continue_first(trailing_tokenizer):
    documents, _ = numbered_documents([[10] * 30] * 9)
    text = running_text(documents)
    objective = PermutationLM(trailing_tokenizer, max_length=32, seed=0, memory_length=8, reuse_length=4)
    num_continuing = 0
    rows = list(objective.examples(documents))
    for number, row in enumerate(rows):
        a, b = split_segments(row)
        middle = 4 * number + len(a)
        num_continuing += b.tolist() == text[middle : middle + len(b)]
    assert len(rows) > 600
    assert num_continuing / len(rows) == pytest.approx(0.5, abs=0.08)


@pytest.mark.parametrize("document_end", ["<eod>", "none"])
def test_single_token_text_is_always_target(trailing_tokenizer, document_end):
    objective = PermutationLM(trailing_tokenizer, max_length=12, seed=0, document_end=document_end)
    rows = list(objective.examples([[word(1)]]))
    for index, row in enumerate(rows):
        batch = objective.collate([{**row, "example_index": index, "epoch": 0}])
        assert set(batch["labels"].flatten().tolist()) == {FIRST_WORD + 1}
    assert FIRST_WORD + 1 in split_segments(rows[0])[0]


def test_row_of_special_tokens_has_no_target(trailing_tokenizer):
    batch = DataCollatorForPermutationLM(trailing_tokenizer)(with_index([{"input_ids": [EOD, SEP, CLS]}]))
    assert batch["target_positions"].tolist() == [[-1]]
    assert batch["labels"].tolist() == [[IGNORE_INDEX]]
    assert batch["permutation_order"].tolist() == [[-1, -1, -1]]


def test_words_of_two_documents_have_different_ids(trailing_tokenizer):
    objective = PermutationLM(trailing_tokenizer, max_length=12, seed=0, document_end="none")
    row = next(objective.examples([[word(1)], [word(2)], [word(3)]]))
    words = row["word_ids"][row["word_ids"] != -1]
    assert all(left != right for left, right in pairwise(words.tolist()))


def test_leading_special_tokens_with_memory_raise(tokenizer):
    documents, _ = numbered_documents([[10] * 5])
    objective = PermutationLM(tokenizer, max_length=24, seed=0, document_end="none")
    assert all(row["input_ids"][0] == tokenizer.cls_token_id for row in objective.examples(documents))
    with pytest.raises(CtxError, match="begins examples with special tokens"):
        PermutationLM(tokenizer, max_length=24, seed=0, document_end="none", memory_length=8)
