"""ELECTRA (Clark et al. 2020, arXiv 2003.10555): an encoder pretrained to detect tokens replaced by a small generator.

Joint pretraining of generator and discriminator is in `pretraining_electra`.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn
from transformers.core_model_loading import WeightRenaming, WeightTransform
from transformers.utils import ModelOutput
from transformers.utils.generic import can_return_tuple

from hf_ctxmodels import heads
from hf_ctxmodels.architectures.transformer_encoder import TransformerEncoder, build_embeddings
from hf_ctxmodels.core.host_copies import select_true
from hf_ctxmodels.core.inputs import padding_mask_or_none
from hf_ctxmodels.core.model import CtxPreTrainedModel
from hf_ctxmodels.core.weights import POST_NORM_RENAMINGS, fused_projections
from hf_ctxmodels.heads import ItemCounts, mean_over_targets
from hf_ctxmodels.heads.base import ignore_padding, labeled_targets, mask_of_targets
from hf_ctxmodels.layers.common import get_activation
from hf_ctxmodels.layers.cpu.dropout import Dropout
from hf_ctxmodels.layers.transformer import TokenPositionTypeEmbeddings
from hf_ctxmodels.models.electra.configuration_electra import CtxElectraConfig
from hf_ctxmodels.models.electra.replaced_token_detection import DetectionHead, detection_counts, detection_loss

# no pattern matches the names in a joint checkpoint that start with `generator.`
ELECTRA_CONVERSION: list[WeightTransform] = [
    *POST_NORM_RENAMINGS,
    WeightRenaming(r"embeddings_project\.", r"embeddings.projection."),
    WeightRenaming(r"discriminator_predictions\.dense\.", r"rtd_head.dense."),
    WeightRenaming(r"discriminator_predictions\.dense_prediction\.", r"rtd_head.out_proj."),
    WeightRenaming(r"generator_predictions\.dense\.", r"mlm_head.dense."),
    WeightRenaming(r"generator_predictions\.LayerNorm\.", r"mlm_head.norm."),
    WeightRenaming(r"generator_lm_head\.", r"mlm_head.decoder."),
    *fused_projections("attention.self"),
]


class CtxElectraPreTrainedModel(CtxPreTrainedModel):
    """Base class of the ELECTRA models."""

    config: CtxElectraConfig
    base_model_prefix = "electra"
    reference_model_type = "electra"
    export_conversion = ELECTRA_CONVERSION
    # other heads of the family, the generator, and a buffer of old checkpoints
    _keys_to_ignore_on_load_unexpected = [
        r"^(mlm_head|rtd_head|copy_gate|reward_baseline|generator)\.",
        r"position_ids$",
    ]

    def reference_config(self) -> dict[str, Any]:
        """The configuration of the class of transformers, without the fields of joint pretraining."""
        values = super().reference_config()
        return {name: value for name, value in values.items() if name not in self.config.pair_fields}


class CtxElectraModel(TransformerEncoder, CtxElectraPreTrainedModel):
    """The ELECTRA encoder; the discriminator's if loaded from a joint checkpoint."""

    def __init__(self, config: CtxElectraConfig, add_pooling_layer: bool = False) -> None:
        super().__init__(config, add_pooling_layer)

    def build_embeddings(self, config: CtxElectraConfig) -> TokenPositionTypeEmbeddings:
        """Create the embeddings, projected to `hidden_size` if their width differs."""
        projected_size = None if config.embedding_size == config.hidden_size else config.hidden_size
        return build_embeddings(config, width=config.embedding_size, projected_size=projected_size)

    def build_pooler(self, config: CtxElectraConfig) -> nn.Module:
        """Create an identity: `pooler_output` is the first token's state, since the heads have a dense layer."""
        return nn.Identity()


class CtxElectraHeadModel(heads.HeadModel, CtxElectraPreTrainedModel):
    """Base class of the ELECTRA models with a head."""

    encoder_class = CtxElectraModel


class CtxElectraForMaskedLM(heads.ForMaskedLM, CtxElectraHeadModel):
    """The generator: ELECTRA with a masked-LM head, whose decoder is tied to the word embeddings."""

    _tied_weights_keys = {"mlm_head.decoder.weight": "electra.embeddings.word_embeddings.weight"}
    transform_activation = "gelu"  # independent of `hidden_act`, as in transformers


@dataclass
class CtxElectraDetectionOutput(ModelOutput):
    """Output of `CtxElectraForReplacedTokenDetection`.

    Attributes:
        loss: Binary cross-entropy in nats.
        logits: (batch, length), positive for replaced tokens.
        metrics: "precision", "recall", "f1" and "share" of replaced tokens, see `heads.accuracy_counts`.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    metrics: dict[str, Tensor] | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None


class CtxElectraForReplacedTokenDetection(CtxElectraHeadModel):
    """The discriminator without a generator (section 2); ElectraForPreTraining in `transformers`."""

    reference_architecture = "ElectraForPreTraining"
    loss_targets: ClassVar[tuple[str, ...]] = ("labels",)

    def build_head(self, config: CtxElectraConfig) -> None:
        """Create the detection head."""
        self.rtd_head = DetectionHead(config.hidden_size, activation=config.hidden_act)

    @property
    def supports_label_smoothing(self) -> bool:
        """False: the loss is a binary cross-entropy."""
        return False

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        sequence_ids: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: ItemCounts = None,
        **kwargs: Any,
    ) -> CtxElectraDetectionOutput:
        """Compute logits, and the loss with `labels` (batch, length): 1 for replaced, 0 for original; -100 and padding
        are ignored. Other arguments as in the encoder's forward."""
        outputs = self.encode(
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            sequence_ids=sequence_ids,
            **kwargs,
        )
        logits = self.rtd_head(outputs.last_hidden_state)
        loss = metrics = None
        if labels is not None:
            labels = heads.validate_targets(labels, "labels", logits.shape)
            heads.check_classes(labels, 2, "labels")
            labels = ignore_padding(labels, padding_mask_or_none(attention_mask), sequence_ids)
            target_logits, replaced = select_true(logits, mask_of_targets(labels)), labeled_targets(labels) == 1
            loss = mean_over_targets(detection_loss(target_logits, replaced), labels, "labels", num_items_in_batch)
            metrics = detection_counts(target_logits.detach(), replaced)
        return CtxElectraDetectionOutput(
            loss=loss,
            logits=logits,
            metrics=metrics,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


class CtxElectraForSequenceClassification(heads.ForSequenceClassification, CtxElectraHeadModel):
    """ELECTRA with a classifier or regressor on the first token's state: dense layer, gelu and linear layer."""

    classifier_activation = "gelu"


class CtxElectraForTokenClassification(heads.ForTokenClassification, CtxElectraHeadModel):
    """ELECTRA with a token classifier."""


class CtxElectraForQuestionAnswering(heads.ForQuestionAnswering, CtxElectraHeadModel):
    """ELECTRA with a span classifier for extractive question answering."""


class CtxElectraForMultipleChoice(heads.ForMultipleChoice, CtxElectraHeadModel):
    """ELECTRA with a multiple-choice classifier on the first token's state (`config.summary_*`)."""

    def build_head(self, config: CtxElectraConfig) -> None:
        """Create the summary and a linear layer to one logit."""
        summary = nn.Linear(config.hidden_size, config.hidden_size) if config.summary_use_proj else nn.Identity()
        self.sequence_summary = nn.ModuleDict({"summary": summary})
        self.activation = get_activation(config.summary_activation) if config.summary_activation else nn.Identity()
        self.dropout = Dropout(config.summary_last_dropout)
        self.classifier = nn.Linear(config.hidden_size, 1)

    def score(self, pooled: Tensor, choices: int) -> Tensor:
        """(batch * choices, hidden) states of the first tokens -> (batch * choices, 1) logits."""
        return self.classifier(self.dropout(self.activation(self.sequence_summary["summary"](pooled))))
