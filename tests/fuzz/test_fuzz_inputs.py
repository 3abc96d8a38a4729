"""Mutated arguments of all encoders and heads give finite outputs or an error that names an argument."""

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from mutations import assert_readable_errors, check_seeds
from torch import Tensor
from transformers import PreTrainedModel
from zoo import CASES, Case, assert_same_outputs, make_batch, make_targets, tensors_of

from hf_ctxmodels import CtxError
from hf_ctxmodels.registry import FAMILIES
from hf_ctxmodels.spec import FamilySpec

QUICK_SEEDS, MANY_SEEDS = 20, 400
SEED_COUNTS = [QUICK_SEEDS, pytest.param(MANY_SEEDS, marks=pytest.mark.slow)]
_TYPE_MUTATIONS: tuple[Callable[[Tensor], Any], ...] = (
    lambda tensor: tensor.tolist(),
    np.asarray,
    lambda tensor: "text",
    lambda tensor: 3,
)
_DTYPE_MUTATIONS = (torch.float32, torch.float64, torch.float16, torch.bool, torch.uint8, torch.int16, torch.int32)
_SHAPE_MUTATIONS: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda tensor: tensor[..., :-1],
    lambda tensor: tensor[:1],
    lambda tensor: tensor[:0],
    lambda tensor: tensor[0],
    lambda tensor: tensor[None],
    lambda tensor: tensor[..., None],
    lambda tensor: torch.cat([tensor, tensor]),
    lambda tensor: torch.cat([tensor, tensor], -1),
    lambda tensor: tensor.flatten(),
    lambda tensor: tensor.flatten()[0],
    lambda tensor: tensor.transpose(0, -1),
)
_VALUE_MUTATIONS: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda tensor: -tensor - 1,
    lambda tensor: tensor + 10**6,
    lambda tensor: torch.full_like(tensor, -100),
    torch.zeros_like,
)
_MUTATIONS: tuple[tuple[Any, ...], ...] = (_TYPE_MUTATIONS, _DTYPE_MUTATIONS, _SHAPE_MUTATIONS, _VALUE_MUTATIONS)


def mutate_argument(tensor: Tensor, rng: random.Random) -> Any:
    """Change the type, dtype, shape or values of an argument."""
    mutation = rng.choice(rng.choice(_MUTATIONS))
    if isinstance(mutation, torch.dtype):
        return tensor.to(mutation)
    if tensor.is_floating_point() and mutation in _VALUE_MUTATIONS:
        return tensor  # all values of embeddings are valid
    return mutation(tensor)


def valid_batch(case: Case, use_embeddings: bool) -> dict[str, Any]:
    """A batch with targets, with `input_ids` or `inputs_embeds`."""
    batch: dict[str, Any] = make_batch(case)
    if not case.is_base:
        batch |= make_targets(case, batch)
    if use_embeddings:
        batch["inputs_embeds"] = case.embed_ids(case.model(), batch.pop("input_ids")).detach()
    return batch


def has_same_values(tensor: Tensor, value: Any) -> bool:
    """Whether a value is a tensor with the same values, of any dtype."""
    return torch.is_tensor(value) and value.shape == tensor.shape and torch.equal(value.to(tensor.dtype), tensor)


def check_mutated_arguments(
    case: Case, model: PreTrainedModel, batches: list[dict[str, Any]], errors: list[str], rng: random.Random
) -> None:
    """Mutate one or two arguments of a valid batch; equal values must give equal outputs."""
    batch = rng.choice(batches)
    names = rng.choices(list(batch), k=rng.randint(1, 2))
    mutated = {name: mutate_argument(batch[name], rng) for name in names}
    message = None
    with assert_readable_errors((str(case), mutated)):
        try:
            output = model(**batch | mutated)
        except CtxError as error:
            message = str(error)
            raise
    if message is not None:
        errors.append(message)
        assert any(name in message for name in (*batch, "The batch is empty")), f"{case}: {message}"
        return
    not_finite = [name for name, tensor in tensors_of(output).items() if not tensor.isfinite().all()]
    assert not not_finite, f"{case}: {not_finite} not finite"
    if all(has_same_values(batch[name], value) for name, value in mutated.items()):
        assert_same_outputs(output, model(**batch))


@pytest.mark.fast_families("bert", "t5", "elmo")
@pytest.mark.parametrize("count", SEED_COUNTS)
@pytest.mark.parametrize("family", FAMILIES.values(), ids=list(FAMILIES))
def test_mutated_arguments(family: FamilySpec, count: int) -> None:
    for case in (case for case in CASES if case.family is family):
        model, errors = case.model().requires_grad_(False), list[str]()
        accepts_embeddings = case.accepts_inputs_embeds and not case.has_choices and not case.has_generator
        batches = [valid_batch(case, use_embeddings) for use_embeddings in (False, *[True] * accepts_embeddings)]
        check_seeds(count, partial(check_mutated_arguments, case, model, batches, errors))
        assert errors
