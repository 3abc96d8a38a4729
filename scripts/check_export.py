"""Exports a tiny model of each family, and compares its results at other shapes with the model's own.

python scripts/check_export.py > table.md

Every model is exported with a dynamic batch and length by `torch.export`, written, read, and run; and to ONNX, and run
by onnxruntime (the extra `onnx`). A row of the table has the largest difference of the outputs at tokens, as a share of
the largest value of that output.
"""

import argparse
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.export import Dim
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from hf_ctxmodels.models._shared.transformer_seq2seq import EncoderDecoder
from hf_ctxmodels.registry import FAMILIES
from hf_ctxmodels.spec import FamilySpec

_HEADS = (
    "AutoModel",
    "AutoModelForSequenceClassification",
    "AutoModelForTokenClassification",
    "AutoModelForMaskedLM",
    "AutoModelForCausalLM",
)
_OF_ENCODER_DECODERS = ("AutoModelForTextEncoding", "AutoModelForQuestionAnswering", "AutoModelForSeq2SeqLM")
EXAMPLE = (9, 6, 4)
"""Lengths of the rows that a model is exported with."""
OTHERS = ((3, 12, 7, 2, 8), (5,))
"""Lengths of the rows that the exported model is run on: another number of rows and columns, and a single row."""
WORDS = 5  # the first id that is no special token

Batch = dict[str, Tensor]


class DecoderStep(nn.Module):
    """Logits of a target for what the encoder gave: the part of a model that generation repeats."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, encoder_hidden_states: Tensor, attention_mask: Tensor, decoder_input_ids: Tensor
    ) -> dict[str, Tensor]:
        """(batch, length, hidden), (batch, length) and (batch, steps) -> "logits" (batch, steps, vocabulary)."""
        encoded = BaseModelOutput(encoder_hidden_states)
        outputs = self.model(
            encoder_outputs=encoded, attention_mask=attention_mask, decoder_input_ids=decoder_input_ids
        )
        return {"logits": outputs.logits}


PARTS: dict[str, Callable[[PreTrainedModel], nn.Module]] = {
    "": lambda model: model,
    "encoder": lambda model: model.get_encoder(),
    "decoder_step": DecoderStep,
}
"""What is exported of a model, by the end of its name in the table."""


def exported(spec: FamilySpec) -> Iterator[tuple[str, str]]:
    """The Auto classes of a family that are exported, and which of `PARTS`."""
    both = issubclass(spec.models["AutoModel"], EncoderDecoder)
    for auto_name in (*_HEADS, *_OF_ENCODER_DECODERS) if both else _HEADS:
        if auto_name in spec.models:
            yield from ((auto_name, part) for part in (PARTS if auto_name == "AutoModelForSeq2SeqLM" else [""]))


@dataclass(frozen=True)
class Result:
    """What became of one model.

    Attributes:
        model: Its class, and the part.
        exported: The largest difference of the written and read `torch.export` program, or why there is none.
        onnx: Likewise of onnxruntime.
    """

    model: str
    exported: float | str
    onnx: float | str


def tiny_model(spec: FamilySpec, auto_name: str) -> PreTrainedModel:
    """A model of the family's smallest size with random weights, far enough from zero that attention is not uniform."""
    small = {"vocab_size": 61, "initializer_range": 0.2, "num_labels": 3, "pad_token_id": 0, "default_lang": 0}
    known = {*spec.config.__dataclass_fields__, "num_labels"}
    fields = {**spec.sizes["tiny"], **{name: value for name, value in small.items() if name in known}}
    torch.manual_seed(0)
    return spec.models[auto_name](spec.config(**fields)).eval()


def make_batch(model: PreTrainedModel, lengths: Iterable[int], auto_name: str, part: str = "") -> Batch:
    """Random rows of these lengths, padded at their ends; for a decoder targets that are longer."""
    lengths = torch.tensor([*lengths])
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    torch.manual_seed(int(lengths.sum()))
    limit = getattr(model.config, "num_characters", model.config.vocab_size)
    width = getattr(model.config, "max_characters_per_token", None)
    ids = torch.randint(WORDS, limit, mask.shape if width is None else (*mask.shape, width))
    batch = {
        "input_ids": ids * (mask if width is None else mask[..., None]),
        "attention_mask": mask.long(),
    }
    if part == "decoder_step":
        del batch["input_ids"]
        batch["encoder_hidden_states"] = torch.randn(*mask.shape, model.config.hidden_size)
    if auto_name == "AutoModelForSeq2SeqLM" and part != "encoder":
        batch["decoder_input_ids"] = torch.randint(WORDS, limit, (len(mask), mask.shape[1] + 2))
    return batch


def batches(model: PreTrainedModel, auto_name: str = "AutoModel", part: str = "") -> tuple[Batch, list[Batch]]:
    """What a model is exported with, and what it is then run on."""
    return (
        make_batch(model, EXAMPLE, auto_name, part),
        [make_batch(model, lengths, auto_name, part) for lengths in OTHERS],
    )


def largest_difference(expected: Iterable[Tensor], got: Iterable[Tensor], mask: Tensor) -> float:
    """Over all outputs, as a share of an output's largest value; what there is for each token is compared where `mask`,
    (batch, length), is not 0."""
    found = [0.0]
    for ours, theirs in zip(expected, got, strict=True):
        if ours.shape[:2] == mask.shape:
            ours, theirs = ours[mask != 0], theirs[mask != 0]
        found.append(float((ours - theirs).abs().max() / ours.abs().max()))
    return max(found)


def run(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """The outputs of a model by name."""
    with torch.no_grad():
        return {name: value for name, value in model(**batch).items() if isinstance(value, Tensor)}


def check_program(model: nn.Module, batch: Batch, others: list[Batch], folder: Path) -> float:
    """Largest difference of the program that `torch.export` makes of a model, after it was written and read."""
    shapes = {name: {0: Dim.DYNAMIC, 1: Dim.DYNAMIC} for name in batch}
    file = folder / "model.pt2"
    with torch.no_grad():
        program = torch.export.export(model, (), kwargs=batch, dynamic_shapes=shapes)
        torch.export.save(program, file)
        opened = torch.export.load(file).module()
    return max(
        largest_difference(run(model, other).values(), run(opened, other).values(), other["attention_mask"])
        for other in others
    )


def check_onnx(model: nn.Module, batch: Batch, others: list[Batch], folder: Path) -> float:
    """Largest difference of what onnxruntime computes."""
    import onnxruntime

    names = [*run(model, batch)]
    torch.onnx.export(
        model,
        kwargs=batch,
        f=folder / "model.onnx",
        dynamo=True,
        dynamic_shapes={name: {0: "batch", 1: "steps" if name.startswith("decoder_") else "length"} for name in batch},
        output_names=names,
        verbose=False,
    )
    session = onnxruntime.InferenceSession(folder / "model.onnx", providers=["CPUExecutionProvider"])
    differences = []
    for other in others:
        got = session.run(names, {name: tensor.numpy() for name, tensor in other.items()})
        expected = run(model, other).values()
        differences.append(largest_difference(expected, map(torch.from_numpy, got), other["attention_mask"]))
    return max(differences)


def check(spec: FamilySpec, auto_name: str, part: str = "", *, onnx: bool) -> Result:
    """Export a model in both ways.

    Args:
        spec: Its family.
        auto_name: Its Auto class.
        part: Which of `PARTS`.
        onnx: Whether to export it to ONNX too.
    """
    model = tiny_model(spec, auto_name)
    found: list[float | str] = []
    for kind in (check_program, check_onnx):
        if kind is check_onnx and not onnx:
            found.append("not run")
            continue
        with tempfile.TemporaryDirectory() as folder:
            try:
                found.append(kind(PARTS[part](model), *batches(model, auto_name, part), Path(folder)))
            except Exception as error:
                found.append(f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:80]}")
    return Result(".".join([type(model).__name__, *([part] if part else [])]), *found)


def table(families: Iterable[str], *, onnx: bool) -> Iterator[str]:
    """The lines of a Markdown table."""
    yield "| family | model | torch.export | ONNX |"
    yield "| --- | --- | --- | --- |"
    for family in families:
        spec = FAMILIES[family]
        for auto_name, part in exported(spec):
            result = check(spec, auto_name, part, onnx=onnx)
            cells = (each if isinstance(each, str) else f"{each:.1e}" for each in (result.exported, result.onnx))
            yield f"| {family} | `{result.model}` | {' | '.join(cells)} |"


def versions() -> str:
    """The versions of what took part."""
    names = ("torch", "transformers", "onnx", "onnxscript", "onnxruntime")
    return ", ".join(f"{name} {version(name)}" for name in names if find_spec(name))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=[*FAMILIES])
    parser.add_argument("--no_onnx", action="store_true", help="Only torch.export.")
    arguments = parser.parse_args()
    for line in table(arguments.families, onnx=not arguments.no_onnx):
        print(line, flush=True)
    print(f"\n{versions()}")


if __name__ == "__main__":
    main()
