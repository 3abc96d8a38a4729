"""Self-attention against torch's module and the written-out formula; embeddings of Transformers."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from hf_ctxmodels.layers.attention.backends import eager_attention_forward
from hf_ctxmodels.layers.attention.layouts import PackedLayout, PaddedLayout
from hf_ctxmodels.layers.attention.modules import SelfAttention
from hf_ctxmodels.layers.transformer import TokenPositionTypeEmbeddings

WIDTH, HEADS = 12, 3
MASK = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [0, 0, 1, 1, 0]])
STATES = torch.randn(3, 5, WIDTH, generator=torch.Generator().manual_seed(1))


def make_attention(bias: bool = True) -> SelfAttention:
    torch.manual_seed(0)
    module = SelfAttention(WIDTH, HEADS, bias=bias).eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape))
    return module


def torch_attention(module: SelfAttention) -> Tensor:
    """`F.multi_head_attention_forward` with the same weights."""
    result, _ = F.multi_head_attention_forward(
        *[STATES.transpose(0, 1)] * 3,
        embed_dim_to_check=WIDTH,
        num_heads=HEADS,
        in_proj_weight=module.qkv_proj.weight,
        in_proj_bias=module.qkv_proj.bias,
        bias_k=None,
        bias_v=None,
        add_zero_attn=False,
        dropout_p=0.0,
        out_proj_weight=module.out_proj.weight,
        out_proj_bias=module.out_proj.bias,
        training=False,
        key_padding_mask=MASK == 0,
        need_weights=False,
    )
    return result.transpose(0, 1)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("implementation", ["eager", "sdpa", "packed"])
def test_equal_to_torch(implementation: str, bias: bool) -> None:
    module = make_attention(bias)
    if implementation == "packed":
        layout: PackedLayout | PaddedLayout = PackedLayout.build(*MASK.shape, MASK, None, MASK.device)
    else:
        layout = PaddedLayout(*MASK.shape, MASK == 1, implementation=implementation)
    context, probabilities = module(layout.pack(STATES), layout)
    expected = torch_attention(module)[MASK == 1]
    torch.testing.assert_close(layout.unpack(context)[MASK == 1], expected, atol=1e-5, rtol=1e-5)
    assert (probabilities is not None) == (implementation == "eager")


@pytest.mark.parametrize("bias", [True, False])
def test_selected_tokens_equal_all_tokens(bias: bool) -> None:
    module, layout = make_attention(bias), PackedLayout.build(*MASK.shape, MASK, None, MASK.device)
    packed = layout.pack(STATES)
    outputs, _ = module(packed, layout)
    output_mask = torch.zeros_like(MASK, dtype=torch.bool)
    output_mask[0, [1, 3]] = output_mask[2, 3] = True
    selected = layout.select(output_mask, include_first_tokens=False)
    torch.testing.assert_close(module(packed, selected)[0], selected.select_queries(outputs), atol=1e-5, rtol=1e-5)
    whole = layout.select(MASK == 1, include_first_tokens=False)
    assert whole.select_queries(packed) is packed, "a selection of all tokens copies nothing"
    assert torch.equal(whole.select_outputs(module(packed, whole)[0]), outputs)


def test_eager_attention_is_the_formula() -> None:
    generator = torch.Generator().manual_seed(2)
    query, key, value = (torch.randn(2, HEADS, 4, 5, generator=generator) for _ in range(3))
    bias, mask = torch.randn(2, 1, 4, 4, generator=generator), torch.zeros(2, 1, 1, 4)
    mask[1, ..., 2:] = float("-inf")
    context, probabilities = eager_attention_forward(
        torch.nn.Module().eval(), query, key, value, mask, scaling=0.5, position_bias=bias
    )
    scores = torch.einsum("bhqd,bhkd->bhqk", query, key) * 0.5 + bias + mask
    expected = scores.exp() / scores.exp().sum(-1, keepdim=True)
    torch.testing.assert_close(probabilities, expected)
    torch.testing.assert_close(context, torch.einsum("bhqk,bhkd->bqhd", expected, value))


def test_eager_attention_has_dropout_only_in_training() -> None:
    module, query = torch.nn.Module(), torch.randn(1, HEADS, 6, 5, generator=torch.Generator().manual_seed(3))
    _, expected = eager_attention_forward(module.eval(), query, query, query, None, scaling=1.0, dropout=0.5)
    torch.manual_seed(0)
    _, probabilities = eager_attention_forward(module.train(), query, query, query, None, scaling=1.0, dropout=0.5)
    is_dropped = probabilities == 0
    assert 0.2 < is_dropped.float().mean() < 0.8
    torch.testing.assert_close(probabilities[~is_dropped], 2 * expected[~is_dropped])


def test_embeddings_are_the_normalised_sum() -> None:
    torch.manual_seed(0)
    layer = TokenPositionTypeEmbeddings(9, WIDTH, 7, 2, layer_norm_eps=1e-6, dropout=0.0, padding_idx=0)
    words, positions, types = torch.tensor([[3, 4, 0]]), torch.tensor([[2, 0, 6]]), torch.tensor([[0, 1, 1]])
    total = layer.word_embeddings.weight[words] + layer.position_embeddings.weight[positions]
    total = total + layer.token_type_embeddings.weight[types]
    expected = (total - total.mean(-1, keepdim=True)) / (total.var(-1, keepdim=True, correction=0) + 1e-6).sqrt()
    embeddings = layer(words, positions, types)
    torch.testing.assert_close(embeddings, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(layer(layer.word_embeddings(words), positions, types), embeddings)
    assert torch.equal(layer(words, positions, None), layer(words, positions, torch.zeros_like(types)))
    embeddings.sum().backward()
    assert not layer.word_embeddings.weight.grad[0].any()
