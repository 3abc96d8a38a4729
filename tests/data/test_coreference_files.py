"""Coreference files and the windows of their documents."""

import gzip
from pathlib import Path

import pytest

from hf_ctxmodels import CtxError
from hf_ctxmodels.data.coreference_files import CoreferenceDocument, read_coreference

CONLL = """#begin document (a); part 0
a\t0\t0\tAnn\t(1)|(25|(24)
a\t0\t1\tsaw\t-
a\t0\t2\ther\t(2|(1)
a\t0\t3\tcat\t2)|25)

a\t0\t0\tIt\t(2)
a\t0\t1\tslept\t-
#end document
#begin document (b); part 1
b 1 0 She (1)
"""
CONLLU = "\n".join(
    [
        "# newdoc id = a",
        "1\tAnn\t_\t_\t_\t_\t0\troot\t_\tEntity=(1-person-new-cf1-1-sgl)|SpaceAfter=No",
        "2-3\tsaw her\t_\t_\t_\t_\t_\t_\t_\tEntity=(9)",
        "2\tsaw\t_\t_\t_\t_\t1\tdep\t_\tEntity=(25-event-new",
        "3\ther\t_\t_\t_\t_\t1\tdep\t_\tEntity=(2-animal-new(1-person-giv:act-cf1-1-ana)",
        "4\tcat\t_\t_\t_\t_\t1\tdep\t_\tEntity=2)25)",
        "",
        "1\tIt\t_\t_\t_\t_\t0\troot\t_\tEntity=(2)",
        "",
    ]
)


def write(file: Path, text: str) -> Path:
    data = text.encode()
    file.write_bytes(gzip.compress(data) if file.suffix == ".gz" else data)
    return file


def test_nested_clusters_are_read(tmp_path: Path) -> None:
    first, second = read_coreference(write(tmp_path / "a.conll.gz", CONLL))
    assert first.sentences == [["Ann", "saw", "her", "cat"], ["It", "slept"]]
    assert first.clusters == [[(0, 1), (2, 3)], [(0, 4)], [(2, 4), (4, 5)]]  # (24) has the span of (1)
    assert (second.name, second.clusters) == ("b; part 1", [[(0, 1)]])
    [document] = read_coreference(write(tmp_path / "a.conllu", CONLLU))
    assert document.name == "a"
    assert document.clusters == [[(0, 1), (2, 3)], [(1, 4)], [(2, 4), (4, 5)]]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.conll", CONLL.replace("2)|25)", "2)"), r"\(25 does not end.*(?s:.*)a\.conll:2"),
        ("a.conll", CONLL.replace("(2)", "2)"), r"2\) does not begin(?s:.*)a\.conll:7"),
        ("a.conll", CONLL.replace("(2)", "(2[1/2])"), "Not a list of mentions(?s:.*)several parts"),
        ("a.conll", "a word\n", "expected the word in column 4"),
        ("a.jsonl", '{"sentences": ["Ann slept."]}', "(?s)TypeError: a sentence is not a list.*a.jsonl:1"),
        ("a.jsonl", '{"sentences": [["a", " "]]}', "(?s)Not a document: a word is blank.*a.jsonl:1"),
        ("a.jsonl", '{"sentences": [["a"]], "clusters": [[[0, 1]]]}', r"\[0, 1\] is not a span of 1 words"),
        ("a.conllu", "# newdoc\n", "no documents"),
    ],
)
def test_invalid_file_raises(tmp_path: Path, name: str, text: str, message: str) -> None:
    with pytest.raises(CtxError, match=message):
        read_coreference(write(tmp_path / name, text))


def test_windows_keep_sentences_and_their_clusters() -> None:
    sentences = [["a"] * 3, ["b"] * 4, ["c"] * 2, ["d"] * 11, ["e"]]
    document = CoreferenceDocument("x", sentences, [[(0, 1), (6, 7), (7, 9)], [(9, 12), (18, 20), (20, 21)]], "f:1")
    windows = document.windows(8)
    assert [[len(sentence) for sentence in window.sentences] for window in windows] == [[3, 4], [2], [8], [3, 1]]
    assert [window.clusters for window in windows] == [[[(0, 1), (6, 7)]], [[(0, 2)]], [[(0, 3)]], [[(1, 3), (3, 4)]]]
    assert [word for window in windows for word in window.words] == document.words


@pytest.mark.slow
def test_counts_match_corpus_documentation(shared_data: Path) -> None:
    """Counts from the documentation: mentions of LitBank; spans, clusters and coreferent spans of GUM."""
    for name, expected in (
        ("coref/litbank/litbank.coref.conll.gz", [67, 142197, 19550, 1411, 15684]),
        ("ner_pos/ud_english_gum/en_gum-ud-dev.conllu.gz", [30, 28119, 7897, 1102, 5059]),
    ):
        documents = read_coreference(shared_data / name)
        clusters = [cluster for document in documents for cluster in document.clusters]
        coreferent = [cluster for cluster in clusters if len(cluster) > 1]
        num_words, num_mentions = sum(len(d.words) for d in documents), sum(map(len, clusters))
        assert [len(documents), num_words, num_mentions, len(coreferent), sum(map(len, coreferent))] == expected
