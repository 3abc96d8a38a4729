"""Recurrent decoders: conditioned on a sentence vector at every step, or with attention to the source."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from transformers import initialization as init

from hf_ctxmodels.core.caches import RecurrentCache
from hf_ctxmodels.core.host_copies import host_copy, select_true, to_device
from hf_ctxmodels.layers.common import RecurrentDecoderOutput
from hf_ctxmodels.layers.cpu.dropout import Dropout, dropout
from hf_ctxmodels.layers.cpu.linear import linear
from hf_ctxmodels.layers.lm_loss.cross_entropy import summed_cross_entropy
from hf_ctxmodels.layers.pooling import build_token_mask, mask_until_last_target
from hf_ctxmodels.layers.recurrent.packing import PackedSequences
from hf_ctxmodels.layers.recurrent.rnn import GRU, LSTM


class VectorDecoder(nn.Module):
    """A recurrent decoder with unidirectional layers, and dropout on the input of each layer and on the output. Its
    input at every step is the previous token's embedding concatenated with a vector that is constant within a row."""

    def __init__(
        self,
        vocab_size: int,
        embedding_size: int,
        layers: Iterable[nn.Module],
        *,
        dropout: float,
        padding_idx: int | None,
    ) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(vocab_size, embedding_size, padding_idx=padding_idx)
        self.layers = nn.ModuleList(layers)
        self.dropout = Dropout(dropout)

    def forward(
        self,
        ids: Tensor,
        vectors: Tensor,
        cache: RecurrentCache,
        token_mask: Tensor | None = None,
        unpad: bool = True,
        record: bool = False,
    ) -> RecurrentDecoderOutput:
        """Run over target tokens; returns (rows, steps, hidden) states, zero outside of `token_mask`, and the state
        after the last token.

        Args:
            ids: (rows, steps) target ids, each the token before the predicted one.
            vectors: (rows, width).
            cache: State after the previous tokens, (rows, 1, hidden) tensors for every layer.
            token_mask: (rows, steps) bool, True at tokens, at least one in each row; None if all positions are tokens.
            unpad: Skip the other positions; False computes the same, but slower.
            record: Return `hidden_states`.
        """
        embeddings = self.embeddings(ids)
        states = torch.cat([embeddings, vectors[:, None].expand(-1, ids.shape[1], -1).to(embeddings.dtype)], -1)
        packing = PackedSequences.build(build_token_mask(ids, token_mask), directions=1, unpad=unpad)
        final_states, recorded = [], [embeddings]
        for layer, initial_state in zip(self.layers, cache.states, strict=True):
            inputs = packing.pack(self.dropout(states))
            packed, final_state = layer(inputs, packing, packing.pack_state(initial_state))
            states = packing.unpack(packed)[0]
            final_states.append(packing.unpack_state(final_state))
            recorded.append(states)
        last_cache = RecurrentCache(final_states, cache.seen_tokens + ids.shape[1])
        return RecurrentDecoderOutput(self.dropout(states), last_cache, tuple(recorded) if record else None)

    def target_states(self, ids: Tensor, target_mask: Tensor, vectors: Tensor, cache: RecurrentCache) -> Tensor:
        """(targets, hidden) states where `target_mask` (rows, steps) is True; rows end at their last target."""
        states = self(ids, vectors, cache, mask_until_last_target(target_mask)).states
        return select_true(states, target_mask)


class SentenceDecoder(VectorDecoder):
    """LASER's decoder for all languages (Artetxe & Schwenk 2019, section 3.1): LSTMs with the sentence vector and a
    language embedding as input at every step; linear layers compute their initial states from the sentence vector."""

    def __init__(
        self,
        vocab_size: int,
        embedding_size: int,
        sentence_size: int,
        languages: int,
        language_size: int,
        hidden_size: int,
        layers: int,
        *,
        dropout: float,
        padding_idx: int | None = None,
    ) -> None:
        input_sizes = [embedding_size + sentence_size + language_size, *[hidden_size] * (layers - 1)]
        lstm_layers = (LSTM(size, hidden_size, directions=1, state_bias=True) for size in input_sizes)
        super().__init__(vocab_size, embedding_size, lstm_layers, dropout=dropout, padding_idx=padding_idx)
        self.languages = nn.Embedding(languages, language_size)
        self.first_hidden = nn.Linear(sentence_size, layers * hidden_size)
        self.first_cell = nn.Linear(sentence_size, layers * hidden_size)

    def start(self, sentence: Tensor) -> RecurrentCache:
        """The cache before the first token, from (rows, sentence) vectors."""
        hidden = linear(self.first_hidden, sentence)[:, None].chunk(len(self.layers), -1)
        cell = linear(self.first_cell, sentence)[:, None].chunk(len(self.layers), -1)
        return RecurrentCache(zip(hidden, cell, strict=True))

    def step_vectors(self, sentence: Tensor, language: Tensor) -> Tensor:
        """(rows, sentence) vectors concatenated with the embeddings of (rows,) languages."""
        return torch.cat([sentence, self.languages(language).to(sentence.dtype)], -1)


class ConditionalDecoder(VectorDecoder):
    """GenSen's decoder of a task (Subramanian et al. 2018, arXiv 1804.00079): a GRU conditioned on the sentence vector,
    which is also its initial state and as wide as it, and the task's output layer."""

    def __init__(self, vocab_size: int, embedding_size: int, hidden_size: int, padding_idx: int | None = None) -> None:
        layer = GRU(embedding_size + hidden_size, hidden_size, directions=1)
        super().__init__(vocab_size, embedding_size, [layer], dropout=0.0, padding_idx=padding_idx)
        self.prediction = nn.Linear(hidden_size, vocab_size)

    @staticmethod
    def start(sentence: Tensor) -> RecurrentCache:
        """The cache before the first token, from (rows, hidden) vectors."""
        return RecurrentCache([(sentence[:, None],)])

    def summed_loss(self, states: Tensor, targets: Tensor) -> Tensor:
        """Summed cross-entropy in nats of (targets,) ids predicted from (targets, hidden) states."""
        return summed_cross_entropy(self.prediction, states, targets)


Step = tuple[list[Tensor], Tensor | None]
"""(rows, hidden) states of each layer, and (rows, 1, length) attention weights, if any."""


class AttentionalDecoder(nn.Module):
    """An LSTM decoder with global attention and input feeding. At every step t, with the encoder's states H:

        h = LSTM([z_t-1; h~_t-1])
        alpha = softmax(H (W1 h + b1))
        h~ = tanh(W2 [H^T alpha; h] + b2)

    The next token is predicted from h~, the context-adjusted state. h~_0 is zero; h_0 is the argument of `start`.
    Without attention (`use_attention=False`), h~ = tanh(W2 h + b2). Dropout is applied to the input of each layer, and
    to the output.
    """

    def __init__(
        self,
        vocab_size: int,
        embedding_size: int,
        hidden_size: int,
        layers: int,
        *,
        dropout: float,
        use_attention: bool,
        padding_idx: int | None = None,
    ) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(vocab_size, embedding_size, padding_idx=padding_idx)
        input_sizes = [embedding_size + hidden_size, *[hidden_size] * (layers - 1)]
        self.cells = nn.ModuleList(nn.LSTMCell(size, hidden_size) for size in input_sizes)
        self.query = nn.Linear(hidden_size, hidden_size) if use_attention else None
        self.combine = nn.Linear(hidden_size * (2 if use_attention else 1), hidden_size)
        self.dropout = Dropout(dropout)

    def start(self, hidden: Tensor, cell: Tensor) -> RecurrentCache:
        """The cache before the first token, from (rows, layers, hidden) final encoder states: the (rows, hidden) states
        of the layers, and h~."""
        states = zip(hidden.unbind(1), cell.unbind(1), strict=True)
        return RecurrentCache([*states, (torch.zeros_like(hidden[:, 0]),)])

    def forward(
        self, ids: Tensor, memory: Tensor, token_mask: Tensor, cache: RecurrentCache, record: bool = False
    ) -> RecurrentDecoderOutput:
        """Run over target tokens; returns (rows, steps, hidden) h~ of each step, and the state after the last step.

        Args:
            ids: (rows, steps) target ids, each the token before the predicted one.
            memory: (rows, length, hidden) the encoder's states.
            token_mask: (rows, length) bool, False at padding positions of the source.
            record: Return `hidden_states`, the last of which are h~, and `cross_attentions`.
        """
        counts = [len(ids)] * ids.shape[1]
        recorded: list[Step] | None = [] if record else None
        outputs, last_cache = self._run_steps(ids, counts, memory, token_mask, cache, recorded)
        adjusted = torch.stack(outputs, 1)
        if recorded is None:
            return RecurrentDecoderOutput(self.dropout(adjusted), last_cache)
        layers = [torch.stack(states, 1) for states in zip(*(states for states, _ in recorded), strict=True)]
        hidden_states = (self.embeddings(ids), *layers[:-1], adjusted)
        weights = [weights for _, weights in recorded if weights is not None]
        cross_attentions = (torch.cat(weights, 1)[:, None],) if weights else None
        return RecurrentDecoderOutput(self.dropout(adjusted), last_cache, hidden_states, cross_attentions)

    def target_states(
        self, ids: Tensor, target_mask: Tensor, memory: Tensor, token_mask: Tensor, cache: RecurrentCache
    ) -> Tensor:
        """(targets, hidden) h~ where `target_mask` (rows, steps) is True; rows end at their last target."""
        columns, target_mask = torch.arange(ids.shape[1]), host_copy(target_mask)
        lengths = ((columns + 1) * target_mask).amax(1)
        host_order = lengths.argsort(descending=True, stable=True)
        counts = (lengths[:, None] > columns[: max(1, int(lengths.max()))]).sum(0).tolist()
        counts[0] = len(ids)  # for an output without targets
        order = to_device(host_order, ids.device)
        outputs, _ = self._run_steps(ids[order], counts, memory[order], token_mask[order], cache.select(order), None)
        step_starts = torch.tensor([0, *counts[:-1]]).cumsum(0)
        rows, steps = target_mask.nonzero(as_tuple=True)
        indices = to_device(step_starts[steps] + host_order.argsort()[rows], ids.device)
        return self.dropout(torch.cat(outputs)[indices])

    def _run_steps(
        self,
        ids: Tensor,
        counts: list[int],
        memory: Tensor,
        token_mask: Tensor,
        cache: RecurrentCache,
        recorded: list[Step] | None,
    ) -> tuple[list[Tensor], RecurrentCache]:
        """(counts[t], hidden) h~ of each step t, for the first `counts[t]` rows, a non-increasing number; steps are
        appended to `recorded`."""
        embeddings = self.dropout(self.embeddings(ids[:, : len(counts)]))
        padding = ~token_mask
        *states, (adjusted,) = cache.states
        outputs = []
        for step, count in enumerate(counts):
            inputs = torch.cat([embeddings[:count, step], adjusted[:count]], -1)
            for depth, layer in enumerate(self.cells):
                hidden, cell = states[depth]
                inputs = self.dropout(inputs) if depth else inputs
                states[depth] = layer(inputs, (hidden[:count], cell[:count]))
                inputs = states[depth][0]
            weights = None
            if self.query is not None:
                queries = linear(self.query, inputs)[:, None]
                context, weights = global_attention(queries, memory[:count], memory[:count], padding[:count])
                inputs = torch.cat([context[:, 0], inputs.to(memory.dtype)], -1)
            adjusted = linear(self.combine, inputs).tanh()
            outputs.append(adjusted)
            if recorded is not None:
                recorded.append(([hidden for hidden, _ in states], weights))
        return outputs, RecurrentCache([*states, (adjusted,)], cache.seen_tokens + len(counts))


def global_attention(
    queries: Tensor, keys: Tensor, values: Tensor, padding: Tensor, dropout_rate: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Global attention (Luong et al. 2015, section 3.1): softmax(queries keys^T) values.

    Queries are (rows, steps, width), keys and values (rows, length, width), `padding` is (rows, length) bool; returns
    (rows, steps, value width), and (rows, steps, length) attention weights, after dropout with `dropout_rate`.
    """
    scores = (queries.to(keys.dtype) @ keys.transpose(1, 2)).float()
    weights = scores.masked_fill(padding[:, None], float("-inf")).softmax(-1).to(values.dtype)
    weights = dropout(weights, dropout_rate, training=dropout_rate > 0)
    return weights @ values, weights


@torch.no_grad()
def reset_lstm_cell(cell: nn.LSTMCell) -> None:
    """Initialize an LSTM cell as in torch, with a forget bias of one; loaded weights are not changed."""
    bound = cell.hidden_size**-0.5
    for weight in (cell.weight_ih, cell.weight_hh):
        init.uniform_(weight, -bound, bound)
    init.zeros_(cell.bias_hh)
    if not getattr(cell.bias_ih, "_is_hf_initialized", False):
        init.zeros_(cell.bias_ih)
        init.ones_(cell.bias_ih[cell.hidden_size : 2 * cell.hidden_size])
