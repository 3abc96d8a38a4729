"""ELMo's bidirectional language model: rows of the running text, labels in both directions and unknown words."""

import numpy as np
import pytest
from numbered_text import with_index

from hf_ctxmodels import CtxBertTokenizer, CtxElmoTokenizer, CtxError
from hf_ctxmodels.objectives import BidirectionalLM
from hf_ctxmodels.objectives.bidirectional_lm import decode_words, encode_words

DOCUMENTS = [
    ["The cat sat on the mat .", "", "A cat !"],
    ["The Ümlaut cat sat on one long line of many unseen words ."],
]


@pytest.fixture(scope="module")
def tokenizer() -> CtxElmoTokenizer:
    return CtxElmoTokenizer.train(["The cat sat on the mat . A cat sat on the mat ."], 30, min_count=2)


def examples(tokenizer: CtxElmoTokenizer, length: int = 9, **options: object) -> tuple[BidirectionalLM, list[dict]]:
    objective = BidirectionalLM(tokenizer, max_length=length, seed=0, **options)
    return objective, with_index(objective.examples(DOCUMENTS))


@pytest.mark.parametrize("length", [3, 5, 9, 14, 50])
def test_rows_contain_text_in_order(tokenizer: CtxElmoTokenizer, length: int) -> None:
    objective, rows = examples(tokenizer, length)
    assert max(len(row["input_ids"]) for row in rows) <= length
    words = []
    for row in rows:
        batch = objective.collate([row])
        words += tokenizer.character_ids_to_words(batch["input_ids"][0])
    expected = []
    for document in DOCUMENTS:
        for sentence in filter(None, document):
            expected += ["<S>", *sentence.split(), "</S>"]
    assert words == expected


def test_labels_are_neighboring_words(tokenizer: CtxElmoTokenizer) -> None:
    objective, rows = examples(tokenizer, 14)
    batch = objective.collate(rows)
    bos_id, eos_id = tokenizer.bos_token_id, tokenizer.eos_token_id
    for ids, mask, labels in zip(rows, batch["attention_mask"], batch["labels"], strict=True):
        ids, labels = ids["input_ids"].tolist(), labels[mask.bool()].tolist()
        for position, (next_label, previous_label) in enumerate(labels):
            next_id = ids[position + 1] if position + 1 < len(ids) else bos_id
            previous_id = ids[position - 1] if position else eos_id
            assert next_label == (-100 if next_id == bos_id else next_id)
            assert previous_label == (-100 if previous_id == eos_id else previous_id)
    assert (batch["labels"][batch["attention_mask"] == 0] == -100).all()
    assert not batch["input_ids"][batch["attention_mask"] == 0].any()


def test_unknown_words_round_trip() -> None:
    words = ["a", "ünï", "", "日本", "\udc80"]
    assert decode_words(encode_words(words)) == words
    assert decode_words(np.array([], dtype=np.uint8)) == []


def test_rates_and_statistics(tokenizer: CtxElmoTokenizer) -> None:
    objective, rows = examples(tokenizer, 50)
    assert objective.statistics["sentences"] == 3
    assert objective.statistics["tokens"] == sum(len(row["input_ids"]) for row in rows)
    rates = objective.rates(objective.count_batch(objective.collate(rows)))
    words = objective.statistics["tokens"]
    assert rates["targets_per_token"] == pytest.approx((2 * words - 2 * 3) / words)  # two ignored per sentence
    assert 0 < rates["unknown_target_share"] < 1


def test_unsupported_tokenizer_raises(tokenizer: CtxElmoTokenizer) -> None:
    with pytest.raises(CtxError, match="no characters"):
        BidirectionalLM(CtxBertTokenizer.train(["a b"], vocab_size=40), max_length=9, seed=0)
    objective, rows = examples(tokenizer)
    with pytest.raises(CtxError, match="another tokenizer"):
        objective.collate([{**rows[0], "input_ids": rows[0]["input_ids"] + 99}])
