"""New weights in place of pretrained ones: exactly those asked for, as in a new model."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from training_runs import CallbackRun
from zoo import HEADS, Case, assert_close

from hf_ctxmodels import CtxError
from hf_ctxmodels.downstream.finetuning import (
    ElasticWeightConsolidation,
    L2SPPenalty,
    Mixout,
    reinitialize_head,
    reinitialize_layers,
)
from hf_ctxmodels.downstream.finetuning.fisher import save_fisher
from hf_ctxmodels.downstream.finetuning.reinitialization import pretrained_head_modules
from hf_ctxmodels.registry import FAMILIES
from hf_ctxmodels.training.optimizers import layer_groups

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
            names = {name for name in reinitialize_head(model, seed=4) if name in before}
            assert torch.equal(fixed, torch.get_rng_state())
            assert names == {name for name in before if not name.startswith(f"{model.base_model_prefix}.")}
            check_drawn_anew(model, before, names)
    for family, kept in (("t5", []), ("bart", []), ("mass", ["lm_head"]), ("unilm", ["mlm_head"])):  # unless tied
        assert pretrained_head_modules(Case(FAMILIES[family], "AutoModelForSeq2SeqLM").model()) == kept, family
    model = BERT.model()
    before = weights_of(model)
    names = set(reinitialize_layers(model, 0, seed=4, pooler=True))
    assert names == {"bert.pooler.dense.weight", "bert.pooler.dense.bias"}
    check_drawn_anew(model, before, names)
    model = BERT.model(classifier_pooling="mean")
    with pytest.raises(CtxError, match="has no pooler"):
        reinitialize_layers(model, 0, seed=4, pooler=True)


def check_drawn_anew(model: Any, before: dict[str, torch.Tensor], names: set[str]) -> None:
    torch.manual_seed(4)
    fresh = dict(type(model)(copy.deepcopy(model.config)).named_parameters())
    for name, each in model.named_parameters():
        assert torch.equal(each, fresh[name] if name in names else before[name]), name
        assert name not in names or not torch.equal(each, before[name]) or each.ndim < 2


def test_what_is_new_is_not_held(tmp_path: Path) -> None:
    """Neither layers that are drawn anew nor rows of new tokens, by anchors and mixout; other weights are refused."""
    model, generator = BERT.model(), torch.Generator().manual_seed(3)
    encoder, table = dict(model.base_model.named_parameters()), "embeddings.word_embeddings.weight"
    fisher = {name: torch.rand(each.shape, generator=generator) for name, each in encoder.items()}
    file, known = tmp_path / "fisher.safetensors", model.config.vocab_size
    save_fisher(file, fisher, model)
    mixed = set(Mixout(model, 0.5).mixed)
    new = {name.removeprefix("bert.") for name in reinitialize_layers(model, 1, seed=3)}
    model.resize_token_embeddings(known + 3, mean_resizing=False)
    model.num_new_tokens = 3
    assert mixed & new
    assert set(Mixout(model, 0.5).mixed) == mixed - new
    methods = {"ewc": ElasticWeightConsolidation(model, 1.0, file, 0.5), "l2": L2SPPenalty(model, 1.0, 0.5)}
    with torch.no_grad():
        for each in model.parameters():
            each.add_(torch.randn(each.shape, generator=generator) * 0.1)
    now = dict(model.base_model.named_parameters())
    for way, method in methods.items():
        assert set(method.anchored) == set(encoder) - new
        model.zero_grad()
        CallbackRun().pre_optimizer_step(method)
        expected = {name: each / 2 for name, each in now.items() if name in new}  # the plain penalty on new weights
        for name, start in method.pretrained.items():
            rows = len(fisher[name])
            held = (fisher[name] if way == "ewc" else 1.0) * (now[name] - start)[:rows]
            expected[name] = torch.cat([held, torch.zeros_like(now[name][rows:])])
        for name, each in now.items():
            assert_close(each.grad, expected[name].detach(), f"{way} {name}")
    assert expected[table][known:].shape[0] == 3
    model.base_model.embeddings.word_embeddings.weight.data[0] += 1
    with pytest.raises(CtxError, match="from other weights"):
        ElasticWeightConsolidation(model, 1.0, file)
