r"""Convert released InferSent weights and a file of word vectors to an encoder and its tokenizer.

python -m hf_ctxmodels.conversion.infersent --weights infersent1.pkl --version 1 --vectors glove.840B.300d.txt \
    --output runs/infersent
python -m hf_ctxmodels.conversion.infersent --weights infersent2.pkl --version 2 --vectors crawl-300d-2M.vec \
    --vectors_format word2vec-text --output runs/infersent
"""

from dataclasses import dataclass, field

from hf_ctxmodels.conversion.word_vector_encoders import VectorConversionArguments, convert
from hf_ctxmodels.core.errors import run_script
from hf_ctxmodels.training.recipe import parse_arguments

_SENTENCE_TOKENS = {"1": ("<s>", "</s>"), "2": ("<p>", "</p>")}  # tokens around every sentence, by version


@dataclass
class ConversionArguments(VectorConversionArguments):
    """Arguments of the conversion."""

    version: str = field(default="2", metadata={"help": "Version of the release.", "choices": list(_SENTENCE_TOKENS)})
    pooling: str = field(default="max", metadata={"help": "Pooling of the encoder.", "choices": ["max", "mean"]})


def main() -> None:
    """Convert, and print a summary."""
    (arguments,) = parse_arguments(ConversionArguments, description=__doc__)
    begin, end = _SENTENCE_TOKENS[arguments.version]
    print(convert(arguments, "infersent", pooling=arguments.pooling, bos_token=begin, eos_token=end))


if __name__ == "__main__":
    run_script(main)
