"""The span boundary head (Joshi et al. 2020, section 3.2)."""

import torch
from torch import Tensor, nn

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.inputs import is_traced, span_boundaries
from hf_ctxmodels.heads import IGNORE_INDEX
from hf_ctxmodels.layers.activations import get_activation
from hf_ctxmodels.layers.cpu.linear import linear
from hf_ctxmodels.layers.hook_points import HookPoint
from hf_ctxmodels.layers.lm_loss.cross_entropy import summed_cross_entropy
from hf_ctxmodels.models.spanbert.configuration_spanbert import CtxSpanBertConfig


class SpanBoundaryHead(nn.Module):
    """Predicts a masked token from the tokens before and after its span and its position in the span.

    Two linear layers, each with activation and LayerNorm, and an output layer with a separate bias.

    Args:
        config: The model's configuration.
    """

    def __init__(self, config: CtxSpanBertConfig) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.layer_norm_eps
        self.position_embeddings = nn.Embedding(config.max_pair_targets, config.pair_position_size)
        self.first_dense = nn.Linear(2 * width + config.pair_position_size, width)
        self.first_norm = nn.LayerNorm(width, eps=eps)
        self.second_dense = nn.Linear(width, width)
        self.second_norm = nn.LayerNorm(width, eps=eps)
        self.activation = get_activation(config.hidden_act)
        self.decoder_input = HookPoint()
        self.decoder = nn.Linear(width, config.vocab_size)

    def summed_loss(
        self,
        before: Tensor,
        after: Tensor,
        offsets: Tensor,
        targets: Tensor,
    ) -> Tensor:
        """Summed cross-entropy in nats.

        Args:
            before, after: (targets, hidden) encoder output at the boundaries of the span of each target.
            offsets: (targets,) position of the target in its span, from 0.
            targets: (targets,) token ids.
        """
        inputs = torch.cat([before, after, self.position_embeddings(offsets).to(before.dtype)], -1)
        states = self.first_norm(self.activation(linear(self.first_dense, inputs)))
        states = self.second_norm(self.activation(linear(self.second_dense, states)))
        return summed_cross_entropy(self.decoder, self.decoder_input(states), targets)


class BoundaryTargets:
    """Positions of the span boundaries of the targets. A span is a run of positions with `labels`.

    Args:
        labels, boundary_labels: (batch, length) int64, -100 where nothing is predicted.
        max_targets: Maximum number of predicted tokens per span.

    Attributes:
        positions: (batch, length) bool, True at the boundaries.
        before, after: (targets,) boundaries of each target in the flattened batch.
        offsets: (targets,) position of the target in its span, from 0.

    Raises:
        CtxError: A target is outside the spans, beyond their first `max_targets` tokens, or in a span at the beginning
            or the end of the sequence.
    """

    def __init__(self, labels: Tensor, boundary_labels: Tensor, max_targets: int) -> None:
        length = labels.shape[1]
        rows, columns = (boundary_labels != IGNORE_INDEX).nonzero(as_tuple=True)
        before, after = (ends[rows, columns] for ends in span_boundaries(labels != IGNORE_INDEX))
        self.offsets = columns - before - 1
        if not is_traced(labels):
            is_invalid = (before < 0) | (after >= length) | (self.offsets < 0) | (self.offsets >= max_targets)
            if bool(is_invalid.any()):
                index = [int(rows[is_invalid][0]), int(columns[is_invalid][0])]
                raise CtxError(
                    f"boundary_labels has an invalid target at {index}: expected one of the first {max_targets} tokens "
                    "of a span (a run of labels other than -100) with a token before and after it.",
                    hint="create labels and boundary_labels with DataCollatorForSpanBoundary and the model's "
                    f"max_pair_targets={max_targets}.",
                )
        self.before, self.after = rows * length + before, rows * length + after
        positions = torch.zeros(labels.numel(), dtype=torch.bool, device=labels.device)
        positions[self.before] = True
        positions[self.after] = True
        self.positions = positions.view(labels.shape)

    def output_indices(self, output_mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """(targets,) indices of `before` and `after` in the encoder output.

        Args:
            output_mask: (batch, length) bool, the positions in the output; None for all.
        """
        if output_mask is None:
            return self.before, self.after
        output_index = output_mask.flatten().cumsum(0) - 1
        return output_index[self.before], output_index[self.after]
