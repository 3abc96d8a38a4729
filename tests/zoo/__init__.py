"""Tiny models and batches for every family and head in the registry: what the common suite and the parity tests run on.

A new family needs nothing here: what cannot be read from its classes is in the traits of its SPEC. Only a kind of
target that no head before it had (`hf_ctxmodels.spec.Target`) is made in `targets`.
"""

from zoo.batches import LENGTHS, STEPS, make_batch
from zoo.cases import (
    CHOICES,
    CLS,
    FIRST_WORD,
    MASK,
    PAD,
    TINY,
    UNKNOWN,
    Batch,
    Case,
    decoding_its_input,
    main_head,
    randomised,
    tiny_config,
)
from zoo.compare import (
    assert_close,
    assert_every_parameter_learns,
    assert_same_gradients,
    assert_same_outputs,
    assert_same_weights,
    at_tokens,
    gradients,
    objective,
    objective_of,
    tensors_of,
)
from zoo.low_rank import LowRank
from zoo.matrix import (
    ARCHETYPE_FAMILIES,
    ARCHETYPES,
    BASES,
    CASES,
    HEADS,
    NETWORKS,
    PEERED,
    REPRESENTATIVES,
    TIED_HEADS,
    TOKEN_HEADS,
    each_forward,
)
from zoo.paths import PATHS, SIDES, by_fast_path, by_path
from zoo.targets import learnable_batch, make_targets

__all__ = [
    "ARCHETYPES",
    "ARCHETYPE_FAMILIES",
    "BASES",
    "CASES",
    "CHOICES",
    "CLS",
    "FIRST_WORD",
    "HEADS",
    "LENGTHS",
    "MASK",
    "NETWORKS",
    "PAD",
    "PATHS",
    "PEERED",
    "REPRESENTATIVES",
    "SIDES",
    "STEPS",
    "TIED_HEADS",
    "TINY",
    "TOKEN_HEADS",
    "UNKNOWN",
    "Batch",
    "Case",
    "LowRank",
    "assert_close",
    "assert_every_parameter_learns",
    "assert_same_gradients",
    "assert_same_outputs",
    "assert_same_weights",
    "at_tokens",
    "by_fast_path",
    "by_path",
    "decoding_its_input",
    "each_forward",
    "gradients",
    "learnable_batch",
    "main_head",
    "make_batch",
    "make_targets",
    "objective",
    "objective_of",
    "randomised",
    "tensors_of",
    "tiny_config",
]
