"""Fine-tuning of the pretrained BERT from few labels: which Wikipedia article is a sentence from? The classifier is
then published to a directory and opened by new processes."""

import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.data.demo_corpus import demo_articles
from hf_ctxmodels.data.documents import split_sentences
from hf_ctxmodels.data.text_files import read_json_lines
from hf_ctxmodels.demo.demo_runner import DemoReport, DemoRunner, Result
from hf_ctxmodels.demo.real_bert import checkpoint
from hf_ctxmodels.models.bert import CtxBertModel, CtxBertTokenizer
from hf_ctxmodels.training.summary import TrainingSummary

RECIPE = "topics_demo"
NUM_ARTICLES = 12
LABELS_PER_ARTICLE = 5
_HELD_OUT_STEP = 5  # every fifth paragraph is held out
_MIN_WORDS = 6  # of a sentence
_NUM_COMPARED = 40  # sentences whose labels are compared after publishing
_MAX_EXAMPLE_LENGTH = 90  # characters
NEW_SENTENCES = (
    "Two men walked on the Moon while a third stayed in orbit.",
    "The colonies wanted to be free of the British king.",
    "Nothing moves faster than light.",
    "The president was shot in a theatre.",
)

# The programs read texts from standard input, truncate them to 64 tokens as in training, and print their labels.
_CLASSIFY = """
import json, sys
{imports}
from transformers import pipeline
from transformers.utils import logging
logging.set_verbosity_error()
logging.disable_progress_bar()
classify = pipeline("text-classification", sys.argv[1]{options})
labels = [row["label"] for row in classify(json.load(sys.stdin), truncation=True, max_length=64)]
print(json.dumps(labels))
"""


def write_sentences(folder: Path) -> dict[str, list[dict[str, str]]]:
    """Write train.jsonl and test.jsonl: first sentences of paragraphs of the longest articles, labeled with the title.
    Every fifth paragraph is held out; five of the others are sampled per article, with a fixed seed."""
    longest_articles = sorted(demo_articles(), key=lambda article: -len(article[1]))[:NUM_ARTICLES]
    rng = random.Random(0)
    splits: dict[str, list[dict[str, str]]] = {"train": [], "test": []}
    for title, paragraphs in longest_articles:
        sentences = [split_sentences(paragraph)[0] for paragraph in paragraphs]
        examples = [{"text": text, "label": title} for text in sentences if len(text.split()) >= _MIN_WORDS]
        splits["test"] += examples[::_HELD_OUT_STEP]
        candidates = [example for index, example in enumerate(examples) if index % _HELD_OUT_STEP]
        splits["train"] += rng.sample(candidates, min(LABELS_PER_ARTICLE, len(candidates)))
    folder.mkdir(parents=True, exist_ok=True)
    for name, examples in splits.items():
        text = "".join(json.dumps(example) + "\n" for example in examples)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
    return splits


def show_topic_classifier(report: DemoReport, runner: DemoRunner, epochs: int) -> None:
    """Fine-tune the pretrained BERT, and compare it with TF-IDF and the majority class."""
    folder, start = runner.folder / "topics", runner.folder / "real-bert"
    splits = write_sentences(folder)
    CtxBertModel.from_pretrained(checkpoint()).save_pretrained(start)
    CtxBertTokenizer.from_pretrained(checkpoint()).save_pretrained(start)
    readable = (row for row in splits["test"] if len(row["text"]) < _MAX_EXAMPLE_LENGTH and " ." not in row["text"])
    example = next(row for row in readable if row["label"] not in row["text"])
    report.text(
        f"Which article is a sentence from? {NUM_ARTICLES} Wikipedia articles, {LABELS_PER_ARTICLE} labeled sentences "
        f'per article, {len(splits["test"])} held-out sentences, such as "{example["text"]}" ({example["label"]}).'
    )
    runner.run(
        report,
        *("topics", "finetune", "sequence-classification", "--recipe", RECIPE),
        *("--model", start, "--num_train_epochs", epochs),
        *("--train_file", folder / "train.jsonl", "--validation_file", folder / "test.jsonl"),
        *("--predictions_file", folder / "predictions.jsonl"),
        output=folder / "model",
    )
    metrics = TrainingSummary.load(folder / "model").metrics
    baselines = {"TF-IDF": metrics["baseline_accuracy_tfidf"], "majority": metrics["baseline_accuracy"]}
    report.result(
        Result("accuracy on held-out sentences", metrics["eval_accuracy"], baselines),
        "TF-IDF: logistic regression on TF-IDF features of the same sentences; majority: the most frequent article",
    )


def show_publishing(report: DemoReport, runner: DemoRunner) -> None:
    """Publish the classifier to a directory, open it in two new processes, and compare its labels with the run's."""
    published, folder = runner.folder / "published", runner.folder / "topics"
    flags = ("--model", folder / "model", "--repo_id", "your-name/topics")
    runner.run(report, "published", "push", *flags, output=published)
    report.text(f"{published}: {', '.join(sorted(path.name for path in published.iterdir()))}")
    expected, texts = (
        [row[column] for row, _ in islice(read_json_lines(folder / file), _NUM_COMPARED)]
        for file, column in (("predictions.jsonl", "prediction"), ("test.jsonl", "text"))
    )
    for name, program in (
        ("import hf_ctxmodels", _CLASSIFY.format(imports="import hf_ctxmodels", options="")),
        ("trust_remote_code=True, no import", _CLASSIFY.format(imports="", options=", trust_remote_code=True")),
    ):
        labels = classify_in_clean_process(program, published, [*texts, *NEW_SENTENCES])
        num_equal = sum(label == prediction for label, prediction in zip(labels, expected))
        report.line(f"opened in a new process with {name + ':':<35}{num_equal} of {len(expected)} labels are equal")
        if num_equal < len(expected):
            raise CtxError(
                "The published model predicts different labels.", location=str(published), hint="report this."
            )
    report.line("predictions for sentences that are in no article:")
    report.rows([(f"  {text}", label) for text, label in zip(NEW_SENTENCES, labels[len(expected) :])])


def classify_in_clean_process(program: str, directory: Path, texts: Sequence[str]) -> list[str]:
    """Predict labels by a program of `_CLASSIFY` with an empty cache, which opens the classifier of a directory."""
    with tempfile.TemporaryDirectory() as home:
        result = subprocess.run(
            [sys.executable, "-c", program, str(directory.resolve())],
            input=json.dumps(list(texts)),
            env={**os.environ, "HF_HOME": home, "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
    if result.returncode:
        message = (result.stderr.splitlines() or ["no error message"])[-1]
        raise CtxError(f"The published model cannot be opened: {message}", location=str(directory), hint="report this.")
    return json.loads(result.stdout.splitlines()[-1])
