"""Quantization-aware fine-tuning with low-bit weights (Q-BERT, Shen et al. 2019, arXiv 1909.05840)."""

import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_ctxmodels.compression.low_bits.quantizer import (
    find_quantizable_modules,
    pack_model,
    replace_with_fake_quantized,
)
from hf_ctxmodels.core.console import print_status
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import REQUIRED, flag, flat_options, parse_choices
from hf_ctxmodels.core.model import inspection_mode
from hf_ctxmodels.core.output_files import replacing_files
from hf_ctxmodels.training.model_loading import prepare_for_training
from hf_ctxmodels.training.training_step import EpochIndexed

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

    quantize: QBertOptions | None = flag(
        None, "Train with low-bit weights and 8-bit activations.", {"q-bert": QBertOptions}
    )

    def __post_init__(self) -> None:
        parse_choices(self)

    def identity(self) -> dict[str, Any]:
        """Values that must be equal when the run is resumed; none without bits."""
        return {} if self.quantize is None else flat_options(self)

    def start(
        self, model: PreTrainedModel, features: Sequence[Any], collate: Any, batch_size: int, accelerator: Accelerator
    ) -> None:
        """Replace the layers of a model by fake-quantized ones, unless no bits are given.

        Args:
            model: A model with a head; its parameters and their names do not change.
            features, collate, batch_size: Training examples and their collation, for the sensitivities.
            accelerator: The main process reports the sensitivities.

        Raises:
            CtxError: The bits are out of range, or the model is quantized already or has tied output layers.
        """
        prepare_for_training(model)
        options = self.quantize
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
                text = f"{layer}: sensitivity {sensitivities[layer]:.4g}, {num_bits} bits"
                print_status(text, accelerator.is_main_process)
                bits |= dict.fromkeys(layers[layer], num_bits)
        replace_with_fake_quantized(model, bits, options.groups)

    def save(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, output_dir: str, accelerator: Accelerator
    ) -> None:
        """Write the trained model with packed weights to the folder `quantized` of the output directory, which itself
        holds the float32 weights that training resumes from."""
        if self.quantize is None or not accelerator.is_main_process:
            return
        folder = Path(output_dir) / PACKED_FOLDER
        with replacing_files(folder) as temporary:
            pack_model(model.cpu()).save_pretrained(temporary)
            tokenizer.save_pretrained(temporary)
        sizes = [sum(path.stat().st_size for path in root.glob("*.safetensors")) for root in (Path(output_dir), folder)]
        print_status(f"{folder}: {sizes[1] / 1e6:,.1f} MB, in float32 {sizes[0] / 1e6:,.1f} MB")


def _sample_batches(
    features: Sequence[Any], collate: Any, batch_size: int, num_batches: int
) -> Iterator[Mapping[str, Any]]:
    """Evenly spaced batches of the training examples; raises CtxError if there are fewer examples than batches."""
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


def top_eigenvalue(
    loss: Tensor, parameters: Sequence[Tensor], *, iterations: int = 50, tolerance: float = 1e-3, seed: int = 0
) -> float:
    """Eigenvalue of largest magnitude of the Hessian of a scalar loss in the parameters, by power iteration (Shen et
    al., algorithm 1) until the relative change of two estimates is at most `tolerance`. The loss must be twice
    differentiable; `seed` determines the first vector."""
    gradients = torch.autograd.grad(loss, parameters, create_graph=True)
    generator = torch.Generator().manual_seed(seed)
    vector = _normalized([torch.randn(p.shape, generator=generator).to(p) for p in parameters])
    eigenvalue = 0.0
    for _ in range(iterations):
        product = torch.autograd.grad(gradients, parameters, grad_outputs=vector, retain_graph=True)
        estimate = float(sum((left * right).sum() for left, right in zip(vector, product, strict=True)))
        has_converged = abs(estimate - eigenvalue) <= tolerance * abs(estimate)
        eigenvalue, vector = estimate, _normalized(product)
        if has_converged:
            break
    return eigenvalue


def _normalized(vector: Iterable[Tensor]) -> list[Tensor]:
    vector = [*vector]
    norm = torch.stack([values.square().sum() for values in vector]).sum().sqrt().clamp_min(1e-30)
    return [values / norm for values in vector]


def group_by_layer(names: Iterable[str]) -> dict[str, list[str]]:
    """Layer -> names of its modules; modules outside of layers are dropped."""
    names_by_layer: dict[str, list[str]] = {}
    for name in names:
        if (match := re.match(r"(?:.*\.)?layers\.\d+(?=\.)", name)) is not None:
            names_by_layer.setdefault(match[0], []).append(name)
    return names_by_layer


def layer_sensitivities(
    model: nn.Module, layers: Mapping[str, Sequence[str]], batches: Iterable[Mapping[str, Any]]
) -> dict[str, float]:
    """abs(mean) + standard deviation of each layer's top eigenvalue over batches (Shen et al., equation 5).

    Args:
        model: A model with a twice differentiable loss: in evaluation mode, with eager attention.
        batches: One batch from each part of the data.
    """
    blocks: dict[str, list[Any]] = {
        layer: [model.get_submodule(name).weight for name in names] for layer, names in layers.items()
    }
    eigenvalues: dict[str, list[float]] = {layer: [] for layer in layers}
    for batch in batches:
        loss = model(**batch).loss
        for layer, parameters in blocks.items():
            eigenvalues[layer].append(top_eigenvalue(loss, parameters))
    return {layer: abs(statistics.mean(values)) + statistics.pstdev(values) for layer, values in eigenvalues.items()}


def assign_bits(sensitivity: Mapping[str, float], bits: Sequence[int]) -> dict[str, int]:
    """Layer -> bits: the most sensitive layers get the most bits; each number of bits has equally many layers."""
    ordered = sorted(sensitivity, key=lambda layer: -sensitivity[layer])
    descending_bits = sorted(bits, reverse=True)
    return {layer: descending_bits[rank * len(bits) // len(ordered)] for rank, layer in enumerate(ordered)}
