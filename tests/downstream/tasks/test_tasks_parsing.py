"""Dependency parsing task: files, columns of heads, scores, the baseline of neighbors."""

import json
from pathlib import Path

import numpy as np
import pytest
from task_files import make_task, write_file
from transformers import PreTrainedTokenizerBase
from treebank_files import to_conllu, write_treebank

from hf_ctxmodels import CtxCvtConfig, CtxCvtTokenizer, CtxError
from hf_ctxmodels.downstream.tasks.dependency_parsing import DependencyTree, attachment_scores

TREE = [("I", 2, "nsubj"), ("know", 0, "root"), ("it", 2, "obj"), (".", 2, "punct")]
SHORT = [("Yes", 0, "root"), ("indeed", 1, "advmod")]


@pytest.fixture
def file(tmp_path: Path) -> str:
    return write_file(tmp_path / "a.conllu", to_conllu([TREE, SHORT]))


def test_trees_are_read(file: str) -> None:
    task = make_task("dependency-parsing")
    first, second = task.read_file(file)
    assert first == DependencyTree(
        ["I", "know", "it", "."], [1, -1, 1, 1], ["nsubj", "root", "obj", "punct"], f"{file}:1"
    )
    assert second.heads == [-1, 0]
    assert task.has_labels(file)
    config = CtxCvtConfig()
    task.configure(config, [second], [first])
    assert task.labels == ["advmod", "nsubj", "obj", "punct", "root"]
    assert config.num_labels == 5


@pytest.mark.parametrize(
    ("old", "new", "message", "line"),
    [
        ("2\tobj", "7\tobj", "'7' of word 3 .it. is no other word", 3),
        ("2\tobj", "x\tobj", "'x' of word 3", 3),
        ("2\tobj", "3\tobj", "'3' of word 3", 3),
        ("2\tobj", "0\tobj", "not a tree: 2 roots", 1),
        ("0\troot\t_\t_\n3", "3\troot\t_\t_\n3", "not a tree: 0 roots", 1),
        ("\tobj\t_\t_", "\tobj", "has 8 tab-separated column", 3),
        ("2\tobj", "2\t_", "Word 3 .it. has no relation", 1),
    ],
)
def test_invalid_trees_raise(tmp_path: Path, old: str, new: str, message: str, line: int) -> None:
    file = write_file(tmp_path / "a.conllu", to_conllu([TREE, SHORT]).replace(old, new))
    with pytest.raises(CtxError, match=message) as error:
        make_task("dependency-parsing").read_file(file)
    assert error.value.location == f"{file}:{line}"


def test_other_files_raise(tmp_path: Path) -> None:
    file = write_file(tmp_path / "a.conll", to_conllu([TREE]))
    with pytest.raises(CtxError, match="CoNLL-U"):
        make_task("dependency-parsing").read_file(file)


def test_files_without_trees(tmp_path: Path) -> None:
    task = make_task("dependency-parsing")
    task.labels = ["root"]
    columns = "1\tYes\t_\t_\t_\t_\t_\t_\t_\t_\n2\tindeed\t_\t_\t_\t_\t_\t_\t_\t_\n"
    files = {
        "a.conllu": columns,
        "a.txt": "Yes indeed\n",
        "a.jsonl": json.dumps({"tokens": ["Yes", "indeed"]}),
        "b.jsonl": json.dumps({"tokens": "Yes indeed"}),
    }
    for name, text in files.items():
        file = write_file(tmp_path / name, text)
        [tree] = task.read_unlabeled(file)
        assert tree.words == ["Yes", "indeed"], name
        assert not task.has_labels(file)
    with pytest.raises(CtxError, match="list of words in 'tokens'"):
        task.read_unlabeled(write_file(tmp_path / "c.jsonl", json.dumps({"tokens": 3})))
    for words in ([], [None], [["Yes"]], [True]):
        with pytest.raises(CtxError, match="list of words in 'tokens'"):
            task.read_unlabeled(write_file(tmp_path / "c.jsonl", json.dumps({"tokens": words})))
    [tree] = task.read_unlabeled(write_file(tmp_path / "c.jsonl", json.dumps({"tokens": ["Yes", 3]})))
    assert tree.words == ["Yes", "3"]


@pytest.mark.parametrize("side", ["right", "left"])
def test_columns_of_heads_and_decoding(file: str, side: str) -> None:
    """The tokenizer adds <S> and </S>; a batch with padding is decoded to the trees of the file."""
    task, tokenizer = make_task("dependency-parsing"), CtxCvtTokenizer.from_words([])
    tokenizer.padding_side = side
    examples = task.read_file(file)
    task.configure(CtxCvtConfig(), examples, examples)
    encoded = task.encode(examples, tokenizer)
    batch = task.collator(tokenizer)([feature | {"epoch": 1, "example_index": 0} for feature in encoded.features])
    relations = {name: index for index, name in enumerate(task.labels)}
    first = [-100, relations["nsubj"], relations["root"], relations["obj"], relations["punct"], -100]
    padded = [-100, relations["root"], relations["advmod"], -100]
    padded = [*padded, -100, -100] if side == "right" else [-100, -100, *padded]
    assert batch["labels"].tolist() == [first, padded]
    assert batch["heads"][0].tolist() == [-1, 2, -1, 2, 2, -1]
    assert batch["heads"][1].tolist() == ([-1, -1, 1, -1, -1, -1] if side == "right" else [-1, -1, -1, -1, 3, -1])
    outputs = []
    for labels, heads, mask in zip(batch["labels"], batch["heads"], batch["attention_mask"].bool(), strict=True):
        scores = np.zeros((6, 7))
        scores[np.arange(6), 1 + heads.numpy()] = 1.0
        arc_relations = np.repeat(labels.numpy()[:, None], 7, 1)
        outputs.append({"arc_scores": scores[mask], "arc_relations": arc_relations[mask]})
    predictions = task.decode(examples, encoded, outputs)
    assert predictions == [(tree.heads, tree.relations) for tree in examples]
    assert task.results(examples, encoded, outputs)[1] == {
        "words": ["Yes", "indeed"], "heads": [0, 1], "relations": ["root", "advmod"],
    }  # fmt: skip
    record = task.record(examples[0], predictions[1])
    assert record["label"]["heads"] == [2, 0, 2, 2]
    assert record["prediction"]["heads"] == [0, 1]


def test_invalid_sentences_raise(file: str) -> None:
    tokenizer = CtxCvtTokenizer.from_words([])
    task = make_task("dependency-parsing", max_length=5)
    examples = task.read_file(file)
    task.configure(CtxCvtConfig(), examples, [])
    with pytest.raises(CtxError, match="6 tokens, more than --max_length 5") as error:
        task.encode(examples, tokenizer)
    assert error.value.location == f"{file}:1"
    task = make_task("dependency-parsing")
    task.configure(CtxCvtConfig(), examples[1:], [])
    with pytest.raises(CtxError, match="'nsubj' does not occur in the training file") as error:
        task.encode(examples, tokenizer)
    assert error.value.location == f"{file}:1"


def test_heads_are_first_subwords(tokenizer: PreTrainedTokenizerBase) -> None:
    task = make_task("dependency-parsing")
    tree = DependencyTree(["Sailors", "mend", "nets"], [1, -1, 1], ["nsubj", "root", "obj"], "")
    task.labels = ["nsubj", "obj", "root"]
    encoded = task.encode([tree], tokenizer)
    [feature], [positions] = encoded.features, encoded.origins
    word_ids = tokenizer([tree.words], is_split_into_words=True).word_ids(0)
    assert positions == [word_ids.index(word) for word in range(3)]
    assert len(word_ids) > 5
    assert [feature["heads"][position] for position in positions] == [positions[1], -1, positions[1]]
    assert sum(label != -100 for label in feature["labels"]) == 3


def test_attachment_scores() -> None:
    """All words count, and subtypes are ignored."""
    reference = ([1, -1, 1, 1], ["nsubj:pass", "root", "obj", "punct"])
    prediction = ([1, -1, 0, 1], ["nsubj", "root", "obj", "det"])
    assert attachment_scores([prediction], [reference]) == {"las": 0.5, "uas": 0.75}


def test_baseline_is_better_neighbor(tmp_path: Path) -> None:
    task = make_task("dependency-parsing")
    examples = task.read_file(str(write_treebank(tmp_path / "a.conllu", 60, 0)))
    validation = task.read_file(write_file(tmp_path / "b.conllu", to_conllu([TREE])))
    assert task.baseline(examples, validation) == [([1, 2, 3, -1], ["amod", "amod", "amod", "root"])]
    assert "next word" in task.baseline_name
    left = task.read_file(write_file(tmp_path / "c.conllu", to_conllu([SHORT])))
    assert task.baseline(left, validation) == [([-1, 0, 1, 2], ["root", "advmod", "advmod", "advmod"])]
    assert "previous word" in task.baseline_name


def test_constant_prediction(file: str) -> None:
    task = make_task("dependency-parsing")
    examples = task.read_file(file)
    correct = [(tree.heads, tree.relations) for tree in examples]
    assert task.constant_prediction(examples, correct) is None
    assert task.constant_prediction(examples, [(tree.heads, ["obj"] * len(tree.words)) for tree in examples]) == "obj"
