r"""Convert released MT-LSTM weights and a file of word vectors to a CoVe encoder and its tokenizer.

python -m hf_ctxmodels.conversion.cove --weights wmtlstm.pth --vectors glove.840B.300d.txt --output runs/cove
"""

from hf_ctxmodels.conversion.word_vector_encoders import VectorConversionArguments, convert
from hf_ctxmodels.core.errors import run_script
from hf_ctxmodels.training.recipe import parse_arguments


def main() -> None:
    """Convert, and print a summary."""
    (arguments,) = parse_arguments(VectorConversionArguments, description=__doc__)
    print(convert(arguments, "cove"))


if __name__ == "__main__":
    run_script(main)
