"""Word vectors from one or several models, as features of other networks (Peters et al. 2018, section 3.3)."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import tee
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import cached_file

from hf_ctxmodels.architectures.word_alignment import Sentence, WordPooling
from hf_ctxmodels.architectures.word_encoder import EncodedSentence, WordEncoder
from hf_ctxmodels.core.devices import place_model
from hf_ctxmodels.core.errors import CtxError, wrap_errors
from hf_ctxmodels.downstream.adapters.adapter_checkpoints import load_model_and_tokenizer
from hf_ctxmodels.downstream.networks.feature_stack import FeatureLayers, FeatureModel, FeatureStack
from hf_ctxmodels.layers.common import ScalarMix

Layers = Literal["last", "all", "mix"] | int
"""Layers of the word vectors: one layer, all layers, or their weighted sum."""
Source = str | Path | tuple[PreTrainedModel, PreTrainedTokenizerBase]
"""Directory or Hub id of a model with its tokenizer, or both."""

_MIX_WEIGHTS = ("layer_mix.weights", "mixes.0.weights")  # of heads, and of ELMo's heads


def embed_words(
    sentences: Sentence | Iterable[Sentence],
    model: Source | Sequence[Source],
    *,
    layers: Layers = "last",
    pooling: WordPooling = "mean",
    batch_tokens: int = 4096,
    device: str | None = None,
) -> list[EncodedSentence]:
    """Embed the words of sentences in context.

    Args:
        sentences: Texts or lists of words, or one text.
        model: Directory or Hub id of a model of any family or of transformers, or the model and its tokenizer; or
            several of these, whose vectors are concatenated.
        layers: "last"; the number of a layer; "mix", the weighted sum with the weights that a fine-tuned model has
            learned, else the average; or "all".
        pooling, batch_tokens: As in `WordEncoder`.
        device: Device of the models; by default the GPU if there is one.

    Returns:
        The words of each sentence with their (words, width) vectors, or (words, layers, width) with "all".

    Raises:
        CtxError: As in `WordEncoder`, or `layers="all"` with several models.

    Example:
        >>> river, money = embed_words(["The river has a bank.", "A bank lends money."], "runs/elmo", layers="mix")
        >>> torch.cosine_similarity(river.vectors[4], money.vectors[1], dim=0)
    """
    sentences = [sentences] if isinstance(sentences, str) else sentences
    encoders = open_encoders(model, layers, pooling=pooling, batch_tokens=batch_tokens, device=device)
    return list(encode_words(encoders, sentences))


class LayerEncoder:
    """A word encoder with the selection or weighting of its layers.

    Attributes:
        layers: As in `embed_words`.
        mix: The weights of the layers with `layers="mix"`.
    """

    def __init__(self, encoder: WordEncoder, layers: Layers, source: str) -> None:
        self.encoder, self.layers = encoder, layers
        self.mix = (saved_layer_mix(source) or ScalarMix(encoder.num_layers)) if layers == "mix" else None
        if self.mix is not None and len(self.mix.weights) != encoder.num_layers:
            raise CtxError(
                f"The layer mix has {len(self.mix.weights)} weights, the model {encoder.num_layers} layers.",
                location=source,
                hint='use layers="last" or the number of a layer.',
            )

    @torch.no_grad()
    def select(self, vectors: Tensor) -> Tensor:
        """(words, layers, hidden) -> (words, width), or (words, layers, width) for all layers."""
        if self.layers == "all":
            return vectors
        widths = self.encoder.widths
        if self.mix is None:
            [number] = self.encoder.layers
            return vectors[:, 0, : widths[number]]
        return self.mix([vectors[None, :, layer, :width] for layer, width in enumerate(widths)])[0]


def open_encoders(
    models: Source | Sequence[Source],
    layers: Layers,
    *,
    pooling: WordPooling = "mean",
    batch_tokens: int = 4096,
    device: str | None = None,
) -> list[LayerEncoder]:
    """Open models as encoders of words; arguments and errors as in `embed_words`."""
    opened = open_models(models)
    if layers == "all" and len(opened) > 1:
        raise CtxError(
            "All layers of several models cannot be concatenated.",
            location='layers="all"',
            hint='use "mix", "last" or the number of a layer.',
        )
    numbers: Any = "all" if layers in ("all", "mix") else [-1 if layers == "last" else layers]
    options: Any = {"layers": numbers, "pooling": pooling, "batch_tokens": batch_tokens}
    return [
        LayerEncoder(WordEncoder(place_model(model, device), tokenizer, **options), layers, model.config.name_or_path)
        for _, model, tokenizer in opened
    ]


def open_models(models: Source | Sequence[Source]) -> list[tuple[str, PreTrainedModel, PreTrainedTokenizerBase]]:
    """Names, base models and tokenizers of one or several sources; raises CtxError if one cannot be opened."""
    is_one = isinstance(models, str | Path) or (isinstance(models, tuple) and isinstance(models[0], PreTrainedModel))
    sources: Any = [models] if is_one else models
    opened = []
    for source in sources:
        model, tokenizer = source if isinstance(source, tuple) else load_model_and_tokenizer(str(source), "AutoModel")
        opened.append((model.config.name_or_path or type(model).__name__, model, tokenizer))
    if not opened:
        raise CtxError("No model is given.", location="models", hint="pass a directory or Hub id.")
    return opened


def encode_words(encoders: Sequence[LayerEncoder], sentences: Iterable[Sentence]) -> Iterator[EncodedSentence]:
    """Encode any number of sentences in constant memory; the vectors of several models are concatenated, and a word has
    tokens if it has tokens in all models."""
    copies = tee(sentences, len(encoders))
    streams = [encoder.encoder.encode(copy) for encoder, copy in zip(encoders, copies, strict=True)]
    for group in zip(*streams, strict=True):
        vectors = [encoder.select(sentence.vectors) for encoder, sentence in zip(encoders, group, strict=True)]
        has_tokens = torch.stack([sentence.has_tokens for sentence in group]).all(0)
        yield EncodedSentence(group[0].words, torch.cat(vectors, -1), has_tokens)


def saved_layer_mix(source: str) -> ScalarMix | None:
    """The layer mix that the head of a fine-tuned model has learned, from a directory or Hub id; None if there is
    none."""
    options = dict.fromkeys(("_raise_exceptions_for_missing_entries", "_raise_exceptions_for_connection_errors"), False)
    file = cached_file(source, "model.safetensors", **options) if source else None
    if file is None:
        return None
    with wrap_errors("The weights cannot be read", location=file), safe_open(file, "pt") as tensors:
        prefixes = [name.removesuffix("weights") for name in tensors.keys() if name.endswith(_MIX_WEIGHTS)]  # noqa: SIM118
        if not prefixes:
            return None
        weights, gamma = (tensors.get_tensor(f"{prefixes[0]}{field}") for field in ("weights", "gamma"))
    mix = ScalarMix(len(weights))
    mix.load_state_dict({"weights": weights, "gamma": gamma})
    return mix


class ContextualFeatures(FeatureStack):
    """The word vectors of one or several models, concatenated: the input of a custom network.

    The layers of a model are mixed with learned weights and a learned scale (Peters et al. 2018, equation 1). Frozen
    models compute without dropout and gradients, also in training mode.

    Args:
        models: As in `embed_words`; static embeddings have one layer.
        layers: "mix", "last" or the number of a layer, or one of these for each model.
        pooling, max_length: As in `WordEncoder`.
        trainable: Train the models, or one value for each model.
        layer_norm: Normalize the layers before they are mixed.
        dropout: Dropout probability of the concatenated vectors.

    Attributes:
        width: Width of the concatenated vectors.
        names: Names of the models.

    Example:
        >>> class Tagger(torch.nn.Module):
        ...     def __init__(self, models, num_tags):
        ...         super().__init__()
        ...         self.features = ContextualFeatures(models, dropout=0.5)
        ...         self.lstm = torch.nn.LSTM(self.features.width, 100, bidirectional=True, batch_first=True)
        ...         self.output = torch.nn.Linear(200, num_tags)
        ...     def forward(self, sentences):
        ...         vectors, is_word = self.features(sentences)
        ...         return self.output(self.lstm(vectors)[0]), is_word
    """

    def __init__(
        self,
        models: Source | Sequence[Source],
        *,
        layers: FeatureLayers | Sequence[FeatureLayers] = "mix",
        pooling: WordPooling = "mean",
        trainable: bool | Sequence[bool] = False,
        layer_norm: bool = False,
        dropout: float = 0.0,
        max_length: int | None = None,
    ) -> None:
        opened = open_models(models)
        model_layers = _broadcast_to_models(layers, opened, "layers", (str, int))
        are_trainable = _broadcast_to_models(trainable, opened, "trainable", bool)
        super().__init__(
            [
                FeatureModel(name, model, WordEncoder(model, tokenizer).widths, *options)
                for (name, model, tokenizer), *options in zip(opened, model_layers, are_trainable, strict=True)
            ],
            pooling=pooling,
            layer_norm=layer_norm,
            dropout=dropout,
        )
        self.set_tokenizers({name: tokenizer for name, _, tokenizer in opened}, max_length)
        self.train()


def _broadcast_to_models(value: Any, models: Sequence[Any], name: str, scalar_type: Any) -> list[Any]:
    """A value for each model, from one value or a sequence; raises CtxError for a sequence of another length."""
    values = [value] * len(models) if isinstance(value, scalar_type) else list(value)
    if len(values) != len(models):
        raise CtxError(
            f"{len(values)} values for {len(models)} models.", location=name, hint="give one for each model."
        )
    return values
