"""Causal language modeling: the running text in rows of random lengths, and rows of joined or packed documents."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numbered_text import numbered_documents

from hf_ctxmodels import CtxError, CtxGpt2Tokenizer, CtxUlmfitTokenizer
from hf_ctxmodels.data.control_codes import add_control_codes, control_code_ids
from hf_ctxmodels.data.documents import TextWithCode
from hf_ctxmodels.objectives import CausalLM
from hf_ctxmodels.objectives.causal_lm import DocumentLM

DOCUMENTS, _ = numbered_documents([[5, 9], [30, 2, 2], [1], [40] * 12])

FIRST_WORD = 5
shapes = st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4), min_size=1, max_size=6)


@pytest.fixture(scope="module")
def words() -> CtxUlmfitTokenizer:
    texts = [" ".join(document) for document in DOCUMENTS]
    return CtxUlmfitTokenizer.train(texts, 2000, min_count=1)


def running_text(words: CtxUlmfitTokenizer) -> list[int]:
    return [number for document in DOCUMENTS for number in words(" ".join(document)).input_ids]


def examples(words: CtxUlmfitTokenizer, length: int, **options: object) -> tuple[CausalLM, list[dict]]:
    objective = CausalLM(words, max_length=length, seed=0, **options)
    return objective, list(objective.examples(DOCUMENTS))


@pytest.mark.parametrize("length", [2, 7, 20, 5000])
def test_rows_and_their_targets_are_the_text_without_a_gap(words: CtxUlmfitTokenizer, length: int) -> None:
    objective, rows = examples(words, length)
    assert max(len(row["input_ids"]) for row in rows) <= length
    text = running_text(words)
    batch = objective.collate(rows)
    tokens = batch["attention_mask"].bool()
    assert batch["input_ids"][tokens].tolist() == text
    assert batch["labels"][:, 1:][tokens].tolist() == [*text[1:], -100]
    assert (batch["labels"][:, 1:][~tokens] == -100).all()
    assert (batch["labels"][:, 0] == -100).all()
    assert (batch["input_ids"][~tokens] == words.pad_token_id).all()
    counts = objective.count_batch(batch)
    assert counts["targets"] == len(text) - 1
    assert counts["unknown_targets"] == 0
    assert objective.rates(counts)["targets_per_token"] == pytest.approx(1 - 1 / len(text))
    assert objective.statistics["tokens"] == len(text)


def test_lengths_are_those_of_the_paper() -> None:
    """95 in 100 are drawn around bptt, the others around its half."""
    words = CtxUlmfitTokenizer.train(["one two"], 20, min_count=1)
    objective = CausalLM(words, max_length=100, seed=1, bptt=70)
    lengths = np.array([len(row["input_ids"]) for row in objective.examples([["one two " * 500]] * 300)][:-1])
    halved = lengths < 52
    assert len(lengths) > 4000
    assert halved.mean() == pytest.approx(0.05, abs=0.012)
    assert lengths[~halved].mean() == pytest.approx(70, abs=0.4)
    assert lengths[~halved].std() == pytest.approx(5, abs=0.3)
    assert lengths[halved].mean() == pytest.approx(35, abs=1.5)


def test_rows_of_one_length(words: CtxUlmfitTokenizer) -> None:
    _, rows = examples(words, 20, bptt_deviation=0.0)
    assert {len(row["input_ids"]) for row in rows[:-1]} == {20}


@pytest.mark.parametrize("length", [2, 7, 20, 5000])
@pytest.mark.parametrize("side", ["right", "left"])
def test_backward_rows_are_the_text_from_its_end(words: CtxUlmfitTokenizer, length: int, side: str) -> None:
    """Each row in the order of the text, and followed by the row before it; each word's target is the one before it."""
    objective, rows = examples(words, length, backward=True)
    text = running_text(words)
    assert [word for row in reversed(rows) for word in row["input_ids"].tolist()] == text
    words.padding_side, before = side, words.padding_side
    batch = objective.collate(list(reversed(rows)))
    words.padding_side = before
    there = batch["attention_mask"].bool()
    assert batch["labels"][:, :-1][there].tolist() == [-100, *text[:-1]]
    assert (batch["labels"][:, :-1][~there] == -100).all()
    assert (batch["labels"][:, -1] == -100).all()


def resolve_targets(batch):
    """Tokens and their targets, row by row; -100 for no target."""
    mask, following = batch["attention_mask"].bool(), batch["labels"][:, 1:]
    assert following.shape == mask.shape
    return [(ids[real].tolist(), after[real].tolist()) for ids, after, real in zip(batch["input_ids"], following, mask)]


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


def test_a_tokenizer_without_a_separator_is_refused(tokenizer):
    with pytest.raises(CtxError, match="has no eos_token"):
        DocumentLM(tokenizer, max_length=8, seed=0)
    with pytest.raises(CtxError, match="max_length=1"):
        DocumentLM(CtxGpt2Tokenizer.train(["a b c"], vocab_size=260), max_length=1, seed=0)


def coded_texts(*codes: str | None) -> list[list[str]]:
    """The numbered documents, with a control code or without."""
    return [
        document if code is None else TextWithCode(document, code)
        for document, code in zip(DOCUMENTS, codes, strict=True)
    ]


@pytest.mark.parametrize("length", [2, 7, 5000])
@pytest.mark.parametrize("make", [DocumentLM, CausalLM])
@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("backward", [False, True])
def test_windows_begin_with_the_control_code(make: type, length: int, packing: bool, backward: bool) -> None:
    """Each window of a document begins with its code, which is not a target; every other token is a target once."""
    if (backward and make is DocumentLM) or (packing and make is CausalLM):
        return
    words = CtxUlmfitTokenizer.train([" ".join(document) for document in DOCUMENTS], 2000, min_count=1)
    words.eos_token = words.eos_token or words.bos_token
    names = ["news", "books and plays"]
    add_control_codes(words, names)
    options = {"packing": True} if packing else {"backward": True} if backward else {}
    objective = make(words, max_length=length, seed=0, control_codes=",".join(names), **options)
    codes = control_code_ids(words, names)
    assert objective.config_fields["control_codes"] == codes
    assert len(set(codes.values())) == 2
    assert not objective.sampling.contiguous
    documents = coded_texts("news", "books and plays", "news", None)
    examples = [example | {"sequence_ids": example.get("sequence_ids", np.ones(len(example["input_ids"]), int))}
                for example in objective.examples(documents)]  # fmt: skip
    firsts = [codes["news"], codes["books and plays"], codes["news"], words.eos_token_id]
    texts = [words(" ".join(document), add_special_tokens=False).input_ids for document in DOCUMENTS]
    expected = []
    for first, text in zip(firsts, texts, strict=True):
        tokens = [*text, words.eos_token_id][:: -1 if backward else 1]
        expected += [[first, *tokens[start : start + length - 1]] for start in range(0, len(tokens), length - 1)]
    windows = []
    for example in examples:
        ids, numbers = example["input_ids"], example["sequence_ids"]
        assert len(ids) <= length
        windows += [ids[numbers == number][:: -1 if backward else 1].tolist() for number in range(1, numbers.max() + 1)]
    assert sorted(windows) == sorted(expected)
    labels = objective.collate(examples)["labels"]
    targets = sorted(labels[labels != -100].tolist())
    assert targets == sorted(token for window in expected for token in window[1:])


def test_control_dropout_and_unknown_codes() -> None:
    words = CtxGpt2Tokenizer.train(["one two three"] * 9, 270)
    add_control_codes(words, ["a", "news"])
    assert control_code_ids(words, ["a", "news"]) == {
        "a": words.convert_tokens_to_ids("a"),  # a word of the vocabulary, as in CTRL
        "news": words.convert_tokens_to_ids("<|news|>"),
    }
    objective = DocumentLM(words, max_length=4, seed=0, control_codes="a,news", control_dropout=0.3)
    windows = list(objective.examples([TextWithCode(["one two three " * 400], "news")]))
    dropped = np.array([window["input_ids"][0] == words.eos_token_id for window in windows])
    assert dropped.mean() == pytest.approx(0.3, abs=0.06)
    with pytest.raises(CtxError, match="there are no control codes to replace"):
        DocumentLM(words, max_length=4, seed=0, control_dropout=0.3)
    with pytest.raises(CtxError, match=r"control code 'law'[\s\S]*a, news"):
        list(objective.examples([TextWithCode(["one"], "law")]))
    with pytest.raises(CtxError, match="'other' is not one token"):
        DocumentLM(words, max_length=4, seed=0, control_codes="a,other")
