"""Classifiers of texts and of text pairs on word vectors: ESIM, decomposable attention, the biattentive classification
network, and a bidirectional LSTM with pooling.

All forwards take (batch, words, input) vectors, the (batch, words) bool mask `is_word`, False at padding, which may be
anywhere in a row, and the (batch, words) bool mask `is_second`, True at the words of the second text. The two texts of
a row are encoded separately. A single text is compared with itself. The output is (batch, num_labels) logits.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import initialization as init

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import check_range
from hf_ctxmodels.core.host_copies import is_traced, on_host
from hf_ctxmodels.core.inputs import check_no_empty_rows, sequence_numbers
from hf_ctxmodels.layers.biattention import Biattention, maxout_classifier
from hf_ctxmodels.layers.cpu.dropout import Dropout
from hf_ctxmodels.layers.cpu.linear import LinearLayers, linear
from hf_ctxmodels.layers.pooling import attention_pooling, forward_fill_padding, pool_tokens, text_masks
from hf_ctxmodels.layers.recurrent.packing import PackedSequences, run_bidirectional, run_layer
from hf_ctxmodels.layers.recurrent.rnn import LSTM, bidirectional_lstms

MAX_DISTANCE = 10  # greater distances share one bias in intra-sentence attention (Parikh et al. 2016, section 3.4)


@dataclass
class EsimOptions:
    """Options of `Esim`.

    Attributes:
        hidden_size: Width of the LSTMs per direction, of the projection and of the classifier's hidden layer.
        dropout: Dropout rate of the inputs of the composition and of the classifier's layers.
    """

    hidden_size: int = 300
    dropout: float = 0.5

    def __post_init__(self) -> None:
        check_range(self, "hidden_size", at_least=1)
        check_range(self, "dropout", at_least=0, below=1)


class Esim(nn.Module):
    """Enhanced sequential inference model (Chen et al. 2017, arXiv 1609.06038, sections 3.1 to 3.3).

        a, b = BiLSTM(text)                                                         input encoding (1, 2)
        e_ij = a_i b_j,  a~_i = sum_j softmax_j(e_ij) b_j                           soft alignment (11 to 13)
        m_i = [a_i; a~_i; a_i - a~_i; a_i * a~_i]                                   enhancement (14, 15)
        v = BiLSTM(ReLU(W m + b))                                                   composition (16, 17)
        logits = MLP([mean v_a; max v_a; mean v_b; max v_b])                        pooling (18 to 20), tanh

    Args:
        output_size: Width of vectors that are concatenated with the states of the input encoding, so that the alignment
            reads them (Peters et al. 2018, section 5.2); 0 for none.
    """

    def __init__(self, input_size: int, num_labels: int, options: EsimOptions, output_size: int = 0) -> None:
        super().__init__()
        width = options.hidden_size
        self.dropout = Dropout(options.dropout)
        self.encoder = LSTM(input_size, width)
        self.projection = nn.Linear(4 * (2 * width + output_size), width)
        self.composition = LSTM(width, width)
        self.classifier = LinearLayers(
            *(nn.Linear(8 * width, width), nn.Tanh(), Dropout(options.dropout), nn.Linear(width, num_labels))
        )

    def forward(
        self, vectors: Tensor, is_word: Tensor, is_second: Tensor | None = None, output_vectors: Tensor | None = None
    ) -> Tensor:
        """Compute (batch, num_labels) logits, see the module."""
        is_second = _second_text(is_word, is_second)
        packing = pack_texts(vectors, is_word, is_second)
        encoded = run_layer(self.encoder, vectors, packing)
        if output_vectors is not None:
            encoded = torch.cat([encoded, output_vectors.to(encoded.dtype)], -1)
        aligned = attention_pooling(encoded @ encoded.transpose(1, 2), encoded, _partners(is_word, is_second))
        enhanced = torch.cat([encoded, aligned, encoded - aligned, encoded * aligned], -1)
        projected = self.dropout(linear(self.projection, enhanced).relu())
        composed = run_layer(self.composition, projected, packing)
        pooled = [pool_tokens(composed, text, "mean+max") for text in text_masks(is_word, is_second).chunk(2)]
        return self.classifier(self.dropout(torch.cat(pooled, -1)))


@dataclass
class DecomposableAttentionOptions:
    """Options of `DecomposableAttention`.

    Attributes:
        hidden_size: Width of the projected vectors and of all feed-forward layers.
        dropout: Dropout rate of the inputs of feed-forward layers.
        intra_attention: Whether the words of each text attend to each other first (section 3.4).
    """

    hidden_size: int = 200
    dropout: float = 0.2
    intra_attention: bool = False

    def __post_init__(self) -> None:
        check_range(self, "hidden_size", at_least=1)
        check_range(self, "dropout", at_least=0, below=1)


class DecomposableAttention(nn.Module):
    """Decomposable attention, without recurrence (Parikh et al. 2016, arXiv 1606.01933).

        a_i = P w_i;  with intra-sentence attention (section 3.4, 7 and 8):
        f_ij = F_intra(a_i) F_intra(a_j),  a_i = [a_i; sum_j softmax_j(f_ij + d_(i-j)) a_j]
        e_ij = F(a_i) F(b_j),  beta_i = sum_j softmax_j(e_ij) b_j                   attend (1, 2)
        v_i = G([a_i; beta_i])                                                      compare (3)
        logits = H([sum_i v_a,i; sum_j v_b,j])                                      aggregate (4, 5)

    F, F_intra and G have two ReLU layers; H has two and the output layer. The distances i - j from -10 to 10 have a
    learned bias each, all others share one.
    """

    initializes_itself = True

    def __init__(self, input_size: int, num_labels: int, options: DecomposableAttentionOptions) -> None:
        super().__init__()
        width = options.hidden_size
        self.projection = nn.Linear(input_size, width, bias=False)
        self.intra = self._layers(width, width, options.dropout) if options.intra_attention else None
        if options.intra_attention:
            self.distance_bias = nn.Parameter(torch.empty(2 * MAX_DISTANCE + 2))  # the first: distances above the limit
            self.reset_parameters()
        word_size = width * (2 if options.intra_attention else 1)
        self.attend = self._layers(word_size, width, options.dropout)
        self.compare = self._layers(2 * word_size, width, options.dropout)
        self.aggregate = self._layers(2 * width, width, options.dropout)
        self.output = nn.Linear(width, num_labels)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialize the biases of distances to 0."""
        if self.intra is not None:
            init.zeros_(self.distance_bias)

    def _layers(self, input_size: int, width: int, dropout: float) -> LinearLayers:
        layers: list[nn.Module] = []
        for size in (input_size, width):
            layers += [Dropout(dropout), nn.Linear(size, width), nn.ReLU()]
        return LinearLayers(*layers)

    def forward(self, vectors: Tensor, is_word: Tensor, is_second: Tensor | None = None) -> Tensor:
        """Compute (batch, num_labels) logits, see the module."""
        is_second = _second_text(is_word, is_second)
        states = linear(self.projection, vectors)
        if self.intra is not None:
            hidden = self.intra(states)
            numbers = is_word.long().cumsum(1)
            distances = numbers[:, :, None] - numbers[:, None]
            indices = torch.where(distances.abs() > MAX_DISTANCE, 0, distances + MAX_DISTANCE + 1)
            scores = hidden @ hidden.transpose(1, 2) + self.distance_bias[indices]
            same_text = (is_second[:, :, None] == is_second[:, None]) & is_word[:, None]
            states = torch.cat([states, attention_pooling(scores, states, same_text)], -1)
        hidden = self.attend(states)
        aligned = attention_pooling(hidden @ hidden.transpose(1, 2), states, _partners(is_word, is_second))
        compared = self.compare(torch.cat([states, aligned], -1))
        texts = text_masks(is_word, is_second).chunk(2)
        summed = [(compared * text[..., None]).sum(1) for text in texts]
        return self.output(self.aggregate(torch.cat(summed, -1)))


@dataclass
class BiattentiveOptions:
    """Options of `BiattentiveNetwork`.

    Attributes:
        hidden_size: Width of the LSTMs per direction.
        maxout_pieces: Number of linear layers of a maxout layer.
        dropout: Dropout rate of the inputs of all layers.
    """

    hidden_size: int = 300
    maxout_pieces: int = 4
    dropout: float = 0.1

    def __post_init__(self) -> None:
        check_range(self, "hidden_size", "maxout_pieces", at_least=1)
        check_range(self, "dropout", at_least=0, below=1)


class BiattentiveNetwork(nn.Module):
    """Biattentive classification network of texts and pairs (McCann et al. 2017, arXiv 1708.00107, section 5)."""

    def __init__(self, input_size: int, num_labels: int, options: BiattentiveOptions) -> None:
        super().__init__()
        self.biattention = Biattention(input_size, options.hidden_size, options.dropout)
        self.classifier = maxout_classifier(options.hidden_size, num_labels, options.maxout_pieces, options.dropout)

    def forward(self, vectors: Tensor, is_word: Tensor, is_second: Tensor | None = None) -> Tensor:
        """Compute (batch, num_labels) logits, see the module."""
        is_second = on_host(forward_fill_padding, _second_text(is_word, is_second), is_word)
        return self.classifier(self.biattention(vectors, is_word, is_second, not is_traced(vectors)))


@dataclass
class SentenceOptions:
    """Options of `SentenceNetwork`.

    Attributes:
        hidden_size: Width of the LSTMs per direction.
        num_layers: Number of LSTM layers.
        attention_hops: Number of weighted means of the states; 0 for their maximum.
        attention_size: Width of the hidden layer that computes the attention.
        dropout: Dropout rate between LSTM layers and of the classifier's input.
    """

    hidden_size: int = 300
    num_layers: int = 1
    attention_hops: int = 0
    attention_size: int = 350
    dropout: float = 0.2

    def __post_init__(self) -> None:
        check_range(self, "hidden_size", "num_layers", "attention_size", at_least=1)
        check_range(self, "attention_hops", at_least=0)
        check_range(self, "dropout", at_least=0, below=1)


class SentenceNetwork(nn.Module):
    """Bidirectional LSTM of a text with max-pooling (Conneau et al. 2017, arXiv 1705.02364, section 3.2.2) or
    self-attention, `softmax(W_2 tanh(W_1 H^T)) H` without its penalty (Lin et al. 2017, arXiv 1703.03130, section 2),
    and a linear classifier.

    Args:
        output_size: Width of vectors that are concatenated with the LSTM's states before pooling; 0 for none.
    """

    def __init__(self, input_size: int, num_labels: int, options: SentenceOptions, output_size: int = 0) -> None:
        super().__init__()
        self.dropout = Dropout(options.dropout)
        self.layers = bidirectional_lstms(input_size, options.hidden_size, options.num_layers)
        state_size = 2 * options.hidden_size + output_size
        self.attention = None
        if options.attention_hops:
            self.attention = LinearLayers(
                nn.Linear(state_size, options.attention_size, bias=False),
                nn.Tanh(),
                nn.Linear(options.attention_size, options.attention_hops, bias=False),
            )
        self.classifier = nn.Linear(max(options.attention_hops, 1) * state_size, num_labels)

    def forward(
        self, vectors: Tensor, is_word: Tensor, is_second: Tensor | None = None, output_vectors: Tensor | None = None
    ) -> Tensor:
        """Compute (batch, num_labels) logits, see the module; a second text is a CtxError."""
        if not is_traced(vectors) and bool(_second_text(is_word, is_second).any()):
            raise CtxError(
                "A sentence network reads one text, but an example has two.",
                hint="use esim, decomposable_attention or biattentive for pairs.",
            )
        packing = pack_texts(vectors, is_word)
        states = run_bidirectional(self.layers, vectors, packing, self.dropout)[0][-1]
        if output_vectors is not None:
            states = torch.cat([states, output_vectors.to(states.dtype)], -1)
        if self.attention is None:
            pooled = pool_tokens(states, is_word, "max")
        else:
            scores = self.attention(states).transpose(1, 2)
            pooled = attention_pooling(scores, states, is_word[:, None]).flatten(1)
        return linear(self.classifier, self.dropout(pooled))


def _second_text(is_word: Tensor, is_second: Tensor | None) -> Tensor:
    """(batch, words) bool, the words of the second text; raises CtxError for an example without words."""
    if not is_traced(is_word):
        check_no_empty_rows(is_word)
    return on_host(torch.zeros_like, is_word) if is_second is None else on_host(torch.logical_and, is_second, is_word)


def pack_texts(vectors: Tensor, is_word: Tensor, is_second: Tensor | None = None) -> PackedSequences:
    """The words of each text of a batch as a sequence."""
    sequences = None
    if is_second is not None:
        sequences = on_host(lambda *masks: sequence_numbers(forward_fill_padding(*masks)), is_second, is_word)
    return PackedSequences.build(is_word, sequences, unpad=not is_traced(vectors))


def _partners(is_word: Tensor, is_second: Tensor) -> Tensor:
    """(batch, words, words) bool: the words of the other text, or of the same one in rows with a single text."""

    def mask(words: Tensor, second: Tensor) -> Tensor:
        is_pair = (words & second).any(1) & (words & ~second).any(1)
        return words[:, None] & ((second[:, :, None] != second[:, None]) | ~is_pair[:, None, None])

    return on_host(mask, is_word, is_second)
