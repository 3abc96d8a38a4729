"""Multi-task learning of sentence encoders, one task per step (Subramanian et al. 2018, arXiv 1804.00079)."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch

from hf_ctxmodels.core.constants import IGNORE_INDEX
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import check_range, flag
from hf_ctxmodels.data.documents import LabeledPair, TranslatedText
from hf_ctxmodels.data.examples import Example, ExampleSet
from hf_ctxmodels.data.padding import Batch, PaddingCollator, pad_targets
from hf_ctxmodels.data.training_set import ExampleSampling
from hf_ctxmodels.objectives.base import BaselineOptions, Objective, batch_statistics, target_rates
from hf_ctxmodels.objectives.tokenized_documents import document_batches, untagged_translation

SKIP_THOUGHT, RELATIONS = "skip-thought", "relations"
NEXT, PREVIOUS = "next", "previous"


@dataclass
class DataCollatorForSentenceTasks(PaddingCollator):
    """Pads sentences, target texts, and pairs of sentences.

    Each feature holds:
        input_ids: (tokens,) of a sentence.
        second_ids: (tokens,) of the second sentence of a pair; else empty.
        labels: (tokens,) of the target text, including its end; else empty.
        target_language: The number of the target's decoder.
        relation: The class of a pair; else -100.

    Returns: input_ids, attention_mask (batch, width); token_type_ids (batch, width), 1 at the second sentences; labels
        (batch, steps), -100 after the end of a text; target_languages (batch,); relation_labels (batch,), -100 for
        none.
    """

    def collate(self, features: list[dict[str, Any]]) -> Batch:
        """Pad features; see the class for their columns and the returned ones."""
        names = ("input_ids", "second_ids", "labels")
        firsts, seconds, targets = ([np.asarray(feature[name]) for feature in features] for name in names)
        sequences = [np.concatenate(pair) for pair in zip(firsts, seconds, strict=True)]
        padder, inputs = self.pad_inputs(sequences)
        token_types = [
            np.repeat([0, 1], [len(first), len(second)]) for first, second in zip(firsts, seconds, strict=True)
        ]
        return {
            **inputs,
            "token_type_ids": padder.pad(token_types, 0),
            "labels": pad_targets(targets),
            "target_languages": torch.tensor([int(feature["target_language"]) for feature in features]),
            "relation_labels": torch.tensor([int(feature["relation"]) for feature in features]),
        }


@dataclass
class SentenceTasks(DataCollatorForSentenceTasks, Objective):
    """GenSen's objective: one sentence encoder learns several tasks, a random one in every step.

    All tasks are equally likely, except relations, which have one step in ten. The type of a document determines its
    task. Examples with a sentence or target longer than `max_length` are skipped and counted.

    | document | input | targets |
    |---|---|---|
    | running text | a sentence | the next or the previous sentence, each by a separate decoder (skip-thought) |
    | a text and its tagged translation | the text | the translation, or parse, by the tag's decoder |
    | a labeled pair | two sentences | their relation |

    References: Subramanian et al. 2018 (arXiv 1804.00079); the released code, where both neighbors of a sentence are
        one example; Kiros et al. 2015 (skip-thought, arXiv 1506.06726); Vinyals et al. 2015 (parses, arXiv 1412.7449).
    Related: `TranslationToLanguages` has one decoder for all languages.

    Example:
        >>> SentenceTasks(tokenizer, max_length=60, seed=0, tasks="skip-thought,<de>,relations")
    """

    auto_class = "AutoModelForPreTraining"
    tasks: str = flag("all", "Comma-separated tasks: skip-thought, relations, and the tags of translations.")
    relations: str = flag("contradiction,entailment,neutral", "Comma-separated labels of pairs.")
    relations_every: int = flag(10, "Period of relations in steps, with other tasks; 0: sampled like the others.")

    def __post_init__(self) -> None:
        super().__post_init__()
        tokenizer = self.tokenizer
        tags = getattr(tokenizer, "languages", None)
        if tags is None:
            raise CtxError(
                f"{type(tokenizer).__name__} has no joint vocabulary of sources and targets.",
                hint="use the tokenizer of a family with this objective.",
            )
        all_tasks = [SKIP_THOUGHT, *tags, RELATIONS]
        self.task_names = all_tasks if self.tasks == "all" else _parse_names(self.tasks)
        if unknown := [task for task in self.task_names if task not in all_tasks]:
            raise CtxError(
                f"There is no task {unknown[0]!r}.",
                location=f"tasks={self.tasks}",
                hint=f"use some of: {', '.join(all_tasks)}. Tags are those that the tokenizer was trained with.",
            )
        has_relations = RELATIONS in self.task_names
        self.relation_labels = [name.lower() for name in _parse_names(self.relations)] if has_relations else []
        neighbors = [NEXT, PREVIOUS] if SKIP_THOUGHT in self.task_names else []
        self.decoder_tasks = [*neighbors, *(task for task in self.task_names if task in tags)]
        check_range(self, "relations_every", at_least=0)
        periods = {}
        if self.relations_every and has_relations:
            periods = {self.task_names.index(RELATIONS): self.relations_every}
        self.sampling = ExampleSampling(task_column="task", task_periods=periods)
        excluded = {tokenizer.pad_token_id, tokenizer.bos_token_id, *tokenizer.convert_tokens_to_ids(tags)}
        self.baseline = BaselineOptions(len(tokenizer), sorted(excluded), column="labels")
        self.config_fields = {
            "target_vocab_size": self.baseline.num_tokens,
            "decoder_start_token_id": int(self.tokenizer.bos_token_id),
            "eos_token_id": int(self.tokenizer.eos_token_id),
            "decoder_tasks": self.decoder_tasks,
            "relations": self.relation_labels,
        }

    def examples(self, documents: Iterable[list[str]], epoch: int = 0) -> Iterator[Example]:
        """Examples with the columns of the collator, and the number of the task; raises CtxError for a translation
        without a tag, or an unknown label."""
        for batch in document_batches(documents):
            self.statistics["documents"] += len(batch)
            translated = [document for document in batch if isinstance(document, TranslatedText)]
            pairs = [document for document in batch if isinstance(document, LabeledPair)]
            texts = [document for document in batch if not isinstance(document, TranslatedText | LabeledPair)]
            for examples in (self._skip_thoughts(texts), self._translations(translated), self._relations(pairs)):
                for example in examples:
                    columns = (np.asarray(example[name]) for name in ("input_ids", "second_ids", "labels"))
                    if max(map(len, columns)) > self.max_length:
                        self.statistics["left_out"] += 1
                        continue
                    yield example

    def check(self, examples: ExampleSet) -> None:
        """Raise CtxError if a task of the option `tasks` has no example."""
        if self.tasks != "all":
            require_examples(examples, dict(enumerate(self.task_names)), f"tasks={self.tasks}")

    def _skip_thoughts(self, documents: Sequence[list[str]]) -> Iterator[Example]:
        if SKIP_THOUGHT not in self.task_names:
            return
        encoded = iter(self._encode([sentence for document in documents for sentence in document]))
        for document in documents:
            sentences = list(islice(encoded, len(document)))
            for number, sentence in enumerate(sentences):
                for name, neighbor in ((NEXT, number + 1), (PREVIOUS, number - 1)):
                    if 0 <= neighbor < len(sentences):
                        decoder = self.decoder_tasks.index(name)
                        yield self._example(SKIP_THOUGHT, sentence, labels=sentences[neighbor], target_language=decoder)

    def _translations(self, documents: Sequence[TranslatedText]) -> Iterator[Example]:
        tags = self.tokenizer.languages
        translations = []
        for text, translation in documents:
            tag, _, target = translation.partition(" ")
            if tag not in tags:
                raise untagged_translation(translation, tags)
            if tag in self.task_names:
                translations.append((tag, text, target))
        sources = self._encode([text for _, text, _ in translations])
        targets = self._encode([target for _, _, target in translations])
        for (tag, _, _), source, labels in zip(translations, sources, targets, strict=True):
            yield self._example(tag, source, labels=labels, target_language=self.decoder_tasks.index(tag))

    def _relations(self, documents: Sequence[LabeledPair]) -> Iterator[Example]:
        if RELATIONS not in self.task_names:
            return
        firsts, seconds = (self._encode([document[side] for document in documents]) for side in range(2))
        for document, first, second in zip(documents, firsts, seconds, strict=True):
            label = document.label.lower()
            if label not in self.relation_labels:
                raise CtxError(
                    f"The label {document.label!r} is not among {', '.join(self.relation_labels)}.",
                    hint="list all labels: --objective sentence-tasks:relations=...",
                )
            yield self._example(RELATIONS, first, second_ids=second, relation=self.relation_labels.index(label))

    def _encode(self, texts: list[str]) -> list[np.ndarray]:
        """(tokens,) ids of each text, including its end."""
        if not texts:
            return []
        encodings = self.tokenizer(texts, verbose=False).encodings or []
        encoded = [np.array(encoding.ids, dtype=np.int32) for encoding in encodings]
        self.statistics.update(sentences=len(encoded), tokens=sum(map(len, encoded)))
        return encoded

    def _example(self, task: str, ids: np.ndarray, **columns: np.ndarray | int) -> Example:
        absent: Example = {"target_language": 0, "relation": IGNORE_INDEX}
        absent |= {name: np.zeros(0, dtype=np.int32) for name in ("second_ids", "labels")}
        return {"task": self.task_names.index(task), "input_ids": ids, **absent, **columns}

    def count_batch(self, batch: Mapping[str, torch.Tensor]) -> dict[str, int]:
        """Counts of `batch_statistics`, examples of each decoder, and labeled pairs."""
        has_target = (batch["labels"] != IGNORE_INDEX).any(1)
        examples_by_task = {
            f"{name}_examples": int((has_target & (batch["target_languages"] == number)).sum())
            for number, name in enumerate(self.decoder_tasks)
        }
        examples_by_task[f"{RELATIONS}_examples"] = int((batch["relation_labels"] != IGNORE_INDEX).sum())
        return {**batch_statistics(batch, self.tokenizer.unk_token_id), **examples_by_task}

    def rates(self, counts: Mapping[str, int]) -> dict[str, float]:
        """Rates of `target_rates`, and the share of each task in the examples, not in the steps."""
        names, examples = (*self.decoder_tasks, RELATIONS), max(1, counts["examples"])
        return {**target_rates(counts), **{f"{name}_share": counts[f"{name}_examples"] / examples for name in names}}


def require_examples(examples: ExampleSet, tasks: Mapping[int, str], location: str) -> None:
    """Raise CtxError if a task, by its number in the column `task`, has no example."""
    numbers = {int(number) for values in examples.column_values("task") for number in np.unique(values)}
    if missing := [name for number, name in tasks.items() if number not in numbers]:
        raise CtxError(
            f"The documents have no example of the task {missing[0]!r}.",
            location=location,
            hint="use running text of several sentences, --translations with --language_tags for a tag, "
            "FILE=FIRST,SECOND,LABEL for labeled pairs; or remove the task.",
        )


def _parse_names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    if not all(names) or len(set(names)) < len(names):
        raise CtxError(f"{text!r} is not a list of different names.", hint="separate them by commas: a,b.")
    return names
