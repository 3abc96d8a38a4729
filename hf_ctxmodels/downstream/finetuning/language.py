"""The language of texts, for models that are told it: by language embeddings, or by marks of words."""

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from hf_ctxmodels.core.errors import CtxError


def supported_languages(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The languages that a model has embeddings of, or its tokenizer marks; none for models that are not told."""
    if hasattr(config, "default_lang") and getattr(config, "lang2id", None):
        return list(config.lang2id)
    return list(getattr(tokenizer, "languages", ()))


def set_language(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, language: str, location: str) -> None:
    """Let texts without a tag be in this language.

    Args:
        config: Of the model; its `default_lang` is set where it has language embeddings.
        tokenizer: Its `language` is set where it marks words, or splits them by the rules of their language.
        language: A name.
        location: The flag, for the error.

    Raises:
        CtxError: The model does not know the language, or none.
    """
    known = supported_languages(config, tokenizer)
    if language not in known:
        raise CtxError(
            f"The model has no embedding of the language {language!r}." if known else "The model knows no languages.",
            location=location,
            hint=f"use some of {', '.join(known)}; in `evaluate transfer` as NAME=FILE." if known else "leave it out.",
        )
    if getattr(config, "lang2id", None):
        config.default_lang = config.lang2id[language]  # type: ignore[attr-defined]
    if not getattr(config, "lang2id", None) or getattr(tokenizer, "splits_by_language", False):
        tokenizer.language = language  # type: ignore[attr-defined]
