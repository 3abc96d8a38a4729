r"""Convert released InferSent weights and a file of word vectors to an encoder and its tokenizer.

hf-ctxmodels convert infersent --weights infersent1.pkl --version 1 --vectors glove.840B.300d.txt \
    --output runs/infersent
hf-ctxmodels convert infersent --weights infersent2.pkl --version 2 --vectors crawl-300d-2M.vec \
    --vectors_format word2vec-text --output runs/infersent
"""

from dataclasses import dataclass
from typing import Any

from hf_ctxmodels.conversion.torch_lstm import VectorEncoderConversion
from hf_ctxmodels.core.flags import flag

_SENTENCE_TOKENS = {"1": ("<s>", "</s>"), "2": ("<p>", "</p>")}  # tokens around every sentence, by version


@dataclass(kw_only=True)
class InferSentConversion(VectorEncoderConversion):
    """Arguments of the conversion."""

    version: str = flag("2", "Version of the release.", choices=tuple(_SENTENCE_TOKENS))
    pooling: str = flag("max", "Pooling of the encoder.", choices=("max", "mean"))

    def convert(self) -> tuple[Any, Any, str]:
        """The model, its tokenizer and a description of the source."""
        return self.convert_encoder("infersent", _SENTENCE_TOKENS[self.version], pooling=self.pooling)
