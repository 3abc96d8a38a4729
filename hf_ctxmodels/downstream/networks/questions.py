"""Extractive question answering on word vectors: BiDAF with self-attention (Seo et al. 2017, arXiv 1611.01603; Clark &
Gardner 2018, arXiv 1710.10723)."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import initialization as init

from hf_ctxmodels.core.constants import IGNORE_INDEX
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import check_range
from hf_ctxmodels.core.host_copies import host_copy, is_traced, on_host
from hf_ctxmodels.downstream.networks.pairs import pack_texts
from hf_ctxmodels.heads.base import ItemCounts, mean_over_targets, validate_sequence_targets
from hf_ctxmodels.layers.cpu.dropout import Dropout
from hf_ctxmodels.layers.cpu.linear import LinearLayers, linear
from hf_ctxmodels.layers.pooling import attention_pooling, states_at
from hf_ctxmodels.layers.recurrent.packing import run_layer
from hf_ctxmodels.layers.recurrent.rnn import GRU


@dataclass
class AnswerSpanOptions:
    """Options of `AnswerSpanNetwork`.

    Attributes:
        hidden_size: Width of the GRUs per direction.
        dropout: Dropout rate of the inputs of linear layers and of GRUs, except the first one.
        no_answer: Whether a question may be unanswerable, or a window of a long context lack the answer, which adds a
            logit of no answer.
        no_answer_size: Width of the hidden layer that computes this logit.
    """

    hidden_size: int = 100
    dropout: float = 0.2
    no_answer: bool = True
    no_answer_size: int = 80

    def __post_init__(self) -> None:
        check_range(self, "hidden_size", "no_answer_size", at_least=1)
        check_range(self, "dropout", at_least=0, below=1)


class AnswerSpanScores(NamedTuple):
    """Output of `AnswerSpanNetwork`.

    Attributes:
        start_logits, end_logits: (batch, words), the lowest number of the dtype outside the context.
        no_answer_logits: (batch,), on the scale of a sum of start and end logit; None without `no_answer`.
    """

    start_logits: Tensor
    end_logits: Tensor
    no_answer_logits: Tensor | None


class TrilinearAttention(nn.Module):
    """Scores `w_1 h_i + w_2 q_j + w_3 (h_i * q_j)` of (batch, words, size) states h and q (Seo et al. 2017, section 2,
    attention flow layer)."""

    initializes_itself = True

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.empty(3, size))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Uniform within 1 / sqrt(size)."""
        bound = self.weights.shape[1] ** -0.5
        init.uniform_(self.weights, -bound, bound)

    def forward(self, states: Tensor, queries: Tensor) -> Tensor:
        """(batch, words, size) and (batch, queries, size) -> (batch, words, queries)."""
        state_weight, query_weight, product_weight = self.weights.to(states.dtype)
        products = (states * product_weight) @ queries.transpose(1, 2)
        return products + (states @ state_weight)[:, :, None] + (queries @ query_weight)[:, None]


class AnswerSpanNetwork(nn.Module):
    """BiDAF with self-attention (Clark & Gardner 2018, section 2.3 and figure 1).

        h, q = BiGRU(context), BiGRU(question)                                      shared weights
        c_i = sum_j softmax_j(a_ij) q_j                                             context-to-query
        d = sum_i softmax_i(max_j a_ij) h_i                                         query-to-context
        x_i = ReLU(W [h_i; c_i; h_i * c_i; h_i * d])                                fusion
        g = BiGRU(x),  x_i = x_i + ReLU(W [g_i; s_i; g_i * s_i])                    residual self-attention, s_i below
        u = BiGRU(x),  start = w u;  v = BiGRU([u; x]),  end = w v                  prediction

    a is `TrilinearAttention`. s_i is the sum of the states g_j of other words, weighted by the softmax of their scores
    and, as in the released code, of a learned bias, which attends to nothing. With `options.no_answer`, a layer on the
    means of u and v, weighted by the softmax of their logits, and on a learned weighted mean of x computes the logit of
    no answer (section 3.3).

    Args:
        output_size: Width of vectors that are concatenated with h and q, so that the attention reads them (Peters et
            al. 2018, section 5.2); 0 for none.
    """

    initializes_itself = True

    def __init__(self, input_size: int, options: AnswerSpanOptions, output_size: int = 0) -> None:
        super().__init__()
        width = 2 * options.hidden_size
        self.dropout = Dropout(options.dropout)
        self.encoder = GRU(input_size, options.hidden_size)
        self.attention = TrilinearAttention(width + output_size)
        self.fusion = nn.Linear(4 * (width + output_size), width)
        self.modeling = GRU(width, options.hidden_size)
        self.self_attention = TrilinearAttention(width)
        self.no_alignment = nn.Parameter(torch.empty(1))
        self.reset_parameters()
        self.self_fusion = nn.Linear(3 * width, width)
        self.start_layer = GRU(width, options.hidden_size)
        self.start = nn.Linear(width, 1)
        self.end_layer = GRU(2 * width, options.hidden_size)
        self.end = nn.Linear(width, 1)
        self.no_answer = self.summary = None
        if options.no_answer:
            self.summary = nn.Linear(width, 1, bias=False)
            size = options.no_answer_size
            self.no_answer = LinearLayers(nn.Linear(3 * width, size), nn.ReLU(), nn.Linear(size, 1))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialize the bias that attends to nothing, to -1 as in the released code."""
        init.constant_(self.no_alignment, -1.0)

    def forward(
        self, vectors: Tensor, is_word: Tensor, is_context: Tensor, output_vectors: Tensor | None = None
    ) -> AnswerSpanScores:
        """Compute the logits of a batch.

        Args:
            vectors: (batch, words, input) vectors of question and context.
            is_word, is_context: (batch, words) bool, False at padding, which may be anywhere, and True at the words of
                the context.

        Raises:
            CtxError: An example has no question or no context.
        """
        context = on_host(torch.logical_and, is_context, is_word)
        question = on_host(lambda words, is_context: words & ~is_context, is_word, context)
        if not is_traced(vectors):
            _check_texts(question, context)
        encoded = run_layer(self.encoder, vectors, pack_texts(vectors, is_word, context))
        if output_vectors is not None:
            encoded = torch.cat([encoded, output_vectors.to(encoded.dtype)], -1)
        packing = pack_texts(vectors, context)
        states = self.dropout(linear(self.fusion, self._attend_to_question(encoded, question, context)).relu())
        states = states + self._attend_to_context(run_layer(self.modeling, self.dropout(states), packing), context)

        start_states = run_layer(self.start_layer, self.dropout(states), packing)
        end_states = run_layer(self.end_layer, self.dropout(torch.cat([start_states, states], -1)), packing)
        start_logits, end_logits = (
            _mask(linear(layer, layer_states)[..., 0], context)
            for layer, layer_states in ((self.start, start_states), (self.end, end_states))
        )
        if self.no_answer is None or self.summary is None:
            return AnswerSpanScores(start_logits, end_logits, None)
        scores = (start_logits, end_logits, linear(self.summary, states)[..., 0])
        means = [
            attention_pooling(logits[:, None], layer_states, context[:, None])[:, 0]
            for logits, layer_states in zip(scores, (start_states, end_states, states), strict=True)
        ]
        return AnswerSpanScores(start_logits, end_logits, self.no_answer(torch.cat(means, -1))[:, 0])

    def _attend_to_question(self, states: Tensor, question: Tensor, context: Tensor) -> Tensor:
        """(batch, words, 4 * width) features of the context; other rows are undefined."""
        scores = self.attention(states, states)
        question_vectors = attention_pooling(scores, states, question[:, None])
        maxima = _mask(scores, question[:, None]).amax(-1)
        context_vector = attention_pooling(maxima[:, None], states, context[:, None])
        return torch.cat([states, question_vectors, states * question_vectors, states * context_vector], -1)

    def _attend_to_context(self, states: Tensor, context: Tensor) -> Tensor:
        """(batch, words, width) update of the context's states."""
        scores = self.self_attention(states, states)
        diagonal = torch.eye(states.shape[1], dtype=torch.bool, device=states.device)
        scores = _mask(scores.float(), context[:, None] & ~diagonal)
        bias = self.no_alignment.float().expand(*scores.shape[:2], 1)
        weights = torch.cat([scores, bias], -1).softmax(-1)[..., :-1].to(states.dtype)
        context_vectors = weights @ states
        features = torch.cat([states, context_vectors, states * context_vectors], -1)
        return self.dropout(linear(self.self_fusion, features).relu())


def answer_span_loss(
    scores: AnswerSpanScores,
    is_context: Tensor,
    start_positions: Tensor,
    end_positions: Tensor,
    num_items: ItemCounts = None,
) -> Tensor:
    """Mean negative log-likelihood in nats of answers under a softmax over all pairs of a start and an end, and no
    answer (Clark & Gardner 2018, section 3.3). Without a logit of no answer, it is the sum of the cross-entropies of
    start and end.

    Args:
        is_context: (batch, words) bool.
        start_positions, end_positions: (batch,) columns of the answer's first and last word. A column outside the
            context means no answer, which only networks with `no_answer` learn; a column outside the row is ignored.
        num_items: Number of "start_positions" in a larger batch, see `heads.base.ItemCounts`.
    """
    start_logits, end_logits, no_answer_logits = scores
    batch_size, length = start_logits.shape
    starts = validate_sequence_targets(start_positions, "start_positions", batch_size)
    ends = validate_sequence_targets(end_positions, "end_positions", batch_size)

    def target_rows(starts: Tensor, ends: Tensor, is_context: Tensor) -> Tensor:
        """(2, batch) bool: rows with an answer, and ignored rows."""
        is_inside = (starts >= 0) & (starts < length) & (ends >= 0) & (ends < length)
        columns = torch.stack([starts, ends], 1).clamp(0, length - 1)
        is_answer = is_context.gather(1, columns).all(1)
        is_ignored = ~is_inside if no_answer_logits is not None else ~is_inside | ~is_answer
        return torch.stack([is_answer, is_ignored])

    has_answer, is_ignored = on_host(target_rows, starts, ends, is_context)
    start_columns, end_columns = starts.clamp(0, length - 1), ends.clamp(0, length - 1)
    target_logits = states_at(start_logits.float(), start_columns) + states_at(end_logits.float(), end_columns)
    total_logits = start_logits.float().logsumexp(-1) + end_logits.float().logsumexp(-1)
    if no_answer_logits is not None:
        target_logits = torch.where(has_answer, target_logits, no_answer_logits.float())
        total_logits = torch.logaddexp(total_logits, no_answer_logits.float())
    losses = (total_logits - target_logits).masked_fill(is_ignored, 0.0)
    return mean_over_targets(losses.sum(), starts.masked_fill(is_ignored, IGNORE_INDEX), "start_positions", num_items)


def _mask(scores: Tensor, mask: Tensor) -> Tensor:
    return scores.masked_fill(~mask, torch.finfo(scores.dtype).min)


def _check_texts(question: Tensor, context: Tensor) -> None:
    """Raise CtxError for an example without words of the question or of the context."""
    for name, mask in (("question", question), ("context", context)):
        has_words = host_copy(mask).any(1)
        if not bool(has_words.all()):
            raise CtxError(
                f"Example {int((~has_words).nonzero()[0])} of the batch has no words in its {name}.",
                hint="remove the example.",
            )
