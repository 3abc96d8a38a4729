"""XLM (Lample & Conneau 2019, arXiv 1901.07291): a Transformer for several languages, pretrained by masked, translation
or causal language modeling."""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import Cache, GenerationMixin
from transformers import initialization as init
from transformers.core_model_loading import WeightRenaming, WeightTransform
from transformers.modeling_outputs import BaseModelOutputWithPast

from hf_ctxmodels import heads
from hf_ctxmodels.architectures.transformer_decoder import (
    DecoderHeadModel,
    TransformerDecoder,
    extend_languages,
    is_not_trailing_padding,
)
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.host_copies import host_copy, is_traced, on_host
from hf_ctxmodels.core.inputs import check_aligned, check_ids
from hf_ctxmodels.core.model import CtxPreTrainedModel
from hf_ctxmodels.core.weights import fused_projections
from hf_ctxmodels.heads import ItemCounts, with_unused_parameters
from hf_ctxmodels.layers.attention.layouts import Layout
from hf_ctxmodels.layers.attention.masks import BIDIRECTIONAL, CAUSAL
from hf_ctxmodels.layers.attention.prepared_masks import AttentionMask
from hf_ctxmodels.layers.transformer import BlockOutput, Memory
from hf_ctxmodels.models.xlm.configuration_xlm import CtxXLMConfig

XLM_EXPORT: list[WeightTransform] = [
    WeightRenaming(r"^transformer\.", r"xlm\."),
    WeightRenaming(r"(?<!_)embeddings\.", r"word_embeddings\."),
    WeightRenaming(r"lang_embeddings\.", r"language_embeddings\."),
    WeightRenaming(r"layer_norm_emb\.", r"embedding_norm\."),
    WeightRenaming(r"attentions\.(\d+)\.", r"layers\.\1\.attention\."),
    WeightRenaming(r"layer_norm1\.(\d+)\.", r"layers\.\1\.attention_norm\."),
    WeightRenaming(r"ffns\.(\d+)\.lin1\.", r"layers\.\1\.feed_forward\.up_proj\."),
    WeightRenaming(r"ffns\.(\d+)\.lin2\.", r"layers\.\1\.feed_forward\.down_proj\."),
    WeightRenaming(r"layer_norm2\.(\d+)\.", r"layers\.\1\.feed_forward_norm\."),
    WeightRenaming(r"out_lin\.", r"out_proj\."),
    WeightRenaming(r"pred_layer\.proj\.", r"lm_head\."),
    WeightRenaming(r"^qa_outputs\.start_logits\.", r"start_logits\."),
    WeightRenaming(r"^qa_outputs\.end_logits\.", r"end_logits\."),
    WeightRenaming(r"^qa_outputs\.answer_class\.", r"answer_class\."),
    WeightRenaming(r"end_logits\.LayerNorm\.", r"end_logits\.norm\."),
    *fused_projections("attention", ("q_lin", "k_lin", "v_lin")),
]
# transformers names the classifier of sequence heads `sequence_summary.summary`; loading uses this table for all heads
XLM_CONVERSION = [WeightRenaming(r"^sequence_summary\.summary\.", r"classifier\."), *XLM_EXPORT]


class SinusoidalPositions(nn.Embedding):
    """Fixed positions: sines in the even columns, cosines in the odd columns (Vaswani et al. 2017, section 3.5)."""

    fixed_parameters = ("weight",)

    def __init__(self, positions: int, width: int) -> None:
        super().__init__(positions, width)
        self.weight.requires_grad_(False)

    def fill(self) -> None:
        """Initialize the weights, unless they were loaded."""
        positions, width = self.weight.shape
        pairs = torch.arange(width, dtype=torch.float64) // 2
        angles = torch.arange(positions, dtype=torch.float64)[:, None] / 10000 ** (2 * pairs / width)
        even = torch.arange(width) % 2 == 0
        init.copy_(self.weight, torch.where(even, angles.sin(), angles.cos()).to(self.weight))


class LanguageLayers(nn.Module):
    """A layer that each language has separately (Wu et al. 2020, arXiv 1911.01464, section 4.3).

    A token is computed by the layer of its language, applied to the whole sequence: the layer of every language in the
    batch computes all tokens, and the outputs are selected.

    Attributes:
        languages: The layer of each language, by its id.
    """

    def __init__(self, blocks: Iterable[nn.Module]) -> None:
        super().__init__()
        self.languages = nn.ModuleList(blocks)

    def forward(
        self,
        hidden_states: Tensor,
        layout: Layout,
        mask: AttentionMask = BIDIRECTIONAL,
        memory: Memory | None = None,
        *,
        langs: Tensor,
        languages: Sequence[int],
        past_key_values: Cache | None = None,
        layer_index: int = 0,
    ) -> BlockOutput:
        """(..., hidden) at all tokens of `layout` -> (..., hidden); other arguments as in `TransformerBlock`.

        Args:
            langs: (...) language id of each token, as packed by `layout`.
            languages: The ids in `langs`.
        """
        if past_key_values is not None and len(languages) > 1:
            raise CtxError(
                "With language-specific layers, a cache needs one language for all sequences of a batch.",
                location="langs",
                hint="generate in one language at a time, or pass use_cache=False.",
            )
        outputs = [
            self.languages[language](
                hidden_states, layout, mask, memory, past_key_values=past_key_values, layer_index=layer_index
            )
            for language in languages
        ]
        states, attention, cross_attention = outputs[0]
        for language, output in zip(languages[1:], outputs[1:], strict=True):
            is_language = langs == language
            states = torch.where(is_language[..., None], output.hidden_states, states)
            if attention is not None:  # (batch, heads, queries, keys) of a padded batch
                attention = torch.where(is_language[:, None, :, None], output.attention, attention)
        for language, block in enumerate(self.languages):
            if language not in languages:
                states = with_unused_parameters(states, block)
        return BlockOutput(states, attention, cross_attention)


class CtxXLMPreTrainedModel(CtxPreTrainedModel):
    """Base class of the XLM models."""

    config: CtxXLMConfig
    base_model_prefix = "xlm"
    reference_model_type: ClassVar[str | None] = "xlm"
    export_conversion = XLM_EXPORT
    # the output layer, and a buffer of old checkpoints
    _keys_to_ignore_on_load_unexpected = [r"^lm_head\.", r"position_ids$"]

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Normal embeddings, zero for padding; linear layers as in torch, like the released code."""
        if isinstance(module, SinusoidalPositions):
            module.fill()
        elif isinstance(module, nn.Embedding):
            init.normal_(module.weight, std=self.config.embedding_std)
            if module.padding_idx is not None and not getattr(module.weight, "_is_hf_initialized", False):
                init.zeros_(module.weight[module.padding_idx])
        elif isinstance(module, nn.Linear):
            bound = module.in_features**-0.5
            if module.bias is not None:
                init.uniform_(module.bias, -bound, bound)  # before the weight, which may be tied and initialized
            init.uniform_(module.weight, -bound, bound)
        else:
            super()._init_weights(module)

    def reference_config(self) -> dict[str, Any]:
        """Return the configuration of the class in transformers; raise CtxError if it does not support the layers."""
        config = self.config
        if config.hidden_act not in ("gelu", "relu") or config.feed_forward_size != 4 * config.hidden_size:
            raise CtxError(
                "transformers' XLM supports an intermediate size of 4 * hidden_size with gelu or relu, but this model "
                f"has {config.feed_forward_size} with {config.hidden_act}.",
                hint="use save_pretrained.",
            )
        if config.has_language_layers:
            raise CtxError(
                f"transformers' XLM has no separate layers of each language, but num_language_layers="
                f"{config.num_language_layers}.",
                hint="use save_pretrained.",
            )
        values = super().reference_config() | {"gelu_activation": config.hidden_act == "gelu"}
        values |= {"embed_init_std": config.embedding_std, "summary_first_dropout": config.head_dropout}
        if config.lang2id is not None:
            values["id2lang"] = {str(number): language for language, number in config.lang2id.items()}
        return values if config.default_lang is None else values | {"lang_id": config.default_lang}


class CtxXLMModel(TransformerDecoder, CtxXLMPreTrainedModel):
    """The model without a head: a bidirectional encoder, or a causal decoder with a cache if `config.causal`."""

    zeros_padding = True
    extra_input_ids = {"langs": "n_langs"}
    _no_split_modules = ["TransformerBlock", "LanguageLayers"]

    def __init__(self, config: CtxXLMConfig) -> None:
        super().__init__(config)
        self.masks = CAUSAL if config.causal else BIDIRECTIONAL

    def build_word_embeddings(self, config: CtxXLMConfig) -> nn.Embedding:
        """Create the word embeddings."""
        return nn.Embedding(config.vocab_size, config.hidden_size, padding_idx=config.pad_token_id)

    def build_embeddings(self, config: CtxXLMConfig) -> None:
        """Create the position and language embeddings."""
        position_class = SinusoidalPositions if config.sinusoidal_embeddings else nn.Embedding
        self.position_embeddings = position_class(config.max_position_embeddings, config.hidden_size)
        if config.embeds_languages:
            self.language_embeddings = nn.Embedding(config.n_langs, config.hidden_size)

    def build_modules(self, config: CtxXLMConfig, num_layers: int, embedding_dropout: float) -> None:
        """Create all modules except the word embeddings."""
        super().build_modules(config, num_layers, embedding_dropout)
        for number in range(config.num_language_layers if config.has_language_layers else 0):
            self.layers[number] = LanguageLayers(self.build_layer(config) for _ in range(config.n_langs))

    @property
    def language_layers(self) -> list[LanguageLayers]:
        """The layers that each language has separately."""
        return [layer for layer in self.layers if isinstance(layer, LanguageLayers)]

    def layers_for(self, packed_ids: Mapping[str, Tensor]) -> Iterable[Callable[..., BlockOutput]]:
        """The layers, for the languages of a batch."""
        if not self.config.has_language_layers:
            return self.layers
        langs = packed_ids["langs"]
        languages = range(self.config.n_langs) if is_traced(langs) else host_copy(langs).unique().tolist() or [0]
        return [
            partial(layer, langs=langs, languages=languages) if isinstance(layer, LanguageLayers) else layer
            for layer in self.layers
        ]

    def extra_embedding_ids(self, tokens: Tensor, kwargs: dict[str, Any]) -> dict[str, Tensor]:
        """The language ids, if the model has language embeddings or layers."""
        langs = language_ids(self.config, tokens, kwargs.pop("langs", None))
        return {} if langs is None else {"langs": langs}

    def embed(self, embeddings: Tensor, position_ids: Tensor, langs: Tensor | None = None) -> Tensor:
        """(..., hidden) word embeddings, (...) positions and languages -> (..., hidden)."""
        embedded = embeddings + self.position_embeddings(position_ids)
        if langs is not None and self.config.embeds_languages:
            embedded = embedded + self.language_embeddings(langs)
        return self.dropout(self.embedding_norm(embedded))

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        langs: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        sequence_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = None,
        output_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Encode a batch. Other arguments as in `TransformerDecoder.forward`.

        Args:
            attention_mask: If None, padding tokens at the end of a sequence are masked, as in transformers.
            langs: (batch, length) language id of each token; None for `config.default_lang`. Required by a model with
                language embeddings or layers, and without `default_lang`.
            past_key_values, use_cache: For causal models only.
            kwargs: Other arguments, without `token_type_ids`, for which transformers adds word embeddings.
        """
        if kwargs.pop("token_type_ids", None) is not None:
            raise CtxError("XLM has no segments.", location="token_type_ids", hint="remove token_type_ids.")
        if (past_key_values is not None or use_cache) and not self.config.causal:
            raise CtxError(
                "A bidirectional model does not support a cache.",
                hint="use CtxXLMForCausalLM, or set config.causal=True.",
            )
        ids: Any = input_ids
        pad_token_id = self.config.pad_token_id
        is_unmasked = attention_mask is None and past_key_values is None and pad_token_id is not None
        if is_unmasked and isinstance(ids, Tensor) and ids.dim() == 2 and ids.numel():
            is_token = on_host(lambda tokens: is_not_trailing_padding(tokens, pad_token_id).long(), ids)
            attention_mask = None if not is_traced(ids) and bool(host_copy(is_token).all()) else is_token
        return super().forward(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            sequence_ids=sequence_ids,
            past_key_values=past_key_values,
            use_cache=use_cache,
            output_mask=output_mask,
            langs=langs,
            **kwargs,
        )


def language_ids(config: Any, tokens: Tensor, langs: Tensor | None, name: str = "langs") -> Tensor | None:
    """(batch, length) language id of each token of (batch, length, ...) tokens: the argument `langs` called `name`, or
    `config.default_lang`; None for a model that does not need them."""
    batch_size, length = tokens.shape[:2]
    check_aligned({name: langs}, batch_size, length)
    check_ids(name, langs, config.n_langs, "n_langs")
    if not config.needs_languages:
        return None
    if langs is not None:
        return langs
    if config.default_lang is None:
        names = sorted((config.lang2id or {}).items(), key=lambda item: item[1])
        ids = ", ".join(f"{number} {language}" for language, number in names) or f"0 to {config.n_langs - 1}"
        raise CtxError(
            f"The model has {'embeddings' if config.embeds_languages else 'layers'} of {config.n_langs} languages, but "
            f"{name} is missing.",
            hint=f"pass {name} (batch, length), the language id of each token ({ids}), for example by setting the "
            "tokenizer's `language`; or set config.default_lang.",
        )
    return torch.full((batch_size, length), config.default_lang, device=tokens.device)


class CtxXLMHeadModel(DecoderHeadModel, CtxXLMPreTrainedModel):
    """Base class of the XLM models with a head; sequence heads use the state of the first token, </s>."""

    encoder_class = CtxXLMModel
    default_pooling = "first"


class CtxXLMForMaskedLM(heads.ForMaskedLM, CtxXLMHeadModel):
    """XLM with an output layer for masked and translation language modeling, tied to the word embeddings.

    With `config.causal` the logits are causal, and labels are not shifted.
    """

    _tied_weights_keys = {"lm_head.weight": "xlm.word_embeddings.weight"}
    reference_architecture = "XLMWithLMHeadModel"
    output_layer_name = "lm_head"

    def build_head(self, config: CtxXLMConfig) -> None:
        """Create the output layer; unlike BERT's head, XLM's has no layers before it."""
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size)

    def token_logits(self, states: Tensor) -> Tensor:
        """(..., hidden) output of the encoder -> (..., vocabulary) logits."""
        return heads.HeadModel.token_logits(self, states)

    def token_loss(self, states: Tensor, labels: Tensor, num_items: ItemCounts) -> Tensor:
        """Mean cross-entropy in nats; (targets, hidden) states at the labeled positions."""
        return heads.HeadModel.token_loss(self, states, labels, num_items)


class CtxXLMForCausalLM(heads.ForCausalLM, CtxXLMHeadModel, GenerationMixin):
    """XLM as a causal language model (section 3.2), with `config.causal`.

    Its weights have the same names as in `CtxXLMForMaskedLM`, which can load them and export them to transformers.
    """

    _tied_weights_keys = {"lm_head.weight": "xlm.word_embeddings.weight"}
    reference_model_type = None  # the class of transformers computes the same logits, but does not shift labels

    def __init__(self, config: CtxXLMConfig) -> None:
        if not config.causal:
            config = copy.deepcopy(config)
            config.causal = True
        super().__init__(config)

    def build_head(self, config: CtxXLMConfig) -> None:
        """Create the output layer, which has a bias."""
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size)

    def prepare_inputs_for_generation(
        self, input_ids: Tensor, *args: Any, langs: Tensor | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """Prepare inputs as in transformers; new tokens have the language of the last token of the prompt."""
        inputs = super().prepare_inputs_for_generation(input_ids, *args, **kwargs)
        if langs is not None:
            new_tokens = inputs["input_ids"] if inputs.get("input_ids") is not None else inputs["inputs_embeds"]
            end = max(input_ids.shape[1], new_tokens.shape[1])
            inputs["langs"] = extend_languages(langs, end)[:, end - new_tokens.shape[1] :]
        return inputs


class CtxXLMForSequenceClassification(heads.ForSequenceClassification, CtxXLMHeadModel):
    """XLM with a classifier or regressor on the first token's state."""

    export_conversion = XLM_CONVERSION


class CtxXLMForMultipleChoice(heads.ForMultipleChoice, CtxXLMHeadModel):
    """XLM that scores choices by two linear layers, the first of width `num_labels`, as in transformers."""

    export_conversion = XLM_CONVERSION

    def build_head(self, config: CtxXLMConfig) -> None:
        """Create dropout and both linear layers."""
        super().build_head(config)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.logits_proj = nn.Linear(config.num_labels, 1)

    def score(self, pooled: Tensor, choices: int) -> Tensor:
        """(batch * choices, hidden) -> (batch * choices, 1) logits."""
        return self.logits_proj(self.classifier(self.dropout(pooled)))


class CtxXLMForTokenClassification(heads.ForTokenClassification, CtxXLMHeadModel):
    """XLM with a token classifier."""


class CtxXLMForQuestionAnswering(heads.ForQuestionAnswering, CtxXLMHeadModel):
    """XLM with a span classifier for extractive question answering."""

    reference_architecture = "XLMForQuestionAnsweringSimple"


class CtxXLMForBeamSearchQuestionAnswering(heads.ForBeamSearchQuestionAnswering, CtxXLMHeadModel):
    """XLM with beam search over spans and answerability for extractive question answering."""

    reference_architecture = "XLMForQuestionAnswering"
