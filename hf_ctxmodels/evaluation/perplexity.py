"""Perplexity of a causal language model on documents with overlapping windows, and summed next-token cross-entropy."""

import inspect
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_ctxmodels.core.constants import IGNORE_INDEX
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.host_copies import CollatedBatch
from hf_ctxmodels.core.model import evaluation_mode
from hf_ctxmodels.heads import ForCausalLM

_COUNTS = ("words", "unknown", "characters", "bytes")


def is_permutation_lm(model: PreTrainedModel) -> bool:
    """Whether the model is a permutation language model (XLNet), whose inputs name the factorization order."""
    return model.can_generate() and "permutation_order" in inspect.signature(model.forward).parameters


def sum_next_token_loss(
    model: PreTrainedModel, sequences: Iterable[tuple[Tensor, Tensor]], *, batch_size: int, padding: int = 0
) -> tuple[float, int]:
    """Sum the cross-entropy of all targets.

    Args:
        model: A causal language model, or XLNet, whose query stream predicts the tokens from left to right.
        sequences: Pairs of (tokens,) ids and (tokens,) next tokens, -100 where there is no target; the last next token
            is a target.
        batch_size: Sequences per batch, padded to the longest one.
        padding: Token id at padding positions.

    Returns:
        The summed cross-entropy in nats, and the number of targets.
    """
    iterator, total_loss, num_targets = iter(sequences), 0.0, 0
    with evaluation_mode(model):
        while batch := list(islice(iterator, batch_size)):
            input_ids = pad_sequence([ids for ids, _ in batch], batch_first=True, padding_value=padding)
            attention_mask = pad_sequence([torch.ones_like(ids) for ids, _ in batch], batch_first=True)
            targets = pad_sequence([next_ids for _, next_ids in batch], batch_first=True, padding_value=IGNORE_INDEX)
            inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "shift_labels": targets}
            if is_permutation_lm(model):
                # the last target is appended, since the query stream predicts a token at its own position
                lengths = attention_mask.sum(1, keepdim=True)
                input_ids = F.pad(input_ids, (0, 1)).scatter(1, lengths, targets.gather(1, lengths - 1))
                positions = torch.arange(input_ids.shape[1]).expand(input_ids.shape)
                inputs = {"input_ids": input_ids, "attention_mask": F.pad(attention_mask, (1, 0), value=1)}
                inputs |= {"token_type_ids": torch.zeros_like(input_ids), "permutation_order": positions}
                target_positions = positions[:, 1:].masked_fill(targets == IGNORE_INDEX, -1)
                inputs |= {"target_positions": target_positions, "labels": targets}
            inputs = CollatedBatch(inputs).to(model.device)
            loss = model(**inputs, return_logits=False).loss
            count = int((targets != IGNORE_INDEX).sum())
            total_loss, num_targets = total_loss + float(loss) * count, num_targets + count
    return total_loss, num_targets


def perplexity_from_nats(nats: float) -> float:
    """exp(nats), at most e^700: the words of a text without spaces, as in Chinese, are as long as sentences."""
    return math.exp(min(nats, 700.0))


@dataclass(frozen=True)
class Perplexity:
    """Summed cross-entropy (nats) of a text, and the numbers of predicted tokens, of words separated by white space,
    of predicted unknown tokens, of characters and of bytes in UTF-8. Many unknown tokens make the perplexity too low,
    since one token stands for many words."""

    nats: float
    tokens: int
    words: int
    unknown: int = 0
    characters: int = 0
    bytes: int = 0

    @property
    def per_token(self) -> float:
        """Perplexity per token, comparable between models with the same tokenizer."""
        return perplexity_from_nats(self.nats / self.tokens)

    @property
    def per_word(self) -> float:
        """Perplexity per word, comparable between tokenizers without unknown tokens; at most e^700."""
        return perplexity_from_nats(self.nats / max(self.words, 1))

    @property
    def bits_per_character(self) -> float:
        """Cross-entropy in bits per character of the text, as reported for text8; comparable as `per_word`."""
        return self.nats / math.log(2) / self.characters

    @property
    def bits_per_byte(self) -> float:
        """Cross-entropy in bits per byte of the text in UTF-8, reported as bits per character for enwik8."""
        return self.nats / math.log(2) / self.bytes


def measure_perplexity(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    documents: Iterable[str],
    *,
    max_length: int | None = None,
    stride: int | None = None,
    batch_size: int = 8,
) -> Perplexity:
    """Predict every token of the documents from its left context.

    A document longer than `max_length` is split into windows whose starts are `stride` tokens apart. A window scores
    the tokens that no earlier window has scored; each has at least `max_length - stride + 1` tokens of context. The
    tokenizer's `eos_token` separates documents unless the tokenizer adds special tokens itself. XLNet predicts only the
    tokens of the text, with its query stream, in left-to-right factorization order.

    Args:
        model, tokenizer: A causal language model or XLNet, and its tokenizer.
        documents: Texts; those without tokens are skipped.
        max_length: Tokens per window; None for the longest input of the model, or the whole document.
        stride: Tokens between the starts of two windows; None for half a window.

    Raises:
        CtxError: The model is not a left-to-right language model, the windows do not fit it, or there is no text.
    """
    if not (isinstance(model, ForCausalLM) and not model.is_backward) and not is_permutation_lm(model):
        raise CtxError(
            f"{type(model).__name__} does not predict tokens from their left context.",
            hint="open a left-to-right language model with AutoModelForCausalLM.",
        )
    limit = model.config.max_sequence_length
    length = limit if max_length is None else max_length
    if stride is None and length is not None:
        stride = max(1, length // 2)
    if length is not None and (length < 1 or (limit is not None and length > limit)):
        maximum = "" if limit is None else f" and at most {limit}"
        raise CtxError(
            f"Windows of {length} tokens do not fit the model.", hint=f"use a max_length of at least 1{maximum}."
        )
    if stride is not None and (stride < 1 or (length is not None and stride > length)):
        raise CtxError(
            f"A stride of {stride} tokens does not fit windows of {length}.", hint="use a stride from 1 to max_length."
        )
    counts = dict.fromkeys(_COUNTS, 0)
    adds_special_tokens = not is_permutation_lm(model)
    windows = _windows(_encoded_documents(tokenizer, documents, counts, adds_special_tokens), length, stride)
    nats, tokens = sum_next_token_loss(model, windows, batch_size=batch_size, padding=tokenizer.pad_token_id or 0)
    if not tokens or not counts["words"]:
        raise CtxError("The documents have no text to predict.", hint="check the documents.")
    return Perplexity(nats, tokens, **counts)


@dataclass(frozen=True)
class RunningText:
    """The (tokens,) ids of documents as one text, and its `counts`, see `Perplexity`."""

    ids: Tensor
    counts: dict[str, int]

    @classmethod
    def tokenize(cls, tokenizer: PreTrainedTokenizerBase, documents: Iterable[str]) -> Self:
        """Tokenize documents; raises CtxError if they have no text."""
        counts = dict.fromkeys(_COUNTS, 0)
        ids = torch.cat([torch.empty(0, dtype=torch.long), *_encoded_documents(tokenizer, documents, counts, True)])
        if len(ids) < 2:
            raise CtxError("The documents have no text to predict.", hint="check the documents.")
        return cls(ids, counts)


def measure_perplexity_with_memory(
    model: PreTrainedModel,
    text: RunningText,
    *,
    memory_length: int,
    segment_length: int = 64,
    batch_size: int = 8,
    clamp_len: int | None = None,
    same_length: bool | None = None,
) -> Perplexity:
    """Predict the tokens of running text in segments, with a memory of the preceding ones (Dai et al. 2019, section 4).

    The first token of the text is not predicted. The text is split into `batch_size` contiguous streams, the examples
    of a batch; the first segments of a stream have less memory.

    Args:
        model: A causal language model with a memory (Transformer-XL).
        text: The text, tokenized by the tokenizer of the model.
        memory_length: States of the memory, which may exceed the length in training; 0 for none.
        segment_length: Tokens that are read at the same time.
        clamp_len: Distances are clamped to this value, -1 for no limit; None for the value of the configuration. The
            paper evaluates with memories that are longer than in training, and clamps to the distances seen there.
        same_length: Whether a token attends to at most `memory_length` keys; None for the value of the configuration.

    Raises:
        CtxError: The model has no memory, or a length is too small.
    """
    if not isinstance(model, ForCausalLM) or "mems" not in getattr(model, "state_outputs", ()):
        raise CtxError(
            f"{type(model).__name__} has no memory.", location="memory_length", hint="use windows: omit memory_length."
        )
    if segment_length < 1 or memory_length < 0:
        raise CtxError(
            f"Segments of {segment_length} tokens and a memory of {memory_length} states.",
            hint="use segments of 1 or more, and a memory of 0 or more.",
        )
    num_targets = len(text.ids) - 1
    size = -(-num_targets // batch_size)
    streams = [text.ids[start : start + size + 1] for start in range(0, num_targets, size)]
    rows = pad_sequence(streams, batch_first=True, padding_value=IGNORE_INDEX)
    nats, fields = 0.0, {"mem_len": memory_length, "clamp_len": clamp_len, "same_length": same_length}
    changes = {name: value for name, value in fields.items() if value is not None}
    saved_fields = {name: getattr(model.config, name) for name in changes}
    try:
        for name, value in changes.items():
            setattr(model.config, name, value)
        with evaluation_mode(model):
            mems = None
            for start in range(0, rows.shape[1] - 1, segment_length):
                remaining = rows[:, start + 1] != IGNORE_INDEX  # a stream may be shorter than the others
                if not remaining.all():
                    rows = rows[remaining]
                    mems = None if mems is None else tuple(memory[remaining.to(memory.device)] for memory in mems)
                segment = rows[:, start : start + segment_length + 1]
                input_ids, targets = segment[:, :-1].clamp(min=0), segment[:, 1:]
                is_target = targets != IGNORE_INDEX
                inputs = {"input_ids": input_ids, "shift_labels": targets, "attention_mask": is_target.long()}
                batch = CollatedBatch(inputs).to(model.device)
                outputs = model(**batch, mems=mems, use_mems=memory_length > 0, return_logits=False)
                nats, mems = nats + float(outputs.loss) * int(is_target.sum()), outputs.mems
    finally:
        for name, value in saved_fields.items():
            setattr(model.config, name, value)
    return Perplexity(nats, num_targets, **text.counts)


def _encoded_documents(
    tokenizer: PreTrainedTokenizerBase, documents: Iterable[str], counts: dict[str, int], adds_special_tokens: bool
) -> Iterator[Tensor]:
    """Yield the (tokens,) ids of documents with at least two tokens; add to `counts`, see `Perplexity`."""
    tokenizer_adds_tokens = bool(tokenizer.num_special_tokens_to_add())
    eos_id, unknown_id = tokenizer.eos_token_id, tokenizer.unk_token_id
    for document in documents:
        ids = tokenizer(document, add_special_tokens=adds_special_tokens, verbose=False)["input_ids"]
        if adds_special_tokens and not tokenizer_adds_tokens and eos_id is not None:
            ids = [eos_id, *ids, eos_id] if ids else []
        if len(ids) > 1:
            counts["words"] += len(document.split())
            counts["characters"] += len(document)
            counts["bytes"] += len(document.encode("utf-8", "replace"))
            counts["unknown"] += 0 if unknown_id is None or unknown_id == eos_id else ids[1:].count(unknown_id)
            yield torch.tensor(ids)


def _windows(documents: Iterable[Tensor], length: int | None, stride: int | None) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the (tokens,) ids of each window and their next tokens, -100 where an earlier window has scored them."""
    for ids in documents:
        window_length = len(ids) if length is None else length
        num_scored = 0
        for start in range(0, len(ids) - 1, len(ids) if stride is None else stride):
            stop = min(start + window_length, len(ids) - 1)
            targets = ids[start + 1 : stop + 1].clone()
            targets[: num_scored - start] = IGNORE_INDEX
            yield ids[start:stop], targets
            num_scored = stop
            if stop == len(ids) - 1:
                break
