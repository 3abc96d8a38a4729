r"""Convert a released LASER encoder and its BPE codes to a model and its tokenizer.

The tokenizer splits words by the English Moses rules (package sacremoses); set `tokenizer.moses_language` for another
language, or to None for text that is already split into words.

hf-ctxmodels convert laser --encoder bilstm.93langs.2018-12-26.pt --codes 93langs.fcodes \
    --output runs/laser
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hf_ctxmodels.conversion.released_files import Conversion, read_codes, read_torch_file, to_native_subword
from hf_ctxmodels.conversion.torch_lstm import convert_layers
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import REQUIRED, flag
from hf_ctxmodels.models.laser.configuration_laser import CtxLaserConfig
from hf_ctxmodels.models.laser.modeling_laser import CtxLaserModel
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
    encoder: Mapping[str, Any], merges: Sequence[tuple[str, str]], location: str | None = None
) -> tuple[CtxLaserModel, CtxLaserTokenizer]:
    """Create the model and its tokenizer from the content of `read_encoder` and the merges of `read_codes`. Tokens that
    occur only in merges have the embedding of unknown tokens.

    Raises:
        CtxError: Weights, dictionary and merges do not match.
    """
    weights = {name.removeprefix("lstm."): value for name, value in encoder["model"].items()}
    embeddings = weights.pop("embed_tokens.weight", None)
    layers, sizes = convert_layers(weights, location)
    dictionary: Mapping[str, int] = encoder["dictionary"]
    if missing := [token for token in JOINT_SPECIAL_TOKENS if token not in dictionary]:
        raise CtxError(f"The dictionary lacks {', '.join(missing)}.", location=location)
    vocab = {
        token if token in JOINT_SPECIAL_TOKENS else to_native_subword(token): int(number)
        for token, number in dictionary.items()
    }
    if sorted(vocab.values()) != list(range(len(dictionary))):
        raise CtxError("The ids of the dictionary are not 0, 1, 2, ...", location=location)
    for first, second in merges:
        for token in (first, second, first + second):
            vocab.setdefault(token, len(vocab))
    expected_shape = (len(dictionary), sizes["embedding_size"])
    if embeddings is None or tuple(embeddings.shape) != expected_shape:
        raise CtxError(
            f"The embeddings are {None if embeddings is None else tuple(embeddings.shape)}, expected {expected_shape}: "
            "one row per token of the dictionary.",
            location=location,
        )
    start, pad, end, unknown = (dictionary[token] for token in JOINT_SPECIAL_TOKENS)
    token_ids = {"decoder_start_token_id": start, "pad_token_id": pad, "eos_token_id": end}
    config = CtxLaserConfig(vocab_size=len(vocab), target_vocab_size=len(vocab), **token_ids, **sizes)
    added_embeddings = embeddings[unknown].expand(len(vocab) - len(embeddings), -1)
    model = CtxLaserModel(config)
    model.load_state_dict({**layers, "embeddings.weight": torch.cat([embeddings, added_embeddings]).float()})
    tokenizer = CtxLaserTokenizer(vocab=vocab, merges=list(merges), split_punctuation=False, moses_language="en")
    return model.eval(), tokenizer


@dataclass(kw_only=True)
class LaserConversion(Conversion):
    """Arguments of the conversion."""

    encoder: str = flag(REQUIRED, "Released encoder.")
    codes: str = flag(REQUIRED, "BPE codes: two tokens and a count per line.")

    def convert(self) -> tuple[CtxLaserModel, CtxLaserTokenizer, str]:
        """The model, its tokenizer and the file of the weights."""
        return *build_laser(read_encoder(self.encoder), read_codes(self.codes), self.encoder), self.encoder
