"""Quantized linear layers: outputs and losses are close to the float32 model."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.ao.nn.quantized.dynamic import Linear as DynamicLinear
from torch.ao.quantization import quantize_dynamic
from transformers import PreTrainedModel
from zoo import REPRESENTATIVES, Case, as_subtests, make_batch, make_targets, tensors_of

from hf_ctxmodels import CtxError
from hf_ctxmodels.registry import FAMILIES

BERT = Case(FAMILIES["bert"], "AutoModelForMaskedLM")


def dynamic(model: PreTrainedModel) -> Any:
    return quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8)


def weight_only(model: PreTrainedModel) -> Any:
    torchao = pytest.importorskip("torchao.quantization", reason="needs torchao, which the extra `ecosystem` brings")
    torchao.quantize_(model, torchao.Int8WeightOnlyConfig())
    return model


def eight_bit(model: PreTrainedModel) -> Any:
    """Replace all linear layers, as `BitsAndBytesConfig(load_in_8bit=True)` does except for the output layer."""
    bitsandbytes = pytest.importorskip("bitsandbytes", reason="needs bitsandbytes, which the extra `ecosystem` brings")
    for name, module in list(model.named_modules()):
        if type(module) is torch.nn.Linear:
            sizes = {"bias": module.bias is not None, "has_fp16_weights": False}
            quantized = bitsandbytes.nn.Linear8bitLt(module.in_features, module.out_features, **sizes)
            quantized.load_state_dict(module.state_dict())
            model.set_submodule(name, quantized)
    return model.to("cpu")


def count_quantized(model: PreTrainedModel) -> int:
    layers = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    packed = sum(isinstance(module, DynamicLinear) for module in model.modules())
    return packed + sum(type(module.weight) is not torch.nn.Parameter for module in layers)


@pytest.mark.fast_families("bert", "elmo")
@pytest.mark.filterwarnings("ignore")  # deprecations of torch and torchao
@pytest.mark.parametrize(("quantize", "tolerance"), [(dynamic, 0.3), (weight_only, 0.15), (eight_bit, 0.15)])
@as_subtests(REPRESENTATIVES)
@torch.no_grad()
def test_quantized_outputs_are_close(case: Case, quantize: Callable[[PreTrainedModel], Any], tolerance: float) -> None:
    """For the pretraining head of each family and for each type of head."""
    model, batch = case.model(), make_batch(case)
    num_layers = sum(type(module) is torch.nn.Linear for module in model.modules())
    expected = tensors_of(model(**batch))
    targets = batch | make_targets(case, batch)
    loss = float(model(**targets).loss)
    quantized = quantize(model)
    assert count_quantized(quantized) == num_layers, f"{case}: unquantized layers"
    for name, value in tensors_of(quantized(**batch)).items():
        error = float((value - expected[name]).norm() / expected[name].norm())
        assert error < tolerance, f"{case}: {name} is off by {error:.3f}"
        has_linear_layers = num_layers and name != "encoder_last_hidden_state"  # recurrent encoders have none
        assert error > 0 or not has_linear_layers, f"{case}: {name} is unchanged"
    for all_logits in (True, False):
        quantized.config.return_logits_with_labels = all_logits
        actual = float(quantized(**targets).loss)
        assert abs(actual - loss) < tolerance * max(loss, 1.0), f"{case}: the loss is {actual}, expected {loss}"


@pytest.mark.filterwarnings("ignore")
def test_saving_quantized_weights_raises(tmp_path: Path) -> None:
    """No file with wrong weights is written."""
    with pytest.raises(CtxError, match="cannot be saved"):
        dynamic(BERT.model()).save_pretrained(tmp_path)
    parametrized = BERT.model()
    torch.nn.utils.parametrizations.weight_norm(parametrized.mlm_head.dense)
    for model in (dynamic(BERT.model()), parametrized):
        with pytest.raises(CtxError, match="is not plain"):
            model.export_reference(tmp_path)
    assert not any(tmp_path.iterdir())
