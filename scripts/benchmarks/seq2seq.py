"""The suite `seq2seq`: what writes a target for a source, against transformers at the same weights.

The peer of an encoder-decoder is the class of the same name, and of MASS for summaries BART, whose network it is.
UniLM and ERNIE-GEN, which have no classes in transformers, are BERT with a mask that says who sees whom.
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
from benchmarks.encoders import Sides
from benchmarks.streams import infilling_batches, segment_batches
from hf_ctxmodels.core.model import CtxPreTrainedModel
from hf_ctxmodels.heads.base import IGNORE_INDEX
from hf_ctxmodels.registry import FAMILIES

TARGET_SHARES = {"t5": 114 / 512, "bart": 1.0, "mass": 0.5}
"""Tokens of a target for each of its source, as the objective makes them."""
_COMPARED_STEPS = 8
_REFERENCES = {
    "t5": transformers.T5ForConditionalGeneration,
    "bart": transformers.BartForConditionalGeneration,
    "mass": transformers.BartForConditionalGeneration,
    "unilm": transformers.BertForMaskedLM,
    "ernie_gen": transformers.BertForMaskedLM,
}
_BART_FIRST_ROW = 2  # of its table of positions that is used


def describe_peer(attention: str) -> str:
    """What the suite runs."""
    return (
        f"{report.describe_peer(attention)} Sources have T tokens at most; T and 'filled' are of source and target "
        "together for UniLM and ERNIE-GEN. Targets have 114 tokens for 512 of the source (T5), as many (BART), half "
        "(MASS for summaries, opened as a BART, so that positions of a segment count from 0 on both sides). UniLM is "
        "trained on masked words of rows of its four kinds, ERNIE-GEN on tokens and spans of the second half of each "
        "row; their peer is BertForMaskedLM with a mask (batch, 1, L, L), of ERNIE-GEN over the content and both "
        f"streams of queries. Generation writes {NEW_TOKENS} tokens."
    )


def build_sides(case: Case, attention: str) -> Sides:
    """Both sides of a case.

    Args:
        case: What is run.
        attention: Attention implementation of the peer.
    """
    lengths = random_lengths(case)
    ours = build_model(case)
    peer = _open_peer(case, ours, attention)
    if case.family in TARGET_SHARES:
        return _encoder_decoder_sides(case, ours, peer, lengths)
    make = segment_batches if case.family == "unilm" else infilling_batches
    batches, predicted = make(ours.config, lengths)
    computed = int(lengths.sum()) + (predicted if case.family == "ernie_gen" else 0)  # the queries
    flops = case.layers * _layer_flops(case.width, 12, computed, int((lengths**2).sum()))
    flops += 2 * case.width * ours.config.vocab_size * predicted
    return Sides(ours, peer, batches, int(lengths.sum()), 3 * flops)


def build_model(case: Case) -> CtxPreTrainedModel:
    """A new model of ours, with as many layers in the decoder as in the encoder."""
    family, heads = FAMILIES[case.family], case.width // 64
    shape = {"hidden_size": case.width, "num_hidden_layers": case.layers, "decoder_layers": case.layers}
    shape |= {"num_attention_heads": heads, "decoder_attention_heads": heads, "head_dim": 64}
    shape |= {"intermediate_size": 4 * case.width, "decoder_ffn_dim": 4 * case.width}
    known: dict[str, Any] = {name: value for name, value in shape.items() if name in family.config.__dataclass_fields__}
    base = family.sizes.get("summaries", {})
    name = "AutoModelForMaskedLM" if case.family == "unilm" else "AutoModelForSeq2SeqLM"
    return family.models[name](family.config(**{**base, **known, **case.config}))


def _open_peer(case: Case, ours: CtxPreTrainedModel, attention: str) -> Any:
    source = as_bart(ours) if case.family == "mass" else ours
    with tempfile.TemporaryDirectory() as folder:
        source.export_reference(folder)
        return _REFERENCES[case.family].from_pretrained(folder, attn_implementation=attention)


def as_bart(mass: CtxPreTrainedModel) -> CtxPreTrainedModel:
    """A BART with the weights of a MASS for summaries: the same network, but for unused rows of the positions."""
    family, fields = FAMILIES["bart"], mass.config.to_dict()
    names = family.config.__dataclass_fields__.keys() & fields.keys() - {"architectures", "transformers_version"}
    bart = family.models["AutoModelForSeq2SeqLM"](family.config(**{name: fields[name] for name in names}))
    weights = {name.replace("mass.", "bart.", 1): tensor for name, tensor in mass.state_dict().items()}
    for name in [name for name in weights if "position_embeddings" in name]:
        weights[name] = F.pad(weights[name], (0, 0, _BART_FIRST_ROW, 0))
    weights["lm_head.bias"] = torch.zeros(mass.config.vocab_size)
    bart.load_state_dict(weights)
    return bart


def _encoder_decoder_sides(case: Case, ours: PreTrainedModel, peer: PreTrainedModel, sources: Tensor) -> Sides:
    config, size = ours.config, ours.config.vocab_size
    mask = (torch.arange(case.length) < sources[:, None]).long()
    ids = torch.randint(size // 10, size, mask.shape).where(mask == 1, config.pad_token_id)
    batch = {"input_ids": ids, "attention_mask": mask}
    if case.work == "encoder states":
        flops = case.layers * _layer_flops(case.width, 12, int(sources.sum()), int((sources**2).sum()))
        encoder: Any = ours.get_encoder()
        return Sides(encoder, peer.get_encoder(), {"ours": batch, "peer": batch}, int(sources.sum()), flops)
    compared = {}
    if case.generates:
        beams = 4 if "beams" in case.work else 1
        targets = torch.full((case.batch,), NEW_TOKENS)
        tokens, flops = int(targets.sum()), _encoder_decoder_flops(case, size, sources, targets, beams)
        compared["decoder_input_ids"] = torch.randint(size // 10, size, (case.batch, _COMPARED_STEPS))
        peer.generation_config = ours.generation_config  # transformers' BART ends with </s>
    else:
        targets = (sources * TARGET_SHARES[case.family]).round().long().clamp(min=2)
        written = torch.arange(int(targets.max())) < targets[:, None]
        batch["labels"] = torch.randint(size // 10, size, written.shape).where(written, IGNORE_INDEX)
        tokens = int(sources.sum() + targets.sum())
        flops = 3 * _encoder_decoder_flops(case, size, sources, targets)
    return Sides(ours, peer, {"ours": batch, "peer": batch}, tokens, flops, compared)


def _layer_flops(width: int, squares: int, tokens: int, pairs: int) -> float:
    """Of a layer with this many weights in units of width**2: 2 per weight and token, and attention."""
    return 2 * squares * width**2 * tokens + 4 * width * pairs


def _encoder_decoder_flops(case: Case, vocab_size: int, sources: Tensor, targets: Tensor, beams: int = 1) -> float:
    """Of a forward; the source is read once for all beams."""
    width, tokens = case.width, beams * int(targets.sum())
    pairs = beams * int((targets**2 + targets * sources).sum())
    encoder = _layer_flops(width, 12, int(sources.sum()), int((sources**2).sum()))
    # beside the 12 squares queries and outputs of cross-attention, whose keys and values are the source's
    decoder = _layer_flops(width, 14, tokens, pairs) + _layer_flops(width, 2, int(sources.sum()), 0)
    return case.layers * (encoder + decoder) + 2 * width * vocab_size * tokens


run = partial(encoders.run, cases=SEQ2SEQ_CASES, build=build_sides)
"""Run every case; see `encoders.run`."""
