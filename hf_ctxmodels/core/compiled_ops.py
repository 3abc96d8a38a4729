"""Custom operators of compiled graphs, among them operators whose results have data-dependent sizes.

`torch.compile` breaks the graph at `nonzero` and boolean indices unless `fullgraph=True` or
`torch._dynamo.config.capture_dynamic_output_shape_ops` is set. The operators here allocate their sizes themselves
(`data_dependent_size`), so that compiled graphs need no setting.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._library.fake_impl import allocate_size

_NAMESPACE = "hf_ctxmodels"


def is_compiled() -> bool:
    """Whether a graph is being compiled by `torch.compile`; exported graphs have no custom operators."""
    return torch.compiler.is_compiling() and not torch.compiler.is_exporting()


def define_operator(schema: str, function: Callable, fake: Callable) -> Any:
    """Define an operator without autograd.

    Args:
        schema: Name and signature, without the namespace.
        function: The implementation; its results are contiguous and share no memory with its arguments.
        fake: Computes tensors with the shapes and dtypes of the results.
    """
    name = schema[: schema.index("(")]
    qualified_name = f"{_NAMESPACE}::{name}"
    torch.library.define(qualified_name, schema[len(name) :])
    torch.library.impl(qualified_name, "CompositeExplicitAutograd")(torch.no_grad()(function))
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
