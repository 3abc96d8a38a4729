"""The coreference network as a model (Lee et al. 2017)."""

from typing import Any

from torch import Tensor, nn
from transformers.utils.generic import can_return_tuple

from hf_ctxmodels.downstream.networks.coreference import CoreferenceNetwork, CoreferenceOptions, CoreferenceOutput
from hf_ctxmodels.downstream.networks.modeling import CtxTaskNetworkHeadModel
from hf_ctxmodels.heads.base import ItemCounts, validate_targets
from hf_ctxmodels.layers.pooling import build_token_mask


class CtxTaskNetworkForCoreference(CtxTaskNetworkHeadModel):
    """Finds the coreferent spans of texts."""

    networks = {"coreference": (CoreferenceNetwork, CoreferenceOptions)}
    loss_targets = ("labels",)
    allows_output_features = False

    def make_network(self, network_class: Any, options: Any, output_size: int) -> nn.Module:
        """Create the network."""
        return network_class(self.config.feature_size, options)

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
        outputs = self.encode(attention_mask=attention_mask, **inputs, **kwargs)
        vectors = outputs.last_hidden_state
        is_word = build_token_mask(vectors, attention_mask)
        if labels is not None:
            labels = validate_targets(labels, "labels")
        output = self.network(vectors, is_word, sentence_ids, labels, num_items_in_batch)
        if labels is not None:
            output.loss = self.finish_loss(output.loss, outputs, labels, "labels", num_items_in_batch)
        return output
