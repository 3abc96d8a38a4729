"""Exports a tiny model of each family, and compares its results at other shapes with the model's own.

python scripts/check_export.py > table.md

Every model is exported with a dynamic batch and length by `torch.export`, written, read, and run; and to ONNX, and run
by onnxruntime (the extra `onnx`). A row of the table has the largest difference of the outputs at tokens, as a share of
the largest value of that output.
"""

import argparse
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_ctxmodels.architectures.encoder_decoder import EncoderDecoder
from hf_ctxmodels.inference.exporting import PARTS, Part, max_relative_difference, write_onnx, write_program
from hf_ctxmodels.inference.model_inputs import Batch
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
PARTS_OF_OTHERS: tuple[Part, ...] = ("model",)
WORDS = 5  # the first id that is no special token


def exported(spec: FamilySpec) -> Iterator[tuple[str, Part]]:
    """The Auto classes of a family that are exported, and which of `PARTS`."""
    both = issubclass(spec.models["AutoModel"], EncoderDecoder)
    for auto_name in (*_HEADS, *_OF_ENCODER_DECODERS) if both else _HEADS:
        if auto_name in spec.models:
            yield from (
                (auto_name, part) for part in (PARTS if auto_name == "AutoModelForSeq2SeqLM" else PARTS_OF_OTHERS)
            )


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


def make_batch(model: PreTrainedModel, lengths: Iterable[int], auto_name: str, part: Part = "model") -> Batch:
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
    if part == "decoder":
        del batch["input_ids"]
        batch["encoder_hidden_states"] = torch.randn(*mask.shape, model.config.hidden_size)
    if auto_name == "AutoModelForSeq2SeqLM" and part != "encoder":
        batch["decoder_input_ids"] = torch.randint(WORDS, limit, (len(mask), mask.shape[1] + 2))
    return batch


def batches(model: PreTrainedModel, auto_name: str = "AutoModel", part: Part = "model") -> tuple[Batch, list[Batch]]:
    """What a model is exported with, and what it is then run on."""
    return (
        make_batch(model, EXAMPLE, auto_name, part),
        [make_batch(model, lengths, auto_name, part) for lengths in OTHERS],
    )


def check_program(model: nn.Module, batch: Batch, others: list[Batch], folder: Path) -> float:
    """Largest difference of the program that `torch.export` makes of a model, after it was written and read."""
    with torch.no_grad():
        return max_relative_difference(model, write_program(model, batch, folder / "model.pt2"), others)


def check_onnx(model: nn.Module, batch: Batch, others: list[Batch], folder: Path) -> float:
    """Largest difference of what onnxruntime computes."""
    with torch.no_grad():
        return max_relative_difference(model, write_onnx(model, batch, folder / "model.onnx"), others)


def check(spec: FamilySpec, auto_name: str, part: Part = "model", *, onnx: bool) -> Result:
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
                found.append(kind(PARTS[part](model).eval(), *batches(model, auto_name, part), Path(folder)))
            except Exception as error:
                found.append(f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:80]}")
    return Result(".".join([type(model).__name__, *([] if part == "model" else [part])]), *found)


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
