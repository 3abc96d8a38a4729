"""Sequence to sequence: a source text -> a target text (summaries, questions, paraphrases, translation)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from transformers import AutoModelForSeq2SeqLM, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.generation import decode_generated, max_input_length, max_pair_length, target_vocabulary_config
from hf_ctxmodels.core.languages import LanguagePair, target_language_id
from hf_ctxmodels.data.padding import SourceTargetCollator, strip_decoder_start
from hf_ctxmodels.data.sentence_splitting import split_sentences
from hf_ctxmodels.data.table_files import read_table
from hf_ctxmodels.downstream.tasks.base import (
    Collator,
    Encoded,
    Feature,
    FeatureCollator,
    Logits,
    Task,
    TaskArguments,
    get_texts,
)
from hf_ctxmodels.downstream.tasks.normalized_references import NormalizedReferences
from hf_ctxmodels.downstream.tasks.text_metrics import metric_names, score_texts


@dataclass(frozen=True)
class SourceTarget:
    """A text and what is to be written for it."""

    source: str
    target: str
    where: str


class Seq2Seq(Task[SourceTarget]):
    """Each word of the target from the source and the words of the target before it; predictions are written.

    Files are tables with a column of sources (`--text_columns`, by default `source`) and one of targets
    (`--label_column`, by default `target`). A source over `max_length` tokens is an error, or cut at its end with
    `cut_sources`; a target over `max_target_length` is an error, since a cut one would teach a wrong end. A target that
    the tokenizer begins with the decoder's first input is without it, since the decoder begins with it anyway.

    The baseline is the source itself or its first sentence, whichever has the better main metric. Where the tokenizer
    does not give targets back as they are, there are metrics against what it gives back too: `NormalizedReferences`.
    """

    name: ClassVar[str] = "seq2seq"
    auto_class: ClassVar[str] = "AutoModelForSeq2SeqLM"
    is_generative: ClassVar[bool] = True
    reads: ClassVar[tuple[str, ...]] = (
        *Task.reads,
        "max_target_length",
        "cut_sources",
        "target_language",
        "label_smoothing",
        "num_beams",
        "metrics",
        "plain_targets",
        "target_options",
    )
    uses_target_word_ids: bool = False
    """Whether features hold `target_word_ids`, (tokens,) the number of each target token's word, -1 for others."""
    _BASELINES: ClassVar = {
        "the source itself": lambda source: source,
        "the first sentence of the source": lambda source: split_sentences(source)[0],
    }

    def __init__(self, arguments: TaskArguments) -> None:
        super().__init__(arguments)
        self._metrics = metric_names(arguments.metrics)
        self._references: NormalizedReferences | None = None
        for name in ("max_target_length", "num_beams"):
            if getattr(arguments, name) < 1:
                raise CtxError(f"--{name} must be at least 1.", location=f"--{name} {getattr(arguments, name)}")

    def read_file(self, file: str) -> list[SourceTarget]:
        """See `Task.read_file`."""
        sources = self._columns(self.arguments.text_columns, "source")
        targets = self._columns(self.arguments.label_column, "target")
        if len(sources) != 1 or len(targets) != 1:
            raise CtxError(
                f"{len(sources)} columns of sources and {len(targets)} of targets.",
                location="--text_columns --label_column",
                hint="give one of each.",
            )
        return [
            SourceTarget(get_texts(row, sources)[0], get_texts(row, targets)[0], row.where)
            for row in read_table(file, [*sources, *targets])
        ]

    def config_fields(self, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
        """See `Task.config_fields`: those of the target vocabulary."""
        return target_vocabulary_config(tokenizer)

    def configure(
        self, config: PreTrainedConfig, train: Sequence[SourceTarget], validation: Sequence[SourceTarget]
    ) -> None:
        """Note by which tokens the model begins and ends a text.

        Raises:
            CtxError: The model has no head for the task or no such token, or fewer positions than the longest texts; a
                language is missing or unknown.
        """
        if type(config) not in AutoModelForSeq2SeqLM._model_mapping:
            raise CtxError(
                f"{type(config).__name__} cannot be opened with {self.auto_class}: no head writes targets.",
                hint="use an encoder-decoder.",
            )
        self._check_positions(config)
        written, self._config = self.arguments.target_language, config
        self._languages = LanguagePair.of(config, None, written, ("--language", "--target_language"))
        ends = config.eos_token_id
        if ends is None:
            raise CtxError(
                f"{type(config).__name__} has no token that ends a text (eos_token_id).",
                hint="use an encoder-decoder; or set it by --config_options eos_token_id=NUMBER.",
            )
        self._ends = {ends} if isinstance(ends, int) else set(ends)
        self._query = getattr(config, "query_token_id", None)
        self._start = getattr(config, "decoder_start_token_id", None)

    def _check_positions(self, config: PreTrainedConfig) -> None:
        """Raise CtxError if the model has fewer positions than the longest texts."""
        limit, shared = max_input_length(config), max_pair_length(config)
        source, target = self.arguments.max_length, self.arguments.max_target_length
        for name, length in (("max_length", source), ("max_target_length", target)):
            if limit is not None and length > limit:
                raise CtxError(
                    f"Texts of {length} tokens are over the model's limit of {limit} positions.",
                    location=f"--{name} {length}",
                    hint=f"use --{name} {limit} or less.",
                )
        if shared is not None and source + target > shared:
            raise CtxError(
                f"Sources of {source} and targets of {target} tokens are over the model's limit of {shared} tokens, "
                "which a source and its target share.",
                location=f"--max_length {source} --max_target_length {target}",
                hint=f"lower one of them, to a sum of {shared} or less.",
            )

    def encode(self, examples: Sequence[SourceTarget], tokenizer: PreTrainedTokenizerBase) -> Encoded:
        """See `Task.encode`; origins are example indices."""
        self._tokenizer = tokenizer
        self._references = NormalizedReferences(
            tokenizer, self._metrics, tokenizer_arguments=self._told(tokenizer, "target")
        )
        more = self._numbers(tokenizer)
        sources = self._sources([example.source for example in examples], tokenizer)
        # the decoder's first input, where the tokenizer begins targets with it; a text may begin with it as well
        nothing = tokenizer(text_target="")["input_ids"]
        begun = len(nothing) - len(strip_decoder_start(nothing, self._start))
        targets = self._targets([example.target for example in examples], tokenizer, begun)
        self._check(examples, "source", sources, self.arguments.max_length, len(tokenizer("")["input_ids"]))
        self._check(examples, "target", targets, self.arguments.max_target_length, len(nothing) - begun)
        self._check_reserved(examples, targets, sum(each in self._ends for each in nothing[begun:]), tokenizer)
        features: list[Feature] = [
            {"input_ids": source, "labels": target, **more} for source, target in zip(sources, targets, strict=True)
        ]
        if self.uses_target_word_ids:
            self._add_words(features, [example.target for example in examples], tokenizer)
        return Encoded(features, list(range(len(features))))

    def _numbers(self, tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
        """The numbers of the languages that the model is told, as `SourceTargetCollator` takes them."""
        if self._languages is not None:
            return dict(zip(("language", "target_language"), self._languages.numbers, strict=True))
        number = target_language_id(tokenizer, self.arguments.target_language, self._config)
        return {} if number is None else {"target_language": number}

    def _told(self, tokenizer: PreTrainedTokenizerBase, side: str) -> dict[str, str]:
        """What a tokenizer is told of the language of the `source` or the `target`."""
        return (
            {}
            if self._languages is None
            else self._languages.tokenizer_arguments(tokenizer, getattr(self._languages, side))
        )

    def _add_words(self, features: list[Feature], texts: list[str], tokenizer: PreTrainedTokenizerBase) -> None:
        """Add `target_word_ids` to features."""
        encoded = tokenizer(text_target=texts, verbose=False)
        for number, feature in enumerate(features):
            words = [-1 if word is None else word for word in encoded.word_ids(number)]
            feature["target_word_ids"] = np.array(words[len(words) - len(feature["labels"]) :])

    def _sources(self, texts: list[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
        cut = {"truncation": True, "max_length": self.arguments.max_length} if self.arguments.cut_sources else {}
        return tokenizer(texts, verbose=False, **cut, **self._told(tokenizer, "source"))["input_ids"]

    def _targets(self, texts: list[str], tokenizer: PreTrainedTokenizerBase, begun: int) -> list[list[int]]:
        """The targets' ids without the first `begun`; raises CtxError unless they hold a token at which the model
        stops."""
        encoded = tokenizer(text_target=texts, verbose=False, **self._told(tokenizer, "target"))
        targets = [ids[begun:] for ids in encoded["input_ids"]]
        if not self._ends & set(targets[0]):
            raise CtxError(
                f"{type(tokenizer).__name__} ends targets without a token at which the model stops writing: "
                f"eos_token_id {', '.join(map(str, sorted(self._ends)))} is not in {targets[0]}.",
                hint="use the model's own tokenizer, one that adds the end of text, and a configuration with its id.",
            )
        return targets

    def _check(
        self, examples: Sequence[SourceTarget], side: str, rows: list[list[int]], limit: int, special: int
    ) -> None:
        """Raise CtxError for a row without a token of text, or with too many tokens."""
        flag = "max_length" if side == "source" else "max_target_length"
        for example, row in zip(examples, rows, strict=True):
            if len(row) <= special:
                raise CtxError(
                    f"The {side} has no token of text: {getattr(example, side)!r}.",
                    location=example.where,
                    hint="remove the line, or fill it in.",
                )
        long = [(len(row), number) for number, row in enumerate(rows) if len(row) > limit]
        if long:
            most, number = max(long)
            raise CtxError(
                f"{len(long)} of {len(rows)} {side}s have more than {limit} tokens, the longest {most}.",
                location=f"{examples[number].where}, --{flag} {limit}",
                hint=f"raise --{flag}, or "
                + ("cut the ends of sources: --cut_sources." if side == "source" else "remove the lines."),
            )

    def _check_reserved(
        self, examples: Sequence[SourceTarget], rows: list[list[int]], ends: int, tokenizer: PreTrainedTokenizerBase
    ) -> None:
        """Raise CtxError for a target whose text holds an end, where a model would stop, or the token that predicts."""
        for example, row in zip(examples, rows, strict=True):
            found = [each for each in row if each in self._ends]
            if self._query in row or len(found) > ends:
                token = self._query if self._query in row else found[0]
                raise CtxError(
                    f"The text of the target holds {tokenizer.convert_ids_to_tokens(token)}, at which the model stops, "
                    f"or by which it predicts: {example.target[:60]!r}.",
                    location=example.where,
                    hint="take such strings out of the text.",
                )

    def collator(self, tokenizer: PreTrainedTokenizerBase) -> Collator:
        """See `Task.collator`; raises CtxError for a tokenizer without a padding token."""
        return FeatureCollator(SourceTargetCollator(tokenizer))

    def generate(self, model: PreTrainedModel, batch: dict[str, Any]) -> list[Logits]:
        """See `Task.generate`: `sequences`, the ids of each."""
        inputs = {name: value for name, value in batch.items() if name not in self.targets}
        settings = {"num_beams": self.arguments.num_beams, "max_new_tokens": self.arguments.max_target_length}
        written = model.generate(**inputs, **settings, do_sample=False)
        return [{"sequences": row} for row in written.cpu().numpy()]

    def decode(self, examples: Sequence[SourceTarget], encoded: Encoded, outputs: Sequence[Logits]) -> list[str]:
        """See `Task.decode`."""
        return decode_generated(self._tokenizer, [np.asarray(output["sequences"]).tolist() for output in outputs])

    def score(self, examples: Sequence[SourceTarget], predictions: Sequence[str]) -> dict[str, float]:
        """The metrics of `--metrics`, see `text_metrics`; after `encode` also `NormalizedReferences.scores`."""
        targets = [example.target for example in examples]
        more = {} if self._references is None else self._references.scores(predictions, targets)
        return score_texts(self._metrics, predictions, targets) | more

    def ceiling(self, examples: Sequence[SourceTarget]) -> dict[str, float]:
        """See `Task.ceiling`; after `encode`."""
        return {} if self._references is None else self._references.ceiling([example.target for example in examples])

    def baseline(self, train: Sequence[SourceTarget], validation: Sequence[SourceTarget]) -> list[str]:
        """The sources or their first sentences, whichever has the better main metric; named in `baseline_name`."""
        written = {name: [write(each.source) for each in validation] for name, write in self._BASELINES.items()}
        scores = {name: next(iter(self.score(validation, texts).values())) for name, texts in written.items()}
        self.baseline_name = max(scores, key=scores.__getitem__)
        return written[self.baseline_name]

    def record(self, example: SourceTarget, prediction: str) -> dict[str, Any]:
        """See `Task.record`."""
        return {
            "where": example.where,
            "source": example.source,
            "target": example.target,
            "prediction": prediction,
        }
