"""Contextual vectors of words, from all layers of any model.

Models read tokens; treebanks, tasks and questions are about words. `WordEncoder` pools the states of the tokens of each
word, without special tokens, for long sentences over overlapping windows.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from inspect import signature
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_ctxmodels.architectures.sentence_encoder import max_sentence_length
from hf_ctxmodels.core.console import progress_bar
from hf_ctxmodels.core.errors import CtxError, wrap_errors
from hf_ctxmodels.core.host_copies import CollatedBatch
from hf_ctxmodels.core.model import evaluation_mode
from hf_ctxmodels.core.output_files import replacing
from hf_ctxmodels.core.weights import weights_digest
from hf_ctxmodels.tokenizers.base import check_tokenizer_matches_model, tokenizer_digest
from hf_ctxmodels.tokenizers.character_level import CtxCharacterTokenizer

Sentence = str | Sequence[str]
"""A text, or a list of words."""
WordPooling = Literal["mean", "first", "last"]
"""Which token states of a word are averaged: all, or only the first or last one."""

WORD = re.compile(r"\w+(?:[-'’.]\w+)*|[^\w\s]")
"""A word or punctuation mark of a text."""

_NO_WORD = -1
_CHUNK_SENTENCES = 1024  # sentences that are batched by length together


@dataclass
class WordWindow:
    """The tokens of a sentence, or of a part of a sentence that is longer than the model.

    Attributes:
        sentence: Index of the sentence.
        features: Model inputs, without padding.
        token_words: (tokens,) index of each token's word in the sentence, -1 for special tokens.
        first, last: The vectors of the words first ... last - 1 are read from this window; consecutive windows of a
            sentence continue one another.
    """

    sentence: int
    features: dict[str, Any]
    token_words: np.ndarray
    first: int
    last: int


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

    @cached_property
    def words(self) -> list[str]:
        """The words of all sentences."""
        return [word for sentence in self.sentences for word in sentence]

    def __len__(self) -> int:
        return len(self.sentences)

    def __getitem__(self, index: int) -> EncodedSentence:
        """The sentence with this index; raises IndexError if there is none."""
        words = self.sentences[index]
        start = int(self.starts[index % len(self.sentences)])
        rows = slice(start, start + len(words))
        return EncodedSentence(words, self.vectors[rows], self.has_tokens[rows])


def split_words(sentence: Sentence) -> list[str]:
    """The words of a sentence; punctuation marks are words.

    Example:
        >>> split_words("The river has a bank.")
        ['The', 'river', 'has', 'a', 'bank', '.']
    """
    return WORD.findall(sentence) if isinstance(sentence, str) else list(sentence)


def align_words(
    tokenizer: PreTrainedTokenizerBase, sentences: Sequence[Sentence], max_length: int | None = None
) -> list[WordWindow]:
    """Tokenize sentences and find the word of each token.

    The words of a list are joined by spaces. Character-level tokenizers read each word as it is, as one token.

    Args:
        tokenizer: A tokenizer with offsets.
        sentences: Texts or lists of words.
        max_length: Maximum number of tokens of a window, with special tokens; None for no limit. Windows of a longer
            sentence overlap by a quarter; a word's vector is read from the window in which it is complete and farthest
            from both ends.

    Raises:
        CtxError: The tokenizer has no offsets, a sentence is neither a text nor a list of words, or has no token.
    """
    if not tokenizer.is_fast:
        raise CtxError(
            f"{type(tokenizer).__name__} has no offsets, which align tokens with words.",
            hint="use a tokenizer with a tokenizer.json.",
        )
    texts, spans = [], []
    for number, sentence in enumerate(sentences):
        if not isinstance(sentence, str) and not all(isinstance(word, str) for word in sentence):
            raise CtxError(f"Sentence {number} is neither a text nor a list of words: {sentence!r}.")
        text = sentence if isinstance(sentence, str) else " ".join(sentence)
        texts.append(text)
        spans.append(_word_spans(sentence))
    options: dict[str, Any] = {"return_special_tokens_mask": True, "verbose": False}
    if max_length is not None:
        special_tokens = tokenizer.num_special_tokens_to_add()
        stride = max(0, min(max_length // 4, max_length - special_tokens - 1))
        options |= {
            "truncation": True, "max_length": max_length, "stride": stride, "return_overflowing_tokens": True,
        }  # fmt: skip
    if isinstance(tokenizer, CtxCharacterTokenizer):
        encoding = tokenizer([split_words(sentence) for sentence in sentences], is_split_into_words=True, **options)
    else:
        encoding = tokenizer(texts, return_offsets_mapping=True, **options)
    numbers = encoding.pop("overflow_to_sample_mapping", range(len(texts)))
    special_masks = encoding.pop("special_tokens_mask")
    offsets = encoding.pop("offset_mapping", None)
    windows_by_sentence: list[list[WordWindow]] = [[] for _ in texts]
    for index, number in enumerate(numbers):
        if offsets is None:
            words = [_NO_WORD if word is None else word for word in encoding.word_ids(index)]
            token_words = np.array(words, dtype=np.int64)
        else:
            token_words = _words_at(np.asarray(offsets[index]).reshape(-1, 2), spans[number])
        token_words[np.asarray(special_masks[index], dtype=bool)] = _NO_WORD
        features = {name: encoding[name][index] for name in encoding}
        windows_by_sentence[number].append(WordWindow(number, features, token_words, 0, len(spans[number])))
    for windows in windows_by_sentence:
        if len(windows) > 1:
            _divide_words(windows)
    return [window for windows in windows_by_sentence for window in windows]


def _word_spans(sentence: Sentence) -> np.ndarray:
    """(words, 2) start and end of each word in the text of the sentence."""
    if isinstance(sentence, str):
        spans = [match.span() for match in WORD.finditer(sentence)]
        return np.array(spans, dtype=np.int64).reshape(-1, 2)
    lengths = np.array([len(word) for word in sentence], dtype=np.int64)
    starts = np.cumsum(lengths + 1) - lengths - 1
    return np.stack([starts, starts + lengths], 1)


def _words_at(offsets: np.ndarray, spans: np.ndarray) -> np.ndarray:
    """(tokens,) index of the word that contains the last character of each token, -1 without one."""
    if not len(spans):
        return np.full(len(offsets), _NO_WORD)
    positions = np.maximum(offsets[:, 1] - 1, offsets[:, 0])  # tokens without characters, of spaces, precede their word
    words = np.searchsorted(spans[:, 0], positions, side="right") - 1
    is_inside = (words >= 0) & (positions < spans[np.maximum(words, 0), 1])
    return np.where(is_inside, words, _NO_WORD)


def _divide_words(windows: list[WordWindow]) -> None:
    """Set `first` and `last`: each word belongs to the window with most of its tokens, and most context around it."""
    num_words = windows[0].last
    best = np.zeros(num_words, dtype=np.int64)
    best_scores = np.full(num_words, -1.0)
    for number, window in enumerate(windows):
        positions = np.flatnonzero(window.token_words != _NO_WORD)
        words, first_positions, counts = np.unique(window.token_words[positions], return_index=True, return_counts=True)
        starts = positions[first_positions]
        context = np.minimum(starts, len(window.token_words) - starts - counts)
        scores = counts + context / (len(window.token_words) + 1)
        is_better = scores > best_scores[words]
        best[words[is_better]], best_scores[words[is_better]] = number, scores[is_better]
    best = np.maximum.accumulate(best)  # words without tokens stay with their neighbours
    for number, window in enumerate(windows):
        window.first, window.last = (int(np.searchsorted(best, number, side)) for side in ("left", "right"))


class WordEncoder:
    """The vectors of words in context, from the hidden states of a model.

    Layer 0 is the output of the embeddings, layer i the output of layer i; static embeddings have layer 0 only. Of an
    encoder-decoder, the encoder is used. The model computes in evaluation mode, on its device.

    Args:
        model: A model of any family or of transformers; of a model with a head, the base model is used.
        tokenizer: Its tokenizer.
        layers: "all", or the numbers of layers; negative ones count from the last layer.
        pooling: Tokens of a word whose states are averaged: all ("mean"), or only the "first" or "last" one.
        batch_tokens: Maximum number of tokens of a batch, with padding.
        max_length: Maximum number of tokens of a window, by default the maximum length of the model; see `align_words`.

    Attributes:
        num_layers: Number of layers of the model, with the embeddings.
        layers: Numbers of the encoded layers.
        hidden_size: Width of the widest layer; narrower layers, as in ULMFiT, are padded with zeros.

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
    ) -> None:
        if pooling not in ("mean", "first", "last"):
            raise CtxError(f"pooling={pooling!r} is not supported.", hint='use "mean", "first" or "last".')
        if batch_tokens < 1:
            raise CtxError(f"batch_tokens={batch_tokens}, expected 1 or more.")
        check_tokenizer_matches_model(
            tokenizer, model.config, location=tokenizer.name_or_path or type(tokenizer).__name__
        )
        base_model = model.base_model
        has_decoder = "decoder_input_ids" in signature(base_model.forward).parameters
        self.model: Any = base_model.get_encoder() if has_decoder else base_model
        self.tokenizer, self.pooling, self.batch_tokens = tokenizer, pooling, batch_tokens
        limit = max_sentence_length(base_model, tokenizer)
        self.max_length = min((length for length in (limit, max_length) if length is not None), default=None)
        self._config = model.config
        [window] = align_words(tokenizer, [["a"]])
        widths = [states.shape[-1] for states in self._hidden_states([window])]
        self.num_layers, self.hidden_size = len(widths), max(widths)
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
            yield from self._encode_chunk(chunk)

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
            encoded_sentences: Iterable[EncodedSentence] = self.encode(corpus)
            if progress:
                encoded_sentences = progress_bar(encoded_sentences, "encoding", unit="sentences", total=len(corpus))
            for start, sentence in zip(starts.tolist(), encoded_sentences, strict=False):
                vectors[start : start + len(sentence.words)] = sentence.vectors
                has_tokens[start : start + len(sentence.words)] = sentence.has_tokens

        if cache_dir is None or not shape[0]:
            vectors, has_tokens = torch.empty(shape, dtype=dtype), torch.empty(shape[0], dtype=torch.bool)
            fill(vectors, has_tokens)
            return EncodedCorpus(words, vectors, has_tokens, starts)
        file = Path(cache_dir) / f"words-{self._digest(corpus, dtype)}.safetensors"
        if not file.exists():
            with replacing(file) as temporary:
                fill(*_create_tensors(temporary, {"vectors": (dtype, shape), "has_tokens": (torch.bool, shape[:1])}))
        with wrap_errors("The cached vectors are damaged", location=str(file), hint="delete this file."):
            tensors = load_file(file)
            return EncodedCorpus(words, tensors["vectors"], tensors["has_tokens"], starts)

    def _digest(self, corpus: list[str | list[str]], dtype: torch.dtype) -> str:
        """A digest of everything that determines the vectors, except the batches."""
        config = {name: value for name, value in self._config.to_dict().items() if not name.startswith("_")}
        options = (self.layers, self.pooling, self.max_length, str(dtype), type(self.model).__name__, config, corpus)
        digest = hashlib.blake2b(json.dumps(options, sort_keys=True, default=str).encode(), digest_size=16)
        digest.update(weights_digest(self.model.state_dict()).encode())
        digest.update(tokenizer_digest(self.tokenizer).encode())
        return digest.hexdigest()

    def _encode_chunk(self, sentences: list[Sentence]) -> Iterator[EncodedSentence]:
        words = [split_words(sentence) for sentence in sentences]
        starts = np.cumsum([0, *map(len, words)])
        vectors = torch.zeros(int(starts[-1]), len(self.layers), self.hidden_size)
        has_tokens = torch.zeros(len(vectors), dtype=torch.bool)
        windows = align_words(self.tokenizer, sentences, self.max_length)
        windows = [window for window in windows if (window.token_words != _NO_WORD).any()]
        for batch in self._batches(windows):
            rows, row_words, batch_vectors = self._encode_batch(batch)
            selected = torch.from_numpy(starts[[window.sentence for window in batch]])[rows] + row_words
            vectors[selected], has_tokens[selected] = batch_vectors, True
        for start, sentence_words in zip(starts.tolist(), words, strict=False):
            rows = slice(start, start + len(sentence_words))
            yield EncodedSentence(sentence_words, vectors[rows], has_tokens[rows])

    def _batches(self, windows: list[WordWindow]) -> Iterator[list[WordWindow]]:
        """The windows by length, at most `batch_tokens` padded tokens in a batch."""
        windows = sorted(windows, key=lambda window: -len(window.token_words))
        start = 0
        while start < len(windows):
            size = max(1, self.batch_tokens // len(windows[start].token_words))
            yield windows[start : start + size]
            start += size

    def _hidden_states(self, windows: list[WordWindow]) -> Sequence[Tensor]:
        """The (batch, length, width) outputs of all layers, for a batch of windows."""
        batch = self.tokenizer.pad([window.features for window in windows], return_tensors="pt")
        with evaluation_mode(self.model):
            inputs = CollatedBatch(batch).to(next(self.model.parameters()).device)
            outputs = self.model(**inputs, output_hidden_states=True, return_dict=True)
        hidden_states = getattr(outputs, "hidden_states", None)
        return (outputs.last_hidden_state,) if hidden_states is None else hidden_states

    def _encode_batch(self, windows: list[WordWindow]) -> tuple[Tensor, Tensor, Tensor]:
        """The words of a batch: (words,) index of the window and in the sentence, (words, layers, hidden) vectors."""
        hidden_states = self._hidden_states(windows)
        length = hidden_states[0].shape[1]
        rows, columns, token_words = [], [], []
        for row, window in enumerate(windows):
            positions = self._token_positions(window)
            offset = length - len(window.token_words) if self.tokenizer.padding_side == "left" else 0
            rows.append(np.full(len(positions), row))
            columns.append(positions + offset)
            token_words.append(window.token_words[positions])
        row_index, column_index, word_index = (
            torch.from_numpy(np.concatenate(values)) for values in (rows, columns, token_words)
        )
        keys = row_index * (int(word_index.max()) + 1) + word_index
        _, token_to_word, counts = torch.unique(keys, return_inverse=True, return_counts=True)
        states = torch.stack(
            [
                F.pad(layer[row_index, column_index].float(), (0, self.hidden_size - layer.shape[-1]))
                for layer in (hidden_states[number] for number in self.layers)
            ],
            1,
        ).cpu()
        sums = states.new_zeros(len(counts), *states.shape[1:]).index_add_(0, token_to_word, states)
        representative = torch.empty(len(counts), dtype=torch.long)
        representative[token_to_word] = torch.arange(len(token_to_word))
        vectors = sums / counts[:, None, None]
        return row_index[representative], word_index[representative], vectors

    def _token_positions(self, window: WordWindow) -> np.ndarray:
        """Positions of the tokens whose states are averaged: of words that are read from this window."""
        words = window.token_words
        positions = np.flatnonzero((words >= window.first) & (words < window.last))
        if self.pooling == "mean":
            return positions
        ordered = positions if self.pooling == "first" else positions[::-1]
        _, indices = np.unique(words[ordered], return_index=True)
        return np.sort(ordered[indices])


def _create_tensors(file: Path, layout: dict[str, tuple[torch.dtype, tuple[int, ...]]]) -> list[Tensor]:
    """Create a safetensors file with tensors of these types and shapes, and return them, memory-mapped for writing."""
    names = {torch.float32: "F32", torch.float16: "F16", torch.bool: "BOOL"}
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
