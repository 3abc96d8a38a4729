"""Continual multi-task pretraining (Sun et al. 2020, "ERNIE 2.0", arXiv 1907.12412)."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hf_ctxmodels.core.constants import IGNORE_INDEX
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import flag
from hf_ctxmodels.data.documents import LabelledPair
from hf_ctxmodels.data.examples import Example
from hf_ctxmodels.data.padding import Batch, PaddingCollator, RowPadder
from hf_ctxmodels.data.seeding import Stream, generator
from hf_ctxmodels.data.training_set import SamplingPolicy
from hf_ctxmodels.objectives.base import BaselinePolicy, Objective, check_at_least
from hf_ctxmodels.objectives.components.features import feature_generator
from hf_ctxmodels.objectives.components.masking import TokenMasker, masking_rates
from hf_ctxmodels.objectives.components.tokenized_documents import (
    DOCUMENTS_PER_BATCH,
    NO_WORD,
    SpecialTokensTemplate,
    TokenizedDocument,
    document_batches,
    tokenize_documents,
)
from hf_ctxmodels.objectives.components.units import Phrases, UnitMaskingRule
from hf_ctxmodels.objectives.multitask.ernie_tasks import (
    Capitalization,
    DiscourseRelation,
    DocumentTask,
    KnowledgeMasking,
    PairTask,
    QueryTitleRelevance,
    SentenceDistance,
    SentenceReordering,
    TaskExample,
    TokenDocumentRelation,
    parse_schedule,
)

TASKS: dict[str, type[DocumentTask] | type[PairTask]] = {
    task.name: task
    for task in (
        KnowledgeMasking,
        Capitalization,
        TokenDocumentRelation,
        SentenceReordering,
        SentenceDistance,
        DiscourseRelation,
        QueryTitleRelevance,
    )
}
"""All tasks in the order of the paper, which is the number `task` of an example."""
_NUMBERS = {name: number for number, name in enumerate(TASKS)}
_DOCUMENT_TASKS = ",".join(name for name, task in TASKS.items() if issubclass(task, DocumentTask))


@dataclass
class DataCollatorForContinualTasks(PaddingCollator):
    """Pads examples of several tasks, and masks units in the examples of knowledge masking.

    Each feature holds:
        task: The number of its task in `TASKS`.
        input_ids, token_type_ids, word_ids: (tokens,); word_ids are the numbers of units, -1 for none.
        token_targets: (tokens,) class of each token, -100 for none.
        target: Class of the example, -100 for none.
        example_index, epoch: Integers that seed the mask.

    Returns: input_ids, attention_mask, token_type_ids, task_type_ids, the type of the task, and labels (batch, width);
        and for each task `<task>_labels`, (batch, width) or (batch,), -100 in the examples of other tasks.

    Args:
        tokenizer: With a mask token and a padding token.
        classification_tasks: Names of the tasks with `<task>_labels`; None for all except knowledge masking.
        mlm_probability, mask_share, random_share, unit_rows, max_predictions: See `UnitMaskingRule`.
        static: The same mask in every epoch.
        seed: Seed of the masks.
        pad_to_multiple_of: Round the width of the batch up.
    """

    classification_tasks: Sequence[str] | None = None
    unit_rows: float = flag(1.0, "Probability that units are masked in an example instead of single tokens.")
    mlm_probability: float = flag(0.15, "Share of the units of an example to predict.")
    mask_share: float = flag(0.8, "Share of the predicted tokens replaced by the mask token.")
    random_share: float = flag(0.1, "Share of the predicted tokens replaced by a random one; the rest is unchanged.")
    max_predictions: int | None = flag(None, "Maximum number of predicted tokens in an example.")
    static: bool = flag(False, "The same mask in every epoch instead of a new one.")
    pad_to_multiple_of: int | None = flag(None, "Round the width of a batch up to a multiple of this.")
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.classification_tasks is None:
            self.classification_tasks = [name for name in TASKS if name != KnowledgeMasking.name]
        rule = UnitMaskingRule(
            probability=self.mlm_probability,
            mask_share=self.mask_share,
            random_share=self.random_share,
            max_predictions=self.max_predictions,
            unit_rows=self.unit_rows,
        )
        self.masker = TokenMasker(self.tokenizer, rule)

    def collate(self, features: list[dict[str, Any]]) -> Batch:
        """Mask and pad features; see the class for their columns and the returned ones."""
        rows, labels = [], []
        for feature in features:
            ids = np.asarray(feature["input_ids"])
            targets = np.full(len(ids), IGNORE_INDEX)
            if int(feature["task"]) == _NUMBERS[KnowledgeMasking.name]:
                rng = feature_generator(feature, self.seed, self.static)
                ids, targets = self.masker.mask(ids, np.asarray(feature["word_ids"]), rng)
            rows.append(ids)
            labels.append(targets)
        lengths = [len(ids) for ids in rows]
        padder = RowPadder(lengths, self.tokenizer.padding_side, self.pad_to_multiple_of)
        tasks = np.array([int(feature["task"]) for feature in features])
        task_types = np.array([task.task_type for task in TASKS.values()])[tasks]
        token_types = [np.asarray(feature["token_type_ids"]) for feature in features]
        batch = {
            "input_ids": padder.pad(rows, int(self.tokenizer.pad_token_id)),
            "attention_mask": padder.attention_mask(),
            "token_type_ids": padder.pad(token_types, self.tokenizer.pad_token_type_id),
            "task_type_ids": padder.pad([np.repeat(*pair) for pair in zip(task_types, lengths, strict=True)], 0),
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
    type of a document determines its tasks; a labelled pair belongs to the task that has its label.

    | task | document | example | target |
    |---|---|---|---|
    | knowledge_masking | sentences | `[CLS] sentences [SEP]` | all tokens of 15% of the units |
    | capitalization | sentences | the same, unmasked | each token: its word begins with a capital |
    | token_document | sentences | the same, at most half a document | each token: it also occurs in another segment |
    | sentence_reordering | sentences | the same, 1 to m segments in a random order | the permutation |
    | sentence_distance | sentences | `[CLS] A [SEP] B [SEP]` | neighbours, same document, two documents |
    | discourse_relation | a labelled pair | `[CLS] A [SEP] B [SEP]` | the label |
    | query_title | a labelled pair | `[CLS] query [SEP] title [SEP]` | the label |

    Examples longer than `max_length` are skipped and counted. There is one embedding for each type of task: word,
    structure or semantic. The English pretraining code was not released; m, the number of targets, the use of one task
    in a step and equal loss weights are choices of this implementation.

    References: Sun et al. 2020, sections 3.2 and 4.2.
    Related: `UnitMaskingWithPairs` is ERNIE 1.0's; `SentenceTasks` samples the task of a step at random.

    Example:
        >>> ContinualTasks(tokenizer, max_length=128, seed=0, schedule="knowledge_masking:9; knowledge_masking:3, "
        ...     "capitalization:6")
    """

    auto_class = "AutoModelForPreTraining"
    units: str = flag("", "File of phrases, one per line, that are units; empty: only words are units.")
    schedule: str = flag(
        _DOCUMENT_TASKS,
        "Stages, separated by semicolons, each of `task:steps`, separated by commas; without steps equal shares. A "
        "stage has the tasks of the previous one; the last one is repeated.",
    )
    reordering_segments: int = flag(3, "Maximum number of segments of a text whose order is predicted.")
    discourse_relations: str = flag("", "Comma-separated labels of the pairs for discourse_relation.")
    relevance_labels: str = flag("irrelevant,shown,clicked", "Comma-separated labels of the pairs for query_title.")

    def __post_init__(self) -> None:
        super().__post_init__()
        stages = parse_schedule(self.schedule, TASKS)
        check_at_least(2, reordering_segments=self.reordering_segments)
        self.templates = {segments: SpecialTokensTemplate(self.tokenizer, segments) for segments in (1, 2)}
        self.tasks = {name: self._make_task(name) for name in TASKS if name in stages[-1]}
        self._validate_labels()
        lowercases = self.tokenizer("A").input_ids == self.tokenizer("a").input_ids
        if Capitalization.name in self.tasks and not lowercases:
            raise CtxError(
                "The tokenizer preserves capitals, so the input contains the answer of the task capitalization.",
                location=f"schedule={self.schedule}",
                hint="use a tokenizer that lower-cases (do_lower_case), or remove the task.",
            )
        self.phrases = Phrases.from_file(self.tokenizer, self.units) if self.units else Phrases(self.tokenizer, ())
        numbered_stages = tuple({_NUMBERS[name]: steps for name, steps in stage.items()} for stage in stages)
        self.sampling = SamplingPolicy(task_column="task", task_stages=numbered_stages)
        self.classification_tasks = [name for name in self.tasks if name != KnowledgeMasking.name]
        token_classes = tuple(f"{name}_labels" for name, task in self.tasks.items() if task.classifies_tokens)
        self.baseline = BaselinePolicy(len(self.tokenizer), self.tokenizer.all_special_ids, token_classes=token_classes)

    def _make_task(self, name: str) -> DocumentTask | PairTask:
        task = TASKS[name]
        if issubclass(task, PairTask):
            text = self.discourse_relations if task is DiscourseRelation else self.relevance_labels
            return task([label.strip().lower() for label in text.split(",") if label.strip()])
        room, pair_room = (self.templates[segments].room(self.max_length) for segments in (1, 2))
        if task is SentenceReordering:
            return SentenceReordering(room, pair_room, self.reordering_segments)
        return task(room, pair_room)

    def _validate_labels(self) -> None:
        """Raise CtxError unless each task on pairs has two or more labels, and all labels are different."""
        pair_tasks = [task for task in self.tasks.values() if isinstance(task, PairTask)]
        labels = [label for task in pair_tasks for label in task.labels]
        if len(set(labels)) < len(labels) or any(task.classes < 2 for task in pair_tasks):
            names = " and ".join(task.name for task in pair_tasks)
            raise CtxError(
                f"The labels of {names} are {', '.join(labels) or 'none'}; each task requires two or more, different "
                "from other tasks', since the label of a pair determines its task.",
                hint="list them: --objective continual-tasks:discourse_relations=...,relevance_labels=...",
            )

    @property
    def config_fields(self) -> dict[str, Any]:
        """The tasks in addition to masked units, with their numbers of classes, and their embeddings."""
        classes = {name: task.classes for name, task in self.tasks.items() if name != KnowledgeMasking.name}
        return {"pretraining_tasks": classes, "use_task_id": True}

    def examples(self, documents: Iterable[list[str]], pass_index: int = 0) -> Iterator[Example]:
        """Examples with the columns of the collator.

        Raises:
            CtxError: A label is unknown, or a task has no example.
        """
        examples_by_task, first = Counter[str](), 0
        for batch in document_batches(documents, DOCUMENTS_PER_BATCH):
            pairs = [document for document in batch if isinstance(document, LabelledPair)]
            texts = [document for document in batch if not isinstance(document, LabelledPair)]
            for name, example in (*self._text_examples(texts, pass_index, first), *self._pair_examples(pairs)):
                template = self.templates[len(example.segments)]
                if sum(map(len, example.segments)) > template.room(self.max_length):
                    self.statistics["left_out"] += 1
                    continue
                examples_by_task[name] += 1
                yield self._with_special_tokens(name, example, template)
            first += len(batch)
        if missing := [name for name in self.tasks if not examples_by_task[name]]:
            raise CtxError(
                f"The documents have no example of the task {missing[0]!r}.",
                location=f"schedule={self.schedule}",
                hint="use documents of several sentences, and FILE=FIRST,SECOND,LABEL for tasks on labelled pairs; or "
                "remove the task.",
            )

    def _text_examples(self, texts: list[list[str]], pass_index: int, first: int) -> Iterator[tuple[str, TaskExample]]:
        """Names of tasks and examples of running text."""
        tasks = [task for task in self.tasks.values() if isinstance(task, DocumentTask)]
        if not texts or not tasks:
            return
        with_words = KnowledgeMasking.name in self.tasks and self.masker.rule.needs_words
        tokenized = tokenize_documents(self.tokenizer, texts, with_words, Capitalization.name in self.tasks)
        numbered = [(first + number, document) for number, document in enumerate(tokenized) if len(document)]
        documents = [document for _, document in numbered]
        for position, (number, document) in enumerate(numbered):
            self.statistics.update(documents=1, sentences=len(document), tokens=len(document.ids))
            other_documents = _OtherDocuments(documents, position)
            document_with_units = self.phrases.join_document(document)
            for task in tasks:
                index = number * len(TASKS) + _NUMBERS[task.name]
                rng = generator(self.seed, pass_index, index, Stream.PAIRING)
                for example in task.examples(document_with_units, other_documents, rng):
                    yield task.name, example

    def _pair_examples(self, pairs: list[LabelledPair]) -> Iterator[tuple[str, TaskExample]]:
        """Names of tasks and examples of labelled pairs."""
        tasks = {label: task for task in self.tasks.values() if isinstance(task, PairTask) for label in task.labels}
        if not pairs or not tasks:
            return
        self.statistics["documents"] += len(pairs)
        firsts, seconds = (
            self.tokenizer([pair[side] for pair in pairs], add_special_tokens=False, verbose=False)["input_ids"]
            for side in (0, 1)
        )
        for pair, first, second in zip(pairs, firsts, seconds, strict=True):
            task = tasks.get(pair.label.lower())
            if task is None:
                raise CtxError(
                    f"The label {pair.label!r} is not among {', '.join(tasks)}.",
                    hint="list all labels: --objective continual-tasks:discourse_relations=...,relevance_labels=...",
                )
            yield task.name, task.example(pair, np.array(first, dtype=np.int32), np.array(second, dtype=np.int32))

    def _with_special_tokens(self, name: str, example: TaskExample, template: SpecialTokensTemplate) -> Example:
        ids = template.fill(*example.segments)
        no_words = np.full(len(ids), NO_WORD, dtype=np.int32)
        targets = no_words if example.token_targets is None else template.fill_words(*example.token_targets)
        return {
            "task": _NUMBERS[name],
            "input_ids": ids,
            "token_type_ids": template.token_types(*map(len, example.segments)),
            "word_ids": no_words if example.words is None else template.fill_words(*example.words),
            "token_targets": np.where(targets == NO_WORD, IGNORE_INDEX, targets).astype(np.int16),
            "target": example.target,
        }

    def count(self, batch: Mapping[str, torch.Tensor]) -> dict[str, int]:
        """Counts of the masking, and examples and classes of each task."""
        is_masked = (batch["labels"] != IGNORE_INDEX).any(1)
        masked = {name: batch[name][is_masked] for name in ("input_ids", "labels")}
        counts = {**self.masker.count(masked), "masked_rows": int(is_masked.sum()), "all_rows": len(is_masked)}
        for name in self.classification_tasks or ():
            targets = batch[f"{name}_labels"]
            has_target = targets != IGNORE_INDEX if targets.dim() == 1 else (targets != IGNORE_INDEX).any(1)
            counts[f"{name}_rows"] = int(has_target.sum())
            classes = torch.bincount(targets[targets != IGNORE_INDEX], minlength=self.tasks[name].classes)
            counts |= {f"{name}_{number}": count for number, count in enumerate(classes.tolist())}
        return counts

    def rates(self, counts: Mapping[str, int]) -> dict[str, float]:
        """Shares of the masking, of the examples of each task, and of each of its classes."""
        rates = masking_rates(counts)
        task_names = self.classification_tasks or ()
        for name in ("masked", *task_names):
            rates[f"share_{name}"] = counts[f"{name}_rows"] / max(1, counts["all_rows"])
        for name in task_names:
            classes = [counts[f"{name}_{number}"] for number in range(self.tasks[name].classes)]
            rates |= {f"{name}_{number}": count / max(1, sum(classes)) for number, count in enumerate(classes)}
        return rates


class _OtherDocuments(Sequence[TokenizedDocument]):
    """All documents but one, without a copy."""

    def __init__(self, documents: list[TokenizedDocument], excluded: int) -> None:
        self._documents, self._excluded = documents, excluded

    def __len__(self) -> int:
        return len(self._documents) - 1

    def __getitem__(self, number: Any) -> Any:
        return self._documents[number + (number >= self._excluded)]
