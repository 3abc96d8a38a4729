"""Context managers that set a model to evaluation mode, or to full computation for hooks and explainers."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.model import CtxPreTrainedModel

_PLAIN = {"unpad": False, "_attn_implementation": "eager", "return_logits_with_labels": True}


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Without dropout and without gradients; afterwards every module has its own mode again, also after an error.

    Example:
        >>> with evaluation_mode(model):
        ...     outputs = model(**batch)
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def inspection_mode(model: nn.Module) -> Iterator[None]:
    """Within, hooks and explainers see what they know from transformers.

    The layers of Transformers compute on padded (batch, length, hidden) states, by eager attention: forward hooks see
    and may change these, `hidden_states[i].retain_grad()` works for the loss too, and attention weights are there. The
    outputs are the same, and are computed more slowly. Recurrent layers compute every position too, but hooks on them
    see (rows, width), and only their last hidden state has a gradient. Afterwards everything is as before.

    Args:
        model: A model of this package, or one that holds such models (an adapter's, for example).

    Raises:
        CtxError: There is no such model, or a forward was asked for attention weights and gives none.

    Example:
        >>> import torch
        >>> from hf_ctxmodels import CtxBertConfig, CtxBertModel
        >>> sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 8}
        >>> model = CtxBertModel(CtxBertConfig(vocab_size=9, **sizes))
        >>> with inspection_mode(model):
        ...     outputs = model(torch.tensor([[1, 2, 3]]), output_attentions=True, output_hidden_states=True)
        ...     outputs.hidden_states[1].retain_grad()
        ...     outputs.last_hidden_state[0, 0].sum().backward()
        >>> outputs.attentions[0].shape, outputs.hidden_states[1].grad.shape
        (torch.Size([1, 2, 3, 3]), torch.Size([1, 3, 8]))
    """
    models = [module for module in model.modules() if isinstance(module, CtxPreTrainedModel)]
    if not models:
        raise CtxError(f"{type(model).__name__} holds no model of this package.")
    configs = {id(each.config): each.config for each in models}.values()
    before = [(config, {name: getattr(config, name) for name in _PLAIN}) for config in configs]
    with ExitStack() as stack:
        for each in models:
            stack.enter_context(each.register_forward_hook(_check_attentions, with_kwargs=True))
        try:
            for config in configs:
                _set(config, _PLAIN)
            yield
        finally:
            for config, values in before:
                _set(config, values)


def _set(config: Any, values: dict[str, Any]) -> None:
    for name, value in values.items():
        setattr(config, name, value)


def _check_attentions(model: CtxPreTrainedModel, args: Any, kwargs: dict[str, Any], output: Any) -> None:
    if not model.config.resolve_output_flags(kwargs)["output_attentions"] or not hasattr(output, "items"):
        return
    if not any(value for name, value in output.items() if name.endswith("attentions")):
        raise CtxError(
            f"{type(model).__name__} gives no attention weights, which output_attentions asks for.",
            hint="leave output_attentions out: a recurrent network has none.",
        )
