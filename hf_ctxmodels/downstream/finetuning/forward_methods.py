"""A model's forward replaced by another one, in that model alone and in its copies."""

from collections.abc import Callable
from functools import wraps
from inspect import Parameter, Signature, signature
from types import MethodType
from typing import Any

from transformers import PreTrainedModel

Forward = Callable[..., Any]
"""A forward whose first argument is the model."""


def replace_forward(model: PreTrainedModel, make: Callable[[Forward], Forward]) -> None:
    """Put another forward in the place of a model's, with its name and signature.

    It is bound to the model, so that `copy.deepcopy` binds it to the copy.

    Args:
        model: Whose class stays as it is.
        make: Gives the new forward, which calls the old one that it is given.
    """
    old = _unbound(model.forward)
    model.forward = MethodType(wraps(old)(make(old)), model)  # type: ignore[method-assign]


def _unbound(forward: Any) -> Forward:
    """A bound forward as a function of the model; one that another package has put in place is bound to its own."""
    if hasattr(forward, "__func__"):
        return forward.__func__

    def unbound(_: Any, *args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    model = Parameter("self", Parameter.POSITIONAL_ONLY)
    unbound.__signature__ = Signature([model, *signature(forward).parameters.values()])  # type: ignore[attr-defined]
    return unbound
