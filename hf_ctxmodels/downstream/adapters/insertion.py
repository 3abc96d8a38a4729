"""Insertion of adapters into a model: its blocks and hook points, and the adapter modules hooked to them."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_ctxmodels.core.adapter_support import BLOCK_ADAPTERS, INVERTIBLE_ADAPTERS
from hf_ctxmodels.core.config import CtxTransformerConfig
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.model import CtxPreTrainedModel
from hf_ctxmodels.downstream.adapters.configuration import BottleneckConfig
from hf_ctxmodels.downstream.adapters.modules import (
    BottleneckAdapter,
    InvertibleAdapter,
    InvertibleAdapters,
    SublayerAdapters,
)
from hf_ctxmodels.heads import ForCausalLM
from hf_ctxmodels.layers.common import HookPoint
from hf_ctxmodels.layers.transformer import ResidualSum
from hf_ctxmodels.registry import FAMILIES


@dataclass(frozen=True)
class AdaptableBlock:
    """A block that can have adapters, and its name in the base model.

    Attributes:
        index: Position among the blocks, from 0; a decoder's blocks follow the encoder's. A shared block counts once.
        depths: Positions at which the block is applied.
    """

    index: int
    name: str
    module: Any
    depths: tuple[int, ...]

    @property
    def adapters(self) -> dict[str, SublayerAdapters]:
        """Sub-layer -> its adapters; empty before any adapter is inserted."""
        return dict(getattr(self.module, BLOCK_ADAPTERS, {}))

    @property
    def hidden_size(self) -> int:
        """Width of the block."""
        return int(self.module.feed_forward_norm.normalized_shape[0])


def get_adaptable_model(model: nn.Module) -> CtxPreTrainedModel:
    """The base model, into which adapters are inserted; raises CtxError if it has no Transformer layers."""
    base = getattr(model, "base_model", model)
    if not isinstance(base, CtxPreTrainedModel) or not list_blocks(base):
        names = [name for name, family in FAMILIES.items() if issubclass(family.config, CtxTransformerConfig)]
        raise CtxError(
            f"{type(model).__name__} has no Transformer layers.",
            hint=f"use a model of one of these families: {', '.join(names)}.",
        )
    return base


def list_blocks(base: nn.Module) -> list[AdaptableBlock]:
    """The blocks of a base model, an encoder's before a decoder's."""
    applied_layers = list(getattr(base, "layers", None) or [])
    modules = [
        (name, module)
        for name, module in base.named_modules()
        if isinstance(getattr(module, "feed_forward_residual", None), ResidualSum)
    ]
    blocks = []
    for index, (name, module) in enumerate(modules):
        depths = tuple(depth for depth, layer in enumerate(applied_layers) if layer is module) or (index,)
        blocks.append(AdaptableBlock(index, name, module, depths))
    return blocks


def list_sublayer_adapters(base: nn.Module) -> Iterator[tuple[AdaptableBlock, str, SublayerAdapters]]:
    """Block, sub-layer and adapters of all sub-layers."""
    for block in list_blocks(base):
        for sublayer, adapters in block.adapters.items():
            yield block, sublayer, adapters


def get_invertible_adapters(base: nn.Module) -> InvertibleAdapters | None:
    """The invertible adapters of the embeddings, or None."""
    return getattr(_embeddings(base), INVERTIBLE_ADAPTERS, None)


def _embeddings(base: Any) -> nn.Module:
    """The module with the hook point `embedding_output`; in an encoder-decoder, the encoder."""
    return next(module for module in base.modules() if hasattr(module, "embedding_output"))


def insert_adapter(model: nn.Module, base: CtxPreTrainedModel, name: str, config: BottleneckConfig) -> None:
    """Insert a new adapter into the sub-layers of its configuration; `model` is the base model, or has a head."""
    if config.inv_adapter is not None and isinstance(model, ForCausalLM) and model.get_output_embeddings() is None:
        raise CtxError(
            f"{type(model).__name__} has no output layer for the inverse of the adapter.",
            hint="use an adapter without inv_adapter.",
        )
    blocks = list_blocks(base)
    num_layers = sum(len(block.depths) if config.one_per_depth else 1 for block in blocks)
    if any(not 0 <= index < num_layers for index in config.leave_out):
        raise CtxError(
            f"leave_out={list(config.leave_out)}, but the model has {num_layers} layers.",
            hint=f"use layer indices from 0 to {num_layers - 1}.",
        )
    num_inserted = sum(_insert_into_block(block, name, config) for block in blocks)
    if not num_inserted:
        raise CtxError(
            f"{type(base).__name__} has no layer for an adapter after {', '.join(config.sublayers) or 'no sub-layer'} "
            f"with leave_out={list(config.leave_out)}.",
            hint="set mh_adapter, output_adapter or cross_adapter (encoder-decoder), or reduce leave_out.",
        )
    if config.inv_adapter is not None:
        embeddings: Any = _embeddings(base)
        if get_invertible_adapters(base) is None:
            embeddings.add_module(INVERTIBLE_ADAPTERS, InvertibleAdapters())
            embeddings.invertible.attach(embeddings.embedding_output)
        word_embeddings: Any = base.get_input_embeddings()
        factor = config.inv_adapter_reduction_factor or 2
        adapter = InvertibleAdapter(word_embeddings.embedding_dim, config.non_linearity, factor)
        embeddings.invertible.members[name] = adapter
        match_module(embeddings.invertible, word_embeddings)
        attach_to_output_layers(model, base)


def _insert_into_block(block: AdaptableBlock, name: str, config: BottleneckConfig) -> int:
    """Insert an adapter into a block; returns the number of its sub-layers with the adapter."""
    if not block.adapters:
        modules = {}
        for sublayer in ("attention", "cross_attention", "feed_forward"):
            residual_sum = getattr(block.module, f"{sublayer}_residual", None)
            if residual_sum is not None:
                modules[sublayer] = SublayerAdapters()
                modules[sublayer].attach(residual_sum)
        block.module.add_module(BLOCK_ADAPTERS, nn.ModuleDict(modules))
    num_inserted = 0
    for sublayer in config.sublayers:
        if sublayer not in block.adapters:
            continue
        adapter: nn.Module
        if config.one_per_depth and len(block.depths) > 1:
            depths = [depth for depth in block.depths if depth not in config.leave_out]
            adapter = nn.ModuleDict(
                {str(depth): BottleneckAdapter(block.hidden_size, config, depth) for depth in depths}
            )
        else:
            layer_index = block.depths[0] if config.one_per_depth else block.index
            if layer_index in config.leave_out:
                continue
            adapter = BottleneckAdapter(block.hidden_size, config, layer_index)
        block.adapters[sublayer].members[name] = adapter
        num_inserted += 1
    match_module(block.module.adapters, block.module.feed_forward_norm)
    return num_inserted


def attach_to_output_layers(model: nn.Module, base: CtxPreTrainedModel) -> None:
    """Hook the inverse of the invertible adapters to the output layers of the heads on a base model."""
    adapters = get_invertible_adapters(base)
    if adapters is None:
        return
    for head in model.modules():
        if isinstance(head, PreTrainedModel) and head is not base and head.base_model is base:
            for module in _modules_without_models(head):
                if isinstance(output_layer_input := getattr(module, "output_layer_input", None), HookPoint):
                    adapters.attach_inverse(output_layer_input)


def _modules_without_models(head: nn.Module) -> Iterator[nn.Module]:
    """The modules of a head, except nested models: the encoder, or ELECTRA's generator."""
    yield head
    for child in head.children():
        if not isinstance(child, PreTrainedModel):
            yield from _modules_without_models(child)


def match_module(module: nn.Module, reference: nn.Module) -> None:
    """Move a module to the device, floating dtype and mode of another."""
    parameter = next(reference.parameters())
    module.to(device=parameter.device, dtype=parameter.dtype if parameter.is_floating_point() else torch.float32)
    module.train(reference.training)


def remove_all_adapters(base: nn.Module) -> None:
    """Remove the adapter modules and their hooks."""
    adapters: list[Any] = [adapters for _, _, adapters in list_sublayer_adapters(base)]
    for block in list_blocks(base):
        if block.adapters:
            delattr(block.module, BLOCK_ADAPTERS)
    if (invertible_adapters := get_invertible_adapters(base)) is not None:
        delattr(_embeddings(base), INVERTIBLE_ADAPTERS)
        adapters.append(invertible_adapters)
    for module in adapters:
        for handle in module.handles:
            handle.remove()
