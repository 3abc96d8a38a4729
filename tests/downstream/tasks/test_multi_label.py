"""Multi-label classification: formats of the labels, order of the classes, metrics, baselines and errors."""

import json

import numpy as np
import pytest
import torch
from datasets import ClassLabel, Dataset, Features, List, Value
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import accuracy_score, f1_score
from sklearn.multiclass import OneVsRestClassifier
from task_files import make_task, write_file

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.downstream.tasks import metrics, tfidf
from hf_ctxmodels.downstream.tasks.sequence_classification import SequenceExample
from hf_ctxmodels.models.bert.configuration_bert import CtxBertConfig

EMOTIONS = ["sadness", "joy", "anger"]
CLASSES = Features({"text": Value("string"), "labels": List(ClassLabel(names=EMOTIONS))})
NAME = "multi-label-classification"


def labels_of(path, text, **arguments):
    return [example.label for example in make_task(NAME, **arguments).read_file(write_file(path, text))]


def configured(train, validation=None, **arguments):
    task, config = make_task(NAME, **arguments), CtxBertConfig()
    train = task.read_file(train)
    task.configure(config, train, train if validation is None else task.read_file(validation))
    return task, config, train


def test_formats_of_labels(tmp_path):
    expected = [("joy", "anger"), (), ("sadness",)]
    records = [{"text": "x", "label": [*labels]} for labels in expected]
    assert labels_of(tmp_path / "a.jsonl", "\n".join(map(json.dumps, records))) == expected
    assert labels_of(tmp_path / "a.csv", 'text,label\nx,"joy, anger,joy"\ny,\nz,sadness\n') == expected
    assert (
        labels_of(tmp_path / "a.tsv", "text\tlabel\nx\tjoy|anger\ny\t\nz\tsadness|\n", label_delimiter="|") == expected
    )
    binary = "text,sadness,joy,anger\nx,0,1,1.0\ny,0,0,0\nz,True,False,0\n"
    assert labels_of(tmp_path / "b.csv", binary, label_column="joy,anger,sadness") == expected
    numbers = [{"text": "x", "label": [3, 10]}, {"text": "y", "label": [""]}]
    assert labels_of(tmp_path / "n.jsonl", "\n".join(map(json.dumps, numbers))) == [("3", "10"), ()]
    Dataset.from_dict({"text": ["x", "y", "z"], "labels": [[1, 2], [], [0]]}, CLASSES).to_parquet(
        tmp_path / "a.parquet"
    )
    examples = make_task(NAME, label_column="labels").read_file(str(tmp_path / "a.parquet"))
    assert [example.label for example in examples] == expected


def test_binary_columns_may_have_classes(tmp_path):
    binary = ClassLabel(names=["no", "yes"])
    features = Features({"text": Value("string"), "toxic": binary, "threat": binary})
    rows = {"text": ["x", "y"], "toxic": [1, 0], "threat": [1, 1]}
    Dataset.from_dict(rows, features).to_parquet(tmp_path / "a.parquet")
    examples = make_task(NAME, label_column="toxic,threat").read_file(str(tmp_path / "a.parquet"))
    assert [example.label for example in examples] == [("toxic", "threat"), ("threat",)]


def test_order_of_labels(tmp_path, tokenizer):
    """The order of a dataset's classes or of the columns, also of labels without an example; otherwise sorted."""
    Dataset.from_dict({"text": ["x", "y"], "labels": [[2, 0], []]}, CLASSES).to_parquet(tmp_path / "a.parquet")
    task, config, train = configured(str(tmp_path / "a.parquet"), label_column="labels")
    assert config.id2label == dict(enumerate(EMOTIONS))
    assert config.problem_type == "multi_label_classification"
    encoded = task.encode(train, tokenizer)
    batch = task.collator(tokenizer)(encoded.features)
    assert batch["labels"].tolist() == [[1, 0, 1], [0, 0, 0]]
    assert batch["labels"].dtype == torch.float32

    columns = write_file(tmp_path / "b.csv", "text,toxic,threat,insult\nx,1,0,1\ny,0,0,0\n")
    assert [*configured(columns, label_column="toxic,threat,insult")[1].label2id] == ["toxic", "threat", "insult"]
    numbers = write_file(tmp_path / "c.csv", 'text,label\nx,"10,9"\ny,9\n')
    assert [*configured(numbers)[1].label2id] == ["9", "10"]


def test_predictions(tmp_path, tokenizer):
    task, _, train = configured(write_file(tmp_path / "a.csv", 'text,label\nx,"b,a"\ny,\nz,c\n'))
    logits = [[0.1, 2.0, -3.0], [-1.0, -0.5, 0.0], [-1.0, 1.0, 1.0]]
    outputs = [{"logits": np.array(row, np.float32)} for row in logits]
    encoded = task.encode(train, tokenizer)
    assert task.decode(train, encoded, outputs) == [("a", "b"), (), ("b", "c")]
    results = task.results(train, encoded, outputs)
    assert results[2]["labels"] == ["b", "c"]
    assert results[1]["probabilities"] == pytest.approx({"a": 1 / (1 + np.e), "b": 1 / (1 + np.e**0.5), "c": 0.5})
    scores = task.score(train, task.decode(train, encoded, outputs))
    assert scores == pytest.approx({"f1_micro": 6 / 7, "f1_macro": (1 + 2 / 3 + 1) / 3, "accuracy": 2 / 3})
    assert task.record(train[0], ("b",)) == {"location": train[0].location, "label": ("b", "a"), "prediction": ("b",)}


def test_metrics_agree_with_scikit_learn():
    rng = np.random.default_rng(0)
    for rate in (0.0, 0.1, 0.6):
        predictions, references = rng.random((2, 40, 5)) < rate
        references[:, 3] = False
        expected = {
            f"f1_{name}": f1_score(references, predictions, average=name, zero_division=0)
            for name in ("micro", "macro")
        }
        expected["accuracy"] = accuracy_score(references, predictions)
        assert metrics.multi_label_scores(predictions, references) == pytest.approx(expected)


def test_baselines(tmp_path):
    """The constant baseline has the highest micro F1 of all constant predictions; TF-IDF is one-vs-rest."""
    rows = [
        ("good bad", "x,y"),
        ("good", "x"),
        ("bad", "y"),
        ("good odd", "x,z"),
        ("even", ""),
        ("good bad", "x,y"),
    ] * 4
    file = write_file(tmp_path / "a.tsv", "text\tlabel\n" + "".join(f"{text}\t{labels}\n" for text, labels in rows))
    task, _, train = configured(file)
    constants = [(), ("x",), ("y",), ("z",), ("x", "y"), ("x", "z"), ("y", "z"), ("x", "y", "z")]
    scores = {labels: task.score(train, [labels] * len(train))["f1_micro"] for labels in constants}
    assert task.baseline(train, train) == [max(scores, key=scores.get)] * len(train)
    assert task.learned_baseline(train, train) == [example.label for example in train]
    assert task.constant_prediction(train, [("x", "y")] * len(train)) == "x, y"
    assert task.constant_prediction(train, [()] * len(train)) == "no label"
    assert task.constant_prediction(train, [example.label for example in train]) is None


def test_tfidf_is_one_vs_rest():
    """With a label that all examples have, which has no classifier."""
    rng = np.random.default_rng(0)
    words = [start + end for start in ("ba", "ko", "mi", "tu") for end in "lmnrs"]
    texts = [" ".join(rng.choice(words, 4)) for _ in range(60)]
    sets = [tuple(label for label in "abc" if rng.random() < 0.4 or label in text) for text in texts]
    examples = [SequenceExample((text,), (*labels, "z"), "") for text, labels in zip(texts, sets, strict=True)]
    predictions = tfidf.tfidf_predictions(examples, examples, regression=False)
    features = TfidfVectorizer(sublinear_tf=True, dtype=np.float32).fit_transform(texts)
    targets = np.array([[label in labels for label in "abc"] for labels in sets], int)
    expected = OneVsRestClassifier(LogisticRegression(C=10.0, max_iter=200)).fit(features, targets).predict(features)
    assert [[*labels] for labels in predictions] == [[*np.array([*"abc"])[row.astype(bool)], "z"] for row in expected]
    assert (expected != targets).any()


@pytest.mark.parametrize(
    ("name", "text", "arguments", "message"),
    [
        ("a.jsonl", '{"text": "x", "label": ["a"]}\n{"text": "y", "label": "b"}', {}, r"(?s)mixes lists and other.*:2"),
        ("a.jsonl", '{"text": "x", "label": ["a", null]}', {}, r"(?s)Expected the labels.*\['a', None\].*:1"),
        ("a.jsonl", '{"text": "x", "label": null}', {}, "got None"),
        ("a.jsonl", '{"text": "x", "label": 3}', {}, "got 3"),
        ("a.csv", "text,label\nx,\"['a', 'b']\"\n", {}, r"(?s)got \"\['a', 'b'\]\".*separated by ','"),
        ("a.csv", "text,a,b\nx,1,0\ny,0,0.5\n", {"label_column": "a,b"}, r"(?s)'0.5' in column 'b' is not 0 or 1.*:3"),
        ("a.csv", "text,a,b\nx,1,0\n", {"label_column": "a,c"}, "No column 'c'"),
        ("a.csv", "text,a,b\nx,-1,-1\n", {"label_column": "a,b"}, "labels in 'a' are -1"),
    ],
)
def test_invalid_labels(tmp_path, name, text, arguments, message):
    with pytest.raises(CtxError, match=message):
        make_task(NAME, **arguments).read_file(write_file(tmp_path / name, text))


def test_files_without_labels_and_unknown_labels(tmp_path, tokenizer, capsys):
    labeled = write_file(tmp_path / "a.csv", 'text,label\nx,"a,b"\ny,a\n')
    empty = write_file(tmp_path / "b.csv", "text,label\nx,\ny,\n")
    other = write_file(tmp_path / "c.csv", "text,label\nx,a\ny,c\n")
    for files, flag in (((empty, labeled), "--train_file"), ((labeled, empty), "--validation_file")):
        with pytest.raises(CtxError, match=rf"(?s)None of 2 examples has a label.*{flag}"):
            configured(*files)
    task, *_ = configured(labeled, other)
    assert "exactly one label" not in capsys.readouterr().err
    with pytest.raises(CtxError, match=r"(?s)label 'c' does not occur.*c\.csv:3"):
        task.encode(task.read_file(other), tokenizer)
    assert task.has_labels(labeled)
    assert not task.has_labels(empty)
    assert [example.label for example in task.read_unlabeled(empty)] == [(), ()]
    configured(other)
    assert "warning: all training examples have exactly one label" in capsys.readouterr().err


def test_single_label_task_names_the_task_of_lists(tmp_path):
    file = write_file(tmp_path / "a.jsonl", '{"text": "x", "label": ["a"]}')
    with pytest.raises(CtxError, match=r"(?s)Expected one label, got the list.*multi-label-classification"):
        make_task("sequence-classification").read_file(file)


def test_labels_of_pairs_in_both_orders(tmp_path, tokenizer):
    """Numbers are not rounded, and sets of labels are floating-point numbers."""
    file = write_file(tmp_path / "a.tsv", "one\ttwo\tlabel\ncat\tdog\t3.8\ndog\tcat\t0.5\n")
    arguments = {"text_columns": "one,two", "both_orders": True}
    for name, expected in (("regression", [3.8, 0.5]), (NAME, [[0, 1], [1, 0]])):
        task = make_task(name, **arguments)
        examples = task.read_file(file)
        task.configure(CtxBertConfig(), examples, examples)
        batch = task.collator(tokenizer)(task.encode(examples, tokenizer).features)
        torch.testing.assert_close(batch["labels"], torch.tensor(expected, dtype=torch.float32))
