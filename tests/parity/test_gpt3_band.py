"""GPT-3's dense and banded layers against GPT-Neo of transformers, which masks its local layers.

GPT-Neo does not scale its scores and has no biases of queries, keys and values: the scale goes into the
queries' weights.
"""

import pytest
import torch
from torch import Tensor
from transformers import GPTNeoConfig, GPTNeoForCausalLM

from hf_ctxmodels import CtxGpt3Config, CtxGpt3ForCausalLM

LAYERS, WIDTH, HEADS, LENGTH = 4, 24, 3, 40
NAMES = {
    "wte": "word_embeddings",
    "wpe": "position_embeddings",
    "ln_f": "final_norm",
    "attn.attention.out_proj": "attention.out_proj",
    "mlp.c_fc": "feed_forward.up_proj",
    "mlp.c_proj": "feed_forward.down_proj",
    "ln_1": "attention_norm",
    "ln_2": "feed_forward_norm",
}


def converted(reference: GPTNeoForCausalLM) -> dict[str, Tensor]:
    """Our names and layout; biases of queries, keys and values are zero."""
    theirs, ours = reference.state_dict(), {}
    for name, tensor in theirs.items():
        for old, new in NAMES.items():
            if f".{old}." in name:
                renamed = name.replace(old, new).replace("transformer.h.", "gpt3.layers.")
                ours[renamed.replace("transformer.", "gpt3.")] = tensor
    for layer in range(LAYERS):
        query, key, value = (
            theirs[f"transformer.h.{layer}.attn.attention.{part}_proj.weight"] for part in ("q", "k", "v")
        )
        fused = torch.cat([query * (WIDTH // HEADS) ** 0.5, key, value])
        ours |= {
            f"gpt3.layers.{layer}.attention.qkv_proj.weight": fused,
            f"gpt3.layers.{layer}.attention.qkv_proj.bias": torch.zeros(3 * WIDTH),
        }
    return ours | {"lm_head.weight": theirs["lm_head.weight"]}


@pytest.mark.parametrize("window", [1, 5, 16, 64])
def test_losses_gradients_and_continuations(window: int) -> None:
    torch.manual_seed(window)
    shape = {"hidden_size": WIDTH, "vocab_size": 61, "max_position_embeddings": 64, "initializer_range": 0.2}
    types = [[["global", "local"], LAYERS // 2]]
    theirs = GPTNeoConfig(num_layers=LAYERS, num_heads=HEADS, attention_types=types, window_size=window, **shape)
    reference = GPTNeoForCausalLM(theirs).eval()
    sizes = {"num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "window": window}
    model = CtxGpt3ForCausalLM(CtxGpt3Config(**sizes, **shape, bos_token_id=None, eos_token_id=None)).eval()
    model.load_state_dict(converted(reference))
    ids = torch.randint(1, 61, (3, LENGTH))
    torch.testing.assert_close(model(ids).logits, reference(ids).logits, atol=1e-5, rtol=1e-5)
    losses = [each(ids, labels=ids).loss for each in (model, reference)]
    torch.testing.assert_close(*losses, atol=1e-5, rtol=1e-5)
    tables = [each.get_input_embeddings().weight for each in (model, reference)]
    gradients = [torch.autograd.grad(loss, table)[0] for loss, table in zip(losses, tables)]
    torch.testing.assert_close(*gradients, atol=1e-5, rtol=1e-4)
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = reference.generate(ids[:, :20], **options, use_cache=False)
    assert torch.equal(model.generate(ids[:, :20], **options), expected)
    static = {"cache_implementation": "static", "disable_compile": True}
    assert torch.equal(model.generate(ids[:, :20], **options, **static), expected)
