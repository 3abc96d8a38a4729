"""Suite `recurrent`: recurrent layers, encoders and pretraining steps compared with plain torch.

torch's LSTM supports projections, but no clipping, so it does less work. The reference of `encoder` follows the
equations directly: for each direction and time step, it encodes the characters of one word per sequence and runs all
layers. References of whole models are in `sentence_encoders` and `recurrent_pretraining`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.measure import Measurement, measure
from benchmarks.recurrent_cases import CASES, Case, ForwardPair
from benchmarks.recurrent_pretraining import autoencoder_forwards, translator_forwards
from benchmarks.recurrent_references import demo_lengths, demo_sentences, pack, torch_layers, unpack
from benchmarks.sentence_encoders import encoder_forwards
from benchmarks.settings import Settings
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.layers.recurrent.packing import PackedSequences, run_bidirectional, run_layer
from hf_ctxmodels.layers.recurrent.rnn import LSTM
from hf_ctxmodels.registry import get_family

FAMILY, STACK_FAMILY = "elmo", "ulmfit"
SETTING = (
    "lstm: one bidirectional layer with ELMo's sizes (input 512, cell 4096, output 512) and clipping, without padding; "
    "the reference is `torch.nn.LSTM(proj_size=512)`, without clipping. encoder: ELMo on sentences of the demo text; "
    "the reference computes characters and inputs per time step and direction. stack: AWD-LSTM's sizes (input 400, "
    "cell 1150, 3 layers), with half of the recurrent weights dropped in training; the reference is three "
    "`torch.nn.LSTM` with dropped weights set before each pass. sentences: two bidirectional layers with MT-LSTM's "
    "sizes (input 300, cell 300) on sequences with the lengths of the demo text's sentences; the reference is "
    "`torch.nn.LSTM` on `pack_padded_sequence`. infersent, laser, gensen: encoders at the papers' sizes, from ids to "
    "sentence embeddings; the reference is an embedding lookup, `torch.nn.LSTM` or `torch.nn.GRU` on "
    "`pack_padded_sequence`, and the same pooling (batch size 48 is GenSen's; InferSent's 64 and LASER's 128,000 "
    "tokens are too slow on a CPU). seqae, lmseq2seq (with both language model losses): loss and gradients of a "
    "pretraining step at the size `small`; the reference is `torch.nn.LSTM` with a packed encoder, a teacher-forced "
    "decoder on padded targets, and softmax at all positions. These five use random ids in sequences with the lengths "
    "of the demo text's sentences, without dropout. Weights are equal, gradients accumulate, and outputs are compared "
    "before the interleaved measurement."
)
_HEADER = (
    "| case | hf_ctxmodels | reference | speedup | target | hf_ctxmodels CPU time | reference CPU time "
    "| hf_ctxmodels peak memory | reference peak memory |\n"
    "|---|---|---|---|---|---|---|---|---|"
)
_TOLERANCE = 1e-3
SIZES: dict[str, Any] = {"input_size": 512, "cell_size": 4096, "projection_size": 512}


@dataclass(frozen=True)
class Result:
    """One row of the table."""

    case: Case
    model: Measurement
    reference: Measurement


def run(settings: Settings) -> Iterator[Result]:
    """Run the cases.

    Raises:
        CtxError: The outputs of model and reference differ.
    """
    device, dtype = settings.torch_device, settings.torch_dtype
    for case in CASES:
        if settings.select_row(case.name):
            torch.manual_seed(0)
            forward, reference_forward = _BUILDERS[case.architecture](case, device, dtype)
            with torch.no_grad():
                difference = float((forward() - reference_forward()).abs().max())
            if difference > (_TOLERANCE if dtype is torch.float32 else 0.1):
                raise CtxError(f"{case.name}: the outputs differ by {difference:.1e}.")
            steps = {
                "model": _step(forward, case.has_backward),
                "reference": _step(reference_forward, case.has_backward),
            }
            measurements = measure(steps, settings)
            yield Result(case, measurements["model"], measurements["reference"])


def _step(forward: Callable[[], Tensor], has_backward: bool) -> Callable[[], object]:
    if has_backward:
        return lambda: forward().float().square().mean().backward()
    return torch.inference_mode()(forward)


def _lstm(case: Case, device: torch.device, dtype: torch.dtype) -> ForwardPair:
    layer = LSTM(**SIZES, cell_clip=3.0, projection_clip=3.0).to(device, dtype)
    reference = torch_layers([layer])
    batch = 0.5 * torch.randn(case.batch_size, case.length, SIZES["input_size"], device=device, dtype=dtype)

    def forward() -> Tensor:
        packing = PackedSequences.build(torch.ones(batch.shape[:2], dtype=torch.bool, device=device))
        return run_layer(layer, batch, packing)

    return forward, lambda: reference(batch)[0]


def _sentences(case: Case, device: torch.device, dtype: torch.dtype) -> ForwardPair:
    width = 300
    layers = nn.ModuleList(LSTM(size, width, state_bias=True) for size in (width, 2 * width)).to(device, dtype)
    reference = torch_layers(layers)
    lengths = demo_lengths(case.batch_size, case.length)
    token_mask = (torch.arange(int(lengths.max())) < lengths[:, None]).to(device)
    batch = 0.5 * torch.randn(*token_mask.shape, width, device=device, dtype=dtype)

    def forward() -> Tensor:
        return run_bidirectional(layers, batch, PackedSequences.build(token_mask), nn.Identity())[0][-1]

    return forward, lambda: unpack(reference(pack(batch, lengths))[0])


def _encoder(case: Case, device: torch.device, dtype: torch.dtype) -> ForwardPair:
    family = get_family(FAMILY)
    tokenizer_class: Any = family.tokenizer
    sentences = list(islice(demo_sentences(), case.batch_size))
    batch = tokenizer_class.from_words([])(
        sentences, padding=True, truncation=True, max_length=case.length, return_tensors="pt"
    ).to(device)
    model = family.models["AutoModel"](family.config(**family.sizes["base"])).to(device, dtype).eval()
    mask = batch["attention_mask"].bool()
    return lambda: model(**batch).last_hidden_state[mask], lambda: stepwise_encoder(model, **batch)[mask]


def _stack(case: Case, device: torch.device, dtype: torch.dtype) -> ForwardPair:
    """Weight dropout is active only with gradients, so that outputs can be compared without."""
    family, dropout = get_family(STACK_FAMILY), 0.5
    rates = {"dropout_scale": 1.0, "weight_dropout_prob": dropout}
    rates |= {f"{name}_dropout_prob": 0.0 for name in ("embedding", "input", "hidden", "output")}
    model = family.models["AutoModel"](family.config(**family.sizes["base"], **rates, vocab_size=10_000))
    model = model.to(device, dtype)
    reference_layers = [torch_layers([layer]) for layer in model.layers]
    ids = torch.randint(10_000, (case.batch_size, case.length), device=device)

    def forward() -> Tensor:
        return model.train(torch.is_grad_enabled())(input_ids=ids).last_hidden_state

    def reference_forward() -> Tensor:
        values = model.get_input_embeddings()(ids)
        for layer in reference_layers:
            weight = layer.get_parameter("weight_hh_l0")
            dropped = F.dropout(weight, dropout, torch.is_grad_enabled())
            values = torch.func.functional_call(layer, {"weight_hh_l0": dropped}, (values,))[0]
        return values

    return forward, reference_forward


_BUILDERS: dict[str, Callable[[Case, torch.device, torch.dtype], ForwardPair]] = {
    "lstm": _lstm,
    "encoder": _encoder,
    "stack": _stack,
    "sentences": _sentences,
    "infersent": encoder_forwards,
    "laser": encoder_forwards,
    "gensen": encoder_forwards,
    "seqae": autoencoder_forwards,
    "lmseq2seq": translator_forwards,
}


def stepwise_encoder(model: Any, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """(batch, words, hidden) output of ELMo, computed step by step, for a batch padded on the right."""
    lengths, words = attention_mask.sum(1), input_ids.shape[1]
    positions = torch.arange(words, device=input_ids.device)
    backward = torch.where(positions < lengths[:, None], lengths[:, None] - 1 - positions, positions)
    direction_outputs = []
    for direction, order in enumerate((positions.expand_as(backward), backward)):
        ids = input_ids.gather(1, order[..., None].expand_as(input_ids))
        states = [
            tuple(tensor[0] for tensor in layer.zero_state(len(ids)))  # hidden and cell state of one direction
            for layer in model.layers
        ]
        outputs = []
        for step in range(words):
            value = model.characters.plain(ids[:, step])
            for depth, layer in enumerate(model.layers):
                states[depth] = _lstm_step(layer, direction, value, *states[depth])
                is_residual = depth and model.config.residual
                value = states[depth][0] + value if is_residual else states[depth][0]
            outputs.append(value)
        stacked = torch.stack(outputs, 1)
        direction_outputs.append(stacked.gather(1, order[..., None].expand_as(stacked)))
    return torch.cat(direction_outputs, -1)


def _lstm_step(layer: LSTM, direction: int, value: Tensor, hidden: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
    from_input = F.linear(value, layer.input_weight[direction], layer.bias[direction])
    in_gate, forget, candidate, out_gate = (from_input + F.linear(hidden, layer.state_weight[direction])).chunk(4, -1)
    cell = forget.sigmoid() * cell + in_gate.sigmoid() * candidate.tanh()
    if layer.cell_clip is not None:
        cell = cell.clamp(-layer.cell_clip, layer.cell_clip)
    hidden = out_gate.sigmoid() * cell.tanh()
    if layer.projection is not None:
        hidden = F.linear(hidden, layer.projection[direction])
    if layer.projection_clip is not None:
        hidden = hidden.clamp(-layer.projection_clip, layer.projection_clip)
    return hidden, cell


def table(results: Sequence[Result]) -> str:
    """Format results as Markdown."""
    return "\n".join([_HEADER, *(_row(result) for result in results)])


def _row(result: Result) -> str:
    model, reference = result.model, result.reference
    cells = [
        result.case.name,
        f"{1e3 * model.seconds:,.0f} ms ± {model.spread / 2:.0%}",
        f"{1e3 * reference.seconds:,.0f} ms ± {reference.spread / 2:.0%}",
        f"{reference.seconds / model.seconds:.2f}x",
        f"{result.case.min_speedup:.2f}x",
        f"{1e3 * model.cpu_seconds:,.0f} ms",
        f"{1e3 * reference.cpu_seconds:,.0f} ms",
        f"{model.peak_bytes / 1e6:,.0f} MB",
        f"{reference.peak_bytes / 1e6:,.0f} MB",
    ]
    return f"| {' | '.join(cells)} |"
