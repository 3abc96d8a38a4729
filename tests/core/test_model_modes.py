"""`evaluation_mode` and `inspection_mode`."""

import pytest
import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer
from zoo import BASES, HEADS, Case, as_subtests, assert_close, labeled_batch, make_batch, scalar_loss

from hf_ctxmodels import CtxError, inspection_mode
from hf_ctxmodels.architectures.query_generation import QueryForConditionalGeneration
from hf_ctxmodels.core.config import CtxTransformerConfig
from hf_ctxmodels.core.model import evaluation_mode
from hf_ctxmodels.registry import FAMILIES

# query generation packs source, target and queries into one sequence
TRANSFORMERS = [
    case
    for case in [*BASES, *HEADS]
    if issubclass(case.family.config, CtxTransformerConfig)
    and not issubclass(case.model_class, QueryForConditionalGeneration)
]
FIELDS = ("unpad", "_attn_implementation", "return_logits_with_labels")


def test_evaluation_mode() -> None:
    """Dropout and gradients are disabled; the modes of all modules are restored, also after an error."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.9), nn.Dropout(0.9))
    model[1].eval()  # a frozen module of a model in training
    inputs = torch.randn(3, 4)
    with evaluation_mode(model):
        outputs = model(inputs)
    assert torch.equal(outputs, model[0](inputs))
    assert not outputs.requires_grad
    with pytest.raises(RuntimeError), evaluation_mode(model):
        model(torch.ones(1, 5))
    assert [module.training for module in model.modules()] == [True, True, False, True]
    assert torch.is_grad_enabled()


@pytest.mark.fast_families("bert", "t5")
@as_subtests(TRANSFORMERS)
def test_inspection_mode_of_transformers(case: Case) -> None:
    """Hooks receive padded states, hidden states get gradients, and outputs do not change."""
    model, batch = case.model(), labeled_batch(case)
    padded_shape = case.first_token_ids(batch).flatten(0, -2).shape
    expected, shapes = scalar_loss(case, model, batch), []
    layer = next(module for module in model.base_model.modules() if isinstance(module, GradientCheckpointingLayer))
    hook = layer.register_forward_hook(
        lambda module, inputs, output, shapes=shapes: shapes.append(output[0].shape[:-1])
    )
    model(**batch)
    if getattr(model.config, "attn_type", "bi") != "uni":
        assert shapes.pop() != padded_shape, f"{case}: padded outside inspection_mode"
    shapes.clear()
    with inspection_mode(model):
        outputs = model(**batch, output_hidden_states=True, output_attentions=True)
        assert shapes == [padded_shape] * len(shapes), f"{case}: {shapes}"
        decoder = "decoder_" if "decoder_hidden_states" in outputs else ""
        hidden_states, attentions = (outputs[decoder + name] for name in ("hidden_states", "attentions"))
        state_shape = batch["decoder_input_ids"].shape if case.is_seq2seq else padded_shape
        for states in hidden_states:
            assert states.shape[:-1] == state_shape, f"{case}: a hidden state is {tuple(states.shape)}"
            states.retain_grad()
        (outputs.last_hidden_state.square().sum() if case.is_base else outputs.loss).backward()
        assert all(states.grad.any() for states in hidden_states), f"{case}: no gradient"
        assert attentions[0].shape[-2:] == (state_shape[1], state_shape[1])
        assert_close(scalar_loss(case, model, batch), expected, str(case))
    hook.remove()
    assert_close(scalar_loss(case, model, batch), expected, str(case))


def test_inspection_mode_restores_configurations_after_error() -> None:
    model = Case(FAMILIES["electra"], "AutoModelForPreTraining").model(attention="sdpa")
    model.generator.config.unpad = False
    configs = [model.config, model.generator.config]
    expected = [[getattr(config, name) for name in FIELDS] for config in configs]

    def fail() -> None:
        assert [config._attn_implementation for config in configs] == ["eager", "eager"]
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), inspection_mode(torch.nn.Sequential(model)):
        fail()
    assert [[getattr(config, name) for name in FIELDS] for config in configs] == expected
    assert not model._forward_hooks


def test_inspection_mode_of_unsupported_models_raises() -> None:
    """Recurrent networks have no attention weights; other modules cannot be inspected."""
    case = Case(FAMILIES["elmo"], "AutoModel")
    with inspection_mode(model := case.model()), pytest.raises(CtxError, match="no attention weights"):
        model(**make_batch(case), output_attentions=True)
    with pytest.raises(CtxError, match="no model of this package"), inspection_mode(torch.nn.Linear(1, 1)):
        pass
