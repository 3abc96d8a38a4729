"""Weight conversion of BERT and DistilBERT between the layout of transformers and the native layout, and of BERT's
segment embeddings in families with more segments."""

import re
from typing import Any

import torch
from torch import Tensor
from transformers.core_model_loading import ConversionOps, WeightConverter, WeightRenaming, WeightTransform

from hf_ctxmodels.architectures.configurations import GENERATION_TOKEN_FIELDS, PAIR_SEGMENTS
from hf_ctxmodels.core.weights import (
    LEGACY_NORM_RENAMINGS,
    POST_NORM_RENAMINGS,
    decoder_bias,
    fused_projections,
    single_tensor,
)

_RENAMINGS = [
    *POST_NORM_RENAMINGS,
    WeightRenaming(r"cls\.predictions\.transform\.dense\.", r"mlm_head.dense."),
    WeightRenaming(r"cls\.predictions\.transform\.LayerNorm\.", r"mlm_head.norm."),
    WeightRenaming(r"cls\.predictions\.decoder\.weight", r"mlm_head.decoder.weight"),
    WeightRenaming(r"cls\.seq_relationship\.", r"nsp_head."),
]
BERT_EXPORT: list[WeightTransform] = [
    *_RENAMINGS,
    *fused_projections("attention.self"),
    decoder_bias("cls.predictions"),
]
# DistilBERT (Sanh et al. 2019, arXiv 1910.01108): BERT without segment embeddings, under other names
DISTILBERT_EXPORT: list[WeightTransform] = [
    WeightRenaming(r"^distilbert\.", r"bert."),
    WeightRenaming(r"embeddings\.LayerNorm\.", r"embeddings.norm."),
    WeightRenaming(r"transformer\.layer\.", r"layers."),
    WeightRenaming(r"attention\.out_lin\.", r"attention.out_proj."),
    WeightRenaming(r"sa_layer_norm\.", r"attention_norm."),
    WeightRenaming(r"ffn\.lin1\.", r"feed_forward.up_proj."),
    WeightRenaming(r"ffn\.lin2\.", r"feed_forward.down_proj."),
    WeightRenaming(r"output_layer_norm\.", r"feed_forward_norm."),
    WeightRenaming(r"^pre_classifier\.", r"bert.pooler.dense."),
    WeightRenaming(r"^vocab_transform\.", r"mlm_head.dense."),
    WeightRenaming(r"^vocab_layer_norm\.", r"mlm_head.norm."),
    WeightRenaming(r"^vocab_projector\.", r"mlm_head.decoder."),
    *fused_projections("attention", ("q_lin", "k_lin", "v_lin")),
]

# the weight names of BERT and DistilBERT are disjoint, so one table loads both
BERT_CONVERSION: list[WeightTransform] = [*LEGACY_NORM_RENAMINGS, *BERT_EXPORT, *DISTILBERT_EXPORT]


class ExpandSegments(ConversionOps):
    """(2, hidden) embeddings of BERT's segments -> (2 + copies, hidden), copies of the segments `copied`.

    The reverse removes the copies if they are unchanged. More embeddings than two, and trained ones, are not changed.
    """

    def __init__(self, copied: tuple[int, ...], reverse: bool = False) -> None:
        self.copied, self.reverse = copied, reverse

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict[str, Tensor]:
        """Add or remove the copies."""
        (value,) = input_dict.values()
        embeddings = single_tensor(value)
        if self.reverse and _are_copies(embeddings, self.copied):
            embeddings = embeddings[:PAIR_SEGMENTS].clone()
        elif not self.reverse and len(embeddings) == PAIR_SEGMENTS:
            embeddings = torch.cat([embeddings, embeddings[list(self.copied)]])
        return {target_patterns[0]: embeddings}

    @property
    def reverse_op(self) -> ConversionOps:
        """The opposite conversion."""
        return ExpandSegments(self.copied, not self.reverse)


def segment_conversion(copied: tuple[int, ...]) -> WeightConverter:
    """Conversion of BERT's two segment embeddings, see `ExpandSegments`."""
    name = "embeddings.token_type_embeddings.weight"
    return WeightConverter(name, name, [ExpandSegments(copied)])


def bert_architecture(model: Any) -> str:
    """Name of the BERT class in transformers that corresponds to a class with BERT's network: "BertForMaskedLM"."""
    return re.sub(r"^Ctx\w*?(?=For|Model$)", "Bert", model.package_class_name())


def exported_bert_fields(model: Any) -> dict[str, Any]:
    """Fields of the exported BERT configuration of a family with more segments: the class, the number of segments
    (BERT's two, or all if the additional ones have been trained), and the ids of the tokens for generation."""
    embeddings = model.base_model.embeddings.token_type_embeddings.weight
    segments = PAIR_SEGMENTS if _are_copies(embeddings, model.config.copied_segments) else len(embeddings)
    token_ids = {name: getattr(model.config, name) for name in GENERATION_TOKEN_FIELDS}
    return {"architectures": [bert_architecture(model)], "type_vocab_size": segments, **token_ids}


def _are_copies(embeddings: Tensor, copied: tuple[int, ...]) -> bool:
    has_size = len(embeddings) == PAIR_SEGMENTS + len(copied)
    return has_size and torch.equal(embeddings[PAIR_SEGMENTS:], embeddings[list(copied)])
