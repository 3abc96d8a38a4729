"""What `generate` needs beside a model: its target vocabulary and languages, its limits, and the text of its ids."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self

from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from hf_ctxmodels.core.errors import CtxError


def target_vocabulary_config(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Configuration fields of a model that writes in the tokenizer's target vocabulary.

    They are the size of the vocabulary, the decoder's first input, the end of a target, and the number of languages
    where the tokenizer lists `languages`. A tokenizer without a target vocabulary has none of them.
    """
    words = getattr(tokenizer, "target_words", None)
    if words is None:
        return {}
    fields = {
        "target_vocab_size": len(words),
        "decoder_start_token_id": tokenizer.target_start_id,
        "eos_token_id": tokenizer.target_end_id,
    }
    languages = getattr(tokenizer, "languages", None)
    return {**fields, "num_languages": len(languages)} if languages else fields


def check_can_generate(model: PreTrainedModel) -> None:
    """Raise CtxError unless the model has a head that writes text."""
    if not hasattr(model, "can_generate") or not model.can_generate():
        raise CtxError(
            f"{type(model).__name__} does not write text.",
            hint="use an encoder-decoder (AutoModelForSeq2SeqLM) or a decoder (AutoModelForCausalLM).",
        )


def target_language_id(
    tokenizer: PreTrainedTokenizerBase, language: str | None, config: PreTrainedConfig
) -> int | None:
    """The number of a target language, or None for none.

    Args:
        tokenizer: With `languages`, if the model writes several.
        language: One of them, as `<de>`.
        config: The model's, with `num_languages` if it writes several.

    Raises:
        CtxError: The model does not write this language.
    """
    if language is None:
        return None
    languages = list(getattr(tokenizer, "languages", ())) if hasattr(config, "num_languages") else []
    if language not in languages:
        raise CtxError(
            f"The model does not write {language!r}.",
            hint=f"use one of {', '.join(languages)}."
            if languages
            else "leave the language out: the model writes one.",
        )
    return languages.index(language)


@dataclass(frozen=True)
class LanguagePair:
    """The languages of what is read and of what is written, for a model with embeddings of both (MASS, XLM).

    Attributes:
        source, target: Names.
        numbers: Their numbers in the model, in this order.
    """

    source: str
    target: str
    numbers: tuple[int, int]

    @classmethod
    def of(
        cls,
        config: PreTrainedConfig,
        source: str | None,
        target: str | None,
        flags: tuple[str, str] = ("source_language", "language"),
    ) -> Self | None:
        """Those of a model; None if it need not be told any.

        Args:
            config: The model's.
            source: Name of the language that is read; None for that of `config.default_lang`. A decoder continues a
                prompt in the language that is written.
            target: Name of the language that is written.
            flags: How both are given, for errors.

        Raises:
            CtxError: One is missing or unknown, or the model's languages have no names.
        """
        if not getattr(config, "embeds_languages", False):
            return None
        known: dict[str, int] = config.lang2id or {}
        untold = source is None and target is None and config.default_lang is not None
        if untold and not known and not config.is_encoder_decoder:
            return None  # the model gives its default to all tokens
        if not known:
            raise CtxError(
                f"The model has embeddings of {config.n_langs} languages, which have no names.",
                hint="name them by config.lang2id, each with its number; a new model of one language has n_langs=1.",
            )
        names = {number: name for name, number in known.items()}
        default = names.get(config.default_lang)
        if not config.is_encoder_decoder:
            target = default if target is None else target
            source = target if source is None else source
        given = (default if source is None else source, target)
        for name, flag, what in zip(given, flags, ("texts that are read", "texts that are written"), strict=True):
            if name not in known:
                raise CtxError(
                    f"The language of {what} is missing." if name is None else f"The model has no language {name!r}.",
                    location=flag,
                    hint=f"use one of {', '.join(known)}.",
                )
        read, written = (str(name) for name in given)
        return cls(read, written, (known[read], known[written]))

    @staticmethod
    def tokenizer_arguments(tokenizer: PreTrainedTokenizerBase, name: str | None) -> dict[str, str]:
        """Keywords with which a tokenizer encodes texts of a language: nothing if it does not ask for it."""
        asks = hasattr(tokenizer, "language_id") and name in tokenizer.languages
        return {"language": str(name)} if asks else {}


def max_input_length(config: PreTrainedConfig) -> int | None:
    """The largest number of tokens that a model has positions for; None for no limit."""
    if hasattr(config, "max_sequence_length"):  # of this package
        return config.max_sequence_length
    return getattr(config, "max_position_embeddings", None)


def max_pair_length(config: PreTrainedConfig) -> int | None:
    """The largest number of tokens of a source and its target together; None where each has positions of its own."""
    return getattr(config, "max_source_target_length", None)


def decode_generated(tokenizer: PreTrainedTokenizerBase, sequences: Iterable[Iterable[int]]) -> list[str]:
    """Texts of ids as `generate` returns them, and of labels: -100 and special tokens are left out."""
    rows = [[int(each) for each in row if int(each) >= 0] for row in sequences]
    if hasattr(tokenizer, "decode_target"):  # of a vocabulary of its own
        return tokenizer.decode_target(rows)
    return [text.strip() for text in tokenizer.batch_decode(rows, skip_special_tokens=True)]
