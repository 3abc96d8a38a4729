"""Suite `seq2seq`: sequence-to-sequence models compared with transformers at the same weights.

The reference of an encoder-decoder is the class of the same name; for MASS it is BART, which has the same architecture.
UniLM and ERNIE-GEN have no classes in transformers; their reference is BERT with a 4-d attention mask.
"""

import tempfile
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from benchmarks import encoders, report
from benchmarks.batches import random_lengths
from benchmarks.cases import NEW_TOKENS, SEQ2SEQ_CASES, Case
from benchmarks.encoders import Comparison
from benchmarks.unified_lm_batches import infilling_batches, segment_batches
from hf_ctxmodels.core.model import CtxPreTrainedModel
from hf_ctxmodels.heads.base import IGNORE_INDEX
from hf_ctxmodels.registry import FAMILIES

TARGET_LENGTH_RATIOS = {"t5": 114 / 512, "bart": 1.0, "mass": 0.5}
"""Target length divided by source length, as in the pretraining objective."""
_COMPARED_STEPS = 8
_REFERENCES = {
    "t5": transformers.T5ForConditionalGeneration,
    "bart": transformers.BartForConditionalGeneration,
    "mass": transformers.BartForConditionalGeneration,
    "unilm": transformers.BertForMaskedLM,
    "ernie_gen": transformers.BertForMaskedLM,
}
_BART_POSITION_OFFSET = 2  # first used row of the position embeddings


def describe_reference(attention: str) -> str:
    """Describe the references and the workloads."""
    return (
        f"{report.describe_reference(attention)} Sources have at most T tokens; for UniLM and ERNIE-GEN, T and "
        "'filled' refer to source and target together. Targets have 114 tokens per 512 source tokens (T5), the length "
        "of the source (BART), or half of it (MASS, loaded as BART, with segment positions from 0 in both). UniLM is "
        "trained on masked tokens of its four objectives, ERNIE-GEN on words and spans of the second half of each "
        "sequence; their reference is BertForMaskedLM with a (batch, 1, L, L) mask, which for ERNIE-GEN covers the "
        f"content and both query streams. Generation produces {NEW_TOKENS} tokens."
    )


def build_comparison(case: Case, attention: str) -> Comparison:
    """Build the model, the reference and the batches of a case.

    Args:
        case: Benchmark case.
        attention: Attention implementation of the reference.
    """
    lengths = random_lengths(case)
    model = build_model(case)
    reference = _load_reference(case, model, attention)
    if case.family in TARGET_LENGTH_RATIOS:
        return _build_encoder_decoder(case, model, reference, lengths)
    build_batches = segment_batches if case.family == "unilm" else infilling_batches
    batches, predicted = build_batches(model.config, lengths)
    num_tokens = int(lengths.sum()) + (predicted if case.family == "ernie_gen" else 0)  # with queries
    flops = case.layers * _layer_flops(case.width, 12, num_tokens, int((lengths**2).sum()))
    flops += 2 * case.width * model.config.vocab_size * predicted
    return Comparison(model, reference, batches, int(lengths.sum()), 3 * flops)


def build_model(case: Case) -> CtxPreTrainedModel:
    """Build a model with random weights and as many decoder layers as encoder layers."""
    family, heads = FAMILIES[case.family], case.width // 64
    shape = {"hidden_size": case.width, "num_hidden_layers": case.layers, "decoder_layers": case.layers}
    shape |= {"num_attention_heads": heads, "decoder_attention_heads": heads, "head_dim": 64}
    shape |= {"intermediate_size": 4 * case.width, "decoder_ffn_dim": 4 * case.width}
    fields = family.config.__dataclass_fields__
    config_shape: dict[str, Any] = {name: value for name, value in shape.items() if name in fields}
    defaults = family.sizes.get("summaries", {})
    name = "AutoModelForMaskedLM" if case.family == "unilm" else "AutoModelForSeq2SeqLM"
    return family.models[name](family.config(**{**defaults, **config_shape, **case.config}))


def _load_reference(case: Case, model: CtxPreTrainedModel, attention: str) -> Any:
    source = as_bart(model) if case.family == "mass" else model
    with tempfile.TemporaryDirectory() as folder:
        source.export_reference(folder)
        return _REFERENCES[case.family].from_pretrained(folder, attn_implementation=attention)


def as_bart(mass: CtxPreTrainedModel) -> CtxPreTrainedModel:
    """A BART with the weights of a MASS summarization model; they differ in unused rows of the position embeddings."""
    family, fields = FAMILIES["bart"], mass.config.to_dict()
    names = family.config.__dataclass_fields__.keys() & fields.keys() - {"architectures", "transformers_version"}
    bart = family.models["AutoModelForSeq2SeqLM"](family.config(**{name: fields[name] for name in names}))
    weights = {name.replace("mass.", "bart.", 1): tensor for name, tensor in mass.state_dict().items()}
    for name in [name for name in weights if "position_embeddings" in name]:
        weights[name] = F.pad(weights[name], (0, 0, _BART_POSITION_OFFSET, 0))
    weights["lm_head.bias"] = torch.zeros(mass.config.vocab_size)
    bart.load_state_dict(weights)
    return bart


def _build_encoder_decoder(
    case: Case, model: PreTrainedModel, reference: PreTrainedModel, sources: Tensor
) -> Comparison:
    config, size = model.config, model.config.vocab_size
    mask = (torch.arange(case.length) < sources[:, None]).long()
    ids = torch.randint(size // 10, size, mask.shape).where(mask == 1, config.pad_token_id)
    batch = {"input_ids": ids, "attention_mask": mask}
    if case.workload == "encoder states":
        flops = case.layers * _layer_flops(case.width, 12, int(sources.sum()), int((sources**2).sum()))
        encoder: Any = model.get_encoder()
        return Comparison(
            encoder, reference.get_encoder(), {"model": batch, "reference": batch}, int(sources.sum()), flops
        )
    comparison_inputs = {}
    if case.is_generation:
        beams = 4 if "beams" in case.workload else 1
        targets = torch.full((case.batch,), NEW_TOKENS)
        tokens, flops = int(targets.sum()), _encoder_decoder_flops(case, size, sources, targets, beams)
        comparison_inputs["decoder_input_ids"] = torch.randint(size // 10, size, (case.batch, _COMPARED_STEPS))
        reference.generation_config = model.generation_config  # transformers' BART ends with </s>
    else:
        targets = (sources * TARGET_LENGTH_RATIOS[case.family]).round().long().clamp(min=2)
        is_target = torch.arange(int(targets.max())) < targets[:, None]
        batch["labels"] = torch.randint(size // 10, size, is_target.shape).where(is_target, IGNORE_INDEX)
        tokens = int(sources.sum() + targets.sum())
        flops = 3 * _encoder_decoder_flops(case, size, sources, targets)
    return Comparison(model, reference, {"model": batch, "reference": batch}, tokens, flops, comparison_inputs)


def _layer_flops(width: int, squares: int, tokens: int, pairs: int) -> float:
    """Operations of a layer: 2 per token and weight (`squares * width**2` weights), and attention."""
    return 2 * squares * width**2 * tokens + 4 * width * pairs


def _encoder_decoder_flops(case: Case, vocab_size: int, sources: Tensor, targets: Tensor, beams: int = 1) -> float:
    """Operations of a forward pass; the source is encoded once for all beams."""
    width, tokens = case.width, beams * int(targets.sum())
    pairs = beams * int((targets**2 + targets * sources).sum())
    encoder = _layer_flops(width, 12, int(sources.sum()), int((sources**2).sum()))
    # cross-attention adds query and output projections per target token, key and value projections per source token
    decoder = _layer_flops(width, 14, tokens, pairs) + _layer_flops(width, 2, int(sources.sum()), 0)
    return case.layers * (encoder + decoder) + 2 * width * vocab_size * tokens


run = partial(encoders.run, cases=SEQ2SEQ_CASES, build=build_comparison)
"""Run the cases of the suite; see `encoders.run` for the arguments."""
