"""Languages of multilingual models: tags in texts, ids in configurations."""

import re
from dataclasses import dataclass
from typing import Self

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from hf_ctxmodels.core.errors import CtxError

_TAG = re.compile(r"<([^<>\s]+)> ?")


def split_language_tag(text: str) -> tuple[str | None, str]:
    """Split a text with a leading language tag ("<de> Ein Satz.") into language, or None, and text."""
    tag = _TAG.match(text)
    return (None, text) if tag is None else (tag[1], text[tag.end() :])


def target_language_id(
    tokenizer: PreTrainedTokenizerBase, language: str | None, config: PreTrainedConfig
) -> int | None:
    """Id of a target language; None if `language` is None.

    Args:
        tokenizer: Has `languages` if the model generates several.
        language: A tag such as `<de>`.
        config: The model's configuration; has `num_languages` if it generates several.

    Raises:
        CtxError: The model does not generate this language.
    """
    if language is None:
        return None
    languages = list(getattr(tokenizer, "languages", ())) if hasattr(config, "num_languages") else []
    if language not in languages:
        hint = f"use one of {', '.join(languages)}." if languages else "leave the language out: the model has only one."
        raise CtxError(f"The model does not generate {language!r}.", hint=hint)
    return languages.index(language)


@dataclass(frozen=True)
class LanguagePair:
    """Source and target language of a model with language embeddings (MASS, XLM).

    Attributes:
        source, target: Names.
        ids: Ids of source and target.
    """

    source: str
    target: str
    ids: tuple[int, int]

    @classmethod
    def resolve(
        cls,
        config: PreTrainedConfig,
        source: str | None,
        target: str | None,
        flags: tuple[str, str] = ("source_language", "language"),
    ) -> Self | None:
        """Resolve the languages for a model; None if the model does not need them.

        Args:
            config: The model's configuration.
            source: Name of the source language; None for `config.default_lang`. A decoder continues a prompt in its
                target language.
            target: Name of the target language.
            flags: Names of both arguments, for error messages.

        Raises:
            CtxError: A language is missing or unknown, or the languages of the model have no names.
        """
        if not getattr(config, "embeds_languages", False):
            return None
        ids: dict[str, int] = config.lang2id or {}
        uses_default = source is None and target is None and config.default_lang is not None
        if uses_default and not ids and not config.is_encoder_decoder:
            return None  # the model uses its default for all tokens
        if not ids:
            raise CtxError(
                f"The model has embeddings of {config.n_langs} languages without names.",
                hint="set config.lang2id, language name -> id; a new model of one language has n_langs=1.",
            )
        names = {number: name for name, number in ids.items()}
        default = names.get(config.default_lang)
        if not config.is_encoder_decoder:
            target = default if target is None else target
            source = target if source is None else source
        source = default if source is None else source
        for name, flag, role in ((source, flags[0], "source"), (target, flags[1], "target")):
            if name not in ids:
                raise CtxError(
                    f"The {role} language is missing." if name is None else f"The model has no language {name!r}.",
                    location=flag,
                    hint=f"use one of {', '.join(ids)}.",
                )
        return cls(str(source), str(target), (ids[str(source)], ids[str(target)]))

    @staticmethod
    def tokenizer_arguments(tokenizer: PreTrainedTokenizerBase, name: str | None) -> dict[str, str]:
        """Arguments for encoding text in a language; empty for a tokenizer that takes none."""
        takes_language = hasattr(tokenizer, "language_id") and name in tokenizer.languages
        return {"language": str(name)} if takes_language else {}
