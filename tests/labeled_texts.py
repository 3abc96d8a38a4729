"""Small datasets that a model learns in a few steps, and tiny models with a matching vocabulary."""

import json
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from zoo import tiny_config

GOOD, BAD = ["lovely", "great", "splendid", "charming"], ["awful", "dreadful", "boring", "silly"]
PLACES, NAMES = ["Paris", "Rome", "Athens", "Lima"], ["Anna", "Boris", "Clara", "David"]
FILLER_WORDS = ["the", "film", "was", "in", "saw", "a", "story", "yesterday", "who", "where", "is"]


def save_tiny(directory: Path, family, from_transformers: bool) -> str:
    """Save a tiny random model and a tokenizer of the words above; returns the directory."""
    tokenizer = family.tokenizer.train([" ".join(GOOD + BAD + PLACES + NAMES + FILLER_WORDS)] * 20, vocab_size=300)
    torch.manual_seed(0)
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": 64, "initializer_range": 0.1}
    fields = {name: size for name, size in sizes.items() if name in family.config.__dataclass_fields__}
    model = family.models["AutoModel"](tiny_config(family, num_labels=2, **fields))
    tokenizer.save_pretrained(directory)
    if from_transformers:
        # transformers' classes, as in a published checkpoint
        model.export_reference(directory)
        settings = directory / "tokenizer_config.json"
        reference_config = transformers.CONFIG_MAPPING[family.reference]
        reference = transformers.models.auto.tokenization_auto.TOKENIZER_MAPPING[reference_config].__name__
        if reference != "XLMTokenizer":  # XLMTokenizer reads no tokenizer.json
            settings.write_text(json.dumps(json.loads(settings.read_text()) | {"tokenizer_class": reference}))
    else:
        model.save_pretrained(directory)
    return str(directory)


def write_splits(directory: Path, suffix: str, make_text: Callable[[random.Random, int], str], train: int = 96) -> Any:
    """Write a training and a validation file and return them as flags; `make_text` takes the number of examples."""
    generator, files = random.Random(0), {}
    for flag, name, size in (("train_file", "train", train), ("validation_file", "dev", 32)):
        files[flag] = directory / f"{name}.{suffix}"
        files[flag].write_text(make_text(generator, size))
    return files


def classification_files(directory: Path, labels: tuple = ("neg", "pos")) -> dict[str, Any]:
    def text(generator: random.Random, size: int) -> str:
        classes = [generator.random() < 0.6 for _ in range(size)]
        rows = [f"the film was {generator.choice(GOOD if good else BAD)}\t{labels[good]}" for good in classes]
        return "\n".join(["sentence\tgold", *rows]) + "\n"

    return write_splits(directory, "tsv", text) | {"text_columns": "sentence", "label_column": "gold"}


regression_files = partial(classification_files, labels=(0.5, 4.5))


def tagging_files(directory: Path) -> dict[str, Any]:
    def text(generator: random.Random, size: int) -> str:
        sentences = [(generator.choice(NAMES), generator.choice(PLACES)) for _ in range(size)]
        return "\n\n".join(f"{name} I-PER\nsaw O\n{city} I-LOC" for name, city in sentences) + "\n"

    return write_splits(directory, "conll", text)


def squad_files(directory: Path) -> dict[str, Any]:
    def text(generator: random.Random, size: int) -> str:
        paragraphs = []
        for number in range(size):
            city = generator.choice(PLACES)
            context = f"{generator.choice(NAMES)} saw a film in {city} yesterday"
            answer = {"text": city, "answer_start": context.index(city)}
            paragraphs.append(
                {"context": context, "qas": [{"id": f"{number}", "question": "where", "answers": [answer]}]}
            )
        return json.dumps({"data": [{"paragraphs": paragraphs}]})

    return write_splits(directory, "json", text, train=128)


def choice_files(directory: Path) -> dict[str, Any]:
    def text(generator: random.Random, size: int) -> str:
        records = []
        for _ in range(size):
            choices = [generator.choice(BAD) for _ in range(3)]
            label = generator.randrange(3)
            choices[label] = generator.choice(GOOD)
            records.append(json.dumps({"text": "the film was", "choices": choices, "label": label}))
        return "\n".join(records)

    return write_splits(directory, "jsonl", text)


def pair_files(directory: Path) -> dict[str, Any]:
    def text(generator: random.Random, size: int) -> str:
        rows = [[generator.choice(GOOD + BAD) for _ in range(2)] for _ in range(size)]
        lines = [f"the {a}\tthe film was {b}\t{float((a in GOOD) == (b in GOOD))}" for a, b in rows]
        return "\n".join(["one\tother\tlabel", *lines]) + "\n"

    return write_splits(directory, "tsv", text) | {"text_columns": "one,other", "both_orders": "true"}
