r"""Convert released MT-LSTM weights and a file of word vectors to a CoVe encoder and its tokenizer.

python -m hf_ctxmodels.conversion.cove --weights wmtlstm.pth --vectors glove.840B.300d.txt --output runs/cove
"""

from hf_ctxmodels.conversion.released_files import run_conversion
from hf_ctxmodels.conversion.torch_lstm import VectorEncoderArguments, convert_vector_encoder
from hf_ctxmodels.core.console import run_script

if __name__ == "__main__":
    run_script(
        lambda: run_conversion(
            VectorEncoderArguments, lambda arguments: convert_vector_encoder(arguments, "cove"), __doc__
        )
    )
