"""ELECTRA (Clark et al. 2020): an encoder pretrained to detect tokens replaced by a small generator."""

from typing import Any

from hf_ctxmodels.models.electra.configuration_electra import CtxElectraConfig
from hf_ctxmodels.models.electra.modeling_electra import (
    ELECTRA_CONVERSION,
    CtxElectraForMaskedLM,
    CtxElectraForMultipleChoice,
    CtxElectraForQuestionAnswering,
    CtxElectraForReplacedTokenDetection,
    CtxElectraForSequenceClassification,
    CtxElectraForTokenClassification,
    CtxElectraModel,
)
from hf_ctxmodels.models.electra.pretraining_electra import CtxElectraForPreTraining
from hf_ctxmodels.models.electra.tokenization_electra import CtxElectraTokenizer
from hf_ctxmodels.spec import FamilySpec, PublishedCount, ShortTraining, Target, Traits, encoder_size

# small, base, large: Clark et al. 2020, appendix A, table 6; tiny and mini have the proportions of small
SIZES: dict[str, dict[str, Any]] = {
    "tiny": {**encoder_size(128, 2, 2), "embedding_size": 64, "generator_size": 0.5},
    "mini": {**encoder_size(256, 4, 4), "embedding_size": 128, "generator_size": 0.25},
    "small": {**encoder_size(256, 12, 4), "embedding_size": 128, "generator_size": 0.25, "initializer_range": 0.02},
    "base": {**encoder_size(768, 12, 12), "embedding_size": 768, "generator_size": 1 / 3},
    "large": {**encoder_size(1024, 24, 16), "embedding_size": 1024, "generator_size": 0.25},
}


def _published_pair(
    fields: dict[str, Any], width: int, encoder: int, discriminator: int, generator: int
) -> PublishedCount:
    """Counts of a published discriminator; pretraining adds its generator except for the shared embeddings and norm."""
    counts = {
        "AutoModel": encoder,
        "CtxElectraForReplacedTokenDetection": discriminator,
        "AutoModelForPreTraining": discriminator + generator - (30522 + 512 + 2 + 2) * width,
    }
    return PublishedCount(fields, counts)


SPEC = FamilySpec(
    name="electra",
    paper="Clark et al. 2020, ELECTRA: Pre-training Text Encoders as Discriminators Rather Than Generators "
    "(arXiv 2003.10555)",
    config=CtxElectraConfig,
    tokenizer=CtxElectraTokenizer,
    models={
        "AutoModel": CtxElectraModel,
        "AutoModelForPreTraining": CtxElectraForPreTraining,
        "AutoModelForMaskedLM": CtxElectraForMaskedLM,
        "AutoModelForSequenceClassification": CtxElectraForSequenceClassification,
        "AutoModelForTokenClassification": CtxElectraForTokenClassification,
        "AutoModelForQuestionAnswering": CtxElectraForQuestionAnswering,
        "AutoModelForMultipleChoice": CtxElectraForMultipleChoice,
    },
    objective_classes={"rtd": "ReplacedTokenDetection", "mlm": "MaskedLM"},
    sizes=SIZES,
    # parameter counts of the classes of transformers 5.23
    published={
        "small": _published_pair({}, 128, 13_483_008, 13_549_057, 4_620_026),
        "base": _published_pair(SIZES["base"], 768, 108_891_648, 109_483_009, 33_740_602),
        "large": _published_pair(SIZES["large"], 1024, 334_092_288, 335_142_913, 51_295_290),
        # the released generator of the small discriminator has the same size as the discriminator
        "released generator of small": PublishedCount({}, {"AutoModelForMaskedLM": 13_546_682}),
        "generator of small": PublishedCount(
            {"hidden_size": 64, "num_attention_heads": 1, "intermediate_size": 256},
            {"AutoModel": 4_580_928, "AutoModelForMaskedLM": 4_620_026},
        ),
        "generator of base": PublishedCount(
            {"embedding_size": 768}, {"AutoModel": 33_511_168, "AutoModelForMaskedLM": 33_740_602}
        ),
        "generator of large": PublishedCount(
            {"embedding_size": 1024, "num_hidden_layers": 24},
            {"AutoModel": 50_999_552, "AutoModelForMaskedLM": 51_295_290},
        ),
    },
    conversion=ELECTRA_CONVERSION,
    reference_heads={"AutoModelForPreTraining": CtxElectraForReplacedTokenDetection},
    traits=Traits(
        tiny={"discriminator_weight": 2.0},
        # a generator that shares all weights learns little: the other loss has 50 times its weight
        short_training=ShortTraining(config_options=("generator_size=0.5",)),
        targets={"token_labels": Target.ORIGINAL},
        loss_weights={"rtd_loss": "discriminator_weight"},
    ),
)

__all__ = [
    "CtxElectraConfig",
    "CtxElectraForMaskedLM",
    "CtxElectraForMultipleChoice",
    "CtxElectraForPreTraining",
    "CtxElectraForQuestionAnswering",
    "CtxElectraForReplacedTokenDetection",
    "CtxElectraForSequenceClassification",
    "CtxElectraForTokenClassification",
    "CtxElectraModel",
    "CtxElectraTokenizer",
]
