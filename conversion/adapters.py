r"""Convert an AdapterHub adapter with pickled weights (pytorch_adapter.bin) to safetensors.

python conversion/adapters.py --adapter AdapterHub/bert-base-multilingual-cased-de-wiki_pfeiffer --output adapters/de

Only tensors are loaded from pickles. Heads and fusions in the same folder are converted too.
"""

from dataclasses import dataclass, field

from hf_ctxmodels.conversion.adapter_pickles import convert_adapter
from hf_ctxmodels.core.errors import run_script
from hf_ctxmodels.training.recipe import parse_arguments


@dataclass
class ConversionArguments:
    """Arguments of the conversion."""

    adapter: str = field(metadata={"help": "Folder or Hub id with pytorch_adapter.bin."})
    output: str = field(metadata={"help": "Folder for the converted adapter."})


def main() -> None:
    """Convert, and print a summary."""
    (arguments,) = parse_arguments(ConversionArguments, description=__doc__)
    print(convert_adapter(arguments.adapter, arguments.output))


if __name__ == "__main__":
    run_script(main)
