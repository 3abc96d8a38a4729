"""Encoder-decoders from two checkpoints, for fine-tuning."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from hf_ctxmodels.architectures.configurations import CtxLSTMLanguageModelConfig
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.models.encoder_decoder import CtxEncoderDecoderConfig, CtxEncoderDecoderForConditionalGeneration
from hf_ctxmodels.models.encoder_decoder.modeling_encoder_decoder import pair_config, target_token_ids
from hf_ctxmodels.models.lmseq2seq import CtxLmSeq2SeqForConditionalGeneration, CtxLmSeq2SeqTokenizer
from hf_ctxmodels.training.model_loading import change_config, load_config, load_tokenizer, new_model, verify_weights


def load_pair(
    encoder: str, decoder: str, share_weights: bool, changes: Mapping[str, Any]
) -> tuple[PreTrainedConfig, PreTrainedTokenizerBase]:
    """The configuration and the tokenizer of an encoder-decoder from two checkpoints, directories or Hub ids.

    Two LSTM language models become a `CtxLmSeq2SeqForConditionalGeneration`, other models a
    `CtxEncoderDecoderForConditionalGeneration`.

    Args:
        share_weights: Whether the decoder shares the encoder's weights.
        changes: Fields of the configuration; for Transformers, of the configurations of both models.

    Raises:
        CtxError: A checkpoint cannot be loaded, the models cannot be combined, or their vocabularies differ.
    """
    location = f"--model {encoder} --decoder {'shared' if share_weights else f'separate:model={decoder}'}"
    if isinstance(load_config(encoder), CtxLSTMLanguageModelConfig):
        if share_weights:
            raise CtxError(
                "LSTM language models do not share weights.",
                location=location,
                hint="use --decoder separate:model=DIR.",
            )
        recurrent = CtxLmSeq2SeqForConditionalGeneration.from_pretrained_pair(encoder, decoder, **changes)
        return recurrent.config, CtxLmSeq2SeqTokenizer.from_pretrained_pair(encoder, decoder)
    tokenizer, target_tokenizer = load_tokenizer(encoder), load_tokenizer(decoder)
    if tokenizer.get_vocab() != target_tokenizer.get_vocab():
        raise CtxError(
            f"The tokenizers of {encoder} ({len(tokenizer):,} tokens) and {decoder} ({len(target_tokenizer):,} tokens) "
            "differ, but the command reads and generates with one tokenizer.",
            location=location,
            hint="use two models that were trained with the same tokenizer, or train in Python with "
            "CtxEncoderDecoderForConditionalGeneration.from_pretrained_pair.",
        )
    config = pair_config(encoder, decoder, share_weights=share_weights, **target_token_ids(tokenizer))
    for side, source in ((config.encoder, encoder), (config.decoder, decoder)):
        change_config(side, changes, source)
    return config, tokenizer


def open_pair(encoder: str, decoder: str, config: PreTrainedConfig) -> PreTrainedModel:
    """The encoder-decoder of a configuration of `load_pair`, with the weights of both checkpoints; raises CtxError if
    they cannot be loaded."""
    for source in (encoder, decoder):
        verify_weights(Path(source))
    if not isinstance(config, CtxEncoderDecoderConfig):
        return new_model("AutoModelForSeq2SeqLM", config)
    return CtxEncoderDecoderForConditionalGeneration.from_pretrained_pair(encoder, decoder, config=config)
