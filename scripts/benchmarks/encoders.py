"""The suite `encoders`: inference and pretraining of every encoder family against its peer."""

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.batches import predicted_tokens, random_batches, random_lengths
from benchmarks.cases import CASES, NEW_TOKENS, Case, Work
from benchmarks.measure import Measurement, Step, matmul_flops, measure
from benchmarks.pair import ReferencePair
from hf_ctxmodels.registry import FAMILIES

_Model: TypeAlias = PreTrainedModel | ReferencePair


@dataclass(frozen=True)
class Sides:
    """Our model and the peer with the same weights, and what they are given.

    Attributes:
        ours, peer: The models.
        batches: "ours" and "peer" -> the arguments of `forward`, or of `generate`.
        tokens: Counted for the rate: real ones, or new ones.
        flops: Necessary operations of a step.
        compared: Further arguments of both, with which the outputs are compared.
    """

    ours: PreTrainedModel
    peer: _Model
    batches: Mapping[str, dict[str, Tensor]]
    tokens: int
    flops: float
    compared: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Result:
    """What one case gave.

    Attributes:
        case: What was run.
        difference: Largest absolute difference of outputs (inference) or losses (training).
        ours, peer: The two measurements.
        tokens: Real tokens in the batch.
        utilisation: Our floating-point rate over that of a large matrix product on the same machine.
    """

    case: Case
    difference: float
    ours: Measurement
    peer: Measurement
    tokens: int
    utilisation: float


def build_sides(case: Case, attention: str) -> Sides:
    """Both sides of an encoder's or a decoder's case.

    Args:
        case: What is run.
        attention: Attention implementation of the peer; eager where it has no other.
    """
    ours, peer = _same_weights(case, attention)
    lengths = random_lengths(case)
    tokens = case.batch * NEW_TOKENS if case.generates else int(lengths.sum())
    flops = _model_flops(ours.config, lengths, case)
    return Sides(ours, peer, random_batches(ours, lengths, case), tokens, flops)


def run(
    device: torch.device,
    dtype: torch.dtype,
    repeats: int,
    attention: str,
    only: str | None = None,
    busy: bool = False,
    cases: Sequence[Case] | None = None,
    build: Callable[[Case, str], Sides] = build_sides,
) -> Iterator[Result]:
    """Run every case.

    Args:
        device, dtype: Where and in which precision.
        repeats: Timed runs of each side.
        attention: Attention implementation of the peer; eager where it has no other.
        only: Run the cases that `Case.chosen_by` chooses.
        busy: Whether another process spins on one core meanwhile.
        cases: What to run; None for the suite `encoders`.
        build: Makes the sides of a case.
    """
    ceiling = matmul_flops(device, dtype, 8192 if device.type == "cuda" else 2048)
    for case in [case.when(busy) for case in (CASES if cases is None else cases)]:
        if case.chosen_by(only):
            torch.manual_seed(0)
            yield _run_case(case, build(case, attention), device, dtype, repeats, ceiling)


def _run_case(
    case: Case, sides: Sides, device: torch.device, dtype: torch.dtype, repeats: int, ceiling: float
) -> Result:
    ours, peer = (model.to(device, torch.float32 if case.trains else dtype) for model in (sides.ours, sides.peer))
    batches = {side: _moved(batch, device) for side, batch in sides.batches.items()}
    difference = _difference(ours, peer, batches, _moved(sides.compared, device))
    if case.work == "compiled inference":
        ours = torch.compile(ours, fullgraph=True)
    make = training_step if case.trains else generation_step if case.generates else _inference_step
    steps = {
        "peer": make(peer, batches["peer"], dtype, case.work),
        "ours": make(ours, batches["ours"], dtype, case.work),
    }
    measured = measure(steps, repeats, device)
    return Result(
        case=case,
        difference=difference,
        ours=measured["ours"],
        peer=measured["peer"],
        tokens=sides.tokens,
        utilisation=sides.flops / measured["ours"].seconds / ceiling,
    )


def _moved(batch: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    return {name: tensor.to(device) for name, tensor in batch.items()}


def build_model(case: Case) -> PreTrainedModel:
    """A new model of ours."""
    family = FAMILIES[case.family]
    config = family.config(
        hidden_size=case.width,
        num_hidden_layers=case.layers,
        num_attention_heads=case.width // 64,
        intermediate_size=4 * case.width,
        **case.config,
    )
    return family.models[_auto_name(case)](config)


def _auto_name(case: Case) -> str:
    """The head that pretrains the family, or its masked LM where transformers has no such head."""
    if not (case.pretrains or case.generates):
        return "AutoModel"
    family, name = FAMILIES[case.family], "AutoModelForPreTraining"
    has_peer = name not in family.reference_heads and family.models[name].reference_model_type is not None
    return name if has_peer or case.wiring is not None else "AutoModelForMaskedLM"


def _same_weights(case: Case, attention: str) -> tuple[PreTrainedModel, _Model]:
    """Our model and the peer opened from its export."""
    ours = build_model(case)
    if case.wiring is not None:
        return ours, ReferencePair(ours, case.wiring, attention)
    with tempfile.TemporaryDirectory() as folder:
        ours.export_reference(folder)
        reference = transformers.AutoConfig.from_pretrained(folder)
        peer_class = getattr(transformers, _auto_name(case))._model_mapping[type(reference)]
        attention = attention if peer_class._supports_sdpa else "eager"
        peer = peer_class.from_pretrained(folder, attn_implementation=attention)
    return ours, peer


def _inference_step(model: _Model, batch: dict[str, Tensor], dtype: torch.dtype, work: Work) -> Step:
    model.eval()

    @torch.inference_mode()
    def step() -> None:
        model(**batch)

    return step


def generation_step(model: _Model, batch: dict[str, Tensor], dtype: torch.dtype, work: Work) -> Step:
    """A continuation of fixed length: no token ends it. `min_new_tokens` would pass over all scores in every step."""
    model.eval()
    beams = 4 if work == "generation with 4 beams" else 1
    model.generation_config.eos_token_id = None  # type: ignore[union-attr]

    def step() -> Tensor:
        return model.generate(**batch, max_new_tokens=NEW_TOKENS, num_beams=beams, do_sample=False)  # type: ignore[operator]

    return step


def training_step(model: _Model, batch: dict[str, Tensor], dtype: torch.dtype, work: Work) -> Step:
    """Forward, backward and, but for "gradients", a fused AdamW update; half precision by autocast, as in training."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        with torch.autocast(model.device.type, dtype, enabled=dtype != torch.float32):
            outputs = model(**batch)
            if work == "encoder training":
                loss = outputs.last_hidden_state[batch["attention_mask"].bool()].float().square().mean()
            else:
                loss = outputs.loss
        loss.backward()
        if work != "gradients":
            optimizer.step()
        optimizer.zero_grad()

    return step


@torch.no_grad()
def _difference(
    ours: PreTrainedModel, peer: _Model, batches: Mapping[str, dict[str, Tensor]], compared: Mapping[str, Tensor]
) -> float:
    """Largest difference between the two sides with dropout off, before they are timed."""
    ours.eval(), peer.eval()
    a = ours(**batches["ours"], **compared)
    drawn = {"corrupted_ids": a.corrupted_ids} if "corrupted_ids" in a else {}
    b = peer(**batches["peer"], **compared, **drawn)
    if "loss" in a:
        return abs(a.loss.item() - b.loss.item())
    if "logits" in a:
        return (a.logits - b.logits).abs().max().item()
    real = batches["ours"]["attention_mask"].bool()
    return (a.last_hidden_state[real] - b.last_hidden_state[real]).abs().max().item()


def _model_flops(config: Any, lengths: Tensor, case: Case) -> float:
    """Necessary operations: 2 per weight of a linear map and token, attention, three times as many with backward; those
    of the vocabulary at the predicted positions only."""
    tokens, pairs = lengths.sum().item(), (lengths**2).sum().item()
    flops = 0.0
    for share in [1.0] if case.wiring is None else [1.0, config.generator_size]:  # a pair has two encoders
        width = case.width * share
        per_layer = 12 * width**2  # projections (4) and feed-forward (8)
        flops += case.layers * (2 * per_layer * tokens + 4 * width * pairs)
    embedding_size = getattr(config, "embedding_size", case.width)
    flops += 2 * embedding_size * config.vocab_size * predicted_tokens(lengths, case)
    return 3 * flops if case.trains else flops
