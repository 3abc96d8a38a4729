"""Export a tiny model of each family and compare the outputs with the original model at other shapes.

python scripts/check_export.py > table.md

Each model is exported with dynamic batch size and length by `torch.export`, saved, loaded and run, and exported to ONNX
and run by onnxruntime (extra `onnx`). The table shows the maximum difference of the outputs at tokens, relative to the
maximum value of the output.
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
from hf_ctxmodels.inference.exporting import PARTS, Batch, Part, max_relative_difference, write_onnx, write_program
from hf_ctxmodels.registry import FAMILIES
from hf_ctxmodels.spec import FamilySpec

_HEADS = (
    "AutoModel",
    "AutoModelForSequenceClassification",
    "AutoModelForTokenClassification",
    "AutoModelForMaskedLM",
    "AutoModelForCausalLM",
)
_ENCODER_DECODER_HEADS = ("AutoModelForTextEncoding", "AutoModelForQuestionAnswering", "AutoModelForSeq2SeqLM")
EXAMPLE_LENGTHS = (9, 6, 4)
"""Sequence lengths of the batch for the export."""
TEST_LENGTHS = ((3, 12, 7, 2, 8), (5,))
"""Sequence lengths of the test batches: other batch size and length, and a single sequence."""
WHOLE_MODEL: tuple[Part, ...] = ("model",)
FIRST_WORD_ID = 5  # first id that is not a special token


def export_cases(spec: FamilySpec) -> Iterator[tuple[str, Part]]:
    """Yield the exported Auto classes of a family, with the parts to export (see `PARTS`)."""
    is_encoder_decoder = issubclass(spec.models["AutoModel"], EncoderDecoder)
    for auto_name in (*_HEADS, *_ENCODER_DECODER_HEADS) if is_encoder_decoder else _HEADS:
        if auto_name in spec.models:
            yield from ((auto_name, part) for part in (PARTS if auto_name == "AutoModelForSeq2SeqLM" else WHOLE_MODEL))


@dataclass(frozen=True)
class Result:
    """Result for one model.

    Attributes:
        model: Class of the model, and the part.
        program: Maximum difference of the `torch.export` program, or the error.
        onnx: Maximum difference of onnxruntime, or the error.
    """

    model: str
    program: float | str
    onnx: float | str


def tiny_model(spec: FamilySpec, auto_name: str) -> PreTrainedModel:
    """A model of the size `tiny` with random weights, large enough for non-uniform attention."""
    overrides = {"vocab_size": 61, "initializer_range": 0.2, "num_labels": 3, "pad_token_id": 0, "default_lang": 0}
    fields_of_config = {*spec.config.__dataclass_fields__, "num_labels"}
    fields = {**spec.sizes["tiny"], **{name: value for name, value in overrides.items() if name in fields_of_config}}
    torch.manual_seed(0)
    return spec.models[auto_name](spec.config(**fields)).eval()


def make_batch(model: PreTrainedModel, lengths: Iterable[int], auto_name: str, part: Part = "model") -> Batch:
    """Random sequences of the given lengths, padded on the right; decoder inputs are longer by two tokens."""
    lengths = torch.tensor([*lengths])
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    torch.manual_seed(int(lengths.sum()))
    num_ids = getattr(model.config, "num_characters", model.config.vocab_size)
    num_characters = getattr(model.config, "max_characters_per_token", None)
    ids = torch.randint(FIRST_WORD_ID, num_ids, mask.shape if num_characters is None else (*mask.shape, num_characters))
    batch = {
        "input_ids": ids * (mask if num_characters is None else mask[..., None]),
        "attention_mask": mask.long(),
    }
    if part == "decoder":
        del batch["input_ids"]
        batch["encoder_hidden_states"] = torch.randn(*mask.shape, model.config.hidden_size)
    if auto_name == "AutoModelForSeq2SeqLM" and part != "encoder":
        batch["decoder_input_ids"] = torch.randint(FIRST_WORD_ID, num_ids, (len(mask), mask.shape[1] + 2))
    return batch


def make_batches(
    model: PreTrainedModel, auto_name: str = "AutoModel", part: Part = "model"
) -> tuple[Batch, list[Batch]]:
    """Batch for the export, and test batches."""
    return (
        make_batch(model, EXAMPLE_LENGTHS, auto_name, part),
        [make_batch(model, lengths, auto_name, part) for lengths in TEST_LENGTHS],
    )


def check_program(model: nn.Module, batch: Batch, test_batches: list[Batch], folder: Path) -> float:
    """Maximum difference of the saved and loaded `torch.export` program."""
    with torch.no_grad():
        return max_relative_difference(model, write_program(model, batch, folder / "model.pt2"), test_batches)


def check_onnx(model: nn.Module, batch: Batch, test_batches: list[Batch], folder: Path) -> float:
    """Maximum difference of onnxruntime."""
    with torch.no_grad():
        return max_relative_difference(model, write_onnx(model, batch, folder / "model.onnx"), test_batches)


def check(spec: FamilySpec, auto_name: str, part: Part = "model", *, onnx: bool) -> Result:
    """Export a model in both formats.

    Args:
        spec: Family.
        auto_name: Auto class.
        part: Part of the model, see `PARTS`.
        onnx: Whether to export to ONNX.
    """
    model = tiny_model(spec, auto_name)
    differences: list[float | str] = []
    for check_format in (check_program, check_onnx):
        if check_format is check_onnx and not onnx:
            differences.append("not run")
            continue
        with tempfile.TemporaryDirectory() as folder:
            try:
                differences.append(
                    check_format(PARTS[part](model).eval(), *make_batches(model, auto_name, part), Path(folder))
                )
            except Exception as error:
                differences.append(f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:80]}")
    return Result(".".join([type(model).__name__, *([] if part == "model" else [part])]), *differences)


def table(families: Iterable[str], *, onnx: bool) -> Iterator[str]:
    """Yield the lines of a Markdown table."""
    yield "| family | model | torch.export | ONNX |"
    yield "| --- | --- | --- | --- |"
    for family in families:
        spec = FAMILIES[family]
        for auto_name, part in export_cases(spec):
            result = check(spec, auto_name, part, onnx=onnx)
            cells = (value if isinstance(value, str) else f"{value:.1e}" for value in (result.program, result.onnx))
            yield f"| {family} | `{result.model}` | {' | '.join(cells)} |"


def versions() -> str:
    """Versions of the packages."""
    names = ("torch", "transformers", "onnx", "onnxscript", "onnxruntime")
    return ", ".join(f"{name} {version(name)}" for name in names if find_spec(name))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=[*FAMILIES], help="Families to export.")
    parser.add_argument("--no_onnx", action="store_true", help="Skip the export to ONNX.")
    arguments = parser.parse_args()
    for line in table(arguments.families, onnx=not arguments.no_onnx):
        print(line, flush=True)
    print(f"\n{versions()}")


if __name__ == "__main__":
    main()
