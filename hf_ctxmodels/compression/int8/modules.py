"""Linear maps and tables with weights of 8 bits."""

import math
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hf_ctxmodels.compression.int8.quantization import (
    Activations,
    check_not_trained,
    dequantize_rows,
    quantize_rows,
    quantize_tensor,
    quantize_tokens,
    range_of,
    scale_of_range,
)
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.layers.cpu.linear import operators_are_intercepted

ActivationScale = Literal["token", "tensor", "static"]

# without VNNI, oneDNN adds products of two codes in 16 bits, which overflow
HAS_INT8_PRODUCT = (
    torch.backends.mkldnn.is_available()
    and hasattr(torch.ops.onednn, "qlinear_pointwise")
    and torch.cpu._is_vnni_supported()
)


def _fixed(values: Tensor) -> nn.Parameter:
    return nn.Parameter(values, requires_grad=False)


class Int8Linear(nn.Module):
    """A linear map whose weights and inputs have 8 bits, for inference on a CPU.

    With a scale for each token an output depends on its own row alone; with one for the tensor it depends a little on
    the rest of the batch; a static one is that of a calibration, which values outside of its range are cut to.

    Args:
        in_features, out_features: Widths.
        bias: Whether there is a bias, in single precision.
        activations: What has a scale of the inputs: each token, the tensor, or all inputs ("static").

    Attributes:
        codes: (out, in) int8 weights.
        code_scale: (out,) their scales.
        input_scale, input_zero_point: Of a static scale.
    """

    has_quantized_weights = True
    accepts_output_range = True

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, activations: ActivationScale = "token"
    ) -> None:
        super().__init__()
        self.in_features, self.out_features, self.activations = in_features, out_features, activations
        self.codes = _fixed(torch.empty(out_features, in_features, dtype=torch.int8))
        self.code_scale = _fixed(torch.empty(out_features))
        self.bias = _fixed(torch.empty(out_features)) if bias else None
        static = activations == "static"
        self.input_scale = _fixed(torch.empty(1)) if static else None
        self.input_zero_point = _fixed(torch.empty(1, dtype=torch.long)) if static else None
        self._packed: dict[Any, tuple[tuple[int, int], tuple[Tensor, Tensor, Tensor]]] = {}

    @property
    def is_rowwise(self) -> bool:
        """Whether an output depends on its own row alone, so that rows can be given in parts."""
        return self.activations != "tensor"

    @classmethod
    @torch.no_grad()
    def of(
        cls,
        weight: Tensor,
        bias: Tensor | None,
        activations: ActivationScale = "token",
        input_range: tuple[float, float] | None = None,
    ) -> Self:
        """The map of an (out, in) weight.

        Args:
            weight, bias: Of a linear map.
            activations: As above.
            input_range: The least and the largest input of a calibration, for a static scale.
        """
        made = cls(weight.shape[1], weight.shape[0], bias is not None, activations)
        codes, scale = quantize_rows(weight)
        made.codes, made.code_scale = _fixed(codes), _fixed(scale)
        if bias is not None:
            made.bias = _fixed(bias.detach().float().clone())
        if input_range is not None:
            scale_of_input, zero_point = scale_of_range(*input_range)
            made.input_scale = _fixed(torch.tensor([scale_of_input]))
            made.input_zero_point = _fixed(torch.tensor([zero_point]))
        return made

    def dequantized(self) -> Tensor:
        """(out, in) weights in single precision."""
        return dequantize_rows(self.codes, self.code_scale)

    def forward(self, input: Tensor, start: int | None = None, stop: int | None = None) -> Tensor:
        """The map, or a range of its outputs.

        Args:
            input: (..., in).
            start, stop: The first output and that after the last.

        Returns:
            (..., out) in the type of `input`.

        Raises:
            CtxError: A gradient is asked for, the model is trained, or the map is not on a CPU.
        """
        self._check(input)
        states = input.reshape(-1, self.in_features).float()
        given = self._quantized(states)
        part = slice(start, stop)
        if given is None:
            output = F.linear(states, self.dequantized()[part], None if self.bias is None else self.bias[part].float())
        elif operators_are_intercepted() or not HAS_INT8_PRODUCT or not states.numel():
            output = self._slow(given, part)
        else:
            output = self._fast(given, part)
        return output.view(*input.shape[:-1], output.shape[-1]).to(input.dtype)

    def _check(self, input: Tensor) -> None:
        check_not_trained(self)
        if input.requires_grad and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise CtxError(
                "A quantized model has no gradients.",
                location="Int8Linear",
                hint="train or explain the model in single precision, and quantize it afterwards.",
            )
        if self.codes.device.type not in ("cpu", "meta"):
            raise CtxError(
                f"Weights of 8 bits are for a CPU, and these are on {self.codes.device}.",
                hint="leave the model on the CPU, or take model.bfloat16() on a GPU.",
            )

    def _quantized(self, states: Tensor) -> Activations | None:
        """None for inputs that are not finite and have one scale."""
        if self.activations == "token":
            return quantize_tokens(states)
        if self.input_scale is not None and self.input_zero_point is not None:
            return quantize_tensor(states, float(self.input_scale), int(self.input_zero_point))
        scale, zero_point = scale_of_range(*range_of(states))
        return quantize_tensor(states, scale, zero_point) if math.isfinite(scale) else None

    def _slow(self, given: Activations, part: slice) -> Tensor:
        """What every machine computes: the product of the values that the codes stand for."""
        bias = None if self.bias is None else self.bias[part].float()
        return F.linear(given.dequantize(), self.dequantized()[part], bias)

    def _fast(self, given: Activations, part: slice) -> Tensor:
        """oneDNN's product of the codes."""
        packed, scale, zeros = self._packed_weight(part)
        bias = None if self.bias is None else self.bias[part].float()
        scale_of_all, bias_inside = (1.0, None) if isinstance(given.scale, Tensor) else (given.scale, bias)
        output: Tensor = torch.ops.onednn.qlinear_pointwise(
            *(given.codes, scale_of_all, given.zero_point, packed, scale, zeros),
            *(bias_inside, 1.0, 0, torch.float32, "none", [], ""),
        )
        if not isinstance(given.scale, Tensor):
            return output
        return output.mul_(given.scale) if bias is None else torch.addcmul(bias, output, given.scale, out=output)

    def _packed_weight(self, part: slice) -> tuple[Tensor, Tensor, Tensor]:
        """Laid out for the processor once, with the scales and zero points of the outputs."""
        key = (part.start, part.stop)
        version = (self.codes.data_ptr(), 0 if self.codes.is_inference() else self.codes._version)
        kept = self._packed.get(key)
        if kept is None or kept[0] != version:
            scale = self.code_scale[part].float().contiguous()
            packed = torch.ops.onednn.qlinear_prepack(self.codes[part].contiguous(), None)
            kept = self._packed[key] = (version, (packed, scale, torch.zeros(len(scale), dtype=torch.long)))
        return kept[1]

    def __getstate__(self) -> dict[str, Any]:
        """Without what is laid out for this processor."""
        return self.__dict__ | {"_packed": {}}

    def extra_repr(self) -> str:
        """For `print(model)`."""
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, by {self.activations}"


class Int8Embedding(nn.Module):
    """A table of rows with 8 bits, and a scale for each row.

    Args:
        num_embeddings, embedding_dim: Shape.
        padding_idx: As in `torch.nn.Embedding`.
        factor: What a row is multiplied by.
    """

    has_quantized_weights = True

    def __init__(
        self, num_embeddings: int, embedding_dim: int, padding_idx: int | None = None, factor: float = 1.0
    ) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.padding_idx, self.factor = padding_idx, factor
        self.codes = _fixed(torch.empty(num_embeddings, embedding_dim, dtype=torch.int8))
        self.code_scale = _fixed(torch.empty(num_embeddings))

    @torch.no_grad()
    def fill(self, weight: Tensor) -> Self:
        """Take the rows of a (num_embeddings, embedding_dim) table."""
        codes, scale = quantize_rows(weight)
        self.codes, self.code_scale = _fixed(codes), _fixed(scale)
        return self

    @property
    def weight(self) -> Tensor:
        """The whole table in single precision, made anew, without the factor."""
        return dequantize_rows(self.codes, self.code_scale)

    def forward(self, input: Tensor) -> Tensor:
        """(...) ids -> (..., embedding_dim)."""
        check_not_trained(self)
        rows = dequantize_rows(F.embedding(input, self.codes), self.code_scale[input], self.code_scale.dtype)
        return rows if self.factor == 1.0 else rows * self.factor

    def extra_repr(self) -> str:
        """For `print(model)`."""
        return f"{self.num_embeddings}, {self.embedding_dim}"


class Int8Rows(nn.Module):
    """Parametrization of a parameter that is stored with 8 bits and multiplied in single precision, for
    `torch.nn.utils.parametrize`: the weights of recurrences, whose products are too small for codes."""

    has_quantized_weights = True

    def forward(self, codes: Tensor, scale: Tensor) -> Tensor:
        """(..., rows, columns)."""
        return dequantize_rows(codes, scale, scale.dtype)

    def right_inverse(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """The codes, and the scales of the rows."""
        if weight.device.type == "meta":
            codes, scale = weight.to(torch.int8), weight[..., 0].float()
        else:
            codes, scale = quantize_rows(weight)
        return _fixed(codes), _fixed(scale)
