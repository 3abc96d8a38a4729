"""Validation of configuration values of all families: sizes, rates, labels and the data type."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

_MAX_INTEGER = 2**31 - 1
_MAX_MODULES, _MAX_LABELS = 10_000, 1_000_000  # each layer and each label takes memory for an object

_SIZES = {
    "vocab_size",
    "hidden_size",
    "num_attention_heads",
    "intermediate_size",
    "embedding_size",
    "character_embedding_size",
    "max_characters_per_token",
}
_MODULE_COUNTS = {
    "num_hidden_layers",
    "num_hidden_groups",
    "inner_group_num",
    "num_highway_layers",
    "num_decoder_layers",
    "num_mixes",
    "pretrained_layers",
}
_FACTORS = {"dropout_scale"}  # factors of dropout rates


def check_labels_and_dtype(labels: Any, num_labels: Any, dtype: Any) -> None:
    """Check values that transformers would fail on, or never finish with.

    Args:
        labels: `id2label`; None for default names.
        num_labels: Number of labels, or None.
        dtype: Name of a data type, as in a file; other values are not checked.

    Raises:
        ValueError: One of them is invalid.
    """
    if labels is not None and not (isinstance(labels, Mapping) and all(map(_is_number, labels))):
        raise ValueError(f"id2label={_short_repr(labels)} must map ids of labels to their names.")
    is_count = isinstance(num_labels, int) and not isinstance(num_labels, bool)
    if num_labels is not None and not (is_count and 1 <= num_labels <= _MAX_LABELS):
        raise ValueError(f"num_labels={_short_repr(num_labels)} must be between 1 and {_MAX_LABELS:,}.")
    if isinstance(dtype, str) and not isinstance(getattr(torch, dtype, None), torch.dtype):
        raise ValueError(f"dtype={_short_repr(dtype)} is not a data type of torch such as 'float32'.")


def check_numbers(values: Mapping[str, Any]) -> None:
    """Check that numbers are finite and within their bounds.

    Args:
        values: Field name -> value of the declared type.

    Raises:
        ValueError: A value is out of bounds.
    """
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if not math.isfinite(value):
            raise ValueError(f"{name}={value} must be a finite number.")
        if isinstance(value, int) and abs(value) > _MAX_INTEGER:
            raise ValueError(f"{name}={_short_repr(value)} must not be above {_MAX_INTEGER:,}.")
        if name in _SIZES and value < 1:
            raise ValueError(f"{name}={value} must be 1 or more.")
        if name in _MODULE_COUNTS and not 0 <= value <= _MAX_MODULES:
            raise ValueError(f"{name}={value} must be between 0 and {_MAX_MODULES:,}.")
        if "dropout" in name and name not in _FACTORS and not 0 <= value <= 1:
            raise ValueError(f"{name}={value} is a rate, and must be between 0 and 1.")


def is_valid_module_name(name: object) -> bool:
    """Whether a value can name a module in an `nn.ModuleDict`: no dots, and no attribute such as `train`."""
    return isinstance(name, str) and "." not in name and not hasattr(nn.ModuleDict(), name)


def _is_number(key: Any) -> bool:
    try:
        int(key)
    except (TypeError, ValueError):
        return False
    return True


def _short_repr(value: Any) -> str:
    """Return a `repr` of bounded length; Python cannot format integers of thousands of digits."""
    if isinstance(value, int) and value.bit_length() > 1000:
        return "a number of thousands of bits"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
