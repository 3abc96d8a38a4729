r"""Measure forgetting in fine-tuning: the pretraining loss of the fine-tuned encoder, and the distance of its weights.

    hf-ctxmodels evaluate forgetting --pretrained runs/bert --finetuned runs/sst2 --text held_out.txt

The objective, its options and the maximum length are read from the pretrained checkpoint.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_ctxmodels.core.flags import flag
from hf_ctxmodels.core.output_files import check_output_file, wrap_write_errors
from hf_ctxmodels.downstream.finetuning.forgetting import PretrainingEvaluation, measure_forgetting
from hf_ctxmodels.training.recipe import parse_arguments


@dataclass
class ForgettingArguments:
    """Checkpoints and text."""

    pretrained: str = field(metadata={"help": "Pretrained checkpoint with its head: directory or Hub id."})
    finetuned: str = field(metadata={"help": "Checkpoint fine-tuned from it: directory or Hub id."})
    text: list[str] = field(metadata={"help": "Documents, as --dataset of pretrain, preferably unseen."})
    validation_fraction: float | None = flag(
        None, "Use only the validation documents of pretrain with this fraction and the same files."
    )
    max_length: int | None = flag(None, "Maximum length in tokens; by default the length of pretraining.")
    batch_size: int = flag(32, "Examples per batch.")
    output_file: str | None = flag(None, "JSON file for the results.")
    overwrite: bool = flag(False, "Replace --output_file.")


def table(results: dict[str, Any]) -> str:
    """Format the losses before and after fine-tuning, and the distance of each part of the encoder."""
    lines = [f"{results['objective']}, {results['rows']} examples", f"{'metric':<28}{'before':>12}{'after':>12}"]
    for name, value in results["before"].items():
        lines.append(f"{name.removeprefix('eval_'):<28}{value:>12.4f}{results['after'][name]:>12.4f}")
    lines.append(f"{'weights':<28}{'distance':>12}{'relative':>12}")
    for module, distance in results["distances"].items():
        lines.append(f"{module:<28}{distance['distance']:>12.4f}{distance['relative']:>12.4f}")
    return "\n".join(lines)


def main() -> None:
    """Measure and print the forgetting."""
    (arguments,) = parse_arguments(ForgettingArguments, description=__doc__)
    if arguments.output_file is not None:
        check_output_file(arguments.output_file, flag="--output_file", overwrite=arguments.overwrite)
    evaluation = PretrainingEvaluation.open(
        arguments.pretrained,
        *arguments.text,
        max_length=arguments.max_length,
        held_out=arguments.validation_fraction,
    )
    results = measure_forgetting(evaluation, arguments.finetuned, arguments.batch_size)
    if arguments.output_file is not None:
        path = Path(arguments.output_file)
        with wrap_write_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    print(table(results))
