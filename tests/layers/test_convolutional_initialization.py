"""Convolutional initialization: the heads of the first layer attend to the neighbors of a token."""

from typing import Any

import pytest
import torch
from torch.testing import assert_close
from transformers import AutoModel

from hf_ctxmodels.core.model import CtxPreTrainedModel
from hf_ctxmodels.registry import get_family

OFFSETS = (-1, 1, -2, 2)
FIRST_LAYER = "layers.0.attention.qkv_proj.weight"
POSITIONS = "embeddings.position_embeddings.weight"


def new_encoder(**fields: Any) -> CtxPreTrainedModel:
    torch.manual_seed(0)
    spec = get_family("bert")
    return spec.models["AutoModel"](spec.config(**{"vocab_size": 500, **spec.sizes["mini"], **fields})).eval()


def test_each_head_attends_to_one_neighbor() -> None:
    model = new_encoder()
    model.set_attn_implementation("eager")
    tokens = torch.randint(500, (8, 128))
    with torch.no_grad():
        first, second, *_ = model(tokens, output_attentions=True).attentions  # (batch, heads, queries, keys)
    queries = torch.arange(20, 108)
    for head, offset in enumerate(OFFSETS):
        by_offset = {other: first[:, head, queries, queries + other].mean().item() for other in range(-20, 20)}
        at_neighbor = by_offset.pop(offset)
        assert at_neighbor > 0.4, "uniform attention has 0.008"
        assert max(by_offset.values()) < at_neighbor / 20
    assert second.max() < 0.2, "only the first layer"
    assert model.embeddings.position_embeddings.weight.std().item() == pytest.approx(0.035, rel=0.02)


def test_other_weights_are_random_as_usual() -> None:
    usual = new_encoder(convolutional_initialization=False).state_dict()
    weights = new_encoder().state_dict()
    changed = {name for name, weight in weights.items() if not torch.equal(weight, usual[name])}
    assert changed - {"pooler.dense.weight"} == {FIRST_LAYER, POSITIONS}  # the pooler is initialized afterwards
    width = 256
    difference = weights[FIRST_LAYER] - usual[FIRST_LAYER]
    query, key, value = difference.split(width)
    gain = key[0, 0].item()
    assert_close(key, gain * torch.eye(width))
    assert_close(query @ query.mT, gain**2 * torch.eye(width), msg="the queries are not rotated keys")
    assert not value.any()


def test_loaded_weights_remain(tmp_path) -> None:
    model = new_encoder()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
    model.save_pretrained(tmp_path)
    random_state = torch.get_rng_state()
    for name, parameter in type(model).from_pretrained(tmp_path).named_parameters():
        assert torch.all(parameter == 0.5), name
    assert torch.equal(torch.get_rng_state(), random_state)


def test_partial_checkpoints(tmp_path) -> None:
    """New position embeddings would not match loaded projections."""
    new_encoder().save_pretrained(tmp_path)
    fields = {"max_position_embeddings": 64, "ignore_mismatched_sizes": True}
    model = type(new_encoder()).from_pretrained(tmp_path, **fields)
    positions = model.embeddings.position_embeddings.weight
    assert positions.shape[0] == 64
    assert (positions[:, ::2] ** 2 + positions[:, 1::2] ** 2).std() > 1e-4, "normal, not sines and cosines"


def test_small_sizes_of_bert_and_its_successors() -> None:
    for name in ("bert", "ernie", "roberta", "xlm_roberta", "spanbert", "structbert", "unilm", "ernie_gen"):
        sizes = get_family(name).sizes
        enabled = {size for size, fields in sizes.items() if fields.get("convolutional_initialization")}
        assert enabled == {"tiny", "mini", "small"}, name


def test_odd_width_of_heads() -> None:
    """The last dimensions of the position embeddings are zero."""
    model = new_encoder(hidden_size=20, num_attention_heads=4)
    positions = model.embeddings.position_embeddings.weight
    assert positions[:, :16].std() > 0.03
    assert not positions[:, 16:].any()


def test_half_precision() -> None:
    spec = get_family("bert")
    config = spec.config(vocab_size=50, **spec.sizes["tiny"])
    model = AutoModel.from_config(config, dtype=torch.bfloat16)
    assert model.dtype == torch.bfloat16
    positions = model.embeddings.position_embeddings.weight.float()
    sines, cosines = positions[:, ::2], positions[:, 1::2]
    assert_close(sines**2 + cosines**2, torch.full_like(sines, 2 * 0.049**2), rtol=0.02, atol=0)
    weight = model.layers[0].attention.qkv_proj.weight
    assert weight.isfinite().all()
