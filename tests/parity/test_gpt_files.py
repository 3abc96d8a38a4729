"""GPT's released parameter files: logits against a loop over the arrays; invalid files."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attention_reference import attend
from commands import run_command
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_ctxmodels import CtxError, CtxGptConfig, CtxGptForCausalLM
from hf_ctxmodels.conversion.gpt import read_openai_checkpoint
from hf_ctxmodels.conversion.released_files import load_weights

TOKENS = ["<unk>", "a", "b", "t", "a</w>", "b</w>", "t</w>", "at</w>", "bat</w>"]
MERGES = "#version: 0.2\na t</w>\nb at</w>\n"
WIDTH, LAYERS, HEADS, POSITIONS = 24, 3, 4, 10


def random_arrays(embeddings: list[list[int]], seed: int = 0) -> list[np.ndarray]:
    """Random parameters in the order and the shapes of the released files."""
    rng = np.random.default_rng(seed)
    layer = [[1, WIDTH, 3 * WIDTH], [3 * WIDTH], [1, WIDTH, WIDTH], [WIDTH], [WIDTH], [WIDTH]]
    layer += [[1, WIDTH, 4 * WIDTH], [4 * WIDTH], [1, 4 * WIDTH, WIDTH], [WIDTH], [WIDTH], [WIDTH]]
    return [rng.normal(0, 0.3, shape).astype(np.float32) for shape in [*embeddings, *layer * LAYERS]]


def write_checkpoint(folder: Path, arrays: list[np.ndarray], num_files: int = 10) -> None:
    """Concatenated parameters, split into files at arbitrary positions."""
    (folder / "params_shapes.json").write_text(json.dumps([list(array.shape) for array in arrays]))
    values = np.concatenate([array.reshape(-1) for array in arrays])
    for number, chunk in enumerate(np.array_split(values, num_files)):
        np.save(folder / f"params_{number}.npy", chunk)
    (folder / "encoder_bpe_40000.json").write_text(json.dumps({token: n for n, token in enumerate(TOKENS)}))
    (folder / "vocab_40000.bpe").write_text(MERGES)


def reference_logits(arrays: list[np.ndarray], ids: list[int]) -> Tensor:
    """Post-norm layers in float64; `arrays` are words, positions and the layers' parameters."""
    words, positions, *layers = (torch.from_numpy(array).double() for array in arrays)
    hidden = words[ids] + positions[: len(ids)]
    for start in range(0, len(layers), 12):
        qkv, qkv_bias, out, out_bias, gain_1, bias_1, up, up_bias, down, down_bias, gain_2, bias_2 = layers[start:][:12]
        projections = [*zip(qkv[0].T.chunk(3), qkv_bias.chunk(3)), (out[0].T, out_bias)]
        context = attend(hidden, hidden, projections, HEADS, causal=True)
        normed = F.layer_norm(hidden + context, (WIDTH,), gain_1, bias_1)
        inner = F.gelu(normed @ up[0] + up_bias, approximate="tanh")
        hidden = F.layer_norm(normed + inner @ down[0] + down_bias, (WIDTH,), gain_2, bias_2)
    return hidden @ words.T


@pytest.mark.parametrize("layout", ["two matrices", "one matrix", "one matrix with task tokens"])
def test_logits_match_reference_loop(layout: str, tmp_path: Path, capsys: Any) -> None:
    vocab_size = len(TOKENS) + 3 * layout.endswith("task tokens")
    if layout == "two matrices":  # as released: positions first
        arrays = random_arrays([[POSITIONS, WIDTH], [vocab_size, WIDTH]])
        reference_arrays = [arrays[1], arrays[0], *arrays[2:]]
    else:
        arrays = random_arrays([[vocab_size + POSITIONS, WIDTH]])
        reference_arrays = [arrays[0][:vocab_size], arrays[0][vocab_size:], *arrays[1:]]
    write_checkpoint(tmp_path, arrays)
    flags = {"folder": tmp_path, "output": tmp_path / "out", "positions": POSITIONS, "heads": HEADS}
    assert run_command("convert", "gpt", **flags) == 0
    assert f"{sum(array.size for array in arrays):,} parameters, {vocab_size} tokens" in capsys.readouterr().out
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    text = [8, 7, 0, 4, 8]
    start, end = ([9], [11]) if layout.endswith("task tokens") else ([], [])
    ids = tokenizer("Bat at x a bat").input_ids
    assert ids == [*start, *text, *end]
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(logits.double(), reference_logits(reference_arrays, ids), atol=1e-4, rtol=1e-5)


def test_invalid_files_raise(tmp_path: Path) -> None:
    vocabulary, merges = tmp_path / "encoder_bpe_40000.json", tmp_path / "vocab_40000.bpe"
    arrays = random_arrays([[POSITIONS, WIDTH], [len(TOKENS), WIDTH]])
    write_checkpoint(tmp_path, arrays)
    cases = [
        (arrays[:-2], "lists 36 parameters"),
        ([arrays[0], arrays[1][:-1], *arrays[2:]], "8 token embeddings for 9 tokens"),
        ([np.concatenate(arrays[:2])[1:], *arrays[2:]], "18 rows, expected 9 tokens"),
        ([*arrays[:2], arrays[2], arrays[3][1:], *arrays[4:]], r"qkv_proj.bias is \(71,\), expected \(72,\)"),
    ]
    for invalid_arrays, message in cases:
        write_checkpoint(tmp_path, invalid_arrays)
        with pytest.raises(CtxError, match=message):
            read_openai_checkpoint(tmp_path, vocabulary, merges, positions=POSITIONS, heads=HEADS)
    write_checkpoint(tmp_path, arrays)
    values = np.load(tmp_path / "params_3.npy")
    for not_real in (values.astype(str), values + 1j):
        np.save(tmp_path / "params_3.npy", not_real)
        with pytest.raises(CtxError, match=r"cannot be read: .*Cannot cast"):
            read_openai_checkpoint(tmp_path, vocabulary, merges, heads=HEADS)
    write_checkpoint(tmp_path, arrays)
    (tmp_path / "params_9.npy").unlink()
    with pytest.raises(CtxError, match="files hold"):
        read_openai_checkpoint(tmp_path, vocabulary, merges, heads=HEADS)
    (tmp_path / "params_3.npy").write_bytes(b"not an array")
    with pytest.raises(CtxError, match="cannot be read"):
        read_openai_checkpoint(tmp_path, vocabulary, merges, heads=HEADS)


def test_differing_tied_weights_raise() -> None:
    """Weights that the model shares cannot be loaded from two different matrices."""
    model = CtxGptForCausalLM(CtxGptConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=2))
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    load_weights(model, dict(weights), "file")
    weights["lm_head.weight"] += 1
    with pytest.raises(CtxError, match=r"lm_head\.weight and gpt\.word_embeddings\.weight, which .* shares, differ"):
        load_weights(model, weights, "file")
