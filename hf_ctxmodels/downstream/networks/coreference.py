"""Coreference resolution by ranking the antecedents of spans (Lee et al. 2017, "End-to-end Neural Coreference
Resolution", arXiv 1707.07045), with the coarse-to-fine pruning of Lee et al. 2018 (arXiv 1804.05392, section 4)."""

import math
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import initialization as init
from transformers.utils import ModelOutput
from transformers.utils.generic import can_return_tuple

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import check_range
from hf_ctxmodels.core.host_copies import host_copy
from hf_ctxmodels.core.inputs import check_ids
from hf_ctxmodels.downstream.networks.modeling import CtxTaskNetworkHeadModel
from hf_ctxmodels.heads.base import ItemCounts, check_target_shape, mean_over_targets, validate_targets
from hf_ctxmodels.layers.cpu.dropout import Dropout
from hf_ctxmodels.layers.recurrent.packing import PackedSequences, run_bidirectional
from hf_ctxmodels.layers.recurrent.rnn import bidirectional_lstms

NO_ANTECEDENT = -1
_DISTANCE_BOUNDS = (2, 3, 4, 5, 8, 16, 32, 64)  # lower bounds of the distances' classes 1, 2, ..., 8 (section 7)


@dataclass(frozen=True)
class CoreferenceOptions:
    """Sizes of the network; the defaults are from Lee et al. 2017, section 7, except `max_antecedents`.

    Attributes:
        hidden_size: Width of each direction of the biLSTM.
        num_layers: Layers of the biLSTM; 0 for the input vectors themselves.
        scorer_size, scorer_layers: Width and number of the hidden layers of both scorers.
        feature_size: Width of the embeddings of span widths and distances.
        dropout: Dropout probability of the states and hidden layers.
        max_span_width: Words of the longest span; longer mentions cannot be predicted.
        spans_per_word: Spans that are kept, as a multiple of the number of words.
        max_antecedents: Antecedents of a span that are scored, the best by their coarse score.
    """

    hidden_size: int = 200
    num_layers: int = 1
    scorer_size: int = 150
    scorer_layers: int = 2
    feature_size: int = 20
    dropout: float = 0.2
    max_span_width: int = 10
    spans_per_word: float = 0.4
    max_antecedents: int = 50

    def __post_init__(self) -> None:
        check_range(self, "num_layers", at_least=0)
        names = ("hidden_size", "scorer_size", "scorer_layers", "feature_size", "max_span_width", "max_antecedents")
        check_range(self, *names, at_least=1)
        check_range(self, "dropout", at_least=0, below=1)
        check_range(self, "spans_per_word", above=0)


@dataclass
class CoreferenceOutput(ModelOutput):
    """Spans and their antecedents; rows with fewer spans are padded at the end.

    Attributes:
        loss: Negative log-likelihood in nats of the correct antecedents, divided by the number of mentions.
        spans: (batch, spans, 2) first word and the word after the last, in order; words of a row are counted without
            padding. -1 at padding.
        mention_scores: (batch, spans) scores s_m, -inf at padding.
        candidates: (batch, spans, antecedents) index of each scored antecedent in `spans`.
        antecedent_scores: (batch, spans, antecedents) scores s(i, j), -inf at padding; "no antecedent" has the score 0.
        antecedents: (batch, spans) index of the best antecedent in `spans`; -1 for none.
    """

    loss: Tensor | None = None
    spans: Tensor | None = None
    mention_scores: Tensor | None = None
    candidates: Tensor | None = None
    antecedent_scores: Tensor | None = None
    antecedents: Tensor | None = None


class CoreferenceNetwork(nn.Module):
    """Scores spans as mentions, keeps the best, and scores the antecedents of each.

        g_i     = [x*_start; x*_end; sum_t softmax_t(FFNN(x*_t)) x_t; width]      over the words t of span i
        s_m(i)  = FFNN(g_i)
        s(i, j) = s_m(i) + s_m(j) + g_i W g_j + FFNN([g_i; g_j; g_i * g_j; distance]),    s(i, none) = 0
        P(j)    = softmax over the antecedents j of s(i, j)

    x are the input vectors and x* the states of the biLSTM, which reads each sentence separately; spans lie within a
    sentence. The spans with the highest s_m are kept, `spans_per_word` per word, without a span that crosses a
    better one. Of the spans before span i, those with the highest s_m(i) + s_m(j) + g_i W g_j are scored. The
    distance is the number of spans between i and j in the classes 1, 2, 3, 4, 5-7, 8-15, 16-31, 32-63, 64+. The loss
    maximizes the probability of all correct antecedents together; a span without one has the antecedent none.

    Args:
        input_size: Width of the word vectors.
    """

    initializes_itself = True

    def __init__(self, input_size: int, options: CoreferenceOptions) -> None:
        super().__init__()
        self.options = options
        hidden = options.scorer_size
        state_size = 2 * options.hidden_size if options.num_layers else input_size
        self.dropout = Dropout(options.dropout)
        self.lstm = bidirectional_lstms(input_size, options.hidden_size, options.num_layers)
        self.head_scorer = nn.Sequential(
            nn.Linear(state_size, hidden), *hidden_layers(hidden, options.scorer_layers - 1, options.dropout)
        )
        self.width_embeddings = nn.Embedding(options.max_span_width, options.feature_size)
        span_size = 2 * state_size + input_size + options.feature_size
        # The first layer of each scorer is divided by its inputs: most of it is computed once for each word or span.
        self.start_layer = nn.Linear(state_size, hidden)
        self.end_layer = nn.Linear(state_size, hidden, bias=False)
        self.head_layer = nn.Linear(input_size, hidden, bias=False)
        self.width_layer = nn.Linear(options.feature_size, hidden, bias=False)
        self.mention_scorer = hidden_layers(hidden, options.scorer_layers - 1, options.dropout)
        self.coarse_weight = nn.Linear(span_size, span_size, bias=False)
        self.distance_embeddings = nn.Embedding(len(_DISTANCE_BOUNDS) + 1, options.feature_size)
        self.anaphor_layer = nn.Linear(span_size, hidden)
        self.antecedent_layer = nn.Linear(span_size, hidden, bias=False)
        self.product_layer = nn.Linear(span_size, hidden, bias=False)
        self.distance_layer = nn.Linear(options.feature_size, hidden, bias=False)
        self.antecedent_scorer = hidden_layers(hidden, options.scorer_layers - 1, options.dropout)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialize weights by the uniform distribution that preserves the variance (Glorot & Bengio 2010), biases by
        0."""
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                init.xavier_uniform_(module.weight)
            if isinstance(module, nn.Linear) and module.bias is not None:
                init.zeros_(module.bias)

    def forward(
        self,
        vectors: Tensor,
        is_word: Tensor,
        sentence_ids: Tensor | None = None,
        labels: Tensor | None = None,
        num_items: ItemCounts = None,
    ) -> CoreferenceOutput:
        """Find the best antecedent of each span of a text.

        Args:
            vectors: (batch, words, input) vectors.
            is_word: (batch, words) bool, False at padding, on either side.
            sentence_ids: (batch, words) number of each word's sentence within its row, below `words`; None for one
                sentence.
            labels: (batch, words, max_span_width) cluster of the mention that begins at a word and has 1, 2, ... words;
                -100 for no mention. A cluster of one mention is ignored by the loss.
            num_items: The number of mentions to divide the loss by, see `heads.base`.

        Raises:
            CtxError: A row has no words, or sentence numbers or labels have another shape or range.
        """
        if not bool(host_copy(is_word).any(1).all()):
            raise CtxError("A text has no words.", location="coreference", hint="remove empty texts.")
        if sentence_ids is None:
            sentence_ids = torch.zeros_like(is_word, dtype=torch.int64)
        check_target_shape(sentence_ids, "sentence_ids", is_word.shape)
        check_ids("sentence_ids", sentence_ids, is_word.shape[1], "words")
        states = vectors
        if self.options.num_layers:
            packing = PackedSequences.build(is_word, sentence_ids)
            states = self.dropout(run_bidirectional(self.lstm, vectors, packing, self.dropout)[0][-1])
        words = WordSpans.of(is_word, sentence_ids, self.options.max_span_width)
        vectors, states = vectors[is_word], states[is_word]
        weights = words.attention(self.head_scorer(states)[:, 0])
        widths = self.dropout(self.width_embeddings.weight)
        mention_scores = self.mention_scores(vectors, states, weights, widths, words)
        span_indices, is_kept = self._prune(mention_scores, words.rows, len(is_word))
        starts, lengths = span_indices // self.options.max_span_width, span_indices % self.options.max_span_width + 1
        heads = (weights[starts, lengths - 1][..., None, :] @ vectors[words.positions[starts]])[..., 0, :]
        kept_spans = torch.cat([states[starts], states[starts + lengths - 1], heads, widths[lengths - 1]], -1)
        kept_scores = mention_scores.flatten()[span_indices].masked_fill(~is_kept, -math.inf)

        candidates, scores = self.antecedent_scores(kept_spans, kept_scores, is_kept)
        best = F.pad(scores, (1, 0)).argmax(-1, keepdim=True)  # 0 for no antecedent
        antecedents = candidates.gather(2, (best - 1).clamp(min=0)).masked_fill(best == 0, NO_ANTECEDENT)[..., 0]
        loss = None
        if labels is not None:
            check_target_shape(labels, "labels", (*is_word.shape, self.options.max_span_width))
            clusters = labels[is_word].flatten()[span_indices].masked_fill(~is_kept, NO_ANTECEDENT)
            loss = mean_over_targets(
                antecedent_loss(scores, candidates, clusters, is_kept), labels, "labels", num_items
            )
        first_words = (is_word.sum(1).cumsum(0) - is_word.sum(1))[:, None, None]
        word_spans = (torch.stack([starts, starts + lengths], -1) - first_words).masked_fill(~is_kept[..., None], -1)
        return CoreferenceOutput(loss, word_spans, kept_scores, candidates, scores, antecedents)

    def mention_scores(
        self, vectors: Tensor, states: Tensor, weights: Tensor, widths: Tensor, words: "WordSpans"
    ) -> Tensor:
        """Score all spans as mentions.

        The linear layer of a weighted sum is the weighted sum of the linear layer, so that no span is represented.

        Args:
            vectors, states: (words, width) inputs and states of the words of all rows, without padding.
            weights: (words, max_span_width, max_span_width) attention of each span to its words.
            widths: (max_span_width, feature_size) embeddings.

        Returns:
            (words, max_span_width) scores of spans by their first word and number of words, -inf where there is none.
        """
        hidden = self.start_layer(states)[:, None] + self.end_layer(states)[words.positions]
        hidden = hidden + weights @ self.head_layer(vectors)[words.positions] + self.width_layer(widths)
        return self.mention_scorer(hidden)[..., 0].masked_fill(~words.is_span, -math.inf)

    def _prune(self, mention_scores: Tensor, rows: Tensor, batch_size: int) -> tuple[Tensor, Tensor]:
        """(batch, spans) indices of the selected spans in the flattened (words, max_span_width), in order, and a mask
        that is False at padding."""
        scores, row_words = host_copy(mention_scores.detach()), torch.bincount(host_copy(rows), minlength=batch_size)
        span_indices, first = [], 0
        for num_words in row_words.tolist():
            limit = math.ceil(self.options.spans_per_word * num_words)
            indices = select_spans(scores[first : first + num_words], limit)
            span_indices.append(torch.tensor(indices) + first * self.options.max_span_width)
            first += num_words
        padded = nn.utils.rnn.pad_sequence(span_indices, batch_first=True, padding_value=-1).to(rows.device)
        return padded.clamp(min=0), padded >= 0

    def antecedent_scores(self, spans: Tensor, mention_scores: Tensor, is_kept: Tensor) -> tuple[Tensor, Tensor]:
        """Choose the antecedents of each span by their coarse score, and score them.

        Args:
            spans: (batch, spans, width) representations, in order.
            mention_scores: (batch, spans) scores, -inf at padding.
            is_kept: (batch, spans) bool, False at padding.

        Returns:
            (batch, spans, antecedents) indices and scores, -inf where a span has fewer antecedents.
        """
        order = torch.arange(spans.shape[1], device=spans.device)
        distances = order[:, None] - order
        is_antecedent = (distances > 0) & is_kept[:, None] & is_kept[..., None]
        mention_scores = mention_scores.masked_fill(~is_kept, 0)
        coarse = self.dropout(self.coarse_weight(spans)) @ spans.transpose(1, 2)
        coarse = coarse + mention_scores[:, None] + mention_scores[..., None]
        coarse = coarse.masked_fill(~is_antecedent, -math.inf)
        coarse, candidates = coarse.topk(min(self.options.max_antecedents, spans.shape[1]), -1)

        batch = torch.arange(len(spans), device=spans.device)[:, None, None]
        bounds = torch.tensor(_DISTANCE_BOUNDS, device=spans.device)
        distance_classes = torch.bucketize(order[None, :, None] - candidates, bounds, right=True)
        hidden = self.anaphor_layer(spans)[:, :, None] + self.antecedent_layer(spans)[batch, candidates]
        hidden = hidden + self.product_layer(spans[:, :, None] * spans[batch, candidates])
        hidden = hidden + self.distance_layer(self.dropout(self.distance_embeddings(distance_classes)))
        return candidates, coarse + self.antecedent_scorer(hidden)[..., 0]


@dataclass(frozen=True)
class WordSpans:
    """The spans of the words of all rows, without padding.

    Attributes:
        rows: (words,) row of each word.
        positions: (words, max_span_width) indices of each word and the next ones.
        is_span: (words, max_span_width) bool, whether the span from a word to the next ones lies within a sentence.
    """

    rows: Tensor
    positions: Tensor
    is_span: Tensor

    @classmethod
    def of(cls, is_word: Tensor, sentence_ids: Tensor, max_span_width: int) -> Self:
        """The spans of at most `max_span_width` words; arguments as in `CoreferenceNetwork.forward`."""
        rows, sentences = is_word.nonzero()[:, 0], sentence_ids[is_word]
        positions = torch.arange(len(rows), device=rows.device)[:, None]
        positions = positions + torch.arange(max_span_width, device=rows.device)
        is_span = positions < len(rows)
        positions = positions.clamp(max=len(rows) - 1)
        is_span &= (rows[positions] == rows[:, None]) & (sentences[positions] == sentences[:, None])
        return cls(rows, positions, is_span)

    def attention(self, scores: Tensor) -> Tensor:
        """(words,) scores -> (words, max_span_width, max_span_width) softmax over the words of each span, 0 for words
        after its last."""
        width = self.positions.shape[1]
        is_after = torch.ones(width, width, dtype=torch.bool, device=scores.device).triu(1)
        return scores[self.positions][:, None].expand(-1, width, -1).masked_fill(is_after, -math.inf).softmax(-1)


def hidden_layers(size: int, num_further: int, dropout: float) -> nn.Sequential:
    """The feed-forward network after its first linear layer: activations, further hidden layers, and a score."""
    layers: list[nn.Module] = []
    for _ in range(num_further):
        layers += [nn.ReLU(), Dropout(dropout), nn.Linear(size, size)]
    return nn.Sequential(*layers, nn.ReLU(), Dropout(dropout), nn.Linear(size, 1))


def select_spans(scores: Tensor, limit: int) -> list[int]:
    """Choose the spans with the highest scores such that none crosses another (Lee et al. 2017, section 5).

    Args:
        scores: (words, max_span_width) scores of spans by their first word and number of words, -inf for no span; on
            the CPU.
        limit: Maximum number of spans.

    Returns:
        Indices in the flattened scores, in ascending order: by first word, then by the number of words.
    """
    num_words, width = scores.shape
    last_of_start, first_of_end = list(range(num_words)), list(range(num_words))  # longest chosen span at a word
    ordered = scores.flatten().sort(descending=True, stable=True)
    selected: list[int] = []
    for index in ordered.indices[ordered.values > -math.inf].tolist():
        if len(selected) == limit:
            break
        first, last = index // width, index // width + index % width
        if any(last_of_start[word] > last for word in range(first + 1, last + 1)):
            continue
        if any(first_of_end[word] < first for word in range(first, last)):
            continue
        selected.append(index)
        last_of_start[first] = max(last_of_start[first], last)
        first_of_end[last] = min(first_of_end[last], first)
    return sorted(selected)


def antecedent_loss(scores: Tensor, candidates: Tensor, clusters: Tensor, is_kept: Tensor) -> Tensor:
    """Summed negative log-likelihood in nats of all correct antecedents of each span (Lee et al. 2017, equation in
    section 6).

    Args:
        scores, candidates: (batch, spans, antecedents) scores and indices of antecedents.
        clusters: (batch, spans) cluster of each span, negative for no mention.
        is_kept: (batch, spans) bool, False at padding.
    """
    batch = torch.arange(len(clusters), device=clusters.device)[:, None, None]
    is_correct = (clusters[batch, candidates] == clusters[..., None]) & (clusters >= 0)[..., None]
    is_correct &= scores > -math.inf
    is_correct = torch.cat([~is_correct.any(-1, keepdim=True), is_correct], -1)
    all_scores = F.pad(scores.float(), (1, 0))
    correct_scores = all_scores.masked_fill(~is_correct, -math.inf)
    return ((all_scores.logsumexp(-1) - correct_scores.logsumexp(-1)) * is_kept).sum()


class CtxTaskNetworkForCoreference(CtxTaskNetworkHeadModel):
    """Finds the coreferent spans of texts."""

    networks = {"coreference": (CoreferenceNetwork, CoreferenceOptions)}
    has_labels = False
    loss_targets = ("labels",)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        sentence_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: ItemCounts = None,
        **kwargs: Any,
    ) -> CoreferenceOutput:
        """Find the spans and their antecedents, and compute the loss with `labels`. Other arguments as in the base
        model.

        Args:
            sentence_ids: (batch, words) number of the sentence of each word, see `CoreferenceNetwork`.
            labels: (batch, words, max_span_width) clusters of mentions, see `CoreferenceNetwork`.
        """
        inputs = {"input_ids": input_ids, "inputs_embeds": inputs_embeds}
        outputs, vectors, is_word = self.embed_words(attention_mask, **inputs, **kwargs)
        labels = None if labels is None else validate_targets(labels, "labels")
        output = self.network(vectors, is_word, sentence_ids, labels, num_items_in_batch)
        if labels is not None:
            output.loss = self.finish_loss(output.loss, outputs, labels, "labels", num_items_in_batch)
        return output
