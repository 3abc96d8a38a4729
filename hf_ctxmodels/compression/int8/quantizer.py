"""The method `ctx-int8` of transformers' `quantization_config`: how `from_pretrained` opens what was saved."""

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
    replace,
)
from hf_ctxmodels.compression.int8.modules import ActivationScale
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import check_choice
from hf_ctxmodels.core.weights import is_quantized

METHOD = "ctx-int8"
TableType = Literal["int8", "float32"]


@dataclass
class CtxInt8Config(QuantizationConfigMixin):
    """What has 8 bits, and how.

    Attributes:
        activations: What has a scale of the inputs of maps: each token, the tensor, or all inputs ("static", of a
            calibration).
        embeddings: Type of the tables.
        skip: Modules that stay as they are: paths, or last parts of paths.
        modules: Paths of what was quantized; None before.
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
            raise CtxError(f"skip is {self.skip!r}.", location=METHOD, hint='give a list of names: ["pooler"].')

    def to_dict(self) -> dict[str, Any]:
        """As in config.json."""
        return asdict(self)


class CtxInt8Quantizer(HfQuantizer):
    """Opens models with weights of 8 bits, and quantizes others when they are opened with a `CtxInt8Config`."""

    quantization_config: CtxInt8Config

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        """Raise CtxError for a GPU, or a static scale without a calibration."""
        devices = device_map.values() if isinstance(device_map, dict) else [device_map]
        if any(each not in (None, "auto", "disk") and torch.device(each).type != "cpu" for each in devices):
            raise CtxError(
                f"Weights of 8 bits are for a CPU, not for {device_map}.",
                location=METHOD,
                hint="leave device_map out; on a GPU take dtype=torch.bfloat16 of the model in single precision.",
            )
        if not self.pre_quantized and self.quantization_config.activations == "static":
            raise CtxError(
                "A static scale needs a calibration.",
                location="from_pretrained",
                hint="use `hf-ctxmodels quantize --activations static --calibration_file`, or another scale.",
            )

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Single precision for what has no codes, whose sums with values of codes would have two types."""
        return torch.float32

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> None:
        strict = set(model._keep_in_fp32_modules_strict or ())
        model._keep_in_fp32_modules_strict = strict | {"code_scale", "input_scale"}
        if self.pre_quantized:
            config = self.quantization_config
            known = {*find_replaceable_modules(model, embeddings=True)}
            names = [name for name in names_in_class(model, config.modules or ()) if name in known]
            replace(model, names, config.activations, empty=True)

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        if not self.pre_quantized:
            _replace(model, self.quantization_config, None)
        return model.requires_grad_(False)

    def is_serializable(self) -> bool:
        """Yes."""
        return True

    @property
    def is_trainable(self) -> bool:
        """No: codes have no gradients."""
        return False


def quantize_model(model: PreTrainedModel, config: CtxInt8Config, ranges: InputRanges | None = None) -> None:
    """Quantize a model in place; `save_pretrained` then saves the codes. What has none is in single precision then.

    Args:
        model: In single or half precision, on a CPU.
        config: What has 8 bits.
        ranges: Inputs of the maps in a calibration, see `RangeRecorder`; for static scales.

    Raises:
        CtxError: The model is quantized already or not on a CPU, a module to be left out is not there, or a map had no
            input in the calibration.
    """
    check_not_quantized(model)
    if model.device.type != "cpu":
        raise CtxError(f"The model is on {model.device}.", location=METHOD, hint="move it to the CPU: model.cpu().")
    model.float()
    _replace(model, config, ranges)
    quantizer = CtxInt8Quantizer(config, pre_quantized=True)
    object.__setattr__(model, "hf_quantizer", quantizer)
    model.config.quantization_config = config
    model.is_quantized, model.quantization_method = True, METHOD  # type: ignore[assignment]
    model.requires_grad_(False).eval()


def _replace(model: PreTrainedModel, config: CtxInt8Config, ranges: InputRanges | None) -> None:
    names = find_replaceable_modules(model, embeddings=config.embeddings == "int8", skipped=config.skip)
    replace(model, names, config.activations, ranges)
    config.modules = names


def check_not_quantized(model: PreTrainedModel) -> None:
    """Raise CtxError for a model that is quantized, by this package or another."""
    if is_quantized(model):
        raise CtxError(
            "The model is quantized already.",
            location=model.config.name_or_path or METHOD,
            hint="give the model in single precision that it was made of.",
        )


def register_int8() -> None:
    """Make the method known to transformers; idempotent."""
    if METHOD not in AUTO_QUANTIZER_MAPPING:
        register_quantization_config(METHOD)(CtxInt8Config)
        register_quantizer(METHOD)(CtxInt8Quantizer)
