"""Pretraining tasks of ERNIE 2.0: targets against reference loops, class frequencies and the task schedule."""

import json
from collections import Counter
from itertools import combinations, islice, pairwise, permutations

import numpy as np
import pytest
import torch
from numbered_text import numbered_documents, split_segments, with_index

from hf_ctxmodels import CtxErnieTokenizer
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.data import (
    ExampleSampling,
    ExampleSet,
    MixtureBatchSampler,
    ScheduledMixture,
    build_training_set,
    load_documents,
)
from hf_ctxmodels.objectives import ContinualTasks
from hf_ctxmodels.objectives.continual_tasks import TASKS, parse_task_schedule
from hf_ctxmodels.objectives.masking import IGNORE_INDEX


def rows_of(tokenizer, documents, task, passes=1, max_length=32, **options):
    objective = ContinualTasks(tokenizer, max_length=max_length, seed=0, schedule=task, **options)
    return objective, [row for index in range(passes) for row in objective.examples(documents, index)]


def test_capitalization_targets():
    sentences = ["The USA and iPhone met Émile ÖL at 9 Oaks , not a 5th McDonald !", "it Ended . Äpfel 日本 X"]
    tokenizer = CtxErnieTokenizer.train(["the usa and met at not it a abcdefghijklmnopqrstuvwxyz0123456789,!.日本"], 90)
    expected = []
    for raw_word in " ".join(sentences).split():
        for part in [raw_word] if raw_word.isascii() or raw_word[0] not in "日" else raw_word:
            pieces = tokenizer(part, add_special_tokens=False).input_ids
            first = part[0]
            target = 1 if first.isupper() else 0 if first.islower() else IGNORE_INDEX
            expected += [target] * len(pieces)
    _, rows = rows_of(tokenizer, [sentences], "capitalization", max_length=512)
    assert len(rows) == 1
    assert rows[0]["token_targets"].tolist() == [IGNORE_INDEX, *expected, IGNORE_INDEX]
    assert {0, 1, IGNORE_INDEX} == set(expected)
    assert any(target == 1 and first == 1 for target, first in pairwise(expected)), "also in later pieces of a word"
    cased = CtxErnieTokenizer.train(["A a B b"], 30, do_lower_case=False, min_frequency=1)
    with pytest.raises(CtxError, match="preserves capitals"):
        rows_of(cased, [sentences], "capitalization")


def test_token_document_targets(tokenizer):
    rng = np.random.default_rng(0)
    letters = ["wa", "wb", "wc", "wd", "we", "wf", "wg", "wh", "wi", "wj"]
    shape = [*rng.integers(1, 9, 30), 1]
    documents = [[" ".join(rng.choice(letters, rng.integers(1, 7))) for _ in range(count)] for count in shape]
    documents[-1] = ["wa"]  # a single token cannot occur in another segment
    _, rows = rows_of(tokenizer, documents, "token_document", max_length=16)
    row_number, target_counts = 0, Counter()
    for document in documents[:-1]:
        text = tokenizer(" ".join(document), add_special_tokens=False).input_ids
        offset = 0
        while offset < len(text) and len(text) > 1:
            row = rows[row_number]
            segment = row["input_ids"][1:-1].tolist()
            assert segment == text[offset : offset + len(segment)]
            assert len(segment) <= min(14, len(text) // 2)
            other_tokens = text[:offset] + text[offset + len(segment) :]
            expected = [int(token in other_tokens) for token in segment]
            assert row["token_targets"].tolist() == [IGNORE_INDEX, *expected, IGNORE_INDEX]
            target_counts.update(expected)
            offset, row_number = offset + len(segment), row_number + 1
    assert row_number == len(rows)
    assert min(target_counts[0], target_counts[1]) > 50


@pytest.mark.parametrize("max_segments", [2, 3])
def test_sentence_reordering_targets(tokenizer, max_segments):
    documents, _ = numbered_documents([[2] * 60] * 4)
    classes = [order for number in range(1, max_segments + 1) for order in permutations(range(number))]
    assert len(classes) == {2: 3, 3: 9}[max_segments]
    objective, rows = rows_of(tokenizer, documents, "sentence_reordering", 40, reordering_segments=max_segments)
    assert objective.config_fields["pretraining_tasks"] == {"sentence_reordering": len(classes)}
    targets, length_counts = Counter(), Counter()
    for row in rows:
        (numbers,) = split_segments(row)
        order, text = classes[row["target"]], np.sort(numbers)
        assert (np.diff(text) == 1).all()
        splits = (np.split(text, cuts) for cuts in combinations(range(2, len(text), 2), len(order) - 1))
        assert any(np.array_equal(np.concatenate([runs[k] for k in order]), numbers) for runs in splits), "of sentences"
        targets[row["target"]] += 1
        length_counts[len(order)] += 1
    assert len(rows) > 500
    for number in range(1, max_segments + 1):
        assert length_counts[number] / len(rows) == pytest.approx(1 / max_segments, abs=5 * 0.5 / len(rows) ** 0.5)
    for target, order in enumerate(classes):
        total = length_counts[len(order)]
        expected = 1 / len([other for other in classes if len(other) == len(order)])
        assert targets[target] / total == pytest.approx(expected, abs=5 * 0.5 / total**0.5), order


def test_sentence_distance_targets(tokenizer):
    documents, document_of = numbered_documents([[3] * 30] * 8 + [[3]])
    objective, rows = rows_of(tokenizer, documents, "sentence_distance", passes=8)
    targets = Counter()
    for row in rows:
        first, second = (int(segment[0]) // 3 for segment in split_segments(row))
        assert row["token_type_ids"].tolist() == [0] * 5 + [1] * 4
        same_document = document_of[3 * first] == document_of[3 * second]
        assert row["target"] == (0 if same_document and second == first + 1 else 1 if same_document else 2)
        assert not same_document or abs(second - first) > 1 or second == first + 1
        targets[row["target"]] += 1
    assert len(rows) == 8 * 241, "every sentence is the first of a pair"
    for target in range(3):
        assert targets[target] / len(rows) == pytest.approx(1 / 3, abs=5 * 0.5 / len(rows) ** 0.5 + 0.01)
    _, cut = rows_of(tokenizer, numbered_documents([[30, 4], [9]])[0], "sentence_distance", max_length=16)
    assert {tuple(map(len, split_segments(row))) for row in cut} <= {(9, 4), (7, 6), (4, 9), (6, 7)}, (
        "sentences are cut"
    )
    _, single_document_rows = rows_of(tokenizer, numbered_documents([[3] * 5])[0], "sentence_distance", passes=8)
    assert {row["target"] for row in single_document_rows} == {0, 1}, "there is no other document"
    batch = objective.collate(with_index(rows))
    rates = objective.rates(objective.count_batch(batch))
    assert [rates[f"sentence_distance_{k}_share"] for k in range(3)] == pytest.approx(
        [targets[k] / len(rows) for k in range(3)]
    )


PAIRS = [("wa wb", "wc", "But"), ("wd", "we wf", "clicked"), ("wg", "wh", "so"), ("wg", "wh", "irrelevant")]
TEXT = "wa wb wc. wd we wf.\nwg wh wi wj.\n\nwb wc wd.\nwe wf wg."
SCHEDULE = "knowledge_masking:4; knowledge_masking:2, sentence_distance:3, discourse_relation:1, query_title:1"


@pytest.fixture
def documents(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    rows = [dict(zip(("first", "second", "label"), pair, strict=True)) for pair in PAIRS]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_documents(str(tmp_path / "text.txt"), f"{tmp_path / 'pairs.jsonl'}=first,second,label")


def test_label_determines_task_of_pair(tokenizer, documents):
    objective, rows = rows_of(tokenizer, documents, SCHEDULE, discourse_relations="so, but")
    task_names = list(TASKS)
    targets = [
        (task_names[row["task"]], row["target"])
        for row in rows
        if task_names[row["task"]] in ("discourse_relation", "query_title")
    ]
    assert targets == [("discourse_relation", 1), ("query_title", 2), ("discourse_relation", 0), ("query_title", 0)]
    expected = {"sentence_distance": 3, "discourse_relation": 2, "query_title": 3}
    assert objective.config_fields == {"pretraining_tasks": expected, "use_task_id": True}
    with pytest.raises(CtxError, match="label 'But' is not among so, because"):
        rows_of(tokenizer, documents, SCHEDULE, discourse_relations="so,because")


def test_batch_of_several_tasks(tokenizer, documents):
    """Only knowledge-masking rows are masked; a row has targets for its own task, and -100 for the others."""
    objective, rows = rows_of(tokenizer, documents, SCHEDULE, discourse_relations="so,but", mlm_probability=0.5)
    batch = objective.collate(with_index(rows))
    inputs = {"input_ids", "attention_mask", "token_type_ids", "task_type_ids", "labels"}
    assert set(batch) == inputs | {f"{name}_labels" for name in objective.config_fields["pretraining_tasks"]}
    for number, row in enumerate(rows):
        task = list(TASKS)[row["task"]]
        is_token = batch["attention_mask"][number] == 1
        original = batch["input_ids"][number].where(batch["labels"][number] == IGNORE_INDEX, batch["labels"][number])
        assert original[is_token].tolist() == row["input_ids"].tolist()
        assert bool((batch["labels"][number] != IGNORE_INDEX).any()) == (task == "knowledge_masking")
        assert set(batch["task_type_ids"][number, is_token].tolist()) == {TASKS[task].task_type}
        for name in objective.config_fields["pretraining_tasks"]:
            assert int(batch[f"{name}_labels"][number]) == (row["target"] if name == task else IGNORE_INDEX)
    next_epoch = objective.collate(with_index(rows, epoch=1))
    assert not torch.equal(next_epoch["labels"], batch["labels"])
    rates = objective.rates(objective.count_batch(batch))
    shares = Counter(list(TASKS)[row["task"]] for row in rows)
    assert rates["masked_share"] == pytest.approx(shares["knowledge_masking"] / len(rows))
    assert rates["query_title_share"] == pytest.approx(2 / len(rows))
    assert tuple(rates[f"query_title_{k}_share"] for k in range(3)) == (0.5, 0.0, 0.5)
    assert rates["selected_share"] == pytest.approx(0.5, abs=0.2)


def test_training_set_follows_task_schedule(tokenizer, documents):
    objective = ContinualTasks(tokenizer, max_length=32, seed=0, schedule=SCHEDULE, discourse_relations="so,but")
    mixture = build_training_set(documents, objective, objective.sampling)
    assert isinstance(mixture, ScheduledMixture)
    task_ids = {name: number for number, name in enumerate(TASKS)}
    for per_step in (1, 3):
        batches = list(islice(MixtureBatchSampler(mixture, 2, seed=1, batches_per_step=per_step), 25 * per_step))
        tasks = [{int(mixture[key]["task"]) for key in batch} for batch in batches]
        steps = [set().union(*tasks[first : first + per_step]) for first in range(0, len(tasks), per_step)]
        assert all(len(step) == 1 for step in steps), "a step has one task"
        step_tasks = [step.pop() for step in steps]
        assert step_tasks[:4] == [0] * 4
        stage = {"knowledge_masking": 2, "sentence_distance": 3, "discourse_relation": 1, "query_title": 1}
        for first in (4, 11, 18):  # the last stage is repeated
            assert Counter(step_tasks[first : first + 7]) == {task_ids[name]: steps for name, steps in stage.items()}
        resumed = MixtureBatchSampler(mixture, 2, seed=1, start_batch=11, batches_per_step=per_step)
        assert list(islice(resumed, 10)) == batches[11:21]
    with pytest.raises(CtxError, match="without a step"):
        ScheduledMixture(mixture.datasets, [{0: 1}, {0: 0, 1: 2}])


def test_steps_are_spread_evenly_within_stage():
    mixture = ScheduledMixture([[{}], [{}], [{}]], [{0: 50, 1: 30, 2: 20}])
    order = mixture.choose(np.arange(100), seed=0)
    for task, steps in enumerate((50, 30, 20)):
        cumulative = np.cumsum(order == task)
        assert np.abs(cumulative - (np.arange(100) + 1) * steps / 100).max() <= 1.5
    assert (mixture.choose(np.arange(100, 200), seed=0) == order).all()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("knowledge_masking; capitalization", "Stage 2 lacks the earlier task 'knowledge_masking'"),
        ("knowledge", "no task 'knowledge'(.|\n)*sentence_distance"),
        ("capitalization:0", "'capitalization:0'.*no number of steps"),
        ("capitalization:x", "no number of steps"),
        ("capitalization, capitalization:2", "'capitalization:2' is repeated"),
        ("", "no task ''"),
    ],
)
def test_invalid_schedules(text, message):
    with pytest.raises(CtxError, match=message):
        parse_task_schedule(text, TASKS)


def test_invalid_options_and_missing_examples(tokenizer, documents, tmp_path):
    for options, message in (
        ({"schedule": "discourse_relation"}, "labels of discourse_relation are none"),
        ({"schedule": SCHEDULE, "discourse_relations": "but,shown"}, "but, shown, .*two or more"),
    ):
        with pytest.raises(CtxError, match=message):
            ContinualTasks(tokenizer, max_length=32, seed=0, **options)
    objective = ContinualTasks(tokenizer, max_length=32, seed=0, schedule="knowledge_masking,query_title")
    with pytest.raises(CtxError, match="no example of the task 'query_title'"):
        build_training_set(load_documents(str(tmp_path / "text.txt")), objective, objective.sampling)
    objective = ContinualTasks(tokenizer, max_length=32, seed=0, schedule="knowledge_masking")
    assert objective.sampling == ExampleSampling(task_column="task", task_stages=({0: 1},))
    with pytest.raises(CtxError, match="--streaming"):
        build_training_set(documents, objective, objective.sampling, streaming=True)
    assert len(ExampleSet.build(objective.examples(documents))) == 2, "pairs are skipped without a task for them"
