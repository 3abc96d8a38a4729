"""Causal language modeling: running text in rows of random length, and joined or packed documents."""

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
def word_tokenizer() -> CtxUlmfitTokenizer:
    texts = [" ".join(document) for document in DOCUMENTS]
    return CtxUlmfitTokenizer.train(texts, 2000, min_count=1)


def running_text(word_tokenizer: CtxUlmfitTokenizer) -> list[int]:
    return [number for document in DOCUMENTS for number in word_tokenizer(" ".join(document)).input_ids]


def examples(word_tokenizer: CtxUlmfitTokenizer, length: int, **options: object) -> tuple[CausalLM, list[dict]]:
    objective = CausalLM(word_tokenizer, max_length=length, seed=0, **options)
    return objective, list(objective.examples(DOCUMENTS))


@pytest.mark.parametrize("length", [2, 7, 20, 5000])
def test_rows_cover_text_and_predict_next_token(word_tokenizer: CtxUlmfitTokenizer, length: int) -> None:
    objective, rows = examples(word_tokenizer, length)
    assert max(len(row["input_ids"]) for row in rows) <= length
    text = running_text(word_tokenizer)
    batch = objective.collate(rows)
    is_token = batch["attention_mask"].bool()
    assert batch["input_ids"][is_token].tolist() == text
    assert batch["labels"][:, 1:][is_token].tolist() == [*text[1:], -100]
    assert (batch["labels"][:, 1:][~is_token] == -100).all()
    assert (batch["labels"][:, 0] == -100).all()
    assert (batch["input_ids"][~is_token] == word_tokenizer.pad_token_id).all()
    counts = objective.count_batch(batch)
    assert counts["targets"] == len(text) - 1
    assert counts["unknown_targets"] == 0
    assert objective.rates(counts)["targets_per_token"] == pytest.approx(1 - 1 / len(text))
    assert objective.statistics["tokens"] == len(text)


def test_random_row_lengths_follow_paper() -> None:
    """95% of the lengths are sampled around bptt, the others around bptt / 2."""
    tokenizer = CtxUlmfitTokenizer.train(["one two"], 20, min_count=1)
    objective = CausalLM(tokenizer, max_length=100, seed=1, bptt=70)
    lengths = np.array([len(row["input_ids"]) for row in objective.examples([["one two " * 500]] * 300)][:-1])
    halved = lengths < 52
    assert len(lengths) > 4000
    assert halved.mean() == pytest.approx(0.05, abs=0.012)
    assert lengths[~halved].mean() == pytest.approx(70, abs=0.4)
    assert lengths[~halved].std() == pytest.approx(5, abs=0.3)
    assert lengths[halved].mean() == pytest.approx(35, abs=1.5)


def test_constant_row_length(word_tokenizer: CtxUlmfitTokenizer) -> None:
    _, rows = examples(word_tokenizer, 20, bptt_deviation=0.0)
    assert {len(row["input_ids"]) for row in rows[:-1]} == {20}


@pytest.mark.parametrize("length", [2, 7, 20, 5000])
@pytest.mark.parametrize("side", ["right", "left"])
def test_backward_rows_predict_previous_token(word_tokenizer: CtxUlmfitTokenizer, length: int, side: str) -> None:
    """Rows are in reverse order, each in the order of the text; the target of a token is the token before it."""
    objective, rows = examples(word_tokenizer, length, backward=True)
    text = running_text(word_tokenizer)
    assert [word for row in reversed(rows) for word in row["input_ids"].tolist()] == text
    word_tokenizer.padding_side, original_side = side, word_tokenizer.padding_side
    batch = objective.collate(list(reversed(rows)))
    word_tokenizer.padding_side = original_side
    is_token = batch["attention_mask"].bool()
    assert batch["labels"][:, :-1][is_token].tolist() == [-100, *text[:-1]]
    assert (batch["labels"][:, :-1][~is_token] == -100).all()
    assert (batch["labels"][:, -1] == -100).all()


def resolve_targets(batch):
    """Tokens and targets of each row; -100 for no target."""
    mask, labels = batch["attention_mask"].bool(), batch["labels"][:, 1:]
    assert labels.shape == mask.shape
    return [(ids[real].tolist(), target[real].tolist()) for ids, target, real in zip(batch["input_ids"], labels, mask)]


@given(shape=shapes, max_length=st.integers(2, 20))
def test_joined_rows_predict_each_token_once(eos_tokenizer, shape, max_length):
    documents, document_of = numbered_documents(shape)
    objective = DocumentLM(eos_tokenizer, max_length=max_length, seed=0)
    rows = list(objective.examples(documents))
    assert all(len(row["input_ids"]) == max_length for row in rows[:-1])
    inputs, predicted = [], []
    for ids, targets in resolve_targets(objective.collate(rows)):
        assert targets[:-1] == ids[1:]
        inputs += ids
        predicted += targets
    sep = eos_tokenizer.eos_token_id
    word_numbers = iter(range(len(document_of)))
    expected = []
    for document in shape:
        expected += [next(word_numbers) + FIRST_WORD for _ in range(sum(document))] + [sep]
    assert predicted == expected, "including the end of a document"
    assert inputs == [sep, *expected[:-1]]


@given(shape=shapes, max_length=st.integers(2, 20))
def test_packed_rows_predict_within_each_document(eos_tokenizer, shape, max_length):
    documents, document_of = numbered_documents(shape)
    objective = DocumentLM(eos_tokenizer, max_length=max_length, seed=0, packing=True)
    rows = list(objective.examples(documents))
    assert all(len(row["input_ids"]) <= max_length for row in rows)
    batch = objective.collate(rows)
    sep, predicted = eos_tokenizer.eos_token_id, []
    for row, (ids, row_targets) in zip(rows, resolve_targets(batch), strict=True):
        for number in range(1, int(row["sequence_ids"].max()) + 1):
            (positions,) = np.nonzero(row["sequence_ids"] == number)
            sequence, targets = [ids[i] for i in positions], [row_targets[i] for i in positions]
            assert targets == [*sequence[1:], -100]
            source_documents = {document_of[token - FIRST_WORD] for token in sequence if token != sep}
            assert len(source_documents) == 1
            predicted += [target for target in targets[:-1] if target != sep]
    assert sorted(predicted) == [number + FIRST_WORD for number in range(len(document_of))]
    assert batch["sequence_ids"].shape == batch["input_ids"].shape


def test_tokenizer_without_eos_token_raises(tokenizer):
    with pytest.raises(CtxError, match="has no eos_token"):
        DocumentLM(tokenizer, max_length=8, seed=0)
    with pytest.raises(CtxError, match="max_length=1"):
        DocumentLM(CtxGpt2Tokenizer.train(["a b c"], vocab_size=260), max_length=1, seed=0)


def coded_texts(*codes: str | None) -> list[list[str]]:
    """The numbered documents with their control codes; None for no code."""
    return [
        document if code is None else TextWithCode(document, code)
        for document, code in zip(DOCUMENTS, codes, strict=True)
    ]


@pytest.mark.parametrize("length", [2, 7, 5000])
@pytest.mark.parametrize(
    ("objective_class", "packing", "backward"),
    [(DocumentLM, False, False), (DocumentLM, True, False), (CausalLM, False, False), (CausalLM, False, True)],
)
def test_windows_start_with_control_code(objective_class: type, length: int, packing: bool, backward: bool) -> None:
    """Each window of a document begins with its code, which is not a target; every other token is a target once."""
    tokenizer = CtxUlmfitTokenizer.train([" ".join(document) for document in DOCUMENTS], 2000, min_count=1)
    tokenizer.eos_token = tokenizer.eos_token or tokenizer.bos_token
    names = ["news", "books and plays"]
    add_control_codes(tokenizer, names)
    options = {"packing": True} if packing else {"backward": True} if backward else {}
    objective = objective_class(tokenizer, max_length=length, seed=0, control_codes=",".join(names), **options)
    codes = control_code_ids(tokenizer, names)
    assert objective.config_fields["control_codes"] == codes
    assert len(set(codes.values())) == 2
    assert not objective.sampling.contiguous
    documents = coded_texts("news", "books and plays", "news", None)
    examples = [example | {"sequence_ids": example.get("sequence_ids", np.ones(len(example["input_ids"]), int))}
                for example in objective.examples(documents)]  # fmt: skip
    first_ids = [codes["news"], codes["books and plays"], codes["news"], tokenizer.eos_token_id]
    texts = [tokenizer(" ".join(document), add_special_tokens=False).input_ids for document in DOCUMENTS]
    expected = []
    for first_id, text in zip(first_ids, texts, strict=True):
        tokens = [*text, tokenizer.eos_token_id][:: -1 if backward else 1]
        expected += [[first_id, *tokens[start : start + length - 1]] for start in range(0, len(tokens), length - 1)]
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
    tokenizer = CtxGpt2Tokenizer.train(["one two three"] * 9, 270)
    add_control_codes(tokenizer, ["a", "news"])
    assert control_code_ids(tokenizer, ["a", "news"]) == {
        "a": tokenizer.convert_tokens_to_ids("a"),  # a word of the vocabulary, as in CTRL
        "news": tokenizer.convert_tokens_to_ids("<|news|>"),
    }
    objective = DocumentLM(tokenizer, max_length=4, seed=0, control_codes="a,news", control_dropout=0.3)
    windows = list(objective.examples([TextWithCode(["one two three " * 400], "news")]))
    dropped = np.array([window["input_ids"][0] == tokenizer.eos_token_id for window in windows])
    assert dropped.mean() == pytest.approx(0.3, abs=0.06)
    with pytest.raises(CtxError, match="there are no control codes to replace"):
        DocumentLM(tokenizer, max_length=4, seed=0, control_dropout=0.3)
    with pytest.raises(CtxError, match=r"control code 'law'[\s\S]*a, news"):
        list(objective.examples([TextWithCode(["one"], "law")]))
    with pytest.raises(CtxError, match="'other' is not one token"):
        DocumentLM(tokenizer, max_length=4, seed=0, control_codes="a,other")
