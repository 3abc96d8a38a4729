"""Rows of news articles: shares and order of the fields, cuts, windows, targets."""

import numpy as np
import pytest
import torch

from hf_ctxmodels import CtxError, CtxGroverTokenizer
from hf_ctxmodels.core.constants import NEWS_FIELDS
from hf_ctxmodels.data.documents import NewsArticle
from hf_ctxmodels.data.seeding import generator
from hf_ctxmodels.objectives import NewsFieldsLM

BYTES = "abcdefghijklmnopqrstuvwxyz"
ALL = NewsArticle({field: BYTES[number] * 3 for number, field in enumerate(NEWS_FIELDS)})


@pytest.fixture(scope="module")
def tokenizer() -> CtxGroverTokenizer:
    """Every byte is a token."""
    return CtxGroverTokenizer.train([BYTES], 270, model_max_length=1024)


def whole_rows(objective: NewsFieldsLM, documents: list, epoch: int = 0) -> list[list[int]]:
    return [[*row["input_ids"].tolist(), row["following"]] for row in objective.examples(documents, epoch)]


def fields_of(tokenizer: CtxGroverTokenizer, row: list[int]) -> list[str]:
    """The fields in their order in a row; each has its own letter."""
    begins = {tokenizer.field_ids(field)[0]: field for field in NEWS_FIELDS}
    fields = [begins[token] for token in row if token in begins]
    assert row == [token for field in fields for token in tokenizer.encode_fields({field: ALL.fields[field]})]
    return fields


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"article_first": 1, "canonical": 0, "metadata_dropout": 1}, [("article",)]),
        ({"article_first": 0, "canonical": 1}, [NEWS_FIELDS]),
        ({"article_first": 0, "canonical": 0, "metadata_dropout": 1}, [("title", "article"), ("article", "title")]),
    ],
)
def test_options_choose_the_kind(tokenizer: CtxGroverTokenizer, options: dict, expected: list) -> None:
    objective = NewsFieldsLM(tokenizer, max_length=100, seed=0, **options)
    assert {tuple(fields_of(tokenizer, row)) for row in whole_rows(objective, [ALL] * 50)} == set(expected)


def test_arrangements_are_those_of_the_released_code(tokenizer: CtxGroverTokenizer) -> None:
    """Draw by draw: the article first, all in order, or two halves; all but title and article may drop out."""
    objective = NewsFieldsLM(tokenizer, max_length=100, seed=0)
    metadata = [*NEWS_FIELDS[:4]]
    for number in range(300):
        draws, first, second = generator(7, 0, number), [], []
        kind = draws.random()
        if kind < 0.35:
            first = ["article"]
            second = [field for field in [*metadata, "summary"] if not draws.random() < 0.1]
        elif kind < 0.5:
            first = [*metadata, "article", "summary"]
        else:
            for field in [*metadata, "article", "summary"]:
                if draws.random() < 0.1 and field not in ("article", "title"):
                    pass
                elif draws.random() < 0.5:
                    first += [field] if field != "summary" else []
                else:
                    second.append(field)
        assert objective.arrange(generator(7, 0, number)) == (first, second)


def test_long_articles_are_cut_or_give_windows(tokenizer: CtxGroverTokenizer) -> None:
    """An article of 46 tokens with its ends and a title of 10 in rows of 51: too long together, and each shorter."""
    article = NewsArticle({"title": "t" * 8, "article": "".join(BYTES[n % 26] for n in range(44))})
    options = {"article_first": 1, "canonical": 0, "metadata_dropout": 0}
    always = NewsFieldsLM(tokenizer, max_length=50, seed=0, cut=1, **options)
    begin, end = tokenizer.field_ids("article")
    text = [begin, *tokenizer.encode_text(article.fields["article"]), end]
    title = tokenizer.encode_fields({"title": "t" * 8})
    assert whole_rows(always, [article]) == [[*text[:40], tokenizer.pad_token_id, *title]]
    never = NewsFieldsLM(tokenizer, max_length=50, seed=0, cut=0, **options)
    windows = [tuple(row) for row in whole_rows(never, [article] * 400)]
    joined = [*text, *title]
    assert set(windows) == {tuple(joined[start : start + 51]) for start in range(6)}
    sometimes = NewsFieldsLM(tokenizer, max_length=50, seed=0, **options)
    share = np.mean([tokenizer.pad_token_id in row for row in whole_rows(sometimes, [article] * 1000)])
    assert share == pytest.approx(0.2, abs=0.05)
    longer = NewsFieldsLM(tokenizer, max_length=20, seed=0, cut=1, **options)
    rows = whole_rows(longer, [article])
    assert len(rows) == round(len(text) / 21), "the article alone is too long, and the title is lost"
    assert len({tuple(row) for row in rows}) == len(rows), "different windows"
    assert all(len(row) == 21 and row[0] in text for row in rows)


def test_targets_are_the_next_tokens_except_padding(tokenizer: CtxGroverTokenizer) -> None:
    """No target is in the input at or before its own place, and text that spells a special token is not one."""
    article = NewsArticle({"title": "t" * 8, "article": "<|padding|><|endofarticle|> " * 2})
    objective = NewsFieldsLM(tokenizer, max_length=60, seed=0, cut=1, article_first=1, canonical=0, metadata_dropout=0)
    rows = list(objective.examples([article, ["Running text.", "Of two sentences."]]))
    batch = objective.collate(rows)
    labels = batch["labels"][:, 1:]
    for number, row in enumerate(rows):
        length = len(row["input_ids"])
        whole = torch.tensor([*row["input_ids"].tolist(), row["following"]])
        assert batch["attention_mask"][number].sum() == length
        assert torch.equal(labels[number, :length], whole[1:].masked_fill(whole[1:] == 0, -100))
        assert (labels[number, length:] == -100).all()
    _, end = tokenizer.field_ids("article")
    assert (rows[0]["input_ids"] == 0).sum() == 1
    assert (labels[0] == end).sum() == 0, "the end was cut off; that in the text is seven bytes"
    text = tokenizer.decode([*rows[1]["input_ids"], rows[1]["following"]])
    assert text == "<|beginarticle|>Running text. Of two sentences.<|endofarticle|>"
    counts = objective.count_batch(batch)
    assert counts["targets"] == sum(len(row["input_ids"]) for row in rows) - 1
    assert objective.statistics["documents"] == 2


def test_rows_depend_on_seed_pass_and_number_alone(tokenizer: CtxGroverTokenizer) -> None:
    documents = [ALL] * 1100  # more than one batch of the tokenizer
    first = whole_rows(NewsFieldsLM(tokenizer, max_length=20, seed=5), documents)
    again = NewsFieldsLM(tokenizer, max_length=20, seed=5)
    assert whole_rows(again, documents) == first
    assert whole_rows(again, documents, epoch=1) != first
    assert whole_rows(NewsFieldsLM(tokenizer, max_length=20, seed=6), documents) != first
    some = whole_rows(again, documents[:40])
    assert some == first[: len(some)]


def test_what_cannot_be(tokenizer: CtxGroverTokenizer) -> None:
    for options, message in (
        ({"cut": 1.5}, "cut=1.5"),
        ({"article_first": 0.8, "canonical": 0.3}, "article_first=0.8 and canonical=0.3"),
        ({"max_length": 1}, "max_length=1"),
    ):
        with pytest.raises(CtxError, match=message):
            NewsFieldsLM(tokenizer, **{"max_length": 8, "seed": 0, **options})
