"""Sequence to sequence: a source text -> a target text (summaries, questions, paraphrases, translation)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from transformers import AutoModelForSeq2SeqLM, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from hf_ctxmodels.core.console import print_status
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import typed_options
from hf_ctxmodels.core.generation import (
    LanguagePair,
    check_target_vocabulary,
    decode_generated,
    max_input_length,
    max_pair_length,
    target_language_id,
    target_vocabulary_config,
)
from hf_ctxmodels.data.documents import split_sentences
from hf_ctxmodels.data.padding import SourceTargetCollator, strip_decoder_start
from hf_ctxmodels.data.table_files import has_labels, read_table, read_texts
from hf_ctxmodels.downstream.tasks.base import (
    Collator,
    Encoded,
    Feature,
    Logits,
    Task,
    TaskArguments,
    get_texts,
    repeated_prediction,
)
from hf_ctxmodels.downstream.tasks.text_metrics import NormalizedReferences, metric_names, score_texts
from hf_ctxmodels.registry import FAMILIES
from hf_ctxmodels.spec import Seq2SeqFinetuning

CONSTANT_SHARE = 0.9
"""Share of equal texts at which the generated texts do not depend on the source."""


@dataclass(frozen=True)
class SourceTarget:
    """A source text and its target text."""

    source: str
    target: str
    location: str


Examples = Sequence[SourceTarget]


class UnlabeledSource(SourceTarget):
    """A source text without a target, which is empty."""


@dataclass(frozen=True)
class TargetCollator:
    """Collates a task's features, whose `labels` are the targets, with a collator of `SourceTargetCorruption`."""

    collate: Collator

    def __call__(self, features: list[Feature]) -> dict[str, Any]:
        """A batch of arguments of the model's forward."""
        return self.collate([{**feature, "target_ids": feature["labels"]} for feature in features])


class Seq2Seq(Task[SourceTarget]):
    """Generation of a target text from a source text.

    Files are tables with a column of sources (`--text_columns`, by default `source`) and a column of targets
    (`--label_column`, by default `target`). A source longer than `max_length` tokens is an error, or truncated with
    `cut_sources`; a target longer than `max_target_length` is an error, since truncation would teach a wrong end.

    A family may train on masked or noised targets (`FamilySpec.seq2seq_finetuning`), unless `plain_targets` is given;
    evaluation uses plain targets. If the tokenizer does not reproduce targets exactly, there are also metrics against
    the decoded targets: `NormalizedReferences`.
    """

    name = "seq2seq"
    auto_class = "AutoModelForSeq2SeqLM"
    collator_class: ClassVar[Callable[..., Any]] = SourceTargetCollator
    is_generative = True
    has_unlabeled_loss = True
    argument_names = (
        *Task.argument_names,
        *("max_target_length", "cut_sources", "target_language", "label_smoothing", "num_beams", "metrics"),
        *("plain_targets", "target_options"),
    )
    uses_target_word_ids: bool = False
    """Whether features contain `target_word_ids`, (tokens,) the index of each target token's word, -1 for others."""

    def __init__(self, arguments: TaskArguments) -> None:
        super().__init__(arguments)
        self._metrics = metric_names(arguments.metrics)
        self._references: NormalizedReferences | None = None

    def read_file(self, file: str) -> list[SourceTarget]:
        """Read the examples of a file."""
        sources, targets = self._columns("text_columns", "source", 1), self._columns("label_column", "target", 1)
        return [
            SourceTarget(get_texts(row, sources)[0], get_texts(row, targets)[0], row.location)
            for row in read_table(file, [*sources, *targets])
        ]

    def read_unlabeled(self, file: str) -> list[SourceTarget]:
        """A table with the column of sources, or a `.txt` file with one source per line."""
        columns = self._columns("text_columns", "source", 1)
        return [UnlabeledSource(get_texts(row, columns)[0], "", row.location) for row in read_texts(file, *columns)]

    def has_labels(self, file: str) -> bool:
        """Whether the examples of a file have targets."""
        return has_labels(file, *self._columns("label_column", "target", 1))

    def config_fields(self, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
        """Fields of the target vocabulary."""
        return target_vocabulary_config(tokenizer)

    def set_token_fields(self, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        """Set the ids of the tokens that the family's head generates with; raises CtxError if the tokenizer lacks
        one, or lacks the target vocabulary."""
        if "target_vocab_size" in type(config).__dataclass_fields__:
            check_target_vocabulary(tokenizer)
        finetuning = _family_finetuning(config)
        for name, value in finetuning.objective.head_fields(tokenizer).items() if finetuning else ():
            setattr(config, name, value)

    def configure(self, config: PreTrainedConfig, train: Examples, validation: Examples) -> None:
        """Read the special tokens and languages of the model; raises CtxError if it has no head for the task, no end
        token or too few positions, or if a language is missing or unknown."""
        if type(config) not in AutoModelForSeq2SeqLM._model_mapping:
            raise CtxError(
                f"{type(config).__name__} has no class for {self.auto_class}.",
                hint="use an encoder-decoder, or make one by --decoder.",
            )
        limit, shared = max_input_length(config), max_pair_length(config)
        source, target = self.arguments.max_length, self.arguments.max_target_length
        for name, length in (("max_length", source), ("max_target_length", target)):
            if limit is not None and length > limit:
                raise CtxError(
                    f"{length} tokens exceed the model's limit of {limit} positions.",
                    location=f"--{name} {length}",
                    hint=f"use --{name} {limit} or less.",
                )
        if shared is not None and source + target > shared:
            raise CtxError(
                f"{source} source and {target} target tokens exceed the model's common limit of {shared} tokens.",
                location=f"--max_length {source} --max_target_length {target}",
                hint=f"use lengths with a sum of at most {shared}.",
            )
        self._config = config
        self._languages = LanguagePair.resolve(
            config, None, self.arguments.target_language, ("--language", "--target_language")
        )
        ends = config.eos_token_id
        if ends is None:
            raise CtxError(
                f"{type(config).__name__} has no end-of-sequence token (eos_token_id).",
                hint="use an encoder-decoder, or pass --config_options eos_token_id=ID.",
            )
        self._ends = {ends} if isinstance(ends, int) else set(ends)
        self._query = getattr(config, "query_token_id", None)
        self._start = getattr(config, "decoder_start_token_id", None)

    def encode(self, examples: Examples, tokenizer: PreTrainedTokenizerBase) -> Encoded:
        """Tokenize the examples. The target of an unlabeled source is the end token."""
        self._tokenizer = tokenizer
        source_arguments, target_arguments = (
            {}
            if self._languages is None
            else self._languages.tokenizer_arguments(tokenizer, getattr(self._languages, side))
            for side in ("source", "target")
        )
        self._references = NormalizedReferences(tokenizer, self._metrics, tokenizer_arguments=target_arguments)
        truncation: dict[str, Any] = {"truncation": True, "max_length": self.arguments.max_length}
        sources = tokenizer(
            [example.source for example in examples],
            verbose=False,
            **source_arguments,
            **(truncation if self.arguments.cut_sources else {}),
        )["input_ids"]
        # the tokenizer may begin targets with the decoder's start token; a text may begin with this token too
        empty_target = tokenizer(text_target="")["input_ids"]
        num_start_tokens = len(empty_target) - len(strip_decoder_start(empty_target, self._start))
        empty_target = empty_target[num_start_tokens:]
        texts = [example.target for example in examples]
        encoded_targets = tokenizer(text_target=texts, verbose=False, **target_arguments)
        targets = [ids[num_start_tokens:] for ids in encoded_targets["input_ids"]]
        if not self._ends & set(targets[0]):
            raise CtxError(
                f"{type(tokenizer).__name__} adds no end-of-sequence token to targets: eos_token_id "
                f"{', '.join(map(str, sorted(self._ends)))} is not in {targets[0]}.",
                hint="use the model's tokenizer, which adds the end token, and a configuration with its id.",
            )
        self._check_lengths(examples, "source", sources, self.arguments.max_length, len(tokenizer("")["input_ids"]))
        labeled = [index for index, example in enumerate(examples) if not isinstance(example, UnlabeledSource)]
        labeled_examples = [examples[index] for index in labeled]
        labeled_targets = [targets[index] for index in labeled]
        max_target_length = self.arguments.max_target_length
        self._check_lengths(labeled_examples, "target", labeled_targets, max_target_length, len(empty_target))
        num_ends = sum(token_id in self._ends for token_id in empty_target)
        for example, target in zip(labeled_examples, labeled_targets, strict=True):
            end_tokens = [token_id for token_id in target if token_id in self._ends]
            if self._query in target or len(end_tokens) > num_ends:
                token_id = self._query if self._query in target else end_tokens[0]
                raise CtxError(
                    f"The text of the target contains the reserved token {tokenizer.convert_ids_to_tokens(token_id)}: "
                    f"{example.target[:60]!r}.",
                    location=example.location,
                    hint="remove the token from the text.",
                )
        if self._languages is not None:
            language_ids = dict(zip(("language", "target_language"), self._languages.ids, strict=True))
        else:
            language_id = target_language_id(tokenizer, self.arguments.target_language, self._config)
            language_ids = {} if language_id is None else {"target_language": language_id}
        features: list[Feature] = [
            {"input_ids": source, "labels": target, **language_ids}
            for source, target in zip(sources, targets, strict=True)
        ]
        if self.uses_target_word_ids:
            for index, feature in enumerate(features):
                word_ids = [-1 if word_id is None else word_id for word_id in encoded_targets.word_ids(index)]
                feature["target_word_ids"] = np.array(word_ids[len(word_ids) - len(feature["labels"]) :])
        return Encoded(features)

    def _check_lengths(
        self, examples: Examples, side: str, sequences: list[list[int]], limit: int, num_special: int
    ) -> None:
        """Raise CtxError for a text without tokens, or with more tokens than the limit."""
        flag = "max_length" if side == "source" else "max_target_length"
        for example, sequence in zip(examples, sequences, strict=True):
            if len(sequence) <= num_special:
                raise CtxError(
                    f"The {side} has no tokens: {getattr(example, side)!r}.",
                    location=example.location,
                    hint="remove the line, or fill it in.",
                )
        too_long = [(len(sequence), index) for index, sequence in enumerate(sequences) if len(sequence) > limit]
        if too_long:
            longest, index = max(too_long)
            raise CtxError(
                f"{len(too_long)} of {len(sequences)} {side}s have more than {limit} tokens, the longest {longest}.",
                location=f"{examples[index].location}, --{flag} {limit}",
                hint=f"raise --{flag}, or "
                + ("truncate sources by --cut_sources." if side == "source" else "remove the lines."),
            )

    def training_collator(
        self, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, seed: int, verbose: bool = True
    ) -> Collator:
        """The collator of the family's objective, else `collator`; sets `uses_target_word_ids`. Raises CtxError for
        unknown options and wrong values."""
        arguments = self.arguments
        finetuning = None if arguments.plain_targets else _family_finetuning(config)
        if finetuning is None:
            if arguments.target_options:
                raise CtxError(
                    f"{type(config).__name__} is trained on plain targets.",
                    location=f"--target_options {' '.join(arguments.target_options)}",
                    hint="remove the options" + (", or --plain_targets." if arguments.plain_targets else "."),
                )
            return self.collator(tokenizer)
        objective_class = finetuning.objective
        names = objective_class.option_help()
        texts = dict(text.partition("=")[::2] for text in arguments.target_options)
        options = typed_options(objective_class, texts, location="--target_options", names=names)
        if "max_target_length" in options:
            raise CtxError("max_target_length is a flag.", location="--target_options", hint="use --max_target_length.")
        length = arguments.max_target_length
        longest = min(arguments.max_length + length, tokenizer.model_max_length)
        objective = objective_class(tokenizer, max_length=longest, seed=seed, max_target_length=length, **options)
        self.uses_target_word_ids = objective.needs_target_words
        description = ", ".join([objective_class.__name__, *arguments.target_options])
        print_status(f"training on the targets of {description}; --plain_targets disables this", verbose)
        return TargetCollator(objective.collate)

    def label_smoothing(self, config: PreTrainedConfig) -> float:
        """The label smoothing of the flag; else of the configuration; else, unless targets are plain, of the family."""
        finetuning = _family_finetuning(config)
        if self.arguments.label_smoothing is not None or finetuning is None:
            return self.arguments.label_smoothing or 0.0
        return config.label_smoothing or (0.0 if self.arguments.plain_targets else finetuning.label_smoothing)

    def generate(self, model: PreTrainedModel, batch: dict[str, Any]) -> list[Logits]:
        """Generated token ids, as `sequences`."""
        inputs = {name: value for name, value in batch.items() if name not in self.targets}
        settings = {"num_beams": self.arguments.num_beams, "max_new_tokens": self.arguments.max_target_length}
        generated = model.generate(**inputs, **settings, do_sample=False)
        return [{"sequences": token_ids} for token_ids in generated.cpu().numpy()]

    def decode(self, examples: Examples, encoded: Encoded, outputs: Sequence[Logits]) -> list[str]:
        """The generated texts."""
        return decode_generated(self._tokenizer, [np.asarray(output["sequences"]).tolist() for output in outputs])

    def score(self, examples: Examples, predictions: Sequence[str]) -> dict[str, float]:
        """The metrics of `--metrics`, see `text_metrics`; after `encode` also `NormalizedReferences.scores`."""
        targets = [example.target for example in examples]
        scores = score_texts(self._metrics, predictions, targets)
        return scores if self._references is None else scores | self._references.scores(predictions, targets)

    def upper_bounds(self, examples: Examples) -> dict[str, float]:
        """Upper bounds of the metrics, after `encode`."""
        targets = [example.target for example in examples]
        return {} if self._references is None else self._references.upper_bounds(targets)

    def constant_prediction(self, examples: Examples, predictions: Sequence[str]) -> str | None:
        """The text of nine in ten predictions."""
        return repeated_prediction(predictions, [example.target for example in examples], CONSTANT_SHARE)

    def baseline(self, train: Examples, validation: Examples) -> list[str]:
        """The sources or their first sentences, whichever has the better main metric; named in `baseline_name`."""
        predictions = {
            "the source itself": [example.source for example in validation],
            "the first sentence of the source": [split_sentences(example.source)[0] for example in validation],
        }
        scores = {name: next(iter(self.score(validation, texts).values())) for name, texts in predictions.items()}
        self.baseline_name = max(scores, key=scores.__getitem__)
        return predictions[self.baseline_name]

    def record(self, example: SourceTarget, prediction: str) -> dict[str, Any]:
        """JSON object of an example for the predictions file."""
        return {**vars(example), "prediction": prediction}


def _family_finetuning(config: PreTrainedConfig) -> Seq2SeqFinetuning | None:
    """The sequence-to-sequence fine-tuning of a configuration's family; None for plain targets."""
    return next((family.seq2seq_finetuning for family in FAMILIES.values() if type(config) is family.config), None)
