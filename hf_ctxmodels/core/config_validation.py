"""Bounds of what a configuration may hold, whatever the family: sizes, rates, labels, the data type."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

_LARGEST = 2**31 - 1  # of any integer: no table or layer has more rows
_MOST_MODULES, _MOST_LABELS = 10_000, 1_000_000  # each layer and each label is an object

_SIZES = (
    *("vocab_size", "hidden_size", "num_attention_heads", "intermediate_size", "embedding_size"),
    *("character_embedding_size", "max_characters_per_token"),
)
_REPEATED = (
    *("num_hidden_layers", "num_hidden_groups", "inner_group_num", "num_highway_layers", "num_decoder_layers"),
    *("num_mixes", "pretrained_layers"),
)
_NO_RATE = ("dropout_scale",)  # which multiplies rates


def check_labels_and_dtype(labels: Any, num_labels: Any, dtype: Any) -> None:
    """Refuse what transformers would fail on, or count to without an end.

    Args:
        labels: `id2label`; None for default names.
        num_labels: As given; None where it is not.
        dtype: As in a file, a name; anything else is not checked.

    Raises:
        ValueError: One of them cannot be used.
    """
    if labels is not None and not (isinstance(labels, Mapping) and all(map(_is_number, labels))):
        raise ValueError(f"id2label={_shown(labels)} must map the number of each label to its name.")
    is_count = isinstance(num_labels, int) and not isinstance(num_labels, bool)
    if num_labels is not None and not (is_count and 1 <= num_labels <= _MOST_LABELS):
        raise ValueError(f"num_labels={_shown(num_labels)} must be between 1 and {_MOST_LABELS:,}.")
    if isinstance(dtype, str) and not isinstance(getattr(torch, dtype, None), torch.dtype):
        raise ValueError(f"dtype={_shown(dtype)} is no data type of torch, such as 'float32'.")


def check_numbers(values: Mapping[str, Any]) -> None:
    """Refuse sizes that no model has, and numbers that would make every output NaN.

    Args:
        values: Fields by name, of the types that they are declared with.

    Raises:
        ValueError: The first one out of bounds.
    """
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if not math.isfinite(value):
            raise ValueError(f"{name}={value} must be a finite number.")
        if isinstance(value, int) and abs(value) > _LARGEST:
            raise ValueError(f"{name}={_shown(value)} must not be above {_LARGEST:,}.")
        if name in _SIZES and value < 1:
            raise ValueError(f"{name}={value} must be 1 or more.")
        if name in _REPEATED and not 0 <= value <= _MOST_MODULES:
            raise ValueError(f"{name}={value} must be between 0 and {_MOST_MODULES:,}.")
        if "dropout" in name and name not in _NO_RATE and not 0 <= value <= 1:
            raise ValueError(f"{name}={value} is a rate, and must be between 0 and 1.")


def is_valid_module_name(name: object) -> bool:
    """Whether a value is a name without dots that no attribute of an `nn.ModuleDict` has: not `train`."""
    return isinstance(name, str) and "." not in name and not hasattr(nn.ModuleDict(), name)


def _is_number(key: Any) -> bool:
    try:
        int(key)
    except (TypeError, ValueError):
        return False
    return True


def _shown(value: Any) -> str:
    """Of bounded length; an integer of thousands of digits has no text at all."""
    if isinstance(value, int) and value.bit_length() > 1000:
        return "a number of thousands of bits"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
