"""Parts of a corpus: file ranges, document numbers, samples, and remote or compressed files."""

import gzip
import json
import pickle
from itertools import pairwise
from pathlib import Path

import fsspec
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.data import document_sources, documents, load_documents
from hf_ctxmodels.data.document_sources import DataArguments, document_files
from hf_ctxmodels.data.documents import Documents, NoDocumentError, SampledDocuments
from hf_ctxmodels.data.files import describe_content, split_columns
from hf_ctxmodels.data.text_files import FileRange, TextColumns, read_file

SENTENCES = [f"Sentence number {number}." for number in range(60)]


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (documents, document_sources):
        monkeypatch.setattr(module, "PART_BYTES", 100)


def read_all(selection: Documents) -> list[list[str]]:
    try:
        return list(selection)
    except NoDocumentError:
        return []


@given(
    lines=st.lists(st.sampled_from(["A.", "\ufeff", "", " ", "\u3000", "é" * 9, "x y", "\x85", "\u2028"]), max_size=25),
    newline=st.sampled_from(["\n", "\r\n", "\r"]),
    has_bom=st.booleans(),
    trailing=st.booleans(),
    separator=st.sampled_from(["line", "blank"]),
    cuts=st.lists(st.integers(1, 120), max_size=5),
)
def test_file_ranges_cover_all_documents(tmp_path_factory, lines, newline, has_bom, trailing, separator, cuts):
    path = tmp_path_factory.mktemp("ranges") / "a.txt"
    path.write_bytes((b"\xef\xbb\xbf" if has_bom else b"") + (newline.join(lines) + newline * trailing).encode())
    columns = TextColumns()
    bounds = [0, *sorted(set(cuts)), None]
    ranges = [FileRange(str(path), start or 0, stop) for start, stop in pairwise(bounds)]
    actual = [document for file_range in ranges for document in read_file(file_range, columns, separator)]
    assert actual == list(read_file(FileRange(str(path)), columns, separator))


def test_error_reports_line_number(tmp_path: Path, small_parts: None) -> None:
    rows = [json.dumps({"text": sentence}) for sentence in SENTENCES]
    path = tmp_path / "a.jsonl"
    for invalid_line, message in (("{", "Invalid JSON"), ('{"body": "a"}', "No column 'text'"), ("[1]", "got list")):
        path.write_text("\n".join([*rows[:41], invalid_line, *rows[41:]]))
        with pytest.raises(CtxError, match=rf"{message}(.|\n)*a.jsonl:42\n"):
            list(load_documents(str(path)))
    path.write_bytes("\n".join(rows[:41]).encode() + b"\n\xff\n")
    position = len("\n".join(rows[:41])) + 1
    with pytest.raises(CtxError, match=f"byte {position} is 0xff"):
        list(load_documents(str(path)))


def write_corpus(folder: Path) -> list[str]:
    """A corpus with all kinds of parts: file groups, byte ranges, row groups, compressed and paired files."""
    (folder / "small").mkdir()
    for number in range(10):
        (folder / "small" / f"{number}.txt").write_text("\n\n".join(SENTENCES[number::10]) + "\n")
    (folder / "large.txt").write_text("\n".join(SENTENCES))
    (folder / "large.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in SENTENCES))
    pyarrow.parquet.write_table(pyarrow.table({"text": SENTENCES}), folder / "large.parquet", row_group_size=7)
    (folder / "packed.jsonl.gz").write_bytes(gzip.compress((folder / "large.jsonl").read_bytes()))
    (folder / "pairs.tsv").write_text("".join(f"{a}\t{b}\t1\n" for a, b in zip(SENTENCES, SENTENCES[::-1])))
    names = ("small/*.txt", "large.txt", "large.jsonl", "large.parquet", "packed.jsonl.gz", "pairs.tsv=1,2,3")
    return [str(folder / name) for name in names]


def test_parts_equal_whole_corpus(tmp_path: Path, small_parts: None) -> None:
    corpus = load_documents(*write_corpus(tmp_path), language_tags=["-"] * 5 + ["<de>"])
    parts = corpus.parts()
    assert len(parts) > 50
    assert len(list(corpus)) == 10 + 5 * 60
    assert [document for part in parts for document in part] == list(corpus)
    assert corpus.num_bytes == sum(part.num_bytes for part in parts)
    for subset in corpus.split(0.25):
        unpickled = [pickle.loads(pickle.dumps(part)) for part in subset.parts()]
        assert [document for part in unpickled for document in part] == list(subset)
        assert [document for source in subset.by_source() for document in read_all(source)] == list(subset)
    assert 50 < len(list(corpus.split(0.25)[1])) < 110


def test_small_corpus_is_one_part(tmp_path: Path) -> None:
    paths = write_corpus(tmp_path)
    corpus = load_documents(*paths)
    assert corpus.parts() == [corpus]
    assert [part.first for part in corpus.layout] == [0]
    (held_out,) = corpus.split(0.5)[1].parts()
    assert list(corpus) == [document for path in paths for document in load_documents(path)]
    held_out_indices = held_out.held_out
    assert list(held_out) == [document for index, document in enumerate(corpus) if index in held_out_indices]
    limited = load_documents(*paths, max_documents=70)
    assert list(limited) == list(corpus)[:70]
    assert [len(list(source)) for source in limited.by_source()] == [10, *[60] * 5]


def test_reading_stops_after_max_documents(tmp_path: Path, small_parts: None) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes("\n\n".join(SENTENCES).encode() + b"\n\n\xff")
    limited = load_documents(str(path), max_documents=40)
    assert limited.parts() == [limited]
    training, held_out = limited.split(0.1)
    assert len(list(training)) + len(list(held_out)) == 40
    with pytest.raises(CtxError, match="max_documents"):
        load_documents(str(path), max_documents=0)


@pytest.mark.parametrize("streaming", [False, True])
def test_dataset_rows_are_split_into_parts(
    tmp_path: Path, small_parts: None, streaming: bool, capsys: pytest.CaptureFixture
) -> None:
    for number in range(3):
        texts = SENTENCES[20 * number : 20 * number + 20]
        (tmp_path / f"train-{number}.csv").write_text("\n".join(["text", *texts]) + "\n")
    corpus = load_documents(str(tmp_path), streaming=streaming)
    assert list(corpus) == [[sentence] for sentence in SENTENCES]
    assert len(corpus.parts()) == 3 if streaming else len(corpus.parts()) > 10
    assert [document for part in pickle.loads(pickle.dumps(corpus.parts())) for document in part] == list(corpus)
    assert "warning" not in capsys.readouterr().err
    data = DataArguments([str(tmp_path)], streaming=streaming, validation_fraction=0.1)
    held_out = data.load()[1]
    unstreamed = load_documents(str(tmp_path)).split(0.1)[1]
    assert ("may hold out other documents" in capsys.readouterr().err) == (list(held_out) != list(unstreamed))


def compressed(suffix: str, data: bytes) -> bytes:
    if suffix == ".gz":
        return gzip.compress(data)
    return pyarrow.compress(data, codec="zstd", asbytes=True) if suffix else data


@pytest.fixture
def remote() -> str:
    filesystem = fsspec.filesystem("memory")
    filesystem.store.clear()
    return "memory://corpus"


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
@pytest.mark.parametrize("ext", [".txt", ".jsonl", ".parquet"])
def test_remote_and_compressed_files(tmp_path: Path, small_parts: None, remote: str, ext: str, suffix: str) -> None:
    local = tmp_path / "nested" / "text"
    local.mkdir(parents=True)
    filesystem = fsspec.filesystem("memory")
    for name, texts in (("a", SENTENCES[:30]), ("b", SENTENCES[30:])):
        sink = pyarrow.BufferOutputStream()
        if ext == ".parquet":
            pyarrow.parquet.write_table(pyarrow.table({"text": texts}), sink, row_group_size=10)
        else:
            rows = texts if ext == ".txt" else [json.dumps({"text": text}) for text in texts]
            sink.write("\n".join(rows).encode())
        data = compressed(suffix, sink.getvalue().to_pybytes())
        (local / f"{name}{ext}{suffix}").write_bytes(data)
        filesystem.pipe_file(f"/corpus/nested/text/{name}{ext}{suffix}", data)
    expected = [[sentence] for sentence in SENTENCES]
    for folder in (tmp_path, f"file://{tmp_path}", remote):
        for pattern in ("", f"/nested/*/*{ext}{suffix}"):
            corpus = load_documents(f"{folder}{pattern}", document_separator="line")
            assert [document for part in corpus.parts() for document in part] == expected
            assert len(corpus.parts()) > (1 if suffix else 3)
        assert list(load_documents(f"{folder}/nested/text/a{ext}{suffix}", document_separator="line")) == expected[:30]


def test_large_compressed_file_is_one_part(tmp_path: Path, small_parts: None, capsys) -> None:
    text = np.random.default_rng(0).integers(97, 123, size=4000, dtype=np.uint8).tobytes()
    (tmp_path / "large.txt.gz").write_bytes(gzip.compress(text))
    assert len(load_documents(str(tmp_path / "large.txt.gz")).parts()) == 1
    assert "large.txt.gz is compressed and large: one process reads it" in capsys.readouterr().err


def test_errors_of_remote_and_compressed_files(tmp_path: Path, remote: str) -> None:
    with pytest.raises(CtxError, match=r"needs the package s3fs(.|\n)*pip install s3fs"):
        load_documents("s3://bucket/corpus/*.txt")
    with pytest.raises(CtxError, match="URL cannot be opened"):
        load_documents("unknown://bucket/a.txt")
    for name in ("a.txt", "*.txt", "folder"):
        with pytest.raises(CtxError, match="No such file"):
            load_documents(f"{remote}/{name}")
    path = tmp_path / "a.txt.zst"
    path.write_bytes(compressed(".zst", " ".join(SENTENCES).encode())[:-20])
    with pytest.raises(CtxError, match=r"The Zstandard file is damaged(.|\n)*a.txt.zst"):
        list(load_documents(str(path)))


@pytest.mark.parametrize("num_bytes", [300, 3000, 1 << 20])
def test_sample_covers_all_parts(tmp_path: Path, small_parts: None, monkeypatch, num_bytes: int) -> None:
    monkeypatch.setattr(documents, "_MIN_SHARE", 10)
    path = tmp_path / "a.txt"
    path.write_text("\n".join(f"Sentence number {number:04}." for number in range(1000)))
    training, _ = load_documents(str(path)).split(0.1)
    sample = SampledDocuments(training, num_bytes)
    sampled = list(sample)
    assert list(sample) == sampled
    assert [document for document in training if document in sampled] == sampled, "in order, none held out"
    size = sum(len(sentence) for document in sampled for sentence in document)
    assert size == pytest.approx(min(num_bytes, 900 * 21), rel=0.6)
    numbers = [int(document[0][-5:-1]) for document in sampled]
    assert numbers[0] < 200
    assert numbers[-1] > 800
    assert list(SampledDocuments(training, num_bytes, seed=1)) != sampled or num_bytes > 3000


def test_sample_reads_only_the_start_of_a_part(tmp_path: Path) -> None:
    """At most eight times the sampled bytes are read of a part; sources are sampled in proportion to their size."""
    for name, factor in (("a", 1), ("b", 3)):
        (tmp_path / f"{name}.txt").write_bytes(("\n".join(SENTENCES * 20 * factor) + "\n").encode() + b"\xff\n")
    paths = [str(tmp_path / f"{name}.txt") for name in "ab"]
    sources = SampledDocuments(load_documents(*paths, document_separator="line"), 4000).by_source()
    sizes = [sum(len(sentence) for (sentence,) in source) for source in sources]
    assert sizes == pytest.approx([1000, 3000], rel=0.5)


def test_sample_of_the_first_documents(tmp_path: Path) -> None:
    """A sample larger than the first documents has all of them, whatever the size of the file."""
    (tmp_path / "a.txt").write_text("\n".join(SENTENCES * 100))
    first = load_documents(str(tmp_path / "a.txt"), document_separator="line", max_documents=30)
    assert len(list(SampledDocuments(first, 10_000))) == 30


def test_remote_identity_depends_on_content(remote: str) -> None:
    filesystem = fsspec.filesystem("memory")
    for name, text in (("a", "One."), ("b", "Two.")):
        filesystem.pipe_file(f"/corpus/{name}.txt", text.encode())
    identities = [describe_content(f"{remote}{pattern}") for pattern in ("", "/*.txt", "/a.txt")]
    assert [identity.split(", ")[0] for identity in identities] == [
        "corpus (8 bytes",
        "*.txt (8 bytes",
        "a.txt (4 bytes",
    ]
    assert identities == [describe_content(f"{remote}{pattern}") for pattern in ("", "/*.txt", "/a.txt")]
    filesystem.pipe_file("/corpus/a.txt", b"Six.")
    changed = [describe_content(f"{remote}{pattern}") for pattern in ("", "/*.txt", "/a.txt")]
    assert not set(changed) & set(identities)
    assert describe_content("nobody/nothing") == "nobody/nothing"
    # a table of labeled pairs
    filesystem.pipe_file("/corpus/pairs.csv", b"a,b,label\nx,y,1\n")
    identity = describe_content(f"{remote}/pairs.csv=a,b,label")
    filesystem.pipe_file("/corpus/pairs.csv", b"a,b,label\nx,y,0\n")
    assert identity.startswith("pairs.csv (16 bytes")
    assert describe_content(f"{remote}/pairs.csv=a,b,label") != identity


@pytest.mark.parametrize(
    ("source", "file", "columns"),
    [
        ("pairs.csv=a,b,label", "pairs.csv", ["a", "b", "label"]),
        ("day=1/pairs.csv.gz=1,2,3", "day=1/pairs.csv.gz", ["1", "2", "3"]),
        ("s3://data/day=1/pairs.tsv=text.1,text.2,label", "s3://data/day=1/pairs.tsv", ["text.1", "text.2", "label"]),
        ("https://x.org/pairs.csv?v=1=a,b,label", "https://x.org/pairs.csv?v=1", ["a", "b", "label"]),
        ("file:///pairs.csv=score", "/pairs.csv", ["score"]),
        ("org/name:split=test=a,b,score", "org/name:split=test", ["a", "b", "score"]),
        ("org/name:config=x,split=train[:9%]=a,b", "org/name:config=x,split=train[:9%]", ["a", "b"]),
    ],
)
def test_split_columns(source: str, file: str, columns: list[str]) -> None:
    assert split_columns(source) == (file, columns)


@pytest.mark.parametrize(
    "source",
    [
        *("demo", "a.txt", "org/name", "day=1", "day=1/a.txt", "corpus.v2=de.txt.gz", "s3://data/v1.0=*.csv"),
        *("https://x.org/a.csv?v=1", "https://x.org/a.csv?u=1&v=2", "https://x.org/a.csv?u&v=2"),
        *("org/name:split=test", "org/name:config=x,split=test"),
    ],
)
def test_sources_without_columns(source: str) -> None:
    assert split_columns(source) == (source, [])


def test_file_with_equals_sign_is_no_table(tmp_path: Path) -> None:
    file = tmp_path / "pairs.csv=new"
    file.write_text("A text.")
    assert split_columns(str(file)) == (str(file), [])
    assert describe_content(str(file)).startswith("pairs.csv=new (7 bytes")


def test_directory_whose_name_is_a_pattern(tmp_path: Path) -> None:
    """The brackets of a name are not a pattern: the files are read, and identify the directory."""
    directory = tmp_path / "news[1]"
    directory.mkdir()
    identities = set()
    for text in ("One.", "Two."):
        (directory / "a.txt").write_text(text)
        (directory / "b.txt").write_text("Six.")
        assert [*load_documents(str(directory))] == [[text], ["Six."]]
        assert document_files([str(directory)]) == [str(directory / name) for name in ("a.txt", "b.txt")]
        identities.add(describe_content(str(directory)))
    assert len(identities) == 2
    assert all(identity.startswith("news[1] (8 bytes") for identity in identities)


@pytest.mark.parametrize("is_remote", [False, True])
def test_spark_directories(tmp_path: Path, remote: str, is_remote: bool) -> None:
    """Partition directories with marker files and hidden checksums are read; mixed formats raise."""
    folder = remote if is_remote else str(tmp_path)
    filesystem = fsspec.filesystem("memory" if is_remote else "file")
    for number in (1, 2):
        sink = pyarrow.BufferOutputStream()
        texts = SENTENCES[10 * number : 10 * number + 10]
        pyarrow.parquet.write_table(pyarrow.table({"text": texts}), sink)
        directory = f"{folder}/date=2026-01-0{number}"
        filesystem.makedirs(directory, exist_ok=True)
        filesystem.pipe_file(f"{directory}/part-00000-5f.c000.snappy.parquet", sink.getvalue().to_pybytes())
        filesystem.pipe_file(f"{directory}/.part-00000-5f.c000.snappy.parquet.crc", b"crc")
    filesystem.pipe_file(f"{folder}/_SUCCESS", b"")
    assert list(load_documents(folder)) == [[sentence] for sentence in SENTENCES[10:30]]
    for source in (f"{folder}/date=2026-01-01", f"{folder}/date=2026-01-01/*.parquet"):
        assert list(load_documents(source)) == [[sentence] for sentence in SENTENCES[10:20]]
    filesystem.pipe_file(f"{folder}/more.jsonl", b"{}")
    with pytest.raises(CtxError, match=r"and other data(.|\n)*quoted pattern"):
        load_documents(folder)
