"""What a language model from left to right is asked: the running text in rows of random lengths."""

import numpy as np
import pytest
import torch
from numbered_text import numbered_documents

from hf_ctxmodels import CtxError, CtxUlmfitTokenizer
from hf_ctxmodels.objectives import CausalLM

DOCUMENTS, _ = numbered_documents([[5, 9], [30, 2, 2], [1], [40] * 12])


@pytest.fixture(scope="module")
def tokenizer() -> CtxUlmfitTokenizer:
    texts = [" ".join(document) for document in DOCUMENTS]
    return CtxUlmfitTokenizer.train(texts, 2000, min_count=1)


def running_text(tokenizer: CtxUlmfitTokenizer) -> list[int]:
    return [number for document in DOCUMENTS for number in tokenizer(" ".join(document)).input_ids]


def examples(tokenizer: CtxUlmfitTokenizer, length: int = 20, epoch: int = 0, **options: object) -> tuple:
    objective = CausalLM(tokenizer, max_length=length, seed=0, **options)
    return objective, list(objective.examples(DOCUMENTS, epoch))


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
    counts = objective.count(batch)
    assert counts["targets"] == len(text) - 1
    assert counts["unknown_targets"] == 0
    assert objective.rates(counts)["targets_per_word"] == pytest.approx(1 - 1 / len(text))
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


def test_another_pass_cuts_elsewhere_and_the_same_one_alike(tokenizer: CtxUlmfitTokenizer) -> None:
    cuts = [[len(row["input_ids"]) for row in examples(tokenizer, epoch=number)[1]] for number in (0, 0, 1)]
    assert cuts[0] == cuts[1] != cuts[2]


def test_rows_of_one_length(tokenizer: CtxUlmfitTokenizer) -> None:
    _, rows = examples(tokenizer, 20, bptt_deviation=0.0)
    assert {len(row["input_ids"]) for row in rows[:-1]} == {20}


def test_what_is_carried(tokenizer: CtxUlmfitTokenizer) -> None:
    for carry in (True, False):
        objective, _ = examples(tokenizer, carry=carry)
        assert objective.sampling.contiguous is carry
        assert objective.config_fields == {"stateful": carry, "backward": False}


@pytest.mark.parametrize("options", [{"bptt": -1}, {"bptt_deviation": -1.0}, {"bptt": 30}])
def test_refused(tokenizer: CtxUlmfitTokenizer, options: dict) -> None:
    with pytest.raises(CtxError, match="bptt"):
        CausalLM(tokenizer, max_length=20, seed=0, **options)


def test_rows_do_not_depend_on_their_batch(tokenizer: CtxUlmfitTokenizer) -> None:
    objective, rows = examples(tokenizer)
    together = objective.collate(rows)
    for number, row in enumerate(rows):
        alone = objective.collate([row])
        there = together["attention_mask"][number].bool()
        assert torch.equal(together["input_ids"][number][there], alone["input_ids"][0])
        assert torch.equal(together["labels"][number][1:][there], alone["labels"][0, 1:])


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
    assert objective.config_fields["backward"] is True
