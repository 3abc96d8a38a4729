"""Tasks as text (Raffel et al. 2020, "T5", section 2.4), for encoder-decoders and for decoders."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedConfig, PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from hf_ctxmodels.architectures.continuations import ContinuationScorer
from hf_ctxmodels.core.console import progress_bar
from hf_ctxmodels.core.constants import IGNORE_INDEX
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.generation import encode_prompts, max_input_length, max_source_length
from hf_ctxmodels.data.padding import ContextTargetCollator
from hf_ctxmodels.downstream.finetuning.task_evaluation import TaskEvaluation
from hf_ctxmodels.downstream.tasks.base import Encoded, Feature, Logits, TaskArguments, most_frequent
from hf_ctxmodels.downstream.tasks.seq2seq import Seq2Seq, SourceTarget
from hf_ctxmodels.downstream.tasks.text_metrics import NormalizedReferences
from hf_ctxmodels.downstream.text2text.examples import TextExample
from hf_ctxmodels.downstream.text2text.text_task import TextTask


@dataclass(frozen=True)
class TextPair(SourceTarget):
    """The input and the target of an example, as source and target."""

    example: TextExample

    @property
    def label(self) -> int | float | None:
        """The example's label."""
        return self.example.label


TextPairs = Sequence[Any]
"""`TextPair` examples; `Any`, so that the methods of `Seq2Seq` can be overridden."""


def decoded_label_strings(
    text_task: TextTask, examples: Sequence[TextExample], references: NormalizedReferences
) -> dict[str, str]:
    """The label strings of the examples by their texts after encoding and decoding.

    Raises:
        CtxError: The tokenizer decodes two label strings of a classification task as the same text.
    """
    label_strings: dict[str, str] = {}
    for choices in dict.fromkeys(example.choices for example in examples if example.choices):
        decoded = references.texts(choices)
        if text_task.kind == "classification" and len(set(decoded)) < len(set(choices)):
            raise CtxError(
                f"The tokenizer does not distinguish the label strings {', '.join(map(repr, choices))}: it decodes "
                f"them as {', '.join(map(repr, decoded))}.",
                location=f"the task {text_task.name}",
                hint="change the label strings, or use another tokenizer.",
            )
        label_strings |= dict(zip(decoded, choices))
    return label_strings


class TextToText(Seq2Seq):
    """A `TextTask` for encoder-decoders, encoded as `Seq2Seq` and scored by the task's metrics.

    A tokenizer may change label strings ("not_equivalent" without a token for "_", lower case): an output that equals a
    label string after encoding and decoding counts as the label string.
    """

    name = "text2text"
    separator = ""
    """Text after the input of a prompt."""

    argument_names = (
        *("max_length", "max_target_length", "cut_sources", "num_beams"),
        *("label_smoothing", "plain_targets", "target_options"),
    )

    def __init__(self, text_task: TextTask, arguments: TaskArguments) -> None:
        super().__init__(replace(arguments, metrics="exact_match"))  # of targets that the tokenizer changes
        self.text_task = text_task
        self._label_strings: dict[str, str] = {}

    def read_file(self, file: str) -> list[Any]:
        """Read the examples of a split of the task, or of a file."""
        examples = self.text_task.read(file)
        return [TextPair(example.input, example.target, example.location, example) for example in examples]

    def encode(self, examples: TextPairs, tokenizer: Tokenizer) -> Encoded:
        """Tokenize the examples; raises CtxError as `Seq2Seq.encode`, and if the tokenizer confuses label strings."""
        encoded = self.encode_pairs(examples, tokenizer)
        assert self._references is not None
        self._label_strings |= decoded_label_strings(
            self.text_task, [pair.example for pair in examples], self._references
        )
        return encoded

    def encode_pairs(self, examples: TextPairs, tokenizer: Tokenizer) -> Encoded:
        """Features with the input's `input_ids` and the target's `labels`, which include the end token."""
        return super().encode(examples, tokenizer)

    def decode(self, examples: TextPairs, encoded: Encoded, outputs: Sequence[Logits]) -> list[str]:
        """The generated texts, or the label strings with the highest likelihood."""
        texts = super().decode(examples, encoded, [output for output in outputs if "sequences" in output])
        generated = iter(self._label_strings.get(text, text) for text in texts)
        pairs = zip(examples, outputs, strict=True)
        return [
            pair.example.choices[int(output["choice"])] if "choice" in output else next(generated)
            for pair, output in pairs
        ]

    def score(self, examples: TextPairs, predictions: Sequence[str]) -> dict[str, float]:
        """The metrics of the task, and the share of unknown outputs."""
        return self.text_task.score([pair.example for pair in examples], list(predictions))

    def decoded_target_scores(self, examples: TextPairs) -> dict[str, float]:
        """The metrics of the targets after encoding and decoding, which some tokenizers change; after `encode`."""
        assert self._references is not None
        texts = self._references.texts([pair.target for pair in examples])
        return self.score(examples, [self._label_strings.get(text, text) for text in texts])

    def baseline(self, train: TextPairs, validation: TextPairs) -> list[str]:
        """Predictions without a model.

        - Labels and numbers: the most frequent target of the training examples.
        - Referents: the most frequent label of the validation examples, since all training examples may be correct.
        - Texts: the input without the prefix that all inputs share, such as "summarize: ".
        """
        if self.text_task.label is not None:
            is_correct = most_frequent(pair.label for pair in validation)
            return [pair.target if is_correct else "?" for pair in validation]
        if self.text_task.kind != "text":
            return [most_frequent(pair.target for pair in train)] * len(validation)
        sources = [pair.source for pair in (*train, *validation)]
        first, last = min(sources), max(sources)
        prefix = first[: next((i for i, pair in enumerate(zip(first, last)) if pair[0] != pair[1]), len(first))]
        return [pair.source[len(prefix) :] for pair in validation]

    def record(self, example: Any, prediction: str) -> dict[str, Any]:
        """JSON object of an example for the predictions file."""
        fields = {"location": example.location, "input": example.source, "target": example.target}
        return {**fields, "prediction": prediction}

    def rank(self, model: PreTrainedModel, pairs: TextPairs, features: Sequence[Feature]) -> list[Logits]:
        """The position of the label string with the highest probability, summed over its tokens and the end token, as
        `choice`. The input is the features' `input_ids`, which `cut_sources` may have truncated."""
        requests = [self.ranking_request(pair, choice) for pair in pairs for choice in pair.example.choices]
        context_ids = None
        if self.arguments.cut_sources:
            examples = zip(pairs, features, strict=True)
            context_ids = [feature["input_ids"] for pair, feature in examples for _ in pair.example.choices]
        scorer = ContinuationScorer(model, self._tokenizer, scores_end=True)
        scores = iter(scorer.score(requests, context_ids))
        ranked = [[next(scores).log_probability for _ in pair.example.choices] for pair in pairs]
        return [{"choice": np.asarray(np.argmax(log_probabilities))} for log_probabilities in ranked]

    def ranking_request(self, pair: TextPair, choice: str) -> tuple[str, str]:
        """The context and the continuation whose likelihood ranks a label string."""
        return pair.source, choice


class CausalTextToText(TextToText):
    """A `TextTask` for decoders: input, `separator` and target are one sequence, with the loss on the target alone
    (Radford et al. 2018, section 3.3, for its form). The separator follows the prompts for `generate`, too."""

    auto_class = "AutoModelForCausalLM"
    separator = " ="
    """As in GPT-2's translation prompts (Radford et al. 2019, section 3.7)."""

    collator_class = ContextTargetCollator

    def set_token_fields(self, config: PreTrainedConfig, tokenizer: Tokenizer) -> None:
        """Set the end token, and a padding token if there is none; raises CtxError without an end token."""
        if tokenizer.eos_token_id is None:
            raise CtxError(
                f"{type(tokenizer).__name__} has no end token (eos_token), which ends targets.",
                hint="use a tokenizer with one, or an encoder-decoder.",
            )
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token
        if config.eos_token_id is None:
            config.eos_token_id = tokenizer.eos_token_id

    def configure(self, config: PreTrainedConfig, train: TextPairs, validation: TextPairs) -> None:
        """Raise CtxError if the model is not a decoder, requires language ids, or has too few positions."""
        if type(config) not in AutoModelForCausalLM._model_mapping or getattr(config, "backward", False):
            raise CtxError(
                f"{type(config).__name__} has no head that generates text from left to right.",
                hint="use an encoder-decoder or a decoder.",
            )
        if getattr(config, "needs_languages", False) and config.n_langs > 1:
            raise CtxError(f"{type(config).__name__} needs a language for each token.", hint="use another model.")
        limit, arguments = max_input_length(config), self.arguments
        if limit is not None and arguments.max_length + arguments.max_target_length > limit:
            raise CtxError(
                f"{arguments.max_length} input and {arguments.max_target_length} target tokens exceed the model's "
                f"limit of {limit} tokens.",
                location=f"--max_length {arguments.max_length} --max_target_length {arguments.max_target_length}",
                hint=f"use lengths with a sum of at most {limit}.",
            )

    def encode_pairs(self, examples: TextPairs, tokenizer: Tokenizer) -> Encoded:
        """Encode inputs and targets as one sequence each; the separator is the end of the input."""
        self._tokenizer, self._end = tokenizer, int(tokenizer.eos_token_id)
        self._references = NormalizedReferences(tokenizer, self._metrics)
        contexts = encode_prompts(tokenizer, [pair.source + self.separator for pair in examples])
        rows = encode_prompts(tokenizer, [f"{pair.source}{self.separator} {pair.target}" for pair in examples])
        targets = [[*row[len(context) :], self._end] for context, row in zip(contexts, rows, strict=True)]
        if self.arguments.cut_sources:  # not the separator
            limit, num_kept = self.arguments.max_length, len(encode_prompts(tokenizer, [self.separator])[0])
            contexts = [
                context if len(context) <= limit else [*context[: limit - num_kept], *context[-num_kept:]]
                for context in contexts
            ]
        self._check_lengths(examples, "source", contexts, self.arguments.max_length, 0)
        self._check_lengths(examples, "target", targets, self.arguments.max_target_length, 1)
        features: list[Feature] = [
            {"input_ids": context, "labels": target} for context, target in zip(contexts, targets, strict=True)
        ]
        return Encoded(features)

    def generate(self, model: PreTrainedModel, batch: dict[str, Any]) -> list[Logits]:
        """The token ids generated after the contexts, as `sequences`."""
        is_context = (batch["attention_mask"] != 0) & (batch["labels"] == IGNORE_INDEX)
        width = int(is_context.sum(1).max())
        order = torch.argsort(is_context.long(), dim=1, stable=True)[:, -width:]  # padding on the left
        generated = model.generate(
            input_ids=batch["input_ids"].gather(1, order),
            attention_mask=is_context.long().gather(1, order),
            num_beams=self.arguments.num_beams,
            max_new_tokens=self.arguments.max_target_length,
            do_sample=False,
            eos_token_id=self._end,
            pad_token_id=int(self._tokenizer.pad_token_id),
        )
        return [{"sequences": np.asarray(token_ids)} for token_ids in generated[:, width:].cpu().numpy()]

    def ranking_request(self, pair: TextPair, choice: str) -> tuple[str, str]:
        """The context, and the choice with the end-of-sequence token."""
        return pair.source + self.separator, f" {choice}{self._tokenizer.eos_token}"


def text_to_text_class(config: PreTrainedConfig) -> type[TextToText]:
    """The class for a model's configuration."""
    return TextToText if type(config) in AutoModelForSeq2SeqLM._model_mapping else CausalTextToText


def most_likely_choices(
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    text_task: TextTask,
    examples: Sequence[TextExample],
    *,
    max_length: int | None = None,
    max_target_length: int = TaskArguments.max_target_length,
    batch_size: int = 32,
    progress: bool = False,
) -> list[str]:
    """The choice of each example with the highest likelihood as the target; see `TextToText.rank`.

    Args:
        examples: With choices: the label strings of the task, or a field; their targets are not read.
        max_length: Truncate inputs to this number of tokens; None raises an error for inputs over the model's limit.
        max_target_length: Tokens of the longest choice; decoders share their positions between inputs and choices.
        batch_size: Examples whose choices are scored together.

    Raises:
        CtxError: An example has no choices, an input or a choice is too long, or the model does not generate text.
    """
    if without := [example for example in examples if not example.choices]:
        raise CtxError(
            f"The task {text_task.name} has neither label strings nor `choices`.",
            location=without[0].location,
            hint="generate the text instead.",
        )
    arguments = TaskArguments(
        max_length=max_length or max_source_length(model.config, max_target_length) or sys.maxsize,
        max_target_length=max_target_length,
        cut_sources=max_length is not None,
    )
    task = text_to_text_class(model.config)(text_task, arguments)
    task.set_token_fields(model.config, tokenizer)
    pairs = [TextPair(example.input, example.choices[0], example.location, example) for example in examples]
    task.configure(model.config, pairs, pairs)
    encoded = task.encode(pairs, tokenizer)
    outputs: list[Logits] = []
    for start in progress_bar(range(0, len(pairs), batch_size), "ranking", unit="batches", enabled=progress):
        batch = slice(start, start + batch_size)
        outputs += task.rank(model, pairs[batch], encoded.features[batch])
    return task.decode(pairs, encoded, outputs)


@dataclass
class RankingEvaluation(TaskEvaluation):
    """Evaluation of a task with label strings by their likelihood, instead of generation."""

    task: TextToText

    def generate(self, model: Any, inputs: dict[str, Any], start: int) -> list[Logits]:
        """The scores of the choices of a batch, as in `TextToText.rank`."""
        batch = slice(start, start + len(inputs["input_ids"]))
        return self.task.rank(model, self.examples[batch], self.encoded.features[batch])
