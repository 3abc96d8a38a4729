"""Sources of documents and news articles, and errors for invalid sources."""

import bz2
import gzip
import io
import json
import lzma
import tarfile
import zipfile
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from datasets import Dataset, DatasetDict
from hypothesis import given
from hypothesis import strategies as st

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.data import load_documents
from hf_ctxmodels.data.demo_corpus import prose_paragraphs
from hf_ctxmodels.data.documents import NewsArticle, NoDocumentError, split_sentences
from hf_ctxmodels.data.text_files import read_lines

DOCUMENTS = [["One sentence.", "Another one!", "A second paragraph."], ["Grüße aus Köln.", "你好。", "我很好。"]]
PARAGRAPHS = [["One sentence. Another one!", "A second paragraph."], ["Grüße aus Köln.", "你好。我很好。"]]


def write(folder, name, data):
    path = folder / name
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    return str(path)


def archive(create, method, *arguments):
    """Bytes of an archive that `create(file, "w")` makes, after a call of its method."""
    file = io.BytesIO()
    with create(file, "w") as open_archive:
        getattr(open_archive, method)(*arguments)
    return file.getvalue()


def tar_file(file, mode):
    return tarfile.open(fileobj=file, mode=mode)


def text_file(paragraphs=PARAGRAPHS, newline="\n"):
    return (newline * 2).join(newline.join(document) for document in paragraphs).encode()


def json_file(rows=None, column="text"):
    rows = rows or [{"id": 1, column: "\n".join(document)} for document in PARAGRAPHS]
    return "\n".join(json.dumps(row, ensure_ascii=False) for row in rows).encode()


def parquet_file(texts=None, column="text"):
    sink = pyarrow.BufferOutputStream()
    table = pyarrow.table({"id": [1, 2], column: texts or ["\n".join(document) for document in PARAGRAPHS]})
    pyarrow.parquet.write_table(table, sink)
    return sink.getvalue().to_pybytes()


@pytest.mark.parametrize("compression", ["", ".gz"])
@pytest.mark.parametrize("extension", ["txt", "jsonl", "parquet"])
def test_file_formats_yield_equal_documents(tmp_path, extension, compression):
    data = {"txt": text_file, "jsonl": json_file, "parquet": parquet_file}[extension]()
    documents = load_documents(write(tmp_path, f"corpus.{extension}{compression}", data))
    assert list(documents) == DOCUMENTS
    assert list(documents) == DOCUMENTS
    assert list(documents.texts()) == ["\n".join(document) for document in DOCUMENTS]


@pytest.mark.parametrize(
    "data",
    [
        b"\xef\xbb\xbf" + text_file(),
        text_file(newline="\r\n"),
        text_file(newline="\r"),
        b"\n \n" + text_file() + b"\n\n\n",
    ],
    ids=["byte order mark", "windows line endings", "old macintosh line endings", "surrounding blank lines"],
)
def test_text_file_variants(tmp_path, data):
    assert list(load_documents(write(tmp_path, "corpus.txt", data))) == DOCUMENTS


def test_text_column(tmp_path):
    for name, data in (("a.jsonl", json_file(column="body")), ("a.parquet", parquet_file(column="body"))):
        path = write(tmp_path, name, data)
        assert list(load_documents(path, text_column="body")) == DOCUMENTS
        with pytest.raises(CtxError, match=r"No column 'units'; the columns are 'id', 'body'"):
            list(load_documents(path, text_column="body", units_column="units"))


SENTENCES = [f"Sentence {number} of the text." for number in range(40)]
WIKITEXT = " \n = Title = \n \n First paragraph . \n Second paragraph . \n \n = = Section = = \n \n Third . \n"


def test_document_separator(tmp_path, capsys, monkeypatch):
    """The separator is guessed from the text, printed unless it is a blank line, and can be set."""
    line_file = write(tmp_path, "news.en.gz", "\n".join(SENTENCES).encode())
    wikitext_file = write(tmp_path, "wiki.txt", (WIKITEXT * 9).encode())
    blank_line_file = write(tmp_path, "blank.txt", ("\n".join(SENTENCES) + "\n\n" + "\n".join(SENTENCES)).encode())
    assert list(load_documents(line_file)) == [[sentence] for sentence in SENTENCES]
    assert "news.en.gz: each line is a document; --document_separator" in capsys.readouterr().err
    assert list(load_documents(wikitext_file))[1] == ["First paragraph .", "Second paragraph ."]
    assert list(load_documents(blank_line_file)) == [SENTENCES, SENTENCES]
    assert not capsys.readouterr().err
    monkeypatch.setenv("RANK", "1")  # only the main process prints
    assert len(list(load_documents(line_file))) > 1
    assert "is a document" not in capsys.readouterr().err
    assert list(load_documents(line_file, document_separator="blank")) == [SENTENCES]
    assert len(list(load_documents(blank_line_file, document_separator="line"))) == 80
    assert list(load_documents(blank_line_file, document_separator="file")) == [SENTENCES * 2]
    large_file = write(tmp_path, "large.txt", (("word " * 10_000 + "\n") * 25 + "\nword").encode())
    assert len(list(load_documents(large_file))) == 26, "the blank line after the first MiB is not read"
    with pytest.raises(CtxError, match=r"suffix '\.tsv'"):
        load_documents(write(tmp_path, "table.tsv.gz", b"a\tb\n"))


def test_suffixes_of_languages(tmp_path):
    for language in ("en", "km"):
        path = write(tmp_path, f"corpus.en-km.{language}", "\n".join(SENTENCES).encode())
        assert list(load_documents(path)) == [[sentence] for sentence in SENTENCES]
    for pattern in ("", "*.??"):
        assert len(list(load_documents(str(tmp_path / pattern), document_separator="line"))) == 80
    with pytest.raises(CtxError, match="The dataset cannot be opened"):  # no such file, thus a Hub id
        load_documents("user/corpus.en")


def test_directory_of_text_files(tmp_path, capsys):
    """Small files are documents, large files are read as single files; names select splits as in `datasets`."""
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "one.txt").write_text("A first line.\nA second line.\n\nThe end.\n")
    with gzip.open(tmp_path / "plain" / "two.txt.gz", "wt") as file:
        file.write("A second document.\nIts second line.\n")
    expected = [["A first line.", "A second line.", "The end."], ["A second document.", "Its second line."]]
    assert [*load_documents(str(tmp_path / "plain"))] == expected
    assert "each file is a document" in capsys.readouterr().err
    (tmp_path / "large").mkdir()
    for name in ("a", "b"):
        (tmp_path / "large" / f"{name}.txt").write_text("A first line.\n\nAnother document.\n" * 3000)
    assert len([*load_documents(str(tmp_path / "large"))]) == 6002
    (tmp_path / "splits").mkdir()
    for split in ("train", "test"):
        (tmp_path / "splits" / f"{split}.txt").write_text(f"The {split} text.\nA line.\n")
        assert [*load_documents(f"{tmp_path / 'splits'}:split={split}")] == [[f"The {split} text.", "A line."]]
    with pytest.raises(CtxError, match=r"splits has no split 'dev'(.|\n)*use one of: train, test"):
        load_documents(f"{tmp_path / 'splits'}:split=dev")
    with pytest.raises(CtxError, match="have no configurations"):
        load_documents(f"{tmp_path / 'splits'}:config=en")
    (tmp_path / "plain" / "three.jsonl").write_text('{"text": "A fourth document."}\n')
    with pytest.raises(CtxError, match="txt files and other data: three"):
        load_documents(str(tmp_path / "plain"))


@pytest.mark.parametrize("streaming", [False, True])
def test_directory_is_loaded_with_datasets(tmp_path, streaming):
    write(tmp_path, "train.jsonl", json_file())
    write(tmp_path, "test.jsonl", json_file([{"id": 3, "text": "Held out."}]))
    assert list(load_documents(str(tmp_path), streaming=streaming)) == DOCUMENTS
    assert list(load_documents(f"{tmp_path}:split=test", streaming=streaming)) == [["Held out."]]


@pytest.fixture(scope="module")
def demo_documents():
    pytest.importorskip("gensim", reason="the demo text is part of gensim (extra `demo`)")
    return list(load_documents("demo"))


def test_demo_corpus_is_clean_text(demo_documents):
    documents = demo_documents
    assert len(documents) > 390
    assert documents[0][0].startswith("Hundreds of people have been forced to vacate their homes")
    num_words = sum(len(sentence.split()) for document in documents for sentence in document)
    assert 400_000 < num_words < 500_000
    text = "\n".join(sentence for document in documents[299:] for sentence in document)
    for markup in ("[[", "{{", "''", "|", "==", "<ref", "&nbsp;", "#REDIRECT"):
        assert markup not in text


def test_prose_paragraphs_skip_wiki_markup():
    lines = [
        "== History ==",
        "* An item of a list that is long enough.",
        "'''Anarchism''' is a ''political'' idea with many old roots.",
        "File:Map.jpg|A map that shows where the sea and the land are.",
        "Too short.",
    ]
    assert prose_paragraphs("\n".join(lines)) == ["Anarchism is a political idea with many old roots."]


INVALID_SOURCES = {
    "missing": ("gone.txt", None, "No such file"),
    "missing table": ("gone.csv", None, "No such file"),
    "unknown suffix": ("corpus.docx", b"x", r"suffix '\.docx'"),
    "empty text": ("corpus.txt", b"", "dataset is empty"),
    "blank text": ("corpus.txt", b" \n\n \n", "dataset is empty"),
    "empty jsonl": ("corpus.jsonl", b"", "dataset is empty"),
    "not utf-8": ("corpus.txt", b"Fine.\nA caf\xe9.\n", r"byte 11 is 0xe9(.|\n)*corpus.txt, byte 11"),
    "not utf-8 after a byte order mark": ("corpus.txt", b"\xef\xbb\xbfA caf\xe9.\n", "byte 8 is 0xe9"),
    "not utf-8, compressed": ("corpus.txt.gz", b"A caf\xe9.\n", "byte 5 after decompression"),
    "utf-16": ("corpus.txt", "One.\nTwo.\n".encode("utf-16-le"), r"UTF-16LE without(.|\n)*byte 1(.|\n)*-f UTF-16LE"),
    "big-endian utf-16": ("corpus.txt", "One.\n".encode("utf-16-be"), r"UTF-16BE without a byte order mark: byte 0"),
    "zip": ("corpus.txt", archive(zipfile.ZipFile, "writestr", "a.txt", "One.\n"), r"zip data, not text(.|\n)*corpus"),
    "gzip without suffix": ("corpus.txt", gzip.compress(b"One.\n"), r"gzip data, not text(.|\n)*end in \.gz"),
    "7z": ("corpus.txt", b"7z\xbc\xaf\x27\x1c\x00\x04", "7z data, not text"),
    "RAR": ("corpus.txt", b"Rar!\x1a\x07\x01\x00", "RAR data, not text"),
    "bzip2": ("corpus.txt", bz2.compress(b"One.\n"), "bzip2 data, not text"),
    "xz": ("corpus.jsonl", lzma.compress(b"One.\n"), "xz data, not text"),
    "tar": (
        "corpus.txt.gz",
        archive(tar_file, "addfile", tarfile.TarInfo("a.txt")),
        r"tar data, not text(.|\n)*after decompression",
    ),
    "bad json": ("corpus.jsonl", b'{"text": "a"}\n{"text": \n', r"JSON(.|\n)*corpus\.jsonl:2"),
    "json list": ("corpus.jsonl", b'["a"]', r"Expected a JSON object, got list(.|\n)*corpus\.jsonl:1"),
    "no column": ("corpus.jsonl", json_file(column="body"), r"No column 'text'; the columns are 'id', 'body'"),
    "no column in parquet": ("corpus.parquet", parquet_file(column="body"), "the columns are 'id', 'body'"),
    "numbers": ("corpus.jsonl", b'{"text": 3}', "'text' contains a int"),
    "no text": ("corpus.jsonl", b'{"text": "a"}\n{"text": " "}', "Document 1 .* has no text"),
    "null": ("corpus.parquet", parquet_file(["a", None]), "Document 1 .* has no text"),
    "damaged parquet": ("corpus.parquet", parquet_file()[:-20], "The Parquet file is damaged"),
}


@pytest.mark.parametrize(("name", "data", "message"), INVALID_SOURCES.values(), ids=INVALID_SOURCES.keys())
def test_invalid_source_error_and_hint(tmp_path, name, data, message):
    path = str(tmp_path / name) if data is None else write(tmp_path, name, data)
    with pytest.raises(CtxError, match=message) as error:
        list(load_documents(path))
    assert error.value.hint


def test_truncated_gzip_file_raises(tmp_path):
    path = tmp_path / "corpus.txt.gz"
    path.write_bytes(gzip.compress(text_file() * 100)[:-20])
    with pytest.raises(CtxError, match="The gzip file is damaged"):
        list(load_documents(str(path)))


def test_unreachable_dataset_raises():
    with pytest.raises(CtxError, match=r"cannot be opened(.|\n)*nobody/nothing"):
        load_documents("nobody/nothing")


@pytest.mark.parametrize("streaming", [False, True])
def test_directories_of_save_to_disk(tmp_path, streaming):
    first, second = (Dataset.from_dict({"text": [text]}) for text in ("One.", "Two."))
    first.save_to_disk(tmp_path / "rows")
    empty = first.select([])
    DatasetDict({"part-1": first, "part-2": second, "none": empty}).save_to_disk(tmp_path / "splits")
    assert list(load_documents(str(tmp_path / "rows"), streaming=streaming)) == [["One."]]
    assert list(load_documents(f"{tmp_path / 'splits'}:split=part-2", streaming=streaming)) == [["Two."]]
    for name, split, splits in (("rows", "test", "train"), ("splits", "train", "part-1, part-2, none")):
        with pytest.raises(CtxError, match=f"no split '{split}'") as error:
            load_documents(f"{tmp_path / name}:split={split}", streaming=streaming)
        location = f"{tmp_path / name}:split={split}"
        assert (error.value.location, error.value.hint) == (location, f"use one of: {splits}.")
    with pytest.raises(CtxError, match="cannot be opened: it has no rows"):
        load_documents(f"{tmp_path / 'splits'}:split=none", streaming=streaming)


@pytest.mark.parametrize(("name", "content"), [("state.json", "{}"), ("dataset_dict.json", '{"parts": ["train"]}')])
def test_directory_with_another_file_of_this_name_is_loaded(tmp_path, monkeypatch, name, content):
    """The file is not of `save_to_disk`; an IndexError of `load_dataset` does not mean that the dataset is empty."""
    write(tmp_path, name, content.encode())
    monkeypatch.setattr("datasets.load_dataset", lambda *_, **__: Dataset.from_dict({"text": ["One."]}))
    assert list(load_documents(str(tmp_path))) == [["One."]]
    monkeypatch.setattr("datasets.load_dataset", lambda *_, **__: [][0])
    with pytest.raises(IndexError):
        load_documents(str(tmp_path))


@pytest.mark.parametrize("extension", ["jsonl", "parquet"])
def test_blank_lines_of_records_are_no_paragraphs(tmp_path, extension):
    texts = ["One.\n\n \nTwo.", "\n\n"]
    data = json_file([{"text": text} for text in texts]) if extension == "jsonl" else parquet_file(texts)
    documents = load_documents(write(tmp_path, f"corpus.{extension}", data))
    assert list(documents.paragraphs()) == [["One.", "Two."]]


def test_empty_documents_are_skipped(tmp_path):
    path = write(tmp_path, "a.jsonl", b'{"text": ""}\n{"text": "A."}\n{"text": null}')
    assert list(load_documents(path, skip_empty_documents=True)) == [["A."]]


@given(count=st.integers(1, 120), fraction=st.sampled_from([0.5, 0.34, 0.1, 0.05, 0.01]), seed=st.integers(0, 100))
def test_split_size_and_stability(tmp_path_factory, count, fraction, seed):
    path = tmp_path_factory.mktemp("split") / "a.txt"

    def split_numbers(num_documents):
        path.write_text("\n\n".join(f"w{index}" for index in range(num_documents)))
        numbers = []
        for subset in load_documents(str(path)).split(fraction, seed):
            try:
                numbers.append([int(sentence[1:]) for (sentence,) in subset])
            except NoDocumentError:
                numbers.append([])
        return numbers

    training, held_out = split_numbers(count)
    assert sorted(training + held_out) == list(range(count))
    block_size = round(1 / fraction)
    assert count // block_size <= len(held_out) <= -(-count // block_size)
    longer_training, longer_held_out = split_numbers(count + 7)
    assert set(training) <= set(longer_training), "the subset of a document must not depend on later documents"
    assert set(held_out) <= set(longer_held_out)


def test_pattern_reads_files_sorted_by_name(tmp_path):
    (tmp_path / "b.txt").write_text("Third.\n")
    (tmp_path / "c.md").write_text("Not asked for.\n")
    with gzip.open(tmp_path / "a.txt.gz", "wt") as file:
        file.write("First.\n\nSecond.\n")
    documents = load_documents(str(tmp_path / "*.txt*"))
    assert list(documents) == [["First."], ["Second."], ["Third."]]
    with pytest.raises(CtxError, match="No such file"):
        load_documents(str(tmp_path / "z*.txt"))
    with pytest.raises(CtxError, match=r"suffix '\.md'"):
        load_documents(str(tmp_path / "*"))


def test_sources_are_concatenated(tmp_path, demo_documents):
    (tmp_path / "b.txt").write_text("Second.")
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "First."}))
    documents = load_documents(str(tmp_path / "a.jsonl"), str(tmp_path / "*.txt"), "demo")
    assert list(documents) == [["First."], ["Second."], *demo_documents]
    assert documents.name == f"a.jsonl, {tmp_path / '*.txt'}, demo"


@pytest.mark.parametrize("fraction", [0, 0.6, -1])
def test_invalid_split_fraction_raises(fraction):
    with pytest.raises(CtxError, match="validation_fraction"):
        load_documents("demo").split(fraction)


@given(st.text(alphabet="aB1.!?…。।؟ \n\"')(”“é", max_size=60))
def test_sentence_splitting_keeps_all_characters(text):
    sentences = split_sentences(text)
    assert "".join("".join(sentences).split()) == "".join(text.split())
    assert all(sentence == sentence.strip() != "" for sentence in sentences)


@pytest.mark.parametrize(
    ("paragraph", "count"),
    [
        ("Mr. J. Smith of the U.S. Army came. He left!", 2),
        ('"Is it late?" she asked. "No." He slept.', 3),
        ("It costs 3.50 or so... and more. (Really?) Yes.", 3),
        ("See e.g. Fig. 3 of vol. II.", 1),
        ("Das ist z.B. gut. Das Ende.", 2),
        ("你好。我很好！真的？", 3),
        ('यह एक वाक्य है। क्या यह दूसरा है? हाँ।। वह बोला, "ठीक है।" फिर वह गया।', 5),
        ("هل تعلم؟! نعم. «لماذا؟» سألت.", 4),
        ("یہ ایک جملہ ہے۔یہ دوسرا ہے۔", 2),
        ("¿Qué? ¡Nada! Fin", 3),
        ("the plot , if any , is thin . watch it ? no ... not me . dr. who said so .", 4),
        ("   ", 0),
    ],
)
def test_sentence_boundaries(paragraph, count):
    assert len(split_sentences(paragraph)) == count


def test_mixed_source_types(tmp_path):
    """Plain text, text with translations and labeled pairs; `-` means no translations or no tag."""
    (tmp_path / "a.txt").write_text("One. Two.\n")
    (tmp_path / "b.txt").write_text("A cat.\n")
    (tmp_path / "c.txt").write_text("Eine Katze.\n")
    (tmp_path / "d.tsv").write_text("x\ty\tz\nA dog.\tno\tIt ran.\n \tno\tIt ran.\n")
    (tmp_path / "e.jsonl").write_text('{"x": null, "y": "b", "z": "1"}\n{"x": "A", "y": "b", "z": 1}\n')
    names = [str(tmp_path / name) for name in ("a.txt", "b.txt", "d.tsv=x,z,y")]
    translations = ["-", str(tmp_path / "c.txt"), "-"]
    documents = load_documents(*names, translations=translations, language_tags=["-", "<de>", "-"])
    loaded = list(documents)
    assert loaded == [["One.", "Two."], ["A cat.", "<de> Eine Katze."], ["A dog.", "It ran."]]
    assert [type(document).__name__ for document in loaded] == ["list", "TranslatedText", "LabeledPair"]
    assert loaded[2].label == "no"
    assert list(documents.texts()) == ["One.\nTwo.", "A cat.\t<de> Eine Katze.", "A dog.\nIt ran."]
    tagged = list(load_documents(names[0], names[2], language_tags=["<a>", "<d>"]))
    assert tagged == [["<a> One.", "<a> Two."], ["<d> A dog.", "<d> It ran."]]
    assert tagged[1].label == "no"
    assert list(load_documents(f"{tmp_path / 'e.jsonl'}=x,y,z")) == [["A", "b"]]
    with pytest.raises(CtxError, match="FILE=FIRST,SECOND,LABEL"):
        load_documents(f"{tmp_path / 'd.tsv'}=x,z")
    with pytest.raises(CtxError, match="No such file"):
        load_documents(f"{tmp_path / 'e.tsv'}=x,y,z")
    with pytest.raises(CtxError, match="No column 'w'"):
        list(load_documents(f"{tmp_path / 'd.tsv'}=x,y,w"))


ARTICLE = {
    "domain": "example.org",
    "date": "2019-04-06",
    "authors": ["A. Writer", "B. Editor"],
    "title": " A title ",
    "article": "First line.\nSecond line.",
    "summary": "s" * 51,
}


def read_news(folder: Path, *rows: object, name: str = "news.jsonl") -> list[NewsArticle]:
    return list(load_documents(write(folder, name, json_file(rows)), news_articles=True))


def test_news_article_fields(tmp_path: Path) -> None:
    """As in the released code: joined authors, dates in words; short authors and summaries are dropped."""
    expected = {**ARTICLE, "date": "April 6, 2019", "authors": "A. Writer, B. Editor", "title": "A title"}
    minimal = {**dict.fromkeys(ARTICLE), "article": "Text.", "authors": ["Al Bo"], "summary": "s" * 50, "title": ""}
    articles = read_news(tmp_path, ARTICLE, minimal, name="news.jsonl.gz")
    assert [article.fields for article in articles] == [expected, {"article": "Text."}]
    assert articles[0] == list(expected.values())
    for date in ("04-06-2019", "4-6-2019", "April 6, 2019", "April 06, 2019"):
        (article,) = read_news(tmp_path, {**ARTICLE, "date": date})
        assert article.fields["date"] == "April 6, 2019"
    all_articles = list(load_documents(str(tmp_path / "news.jsonl*"), news_articles=True))
    assert len(all_articles) == 3
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
def test_invalid_news_field_error_reports_line(tmp_path: Path, change: dict, message: str) -> None:
    with pytest.raises(CtxError, match=rf"{message}(.|\n)*news.jsonl:2\n"):
        read_news(tmp_path, ARTICLE, {**ARTICLE, **change})


def test_invalid_news_files(tmp_path: Path) -> None:
    for field in ARTICLE:
        row = {name: value for name, value in ARTICLE.items() if name != field}
        with pytest.raises(CtxError, match=rf"no field '{field}'; its fields are(.|\n)*news.jsonl:2\n"):
            read_news(tmp_path, ARTICLE, row)
    with pytest.raises(CtxError, match=r"Expected a JSON object, got list(.|\n)*news.jsonl:1"):
        read_news(tmp_path, ["no", "article"])
    (tmp_path / "news.txt").write_text("text")
    for source, message in ((tmp_path / "news.txt", r"expected .jsonl"), (tmp_path / "no.jsonl", "No such file")):
        with pytest.raises(CtxError, match=message):
            load_documents(str(source), news_articles=True)
    with pytest.raises(CtxError, match="neither language tags nor translations"):
        load_documents(str(tmp_path / "news.jsonl"), news_articles=True, language_tags=["<en>"])


def test_stray_nul_characters_are_text(tmp_path):
    (tmp_path / "corpus.txt").write_bytes(b"a\0b\nA \0\0 cat sat.\n")
    assert list(read_lines(tmp_path / "corpus.txt")) == ["a\0b\n", "A \0\0 cat sat.\n"]


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ("a.jsonl", {"units_column": "units", "control_codes": ["News"]}, "--control_codes cannot be combined"),
        ("a.jsonl", {"control_column": "code", "control_codes": ["News"]}, "--control_column cannot be combined"),
        ("a.txt", {"translations": ["b.txt"], "control_codes": ["News"]}, "have no control codes"),
        ("a.tsv=a,b,label", {"control_codes": ["News"]}, "have no control codes"),
    ],
)
def test_control_codes_that_would_replace_other_data_raise(tmp_path, monkeypatch, source, options, message):
    """The units, the code of the column, or the label was lost."""
    monkeypatch.chdir(tmp_path)
    Path("a.jsonl").write_text('{"text": "New York.", "units": ["New York"], "code": "A"}\n')
    Path("a.tsv").write_text("a\tb\tlabel\nx\ty\t1\n")
    for name in ("a.txt", "b.txt"):
        Path(name).write_text("A text.\n")
    with pytest.raises(CtxError, match=message):
        load_documents(source, **options)
    if message == "have no control codes":
        options["control_codes"] = ["-"]
        assert len([*load_documents(source, **options)]) == 1
