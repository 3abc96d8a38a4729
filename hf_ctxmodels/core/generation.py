"""Vocabulary, length limits, languages and decoding of models that generate text."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self

from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from hf_ctxmodels.core.errors import CtxError

# Encoders of transformers whose first position is the one after the id of the padding token
_POSITIONS_AFTER_PADDING = {
    *("roberta", "xlm-roberta", "xlm-roberta-xl", "roberta-prelayernorm", "camembert", "data2vec-text", "xmod"),
    *("ibert", "longformer", "mpnet"),
}


def target_vocabulary_config(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Configuration fields of a model that generates in the tokenizer's target vocabulary, if it has one."""
    words = getattr(tokenizer, "target_words", None)
    if words is None:
        return {}
    fields = {
        "target_vocab_size": len(words),
        "decoder_start_token_id": tokenizer.target_start_id,
        "eos_token_id": tokenizer.target_end_id,
    }
    if languages := getattr(tokenizer, "languages", None):
        fields["num_languages"] = len(languages)
        if hasattr(tokenizer, "num_characters"):  # which include the languages of the source
            fields["num_characters"] = tokenizer.num_characters
    return fields


def check_target_vocabulary(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise CtxError unless the tokenizer has a target vocabulary."""
    if getattr(tokenizer, "target_words", None) is None:
        raise CtxError(
            f"{type(tokenizer).__name__} has no target vocabulary.",
            hint="use the tokenizer of a translation family, trained on text with translations: "
            "`hf-ctxmodels data tokenizer --translations`.",
        )


def check_can_generate(model: PreTrainedModel) -> None:
    """Raise CtxError unless the model generates text."""
    if not hasattr(model, "can_generate") or not model.can_generate():
        raise CtxError(
            f"{type(model).__name__} does not generate text.",
            hint="use an encoder-decoder (AutoModelForSeq2SeqLM) or a decoder (AutoModelForCausalLM).",
        )


def max_input_length(config: PreTrainedConfig) -> int | None:
    """Largest number of tokens that a model has positions for; None for no limit."""
    if hasattr(config, "max_sequence_length"):  # a configuration of this package
        return config.max_sequence_length
    limit = getattr(config, "max_position_embeddings", None)
    if limit is None or limit < 1:  # XLNet has -1
        return None
    return limit - config.pad_token_id - 1 if config.model_type in _POSITIONS_AFTER_PADDING else limit


def max_pair_length(config: PreTrainedConfig) -> int | None:
    """Largest total number of tokens of a source and its target; None if their positions are separate."""
    return getattr(config, "max_source_target_length", None)


def max_source_length(config: PreTrainedConfig, num_new_tokens: int) -> int | None:
    """Largest number of tokens of a source or prompt that leaves positions for the tokens to generate; None for no
    limit."""
    pair_length, limit = max_pair_length(config), max_input_length(config)
    if pair_length is not None:
        return pair_length - num_new_tokens
    return limit if limit is None or config.is_encoder_decoder else limit - num_new_tokens


def decode_generated(tokenizer: PreTrainedTokenizerBase, sequences: Iterable[Iterable[int]]) -> list[str]:
    """Decode sequences of ids from `generate`, or labels, without -100 and special tokens."""
    sequences = [[int(token_id) for token_id in sequence if int(token_id) >= 0] for sequence in sequences]
    if hasattr(tokenizer, "decode_target"):  # a separate target vocabulary
        return tokenizer.decode_target(sequences)
    return [text.strip() for text in tokenizer.batch_decode(sequences, skip_special_tokens=True)]


def encode_prompts(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], **arguments: Any) -> list[list[int]]:
    """(tokens,) ids of each prompt of a decoder, without the special tokens at its end."""
    encoded = tokenizer(list(texts), verbose=False, return_special_tokens_mask=True, **arguments)
    sequences = []
    for ids, special_tokens in zip(encoded["input_ids"], encoded["special_tokens_mask"], strict=True):
        stop = len(ids)
        while stop and special_tokens[stop - 1]:
            stop -= 1
        sequences.append(ids[:stop])
    return sequences


_TAG = re.compile(r"<([^<>\s]+)> ?")


def split_language_tag(text: str) -> tuple[str | None, str]:
    """Split a text with a leading language tag ("<de> Ein Satz.") into language, or None, and text."""
    tag = _TAG.match(text)
    return (None, text) if tag is None else (tag[1], text[tag.end() :])


def target_language_id(
    tokenizer: PreTrainedTokenizerBase, language: str | None, config: PreTrainedConfig
) -> int | None:
    """Id of a target language such as "<de>", or None; raises CtxError if the model does not generate it."""
    if language is None:
        return None
    languages = list(getattr(tokenizer, "languages", ())) if hasattr(config, "num_languages") else []
    if language not in languages:
        hint = f"use one of {', '.join(languages)}." if languages else "leave the language out: the model has only one."
        raise CtxError(f"The model does not generate {language!r}.", hint=hint)
    return languages.index(language)


def control_code_id(config: PreTrainedConfig, name: str | None) -> int | None:
    """Token id of a control code, or None; raises CtxError if the model was not trained with it."""
    if name is None:
        return None
    codes: dict[str, int] = getattr(config, "control_codes", None) or {}
    if name not in codes:
        hint = f"use one of {', '.join(codes)}." if codes else "remove it: the model was trained without control codes."
        raise CtxError(f"The model has no control code {name!r}.", location=f"--control {name}", hint=hint)
    return codes[name]


@dataclass(frozen=True)
class LanguagePair:
    """Names and ids of source and target language of a model with language embeddings (MASS, XLM)."""

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

        `source` is `config.default_lang` by default; a decoder continues a prompt in its target language. `flags` are
        the names of both arguments for error messages.

        Raises:
            CtxError: A language is missing or unknown, or the languages of the model have no names.
        """
        if not getattr(config, "needs_languages", False):
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


def padding_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """The id that fills batches: of the padding token, or of the end-of-sequence token, or 0."""
    candidates = (tokenizer.pad_token_id, tokenizer.eos_token_id)
    return next((token_id for token_id in candidates if token_id is not None), 0)
