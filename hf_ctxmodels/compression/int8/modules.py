"""int8 quantization of weights per row and of activations per token or per tensor, and modules with int8 weights.

A weight is `code * scale` with codes from -127 to 127 and one scale for each output row. An activation is
`(code - zero_point) * scale` with codes from 0 to 255 (Jacob et al. 2018, arXiv 1712.05877, equation 1).
"""

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.layers.cpu.linear import operators_are_intercepted

ActivationScale = Literal["token", "tensor", "static"]

# without VNNI, oneDNN accumulates products in 16 bits, which overflow
HAS_INT8_PRODUCT = (
    torch.backends.mkldnn.is_available()
    and hasattr(torch.ops.onednn, "qlinear_pointwise")
    and torch.cpu._is_vnni_supported()
)

MAX_CODE = 127  # of weights; activations of a token are at most this far from `MIDDLE`
MIDDLE = 128  # zero point of activations quantized per token
_CHUNK = 1 << 17  # elements rounded at a time, so that intermediate results stay in the cache
_INTERMEDIATE = torch.int16  # torch converts float32 to it, and it to uint8, with vector instructions
_ROUNDING = 0.5  # added before truncation
_TINY = 1e-30  # rows with a smaller maximum have codes `MIDDLE` only


def quantize_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize a finite (..., rows, columns) weight to int8 codes and (..., rows) float32 scales, 1 for zeros."""
    weight = weight.detach().float()
    maximum = weight.abs().amax(-1)
    scale = (maximum / MAX_CODE).where(maximum > 0, 1.0)
    return (weight / scale[..., None]).round_().to(torch.int8), scale


def fixed(values: Tensor) -> nn.Parameter:
    """A parameter without a gradient."""
    return nn.Parameter(values, requires_grad=False)


def dequantize_rows(codes: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """(..., rows, columns) weights from codes and the scales of their rows."""
    return (codes * scale.float()[..., None]).to(dtype)


def check_not_trained(module: nn.Module) -> None:
    """Raise CtxError for a quantized module in training mode with gradients: its layers would not be trained."""
    if module.training and torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise CtxError(
            "A quantized model cannot be trained: its weights are integer codes.",
            location=type(module).__name__,
            hint="train the float32 model and quantize it afterwards; call model.eval() for inference.",
        )


class Activations(NamedTuple):
    """(rows, width) uint8 codes, the code of the value 0, and (rows, 1) scales or one scale."""

    codes: Tensor
    zero_point: int
    scale: Tensor | float

    def dequantize(self) -> Tensor:
        """(rows, width) float32."""
        return (self.codes.float() - self.zero_point) * self.scale


def quantize_tokens(states: Tensor) -> Activations:
    """Quantize (rows, width) float32 activations with one scale per row, which is not finite for a non-finite row."""
    middle, scales = states.new_full((states.shape[1],), MIDDLE + _ROUNDING), []

    def scale_rows(rows: Tensor) -> Tensor:
        maximum = rows.abs().amax(1, keepdim=True)
        scales.append(maximum * (1 / MAX_CODE))
        return torch.addcmul(middle, rows, maximum.clamp_min_(_TINY).reciprocal_().mul_(MAX_CODE))

    codes = _round_to_uint8(states, scale_rows)
    return Activations(codes, MIDDLE, torch.cat(scales))


def range_of(states: Tensor) -> tuple[float, float]:
    """Minimum and maximum, extended to include 0."""
    if not states.numel():
        return 0.0, 0.0
    minimum, maximum = (float(value) for value in states.aminmax())
    return min(minimum, 0.0), max(maximum, 0.0)


def scale_of_range(minimum: float, maximum: float) -> tuple[float, int]:
    """Scale and zero point of codes from 0 to 255 for a range that includes 0."""
    scale = (maximum - minimum) / 255 or 1.0
    return scale, round(-minimum / scale) if math.isfinite(scale) else 0


def quantize_tensor(states: Tensor, scale: float, zero_point: int) -> Activations:
    """Quantize (rows, width) float32 activations with one scale; values outside the range are clamped."""
    middle = states.new_full((), zero_point + _ROUNDING)
    codes = _round_to_uint8(states, lambda rows: torch.add(middle, rows, alpha=1 / scale).clamp_(0, 255))
    return Activations(codes, zero_point, scale)


def _round_to_uint8(states: Tensor, scale_rows: Callable[[Tensor], Tensor]) -> Tensor:
    """uint8 codes of scaled rows, computed in chunks that fit into the cache."""
    rows, width = states.shape
    step = max(1, _CHUNK // max(1, width))
    if torch.compiler.is_compiling() or rows <= step:  # while compiling, the number of chunks would depend on the data
        return scale_rows(states).to(_INTERMEDIATE).to(torch.uint8)
    codes = torch.empty(states.shape, dtype=torch.uint8, device=states.device)
    for start in range(0, rows, step):
        codes[start : start + step] = scale_rows(states[start : start + step]).to(_INTERMEDIATE)
    return codes


class Int8Linear(nn.Module):
    """Linear layer with int8 weights and inputs, for inference on a CPU.

    With one scale per tensor, an output row also depends slightly on the rest of the batch. Static scales come from a
    calibration; values outside their range are clamped.

    Args:
        bias: Whether there is a bias, in float32.
        activations: Granularity of the input scales: "token", "tensor", or "static".

    Attributes:
        codes, code_scale: (out, in) int8 weights, and their (out,) scales.
        input_scale, input_zero_point: Static scale and zero point of the inputs.
    """

    has_quantized_weights = True
    is_cpu_only = True
    accepts_output_range = True

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, activations: ActivationScale = "token"
    ) -> None:
        super().__init__()
        self.in_features, self.out_features, self.activations = in_features, out_features, activations
        self.codes = fixed(torch.empty(out_features, in_features, dtype=torch.int8))
        self.code_scale = fixed(torch.empty(out_features))
        self.bias = fixed(torch.empty(out_features)) if bias else None
        static = activations == "static"
        self.input_scale = fixed(torch.empty(1)) if static else None
        self.input_zero_point = fixed(torch.empty(1, dtype=torch.long)) if static else None
        self._packed: dict[Any, tuple[tuple[int, int], tuple[Tensor, Tensor, Tensor]]] = {}

    @property
    def is_rowwise(self) -> bool:
        """Whether an output row depends on its own input row only."""
        return self.activations != "tensor"

    @classmethod
    @torch.no_grad()
    def from_weight(
        cls,
        weight: Tensor,
        bias: Tensor | None,
        activations: ActivationScale = "token",
        input_range: tuple[float, float] | None = None,
    ) -> Self:
        """Quantize the parameters of a linear layer; static scales need the minimum and maximum of its inputs."""
        layer = cls(weight.shape[1], weight.shape[0], bias is not None, activations)
        codes, scale = quantize_rows(weight)
        layer.codes, layer.code_scale = fixed(codes), fixed(scale)
        if bias is not None:
            layer.bias = fixed(bias.detach().float().clone())
        if input_range is not None:
            input_scale, zero_point = scale_of_range(*input_range)
            layer.input_scale = fixed(torch.tensor([input_scale]))
            layer.input_zero_point = fixed(torch.tensor([zero_point]))
        return layer

    def dequantized(self) -> Tensor:
        """(out, in) weights in float32."""
        return dequantize_rows(self.codes, self.code_scale)

    def forward(self, input: Tensor, start: int | None = None, stop: int | None = None) -> Tensor:
        """(..., in) -> (..., out), or the output features from `start` to `stop`, in the dtype of `input`.

        Raises:
            CtxError: The input requires a gradient, the model is in training mode, or the layer is not on the CPU.
        """
        check_not_trained(self)
        if input.requires_grad and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise CtxError(
                "A quantized model has no gradients.",
                location="Int8Linear",
                hint="train or explain the float32 model, and quantize it afterwards.",
            )
        if self.codes.device.type not in ("cpu", "meta"):
            raise CtxError(
                f"int8 weights are supported on CPU only, but these are on {self.codes.device}.",
                hint="keep the model on the CPU, or use model.bfloat16() on a GPU.",
            )
        states = input.reshape(-1, self.in_features).float()
        activations: Activations | None  # None for a non-finite input with one scale
        if self.activations == "token":
            activations = quantize_tokens(states)
        elif self.input_scale is not None and self.input_zero_point is not None:
            activations = quantize_tensor(states, float(self.input_scale), int(self.input_zero_point))
        else:
            scale, zero_point = scale_of_range(*range_of(states))
            activations = quantize_tensor(states, scale, zero_point) if math.isfinite(scale) else None
        features = slice(start, stop)
        needs_float = operators_are_intercepted() or not HAS_INT8_PRODUCT or not states.numel()
        if activations is None or needs_float:
            values = states if activations is None else activations.dequantize()
            bias = None if self.bias is None else self.bias[features].float()
            output = F.linear(values, self.dequantized()[features], bias)
        else:
            output = self._onednn_product(activations, features)
        return output.view(*input.shape[:-1], output.shape[-1]).to(input.dtype)

    def _onednn_product(self, activations: Activations, features: slice) -> Tensor:
        """oneDNN's product of the codes."""
        packed, scale, zeros = self._packed_weight(features)
        bias = None if self.bias is None else self.bias[features].float()
        has_row_scales = isinstance(activations.scale, Tensor)
        input_scale, fused_bias = (1.0, None) if has_row_scales else (activations.scale, bias)
        inputs, output_type = (activations.codes, input_scale, activations.zero_point), (1.0, 0, torch.float32)
        output: Tensor = torch.ops.onednn.qlinear_pointwise(
            *inputs, packed, scale, zeros, fused_bias, *output_type, "none", [], ""
        )
        if not isinstance(activations.scale, Tensor):
            return output
        if bias is None:
            return output.mul_(activations.scale)
        return torch.addcmul(bias, output, activations.scale, out=output)

    def _packed_weight(self, features: slice) -> tuple[Tensor, Tensor, Tensor]:
        """The weight in oneDNN's layout, packed once, with the scales and zero points of the output features."""
        key = (features.start, features.stop)
        version = (self.codes.data_ptr(), 0 if self.codes.is_inference() else self.codes._version)
        cached = self._packed.get(key)
        if cached is None or cached[0] != version:
            scale = self.code_scale[features].float().contiguous()
            packed = torch.ops.onednn.qlinear_prepack(self.codes[features].contiguous(), None)
            cached = self._packed[key] = (version, (packed, scale, torch.zeros(len(scale), dtype=torch.long)))
        return cached[1]

    def __getstate__(self) -> dict[str, Any]:
        """State without the packed weights of this processor."""
        return self.__dict__ | {"_packed": {}}

    def extra_repr(self) -> str:
        """Text for `print(model)`."""
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, by {self.activations}"


class Int8Embedding(nn.Module):
    """`torch.nn.Embedding` with int8 weights and one scale for each row; the embeddings are multiplied by `factor`."""

    has_quantized_weights = True

    def __init__(
        self, num_embeddings: int, embedding_dim: int, padding_idx: int | None = None, factor: float = 1.0
    ) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.padding_idx, self.factor = padding_idx, factor
        self.codes = fixed(torch.empty(num_embeddings, embedding_dim, dtype=torch.int8))
        self.code_scale = fixed(torch.empty(num_embeddings))

    @torch.no_grad()
    def fill(self, weight: Tensor) -> Self:
        """Quantize a (num_embeddings, embedding_dim) weight."""
        codes, scale = quantize_rows(weight)
        self.codes, self.code_scale = fixed(codes), fixed(scale)
        return self

    @property
    def weight(self) -> Tensor:
        """The dequantized weight in float32, without the factor."""
        return dequantize_rows(self.codes, self.code_scale)

    def forward(self, input: Tensor) -> Tensor:
        """(...) ids -> (..., embedding_dim)."""
        check_not_trained(self)
        codes, scale = F.embedding(input, self.codes), self.code_scale[input]
        embeddings = dequantize_rows(codes, scale, self.code_scale.dtype)
        return embeddings if self.factor == 1.0 else embeddings * self.factor

    def extra_repr(self) -> str:
        """Text for `print(model)`."""
        return f"{self.num_embeddings}, {self.embedding_dim}"


class Int8Rows(nn.Module):
    """Parametrization (`torch.nn.utils.parametrize`) of a recurrent weight that is stored as int8 and multiplied in
    float32."""

    has_quantized_weights = True

    def forward(self, codes: Tensor, scale: Tensor) -> Tensor:
        """(..., rows, columns)."""
        return dequantize_rows(codes, scale, scale.dtype)

    def right_inverse(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """The codes and the scales of the rows."""
        if weight.device.type == "meta":
            codes, scale = weight.to(torch.int8), weight[..., 0].float()
        else:
            codes, scale = quantize_rows(weight)
        return fixed(codes), fixed(scale)
