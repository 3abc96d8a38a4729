r"""Convert released MT-LSTM weights and a file of word vectors to a CoVe encoder and its tokenizer.

python -m hf_ctxmodels.conversion.cove --weights wmtlstm.pth --vectors glove.840B.300d.txt --output runs/cove
"""

from typing import Any

from hf_ctxmodels.conversion.torch_lstm import VectorEncoderConversion
from hf_ctxmodels.core.console import run_script


class CoveConversion(VectorEncoderConversion):
    """Arguments of the conversion."""

    def convert(self) -> tuple[Any, Any, str]:
        """The model, its tokenizer and a description of the source."""
        return self.convert_encoder("cove")


if __name__ == "__main__":
    run_script(lambda: CoveConversion.main(__doc__))
