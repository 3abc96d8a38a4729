"""CVT for dependency parsing (Clark et al. 2018, section 3.3)."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers.utils.generic import can_return_tuple

from hf_ctxmodels.heads import ItemCounts
from hf_ctxmodels.heads.dependency_parsing import best_relations, edge_labels, edge_loss
from hf_ctxmodels.layers.biaffine import BiaffineScorer
from hf_ctxmodels.models.cvt.configuration_cvt import EDGE_VIEWS, CtxCvtConfig
from hf_ctxmodels.models.cvt.modeling_cvt import CtxCvtHeadModel, CtxCvtOutput, build_view_modules
from hf_ctxmodels.tokenizers.character_level import SENTENCE_END, SENTENCE_START


class CrossViewParsers(nn.Module):
    """Primary scores of edges, from all layers of both words, and auxiliary scores from partial views (section 3.3).

    A view is one direction of the first layer for heads and one for dependents, in this order: "forward_forward",
    "forward_backward", "backward_forward" and "backward_backward".
    """

    def __init__(self, config: CtxCvtConfig, num_relations: int) -> None:
        super().__init__()
        size, width = config.prediction_size, config.projection_size
        self.primary = BiaffineScorer(config.head_input_size, config.head_input_size, size, num_relations)
        self.auxiliary = build_view_modules(
            config, EDGE_VIEWS, lambda: BiaffineScorer(width, width, size, num_relations)
        )

    def forward(self, states: Tensor, sequences: Tensor) -> Tensor:
        """(batch, words, input) states and (batch, words) sequence numbers, 0 at positions that are not words ->
        (batch, words, (1 + words) * relations) scores, see `BiaffineScorer`."""
        return self.primary(states, states, sequences).flatten(2)

    def get_views(self, states: Tensor, sequences: Tensor) -> dict[str, Tensor]:
        """View name -> scores as in `forward`, from the (batch, words, 2 * width) states of the bidirectional first
        layer."""
        forward, backward = states.chunk(2, -1)
        views = {
            "forward_forward": (forward, forward),
            "forward_backward": (forward, backward),
            "backward_forward": (backward, forward),
            "backward_backward": (backward, backward),
        }
        names = [name.removesuffix("_view") for name in self.auxiliary]
        return {name: self.auxiliary[f"{name}_view"](*views[name], sequences).flatten(2) for name in names}


@dataclass
class CtxCvtParsingOutput(CtxCvtOutput):
    """Output of `CtxCvtForDependencyParsing`.

    Attributes:
        logits: (batch, words, 1 + words, relations) primary scores, see `heads.dependency_parsing`.
        arc_scores: (batch, words, 1 + words) log-probability of the best relation to each head; only in evaluation.
        arc_relations: (batch, words, 1 + words) index of this relation; only in evaluation.
    """

    arc_scores: Tensor | None = None
    arc_relations: Tensor | None = None


class CtxCvtForDependencyParsing(CtxCvtHeadModel):
    """A graph-based dependency parser: the head and the relation of each word (section 3.3).

    The head of a word is the root or another word of its sentence, but not the start or end of the sentence, `<S>` and
    `</S>`. Without `input_ids` these are candidates, too.
    """

    has_word_views = True

    def build_predictors(self, config: CtxCvtConfig, labels: int) -> nn.Module:
        """Create the primary and the auxiliary parsers; `labels` is the number of relations."""
        return CrossViewParsers(config, labels)

    def number_words(self, token_mask: Tensor, sequence_ids: Tensor | None, input_ids: Tensor | None) -> Tensor:
        """As in the base class, with 0 at `<S>` and `</S>`, too."""
        sequences = super().number_words(token_mask, sequence_ids, input_ids)
        if input_ids is None:
            return sequences
        is_word = (input_ids[..., 1] != SENTENCE_START) & (input_ids[..., 1] != SENTENCE_END)
        return sequences * is_word.to(sequences.device)

    def supervised_loss(self, logits: Tensor, labels: Tensor, num_items: ItemCounts) -> Tensor:
        """Mean cross-entropy of the edges, see `edge_loss`."""
        return edge_loss(logits, labels, num_items)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        sequence_ids: Tensor | None = None,
        labels: Tensor | None = None,
        heads: Tensor | None = None,
        views: Tensor | None = None,
        task: str | None = None,
        output_hidden_states: bool | None = None,
        num_items_in_batch: ItemCounts = None,
        **kwargs: Any,
    ) -> CtxCvtParsingOutput:
        """Compute the scores of edges, and the loss with `labels` and `heads`, or with `views`. Other arguments as in
        `CtxCvtHeadModel.forward`.

        Args:
            labels: (batch, words) relations of words to their heads; -100 is ignored.
            heads: (batch, words) columns of the heads, -1 for the root; ignored where `labels` is -100.
            views: (batch, words): 1 at the words whose auxiliary predictions are trained, else -100.
        """
        task = self.resolve_task(task)
        parsers: Any = self.predictors[task]
        num_relations = parsers.primary.num_relations
        labels = self.validate_token_targets(labels, "labels", input_ids, inputs_embeds)
        if labels is not None:
            labels = edge_labels(labels, heads, num_relations)
        output = super().forward(
            input_ids=input_ids,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            sequence_ids=sequence_ids,
            labels=labels,
            views=views,
            task=task,
            output_hidden_states=output_hidden_states,
            num_items_in_batch=num_items_in_batch,
            **{**kwargs, "return_dict": True},
        )
        parsed = CtxCvtParsingOutput(**output)
        if output.logits is not None:
            parsed.logits = output.logits.unflatten(2, (-1, num_relations))
            if not self.training:
                parsed.arc_scores, parsed.arc_relations = best_relations(parsed.logits)
        return parsed
