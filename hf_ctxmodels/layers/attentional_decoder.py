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
        words = self.dropout(self.embeddings(ids))
        excluded = ~tokens
        hidden, cell, adjusted = list(state.hidden), list(state.cell), state.adjusted
        outputs = []
        for step in range(ids.shape[1]):
            below = torch.cat([words[:, step], adjusted], -1)
            for depth, layer in enumerate(self.cells):
                hidden[depth], cell[depth] = layer(
                    self.dropout(below) if depth else below, (hidden[depth], cell[depth])
                )
                below = hidden[depth]
            adjusted = self._adjusted(below, memory, excluded)
            outputs.append(adjusted)
        after = DecoderState(torch.stack(hidden), torch.stack(cell), adjusted, state.steps + ids.shape[1])
        return self.dropout(torch.stack(outputs, 1)), after

    def _adjusted(self, hidden: Tensor, memory: Tensor, excluded: Tensor) -> Tensor:
        """(rows, hidden) -> (rows, hidden) with what is attended to."""
        if self.query is not None:
            scores = (memory @ self.query(hidden)[..., None])[..., 0].float()
            weights = scores.masked_fill(excluded, float("-inf")).softmax(-1).to(memory.dtype)
            hidden = torch.cat([(weights[:, None] @ memory)[:, 0], hidden.to(memory.dtype)], -1)
        return self.combine(hidden).tanh()


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
