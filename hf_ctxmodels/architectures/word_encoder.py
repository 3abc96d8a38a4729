"""Contextual vectors of words, from all layers of any model.

`WordEncoder` pools the states of the tokens of each word, without special tokens, for long sentences over overlapping
windows.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from inspect import signature
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_ctxmodels.architectures.sentence_encoder import max_sentence_length
from hf_ctxmodels.architectures.word_alignment import (
    NO_WORD,
    Sentence,
    WordPooling,
    WordTokens,
    WordWindow,
    align_words,
    split_words,
)
from hf_ctxmodels.core.batch_threads import map_batches, num_batch_threads
from hf_ctxmodels.core.console import progress_bar
from hf_ctxmodels.core.errors import CtxError, wrap_errors
from hf_ctxmodels.core.host_copies import CollatedBatch
from hf_ctxmodels.core.model import evaluation_mode
from hf_ctxmodels.core.output_files import replacing
from hf_ctxmodels.core.weights import weights_digest
from hf_ctxmodels.tokenizers.base import check_tokenizer_matches_model, tokenizer_digest

_CHUNK_SENTENCES = 1024  # sentences that are batched by length together


@dataclass
class EncodedSentence:
    """The words of a sentence and their vectors.

    Attributes:
        words: The words.
        vectors: (words, layers, hidden), 0 for words without tokens.
        has_tokens: (words,) bool: False for a word for which the tokenizer has no token, such as a control character.
    """

    words: list[str]
    vectors: Tensor
    has_tokens: Tensor


@dataclass
class EncodedCorpus:
    """The words of a corpus and their vectors, which can be memory-mapped.

    Attributes:
        sentences: The words of each sentence.
        vectors: (words of all sentences, layers, hidden), 0 for words without tokens.
        has_tokens: (words of all sentences,) bool.
        starts: (sentences + 1,) index of each sentence's first word, and the number of words.
    """

    sentences: list[list[str]]
    vectors: Tensor
    has_tokens: Tensor
    starts: Tensor

    def __len__(self) -> int:
        return len(self.sentences)

    def __getitem__(self, index: int) -> EncodedSentence:
        """The sentence with this index; raises IndexError if there is none."""
        words = self.sentences[index]
        start = int(self.starts[index % len(self.sentences)])
        rows = slice(start, start + len(words))
        return EncodedSentence(words, self.vectors[rows], self.has_tokens[rows])


class WordEncoder:
    """The vectors of words in context, from the hidden states of a model.

    Layer 0 is the output of the embeddings, layer i the output of layer i; static embeddings have layer 0 only. Of an
    encoder-decoder, the encoder is used. The model computes in evaluation mode, on its device.

    Args:
        model: A model of any family or of transformers; of a model with a head, the base model is used.
        tokenizer: Its tokenizer.
        layers: "all", or the numbers of layers; negative ones count from the last layer.
        pooling: Tokens of a word whose states are averaged: all ("mean"), or only the "first" or "last" one.
        batch_tokens: Maximum number of tokens of a batch, with padding; on a CPU it is divided into a batch per thread.
        max_length: Maximum number of tokens of a window, by default the maximum length of the model; see `align_words`.
        widths: Width of each layer of the model; None to measure them.

    Attributes:
        base_model: The model without its head.
        model: The base model, or the encoder of an encoder-decoder.
        num_layers: Number of layers of the model, with the embeddings.
        layers: Numbers of the encoded layers.
        hidden_size: Width of the widest layer; narrower layers, as in ULMFiT, are padded with zeros.
        widths: Width of each layer of the model.

    Raises:
        CtxError: The tokenizer does not match the model or has no offsets, or there is no such layer.

    Example:
        >>> from transformers import AutoModel, AutoTokenizer
        >>> import hf_ctxmodels
        >>> model, tokenizer = AutoModel.from_pretrained("runs/bert"), AutoTokenizer.from_pretrained("runs/bert")
        >>> encoder = WordEncoder(model, tokenizer, layers=[0, -1])
        >>> for sentence in encoder.encode(["The river has a bank.", ["A", "bank", "lends", "money"]]):
        ...     print(sentence.words, sentence.vectors.shape)
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        layers: Literal["all"] | Sequence[int] = "all",
        pooling: WordPooling = "mean",
        batch_tokens: int = 4096,
        max_length: int | None = None,
        widths: Sequence[int] | None = None,
    ) -> None:
        if pooling not in ("mean", "first", "last"):
            raise CtxError(f"pooling={pooling!r} is not supported.", hint='use "mean", "first" or "last".')
        if batch_tokens < 1:
            raise CtxError(f"batch_tokens={batch_tokens}, expected 1 or more.")
        check_tokenizer_matches_model(tokenizer, model.config)
        self.base_model = base_model = model.base_model
        has_decoder = "decoder_input_ids" in signature(base_model.forward).parameters
        self.model: Any = base_model.get_encoder() if has_decoder else base_model
        self.tokenizer, self.pooling, self.batch_tokens = tokenizer, pooling, batch_tokens
        limit = max_sentence_length(base_model, tokenizer)
        self.max_length = min((length for length in (limit, max_length) if length is not None), default=None)
        self._config = model.config
        if widths is None:
            [window] = align_words(tokenizer, [["a"]])
            with evaluation_mode(self.model):
                widths = [states.shape[-1] for states in _all_states(self._run([window], output_hidden_states=True))]
        self.num_layers, self.hidden_size, self.widths = len(widths), max(widths), tuple(widths)
        numbers = range(self.num_layers) if layers == "all" else layers
        for number in numbers:
            if not isinstance(number, int) or not -self.num_layers <= number < self.num_layers:
                raise CtxError(
                    f"{type(base_model).__name__} has the layers 0 to {self.num_layers - 1}, not {number}.",
                    location=f"layers={layers!r}",
                    hint="use numbers in this range.",
                )
        if not numbers:
            raise CtxError("No layer is selected.", location="layers", hint='use "all", or numbers of layers.')
        self.layers = tuple(number % self.num_layers for number in numbers)

    def encode(self, sentences: Iterable[Sentence]) -> Iterator[EncodedSentence]:
        """Encode any number of sentences in constant memory, in their order.

        Raises:
            CtxError: As in `align_words`.
        """
        iterator = iter(sentences)
        while chunk := list(islice(iterator, _CHUNK_SENTENCES)):
            corpus = self.encode_corpus(chunk, progress=False)
            yield from (corpus[index] for index in range(len(corpus)))

    def encode_corpus(
        self,
        sentences: Iterable[Sentence],
        *,
        cache_dir: str | Path | None = None,
        dtype: torch.dtype = torch.float32,
        progress: bool = True,
    ) -> EncodedCorpus:
        """Encode a corpus as one tensor.

        Args:
            sentences: Texts or lists of words.
            cache_dir: Directory of a safetensors file with the vectors, which are written as they are computed and then
                memory-mapped, so that they may exceed memory. The file is read again for the same sentences, options,
                weights and tokenizer. None to hold the vectors in memory.
            dtype: torch.float32 or torch.float16.
            progress: Show a progress bar.

        Raises:
            CtxError: As in `align_words`; or the file cannot be read or written.
        """
        corpus = [sentence if isinstance(sentence, str) else list(sentence) for sentence in sentences]
        words = [split_words(sentence) for sentence in corpus]
        starts = torch.tensor([0, *map(len, words)]).cumsum(0)
        shape = (int(starts[-1]), len(self.layers), self.hidden_size)

        def fill(vectors: Tensor, has_tokens: Tensor) -> None:
            has_tokens.zero_()
            for first in progress_bar(range(len(corpus)), "encoding", unit="sentences", enabled=progress):
                if first % _CHUNK_SENTENCES == 0:
                    chunk = slice(first, first + _CHUNK_SENTENCES)
                    self._encode_chunk(corpus[chunk], starts[chunk], vectors, has_tokens)
            vectors[~has_tokens] = 0
            for layer, number in enumerate(self.layers):
                vectors[:, layer, self.widths[number] :] = 0

        if cache_dir is None or not shape[0]:
            vectors, has_tokens = torch.empty(shape, dtype=dtype), torch.empty(shape[0], dtype=torch.bool)
            fill(vectors, has_tokens)
            return EncodedCorpus(words, vectors, has_tokens, starts)
        content = json.dumps([self.digest(), str(dtype), corpus])
        name = hashlib.blake2b(content.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
        file = Path(cache_dir) / f"words-{name}.safetensors"
        if not file.exists():
            with replacing(file) as temporary:
                fill(*create_tensors(temporary, {"vectors": (dtype, shape), "has_tokens": (torch.bool, shape[:1])}))
        with wrap_errors("The cached vectors are damaged", location=str(file), hint="delete this file."):
            tensors = load_file(file)
            return EncodedCorpus(words, tensors["vectors"], tensors["has_tokens"], starts)

    def digest(self) -> str:
        """A digest of what determines the vectors of a sentence: weights, configuration, tokenizer and options."""
        config = {name: value for name, value in self._config.to_dict().items() if not name.startswith("_")}
        options = (self.layers, self.pooling, self.max_length, type(self.model).__name__, config)
        digest = hashlib.blake2b(json.dumps(options, sort_keys=True, default=str).encode(), digest_size=16)
        # the pooler does not contribute, and has random weights if the checkpoint has none
        weights = {name: weight for name, weight in self.model.state_dict().items() if not name.startswith("pooler.")}
        digest.update(weights_digest(weights).encode())
        digest.update(tokenizer_digest(self.tokenizer).encode())
        return digest.hexdigest()

    def _encode_chunk(self, sentences: Sequence[Sentence], starts: Tensor, vectors: Tensor, has_tokens: Tensor) -> None:
        """Encode sentences that are batched by length together.

        Args:
            sentences: Texts or lists of words.
            starts: (sentences,) row of each sentence's first word in `vectors`.
            vectors: (words, layers, hidden), to which the vectors of words with tokens are written.
            has_tokens: (words,) bool, set to True for words with tokens.
        """
        windows = align_words(self.tokenizer, sentences, self.max_length)
        windows = [window for window in windows if (window.token_words != NO_WORD).any()]

        def encode(batch: list[WordWindow]) -> None:
            tokens = WordTokens.from_windows(batch, self.pooling, self.tokenizer.padding_side)
            pooled = [tokens.pool(states).to("cpu", vectors.dtype) for states in self.hidden_states(batch)]
            rows = starts[tokens.sentences] + tokens.positions
            for layer, layer_vectors in enumerate(pooled):
                vectors[rows, layer, : layer_vectors.shape[1]] = layer_vectors
            has_tokens[rows] = True

        map_batches(encode, self._batches(windows), self.model)

    def _batches(self, windows: list[WordWindow]) -> Iterator[list[WordWindow]]:
        """The windows by length, at most `batch_tokens` padded tokens in the batches that are computed at once."""
        windows = sorted(windows, key=lambda window: -len(window.token_words))
        batch_tokens = self.batch_tokens // num_batch_threads(self.model)
        start = 0
        while start < len(windows):
            size = max(1, batch_tokens // len(windows[start].token_words))
            yield windows[start : start + size]
            start += size

    def hidden_states(self, windows: Sequence[WordWindow]) -> Sequence[Tensor]:
        """The (batch, length, width) states of the encoded layers for a padded batch of windows, in the current mode of
        the model."""
        if self.layers == (self.num_layers - 1,):
            return (self._run(windows, output_hidden_states=False).last_hidden_state,)  # may use prepared weights
        states = _all_states(self._run(windows, output_hidden_states=True))
        return [states[number] for number in self.layers]

    def _run(self, windows: Sequence[WordWindow], output_hidden_states: bool) -> Any:
        batch = self.tokenizer.pad([window.features for window in windows], return_tensors="pt")
        inputs = CollatedBatch(batch).to(next(self.model.parameters()).device)
        return self.model(**inputs, output_hidden_states=output_hidden_states, return_dict=True)


def _all_states(outputs: Any) -> Sequence[Tensor]:
    """The states of the embeddings and all layers; a static model has only one."""
    hidden_states = getattr(outputs, "hidden_states", None)
    return (outputs.last_hidden_state,) if hidden_states is None else hidden_states


def create_tensors(file: Path, layout: dict[str, tuple[torch.dtype, tuple[int, ...]]]) -> list[Tensor]:
    """Create a safetensors file with tensors of these types and shapes, and return them, memory-mapped for writing."""
    names = {
        torch.float32: "F32", torch.float16: "F16", torch.int64: "I64", torch.uint8: "U8", torch.bool: "BOOL",
    }  # fmt: skip
    header: dict[str, Any] = {}
    end = 0
    for name, (dtype, shape) in layout.items():
        start, end = end, end + int(np.prod(shape)) * dtype.itemsize
        header[name] = {"dtype": names[dtype], "shape": shape, "data_offsets": [start, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with file.open("wb") as output:
        output.write(len(encoded).to_bytes(8, "little") + encoded)
        output.truncate(8 + len(encoded) + end)
    tensors = []
    for name, (dtype, shape) in layout.items():
        numpy_type = torch.empty(0, dtype=dtype).numpy().dtype
        offset = 8 + len(encoded) + header[name]["data_offsets"][0]
        tensors.append(torch.from_numpy(np.memmap(file, numpy_type, "r+", offset, shape)))
    return tensors
