"""Mutated files of all formats are read or raise a readable error that names the file."""

import gzip
import json
import random
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from mutations import SEED_COUNTS, assert_readable_errors, check_seeds, dump_json, mutate_bytes, mutate_json

from hf_ctxmodels.conversion.elmo import config_from_options
from hf_ctxmodels.conversion.released_files import read_codes
from hf_ctxmodels.conversion.ulmfit import read_words
from hf_ctxmodels.conversion.word_vector_files import READERS
from hf_ctxmodels.core.command_line import read_recipe, recipe_flags
from hf_ctxmodels.core.loading import read_json
from hf_ctxmodels.data import load_documents
from hf_ctxmodels.data.table_files import read_conll, read_conllu, read_table
from hf_ctxmodels.downstream.tasks import TASKS, TaskArguments
from hf_ctxmodels.downstream.tasks.question_answering import read_squad
from hf_ctxmodels.training.checkpoint_files import MANIFEST_FILE, damaged_files
from hf_ctxmodels.training.summary import SUMMARY_FILE, TrainingSummary
from hf_ctxmodels.training.training_log import LOG_FILE, read_log

RECORDS = [{"text": "The cat sat.\nA dog ran.", "label": 1}, {"text": "It was é.", "label": 0}]
JSONL = "".join(json.dumps(record) + "\n" for record in RECORDS).encode()
QUESTIONS = [
    {"id": "1", "question": "Who sat?", "answers": [{"text": "cat", "answer_start": 4}]},
    {"id": "2", "question": "Who ran?", "is_impossible": True, "answers": []},
]
SQUAD = {"data": [{"paragraphs": [{"context": "The cat sat on the mat.", "qas": QUESTIONS}]}]}
CONLLU = "".join(f"{number}\t{word}\t_\tNOUN\t_\t_\t0\t_\t_\t_\n" for number, word in enumerate(["a", "cat"], start=1))
SUMMARY = {"task": "pretraining", "model_class": "M", "model_type": "m", "dataset": "demo", "seed": 1, "parameters": 9}
SUMMARY |= {"steps": 2, "global_batch_size": 4, "metrics": {"eval_loss": 1.5}, "curve": [{"step": 1, "loss": 2.0}]}
LSTM = {"dim": 8, "projection_dim": 4, "n_layers": 2, "use_skip_connections": True, "cell_clip": 3, "proj_clip": 3}
CNN = {"n_characters": 262, "max_characters_per_token": 50, "embedding": {"dim": 4}, "activation": "relu"}
OPTIONS = {"lstm": LSTM, "char_cnn": CNN | {"filters": [[1, 4], [2, 8]], "n_highway": 1}}


def read_documents(path: Path) -> None:
    """Read all documents, as training does."""
    for document in load_documents(str(path), skip_empty_documents=True):
        " ".join(document).encode()


def read_rows(path: Path) -> None:
    for row in read_table(path, ["text", "label"]):
        str(row.values["text"]).encode()


def read_task(name: str, path: Path) -> None:
    TASKS[name](TaskArguments(text_columns="text")).read(str(path), "train")


FILES: dict[str, tuple[str, bytes, Callable[[Path], Any]]] = {
    "documents.txt": ("a.txt", b"The cat sat.\nA dog ran.\n\nIt was \xc3\xa9.\n", read_documents),
    "documents.jsonl": ("a.jsonl", JSONL, read_documents),
    "documents.jsonl.gz": ("a.jsonl.gz", gzip.compress(JSONL), read_documents),
    "table.jsonl": ("a.jsonl", JSONL, read_rows),
    "table.csv": ("a.csv", b'text,label\n"The cat, it sat.",1\nIt was,0\n', read_rows),
    "table.tsv.gz": ("a.tsv.gz", gzip.compress(b"text\tlabel\nThe cat\t1\nIt was\t0\n"), read_rows),
    "classification.jsonl": ("a.jsonl", JSONL, partial(read_task, "sequence-classification")),
    "regression.jsonl": ("a.jsonl", JSONL, partial(read_task, "regression")),
    "squad": ("a.json", json.dumps(SQUAD).encode(), lambda path: read_squad(str(path))),
    "conll": ("a.conll", b"EU\tB-ORG\nrejects\tO\n\nBlack\tO\n", read_conll),
    "conllu": ("a.conllu", CONLLU.encode(), read_conllu),
    "word2vec-text": ("a.txt", b"2 3\ncat 1 2 3\ndog 4 5 6\n", READERS["word2vec-text"]),
    "word2vec-binary": (
        "a.bin",
        b"2 3\ncat " + struct.pack("<3f", 1, 2, 3) + b"\ndog " + struct.pack("<3f", 4, 5, 6) + b"\n",
        READERS["word2vec-binary"],
    ),
    "glove": ("a.txt", b"cat 1 2 3\ndog 4 5 6\n", READERS["glove"]),
    "recipe": (
        "a.yaml",
        b"family: bert\nmax_steps: 10\nobjective: {mlm: {a: 1}}\n",
        lambda path: recipe_flags(read_recipe(path), {"family", "max_steps", "objective"}, path),
    ),
    "log": (LOG_FILE, b'{"step": 1, "loss": 2.5}\n{"step": 2, "loss": 2.0}\n', lambda path: read_log(path.parent, 5)),
    "manifest": (MANIFEST_FILE, b'{"sha256": {"a": "00", "b": "11"}}', lambda path: damaged_files(path.parent)),
    "summary": (SUMMARY_FILE, json.dumps(SUMMARY).encode(), lambda path: TrainingSummary.load(path.parent)),
    "words.json": ("a.json", b'["the", "cat", "xxunk"]', read_words),
    "words.txt": ("a.txt", b"the\ncat\n", read_words),
    "elmo options": ("a.json", json.dumps(OPTIONS).encode(), lambda path: config_from_options(read_json(path))),
    "codes": ("a.fcodes", b"t h 10\nth e</w> 9\n", read_codes),
}
JSON_FILES = ("squad", "manifest", "summary", "words.json", "elmo options")


def mutate_json_file(content: bytes, rng: random.Random) -> bytes:
    return dump_json(mutate_json(json.loads(content), rng)).encode()


def mutate_json_lines(content: bytes, rng: random.Random) -> bytes:
    return b"".join(dump_json(mutate_json(json.loads(line), rng)).encode() + b"\n" for line in content.splitlines())


MUTATIONS = [(name, mutate_bytes) for name in FILES] + [(name, mutate_json_file) for name in JSON_FILES]
MUTATIONS += [(name, mutate_json_lines) for name, (file, *_) in FILES.items() if file == "a.jsonl"]


@pytest.mark.parametrize("count", SEED_COUNTS)
@pytest.mark.parametrize(("name", "mutate"), MUTATIONS)
def test_mutated_files(name: str, mutate: Callable[[bytes, random.Random], bytes], count: int, tmp_path: Path) -> None:
    file_name, content, read = FILES[name]
    path = tmp_path / file_name

    def check(rng: random.Random) -> None:
        path.write_bytes(mutate(content, rng))
        with assert_readable_errors(path.read_bytes()[:300]):
            read(path)

    path.write_bytes(content)
    read(path)
    check_seeds(count, check)
