"""What a language model from left to right is asked: the running text in rows of random lengths."""

import numpy as np
import pytest
from numbered_text import numbered_documents

from hf_ctxmodels import CtxUlmfitTokenizer
from hf_ctxmodels.objectives import CausalLM

DOCUMENTS, _ = numbered_documents([[5, 9], [30, 2, 2], [1], [40] * 12])


@pytest.fixture(scope="module")
def tokenizer() -> CtxUlmfitTokenizer:
    texts = [" ".join(document) for document in DOCUMENTS]
    return CtxUlmfitTokenizer.train(texts, 2000, min_count=1)


def running_text(tokenizer: CtxUlmfitTokenizer) -> list[int]:
    return [number for document in DOCUMENTS for number in tokenizer(" ".join(document)).input_ids]


def examples(tokenizer: CtxUlmfitTokenizer, length: int, **options: object) -> tuple[CausalLM, list[dict]]:
    objective = CausalLM(tokenizer, max_length=length, seed=0, **options)
    return objective, list(objective.examples(DOCUMENTS))


@pytest.mark.parametrize("length", [2, 7, 20, 5000])
def test_rows_and_their_targets_are_the_text_without_a_gap(tokenizer: CtxUlmfitTokenizer, length: int) -> None:
    objective, rows = examples(tokenizer, length)
    assert max(len(row["input_ids"]) for row in rows) <= length
    text = running_text(tokenizer)
    batch = objective.collate(rows)
    tokens = batch["attention_mask"].bool()
    assert batch["input_ids"][tokens].tolist() == text
    assert batch["labels"][:, 1:][tokens].tolist() == [*text[1:], -100]
    assert (batch["labels"][:, 1:][~tokens] == -100).all()
    assert (batch["labels"][:, 0] == -100).all()
    assert (batch["input_ids"][~tokens] == tokenizer.pad_token_id).all()
    counts = objective.count_batch(batch)
    assert counts["targets"] == len(text) - 1
    assert counts["unknown_targets"] == 0
    assert objective.rates(counts)["targets_per_token"] == pytest.approx(1 - 1 / len(text))
    assert objective.statistics["tokens"] == len(text)


def test_lengths_are_those_of_the_paper() -> None:
    """95 in 100 are drawn around bptt, the others around its half."""
    tokenizer = CtxUlmfitTokenizer.train(["one two"], 20, min_count=1)
    objective = CausalLM(tokenizer, max_length=100, seed=1, bptt=70)
    lengths = np.array([len(row["input_ids"]) for row in objective.examples([["one two " * 500]] * 300)][:-1])
    halved = lengths < 52
    assert len(lengths) > 4000
    assert halved.mean() == pytest.approx(0.05, abs=0.012)
    assert lengths[~halved].mean() == pytest.approx(70, abs=0.4)
    assert lengths[~halved].std() == pytest.approx(5, abs=0.3)
    assert lengths[halved].mean() == pytest.approx(35, abs=1.5)


def test_rows_of_one_length(tokenizer: CtxUlmfitTokenizer) -> None:
    _, rows = examples(tokenizer, 20, bptt_deviation=0.0)
    assert {len(row["input_ids"]) for row in rows[:-1]} == {20}


@pytest.mark.parametrize("length", [2, 7, 20, 5000])
@pytest.mark.parametrize("side", ["right", "left"])
def test_backward_rows_are_the_text_from_its_end(tokenizer: CtxUlmfitTokenizer, length: int, side: str) -> None:
    """Each row in the order of the text, and followed by the row before it; each word's target is the one before it."""
    objective, rows = examples(tokenizer, length, backward=True)
    text = running_text(tokenizer)
    assert [word for row in reversed(rows) for word in row["input_ids"].tolist()] == text
    tokenizer.padding_side, before = side, tokenizer.padding_side
    batch = objective.collate(list(reversed(rows)))
    tokenizer.padding_side = before
    there = batch["attention_mask"].bool()
    assert batch["labels"][:, :-1][there].tolist() == [-100, *text[:-1]]
    assert (batch["labels"][:, :-1][~there] == -100).all()
    assert (batch["labels"][:, -1] == -100).all()
