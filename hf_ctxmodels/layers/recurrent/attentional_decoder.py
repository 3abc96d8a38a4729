"""A decoder with global attention and input feeding (Luong et al. 2015; McCann et al. 2017, section 3)."""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import initialization as init

from hf_ctxmodels.core.recurrent_cache import RecurrentCache
from hf_ctxmodels.layers.cpu.dropout import Dropout
from hf_ctxmodels.layers.cpu.linear import linear
from hf_ctxmodels.layers.decoder_output import DecoderOutput


class _Step(NamedTuple):
    """(rows, hidden) of each layer, and (rows, 1, length) attention weights, if any."""

    layers: list[Tensor]
    weights: Tensor | None


class AttentionalDecoder(nn.Module):
    """An LSTM decoder with global attention and input feeding. At every step t, with the encoder's states H:

        h = LSTM([z_t-1; h~_t-1])
        alpha = softmax(H (W1 h + b1))
        h~ = tanh(W2 [H^T alpha; h] + b2)

    The next token is predicted from h~, the context-adjusted state. h~_0 is zero; h_0 is the argument of `start`.

    Args:
        vocab_size: Number of target tokens.
        embedding_size: Width of their embeddings.
        hidden_size: Width of the hidden states of the encoder and the decoder.
        layers: Number of LSTM layers.
        dropout: Dropout on the input of each layer, and on the output.
        use_attention: False for no attention: h~ = tanh(W2 h + b2).
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
        self, ids: Tensor, memory: Tensor, tokens: Tensor, cache: RecurrentCache, record: bool = False
    ) -> DecoderOutput:
        """Run over target tokens.

        Args:
            ids: (rows, steps) target ids, each the token before the predicted one.
            memory: (rows, length, hidden) the encoder's states.
            tokens: (rows, length) bool, False at padding positions of the source.
            cache: State after the previous tokens.
            record: Return `hidden_states`, the last of which are h~, and `cross_attentions`.

        Returns:
            (rows, steps, hidden) h~ of each step, and the state after the last step.
        """
        counts = [len(ids)] * ids.shape[1]
        recorded: list[_Step] | None = [] if record else None
        outputs, last_cache = self._run_steps(ids, counts, memory, tokens, cache, recorded)
        adjusted = torch.stack(outputs, 1)
        if recorded is None:
            return DecoderOutput(self.dropout(adjusted), last_cache)
        layers = [torch.stack(states, 1) for states in zip(*(step.layers for step in recorded), strict=True)]
        hidden_states = (self.embeddings(ids), *layers[:-1], adjusted)
        weights = [step.weights for step in recorded if step.weights is not None]
        cross_attentions = (torch.cat(weights, 1)[:, None],) if weights else None
        return DecoderOutput(self.dropout(adjusted), last_cache, hidden_states, cross_attentions)

    def target_states(
        self, ids: Tensor, target_mask: Tensor, memory: Tensor, tokens: Tensor, cache: RecurrentCache
    ) -> Tensor:
        """(targets, hidden) h~ where `target_mask` (rows, steps) is True, in row-major order; see `forward`.

        Rows are not computed beyond their last target.
        """
        columns = torch.arange(ids.shape[1], device=ids.device)
        lengths = ((columns + 1) * target_mask).amax(1)
        order = lengths.argsort(descending=True, stable=True)
        counts = (lengths[:, None] > columns[: max(1, int(lengths.max()))]).sum(0).tolist()
        counts[0] = len(ids)  # for an output without targets
        outputs, _ = self._run_steps(ids[order], counts, memory[order], tokens[order], cache.select(order), None)
        step_starts = torch.tensor([0, *counts[:-1]], device=ids.device).cumsum(0)
        rows, steps = target_mask.nonzero(as_tuple=True)
        return self.dropout(torch.cat(outputs)[step_starts[steps] + order.argsort()[rows]])

    def _run_steps(
        self,
        ids: Tensor,
        counts: list[int],
        memory: Tensor,
        tokens: Tensor,
        cache: RecurrentCache,
        recorded: list[_Step] | None,
    ) -> tuple[list[Tensor], RecurrentCache]:
        """(counts[t], hidden) h~ of each step t, for the first `counts[t]` rows, a non-increasing number; steps are
        appended to `recorded`."""
        embeddings = self.dropout(self.embeddings(ids[:, : len(counts)]))
        padding = ~tokens
        *states, (adjusted,) = cache.states
        outputs = []
        for step, count in enumerate(counts):
            inputs = torch.cat([embeddings[:count, step], adjusted[:count]], -1)
            for depth, layer in enumerate(self.cells):
                hidden, cell = states[depth]
                inputs = self.dropout(inputs) if depth else inputs
                states[depth] = layer(inputs, (hidden[:count], cell[:count]))
                inputs = states[depth][0]
            adjusted, weights = self._adjust(inputs, memory[:count], padding[:count])
            outputs.append(adjusted)
            if recorded is not None:
                recorded.append(_Step([hidden for hidden, _ in states], weights))
        return outputs, RecurrentCache([*states, (adjusted,)], cache.seen_tokens + len(counts))

    def _adjust(self, hidden: Tensor, memory: Tensor, padding: Tensor) -> tuple[Tensor, Tensor | None]:
        """(rows, hidden) h -> (rows, hidden) h~, and (rows, 1, length) alpha with attention."""
        weights = None
        if self.query is not None:
            context, weights = global_attention(linear(self.query, hidden)[:, None], memory, memory, padding)
            hidden = torch.cat([context[:, 0], hidden.to(memory.dtype)], -1)
        return linear(self.combine, hidden).tanh(), weights


def global_attention(queries: Tensor, keys: Tensor, values: Tensor, padding: Tensor) -> tuple[Tensor, Tensor]:
    """Global attention (Luong et al. 2015, section 3.1): softmax(queries keys^T) values.

    Args:
        queries: (rows, steps, width).
        keys: (rows, length, width).
        values: (rows, length, value width).
        padding: (rows, length) bool, True at padding.

    Returns:
        (rows, steps, value width), and (rows, steps, length) attention weights.
    """
    scores = (queries.to(keys.dtype) @ keys.transpose(1, 2)).float()
    weights = scores.masked_fill(padding[:, None], float("-inf")).softmax(-1).to(values.dtype)
    return weights @ values, weights


@torch.no_grad()
def reset_lstm_cell(cell: nn.LSTMCell) -> None:
    """Initialise an LSTM cell as in torch, with a forget bias of one; loaded weights are not changed."""
    bound = cell.hidden_size**-0.5
    for weight in (cell.weight_ih, cell.weight_hh):
        init.uniform_(weight, -bound, bound)
    init.zeros_(cell.bias_hh)
    if not getattr(cell.bias_ih, "_is_hf_initialized", False):
        init.zeros_(cell.bias_ih)
        init.ones_(cell.bias_ih[cell.hidden_size : 2 * cell.hidden_size])
