r"""An adapter of AdapterHub as a pickle (pytorch_adapter.bin) -> a folder with safetensors files, which opens here.

python conversion/adapters.py --adapter AdapterHub/bert-base-multilingual-cased-de-wiki_pfeiffer --output adapters/de

Nothing but tensors is read of a pickle. Heads and fusions beside it are converted too.
"""

from dataclasses import dataclass, field

from hf_ctxmodels.conversion.adapter_pickles import convert_adapter
from hf_ctxmodels.core.errors import run_script
from hf_ctxmodels.training.recipe import parse_arguments


@dataclass
class ConversionArguments:
    """What is converted."""

    adapter: str = field(metadata={"help": "Folder or Hub id with pytorch_adapter.bin."})
    output: str = field(metadata={"help": "Folder for the files of the adapter."})


def main() -> None:
    """Convert, and say what."""
    (arguments,) = parse_arguments(ConversionArguments, description=__doc__)
    print(convert_adapter(arguments.adapter, arguments.output))


if __name__ == "__main__":
    run_script(main)
