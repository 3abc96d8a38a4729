"""Sequence autoencoder: rows contain the text twice; targets are the second copy and the end-of-text token."""

import copy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numbered_text import numbered_documents

from hf_ctxmodels import CtxError, CtxSeqaeTokenizer, CtxWord2VecTokenizer
from hf_ctxmodels.objectives import SequenceAutoencoding

DOCUMENTS, _ = numbered_documents([[5, 9], [30, 2, 2], [1], [40] * 3])


@pytest.fixture(scope="module")
def tokenizer() -> CtxSeqaeTokenizer:
    return CtxSeqaeTokenizer.train([" ".join(document) for document in DOCUMENTS], 2000, min_count=1)


def examples(tokenizer: CtxSeqaeTokenizer, length: int, **options: object) -> tuple[SequenceAutoencoding, list]:
    objective = SequenceAutoencoding(tokenizer, max_length=length, seed=0, **options)
    return objective, list(objective.examples(DOCUMENTS))


@settings(max_examples=20)
@given(length=st.integers(3, 400), side=st.sampled_from(["left", "right"]), by_sentence=st.booleans())
def test_rows_contain_text_twice(tokenizer: CtxSeqaeTokenizer, length: int, side: str, by_sentence: bool) -> None:
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.padding_side = side
    objective, rows = examples(tokenizer, length, by_sentence=by_sentence)
    batch = objective.collate(rows)
    assert batch["input_ids"].shape[1] <= length
    assert batch["labels"].shape[1] == batch["input_ids"].shape[1] + 1
    all_ids = []
    for ids, mask, labels in zip(batch["input_ids"], batch["attention_mask"], batch["labels"][:, 1:], strict=True):
        ids, labels = ids[mask == 1].tolist(), labels[mask == 1].tolist()
        size = (len(ids) - 1) // 2
        assert ids == [*ids[:size], tokenizer.eos_token_id, *ids[:size]]
        assert labels == [-100] * size + [*ids[:size], tokenizer.eos_token_id]
        all_ids += ids[:size]
    texts = [sentence for document in DOCUMENTS for sentence in document]
    assert all_ids == [number for text in texts for number in tokenizer(text, add_special_tokens=False).input_ids]
    assert (batch["labels"][:, 1:][batch["attention_mask"] == 0] == -100).all()
    assert (batch["labels"][:, 0] == -100).all()
    assert (batch["input_ids"][batch["attention_mask"] == 0] == tokenizer.pad_token_id).all()


def test_counts_and_rates(tokenizer: CtxSeqaeTokenizer) -> None:
    objective, rows = examples(tokenizer, 21)
    counts = objective.count_batch(objective.collate(rows))
    num_words = objective.statistics["tokens"]
    assert counts["examples"] == len(rows)
    assert counts["targets"] == num_words + len(rows)
    assert counts["tokens"] == 2 * num_words + len(rows)
    assert objective.rates(counts)["targets_per_example"] == pytest.approx(counts["targets"] / len(rows))


def test_tokenizer_without_eos_token_raises() -> None:
    with pytest.raises(CtxError, match="has no eos_token"):
        SequenceAutoencoding(CtxWord2VecTokenizer.from_words(["a"]), max_length=9, seed=0)
