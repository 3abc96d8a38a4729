"""Attention maps of any Transformer: of tokens and of words, and their rollout over layers."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from inspect import signature
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.model import CtxPreTrainedModel, evaluation_mode, inspection_mode

_BATCH_SIZE = 8


def attention_maps(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, inputs: Iterable[dict[str, Any]]
) -> Iterator[Tensor]:
    """The attention probabilities of all layers and heads; for an encoder-decoder, of its encoder.

    Args:
        model: A Transformer of this package or of transformers, on any device.
        inputs: Features of the tokenizer for each text, without padding.

    Yields:
        (layers, heads, tokens, tokens) float32 on the CPU; a row is a query, a column a key.

    Raises:
        CtxError: The model has no attention, its layers have different numbers of heads (a pruned model), or weights
            are not finite.
    """
    if not hasattr(model.config, "num_attention_heads"):
        raise CtxError(f"{type(model).__name__} has no attention.", hint="use a Transformer.")
    base: Any = model.base_model
    encoder = base.get_encoder() if "decoder_input_ids" in signature(base.forward).parameters else base
    device = next(base.parameters()).device
    iterator = iter(inputs)
    while batch := list(islice(iterator, _BATCH_SIZE)):
        padded = tokenizer.pad([dict(features) for features in batch], return_tensors="pt", padding=True)
        padded = {name: value.to(device) for name, value in padded.items()}
        with evaluation_mode(model), _eager_attention(model):
            attentions = encoder(**padded, output_attentions=True, return_dict=True).get("attentions")
        if not attentions:
            raise CtxError(f"{type(model).__name__} returns no attention weights.", hint="use a Transformer.")
        if len({layer.shape[1] for layer in attentions}) > 1:
            raise CtxError(
                f"The layers of {type(model).__name__} have different numbers of heads.",
                hint="analyze the model before its heads are pruned.",
            )
        maps = torch.stack(list(attentions), 1).float().cpu()
        for row, token_mask in zip(maps, padded["attention_mask"].bool().cpu(), strict=True):
            attention = row[:, :, token_mask][..., token_mask]
            if not attention.isfinite().all():
                message = f"The attention weights of {type(model).__name__} are not finite."
                raise CtxError(message, hint="use another checkpoint.")
            yield attention


@contextmanager
def _eager_attention(model: PreTrainedModel) -> Iterator[None]:
    if any(isinstance(module, CtxPreTrainedModel) for module in model.modules()):
        with inspection_mode(model):
            yield
        return
    implementation = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(implementation)


def word_attention(attention: Tensor, token_words: np.ndarray | Sequence[int], num_words: int) -> Tensor:
    """Attention between words (Clark et al. 2019, section 4.1): the sum over the tokens of the word that is attended
    to, and the mean over the tokens of the word that attends.

    Args:
        attention: (..., tokens, tokens).
        token_words: (tokens,) index of each token's word, -1 for special tokens.

    Returns:
        (..., words, words), without the attention to special tokens; 0 for words without tokens.
    """
    words = torch.as_tensor(np.asarray(token_words))
    membership = (words[:, None] == torch.arange(num_words)).to(attention)
    counts = membership.sum(0).clamp(min=1)
    return (membership / counts).T @ attention @ membership


def rollout(attention: Tensor) -> Tensor:
    """Attention rollout (Abnar & Zuidema 2020, section 3): how much of each input token's information reaches each
    position of a layer, if half of a state comes from the residual connection.

    Args:
        attention: (layers, heads, tokens, tokens).

    Returns:
        (layers, tokens, tokens); rows sum to 1.
    """
    tokens = attention.shape[-1]
    mixed = attention.mean(1) + torch.eye(tokens, dtype=attention.dtype)
    mixed = mixed / mixed.sum(-1, keepdim=True)
    result = [mixed[0]]
    for layer in mixed[1:]:
        result.append(layer @ result[-1])
    return torch.stack(result)
