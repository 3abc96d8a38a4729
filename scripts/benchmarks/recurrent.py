"""The suite `recurrent`: recurrent layers, encoders and pretraining steps against plain torch.

torch's LSTM projects, but clips nothing, so it has less to do. The peer of the case `encoder` is what the equations say
when they are written down as they stand: for each direction and each step the characters of that step's words, then
every layer's input and state multiplied within the step. Those of whole families are in `sentence_encoders` and
`recurrent_pretraining`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.measure import Measurement, measure
from benchmarks.recurrent_cases import CASES, Case, Sides
from benchmarks.recurrent_peers import demo_lengths, demo_sentences, pack, torch_layers, unpack
from benchmarks.recurrent_pretraining import autoencoder_sides, translator_sides
from benchmarks.sentence_encoders import encoder_sides
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.layers.recurrent.lstm import LSTM
from hf_ctxmodels.layers.recurrent.packing import PackedSequences, run_bidirectional, run_layer
from hf_ctxmodels.registry import get_family

FAMILY, STACK_FAMILY = "elmo", "ulmfit"
SETTING = (
    "the LSTM is one bidirectional layer with the original's sizes (512 in, 4096 cells, 512 out), clipped, "
    "against `torch.nn.LSTM(proj_size=512)`, which does not clip, in batches without padding; the encoder is the "
    "original one on sentences of the demo text, against a direct implementation that computes every step's characters "
    "and inputs within the step, each direction by itself; the stack has the AWD-LSTM's sizes (400 in, 1150 cells, 3 "
    "layers), in training with half of the weights from step to step dropped, against three `torch.nn.LSTM` whose "
    "weights are set to dropped ones before each pass; sentences are those of the demo text, as long as they are, in "
    "two bidirectional layers with the MT-LSTM's sizes (300 in, 300 cells), against `torch.nn.LSTM` on "
    "`pack_padded_sequence`. infersent, laser and gensen are these families' encoders at the papers' sizes, from ids "
    "to a sentence's vector, against the lookup, `torch.nn.LSTM` or `torch.nn.GRU` on `pack_padded_sequence`, and the "
    "family's pooling (48 rows are GenSen's batch; InferSent's 64 and LASER's 128,000 tokens are more than a CPU does "
    "in seconds). seqae and lmseq2seq, with the losses of its two language models, are a pretraining step at the size "
    "`small`, loss and gradients, against `torch.nn.LSTM`: an encoder on `pack_padded_sequence`, a teacher-forced "
    "decoder on padded targets, and a softmax at all of their places. These five read random ids, one for each word of "
    "the demo text's sentences, as long as they are, without dropout; the translator's target is another sentence. "
    "Same weights; gradients are added to those of the step before; the outputs are compared first; in turn."
)
_HEADER = (
    "| what | ours | peer | peer / ours | expected at least | CPU time, ours | peer | peak memory, ours | peer |\n"
    "|---|---|---|---|---|---|---|---|---|"
)
_TOLERANCE = 1e-3
SIZES: dict[str, Any] = {"input_size": 512, "cell_size": 4096, "projection_size": 512}


@dataclass(frozen=True)
class Result:
    """One line of the table, measured."""

    case: Case
    ours: Measurement
    peer: Measurement


def run(
    device: torch.device, dtype: torch.dtype, repeats: int, attention: str, only: str | None = None
) -> Iterator[Result]:
    """Run the cases.

    Args:
        device, dtype: Where and in which precision.
        repeats: Timed steps of each.
        attention: Not used: there is none.
        only: Run the cases in whose name this text occurs.

    Raises:
        CtxError: Both sides do not give the same.
    """
    for case in CASES:
        if only is None or only in case.name:
            torch.manual_seed(0)
            ours, peer = _BUILDERS[case.what](case, device, dtype)
            with torch.no_grad():
                difference = float((ours() - peer()).abs().max())
            if difference > (_TOLERANCE if dtype is torch.float32 else 0.1):
                raise CtxError(f"{case.name}: the outputs differ by {difference:.1e}.")
            steps = {"ours": _step(ours, case.trains), "peer": _step(peer, case.trains)}
            measured = measure(steps, repeats, device)
            yield Result(case, measured["ours"], measured["peer"])


def _step(forward: Callable[[], Tensor], trains: bool) -> Callable[[], object]:
    if trains:
        return lambda: forward().float().square().mean().backward()
    return torch.inference_mode()(forward)


def _lstm(case: Case, device: torch.device, dtype: torch.dtype) -> Sides:
    layer = LSTM(**SIZES, cell_clip=3.0, projection_clip=3.0).to(device, dtype)
    peer = torch_layers([layer])
    batch = 0.5 * torch.randn(case.rows, case.length, SIZES["input_size"], device=device, dtype=dtype)

    def ours() -> Tensor:
        rows = PackedSequences.build(torch.ones(batch.shape[:2], dtype=torch.bool, device=device))
        return run_layer(layer, batch, rows)

    return ours, lambda: peer(batch)[0]


def _sentences(case: Case, device: torch.device, dtype: torch.dtype) -> Sides:
    width = 300
    layers = nn.ModuleList(LSTM(size, width, state_bias=True) for size in (width, 2 * width)).to(device, dtype)
    peer = torch_layers(layers)
    lengths = demo_lengths(case.rows, case.length)
    tokens = (torch.arange(int(lengths.max())) < lengths[:, None]).to(device)
    batch = 0.5 * torch.randn(*tokens.shape, width, device=device, dtype=dtype)

    def ours() -> Tensor:
        return run_bidirectional(layers, batch, PackedSequences.build(tokens), nn.Identity())[0][-1]

    return ours, lambda: unpack(peer(pack(batch, lengths))[0])


def _encoder(case: Case, device: torch.device, dtype: torch.dtype) -> Sides:
    family = get_family(FAMILY)
    tokenizer_class: Any = family.tokenizer
    sentences = list(islice(demo_sentences(), case.rows))
    batch = tokenizer_class.from_words([])(
        sentences, padding=True, truncation=True, max_length=case.length, return_tensors="pt"
    ).to(device)
    model = family.models["AutoModel"](family.config(**family.sizes["base"])).to(device, dtype).eval()
    mask = batch["attention_mask"].bool()
    return lambda: model(**batch).last_hidden_state[mask], lambda: word_by_word(model, **batch)[mask]


def _stack(case: Case, device: torch.device, dtype: torch.dtype) -> Sides:
    """Weights are dropped where there are gradients, so the outputs can be compared without."""
    family, share = get_family(STACK_FAMILY), 0.5
    rates = {"dropout_scale": 1.0, "weight_dropout_prob": share}
    rates |= {f"{kind}_dropout_prob": 0.0 for kind in ("embedding", "input", "hidden", "output")}
    model = family.models["AutoModel"](family.config(**family.sizes["base"], **rates, vocab_size=10_000))
    model = model.to(device, dtype)
    peers = [torch_layers([layer]) for layer in model.layers]
    ids = torch.randint(10_000, (case.rows, case.length), device=device)

    def ours() -> Tensor:
        return model.train(torch.is_grad_enabled())(input_ids=ids).last_hidden_state

    def theirs() -> Tensor:
        values = model.get_input_embeddings()(ids)
        for peer in peers:
            weight = peer.get_parameter("weight_hh_l0")
            dropped = F.dropout(weight, share, torch.is_grad_enabled())
            values = torch.func.functional_call(peer, {"weight_hh_l0": dropped}, (values,))[0]
        return values

    return ours, theirs


_BUILDERS: dict[str, Callable[[Case, torch.device, torch.dtype], Sides]] = {
    "lstm": _lstm,
    "encoder": _encoder,
    "stack": _stack,
    "sentences": _sentences,
    "infersent": encoder_sides,
    "laser": encoder_sides,
    "gensen": encoder_sides,
    "seqae": autoencoder_sides,
    "lmseq2seq": translator_sides,
}


def word_by_word(model: Any, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """(rows, words, hidden): the output of an encoder whose rows are padded on the right, as the equations say."""
    lengths, words = attention_mask.sum(1), input_ids.shape[1]
    numbers = torch.arange(words, device=input_ids.device)
    backward = torch.where(numbers < lengths[:, None], lengths[:, None] - 1 - numbers, numbers)
    ends = []
    for direction, order in enumerate((numbers.expand_as(backward), backward)):
        ids = input_ids.gather(1, order[..., None].expand_as(input_ids))
        states = [
            tuple(part[0] for part in layer.zero_state(len(ids)))
            for layer in model.layers  # outputs and cells of no direction in particular: zeros
        ]
        outputs = []
        for place in range(words):
            value = model.characters.plain(ids[:, place])
            for depth, layer in enumerate(model.layers):
                states[depth] = _one_step(layer, direction, value, *states[depth])
                residual = depth and model.config.residual
                value = states[depth][0] + value if residual else states[depth][0]
            outputs.append(value)
        found = torch.stack(outputs, 1)
        ends.append(found.gather(1, order[..., None].expand_as(found)))
    return torch.cat(ends, -1)


def _one_step(layer: LSTM, direction: int, value: Tensor, hidden: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
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
    """Render results."""
    return "\n".join([_HEADER, *(_row(result) for result in results)])


def _row(result: Result) -> str:
    ours, peer = result.ours, result.peer
    cells = [
        result.case.name,
        f"{1e3 * ours.seconds:,.0f} ms ± {ours.spread / 2:.0%}",
        f"{1e3 * peer.seconds:,.0f} ms ± {peer.spread / 2:.0%}",
        f"{peer.seconds / ours.seconds:.2f}x",
        f"{result.case.speed:.2f}x",
        f"{1e3 * ours.cpu_seconds:,.0f} ms",
        f"{1e3 * peer.cpu_seconds:,.0f} ms",
        f"{ours.peak_bytes / 1e6:,.0f} MB",
        f"{peer.peak_bytes / 1e6:,.0f} MB",
    ]
    return f"| {' | '.join(cells)} |"
