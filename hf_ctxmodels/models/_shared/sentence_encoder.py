"""Vectors of whole sentences from any model: what it pools itself, or its tokens' states pooled."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.model import CtxPreTrainedModel
from hf_ctxmodels.layers.pooling import Pooling, pool_rows, token_mask
from hf_ctxmodels.tokenizers.base import check_fit


class SentenceEncoder(CtxPreTrainedModel):
    """A base model whose `pooler_output` is made to stand for a sentence."""

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
            tokenizer: The model's own; None opens the one that was saved with it.
            batch_size: Sentences at a time.
            normalize: Scale every vector to length 1.

        Raises:
            CtxError: As there, or no tokenizer is given, nor was one saved with the model.
        """
        if tokenizer is None:
            tokenizer = _own_tokenizer(self)
        return encode_sentences(self, tokenizer, sentences, batch_size=batch_size, normalize=normalize)


def _own_tokenizer(model: PreTrainedModel) -> PreTrainedTokenizerBase:
    source = model.config.name_or_path
    try:
        if not source:
            raise OSError("the model was not opened from anywhere.")
        return AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError) as error:
        raise CtxError(
            f"There is no tokenizer to read the sentences with: {error}",
            location=source or None,
            hint="save the tokenizer beside the model, or give it: model.encode(sentences, tokenizer).",
        ) from error


def sentence_vectors(model: PreTrainedModel, inputs: Mapping[str, Tensor], pooling: Pooling | None = None) -> Tensor:
    """(batch, width) of tokenised sentences.

    Args:
        model: A base model.
        inputs: As its tokenizer makes them.
        pooling: How to pool the states of the tokens; None takes what the model pools itself.

    Raises:
        CtxError: It pools nothing by itself.
    """
    outputs: Any = model(return_dict=True, **inputs)
    if pooling is not None:
        states = outputs.last_hidden_state
        return pool_rows(states, token_mask(states, inputs.get("attention_mask")), pooling)
    pooled = getattr(outputs, "pooler_output", None)
    if pooled is None:
        raise CtxError(
            f"{type(model).__name__} gives no vector for a whole sentence.",
            hint='say how its tokens are pooled: pooling="mean".',
        )
    return pooled


@torch.no_grad()
def encode_sentences(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sentences: Sequence[str],
    *,
    pooling: Pooling | None = None,
    batch_size: int = 64,
    normalize: bool = False,
) -> Tensor:
    """A vector for every sentence, on the model's device, in their order.

    Sentences of about the same length are put together. The model is in evaluation mode meanwhile. What is longer than
    the model's limit is cut.

    Args:
        model: A base model, as `AutoModel` opens, of any family.
        tokenizer: Its own.
        sentences: Any number of texts.
        pooling: As in `sentence_vectors`.
        batch_size: Sentences at a time.
        normalize: Scale every vector to length 1.

    Returns:
        (sentences, width).

    Raises:
        CtxError: `sentences` is a single text or holds something else, a sentence has no token, the tokenizer is
            another model's, or the model does not pool.

    Example:
        >>> vectors = encode_sentences(model, tokenizer, ["A cat sat.", "It ran."], pooling="mean")
    """
    texts = _checked(sentences)
    if batch_size < 1:
        raise CtxError(f"batch_size={batch_size}, expected 1 or more.")
    check_fit(tokenizer, model.config, location=tokenizer.name_or_path or type(tokenizer).__name__)
    if not texts:
        width = encode_sentences(model, tokenizer, ["a"], pooling=pooling).shape[1]
        return torch.zeros(0, width, dtype=model.dtype, device=model.device)
    encoded = tokenise(tokenizer, texts, longest_input(model, tokenizer))
    lengths = [len(ids) for ids in encoded["input_ids"]]
    order = sorted(range(len(texts)), key=lambda number: lengths[number])
    vectors: dict[int, Tensor] = {}
    training = model.training
    model.eval()
    try:
        for first in range(0, len(order), batch_size):
            numbers = order[first : first + batch_size]
            batch = tokenizer.pad(
                {name: [values[number] for number in numbers] for name, values in encoded.items()}, return_tensors="pt"
            )
            found = sentence_vectors(model, {name: each.to(model.device) for name, each in batch.items()}, pooling)
            vectors |= dict(zip(numbers, F.normalize(found, dim=1) if normalize else found, strict=True))
    finally:
        model.train(training)
    return torch.stack([vectors[number] for number in range(len(texts))])


def tokenise(tokenizer: PreTrainedTokenizerBase, texts: list[str], max_length: int | None) -> dict[str, list[Any]]:
    """What a model reads, of every text, without padding.

    Raises:
        CtxError: A text has no token.
    """
    cut = {} if max_length is None else {"truncation": True, "max_length": max_length}
    encoded = tokenizer(texts, verbose=False, **cut)
    for number, ids in enumerate(encoded["input_ids"]):
        if not len(ids):
            raise CtxError(
                f"Sentence {number} (counted from 0) has no word: {texts[number]!r}.", hint="leave it out, or fill it."
            )
    return {name: encoded[name] for name in encoded}


def longest_input(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Tokens that a model reads at most; None where there is no limit."""
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
