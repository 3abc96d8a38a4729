r"""Released InferSent weights and a file of word vectors -> an InferSent encoder and its tokenizer.

python conversion/infersent.py --weights infersent1.pkl --version 1 --vectors glove.840B.300d.txt \
    --output runs/infersent
python conversion/infersent.py --weights infersent2.pkl --version 2 --vectors crawl-300d-2M.vec --read word2vec-text \
    --output runs/infersent
"""

from dataclasses import dataclass, field

from hf_ctxmodels.conversion.word_vector_encoders import VectorConversionArguments, convert
from hf_ctxmodels.core.errors import run_script
from hf_ctxmodels.training.recipe import parse_arguments

_MARKS = {"1": ("<s>", "</s>"), "2": ("<p>", "</p>")}  # words around every sentence, where there are vectors of them


@dataclass
class ConversionArguments(VectorConversionArguments):
    """What is converted."""

    version: str = field(default="2", metadata={"help": "Of the release.", "choices": list(_MARKS)})
    pooling: str = field(default="max", metadata={"help": "What it was trained with.", "choices": ["max", "mean"]})


def main() -> None:
    """Convert, and say what."""
    (arguments,) = parse_arguments(ConversionArguments, description=__doc__)
    begin, end = _MARKS[arguments.version]
    print(convert(arguments, "infersent", pooling=arguments.pooling, bos_token=begin, eos_token=end))


if __name__ == "__main__":
    run_script(main)
