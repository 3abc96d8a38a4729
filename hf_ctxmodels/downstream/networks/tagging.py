"""Taggers of words on word vectors: a bidirectional LSTM with a conditional random field or a softmax."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hf_ctxmodels.core.bio_tags import is_bio
from hf_ctxmodels.core.constants import IGNORE_INDEX
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import check_range
from hf_ctxmodels.heads.base import (
    ItemCounts,
    check_classes,
    cross_entropy_over_targets,
    mean_over_targets,
    validate_targets,
)
from hf_ctxmodels.layers.cpu.dropout import Dropout, VariationalDropout
from hf_ctxmodels.layers.crf import ConditionalRandomField, Constraints, Scores, max_marginals, viterbi
from hf_ctxmodels.layers.recurrent.highway import HighwayLSTM
from hf_ctxmodels.layers.recurrent.packing import PackedSequences, run_bidirectional
from hf_ctxmodels.layers.recurrent.rnn import LSTM


@dataclass
class TaggingOptions:
    """Options of `TaggingNetwork`.

    Attributes:
        hidden_size: Width of the LSTMs per direction.
        num_layers: Number of LSTM layers.
        dropout: Dropout rate of the states of each layer; the word vectors have the dropout of the features.
        variational_dropout: Drop the same features of all words of a sentence (Gal & Ghahramani 2016).
        highway: Layers of one direction, alternately forward and backward, with highway connections and dropout of
            their recurrent states (He et al. 2017, section 2.1), instead of bidirectional layers.
        crf: Conditional random field; else the labels are independent.
        constrained: Predict valid BIO labels only. With the conditional random field invalid labels also have
            probability 0 in training. Without effect on other labels, such as parts of speech.
        predicate_size: Width of the embeddings that mark the predicate (He et al. 2017, section 2.1); 0 for none.
    """

    hidden_size: int = 200
    num_layers: int = 1
    dropout: float = 0.5
    variational_dropout: bool = False
    highway: bool = False
    crf: bool = True
    constrained: bool = True
    predicate_size: int = 0

    def __post_init__(self) -> None:
        check_range(self, "hidden_size", "num_layers", at_least=1)
        check_range(self, "predicate_size", at_least=0)
        check_range(self, "dropout", at_least=0, below=1)


class TaggingNetwork(nn.Module):
    """Tagger of words: LSTM layers, a linear layer, and a conditional random field (Huang et al. 2015, arXiv
    1508.01991; Lample et al. 2016, arXiv 1603.01360), or a softmax.

    Args:
        input_size: Width of the word vectors.
        output_size: Width of vectors that are concatenated with the states before the output layer (Peters et al. 2018,
            section 3.3); 0 for none.
        labels: Names of the labels, for the constraints; without them there are none.
    """

    def __init__(
        self,
        input_size: int,
        num_labels: int,
        options: TaggingOptions,
        output_size: int = 0,
        labels: Sequence[str] = (),
    ) -> None:
        super().__init__()
        width, depth = options.hidden_size, options.num_layers
        self.dropout = (VariationalDropout if options.variational_dropout else Dropout)(options.dropout)
        self.predicate_embeddings = nn.Embedding(2, options.predicate_size) if options.predicate_size else None
        sizes = [input_size + options.predicate_size, *[width if options.highway else 2 * width] * depth]
        self.layers = nn.ModuleList(
            HighwayLSTM(size, width, options.dropout) if options.highway else LSTM(size, width) for size in sizes[:-1]
        )
        self.classifier = nn.Linear(sizes[-1] + output_size, num_labels)
        self.constraints = Constraints.bio(labels) if options.constrained and is_bio(labels) and labels else None
        self.crf = ConditionalRandomField(num_labels, self.constraints) if options.crf else None

    def forward(
        self,
        vectors: Tensor,
        is_word: Tensor,
        labels: Tensor | None = None,
        output_vectors: Tensor | None = None,
        num_items: ItemCounts = None,
        is_predicate: Tensor | None = None,
    ) -> tuple[Tensor | None, Tensor]:
        """Compute the loss with labels, and logits.

        Args:
            vectors: (batch, words, input) word vectors.
            is_word: (batch, words) bool, False at padding, which may be anywhere in a row.
            labels: (batch, words) class indices; -100 at words without target.
            output_vectors: (batch, words, output) vectors for the output layer.
            num_items: As in `heads.base.number_of_targets`.
            is_predicate: (batch, words), not 0 at the predicate.

        Returns:
            The mean over targets of the negative log-likelihood (nats), or None; and (batch, words, labels) logits. In
            training they are the emissions; in evaluation `argmax` of the logits is the result of `decode`: with a
            conditional random field or constraints they are the `max_marginals` of the labels.
        """
        emissions = self.emissions(vectors, is_word, output_vectors, is_predicate)
        loss = None
        if labels is not None:
            if self.crf is None:
                loss = cross_entropy_over_targets(emissions, labels, "labels", num_items)
            else:
                labels = validate_targets(labels, "labels", emissions.shape[:-1])
                check_classes(labels, emissions.shape[-1], "labels")
                labels = labels.masked_fill(~is_word, IGNORE_INDEX)
                total = -self.crf.log_likelihood(emissions, is_word, labels).sum()
                loss = mean_over_targets(total, labels, "labels", num_items)
        scores = self._sequence_scores()
        if self.training or scores is None:
            return loss, emissions
        return loss, max_marginals(emissions, is_word, scores)

    def decode(self, emissions: Tensor, is_word: Tensor) -> Tensor:
        """The best valid labels (batch, words) for the emissions, -100 at padding."""
        scores = self._sequence_scores()
        if scores is None:
            return emissions.argmax(-1).masked_fill(~is_word, IGNORE_INDEX)
        return viterbi(emissions, is_word, scores)

    def emissions(
        self, vectors: Tensor, is_word: Tensor, output_vectors: Tensor | None = None, is_predicate: Tensor | None = None
    ) -> Tensor:
        """(batch, words, labels) scores of the labels of each word; arguments as in `forward`."""
        if self.predicate_embeddings is not None:
            if is_predicate is None:
                raise CtxError("The tagger has embeddings of predicates.", hint="mark the predicate of each sentence.")
            embeddings = self.predicate_embeddings((is_predicate != 0).long()).to(vectors.dtype)
            vectors = torch.cat([vectors, embeddings], -1)
        packing = PackedSequences.build(is_word)
        if isinstance(self.layers[0], HighwayLSTM):
            states = self._run_highway(vectors, packing)
        else:
            states = self.dropout(run_bidirectional(self.layers, vectors, packing, self.dropout)[0][-1])
        if output_vectors is not None:
            states = torch.cat([states, output_vectors.to(states.dtype)], -1)
        return self.classifier(states)

    def _run_highway(self, states: Tensor, packing: PackedSequences) -> Tensor:
        """(batch, words, hidden) states of the last layer; the layers apply dropout themselves."""
        directions = packing.select_direction("forward"), packing.select_direction("backward")
        for depth, layer in enumerate(self.layers):
            direction = directions[depth % 2]
            states = direction.unpack(layer(direction.pack(states), direction))[0]
        return states

    def _sequence_scores(self) -> Scores | None:
        """Scores of sequences of labels; None if the labels are independent."""
        if self.crf is not None:
            return self.crf.scores()
        if self.constraints is None:
            return None
        transitions, starts = self.constraints.scores(self.classifier.weight.device)
        return Scores(transitions, starts, torch.zeros_like(starts))
