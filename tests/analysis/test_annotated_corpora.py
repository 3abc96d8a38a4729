"""Readers of annotated corpora."""

import gzip
import json
from pathlib import Path

import pytest

from hf_ctxmodels.analysis.annotated_corpora import (
    SpanTarget,
    entity_mentions,
    read_bio_spans,
    read_coreference,
    read_edge_probing,
    read_propbank,
    read_senteval,
)
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.data.treebanks import read_treebank

# "I don't know." with a multiword token, an empty node, and the end of a document's comment block
CONLLU = """# newdoc id = letters
# sent_id = letters-1
# text = I don't know.
1\tI\tI\tPRON\tPRP\tCase=Nom|Number=Sing\t4\tnsubj\t4:nsubj\tEntity=(1-person-new)
2-3\tdon't\t_\t_\t_\t_\t_\t_\t_\t_
2\tdo\tdo\tAUX\tVBP\t_\t4\taux\t4:aux\t_
3\tn't\tnot\tPART\tRB\t_\t4\tadvmod\t4:advmod\t_
4\tknow\tknow\tVERB\tVB\tVerbForm=Inf\t0\troot\t0:root\tSpaceAfter=No
4.1\tit\tit\tPRON\tPRP\t_\t_\t_\t4:obj\t_
5\t.\t.\tPUNCT\t.\t_\t4\tpunct\t4:punct\t_

# a comment without a sentence

# sent_id = letters-2
1\tYes\tyes\tINTJ\tUH\t_\t0\troot\t0:root\t_
"""


def write_corpus(folder: Path, text: str, name: str = "file.conllu") -> Path:
    file = folder / name
    file.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return file


@pytest.mark.parametrize("name", ["file.conllu", "file.conllu.gz"])
@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
def test_read_treebank(tmp_path: Path, name: str, line_end: str) -> None:
    """Multiword ranges and empty nodes are skipped, and heads point to the correct words."""
    first, second = read_treebank(write_corpus(tmp_path, CONLLU.replace("\n", line_end), name))
    assert first.words == ["I", "do", "n't", "know", "."]
    assert first.heads == [3, 3, 3, -1, 3]
    assert first.depths() == [1, 1, 1, 0, 1]
    assert first.features[0] == {"Case": "Nom", "Number": "Sing"}
    assert first.features[1] == {}
    assert first.misc[3] == {"SpaceAfter": "No"}
    assert first.is_punctuation() == [False] * 4 + [True]
    assert (first.document, first.location[-2:]) == ("letters", ":4")
    assert (second.words, second.document) == (["Yes"], "letters")


@pytest.mark.parametrize(
    ("old", "new", "line", "message"),
    [
        ("4\tnsubj", "9\tnsubj", 4, "no other word"),
        ("4\tnsubj", "1\tnsubj", 4, "no other word"),
        ("4\tnsubj", "x\tnsubj", 4, "no other word"),
        ("\t4:aux\t_", "", 6, "Not a CoNLL-U line"),
        ("3\tn't", "5\tn't", 7, "follows word 2"),
    ],
)
def test_invalid_treebank_raises(tmp_path: Path, old: str, new: str, line: int, message: str) -> None:
    with pytest.raises(CtxError, match=message) as error:
        read_treebank(write_corpus(tmp_path, CONLLU.replace(old, new)))
    assert error.value.location is not None
    assert error.value.location.endswith(f"file.conllu:{line}")


@pytest.mark.parametrize(("old", "new"), [("4\tnsubj", "0\tnsubj"), ("0\troot\t0:root\tSpace", "1\tx\t_\tSpace")])
def test_invalid_tree_raises_when_used(tmp_path: Path, old: str, new: str) -> None:
    """Two roots or a cycle raise an error only when the tree is used."""
    sentence = read_treebank(write_corpus(tmp_path, CONLLU.replace(old, new)))[0]
    with pytest.raises(CtxError, match="not a tree"):
        sentence.depths()


def test_read_edge_probing(tmp_path: Path) -> None:
    target = {"span1": [0, 1], "span2": [1, 3], "label": ["A", "B"], "info": {}}
    record = {"text": "I saw her", "targets": [target, {"span1": [2, 3], "label": "C"}], "info": {"source": "s"}}
    (sentence,) = read_edge_probing(write_corpus(tmp_path, json.dumps(record), "file.jsonl"))
    assert sentence.targets == [SpanTarget((0, 1), (1, 3), ("A", "B")), SpanTarget((2, 3), None, ("C",))]
    for span in ([1, 1], [2, 4], [0], [-1, 2], [True, 2], "0:1"):
        text = json.dumps(record | {"targets": [target, target | {"span2": span}]})
        with pytest.raises(CtxError, match="not a span of the 3 words"):
            read_edge_probing(write_corpus(tmp_path, text, "file.jsonl"))


def test_read_senteval(tmp_path: Path) -> None:
    partitions = read_senteval(write_corpus(tmp_path, "tr\tNN\tA cat sat .\nte\tNNS\tCats sat .\n", "file.txt"))
    assert [len(partitions[name]) for name in ("train", "validation", "test")] == [1, 0, 1]
    assert partitions["train"][0].words == ["A", "cat", "sat", "."]
    with pytest.raises(CtxError, match="Not a line of a SentEval file"):
        read_senteval(write_corpus(tmp_path, "dev\tNN\tA cat .\n", "file.txt"))


def test_read_column_formats(tmp_path: Path) -> None:
    """Adjacent IOB1 chunks of one type, arguments of two predicates, nested mentions in one cell."""
    columns = "a I-NP\nb I-NP\nc B-NP\nd O\ne I-VP\n"
    (chunks,) = read_bio_spans(write_corpus(tmp_path, columns, "file.conll"))
    assert [(target.span1, target.labels[0]) for target in chunks.targets] == [
        ((0, 2), "NP"),
        ((2, 3), "NP"),
        ((4, 5), "VP"),
    ]
    rows = ["Bush NNP 2 nsubj _ (A0*) *", "chose VBD 0 root choose.01 (V*) *", "a DT 4 det _ (A1* *"]
    rows += ["retiring VBG 5 amod retire.01 * (V*)", "judge NN 2 obj _ *) (A0*)"]
    text = "\n".join("\t".join([str(number), *row.split()]) for number, row in enumerate(rows, 1))
    (arguments,) = read_propbank(write_corpus(tmp_path, text, "file.conll"))
    assert set(arguments.targets) == {
        SpanTarget((1, 2), (0, 1), ("A0",)),
        SpanTarget((1, 2), (2, 5), ("A1",)),
        SpanTarget((3, 4), (4, 5), ("A0",)),
    }
    with pytest.raises(CtxError, match="expected 8"):
        read_propbank(write_corpus(tmp_path, text.replace("\t(A0*)", ""), "file.conll"))
    mentions = "d 0 0 Her (25|(24)\nd 0 1 mother 25)|(1\nd 0 2 saw 1)\nd 0 3 her (24)\n".replace(" ", "\t")
    (pairs,) = read_coreference(write_corpus(tmp_path, mentions, "file.conll"))
    assert sum(target.labels == ("1",) for target in pairs.targets) == 1
    assert len(pairs.targets) == 6
    assert SpanTarget((3, 4), (0, 1), ("1",)) in pairs.targets
    with pytest.raises(CtxError, match="not closed"):
        read_coreference(write_corpus(tmp_path, mentions.replace("1)", "-"), "file.conll"))


def test_real_treebank_counts(shared_data: Path) -> None:
    """GUM: 7,897 mentions, of which 3,626 have one word, of 10 types; 2,029 coreferent pairs within a sentence."""
    file = shared_data / "ner_pos/ud_english_gum/en_gum-ud-dev.conllu.gz"
    sentences = read_treebank(file)
    mentions = [mention for sentence in sentences for mention in entity_mentions(sentence)]
    assert (len(sentences), sum(len(sentence.words) for sentence in sentences)) == (1575, 28119)
    assert sum(len(sentence.depths()) for sentence in sentences) == 28119
    assert (len(mentions), len({entity_type for _, entity_type, _ in mentions})) == (7897, 10)
    assert sum(end - start == 1 for *_, (start, end) in mentions) == 3626
    targets = [target for sentence in read_coreference(file) for target in sentence.targets]
    assert sum(target.labels == ("1",) for target in targets) == 2029
