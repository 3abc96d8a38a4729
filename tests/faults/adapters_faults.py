"""Faults of adapters."""

from fault import Fault

_FAMILIES, _FILES, _COMMANDS = (
    ("tests/models/test_adapters.py",),
    ("tests/parity/test_adapter_files.py",),
    ("tests/scripts/test_adapter_commands.py",),
)

ADAPTERS_FAULTS = [
    Fault(
        "the inverse of an invertible adapter adds a coupling",
        "hf_ctxmodels/layers/adapters.py",
        "second = second - self.G(first)",
        "second = second + self.G(first)",
        _FAMILIES,
        "inverse",
    ),
    Fault(
        "a masked-LM head reads no inverse",
        "hf_ctxmodels/layers/lm_loss/chunked.py",
        "return before_output_layer(invertible, states)",
        "return states",
        _FILES,
        "outputs and bert",
    ),
    Fault(
        "a stack is applied from its top down",
        "hf_ctxmodels/layers/adapter_slots.py",
        "for item in self.active:",
        "for item in reversed(self.active):",
        _FILES,
        "outputs and bert",
    ),
    Fault(
        "a bottleneck reads the sub-layer's output without the norm",
        "hf_ctxmodels/layers/adapters.py",
        "read = total if norm is None else norm(total)",
        "read = total",
        _FAMILIES,
        "slot",
    ),
    Fault(
        "the model's own file has adapters in it",
        "hf_ctxmodels/core/model.py",
        "return weights if _CHECKPOINT.fullmatch(directory.name) else adapters.plain(weights)",
        "return weights",
        _COMMANDS,
        "trained_alone",
    ),
    Fault(
        "a training checkpoint lacks the adapters",
        "hf_ctxmodels/core/model.py",
        "return weights if _CHECKPOINT.fullmatch(directory.name) else adapters.plain(weights)",
        "return adapters.plain(weights)",
        ("tests/models/test_adapters_trainer.py",),
    ),
    Fault(
        "frozen adapters learn",
        "hf_ctxmodels/adapters/model.py",
        'if is_adapter_parameter(name) or not name.startswith("pooler.")',
        'if not is_adapter_parameter(name) and not name.startswith("pooler.")',
        _FAMILIES,
        "learn",
    ),
    Fault(
        "merging forgets the weight of the adapter",
        "hf_ctxmodels/adapters/merging.py",
        "linear.weight.copy_(weight + product @ weight)",
        "linear.weight.copy_(weight)",
        _FAMILIES,
        "merged",
    ),
    Fault(
        "a language keeps the adapter of the training language",
        "hf_ctxmodels/commands/evaluate_transfer.py",
        "        if language in self.adapters:",
        "        if language in ():",
        _COMMANDS,
        "exchanged",
    ),
    Fault(
        "commands use a model without its adapters",
        "hf_ctxmodels/training/saved.py",
        "if has_saved_adapters(source):",
        "if not Path(source).exists() and has_saved_adapters(source):",
        ("tests/scripts/test_adapter_commands.py",),
        "task_adapter",
    ),
    Fault(
        "a teacher is known by its frozen weights alone",
        "hf_ctxmodels/distillation/opening.py",
        'kinds = ("*.safetensors", f"{FOLDER}/*/*.safetensors", f"{FOLDER}/{STACK_FILE}")',
        'kinds = ("*.safetensors",)',
        ("tests/scripts/test_adapter_commands.py",),
        "task_adapter",
    ),
]
