"""Strange arguments of every encoder and head: finite numbers, or an error that names one of them."""

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from mutations import each_seed, one_screen
from torch import Tensor
from transformers import PreTrainedModel
from zoo import CASES, Case, assert_same_outputs, make_batch, make_targets, tensors_of

from hf_ctxmodels import CtxError
from hf_ctxmodels.registry import FAMILIES
from hf_ctxmodels.spec import FamilySpec

EACH, MANY = 50, 400
COUNTS = [EACH, pytest.param(MANY, marks=pytest.mark.slow)]
_TYPES: tuple[Callable[[Tensor], Any], ...] = (
    lambda given: given.tolist(),
    np.asarray,
    lambda given: "text",
    lambda given: 3,
)
_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bool, torch.uint8, torch.int16, torch.int32)
_SHAPES: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda given: given[..., :-1],
    lambda given: given[:1],
    lambda given: given[:0],
    lambda given: given[0],
    lambda given: given[None],
    lambda given: given[..., None],
    lambda given: torch.cat([given, given]),
    lambda given: torch.cat([given, given], -1),
    lambda given: given.flatten(),
    lambda given: given.flatten()[0],
    lambda given: given.transpose(0, -1),
)
_VALUES: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda given: -given - 1,
    lambda given: given + 10**6,
    lambda given: torch.full_like(given, -100),
    torch.zeros_like,
)
_KINDS: tuple[tuple[Any, ...], ...] = (_TYPES, _DTYPES, _SHAPES, _VALUES)


def strange(given: Tensor, rng: random.Random) -> Any:
    """The argument with another type, dtype, shape or other values."""
    change = rng.choice(rng.choice(_KINDS))
    if isinstance(change, torch.dtype):
        return given.to(change)
    if given.is_floating_point() and change in _VALUES:
        return given  # embeddings may be any numbers
    return change(given)


def right_batch(case: Case, embedded: bool) -> dict[str, Any]:
    """A batch and its targets, sometimes with embeddings in the place of ids."""
    batch: dict[str, Any] = make_batch(case)
    if not case.is_base:
        batch |= make_targets(case, batch)
    if embedded:
        batch["inputs_embeds"] = case.embed(case.model(), batch.pop("input_ids")).detach()
    return batch


def is_same(given: Tensor, other: Any) -> bool:
    """Whether it is a tensor of the same values, of whatever dtype."""
    return torch.is_tensor(other) and other.shape == given.shape and torch.equal(other.to(given.dtype), given)


def check_strange(
    case: Case, model: PreTrainedModel, batches: list[dict[str, Any]], refused: list[str], rng: random.Random
) -> None:
    """Replace one or two arguments of a right batch. What says the same has the same answer."""
    batch = rng.choice(batches)
    names = rng.choices(list(batch), k=rng.randint(1, 2))
    changed = {name: strange(batch[name], rng) for name in names}
    message = None
    with one_screen((str(case), changed)):
        try:
            found = model(**batch | changed)
        except CtxError as error:
            message = str(error)
            raise
    if message is not None:
        refused.append(message)
        assert any(name in message for name in (*batch, "The batch is empty")), f"{case}: {message}"
        return
    wrong = [name for name, tensor in tensors_of(found).items() if not tensor.isfinite().all()]
    assert not wrong, f"{case}: {wrong} not finite"
    if all(is_same(batch[name], value) for name, value in changed.items()):
        assert_same_outputs(found, model(**batch))


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("family", FAMILIES.values(), ids=list(FAMILIES))
def test_strange_arguments(family: FamilySpec, count: int) -> None:
    for case in (case for case in CASES if case.family is family):
        model, refused = case.model().requires_grad_(False), list[str]()
        embeds = case.takes_embeddings and not case.has_choices and not case.generates
        batches = [right_batch(case, embedded) for embedded in (False, *[True] * embeds)]
        each_seed(count, partial(check_strange, case, model, batches, refused))
        assert refused
