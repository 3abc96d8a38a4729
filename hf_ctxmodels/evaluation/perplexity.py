"""Perplexity of a causal language model on documents, by windows that overlap."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.evaluation.next_token_loss import (
    predicts_in_any_order,
    predicts_next_tokens,
    sum_next_token_loss,
)
from hf_ctxmodels.heads import IGNORE_INDEX


@dataclass(frozen=True)
class Perplexity:
    """How well a text is predicted.

    Attributes:
        nats: Summed cross-entropy of the predicted tokens.
        tokens: How many these are: all, or all but the first token of a document without a separator.
        words: Words of the documents, separated by white space.
        unknown: Predicted unknown tokens. Each stands for many words at the price of one, so that a model with many has
            a perplexity that is too low.
    """

    nats: float
    tokens: int
    words: int
    unknown: int = 0

    @property
    def per_token(self) -> float:
        """Perplexity per token, comparable between models with one tokenizer."""
        return math.exp(self.nats / self.tokens)

    @property
    def per_word(self) -> float:
        """Perplexity per word, comparable between tokenizers without unknown tokens."""
        return math.exp(self.nats / self.words)


def measure_perplexity(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    documents: Iterable[str],
    *,
    max_length: int | None = None,
    stride: int | None = None,
    batch_size: int = 8,
) -> Perplexity:
    """Predict every token of each document from the tokens before it.

    A document longer than `max_length` is read in windows, each `stride` tokens after the one before; a window scores
    the tokens that no earlier one has scored, each with at least `max_length - stride + 1` tokens before it. With
    stride 1 every token has as many tokens before it as the model can read. The separator, the tokenizer's `eos_token`,
    stands before and after a document unless the tokenizer adds special tokens by itself. XLNet reads and predicts the
    tokens of the text alone, each by its query stream; its factorisation order is that of the text.

    Args:
        model: A causal language model or XLNet; its mode is restored.
        tokenizer: Its tokenizer.
        documents: Texts; those without tokens are skipped.
        max_length: Tokens of a window; None for the model's longest input, or the whole document where there is none.
        stride: Tokens from a window to the next one; None for half a window.
        batch_size: Windows at a time.

    Raises:
        CtxError: The model predicts no token from those before it, the windows do not fit it, or there is no text.
    """
    if not predicts_next_tokens(model):
        raise CtxError(
            f"{type(model).__name__} gives no probability of each token after those before it.",
            hint="open a causal language model that reads from left to right with AutoModelForCausalLM.",
        )
    limit = model.config.max_sequence_length
    length = limit if max_length is None else max_length
    step = stride if stride is not None else None if length is None else max(1, length // 2)
    _check_windows(length, step, limit)
    counts = {"words": 0, "unknown": 0}
    plain = predicts_in_any_order(model)
    windows = _windows(_texts(tokenizer, documents, counts, plain), length, step)
    nats, tokens = sum_next_token_loss(model, windows, batch_size=batch_size, padding=tokenizer.pad_token_id or 0)
    if not tokens or not counts["words"]:
        raise CtxError("There is no text to predict.", hint="check the documents.")
    return Perplexity(nats, tokens, **counts)


def _check_windows(length: int | None, step: int | None, limit: int | None) -> None:
    if length is not None and (length < 1 or (limit is not None and length > limit)):
        raise CtxError(
            f"Windows of {length} tokens do not fit the model.", hint=f"use a max_length from 1 to {limit or 'any'}."
        )
    if step is not None and (step < 1 or (length is not None and step > length)):
        raise CtxError(
            f"A stride of {step} tokens does not fit windows of {length}.", hint="use a stride from 1 to max_length."
        )


def _texts(
    tokenizer: PreTrainedTokenizerBase, documents: Iterable[str], counts: dict[str, int], plain: bool
) -> Iterator[Tensor]:
    """(tokens,) ids of each document, two at least, without special tokens if `plain`; counts words and unknowns."""
    own, end, unknown = tokenizer.num_special_tokens_to_add(), tokenizer.eos_token_id, tokenizer.unk_token_id
    for document in documents:
        ids = tokenizer(document, add_special_tokens=not plain, verbose=False)["input_ids"]
        if not plain and not own and end is not None:
            ids = [end, *ids, end] if ids else []
        if len(ids) > 1:
            counts["words"] += len(document.split())
            counts["unknown"] += 0 if unknown is None or unknown == end else ids[1:].count(unknown)
            yield torch.tensor(ids)


def _windows(texts: Iterable[Tensor], length: int | None, step: int | None) -> Iterator[tuple[Tensor, Tensor]]:
    """(tokens,) ids of each window and the target of each, -100 where an earlier window has scored it."""
    for ids in texts:
        size, stride = len(ids) if length is None else length, len(ids) if step is None else step
        scored = 0  # targets up to this position
        for start in range(0, len(ids) - 1, stride):
            stop = min(start + size, len(ids) - 1)
            targets = ids[start + 1 : stop + 1].clone()
            targets[: scored - start] = IGNORE_INDEX
            yield ids[start:stop], targets
            scored = stop
            if stop == len(ids) - 1:
                break
