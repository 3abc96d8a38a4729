r"""A released LASER encoder and its BPE codes -> a LASER and its tokenizer, for text that Moses' scripts have split.

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
    """What is converted."""

    encoder: str = field(metadata={"help": "The encoder as it was released."})
    codes: str = field(metadata={"help": "Its BPE codes: two subwords and a count a line."})
    output: str = field(metadata={"help": "Directory for the model and its tokenizer."})
    overwrite: bool = flag(False, "Replace the model that --output holds.")


def main() -> None:
    """Convert, and say what."""
    (arguments,) = parse_arguments(ConversionArguments, description=__doc__)
    check_output_free(arguments.output, arguments.overwrite)
    parts = build_laser(read_encoder(arguments.encoder), read_codes(arguments.codes), arguments.encoder)
    save_converted_model(*parts, arguments.output)
    number = sum(parameter.numel() for parameter in parts[0].layers.parameters())
    print(f"{number:,} parameters on {len(parts[1]):,} subwords: {arguments.encoder} -> {arguments.output}")


if __name__ == "__main__":
    run_script(main)
