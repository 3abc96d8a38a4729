"""Vocabulary, length limits and decoding of models that generate text."""

from collections.abc import Iterable
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from hf_ctxmodels.core.errors import CtxError


def target_vocabulary_config(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Configuration fields of a model that generates in the tokenizer's target vocabulary.

    These are the size of the vocabulary, the decoder's first input, the end of a target, and the number of languages
    if the tokenizer lists `languages`. Empty for a tokenizer without a target vocabulary.
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
    """Raise CtxError unless the model has a head that generates text."""
    if not hasattr(model, "can_generate") or not model.can_generate():
        raise CtxError(
            f"{type(model).__name__} does not generate text.",
            hint="use an encoder-decoder (AutoModelForSeq2SeqLM) or a decoder (AutoModelForCausalLM).",
        )


def max_input_length(config: PreTrainedConfig) -> int | None:
    """Largest number of tokens that a model has positions for; None for no limit."""
    if hasattr(config, "max_sequence_length"):  # a configuration of this package
        return config.max_sequence_length
    return getattr(config, "max_position_embeddings", None)


def max_pair_length(config: PreTrainedConfig) -> int | None:
    """Largest total number of tokens of a source and its target; None if their positions are separate."""
    return getattr(config, "max_source_target_length", None)


def decode_generated(tokenizer: PreTrainedTokenizerBase, sequences: Iterable[Iterable[int]]) -> list[str]:
    """Decode sequences of ids from `generate`, or labels, without -100 and special tokens."""
    sequences = [[int(token_id) for token_id in sequence if int(token_id) >= 0] for sequence in sequences]
    if hasattr(tokenizer, "decode_target"):  # a separate target vocabulary
        return tokenizer.decode_target(sequences)
    return [text.strip() for text in tokenizer.batch_decode(sequences, skip_special_tokens=True)]
