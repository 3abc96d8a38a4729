"""Hidden states of a frozen encoder, computed once and stored on disk (feature-based use; Devlin et al. 2019, section
5.3)."""

import hashlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutput
from transformers.utils import ModelOutput

from hf_ctxmodels.core.console import print_status, progress_bar
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.output_files import wrap_write_errors
from hf_ctxmodels.downstream.finetuning.fisher import weights_digest
from hf_ctxmodels.heads.base import HeadModel
from hf_ctxmodels.heads.seq2seq import Seq2SeqHead

_INDEX_FILE = "index.json"
_SHARD_TOKENS = 1 << 16


class CachedEncoderOutput(BaseModelOutput):
    """Cached hidden states as an encoder's output, or as the decoder's output of an encoder-decoder; all other fields
    of such outputs are None."""

    @property
    def decoder_hidden_states(self) -> tuple[Tensor, ...] | None:
        """`hidden_states`."""
        return self.hidden_states

    def __getattr__(self, name: str) -> None:
        if name.startswith("_"):
            raise AttributeError(name)


class FeatureCache:
    """The hidden states of a frozen encoder, by the content of the input sequence.

    Sequences are encoded one at a time. So the states of a sequence do not depend on its batch, to the last bit, and a
    run that computes the cache equals a run that reads it. An encoder that computes whole batches differs by rounding.

    Args:
        model: A head on a frozen encoder (`freeze_encoder`).
        folder: Folder of a complete cache; None for an empty one.

    Raises:
        CtxError: The cache is damaged.
    """

    def __init__(self, model: HeadModel, folder: Path | None = None) -> None:
        self._encoder = model.base_model
        self._locations: dict[str, list[int]] = {}  # digest -> shard, first token, number of tokens
        self._widths: list[int] = []
        self._shards: list[Any] = []
        self._writer: _CacheWriter | None = None
        if folder is not None:
            self._open(folder)

    def _open(self, folder: Path) -> None:
        try:
            index = json.loads((folder / _INDEX_FILE).read_text(encoding="utf-8"))
            self._locations, self._widths = index["places"], index["widths"]
            files = [safe_open(_shard_path(folder, number), "pt") for number in range(index["shards"])]
            self._shards = [file.get_slice("states") for file in files]  # memory-mapped
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            raise CtxError(
                f"The cached features are damaged: {error}.", location=str(folder), hint="delete this directory."
            ) from error

    def write_to(self, folder: Path) -> "_CacheWriter":
        """A context in which computed states are written to `folder`."""
        self._writer = _CacheWriter(self, folder)
        return self._writer

    @torch.no_grad()
    def __call__(self, all_layers: bool = False, **inputs: Any) -> ModelOutput:
        """An output of the encoder with `hidden_states`.

        Args:
            all_layers: Whether `hidden_states` contains all layers, or only the last one.
            inputs: Arguments of the encoder; tensors are (batch, length, ...).

        Raises:
            CtxError: There are no token ids, the mask is not (batch, length), or there are decoder inputs.
        """
        ids, mask = inputs["input_ids"], inputs.get("attention_mask")
        has_decoder_inputs = any(name.startswith("decoder_") and value is not None for name, value in inputs.items())
        if ids is None or (mask is not None and mask.dim() != 2) or has_decoder_inputs:
            raise CtxError("Features are cached only for token ids with masks of shape (batch, length).")
        is_token = torch.ones(ids.shape[:2], dtype=torch.bool) if mask is None else mask.bool().cpu()
        sequences = [self._encode(inputs, row, columns, all_layers) for row, columns in enumerate(is_token)]
        states = sequences[0].new_zeros(*ids.shape[:2], sequences[0].shape[-1])
        for row, columns in enumerate(is_token):
            states[row, columns] = sequences[row]
        hidden_states = states.to(ids.device).split(self._widths, -1)
        return CachedEncoderOutput(last_hidden_state=hidden_states[-1], hidden_states=hidden_states)

    def _encode(self, inputs: Mapping[str, Any], row: int, columns: Tensor, all_layers: bool) -> Tensor:
        """(tokens, sum of the layers' widths): the states of one sequence, without padding."""
        sequence = {
            name: value[min(row, len(value) - 1), columns.to(value.device)][None]
            if _is_token_wise(value, columns)
            else value
            for name, value in inputs.items()
        }
        digest = _input_digest(sequence)
        if digest in self._locations:
            location = self._locations[digest]
            if self._writer is not None and (states := self._writer.unwritten(location)) is not None:
                return states
            shard, start, length = location
            return self._shards[shard][start : start + length]
        hidden_states = self._encoder(return_dict=True, output_hidden_states=True, **sequence).hidden_states
        hidden_states = hidden_states if all_layers else hidden_states[-1:]
        self._widths = [layer.shape[-1] for layer in hidden_states]
        states = torch.cat([layer[0] for layer in hidden_states], -1).cpu()
        if self._writer is not None:
            self._writer.add(digest, states)
        return states


class _CacheWriter:
    """Writes a cache to a temporary directory, which is renamed when it is complete."""

    def __init__(self, cache: FeatureCache, folder: Path) -> None:
        self._cache, self._folder = cache, folder
        self._temporary = folder.with_name(f".{folder.name}.writing-{os.getpid()}")
        self._unwritten: list[Tensor] = []
        self._num_tokens = self._shard_number = 0

    def __enter__(self) -> None:
        with wrap_write_errors(self._folder):
            self._temporary.mkdir(parents=True)

    def add(self, digest: str, states: Tensor) -> None:
        """Add the states (tokens, widths) of a new sequence."""
        self._cache._locations[digest] = [self._shard_number, self._num_tokens, len(states)]
        self._unwritten.append(states)
        self._num_tokens += len(states)
        if self._num_tokens >= _SHARD_TOKENS:
            self._write_shard()

    def unwritten(self, location: list[int]) -> Tensor | None:
        """The states of a sequence in the unwritten shard; None if its shard is written."""
        shard, start, _ = location
        if shard != self._shard_number:
            return None
        starts = [0]
        for states in self._unwritten:
            starts.append(starts[-1] + len(states))
        return self._unwritten[starts.index(start)]

    def _write_shard(self) -> None:
        path = _shard_path(self._temporary, self._shard_number)
        with wrap_write_errors(self._folder):
            save_file({"states": torch.cat(self._unwritten)}, path)
        self._cache._shards.append(safe_open(path, "pt").get_slice("states"))
        self._unwritten, self._num_tokens = [], 0
        self._shard_number += 1

    def __exit__(self, error_type: Any, *error: Any) -> None:
        cache, cache._writer = self._cache, None
        try:
            if error_type is None:
                if self._unwritten:
                    self._write_shard()
                index = {"places": cache._locations, "widths": cache._widths, "shards": self._shard_number}
                with wrap_write_errors(self._folder):
                    (self._temporary / _INDEX_FILE).write_text(json.dumps(index), encoding="utf-8")
                    self._temporary.rename(self._folder)
        finally:
            shutil.rmtree(self._temporary, ignore_errors=True)


def cache_features(
    model: HeadModel,
    directory: str | Path,
    batches: Sequence[Any],
    identity: Mapping[str, Any],
    *,
    show_progress: bool = True,
) -> None:
    """Let a head read the states of its frozen encoder from disk.

    The cache is first filled with the states of all batches, unless it exists for the same weights, tokenizer and
    examples.

    Args:
        model: A head on a frozen encoder.
        directory: Directory with a folder for each cache.
        batches: All inputs of training and evaluation, one sequence each; their digest is part of the folder's name.
        identity: Further JSON values that determine the inputs, such as the tokenizer's digest.
        show_progress: Whether to print the folder and show a progress bar.

    Raises:
        CtxError: The encoder is not frozen, the head generates text, or the directory cannot be written or read.
    """
    is_generative = isinstance(model, Seq2SeqHead)
    if not isinstance(model, HeadModel) or not model.is_encoder_frozen or is_generative:
        raise CtxError(
            "Features can be cached only for a frozen encoder of this package with a head that does not generate text.",
            location=f"--freeze encoder:cache_features={directory}",
            hint="remove it, or pass --freeze encoder for such a model.",
        )
    encoder_weights = {
        name: weight for name, weight in model.base_model.state_dict().items() if not name.startswith("pooler.")
    }
    content = {
        "weights": weights_digest(encoder_weights),
        "model": type(model).__name__,
        "config": {name: value for name, value in model.config.to_dict().items() if not name.startswith("_")},
        **identity,
        "rows": [_input_digest(batch) for batch in batches],
    }
    digest = hashlib.blake2b(json.dumps(content, sort_keys=True, default=str).encode(), digest_size=16).hexdigest()
    folder = Path(directory) / digest
    if not folder.is_dir():
        cache = model.feature_lookup = FeatureCache(model)
        with cache.write_to(folder), torch.no_grad():
            was_training = model.training
            model.eval()
            for batch in progress_bar(batches, "computing features", unit="batches", enabled=show_progress):
                model(**{name: value.to(model.device) for name, value in batch.items()})
            model.train(was_training)
    model.feature_lookup = FeatureCache(model, folder)
    print_status(f"features of the encoder in {folder}", show_progress)


def _is_token_wise(value: Any, columns: Tensor) -> bool:
    """Whether a value is a tensor with an entry for each token of each sequence."""
    return isinstance(value, Tensor) and value.dim() >= 2 and value.shape[1] == len(columns)


def _input_digest(inputs: Mapping[str, Any]) -> str:
    """A digest of the arguments of the encoder, except the attention mask."""
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(inputs):
        value = inputs[name]
        if name == "attention_mask" or value is None:
            continue
        content = value.cpu().numpy().tobytes() if isinstance(value, Tensor) else repr(value).encode()
        digest.update(name.encode() + b"=" + content + b";")
    return digest.hexdigest()


def _shard_path(folder: Path, number: int) -> Path:
    return folder / f"states-{number:05d}.safetensors"
