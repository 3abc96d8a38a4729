r"""Convert the released parameters of GPT (.npy files) and its vocabulary to a model and its tokenizer.

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
    """Arguments of the conversion."""

    folder: str = field(
        metadata={"help": "Folder with params_shapes.json, params_0.npy, ..., encoder_bpe_40000.json, vocab_40000.bpe."}
    )
    output: str = field(metadata={"help": "Directory for the model and its tokenizer."})
    vocabulary: str | None = flag(None, "Vocabulary; by default encoder_bpe_40000.json in --folder.")
    merges: str | None = flag(None, "Merges; by default vocab_40000.bpe in --folder.")
    positions: int = flag(512, "Number of positions at the end of a joint embedding matrix.")
    heads: int | None = flag(None, "Number of attention heads; by default the width divided by 64.")
    overwrite: bool = flag(False, "Replace an existing model in --output.")


def main() -> None:
    """Convert, and print a summary."""
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
