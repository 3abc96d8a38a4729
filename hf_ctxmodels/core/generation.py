"""What `generate` needs beside a model: its target vocabulary and languages, its limits, and the text of its ids."""

from collections.abc import Iterable
from typing import Any

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
