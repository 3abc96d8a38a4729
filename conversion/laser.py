r"""Convert a released LASER encoder and its BPE codes to a model and its tokenizer, for text tokenized by Moses.

python conversion/laser.py --encoder bilstm.93langs.2018-12-26.pt --codes 93langs.fcodes --output runs/laser
"""

from dataclasses import dataclass, field

from hf_ctxmodels.architectures.fastbpe_files import read_codes
from hf_ctxmodels.conversion.saving import check_output_free, save_converted_model
from hf_ctxmodels.core.errors import run_script
from hf_ctxmodels.core.flags import flag
from hf_ctxmodels.models.laser.conversion_laser import build_laser, read_encoder
from hf_ctxmodels.training.recipe import parse_arguments


@dataclass
class ConversionArguments:
    """Arguments of the conversion."""

    encoder: str = field(metadata={"help": "Released encoder."})
    codes: str = field(metadata={"help": "BPE codes: two tokens and a count per line."})
    output: str = field(metadata={"help": "Directory for the model and its tokenizer."})
    overwrite: bool = flag(False, "Replace an existing model in --output.")


def main() -> None:
    """Convert, and print a summary."""
    (arguments,) = parse_arguments(ConversionArguments, description=__doc__)
    check_output_free(arguments.output, arguments.overwrite)
    model, tokenizer = build_laser(read_encoder(arguments.encoder), read_codes(arguments.codes), arguments.encoder)
    save_converted_model(model, tokenizer, arguments.output)
    number = sum(parameter.numel() for parameter in model.layers.parameters())
    print(f"{number:,} parameters on {len(tokenizer):,} tokens: {arguments.encoder} -> {arguments.output}")


if __name__ == "__main__":
    run_script(main)
