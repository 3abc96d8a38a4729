"""Several tasks on sentences: what a document teaches, batches of one task or of several, and how tasks are drawn."""

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
    """(task, text, second text, what is written, by which decoder, relation) of every example."""

    def text(ids: np.ndarray) -> str:
        assert not len(ids) or ids[-1] == objective.tokenizer.eos_token_id
        return objective.tokenizer.decode(ids, skip_special_tokens=True)

    pairs = []
    for row in objective.examples(documents):
        texts = (text(row[name]) for name in ("input_ids", "second_ids", "labels"))
        writes = objective.decoder_tasks[row["target_language"]] if len(row["labels"]) else ""
        relation = "" if row["relation"] < 0 else objective.relation_labels[row["relation"]]
        pairs.append((objective.task_names[row["task"]], *texts, writes, relation))
    return pairs


def test_what_every_kind_of_document_teaches(documents: Documents, tokenizer: CtxGenSenTokenizer) -> None:
    objective = SentenceTasks(tokenizer, max_length=30, seed=0)
    assert objective.task_names == ["skip-thought", "<de>", "<parse>", "relations"]
    assert objective.config_fields["decoder_tasks"] == ["next", "previous", "<de>", "<parse>"]
    skip = "skip-thought"
    expected = [
        (skip, "the cat sat .", "", "it slept !", "next", ""),
        (skip, "it slept !", "", "then a dog came .", "next", ""),
        (skip, "it slept !", "", "the cat sat .", "previous", ""),
        (skip, "then a dog came .", "", "it slept !", "previous", ""),
        (skip, "a garden .", "", "a bridge .", "next", ""),
        (skip, "a bridge .", "", "a garden .", "previous", ""),
        ("<de>", "a cat sat .", "", "eine katze saß .", "<de>", ""),
        ("<de>", "a dog saw a cat !", "", "ein hund sah eine katze !", "<de>", ""),
        ("<parse>", "the cat sat .", "", "np dt nn vp vbd o .", "<parse>", ""),
        ("relations", "a dog ran .", "it slept .", "", "", "contradiction"),
        ("relations", "a cat sat .", "a cat .", "", "", "entailment"),
    ]
    assert sorted(rows_of(objective, documents)) == sorted(expected)


@pytest.mark.parametrize(
    ("tasks", "writes"), [("<parse>,relations", ["<parse>"]), ("skip-thought", ["next", "previous"])]
)
def test_tasks_by_name(documents: Documents, tokenizer: CtxGenSenTokenizer, tasks: str, writes: list[str]) -> None:
    objective = SentenceTasks(tokenizer, max_length=30, seed=0, tasks=tasks)
    assert objective.decoder_tasks == writes
    assert {row[0] for row in rows_of(objective, documents)} == set(tasks.split(","))
    assert bool(objective.config_fields["relations"]) == ("relations" in tasks)


def test_batches_of_one_task_and_of_several(documents: Documents, tokenizer: CtxGenSenTokenizer) -> None:
    objective = SentenceTasks(tokenizer, max_length=30, seed=0)
    rows = list(objective.examples(documents))
    batch = objective.collate(rows)
    inputs = {"input_ids", "attention_mask", "token_type_ids"}
    assert set(batch) == inputs | {"labels", "target_languages", "relation_labels"}
    for number, row in enumerate(rows):
        there = batch["attention_mask"][number] == 1
        assert batch["input_ids"][number, there].tolist() == [*row["input_ids"], *row["second_ids"]]
        types = [0] * len(row["input_ids"]) + [1] * len(row["second_ids"])
        assert batch["token_type_ids"][number, there].tolist() == types
        assert not batch["token_type_ids"][number, ~there].any()
        asked = batch["labels"][number] != -100
        assert batch["labels"][number, asked].tolist() == row["labels"].tolist()
        assert int(batch["relation_labels"][number]) == row["relation"]
    alone = objective.collate(rows[:2])
    assert not alone["token_type_ids"].any()
    assert (alone["relation_labels"] == -100).all()
    pairs = [row for row in rows if row["relation"] >= 0]
    assert (objective.collate(pairs)["labels"] == -100).all()
    rates = objective.rates(
        Counter(objective.count_batch(batch)) + Counter(objective.count_batch(objective.collate(pairs)))
    )
    assert rates["relations_share"] == pytest.approx(4 / 13)
    assert rates["next_share"] == pytest.approx(3 / 13)
    assert rates["<parse>_share"] == pytest.approx(1 / 13)


def test_long_ones_are_left_out_and_counted(documents: Documents, tokenizer: CtxGenSenTokenizer) -> None:
    whole = SentenceTasks(tokenizer, max_length=30, seed=0)
    short = SentenceTasks(tokenizer, max_length=6, seed=0)
    columns = ("input_ids", "second_ids", "labels")
    fitting = sum(max(len(row[name]) for name in columns) <= 6 for row in whole.examples(documents))
    assert 0 < len(list(short.examples(documents))) == fitting
    assert short.statistics["left_out"] == 11 - fitting


def test_every_batch_is_of_one_task(documents: Documents, tokenizer: CtxGenSenTokenizer) -> None:
    objective = SentenceTasks(tokenizer, max_length=30, seed=0)
    examples = ExampleSet.build(objective.examples(documents))
    mixture = mix_tasks(examples, objective.sampling)
    assert len(mixture) == len(examples)
    batches = [[mixture[key] for key in batch] for batch in islice(MixtureBatchSampler(mixture, 3, seed=1), 400)]
    tasks = [{int(row["task"]) for row in batch} for batch in batches]
    assert all(len(task) == 1 for task in tasks)
    order = [task.pop() for task in tasks]
    assert [number for number, task in enumerate(order) if task == 3] == list(range(0, 400, 10))
    counts = Counter(order)
    assert all(80 < counts[task] < 160 for task in range(3)), counts
    example_counts = Counter(row["example_index"] for batch, task in zip(batches, order) if task == 0 for row in batch)
    assert len(example_counts) == 6
    assert max(example_counts.values()) - min(example_counts.values()) <= 1, (
        "each part goes through its examples again and again"
    )


def test_relations_like_the_others(documents: Documents, tokenizer: CtxGenSenTokenizer) -> None:
    objective = SentenceTasks(tokenizer, max_length=30, seed=0, relations_every=0)
    assert objective.sampling.task_periods == {}
    alone = SentenceTasks(tokenizer, max_length=30, seed=0, tasks="relations")
    mixture = mix_tasks(ExampleSet.build(alone.examples(documents)), alone.sampling)
    assert set(mixture.choose(np.arange(50), seed=0).tolist()) == {0}


def test_what_is_refused(documents: Documents, tokenizer: CtxGenSenTokenizer, tmp_path: Path) -> None:
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
    other = SentenceTasks(tokenizer, max_length=30, seed=0, relations="same,different")
    with pytest.raises(CtxError, match="label 'Contradiction' is not among same, different"):
        list(other.examples(documents))
    running = load_documents(str(tmp_path / "running.txt"))
    named = SentenceTasks(tokenizer, max_length=30, seed=0, tasks="skip-thought,<de>")
    with pytest.raises(CtxError, match="no example of the task '<de>'"):
        named.check(ExampleSet.build(named.examples(running)))
    assert list(SentenceTasks(tokenizer, max_length=30, seed=0).examples(running))
    unmarked = load_documents(str(tmp_path / "de0.txt"), translations=[str(tmp_path / "de1.txt")])
    with pytest.raises(CtxError, match="does not begin with one of <de>, <parse>: 'Eine Katze"):
        list(named.examples(unmarked))
