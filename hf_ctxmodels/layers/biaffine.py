"""Bilinear scores of the edges of a dependency graph (Dozat & Manning 2017, arXiv 1611.01734; Clark et al. 2018)."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import initialization as init

from hf_ctxmodels.layers.cpu.dropout import Dropout
from hf_ctxmodels.layers.cpu.linear import linear


class BiaffineScorer(nn.Module):
    """Scores the edges between all words and from the root (Clark et al. 2018, arXiv 1809.08370, section 3.3):

        s(u, t, r)    = ReLU(W_head h_u + b_head)^T (W_r + W) ReLU(W_dep h_t + b_dep)
        s(root, t, r) = w_r^T ReLU(W_dep h_t + b_dep) + b_r

    for the head u, the dependent t and the relation r. W is shared by all relations. The score of the root is the
    bilinear score of a learned root vector, with a bias.

    Args:
        head_size, dependent_size: Widths of the states of heads and of dependents.
        hidden_size: Width of both hidden layers.
        dropout: Dropout probability of the hidden layers.
    """

    initializes_itself = True

    def __init__(
        self, head_size: int, dependent_size: int, hidden_size: int, num_relations: int, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.num_relations = num_relations
        self.dropout = Dropout(dropout)
        self.head_layer = nn.Linear(head_size, hidden_size)
        self.dependent_layer = nn.Linear(dependent_size, hidden_size)
        self.shared_weight = nn.Linear(hidden_size, hidden_size, bias=False)
        self.relation_weights = nn.Linear(hidden_size, num_relations * hidden_size, bias=False)
        self.root_layer = nn.Linear(hidden_size, num_relations)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialize linear layers as Glorot & Bengio 2010, and W_r + W by the normal distribution that preserves the
        variance."""
        for layer in (self.head_layer, self.dependent_layer, self.root_layer):
            init.xavier_uniform_(layer.weight)
            init.zeros_(layer.bias)
        for layer in (self.shared_weight, self.relation_weights):
            init.normal_(layer.weight, std=(2 * layer.in_features) ** -0.5)

    def forward(self, heads: Tensor, dependents: Tensor, sequences: Tensor) -> Tensor:
        """Score all edges.

        Args:
            heads: (batch, words, head_size) states of the words as heads.
            dependents: (batch, words, dependent_size) states of the words as dependents.
            sequences: (batch, words) number of the sentence of each word; 0 at positions that are not heads, such as
                padding.

        Returns:
            (batch, words, 1 + words, relations) scores: of the root, and of the word in each column as the head of each
            word. The smallest finite number if the head is the word itself, or not a word of its sentence.
        """
        hidden_heads = self.dropout(F.relu(linear(self.head_layer, heads)))
        hidden_dependents = self.dropout(F.relu(linear(self.dependent_layer, dependents)))
        queries = linear(self.relation_weights, hidden_dependents).unflatten(-1, (self.num_relations, -1))
        queries = queries + linear(self.shared_weight, hidden_dependents)[..., None, :]
        word_scores = queries.flatten(1, 2) @ hidden_heads.transpose(1, 2)
        word_scores = word_scores.unflatten(1, (-1, self.num_relations)).transpose(2, 3)
        is_candidate = candidate_heads(sequences)[..., None]
        word_scores = word_scores.masked_fill(~is_candidate, torch.finfo(word_scores.dtype).min)
        root_scores = linear(self.root_layer, hidden_dependents)[:, :, None]
        return torch.cat([root_scores.to(word_scores.dtype), word_scores], 2)


def candidate_heads(sequences: Tensor) -> Tensor:
    """(batch, words) numbers of sentences, 0 for none -> (batch, words, words) bool, whether the word of each column
    (last axis) may be the head of each word: another word of the same sentence."""
    same_sequence = (sequences[:, :, None] == sequences[:, None, :]) & (sequences != 0)[:, None, :]
    itself = torch.eye(sequences.shape[1], dtype=torch.bool, device=sequences.device)
    return same_sequence & ~itself
