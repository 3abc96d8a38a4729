r"""Convert released InferSent weights and a file of word vectors to an encoder and its tokenizer.

python -m hf_ctxmodels.conversion.infersent --weights infersent1.pkl --version 1 --vectors glove.840B.300d.txt \
    --output runs/infersent
python -m hf_ctxmodels.conversion.infersent --weights infersent2.pkl --version 2 --vectors crawl-300d-2M.vec \
    --vectors_format word2vec-text --output runs/infersent
"""

from dataclasses import dataclass
from typing import Any

from hf_ctxmodels.conversion.released_files import run_conversion
from hf_ctxmodels.conversion.torch_lstm import VectorEncoderArguments, convert_vector_encoder
from hf_ctxmodels.core.console import run_script
from hf_ctxmodels.core.flags import flag

_SENTENCE_TOKENS = {"1": ("<s>", "</s>"), "2": ("<p>", "</p>")}  # tokens around every sentence, by version


@dataclass(kw_only=True)
class ConversionArguments(VectorEncoderArguments):
    """Arguments of the conversion."""

    version: str = flag("2", "Version of the release.", choices=_SENTENCE_TOKENS)
    pooling: str = flag("max", "Pooling of the encoder.", choices=("max", "mean"))


def convert(arguments: ConversionArguments) -> tuple[Any, Any, str]:
    """The model, its tokenizer and a description of the source."""
    begin, end = _SENTENCE_TOKENS[arguments.version]
    return convert_vector_encoder(arguments, "infersent", pooling=arguments.pooling, bos_token=begin, eos_token=end)


if __name__ == "__main__":
    run_script(lambda: run_conversion(ConversionArguments, convert, __doc__))
