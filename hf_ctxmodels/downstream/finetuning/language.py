"""The language of the input, for models with language embeddings and tokenizers with language marks."""

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from hf_ctxmodels.core.errors import CtxError


def supported_languages(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The languages that a model has embeddings of, or that its tokenizer marks; empty for other models."""
    if hasattr(config, "default_lang") and getattr(config, "lang2id", None):
        return list(config.lang2id)
    return list(getattr(tokenizer, "languages", ()))


def set_language(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, language: str, location: str) -> None:
    """Set the language of input without a language tag.

    Args:
        config: The model's configuration; its `default_lang` is set if the model has language embeddings.
        tokenizer: Its `language` is set if it marks words, or splits them by the rules of a language.
        language: Name of the language.
        location: The flag, for the error.

    Raises:
        CtxError: The model does not support the language.
    """
    languages = supported_languages(config, tokenizer)
    if language not in languages:
        raise CtxError(
            f"The model has no embedding of the language {language!r}."
            if languages
            else "The model does not distinguish languages.",
            location=location,
            hint=f"use one of {', '.join(languages)}." if languages else "remove it.",
        )
    if getattr(config, "lang2id", None):
        config.default_lang = config.lang2id[language]  # type: ignore[attr-defined]
    if not getattr(config, "lang2id", None) or getattr(tokenizer, "splits_by_language", False):
        tokenizer.language = language  # type: ignore[attr-defined]
