"""Projected attention layers: task-specific attention of a small width in parallel to the layers of a shared encoder
(Stickland and Murray 2019, "BERT and PALs", arXiv 1902.02671)."""

from collections.abc import Collection
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.layers.attention.layouts import Layout
from hf_ctxmodels.layers.attention.modules import SelfAttention
from hf_ctxmodels.layers.attention.prepared_masks import AttentionMask
from hf_ctxmodels.layers.cpu.linear import linear
from hf_ctxmodels.layers.transformer import TransformerBlock


class ProjectedAttention(nn.Module):
    """The projected attention layers of one task.

    With the input h of a layer, `gelu(V_D attention(V_E h))` is added to the sum before the layer's last norm. The
    layers share the projections V_E to `size` features and V_D back, and each has its own multi-head attention. As in
    the released code (`BERTPals` and `BERTLayer` in modeling.py of AsaCooperStickland/Bert-n-Pals), it has no output
    projection, and GELU follows V_D. The released code has 6 heads.
    """

    def __init__(self, hidden_size: int, num_layers: int, size: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.down_proj = nn.Linear(hidden_size, size)
        self.up_proj = nn.Linear(size, hidden_size)
        self.attentions = nn.ModuleList(SelfAttention(size, heads, dropout=dropout) for _ in range(num_layers))
        for attention in self.attentions:
            attention.out_proj = nn.Identity()

    def forward(self, hidden_states: Tensor, layout: Layout, mask: AttentionMask, layer_index: int) -> Tensor:
        """(..., hidden) input of a layer at all tokens -> (..., hidden) at the tokens that the layer computes."""
        context, _ = self.attentions[layer_index](linear(self.down_proj, hidden_states), layout, mask)
        return F.gelu(linear(self.up_proj, context))


class TaskAttention(nn.Module):
    """The projected attention layers of all tasks, hooked to the blocks of an encoder.

    Args:
        encoder: A post-norm encoder without relative positions, such as BERT; the encoder does not become a submodule.
        tasks: Names of the tasks.
        size: Width of the projected attention, a multiple of `heads`.

    Attributes:
        members: Task -> its layers.
        active: The task whose layers are applied; None for none.

    Raises:
        CtxError: The encoder has other layers, or the size is not a multiple of the heads.
    """

    def __init__(self, encoder: Any, tasks: Collection[str], size: int, heads: int) -> None:
        super().__init__()
        blocks = list(getattr(encoder, "layers", ()))
        if not blocks or not all(_is_supported(block) for block in blocks):
            raise CtxError(
                f"{type(encoder).__name__} does not support projected attention.",
                hint="use an encoder like BERT: norms after the sums, no relative positions.",
            )
        if size < 1 or heads < 1 or size % heads:
            raise CtxError(
                f"size={size} is not a multiple of heads={heads}.",
                location="projected attention",
                hint="use a size such as 204 with 12 heads.",
            )
        dropout = blocks[0].attention.attention_dropout
        self.members = nn.ModuleDict(
            {task: ProjectedAttention(encoder.config.hidden_size, len(blocks), size, heads, dropout) for task in tasks}
        )
        self.active: str | None = None
        self._input: tuple[Tensor, Layout, AttentionMask] | None = None
        for block in {id(block): block for block in blocks}.values():  # layers may share a block (ALBERT)
            block.register_forward_pre_hook(self._record_input)
            block.feed_forward_residual.register_forward_pre_hook(self._add_to_output)

    def _record_input(self, block: nn.Module, arguments: tuple[Any, ...]) -> None:
        self._input = None if self.active is None else arguments[:3]  # type: ignore[assignment]

    def _add_to_output(self, residual_sum: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Add the active layer to the output of the feed-forward network; arguments as in `ResidualSum`."""
        if self.active is None or self._input is None:
            return None
        hidden_states, output, norm, layer_index = arguments
        inputs, self._input = self._input, None  # frees the memory
        return hidden_states, output + self.members[self.active](*inputs, layer_index), norm, layer_index


def _is_supported(block: Any) -> bool:
    if not isinstance(block, TransformerBlock) or block.norm != "post" or block.cross_attention is not None:
        return False
    return type(block.attention) is SelfAttention
