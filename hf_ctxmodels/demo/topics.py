"""A classifier from few labels: the real BERT learns to say which Wikipedia article a sentence is from; then it is
published to a directory and opened by other processes."""

import json
import random
from pathlib import Path

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.data.demo_corpus import demo_articles
from hf_ctxmodels.data.sentence_splitting import split_sentences
from hf_ctxmodels.demo.publishing import WITH_IMPORT, WITH_REMOTE_CODE, labels_from
from hf_ctxmodels.demo.real_bert import checkpoint
from hf_ctxmodels.demo.screen import Result, Screen
from hf_ctxmodels.demo.workshop import Workshop
from hf_ctxmodels.models.bert import CtxBertModel, CtxBertTokenizer
from hf_ctxmodels.training.metrics.summary import TrainingSummary

RECIPE = "topics_demo"
ARTICLES, LABELS = 12, 5  # articles, and labelled sentences of each
_HELD_OUT = 5  # every fifth paragraph
_WORDS = 6  # of the shortest sentence
_REOPENED = 40  # sentences
_EXAMPLE = 90  # characters at most
OWN_SENTENCES = (
    "Two men walked on the Moon while a third stayed in orbit.",
    "The colonies wanted to be free of the British king.",
    "Nothing moves faster than light.",
    "The president was shot in a theatre.",
)


def write_sentences(folder: Path) -> dict[str, list[dict[str, str]]]:
    """train.jsonl and test.jsonl: the first sentence of paragraphs of the longest articles, labelled by the title.

    Every fifth paragraph is for the test; of the others five of each article are drawn with a fixed seed.
    """
    longest = sorted(demo_articles(), key=lambda article: -len(article[1]))[:ARTICLES]
    draw = random.Random(0)
    parts: dict[str, list[dict[str, str]]] = {"train": [], "test": []}
    for title, paragraphs in longest:
        sentences = [split_sentences(paragraph)[0] for paragraph in paragraphs]
        rows = [{"text": text, "label": title} for text in sentences if len(text.split()) >= _WORDS]
        parts["test"] += rows[::_HELD_OUT]
        rest = [row for number, row in enumerate(rows) if number % _HELD_OUT]
        parts["train"] += draw.sample(rest, min(LABELS, len(rest)))
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in parts.items():
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
    return parts


def show_topics(screen: Screen, shop: Workshop, epochs: int) -> None:
    """Save the real BERT in our layout, fine-tune it, and compare it with a bag of words and the majority."""
    folder, start = shop.folder / "topics", shop.folder / "real-bert"
    parts = write_sentences(folder)
    CtxBertModel.from_pretrained(checkpoint()).save_pretrained(start)
    CtxBertTokenizer.from_pretrained(checkpoint()).save_pretrained(start)
    short = (row for row in parts["test"] if len(row["text"]) < _EXAMPLE and " ." not in row["text"])
    example = next(row for row in short if row["label"] not in row["text"])
    screen.text(
        f"Which article is a sentence from? {ARTICLES} Wikipedia articles, {LABELS} labelled sentences of each, "
        f'{len(parts["test"])} held-out sentences, such as "{example["text"]}" ({example["label"]}).'
    )
    shop.run(
        screen,
        *("topics", "finetune", "--recipe", RECIPE, "--model", start, "--num_train_epochs", epochs),
        *("--train_file", folder / "train.jsonl", "--validation_file", folder / "test.jsonl"),
        *("--predictions_file", folder / "predictions.jsonl"),
        output=folder / "model",
    )
    metrics = TrainingSummary.load(folder / "model").metrics
    baselines = {"bag of words": bag_of_words(**parts), "majority": metrics["baseline_accuracy"]}
    screen.result(
        Result("accuracy on held-out sentences", metrics["eval_accuracy"], baselines),
        "share of the held-out sentences whose article is named; bag of words: logistic regression on TF-IDF of the "
        "same labelled sentences; majority: one article for all",
    )


def bag_of_words(train: list[dict[str, str]], test: list[dict[str, str]]) -> float:
    """Accuracy of logistic regression on TF-IDF weights of the words."""
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression

    words = TfidfVectorizer()
    features = words.fit_transform([row["text"] for row in train])
    model = LogisticRegression(C=10, max_iter=1000).fit(features, [row["label"] for row in train])
    return float(model.score(words.transform([row["text"] for row in test]), [row["label"] for row in test]))


def show_publishing(screen: Screen, shop: Workshop) -> None:
    """Publish the classifier to a directory, and open it in two clean processes.

    Raises:
        CtxError: A process gives other labels than the training run did.
    """
    published, folder = shop.folder / "published", shop.folder / "topics"
    shop.run(
        screen,
        *("published", "push", "--model", folder / "model", "--repo_id", "your-name/topics"),
        output=published,
    )
    screen.text(f"{published}: {', '.join(sorted(path.name for path in published.iterdir()))}")
    before = [row["prediction"] for row in _rows(folder / "predictions.jsonl")[:_REOPENED]]
    texts = [row["text"] for row in _rows(folder / "test.jsonl")[:_REOPENED]]
    for name, program in (
        ("import hf_ctxmodels", WITH_IMPORT),
        ("trust_remote_code=True, no import", WITH_REMOTE_CODE),
    ):
        labels = labels_from(program, published, [*texts, *OWN_SENTENCES])
        same = sum(label == earlier for earlier, label in zip(before, labels))
        screen.line(f"opened in a clean process by {name + ':':<35}{same} of {len(before)} labels as before")
        if same < len(before):
            raise CtxError("The published model gives other labels.", location=str(published), hint="report this.")
    screen.line("what it says of sentences that are in no article:")
    screen.rows([(f"  {text}", label) for text, label in zip(OWN_SENTENCES, labels[len(before) :])])


def _rows(file: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
