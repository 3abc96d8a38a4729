"""Hidden states of a frozen encoder, computed once and stored on disk (Devlin et al. 2019, section 5.3)."""

import hashlib
import json
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutput
from transformers.utils import ModelOutput

from hf_ctxmodels.core.console import print_status, progress_bar
from hf_ctxmodels.core.errors import CtxError, wrap_errors
from hf_ctxmodels.core.host_copies import CollatedBatch
from hf_ctxmodels.core.model import evaluation_mode
from hf_ctxmodels.core.output_files import wrap_write_errors, write_tensors
from hf_ctxmodels.core.weights import weights_digest
from hf_ctxmodels.heads.base import HeadModel
from hf_ctxmodels.heads.seq2seq import Seq2SeqHead

_INDEX_FILE = "index.json"
_SHARD_TOKENS = 1 << 16


class CachedEncoderOutput(BaseModelOutput):
    """Cached hidden states of an encoder, or of the decoder of an encoder-decoder; other fields are None."""

    @property
    def decoder_hidden_states(self) -> tuple[Tensor, ...] | None:
        """`hidden_states`."""
        return self.hidden_states

    def __getattr__(self, name: str) -> None:
        if name.startswith("_"):
            raise AttributeError(name)


class FeatureCache:
    """The hidden states of a frozen encoder, by the content of the input sequence.

    Sequences are encoded one at a time, so that their states do not depend on the batch, to the last bit.

    Args:
        model: A head on a frozen encoder (`freeze_encoder`).
        folder: Folder of a complete cache; None for an empty one.
    """

    def __init__(self, model: HeadModel, folder: Path | None = None) -> None:
        self._encoder = model.base_model
        self._locations: dict[str, list[int]] = {}  # digest -> shard, first token, number of tokens
        self._widths: list[int] = []
        self._shards: list[Any] = []
        self._temporary: Path | None = None  # folder that computed states are written to
        self._unwritten: dict[str, Tensor] = {}  # digest -> states of the next shard
        self._num_unwritten_tokens = 0
        if folder is None:
            return
        with wrap_errors("The cached features are damaged", location=str(folder), hint="delete this directory."):
            index = json.loads((folder / _INDEX_FILE).read_text(encoding="utf-8"))
            self._locations, self._widths = index["places"], index["widths"]
            files = [safe_open(_shard_path(folder, number), "pt") for number in range(index["shards"])]
            self._shards = [file.get_slice("states") for file in files]  # memory-mapped

    @contextmanager
    def write_to(self, folder: Path) -> Iterator[None]:
        """A context in which computed states are written to a temporary folder, which is then renamed to `folder`;
        another process may have created that with the same features."""
        self._temporary = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}.writing")
        try:
            with wrap_write_errors(folder):
                self._temporary.mkdir(parents=True)
            yield
            with wrap_write_errors(folder):
                if self._unwritten:
                    self._write_shard(self._temporary)
                index = {"places": self._locations, "widths": self._widths, "shards": len(self._shards)}
                (self._temporary / _INDEX_FILE).write_text(json.dumps(index), encoding="utf-8")
                try:
                    self._temporary.rename(folder)
                except OSError:
                    if not folder.is_dir():
                        raise
        finally:
            shutil.rmtree(self._temporary, ignore_errors=True)
            self._temporary = None

    def _write_shard(self, folder: Path) -> None:
        start = 0
        for digest, states in self._unwritten.items():
            self._locations[digest] = [len(self._shards), start, len(states)]
            start += len(states)
        path = _shard_path(folder, len(self._shards))
        with wrap_write_errors(folder):
            write_tensors(path, {"states": torch.cat(list(self._unwritten.values()))})
        self._shards.append(safe_open(path, "pt").get_slice("states"))
        self._unwritten, self._num_unwritten_tokens = {}, 0

    @torch.no_grad()
    def __call__(self, all_layers: bool = False, **inputs: Any) -> ModelOutput:
        """The encoder's output with the `hidden_states` of all layers or only the last one; `inputs` are arguments of
        the encoder, tensors (batch, length, ...).

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
            if isinstance(value, Tensor) and value.dim() >= 2 and value.shape[1] == len(columns)
            else value
            for name, value in inputs.items()
        }
        digest = _input_digest(sequence)
        if digest in self._unwritten:
            return self._unwritten[digest]
        if digest in self._locations:
            shard, start, length = self._locations[digest]
            return self._shards[shard][start : start + length]
        hidden_states = self._encoder(return_dict=True, output_hidden_states=True, **sequence).hidden_states
        hidden_states = hidden_states if all_layers else hidden_states[-1:]
        self._widths = [layer.shape[-1] for layer in hidden_states]
        states = torch.cat([layer[0] for layer in hidden_states], -1).cpu()
        if self._temporary is not None:
            self._unwritten[digest] = states
            self._num_unwritten_tokens += len(states)
            if self._num_unwritten_tokens >= _SHARD_TOKENS:
                self._write_shard(self._temporary)
        return states


def cache_features(
    model: HeadModel,
    directory: str | Path,
    batches: Sequence[Any],
    tokenizer_digest: str,
    *,
    show_progress: bool = True,
) -> None:
    """Let a head read the hidden states of its frozen encoder from disk.

    The cache, a folder of `directory`, is first filled with the states of all batches, unless it exists for the same
    weights, tokenizer and examples.

    Args:
        model: A head on a frozen encoder.
        directory: Directory with a folder for each cache.
        batches: All inputs of training and evaluation, one sequence each.

    Raises:
        CtxError: The encoder is not frozen, the head generates text, or the directory cannot be written or read.
    """
    if not isinstance(model, HeadModel) or not model.is_encoder_frozen or isinstance(model, Seq2SeqHead):
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
        "tokenizer": tokenizer_digest,
        "rows": [_input_digest(batch) for batch in batches],
    }
    digest = hashlib.blake2b(json.dumps(content, sort_keys=True, default=str).encode(), digest_size=16).hexdigest()
    folder = Path(directory) / digest
    if not folder.is_dir():
        cache = model.feature_lookup = FeatureCache(model)
        with cache.write_to(folder), evaluation_mode(model):
            for batch in progress_bar(batches, "computing features", unit="batches", enabled=show_progress):
                model(**CollatedBatch(batch).to(model.device))
    model.feature_lookup = FeatureCache(model, folder)
    print_status(f"features of the encoder in {folder}", show_progress)


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
