"""Quantization-aware fine-tuning with low-bit weights (Q-BERT, Shen et al. 2019, arXiv 1909.05840)."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
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
from hf_ctxmodels.compression.low_bits.sensitivity import assign_bits, group_by_layer, layer_sensitivities
from hf_ctxmodels.core.console import print_status
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import REQUIRED, choice_flag, flag, flat_options, parse_choices
from hf_ctxmodels.core.model import inspection_mode
from hf_ctxmodels.core.output_files import wrap_write_errors
from hf_ctxmodels.training.batches import EpochIndexed
from hf_ctxmodels.training.model_loading import require_trainable

PACKED_FOLDER = "quantized"


@dataclass(frozen=True)
class QBertOptions:
    """Q-BERT (Shen et al. 2019)."""

    bits: tuple[int, ...] = flag(
        REQUIRED, "Bits of the weights, 2 to 8; of several, the most sensitive layers get the largest."
    )
    embedding_bits: int = flag(8, "Bits of the embedding matrices.")
    groups: int = flag(128, "Groups of output features with a quantization range of their own.")
    sensitivity_batches: int = flag(10, "Batches of the training data to compare the sensitivity of the layers on.")


@dataclass
class LowBitsArguments:
    """Training with low-bit weights."""

    quantize: QBertOptions | None = choice_flag(
        None, "Train with weights of a few bits and activations of 8 bits.", {"q-bert": QBertOptions}
    )

    def __post_init__(self) -> None:
        parse_choices(self)

    @property
    def is_active(self) -> bool:
        """Whether the weights are quantized."""
        return self.quantize is not None

    def identity(self) -> dict[str, Any]:
        """Values that must be equal when the run is resumed; none without bits."""
        return flat_options(self) if self.is_active else {}

    def start(
        self, model: PreTrainedModel, features: Sequence[Any], collate: Any, batch_size: int, accelerator: Accelerator
    ) -> None:
        """Compute with low-bit weights from now on, see `start_low_bits`."""
        start_low_bits(model, self.quantize, features, collate, batch_size, accelerator)

    def save(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, output_dir: str, accelerator: Accelerator
    ) -> None:
        """Write the packed model, see `save_packed`."""
        save_packed(model, self.quantize, tokenizer, output_dir, accelerator)


def start_low_bits(
    model: PreTrainedModel,
    options: QBertOptions | None,
    features: Sequence[Any],
    collate: Any,
    batch_size: int,
    accelerator: Accelerator,
) -> None:
    """Replace a model's layers by fake-quantized ones; nothing without `options`.

    Args:
        model: A model with a head; its parameters and their names do not change.
        options: The bits; None replaces nothing.
        features, collate: Training examples and their collator, for the sensitivities.
        batch_size: Batch size for the sensitivities.
        accelerator: The main process reports the sensitivities.

    Raises:
        CtxError: The bits are out of range, or the model is quantized already or has tied output layers.
    """
    require_trainable(model)
    if options is None:
        return
    linear_layers, embeddings = find_quantizable_modules(model)
    bits = dict.fromkeys(embeddings, options.embedding_bits)
    bits |= dict.fromkeys(linear_layers, max(options.bits))
    layers = group_by_layer(linear_layers)
    if len(options.bits) > 1 and layers:
        batches = _sample_batches(features, collate, batch_size, options.sensitivity_batches)
        sensitivities = _measure_sensitivities(model, layers, batches)
        for layer, num_bits in assign_bits(sensitivities, options.bits).items():
            print_status(
                f"{layer}: sensitivity {sensitivities[layer]:.4g}, {num_bits} bits", accelerator.is_main_process
            )
            bits |= dict.fromkeys(layers[layer], num_bits)
    replace_with_fake_quantized(model, bits, options.groups)


def _sample_batches(
    features: Sequence[Any], collate: Any, batch_size: int, num_batches: int
) -> Iterator[Mapping[str, Any]]:
    """Evenly spaced batches of the training examples.

    Raises:
        CtxError: There are fewer examples than batches.
    """
    if not 1 <= num_batches <= len(features):
        raise CtxError(
            f"There are {len(features)} training examples.",
            location=f"--quantize q-bert:sensitivity_batches={num_batches}",
            hint=f"use a number from 1 to {len(features)}.",
        )
    examples, length = EpochIndexed(features), len(features) // num_batches
    for start in range(0, num_batches * length, length):
        batch = collate([examples[0, index] for index in range(start, start + min(batch_size, length))])
        yield {name: value for name, value in batch.items() if isinstance(value, Tensor)}


def _measure_sensitivities(
    model: PreTrainedModel, layers: Mapping[str, Sequence[str]], batches: Iterator[Mapping[str, Any]]
) -> dict[str, float]:
    """`layer_sensitivities` in evaluation mode, with gradients for frozen layers too."""
    was_training = model.training
    linear_layers = [model.get_submodule(name) for names in layers.values() for name in names]
    frozen = [layer.weight for layer in linear_layers if not layer.weight.requires_grad]
    model.eval()
    try:
        for weight in frozen:
            weight.requires_grad_(True)
        with inspection_mode(model), torch.enable_grad():
            return layer_sensitivities(model, layers, batches)
    finally:
        for weight in frozen:
            weight.requires_grad_(False)
        model.train(was_training)


def save_packed(
    model: PreTrainedModel,
    options: QBertOptions | None,
    tokenizer: PreTrainedTokenizerBase,
    output_dir: str,
    accelerator: Accelerator,
) -> None:
    """Write the trained model with packed weights to the folder `quantized` of the output directory.

    The output directory itself holds the float32 weights, which training resumes from. Nothing is written without
    `options`.
    """
    if options is None or not accelerator.is_main_process:
        return
    folder = Path(output_dir) / PACKED_FOLDER
    with wrap_write_errors(folder):
        pack_model(model.cpu()).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    sizes = [sum(path.stat().st_size for path in root.glob("*.safetensors")) for root in (Path(output_dir), folder)]
    print_status(f"{folder}: {sizes[1] / 1e6:,.1f} MB, in float32 {sizes[0] / 1e6:,.1f} MB")
