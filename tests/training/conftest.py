"""Fixtures of the small training problem."""

from training_runs import (  # noqa: F401
    any_workspace,
    contiguous_workspace,
    fresh_accelerate,
    pair_workspace,
    problem,
    workspace,
)
