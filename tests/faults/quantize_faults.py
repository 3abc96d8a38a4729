"""Faults of weights of few bits and of exported files."""

from fault import Fault

_INT8 = ("tests/ecosystem/test_int8.py",)
_LOW_BITS = ("tests/training/test_low_bits.py",)

QUANTIZE_FAULTS = [
    Fault(
        "a token's codes have another zero point than the product is told",
        "hf_ctxmodels/layers/int8/codes.py",
        "    return Activations(codes, MIDDLE, scale)",
        "    return Activations(codes, MIDDLE - 1, scale)",
        _INT8,
        "whole_numbers",
    ),
    Fault(
        "codes are cut off instead of rounded",
        "hf_ctxmodels/layers/int8/codes.py",
        "_ROUNDED = 0.5",
        "_ROUNDED = 0.0",
        _INT8,
        "whole_numbers or codes_of_rows",
    ),
    Fault(
        "a range of the outputs has the weights of another range",
        "hf_ctxmodels/layers/int8/modules.py",
        "key = (part.start, part.stop)",
        "key = None",
        _INT8,
        "whole_numbers",
    ),
    Fault(
        "codes of an output layer are not tied",
        "hf_ctxmodels/layers/int8/replace.py",
        'for part in ("codes", "code_scale"):',
        "for part in ():",
        _INT8,
        "every_family or sizes",
    ),
    Fault(
        "groups have their range from the first row",
        "hf_ctxmodels/layers/low_bits/groups.py",
        "parts = weight.split(size)",
        "parts = [part[:1] for part in weight.split(size)]",
        _LOW_BITS,
        "nearest_levels",
    ),
    Fault(
        "the sign of an eigenvalue is lost",
        "hf_ctxmodels/training/sensitivity.py",
        "eigenvalue, vector = estimate, _normalised(product)",
        "eigenvalue, vector = abs(estimate), _normalised(product)",
        _LOW_BITS,
        "power_iteration",
    ),
    Fault(
        "rows are mapped in parts where their codes have one scale",
        "hf_ctxmodels/layers/int8/modules.py",
        'return self.activations != "tensor"',
        "return True",
        _INT8,
        "in_parts",
    ),
    Fault(
        "the least value of a row does not count for its scale",
        "hf_ctxmodels/layers/int8/codes.py",
        "torch.maximum(rows.amax(1, keepdim=True), -rows.amin(1, keepdim=True))",
        "rows.amax(1, keepdim=True)",
        _INT8,
        "whole_numbers or codes_of_rows",
    ),
    Fault(
        "codes are trained in silence",
        "hf_ctxmodels/layers/int8/codes.py",
        "if module.training and torch.is_grad_enabled() and not torch.compiler.is_compiling():",
        "if False:",
        _INT8,
        "no_code_is_trained",
    ),
    Fault(
        "an exported file that differs is kept",
        "hf_ctxmodels/inference/exporting.py",
        "if not found <= LARGEST_DIFFERENCE:",
        "if False:",
        ("tests/test_export_command.py",),
        "programs",
    ),
]
