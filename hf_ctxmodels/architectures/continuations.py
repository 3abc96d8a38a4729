"""Log-likelihoods of continuations of contexts, and greedy answers: the evaluation of language models by prompts.

Brown et al. 2020, section 2.4: a task is a prompt, and its choices are compared by the likelihood of each as the
continuation of the prompt. The requests of a task share long prefixes: the examples in the prompt, and the context of
all choices. The scorer computes a shared prefix once; its keys and values, or recurrent states, serve all requests.

Texts are tokenized as in lm-evaluation-harness, and the scores equal its `hf` model's.
"""

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_ctxmodels.architectures.continuation_batches import NodeBatch, pad_rows, select_cache, select_rows, tree_mask
from hf_ctxmodels.architectures.continuation_encoding import ContinuationEncoder, StopStrings, TokenPair
from hf_ctxmodels.architectures.prefix_trees import PrefixNode, Target, TokenRow, pack_trees, prefix_trees
from hf_ctxmodels.core.caches import RecurrentCache
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import check_range
from hf_ctxmodels.core.generation import padding_id
from hf_ctxmodels.core.host_copies import CollatedBatch
from hf_ctxmodels.core.model import evaluation_mode
from hf_ctxmodels.heads.base import HeadModel
from hf_ctxmodels.heads.causal_lm import ForCausalLM
from hf_ctxmodels.heads.seq2seq import Seq2SeqHead
from hf_ctxmodels.layers.attention.masks import CAUSAL
from hf_ctxmodels.layers.cpu.linear import prepacked_weights

# Memory of a batch: keys and values of this many tokens per token of the batch, and this many logits.
CACHED_TOKENS_PER_TOKEN = 4
MAX_LOGITS = 2**26
# Trees after the same cached tokens are packed to rows of at most this length: the cache is copied once for each row.
MAX_TREE_TOKENS = 256

Value = TypeVar("Value")


@dataclass(frozen=True)
class ContinuationScore:
    """Likelihood of a continuation given its context.

    Attributes:
        log_probability: Sum over the tokens of the continuation, in nats.
        num_tokens: Tokens of the continuation.
        num_bytes: UTF-8 bytes of the continuation, as it was passed.
        is_greedy: Whether each token is the most probable one.
        is_truncated: Whether the context was truncated at its beginning.
    """

    log_probability: float
    num_tokens: int
    num_bytes: int
    is_greedy: bool
    is_truncated: bool = False


class GreedyAnswer(NamedTuple):
    """Continuation of a context by the most probable tokens.

    Attributes:
        text: The answer, without special tokens and spaces at its ends.
        is_truncated: Whether the context was truncated at its beginning.
    """

    text: str
    is_truncated: bool = False


class ContinuationScorer:
    """Scores continuations of contexts, each as if it were the only one.

    Neither the other requests, nor their order, nor the batches change a score beyond rounding.

    - Decoders: the context and the continuation are one sequence. Prefixes that several requests share are computed
      once, unless the model has no keys and values of all tokens (sliding windows, state-space models of transformers)
      or takes no `position_ids`.
    - Decoders trained as prefix language models (`config.prefix_lm`): the context is the prefix, which is encoded once
      for all of its continuations; contexts share nothing.
    - Encoder-decoders and other prefix language models (UniLM, ERNIE-GEN): the context is the source, which is encoded
      once for all of its continuations, and the continuation is the target.

    Args:
        model: A model of this package or of transformers with a causal or sequence-to-sequence head.
        tokenizer: Its tokenizer.
        batch_tokens: Maximum number of tokens of a batch, padding included; a longer sequence is a separate batch.
        max_length: Maximum number of tokens of an input, whose beginning is truncated; None for the model's. In a model
            in which source and target share positions (UniLM, ERNIE-GEN), of both together.
        scores_end: Whether the continuations of an encoder-decoder include the end token. lm-evaluation-harness omits
            it; with it, the probabilities of all targets sum to 1.

    Raises:
        CtxError: The model does not predict texts from left to right, or a number is too small.

    Example:
        >>> scorer = ContinuationScorer(model, tokenizer)
        >>> scores = scorer.score([("It was great. Sentiment:", label) for label in (" positive", " negative")])
        >>> max(scores, key=lambda score: score.log_probability)
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        batch_tokens: int = 2048,
        max_length: int | None = None,
        scores_end: bool = False,
    ) -> None:
        check_range({"batch_tokens": batch_tokens, "max_length": max_length}, at_least=1)
        _check_model(model)
        self.model: Any = model
        self.tokenizer: Any = tokenizer
        self.batch_tokens = batch_tokens
        self._encoder = ContinuationEncoder(model, tokenizer, max_length=max_length, scores_end=scores_end)
        self._parameters = inspect.signature(model.forward).parameters
        self._vocab_size = model.config.get_text_config(decoder=True).vocab_size

    def score(
        self, requests: Sequence[tuple[str, str]], context_ids: Sequence[Sequence[int]] | None = None
    ) -> list[ContinuationScore]:
        """Score (context, continuation) pairs, in their order.

        Args:
            requests: The pairs.
            context_ids: Tokens of each context, if the caller has truncated them; None to tokenize the texts.

        Raises:
            CtxError: A continuation has no token or more than the model has positions, or a context has no token and
                the tokenizer none that begins a text.
        """
        pairs = self._encoder.encode_pairs(requests, context_ids)
        batches = self._seq2seq_batches(pairs) if self.model.config.is_encoder_decoder else self._causal_batches(pairs)
        log_probabilities = np.zeros(len(pairs))
        is_greedy = np.ones(len(pairs), dtype=bool)
        with evaluation_mode(self.model), prepacked_weights(getattr(self.model, "prepacked_bytes", 0)):
            for batch in batches:
                indices, values, is_best = batch.predictions()
                np.add.at(log_probabilities, indices, values)
                np.logical_and.at(is_greedy, indices, is_best)
        return [
            ContinuationScore(
                float(value), len(pair.continuation), len(continuation.encode()), bool(greedy), pair.is_truncated
            )
            for value, greedy, pair, (_, continuation) in zip(
                log_probabilities, is_greedy, pairs, requests, strict=True
            )
        ]

    def greedy_answers(
        self, contexts: Sequence[str], *, until: Sequence[str] = (), max_new_tokens: int = 64
    ) -> list[GreedyAnswer]:
        """Continue contexts by the most probable tokens, up to an end token or the first of the strings `until`.

        An answer does not depend on the other contexts.

        Args:
            contexts: Prompts, or sources of an encoder-decoder; truncated on the left as in `score`.
            until: Strings that end an answer, such as a line break; they do not belong to the answer.
            max_new_tokens: Tokens of the longest answer.

        Raises:
            CtxError: The new tokens exceed the maximum length, or a context has no token and the tokenizer none that
                begins a text.
        """
        check_range({"max_new_tokens": max_new_tokens}, at_least=1)
        if "" in until:
            raise CtxError("An empty string cannot end an answer.", hint="remove it from until.")
        encoded, is_truncated = self._encoder.encode_contexts(contexts, max_new_tokens)
        stop = StopStrings(self.tokenizer, until, self._encoder.end_ids)
        answer = self._answer_sources if self.model.config.is_encoder_decoder else self._answer_prompts
        answers: dict[int, str] = {}
        with evaluation_mode(self.model), prepacked_weights(getattr(self.model, "prepacked_bytes", 0)):
            answers.update(answer(encoded, stop, max_new_tokens))
        return [GreedyAnswer(answers[index], is_truncated[index]) for index in range(len(contexts))]

    # decoders

    def _causal_batches(self, pairs: Sequence[TokenPair]) -> Iterator[NodeBatch]:
        if self._is_prefix_lm:
            nodes = _context_trees(pairs)
        else:
            rows = [
                TokenRow(_row([*pair.context, *pair.continuation][:-1]), pair.continuation, index)
                for index, pair in enumerate(pairs)
            ]
            nodes = prefix_trees(rows, shares_prefixes=self.reuses_prefixes)
        yield from self._run_nodes([(node, 0) for node in nodes])

    @property
    def _is_prefix_lm(self) -> bool:
        """Whether the tokens of a context attend to one another in both directions, so that contexts share nothing."""
        return isinstance(self.model, ForCausalLM) and getattr(self.model.config, "prefix_lm", False)

    def _answer_prompts(
        self, prompts: Sequence[tuple[int, ...]], stop: StopStrings, max_new_tokens: int
    ) -> Iterator[tuple[int, str]]:
        """Indices and answers of prompts."""
        rows = [TokenRow(_row(ids), (), index) for index, ids in enumerate(prompts)]
        trees = prefix_trees(rows, shares_prefixes=self.reuses_prefixes and not self._is_prefix_lm)
        if not self.reuses_prefixes:
            yield from self._generate(trees, stop, max_new_tokens)
            return
        for batch in self._run_nodes([(node, 0) for node in trees], num_new_tokens=max_new_tokens):
            ends = [(row, node) for row, node in enumerate(batch.nodes) if node.requests]
            if not ends:
                continue
            last_rows = torch.tensor([row for row, _ in ends])
            columns = torch.tensor([len(node.ids) - 1 - batch.first_column for _, node in ends])
            logits = batch.logits[last_rows.to(batch.logits.device), columns.to(batch.logits.device)]
            cache = select_cache(batch.cache, last_rows)
            assert batch.mask is not None
            texts = self._continue_greedily(logits, cache, batch.mask[last_rows], stop, max_new_tokens)
            for (_, node), text in zip(ends, texts, strict=True):
                yield from ((request, text) for request in node.requests)

    def _continue_greedily(
        self, logits: Tensor, cache: Any, mask: Tensor, stop: StopStrings, max_new_tokens: int
    ) -> list[str]:
        """Answers after (batch, vocabulary) logits of the last tokens of prompts."""
        answers: list[list[int]] = [[] for _ in range(len(logits))]
        active = torch.arange(len(logits))
        for step in range(max_new_tokens):
            token_ids = logits.argmax(-1).cpu()
            for row, token_id in zip(active.tolist(), token_ids.tolist(), strict=True):
                answers[row].append(token_id)
            is_unfinished = torch.tensor([not stop.is_finished(answers[row]) for row in active.tolist()])
            if step == max_new_tokens - 1 or not is_unfinished.any():
                break
            if not is_unfinished.all():
                (rows,) = is_unfinished.nonzero(as_tuple=True)
                active, token_ids, mask, cache = active[rows], token_ids[rows], mask[rows], select_cache(cache, rows)
            mask = F.pad(mask, (0, 1), value=1)
            logits, cache = self._run_decoder(token_ids[:, None], mask, cache, 1, True)
            logits = logits[:, -1]
        return [stop.text(ids) for ids in answers]

    @property
    def reuses_prefixes(self) -> bool:
        """Whether the model computes tokens after cached tokens, with padding between them."""
        if isinstance(self.model, ForCausalLM):
            return True
        config = self.model.config.get_text_config(decoder=True)
        layer_types = set(getattr(config, "layer_types", None) or ["full_attention"])
        return (
            layer_types == {"full_attention"}
            and not getattr(config, "sliding_window", None)
            and not getattr(self.model, "_is_stateful", False)
            and {"position_ids", "attention_mask", "past_key_values"} <= self._parameters.keys()
        )

    def _run_nodes(
        self,
        nodes: Sequence[tuple[PrefixNode, int]],
        cache: Any = None,
        past_mask: Tensor | None = None,
        *,
        num_new_tokens: int = 0,
    ) -> Iterator[NodeBatch]:
        """Compute nodes and their descendants.

        Args:
            nodes: Nodes and the rows of their parents in the cache.
            cache, past_mask: Cache of the tokens before the nodes, and their (rows, length) mask; None for no tokens.
            num_new_tokens: Tokens to be generated after the nodes with requests. All batches then have a cache.
        """
        past_length = 0 if past_mask is None else past_mask.shape[1]
        limit = self._encoder.max_length
        limit = None if limit is None else limit - num_new_tokens
        if past_length and not num_new_tokens and self._accepts_tree_masks:
            num_free = MAX_TREE_TOKENS if limit is None else min(MAX_TREE_TOKENS, limit - past_length)
            nodes = pack_trees(nodes, num_free)
        for batch in self._split(nodes, past_length, limit):
            batch_nodes, parents = [node for node, _ in batch], torch.tensor([row for _, row in batch])
            ids, mask = pad_rows([node.ids for node in batch_nodes], padding_id(self.tokenizer))
            past = None
            if past_mask is not None:
                past = select_cache(cache, parents)
                mask = torch.cat([past_mask[parents], mask], 1)
            width = ids.shape[1]
            num_logits = width - min(node.first_target for node in batch_nodes)
            needs_cache = num_new_tokens > 0 or any(node.children for node in batch_nodes)
            layouts = [node.layout for node in batch_nodes]
            tree = None if not any(layouts) else tree_mask(layouts, mask, width)
            logits, new_cache = self._run_decoder(ids, mask, past, num_logits, needs_cache, tree)
            yield NodeBatch(batch_nodes, logits, width - num_logits, new_cache, mask)
            children = [(child, row) for row, node in enumerate(batch_nodes) for child in node.children]
            if children:
                del logits
                yield from self._run_nodes(children, new_cache, mask, num_new_tokens=num_new_tokens)

    @property
    def _accepts_tree_masks(self) -> bool:
        """Whether an attention mask and positions can describe several continuations in one row."""
        if self.model.config._attn_implementation != "sdpa" or "position_ids" not in self._parameters:
            return False
        if not isinstance(self.model, ForCausalLM):
            return not getattr(self.model.config, "alibi", False)  # its biases follow the order of the columns
        decoder = self.model.base_model
        has_positions = not getattr(decoder, "has_relative_positions", True)
        return decoder.accepts_4d_masks and has_positions and decoder.mask_specs() == CAUSAL

    def _run_decoder(
        self,
        ids: Tensor,
        mask: Tensor,
        past: Any,
        num_logits: int,
        returns_cache: bool,
        tree: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Any]:
        """Run a decoder.

        Args:
            ids, mask: (batch, length) ids and (batch, past + length) mask.
            past: Cache of the tokens before the ids; None for none.
            num_logits: Number of last columns whose logits are returned.
            returns_cache: Whether to return the extended cache; None otherwise.
            tree: (batch, 1, length, past + length) mask and (batch, length) positions of rows that are trees.
        """
        length = ids.shape[1]
        inputs: dict[str, Any] = {"input_ids": ids, "use_cache": returns_cache or past is not None}
        if tree is not None:
            inputs["attention_mask"], inputs["position_ids"] = tree
        elif isinstance(self.model, ForCausalLM):
            inputs["attention_mask"] = mask[:, -length:] if isinstance(past, RecurrentCache) else mask
            if past is None and self._is_prefix_lm:
                inputs["prefix_mask"] = mask
        elif past is not None:  # without a cache, tokens do not attend to the padding on their right
            inputs |= {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1)[:, -length:].clamp(min=0)}
        if past is not None:
            inputs["past_key_values"] = past
        if "logits_to_keep" in self._parameters:
            inputs["logits_to_keep"] = num_logits
        outputs = self.model(**CollatedBatch(inputs).to(self.model.device))
        return outputs.logits[:, -num_logits:], outputs.get("past_key_values") if returns_cache else None

    # encoder-decoders

    def _seq2seq_batches(self, pairs: Sequence[TokenPair]) -> Iterator[NodeBatch]:
        start_id = self._start_id()
        rows_by_source: dict[tuple[int, ...], list[TokenRow]] = {}
        for index, pair in enumerate(pairs):
            decoder_ids = _row([start_id, *pair.prefix, *pair.continuation][:-1])
            rows_by_source.setdefault(pair.context, []).append(TokenRow(decoder_ids, pair.continuation, index))
        sources = [
            (PrefixNode(_row(source)), prefix_trees(rows, shares_prefixes=False))
            for source, rows in rows_by_source.items()
        ]
        for batch in self._split(sources, 0):
            ids, mask = pad_rows([source.ids for source, _ in batch], padding_id(self.tokenizer))
            inputs = CollatedBatch({"input_ids": ids, "attention_mask": mask}).to(self.model.device)
            encoded = self.model.get_encoder()(**inputs)
            targets = [(target, row) for row, (_, trees) in enumerate(batch) for target in trees]
            for target_batch in self._split(targets, ids.shape[1]):
                yield self._run_targets(target_batch, encoded, inputs["attention_mask"])

    def _run_targets(self, targets: Sequence[tuple[PrefixNode, int]], encoded: Any, source_mask: Tensor) -> NodeBatch:
        """Predict targets, each with the row of its source."""
        nodes, rows = [node for node, _ in targets], torch.tensor([row for _, row in targets])
        decoder_ids, _ = pad_rows([node.ids for node in nodes], padding_id(self.tokenizer))
        logits = self.model(
            encoder_outputs=select_rows(encoded, rows),
            attention_mask=select_rows(source_mask, rows),
            decoder_input_ids=decoder_ids.to(self.model.device),
            use_cache=False,
        ).logits
        return NodeBatch(nodes, logits, 0, None, None)

    def _answer_sources(
        self, sources: Sequence[tuple[int, ...]], stop: StopStrings, max_new_tokens: int
    ) -> Iterator[tuple[int, str]]:
        """Indices and answers of sources."""
        indices_by_source: dict[tuple[int, ...], list[int]] = {}
        for index, source in enumerate(sources):
            indices_by_source.setdefault(source, []).append(index)
        nodes = [PrefixNode(_row(source), requests=indices) for source, indices in indices_by_source.items()]
        yield from self._generate(nodes, stop, max_new_tokens)

    def _generate(
        self, nodes: Sequence[PrefixNode], stop: StopStrings, max_new_tokens: int
    ) -> Iterator[tuple[int, str]]:
        """Indices and answers of the requests that end with nodes, by `generate`."""
        for batch in self._split([(node, None) for node in nodes], 0):
            ids, mask = pad_rows([node.ids for node, _ in batch], padding_id(self.tokenizer))
            if not self.model.config.is_encoder_decoder:  # generation continues after the last column
                order = torch.argsort(mask, dim=1, stable=True)
                ids, mask = ids.gather(1, order), mask.gather(1, order)
            inputs = CollatedBatch({"input_ids": ids, "attention_mask": mask}).to(self.model.device)
            stop.prompt_length = 0 if self.model.config.is_encoder_decoder else ids.shape[1]
            generated = self.model.generate(
                **inputs, do_sample=False, num_beams=1, max_new_tokens=max_new_tokens, stopping_criteria=[stop],
                pad_token_id=padding_id(self.tokenizer),
            )  # fmt: skip
            for (node, _), row in zip(batch, generated[:, stop.prompt_length :].tolist(), strict=True):
                text = stop.text(row)
                yield from ((request, text) for request in node.requests)

    def _start_id(self) -> int:
        for config in (self.model.generation_config, self.model.config):
            start_id = getattr(config, "decoder_start_token_id", None)
            if start_id is not None:
                return start_id
        raise CtxError("The model has no decoder_start_token_id.", hint="set config.decoder_start_token_id.")

    def _split(
        self, items: Sequence[tuple[PrefixNode, Value]], past_length: int, max_length: int | None = None
    ) -> Iterator[list[tuple[PrefixNode, Value]]]:
        """Batches of (node, value) pairs with nodes of similar length within the memory limits, the longest first.
        Neither a node nor its descendants exceed `max_length` tokens with the padding of the batch."""
        batch: list[tuple[PrefixNode, Value]] = []
        width = first_target = 0
        for node, value in sorted(items, key=lambda item: -len(item[0].ids)):
            width = width or len(node.ids)
            first_target = min(first_target, node.first_target) if batch else node.first_target
            size = len(batch) + 1
            is_too_long = max_length is not None and past_length + width + node.num_following > max_length
            if batch and (
                is_too_long
                or size * width > self.batch_tokens
                or size * (past_length + width) > CACHED_TOKENS_PER_TOKEN * self.batch_tokens
                or size * (width - first_target) * self._vocab_size > MAX_LOGITS
            ):
                yield batch
                batch, width, first_target = [], len(node.ids), node.first_target
            batch.append((node, value))
        if batch:
            yield batch


def _check_model(model: Any) -> None:
    """Raise CtxError unless a model predicts texts from left to right."""
    hint = "use AutoModelForCausalLM or AutoModelForSeq2SeqLM."
    if isinstance(model, ForCausalLM):
        predicts_next_token, hint = not model.is_backward, "use the forward model."
    elif isinstance(model, HeadModel):
        predicts_next_token = isinstance(model, Seq2SeqHead)
    else:  # transformers' XLNet predicts the next token at an additional position only
        predicts_next_token = hasattr(model, "can_generate") and model.can_generate()
        predicts_next_token &= model.config.model_type != "xlnet"
    if not predicts_next_token:
        raise CtxError(f"{type(model).__name__} does not predict texts from left to right.", hint=hint)


def _context_trees(pairs: Sequence[TokenPair]) -> list[PrefixNode]:
    """A node for each distinct context, whose children are the trees of its continuations."""
    indices_by_context: dict[tuple[int, ...], list[int]] = {}
    for index, pair in enumerate(pairs):
        indices_by_context.setdefault(pair.context, []).append(index)
    nodes = []
    for context, indices in indices_by_context.items():
        tokens = {index: pairs[index].continuation for index in indices}
        rows = [TokenRow(_row(ids[:-1]), ids[1:], index) for index, ids in tokens.items() if len(ids) > 1]
        targets = [Target(len(context) - 1, ids[0], index) for index, ids in tokens.items()]
        nodes.append(PrefixNode(_row(context), targets, children=prefix_trees(rows)))
    return nodes


def _row(ids: Sequence[int]) -> np.ndarray:
    return np.array(ids, dtype=np.int32)
