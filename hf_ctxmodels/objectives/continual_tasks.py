"""Continual multi-task pretraining (Sun et al. 2020, "ERNIE 2.0", arXiv 1907.12412): tasks, schedule and objective."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from math import factorial
from typing import Any, NamedTuple

import numpy as np
import torch

from hf_ctxmodels.core.constants import IGNORE_INDEX
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import check_range, flag
from hf_ctxmodels.data.documents import LabeledPair
from hf_ctxmodels.data.examples import Example, ExampleSet
from hf_ctxmodels.data.padding import Batch
from hf_ctxmodels.data.seeding import Purpose, generator
from hf_ctxmodels.data.training_set import ExampleSampling
from hf_ctxmodels.objectives.base import BaselineOptions, Objective
from hf_ctxmodels.objectives.features import feature_generator
from hf_ctxmodels.objectives.masked_lm import MaskingCollator
from hf_ctxmodels.objectives.masking import UnitMaskingRule, masking_rates
from hf_ctxmodels.objectives.sentence_tasks import require_examples
from hf_ctxmodels.objectives.tokenized_documents import (
    NO_WORD,
    SpecialTokensTemplate,
    TokenizedDocument,
    document_batches,
    sentence_chunks,
    sequence_bounds,
    tokenize_documents,
)
from hf_ctxmodels.objectives.unit_masking import Phrases

WORD, STRUCTURE, SEMANTIC = 0, 1, 2
"""Values of `task_type`: the three types of tasks in the paper, and the three rows of the released task embeddings."""

NEIGHBORS, SAME_DOCUMENT, OTHER_DOCUMENT = 0, 1, 2
"""Classes of the task sentence_distance."""


class Task(NamedTuple):
    """A pretraining task, whose targets in a batch are `<task>_labels`.

    Attributes:
        task_type: The row of the task embeddings.
        classifies_tokens: Whether the target is a class of each token, not of the example.
        has_pairs: Whether examples are labeled pairs instead of running text.
    """

    task_type: int
    classifies_tokens: bool = False
    has_pairs: bool = False


MASKING = "knowledge_masking"
TASKS = {
    MASKING: Task(WORD),
    "capitalization": Task(WORD, classifies_tokens=True),
    "token_document": Task(WORD, classifies_tokens=True),
    "sentence_reordering": Task(STRUCTURE),
    "sentence_distance": Task(STRUCTURE),
    "discourse_relation": Task(SEMANTIC, has_pairs=True),
    "query_title": Task(SEMANTIC, has_pairs=True),
}
"""All tasks in the order of the paper, which is the number `task` of an example."""
_NUMBERS = {name: number for number, name in enumerate(TASKS)}


class TaskExample(NamedTuple):
    """An example of a task without special tokens.

    Attributes:
        segments: One or two segments, (tokens,) each.
        token_targets: (tokens,) class of each token; None without such targets.
        target: The class of the example, or -100.
        words: (tokens,) units; None without masking.
    """

    segments: tuple[np.ndarray, ...]
    token_targets: np.ndarray | None = None
    target: int = IGNORE_INDEX
    words: np.ndarray | None = None


def parse_task_schedule(text: str, task_names: Collection[str]) -> list[dict[str, int]]:
    """For each stage task -> number of its steps, by default 1; raises CtxError if the text is malformed, or a stage
    lacks a task of the previous one: the paper trains a new task together with all earlier ones."""
    location = f"schedule={text}"
    hint = (
        "write task:steps, ...; task:steps, ...: a semicolon between stages, each with the tasks of the previous one."
    )
    stages: list[dict[str, int]] = []
    for stage_text in text.split(";"):
        stage: dict[str, int] = {}
        for entry in stage_text.split(","):
            name, _, steps = (field.strip() for field in entry.partition(":"))
            if name not in task_names:
                raise CtxError(
                    f"There is no task {name!r}.", location=location, hint=f"use some of: {', '.join(task_names)}."
                )
            if name in stage or not (steps or "1").isdecimal() or int(steps or 1) < 1:
                raise CtxError(
                    f"{entry.strip()!r} is repeated, or has no number of steps.", location=location, hint=hint
                )
            stage[name] = int(steps or 1)
        if stages and (missing := [name for name in stages[-1] if name not in stage]):
            raise CtxError(
                f"Stage {len(stages) + 1} lacks the earlier task {missing[0]!r}.", location=location, hint=hint
            )
        stages.append(stage)
    return stages


def parse_pair_labels(label_lists: Mapping[str, str]) -> dict[str, list[str]]:
    """The lower-case labels of each task on labeled pairs, from comma-separated lists; raises CtxError if a task has
    fewer than two, or a label occurs twice."""
    labels_by_task = {
        name: [label.strip().lower() for label in text.split(",") if label.strip()]
        for name, text in label_lists.items()
    }
    labels = [label for task_labels in labels_by_task.values() for label in task_labels]
    if len(set(labels)) < len(labels) or any(len(task_labels) < 2 for task_labels in labels_by_task.values()):
        raise CtxError(
            f"The labels of {' and '.join(labels_by_task)} are {', '.join(labels) or 'none'}; each task requires two "
            "or more, different from other tasks', since the label of a pair determines its task.",
            hint="list them: --objective continual-tasks:discourse_relations=...,relevance_labels=...",
        )
    return labels_by_task


def count_classes(tasks: Iterable[str], num_orders: int, pair_labels: Mapping[str, Sequence[str]]) -> dict[str, int]:
    """Task -> number of its classes, without knowledge_masking.

    Args:
        num_orders: Number of orders of segments, the classes of sentence_reordering.
        pair_labels: Labels of each task on labeled pairs.
    """
    counts = {"sentence_reordering": num_orders, "sentence_distance": 3}
    counts |= {name: len(labels) for name, labels in pair_labels.items()}
    return {name: counts.get(name, 2) for name in tasks if name != MASKING}


@dataclass
class DataCollatorForContinualTasks(MaskingCollator):
    """Pads examples of several tasks, and masks units in the examples of knowledge masking.

    Each feature holds:
        task: The number of its task in `TASKS`.
        input_ids, token_type_ids, word_ids: (tokens,); word_ids are the numbers of units, -1 for none.
        token_targets: (tokens,) class of each token, -100 for none.
        target: Class of the example, -100 for none.

    Returns: input_ids, attention_mask, token_type_ids, task_type_ids, the type of the task, and labels (batch, width);
        and for each task `<task>_labels`, (batch, width) or (batch,), -100 in the examples of other tasks.

    Args:
        classification_tasks: Names of the tasks with `<task>_labels`; None for all except knowledge masking. For the
            other arguments see `UnitMaskingRule`.
    """

    rule_class = UnitMaskingRule

    classification_tasks: Sequence[str] | None = None
    unit_rows: float = flag(1.0, "Probability that units are masked in an example instead of single tokens.")
    mlm_probability: float = flag(0.15, "Share of the units of an example to predict.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.classification_tasks is None:
            self.classification_tasks = [name for name in TASKS if name != MASKING]

    def collate(self, features: list[dict[str, Any]]) -> Batch:
        """Mask and pad features; see the class for their columns and the returned ones."""
        sequences, labels = [], []
        for feature in features:
            ids = np.asarray(feature["input_ids"])
            targets = np.full(len(ids), IGNORE_INDEX)
            if int(feature["task"]) == _NUMBERS[MASKING]:
                rng = feature_generator(feature, self.seed, period=self.mask_period)
                ids, targets = self.masker.mask(ids, np.asarray(feature["word_ids"]), rng)
            sequences.append(ids)
            labels.append(targets)
        padder, inputs = self.pad_inputs(sequences, self.pad_to_multiple_of)
        tasks = np.array([int(feature["task"]) for feature in features])
        types_by_number = np.array([task.task_type for task in TASKS.values()])
        task_types = [np.full(len(ids), types_by_number[task]) for ids, task in zip(sequences, tasks, strict=True)]
        token_types = [np.asarray(feature["token_type_ids"]) for feature in features]
        batch = {
            **inputs,
            "token_type_ids": padder.pad(token_types, self.tokenizer.pad_token_type_id),
            "task_type_ids": padder.pad(task_types, 0),
            "labels": padder.pad(labels, IGNORE_INDEX),
        }
        example_targets = torch.tensor([int(feature["target"]) for feature in features])
        token_targets = padder.pad([np.asarray(feature["token_targets"]) for feature in features], IGNORE_INDEX)
        for name in self.classification_tasks or ():
            is_other_task = torch.from_numpy(tasks != _NUMBERS[name])
            if TASKS[name].classifies_tokens:
                batch[f"{name}_labels"] = token_targets.masked_fill(is_other_task[:, None], IGNORE_INDEX)
            else:
                batch[f"{name}_labels"] = example_targets.masked_fill(is_other_task, IGNORE_INDEX)
        return batch


@dataclass
class ContinualTasks(DataCollatorForContinualTasks, Objective):
    """ERNIE 2.0's objective: tasks that are added one after the other; each step has examples of one task.

    A task is trained together with all earlier ones, for the numbers of steps in the schedule (`ScheduledMixture`). The
    type of a document determines its tasks; a labeled pair belongs to the task that has its label. The tokenizer must
    lower-case for capitalization, otherwise the input contains the answer.

    | task | document | example | target |
    |---|---|---|---|
    | knowledge_masking | sentences | `[CLS] sentences [SEP]` | all tokens of 15% of the units |
    | capitalization | sentences | the same, unmasked | each token: its word begins with a capital |
    | token_document | sentences | the same, at most half a document | each token: it also occurs in another segment |
    | sentence_reordering | sentences | the same, 1 to m segments in a random order | one of 1! + ... + m! orders |
    | sentence_distance | sentences | `[CLS] A [SEP] B [SEP]` | neighbors, same document, two documents |
    | discourse_relation | a labeled pair | `[CLS] A [SEP] B [SEP]` | the label |
    | query_title | a labeled pair | `[CLS] query [SEP] title [SEP]` | the label |

    Examples longer than `max_length` are skipped and counted. The English pretraining code was not released; m, the
    number of targets, the use of one task in a step and equal loss weights are choices of this implementation.

    References: Sun et al. 2020, "Continual Multi-task Learning" and "Pre-training Tasks".
    Related: `UnitMaskingWithPairs` is ERNIE 1.0's; `SentenceTasks` samples the task of a step at random.

    Example:
        >>> ContinualTasks(tokenizer, max_length=128, seed=0, schedule="knowledge_masking:9; knowledge_masking:3, "
        ...     "capitalization:6")
    """

    auto_class = "AutoModelForPreTraining"
    units: str = flag("", "File of phrases, one per line, that are units; empty: only words are units.")
    schedule: str = flag(
        ",".join(name for name, task in TASKS.items() if not task.has_pairs),
        "Stages, separated by semicolons, each of `task:steps`, separated by commas; without steps equal shares. A "
        "stage has the tasks of the previous one; the last one is repeated.",
    )
    reordering_segments: int = flag(3, "Maximum number of segments of a text whose order is predicted.")
    discourse_relations: str = flag("", "Comma-separated labels of the pairs for discourse_relation.")
    relevance_labels: str = flag("irrelevant,shown,clicked", "Comma-separated labels of the pairs for query_title.")

    def __post_init__(self) -> None:
        super().__post_init__()
        stages = parse_task_schedule(self.schedule, TASKS)
        check_range(self, "reordering_segments", at_least=2)
        self.templates = {segments: SpecialTokensTemplate(self.tokenizer, segments) for segments in (1, 2)}
        self.max_text_tokens, self.max_pair_tokens = (
            template.num_text_tokens(self.max_length) for template in self.templates.values()
        )
        self.orders = [
            order for number in range(1, self.reordering_segments + 1) for order in permutations(range(number))
        ]
        """The classes of sentence_reordering: the order of the segments of a text in the example."""
        self.tasks = [name for name in TASKS if name in stages[-1]]
        label_lists = {"discourse_relation": self.discourse_relations, "query_title": self.relevance_labels}
        self.labels = parse_pair_labels({name: text for name, text in label_lists.items() if name in self.tasks})
        """Task on labeled pairs -> labels of its classes."""
        self.classes = count_classes(self.tasks, len(self.orders), self.labels)
        """Task -> number of its classes."""
        lowercases = self.tokenizer("A").input_ids == self.tokenizer("a").input_ids
        if "capitalization" in self.tasks and not lowercases:
            raise CtxError(
                "The tokenizer preserves capitals, so the input contains the answer of the task capitalization.",
                location=f"schedule={self.schedule}",
                hint="use a tokenizer that lower-cases (do_lower_case), or remove the task.",
            )
        self.phrases = Phrases.from_file(self.tokenizer, self.units)
        numbered_stages = tuple({_NUMBERS[name]: steps for name, steps in stage.items()} for stage in stages)
        self.sampling = ExampleSampling(task_column="task", task_stages=numbered_stages)
        self.classification_tasks = list(self.classes)
        token_classes = tuple(f"{name}_labels" for name in self.tasks if TASKS[name].classifies_tokens)
        self.baseline = BaselineOptions(
            len(self.tokenizer), self.tokenizer.all_special_ids, token_classes=token_classes
        )
        self.config_fields = {"pretraining_tasks": self.classes, "use_task_id": True}

    def examples(self, documents: Iterable[list[str]], epoch: int = 0) -> Iterator[Example]:
        """Examples with the columns of the collator; raises CtxError if a label is unknown."""
        first = 0
        for batch in document_batches(documents):
            pairs = [document for document in batch if isinstance(document, LabeledPair)]
            texts = [document for document in batch if not isinstance(document, LabeledPair)]
            for name, example in (*self._text_examples(texts, epoch, first), *self._pair_examples(pairs)):
                template = self.templates[len(example.segments)]
                if sum(map(len, example.segments)) > template.num_text_tokens(self.max_length):
                    self.statistics["left_out"] += 1
                    continue
                yield self._with_special_tokens(name, example, template)
            first += len(batch)

    def check(self, examples: ExampleSet) -> None:
        """Raise CtxError if a task of the schedule has no example."""
        super().check(examples)
        require_examples(examples, {_NUMBERS[name]: name for name in self.tasks}, f"schedule={self.schedule}")

    def _text_examples(self, texts: list[list[str]], epoch: int, first: int) -> Iterator[tuple[str, TaskExample]]:
        """Names of tasks and examples of running text."""
        document_tasks = [name for name in self.tasks if not TASKS[name].has_pairs]
        if not texts or not document_tasks:
            return
        with_words = MASKING in self.tasks and self.masker.rule.needs_words
        tokenized = tokenize_documents(self.tokenizer, texts, with_words, "capitalization" in self.tasks)
        numbered = [
            (first + number, self.phrases.join_document(document))
            for number, document in enumerate(tokenized)
            if len(document)
        ]
        documents = [document for _, document in numbered]
        for position, (number, document) in enumerate(numbered):
            self.statistics.update(documents=1, sentences=len(document), tokens=len(document.ids))
            for name in document_tasks:
                rng = generator(self.seed, epoch, number * len(TASKS) + _NUMBERS[name], Purpose.PAIRING)
                for example in self.task_examples(name, documents, position, rng):
                    yield name, example

    def task_examples(
        self, task: str, documents: Sequence[TokenizedDocument], position: int, rng: np.random.Generator
    ) -> Iterator[TaskExample]:
        """The examples of `documents[position]` for a task on running text."""
        document = documents[position]
        if task == "sentence_reordering":
            yield from self._reordered_sentences(document, rng)
        elif task == "sentence_distance":
            yield from self._sentence_pairs(documents, position, rng)
        elif task == "token_document" and len(document.ids) > 1:
            # segments are at most half a document, so that there are at least two
            for start, stop in sequence_bounds(document, min(self.max_text_tokens, len(document.ids) // 2)):
                segment = document.ids[start:stop]
                is_repeated = np.isin(segment, np.concatenate([document.ids[:start], document.ids[stop:]]))
                yield TaskExample((segment,), is_repeated.astype(np.int64))
        elif task == "capitalization":
            assert document.capitals is not None
            # numbers, punctuation and letters without case have no target
            targets = np.where(document.capitals < 0, IGNORE_INDEX, document.capitals.astype(np.int64))
            for start, stop in sequence_bounds(document, self.max_text_tokens):
                yield TaskExample((document.ids[start:stop],), targets[start:stop])
        elif task == MASKING:
            for start, stop in sequence_bounds(document, self.max_text_tokens):
                words = None if document.word_ids is None else document.word_ids[start:stop]
                yield TaskExample((document.ids[start:stop],), words=words)

    def _reordered_sentences(self, document: TokenizedDocument, rng: np.random.Generator) -> Iterator[TaskExample]:
        """Texts of as many sentences as fit, split at random into up to `reordering_segments` segments, which are
        shuffled."""
        for first, last in sentence_chunks(document.bounds, self.max_text_tokens, from_end=rng.random() < 0.5):
            segments = int(rng.integers(1, min(self.reordering_segments, last - first), endpoint=True))
            cuts = np.sort(first + 1 + rng.choice(last - first - 1, segments - 1, replace=False))
            bounds = document.bounds[[first, *cuts, last]]
            smaller_permutations = sum(factorial(count) for count in range(1, segments))
            target = smaller_permutations + int(rng.integers(factorial(segments)))
            reordered = [document.ids[bounds[segment] : bounds[segment + 1]] for segment in self.orders[target]]
            yield TaskExample((np.concatenate(reordered),), target=target)

    def _sentence_pairs(
        self, documents: Sequence[TokenizedDocument], position: int, rng: np.random.Generator
    ) -> Iterator[TaskExample]:
        """Pairs of each sentence with one of a class sampled uniformly among the possible ones, truncated to fit."""
        document = documents[position]
        count = len(document)
        for number in range(count):
            before, after = max(0, number - 1), max(0, count - number - 2)  # sentences that are not neighbors
            possible = [number + 1 < count, before + after > 0, len(documents) > 1]
            if not any(possible):
                continue
            target = int(rng.choice(np.flatnonzero(possible)))
            other_document, other_number = document, number + 1
            if target == SAME_DOCUMENT:
                index = int(rng.integers(before + after))
                other_number = index if index < before else index - before + number + 2
            elif target == OTHER_DOCUMENT:
                index = int(rng.integers(len(documents) - 1))
                other_document = documents[index + (index >= position)]
                other_number = int(rng.integers(len(other_document)))
            first, second = document.sentence(number), other_document.sentence(other_number)
            half = self.max_pair_tokens // 2  # the longer one is truncated first
            truncated_first = first[: max(half, self.max_pair_tokens - len(second))]
            truncated_second = second[: max(self.max_pair_tokens - half, self.max_pair_tokens - len(first))]
            yield TaskExample((truncated_first, truncated_second), target=target)

    def _pair_examples(self, pairs: list[LabeledPair]) -> Iterator[tuple[str, TaskExample]]:
        """Names of tasks and examples of labeled pairs."""
        targets = {label: (name, labels.index(label)) for name, labels in self.labels.items() for label in labels}
        if not pairs or not targets:
            return
        self.statistics["documents"] += len(pairs)
        firsts, seconds = (
            self.tokenizer([pair[side] for pair in pairs], add_special_tokens=False, verbose=False)["input_ids"]
            for side in (0, 1)
        )
        for pair, first, second in zip(pairs, firsts, seconds, strict=True):
            if (label := pair.label.lower()) not in targets:
                raise CtxError(
                    f"The label {pair.label!r} is not among {', '.join(targets)}.",
                    hint="list all labels: --objective continual-tasks:discourse_relations=...,relevance_labels=...",
                )
            name, target = targets[label]
            yield name, TaskExample((np.array(first, np.int32), np.array(second, np.int32)), target=target)

    def _with_special_tokens(self, name: str, example: TaskExample, template: SpecialTokensTemplate) -> Example:
        ids = template.fill(*example.segments)
        no_words = np.full(len(ids), NO_WORD, dtype=np.int32)
        targets = no_words if example.token_targets is None else template.fill_words(example.token_targets)
        return {
            "task": _NUMBERS[name],
            "input_ids": ids,
            "token_type_ids": template.token_types(*map(len, example.segments)),
            "word_ids": no_words if example.words is None else template.fill_words(example.words),
            "token_targets": np.where(targets == NO_WORD, IGNORE_INDEX, targets).astype(np.int16),
            "target": example.target,
        }

    def count_batch(self, batch: Mapping[str, torch.Tensor]) -> dict[str, int]:
        """Counts of the masking, and examples and classes of each task."""
        is_masked = (batch["labels"] != IGNORE_INDEX).any(1)
        masked = {name: batch[name][is_masked] for name in ("input_ids", "labels")}
        counts = {**self.masker.count_batch(masked), "masked_examples": int(is_masked.sum())}
        counts["examples"] = len(is_masked)
        for name, number_of_classes in self.classes.items():
            targets = batch[f"{name}_labels"]
            has_target = targets != IGNORE_INDEX if targets.dim() == 1 else (targets != IGNORE_INDEX).any(1)
            counts[f"{name}_examples"] = int(has_target.sum())
            classes = torch.bincount(targets[targets != IGNORE_INDEX], minlength=number_of_classes)
            counts |= {f"{name}_{number}": count for number, count in enumerate(classes.tolist())}
        return counts

    def rates(self, counts: Mapping[str, int]) -> dict[str, float]:
        """Shares of the masking, of the examples of each task, and of each of its classes."""
        rates = masking_rates({**counts, "examples": counts["masked_examples"]})
        for name in ("masked", *self.classes):
            rates[f"{name}_share"] = counts[f"{name}_examples"] / max(1, counts["examples"])
        for name, number_of_classes in self.classes.items():
            classes = [counts[f"{name}_{number}"] for number in range(number_of_classes)]
            rates |= {f"{name}_{number}_share": count / max(1, sum(classes)) for number, count in enumerate(classes)}
        return rates
