"""The quantization method `ctx-int8` of transformers: configuration, replacement of modules, and `from_pretrained`."""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from transformers import PreTrainedModel
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING, register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from hf_ctxmodels.compression.int8.modules import ActivationScale, Int8Embedding, Int8Linear, Int8Rows, range_of
from hf_ctxmodels.compression.replacement import (
    MIN_FEATURES,
    mark_initialized,
    match_modules,
    names_in_class,
    replace_children,
    watch_inputs,
)
from hf_ctxmodels.core.adapter_support import is_adapter_parameter
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import check_choice
from hf_ctxmodels.core.weights import is_quantized
from hf_ctxmodels.layers.cpu.linear import is_plain_linear
from hf_ctxmodels.layers.recurrent.rnn import GRU, LSTM
from hf_ctxmodels.layers.transformer import ScaledEmbedding

METHOD = "ctx-int8"
TableType = Literal["int8", "float32"]
_RECURRENT_PARAMETERS = ("state_weight", "projection")  # stored as int8

InputRanges = Mapping[str, tuple[float, float]]
"""Name of a linear layer -> minimum and maximum of its inputs."""


class CodesConfig(QuantizationConfigMixin):
    """Base class of the configurations of this package's quantizers, which are dataclasses."""

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], return_unused_kwargs: bool = False, **kwargs: Any) -> Any:
        """The configuration in a config.json; raises CtxError for an unknown field."""
        names = [field.name for field in fields(cls)]  # type: ignore[arg-type]
        if unknown := sorted(config_dict.keys() - {*names}):
            raise CtxError(
                f"There is no field {unknown[0]!r}; the fields are {', '.join(names)}.",
                location="quantization_config",
                hint="remove the field from config.json.",
            )
        return super().from_dict(config_dict, return_unused_kwargs, **kwargs)

    def to_dict(self) -> dict[str, Any]:
        """The entry of config.json."""
        return asdict(self)  # type: ignore[call-overload]


@dataclass
class CtxInt8Config(CodesConfig):
    """Configuration of int8 quantization.

    Attributes:
        activations: Granularity of the input scales of linear layers: "token", "tensor", or "static" for scales of a
            calibration.
        embeddings: Type of the embeddings.
        skip: Modules that are not quantized: names, or last components of names.
        modules: Names of the quantized modules; None before quantization.
    """

    quant_method: Any = METHOD
    activations: ActivationScale = "token"
    embeddings: TableType = "int8"
    skip: list[str] = field(default_factory=list)
    modules: list[str] | None = None

    def __post_init__(self) -> None:
        check_choice(get_args(ActivationScale), activations=self.activations)
        check_choice(get_args(TableType), embeddings=self.embeddings)
        if not isinstance(self.skip, list):
            raise CtxError(
                f"skip is {self.skip!r}, expected a list.", location=METHOD, hint='use a list of names: ["pooler"].'
            )


class CodesQuantizer(HfQuantizer):
    """Base class of this package's quantizers: models with integer codes, which can be saved but not trained."""

    code_names: ClassVar[tuple[str, ...]]
    """Names of the parameters with integer codes, in their modules."""
    scale_names: ClassVar[tuple[str, ...]]
    """Names of the parameters with scales, which must be positive."""

    def get_new_dtype(self, converter: Any, param: Any, dtype: torch.dtype | None) -> torch.dtype | None:
        """As in transformers, but codes keep the type in the file, which is checked after loading."""
        if dtype is not None and not dtype.is_floating_point:
            return None
        return super().get_new_dtype(converter, param, dtype)

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        if self.pre_quantized:
            self._check_codes(model)
        return model.requires_grad_(False)

    def _check_codes(self, model: PreTrainedModel) -> None:
        """Raise CtxError if codes or scales are missing in the file, or have a wrong type or value."""
        for module_name, module in model.named_modules():
            parameters = dict(module.named_parameters(recurse=False))
            if parameters.keys().isdisjoint(self.code_names):
                continue
            for name, parameter in parameters.items():
                if not getattr(parameter, "_is_hf_initialized", False):
                    problem = "is missing in the file"
                elif name in self.code_names and parameter.is_floating_point():
                    problem = f"has the type {parameter.dtype}, expected integers"
                elif name in self.scale_names and not bool((parameter.isfinite() & (parameter > 0)).all()):
                    problem = "has values that are not finite and positive"
                else:
                    continue
                raise CtxError(
                    f"{module_name}.{name} {problem}.",
                    location=model.config.name_or_path,
                    hint="copy the file again, or quantize the float32 model again.",
                )

    def is_serializable(self) -> bool:
        """Quantized models can be saved."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Integer codes have no gradients."""
        return False

    def attach(self, model: PreTrainedModel) -> None:
        """Mark a model as quantized by this method, in evaluation mode; `save_pretrained` saves the codes."""
        object.__setattr__(model, "hf_quantizer", self)
        model.config.quantization_config = self.quantization_config
        model.is_quantized = True  # type: ignore[assignment]
        model.quantization_method = self.quantization_config.quant_method  # type: ignore[assignment]
        model.requires_grad_(False).eval()


class CtxInt8Quantizer(CodesQuantizer):
    """Loads int8 models, and quantizes a model that is loaded with a `CtxInt8Config`."""

    quantization_config: CtxInt8Config
    code_names = ("codes", "original0")  # original: of a parametrization by `Int8Rows`
    scale_names = ("code_scale", "input_scale", "original1")

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        """Raise CtxError for a GPU, or for static scales without a calibration."""
        devices = device_map.values() if isinstance(device_map, dict) else [device_map]
        if any(device not in (None, "auto", "disk") and torch.device(device).type != "cpu" for device in devices):
            raise CtxError(
                f"int8 weights are supported on CPU only, got device_map={device_map}.",
                location=METHOD,
                hint="remove device_map; on a GPU, load the float32 model with dtype=torch.bfloat16.",
            )
        if not self.pre_quantized and self.quantization_config.activations == "static":
            raise CtxError(
                "Static scales need a calibration.",
                location="from_pretrained",
                hint="use `hf-ctxmodels export int8 --activations static:file=FILE`, or another scale.",
            )

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """float32 for weights that are not quantized, the type of dequantized values."""
        return torch.float32

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> None:
        strict = set(model._keep_in_fp32_modules_strict or ())
        model._keep_in_fp32_modules_strict = strict | {"code_scale", "input_scale"}
        if self.pre_quantized:
            config = self.quantization_config
            replaceable = {*find_replaceable_modules(model, embeddings=True)}
            config.modules = [name for name in names_in_class(model, config.modules or ()) if name in replaceable]
            replace_modules(model, config.modules, config.activations, empty=True)

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        if not self.pre_quantized:
            _quantize_modules(model, self.quantization_config, None)
        return super()._process_model_after_weight_loading(model)


def quantize_model(model: PreTrainedModel, config: CtxInt8Config, ranges: InputRanges | None = None) -> None:
    """Quantize a model in place; `save_pretrained` then saves the integer codes, and other weights in float32.

    Args:
        model: A model in float32 or half precision, on the CPU.
        ranges: Input ranges of a calibration, see `record_ranges`; for static scales.

    Raises:
        CtxError: The model is quantized already or not on the CPU, a skipped module does not exist, or a linear layer
            had no input in the calibration.
    """
    if is_quantized(model):
        location = model.config.name_or_path or METHOD
        raise CtxError("The model is quantized already.", location=location, hint="use the float32 model.")
    if model.device.type != "cpu":
        raise CtxError(
            f"The model is on {model.device}, expected the CPU.", location=METHOD, hint="move it by model.cpu()."
        )
    model.float()
    _quantize_modules(model, config, ranges)
    CtxInt8Quantizer(config, pre_quantized=True).attach(model)


def _quantize_modules(model: PreTrainedModel, config: CtxInt8Config, ranges: InputRanges | None) -> None:
    names = find_replaceable_modules(model, embeddings=config.embeddings == "int8", skipped=config.skip)
    replace_modules(model, names, config.activations, ranges)
    config.modules = names


def register_int8() -> None:
    """Register the method with transformers; idempotent."""
    if METHOD not in AUTO_QUANTIZER_MAPPING:
        register_quantization_config(METHOD)(CtxInt8Config)
        register_quantizer(METHOD)(CtxInt8Quantizer)


def find_replaceable_modules(model: nn.Module, *, embeddings: bool, skipped: Collection[str] = ()) -> list[str]:
    """Names of the modules that can be quantized to int8, with embeddings or not; adapters stay in float32. `skipped`
    modules, by names or last components of names, are excluded with their submodules; raises CtxError if there is none
    of a name."""
    excluded = match_modules(model, skipped, "skip")
    return [
        name
        for name, module in model.named_modules()
        if _is_replaceable(module, embeddings) and name not in excluded and not is_adapter_parameter(name)
    ]


def _is_replaceable(module: nn.Module, embeddings: bool) -> bool:
    if isinstance(module, LSTM | GRU):
        return not parametrize.is_parametrized(module) and "input_maps" not in module._modules
    if isinstance(module, nn.Embedding):
        is_plain = type(module).forward in (nn.Embedding.forward, ScaledEmbedding.forward)
        return embeddings and is_plain and module.embedding_dim >= MIN_FEATURES
    return is_plain_linear(module) and min(module.weight.shape) >= MIN_FEATURES


@torch.no_grad()
def replace_modules(
    model: nn.Module,
    names: Collection[str],
    activations: ActivationScale = "token",
    ranges: InputRanges | None = None,
    *,
    empty: bool = False,
) -> None:
    """Replace modules in place by int8 modules, and update the tied weights.

    Args:
        names: Names from `find_replaceable_modules`.
        activations: As in `Int8Linear`.
        ranges: Input ranges of the linear layers, for static scales.
        empty: Leave the weights uninitialized, to load them from a file.
    """
    replacements: dict[int, nn.Module] = {}
    for name in names:
        module: Any = model.get_submodule(name)
        mark_initialized(model, name)
        if isinstance(module, LSTM | GRU):
            _quantize_recurrent_layer(module, activations, empty)
        elif isinstance(module, nn.Embedding):
            factor = module.embedding_dim**0.5 if isinstance(module, ScaledEmbedding) else 1.0
            embedding = Int8Embedding(module.num_embeddings, module.embedding_dim, module.padding_idx, factor)
            replacements[id(module)] = embedding if empty else embedding.fill(module.weight)
        else:
            if activations == "static" and not empty and name not in (ranges or {}):
                raise CtxError(
                    f"{name} had no input in the calibration.",
                    location="activations static",
                    hint="calibrate with inputs that use it, or exclude it by `skip`.",
                )
            input_range = (ranges or {}).get(name) if activations == "static" else None
            replacements[id(module)] = _new_linear(module.weight, module.bias, activations, input_range, empty)
    replace_children(model, replacements)
    if isinstance(model, PreTrainedModel):
        _tie_weights(model)


def _new_linear(
    weight: Tensor, bias: Tensor | None, activations: ActivationScale, input_range: Any, empty: bool
) -> Int8Linear:
    if empty:
        return Int8Linear(weight.shape[1], weight.shape[0], bias is not None, activations)
    return Int8Linear.from_weight(weight, bias, activations, input_range)


def _quantize_recurrent_layer(layer: Any, activations: ActivationScale, empty: bool) -> None:
    """Replace the input projection, which runs for all steps at once, by int8 linear layers; the other weights are
    stored as int8 and dequantized."""
    activations = "token" if activations == "static" else activations  # the directions have no calibrated inputs
    projections = [_new_linear(weight, None, activations, None, empty) for weight in layer.input_weight]
    del layer.input_weight
    layer.input_weight, layer.input_maps = None, nn.ModuleList(projections)
    for parameter in _RECURRENT_PARAMETERS:
        if getattr(layer, parameter, None) is not None:
            getattr(layer, parameter).requires_grad_(False)  # integer codes have no gradient
            parametrize.register_parametrization(layer, parameter, Int8Rows(), unsafe=True)


def _tie_weights(model: PreTrainedModel) -> None:
    """Tie codes and scales of tied weights that are both quantized."""
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    tied_keys: dict[str, str] = {}
    for target, source in model.all_tied_weights_keys.items():
        modules = target.removesuffix(".weight"), source.removesuffix(".weight")
        for pair in (
            (target, source),
            *([f"{name}.{suffix}" for name in modules] for suffix in ("codes", "code_scale")),
        ):
            if names.issuperset(pair):
                tied_keys[pair[0]] = pair[1]
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            module._tied_weights_keys, module.all_tied_weights_keys = {}, {}
    model._tied_weights_keys = model.all_tied_weights_keys = tied_keys
    for target, source in tied_keys.items():
        parent, _, name = target.rpartition(".")
        setattr(model.get_submodule(parent), name, model.get_parameter_or_buffer(source))


@contextmanager
def record_ranges(model: nn.Module, names: Collection[str]) -> Iterator[dict[str, tuple[float, float]]]:
    """Record name -> minimum and maximum of the inputs of linear layers, including 0, while the `with` body runs."""
    ranges: dict[str, tuple[float, float]] = {}

    def record(name: str, module: nn.Module, input: Tensor) -> None:
        minimum, maximum = range_of(input.float())
        recorded = ranges.get(name, (0.0, 0.0))
        ranges[name] = (min(recorded[0], minimum), max(recorded[1], maximum))

    layers = {name for name, module in model.named_modules() if isinstance(module, nn.Linear) and name in names}
    with watch_inputs(model, layers, record):
        yield ranges
