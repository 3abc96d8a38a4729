"""Sentence vectors of any model, and encoders of sentences with bidirectional recurrent layers."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from inspect import signature
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.utils import cached_file
from transformers.utils.generic import can_return_tuple

from hf_ctxmodels.architectures.recurrent_encoders import prepare_inputs, zero_padding
from hf_ctxmodels.core.batch_threads import map_batches
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.host_copies import CollatedBatch, select_true
from hf_ctxmodels.core.loading import load_pretrained, read_json
from hf_ctxmodels.core.model import CtxPreTrainedModel
from hf_ctxmodels.layers.cpu.dropout import Dropout
from hf_ctxmodels.layers.pooling import Pooling, PoolingLayer, build_token_mask, pool_tokens
from hf_ctxmodels.layers.recurrent.packing import run_bidirectional
from hf_ctxmodels.layers.recurrent.rnn import LSTM
from hf_ctxmodels.tokenizers.base import check_tokenizer_matches_model

_SAVED_POOLINGS: dict[str, Pooling] = {
    "cls": "first",
    "pooling_mode_cls_token": "first",
    "max": "max",
    "pooling_mode_max_tokens": "max",
    "mean": "mean",
    "pooling_mode_mean_tokens": "mean",
    "lasttoken": "last",
    "pooling_mode_lasttoken": "last",
}
"""Poolings of sentence-transformers, in the files of all its versions."""


class RecurrentSentenceEncoder(CtxPreTrainedModel):
    """Embeddings, bidirectional recurrent layers, and pooling: `pooler_output` is the sentence vector.

    The configuration has `layer_sizes`, `pooling` and `hidden_dropout_prob`.
    """

    _input_embed_layer = "embeddings"

    def __init__(self, config: Any, add_pooling_layer: bool = True) -> None:
        super().__init__(config)
        self.build_embeddings(config)
        *input_sizes, hidden_size = config.layer_sizes
        self.layers = nn.ModuleList(self.build_layer(input_size, hidden_size // 2) for input_size in input_sizes)
        self.dropout = Dropout(config.hidden_dropout_prob)
        self.pooler = PoolingLayer(config.pooling) if add_pooling_layer else None
        self.post_init()

    def build_embeddings(self, config: Any) -> None:
        """Create the embeddings: `embeddings`, unless a family overrides this."""
        self.embeddings = nn.Embedding(config.vocab_size, config.embedding_size, padding_idx=config.pad_token_id)

    def build_layer(self, input_size: int, hidden_size: int) -> nn.Module:
        """Create a bidirectional layer with this width per direction, by default an LSTM."""
        return LSTM(input_size, hidden_size, state_bias=True)

    def select_tokens(self, input_ids: Tensor | None, token_mask: Tensor) -> Tensor:
        """(batch, length) bool: the tokens to encode, a subset of `token_mask`, which is False at padding."""
        return token_mask

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        sequence_ids: Tensor | None = None,
        output_mask: Tensor | None = None,
        output_hidden_states: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPooling:
        """Encode a batch. Other arguments and errors as in `prepare_inputs`.

        Args:
            output_hidden_states: Return `hidden_states`: the embeddings and the outputs of the layers.
            kwargs: Ignored arguments of other families' models.

        Returns:
            The sentence vector `pooler_output`, (batch, hidden), pools all sequences of a row. States are zero where
            `select_tokens` is False.
        """
        inputs = prepare_inputs(
            self,
            input_ids,
            inputs_embeds,
            attention_mask,
            sequence_ids,
            output_mask,
            token_type_ids=token_type_ids,
            position_ids=kwargs.get("position_ids"),
        )
        token_mask = self.select_tokens(input_ids, inputs.token_mask)
        embedded = zero_padding(inputs.embed(self.get_input_embeddings()), token_mask)
        states, _ = run_bidirectional(self.layers, self.dropout(embedded), inputs.pack(2, token_mask), self.dropout)
        last = states[-1]
        return BaseModelOutputWithPooling(
            last_hidden_state=last if output_mask is None else select_true(last, output_mask),
            pooler_output=None if self.pooler is None else self.pooler(last, token_mask),
            hidden_states=(embedded, *states[1:]) if self.config.returns_hidden_states(output_hidden_states) else None,
        )

    def encode(
        self,
        sentences: str | Sequence[str],
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        batch_size: int = 64,
        normalize: bool = False,
    ) -> Tensor:
        """Call `encode_sentences` with the tokenizer, by default the one that was saved with the model."""
        if tokenizer is None:
            tokenizer = load_pretrained(AutoTokenizer, self.config.name_or_path, "the model's tokenizer")
        return encode_sentences(self, tokenizer, sentences, batch_size=batch_size, normalize=normalize)


def sentence_vectors(model: PreTrainedModel, inputs: Mapping[str, Tensor], pooling: Pooling | None = None) -> Tensor:
    """(batch, width) vectors of tokenized sentences: pooled token states (of the encoder if the model has a decoder),
    or without `pooling` the `pooler_output`; raises CtxError if the model has none."""
    if pooling is not None and "decoder_input_ids" in signature(model.forward).parameters:
        outputs: Any = model.get_encoder()(**inputs)
    else:
        outputs = model(return_dict=True, **inputs)
    if pooling is not None:
        states = outputs.last_hidden_state
        return pool_tokens(states, build_token_mask(states, inputs.get("attention_mask")), pooling)
    pooler_output = getattr(outputs, "pooler_output", None)
    if pooler_output is None:
        raise CtxError(
            f"{type(model).__name__} has no pooler_output.", hint='choose a pooling of its tokens: pooling="mean".'
        )
    return pooler_output


def encode_sentences(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sentences: str | Sequence[str],
    *,
    pooling: Pooling | None = None,
    batch_size: int = 64,
    normalize: bool = False,
) -> Tensor:
    """Encode sentences as vectors, in evaluation mode, truncated to `max_sentence_length`.

    Args:
        model, tokenizer: A base model of any family, as opened by `AutoModel`, and its tokenizer.
        sentences: Sentences, or one sentence.
        pooling: As in `sentence_vectors`.
        normalize: Scale every vector to length 1.

    Returns:
        (sentences, width) vectors in the order of the sentences, or (width,) for one sentence, on the model's device.

    Raises:
        CtxError: A sentence is not a string, a sentence has no token, the tokenizer does not match the model, the
            pooling is unknown, or the model does not pool.

    Example:
        >>> vectors = encode_sentences(model, tokenizer, ["A cat sat.", "It ran."], pooling="mean")
    """
    if isinstance(sentences, str):
        return encode_sentences(model, tokenizer, [sentences], pooling=pooling, normalize=normalize)[0]
    check_strings(sentences)
    options: dict[str, Any] = {"pooling": pooling, "batch_size": batch_size, "normalize": normalize}
    if not len(sentences):
        return encode_sentences(model, tokenizer, ["a"], **options)[:0]
    result: Tensor | None = None
    start = 0
    for vectors in encode_in_windows(model, tokenizer, sentences, **options):
        if result is None:
            result = vectors.new_empty(len(sentences), vectors.shape[1])
        result[start : start + len(vectors)] = vectors
        start += len(vectors)
    assert result is not None
    return result


def check_strings(sentences: Sequence[Any]) -> None:
    """Raise CtxError for a sentence that is not a string."""
    for index, text in enumerate(sentences):
        if not isinstance(text, str):
            raise CtxError(f"sentences[{index}] is a {type(text).__name__}, expected a string.")


def encode_in_windows(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sentences: Iterable[str],
    *,
    pooling: Pooling | None = None,
    batch_size: int = 64,
    normalize: bool = False,
    window: int = 8192,
) -> Iterator[Tensor]:
    """Encode any number of sentences in constant memory: (window, width) vectors of consecutive sentences.

    The sentences of a window are batched by length. Other arguments and errors as in `encode_sentences`.
    """
    if batch_size < 1:
        raise CtxError(f"batch_size={batch_size}, expected 1 or more.")
    check_tokenizer_matches_model(tokenizer, model.config)
    max_length = max_sentence_length(model, tokenizer)

    def encode(examples: dict[str, list[Any]]) -> Tensor:
        batch = tokenizer.pad(examples, return_tensors="pt")
        return sentence_vectors(model, CollatedBatch(batch).to(model.device), pooling)

    iterator, first = iter(sentences), 0
    while texts := list(islice(iterator, window)):
        encoding = tokenize_sentences(tokenizer, texts, max_length, first)
        first += len(texts)
        order = sorted(range(len(texts)), key=lambda index: len(encoding["input_ids"][index]))
        batches = [
            {name: [values[index] for index in order[start : start + batch_size]] for name, values in encoding.items()}
            for start in range(0, len(order), batch_size)
        ]
        vectors = torch.cat(map_batches(encode, batches, model))
        result = torch.empty_like(vectors)
        result[order] = F.normalize(vectors, dim=1) if normalize else vectors
        yield result


def tokenize_sentences(
    tokenizer: PreTrainedTokenizerBase, sentences: list[str], max_length: int | None, first: int = 0
) -> dict[str, list[Any]]:
    """The model inputs of sentences, of which the first has the number `first`, without padding; raises CtxError for a
    sentence without tokens."""
    truncation = {} if max_length is None else {"truncation": True, "max_length": max_length}
    encoding = tokenizer(sentences, verbose=False, **truncation)
    for index, ids in enumerate(encoding["input_ids"]):
        if not len(ids):
            raise CtxError(
                f"Sentence {first + index} (counted from 0) has no word: {sentences[index]!r}.", hint="remove it."
            )
    return dict(encoding)


def max_sentence_length(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Maximum number of tokens of a sentence, the smallest of the limits of tokenizer, model, and, in the model's
    directory, `max_seq_length` of sentence-transformers; None without a limit."""
    limits = [tokenizer.model_max_length, getattr(model.config, "max_sequence_length", None)]
    for name in ("sentence_module.json", "sentence_bert_config.json"):
        limits.append((read_saved_json(model.config.name_or_path, name) or {}).get("max_seq_length"))
    return min((limit for limit in limits if limit is not None and 0 < limit < 1_000_000), default=None)


def saved_pooling(source: str) -> tuple[Pooling | None, bool]:
    """The pooling of `CtxSentenceEncoder` or sentence-transformers in a directory or Hub id, and whether vectors are
    normalized; (None, False) without their files. Raises CtxError for a pooling that is not one of `Pooling`."""
    if (settings := read_saved_json(source, "sentence_module.json", download=True)) is not None:
        return settings.get("pooling"), bool(settings.get("normalize"))
    modules = read_saved_json(source, "modules.json", download=True) or []
    folders = {module["type"].rpartition(".")[2]: module["path"] for module in modules}
    pooling: Pooling | None = None
    if "Pooling" in folders:
        settings = read_saved_json(source, f"{folders['Pooling']}/config.json", download=True) or {}
        modes = settings.get("pooling_mode")
        if modes is None:  # written by earlier versions
            modes = [name for name, value in settings.items() if name.startswith("pooling_mode_") and value is True]
        modes = [modes] if isinstance(modes, str) else modes
        if len(modes) != 1 or modes[0] not in _SAVED_POOLINGS:
            raise CtxError(
                f"The pooling {' and '.join(modes) or 'without a mode'} is not supported.",
                location=source,
                hint="choose another one with --pooling.",
            )
        pooling = _SAVED_POOLINGS[modes[0]]
    return pooling, "Normalize" in folders


def read_saved_json(source: str, name: str, *, download: bool = False) -> Any:
    """Content of a JSON file of a directory, or of a Hub id in the cache or with `download`; None if there is none."""
    if not source:
        return None
    quiet = [f"_raise_exceptions_for_{problem}" for problem in ("gated_repo", "missing_entries", "connection_errors")]
    file = cached_file(source, name, local_files_only=not download, **dict.fromkeys(quiet, False))
    return None if file is None else read_json(file, hint="copy the file again from its source.")
