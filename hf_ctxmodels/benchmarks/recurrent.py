"""The suite `recurrent`: the LSTM against torch's own, and the encoder against one that goes word by word.

torch's LSTM projects, but clips nothing, so it has less to do. The other peer is what the equations say when they are
written down as they stand: for each direction and each step the characters of that step's words, then every layer's
input and state multiplied within the step.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hf_ctxmodels.benchmarks.measure import Measurement, measure
from hf_ctxmodels.data.demo import demo_documents
from hf_ctxmodels.data.sentences import split_sentences
from hf_ctxmodels.errors import CtxError
from hf_ctxmodels.layers.recurrent import LSTM, PackedRows
from hf_ctxmodels.recurrent import run_both_ways, side_by_side
from hf_ctxmodels.registry import get_family

FAMILY, STACK_FAMILY = "elmo", "ulmfit"
SETTING = (
    "the LSTM is one layer of both directions with the original's sizes (512 in, 4096 cells, 512 out), clipped, "
    "against `torch.nn.LSTM(proj_size=512)`, which does not clip, in batches without padding; the encoder is the "
    "original one on sentences of the demo text, against a direct implementation that computes every step's characters "
    "and inputs within the step, each direction by itself; the stack has the AWD-LSTM's sizes (400 in, 1150 cells, 3 "
    "layers), in training with half of the weights from step to step dropped, against three `torch.nn.LSTM` whose "
    "weights are set to dropped ones before each pass; sentences are those of the demo text, as long as they are, in "
    "two layers of both directions with the MT-LSTM's sizes (300 in, 300 cells), against `torch.nn.LSTM` on "
    "`pack_padded_sequence`. Same weights; the outputs are compared first; in turn."
)
_HEADER = (
    "| what | ours | peer | peer / ours | expected at least | peak memory, ours | peer |\n|---|---|---|---|---|---|---|"
)
_TOLERANCE = 1e-3


@dataclass(frozen=True)
class Case:
    """One line of the table.

    Attributes:
        what: "lstm", "encoder", "stack" or "sentences".
        rows, length: Of the batch; the rows of the encoder and of sentences have at most so many words.
        trains: Whether there is a backward pass.
        speed: Least ratio of the peer's time to ours that was demanded before the run.
    """

    what: str
    rows: int
    length: int
    trains: bool
    speed: float

    @property
    def name(self) -> str:
        """What is run, for the table."""
        work = "forward and backward" if self.trains else "inference"
        return f"{self.what}, {work}, B={self.rows}, T={self.length}"


CASES = [
    Case("lstm", 8, 128, False, 1 / 1.3),
    Case("lstm", 8, 128, True, 1 / 1.3),
    Case("encoder", 16, 40, False, 2.0),
    Case("encoder", 16, 40, True, 2.0),
    Case("stack", 16, 70, False, 0.9),
    Case("stack", 16, 70, True, 1.0),
    Case("sentences", 64, 60, False, 1.0),
    Case("sentences", 64, 60, True, 1.0),
]
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
            build = {"lstm": _lstm, "encoder": _encoder, "stack": _stack, "sentences": _sentences}[case.what]
            ours, peer = build(case, device, dtype)
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


def _lstm(case: Case, device: torch.device, dtype: torch.dtype) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
    layer = LSTM(**SIZES, cell_clip=3.0, projection_clip=3.0).to(device, dtype)
    inputs, cells, outputs = SIZES.values()
    peer = nn.LSTM(inputs, cells, proj_size=outputs, bidirectional=True, batch_first=True).to(device, dtype)
    _give_weights([layer], peer)
    batch = 0.5 * torch.randn(case.rows, case.length, inputs, device=device, dtype=dtype)

    def ours() -> Tensor:
        rows = PackedRows.build(torch.ones(batch.shape[:2], dtype=torch.bool, device=device))
        return side_by_side(rows.unpack(layer(rows.pack(batch), rows)[0]))

    return ours, lambda: peer(batch)[0]


@torch.no_grad()
def _give_weights(layers: Iterable[Any], peer: nn.LSTM) -> None:
    """Copy ours into torch's."""
    for depth, layer in enumerate(layers):
        for direction in range(len(layer.bias)):
            name = f"l{depth}{'_reverse' if direction else ''}"
            getattr(peer, f"weight_ih_{name}").copy_(layer.input_weight[direction])
            getattr(peer, f"weight_hh_{name}").copy_(layer.state_weight[direction])
            getattr(peer, f"bias_ih_{name}").copy_(layer.bias[direction])
            getattr(peer, f"bias_hh_{name}").copy_(layer.state_bias[direction] if layer.state_bias is not None else 0)
            if layer.projection is not None:
                getattr(peer, f"weight_hr_{name}").copy_(layer.projection[direction])


def _sentences(
    case: Case, device: torch.device, dtype: torch.dtype
) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
    width = 300
    layers = nn.ModuleList(LSTM(size, width, state_bias=True) for size in (width, 2 * width)).to(device, dtype)
    peer = nn.LSTM(width, width, num_layers=2, bidirectional=True, batch_first=True).to(device, dtype)
    _give_weights(layers, peer)
    lengths = torch.tensor([min(len(each.split()), case.length) for each in islice(_demo_sentences(), case.rows)])
    tokens = (torch.arange(int(lengths.max())) < lengths[:, None]).to(device)
    batch = 0.5 * torch.randn(*tokens.shape, width, device=device, dtype=dtype)

    def ours() -> Tensor:
        return run_both_ways(layers, batch, PackedRows.build(tokens), nn.Identity())[0][-1]

    def theirs() -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(batch, lengths, batch_first=True, enforce_sorted=False)
        return nn.utils.rnn.pad_packed_sequence(peer(packed)[0], batch_first=True)[0]

    return ours, theirs


def _demo_sentences() -> Iterator[str]:
    paragraphs = (paragraph for document in demo_documents() for paragraph in document)
    return (sentence for paragraph in paragraphs for sentence in split_sentences(paragraph))


def _encoder(case: Case, device: torch.device, dtype: torch.dtype) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
    family = get_family(FAMILY)
    tokenizer_class: Any = family.tokenizer
    sentences = list(islice(_demo_sentences(), case.rows))
    batch = tokenizer_class.from_words([])(
        sentences, padding=True, truncation=True, max_length=case.length, return_tensors="pt"
    ).to(device)
    model = family.models["AutoModel"](family.config(**family.sizes["base"])).to(device, dtype).eval()
    mask = batch["attention_mask"].bool()
    return lambda: model(**batch).last_hidden_state[mask], lambda: word_by_word(model, **batch)[mask]


def _stack(case: Case, device: torch.device, dtype: torch.dtype) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
    """Weights are dropped where there are gradients, so the outputs can be compared without."""
    family, share = get_family(STACK_FAMILY), 0.5
    rates = {"dropout_scale": 1.0, "weight_dropout_prob": share}
    rates |= {f"{kind}_dropout_prob": 0.0 for kind in ("embedding", "input", "hidden", "output")}
    model = family.models["AutoModel"](family.config(**family.sizes["base"], **rates, vocab_size=10_000))
    model = model.to(device, dtype)
    sizes = pairwise(model.config.layer_sizes)
    peers: Any = nn.ModuleList(nn.LSTM(*each, batch_first=True) for each in sizes)
    peers = peers.to(device, dtype)
    for layer, alone in zip(model.layers, peers, strict=True):
        _give_weights([layer], alone)
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
        f"{ours.peak_bytes / 1e6:,.0f} MB",
        f"{peer.peak_bytes / 1e6:,.0f} MB",
    ]
    return f"| {' | '.join(cells)} |"
