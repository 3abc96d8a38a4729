"""New weights in place of pretrained ones: exactly those asked for, as in a new model."""

import copy
from typing import Any

import pytest
import torch
from zoo import HEADS, Case

from hf_ctxmodels import CtxError
from hf_ctxmodels.registry import FAMILIES
from hf_ctxmodels.training import reinitialize_layers, reset_head
from hf_ctxmodels.training.optim.discriminative_lr import layer_groups

CLASSIFIERS = [case for case in HEADS if case.auto_name == "AutoModelForSequenceClassification"]
BERT = Case(FAMILIES["bert"], "AutoModelForSequenceClassification")


def weights_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: each.detach().clone() for name, each in model.named_parameters()}


def test_new_weights_are_exactly_those_asked_for(subtests: Any) -> None:
    """In every family: of the top layers, or of the head, and those of a new model."""
    for case in CLASSIFIERS:
        with subtests.test(str(case)):
            model = case.model()
            groups = {id(each) for group in layer_groups(model)[:-1] for each in group}
            layers = getattr(getattr(model.base_model, "decoder", model.base_model), "layers", None)
            before = weights_of(model)
            if layers is None:
                with pytest.raises(CtxError, match="has 0 layers"):
                    reinitialize_layers(model, 1, seed=4)
            else:
                names = set(reinitialize_layers(model, 1, seed=4))
                top = {id(each) for each in list(layers)[-1].parameters()}
                assert names == {name for name, each in model.named_parameters() if id(each) in top}
                assert top <= groups
                check_drawn_anew(model, before, names)
            before, fixed = weights_of(model), torch.get_rng_state()
            names = {name for name in reset_head(model, seed=4) if name in before}
            assert torch.equal(fixed, torch.get_rng_state())
            assert names == {name for name in before if not name.startswith(f"{model.base_model_prefix}.")}
            check_drawn_anew(model, before, names)
    model = BERT.model()
    before = weights_of(model)
    names = set(reinitialize_layers(model, 0, seed=4, pooler=True))
    assert names == {"bert.pooler.dense.weight", "bert.pooler.dense.bias"}
    check_drawn_anew(model, before, names)


def check_drawn_anew(model: Any, before: dict[str, torch.Tensor], names: set[str]) -> None:
    torch.manual_seed(4)
    fresh = dict(type(model)(copy.deepcopy(model.config)).named_parameters())
    for name, each in model.named_parameters():
        assert torch.equal(each, fresh[name] if name in names else before[name]), name
        assert name not in names or not torch.equal(each, before[name]) or each.ndim < 2
