"""Faults in the ways to fine-tune."""

from fault import Fault

METHODS = ("tests/training/test_finetuning_methods.py",)
FEATURES = ("tests/training/test_features.py",)

FINETUNING_FAULTS = [
    Fault(
        "a pooler that fine-tuning left out counts as forgotten",
        "hf_ctxmodels/training/forgetting.py",
        "if name in theirs and not name.startswith(drawn)]",
        "if name in theirs]",
        ("tests/scripts/test_finetuning_ways.py",),
        "forgotten",
    ),
    Fault(
        "the anchor counts once for each micro-batch",
        "hf_ctxmodels/training/finetuning/anchoring.py",
        "            _add_gradient(parameter, pull * (self._weight * scale))",
        "            _add_gradient(parameter, pull * (2 * self._weight * scale))",
        METHODS,
        "written_out",
    ),
    Fault(
        "anchored weights are decayed towards zero",
        "hf_ctxmodels/training/finetuning/anchoring.py",
        '"params": moved, "weight_decay": 0.0',
        '"params": moved',
        METHODS,
        "written_out",
    ),
    Fault(
        "the Fisher information is the square of a mean gradient",
        "hf_ctxmodels/training/finetuning/fisher.py",
        "                total += gradient.float().square()",
        "                total += gradient.float()",
        METHODS,
        "fisher",
    ),
    Fault(
        "mixout shifts the expectation",
        "hf_ctxmodels/training/finetuning/mixout.py",
        "factor = (~pretrained).to(parameter.dtype) / share",
        "factor = (~pretrained).to(parameter.dtype)",
        METHODS,
        "mixout",
    ),
    Fault(
        "a stage of chain-thaw goes on from its last weights",
        "hf_ctxmodels/training/finetuning/thawing.py",
        "            value.copy_(self._best[name])",
        "            pass",
        METHODS,
        "chain_thaw",
    ),
    Fault(
        "the best weights of a stage are lost at a resume",
        "hf_ctxmodels/training/checkpoint/run_state.py",
        "        self._method.load(checkpoint)\n",
        "",
        METHODS,
        "resumed",
    ),
    Fault(
        "one layer too many is drawn anew",
        "hf_ctxmodels/training/finetuning/reinitializing.py",
        "layers[len(layers) - number :]",
        "layers[max(0, len(layers) - number - 1) :]",
        ("tests/training/test_new_weights.py",),
        "exactly",
    ),
    Fault(
        "a cache that was interrupted is taken for a whole one",
        "hf_ctxmodels/training/finetuning/features.py",
        'folder.with_name(f".{folder.name}.writing-{os.getpid()}")',
        "folder",
        FEATURES,
        "whole",
    ),
    Fault(
        "of an encoder-decoder the encoder's layers are drawn anew",
        "hf_ctxmodels/heads/layer_mix.py",
        'for name in ("decoder", "encoder"))',
        'for name in ("encoder", "decoder"))',
        ("tests/training/test_new_weights.py",),
        "exactly",
    ),
    Fault(
        "states that nobody asked for stay in the output of a mixed encoder-decoder",
        "hf_ctxmodels/heads/layer_mix.py",
        '_RECORDED = ("hidden_states", "decoder_hidden_states", "encoder_hidden_states")',
        '_RECORDED = ("hidden_states",)',
        FEATURES,
        "every_family",
    ),
    Fault(
        "the mix of layers ignores the embeddings",
        "hf_ctxmodels/heads/layer_mix.py",
        "chosen = [number for number, each in enumerate(states) if each.shape[-1] == width]",
        "chosen = [number for number, each in enumerate(states) if number and each.shape[-1] == width]",
        FEATURES,
        "mix",
    ),
]
