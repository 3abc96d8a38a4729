"""Encoder-decoders from two checkpoints (Rothe et al. 2020, Leveraging Pre-trained Checkpoints for Sequence Generation
Tasks, arXiv 1907.12461; Lample & Conneau 2019, sections 4.2 and 4.3): an encoder, and a language model with
cross-attention."""

from collections.abc import Mapping
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar, Self

from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, GenerationMixin, PreTrainedTokenizerBase
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

from hf_ctxmodels.architectures.encoder_decoder import EncoderDecoder
from hf_ctxmodels.architectures.encoder_decoder_heads import TransformerForConditionalGeneration
from hf_ctxmodels.architectures.transformer_decoder import EncodedSource, TransformerDecoder
from hf_ctxmodels.architectures.transformer_encoder import TransformerEncoder
from hf_ctxmodels.core.adapter_support import newly_initialized_modules
from hf_ctxmodels.core.auto_classes import get_auto_class, has_class
from hf_ctxmodels.core.config import CtxConfig, convert_config_errors
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.loading import load_pretrained
from hf_ctxmodels.core.model import CtxPreTrainedModel
from hf_ctxmodels.heads.base import ItemCounts
from hf_ctxmodels.layers.attention.modules import CrossAttention
from hf_ctxmodels.layers.cpu.linear import linear
from hf_ctxmodels.layers.transformer import TransformerBlock
from hf_ctxmodels.models.encoder_decoder.configuration_encoder_decoder import CtxEncoderDecoderConfig, find_config_class
from hf_ctxmodels.models.encoder_decoder.conversion_encoder_decoder import (
    export_encoder_decoder,
    load_reference_weights,
)

Checkpoint = str | PathLike[str]


class CtxEncoderDecoderPreTrainedModel(CtxPreTrainedModel):
    """Base class of the encoder-decoders from two models."""

    config: CtxEncoderDecoderConfig
    base_model_prefix = "model"
    reference_model_type: ClassVar[str | None] = "encoder-decoder"

    def _init_weights(self, module: nn.Module) -> None:
        """Initialize a module that belongs to neither model as in the decoder."""
        self.base_model.decoder._init_weights(module)

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Embedding:
        """Resize the embeddings of both models; raises CtxError if their vocabularies differ."""
        if not self.config.has_equal_vocabularies:
            raise CtxError(
                "The encoder and the decoder have different vocabularies.",
                location="resize_token_embeddings",
                hint="resize model.model.encoder or model.model.decoder.",
            )
        base_model: CtxEncoderDecoderModel = self.base_model
        base_model.decoder.resize_token_embeddings(*args, **kwargs)
        resized = base_model.encoder.resize_token_embeddings(*args, **kwargs)
        self.tie_weights()
        return resized


class CtxEncoderDecoderModel(EncoderDecoder, CtxEncoderDecoderPreTrainedModel):
    """An encoder, and the states of a language model that attends to it.

    The encoder is the model of a family. The decoder is a language model: a decoder such as GPT-2, or an encoder with
    its masked-LM head, whose attention is made causal. Each of its layers has a new cross-attention between
    self-attention and the feed-forward network.

    Attributes:
        encoder: The encoder.
        decoder: The language model; only its output layer is not used here.
        source_projection: Linear layer from the encoder's width to the decoder's; None for the same width.
    """

    has_segments = True
    encoder: Any
    decoder: Any

    def __init__(self, config: CtxEncoderDecoderConfig) -> None:
        super(EncoderDecoder, self).__init__(config)  # EncoderDecoder creates both stacks from one configuration
        self.encoder = build_encoder(config.encoder)
        self.decoder = build_decoder(config.decoder)
        source_size, target_size = config.encoder.hidden_size, config.decoder.hidden_size
        self.source_projection = None if source_size == target_size else nn.Linear(source_size, target_size)
        if config.share_weights:
            self._tied_weights_keys = self._shared_weights()
            self.decoder.all_tied_weights_keys = {}  # the table of this model includes the decoder's tied weights
        self.post_init()

    def _shared_weights(self) -> dict[str, str]:
        """Weight of the decoder -> weight of the encoder, also for an output layer that is tied to the embeddings."""
        decoder = self.decoder
        encoder_names = {name for name, _ in self.encoder.named_parameters(remove_duplicate=False)}
        shared = {
            f"{decoder.base_model_prefix}.{name}": f"encoder.{name}"
            for name, _ in decoder.base_model.named_parameters(remove_duplicate=False)
            if name in encoder_names
        }
        tied = {name: shared[source] for name, source in decoder.get_expanded_tied_weights_keys().items()}
        return {f"decoder.{name}": source for name, source in (shared | tied).items()}

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:
        """Weight -> weight that it is tied to: with `share_weights` of the encoder, else of the decoder's head."""
        if self.config.share_weights:
            return dict(self._tied_weights_keys or {})
        return super().get_expanded_tied_weights_keys(all_submodels)

    @property
    def decoder_word_embeddings(self) -> nn.Module:
        """The word embeddings of the decoder."""
        return self.decoder.get_input_embeddings()

    def get_input_embeddings(self) -> nn.Module:
        """The word embeddings of the encoder."""
        return self.encoder.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the word embeddings of the encoder."""
        self.encoder.set_input_embeddings(value)

    def decode(  # type: ignore[override]  # named arguments
        self,
        *,
        source: EncodedSource,
        token_type_ids: Tensor | None = None,
        langs: Tensor | None = None,
        **inputs: Any,
    ) -> BaseModelOutputWithPastAndCrossAttentions:
        """Run the decoder on the encoder's output. `token_type_ids` belong to the encoder; `langs` are ignored by a
        decoder that does not need them."""
        if self.source_projection is not None:
            source = replace(source, states=linear(self.source_projection, source.states))
        if langs is not None and getattr(self.config.decoder, "needs_languages", False):
            inputs["langs"] = langs
        return self.decoder.base_model(source=source, return_dict=True, **inputs)


class CtxEncoderDecoderForConditionalGeneration(
    TransformerForConditionalGeneration, CtxEncoderDecoderPreTrainedModel, GenerationMixin
):
    """Generates a target from a source with an encoder and a language model, each from its own checkpoint.

    Example:
        >>> model = CtxEncoderDecoderForConditionalGeneration.from_pretrained_pair(  # doctest: +SKIP
        ...     "runs/bert", "runs/bert", tokenizer=AutoTokenizer.from_pretrained("runs/bert")
        ... )
        >>> model.save_pretrained("runs/bert2bert")  # doctest: +SKIP
    """

    encoder_class = CtxEncoderDecoderModel
    output_layer_name = None  # type: ignore[assignment]

    def build_head(self, config: CtxEncoderDecoderConfig) -> None:
        """Create nothing: the decoder has the output layer."""

    def get_output_embeddings(self) -> nn.Module | None:
        """The output layer of the decoder."""
        return self.base_model.decoder.get_output_embeddings()

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        """Replace the output layer of the decoder."""
        self.base_model.decoder.set_output_embeddings(new_embeddings)

    def extra_ids(self, langs: Tensor | None = None, **ids: Tensor | None) -> dict[str, Tensor]:
        """The language ids for an encoder that needs them; raises CtxError if no side does."""
        if langs is not None and not self.config.needs_languages:
            raise CtxError("Neither the encoder nor the decoder embeds languages.", hint="remove langs.")
        needs_languages = getattr(self.config.encoder, "needs_languages", False)
        return {} if langs is None or not needs_languages else {"langs": langs}

    def token_logits(self, states: Tensor) -> Tensor:
        """(..., hidden) states of the decoder -> (..., vocabulary) logits."""
        return self.base_model.decoder.token_logits(self.output_layer_input(states))

    def token_loss(self, states: Tensor, labels: Tensor, num_items: ItemCounts) -> Tensor:
        """Mean cross-entropy in nats; (targets, hidden) states at the labeled positions."""
        return self.base_model.decoder.token_loss(self.output_layer_input(states), labels, num_items)

    @classmethod
    def from_pretrained_pair(
        cls,
        encoder: Checkpoint,
        decoder: Checkpoint,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        config: CtxEncoderDecoderConfig | None = None,
        **fields: Any,
    ) -> Self:
        """Create an encoder-decoder from two checkpoints; the cross-attention is newly initialized.

        Args:
            encoder: Directory or Hub id of the encoder: of this package, or of transformers in a layout that a family
                loads.
            decoder: Directory or Hub id of the language model that is the decoder. With `share_weights` only its
                output layer is loaded.
            tokenizer: Tokenizer of the targets, for `target_token_ids`.
            config: The configuration, see `pair_config`; None creates it.
            fields: Other fields of the new configuration, such as `share_weights`.

        Returns:
            The model in evaluation mode; `newly_initialized_modules` has the names of the new modules.

        Raises:
            CtxError: A checkpoint cannot be loaded, or is not an encoder or language model that can be combined.
        """
        if config is None:
            token_ids = {} if tokenizer is None else target_token_ids(tokenizer)
            config = pair_config(encoder, decoder, **{**token_ids, **fields})
        model = cls(config)
        options = {"add_pooling_layer": False} if isinstance(model.base_model.encoder, TransformerEncoder) else {}
        source_weights = load_pretrained(AutoModel, encoder, "the encoder", config=config.encoder, **options)
        auto_class = get_auto_class(language_model_auto_class(config.decoder))
        language_model = load_pretrained(auto_class, decoder, "the decoder", config=config.decoder)
        # weights of the decoder first: the encoder's replace shared ones
        model.base_model.decoder.load_state_dict(language_model.state_dict(), strict=False)
        model.base_model.encoder.load_state_dict(source_weights.state_dict())
        loaded = {f"model.encoder.{name}" for name in source_weights.state_dict()}
        loaded |= {f"model.decoder.{name}" for name in language_model.state_dict()}
        missing = {name for name, _ in model.named_parameters()} - loaded
        model.newly_initialized_modules = newly_initialized_modules(model, missing)
        return model.eval()

    @classmethod
    def from_pretrained(cls, *args: Any, output_loading_info: bool = False, **kwargs: Any) -> Any:
        """Load as in transformers, also a checkpoint of transformers' `EncoderDecoderModel`.

        Raises:
            CtxError: An option, such as `dtype`, is not supported for a checkpoint of transformers.
        """
        source = args[0] if args else kwargs.get("pretrained_model_name_or_path")
        config = kwargs.get("config")
        if source is not None and (config is None or isinstance(config, PathLike | str)):
            names = ("revision", "token", "cache_dir", "local_files_only", "force_download", "subfolder")
            options = {name: kwargs[name] for name in names if name in kwargs}
            if AutoConfig.from_pretrained(config or source, **options).model_type == "encoder-decoder":
                if unsupported := sorted({*kwargs} - {*names, "config", "pretrained_model_name_or_path"}):
                    raise CtxError(
                        f"Not supported for a checkpoint of transformers: {', '.join(unsupported)}.",
                        location=f"from_pretrained({str(source)!r})",
                        hint="load it without them, and change the model afterwards, such as by model.to(dtype).",
                    )
                model = cls(cls.config_class.from_pretrained(config or source, **options))
                report = load_reference_weights(model, source, **options)
                return (model.eval(), report) if output_loading_info else model.eval()
        return super().from_pretrained(*args, output_loading_info=output_loading_info, **kwargs)

    def export_reference(self, save_directory: str | Path) -> None:
        """Write a checkpoint of transformers' `EncoderDecoderModel`; shared weights are written twice.

        Raises:
            CtxError: transformers has no such model.
        """
        export_encoder_decoder(self, Path(save_directory))


def build_encoder(config: CtxConfig) -> Any:
    """Create the encoder, without a pooler; raises CtxError for a model that cannot be an encoder."""
    encoder_class = AutoModel._model_mapping[type(config)]
    has_ids = not getattr(encoder_class, "token_id_axes", ())
    if config.is_encoder_decoder or not has_ids or not hasattr(config, "hidden_size"):
        raise CtxError(
            f"{encoder_class.__name__} cannot be the encoder: it has a decoder, or reads no token ids.",
            hint="use an encoder such as BERT or XLM.",
        )
    options = {"add_pooling_layer": False} if issubclass(encoder_class, TransformerEncoder) else {}
    return encoder_class(config, **options)


def language_model_auto_class(config: CtxConfig) -> str:
    """Name of the Auto class of the language model: for causal models if there is one, else for masked ones."""
    return "AutoModelForCausalLM" if has_class("AutoModelForCausalLM", type(config)) else "AutoModelForMaskedLM"


def build_decoder(config: CtxConfig) -> Any:
    """Create the language model, causal and with cross-attention in each layer; raises CtxError for a model that cannot
    be a decoder."""
    name = language_model_auto_class(config)
    model = get_auto_class(name)._model_mapping[type(config)](config) if has_class(name, type(config)) else None
    stack = getattr(model, "base_model", None)
    blocks = list(dict.fromkeys(stack.layers)) if isinstance(stack, TransformerEncoder | TransformerDecoder) else []
    if not blocks or not all(type(block) is TransformerBlock for block in blocks):
        raise CtxError(
            f"A model with a {type(config).__name__} cannot be the decoder: its layers do not support cross-attention.",
            hint="use BERT, GPT-2, XLM or another Transformer with a language modeling head.",
        )
    for block in blocks:
        dropout, heads = block.attention.attention_dropout, block.attention.initial_num_heads
        block.add_cross_attention(CrossAttention(config.hidden_size, heads, dropout=dropout))
    if isinstance(stack, TransformerEncoder):
        stack.is_decoder = True
    return model


def pair_config(encoder: Checkpoint, decoder: Checkpoint, **fields: Any) -> CtxEncoderDecoderConfig:
    """The configuration of an encoder-decoder from two checkpoints, directories or Hub ids, with other `fields`.

    Raises:
        CtxError: A checkpoint has no configuration that a family loads, or the configurations do not fit.
    """
    sides = {"encoder": _load_config(encoder), "decoder": _load_config(decoder)}
    if hasattr(sides["encoder"], "causal"):  # of a causal XLM; the class of the decoder sets it for the decoder
        sides["encoder"].causal = False
    if hasattr(sides["decoder"], "causal"):
        sides["decoder"].causal = True
    with convert_config_errors(location=f"{encoder}, {decoder}", hint="use two checkpoints that fit."):
        return CtxEncoderDecoderConfig(**sides, **fields)


def _load_config(source: Checkpoint) -> Any:
    config = load_pretrained(AutoConfig, source, "the configuration")
    if isinstance(config, CtxConfig):
        return config
    return find_config_class(config.model_type).from_pretrained(source)


def target_token_ids(tokenizer: PreTrainedTokenizerBase) -> Mapping[str, Any]:
    """Configuration fields of the tokens that start, end and pad a target: [CLS] and [SEP] of BERT, </s> of XLM."""
    start = tokenizer.bos_token_id if tokenizer.cls_token_id is None else tokenizer.cls_token_id
    end = tokenizer.sep_token_id if tokenizer.eos_token_id is None else tokenizer.eos_token_id
    return {"decoder_start_token_id": start, "eos_token_id": end, "pad_token_id": tokenizer.pad_token_id}
