"""Fine-tuning with weights of a few bits (Q-BERT, Shen et al. 2019, arXiv 1909.05840)."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_ctxmodels.compression.low_bits.quantizer import (
    find_quantizable_modules,
    pack_model,
    replace_with_fake_quantized,
)
from hf_ctxmodels.compression.low_bits.sensitivity import layers_of, mix_bits, sensitivities
from hf_ctxmodels.core.console import print_status
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import flag, non_default_fields, reject_flag_conflicts
from hf_ctxmodels.core.model_modes import inspection_mode
from hf_ctxmodels.core.output_files import wrap_write_errors
from hf_ctxmodels.training.batches import EpochIndexed
from hf_ctxmodels.training.model_loading import require_trainable

PACKED_FOLDER = "quantized"


@dataclass
class LowBitsArguments:
    """Bits of the weights (Q-BERT).

    Raises:
        CtxError: A flag needs `--quantize_bits`.
    """

    quantize_bits: list[int] = flag(
        (),
        "Train with weights of so many bits, from 2 to 8, and inputs of 8: one number for all layers, or several, of "
        "which the layers with the largest eigenvalues of the Hessian get the largest (Q-BERT).",
    )
    quantize_embedding_bits: int = flag(8, "With --quantize_bits: bits of the tables of embeddings.")
    quantize_groups: int = flag(128, "With --quantize_bits: groups of output rows with a range of their own.")
    sensitivity_parts: int = flag(
        10, "With several --quantize_bits: parts of the training data, a batch each, whose eigenvalues are compared."
    )

    def __post_init__(self) -> None:
        given = sorted(non_default_fields(self) - {"quantize_bits"})
        rules = ((not self.quantize_bits, f"--{name}", "It belongs to --quantize_bits.") for name in given)
        reject_flag_conflicts(rules, "give --quantize_bits, or leave it out.")

    def identity(self) -> dict[str, Any]:
        """What a resumed run must have in common; nothing without bits."""
        return asdict(self) if self.quantize_bits else {}

    def start(
        self, model: PreTrainedModel, features: Sequence[Any], collate: Any, batch_size: int, accelerator: Accelerator
    ) -> None:
        """Compute with low-bit weights from now on, see `start_low_bits`."""
        start_low_bits(model, self, features, collate, batch_size, accelerator)

    def save(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, output_dir: str, accelerator: Accelerator
    ) -> None:
        """Write the packed model, see `save_packed`."""
        save_packed(model, self, tokenizer, output_dir, accelerator)


def start_low_bits(
    model: PreTrainedModel,
    arguments: LowBitsArguments,
    features: Sequence[Any],
    collate: Any,
    batch_size: int,
    accelerator: Accelerator,
) -> None:
    """Let a model compute with weights of a few bits from now on, if any bits are given.

    Args:
        model: With a head; its parameters and their names stay.
        arguments: Which bits.
        features: Training examples, and `collate` makes a batch of them.
        batch_size: Examples of a part of the data.
        accelerator: Says which process reports.

    Raises:
        CtxError: The bits are impossible, or the model is quantized already or has tied outputs.
    """
    require_trainable(model)
    if not arguments.quantize_bits:
        return
    maps, tables = find_quantizable_modules(model)
    bits = dict.fromkeys(tables, arguments.quantize_embedding_bits) | dict.fromkeys(maps, max(arguments.quantize_bits))
    layers = layers_of(maps)
    if len(arguments.quantize_bits) > 1 and layers:
        parts = _parts(features, collate, batch_size, arguments.sensitivity_parts)
        found = _sensitivities(model, layers, parts)
        for layer, number in mix_bits(found, arguments.quantize_bits).items():
            print_status(f"{layer}: sensitivity {found[layer]:.4g}, {number} bits", accelerator.is_main_process)
            bits |= dict.fromkeys(layers[layer], number)
    replace_with_fake_quantized(model, bits, arguments.quantize_groups)


def _parts(features: Sequence[Any], collate: Any, size: int, parts: int) -> Iterator[Mapping[str, Any]]:
    """A batch from the beginning of each part of the examples.

    Raises:
        CtxError: There are fewer examples than parts.
    """
    if not 1 <= parts <= len(features):
        raise CtxError(
            f"There are {len(features)} training examples.",
            location=f"--sensitivity_parts {parts}",
            hint="give a number from 1 to that.",
        )
    examples, length = EpochIndexed(features), len(features) // parts
    for first in range(0, parts * length, length):
        batch = collate([examples[0, number] for number in range(first, first + min(size, length))])
        yield {name: value for name, value in batch.items() if isinstance(value, Tensor)}


def _sensitivities(
    model: PreTrainedModel, layers: Mapping[str, Sequence[str]], parts: Iterator[Mapping[str, Any]]
) -> dict[str, float]:
    """`sensitivities` of the model as it computes; frozen layers have a Hessian too."""
    was_training = model.training
    maps = [model.get_submodule(name) for names in layers.values() for name in names]
    frozen = [each.weight for each in maps if not each.weight.requires_grad]
    model.eval()
    try:
        for weight in frozen:
            weight.requires_grad_(True)
        with inspection_mode(model), torch.enable_grad():
            return sensitivities(model, layers, parts)
    finally:
        for weight in frozen:
            weight.requires_grad_(False)
        model.train(was_training)


def save_packed(
    model: PreTrainedModel,
    arguments: LowBitsArguments,
    tokenizer: PreTrainedTokenizerBase,
    output_dir: str,
    accelerator: Accelerator,
) -> None:
    """Write the trained model as it is stored to the folder `quantized` of the output directory, if it has few bits.

    The output directory itself holds the weights in single precision, from which training goes on.
    """
    if not arguments.quantize_bits or not accelerator.is_main_process:
        return
    folder = Path(output_dir) / PACKED_FOLDER
    with wrap_write_errors(folder):
        pack_model(model.cpu()).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    sizes = [sum(each.stat().st_size for each in place.glob("*.safetensors")) for place in (Path(output_dir), folder)]
    print_status(f"{folder}: {sizes[1] / 1e6:,.1f} MB, in single precision {sizes[0] / 1e6:,.1f} MB")
