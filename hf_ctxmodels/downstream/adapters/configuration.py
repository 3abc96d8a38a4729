"""Configurations of adapters and fusions, and their form in AdapterHub's JSON files."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from itertools import compress
from typing import Any, Literal, get_type_hints

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.loading import matches_type


@dataclass(frozen=True)
class BottleneckConfig:
    """Configuration of a bottleneck adapter in every layer; the fields have AdapterHub's names.

    Attributes:
        mh_adapter, cross_adapter, output_adapter: Whether there is an adapter after self-attention, after
            cross-attention, and after the feed-forward network.
        reduction_factor: Width of the model divided by the width of the bottleneck; or a mapping from the layer's
            index, as a string, to the factor, with the key "default" for other layers.
        non_linearity: Name of the activation in transformers; "linear" for none.
        original_ln_before: Whether the bottleneck reads the layer's norm of the sum of the sub-layer's output and
            input, instead of the output.
        original_ln_after: Whether the layer's sum and norm follow the adapters.
        residual_before_ln: Whether the adapter's residual is the sub-layer's output, instead of the bottleneck's input;
            "post_add" for the sum before the norm.
        adapter_residual_before_ln: Whether the residual is added before the adapter's own norm, if it has one.
        ln_before, ln_after: Whether the adapter has its own norm before and after the bottleneck.
        scaling: Factor of the bottleneck's output; "learned" for a parameter, "channel" for one parameter per feature.
        is_parallel: Whether the bottleneck reads the sub-layer's input (He et al. 2022, section 3.3).
        dropout: Dropout rate of the bottleneck's output.
        init_weights: "bert": normal, standard deviation 0.02; "houlsby": 0.01, truncated at two standard deviations;
            "mam_adapter": a new adapter is the identity.
        leave_out: Indices of layers without an adapter, from 0; a decoder's layers follow the encoder's.
        inv_adapter: "nice" for an invertible adapter of the embeddings (Pfeiffer et al. 2020, section 4.3), or None.
        inv_adapter_reduction_factor: Half the width of the embeddings divided by the width of its bottlenecks.
        one_per_depth: Whether a layer that is applied at several depths (ALBERT) has an adapter for each; AdapterHub
            has one adapter per layer.

    Raises:
        CtxError: A value has the wrong type or is out of range.
    """

    mh_adapter: bool = False
    cross_adapter: bool = False
    output_adapter: bool = True
    reduction_factor: float | Mapping[str, float] = 16
    non_linearity: str = "relu"
    original_ln_before: bool = True
    original_ln_after: bool = True
    residual_before_ln: bool | Literal["post_add"] = True
    adapter_residual_before_ln: bool = False
    ln_before: bool = False
    ln_after: bool = False
    scaling: float | Literal["learned", "channel"] = 1.0
    is_parallel: bool = False
    dropout: float = 0.0
    init_weights: Literal["bert", "houlsby", "mam_adapter"] = "bert"
    leave_out: tuple[int, ...] = ()
    inv_adapter: Literal["nice"] | None = None
    inv_adapter_reduction_factor: float | None = None
    one_per_depth: bool = False

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for name, value in vars(self).items():
            if not matches_type(value, hints[name]):
                hint = hints[name]
                type_name = hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "")
                raise CtxError(
                    f"{name}={value!r} is not of type {type_name}.",
                    location="the configuration of an adapter",
                    hint="use a value of that type.",
                )
        factors = self.reduction_factor
        smallest = min(factors.values(), default=1) if isinstance(factors, Mapping) else factors
        if min(smallest, self.inv_adapter_reduction_factor or 1) <= 0 or not 0 <= self.dropout < 1:
            raise CtxError(
                f"reduction_factor={factors}, inv_adapter_reduction_factor={self.inv_adapter_reduction_factor} or "
                f"dropout={self.dropout} is out of range.",
                location="the configuration of an adapter",
                hint="use factors above 0, and a dropout rate of at least 0 and below 1.",
            )

    @property
    def sublayers(self) -> tuple[str, ...]:
        """The sub-layers that have an adapter."""
        has_adapter = (self.mh_adapter, self.cross_adapter, self.output_adapter)
        return tuple(compress(("attention", "cross_attention", "feed_forward"), has_adapter))

    def bottleneck_size(self, hidden_size: int, layer_index: int) -> int:
        """Width of the bottleneck in a layer, at least 1; raises CtxError if `reduction_factor` lacks the layer."""
        factor = self.reduction_factor
        if isinstance(factor, Mapping):
            if str(layer_index) not in factor and "default" not in factor:
                raise CtxError(
                    f"reduction_factor has no value for layer {layer_index}.",
                    hint='add the layer, or a value for "default".',
                )
            factor = factor.get(str(layer_index), factor.get("default", 1))
        return max(1, int(hidden_size // factor))


@dataclass(frozen=True)
class FusionConfig:
    """Configuration of an AdapterFusion (Pfeiffer et al. 2021, section 3.2); the fields have AdapterHub's names.

    Attributes:
        query, key, value: Whether there is a linear layer of queries, keys and values.
        query_before_ln: Whether the query is the sub-layer's output, instead of the bottlenecks' input.
        residual_before: Whether the residual is added to every value, instead of the result.
        value_before_softmax: Whether the value layer is applied before mixing.
        value_initialized: Whether the value layer starts as the identity.
        regularization: Whether the training loss includes `0.01 * |value - identity|^2`.
        dropout_prob: Dropout rate of the attention scores; None for 0.
    """

    query: bool = True
    key: bool = True
    value: bool = True
    query_before_ln: bool = False
    residual_before: bool = False
    value_before_softmax: bool = True
    value_initialized: bool = True
    regularization: bool = True
    dropout_prob: float | None = None


_HOULSBY = BottleneckConfig(mh_adapter=True, non_linearity="swish", original_ln_before=False)
_PARALLEL = BottleneckConfig(
    is_parallel=True, original_ln_before=False, reduction_factor=2, scaling=4.0, init_weights="mam_adapter"
)
ADAPTER_CONFIGS: Mapping[str, BottleneckConfig] = {
    "pfeiffer": BottleneckConfig(),
    "houlsby": _HOULSBY,
    "parallel": _PARALLEL,
    "madx-language": BottleneckConfig(reduction_factor=2, inv_adapter="nice", inv_adapter_reduction_factor=2),
    "madx-task": BottleneckConfig(),
}
"""Pfeiffer et al. 2021; Houlsby et al. 2019; He et al. 2022; language and task adapters of MAD-X (Pfeiffer et al. 2020,
section 5, "Experimental Setup")."""

# AdapterHub's names of these configurations, also from earlier releases; a file may hold a name instead of the fields.
_ADAPTERHUB_CONFIGS = {
    "seq_bn": BottleneckConfig(),
    "double_seq_bn": _HOULSBY,
    "par_bn": _PARALLEL,
    **dict.fromkeys(
        ("seq_bn_inv", "pfeiffer+inv"), BottleneckConfig(inv_adapter="nice", inv_adapter_reduction_factor=2)
    ),
}

# Fields of AdapterHub's files that this package does not support, and the values that switch them off.
_UNSUPPORTED_FIELDS = {
    "factorized_phm_W": True,
    "factorized_phm_rule": False,
    "hypercomplex_nonlinearity": "glorot-uniform",
    "init_weights_seed": None,
    "learn_phm": True,
    "phm_bias": True,
    "phm_c_init": "normal",
    "phm_dim": 4,
    "phm_init_range": 0.0001,
    "phm_layer": False,
    "phm_rank": 1,
    "shared_W_phm": False,
    "shared_phm_rule": True,
    "stochastic_depth": 0.0,
    "use_gating": False,
}
_MUST_BE_OFF = ("phm_layer", "stochastic_depth", "use_gating")


def resolve_config(config: str | BottleneckConfig) -> BottleneckConfig:
    """The configuration of a name, or `config` itself; raises CtxError if there is none of this name."""
    if isinstance(config, BottleneckConfig):
        return config
    named_configs = {**ADAPTER_CONFIGS, **_ADAPTERHUB_CONFIGS}
    if config not in named_configs:
        raise CtxError(
            f"There is no adapter configuration {config!r}.",
            hint=f"use one of {', '.join(ADAPTER_CONFIGS)}, or a BottleneckConfig.",
        )
    return named_configs[config]


def config_to_file(config: BottleneckConfig) -> dict[str, Any]:
    """The entry `config` of `adapter_config.json`."""
    values = {**_UNSUPPORTED_FIELDS, **asdict(config), "leave_out": list(config.leave_out)}
    if not config.one_per_depth:
        del values["one_per_depth"]
    return values


def config_from_file(entry: Any, location: str) -> BottleneckConfig:
    """The configuration in `adapter_config.json`, also from earlier releases of AdapterHub; raises CtxError for other
    methods and unsupported features."""
    if isinstance(entry, str):
        return resolve_config(entry)
    if not isinstance(entry, Mapping) or not {"reduction_factor", "non_linearity"} <= {key.lower() for key in entry}:
        raise CtxError(
            "The file does not describe a bottleneck adapter.",
            location=location,
            hint="copy a damaged file again; use PEFT for LoRA, prefix tuning and prompt tuning.",
        )
    values = {key.lower() if key.lower() in ("mh_adapter", "output_adapter") else key: entry[key] for key in entry}
    if isinstance(values.get("inv_adapter"), Mapping):  # adapter-transformers 1
        inv_adapter = values["inv_adapter"]
        values["inv_adapter"] = inv_adapter.get("block_type")
        values["inv_adapter_reduction_factor"] = inv_adapter.get("reduction_factor")
    unsupported = [name for name in _MUST_BE_OFF if values.get(name)]
    if unsupported or values.get("inv_adapter") not in (None, "nice"):
        raise CtxError(
            f"The adapter uses unsupported features: {', '.join(unsupported) or values['inv_adapter']}.",
            location=location,
            hint="use a sequential or parallel bottleneck, or NICE couplings of the embeddings.",
        )
    names = {field.name for field in fields(BottleneckConfig)}
    values = {name: value for name, value in values.items() if name in names and value is not None}
    if isinstance(leave_out := values.get("leave_out"), list):
        values["leave_out"] = tuple(leave_out)
    return BottleneckConfig(**values)


def fusion_from_file(entry: Any, location: str) -> FusionConfig:
    """The configuration in `adapter_fusion_config.json`; raises CtxError for a temperature, which is not saved."""
    if isinstance(entry, str) and entry in ("dynamic", "static"):
        return FusionConfig(value=entry == "dynamic", regularization=entry == "dynamic")
    if not isinstance(entry, Mapping) or not {"query", "key", "value"} <= set(entry) or entry.get("temperature"):
        raise CtxError(
            "The file does not describe a supported fusion of adapters.",
            location=location,
            hint="use AdapterFusion without a temperature.",
        )
    names = {field.name for field in fields(FusionConfig)}
    return FusionConfig(**{name: value for name, value in entry.items() if name in names})
