"""Discriminative fine-tuning and gradual unfreezing (Howard & Ruder 2018, sections 3.2 and 3.3).

These are lower learning rates and a later start of training for lower layers, by the groups of `layer_groups`.
"""

import re
from collections.abc import Sequence
from typing import Any

from torch import nn
from transformers import PreTrainedModel, TrainerCallback

from hf_ctxmodels.core.errors import CtxError

LAYERS = "layers"  # the name of every encoder's stack
_HEADS = float("inf")  # depth of what is above it


def layer_groups(model: PreTrainedModel) -> list[list[nn.Parameter]]:
    """Non-empty groups of trainable parameters by depth: the embeddings, each layer from the lowest up, the heads.

    Other modules of an encoder belong to the embeddings if they precede the layers, else to the heads. Layers that
    share all parameters are one group.
    """
    groups = _by_depth(model)
    return [groups[depth] for depth in sorted(groups)]


def has_heads(model: PreTrainedModel) -> bool:
    """Whether the last of the `layer_groups` is that of the heads; of a bare encoder it may be the last layer."""
    return _HEADS in _by_depth(model)


def _by_depth(model: PreTrainedModel) -> dict[float, list[nn.Parameter]]:
    base = model.base_model
    prefix = "" if base is model else f"{model.base_model_prefix}."
    children = [name for name, _ in base.named_children()]
    above = set(children[children.index(LAYERS) + 1 :]) if LAYERS in children else set()
    numbered = re.compile(rf"{re.escape(prefix)}{LAYERS}\.(\d+)\.")
    groups: dict[float, list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        match = numbered.match(name)
        if match:
            depth = float(match[1])
        elif name.startswith(prefix) and name.removeprefix(prefix).split(".")[0] not in above:
            depth = -1.0
        else:
            depth = _HEADS
        groups.setdefault(depth, []).append(parameter)
    return groups


def group_rates(groups: Sequence[Any], learning_rate: float, decay: float) -> list[float]:
    """The learning rate of each group: `learning_rate` for the last, else that of the next group / `decay`."""
    return [learning_rate / decay ** (len(groups) - 1 - depth) for depth in range(len(groups))]


class GradualUnfreezing:
    """Trains the last group of layers first, and one more after each interval (section 3.3).

    Args:
        model: The model, not wrapped; its `layer_groups` are frozen and unfrozen by `requires_grad`.
        interval: Optimizer steps between two groups; 0 trains all from the start.

    Raises:
        CtxError: The interval is negative.
    """

    def __init__(self, model: PreTrainedModel, interval: int) -> None:
        if interval < 0:
            raise CtxError(f"interval={interval} is negative.", hint="give the optimizer steps between two groups.")
        self._groups, self._interval = layer_groups(model), interval

    def trained(self, step: int) -> int:
        """Number of groups, counted from the last, that are trained after `step` steps."""
        return len(self._groups) if not self._interval else min(len(self._groups), 1 + step // self._interval)

    def apply(self, step: int | None) -> None:
        """Freeze and unfreeze after `step` steps; None unfreezes all."""
        first = 0 if step is None else len(self._groups) - self.trained(step)
        for depth, group in enumerate(self._groups):
            for parameter in group:
                parameter.requires_grad_(depth >= first)


class GradualUnfreezingCallback(TrainerCallback):
    """`GradualUnfreezing` for `transformers.Trainer`, in one process.

    Args:
        interval: Optimizer steps between two groups.

    Example:
        >>> trainer = Trainer(model, arguments, train_dataset=data, callbacks=[GradualUnfreezingCallback(100)])
    """

    def __init__(self, interval: int) -> None:
        self.interval = interval
        self._unfreezing: GradualUnfreezing | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Determine the groups; raises CtxError for several processes."""
        require_one_process(args.world_size)
        self._unfreezing = GradualUnfreezing(model, self.interval)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Freeze and unfreeze."""
        assert self._unfreezing is not None
        self._unfreezing.apply(state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Unfreeze all."""
        assert self._unfreezing is not None
        self._unfreezing.apply(None)


def require_one_process(number: int) -> None:
    """Raise CtxError for several processes, which would wait for gradients of frozen parameters."""
    if number > 1:
        raise CtxError(
            "Gradual unfreezing changes which parameters have gradients, which several processes do not support.",
            location=f"{number} processes",
            hint="use one process, or leave out --unfreeze_steps.",
        )
