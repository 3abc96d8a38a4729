"""Fine-tuning of the pretrained BERT from few labels: which Wikipedia article is a sentence from? The classifier is
then published to a directory and opened by new processes."""

import json
import random
from pathlib import Path

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.data.demo_corpus import demo_articles
from hf_ctxmodels.data.sentence_splitting import split_sentences
from hf_ctxmodels.demo.clean_process import WITH_IMPORT, WITH_REMOTE_CODE, classify_in_clean_process
from hf_ctxmodels.demo.demo_runner import DemoRunner
from hf_ctxmodels.demo.real_bert import checkpoint
from hf_ctxmodels.demo.report import DemoReport, Result
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


def write_sentences(folder: Path) -> dict[str, list[dict[str, str]]]:
    """Write train.jsonl and test.jsonl: first sentences of paragraphs of the longest articles, labelled with the title.

    Every fifth paragraph is held out; five of the others are sampled per article, with a fixed seed.
    """
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
        f"Which article is a sentence from? {NUM_ARTICLES} Wikipedia articles, {LABELS_PER_ARTICLE} labelled sentences "
        f'per article, {len(splits["test"])} held-out sentences, such as "{example["text"]}" ({example["label"]}).'
    )
    runner.run(
        report,
        *(
            "topics",
            "finetune",
            "sequence-classification",
            "--recipe",
            RECIPE,
            "--model",
            start,
            "--num_train_epochs",
            epochs,
        ),
        *("--train_file", folder / "train.jsonl", "--validation_file", folder / "test.jsonl"),
        *("--predictions_file", folder / "predictions.jsonl"),
        output=folder / "model",
    )
    metrics = TrainingSummary.load(folder / "model").metrics
    baselines = {"TF-IDF": tfidf_accuracy(**splits), "majority": metrics["baseline_accuracy"]}
    report.result(
        Result("accuracy on held-out sentences", metrics["eval_accuracy"], baselines),
        "TF-IDF: logistic regression on TF-IDF features of the same sentences; majority: the most frequent article",
    )


def tfidf_accuracy(train: list[dict[str, str]], test: list[dict[str, str]]) -> float:
    """Accuracy of a logistic regression on TF-IDF features."""
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression

    vectorizer = TfidfVectorizer()
    features = vectorizer.fit_transform([row["text"] for row in train])
    model = LogisticRegression(C=10, max_iter=1000).fit(features, [row["label"] for row in train])
    return float(model.score(vectorizer.transform([row["text"] for row in test]), [row["label"] for row in test]))


def show_publishing(report: DemoReport, runner: DemoRunner) -> None:
    """Publish the classifier to a directory, and open it in two new processes.

    Raises:
        CtxError: The labels differ from the predictions of the training run.
    """
    published, folder = runner.folder / "published", runner.folder / "topics"
    runner.run(
        report,
        *("published", "push", "--model", folder / "model", "--repo_id", "your-name/topics"),
        output=published,
    )
    report.text(f"{published}: {', '.join(sorted(path.name for path in published.iterdir()))}")
    expected = [row["prediction"] for row in _read_jsonl(folder / "predictions.jsonl")[:_NUM_COMPARED]]
    texts = [row["text"] for row in _read_jsonl(folder / "test.jsonl")[:_NUM_COMPARED]]
    for name, program in (
        ("import hf_ctxmodels", WITH_IMPORT),
        ("trust_remote_code=True, no import", WITH_REMOTE_CODE),
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


def _read_jsonl(file: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
