"""Suite `encoders`: inference and pretraining of all encoder families compared with transformers."""

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.batches import predicted_tokens, random_batches, random_lengths
from benchmarks.cases import CASES, NEW_TOKENS, Case, Workload
from benchmarks.electra_reference import ReferencePair
from benchmarks.measure import Measurement, Step, matmul_flops, measure
from benchmarks.settings import Settings
from hf_ctxmodels.registry import FAMILIES

_Model: TypeAlias = PreTrainedModel | ReferencePair


@dataclass(frozen=True)
class Comparison:
    """A model and a reference with the same weights, and their inputs.

    Attributes:
        model: Model of this package.
        reference: Reference model.
        batches: Arguments of `forward` or `generate`, for "model" and "reference".
        tokens: Tokens per step, without padding; for generation, new tokens.
        flops: Useful floating-point operations of a step.
        comparison_inputs: Additional arguments of both models for the comparison of outputs.
    """

    model: PreTrainedModel
    reference: _Model
    batches: Mapping[str, dict[str, Tensor]]
    tokens: int
    flops: float
    comparison_inputs: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Result:
    """Result of one case.

    Attributes:
        case: Benchmark case.
        difference: Maximum absolute difference of outputs (inference) or losses (training).
        model, reference: Measurements of the model and of the reference.
        tokens: Tokens per step, without padding.
        utilization: Rate of useful operations divided by the rate of a large matrix product on the same machine.
    """

    case: Case
    difference: float
    model: Measurement
    reference: Measurement
    tokens: int
    utilization: float


def build_comparison(case: Case, attention: str) -> Comparison:
    """Build the model, the reference and the batches of an encoder or decoder case.

    Args:
        case: Benchmark case.
        attention: Attention implementation of the reference; eager if it supports no other.
    """
    model, reference = _build_models(case, attention)
    lengths = random_lengths(case)
    tokens = case.batch * NEW_TOKENS if case.is_generation else int(lengths.sum())
    flops = _model_flops(model.config, lengths, case)
    return Comparison(model, reference, random_batches(model, lengths, case), tokens, flops)


def run(
    settings: Settings,
    cases: Sequence[Case] | None = None,
    build: Callable[[Case, str], Comparison] = build_comparison,
) -> Iterator[Result]:
    """Run the cases.

    Args:
        settings: Settings of the run; the attention of a reference is eager if it supports no other.
        cases: Cases to run; by default the suite `encoders`.
        build: Builds the comparison of a case.
    """
    device = settings.torch_device
    matmul_rate = matmul_flops(device, settings.torch_dtype, 8192 if device.type == "cuda" else 2048)
    for case in [case.with_load(settings.busy) for case in (CASES if cases is None else cases)]:
        if settings.select_row(case.title):
            torch.manual_seed(0)
            yield _run_case(case, build(case, settings.reference_attention), settings, matmul_rate)


def _run_case(case: Case, comparison: Comparison, settings: Settings, matmul_rate: float) -> Result:
    device, dtype = settings.torch_device, settings.torch_dtype
    parameter_dtype = torch.float32 if case.has_backward else dtype  # training uses autocast
    model = comparison.model.to(device, parameter_dtype)
    reference = comparison.reference.to(device, parameter_dtype)
    batches = {name: _to_device(batch, device) for name, batch in comparison.batches.items()}
    difference = _difference(model, reference, batches, _to_device(comparison.comparison_inputs, device))
    if case.workload == "compiled inference":
        model = torch.compile(model, fullgraph=True)
    make_step = training_step if case.has_backward else generation_step if case.is_generation else inference_step
    steps = {
        "reference": make_step(reference, batches["reference"], dtype, case.workload),
        "model": make_step(model, batches["model"], dtype, case.workload),
    }
    measurements = measure(steps, settings)
    return Result(
        case=case,
        difference=difference,
        model=measurements["model"],
        reference=measurements["reference"],
        tokens=comparison.tokens,
        utilization=comparison.flops / measurements["model"].seconds / matmul_rate,
    )


def _to_device(batch: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    return {name: tensor.to(device) for name, tensor in batch.items()}


def build_model(case: Case) -> PreTrainedModel:
    """Build the model of a case with random weights."""
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
    """Auto class with the pretraining head, or with the masked LM head if transformers lacks the former."""
    if not (case.uses_pretraining_head or case.is_generation):
        return "AutoModel"
    family, name = FAMILIES[case.family], "AutoModelForPreTraining"
    has_reference = name not in family.reference_heads and family.models[name].reference_model_type is not None
    return name if has_reference or case.sampling is not None else "AutoModelForMaskedLM"


def _build_models(case: Case, attention: str) -> tuple[PreTrainedModel, _Model]:
    """A model of this package, and the reference loaded from its export."""
    model = build_model(case)
    if case.sampling is not None:
        return model, ReferencePair(model, case.sampling, attention)
    with tempfile.TemporaryDirectory() as folder:
        model.export_reference(folder)
        config = transformers.AutoConfig.from_pretrained(folder)
        reference_class = getattr(transformers, _auto_name(case))._model_mapping[type(config)]
        attention = attention if reference_class._supports_sdpa else "eager"
        reference = reference_class.from_pretrained(folder, attn_implementation=attention)
    return model, reference


def inference_step(model: _Model, batch: dict[str, Tensor], dtype: torch.dtype, workload: Workload) -> Step:
    """Forward pass in evaluation mode."""
    model.eval()

    @torch.inference_mode()
    def step() -> None:
        model(**batch)

    return step


def generation_step(model: _Model, batch: dict[str, Tensor], dtype: torch.dtype, workload: Workload) -> Step:
    """Generate `NEW_TOKENS` tokens without an end token; `min_new_tokens` would process all scores in each step."""
    model.eval()
    beams = 4 if workload == "generation with 4 beams" else 1
    model.generation_config.eos_token_id = None  # type: ignore[union-attr]

    def step() -> Tensor:
        options = {"max_new_tokens": NEW_TOKENS, "num_beams": beams, "do_sample": False}
        return model.generate(**batch, **options)  # type: ignore[operator]

    return step


def training_step(model: _Model, batch: dict[str, Tensor], dtype: torch.dtype, workload: Workload) -> Step:
    """Forward and backward pass under autocast and, except for "gradients", a fused AdamW update."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        with torch.autocast(model.device.type, dtype, enabled=dtype != torch.float32):
            outputs = model(**batch)
            if workload == "encoder training":
                loss = outputs.last_hidden_state[batch["attention_mask"].bool()].float().square().mean()
            else:
                loss = outputs.loss
        loss.backward()
        if workload != "gradients":
            optimizer.step()
        optimizer.zero_grad()

    return step


@torch.no_grad()
def _difference(
    model: PreTrainedModel,
    reference: _Model,
    batches: Mapping[str, dict[str, Tensor]],
    comparison_inputs: Mapping[str, Tensor],
) -> float:
    """Maximum absolute difference between model and reference in evaluation mode."""
    model.eval(), reference.eval()
    outputs = model(**batches["model"], **comparison_inputs)
    sampled = {"corrupted_ids": outputs.corrupted_ids} if "corrupted_ids" in outputs else {}
    expected = reference(**batches["reference"], **comparison_inputs, **sampled)
    if "loss" in outputs:
        return abs(outputs.loss.item() - expected.loss.item())
    if "logits" in outputs:
        return (outputs.logits - expected.logits).abs().max().item()
    is_token = batches["model"]["attention_mask"].bool()
    return (outputs.last_hidden_state[is_token] - expected.last_hidden_state[is_token]).abs().max().item()


def _model_flops(config: Any, lengths: Tensor, case: Case) -> float:
    """Useful operations: 2 per token and weight of a linear layer, and attention; three times as many with a backward
    pass. The output layer counts at predicted positions only."""
    tokens, pairs = lengths.sum().item(), (lengths**2).sum().item()
    flops = 0.0
    for relative_size in [1.0] if case.sampling is None else [1.0, config.generator_size]:  # generator, discriminator
        width = case.width * relative_size
        per_layer = 12 * width**2  # projections (4) and feed-forward (8)
        flops += case.layers * (2 * per_layer * tokens + 4 * width * pairs)
    embedding_size = getattr(config, "embedding_size", case.width)
    flops += 2 * embedding_size * config.vocab_size * predicted_tokens(lengths, case)
    return 3 * flops if case.has_backward else flops
