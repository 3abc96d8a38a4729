"""The suite `encoders`: inference and pretraining of every encoder family against its peer."""

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from hf_ctxmodels.benchmarks.measure import Measurement, Step, matmul_flops, measure
from hf_ctxmodels.registry import FAMILIES, Family

_FILL = 0.36  # share of real tokens in a padded batch: what sentences of mixed length give
_MASKED_SHARE = 0.15


@dataclass(frozen=True)
class Case:
    """One line of the table.

    Attributes:
        work: "inference" or "training".
        layers, width, length, batch: Shape of the model and the batch.
        fill: Share of the batch that is not padding.
        speed: Least ratio of the peer's time to ours that was expected before the run.
        memory: Largest ratio of our peak memory to the peer's that was expected before the run, if any.
    """

    work: str
    layers: int
    width: int
    length: int
    batch: int
    fill: float
    speed: float
    memory: float | None

    @property
    def name(self) -> str:
        """What is run, for the table."""
        return f"{self.work}, {self.layers}x{self.width}, B={self.batch}, T={self.length}, {self.fill:.0%} filled"


CASES = [
    Case("inference", 4, 256, 128, 32, _FILL, 2.5, 0.5),
    Case("inference", 4, 256, 512, 32, _FILL, 3.3, 0.5),
    Case("inference", 12, 768, 128, 32, _FILL, 2.5, 0.5),
    Case("inference", 12, 768, 512, 32, _FILL, 3.3, 0.5),
    Case("inference", 4, 256, 128, 32, 1.0, 0.97, None),
    Case("inference", 12, 768, 128, 32, 1.0, 0.97, None),
    Case("training", 4, 256, 128, 32, 1.0, 4.0, 0.3),
    Case("training", 8, 512, 128, 16, 1.0, 2.3, 0.55),
]


@dataclass(frozen=True)
class Result:
    """What one case gave.

    Attributes:
        case: What was run.
        family: On which family.
        difference: Largest absolute difference of outputs (inference) or losses (training).
        ours, peer: The two measurements.
        tokens: Real tokens in the batch.
        utilisation: Our floating-point rate over that of a large matrix product on the same machine.
    """

    case: Case
    family: str
    difference: float
    ours: Measurement
    peer: Measurement
    tokens: int
    utilisation: float


def run(
    device: torch.device, dtype: torch.dtype, repeats: int, attention: str, only: str | None = None
) -> Iterator[Result]:
    """Run every case on every family that has an encoder and a peer.

    Args:
        device, dtype: Where and in which precision.
        repeats: Timed runs of each side.
        attention: Attention implementation of the peer.
        only: Run the cases whose name contains this text.
    """
    ceiling = matmul_flops(device, dtype, 8192 if device.type == "cuda" else 2048)
    for family in FAMILIES.values():
        for case in CASES:
            if only is None or only in case.name:
                yield _run_case(family, case, device, dtype, repeats, attention, ceiling)


def _run_case(
    family: Family,
    case: Case,
    device: torch.device,
    dtype: torch.dtype,
    repeats: int,
    attention: str,
    ceiling: float,
) -> Result:
    torch.manual_seed(0)
    auto_name = "AutoModel" if case.work == "inference" else "AutoModelForPreTraining"
    ours, peer = _same_weights(family, auto_name, case, attention)
    ours, peer = (model.to(device, dtype if case.work == "inference" else torch.float32) for model in (ours, peer))
    lengths = _lengths(case)
    batch = _batch(lengths, case, ours.config.vocab_size, training=case.work == "training")
    batch = {name: tensor.to(device) for name, tensor in batch.items()}
    make = _inference_step if case.work == "inference" else _training_step
    steps = {"peer": make(peer, batch, dtype), "ours": make(ours, batch, dtype)}
    difference = _difference(ours, peer, batch, case)
    measured = measure(steps, repeats, device)
    tokens = int(lengths.sum())
    flops = _model_flops(ours, lengths, case)
    return Result(
        case=case,
        family=family.name,
        difference=difference,
        ours=measured["ours"],
        peer=measured["peer"],
        tokens=tokens,
        utilisation=flops / measured["ours"].seconds / ceiling,
    )


def _same_weights(
    family: Family, auto_name: str, case: Case, attention: str
) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Our model and the peer opened from its export."""
    config = family.config(
        hidden_size=case.width,
        num_hidden_layers=case.layers,
        num_attention_heads=case.width // 64,
        intermediate_size=4 * case.width,
    )
    ours = family.models[auto_name](config)
    with tempfile.TemporaryDirectory() as folder:
        ours.export_reference(folder)
        peer = getattr(transformers, auto_name).from_pretrained(folder, attn_implementation=attention)
    return ours, peer


def _lengths(case: Case) -> Tensor:
    """(batch,) exponentially spread lengths with the case's mean fill, the longest one full."""
    if case.fill == 1:
        return torch.full((case.batch,), case.length)
    spread = torch.empty(case.batch).exponential_()
    lengths = spread / spread.mean() * case.fill * case.length
    for _ in range(50):  # clamping moves the mean; move it back
        lengths = (lengths * case.fill * case.length / lengths.mean()).clamp(4, case.length)
    lengths[lengths.argmax()] = case.length
    return lengths.long()


def _batch(lengths: Tensor, case: Case, vocab_size: int, *, training: bool) -> dict[str, Tensor]:
    mask = (torch.arange(case.length) < lengths[:, None]).long()
    batch = {
        "input_ids": torch.randint(vocab_size // 10, vocab_size, mask.shape) * mask,
        "attention_mask": mask,
        "token_type_ids": (torch.arange(case.length) >= lengths[:, None] // 2).long() * mask,
    }
    if training:
        masked = torch.rand(mask.shape).masked_fill(mask == 0, 2).argsort(1).argsort(1)
        masked = masked < (lengths[:, None] * _MASKED_SHARE).round()
        batch["labels"] = batch["input_ids"].where(masked, -100)
        batch["next_sentence_label"] = torch.randint(0, 2, (case.batch,))
    return batch


def _inference_step(model: PreTrainedModel, batch: dict[str, Tensor], dtype: torch.dtype) -> Step:
    model.eval()

    @torch.inference_mode()
    def step() -> None:
        model(**batch)

    return step


def _training_step(model: PreTrainedModel, batch: dict[str, Tensor], dtype: torch.dtype) -> Step:
    """Forward, backward and a fused AdamW update; half precision by autocast, as in training."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        with torch.autocast(model.device.type, dtype, enabled=dtype != torch.float32):
            loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@torch.no_grad()
def _difference(ours: PreTrainedModel, peer: PreTrainedModel, batch: dict[str, Tensor], case: Case) -> float:
    """Largest difference between the two sides with dropout off, before they are timed."""
    was_training = ours.training
    ours.eval(), peer.eval()
    a, b = ours(**batch), peer(**batch)
    ours.train(was_training), peer.train(was_training)
    if case.work == "training":
        return abs(a.loss.item() - b.loss.item())
    real = batch["attention_mask"].bool()
    return (a.last_hidden_state[real] - b.last_hidden_state[real]).abs().max().item()


def _model_flops(model: PreTrainedModel, lengths: Tensor, case: Case) -> float:
    """Operations the work needs: 2 per weight of a linear map and token, attention, 3 times as much with backward.

    The vocabulary is counted at the predicted positions only: what need not be computed does not count as useful.
    """
    per_layer = 12 * case.width**2  # projections (4) and feed-forward (8)
    tokens, pairs = lengths.sum().item(), (lengths**2).sum().item()
    flops = case.layers * (2 * per_layer * tokens + 4 * case.width * pairs)
    if case.work == "training":
        predicted = (lengths * _MASKED_SHARE).round().sum().item()
        flops = 3 * (flops + 2 * case.width * model.config.vocab_size * predicted)
    return flops
