"""Decoders that know a sentence's vector and nothing else of it."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_ctxmodels.layers.dropout import Dropout
from hf_ctxmodels.layers.linear import Linear
from hf_ctxmodels.layers.lm_loss.chunked import summed_cross_entropy
from hf_ctxmodels.layers.positions import until_last
from hf_ctxmodels.layers.recurrent.gru import GRU, GRUState
from hf_ctxmodels.layers.recurrent.lstm import LSTM, PackedRows, State


@dataclass
class SentenceDecoderState:
    """What the decoder remembers of every row; a cache, as `generate` takes it.

    Attributes:
        layers: The state of every layer.
        steps: Tokens read.
    """

    layers: list[Any]
    steps: int = 0

    def reorder_cache(self, rows: Tensor) -> None:
        """Put rows in the place of others, as beams go on."""
        self.layers = [type(state)(*(part[:, rows] for part in state)) for state in self.layers]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens read."""
        return self.steps


class VectorDecoder(nn.Module):
    """Tokens of a text, one after the other. Of every step the layers read the token before, and a vector that is the
    same for all steps of a row.

    Args:
        vocab_size: Target tokens.
        embedding_size: Width of theirs.
        layers: Recurrent layers of one direction, the first of which reads embedding and vector side by side.
        dropout: Before every layer, and on what leaves the decoder.
    """

    def __init__(
        self,
        vocab_size: int,
        embedding_size: int,
        layers: Iterable[nn.Module],
        *,
        dropout: float,
        padding_idx: int | None = None,
    ) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(vocab_size, embedding_size, padding_idx=padding_idx)
        self.layers = nn.ModuleList(layers)
        self.dropout = Dropout(dropout)

    def forward(
        self,
        ids: Tensor,
        given: Tensor,
        state: SentenceDecoderState,
        tokens: Tensor | None = None,
        unpad: bool = True,
    ) -> tuple[Tensor, SentenceDecoderState]:
        """Read tokens.

        Args:
            ids: (rows, steps) target ids, each the token before the one to be predicted.
            given: (rows, width) the vectors.
            state: Behind the tokens before.
            tokens: (rows, steps) bool, which are read, one at least of each row; None for all.
            unpad: Leave the others out, or carry the state over them: the same, more slowly.

        Returns:
            (rows, steps, hidden) states, zero where nothing is read, and what is remembered behind the last.
        """
        words = self.embeddings(ids)
        read = torch.cat([words, given[:, None].expand(-1, ids.shape[1], -1).to(words.dtype)], -1)
        tokens = torch.ones_like(ids, dtype=torch.bool) if tokens is None else tokens
        build = PackedRows.build if unpad else PackedRows.with_padding
        rows = build(tokens, None, 1)
        after = []
        for layer, before in zip(self.layers, state.layers, strict=True):
            packed, behind = layer(rows.pack(self.dropout(read)), rows, rows.sorted(before))
            read = rows.unpack(packed)[0]
            after.append(rows.unsorted(behind))
        return self.dropout(read), SentenceDecoderState(after, state.steps + ids.shape[1])

    def asked_states(self, ids: Tensor, target_mask: Tensor, given: Tensor, state: SentenceDecoderState) -> Tensor:
        """(asked, hidden) states where `asked` (rows, steps) bool is, in row-major order; others as in `forward`.

        Rows leave the computation behind their last asked step.
        """
        states, _ = self(ids, given, state, until_last(target_mask) != 0)
        return states[target_mask]


class SentenceDecoder(VectorDecoder):
    """The decoder of all languages (Artetxe & Schwenk 2019, section 3.1): LSTMs that read, at every step, the
    sentence's vector and the language's embedding, and start from linear maps of the vector.

    Args:
        vocab_size: Target tokens.
        embedding_size: Width of theirs.
        sentence_size: Width of a sentence's vector.
        languages: Number of target languages.
        language_size: Width of a language's embedding.
        hidden_size: Width of the states.
        layers: LSTM layers.
        dropout: Before every layer, and on what leaves the decoder.
    """

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
        widths = [embedding_size + sentence_size + language_size, *[hidden_size] * (layers - 1)]
        own = (LSTM(width, hidden_size, directions=1, state_bias=True) for width in widths)
        super().__init__(vocab_size, embedding_size, own, dropout=dropout, padding_idx=padding_idx)
        self.languages = nn.Embedding(languages, language_size)
        self.first_hidden = Linear(sentence_size, layers * hidden_size)
        self.first_cell = Linear(sentence_size, layers * hidden_size)

    def start(self, sentence: Tensor) -> SentenceDecoderState:
        """Before the first token: of (rows, sentence) vectors."""
        parts = (each(sentence).chunk(len(self.layers), -1) for each in (self.first_hidden, self.first_cell))
        return SentenceDecoderState([State(hidden[None], cell[None]) for hidden, cell in zip(*parts, strict=True)])

    def told(self, sentence: Tensor, language: Tensor) -> Tensor:
        """What every step is given: (rows, sentence) vectors and (rows,) numbers of languages, side by side."""
        return torch.cat([sentence, self.languages(language).to(sentence.dtype)], -1)


class ConditionalDecoder(VectorDecoder):
    """One task's decoder: a GRU whose gates and candidate read the sentence's vector at every step beside the token
    before, and whose first state it is; and the task's own softmax (Subramanian et al. 2018, arXiv 1804.00079).

    Args:
        vocab_size: Target tokens.
        embedding_size: Width of theirs.
        hidden_size: Width of the states, and of a sentence's vector.
    """

    def __init__(self, vocab_size: int, embedding_size: int, hidden_size: int, padding_idx: int | None = None) -> None:
        layer = GRU(embedding_size + hidden_size, hidden_size, directions=1)
        super().__init__(vocab_size, embedding_size, [layer], dropout=0.0, padding_idx=padding_idx)
        self.prediction = nn.Linear(hidden_size, vocab_size)

    @staticmethod
    def start(sentence: Tensor) -> SentenceDecoderState:
        """Before the first token: (rows, hidden) vectors."""
        return SentenceDecoderState([GRUState(sentence[None])])

    def summed_loss(self, states: Tensor, targets: Tensor) -> Tensor:
        """The cross-entropies in nats of (targets,) ids behind (targets, hidden) states, added up."""
        return summed_cross_entropy(self.prediction, states, targets)
