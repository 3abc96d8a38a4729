r"""Convert a released LASER encoder to a model and its tokenizer: LASER1 with its BPE codes, or LASER2 with its
SentencePiece model.

The tokenizer of LASER1 splits words by the English Moses rules (package sacremoses); set `tokenizer.moses_language` for
another language, or to None for text that is already split into words. The file laser2.cvocab is not needed: the
encoder contains its dictionary.

hf-ctxmodels convert laser --encoder bilstm.93langs.2018-12-26.pt --codes 93langs.fcodes \
    --output runs/laser
hf-ctxmodels convert laser --encoder laser2.pt --sentencepiece laser2.spm --output runs/laser2
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_ctxmodels.conversion.released_files import Conversion, read_codes, read_torch_file
from hf_ctxmodels.conversion.torch_lstm import convert_layers
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import REQUIRED, flag
from hf_ctxmodels.models.laser.configuration_laser import CtxLaserConfig
from hf_ctxmodels.models.laser.modeling_laser import CtxLaserModel
from hf_ctxmodels.models.laser.released_text import FastBPE, SentencePieces
from hf_ctxmodels.models.laser.tokenization_laser import CtxLaserTokenizer
from hf_ctxmodels.tokenizers.bpe import JOINT_SPECIAL_TOKENS


def read_encoder(file: str | Path) -> dict[str, Any]:
    """Load `params`, `model` and `dictionary` from a released file; raises CtxError for other files."""
    content = read_torch_file(file)
    keys = ("params", "model", "dictionary")
    if not isinstance(content, Mapping) or not all(isinstance(content.get(key), Mapping) for key in keys):
        message = f"The file is not a LASER encoder: it lacks some of {', '.join(keys)}."
        raise CtxError(message, location=str(file), hint="use the released file.")
    return dict(content)


def build_laser(
    encoder: Mapping[str, Any],
    merges: Sequence[tuple[str, str]] = (),
    location: str | None = None,
    *,
    sentencepiece: str | Path | None = None,
) -> tuple[CtxLaserModel, CtxLaserTokenizer]:
    """Create the model and its tokenizer from the content of `read_encoder`, and the merges of `read_codes` (LASER1) or
    the SentencePiece model (LASER2). Token ids are the released ones.

    Raises:
        CtxError: The embeddings do not match the dictionary, or the SentencePiece model cannot be read.
    """
    weights = {name.removeprefix("lstm."): value for name, value in encoder["model"].items()}
    embeddings = weights.pop("embed_tokens.weight", None)
    layers, sizes = convert_layers(weights, location)
    dictionary = {token: int(number) for token, number in encoder["dictionary"].items()}
    if missing := [token for token in JOINT_SPECIAL_TOKENS if token not in dictionary]:
        raise CtxError(f"The dictionary lacks {', '.join(missing)}.", location=location)
    if sorted(dictionary.values()) != list(range(len(dictionary))):
        raise CtxError("The ids of the dictionary are not 0, 1, 2, ...", location=location)
    expected_shape = (len(dictionary), sizes["embedding_size"])
    if embeddings is None or tuple(embeddings.shape) != expected_shape:
        raise CtxError(
            f"The embeddings are {None if embeddings is None else tuple(embeddings.shape)}, expected {expected_shape}: "
            "one row per token of the dictionary.",
            location=location,
        )
    start, pad, end, _ = (dictionary[token] for token in JOINT_SPECIAL_TOKENS)
    token_ids = {"decoder_start_token_id": start, "pad_token_id": pad, "eos_token_id": end}
    config = CtxLaserConfig(vocab_size=len(dictionary), target_vocab_size=len(dictionary), **token_ids, **sizes)
    model = CtxLaserModel(config)
    model.load_state_dict({**layers, "embeddings.weight": embeddings.float()})
    if sentencepiece is not None:
        tokenizer = CtxLaserTokenizer(vocab=dictionary, subwords=SentencePieces(sentencepiece))
    else:
        subwords = FastBPE(merges, dictionary)
        tokenizer = CtxLaserTokenizer(vocab=dictionary, subwords=subwords, moses_language="en")
    return model.eval(), tokenizer


@dataclass(kw_only=True)
class LaserConversion(Conversion):
    """Arguments of the conversion."""

    encoder: str = flag(REQUIRED, "Released encoder.")
    codes: str | None = flag(None, "LASER1: BPE codes, two tokens and a count per line.")
    sentencepiece: str | None = flag(None, "LASER2: SentencePiece model.", conflicts=("codes",))

    def convert(self) -> tuple[CtxLaserModel, CtxLaserTokenizer, str]:
        """The model, its tokenizer and the file of the weights."""
        if self.codes is None and self.sentencepiece is None:
            raise CtxError(
                "Expected one of --codes (LASER1) and --sentencepiece (LASER2).",
                location=self.encoder,
                hint="pass the file of the encoder's release.",
            )
        encoder = read_encoder(self.encoder)
        merges = [] if self.codes is None else read_codes(self.codes)
        return *build_laser(encoder, merges, self.encoder, sentencepiece=self.sentencepiece), self.encoder
