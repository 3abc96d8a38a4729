"""Decoders conditioned on a sentence vector at every step, without attention."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from hf_ctxmodels.core.recurrent_cache import RecurrentCache
from hf_ctxmodels.layers.cpu.dropout import Dropout
from hf_ctxmodels.layers.cpu.linear import linear
from hf_ctxmodels.layers.decoder_output import DecoderOutput
from hf_ctxmodels.layers.lm_loss.cross_entropy import summed_cross_entropy
from hf_ctxmodels.layers.pooling import mask_until_last_target
from hf_ctxmodels.layers.recurrent.gru import GRU
from hf_ctxmodels.layers.recurrent.lstm import LSTM
from hf_ctxmodels.layers.recurrent.packing import PackedSequences


class VectorDecoder(nn.Module):
    """A recurrent decoder. Its input at every step is the previous token's embedding concatenated with a vector that is
    constant within a row.

    Args:
        vocab_size: Number of target tokens.
        embedding_size: Width of their embeddings.
        layers: Unidirectional recurrent layers.
        dropout: Dropout on the input of each layer, and on the output.
    """

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
        tokens: Tensor | None = None,
        unpad: bool = True,
        record: bool = False,
    ) -> DecoderOutput:
        """Run over target tokens.

        Args:
            ids: (rows, steps) target ids, each the token before the predicted one.
            vectors: (rows, width).
            cache: State after the previous tokens, (rows, 1, hidden) tensors for every layer.
            tokens: (rows, steps) bool, True at tokens, at least one in each row; None if all positions are tokens.
            unpad: Skip the other positions; False computes the same, but slower.
            record: Return `hidden_states`.

        Returns:
            (rows, steps, hidden) states, zero outside of `tokens`, and the state after the last token.
        """
        embeddings = self.embeddings(ids)
        states = torch.cat([embeddings, vectors[:, None].expand(-1, ids.shape[1], -1).to(embeddings.dtype)], -1)
        tokens = torch.ones_like(ids, dtype=torch.bool) if tokens is None else tokens
        build = PackedSequences.build if unpad else PackedSequences.with_padding
        packing = build(tokens, None, 1)
        final_states, recorded = [], [embeddings]
        for layer, initial_state in zip(self.layers, cache.states, strict=True):
            inputs = packing.pack(self.dropout(states))
            packed, final_state = layer(inputs, packing, packing.pack_state(initial_state))
            states = packing.unpack(packed)[0]
            final_states.append(packing.unpack_state(final_state))
            recorded.append(states)
        last_cache = RecurrentCache(final_states, cache.seen_tokens + ids.shape[1])
        return DecoderOutput(self.dropout(states), last_cache, tuple(recorded) if record else None)

    def target_states(self, ids: Tensor, target_mask: Tensor, vectors: Tensor, cache: RecurrentCache) -> Tensor:
        """(targets, hidden) states where `target_mask` (rows, steps) is True, in row-major order; see `forward`.

        Rows are not computed beyond their last target.
        """
        return self(ids, vectors, cache, mask_until_last_target(target_mask) != 0).states[target_mask]


class SentenceDecoder(VectorDecoder):
    """LASER's decoder for all languages (Artetxe & Schwenk 2019, section 3.1): LSTMs with the sentence vector and a
    language embedding as input at every step; linear layers compute their initial states from the sentence vector.

    Args:
        vocab_size: Number of target tokens.
        embedding_size: Width of their embeddings.
        sentence_size: Width of a sentence vector.
        languages: Number of target languages.
        language_size: Width of a language embedding.
        hidden_size: Width of the hidden states.
        layers: Number of LSTM layers.
        dropout: Dropout on the input of each layer, and on the output.
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
    which is also its initial state, and the task's output layer.

    Args:
        vocab_size: Number of target tokens.
        embedding_size: Width of their embeddings.
        hidden_size: Width of the hidden states, and of a sentence vector.
    """

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
