"""A decoder with global attention and input feeding (Luong et al. 2015; McCann et al. 2017, section 3)."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import initialization as init

from hf_ctxmodels.layers.dropout import Dropout
from hf_ctxmodels.layers.linear import Linear


@dataclass
class DecoderState:
    """What the decoder remembers of every row; a cache, as `generate` takes it.

    Attributes:
        hidden, cell: (layers, rows, hidden).
        adjusted: (rows, hidden) the context-adjusted state of the step before.
        steps: Tokens read.
    """

    hidden: Tensor
    cell: Tensor
    adjusted: Tensor
    steps: int = 0

    def reorder_cache(self, rows: Tensor) -> None:
        """Put rows in the place of others, as beams go on."""
        self.hidden, self.cell = self.hidden[:, rows], self.cell[:, rows]
        self.adjusted = self.adjusted[rows]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens read."""
        return self.steps


class AttentionalDecoder(nn.Module):
    """Words of the target language, one after the other. Of every step t, with the encoder's states H:

        h = LSTM([z_t-1; h~_t-1])
        alpha = softmax(H (W1 h + b1))
        h~ = tanh(W2 [H^T alpha; h] + b2)

    from which the next word is predicted. h~_0 is zero; h_0 is what `start` is given.

    Args:
        vocab_size: Target tokens.
        embedding_size: Width of theirs.
        hidden_size: Width of the states, the encoder's and the decoder's.
        layers: LSTM layers.
        dropout: Before every layer, and on what leaves the decoder.
        attends: False leaves the attention out: h~ = tanh(W2 h + b2).
    """

    def __init__(
        self,
        vocab_size: int,
        embedding_size: int,
        hidden_size: int,
        layers: int,
        *,
        dropout: float,
        attends: bool,
        padding_idx: int | None = None,
    ) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(vocab_size, embedding_size, padding_idx=padding_idx)
        inputs = [embedding_size + hidden_size, *[hidden_size] * (layers - 1)]
        self.cells = nn.ModuleList(nn.LSTMCell(width, hidden_size) for width in inputs)
        self.query = Linear(hidden_size, hidden_size) if attends else None
        self.combine = Linear(hidden_size * (2 if attends else 1), hidden_size)
        self.dropout = Dropout(dropout)

    def start(self, hidden: Tensor, cell: Tensor) -> DecoderState:
        """Before the first token: (rows, layers, hidden) last states of the encoder."""
        hidden, cell = hidden.transpose(0, 1), cell.transpose(0, 1)
        return DecoderState(hidden, cell, torch.zeros_like(hidden[0]))

    def forward(self, ids: Tensor, memory: Tensor, tokens: Tensor, state: DecoderState) -> tuple[Tensor, DecoderState]:
        """Read tokens.

        Args:
            ids: (rows, steps) target ids, each the token before the one to be predicted.
            memory: (rows, length, hidden) the encoder's states.
            tokens: (rows, length) bool, where there are such.
            state: Behind the tokens before.

        Returns:
            (rows, steps, hidden) h~ of every step, and the state behind the last.
        """
        outputs, after = self._steps(ids, [len(ids)] * ids.shape[1], memory, tokens, state)
        return self.dropout(torch.stack(outputs, 1)), after

    def asked_states(
        self, ids: Tensor, target_mask: Tensor, memory: Tensor, tokens: Tensor, state: DecoderState
    ) -> Tensor:
        """(asked, hidden) h~ where `asked` (rows, steps) bool is, in row-major order; other arguments as in `forward`.

        Rows leave the computation behind their last asked step.
        """
        numbers = torch.arange(ids.shape[1], device=ids.device)
        lengths = ((numbers + 1) * target_mask).amax(1)
        order = lengths.argsort(descending=True, stable=True)
        counts = (lengths[:, None] > numbers[: max(1, int(lengths.max()))]).sum(0).tolist()
        counts[0] = len(ids)  # that there is something, even where nothing is asked
        start = DecoderState(state.hidden[:, order], state.cell[:, order], state.adjusted[order], state.steps)
        outputs, _ = self._steps(ids[order], counts, memory[order], tokens[order], start)
        firsts = torch.tensor([0, *counts[:-1]], device=ids.device).cumsum(0)
        rows, steps = target_mask.nonzero(as_tuple=True)
        return self.dropout(torch.cat(outputs)[firsts[steps] + order.argsort()[rows]])

    def _steps(
        self, ids: Tensor, counts: list[int], memory: Tensor, tokens: Tensor, state: DecoderState
    ) -> tuple[list[Tensor], DecoderState]:
        """(count, hidden) h~ of every step, of the first `counts` rows, never more than in the step before."""
        words = self.dropout(self.embeddings(ids[:, : len(counts)]))
        excluded = ~tokens
        hidden, cell, adjusted = list(state.hidden), list(state.cell), state.adjusted
        outputs = []
        for step, count in enumerate(counts):
            below = torch.cat([words[:count, step], adjusted[:count]], -1)
            for depth, layer in enumerate(self.cells):
                read = self.dropout(below) if depth else below
                hidden[depth], cell[depth] = layer(read, (hidden[depth][:count], cell[depth][:count]))
                below = hidden[depth]
            adjusted = self._adjusted(below, memory[:count], excluded[:count])
            outputs.append(adjusted)
        steps = state.steps + len(counts)
        return outputs, DecoderState(torch.stack(hidden), torch.stack(cell), adjusted, steps)

    def _adjusted(self, hidden: Tensor, memory: Tensor, excluded: Tensor) -> Tensor:
        """(rows, hidden) -> (rows, hidden) with what is attended to."""
        if self.query is not None:
            context = attend(self.query(hidden)[:, None], memory, memory, excluded)[:, 0]
            hidden = torch.cat([context, hidden.to(memory.dtype)], -1)
        return self.combine(hidden).tanh()


def attend(queries: Tensor, keys: Tensor, values: Tensor, excluded: Tensor) -> Tensor:
    """Global attention (Luong et al. 2015, section 3.1): softmax(queries keys^T) values.

    Args:
        queries: (rows, steps, width).
        keys: (rows, length, width) what they are compared with.
        values: (rows, length, any width) what is summed up.
        excluded: (rows, length) bool, where nothing is attended to.

    Returns:
        (rows, steps, the values' width).
    """
    scores = (queries.to(keys.dtype) @ keys.transpose(1, 2)).float()
    weights = scores.masked_fill(excluded[:, None], float("-inf")).softmax(-1).to(values.dtype)
    return weights @ values


@torch.no_grad()
def reset_cell(cell: nn.LSTMCell) -> None:
    """Weights as torch draws them, through transformers' guards; the forget gate starts at one."""
    bound = cell.hidden_size**-0.5
    for weight in (cell.weight_ih, cell.weight_hh):
        init.uniform_(weight, -bound, bound)
    init.zeros_(cell.bias_hh)
    if not getattr(cell.bias_ih, "_is_hf_initialized", False):
        init.zeros_(cell.bias_ih)
        init.ones_(cell.bias_ih[cell.hidden_size : 2 * cell.hidden_size])
