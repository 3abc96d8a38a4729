"""Files of news articles: the texts of their fields, and errors of a line that is no article."""

import gzip
import json
from pathlib import Path

import pytest

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.data import load_documents
from hf_ctxmodels.data.documents import NewsArticle

ARTICLE = {
    "domain": "example.org",
    "date": "2019-04-06",
    "authors": ["A. Writer", "B. Editor"],
    "title": " A title ",
    "article": "First line.\nSecond line.",
    "summary": "s" * 51,
}


def read(folder: Path, *rows: object, name: str = "news.jsonl") -> list[NewsArticle]:
    content = "".join(f"{json.dumps(row)}\n" for row in rows).encode()
    (folder / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    return list(load_documents(str(folder / name), news_articles=True))


def test_texts_of_the_fields(tmp_path: Path) -> None:
    """As the released code makes them: authors joined, a date in words, short authors and summaries left out."""
    texts = {**ARTICLE, "date": "April 6, 2019", "authors": "A. Writer, B. Editor", "title": "A title"}
    bare = {**dict.fromkeys(ARTICLE), "article": "Text.", "authors": ["Al Bo"], "summary": "s" * 50, "title": ""}
    found = read(tmp_path, ARTICLE, bare, name="news.jsonl.gz")
    assert [article.fields for article in found] == [texts, {"article": "Text."}]
    assert found[0] == list(texts.values())
    for date in ("04-06-2019", "4-6-2019", "April 6, 2019", "April 06, 2019"):
        (article,) = read(tmp_path, {**ARTICLE, "date": date})
        assert article.fields["date"] == "April 6, 2019"
    both = list(load_documents(str(tmp_path / "news.jsonl*"), news_articles=True))
    assert len(both) == 3
    training, held_out = load_documents(str(tmp_path / "news.jsonl*"), news_articles=True).split(0.5)
    assert len(list(training)) + len(list(held_out)) == 3
    assert next(iter(training.texts())).count("\n") >= 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"date": 2019}, "Field 'date' contains a int"),
        ({"date": "sometime"}, "'sometime' is not a date"),
        ({"date": "2019-02-31"}, "'2019-02-31' is not a date"),
        ({"authors": "A. Writer"}, "Field 'authors' contains a str"),
        ({"authors": ["A. Writer", 3]}, "Field 'authors' contains a list"),
        ({"article": None}, "The article has no text"),
        ({"article": " \n"}, "The article has no text"),
        ({"title": ["A"]}, "Field 'title' contains a list"),
    ],
)
def test_a_wrong_field_is_named_with_its_line(tmp_path: Path, change: dict, message: str) -> None:
    with pytest.raises(CtxError, match=rf"{message}(.|\n)*news.jsonl:2\n"):
        read(tmp_path, ARTICLE, {**ARTICLE, **change})


def test_what_else_cannot_be_read(tmp_path: Path) -> None:
    for field in ARTICLE:
        row = {name: value for name, value in ARTICLE.items() if name != field}
        with pytest.raises(CtxError, match=rf"no field '{field}'; its fields are(.|\n)*news.jsonl:2\n"):
            read(tmp_path, ARTICLE, row)
    with pytest.raises(CtxError, match=r"Expected a JSON object, got list(.|\n)*news.jsonl:1"):
        read(tmp_path, ["no", "article"])
    (tmp_path / "news.txt").write_text("text")
    for source, message in ((tmp_path / "news.txt", r"expected .jsonl"), (tmp_path / "no.jsonl", "No such file")):
        with pytest.raises(CtxError, match=message):
            load_documents(str(source), news_articles=True)
    with pytest.raises(CtxError, match="neither language tags nor translations"):
        load_documents(str(tmp_path / "news.jsonl"), news_articles=True, language_tags=["<en>"])
