"""Saving of a converted model and its tokenizer."""

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_ctxmodels.core.output_files import MODEL_FILES, TOKENIZER_FILES, check_output_directory, wrap_write_errors
from hf_ctxmodels.tokenizers.base import record_tokenizer_digest


def check_output_free(directory: str, overwrite: bool) -> None:
    """Raise CtxError if the output directory contains a model and `overwrite` is False."""
    check_output_directory(directory, (*MODEL_FILES, *TOKENIZER_FILES), flag="--output", overwrite=overwrite)


def save_converted_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, directory: str) -> None:
    """Save model and tokenizer; the configuration records the tokenizer's digest."""
    record_tokenizer_digest(model.config, tokenizer)
    with wrap_write_errors(directory):
        model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)
