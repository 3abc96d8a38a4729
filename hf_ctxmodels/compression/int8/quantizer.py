"""The quantization method `ctx-int8` of transformers: configuration, and loading by `from_pretrained`."""

from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

import torch
from transformers import PreTrainedModel
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING, register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from hf_ctxmodels.compression.int8.module_replacement import (
    InputRanges,
    find_replaceable_modules,
    names_in_class,
    replace_modules,
)
from hf_ctxmodels.compression.int8.modules import ActivationScale
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import check_choice
from hf_ctxmodels.core.weights import is_quantized

METHOD = "ctx-int8"
TableType = Literal["int8", "float32"]


@dataclass
class CtxInt8Config(QuantizationConfigMixin):
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

    def to_dict(self) -> dict[str, Any]:
        """The entry of config.json."""
        return asdict(self)


class CtxInt8Quantizer(HfQuantizer):
    """Loads int8 models, and quantizes a model that is loaded with a `CtxInt8Config`."""

    quantization_config: CtxInt8Config

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
            names = [name for name in names_in_class(model, config.modules or ()) if name in replaceable]
            replace_modules(model, names, config.activations, empty=True)

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        if not self.pre_quantized:
            _quantize_modules(model, self.quantization_config, None)
        return model.requires_grad_(False)

    def is_serializable(self) -> bool:
        """Quantized models can be saved."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Integer codes have no gradients."""
        return False


def quantize_model(model: PreTrainedModel, config: CtxInt8Config, ranges: InputRanges | None = None) -> None:
    """Quantize a model in place; `save_pretrained` then saves the integer codes, and other weights in float32.

    Args:
        model: A model in float32 or half precision, on the CPU.
        config: The quantization configuration.
        ranges: Input ranges of a calibration, see `RangeRecorder`; for static scales.

    Raises:
        CtxError: The model is quantized already or not on the CPU, a skipped module does not exist, or a linear layer
            had no input in the calibration.
    """
    check_not_quantized(model)
    if model.device.type != "cpu":
        raise CtxError(
            f"The model is on {model.device}, expected the CPU.", location=METHOD, hint="move it by model.cpu()."
        )
    model.float()
    _quantize_modules(model, config, ranges)
    quantizer = CtxInt8Quantizer(config, pre_quantized=True)
    object.__setattr__(model, "hf_quantizer", quantizer)
    model.config.quantization_config = config
    model.is_quantized, model.quantization_method = True, METHOD  # type: ignore[assignment]
    model.requires_grad_(False).eval()


def _quantize_modules(model: PreTrainedModel, config: CtxInt8Config, ranges: InputRanges | None) -> None:
    names = find_replaceable_modules(model, embeddings=config.embeddings == "int8", skipped=config.skip)
    replace_modules(model, names, config.activations, ranges)
    config.modules = names


def check_not_quantized(model: PreTrainedModel) -> None:
    """Raise CtxError if a model is quantized, by this package or another."""
    if is_quantized(model):
        raise CtxError(
            "The model is quantized already.",
            location=model.config.name_or_path or METHOD,
            hint="use the float32 model.",
        )


def register_int8() -> None:
    """Register the method with transformers; idempotent."""
    if METHOD not in AUTO_QUANTIZER_MAPPING:
        register_quantization_config(METHOD)(CtxInt8Config)
        register_quantizer(METHOD)(CtxInt8Quantizer)
