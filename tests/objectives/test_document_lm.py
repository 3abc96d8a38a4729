"""Rows of causal language modelling on documents: joined and cut, or packed without attention between them."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numbered_text import numbered_documents

from hf_ctxmodels import CtxBertTokenizer, CtxGpt2Config, CtxGpt2ForCausalLM, CtxGpt2Tokenizer
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.objectives.causal_lm import DocumentLM

FIRST_WORD = 5
shapes = st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4), min_size=1, max_size=6)


@pytest.fixture(scope="module")
def separated(tokenizer):
    """The numbered words' tokenizer, with a separator of documents."""
    return CtxBertTokenizer(vocab=tokenizer.get_vocab(), model_max_length=512, eos_token="[SEP]")


def resolve_targets(batch):
    """(token, its target) pairs of a batch, row by row; -100 for no target."""
    labels, mask = batch["labels"], batch["attention_mask"].bool()
    following = labels[:, 1:] if labels.shape[1] == mask.shape[1] + 1 else None
    assert following is not None
    return [(ids[real].tolist(), after[real].tolist()) for ids, after, real in zip(batch["input_ids"], following, mask)]


@settings(deadline=None)
@given(shape=shapes, max_length=st.integers(2, 20))
def test_joined_rows_predict_every_token_once_in_order(separated, shape, max_length):
    documents, home = numbered_documents(shape)
    objective = DocumentLM(separated, max_length=max_length, seed=0)
    rows = list(objective.examples(documents))
    assert all(len(row["input_ids"]) == max_length for row in rows[:-1])
    read, predicted = [], []
    for ids, after in resolve_targets(objective.collate(rows)):
        assert after[:-1] == ids[1:]
        read += ids
        predicted += after
    sep = separated.eos_token_id
    words = iter(range(len(home)))
    expected = []
    for document in shape:
        expected += [next(words) + FIRST_WORD for _ in range(sum(document))] + [sep]
    assert predicted == expected, "the end of a document too"
    assert read == [sep, *expected[:-1]]


@settings(deadline=None)
@given(shape=shapes, max_length=st.integers(2, 20))
def test_packed_documents_predict_every_token_once_within_their_own_sequence(separated, shape, max_length):
    documents, home = numbered_documents(shape)
    objective = DocumentLM(separated, max_length=max_length, seed=0, packing=True)
    rows = list(objective.examples(documents))
    assert all(len(row["input_ids"]) <= max_length for row in rows)
    batch = objective.collate(rows)
    sep, predicted = separated.eos_token_id, []
    for row, (ids, after) in zip(rows, resolve_targets(batch)):
        for number in range(1, int(row["sequence_ids"].max()) + 1):
            (own,) = np.nonzero(row["sequence_ids"] == number)
            sequence, goals = [ids[i] for i in own], [after[i] for i in own]
            assert goals == [*sequence[1:], -100]
            in_document = {home[token - FIRST_WORD] for token in sequence if token != sep}
            assert len(in_document) == 1
            predicted += [goal for goal in goals[:-1] if goal != sep]
    assert sorted(predicted) == [number + FIRST_WORD for number in range(len(home))]
    assert batch["sequence_ids"].shape == batch["input_ids"].shape


@torch.no_grad()
def test_packed_documents_do_not_see_each_other():
    """The loss of packed rows is that of each document alone."""
    torch.manual_seed(0)
    documents = [["a cat sat on a mat"], ["a dog ran"], ["the cat and the dog sat"]]
    tokenizer = CtxGpt2Tokenizer.train([text for (text,) in documents] * 3, vocab_size=290)
    config = CtxGpt2Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        initializer_range=0.2,
    )
    model = CtxGpt2ForCausalLM(config).eval()
    together = DocumentLM(tokenizer, max_length=64, seed=0, packing=True)
    (row,) = together.examples(documents)  # one row holds them all
    whole = together.collate([row])
    total, count = 0.0, 0
    for document in documents:
        alone = together.collate(list(together.examples([document])))
        targets = int((alone["labels"] != -100).sum())
        total += float(model(**alone).loss) * targets
        count += targets
    assert count == int((whole["labels"] != -100).sum())
    assert float(model(**whole).loss) == pytest.approx(total / count, rel=1e-5)
    leaking = {name: tensor for name, tensor in whole.items() if name != "sequence_ids"}
    assert float(model(**leaking).loss) != pytest.approx(total / count, rel=1e-4)


def test_a_tokenizer_without_a_separator_is_refused(tokenizer):
    assert isinstance(tokenizer, CtxBertTokenizer)
    with pytest.raises(CtxError, match="has no eos_token"):
        DocumentLM(tokenizer, max_length=8, seed=0)
    with pytest.raises(CtxError, match="max_length=1"):
        DocumentLM(CtxGpt2Tokenizer.train(["a b c"], vocab_size=260), max_length=1, seed=0)
