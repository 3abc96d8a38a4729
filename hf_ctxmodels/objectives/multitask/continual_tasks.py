"""Continual multi-task pretraining (Sun et al. 2020, arXiv 1907.12412)."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from hf_ctxmodels.core.constants import IGNORE_INDEX
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import flag
from hf_ctxmodels.data.documents import LabelledPair
from hf_ctxmodels.data.examples import Example
from hf_ctxmodels.data.padding import PaddingCollator, RowPadder
from hf_ctxmodels.data.seeding import Stream, generator
from hf_ctxmodels.data.training_set import SamplingPolicy
from hf_ctxmodels.objectives.base import Batch, Objective, check_at_least
from hf_ctxmodels.objectives.baseline import BaselinePolicy
from hf_ctxmodels.objectives.components.features import feature_generator
from hf_ctxmodels.objectives.components.masking import TokenMasker, masking_rates
from hf_ctxmodels.objectives.components.tokenized_documents import (
    DOCUMENTS_PER_BATCH,
    NO_WORD,
    RowTemplate,
    TokenizedDocument,
    document_batches,
    tokenize_documents,
)
from hf_ctxmodels.objectives.components.units import UnitMaskingRule
from hf_ctxmodels.objectives.multitask.pair_tasks import DiscourseRelation, QueryTitleRelevance
from hf_ctxmodels.objectives.multitask.schedule import parse_schedule
from hf_ctxmodels.objectives.multitask.structure_tasks import SentenceDistance, SentenceReordering
from hf_ctxmodels.objectives.multitask.task import DocumentTask, PairTask, TaskRow
from hf_ctxmodels.objectives.multitask.word_tasks import Capitalization, KnowledgeMasking, TokenDocumentRelation
from hf_ctxmodels.objectives.pairs.unit_masking import UnitMaskingOptions

# All tasks in the order of the paper; the numbers of `task` in an example.
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
_NUMBERS = {name: number for number, name in enumerate(TASKS)}
_FROM_TEXT = ",".join(name for name, task in TASKS.items() if issubclass(task, DocumentTask))


@dataclass
class DataCollatorForContinualTasks(PaddingCollator):
    """Pads rows of several tasks, and masks those of knowledge masking as `DataCollatorForUnitMaskingWithPairs` does.

    Each feature holds:
        task: The number of its task in `TASKS`.
        input_ids, token_type_ids, word_ids: (tokens,); word_ids are the numbers of units, -1 for none.
        token_targets: (tokens,) class of each token, -100 for none.
        target: Class of the row, -100 for none.
        example_index, epoch: Integers that seed the mask.

    Returns: input_ids, attention_mask, token_type_ids, task_type_ids, the kind of the task, and labels (batch, width);
        and for each task `<task>_labels`, (batch, width) or (batch,), -100 in the rows of other tasks.

    Args:
        tokenizer: With a mask token and a padding token.
        tasks: Names of the classification tasks whose targets a batch has.
        mlm_probability, mask_share, random_share, unit_rows, max_predictions: See `UnitMaskingRule`.
        static: The same mask in every epoch.
        seed: Seed of the masks.
        pad_to_multiple_of: Round the width of the batch up.
    """

    tasks: Sequence[str] = tuple(name for name in TASKS if name != KnowledgeMasking.name)
    mlm_probability: float = 0.15
    mask_share: float = 0.8
    random_share: float = 0.1
    unit_rows: float = 1.0
    max_predictions: int | None = None
    static: bool = False
    seed: int = 0
    pad_to_multiple_of: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.masker = TokenMasker(self.tokenizer, UnitMaskingRule.of(self))

    def torch_call(self, features: list[dict[str, Any]]) -> Batch:
        """Collate features; see the class for what they hold and what is returned."""
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
        numbers = np.array([int(feature["task"]) for feature in features])
        kinds = np.array([task.kind for task in TASKS.values()])[numbers]
        types = [np.asarray(feature["token_type_ids"]) for feature in features]
        batch = {
            "input_ids": padder.pad(rows, int(self.tokenizer.pad_token_id)),
            "attention_mask": padder.attention_mask(),
            "token_type_ids": padder.pad(types, self.tokenizer.pad_token_type_id),
            "task_type_ids": padder.pad([np.repeat(*each) for each in zip(kinds, lengths, strict=True)], 0),
            "labels": padder.pad(labels, IGNORE_INDEX),
        }
        of_rows = np.array([int(feature["target"]) for feature in features])
        of_tokens = padder.pad([np.asarray(feature["token_targets"]) for feature in features], IGNORE_INDEX)
        for name in self.tasks:
            own = torch.from_numpy(numbers == _NUMBERS[name])
            aims = of_tokens if TASKS[name].of_tokens else torch.from_numpy(of_rows)
            batch[f"{name}_labels"] = aims.masked_fill(~own if aims.dim() == 1 else ~own[:, None], IGNORE_INDEX)
        return batch


@dataclass(frozen=True)
class ContinualTasksOptions(UnitMaskingOptions):
    """Options of `ContinualTasks`."""

    schedule: str = flag(
        _FROM_TEXT,
        "Stages, separated by semicolons, each of `task:steps`, separated by commas; without steps equal shares. A "
        "stage has the tasks of the one before; the last one is repeated.",
    )
    reordering_segments: int = flag(3, "Maximum number of segments of a text whose order is predicted.")
    discourse_relations: str = flag("", "Comma-separated labels of the pairs for discourse_relation.")
    relevance_labels: str = flag("irrelevant,shown,clicked", "Comma-separated labels of the pairs for query_title.")


class ContinualTasks(Objective):
    """ERNIE 2.0's objective: tasks that join one after the other; each step has examples of one task.

    A task is learned with all earlier ones, in the numbers of steps that the schedule gives (`ScheduledMixture`). The
    kind of a document decides its tasks; a labelled pair belongs to the task that has its label.

    | task | document | row | target |
    |---|---|---|---|
    | knowledge_masking | sentences | `[CLS] sentences [SEP]` | all tokens of 15% of the units |
    | capitalization | sentences | the same, unmasked | each token: its word begins with a capital |
    | token_document | sentences | the same, at most half a document | each token: it is in another segment, too |
    | sentence_reordering | sentences | the same, 1 to m segments in a random order | the permutation |
    | sentence_distance | sentences | `[CLS] A [SEP] B [SEP]` | neighbours, same document, two documents |
    | discourse_relation | a labelled pair | `[CLS] A [SEP] B [SEP]` | the label |
    | query_title | a labelled pair | `[CLS] query [SEP] title [SEP]` | the label |

    Rows longer than `max_length` are left out and counted. The embedding of a task is that of its kind: word, structure
    or semantic. The English pretraining code was not released; m, the number of targets, the use of one task in a step
    and equal loss weights are choices made here.

    References: Sun et al. 2020, sections 3.2 and 4.2.
    Related: `UnitMaskingWithPairs` is ERNIE 1.0's; `SentenceTasks` draws the task of a step at random.

    Example:
        >>> ContinualTasks(tokenizer, max_length=128, seed=0, schedule="knowledge_masking:9; knowledge_masking:3, "
        ...     "capitalization:6")
    """

    auto_class = "AutoModelForPreTraining"
    Options: ClassVar[type] = ContinualTasksOptions
    options: ContinualTasksOptions
    collate: DataCollatorForContinualTasks

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, max_length: int, seed: int, **options: Any) -> None:
        super().__init__(tokenizer, max_length=max_length, seed=seed, **options)
        stages = parse_schedule(self.options.schedule, TASKS)
        check_at_least(2, reordering_segments=self.options.reordering_segments)
        self.templates = {segments: RowTemplate(tokenizer, segments) for segments in (1, 2)}
        self.tasks = {name: self._task(name) for name in TASKS if name in stages[-1]}
        self._check_labels()
        if Capitalization.name in self.tasks and tokenizer("A").input_ids != tokenizer("a").input_ids:
            raise CtxError(
                "The tokenizer keeps capitals, so the input tells what capitalization asks for.",
                location=f"schedule={self.options.schedule}",
                hint="use one that lower-cases (do_lower_case), or leave the task out.",
            )
        self.phrases = self.options.phrases(tokenizer)
        numbered = tuple({_NUMBERS[name]: steps for name, steps in stage.items()} for stage in stages)
        self.sampling = SamplingPolicy(task_column="task", task_stages=numbered)
        self.collate = self.options.collator(DataCollatorForContinualTasks, tokenizer, seed)
        self.collate.tasks = [name for name in self.tasks if name != KnowledgeMasking.name]
        of_tokens = tuple(f"{name}_labels" for name, task in self.tasks.items() if task.of_tokens)
        self.baseline = BaselinePolicy(len(tokenizer), tokenizer.all_special_ids, token_classes=of_tokens)

    def _task(self, name: str) -> DocumentTask | PairTask:
        kind = TASKS[name]
        if issubclass(kind, PairTask):
            discourse = kind is DiscourseRelation
            text = self.options.discourse_relations if discourse else self.options.relevance_labels
            return kind([label.strip().lower() for label in text.split(",") if label.strip()])
        rooms = (self.templates[1].room(self.max_length), self.templates[2].room(self.max_length))
        if kind is SentenceReordering:
            return SentenceReordering(rooms, self.options.reordering_segments)
        return kind(rooms)

    def _check_labels(self) -> None:
        """Raise CtxError unless each label of a task on pairs is different, and there are two or more."""
        pair_tasks = [task for task in self.tasks.values() if isinstance(task, PairTask)]
        labels = [label for task in pair_tasks for label in task.labels]
        if len(set(labels)) < len(labels) or any(task.classes < 2 for task in pair_tasks):
            names = " and ".join(task.name for task in pair_tasks)
            raise CtxError(
                f"The labels of {names} are {', '.join(labels) or 'none'}; each task needs two or more "
                "of its own, since the label of a pair tells its task.",
                hint="list them: --objective_options discourse_relations=... relevance_labels=...",
            )

    @property
    def config_fields(self) -> dict[str, Any]:
        """The tasks beside masked units, with their numbers of classes, and their embeddings."""
        classified = {name: self.tasks[name].classes for name in self.collate.tasks}
        return {"pretraining_tasks": classified, "use_task_id": True}

    def examples(self, documents: Iterable[list[str]], pass_index: int = 0) -> Iterator[Example]:
        """Rows of the collator's fields.

        Raises:
            CtxError: A label is unknown, or a task has no example.
        """
        seen, number = Counter[str](), 0
        for batch in document_batches(documents, DOCUMENTS_PER_BATCH):
            pairs = [document for document in batch if isinstance(document, LabelledPair)]
            running = [document for document in batch if not isinstance(document, LabelledPair)]
            for name, row in (*self._of_text(running, pass_index, number), *self._of_pairs(pairs)):
                template = self.templates[len(row.segments)]
                if sum(map(len, row.segments)) > template.room(self.max_length):
                    self.statistics["left_out"] += 1
                    continue
                seen[name] += 1
                yield self._example(name, row, template)
            number += len(batch)
        if missing := [name for name in self.tasks if not seen[name]]:
            raise CtxError(
                f"The documents hold no example of the task {missing[0]!r}.",
                location=f"schedule={self.options.schedule}",
                hint="give documents of several sentences, and FILE=FIRST,SECOND,LABEL for tasks on labelled pairs; or "
                "leave the task out.",
            )

    def _of_text(self, texts: list[list[str]], pass_index: int, first: int) -> Iterator[tuple[str, TaskRow]]:
        """Names of tasks and rows, made of running text."""
        tasks = [task for task in self.tasks.values() if isinstance(task, DocumentTask)]
        if not texts or not tasks:
            return
        with_words = KnowledgeMasking.name in self.tasks and self.collate.masker.rule.needs_words
        tokenized = tokenize_documents(self.tokenizer, texts, with_words, Capitalization.name in self.tasks)
        usable = [(first + number, document) for number, document in enumerate(tokenized) if len(document)]
        for place, (number, document) in enumerate(usable):
            self.statistics.update(documents=1, sentences=len(document), tokens=len(document.ids))
            others = _Others([document for _, document in usable], place)
            units = self.phrases.join_document(document)
            for task in tasks:
                index = number * len(TASKS) + _NUMBERS[task.name]
                rng = generator(self.seed, pass_index, index, Stream.PAIRING)
                for row in task.rows(units, others, rng):
                    yield task.name, row

    def _of_pairs(self, pairs: list[LabelledPair]) -> Iterator[tuple[str, TaskRow]]:
        """Names of tasks and rows, made of labelled pairs."""
        tasks = {label: task for task in self.tasks.values() if isinstance(task, PairTask) for label in task.labels}
        if not pairs or not tasks:
            return
        self.statistics["documents"] += len(pairs)
        sides = [
            self.tokenizer([pair[side] for pair in pairs], add_special_tokens=False, verbose=False) for side in (0, 1)
        ]
        for pair, *texts in zip(pairs, *(side["input_ids"] for side in sides), strict=True):
            task = tasks.get(pair.label.lower())
            if task is None:
                raise CtxError(
                    f"The label {pair.label!r} is not among {', '.join(tasks)}.",
                    hint="list all labels: --objective_options discourse_relations=... relevance_labels=...",
                )
            yield task.name, task.row(pair, *(np.array(ids, dtype=np.int32) for ids in texts))

    def _example(self, name: str, row: TaskRow, template: RowTemplate) -> Example:
        """The row with special tokens."""
        ids = template.fill(*row.segments)
        none = np.full(len(ids), NO_WORD, dtype=np.int32)
        targets = none if row.token_targets is None else template.fill_words(*row.token_targets)
        return {
            "task": _NUMBERS[name],
            "input_ids": ids,
            "token_type_ids": template.token_types(*map(len, row.segments)),
            "word_ids": none if row.words is None else template.fill_words(*row.words),
            "token_targets": np.where(targets == NO_WORD, IGNORE_INDEX, targets).astype(np.int16),
            "target": row.target,
        }

    def count(self, batch: Mapping[str, torch.Tensor]) -> dict[str, int]:
        """See `Objective.count`."""
        masked = (batch["labels"] != IGNORE_INDEX).any(1)
        chosen = {name: batch[name][masked] for name in ("input_ids", "labels")}
        counts = {**self.collate.masker.count(chosen), "masked_rows": int(masked.sum()), "all_rows": len(masked)}
        for name in self.collate.tasks:
            targets = batch[f"{name}_labels"]
            rows = targets != IGNORE_INDEX if targets.dim() == 1 else (targets != IGNORE_INDEX).any(1)
            counts[f"{name}_rows"] = int(rows.sum())
            classes = torch.bincount(targets[targets != IGNORE_INDEX], minlength=self.tasks[name].classes)
            counts |= {f"{name}_{number}": count for number, count in enumerate(classes.tolist())}
        return counts

    def rates(self, counts: Mapping[str, int]) -> dict[str, float]:
        """See `Objective.rates`: the masks, each task's share of the examples, and the share of each of its classes."""
        rates = masking_rates(counts)
        names = ["masked", *self.collate.tasks]
        rates |= {f"share_{name}": counts[f"{name}_rows"] / max(1, counts["all_rows"]) for name in names}
        for name in self.collate.tasks:
            classes = [counts[f"{name}_{number}"] for number in range(self.tasks[name].classes)]
            rates |= {f"{name}_{number}": count / max(1, sum(classes)) for number, count in enumerate(classes)}
        return rates


class _Others(Sequence[TokenizedDocument]):
    """All documents but the one at `place`, without a copy."""

    def __init__(self, documents: list[TokenizedDocument], place: int) -> None:
        self._documents, self._place = documents, place

    def __len__(self) -> int:
        return len(self._documents) - 1

    def __getitem__(self, number: Any) -> Any:
        return self._documents[number + (number >= self._place)]
