"""Languages of multilingual models: tags in texts, ids in configurations."""

import re
from dataclasses import dataclass
from typing import Self

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from hf_ctxmodels.core.errors import CtxError

_TAG = re.compile(r"<([^<>\s]+)> ?")


def split_language_tag(text: str) -> tuple[str | None, str]:
    """The language of a text that begins with its tag ("<de> Ein Satz."), or None, and the text without the tag."""
    tag = _TAG.match(text)
    return (None, text) if tag is None else (tag[1], text[tag.end() :])


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
