"""Fine-tuning that forgets less (Howard & Ruder 2018, section 3.2): lower layers learn more slowly, and later.

Both need the parameters of a model by their depth, which `layer_groups` tells for every family.
"""

import re
from collections.abc import Sequence
from typing import Any

from torch import nn
from transformers import PreTrainedModel, TrainerCallback

from hf_ctxmodels.core.errors import CtxError

LAYERS = "layers"  # what every encoder calls its stack


def layer_groups(model: PreTrainedModel) -> list[list[nn.Parameter]]:
    """Trainable parameters by depth: the embeddings, each layer from the lowest up, the heads; none of them empty.

    What an encoder has beside its layers belongs to the embeddings where it stands before them, else to the heads.
    Layers that share all parameters are one.
    """
    base = model.base_model
    prefix = "" if base is model else f"{model.base_model_prefix}."
    children = [name for name, _ in base.named_children()]
    behind = set(children[children.index(LAYERS) + 1 :]) if LAYERS in children else set()
    numbered = re.compile(rf"{re.escape(prefix)}{LAYERS}\.(\d+)\.")
    groups: dict[float, list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        match = numbered.match(name)
        if match:
            depth = float(match[1])
        elif name.startswith(prefix) and name.removeprefix(prefix).split(".")[0] not in behind:
            depth = -1.0
        else:
            depth = float("inf")
        groups.setdefault(depth, []).append(parameter)
    return [groups[depth] for depth in sorted(groups)]


def group_rates(groups: Sequence[Any], learning_rate: float, decay: float) -> list[float]:
    """The learning rate of each group: the last one's is `learning_rate`, each other's the next one's by `decay`."""
    return [learning_rate / decay ** (len(groups) - 1 - depth) for depth in range(len(groups))]


class GradualUnfreezing:
    """Trains the last group of layers first, and one more from time to time (section 3.2).

    Args:
        model: whose `layer_groups` are frozen and unfrozen, by `requires_grad`; not wrapped for several processes.
        interval: optimizer steps from one group to the next; 0 trains all from the start.

    Raises:
        CtxError: a negative interval.
    """

    def __init__(self, model: PreTrainedModel, interval: int) -> None:
        if interval < 0:
            raise CtxError(f"interval={interval} is negative.", hint="give the optimizer steps between two groups.")
        self._groups, self._interval = layer_groups(model), interval

    def trained(self, step: int) -> int:
        """How many groups, counted from the last, learn in the step after `step` steps."""
        return len(self._groups) if not self._interval else min(len(self._groups), 1 + step // self._interval)

    def apply(self, step: int | None) -> None:
        """Freeze and unfreeze for the step after `step` steps; None unfreezes all."""
        first = 0 if step is None else len(self._groups) - self.trained(step)
        for depth, group in enumerate(self._groups):
            for parameter in group:
                parameter.requires_grad_(depth >= first)


class GradualUnfreezingCallback(TrainerCallback):
    """`GradualUnfreezing` for `transformers.Trainer`, in one process.

    Args:
        interval: optimizer steps from one group to the next.

    Example:
        >>> trainer = Trainer(model, arguments, train_dataset=data, callbacks=[GradualUnfreezingCallback(100)])
    """

    def __init__(self, interval: int) -> None:
        self.interval = interval
        self._unfreezing: GradualUnfreezing | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Find the groups.

        Raises:
            CtxError: there are several processes.
        """
        require_one_process(args.world_size)
        self._unfreezing = GradualUnfreezing(model, self.interval)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Freeze and unfreeze."""
        assert self._unfreezing is not None
        self._unfreezing.apply(state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave nothing frozen."""
        assert self._unfreezing is not None
        self._unfreezing.apply(None)


def require_one_process(number: int) -> None:
    """Raise CtxError where several processes would wait for gradients that frozen parameters do not have."""
    if number > 1:
        raise CtxError(
            "Gradual unfreezing changes which parameters have gradients, which several processes cannot follow.",
            location=f"{number} processes",
            hint="start one process, or leave out --unfreeze_steps.",
        )
