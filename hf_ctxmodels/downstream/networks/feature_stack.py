"""Word vectors from several models, concatenated: a module with the models, their layer mixes and tokenizers."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_ctxmodels.architectures.word_alignment import Sentence, WordPooling, WordTokens, align_words, split_words
from hf_ctxmodels.architectures.word_encoder import WordEncoder
from hf_ctxmodels.core.console import progress_bar
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.layers.common import ScalarMix
from hf_ctxmodels.layers.cpu.dropout import Dropout

_CACHE_BYTES = 1 << 30
"""Memory for the vectors of frozen models, which are computed once for each sentence that fits in it."""

FeatureLayers = Literal["mix", "last"] | int
"""Layers that make up a word vector: a learned mix of all layers, the last one, or the layer of this number."""


@dataclass
class FeatureModel:
    """A model of a feature stack; not a module, since the weights are named by `encoders` and `mixes` of the stack.

    Args:
        name: Name of the model.
        model: The base model.
        widths: Width of each layer, of the embeddings first.
        layers: Layers that make up the vectors.
        trainable: Whether the model is trained.

    Attributes:
        mix: The mix of its layers; None for one layer.
        encoder: Its word encoder; None before `FeatureStack.set_tokenizers`.
        cached_vectors: Sentence -> (words, layers, width) vectors; only of a frozen model.
    """

    name: str
    model: PreTrainedModel
    widths: Sequence[int]
    layers: FeatureLayers = "mix"
    trainable: bool = False
    mix: ScalarMix | None = field(default=None, init=False)
    encoder: WordEncoder | None = field(default=None, init=False)
    cached_vectors: dict[Any, Tensor] = field(default_factory=dict, init=False)

    @property
    def layer_numbers(self) -> list[int]:
        """Numbers of the layers that are read; raises CtxError for a layer that the model does not have."""
        if self.layers == "mix":
            return list(range(len(self.widths)))
        number = -1 if self.layers == "last" else self.layers
        if not isinstance(number, int) or not -len(self.widths) <= number < len(self.widths):
            raise CtxError(
                f"{self.name} has the layers 0 to {len(self.widths) - 1}, not {self.layers!r}.",
                location="layers",
                hint='use "mix", "last" or a number in this range.',
            )
        return [number % len(self.widths)]

    @property
    def width(self) -> int:
        """Width of the vectors."""
        return self.widths[self.layer_numbers[-1]]

    @property
    def word_encoder(self) -> WordEncoder:
        """The word encoder; raises CtxError without a tokenizer."""
        if self.encoder is None:
            raise CtxError("The models have no tokenizers.", hint="call set_tokenizers, or load a saved network.")
        return self.encoder


class FeatureStack(nn.Module):
    """The word vectors of several models, concatenated.

    Args:
        models: The models. Frozen ones compute without dropout and gradients, also in training mode.
        pooling: As in `WordEncoder`.
        layer_norm: Normalize the layers before they are mixed.
        dropout: Dropout probability of the concatenated vectors.

    Attributes:
        names: Names of the models.
        width: Width of the concatenated vectors.
    """

    def __init__(
        self,
        models: Sequence[FeatureModel],
        *,
        pooling: WordPooling = "mean",
        layer_norm: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if not models:
            raise CtxError("No model is given.", location="models", hint="pass a directory or Hub id.")
        self.names = [model.name for model in models]
        self.width = sum(model.width for model in models)
        self.encoders, self.mixes = nn.ModuleList(), nn.ModuleList()
        self._models = [replace(model) for model in models]  # another stack may have the same models
        self._pooling = pooling
        self._free_bytes = _CACHE_BYTES
        for model in self._models:
            num_layers = len(model.layer_numbers)
            model.mix = ScalarMix(num_layers, layer_norm) if num_layers > 1 else None
            self.encoders.append(model.model)
            self.mixes.append(nn.Identity() if model.mix is None else model.mix)
            if not model.trainable:
                _freeze(model.model)
        self.dropout = Dropout(dropout)
        self.register_load_state_dict_pre_hook(_clear_cache_if_weights_change)

    def clear_cache(self) -> None:
        """Clear the cached vectors of the frozen models; call it after changing their weights."""
        for model in self._models:
            model.cached_vectors.clear()
        self._free_bytes = _CACHE_BYTES

    def set_tokenizers(self, tokenizers: Mapping[str, PreTrainedTokenizerBase], max_length: int | None = None) -> None:
        """Set the tokenizer of each model, by its name; raises CtxError as `WordEncoder`."""
        for model in self._models:
            model.encoder = WordEncoder(
                model.model,
                tokenizers[model.name],
                layers=model.layer_numbers,
                pooling=self._pooling,
                max_length=max_length,
                widths=model.widths,
            )

    @property
    def tokenizers(self) -> dict[str, PreTrainedTokenizerBase]:
        """The tokenizer of each model, by its name; empty before `set_tokenizers`."""
        return {model.name: model.encoder.tokenizer for model in self._models if model.encoder is not None}

    def train(self, mode: bool = True) -> Self:
        """Set training or evaluation mode; frozen models remain in evaluation mode."""
        super().train(mode)
        for model in self._models:
            model.model.train(mode and model.trainable)
        return self

    def cache(
        self, sentences: Iterable[Sentence], directory: str | Path | None = None, *, show_progress: bool = True
    ) -> None:
        """Compute the vectors of these sentences by the frozen models in large batches; `forward` then reads them.

        If the cache is full, the vectors of the remaining sentences are computed in each forward.

        Args:
            sentences: Texts or lists of words.
            directory: As `cache_dir` in `WordEncoder.encode_corpus`, for vectors that exceed memory.
            show_progress: Show a progress bar.
        """
        frozen_models = [model for model in self._models if not model.trainable]
        if not frozen_models:
            return
        distinct = list(dict.fromkeys(_key(sentence) for sentence in sentences))
        for model in frozen_models:
            if directory is not None:
                corpus = model.word_encoder.encode_corpus(distinct, cache_dir=directory, progress=show_progress)
                model.cached_vectors |= {sentence: corpus[row].vectors for row, sentence in enumerate(distinct)}
                continue
            encoded_sentences = progress_bar(
                model.word_encoder.encode(distinct),
                f"vectors of {model.name}",
                unit="sentences",
                total=len(distinct),
                enabled=show_progress,
            )
            for sentence, encoded in zip(distinct, encoded_sentences, strict=False):
                if not self._store(model, sentence, encoded.vectors):
                    break

    def _store(self, model: FeatureModel, key: Any, vectors: Tensor) -> bool:
        """Store the vectors of a sentence, and return whether there was memory. After the first sentence without
        memory no other one is stored, so that what is stored depends only on the order of the sentences."""
        size = vectors.numel() * vectors.element_size()
        if size > self._free_bytes:
            self._free_bytes = 0
            return False
        model.cached_vectors[key] = vectors
        self._free_bytes -= size
        return True

    def forward(self, sentences: Sequence[Sentence]) -> tuple[Tensor, Tensor]:
        """Embed a batch of sentences.

        Args:
            sentences: Texts or lists of words.

        Returns:
            (batch, words, width) vectors, 0 at padding and for words without tokens, and (batch, words) bool, False at
            padding.
        """
        lengths = torch.tensor([len(split_words(sentence)) for sentence in sentences])
        is_word = torch.arange(int(lengths.max()))[None] < lengths[:, None]
        device = next(self.encoders[0].parameters()).device
        vectors = []
        for model in self._models:
            encode = self._encode_with_gradients if model.trainable else self._encode_frozen
            layers = [layer.to(device) for layer in encode(model, sentences, is_word)]
            vectors.append(layers[0] if model.mix is None else model.mix(layers, is_word.to(device)))
        return self.dropout(torch.cat(vectors, -1)), is_word.to(device)

    def _encode_with_gradients(
        self, model: FeatureModel, sentences: Sequence[Sentence], is_word: Tensor
    ) -> list[Tensor]:
        """(batch, words, width) vectors of the layers of a model that is trained."""
        encoder = model.word_encoder
        windows = align_words(encoder.tokenizer, sentences, encoder.max_length)
        windows = [window for window in windows if (window.token_words >= 0).any()]
        device = next(encoder.model.parameters()).device
        layers = [torch.zeros(*is_word.shape, encoder.widths[number], device=device) for number in encoder.layers]
        if not windows:
            return layers
        tokens = WordTokens.from_windows(windows, encoder.pooling, encoder.tokenizer.padding_side)
        hidden_states = encoder.hidden_states(windows)
        rows, columns = tokens.sentences.to(device), tokens.positions.to(device)
        return [
            layer.index_put((rows, columns), tokens.pool(states).float())
            for layer, states in zip(layers, hidden_states, strict=True)
        ]

    def _encode_frozen(self, model: FeatureModel, sentences: Sequence[Sentence], is_word: Tensor) -> list[Tensor]:
        """(batch, words, width) vectors of the layers of a frozen model, on the CPU."""
        encoder, cached = model.word_encoder, model.cached_vectors
        keys = [_key(sentence) for sentence in sentences]
        missing = list(dict.fromkeys(key for key in keys if key not in cached))
        computed = {key: sentence.vectors for key, sentence in zip(missing, encoder.encode(missing), strict=True)}
        for key, states in computed.items():
            self._store(model, key, states)
        vectors = torch.zeros(*is_word.shape, len(encoder.layers), encoder.hidden_size)
        for row, key in enumerate(keys):
            states = computed[key] if key in computed else cached[key]
            vectors[row, : len(states)] = states
        return [vectors[:, :, layer, : encoder.widths[number]] for layer, number in enumerate(encoder.layers)]

    def layer_shares(self) -> dict[str, list[float]]:
        """The learned share of each layer of each model whose layers are mixed."""
        return {model.name: model.mix.shares() for model in self._models if model.mix is not None}

    def penalty(self) -> Tensor:
        """Squared norm of the weights of all mixes, an L2 penalty towards the average of the layers (Peters et al.
        2018, section 3.3)."""
        penalties = [model.mix.distance() for model in self._models if model.mix is not None]
        return torch.stack(penalties).sum() if penalties else torch.zeros(())


def _clear_cache_if_weights_change(stack: FeatureStack, state_dict: Mapping[str, Tensor], prefix: str, *_: Any) -> None:
    """Clear the cached vectors if the loaded weights of a frozen model differ from its weights, unlike on resume."""
    for number, model in enumerate(stack._models):
        if model.trainable:
            continue
        for name, weight in model.model.state_dict().items():
            loaded = state_dict.get(f"{prefix}encoders.{number}.{name}")
            if loaded is not None and not torch.equal(loaded.to(weight), weight):
                stack.clear_cache()
                return


def _freeze(model: nn.Module) -> None:
    """Exclude the parameters from training, also after weights are loaded."""
    model.requires_grad_(False)
    for module in model.modules():
        module.fixed_parameters = tuple(name for name, _ in module.named_parameters(recurse=False))  # type: ignore[assignment]


def _key(sentence: Sentence) -> Any:
    return sentence if isinstance(sentence, str) else tuple(sentence)
