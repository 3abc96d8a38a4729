r"""The published parameters of GPT (.npy files) and its vocabulary -> a model and its tokenizer.

python conversion/gpt.py --folder finetune-transformer-lm/model --output runs/gpt
"""

from dataclasses import dataclass, field
from pathlib import Path

from hf_ctxmodels.conversion.saving import check_output_free, save_converted_model
from hf_ctxmodels.core.errors import run_script
from hf_ctxmodels.core.flags import flag
from hf_ctxmodels.models.gpt.openai_checkpoint import read_openai_checkpoint
from hf_ctxmodels.training.recipe import parse_arguments


@dataclass
class ConversionArguments:
    """What is converted."""

    folder: str = field(
        metadata={"help": "Folder with params_shapes.json, params_0.npy, ..., encoder_bpe_40000.json, vocab_40000.bpe."}
    )
    output: str = field(metadata={"help": "Directory for the model and its tokenizer."})
    vocabulary: str | None = flag(None, "The vocabulary, if it is not encoder_bpe_40000.json in --folder.")
    merges: str | None = flag(None, "The merges, if they are not vocab_40000.bpe in --folder.")
    positions: int = flag(512, "Position rows at the end of the table, for parameters with one table.")
    heads: int | None = flag(None, "Attention heads, if they are not of width 64.")
    overwrite: bool = flag(False, "Replace the model that --output holds.")


def main() -> None:
    """Convert, and say what."""
    (arguments,) = parse_arguments(ConversionArguments, description=__doc__)
    check_output_free(arguments.output, arguments.overwrite)
    folder = Path(arguments.folder)
    model, tokenizer = read_openai_checkpoint(
        folder,
        arguments.vocabulary or folder / "encoder_bpe_40000.json",
        arguments.merges or folder / "vocab_40000.bpe",
        positions=arguments.positions,
        heads=arguments.heads,
    )
    save_converted_model(model, tokenizer, arguments.output)
    print(f"{model.num_parameters():,} parameters, {len(tokenizer):,} tokens: {folder} -> {arguments.output}")


if __name__ == "__main__":
    run_script(main)
