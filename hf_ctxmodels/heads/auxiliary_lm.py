"""Language modelling as an auxiliary objective of fine-tuning (Radford et al. 2018, section 3.2, equation 5)."""

from typing import Any

import torch
from torch import Tensor, nn

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.heads.base import IGNORE_INDEX, HeadModel, ItemCounts, mean_over_targets
from hf_ctxmodels.heads.causal_lm import next_token_targets
from hf_ctxmodels.layers.lm_loss.cross_entropy import chunked_cross_entropy, summed_cross_entropy


class WithLanguageModeling(HeadModel):
    """Adds a language modelling loss, weighted by `config.lm_loss_weight`, to the training loss of a task's head.

    A row's loss is the mean over its tokens, and rows count alike, as in the released code of GPT: short rows do not
    count less than long ones. With several rows for a target (choices) it is their mean; with several targets in a row
    (tokens) each counts once with the row's loss. So the term's number of targets is the task's, and
    `num_items_in_batch` makes accumulation exact for both.

    Evaluation mode gives the task's loss alone, which that of other models can be compared with. There is no term for
    `inputs_embeds`, where the tokens are unknown.

    The output layer is that of `output_layer`; else the word embeddings, to which it is tied.
    """

    def encode(self, **kwargs: Any) -> Any:
        """Run the decoder; the output keeps the tokens for the loss."""
        outputs = super().encode(**kwargs)
        outputs.tokens_read = {name: kwargs.get(name) for name in ("input_ids", "attention_mask", "sequence_ids")}
        return outputs

    def add_regularization(self, loss: Tensor, encoded: Any, targets: Tensor, name: str, counts: ItemCounts) -> Tensor:
        """The loss plus the weighted language modelling loss."""
        loss = super().add_regularization(loss, encoded, targets, name, counts)
        ids = encoded.tokens_read["input_ids"]
        if not self.training or not self.config.lm_loss_weight or ids is None:
            return loss
        total = self._summed_loss(encoded, _number_of_targets(targets))
        return loss + self.config.lm_loss_weight * mean_over_targets(total, targets, name, counts)

    def _summed_loss(self, encoded: Any, numbers: Tensor) -> Tensor:
        """The sum of the rows' losses, each times its number of targets.

        Args:
            encoded: The encoder's output, with `tokens_read` of (rows, length) tokens.
            numbers: (batch,) number of targets of each example; the rows of an example follow each other.
        """
        read = encoded.tokens_read
        ids, mask = read["input_ids"], read["attention_mask"]
        mask = mask if mask is not None and mask.dim() == 2 else None
        labels = ids if mask is None else ids.masked_fill(mask == 0, IGNORE_INDEX)
        targets = next_token_targets(labels, ids.shape[1], mask, read["sequence_ids"])
        target_mask = targets != IGNORE_INDEX
        rows = len(ids) // len(numbers)
        row_weights = numbers.repeat_interleave(rows) / rows / target_mask.sum(1).clamp(min=1)
        weights = row_weights[:, None].expand_as(targets)[target_mask]
        states = self.decoder_input(encoded.last_hidden_state[target_mask])
        next_ids = targets[target_mask]
        decoder = self.get_output_embeddings()
        if decoder is not None:
            return summed_cross_entropy(decoder, states, next_ids, weights)
        if not self.config.tie_word_embeddings:
            raise CtxError(
                f"{type(self).__name__} has no output layer for lm_loss_weight={self.config.lm_loss_weight}: it is not "
                "tied to the word embeddings.",
                hint="set lm_loss_weight=0.",
            )
        return chunked_cross_entropy(states, self._word_vectors(), None, next_ids, reduction="sum", weights=weights)

    def _word_vectors(self) -> Tensor:
        """(vocabulary, width) the tied table. What stands in its place, for example an adapter, is called."""
        table = self.get_input_embeddings()
        if type(table) is nn.Embedding:
            return table.weight
        return table(torch.arange(self.config.vocab_size, device=self.device))


def _number_of_targets(targets: Tensor) -> Tensor:
    """(batch,) float32 number of targets that are not -100 in each example."""
    counted = torch.ones_like(targets, dtype=torch.bool) if targets.is_floating_point() else targets != IGNORE_INDEX
    return counted.flatten(1).sum(1).float() if targets.dim() > 1 else counted.float()
