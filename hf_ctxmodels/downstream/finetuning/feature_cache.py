"""States of a frozen encoder that are computed once and kept on disk (feature-based use; Devlin et al. 2019, section
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
from hf_ctxmodels.heads.seq2seq import ForConditionalGeneration

_INDEX = "index.json"
_SHARD_TOKENS = 1 << 16


class CachedEncoderOutput(BaseModelOutput):
    """States in place of an encoder's output, of an encoder-decoder those of the decoder; what else such an output may
    have is None."""

    @property
    def decoder_hidden_states(self) -> tuple[Tensor, ...] | None:
        """`hidden_states`."""
        return self.hidden_states

    def __getattr__(self, name: str) -> None:
        if name.startswith("_"):
            raise AttributeError(name)


class FeatureCache:
    """The states of a frozen encoder for rows of tokens, by what the rows hold.

    Rows are computed one at a time. So the states of a row do not depend on its batch, to the last bit, and a run that
    computes them has those of a run that finds them. An encoder that computes whole batches differs in rounding.

    Args:
        model: A head on a frozen encoder (`freeze_encoder`).
        folder: Of a finished cache; None for none.

    Raises:
        CtxError: The cache is damaged.
    """

    def __init__(self, model: HeadModel, folder: Path | None = None) -> None:
        self._encoder = model.base_model
        self._places: dict[str, list[int]] = {}
        self._widths: list[int] = []
        self._shards: list[Any] = []
        self._recorder: _Recorder | None = None
        if folder is not None:
            self._open(folder)

    def _open(self, folder: Path) -> None:
        try:
            index = json.loads((folder / _INDEX).read_text(encoding="utf-8"))
            self._places, self._widths, number = index["places"], index["widths"], index["shards"]
            files = [safe_open(_shard(folder, each), "pt") for each in range(number)]  # memory-mapped
            self._shards = [each.get_slice("states") for each in files]
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            raise CtxError(
                f"The kept features are damaged: {error}.", location=str(folder), hint="delete this directory."
            ) from error

    def record(self, folder: Path) -> "_Recorder":
        """Within the context that is returned, what is computed is written; see `_Recorder`."""
        self._recorder = _Recorder(self, folder)
        return self._recorder

    @torch.no_grad()
    def __call__(self, every_layer: bool = False, **inputs: Any) -> ModelOutput:
        """An output of the encoder with `hidden_states`.

        Args:
            every_layer: Whether they are those of all layers, or of the last one.
            inputs: The encoder's; tensors are (rows, length, ...).

        Raises:
            CtxError: There are no token ids, the mask is a ready one, or the decoder has an input of its own.
        """
        ids, mask = inputs["input_ids"], inputs.get("attention_mask")
        written = [name for name, value in inputs.items() if name.startswith("decoder_") and value is not None]
        if ids is None or (mask is not None and mask.dim() != 2) or written:
            raise CtxError("Features are kept for rows of token ids, and masks (rows, length), alone.")
        tokens = torch.ones(ids.shape[:2], dtype=torch.bool) if mask is None else mask.bool().cpu()
        found = [self._row(inputs, row, columns, every_layer) for row, columns in enumerate(tokens)]
        states = found[0].new_zeros(*ids.shape[:2], found[0].shape[-1])
        for row, columns in enumerate(tokens):
            states[row, columns] = found[row]
        hidden = states.to(ids.device).split(self._widths, -1)
        return CachedEncoderOutput(last_hidden_state=hidden[-1], hidden_states=hidden)

    def _row(self, inputs: Mapping[str, Any], row: int, columns: Tensor, every_layer: bool) -> Tensor:
        """(tokens, widths of the layers) of one row, without its padding."""
        own = {
            name: value[min(row, len(value) - 1), columns.to(value.device)][None]
            if _is_row_wise(value, columns)
            else value
            for name, value in inputs.items()
        }
        key = _key(own)
        if key in self._places:
            shard, start, length = self._places[key]
            if self._recorder is not None and (states := self._recorder.waiting(self._places[key])) is not None:
                return states
            return self._shards[shard][start : start + length]
        hidden = self._encoder(return_dict=True, output_hidden_states=True, **own).hidden_states
        hidden = hidden if every_layer else hidden[-1:]
        self._widths = [each.shape[-1] for each in hidden]
        states = torch.cat([each[0] for each in hidden], -1).cpu()
        if self._recorder is not None:
            self._recorder.add(key, states)
        return states


class _Recorder:
    """A cache while it is written: into a directory of a temporary name, which gets its own when it is whole."""

    def __init__(self, states: FeatureCache, folder: Path) -> None:
        self._states, self._folder = states, folder
        self._temporary = folder.with_name(f".{folder.name}.writing-{os.getpid()}")
        self._waiting: list[Tensor] = []
        self._tokens = self._number = 0

    def __enter__(self) -> None:
        with wrap_write_errors(self._folder):
            self._temporary.mkdir(parents=True)

    def add(self, key: str, states: Tensor) -> None:
        """Keep the states (tokens, widths) of a row that was not there."""
        self._states._places[key] = [self._number, self._tokens, len(states)]
        self._waiting.append(states)
        self._tokens += len(states)
        if self._tokens >= _SHARD_TOKENS:
            self._write()

    def waiting(self, place: list[int]) -> Tensor | None:
        """The states of a row that are not yet written."""
        number, start, _ = place
        if number != self._number:
            return None
        starts = [0]
        for row in self._waiting:
            starts.append(starts[-1] + len(row))
        return self._waiting[starts.index(start)]

    def _write(self) -> None:
        path = _shard(self._temporary, self._number)
        with wrap_write_errors(self._folder):
            save_file({"states": torch.cat(self._waiting)}, path)
        self._states._shards.append(safe_open(path, "pt").get_slice("states"))
        self._waiting, self._tokens = [], 0
        self._number += 1

    def __exit__(self, kind: Any, *error: Any) -> None:
        states, states._recorder = self._states, None
        try:
            if kind is None:
                if self._waiting:
                    self._write()
                index = {"places": states._places, "widths": states._widths, "shards": self._number}
                with wrap_write_errors(self._folder):
                    (self._temporary / _INDEX).write_text(json.dumps(index), encoding="utf-8")
                    self._temporary.rename(self._folder)
        finally:
            shutil.rmtree(self._temporary, ignore_errors=True)


def cache_features(
    model: HeadModel, directory: str | Path, batches: Sequence[Any], identity: Mapping[str, Any], *, shown: bool = True
) -> None:
    """Let a head read the states of its frozen encoder from a directory, which is filled with those of all batches
    first, unless a run with the same weights, tokenizer and examples did so.

    Args:
        model: A head on a frozen encoder.
        directory: Where caches lie, each in a directory of its own.
        batches: All inputs of training and evaluation, whose digest is part of the cache's name.
        identity: What else decides the rows, as JSON values: the tokenizer's digest.
        shown: Whether to say so.

    Raises:
        CtxError: The encoder is not frozen, or the directory cannot be written or read.
    """
    writes = isinstance(model, ForConditionalGeneration)
    if not isinstance(model, HeadModel) or not model.is_encoder_frozen or writes:
        raise CtxError(
            "Features are those of a frozen encoder of this package, for a head that does not write text.",
            location=f"--freeze encoder:cache_features={directory}",
            hint="leave it out, or give --freeze encoder where there is such an encoder.",
        )
    encoder = {name: each for name, each in model.base_model.state_dict().items() if not name.startswith("pooler.")}
    decided = {
        "weights": weights_digest(encoder),
        "model": type(model).__name__,
        "config": {name: value for name, value in model.config.to_dict().items() if not name.startswith("_")},
        **identity,
        "rows": [_key(batch) for batch in batches],
    }
    name = hashlib.blake2b(json.dumps(decided, sort_keys=True, default=str).encode(), digest_size=16).hexdigest()
    folder = Path(directory) / name
    if not folder.is_dir():
        states = model.feature_lookup = FeatureCache(model)
        with states.record(folder), torch.no_grad():
            training = model.training
            model.eval()
            for batch in progress_bar(batches, "computing features", unit="batches", enabled=shown):
                model(**{key: value.to(model.device) for key, value in batch.items()})
            model.train(training)
    model.feature_lookup = FeatureCache(model, folder)
    print_status(f"features of the encoder in {folder}", shown)


def _is_row_wise(value: Any, columns: Tensor) -> bool:
    """Whether a value has an entry for each token of each row."""
    return isinstance(value, Tensor) and value.dim() >= 2 and value.shape[1] == len(columns)


def _key(inputs: Mapping[str, Any]) -> str:
    """A digest of a row's inputs."""
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(inputs):
        value = inputs[name]
        if name == "attention_mask" or value is None:
            continue
        given = value.cpu().numpy().tobytes() if isinstance(value, Tensor) else repr(value).encode()
        digest.update(name.encode() + b"=" + given + b";")
    return digest.hexdigest()


def _shard(folder: Path, number: int) -> Path:
    return folder / f"states-{number:05d}.safetensors"
