"""Sentence vectors of any model: its `pooler_output`, or its pooled token states."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.loading import load_pretrained
from hf_ctxmodels.core.model import CtxPreTrainedModel
from hf_ctxmodels.core.model_modes import evaluation_mode
from hf_ctxmodels.layers.pooling import Pooling, pool_tokens, token_mask
from hf_ctxmodels.tokenizers.base import check_tokenizer_matches_model


class SentenceEncoder(CtxPreTrainedModel):
    """A base model whose `pooler_output` is a sentence vector."""

    def encode(
        self,
        sentences: Sequence[str],
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        batch_size: int = 64,
        normalize: bool = False,
    ) -> Tensor:
        """(sentences, width) vectors; see `encode_sentences`.

        Args:
            sentences: Any number of texts.
            tokenizer: The model's tokenizer; None opens the one that was saved with the model.
            batch_size: Sentences per batch.
            normalize: Scale every vector to length 1.

        Raises:
            CtxError: As there, or no tokenizer is given, nor was one saved with the model.
        """
        if tokenizer is None:
            tokenizer = load_pretrained(AutoTokenizer, self.config.name_or_path, "the model's tokenizer")
        return encode_sentences(self, tokenizer, sentences, batch_size=batch_size, normalize=normalize)


def sentence_vectors(model: PreTrainedModel, inputs: Mapping[str, Tensor], pooling: Pooling | None = None) -> Tensor:
    """(batch, width) vectors of tokenised sentences.

    Args:
        model: A base model.
        inputs: Its inputs.
        pooling: Pooling of the tokens' states; None for the model's `pooler_output`.

    Raises:
        CtxError: The model has no `pooler_output`.
    """
    outputs: Any = model(return_dict=True, **inputs)
    if pooling is not None:
        states = outputs.last_hidden_state
        return pool_tokens(states, token_mask(states, inputs.get("attention_mask")), pooling)
    pooled = getattr(outputs, "pooler_output", None)
    if pooled is None:
        raise CtxError(
            f"{type(model).__name__} has no pooler_output.",
            hint='choose a pooling of its tokens: pooling="mean".',
        )
    return pooled


def encode_sentences(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sentences: Sequence[str],
    *,
    pooling: Pooling | None = None,
    batch_size: int = 64,
    normalize: bool = False,
) -> Tensor:
    """A vector for every sentence, on the model's device, in the given order.

    Batches hold sentences of similar length. The model is in evaluation mode during the call. Longer sentences than the
    model's limit are cut.

    Args:
        model: A base model, as `AutoModel` opens, of any family.
        tokenizer: Its tokenizer.
        sentences: Any number of texts.
        pooling: As in `sentence_vectors`.
        batch_size: Sentences per batch.
        normalize: Scale every vector to length 1.

    Returns:
        (sentences, width).

    Raises:
        CtxError: `sentences` is no list of texts, a sentence has no token, the tokenizer does not fit the model, or the
            model does not pool.

    Example:
        >>> vectors = encode_sentences(model, tokenizer, ["A cat sat.", "It ran."], pooling="mean")
    """
    texts = _checked(sentences)
    if batch_size < 1:
        raise CtxError(f"batch_size={batch_size}, expected 1 or more.")
    check_tokenizer_matches_model(tokenizer, model.config, location=tokenizer.name_or_path or type(tokenizer).__name__)
    if not texts:
        width = encode_sentences(model, tokenizer, ["a"], pooling=pooling).shape[1]
        return torch.zeros(0, width, dtype=model.dtype, device=model.device)
    encoded = tokenise(tokenizer, texts, max_input_length(model, tokenizer))
    lengths = [len(ids) for ids in encoded["input_ids"]]
    order = sorted(range(len(texts)), key=lambda number: lengths[number])
    vectors: dict[int, Tensor] = {}
    with evaluation_mode(model):
        for first in range(0, len(order), batch_size):
            numbers = order[first : first + batch_size]
            batch = tokenizer.pad(
                {name: [values[number] for number in numbers] for name, values in encoded.items()}, return_tensors="pt"
            )
            found = sentence_vectors(model, {name: each.to(model.device) for name, each in batch.items()}, pooling)
            vectors |= dict(zip(numbers, F.normalize(found, dim=1) if normalize else found, strict=True))
    return torch.stack([vectors[number] for number in range(len(texts))])


def tokenise(tokenizer: PreTrainedTokenizerBase, texts: list[str], max_length: int | None) -> dict[str, list[Any]]:
    """The model inputs of every text, without padding; raises CtxError for a text without tokens."""
    cut = {} if max_length is None else {"truncation": True, "max_length": max_length}
    encoded = tokenizer(texts, verbose=False, **cut)
    for number, ids in enumerate(encoded["input_ids"]):
        if not len(ids):
            raise CtxError(f"Sentence {number} (counted from 0) has no word: {texts[number]!r}.", hint="leave it out.")
    return {name: encoded[name] for name in encoded}


def max_input_length(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Maximum number of input tokens; None without a limit."""
    limits = [tokenizer.model_max_length, getattr(model.config, "max_sequence_length", None)]
    found = [limit for limit in limits if limit is not None and 0 < limit < 1_000_000]
    return min(found, default=None)


def _checked(sentences: Sequence[str]) -> list[str]:
    if isinstance(sentences, str):
        raise CtxError("sentences is a single text.", hint="give a list: encode([text]).")
    texts = list(sentences)
    for number, text in enumerate(texts):
        if not isinstance(text, str):
            raise CtxError(f"sentences[{number}] is a {type(text).__name__}, expected a text.")
    return texts
