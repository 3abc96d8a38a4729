"""Tokens of contexts and of their continuations, as in lm-evaluation-harness (`TemplateLM._encode_pair`), and ends of
generated answers."""

from collections.abc import Sequence, Set
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, StoppingCriteria

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.generation import max_input_length, max_pair_length

_EncodedPair = tuple[Sequence[int], Sequence[int], Sequence[int]]  # fields of `TokenPair` before truncation


class TokenPair(NamedTuple):
    """Tokens of a request.

    Attributes:
        context: Tokens of the context, at least one.
        prefix: Tokens between the start token of a decoder and the continuation; empty for decoder-only models.
        continuation: Tokens to predict, at least one.
        is_truncated: Whether the context was truncated at its beginning.
    """

    context: tuple[int, ...]
    prefix: tuple[int, ...]
    continuation: tuple[int, ...]
    is_truncated: bool = False


class ContinuationEncoder:
    """Encodes pairs of context and continuation.

    Trailing spaces of a context are moved to the continuation. A decoder-only model receives the tokens of the
    concatenated texts, of which the first n are the context if the context alone has n tokens. The context and
    target of an encoder-decoder are encoded separately. Special tokens that the tokenizer adds at the end of a text
    belong to the source of an encoder-decoder only. Special tokens at the beginning of a target (<s> of BART, a
    language) are input of the decoder and are not scored.

    Sequences over the maximum length are truncated on the left.

    Args:
        max_length: Maximum number of tokens of an input, which is source and target together if they share positions;
            None for the model's.
        scores_end: Whether the continuations of an encoder-decoder include the end token.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_length: int | None = None,
        scores_end: bool = False,
    ) -> None:
        self.tokenizer: Any = tokenizer
        self.is_encoder_decoder = bool(model.config.is_encoder_decoder)
        self.max_length = _smallest(max_input_length(model.config), max_length)
        pair_length = max_pair_length(model.config)
        self.max_pair_length = None if pair_length is None else _smallest(pair_length, max_length)
        self.scores_end = scores_end
        self.end_ids = _end_ids(model)
        self._target_end_ids = self.end_ids | {self.tokenizer.eos_token_id, self.tokenizer.sep_token_id} - {None}
        self.start_id = getattr(model.config, "decoder_start_token_id", None)
        probe = self.tokenizer("a", return_special_tokens_mask=True, verbose=False)["special_tokens_mask"]
        self._num_trailing = 0 if self.is_encoder_decoder or 0 not in probe else probe[::-1].index(0)

    def encode_pairs(
        self, requests: Sequence[tuple[str, str]], context_ids: Sequence[Sequence[int]] | None = None
    ) -> list[TokenPair]:
        """Encode requests.

        Args:
            context_ids: Tokens of the contexts; None for the tokens of their texts. The tokens of the continuations
                depend on the texts.

        Raises:
            CtxError: A continuation has no token or too many for the model; or a context has no token, and the
                tokenizer has no token that begins a text.
        """
        pairs = [_move_spaces(context, continuation) for context, continuation in requests]
        contexts = self._encode([context for context, _ in pairs])
        encode = self._encode_targets if self.is_encoder_decoder else self._encode_concatenated
        encoded = encode(pairs, contexts)
        if context_ids is not None:
            encoded = [(ids, prefix, target) for ids, (_, prefix, target) in zip(context_ids, encoded, strict=True)]
        return [self._truncate(*item) for item in zip(requests, encoded, strict=True)]

    def encode_contexts(self, contexts: Sequence[str], num_new_tokens: int) -> tuple[list[tuple[int, ...]], list[bool]]:
        """Encode contexts; they are truncated on the left so that new tokens do not exceed the maximum length. Returns
        their tokens, and whether each was truncated."""
        joint_limit = self.max_pair_length if self.is_encoder_decoder else self.max_length
        limit = self.max_length if joint_limit is None else joint_limit - num_new_tokens
        if limit is not None and limit < 1:
            raise CtxError(
                f"{num_new_tokens} new tokens exceed the maximum length of {joint_limit} tokens.",
                hint="use a smaller max_new_tokens.",
            )
        encoded = self._encode(contexts)
        sequences = [tuple(encoded[context]) or self._first_token(context) for context in contexts]
        if limit is None:
            return sequences, [False] * len(sequences)
        return [ids[-limit:] for ids in sequences], [len(ids) > limit for ids in sequences]

    def _encode(self, texts: Sequence[str]) -> dict[str, list[int]]:
        """Text -> ids without special tokens at the end."""
        distinct = list(dict.fromkeys(texts))
        if not distinct:
            return {}
        encoded = self.tokenizer(distinct, verbose=False)["input_ids"]
        return {text: ids[: len(ids) - self._num_trailing] for text, ids in zip(distinct, encoded, strict=True)}

    def _encode_concatenated(
        self, pairs: Sequence[tuple[str, str]], contexts: dict[str, list[int]]
    ) -> list[_EncodedPair]:
        texts = self._encode([context + continuation for context, continuation in pairs])
        encoded: list[_EncodedPair] = []
        for context, continuation in pairs:
            context_ids: Sequence[int] = contexts[context] if context else ()
            ids = texts[context + continuation][len(context_ids) :]
            if not ids:  # the texts share a token at their boundary
                ids = self.tokenizer(continuation, add_special_tokens=False, verbose=False)["input_ids"]
            if not context_ids:
                context_ids = self._first_token(context)
                ids = ids[1:] if len(ids) > 1 and ids[0] == context_ids[0] else ids
            _check_tokens(ids, context, continuation)
            encoded.append((context_ids, (), ids))
        return encoded

    def _encode_targets(self, pairs: Sequence[tuple[str, str]], contexts: dict[str, list[int]]) -> list[_EncodedPair]:
        distinct = list(dict.fromkeys(continuation for _, continuation in pairs))
        encoded = self.tokenizer(text_target=["", *distinct], verbose=False)["input_ids"] if distinct else [[]]
        empty, targets = encoded[0], dict(zip(distinct, encoded[1:], strict=True))
        num_last = int(bool(empty) and empty[-1] in self._target_end_ids)
        num_first = len(empty) - num_last
        first = empty[:num_first]
        if first and first[0] == self.start_id:
            first = first[1:]
        encoded_pairs: list[_EncodedPair] = []
        for context, continuation in pairs:
            ids = targets[continuation][num_first:]
            _check_tokens(ids[: len(ids) - num_last], context, continuation)
            ids = ids if self.scores_end else ids[: len(ids) - num_last]
            encoded_pairs.append((contexts[context] or self._first_token(context), first, ids))
        return encoded_pairs

    def _truncate(self, request: tuple[str, str], ids: _EncodedPair) -> TokenPair:
        context, prefix, continuation = ids
        limit = self.max_length
        if limit is not None and len(continuation) > limit:
            raise CtxError(
                f"The continuation has {len(continuation)} tokens, above the maximum length of {limit}.",
                location=request[1][:60],
                hint="shorten the continuation.",
            )
        if not self.is_encoder_decoder:
            num_context = None if limit is None else limit + 1 - len(continuation)
        else:
            pair_limit = self.max_pair_length
            num_context = limit if pair_limit is None else pair_limit - len(prefix) - len(continuation)
        num_tokens = len(context)
        if num_context is not None:
            context = context[-max(num_context, 1) :]
        return TokenPair(tuple(context), tuple(prefix), tuple(continuation), len(context) < num_tokens)

    def _first_token(self, context: str) -> tuple[int, ...]:
        """The token that replaces a context without tokens."""
        candidates = (self.tokenizer.bos_token_id, self.tokenizer.eos_token_id)
        token_id = next((token_id for token_id in candidates if token_id is not None), None)
        if token_id is None:
            raise CtxError(
                f"The context {context!r} has no token, and the tokenizer has no token that begins a text.",
                hint="use a context of at least one word.",
            )
        return (token_id,)


def _smallest(*limits: int | None) -> int | None:
    return min((limit for limit in limits if limit is not None), default=None)


def _check_tokens(ids: Sequence[int], context: str, continuation: str) -> None:
    if not ids:
        raise CtxError(
            f"The continuation {continuation!r} has no token.", location=context[-60:], hint="remove the request."
        )


def _move_spaces(context: str, continuation: str) -> tuple[str, str]:
    """Move the spaces at the end of the context to the continuation."""
    stripped = context.rstrip()
    return stripped, context[len(stripped) :] + continuation


def _end_ids(model: PreTrainedModel) -> frozenset[int]:
    end_ids: Any = getattr(model.generation_config, "eos_token_id", None)
    if end_ids is None:
        end_ids = getattr(model.config, "eos_token_id", None)
    return frozenset([] if end_ids is None else [end_ids] if isinstance(end_ids, int) else end_ids)


class StopStrings(StoppingCriteria):
    """Ends answers at strings and at end tokens.

    Attributes:
        prompt_length: Number of columns before the answers in the ids of `generate`.
    """

    def __init__(self, tokenizer: Any, strings: Sequence[str], end_ids: Set[int]) -> None:
        self.tokenizer, self.strings, self.end_ids = tokenizer, tuple(strings), end_ids
        self.prompt_length = 0

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:  # type: ignore[override]
        """(batch,) bool, whether the answers in (batch, length) ids are finished."""
        finished = [self.is_finished(row) for row in input_ids[:, self.prompt_length :].tolist()]
        return torch.tensor(finished, device=input_ids.device)

    def is_finished(self, ids: Sequence[int]) -> bool:
        """Whether generated tokens end with an end token, or contain a string that ends the answer."""
        if ids and ids[-1] in self.end_ids:
            return True
        return bool(self.strings) and self._cut(ids)[1]

    def text(self, ids: Sequence[int]) -> str:
        """The answer of generated tokens."""
        return self._cut(ids)[0].strip()

    def _cut(self, ids: Sequence[int]) -> tuple[str, bool]:
        """The text before the first of the strings, and whether there is one."""
        if hasattr(self.tokenizer, "decode_target"):
            (text,) = self.tokenizer.decode_target([list(ids)])
        else:
            text = self.tokenizer.decode(list(ids), skip_special_tokens=True)
        positions = [position for string in self.strings if (position := text.find(string)) >= 0]
        return (text[: min(positions)], True) if positions else (text, False)
