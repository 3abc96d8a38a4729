"""Probes in batches: the same classifier for all layers, and for several targets, in one module.

A batch of probes has L inputs (layers of a model, or mixes of layers) and V variants (the task and its control task,
for each seed), which share the vectors. Parameters have the shape (L, V, ...), and the probes are independent: a batch
computes and learns what its probes would one by one.

| probe | features of a pair | classifier | source |
|---|---|---|---|
| `linear` | [x; y; x * y] | linear | Liu et al. 2019, section 2 |
| `mlp` | [x; y; x * y] | one hidden layer with ReLU | Hewitt & Liang 2019, section 3 |
| `bilinear` | (Ux) * (Vy) | linear | of pairs; low rank, as Hewitt & Liang 2019, section 3 |
| `edge` | [Ux; Vy], pooled by attention | MLP with tanh, one sigmoid per label | Tenney et al. 2019, section 3 |
"""

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import check_range, flag


@dataclass
class LinearOptions:
    """Linear probe."""


@dataclass
class MlpOptions:
    """MLP with one hidden layer."""

    hidden_size: int = flag(64, "Width of the hidden layer; narrow probes are more selective.")
    dropout: float = flag(0.0, "Dropout of the hidden layer.")

    def __post_init__(self) -> None:
        check_range(self, "hidden_size", at_least=1)
        check_range(self, "dropout", at_least=0.0, below=1.0)


@dataclass
class BilinearOptions:
    """Low-rank bilinear probe of pairs."""

    rank: int = flag(64, "Rank of the bilinear map.")

    def __post_init__(self) -> None:
        check_range(self, "rank", at_least=1)


@dataclass
class EdgeOptions:
    """Edge-probing classifier."""

    hidden_size: int = flag(256, "Width of the projections and of the hidden layer.")
    dropout: float = flag(0.3, "Dropout of the hidden layer.")

    def __post_init__(self) -> None:
        check_range(self, "hidden_size", at_least=1)
        check_range(self, "dropout", at_least=0.0, below=1.0)


PROBES: dict[str, type] = {
    "linear": LinearOptions,
    "mlp": MlpOptions,
    "bilinear": BilinearOptions,
    "edge": EdgeOptions,
}
ProbeOptions = LinearOptions | MlpOptions | BilinearOptions | EdgeOptions


@dataclass
class ProbeBatch:
    """The vectors of a batch of examples.

    Attributes:
        vectors: (L, words, hidden) vectors; the words of all spans, one after another.
        spans: (words,) span of each word, `slot * examples + example`; None if all spans have one word.
        num_examples, num_slots: Number of examples, and of spans of an example (1 or 2).
    """

    vectors: Tensor
    spans: Tensor | None
    num_examples: int
    num_slots: int

    def slots(self) -> list[Tensor]:
        """The (L, examples, hidden) vectors of the first and second spans, which have one vector each."""
        return list(self.vectors.unflatten(1, (self.num_slots, self.num_examples)).unbind(1))


@dataclass
class ProbeGrid:
    """Numbers of the probes of a batch, and where their initial weights come from.

    Attributes:
        layers: Names of the inputs; the weights of a probe depend on its layer, variant and no other probe.
        variants: Names of the variants.
    """

    layers: Sequence[str]
    variants: Sequence[str]
    hidden_size: int
    num_slots: int
    num_labels: int
    _generators: list[list[torch.Generator]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._generators = [
            [torch.Generator().manual_seed(zlib.crc32(f"{layer}/{variant}".encode())) for variant in self.variants]
            for layer in self.layers
        ]

    def uniform(self, *shape: int, bound: float) -> nn.Parameter:
        """(L, V, *shape) parameter between -bound and bound, from the generator of each probe."""
        values = torch.empty(len(self.layers), len(self.variants), *shape)
        for row, generators in enumerate(self._generators):
            for column, generator in enumerate(generators):
                values[row, column].uniform_(-bound, bound, generator=generator)
        return nn.Parameter(values)

    def linear(self, inputs: int, outputs: int) -> nn.Parameter:
        """Weights (L, V, inputs, outputs) with the initial values of `nn.Linear`."""
        return self.uniform(inputs, outputs, bound=1 / math.sqrt(inputs))

    def zeros(self, *shape: int) -> nn.Parameter:
        """(L, V, *shape) parameter of zeros."""
        return nn.Parameter(torch.zeros(len(self.layers), len(self.variants), *shape))


def project(inputs: Tensor, weight: Tensor) -> Tensor:
    """Multiply (L, n, inputs), which all variants share, by (L, V, inputs, outputs) in one product per layer; returns
    (L, V, n, outputs)."""
    layers, variants, size, outputs = weight.shape
    joined = weight.transpose(1, 2).reshape(layers, size, variants * outputs)
    return torch.bmm(inputs, joined).unflatten(-1, (variants, outputs)).transpose(1, 2)


def pair_features(slots: Sequence[Tensor]) -> Tensor:
    """The features of examples: the vector of a span, or [x; y; x * y] of two (Liu et al. 2019, section 3.3)."""
    if len(slots) == 1:
        return slots[0]
    first, second = slots
    return torch.cat([first, second, first * second], -1)


class ProbeDropout(nn.Module):
    """Dropout with the same mask for all probes, sampled by a separate generator: a probe neither depends on the other
    probes of its batch nor on the global seed."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p, self._generator = p, torch.Generator().manual_seed(0)

    def forward(self, hidden: Tensor) -> Tensor:
        """(L, V, examples, hidden) -> (L, V, examples, hidden)."""
        if not self.training or not self.p:
            return hidden
        is_kept = torch.rand(hidden.shape[-2:], generator=self._generator) >= self.p
        return hidden * (is_kept / (1 - self.p))


class LinearProbes(nn.Module):
    """Linear classifiers."""

    def __init__(self, grid: ProbeGrid, options: LinearOptions) -> None:
        super().__init__()
        self.weight = grid.linear(grid.hidden_size * (3 if grid.num_slots == 2 else 1), grid.num_labels)
        self.bias = grid.zeros(1, grid.num_labels)

    def forward(self, batch: ProbeBatch) -> Tensor:
        """(L, V, examples, labels) logits."""
        return project(pair_features(batch.slots()), self.weight) + self.bias


class MlpProbes(nn.Module):
    """Classifiers with one hidden layer and ReLU."""

    def __init__(self, grid: ProbeGrid, options: MlpOptions) -> None:
        super().__init__()
        self.hidden_weight = grid.linear(grid.hidden_size * (3 if grid.num_slots == 2 else 1), options.hidden_size)
        self.hidden_bias = grid.zeros(1, options.hidden_size)
        self.weight = grid.linear(options.hidden_size, grid.num_labels)
        self.bias = grid.zeros(1, grid.num_labels)
        self.dropout = ProbeDropout(options.dropout)

    def forward(self, batch: ProbeBatch) -> Tensor:
        """(L, V, examples, labels) logits."""
        hidden = F.relu(project(pair_features(batch.slots()), self.hidden_weight) + self.hidden_bias)
        return self.dropout(hidden) @ self.weight + self.bias


class BilinearProbes(nn.Module):
    """Classifiers of pairs by a low-rank bilinear form of the two vectors per label."""

    def __init__(self, grid: ProbeGrid, options: BilinearOptions) -> None:
        if grid.num_slots != 2:
            raise CtxError(
                "A bilinear probe needs pairs.", location="--probe bilinear", hint="use linear, mlp or edge."
            )
        super().__init__()
        self.first_weight = grid.linear(grid.hidden_size, options.rank)
        self.second_weight = grid.linear(grid.hidden_size, options.rank)
        self.weight = grid.linear(options.rank, grid.num_labels)
        self.bias = grid.zeros(1, grid.num_labels)

    def forward(self, batch: ProbeBatch) -> Tensor:
        """(L, V, examples, labels) logits."""
        first, second = batch.slots()
        product = project(first, self.first_weight) * project(second, self.second_weight)
        return product @ self.weight + self.bias


class EdgeProbes(nn.Module):
    """The classifier of edge probing (Tenney et al. 2019, section 3 and appendix C; jiant).

    A projection for each span, attention over its words, the pooled spans concatenated, and an MLP: linear, tanh, layer
    normalization, dropout, linear. The losses are of one sigmoid per label.
    """

    def __init__(self, grid: ProbeGrid, options: EdgeOptions) -> None:
        super().__init__()
        size = options.hidden_size
        self.projections = nn.ParameterList([grid.linear(grid.hidden_size, size) for _ in range(grid.num_slots)])
        self.projection_biases = nn.ParameterList([grid.zeros(1, size) for _ in range(grid.num_slots)])
        self.scores = nn.ParameterList([grid.linear(size, 1) for _ in range(grid.num_slots)])
        self.hidden_weight, self.hidden_bias = grid.linear(grid.num_slots * size, size), grid.zeros(1, size)
        self.norm_weight, self.norm_bias = nn.Parameter(grid.zeros(1, size) + 1), grid.zeros(1, size)
        self.weight, self.bias = grid.linear(size, grid.num_labels), grid.zeros(1, grid.num_labels)
        self.dropout = ProbeDropout(options.dropout)

    def forward(self, batch: ProbeBatch) -> Tensor:
        """(L, V, examples, labels) logits."""
        spans = batch.spans
        if spans is None:
            spans = torch.arange(batch.num_slots * batch.num_examples)
        pooled = []
        for slot, projection in enumerate(self.projections):
            is_selected = spans // batch.num_examples == slot
            examples = spans[is_selected] % batch.num_examples  # of each word
            projected = project(batch.vectors[:, is_selected], projection) + self.projection_biases[slot]
            weights = segment_softmax((projected @ self.scores[slot]).squeeze(-1), examples, batch.num_examples)
            sums = projected.new_zeros(*projected.shape[:2], batch.num_examples, projected.shape[-1])
            pooled.append(sums.index_add(2, examples, projected * weights[..., None]))
        hidden = torch.tanh(torch.cat(pooled, -1) @ self.hidden_weight + self.hidden_bias)
        hidden = F.layer_norm(hidden, hidden.shape[-1:]) * self.norm_weight + self.norm_bias
        return self.dropout(hidden) @ self.weight + self.bias


def segment_softmax(scores: Tensor, segments: Tensor, num_segments: int) -> Tensor:
    """Softmax of (..., words) scores over the words of each segment; `segments` (words,)."""
    index = segments.expand_as(scores)
    maxima = scores.new_full((*scores.shape[:-1], num_segments), -math.inf)
    maxima = maxima.scatter_reduce(-1, index, scores.detach(), "amax")
    exponentials = (scores - maxima.gather(-1, index)).exp()
    sums = exponentials.new_zeros(maxima.shape).scatter_add(-1, index, exponentials)
    return exponentials / sums.gather(-1, index)


class MixedProbes(nn.Module):
    """Probes of learned mixes of layers: input l mixes the layers 0 to l, by `gamma * sum_j softmax(s)_j * layer_j`
    (Tenney et al. 2019, section 3.1, equation 1).

    Variants do not share their mixes, so that the mixes are the L * V inputs of probes with one variant.
    """

    def __init__(self, grid: ProbeGrid, options: ProbeOptions) -> None:
        super().__init__()
        mixes = [f"mix {layer}/{variant}" for layer in grid.layers for variant in grid.variants]
        self.probes = build_probes(replace(grid, layers=mixes, variants=["task"]), options)
        self.mix = grid.zeros(len(grid.layers))
        self.gamma = nn.Parameter(torch.ones(len(grid.layers), len(grid.variants)))

    def mix_weights(self) -> Tensor:
        """(L, V, layers) softmax-normalized weights; 0 above the input's layer."""
        num_layers = len(self.mix)
        is_above = torch.ones(num_layers, num_layers, dtype=torch.bool).triu(1)
        return self.mix.masked_fill(is_above[:, None], -math.inf).softmax(-1)

    def forward(self, batch: ProbeBatch) -> Tensor:
        """(L, V, examples, labels) logits."""
        weights = self.mix_weights() * self.gamma[..., None]
        mixes = torch.tensordot(weights.flatten(0, 1), batch.vectors, 1)
        return self.probes(replace(batch, vectors=mixes)).squeeze(1).unflatten(0, self.gamma.shape)


_CLASSES: dict[type, Any] = {
    LinearOptions: LinearProbes,
    MlpOptions: MlpProbes,
    BilinearOptions: BilinearProbes,
    EdgeOptions: EdgeProbes,
}


def build_probes(grid: ProbeGrid, options: ProbeOptions) -> Any:
    """The probes of a grid for the options of a kind of probe; the same grid gives the same initial weights again."""
    return _CLASSES[type(options)](replace(grid), options)
