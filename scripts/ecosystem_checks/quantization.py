"""Checks of quantization tools."""

import torch
from torch import nn
from torch.ao.nn.quantized.dynamic import Linear as DynamicLinear
from transformers import AutoModelForSequenceClassification, BitsAndBytesConfig

from .context import CheckContext, assert_close, check


def _count_linear_layers(model: nn.Module) -> int:
    return sum(isinstance(module, nn.Linear) for module in model.modules())


def _assert_near(model: nn.Module, context: CheckContext, tolerance: float = 0.1) -> None:
    """Assert that the logits are close to those in float32, but not equal."""
    with torch.no_grad():
        logits, expected = model(**context.batch()).logits.float(), context.classifier()(**context.batch()).logits
    assert_close(logits, expected, tolerance)
    assert not logits.equal(expected), "nothing was quantized"


@check("torch.ao quantize_dynamic", "torch")
def quantize_dynamic(context: CheckContext) -> str:
    """All linear layers in int8 on a CPU; logits are close to those in float32."""
    model = context.classifier()
    quantized = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    quantized_layers = [module for module in quantized.modules() if isinstance(module, DynamicLinear)]
    assert len(quantized_layers) == _count_linear_layers(model)
    _assert_near(quantized, context)
    return "a quantized model cannot be saved"


@check("torchao", "torchao")
def torchao(context: CheckContext) -> str:
    """`quantize_` with int8 weights in all linear layers; logits are close to those in float32."""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model = context.classifier()
    quantize_(model, Int8WeightOnlyConfig())
    weights = [module.weight for module in model.modules() if isinstance(module, nn.Linear)]
    assert all(hasattr(weight, "qdata") for weight in weights)
    _assert_near(model, context)
    return ""


@check("bitsandbytes", "bitsandbytes")
def bitsandbytes(context: CheckContext) -> str:
    """`from_pretrained` with 8-bit and 4-bit weights on a CPU; logits are close to those in float32."""
    directory = context.save(AutoModelForSequenceClassification)
    four = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", llm_int8_skip_modules=["classifier"])
    eight = BitsAndBytesConfig(load_in_8bit=True)
    for config, class_name, num_skipped, tolerance in ((eight, "Linear8bitLt", 0, 0.1), (four, "Linear4bit", 1, 0.5)):
        options = {"quantization_config": config, "device_map": "cpu"}
        model = AutoModelForSequenceClassification.from_pretrained(directory, **options).eval()
        num_layers = sum(type(module).__name__ == class_name for module in model.modules())
        assert num_layers == _count_linear_layers(context.classifier()) - num_skipped, (
            f"{num_layers} {class_name} layers"
        )
        _assert_near(model, context, tolerance)
    return (
        "on a CPU with AVX-512 BF16 a 4-bit layer needs a multiple of 32 outputs: exclude the classifier with "
        '`llm_int8_skip_modules=["classifier"]`'
    )
