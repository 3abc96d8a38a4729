"""Custom operators of compiled graphs, among them operators whose results have data-dependent sizes.

`torch.compile` breaks the graph at `nonzero` and boolean indices unless `fullgraph=True` or
`torch._dynamo.config.capture_dynamic_output_shape_ops` is set. The operators here allocate their sizes themselves
(`data_dependent_size`), so that compiled graphs need no setting.
"""

from collections.abc import Callable, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor
from torch._library.fake_impl import allocate_size

_NAMESPACE = "hf_ctxmodels"


_is_in_operator: ContextVar[bool] = ContextVar("is_in_operator", default=False)


def is_in_operator() -> bool:
    """Whether an operator of this module runs. A compiler reuses the memory of its tensors."""
    return _is_in_operator.get()


def is_compiled() -> bool:
    """Whether a graph is being compiled by `torch.compile`; exported graphs have no custom operators."""
    return torch.compiler.is_compiling() and not torch.compiler.is_exporting()


def define_operator(schema: str, function: Callable, fake: Callable, *, is_random: bool = False) -> Any:
    """Define an operator without autograd.

    Args:
        schema: Name and signature, without the namespace.
        function: The implementation; its results are contiguous and share no memory with its arguments.
        fake: Computes tensors with the shapes and dtypes of the results.
        is_random: Whether the results of two calls differ.
    """

    def run(*args: Any) -> Any:
        token = _is_in_operator.set(True)
        try:
            return function(*args)
        finally:
            _is_in_operator.reset(token)

    name = schema[: schema.index("(")]
    qualified_name = f"{_NAMESPACE}::{name}"
    torch.library.define(
        qualified_name, schema[len(name) :], tags=(torch.Tag.nondeterministic_seeded,) if is_random else ()
    )
    torch.library.impl(qualified_name, "CompositeExplicitAutograd")(torch.no_grad()(run))
    torch.library.register_fake(qualified_name)(fake)
    return getattr(getattr(torch.ops, _NAMESPACE), name)


def data_dependent_size() -> Any:
    """A new size, in a fake implementation; in contrast to `new_dynamic_size` no setting is needed."""
    return allocate_size(torch.library.get_ctx()._shape_env)


def _true_indices(mask: Tensor) -> Tensor:
    return mask.flatten().nonzero().squeeze(1)


true_indices = define_operator(
    "true_indices(Tensor mask) -> Tensor",
    _true_indices,
    lambda mask: mask.new_empty(data_dependent_size(), dtype=torch.int64),
)


class _RecordedCall(np.ndarray):
    """(1,) int64, the key of a forward pass in `_recorded_calls`.

    A tensor that shares its memory, the handle, keeps this object, and with it the autograd graph, in memory.
    """

    output: Tensor
    inputs: list[Tensor]


_recorded_calls: WeakValueDictionary[int, _RecordedCall] = WeakValueDictionary()
_call_numbers = count()


def define_differentiable_operator(
    name: str,
    arguments: str,
    function: Callable[..., Tensor],
    fake: Callable[..., Tensor],
    num_differentiable: int,
) -> Callable[..., Tensor]:
    """Define an operator whose gradients autograd computes from its implementation.

    The forward pass records the autograd graph of `function`, and the backward pass runs it, as without a compiler.

    Args:
        name: Name of the operator.
        arguments: Schema of the arguments, all tensors first.
        function: The implementation.
        fake: Computes a tensor with the shape and dtype of the result.
        num_differentiable: Number of leading arguments that may have a gradient.
    """
    num_tensors = arguments.count("Tensor")

    def run(*inputs_and_flag: Any) -> tuple[Tensor, Tensor]:
        inputs, needs_grad = inputs_and_flag[:-1], inputs_and_flag[-1]
        if not needs_grad:
            output = function(*inputs)
            return output.clone() if output is inputs[0] else output.contiguous(), torch.zeros(1, dtype=torch.int64)
        with _enabled_autograd():
            leaves = [
                None if tensor is None else tensor.detach().requires_grad_() for tensor in inputs[:num_differentiable]
            ]
            output = function(*leaves, *inputs[num_differentiable:])
            output = output.clone() if output is leaves[0] else output.contiguous()
        call = np.zeros(1, dtype=np.int64).view(_RecordedCall)
        call.output, call.inputs = output, [tensor for tensor in leaves if tensor is not None]
        call[0] = next(_call_numbers)
        _recorded_calls[int(call[0])] = call
        return output.detach(), torch.from_numpy(call)

    def run_backward(grad: Tensor, handle: Tensor, tensors: Sequence[Tensor | None]) -> list[Tensor]:
        call = _recorded_calls[int(handle)]
        gradients: Sequence[Tensor | None] = [None] * len(call.inputs)
        if call.output.requires_grad:  # it depends on an input
            with _enabled_autograd():
                gradients = torch.autograd.grad(call.output, call.inputs, grad, retain_graph=True, allow_unused=True)
        return [
            tensor.new_zeros(tensor.shape) if gradient is None else gradient.contiguous()
            for tensor, gradient in zip(call.inputs, gradients, strict=True)
        ]

    forward_operator = define_operator(
        f"{name}({arguments}, bool needs_grad) -> (Tensor output, Tensor handle)",
        run,
        lambda *inputs: (fake(*inputs[:-1]), torch.empty(1, dtype=torch.int64, device="cpu")),
        is_random=True,
    )
    # `tensors` are the output and the inputs, which the recorded graph reads: a compiler must not reuse their memory
    backward_operator = define_operator(
        f"{name}_backward(Tensor grad, Tensor handle, Tensor?[] tensors) -> Tensor[]",
        run_backward,
        lambda grad, handle, tensors: [
            tensor.new_empty(tensor.shape) for tensor in tensors[1 : num_differentiable + 1] if tensor is not None
        ],
    )

    class _Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Tensor:
            output, handle = forward_operator(*inputs)
            ctx.save_for_backward(handle, output, *inputs[:num_tensors])
            ctx.num_inputs = len(inputs)
            return output

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
            handle, *tensors = ctx.saved_tensors
            gradients = iter(backward_operator(grad, handle, tensors))
            input_gradients = [
                None if tensor is None else next(gradients) for tensor in tensors[1 : num_differentiable + 1]
            ]
            return *input_gradients, *[None] * (ctx.num_inputs - num_differentiable)

    def call(*inputs: Any) -> Tensor:
        tensors = [tensor for tensor in inputs[:num_differentiable] if tensor is not None]
        needs_grad = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
        return _Function.apply(*inputs, needs_grad)

    return call


@contextmanager
def _enabled_autograd() -> Any:
    """Enable autograd in the implementation of an operator, which runs below it."""
    excluded, keys = torch._C._dispatch_tls_local_exclude_set(), torch._C.DispatchKey
    devices = (keys.AutogradCPU, keys.AutogradCUDA, keys.AutogradXPU, keys.AutogradMPS, keys.AutogradPrivateUse1)
    for key in (*devices, keys.AutogradOther, keys.ADInplaceOrView):
        excluded = excluded.remove(key)
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded), torch.enable_grad():
        yield
