"""Rows of news articles: order and dropout of the fields, truncation, windows and targets."""

import numpy as np
import pytest
import torch

from hf_ctxmodels import CtxError, CtxGroverTokenizer
from hf_ctxmodels.core.constants import NEWS_FIELDS
from hf_ctxmodels.data.documents import NewsArticle
from hf_ctxmodels.data.seeding import generator
from hf_ctxmodels.objectives import NewsFieldsLM

LETTERS = "abcdefghijklmnopqrstuvwxyz"
FULL_ARTICLE = NewsArticle({field: LETTERS[number] * 3 for number, field in enumerate(NEWS_FIELDS)})


@pytest.fixture(scope="module")
def tokenizer() -> CtxGroverTokenizer:
    """A tokenizer with one token per byte."""
    return CtxGroverTokenizer.train([LETTERS], 270, model_max_length=1024)


def full_rows(objective: NewsFieldsLM, documents: list, epoch: int = 0) -> list[list[int]]:
    return [[*row["input_ids"].tolist(), row["following"]] for row in objective.examples(documents, epoch)]


def fields_of(tokenizer: CtxGroverTokenizer, row: list[int]) -> list[str]:
    """The fields of a row, in order; their texts consist of different letters."""
    begins = {tokenizer.field_ids(field)[0]: field for field in NEWS_FIELDS}
    fields = [begins[token] for token in row if token in begins]
    assert row == [token for field in fields for token in tokenizer.encode_fields({field: FULL_ARTICLE.fields[field]})]
    return fields


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"article_first": 1, "canonical": 0, "metadata_dropout": 1}, [("article",)]),
        ({"article_first": 0, "canonical": 1}, [NEWS_FIELDS]),
        ({"article_first": 0, "canonical": 0, "metadata_dropout": 1}, [("title", "article"), ("article", "title")]),
    ],
)
def test_options_determine_arrangement(tokenizer: CtxGroverTokenizer, options: dict, expected: list) -> None:
    objective = NewsFieldsLM(tokenizer, max_length=100, seed=0, **options)
    assert {tuple(fields_of(tokenizer, row)) for row in full_rows(objective, [FULL_ARTICLE] * 50)} == set(expected)


def test_arrangements_match_released_code(tokenizer: CtxGroverTokenizer) -> None:
    """Article first, all fields in order, or a random split; fields other than title and article may be dropped."""
    objective = NewsFieldsLM(tokenizer, max_length=100, seed=0)
    metadata = [*NEWS_FIELDS[:4]]
    for index in range(300):
        rng, first, second = generator(7, 0, index), [], []
        sample = rng.random()
        if sample < 0.35:
            first = ["article"]
            second = [field for field in [*metadata, "summary"] if not rng.random() < 0.1]
        elif sample < 0.5:
            first = [*metadata, "article", "summary"]
        else:
            for field in [*metadata, "article", "summary"]:
                if rng.random() < 0.1 and field not in ("article", "title"):
                    pass
                elif rng.random() < 0.5:
                    first += [field] if field != "summary" else []
                else:
                    second.append(field)
        assert objective.arrange(generator(7, 0, index)) == (first, second)


def test_long_articles_are_truncated_or_split(tokenizer: CtxGroverTokenizer) -> None:
    """The article has 46 tokens and the title 10, including start and end tokens: together they exceed a row of 51."""
    article = NewsArticle({"title": "t" * 8, "article": "".join(LETTERS[n % 26] for n in range(44))})
    options = {"article_first": 1, "canonical": 0, "metadata_dropout": 0}
    truncating = NewsFieldsLM(tokenizer, max_length=50, seed=0, cut=1, **options)
    begin, end = tokenizer.field_ids("article")
    text = [begin, *tokenizer.encode_text(article.fields["article"]), end]
    title = tokenizer.encode_fields({"title": "t" * 8})
    assert full_rows(truncating, [article]) == [[*text[:40], tokenizer.pad_token_id, *title]]
    splitting = NewsFieldsLM(tokenizer, max_length=50, seed=0, cut=0, **options)
    windows = [tuple(row) for row in full_rows(splitting, [article] * 400)]
    joined = [*text, *title]
    assert set(windows) == {tuple(joined[start : start + 51]) for start in range(6)}
    default = NewsFieldsLM(tokenizer, max_length=50, seed=0, **options)
    share = np.mean([tokenizer.pad_token_id in row for row in full_rows(default, [article] * 1000)])
    assert share == pytest.approx(0.2, abs=0.05)
    short_rows = NewsFieldsLM(tokenizer, max_length=20, seed=0, cut=1, **options)
    rows = full_rows(short_rows, [article])
    assert len(rows) == round(len(text) / 21), "the article exceeds a row, and the title is dropped"
    assert len({tuple(row) for row in rows}) == len(rows), "windows differ"
    assert all(len(row) == 21 and row[0] in text for row in rows)


def test_targets_are_next_tokens(tokenizer: CtxGroverTokenizer) -> None:
    """Targets are the next tokens, without padding; a special token spelled out in the text is plain text."""
    article = NewsArticle({"title": "t" * 8, "article": "<|padding|><|endofarticle|> " * 2})
    objective = NewsFieldsLM(tokenizer, max_length=60, seed=0, cut=1, article_first=1, canonical=0, metadata_dropout=0)
    rows = list(objective.examples([article, ["Running text.", "Of two sentences."]]))
    batch = objective.collate(rows)
    labels = batch["labels"][:, 1:]
    for number, row in enumerate(rows):
        length = len(row["input_ids"])
        tokens = torch.tensor([*row["input_ids"].tolist(), row["following"]])
        assert batch["attention_mask"][number].sum() == length
        assert torch.equal(labels[number, :length], tokens[1:].masked_fill(tokens[1:] == 0, -100))
        assert (labels[number, length:] == -100).all()
    _, end = tokenizer.field_ids("article")
    assert (rows[0]["input_ids"] == 0).sum() == 1
    assert (labels[0] == end).sum() == 0, "the end token was cut off; the one in the text is plain text"
    text = tokenizer.decode([*rows[1]["input_ids"], rows[1]["following"]])
    assert text == "<|beginarticle|>Running text. Of two sentences.<|endofarticle|>"
    counts = objective.count_batch(batch)
    assert counts["targets"] == sum(len(row["input_ids"]) for row in rows) - 1
    assert objective.statistics["documents"] == 2


def test_rows_depend_only_on_seed_pass_and_index(tokenizer: CtxGroverTokenizer) -> None:
    documents = [FULL_ARTICLE] * 1100  # more than one tokenizer batch
    expected = full_rows(NewsFieldsLM(tokenizer, max_length=20, seed=5), documents)
    objective = NewsFieldsLM(tokenizer, max_length=20, seed=5)
    assert full_rows(objective, documents) == expected
    assert full_rows(objective, documents, epoch=1) != expected
    assert full_rows(NewsFieldsLM(tokenizer, max_length=20, seed=6), documents) != expected
    first_rows = full_rows(objective, documents[:40])
    assert first_rows == expected[: len(first_rows)]


def test_invalid_options(tokenizer: CtxGroverTokenizer) -> None:
    for options, message in (
        ({"cut": 1.5}, "cut=1.5"),
        ({"article_first": 0.8, "canonical": 0.3}, "article_first=0.8 and canonical=0.3"),
        ({"max_length": 1}, "max_length=1"),
    ):
        with pytest.raises(CtxError, match=message):
            NewsFieldsLM(tokenizer, **{"max_length": 8, "seed": 0, **options})
