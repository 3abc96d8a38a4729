"""Sentence tasks of GenSen: examples by type of document, batches of one or several tasks, and task sampling."""

import json
from collections import Counter
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from hf_ctxmodels import CtxCoveTokenizer, CtxError, CtxGenSenTokenizer
from hf_ctxmodels.data import Documents, ExampleSet, MixtureBatchSampler, load_documents
from hf_ctxmodels.data.training_set import mix_tasks
from hf_ctxmodels.objectives import SentenceTasks

TEXT = "The cat sat. It slept!\nThen a dog came.\n\nAlone.\n\nA garden. A bridge.\n"
PAIRS = [("A cat sat.", "Eine Katze saß."), ("A dog saw a cat!", "Ein Hund sah eine Katze!")]
PARSES = [("The cat sat .", "NP DT NN VP VBD O .")]
RELATED = [
    {"premise": "A dog ran.", "hypothesis": "It slept.", "label": "Contradiction"},
    {"premise": "A cat sat.", "hypothesis": "A cat.", "label": "entailment"},
    {"premise": "A cat sat.", "hypothesis": " ", "label": "neutral"},
]


@pytest.fixture
def documents(tmp_path: Path) -> Documents:
    (tmp_path / "running.txt").write_text(TEXT)
    for name, pairs in (("de", PAIRS), ("parse", PARSES)):
        for side in range(2):
            (tmp_path / f"{name}{side}.txt").write_text("".join(f"{pair[side]}\n" for pair in pairs))
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in RELATED))
    files = [str(tmp_path / name) for name in ("running.txt", "de0.txt", "parse0.txt", "pairs.jsonl")]
    return load_documents(
        *files[:3],
        f"{files[3]}=premise,hypothesis,label",
        translations=["-", str(tmp_path / "de1.txt"), str(tmp_path / "parse1.txt"), "-"],
        language_tags=["-", "<de>", "<parse>", "-"],
    )


@pytest.fixture
def tokenizer(documents: Documents) -> CtxGenSenTokenizer:
    return CtxGenSenTokenizer.train(documents.texts(), vocab_size=150)


def rows_of(objective: SentenceTasks, documents: Documents) -> list[tuple]:
    """(task, text, second text, target text, decoder, relation) of each example."""

    def text(ids: np.ndarray) -> str:
        assert not len(ids) or ids[-1] == objective.tokenizer.eos_token_id
        return objective.tokenizer.decode(ids, skip_special_tokens=True)

    rows = []
    for row in objective.examples(documents):
        texts = (text(row[name]) for name in ("input_ids", "second_ids", "labels"))
        decoder = objective.decoder_tasks[row["target_language"]] if len(row["labels"]) else ""
        relation = "" if row["relation"] < 0 else objective.relation_labels[row["relation"]]
        rows.append((objective.task_names[row["task"]], *texts, decoder, relation))
    return rows


def test_examples_of_each_document_type(documents: Documents, tokenizer: CtxGenSenTokenizer) -> None:
    objective = SentenceTasks(tokenizer, max_length=30, seed=0)
    assert objective.task_names == ["skip-thought", "<de>", "<parse>", "relations"]
    assert objective.config_fields["decoder_tasks"] == ["next", "previous", "<de>", "<parse>"]
    skip_thought = "skip-thought"
    expected = [
        (skip_thought, "the cat sat .", "", "it slept !", "next", ""),
        (skip_thought, "it slept !", "", "then a dog came .", "next", ""),
        (skip_thought, "it slept !", "", "the cat sat .", "previous", ""),
        (skip_thought, "then a dog came .", "", "it slept !", "previous", ""),
        (skip_thought, "a garden .", "", "a bridge .", "next", ""),
        (skip_thought, "a bridge .", "", "a garden .", "previous", ""),
        ("<de>", "a cat sat .", "", "eine katze saß .", "<de>", ""),
        ("<de>", "a dog saw a cat !", "", "ein hund sah eine katze !", "<de>", ""),
        ("<parse>", "the cat sat .", "", "np dt nn vp vbd o .", "<parse>", ""),
        ("relations", "a dog ran .", "it slept .", "", "", "contradiction"),
        ("relations", "a cat sat .", "a cat .", "", "", "entailment"),
    ]
    assert sorted(rows_of(objective, documents)) == sorted(expected)


@pytest.mark.parametrize(
    ("tasks", "decoders"), [("<parse>,relations", ["<parse>"]), ("skip-thought", ["next", "previous"])]
)
def test_selected_tasks(documents: Documents, tokenizer: CtxGenSenTokenizer, tasks: str, decoders: list[str]) -> None:
    objective = SentenceTasks(tokenizer, max_length=30, seed=0, tasks=tasks)
    assert objective.decoder_tasks == decoders
    assert {row[0] for row in rows_of(objective, documents)} == set(tasks.split(","))
    assert bool(objective.config_fields["relations"]) == ("relations" in tasks)


def test_batches_of_one_or_several_tasks(documents: Documents, tokenizer: CtxGenSenTokenizer) -> None:
    objective = SentenceTasks(tokenizer, max_length=30, seed=0)
    rows = list(objective.examples(documents))
    batch = objective.collate(rows)
    inputs = {"input_ids", "attention_mask", "token_type_ids"}
    assert set(batch) == inputs | {"labels", "target_languages", "relation_labels"}
    for number, row in enumerate(rows):
        is_token = batch["attention_mask"][number] == 1
        assert batch["input_ids"][number, is_token].tolist() == [*row["input_ids"], *row["second_ids"]]
        types = [0] * len(row["input_ids"]) + [1] * len(row["second_ids"])
        assert batch["token_type_ids"][number, is_token].tolist() == types
        assert not batch["token_type_ids"][number, ~is_token].any()
        is_target = batch["labels"][number] != -100
        assert batch["labels"][number, is_target].tolist() == row["labels"].tolist()
        assert int(batch["relation_labels"][number]) == row["relation"]
    single_task_batch = objective.collate(rows[:2])
    assert not single_task_batch["token_type_ids"].any()
    assert (single_task_batch["relation_labels"] == -100).all()
    pairs = [row for row in rows if row["relation"] >= 0]
    assert (objective.collate(pairs)["labels"] == -100).all()
    rates = objective.rates(
        Counter(objective.count_batch(batch)) + Counter(objective.count_batch(objective.collate(pairs)))
    )
    assert rates["relations_share"] == pytest.approx(4 / 13)
    assert rates["next_share"] == pytest.approx(3 / 13)
    assert rates["<parse>_share"] == pytest.approx(1 / 13)


def test_long_examples_are_skipped_and_counted(documents: Documents, tokenizer: CtxGenSenTokenizer) -> None:
    unlimited = SentenceTasks(tokenizer, max_length=30, seed=0)
    limited = SentenceTasks(tokenizer, max_length=6, seed=0)
    columns = ("input_ids", "second_ids", "labels")
    num_fitting = sum(max(len(row[name]) for name in columns) <= 6 for row in unlimited.examples(documents))
    assert 0 < len(list(limited.examples(documents))) == num_fitting
    assert limited.statistics["left_out"] == 11 - num_fitting


def test_batches_have_one_task(documents: Documents, tokenizer: CtxGenSenTokenizer) -> None:
    objective = SentenceTasks(tokenizer, max_length=30, seed=0)
    examples = ExampleSet.build(objective.examples(documents))
    mixture = mix_tasks(examples, objective.sampling)
    assert len(mixture) == len(examples)
    batches = [[mixture[key] for key in batch] for batch in islice(MixtureBatchSampler(mixture, 3, seed=1), 400)]
    tasks = [{int(row["task"]) for row in batch} for batch in batches]
    assert all(len(task) == 1 for task in tasks)
    batch_tasks = [task.pop() for task in tasks]
    assert [number for number, task in enumerate(batch_tasks) if task == 3] == list(range(0, 400, 10))
    counts = Counter(batch_tasks)
    assert all(80 < counts[task] < 160 for task in range(3)), counts
    example_counts = Counter(
        row["example_index"] for batch, task in zip(batches, batch_tasks) if task == 0 for row in batch
    )
    assert len(example_counts) == 6
    assert max(example_counts.values()) - min(example_counts.values()) <= 1, "each task repeats its examples evenly"


def test_relation_labels_ignore_case(documents: Documents, tokenizer: CtxGenSenTokenizer) -> None:
    options = {"tasks": "relations", "relations": "Contradiction,ENTAILMENT,neutral"}
    objective = SentenceTasks(tokenizer, max_length=30, seed=0, **options)
    assert sorted(example["relation"] for example in objective.examples(documents)) == [0, 1]


def test_relations_without_period(documents: Documents, tokenizer: CtxGenSenTokenizer) -> None:
    objective = SentenceTasks(tokenizer, max_length=30, seed=0, relations_every=0)
    assert objective.sampling.task_periods == {}
    relations_only = SentenceTasks(tokenizer, max_length=30, seed=0, tasks="relations")
    mixture = mix_tasks(ExampleSet.build(relations_only.examples(documents)), relations_only.sampling)
    assert set(mixture.choose(np.arange(50), seed=0).tolist()) == {0}


def test_invalid_options_and_data(documents: Documents, tokenizer: CtxGenSenTokenizer, tmp_path: Path) -> None:
    for options, message in (
        ({"tasks": "<fr>"}, "no task '<fr>'"),
        ({"tasks": "relations,,<de>"}, "not a list of different names"),
        ({"relations": "a,a"}, "not a list of different names"),
        ({"relations_every": -1}, "relations_every=-1 is out of range"),
    ):
        with pytest.raises(CtxError, match=message):
            SentenceTasks(tokenizer, max_length=30, seed=0, **options)
    with pytest.raises(CtxError, match="no joint vocabulary"):
        SentenceTasks(CtxCoveTokenizer.train(["a\tb"], 9, min_count=1, min_target_count=1), max_length=9, seed=0)
    other_relations = SentenceTasks(tokenizer, max_length=30, seed=0, relations="same,different")
    with pytest.raises(CtxError, match="label 'Contradiction' is not among same, different"):
        list(other_relations.examples(documents))
    running_text = load_documents(str(tmp_path / "running.txt"))
    objective = SentenceTasks(tokenizer, max_length=30, seed=0, tasks="skip-thought,<de>")
    with pytest.raises(CtxError, match="no example of the task '<de>'"):
        objective.check(ExampleSet.build(objective.examples(running_text)))
    assert list(SentenceTasks(tokenizer, max_length=30, seed=0).examples(running_text))
    untagged = load_documents(str(tmp_path / "de0.txt"), translations=[str(tmp_path / "de1.txt")])
    with pytest.raises(CtxError, match="does not begin with one of <de>, <parse>: 'Eine Katze"):
        list(objective.examples(untagged))
