"""GPT-3's dense and banded layers against GPT-Neo of transformers.

GPT-Neo does not scale its scores and has no biases of the queries, keys and values: the query weights are scaled.
"""

import pytest
import torch
from torch import Tensor
from transformers import GPTNeoConfig, GPTNeoForCausalLM

from hf_ctxmodels import CtxGpt3Config, CtxGpt3ForCausalLM

LAYERS, WIDTH, HEADS, LENGTH = 4, 24, 3, 40
NATIVE_NAMES = {
    "wte": "word_embeddings",
    "wpe": "position_embeddings",
    "ln_f": "final_norm",
    "attn.attention.out_proj": "attention.out_proj",
    "mlp.c_fc": "feed_forward.up_proj",
    "mlp.c_proj": "feed_forward.down_proj",
    "ln_1": "attention_norm",
    "ln_2": "feed_forward_norm",
}


def convert(reference: GPTNeoForCausalLM) -> dict[str, Tensor]:
    """The native state dict; biases of queries, keys and values are zero."""
    reference_weights, weights = reference.state_dict(), {}
    for name, tensor in reference_weights.items():
        for reference_name, native_name in NATIVE_NAMES.items():
            if f".{reference_name}." in name:
                renamed = name.replace(reference_name, native_name).replace("transformer.h.", "gpt3.layers.")
                weights[renamed.replace("transformer.", "gpt3.")] = tensor
    for layer in range(LAYERS):
        query, key, value = (
            reference_weights[f"transformer.h.{layer}.attn.attention.{letter}_proj.weight"] for letter in "qkv"
        )
        fused = torch.cat([query * (WIDTH // HEADS) ** 0.5, key, value])
        weights |= {
            f"gpt3.layers.{layer}.attention.qkv_proj.weight": fused,
            f"gpt3.layers.{layer}.attention.qkv_proj.bias": torch.zeros(3 * WIDTH),
        }
    return weights | {"lm_head.weight": reference_weights["lm_head.weight"]}


@pytest.mark.parametrize("window", [1, 5, 16, 64])
def test_gpt3_equals_gpt_neo(window: int) -> None:
    torch.manual_seed(window)
    shape = {"hidden_size": WIDTH, "vocab_size": 61, "max_position_embeddings": 64, "initializer_range": 0.2}
    types = [[["global", "local"], LAYERS // 2]]
    reference_config = GPTNeoConfig(
        num_layers=LAYERS, num_heads=HEADS, attention_types=types, window_size=window, **shape
    )
    reference = GPTNeoForCausalLM(reference_config).eval()
    sizes = {"num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "window": window}
    model = CtxGpt3ForCausalLM(CtxGpt3Config(**sizes, **shape, bos_token_id=None, eos_token_id=None)).eval()
    model.load_state_dict(convert(reference))
    ids = torch.randint(1, 61, (3, LENGTH))
    torch.testing.assert_close(model(ids).logits, reference(ids).logits, atol=1e-5, rtol=1e-5)
    losses = [network(ids, labels=ids).loss for network in (model, reference)]
    torch.testing.assert_close(*losses, atol=1e-5, rtol=1e-5)
    embeddings = [network.get_input_embeddings().weight for network in (model, reference)]
    gradients = [torch.autograd.grad(loss, weight)[0] for loss, weight in zip(losses, embeddings)]
    torch.testing.assert_close(*gradients, atol=1e-5, rtol=1e-4)
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = reference.generate(ids[:, :20], **options, use_cache=False)
    assert torch.equal(model.generate(ids[:, :20], **options), expected)
    static = {"cache_implementation": "static", "disable_compile": True}
    assert torch.equal(model.generate(ids[:, :20], **options, **static), expected)
