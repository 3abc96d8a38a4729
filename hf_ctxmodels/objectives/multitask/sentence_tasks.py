"""Multi-task learning of sentence encoders, one task per step (Subramanian et al. 2018, arXiv 1804.00079)."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import flag
from hf_ctxmodels.data.documents import LabelledPair, TranslatedText
from hf_ctxmodels.data.examples import Example
from hf_ctxmodels.data.padding import PaddingCollator, RowPadder
from hf_ctxmodels.data.training_set import SamplingPolicy
from hf_ctxmodels.objectives.base import Batch, Objective, check_at_least
from hf_ctxmodels.objectives.baseline import BaselinePolicy
from hf_ctxmodels.objectives.components.masking import IGNORE_INDEX
from hf_ctxmodels.objectives.components.rates import count_targets, target_rates
from hf_ctxmodels.objectives.components.tokenized_documents import document_batches

SKIP_THOUGHT, RELATIONS = "skip-thought", "relations"
NEXT, PREVIOUS = "next", "previous"
_EMPTY = np.zeros(0, dtype=np.int32)


@dataclass
class DataCollatorForSentenceTasks(PaddingCollator):
    """Pads sentences, target texts, and pairs of sentences.

    Each feature holds:
        input_ids: (tokens,) of a sentence.
        second_ids: (tokens,) of the second sentence of a pair; else empty.
        labels: (tokens,) of the target text, its end included; else empty.
        target_language: The number of the target's decoder.
        relation: The class of a pair; else -100.

    Returns: input_ids, attention_mask (batch, width), padded on the tokenizer's side; token_type_ids (batch, width), 1
        at the second sentences; labels (batch, steps), -100 after a text's end and in rows without one;
        target_languages (batch,); relation_labels (batch,), -100 for none.
    """

    def torch_call(self, features: list[dict[str, Any]]) -> Batch:
        """Collate features; see the class for what they hold and what is returned."""
        names = ("input_ids", "second_ids", "labels")
        firsts, seconds, targets = ([np.asarray(feature[name]) for feature in features] for name in names)
        rows = [np.concatenate(pair) for pair in zip(firsts, seconds, strict=True)]
        padder = RowPadder([len(row) for row in rows], self.tokenizer.padding_side)
        lengths = ([len(first), len(second)] for first, second in zip(firsts, seconds, strict=True))
        languages, relations = (
            [int(feature[name]) for feature in features] for name in ("target_language", "relation")
        )
        return {
            "input_ids": padder.pad(rows, int(self.tokenizer.pad_token_id)),
            "attention_mask": padder.attention_mask(),
            "token_type_ids": padder.pad([np.repeat([0, 1], pair) for pair in lengths], 0),
            "labels": RowPadder([len(row) for row in targets], "right").pad(targets, IGNORE_INDEX),
            "target_languages": torch.tensor(languages),
            "relation_labels": torch.tensor(relations),
        }


@dataclass(frozen=True)
class SentenceTasksOptions:
    """Options of `SentenceTasks`."""

    tasks: str = flag(
        "all",
        "Comma-separated tasks: skip-thought, relations, and the tags of translations; other documents are skipped.",
    )
    relations: str = flag("contradiction,entailment,neutral", "Comma-separated labels of pairs.")
    relations_every: int = flag(
        10, "One in this many steps learns relations, if there is another task; 0 draws them like the others."
    )


class SentenceTasks(Objective):
    """GenSen's objective: one sentence encoder learns several tasks, a random one in every step.

    All tasks are equally likely, except relations, which have one step in ten. The kind of a document decides its task.
    Examples with a sentence or target longer than `max_length` are left out and counted.

    | document | input | targets |
    |---|---|---|
    | running text | a sentence | the next or the previous sentence, each by its own decoder (skip-thought) |
    | a text and its tagged translation | the text | the translation, or parse, by the tag's decoder |
    | a labelled pair | two sentences | their relation |

    References: Subramanian et al. 2018 (arXiv 1804.00079); the released code, where one step predicts both neighbours
        of a sentence, which are separate rows here; Kiros et al. 2015 (skip-thought, arXiv 1506.06726); Vinyals et al.
        2015 (parses as sequences, arXiv 1412.7449).
    Related: `TranslationToLanguages` has one decoder for all languages.

    Example:
        >>> SentenceTasks(tokenizer, max_length=60, seed=0, tasks="skip-thought,<de>,relations")
    """

    auto_class = "AutoModelForPreTraining"
    Options: ClassVar[type] = SentenceTasksOptions
    options: SentenceTasksOptions
    collate: DataCollatorForSentenceTasks

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, max_length: int, seed: int, **options: Any) -> None:
        super().__init__(tokenizer, max_length=max_length, seed=seed, **options)
        tags = getattr(tokenizer, "languages", None)
        if tags is None:
            raise CtxError(
                f"{type(tokenizer).__name__} has no joint vocabulary of sources and targets.",
                hint="use the tokenizer of a family with this objective.",
            )
        known = [SKIP_THOUGHT, *tags, RELATIONS]
        self.tasks = known if self.options.tasks == "all" else _names(self.options.tasks)
        if unknown := [task for task in self.tasks if task not in known]:
            raise CtxError(
                f"There is no task {unknown[0]!r}.",
                location=f"tasks={self.options.tasks}",
                hint=f"use some of: {', '.join(known)}. Tags are those that the tokenizer was trained with.",
            )
        self.relations = _names(self.options.relations) if RELATIONS in self.tasks else []
        neighbours = [NEXT, PREVIOUS] if SKIP_THOUGHT in self.tasks else []
        self.decoder_tasks = [*neighbours, *(task for task in self.tasks if task in tags)]
        check_at_least(0, relations_every=self.options.relations_every)
        every = self.options.relations_every
        periods = {self.tasks.index(RELATIONS): every} if every and RELATIONS in self.tasks else {}
        self.sampling = SamplingPolicy(task_column="task", task_periods=periods)
        excluded = {tokenizer.pad_token_id, tokenizer.bos_token_id, *tokenizer.convert_tokens_to_ids(tags)}
        self.baseline = BaselinePolicy(len(tokenizer), sorted(excluded), column="labels")
        self.collate = DataCollatorForSentenceTasks(tokenizer)

    @property
    def config_fields(self) -> dict[str, Any]:
        """The vocabulary and tasks of the decoders, and the classes of pairs."""
        return {
            "target_vocab_size": self.baseline.num_tokens,
            "decoder_start_token_id": int(self.tokenizer.bos_token_id),
            "eos_token_id": int(self.tokenizer.eos_token_id),
            "decoder_tasks": self.decoder_tasks,
            "relations": self.relations,
        }

    def examples(self, documents: Iterable[list[str]], pass_index: int = 0) -> Iterator[Example]:
        """Rows of the collator's fields, with the number of the task.

        Raises:
            CtxError: A translation without a tag, an unknown label, or no example of a task given by name.
        """
        seen = Counter[int]()
        for batch in document_batches(documents):
            self.statistics["documents"] += len(batch)
            translated = [each for each in batch if isinstance(each, TranslatedText)]
            pairs = [each for each in batch if isinstance(each, LabelledPair)]
            running = [each for each in batch if not isinstance(each, TranslatedText | LabelledPair)]
            for rows in (self._skip_thoughts(running), self._translations(translated), self._pairs(pairs)):
                for row in rows:
                    if max(len(row[name]) for name in ("input_ids", "second_ids", "labels")) > self.max_length:  # type: ignore[arg-type]
                        self.statistics["left_out"] += 1
                        continue
                    seen[int(row["task"])] += 1
                    yield row
        named = self.tasks if self.options.tasks != "all" else []
        if missing := [task for number, task in enumerate(named) if not seen[number]]:
            raise CtxError(
                f"The documents hold no example of the task {missing[0]!r}.",
                location=f"tasks={self.options.tasks}",
                hint="give running text for skip-thought, --translations with --language_tags for a tag, "
                "FILE=FIRST,SECOND,LABEL for relations; or leave the task out.",
            )

    def _skip_thoughts(self, documents: Sequence[list[str]]) -> Iterator[Example]:
        if SKIP_THOUGHT not in self.tasks:
            return
        encoded = self._encoded([sentence for document in documents for sentence in document])
        start = 0
        for document in documents:
            rows = encoded[start : start + len(document)]
            start += len(document)
            for number, row in enumerate(rows):
                for name, neighbour in ((NEXT, number + 1), (PREVIOUS, number - 1)):
                    if 0 <= neighbour < len(rows):
                        yield self._row(SKIP_THOUGHT, row, labels=rows[neighbour], written=name)

    def _translations(self, documents: Sequence[TranslatedText]) -> Iterator[Example]:
        tags, kept = self.tokenizer.languages, []
        for text, translation in documents:
            tag, _, target = translation.partition(" ")
            if tag not in tags:
                known = ", ".join(tags) or "the tokenizer's tags, of which there is none"
                raise CtxError(
                    f"A translation does not begin with one of {known}: {translation[:60]!r}.",
                    hint="give a tag for each file of translations, as to the tokenizer: --language_tags '<de>' ...",
                )
            if tag in self.tasks:
                kept.append((tag, text, target))
        encoded = self._encoded([each[1] for each in kept])
        targets = self._encoded([each[2] for each in kept])
        for (tag, _, _), row, labels in zip(kept, encoded, targets, strict=True):
            yield self._row(tag, row, labels=labels, written=tag)

    def _pairs(self, documents: Sequence[LabelledPair]) -> Iterator[Example]:
        if RELATIONS not in self.tasks:
            return
        sides = [self._encoded([document[side] for document in documents]) for side in range(2)]
        for document, first, second in zip(documents, *sides, strict=True):
            label = document.label.lower()
            if label not in self.relations:
                raise CtxError(
                    f"The label {document.label!r} is not among {', '.join(self.relations)}.",
                    hint="list all labels: --objective_options relations=...",
                )
            yield self._row(RELATIONS, first, second=second, relation=self.relations.index(label))

    def _encoded(self, texts: list[str]) -> list[np.ndarray]:
        """(tokens,) of every text, with its end."""
        if not texts:
            return []
        encodings = self.tokenizer(texts, verbose=False).encodings or []
        rows = [np.array(encoding.ids, dtype=np.int32) for encoding in encodings]
        self.statistics.update(sentences=len(rows), tokens=sum(map(len, rows)))
        return rows

    def _row(
        self,
        task: str,
        first: np.ndarray,
        *,
        second: np.ndarray = _EMPTY,
        labels: np.ndarray = _EMPTY,
        written: str | None = None,
        relation: int = IGNORE_INDEX,
    ) -> Example:
        return {
            "task": self.tasks.index(task),
            "input_ids": first,
            "second_ids": second,
            "labels": labels,
            "target_language": 0 if written is None else self.decoder_tasks.index(written),
            "relation": relation,
        }

    def count(self, batch: Mapping[str, torch.Tensor]) -> dict[str, int]:
        """See `Objective.count`."""
        has_target = (batch["labels"] != IGNORE_INDEX).any(1)
        written = {
            f"written_{name}": int((has_target & (batch["target_languages"] == number)).sum())
            for number, name in enumerate(self.decoder_tasks)
        }
        related = int((batch["relation_labels"] != IGNORE_INDEX).sum())
        return {**count_targets(batch, self.tokenizer.unk_token_id), "related": related, **written}

    def rates(self, counts: Mapping[str, int]) -> dict[str, float]:
        """See `Objective.rates`; the shares are of the examples, not of the steps."""
        rows = max(1, counts["rows"])
        return {
            **target_rates(counts),
            "target_fill": counts["targets"] / max(1, counts["target_positions"]),
            **{f"share_{name}": counts[f"written_{name}"] / rows for name in self.decoder_tasks},
            f"share_{RELATIONS}": counts["related"] / rows,
        }


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    if not all(names) or len(set(names)) < len(names):
        raise CtxError(f"{text!r} is no list of different names.", hint="separate them by commas: a,b.")
    return names
