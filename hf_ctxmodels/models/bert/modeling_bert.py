"""BERT (Devlin et al. 2019, arXiv 1810.04805): a bidirectional Transformer encoder trained on masked words and pairs.

Its own here: post-norm layers, segment embeddings, a pooler on the first token, and masked-LM with next-sentence
prediction. Everything else comes from `hf_ctxmodels.layers` and `hf_ctxmodels.heads`.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import NextSentencePredictorOutput
from transformers.utils import ModelOutput
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults

from hf_ctxmodels import heads
from hf_ctxmodels.heads import IGNORED, ItemCounts, cross_entropy_over_targets
from hf_ctxmodels.layers.attention import SelfAttention
from hf_ctxmodels.layers.dropout import Dropout
from hf_ctxmodels.layers.embeddings import TokenPositionTypeEmbeddings
from hf_ctxmodels.layers.feed_forward import FeedForward
from hf_ctxmodels.layers.prediction import MaskedPredictionHead
from hf_ctxmodels.layers.varlen import Layout
from hf_ctxmodels.modeling_base import (
    CtxPreTrainedModel,
    EncoderOutput,
    capture_unpacked_outputs,
    check_ids,
    default_positions,
)
from hf_ctxmodels.models.bert.configuration_bert import CtxBertConfig
from hf_ctxmodels.models.bert.conversion_bert import BERT_EXPORT


class CtxBertLayer(GradientCheckpointingLayer):
    """Self-attention and feed-forward, each followed by dropout, the residual sum and a LayerNorm (post-norm)."""

    def __init__(self, config: CtxBertConfig) -> None:
        super().__init__()
        self.attention = SelfAttention(
            config.hidden_size,
            config.num_attention_heads,
            dropout=config.attention_probs_dropout_prob,
            config=config,
        )
        self.attention_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.feed_forward = FeedForward(config.hidden_size, config.intermediate_size, config.hidden_act)
        self.feed_forward_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = Dropout(config.hidden_dropout_prob)

    def forward(self, hidden_states: Tensor, layout: Layout) -> Tensor:
        """(..., hidden) as packed by `layout` -> (..., hidden) at the rows it wants."""
        attended, _ = self.attention(hidden_states, layout)
        hidden_states = self.attention_norm(layout.query_rows(hidden_states) + self.dropout(attended))
        return self.feed_forward_norm(hidden_states + self.dropout(self.feed_forward(hidden_states)))


class CtxBertPooler(nn.Module):
    """Dense and tanh on the first token's state: what the pair and sequence heads read."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.dense = nn.Linear(hidden_size, hidden_size)

    def forward(self, first_states: Tensor) -> Tensor:
        """(batch, hidden) -> (batch, hidden)."""
        return torch.tanh(self.dense(first_states))


class CtxBertPreTrainedModel(CtxPreTrainedModel):
    """BERT's part of the model base."""

    config: CtxBertConfig
    base_model_prefix = "bert"
    reference_model_type = "bert"
    export_conversion = BERT_EXPORT
    _no_split_modules = ["CtxBertLayer"]
    _can_record_outputs = {"hidden_states": CtxBertLayer, "attentions": SelfAttention}
    # Other heads of the same family, and a buffer that old checkpoints carry.
    _keys_to_ignore_on_load_unexpected = [r"^mlm_head\.", r"^nsp_head\.", r"pooler\.", r"position_ids$"]


class CtxBertModel(CtxBertPreTrainedModel):
    """The encoder.

    Args:
        config: Its shape.
        add_pooling_layer: Whether to compute `pooler_output`.
    """

    def __init__(self, config: CtxBertConfig, add_pooling_layer: bool = True) -> None:
        super().__init__(config)
        self.embeddings = TokenPositionTypeEmbeddings(
            config.vocab_size,
            config.hidden_size,
            config.max_position_embeddings,
            config.type_vocab_size,
            layer_norm_eps=config.layer_norm_eps,
            dropout=config.hidden_dropout_prob,
            padding_idx=config.pad_token_id,
        )
        self.layers = nn.ModuleList(CtxBertLayer(config) for _ in range(config.num_hidden_layers))
        self.pooler = CtxBertPooler(config.hidden_size) if add_pooling_layer else None
        self.gradient_checkpointing = False
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        """The word embeddings."""
        return self.embeddings.word_embeddings

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        """Replace the word embeddings (used when the vocabulary is resized)."""
        self.embeddings.word_embeddings = value

    @merge_with_config_defaults
    @capture_unpacked_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        sequence_ids: Tensor | None = None,
        wanted: Tensor | None = None,
        **kwargs: Any,
    ) -> EncoderOutput:
        """Encode a batch.

        Args:
            input_ids: (batch, length) token ids; or `inputs_embeds` (batch, length, hidden) in their place.
            attention_mask: (batch, length), 1 at tokens and 0 at padding; or a ready 4-D mask.
            token_type_ids: (batch, length), 0 for the first segment, 1 for the second; None is all 0.
            position_ids: (batch, length) or (1, length); None counts the columns of the batch, or, with
                `sequence_ids`, the tokens of each sequence.
            sequence_ids: (batch, length), for several sequences in one row: 0 at padding; a run of equal
                numbers is one sequence, whose tokens attend to each other only.
            wanted: (batch, length) bool; given, `last_hidden_state` holds only these positions, (wanted, hidden) in
                row-major order, and the last layer is computed only there (and at the first tokens, for the pooler).
            kwargs: `output_hidden_states`, `output_attentions` (eager only), and what the attention function takes.

        Raises:
            CtxError: Input that does not fit together or the model, see `check_encoder_input`.
        """
        words = self.check_encoder_input(
            input_ids,
            inputs_embeds,
            attention_mask,
            self.config.max_position_embeddings,
            sequence_ids=sequence_ids,
            wanted=wanted,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
        )
        check_ids("token_type_ids", token_type_ids, self.config.type_vocab_size, "type_vocab_size")
        check_ids("position_ids", position_ids, self.config.max_position_embeddings, "max_position_embeddings")
        layout = self.encoder_layout(words, attention_mask, sequence_ids, **kwargs)
        hidden_states = self.embeddings(
            layout.pack(words),
            layout.pack(default_positions(words, position_ids, sequence_ids)),
            None if token_type_ids is None else layout.pack(token_type_ids),
        )
        final_layout = layout if wanted is None else layout.select(wanted, and_first=self.pooler is not None)
        for layer in self.layers:
            hidden_states = layer(hidden_states, final_layout if layer is self.layers[-1] else layout)
        return EncoderOutput(
            last_hidden_state=final_layout.output(hidden_states),
            pooler_output=None if self.pooler is None else self.pooler(final_layout.first(hidden_states)),
            layout=layout,
        )


@dataclass
class CtxBertForPreTrainingOutput(ModelOutput):
    """Output of `CtxBertForPreTraining`.

    Attributes:
        loss: Sum of the two terms whose targets were given.
        mlm_loss: Masked-LM cross-entropy in nats, detached.
        next_sentence_loss: Next-sentence cross-entropy in nats, detached.
        prediction_logits: (batch, length, vocabulary); None when `labels` are given.
        seq_relationship_logits: (batch, 2), 0 = the second segment follows the first, 1 = it is a random one.
        hidden_states, attentions: As asked for.
    """

    loss: Tensor | None = None
    prediction_logits: Tensor | None = None
    seq_relationship_logits: Tensor | None = None
    mlm_loss: Tensor | None = None
    next_sentence_loss: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None


class CtxBertHeadModel(heads.HeadModel, CtxBertPreTrainedModel):
    """Binds the generic heads to BERT's encoder."""

    encoder_class = CtxBertModel


class CtxBertForMaskedLM(heads.ForMaskedLM, CtxBertHeadModel):
    """BERT with the masked-LM head; the decoder is tied to the word embeddings."""

    _tied_weights_keys = {"mlm_head.decoder.weight": "bert.embeddings.word_embeddings.weight"}

    def build_head(self, config: CtxBertConfig) -> None:
        """The masked-LM head."""
        self.mlm_head = MaskedPredictionHead(
            config.hidden_size,
            config.hidden_size,
            config.vocab_size,
            activation=config.hidden_act,
            layer_norm_eps=config.layer_norm_eps,
        )


class CtxBertForPreTraining(CtxBertForMaskedLM):
    """Both pretraining objectives: masked-LM and next-sentence prediction (section 3.1).

    The loss is the sum of the terms whose targets are given, each a mean over its own targets: Trainer's single
    `num_items_in_batch` cannot describe two terms, so it is not asked for (`accepts_loss_kwargs`).
    """

    loss_targets: ClassVar[tuple[str, ...]] = ("labels", "next_sentence_label")
    pools = True
    accepts_loss_kwargs = False

    def build_head(self, config: CtxBertConfig) -> None:
        """The masked-LM head and the next-sentence classifier."""
        super().build_head(config)
        self.nsp_head = nn.Linear(config.hidden_size, 2)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        next_sentence_label: Tensor | None = None,
        num_items_in_batch: ItemCounts = None,
        **kwargs: Any,
    ) -> CtxBertForPreTrainingOutput:
        """Logits of both heads, and the loss.

        Args:
            labels: (batch, length) ids of the masked tokens, -100 elsewhere; given, the last layer and the vocabulary
                logits are computed only there, and `prediction_logits` is None.
            next_sentence_label: (batch,), 0 where the second segment follows the first, 1 where it is a random one.
        """
        outputs = self.encode(
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            wanted=None if labels is None else labels != IGNORED,
            **kwargs,
        )
        pair_logits = self.nsp_head(outputs.pooler_output)
        prediction_logits = mlm_loss = pair_loss = None
        if labels is None:
            prediction_logits = self.mlm_head(outputs.last_hidden_state)
        else:
            mlm_loss = self.masked_lm_loss(outputs.last_hidden_state, labels, num_items_in_batch)
        if next_sentence_label is not None:
            pair_loss = cross_entropy_over_targets(
                pair_logits, next_sentence_label.view(-1), "next_sentence_label", num_items_in_batch
            )
        terms = [term for term in (mlm_loss, pair_loss) if term is not None]
        return CtxBertForPreTrainingOutput(
            loss=torch.stack(terms).sum() if terms else None,
            prediction_logits=prediction_logits,
            seq_relationship_logits=pair_logits,
            mlm_loss=None if mlm_loss is None else mlm_loss.detach(),
            next_sentence_loss=None if pair_loss is None else pair_loss.detach(),
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


class CtxBertForNextSentencePrediction(CtxBertHeadModel):
    """BERT with the next-sentence classifier alone (section 3.1, task 2)."""

    loss_targets: ClassVar[tuple[str, ...]] = ("labels",)
    pools = True

    def build_head(self, config: CtxBertConfig) -> None:
        """The next-sentence classifier."""
        self.nsp_head = nn.Linear(config.hidden_size, 2)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: ItemCounts = None,
        **kwargs: Any,
    ) -> NextSentencePredictorOutput:
        """Logits (batch, 2), and the loss where `labels` (batch,) are given: 0 = follows, 1 = random."""
        outputs = self.encode(
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            **kwargs,
        )
        logits = self.nsp_head(outputs.pooler_output)
        loss = None
        if labels is not None:
            loss = cross_entropy_over_targets(logits, labels.view(-1), "labels", num_items_in_batch)
        return NextSentencePredictorOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


class CtxBertForSequenceClassification(heads.ForSequenceClassification, CtxBertHeadModel):
    """BERT with a classifier or regressor on the pooled output."""


class CtxBertForTokenClassification(heads.ForTokenClassification, CtxBertHeadModel):
    """BERT with a classifier on every token."""


class CtxBertForQuestionAnswering(heads.ForQuestionAnswering, CtxBertHeadModel):
    """BERT with start and end scores."""


class CtxBertForMultipleChoice(heads.ForMultipleChoice, CtxBertHeadModel):
    """BERT with one score per choice."""
