"""Inference of a Transformer block on a CPU with prepacked weights and few operators.

In a small model, a sentence of 32 tokens takes as long between the operators as in them. `PrepackedBlock` calls oneDNN,
attention and the norms without the modules around them, and activates and adds in place.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.module import _has_any_global_hook

from hf_ctxmodels.layers.attention.backends import attend
from hf_ctxmodels.layers.attention.layouts import Layout
from hf_ctxmodels.layers.attention.prepared_masks import AttentionMask, PackedMask
from hf_ctxmodels.layers.cpu.linear import CHUNK_ROWS, are_plain_tensors, can_use_onednn, onednn_linear


class PrepackedBlock:
    """The forward pass of a `TransformerBlock` without cross-attention, with a plain feed-forward network, whose linear
    layers `prepack_linear_layers` has prepacked."""

    def __init__(self, block: Any) -> None:
        self.block = block
        attention, feed_forward = block.attention, block.feed_forward
        self.attention, self.activation = attention, feed_forward.activation
        self.norms = block.attention_norm, block.feed_forward_norm
        self.linear_layers = attention.qkv_proj, attention.out_proj, feed_forward.up_proj, feed_forward.down_proj
        # read without `nn.Module.__getattr__`, which takes as long as the rest of the checks
        self.parameters = [module._parameters for module in (*self.norms, *self.linear_layers)]
        self.modules = [(module, type(module), module.__dict__, dict(module._modules)) for module in block.modules()]

    def __reduce__(self) -> Any:
        return type(None), ()  # the copy of a block is not prepacked

    def forward(self, hidden_states: Tensor, layout: Layout, mask: AttentionMask) -> Tensor | None:
        """(tokens, hidden) -> (tokens, hidden).

        None if the block has to compute it in the ordinary way: with gradients, dropout or autocast, in a padded
        layout, in a last layer that computes only some tokens, and after a change of weights, modules or hooks.
        """
        if torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
            return None
        if not isinstance(mask, PackedMask) or mask.queries.query is not None:
            return None
        if mask.spec.bias is not None and self.attention.num_heads < self.attention.initial_num_heads:
            return None  # the bias has the pruned heads, too
        if not can_use_onednn(hidden_states, bfloat16=True):
            return None
        weights = (self._prepacked_weight(layer, hidden_states.dtype) for layer in self.linear_layers)
        available_weights = [weight for weight in weights if weight is not None]
        if len(available_weights) < len(self.linear_layers) or not self._is_unchanged():
            return None
        qkv_weight, out_weight, up_weight, down_weight = available_weights
        qkv_bias, out_bias, up_bias, down_bias = (layer._parameters["bias"] for layer in self.linear_layers)
        is_pre_norm = self.block.norm == "pre"
        attention_norm, feed_forward_norm = (norm.forward for norm in self.norms)
        qkv = onednn_linear(attention_norm(hidden_states) if is_pre_norm else hidden_states, qkv_weight, qkv_bias)
        hidden_states = onednn_linear(self._attend(qkv, layout, mask), out_weight, out_bias).add_(hidden_states)
        if not is_pre_norm:
            hidden_states = attention_norm(hidden_states)

        def transform(rows: Tensor) -> Tensor:
            intermediate = onednn_linear(feed_forward_norm(rows) if is_pre_norm else rows, up_weight, up_bias)
            output = onednn_linear(self._activate(intermediate), down_weight, down_bias).add_(rows)
            return output if is_pre_norm else feed_forward_norm(output)

        if len(hidden_states) <= CHUNK_ROWS:
            return transform(hidden_states)
        return torch.cat([transform(rows) for rows in hidden_states.split(CHUNK_ROWS)])

    def _prepacked_weight(self, layer: nn.Linear, dtype: torch.dtype) -> Tensor | None:
        prepacked = layer.__dict__.get("prepacked_weight")
        weight = None if prepacked is None else prepacked.get(layer)
        return weight if weight is not None and weight.dtype is dtype else None

    def _is_unchanged(self) -> bool:
        """Whether the block has the same modules as when it was prepacked, in evaluation mode and without hooks."""
        if _has_any_global_hook():
            return False
        for module, module_class, state, children in self.modules:
            if type(module) is not module_class or state["training"] or "forward" in state:
                return False
            if state["_modules"] != children:
                return False
            has_hooks = state["_forward_pre_hooks"] or state["_forward_hooks"]
            if (has_hooks or state["_backward_pre_hooks"] or state["_backward_hooks"]) and module is not self.block:
                return False
        return are_plain_tensors(*(tensor for parameters in self.parameters for tensor in parameters.values()))

    def _attend(self, qkv: Tensor, layout: Layout, mask: PackedMask) -> Tensor:
        """(tokens, 3 * inner) queries, keys and values -> (tokens, inner)."""
        heads, scale = (self.attention.num_heads, self.attention.head_dim), self.attention.scale
        group = mask.groups[0]
        if group.window is not None or len(mask.keys.lengths) * group.num_keys != len(qkv):
            query, key, value = qkv.view(-1, 3, *heads).unbind(1)
            return attend(query, key, value, layout, mask, scale=scale)[0].flatten(1)
        # all sequences have the same length
        query, key, value = qkv.view(-1, group.num_keys, 3, *heads).permute(2, 0, 3, 1, 4).unbind(0)
        context = F.scaled_dot_product_attention(
            query, key, value, attn_mask=group.mask, is_causal=group.is_causal, scale=scale
        )
        return context.transpose(1, 2).reshape(len(qkv), -1)

    def _activate(self, intermediate: Tensor) -> Tensor:
        if type(self.activation) is nn.GELU:
            return torch.ops.aten.gelu_.default(intermediate, approximate=self.activation.approximate)
        return self.activation.forward(intermediate)
