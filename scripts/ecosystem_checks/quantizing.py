"""Tools that quantize."""

import torch
from torch import nn
from torch.ao.nn.quantized.dynamic import Linear as DynamicLinear
from transformers import AutoModelForSequenceClassification, BitsAndBytesConfig

from .workplace import Workplace, assert_close, check


def _maps(model: nn.Module) -> int:
    return sum(isinstance(module, nn.Linear) for module in model.modules())


def _assert_near(model: nn.Module, place: Workplace, tolerance: float = 0.1) -> None:
    """The logits are near those of single precision, and not the same."""
    with torch.no_grad():
        found, expected = model(**place.batch()).logits.float(), place.classifier()(**place.batch()).logits
    assert_close(found, expected, tolerance)
    assert not found.equal(expected), "nothing was quantized"


@check("torch.ao quantize_dynamic", "torch")
def quantize_dynamic(place: Workplace) -> str:
    """Every linear map in int8, on a CPU; the logits are near those of single precision."""
    plain = place.classifier()
    quantized = torch.ao.quantization.quantize_dynamic(plain, {nn.Linear}, dtype=torch.qint8)
    found = [module for module in quantized.modules() if isinstance(module, DynamicLinear)]
    assert len(found) == _maps(plain)
    _assert_near(quantized, place)
    return "a quantized model cannot be saved"


@check("torchao", "torchao")
def torchao(place: Workplace) -> str:
    """`quantize_` with int8 weights: of every linear map; the logits are near those of single precision."""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model = place.classifier()
    quantize_(model, Int8WeightOnlyConfig())
    weights = [module.weight for module in model.modules() if isinstance(module, nn.Linear)]
    assert all(hasattr(weight, "qdata") for weight in weights)
    _assert_near(model, place)
    return ""


@check("bitsandbytes", "bitsandbytes")
def bitsandbytes(place: Workplace) -> str:
    """`from_pretrained` with 8-bit and with 4-bit weights, on a CPU; the logits are near those of single precision."""
    directory = place.save(AutoModelForSequenceClassification)
    four = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", llm_int8_skip_modules=["classifier"])
    eight = BitsAndBytesConfig(load_in_8bit=True)
    for config, kind, skipped, tolerance in ((eight, "Linear8bitLt", 0, 0.1), (four, "Linear4bit", 1, 0.5)):
        options = {"quantization_config": config, "device_map": "cpu"}
        model = AutoModelForSequenceClassification.from_pretrained(directory, **options).eval()
        found = sum(type(module).__name__ == kind for module in model.modules())
        assert found == _maps(place.classifier()) - skipped, f"{found} maps are {kind}"
        _assert_near(model, place, tolerance)
    return (
        "on a CPU with AVX-512 BF16 a 4-bit map needs a multiple of 32 outputs: leave out the classifier by "
        '`llm_int8_skip_modules=["classifier"]`'
    )
