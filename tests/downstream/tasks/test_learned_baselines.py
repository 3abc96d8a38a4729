"""TF-IDF baselines and constant predictions."""

import random

import pytest
from task_files import make_task, write_file

from hf_ctxmodels.downstream.finetuning.task_evaluation import TaskEvaluation, learned_baseline_scores
from hf_ctxmodels.downstream.tasks import tfidf
from hf_ctxmodels.downstream.tasks.sequence_classification import SequenceExample
from hf_ctxmodels.models.bert.configuration_bert import CtxBertConfig

WORDS = [f"{start}{end}" for start in ("ba", "ko", "mi", "tu", "ze") for end in "lmnrst"]


def write_tables(tmp_path, make_row, header: str, size: int = 120):
    rng, files = random.Random(0), []
    for name in ("train", "dev"):
        rows = [make_row(rng) for _ in range(size)]
        files.append(write_file(tmp_path / f"{name}.tsv", "\n".join([header, *rows]) + "\n"))
    return files


def random_sentence(rng) -> str:
    return " ".join(rng.sample(WORDS, 5))


def text_row(rng) -> str:
    text = random_sentence(rng)
    return f"{text}\t{'yes' if 'bal' in text or 'tun' in text or 'zes' in text or 'mil' in text else 'no'}"


def chinese_row(rng) -> str:
    text = "".join(rng.sample("我喜欢猫狗鱼鸟山水", 4))
    return f"{text}\t{'yes' if '猫' in text else 'no'}"


def pair_row(rng) -> str:
    first, is_same = random_sentence(rng), rng.random() < 0.5
    return f"{first}\t{' '.join(rng.sample(first.split(), 5)) if is_same else random_sentence(rng)}\t{int(is_same)}"


def score_row(rng) -> str:
    words = rng.sample(WORDS, 5)
    return f"{' '.join(words)}\t{sum(word.startswith('ba') for word in words)}"


@pytest.mark.parametrize(
    ("task", "make_row", "columns", "metric", "minimum"),
    [
        ("sequence-classification", text_row, "text\tlabel", "accuracy", 0.9),
        ("sequence-classification", chinese_row, "text\tlabel", "accuracy", 0.9),
        ("sequence-classification", pair_row, "first\tsecond\tlabel", "accuracy", 0.95),
        ("regression", score_row, "text\tlabel", "pearsonr", 0.8),
    ],
)
def test_tfidf_baseline(tmp_path, monkeypatch, task, make_row, columns, metric, minimum):
    """Better than the majority baseline, deterministic, and worse with fewer training texts."""
    task = make_task(task, text_columns=",".join(columns.split("\t")[:-1]))
    training, validation = (task.read_file(file) for file in write_tables(tmp_path, make_row, columns))
    task.configure(CtxBertConfig(), training, validation)
    scores = learned_baseline_scores(task, training, validation)
    assert scores[metric] > max(minimum, task.score(validation, task.baseline(training, validation))[metric])
    assert learned_baseline_scores(task, training, validation) == scores
    monkeypatch.setattr(tfidf, "MAX_TEXTS", 3)
    assert learned_baseline_scores(task, training, validation)[metric] < scores[metric]
    warnings = TaskEvaluation(task, validation, None, None, 1).warnings(scores | {metric: scores[metric] - 0.1}, scores)
    assert [f"{metric} {scores[metric] - 0.1:.4f} is below {scores[metric]:.4f}" in text for text in warnings] == [True]


@pytest.mark.parametrize("rows", [["!\ta", "?\tb"], ["one text\ta", "two texts\ta"]])
def test_tfidf_without_shared_features_returns_none(rows):
    examples = [SequenceExample((text,), label, "") for text, label in (row.split("\t") for row in rows)]
    assert tfidf.tfidf_predictions(examples, examples, regression=False) is None


def test_tfidf_with_vowel_marks():
    """Words that differ only in their vowels, which are marks in Hindi."""
    examples = [SequenceExample((text,), text, "") for text in ["की बात", "का बात"] * 3]
    assert tfidf.tfidf_predictions(examples, examples[:2], regression=False) == ["की बात", "का बात"]


TABLES = {
    "sequence-classification": ("text\tlabel", [f"w{n}\t{'ab'[n % 2]}" for n in range(6)], ["b"] * 6, "'b'"),
    "regression": ("text\tlabel", [f"w{n}\t{n}" for n in range(6)], [2.71] * 5 + [2.7101], "2.71"),
    "multiple-choice": ("text\tone\ttwo\tlabel", [f"w{n}\tx\ty\t{n % 2}" for n in range(6)], [1] * 6, "1"),
    "seq2seq": ("source\ttarget", [f"w{n}\tv{n}" for n in range(10)], ["v1"] * 9 + ["v2"], "'v1'"),
}


@pytest.mark.parametrize("name", TABLES)
def test_constant_predictions(tmp_path, name):
    header, rows, constant, description = TABLES[name]
    arguments = {"choice_columns": "one,two"} if name == "multiple-choice" else {}
    task = make_task(name, **arguments)
    examples = task.read_file(write_file(tmp_path / "a.tsv", "\n".join([header, *rows]) + "\n"))
    labels = [example.target if name == "seq2seq" else example.label for example in examples]

    def warnings(predictions) -> list[str]:
        return TaskEvaluation(task, examples, None, None, 1, predictions).warnings({}, {})

    assert [f"the prediction is {description} for" in text for text in warnings(constant)] == [True]
    assert warnings(labels) == warnings([]) == []
    assert task.constant_prediction(examples[:1] * 6, labels[:1] * 6) is None, "equal labels explain equal predictions"
