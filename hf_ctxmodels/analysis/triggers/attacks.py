"""Attacks by universal triggers on classifiers, extractive question answering and causal language models.

Wallace et al. 2019 (arXiv 1908.07125), sections 3 to 5. The texts are split in two halves: a trigger is searched on one
half and measured on the other.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any, ClassVar

import numpy as np
import torch
from torch.nn import functional as F
from transformers import DataCollatorForTokenClassification, PreTrainedModel, PreTrainedTokenizerBase

from hf_ctxmodels.analysis.triggers.search import Trigger, TriggerOptions, TriggerSearch, decode_tokens
from hf_ctxmodels.architectures.word_alignment import split_words
from hf_ctxmodels.core.constants import IGNORE_INDEX
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.host_copies import CollatedBatch
from hf_ctxmodels.core.model import evaluation_mode
from hf_ctxmodels.downstream.tasks.base import Collator, Feature
from hf_ctxmodels.downstream.tasks.metrics import answer_exact_match
from hf_ctxmodels.downstream.tasks.question_answering import Question, QuestionAnswering
from hf_ctxmodels.downstream.tasks.sequence_classification import SequenceClassification, SequenceExample
from hf_ctxmodels.evaluation.perplexity import is_permutation_lm
from hf_ctxmodels.inference.prediction import Predictor
from hf_ctxmodels.inference.task_heads import run_head


def insert_trigger(trigger: str, text: str) -> str:
    """A text with a trigger before it."""
    return f"{trigger} {text}" if trigger else text


class Attack(ABC):
    """An attack on a model: features and outcomes of texts with a trigger, which is given as a text.

    Attributes:
        metric: Name of the mean outcome.
        increases_loss: Whether the trigger increases the loss of the features, and so decreases the outcomes.
        has_binary_outcomes: Whether an outcome is 0 or 1.
        reserved_words: Words that the search must not choose.
    """

    metric: str
    increases_loss: bool
    has_binary_outcomes: ClassVar[bool] = True
    reserved_words: Sequence[str] = ()

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, batch_size: int = 64) -> None:
        self.model, self.tokenizer, self.batch_size = model, tokenizer, batch_size

    @abstractmethod
    def features(self, examples: Sequence[Any], trigger: str) -> list[Feature]:
        """Model inputs of texts with a trigger, and the targets of the search."""

    @abstractmethod
    def collator(self) -> Collator:
        """The collator of the features."""

    @abstractmethod
    def outcomes(self, examples: Sequence[Any], trigger: str) -> np.ndarray:
        """(examples,) results of the model for texts with a trigger; their mean is the attack's metric."""

    def trigger_text(self, trigger: Trigger) -> str:
        """The text that is inserted for a trigger."""
        return decode_tokens(self.tokenizer, [trigger])[0]

    def search(self, examples: Sequence[Any], options: TriggerOptions, excluded_words: Sequence[str]) -> TriggerSearch:
        """The search for a trigger on examples."""
        return TriggerSearch(
            self.model,
            self.tokenizer,
            lambda trigger: self.features(examples, self.trigger_text(trigger)),
            self.collator(),
            options,
            increases_loss=self.increases_loss,
            excluded_words={*excluded_words, *self.reserved_words},
        )


class TaskAttack(Attack):
    """An attack on a model with the head of a fine-tuning task."""

    def __init__(self, predictor: Predictor, batch_size: int) -> None:
        super().__init__(predictor.model, predictor.tokenizer, batch_size)
        self.task: Any = predictor.task

    def collator(self) -> Collator:
        """The collator of the features."""
        return self.task.collator(self.tokenizer)

    def predict(self, examples: Sequence[Any]) -> list[Any]:
        """The predictions of the task for examples with a trigger."""
        encoded = self.task.encode(examples, self.tokenizer)
        outputs = run_head(self.model, self.tokenizer, self.task, encoded, self.batch_size)
        return self.task.decode(examples, encoded, outputs)


class ClassificationAttack(TaskAttack):
    """Attack on a classifier of texts or pairs (section 3); the trigger is put before the last text (the hypothesis).

    Outcomes: whether the label is predicted, or with a target, whether the target label is predicted.

    Args:
        predictor: A fine-tuned classifier.
        target: The label that the trigger should make the model predict; None for any wrong label.
    """

    def __init__(self, predictor: Predictor, target: str | None = None, batch_size: int = 64) -> None:
        super().__init__(predictor, batch_size)
        if not isinstance(predictor.task, SequenceClassification):
            raise CtxError(
                f"The task {predictor.task.name} cannot be attacked.",
                location=predictor.model.name_or_path,
                hint="use a classifier of texts or pairs, a question answering model or a causal language model.",
            )
        self.target = target
        if target is not None and target not in self.task.labels:
            raise CtxError(
                f"The model has no label {target!r}.",
                location=predictor.model.name_or_path,
                hint=f"use one of: {', '.join(self.task.labels)}.",
            )
        self.increases_loss = target is None
        self.metric = "accuracy" if target is None else f"predicted as {target}"

    def _examples(self, examples: Sequence[SequenceExample], trigger: str) -> list[SequenceExample]:
        return [
            replace(
                example,
                texts=(*example.texts[:-1], insert_trigger(trigger, example.texts[-1])),
                label=example.label if self.target is None else self.target,
            )
            for example in examples
        ]

    def features(self, examples: Sequence[SequenceExample], trigger: str) -> list[Feature]:
        """Model inputs of texts with a trigger, and the targets of the search."""
        return self.task.encode(self._examples(examples, trigger), self.tokenizer).features

    def outcomes(self, examples: Sequence[SequenceExample], trigger: str) -> np.ndarray:
        """(examples,) whether the label, or the target, is predicted."""
        changed = self._examples(examples, trigger)
        pairs = zip(self.predict(changed), changed, strict=True)
        return np.array([float(prediction == example.label) for prediction, example in pairs])


class AnswerAttack(TaskAttack):
    """Attack on extractive question answering (section 4): the trigger, before the context, contains an answer, which
    the model should give to any question. Half of the tokens are before the answer.

    Outcomes: whether the model's answer equals this answer, by SQuAD's exact match.
    """

    increases_loss = False

    def __init__(self, predictor: Predictor, answer: str, batch_size: int = 64) -> None:
        super().__init__(predictor, batch_size)
        assert isinstance(predictor.task, QuestionAnswering)
        self.answer, self.metric = answer, f"answered {answer!r}"
        self.reserved_words = answer.lower().split()

    def trigger_text(self, trigger: Trigger) -> str:
        """The words before the answer, the answer, and the words after it."""
        middle = (len(trigger) + 1) // 2
        before, after = decode_tokens(self.tokenizer, [trigger[:middle], trigger[middle:]])
        return insert_trigger(before, insert_trigger(self.answer, after)).rstrip()

    def _examples(self, questions: Sequence[Question], trigger: str) -> list[Question]:
        answers = ((trigger.find(self.answer), self.answer),) if trigger else ()
        return [
            replace(question, context=insert_trigger(trigger, question.context), answers=answers)
            for question in questions
        ]

    def features(self, examples: Sequence[Question], trigger: str) -> list[Feature]:
        """Model inputs of the first window of each context, and the positions of the answer in the trigger."""
        encoded = self.task.encode(self._examples(examples, trigger), self.tokenizer)
        first_windows: dict[int, Feature] = {}
        for feature, window in zip(encoded.features, encoded.origins, strict=True):
            first_windows.setdefault(window.example, feature)
        return list(first_windows.values())

    def outcomes(self, examples: Sequence[Question], trigger: str) -> np.ndarray:
        """(questions,) whether the model gives the answer."""
        answers = self.predict(self._examples(examples, trigger))
        return np.array([answer_exact_match(answer.text, self.answer) for answer in answers])


class ContinuationAttack(Attack):
    """Attack on a causal language model (section 5): after the trigger, the target texts are probable.

    Outcomes: cross-entropy (nats per token) of each text, of the tokens after the trigger. The first token follows the
    end-of-text token, if the tokenizer adds no other token.
    """

    increases_loss = False
    metric = "nats per token"
    has_binary_outcomes = False

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, max_length: int, batch_size: int = 64
    ) -> None:
        super().__init__(model, tokenizer, batch_size)
        self.max_length = max_length
        if not model.can_generate() or getattr(model, "is_backward", False) or is_permutation_lm(model):
            raise CtxError(
                f"{type(model).__name__} does not predict each token from the tokens before it.",
                location=model.name_or_path,
                hint="use a left-to-right causal language model.",
            )

    def features(self, examples: Sequence[str], trigger: str) -> list[Feature]:
        """Model inputs of texts with a trigger; the tokens of the text are labels."""
        texts = [insert_trigger(trigger, text) for text in examples]
        encoding = self.tokenizer(
            texts, truncation=True, max_length=self.max_length - 1, return_offsets_mapping=True, verbose=False
        )
        start = len(insert_trigger(trigger, ""))
        eos_id = self.tokenizer.eos_token_id
        features = []
        for ids, offsets in zip(encoding["input_ids"], encoding["offset_mapping"], strict=True):
            labels = [token if end > start else IGNORE_INDEX for token, (_, end) in zip(ids, offsets, strict=True)]
            if ids[0] not in self.tokenizer.all_special_ids and eos_id is not None:
                ids, labels = [eos_id, *ids], [IGNORE_INDEX, *labels]
            features.append({"input_ids": ids, "attention_mask": [1] * len(ids), "labels": labels})
        return features

    def collator(self) -> Collator:
        """The collator of the features."""
        return DataCollatorForTokenClassification(self.tokenizer)

    def outcomes(self, examples: Sequence[str], trigger: str) -> np.ndarray:
        """(texts,) cross-entropy in nats per token."""
        features, collate, means = self.features(examples, trigger), self.collator(), []
        with evaluation_mode(self.model):
            for start in range(0, len(features), self.batch_size):
                batch = CollatedBatch(collate(features[start : start + self.batch_size])).to(self.model.device)
                targets = batch.pop("labels")[:, 1:]
                logits = self.model(**batch).logits[:, :-1].float()
                losses = F.cross_entropy(logits.transpose(1, 2), targets, reduction="none", ignore_index=IGNORE_INDEX)
                means.append(losses.sum(1) / (targets != IGNORE_INDEX).sum(1).clamp(min=1))
        return torch.cat(means).cpu().numpy()


def split_halves(examples: Sequence[Any], seed: int) -> tuple[list[Any], list[Any]]:
    """Two random halves: one to search a trigger on, one to measure it on.

    Raises:
        CtxError: There are fewer than two examples.
    """
    if len(examples) < 2:
        raise CtxError(
            f"Got {len(examples)} examples; a trigger is searched on one half and measured on the other.",
            hint="use at least two examples.",
        )
    shuffled = list(examples)
    Random(seed).shuffle(shuffled)
    return shuffled[: len(shuffled) // 2], shuffled[len(shuffled) // 2 :]


def class_words(examples: Sequence[SequenceExample], count: int) -> list[str]:
    """The `count` lower-cased words that are most typical of each class.

    By the z-score of the log-odds ratio of a word in the class and in the other classes, with one pseudo-count per word
    (Monroe et al. 2008, "Fightin' Words", equations 16 to 22).
    """
    by_label: dict[str, Counter[str]] = {}
    for example in examples:
        by_label.setdefault(example.label, Counter()).update(split_words(" ".join(example.texts).lower()))
    total = sum(by_label.values(), Counter())
    words = list(total)
    frequencies = np.array([total[word] for word in words], dtype=np.float64)
    selected: list[str] = []
    for counts in by_label.values():
        inside = np.array([counts[word] for word in words]) + 1.0
        outside = frequencies - inside + 2.0
        ratio = np.log(inside / (inside.sum() - inside)) - np.log(outside / (outside.sum() - outside))
        scores = ratio / np.sqrt(1 / inside + 1 / outside)
        selected += [words[index] for index in np.argsort(-scores, kind="stable")[:count]]
    return list(dict.fromkeys(selected))


@dataclass(frozen=True)
class TriggerMeasurement:
    """Results of one search and its measurement on the other half.

    Attributes:
        triggers: The text of the trigger of each attacked model.
        plain: (models,) metric without a trigger.
        random: (draws, models) metric with random triggers.
        transferred: (attacked, models) metric with the trigger of each attacked model.
        success: (attacked, models) share of the outcomes that the attack could change and the trigger changes; None for
            outcomes that are not binary.
    """

    triggers: list[str]
    plain: np.ndarray
    random: np.ndarray
    transferred: np.ndarray
    success: np.ndarray | None


def measure_triggers(
    attacks: Sequence[Attack],
    num_attacked: int,
    examples: Sequence[Any],
    options: TriggerOptions,
    *,
    seed: int,
    random_triggers: int,
    excluded_words: Sequence[str] = (),
    triggers: Sequence[str] | None = None,
) -> TriggerMeasurement:
    """Search a trigger for each of the first `num_attacked` models on one half of the examples, and measure them, and
    random triggers of the same vocabularies, with all models on the other half.

    Args:
        triggers: Texts of triggers of an earlier search, which is then not repeated.
    """
    search_half, test_half = split_halves(examples, seed)
    generator, texts, random_texts = Random(seed), [], []
    for index, attack in enumerate(attacks[:num_attacked]):
        search = attack.search(search_half, options, excluded_words)
        texts.append(
            attack.trigger_text(search.run(attack.model.name_or_path)) if triggers is None else triggers[index]
        )
        draws = [generator.choices(search.vocabulary, k=options.length) for _ in range(random_triggers)]
        random_texts += [attack.trigger_text(draw) for draw in draws]
    plain = np.array([attack.outcomes(test_half, "") for attack in attacks])
    outcomes = np.array([[attack.outcomes(test_half, text) for attack in attacks] for text in texts])
    randoms = [[attack.outcomes(test_half, text).mean() for attack in attacks] for text in random_texts]
    success = None
    if attacks[0].has_binary_outcomes:
        vulnerable = (plain > 0.5) == attacks[0].increases_loss
        changed = ((outcomes > 0.5) != (plain > 0.5)) & vulnerable
        success = changed.sum(-1) / np.maximum(vulnerable.sum(-1), 1)
    return TriggerMeasurement(
        texts, plain.mean(-1), np.array(randoms).reshape(-1, len(attacks)), outcomes.mean(-1), success
    )
