"""Low-rank models: selection of layers, statistics of their inputs, factorization, and reopening.

The configuration of a compressed model has the field `low_rank_modules`, from which `from_pretrained` builds the same
modules. Their factors are ordinary weights, which can be trained, quantized and exported.
"""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_ctxmodels.compression.low_rank.factorization import factorize, max_rank
from hf_ctxmodels.compression.low_rank.modules import LowRankEmbedding, LowRankLinear, TiedLowRankLinear
from hf_ctxmodels.compression.replacement import (
    MIN_FEATURES,
    match_modules,
    names_in_class,
    replace_children,
    watch_inputs,
)
from hf_ctxmodels.core.adapter_support import is_adapter_parameter
from hf_ctxmodels.core.console import progress_bar
from hf_ctxmodels.core.devices import to_float64
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.structure import STRUCTURE_CHANGES
from hf_ctxmodels.core.weights import is_quantized
from hf_ctxmodels.layers.cpu.linear import is_plain_linear
from hf_ctxmodels.layers.transformer import ScaledEmbedding

LOW_RANK_MODULES = "low_rank_modules"
"""Field of the configuration of a compressed model: name of a module -> rank of its factors."""


@dataclass(frozen=True)
class LayerResult:
    """Outcome for one layer.

    Attributes:
        name: Name of the module.
        shape: (out, in) of a linear layer, (tokens, width) of embeddings.
        rank: Rank of the factors; None if the layer was not replaced.
        energy: Share of the squared singular values that the factors keep, see `factorization.Factors`; 1 without
            factors.
        reason: Why the layer was not replaced; None if it was.
    """

    name: str
    shape: tuple[int, ...]
    rank: int | None
    energy: float = 1.0
    reason: str | None = None


def register_low_rank() -> None:
    """Let models be constructed from configurations with `low_rank_modules`; idempotent."""
    STRUCTURE_CHANGES[LOW_RANK_MODULES] = _build_low_rank_modules


def find_factorizable_modules(model: PreTrainedModel, layers: Collection[str], skip: Collection[str]) -> list[str]:
    """Names of the linear layers and embeddings to factorize.

    Args:
        layers: Names or last components of names of modules, which select all linear layers and embeddings in them;
            empty for all linear layers and the word embeddings.
        skip: Names or last components of names of modules to exclude.

    Raises:
        CtxError: A name matches no module.
    """
    word_embeddings = _input_embeddings(model)
    selected, skipped = match_modules(model, layers, "layers"), match_modules(model, skip, "skip")
    tied_targets = {target.rpartition(".")[0] for target in model.all_tied_weights_keys}

    def is_selected(name: str, module: nn.Module) -> bool:
        if name in skipped or name in tied_targets or not _is_factorizable(module):
            return False
        return name in selected if layers else isinstance(module, nn.Linear) or module is word_embeddings

    return [name for name, module in model.named_modules() if is_selected(name, module)]


def _input_embeddings(model: PreTrainedModel) -> nn.Module | None:
    try:
        return model.get_input_embeddings()
    except NotImplementedError:
        return None


def _is_factorizable(module: nn.Module) -> bool:
    if not (is_plain_linear(module) or type(module) in (nn.Embedding, ScaledEmbedding)):
        return False
    return min(module.weight.shape) >= MIN_FEATURES  # type: ignore[arg-type, union-attr]


@torch.no_grad()
def factorize_model(
    model: PreTrainedModel,
    *,
    rank: int | None = None,
    energy: float | None = None,
    layers: Collection[str] = (),
    skip: Collection[str] = (),
    moments: Mapping[str, Tensor] | None = None,
) -> list[LayerResult]:
    """Replace linear layers and embeddings in place by low-rank factors, where these have fewer parameters.

    An output layer that is tied to the word embeddings follows them: its weight is the product of the same factors.

    Args:
        model: A model without adapters and quantized weights.
        rank: Rank of all factors.
        energy: Instead of `rank`: share of the squared singular values that the factors of a layer keep, 0 to 1.
        layers, skip: See `find_factorizable_modules`.
        moments: Second moments of the inputs, see `record_second_moments`; layers without one are not replaced.
            None minimizes the error of the weights.

    Returns:
        One result for each selected layer.

    Raises:
        CtxError: The model is quantized, has adapters, is already low-rank or contains several models; a name matches
            no module; or no layer is replaced.
    """
    check_factorizable(model)
    is_valid_rank, is_valid_energy = rank is not None and rank >= 1, energy is not None and 0 < energy <= 1
    if (rank is None) == (energy is None) or not (is_valid_rank or is_valid_energy):
        raise CtxError(
            f"Expected a rank of 1 or more, or an energy between 0 and 1, got rank={rank} and energy={energy}.",
            location="factorize_model",
            hint="give exactly one of rank and energy.",
        )
    modules: dict[str, Any] = dict(model.named_modules())
    results, replacements = [], dict[int, nn.Module]()
    for name in progress_bar(find_factorizable_modules(model, layers, skip), "factorization", unit="layers"):
        result, replacement = _factorize_module(name, modules[name], rank, energy, moments)
        results.append(result)
        if replacement is not None:
            replacements[id(modules[name])] = replacement
    if not replacements:
        reasons = ", ".join(sorted({result.reason or "" for result in results})) or "none matches"
        raise CtxError(
            f"No layer of {type(model).__name__} was replaced: {reasons}.",
            location="low-rank factorization",
            hint="lower the rank or the energy, or select other layers.",
        )
    replace_children(model, replacements)
    setattr(model.config, LOW_RANK_MODULES, {result.name: result.rank for result in results if result.rank})
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            _replace_tied_modules(module)
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            module.all_tied_weights_keys = module.get_expanded_tied_weights_keys(all_submodels=True)
    model.tie_weights()
    return results


def check_factorizable(model: PreTrainedModel) -> None:
    """Raise CtxError if a model is quantized or low-rank, has adapters, or contains models of other configurations."""
    modules = dict(model.named_modules())
    configs = {id(module.config) for module in modules.values() if isinstance(module, PreTrainedModel)}
    if is_quantized(model):
        problem, hint = "The model is quantized.", "compress the float32 model, and quantize it afterwards."
    elif any(is_adapter_parameter(name) or hasattr(module, "base_layer") for name, module in modules.items()):
        problem = "The model has adapters."
        hint = "compress the model without adapters, or merge them first (merge_and_unload of PEFT)."
    elif any(getattr(module, "has_low_rank_weights", False) for module in modules.values()):
        problem, hint = "The model is already low-rank.", "compress the original model."
    elif len(configs) > 1:
        problem = f"{type(model).__name__} contains several models."
        hint = "save and compress one of them: a discriminator without its generator, or the model of one task."
    else:
        return
    raise CtxError(problem, location=model.config.name_or_path or type(model).__name__, hint=hint)


def _factorize_module(
    name: str, module: Any, rank: int | None, energy: float | None, moments: Mapping[str, Tensor] | None
) -> tuple[LayerResult, nn.Module | None]:
    """The result of a layer, and its replacement, if the factors have fewer parameters."""
    weight, is_embedding = module.weight, isinstance(module, nn.Embedding)
    shape, limit = tuple(weight.shape), max_rank(weight.shape)
    moment = None
    if moments is not None:
        moment = moments.get(name)
        if moment is None:
            return LayerResult(name, shape, None, reason="not used by the texts"), None
    if rank is not None and rank > limit:
        return LayerResult(name, shape, None, reason=f"smaller than its factors above rank {limit}"), None
    factors = factorize(weight.T if is_embedding else weight, moment, rank=rank, energy=energy or 1.0)
    if factors.output.shape[1] > limit:
        return LayerResult(name, shape, None, reason="smaller than its factors at this energy"), None
    rank = factors.output.shape[1]
    replacement = _new_module(module, rank)
    if isinstance(replacement, LowRankEmbedding):
        replacement.table.weight.copy_(factors.input.T)
        replacement.projection.weight.copy_(factors.output)
    else:
        replacement.input_factor.weight.copy_(factors.input)
        replacement.output_factor.weight.copy_(factors.output)
        _set_bias(replacement.output_factor, module.bias)
    for parameter in replacement.parameters():
        parameter.requires_grad_(weight.requires_grad)
    return LayerResult(name, shape, rank, factors.energy), replacement.train(module.training)


def _new_module(module: Any, rank: int) -> LowRankLinear | LowRankEmbedding:
    """Low-rank module with uninitialized factors for a linear layer or embeddings."""
    options = {"device": module.weight.device, "dtype": module.weight.dtype}
    if isinstance(module, nn.Embedding):
        factor = module.embedding_dim**0.5 if isinstance(module, ScaledEmbedding) else 1.0
        return LowRankEmbedding(
            module.num_embeddings, module.embedding_dim, rank, module.padding_idx, factor, **options
        )
    return LowRankLinear(module.in_features, module.out_features, rank, module.bias is not None, **options)


def _replace_tied_modules(model: PreTrainedModel) -> None:
    """Replace modules whose weights are tied to low-rank embeddings by modules with the same factors, and update the
    names of the tied weights."""
    tied_keys: dict[str, str] = {}
    is_changed = False
    for target, source in (model.get_expanded_tied_weights_keys() or {}).items():
        name, source_name = target.rpartition(".")[0], source.rpartition(".")[0]
        embeddings, module = _submodule(model, source_name), _submodule(model, name)
        if not isinstance(embeddings, LowRankEmbedding):
            tied_keys[target] = source
            continue
        is_changed = True
        options = {"device": module.weight.device, "dtype": module.weight.dtype}
        replacement: nn.Module
        if isinstance(module, nn.Embedding):
            replacement, factor_name = _new_module(module, embeddings.rank), "projection.weight"
            table_name = "table.weight"
        else:
            sizes = module.in_features, module.out_features, embeddings.rank
            replacement = TiedLowRankLinear(*sizes, module.bias is not None, **options)
            _set_bias(replacement.output_factor, module.bias)
            factor_name, table_name = "projection_weight", "output_factor.weight"
        replace_children(model, {id(module): replacement.train(module.training)})
        tied_keys[f"{name}.{factor_name}"] = f"{source_name}.projection.weight"
        tied_keys[f"{name}.{table_name}"] = f"{source_name}.table.weight"
    if is_changed:
        model._tied_weights_keys = tied_keys


def _set_bias(layer: nn.Linear, bias: Tensor | None) -> None:
    """Replace the bias of a layer; BART's output layer has a buffer."""
    if bias is None or isinstance(bias, nn.Parameter):
        layer.bias = bias  # type: ignore[assignment]
    else:
        del layer.bias
        layer.register_buffer("bias", bias)


def _submodule(model: nn.Module, name: str) -> Any:
    return dict(model.named_modules(remove_duplicate=False)).get(name)


def _build_low_rank_modules(model: PreTrainedModel) -> None:
    """Replace the modules in `config.low_rank_modules` of a model under construction, and the tied output layers."""
    modules = dict(model.named_modules())
    replacements: dict[int, nn.Module] = {}
    for saved_name, rank in getattr(model.config, LOW_RANK_MODULES).items():
        for name in names_in_class(model, [saved_name]):
            module = modules.get(name)
            if isinstance(module, nn.Linear | nn.Embedding):
                replacements[id(module)] = _new_module(module, rank)
    replace_children(model, replacements)
    _replace_tied_modules(model)


@contextmanager
def record_second_moments(model: nn.Module, names: Collection[str]) -> Iterator[dict[str, Tensor]]:
    """Record the second moments of the inputs of modules, while the `with` body runs.

    Yields name -> (in, in) float64 sum of the outer products of the inputs of a linear layer, or (tokens,) counts of
    the ids of embeddings, without padding. A constant factor of a moment does not change the factors.
    """
    moments: dict[str, Tensor] = {}

    def record(name: str, module: nn.Module, input: Tensor) -> None:
        if isinstance(module, nn.Embedding):
            moment = to_float64(torch.bincount(input.flatten(), minlength=module.num_embeddings))
            if module.padding_idx is not None:
                moment[module.padding_idx] = 0
        else:
            rows = input.reshape(-1, input.shape[-1]).float()
            moment = to_float64(rows.T @ rows)
        moments[name] = moments[name] + moment if name in moments else moment

    with watch_inputs(model, names, record):
        yield moments
