"""N-gram overlap of evaluation data with training text."""

import gzip
import json
import pickle
import random

import numpy as np
import pytest
from commands import command_output

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.data import load_documents
from hf_ctxmodels.data.benchmark_files import read_benchmark
from hf_ctxmodels.data.overlap import OverlapRule, measure_overlap, normalize_word

RULE = OverlapRule(min_size=3, max_size=5, max_documents=2)


def ngrams(text, size):
    words = [word for word in map(normalize_word, text.split()) if word]
    return [tuple(words[start : start + size]) for start in range(len(words) - size + 1)]


def random_text(rng, length):
    words = rng.choices(["The", "cat,", "sat", "on", "a", "MAT.", "—", "dog's", "ran"], k=length)
    return " ".join(words)


@pytest.fixture(scope="module")
def texts():
    rng = random.Random(0)
    test = [random_text(rng, length) for length in (2, 9, 7, 12, 30, 1, 8, 6, 5, 7)]
    training = [random_text(rng, rng.randrange(1, 60)) for _ in range(40)]
    return training, test


@pytest.mark.parametrize("num_proc", [1, 2])
def test_overlap_matches_naive_ngram_comparison(tmp_path, texts, num_proc, monkeypatch):
    training, test = texts
    (tmp_path / "train.txt").write_text("\n\n".join(training))
    (tmp_path / "test.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in test))
    monkeypatch.setattr("hf_ctxmodels.data.overlap._BATCH_WORDS", 50)
    monkeypatch.setattr("hf_ctxmodels.data.documents.PART_BYTES", 200)
    monkeypatch.setattr("hf_ctxmodels.data.document_sources.PART_BYTES", 200)
    calls = []

    def map_in_one_process(function, parts, num_proc):  # the processes themselves are tested with `data prepare`
        calls.append(num_proc)
        return map(pickle.loads(pickle.dumps(function)), reversed(parts))

    monkeypatch.setattr("hf_ctxmodels.data.overlap.map_in_processes", map_in_one_process)
    documents = load_documents(str(tmp_path / "train.txt"))
    assert len(documents.parts()) > 5
    result = measure_overlap(documents, [read_benchmark(str(tmp_path / "test.jsonl"))], RULE, num_proc=num_proc)
    assert calls == ([num_proc] if num_proc > 1 else [])
    (file,) = result.files
    lengths = [len(ngrams(text, 1)) for text in test]
    size = min(5, max(3, int(np.percentile(lengths, 5))))
    counts = {}
    for text in training:
        for ngram in set(ngrams(text, size)):
            counts[ngram] = counts.get(ngram, 0) + 1
    matches = [[ngram for ngram in ngrams(text, size) if 0 < counts.get(ngram, 0) <= 2] for text in test]
    dirty = [number for number, matched in enumerate(matches) if matched]
    assert 0 < len(dirty) < len(test)
    assert (result.num_documents, result.num_words) == (40, sum(len(ngrams(text, 1)) for text in training))
    assert (file.ngram_size, file.num_examples, file.num_dirty) == (size, len(test), len(dirty))
    assert file.clean == [number for number in range(len(test)) if number not in dirty]
    assert file.num_short == sum(length < size for length in lengths)
    all_ngrams = [ngram for text in test for ngram in ngrams(text, size)]
    assert file.num_ignored == len({ngram for ngram in all_ngrams if counts.get(ngram, 0) > 2}) > 0
    assert file.ngram_share == pytest.approx(sum(map(len, matches)) / len(all_ngrams))
    training_ngrams = {ngram for text in training for ngram in ngrams(text, 8)}
    matched = [ngram in training_ngrams for text in test for ngram in ngrams(text, 8)]
    assert file.gpt2_share == pytest.approx(np.mean(matched))
    for example, number in zip(file.dirty_examples, dirty, strict=True):
        assert example.location == f"{tmp_path}/test.jsonl:{number + 1}"
        assert (example.matches, example.first_match) == (len(matches[number]), " ".join(matches[number][0]))


SENTENCE = "one two three four five six seven eight nine ten"


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.jsonl", '{"text": "%s"}\n\n{"text": "a b"}\n', '{"text": "a b"}\n'),
        ("a.csv", 'id,text\r\n1,"x,\n%s"\r\n2,"a\nb"\r\n', 'id,text\r\n2,"a\nb"\r\n'),
        ("a.tsv", 'text\tid\n"%s\t1\n"a b\t2', 'text\tid\n"a b\t2'),
        ("a.txt", "id\ttext\n1\t%s\n2\ta b\n", "id\ttext\n2\ta b\n"),
        ("a.txt", "x\n%s\n\na\nb\n", "a\nb\n"),
        ("a.json", None, None),
    ],
    ids=["jsonl", "csv with line breaks in fields", "tsv", "table in .txt", "blocks of lines", "squad"],
)
@pytest.mark.parametrize("compression", ["", ".gz", ".zst"])
def test_clean_examples_keep_input_format(tmp_path, name, content, expected, compression):
    if content is None:
        paragraphs = [{"context": text, "qas": [{"id": text[0], "question": "a?"}]} for text in ("b c", SENTENCE)]
        content, expected = (
            json.dumps({"version": "1", "data": [{"title": "t", "paragraphs": selected}]}) + "\n"
            for selected in (paragraphs, paragraphs[:1])
        )
    else:
        content = content % SENTENCE
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / name).write_bytes(content.encode())
    source = tmp_path / f"{name}{compression}"
    read_benchmark(str(tmp_path / "plain" / name)).write(tmp_path / "plain" / "copy", range(2))
    assert (tmp_path / "plain" / "copy").read_bytes() == content.encode()
    if compression == ".zst":
        import pyarrow

        with pyarrow.CompressedOutputStream(str(source), "zstd") as file:
            file.write(content.encode())
    else:
        source.write_bytes(gzip.compress(content.encode()) if compression else content.encode())
    (tmp_path / "train.txt").write_text(f"Zero {SENTENCE.title()}!\n")
    output_dir = tmp_path / "out"
    output = command_output("data overlap", train=tmp_path / "train.txt", test=source, output_dir=output_dir)
    assert "| 2 | 8 | 1 (50.0%) | 1 |" in output
    assert "one two three four five six seven eight\n" in output
    benchmark = read_benchmark(str(output_dir / "clean" / source.name))
    assert benchmark.select(range(len(benchmark.examples))) == expected
    assert json.loads((output_dir / "overlap.json").read_text())["files"][0]["clean"] == 1
    assert "already holds" in command_output(
        "data overlap", train=tmp_path / "train.txt", test=source, output_dir=output_dir, fails=True
    )


def test_normalized_words():
    """Vowel marks are letters: without them, different words of Hindi would be equal."""
    assert [normalize_word(word) for word in ("(U.S.),", "a_b", "किताब।", "की", "Cafe\u0301!")] == [
        "us", "ab", "किताब", "की", "cafe\u0301",
    ]  # fmt: skip


def test_separators_of_examples(tmp_path):
    (tmp_path / "a.txt").write_text("a\n\nb\nc\n")
    for separator, texts in (("line", ["a", "b", "c"]), ("blank", ["a", "b c"]), ("file", ["a b c"])):
        examples = read_benchmark(str(tmp_path / "a.txt"), separator=separator).examples
        assert [" ".join(example.texts[0].split()) for example in examples] == texts


def test_benchmark_columns(tmp_path):
    rows = [{"passage": {"text": "a b"}, "answers": ["c", "d"], "label": 1}]
    (tmp_path / "a.jsonl").write_text(json.dumps(rows[0]))
    (example,) = read_benchmark(str(tmp_path / "a.jsonl"), ["passage", "answers", "label"]).examples
    assert example.texts == ("a b", "c", "d", "1")
    with pytest.raises(CtxError, match="No column 'text'"):
        read_benchmark(str(tmp_path / "a.jsonl"))
    for source in ("a.parquet", "org/name:split=test", str(tmp_path)):
        with pytest.raises(CtxError, match="Expected a text file"):
            read_benchmark(source)
    with pytest.raises(CtxError, match="max_size"):
        OverlapRule(min_size=9, max_size=8)


@pytest.mark.slow
def test_overlap_of_real_data(shared_data, tmp_path):
    """SQuAD paragraphs that XQuAD contains are found by their n-grams; LAMBADA does not overlap with 25 other books."""
    xquad, squad = (
        [
            paragraph["context"]
            for article in json.loads(gzip.decompress((shared_data / "qa" / name).read_bytes()))["data"]
            for paragraph in article["paragraphs"]
        ]
        for name in ("xquad.en.json.gz", "squad2.dev_part.json.gz")
    )
    (tmp_path / "xquad.txt").write_text("\n\n".join(" ".join(context.split()) for context in xquad))
    benchmark = read_benchmark(str(shared_data / "qa" / "squad2.dev_part.json.gz"))
    (file,) = measure_overlap(load_documents(str(tmp_path / "xquad.txt")), [benchmark]).files
    shared = {number for number, context in enumerate(squad) if context in set(xquad)}
    assert (len(shared), file.num_examples, file.ngram_size) == (54, 430, 13)
    assert shared <= set(range(430)) - set(file.clean)
    lambada = read_benchmark(str(shared_data / "lm" / "lambada" / "lambada_openai_test.part.jsonl.gz"))
    books = load_documents(str(shared_data / "corpus" / "books_fiction.txt.gz"))
    (file,) = measure_overlap(books, [lambada]).files
    assert file.num_dirty == 0
