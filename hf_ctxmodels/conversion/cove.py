r"""Convert released MT-LSTM weights and a file of word vectors to a CoVe encoder and its tokenizer.

hf-ctxmodels convert cove --weights wmtlstm.pth --vectors glove.840B.300d.txt --output runs/cove
"""

from typing import Any

from hf_ctxmodels.conversion.torch_lstm import VectorEncoderConversion


class CoveConversion(VectorEncoderConversion):
    """Arguments of the conversion."""

    def convert(self) -> tuple[Any, Any, str]:
        """The model, its tokenizer and a description of the source."""
        return self.convert_encoder("cove")
