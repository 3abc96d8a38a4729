"""Quantized maps: each one is quantized, acts with and without labels, near the model in single precision."""

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
    """As transformers replaces maps for `BitsAndBytesConfig(load_in_8bit=True)`, but all of them."""
    bitsandbytes = pytest.importorskip("bitsandbytes", reason="needs bitsandbytes, which the extra `ecosystem` brings")
    for name, each in list(model.named_modules()):
        if type(each) is torch.nn.Linear:
            sizes = {"bias": each.bias is not None, "has_fp16_weights": False}
            replaced = bitsandbytes.nn.Linear8bitLt(each.in_features, each.out_features, **sizes)
            replaced.load_state_dict(each.state_dict())
            model.set_submodule(name, replaced)
    return model.to("cpu")


def count_quantized(model: PreTrainedModel) -> int:
    maps = [each for each in model.modules() if isinstance(each, torch.nn.Linear)]
    packed = sum(isinstance(each, DynamicLinear) for each in model.modules())
    return packed + sum(type(each.weight) is not torch.nn.Parameter for each in maps)


@pytest.mark.filterwarnings("ignore")  # torch and torchao announce their next versions
@pytest.mark.parametrize(("quantize", "tolerance"), [(dynamic, 0.3), (weight_only, 0.15), (eight_bit, 0.15)])
@as_subtests(REPRESENTATIVES)
@torch.no_grad()
def test_every_map_acts(case: Case, quantize: Callable[[PreTrainedModel], Any], tolerance: float) -> None:
    """On the pretraining head of every family, and on each other kind of head."""
    model, batch = case.model(), make_batch(case)
    maps = sum(type(each) is torch.nn.Linear for each in model.modules())
    expected = tensors_of(model(**batch))
    targets = batch | make_targets(case, batch)
    loss = float(model(**targets).loss)
    quantized = quantize(model)
    assert count_quantized(quantized) == maps, f"{case}: not every map is quantized"
    for name, value in tensors_of(quantized(**batch)).items():
        error = float((value - expected[name]).norm() / expected[name].norm())
        assert error < tolerance, f"{case}: {name} is off by {error:.3f}"
        is_of_map = maps and name != "encoder_last_hidden_state"  # a recurrent encoder has no linear map
        assert error > 0 or not is_of_map, f"{case}: {name} is as before"
    for everywhere in (True, False):
        quantized.config.return_logits_with_labels = everywhere
        found = float(quantized(**targets).loss)
        assert abs(found - loss) < tolerance * max(loss, 1.0), f"{case}: the loss is {found}, and was {loss}"


@pytest.mark.filterwarnings("ignore")
def test_weights_that_a_file_cannot_hold(tmp_path: Path) -> None:
    """Neither is an unclear error, nor a file that opens with other weights."""
    with pytest.raises(CtxError, match="cannot be saved"):
        dynamic(BERT.model()).save_pretrained(tmp_path)
    wrapped = BERT.model()
    torch.nn.utils.parametrizations.weight_norm(wrapped.mlm_head.dense)
    for model in (dynamic(BERT.model()), wrapped):
        with pytest.raises(CtxError, match="is not plain"):
            model.export_reference(tmp_path)
    assert not any(tmp_path.iterdir())
