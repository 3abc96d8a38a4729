"""Coreference task: clusters, labels and the head-match baseline."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from task_files import make_task, write_file
from transformers import PreTrainedTokenizerBase

from hf_ctxmodels import CtxError
from hf_ctxmodels.data.coreference_files import CoreferenceDocument
from hf_ctxmodels.downstream.tasks.coreference import find_mentions, head_match, link_clusters


def test_clusters_follow_antecedents() -> None:
    spans = np.array([(0, 1), (0, 3), (4, 5), (5, 6), (7, 8), (9, 10), (-1, -1)])
    clusters = link_clusters(spans, np.array([-1, -1, 0, 1, 2, -1, -1]))
    assert clusters == [[(0, 1), (4, 5), (7, 8)], [(0, 3), (5, 6)]]


def test_head_match_baseline(tmp_path: Path) -> None:
    """Mentions are names and phrases of the training file, except phrases that are rarely mentions."""
    documents = [
        {"sentences": [["The", "old", "dog", "ran", "."]], "clusters": [[[0, 2], [1, 2]]]},
        {"sentences": [["He", "said", "it", "."], ["It", "is", "it"]], "clusters": [[[0, 0], [2, 2]]]},
    ]
    task = make_task("coreference")
    train = task.read_file(write_file(tmp_path / "a.jsonl", "\n".join(map(json.dumps, documents))))
    sentences = [
        ["So", "he", "saw", "Mr.", "Ash", ",", "the", "old", "dog", "."],
        ["Ash", "had", "Old", "Ash", ";", "it", "he"],
    ]
    document = CoreferenceDocument("x", sentences, [], "")
    mentions = find_mentions(document, {"he", "the old dog", "old dog"}, 10)
    assert mentions == [(1, 2), (3, 5), (6, 9), (12, 14), (16, 17)]
    assert head_match(document, mentions) == [[(1, 2), (16, 17)], [(3, 5), (12, 14)]]
    assert task.baseline(train, [document]) == [head_match(document, mentions)]


def test_long_mentions_limit_upper_bounds(tmp_path: Path) -> None:
    record = {"sentences": [["w"] * 14], "clusters": [[[0, 11], [13, 13]], [[1, 1], [2, 2]]]}
    task = make_task("coreference")
    examples = task.read_file(write_file(tmp_path / "a.jsonl", json.dumps(record)))
    bounds = task.upper_bounds(examples)
    assert bounds["mention_recall"] == 0.5
    assert bounds["b_cubed_precision"] == 1
    assert task.upper_bounds([CoreferenceDocument("x", [["a", "b"]], [[(0, 1), (1, 2)]], "")]) == {}


def test_singletons_are_not_clusters(tmp_path: Path) -> None:
    task = make_task("coreference")
    texts = [
        {"sentences": [["a", "b"]], "clusters": [[[0, 0]]]},
        {"sentences": [["a", "b"]], "clusters": [[[0, 0], [1, 1]]]},
    ]
    with pytest.raises(CtxError, match="No cluster has two mentions"):
        task.read_file(write_file(tmp_path / "a.jsonl", json.dumps(texts[0])))
    file = write_file(tmp_path / "b.jsonl", "\n".join(map(json.dumps, texts)))
    assert [example.clusters for example in task.read_file(file)] == [[], [[(0, 1), (1, 2)]]]
    assert [example.clusters for example in task.read_unlabeled(file)] == [[], []]


def test_files_without_clusters(tmp_path: Path) -> None:
    task = make_task("coreference")
    columns = "#begin document (a); part 000\na 0 0 Ann\na 0 1 slept\n\na 0 0 She\na 0 1 woke\n#end document\n"
    words = [["Ann", "slept"], ["She", "woke"]]
    labeled = columns.replace("Ann", "Ann (1)").replace("She", "She (1)").replace("slept", "slept -")
    files = {
        "labeled.conll": labeled.replace("woke", "woke -"),
        "words.conll": columns,
        "entities.conll": re.sub("(Ann|slept|She|woke)", r"\1 *", columns),
        "words.jsonl": json.dumps({"sentences": words}),
        "null.jsonl": json.dumps({"sentences": words, "clusters": None}),
        "words.txt": "Ann slept\nShe woke\n",
    }
    for name, text in files.items():
        file = write_file(tmp_path / name, text)
        (example,) = task.read_unlabeled(file)
        assert (example.sentences, example.clusters) == (words, []), name
        if name not in ("words.conll", "entities.conll"):  # without a cluster column
            assert task.has_labels(file) == (name == "labeled.conll"), name


def test_subword_tokenizer_raises(tokenizer: PreTrainedTokenizerBase) -> None:
    task = make_task("coreference")
    with pytest.raises(CtxError, match="are not words"):
        task.encode([CoreferenceDocument("x", [["Sailors", "mend"]], [], "")], tokenizer)
