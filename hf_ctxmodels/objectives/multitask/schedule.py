"""Schedules of continual multi-task learning, as text (Sun et al. 2020, section 3.2)."""

from collections.abc import Collection

from hf_ctxmodels.core.errors import CtxError

_HINT = "write task:steps, ...; task:steps, ...: a semicolon between stages, each with the tasks of the one before."


def parse_schedule(text: str, known: Collection[str]) -> list[dict[str, int]]:
    """For each stage task -> number of its steps.

    Args:
        text: Stages, separated by semicolons; a stage is `task:steps`, separated by commas. Steps left out are 1, for
            one stage with equal shares.
        known: Names of tasks.

    Raises:
        CtxError: The text is wrong, a task is unknown or twice in a stage, or a stage lacks a task of the one before:
            the paper trains a new task together with all earlier ones.
    """
    stages: list[dict[str, int]] = []
    for part in text.split(";"):
        stage: dict[str, int] = {}
        for entry in part.split(","):
            name, _, steps = (each.strip() for each in entry.partition(":"))
            if name not in known:
                raise CtxError(
                    f"There is no task {name!r}.", location=f"schedule={text}", hint=f"use some of: {', '.join(known)}."
                )
            if name in stage or not (steps or "1").isdecimal() or int(steps or 1) < 1:
                raise CtxError(f"{entry.strip()!r} is twice, or has no number of steps.", location=text, hint=_HINT)
            stage[name] = int(steps or 1)
        if stages and (lost := [name for name in stages[-1] if name not in stage]):
            raise CtxError(
                f"Stage {len(stages) + 1} lacks the earlier task {lost[0]!r}.", location=f"schedule={text}", hint=_HINT
            )
        stages.append(stage)
    return stages
