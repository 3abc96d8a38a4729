"""Context managers that set a model to evaluation mode, or to full computation for hooks and explainers."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.model import CtxPreTrainedModel

_INSPECTION_FIELDS = {"unpad": False, "_attn_implementation": "eager", "return_logits_with_labels": True}


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Disable dropout and gradients; on exit, also after an error, every module returns to its previous mode.

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
    """Compute every position with eager attention, so that hooks and explainers work as with transformers' models.

    The layers of Transformers compute padded (batch, length, hidden) states: forward hooks can read and change them,
    `hidden_states[i].retain_grad()` also works for the loss, and attention weights are returned. The outputs are equal,
    but take longer. Recurrent layers compute every position too, but hooks on them receive (rows, width) states, and
    only their last hidden state has a gradient.

    Args:
        model: A model of this package, or a module that contains such models.

    Raises:
        CtxError: There is no such model; or attention weights are requested from a model without attention.

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
        raise CtxError(f"{type(model).__name__} contains no model of this package.")
    configs = list({id(submodel.config): submodel.config for submodel in models}.values())
    previous = [{name: getattr(config, name) for name in _INSPECTION_FIELDS} for config in configs]
    with ExitStack() as hooks:
        for submodel in models:
            hooks.enter_context(submodel.register_forward_hook(_check_attentions, with_kwargs=True))
        try:
            for config in configs:
                _set_fields(config, _INSPECTION_FIELDS)
            yield
        finally:
            for config, values in zip(configs, previous, strict=True):
                _set_fields(config, values)


def _set_fields(config: Any, values: dict[str, Any]) -> None:
    for name, value in values.items():
        setattr(config, name, value)


def _check_attentions(model: CtxPreTrainedModel, args: Any, kwargs: dict[str, Any], output: Any) -> None:
    if not model.config.resolve_output_flags(kwargs)["output_attentions"] or not hasattr(output, "items"):
        return
    if not any(value for name, value in output.items() if name.endswith("attentions")):
        raise CtxError(
            f"{type(model).__name__} returns no attention weights, but output_attentions is set.",
            hint="omit output_attentions: recurrent networks have no attention.",
        )
