"""A dependency parser on word vectors: a bidirectional LSTM and bilinear scores of the edges (Dozat & Manning 2017,
arXiv 1611.01734)."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers.utils.generic import can_return_tuple

from hf_ctxmodels.core.flags import check_range
from hf_ctxmodels.downstream.networks.modeling import CtxTaskNetworkHeadModel
from hf_ctxmodels.heads.base import ItemCounts, validate_targets
from hf_ctxmodels.heads.dependency_parsing import DependencyParsingOutput, best_relations, edge_labels, edge_loss
from hf_ctxmodels.layers.biaffine import BiaffineScorer
from hf_ctxmodels.layers.cpu.dropout import Dropout
from hf_ctxmodels.layers.recurrent.packing import PackedSequences, run_bidirectional
from hf_ctxmodels.layers.recurrent.rnn import bidirectional_lstms


@dataclass(frozen=True)
class ParsingOptions:
    """Options of `ParsingNetwork`.

    Attributes:
        hidden_size: Width of each direction of the biLSTM.
        num_layers: Layers of the biLSTM; 0 for the input vectors themselves.
        scorer_size: Width of the hidden layers of heads and dependents.
        dropout: Dropout probability of the states and hidden layers (Dozat & Manning 2017, table 1).
    """

    hidden_size: int = 200
    num_layers: int = 1
    scorer_size: int = 200
    dropout: float = 0.33

    def __post_init__(self) -> None:
        check_range(self, "num_layers", at_least=0)
        check_range(self, "hidden_size", "scorer_size", at_least=1)
        check_range(self, "dropout", at_least=0, below=1)


class ParsingNetwork(nn.Module):
    """Scores of the edges between the words of a sentence, see `BiaffineScorer`, from the states of a biLSTM.

    Args:
        input_size: Width of the word vectors.
    """

    def __init__(self, input_size: int, num_relations: int, options: ParsingOptions) -> None:
        super().__init__()
        self.dropout = Dropout(options.dropout)
        self.lstm = bidirectional_lstms(input_size, options.hidden_size, options.num_layers)
        state_size = 2 * options.hidden_size if options.num_layers else input_size
        self.scorer = BiaffineScorer(state_size, state_size, options.scorer_size, num_relations, options.dropout)

    def forward(self, vectors: Tensor, is_word: Tensor) -> Tensor:
        """(batch, words, input) vectors, and (batch, words) bool, False at padding -> (batch, words, 1 + words,
        relations) scores."""
        states = vectors
        if len(self.lstm):
            packing = PackedSequences.build(is_word)
            states = self.dropout(run_bidirectional(self.lstm, vectors, packing, self.dropout)[0][-1])
        return self.scorer(states, states, is_word.to(states.device).long())


class CtxTaskNetworkForDependencyParsing(CtxTaskNetworkHeadModel):
    """A dependency parser of the words of sentences."""

    networks = {"biaffine": (ParsingNetwork, ParsingOptions)}
    loss_targets = ("labels",)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        heads: Tensor | None = None,
        num_items_in_batch: ItemCounts = None,
        **kwargs: Any,
    ) -> DependencyParsingOutput:
        """Compute the scores of edges, and the loss with `labels` and `heads`. Other arguments as in the base model.

        Args:
            labels: (batch, words) relations of words to their heads; -100 is ignored.
            heads: (batch, words) columns of the heads, -1 for the root; ignored where `labels` is -100.
        """
        inputs = {"input_ids": input_ids, "inputs_embeds": inputs_embeds}
        outputs, vectors, is_word = self.embed_words(attention_mask, **inputs, **kwargs)
        logits = self.network(vectors, is_word)
        loss = None
        if labels is not None:
            labels = validate_targets(labels, "labels", vectors.shape[:2])
            edges = edge_labels(labels, heads, self.config.num_labels)
            loss = edge_loss(logits.flatten(2), edges, num_items_in_batch)
            loss = self.finish_loss(loss, outputs, labels, "labels", num_items_in_batch)
        if self.training:
            return DependencyParsingOutput(loss=loss, logits=logits)
        return DependencyParsingOutput(loss, logits, *best_relations(logits))
