"""Training and evaluation of batches of probes on fixed vectors."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hf_ctxmodels.analysis.probing.probes import ProbeBatch
from hf_ctxmodels.core.console import progress_bar
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import check_range, flag

Batch = TypeVar("Batch")

UNKNOWN_LABEL = -100
_EVALUATION_BATCH = 1024
_CHUNK_ROWS = 4096
_MAX_SELECTION_EXAMPLES = 5000


@dataclass(frozen=True)
class ProbeTraining:
    """Optimization.

    By Adam, with the weights of the best dev loss. The schedule does not depend on results, so that the probes of a
    batch stay independent.

    Attributes:
        evaluations: Number of evaluations on at most 5,000 dev examples, at equal intervals.
    """

    learning_rate: float = flag(1e-3, "Initial learning rate, which falls linearly to 0.")
    weight_decay: float = flag(0.0, "Weight decay (L2) of Adam.")
    batch_size: int = flag(256, "Examples of a batch; structural probes use 20 sentences.")
    epochs: int = flag(5, "Passes over the training examples.")
    min_steps: int = flag(500, "Repeat small sets of training examples until this number of steps.")
    evaluations: int = 5

    def __post_init__(self) -> None:
        check_range(self, "epochs", "min_steps", "batch_size", at_least=1)
        check_range(self, "learning_rate", above=0.0)
        check_range(self, "weight_decay", at_least=0.0)


@dataclass
class ProbeData:
    """Examples as rows of a table of vectors.

    Attributes:
        vectors: (rows, layers, hidden), of any floating type.
        spans: (examples, slots, 2) first row and the row after the last of each span.
        targets: (V, examples) label of each variant, `UNKNOWN_LABEL` for one that training lacks; or (V, examples,
            labels) bool, for classifiers with a sigmoid per label.
        layers: Columns of `vectors` that are read; None for all.
    """

    vectors: Tensor
    spans: Tensor
    targets: Tensor
    layers: list[int] | None = None

    def __len__(self) -> int:
        return len(self.spans)

    @property
    def is_multilabel(self) -> bool:
        """Whether targets are true or false for each label."""
        return self.targets.dtype == torch.bool

    def select(self, start: int, stop: int) -> "ProbeData":
        """The examples from `start` to `stop`."""
        return replace(self, spans=self.spans[start:stop], targets=self.targets[:, start:stop])

    def batch(self, index: Tensor) -> ProbeBatch:
        """The vectors of the examples with these indices."""
        spans = self.spans[index].transpose(0, 1)  # (slots, examples, 2)
        starts, lengths = spans[..., 0].flatten(), (spans[..., 1] - spans[..., 0]).flatten()
        if bool((lengths == 1).all()):
            rows, span_ids = starts, None
        else:
            rows, span_ids = expand_spans(starts, lengths)
        vectors = self.vectors[rows]
        if self.layers is not None:
            vectors = vectors[:, self.layers]
        return ProbeBatch(vectors.float().transpose(0, 1), span_ids, len(index), spans.shape[0])

    def losses(self, logits: Tensor, index: Tensor) -> Tensor:
        """(L, V, examples) cross-entropy in nats, 0 for an unknown label; the sum over labels for sigmoids."""
        if self.is_multilabel:
            targets = self.targets[:, index].float().expand_as(logits)
            return F.binary_cross_entropy_with_logits(logits, targets, reduction="none").sum(-1)
        targets = self.targets[:, index].expand(logits.shape[:-1])
        losses = F.cross_entropy(logits.flatten(0, 2), targets.flatten(), ignore_index=UNKNOWN_LABEL, reduction="none")
        return losses.view(logits.shape[:-1])


def expand_spans(starts: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """The rows of all spans, one span after another, and the span of each row."""
    span_ids = torch.repeat_interleave(torch.arange(len(starts)), lengths)
    offsets = torch.arange(len(span_ids)) - torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths)
    return starts[span_ids] + offsets, span_ids


def pool_spans(vectors: Tensor, spans: Tensor) -> tuple[Tensor, Tensor]:
    """Means of spans, as a table with a row for each distinct span, and the (examples, slots, 2) spans of its rows."""
    if bool((spans[..., 1] - spans[..., 0] == 1).all()):
        return vectors, spans
    distinct, rows = torch.unique(spans.flatten(0, 1), dim=0, return_inverse=True)
    means = torch.empty(len(distinct), *vectors.shape[1:], dtype=vectors.dtype)
    for start in range(0, len(distinct), _CHUNK_ROWS // 8):
        chunk = distinct[start : start + _CHUNK_ROWS // 8]
        lengths = chunk[:, 1] - chunk[:, 0]
        word_rows, span_ids = expand_spans(chunk[:, 0], lengths)
        sums = torch.zeros(len(chunk), *vectors.shape[1:]).index_add_(0, span_ids, vectors[word_rows].float())
        means[start : start + len(chunk)] = (sums / lengths[:, None, None]).to(means.dtype)
    rows = rows.view(spans.shape[:2])
    return means, torch.stack([rows, rows + 1], -1)


def standardize(vectors: Tensor, num_training_rows: int, has_tokens: Tensor) -> Tensor:
    """Give each dimension of each layer the mean 0 and variance 1 over the training words, which come first; words
    without tokens get the vector 0. A linear probe can express the same functions before and after.

    The vectors are changed, chunk by chunk, and returned.

    Raises:
        CtxError: A vector is not finite.
    """
    sums = torch.zeros(vectors.shape[1:], dtype=torch.double)
    squares, count = torch.zeros_like(sums), 0
    for start in range(0, num_training_rows, _CHUNK_ROWS):
        stop = min(start + _CHUNK_ROWS, num_training_rows)
        chunk = vectors[start:stop][has_tokens[start:stop]].float()
        sums += chunk.sum(0)
        squares += chunk.square().sum(0)
        count += len(chunk)
    mean = sums / max(count, 1)
    variance = squares / max(count, 1) - mean.square()
    if not bool(torch.isfinite(variance).all()):
        raise CtxError(
            "The vectors of the model are not finite, or exceed the range of float16.",
            hint="store them as float32 (--vector_dtype float32).",
        )
    is_constant = variance <= 1e-8 * mean.square() + 1e-12
    mean, scale = mean.float(), torch.where(is_constant, 0.0, variance.clamp_min(1e-12).rsqrt()).float()
    for start in range(0, len(vectors), _CHUNK_ROWS):
        chunk = vectors[start : start + _CHUNK_ROWS]
        values = (chunk.float() - mean) * scale * has_tokens[start : start + _CHUNK_ROWS, None, None]
        chunk.copy_(values.clamp(-1e4, 1e4))
    return vectors


@dataclass
class Evaluation:
    """Sums over the examples of a data set, each of shape (L, V).

    Attributes:
        loss: Cross-entropy in nats, over examples with known labels.
        correct: Correct examples; for sigmoids or a positive label, true positive decisions.
        predicted, expected: Positive decisions; number of examples without a positive label.
    """

    loss: Tensor
    correct: Tensor
    predicted: Tensor
    expected: Tensor

    def score(self) -> Tensor:
        """(L, V) accuracy, or F1: of the positive label, or of all decisions (micro)."""
        return 2 * self.correct / (self.predicted + self.expected).clamp_min(1)


@torch.no_grad()
def evaluate_probes(probes: Any, data: ProbeData, positive_label: int | None = None) -> Evaluation:
    """Evaluate probes; examples whose label training lacks count as errors and have no loss."""
    probes.eval()
    sums: list[Tensor] = []
    for index in torch.arange(len(data)).split(_EVALUATION_BATCH):
        logits = probes(data.batch(index))
        if data.is_multilabel:
            expected = data.targets[:, index].expand_as(logits)
            decisions = logits > 0
            counts = [(decisions & expected).sum((-2, -1)), decisions.sum((-2, -1)), expected.sum((-2, -1))]
        else:
            labels, predictions = data.targets[:, index].expand(logits.shape[:-1]), logits.argmax(-1)
            if positive_label is None:
                size = torch.full(logits.shape[:2], len(index))
                counts = [(predictions == labels).sum(-1), size, size]
            else:
                is_predicted, is_expected = predictions == positive_label, labels == positive_label
                counts = [(is_predicted & is_expected).sum(-1), is_predicted.sum(-1), is_expected.sum(-1)]
        values = torch.stack([data.losses(logits, index).sum(-1).double(), *(count.double() for count in counts)])
        sums.append(values)
    return Evaluation(*torch.stack(sums).sum(0))


def train_probes(probes: Any, train: ProbeData, dev: ProbeData, training: ProbeTraining, *, description: str) -> None:
    """Train a batch of probes on vectors of examples; see `optimize_probes`."""
    batch_size = min(training.batch_size, len(train))
    steps = max(training.epochs * math.ceil(len(train) / batch_size), training.min_steps)
    selection = dev.select(0, _MAX_SELECTION_EXAMPLES)
    optimize_probes(
        probes,
        islice(_batches(len(train), batch_size), steps),
        lambda index: train.losses(probes(train.batch(index)), index).mean(-1),
        lambda: evaluate_probes(probes, selection).loss,
        training,
        steps=steps,
        description=description,
    )


def optimize_probes(
    probes: nn.Module,
    batches: Iterable[Batch],
    batch_losses: Callable[[Batch], Tensor],
    dev_losses: Callable[[], Tensor],
    training: ProbeTraining,
    *,
    steps: int,
    description: str,
) -> None:
    """Train a batch of probes with Adam and a learning rate that falls linearly to 0, and load the weights of each
    probe with the lowest dev loss.

    The losses of the probes are summed, so that the probes are trained independently of each other.

    Args:
        probes: Probes with (L, V, ...) parameters.
        batches: The batches of all `steps`.
        batch_losses: (L, V) losses of a batch.
        dev_losses: (L, V) losses on the dev examples, without gradients.
    """
    optimizer = torch.optim.Adam(
        probes.parameters(), training.learning_rate, weight_decay=training.weight_decay, fused=True
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    best: dict[str, Tensor] = {}
    best_loss = None
    evaluation_steps = {round(steps * (number + 1) / training.evaluations) for number in range(training.evaluations)}
    for step, batch in enumerate(progress_bar(batches, description, unit="steps", total=steps), 1):
        probes.train()
        losses = batch_losses(batch)
        optimizer.zero_grad()
        losses.sum().backward()
        optimizer.step()
        schedule.step()
        if step not in evaluation_steps:
            continue
        loss = dev_losses()
        is_better = torch.ones_like(loss, dtype=torch.bool) if best_loss is None else loss < best_loss
        best_loss = loss if best_loss is None else torch.where(is_better, loss, best_loss)
        for name, parameter in probes.named_parameters():
            values = parameter.detach().reshape(is_better.numel(), -1)
            previous = best.get(name, values)
            best[name] = torch.where(is_better.view(-1, 1), values, previous)
    with torch.no_grad():
        for name, parameter in probes.named_parameters():
            parameter.copy_(best[name].view_as(parameter))


def _batches(num_examples: int, batch_size: int) -> Iterator[Tensor]:
    """Random batches without end, each example once in an epoch; the same for all probes."""
    generator = torch.Generator().manual_seed(0)
    while True:
        yield from torch.randperm(num_examples, generator=generator).split(batch_size)


def label_targets(labels: Sequence[Sequence[str]], names: Sequence[str], is_multilabel: bool) -> Tensor:
    """(examples,) indices of labels, or (examples, labels) bool."""
    indices = {name: index for index, name in enumerate(names)}
    if not is_multilabel:
        return torch.tensor([indices.get(label, UNKNOWN_LABEL) for (label,) in labels])
    targets = torch.zeros(len(labels), len(names), dtype=torch.bool)
    for row, example_labels in enumerate(labels):
        for label in example_labels:
            if label in indices:
                targets[row, indices[label]] = True
    return targets
