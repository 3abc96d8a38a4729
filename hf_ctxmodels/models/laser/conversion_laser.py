"""The released encoder (a dictionary of shape, weights and subwords) and its BPE codes -> model and tokenizer."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from hf_ctxmodels.architectures.fastbpe_files import to_native_subword
from hf_ctxmodels.architectures.torch_lstm_conversion import convert_layers, layer_fields, read_torch_file
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.models.laser.configuration_laser import CtxLaserConfig
from hf_ctxmodels.models.laser.modeling_laser import CtxLaserModel
from hf_ctxmodels.models.laser.tokenization_laser import CtxLaserTokenizer
from hf_ctxmodels.tokenizers.joint_bpe import SPECIAL_TOKENS


def read_encoder(file: str | Path) -> dict[str, Any]:
    """The parts `params`, `model` and `dictionary` of a released file; raises CtxError for other files."""
    found = read_torch_file(file)
    parts = ("params", "model", "dictionary")
    if not isinstance(found, Mapping) or not all(isinstance(found.get(part), Mapping) for part in parts):
        raise CtxError(
            f"The file is no LASER encoder: it lacks some of {', '.join(parts)}.",
            location=str(file),
            hint="give the released file.",
        )
    return dict(found)


def build_vocabulary(dictionary: Mapping[str, int], merges: Sequence[tuple[str, str]]) -> dict[str, int]:
    """The dictionary's subwords under the tokenizer's names, followed by subwords that occur only in merges.

    Raises:
        CtxError: The dictionary lacks a special token, or its numbers are not 0, 1, 2, ...
    """
    if missing := [token for token in SPECIAL_TOKENS if token not in dictionary]:
        raise CtxError(f"The dictionary lacks {', '.join(missing)}.")
    vocab = {
        token if token in SPECIAL_TOKENS else to_native_subword(token): int(number)
        for token, number in dictionary.items()
    }
    if sorted(vocab.values()) != list(range(len(dictionary))):
        raise CtxError("The dictionary's numbers are not 0, 1, 2, ..., one for each subword.")
    for first, second in merges:
        for part in (first, second, first + second):
            vocab.setdefault(part, len(vocab))
    return vocab


def build_laser(
    encoder: Mapping[str, Any], merges: Sequence[tuple[str, str]], location: str | None = None
) -> tuple[CtxLaserModel, CtxLaserTokenizer]:
    """The model and its tokenizer, for lower-cased text split into words.

    Subwords that occur only in merges have the vector of unknown subwords.

    Args:
        encoder: From `read_encoder`.
        merges: From `read_codes`.
        location: The file, for errors.

    Raises:
        CtxError: The parts do not match.
    """
    weights = {name: value for name, value in encoder["model"].items() if name != "embed_tokens.weight"}
    table = encoder["model"].get("embed_tokens.weight")
    layers = convert_layers({name.removeprefix("lstm."): value for name, value in weights.items()}, location)
    vocab = build_vocabulary(encoder["dictionary"], merges)
    known, shape = len(encoder["dictionary"]), layer_fields(layers)
    if table is None or tuple(table.shape) != (known, shape["embedding_size"]):
        raise CtxError(
            f"The embeddings are {None if table is None else tuple(table.shape)}, expected "
            f"{(known, shape['embedding_size'])}: one row per subword of the dictionary.",
            location=location,
        )
    numbers = {name: encoder["dictionary"][token] for name, token in zip(("start", "pad", "end"), SPECIAL_TOKENS)}
    config = CtxLaserConfig(
        vocab_size=len(vocab),
        target_vocab_size=len(vocab),
        decoder_start_token_id=numbers["start"],
        pad_token_id=numbers["pad"],
        eos_token_id=numbers["end"],
        **shape,
    )
    unknown = table[encoder["dictionary"]["<unk>"]].expand(len(vocab) - known, -1)
    model = CtxLaserModel(config)
    model.load_state_dict({**layers, "embeddings.weight": torch.cat([table, unknown]).float()})
    return model.eval(), CtxLaserTokenizer(vocab=vocab, merges=list(merges), split_punctuation=False)
