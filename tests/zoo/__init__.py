"""Tiny models and batches of all families and heads in the registry, for the common tests and the parity tests.

A new family needs no change here: the traits of its SPEC state what its classes do not. A new type of target
(`hf_ctxmodels.spec.Target`) is added to `batches`.
"""

from zoo.batches import LENGTHS, STEPS, labeled_batch, make_batch, make_targets, make_training_batch
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
    LowRank,
    feed_source_to_decoder,
    pretraining_auto_class,
    tiny_config,
    with_random_parameters,
)
from zoo.compare import (
    PATHS,
    SIDES,
    assert_close,
    assert_nonzero_gradients,
    assert_same_gradients,
    assert_same_outputs,
    assert_same_weights,
    gradients,
    load_strict,
    models_by_fast_path,
    models_by_path,
    scalar_loss,
    scalar_loss_of,
    select_non_padding,
    tensors_of,
)
from zoo.matrix import (
    ARCHETYPE_FAMILIES,
    ARCHETYPES,
    BASES,
    CASES,
    HEADS,
    NETWORKS,
    REFERENCE_CASES,
    REPRESENTATIVES,
    TIED_HEADS,
    TOKEN_HEADS,
    as_subtests,
    grouped_by_family,
    parametrize_forwards,
)
