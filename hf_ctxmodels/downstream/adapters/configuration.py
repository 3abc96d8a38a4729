"""Forms of adapters by name, and their `adapter_config.json` of the library adapters (AdapterHub)."""

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.layers.adapters import BottleneckConfig, FusionConfig

FILE_VERSION = "adapters.1.3.0"

_HOULSBY = BottleneckConfig(mh_adapter=True, non_linearity="swish", original_ln_before=False)
_PARALLEL = BottleneckConfig(
    is_parallel=True, original_ln_before=False, reduction_factor=2, scaling=4.0, init_weights="mam_adapter"
)
_LANGUAGE = BottleneckConfig(reduction_factor=2, inv_adapter="nice", inv_adapter_reduction_factor=2)
ADAPTER_CONFIGS: Mapping[str, BottleneckConfig] = {
    "pfeiffer": BottleneckConfig(),
    "houlsby": _HOULSBY,
    "parallel": _PARALLEL,
    "madx-language": _LANGUAGE,
    "madx-task": BottleneckConfig(),
}
"""Pfeiffer et al. 2021; Houlsby et al. 2019; He et al. 2022; language and task adapters of MAD-X (Pfeiffer et al. 2020,
section 5.3)."""

_INVERTIBLE = {"inv_adapter": "nice", "inv_adapter_reduction_factor": 2}
# Names that the library has, or had, for these forms; files may hold one in place of the fields.
_FILE_KINDS = {
    "seq_bn": BottleneckConfig(),
    "double_seq_bn": _HOULSBY,
    "par_bn": _PARALLEL,
    "seq_bn_inv": BottleneckConfig(**_INVERTIBLE),  # type: ignore[arg-type]
    "pfeiffer+inv": BottleneckConfig(**_INVERTIBLE),  # type: ignore[arg-type]
}

# Fields of files that have no part in these adapters: their values where they are not in use.
_NOT_IN_USE = {
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
_ALWAYS_OFF = {"temperature": False}  # of fusions


def resolve_config(config: str | BottleneckConfig) -> BottleneckConfig:
    """A form by its name, or the form itself.

    Raises:
        CtxError: There is none of this name.
    """
    if isinstance(config, BottleneckConfig):
        return config
    known = {**ADAPTER_CONFIGS, **_FILE_KINDS}
    if config not in known:
        raise CtxError(
            f"There is no kind of adapter {config!r}.",
            hint=f"use one of {', '.join(ADAPTER_CONFIGS)}, or a BottleneckConfig.",
        )
    return known[config]


def config_to_file(config: BottleneckConfig) -> dict[str, Any]:
    """The entry `config` of `adapter_config.json`."""
    values = asdict(config)
    if not values.pop("one_per_depth"):
        return dict(sorted({**_NOT_IN_USE, **values, "leave_out": list(config.leave_out)}.items()))
    return dict(sorted({**_NOT_IN_USE, **values, "leave_out": list(config.leave_out), "one_per_depth": True}.items()))


def config_from_file(entry: Any, location: str) -> BottleneckConfig:
    """The form in `adapter_config.json`, of old releases too.

    Raises:
        CtxError: It is no bottleneck adapter, or has parts that are not supported.
    """
    if isinstance(entry, str):
        return resolve_config(entry)
    if not isinstance(entry, Mapping) or not {"reduction_factor", "non_linearity"} <= {key.lower() for key in entry}:
        raise CtxError(
            "The file describes no bottleneck adapter.",
            location=location,
            hint="LoRA, prefix tuning and prompts are PEFT's: train them there.",
        )
    given = {key.lower() if key.lower() in ("mh_adapter", "output_adapter") else key: entry[key] for key in entry}
    if isinstance(given.get("inv_adapter"), Mapping):  # of adapter-transformers 1
        inner = given["inv_adapter"]
        given |= {"inv_adapter": inner.get("block_type"), "inv_adapter_reduction_factor": inner.get("reduction_factor")}
    in_use = [name for name in _MUST_BE_OFF if given.get(name)]
    if in_use or given.get("inv_adapter") not in (None, "nice"):
        raise CtxError(
            f"The adapter has parts that are not supported: {', '.join(in_use) or given['inv_adapter']}.",
            location=location,
            hint="supported are bottlenecks with plain maps, parallel ones, and NICE couplings of the embeddings.",
        )
    known = {field.name for field in fields(BottleneckConfig)}
    values = {name: value for name, value in given.items() if name in known and value is not None}
    values["leave_out"] = tuple(values.get("leave_out", ()))
    return BottleneckConfig(**values)


def fusion_to_file(config: FusionConfig) -> dict[str, Any]:
    """The entry `config` of `adapter_fusion_config.json`."""
    return dict(sorted({**_ALWAYS_OFF, **asdict(config)}.items()))


def fusion_from_file(entry: Any, location: str) -> FusionConfig:
    """The form in `adapter_fusion_config.json`.

    Raises:
        CtxError: It is none, or has a temperature, whose state files do not hold.
    """
    if isinstance(entry, str) and entry in ("dynamic", "static"):
        return FusionConfig(value=entry == "dynamic", regularization=entry == "dynamic")
    if not isinstance(entry, Mapping) or not {"query", "key", "value"} <= set(entry) or entry.get("temperature"):
        raise CtxError(
            "The file describes no fusion of adapters that is supported.",
            location=location,
            hint="AdapterFusion without a temperature is.",
        )
    known = {field.name for field in fields(FusionConfig)}
    return FusionConfig(**{name: value for name, value in entry.items() if name in known})
