"""Grover's TensorFlow checkpoints: outputs and gradients against a loop over their variables."""

import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
import torch
from attention_reference import attend
from commands import run_command
from tokenizers import pre_tokenizers
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from hf_ctxmodels import CtxError
from hf_ctxmodels.conversion.grover import read_grover_checkpoint
from hf_ctxmodels.conversion.tensorflow_files import TensorFlowCheckpoint

WIDTH, LAYERS, POSITIONS, HEAD = 128, 3, 20, 64
PAIRS = [("t", "h"), ("th", "e"), ("Ġ", "the")]
DATA_TYPES = {"float32": 1, "float64": 2, "int32": 3, "int64": 9, "float16": 19}  # numbers of TensorFlow
PROJECTIONS = ("query_layer", "key_layer", "value_layer", "context_projection_layer")


def release_files(folder: Path) -> dict[str, Path]:
    """Paths of a checkpoint, and GPT-2's files with three merges; <|endoftext|> has the last id."""
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in PAIRS), "<|endoftext|>"]
    vocabulary, merges = folder / "encoder.json", folder / "vocab.bpe"
    vocabulary.write_text(json.dumps({token: index for index, token in enumerate(tokens)}), encoding="utf-8")
    lines = ["#version: 0.2", *(" ".join(pair) for pair in PAIRS)]
    merges.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return {"checkpoint": folder / "model.ckpt", "vocabulary": vocabulary, "merges": merges}


def random_variables(vocab_size: int, classes: int = 0, seed: int = 0) -> dict[str, np.ndarray]:
    """Random variables with the names of the released code, and some variables of the optimizer."""
    shapes: dict[str, tuple[int, ...]] = {
        "newslm/embeddings/word_embed": (vocab_size, WIDTH),
        "newslm/embeddings/pos_embed": (POSITIONS, WIDTH),
        **norm_shapes("newslm/embeddings/LayerNorm_embed_norm"),
        "newslm/embeddings/word_embed/adafactor_vr": (vocab_size,),
        "global_step": (),
    }
    for layer in range(LAYERS):
        scope = f"newslm/layer{layer:02d}"
        for name in PROJECTIONS:
            shapes |= {f"{scope}/{name}/kernel": (WIDTH, WIDTH), f"{scope}/{name}/bias": (WIDTH,)}
        shapes |= {f"{scope}/intermediate/kernel": (WIDTH, 4 * WIDTH), f"{scope}/intermediate/bias": (4 * WIDTH,)}
        shapes |= {f"{scope}/output/kernel": (4 * WIDTH, WIDTH), f"{scope}/output/bias": (WIDTH,)}
        shapes |= norm_shapes(f"{scope}/LayerNorm_mlp_ln0") | norm_shapes(f"{scope}/LayerNorm_mlp_ln1")
    if classes:
        shapes |= {"classification/logits/kernel": (WIDTH, classes), "classification/logits/bias": (classes,)}
    rng = np.random.default_rng(seed)
    return {
        name: np.asarray(name.endswith("gamma") + 0.1 * rng.standard_normal(shape), dtype=np.float32)
        for name, shape in shapes.items()
    }


def norm_shapes(scope: str) -> dict[str, tuple[int, ...]]:
    return {f"{scope}/gamma": (WIDTH,), f"{scope}/beta": (WIDTH,)}


def varint(number: int) -> bytes:
    digits = []
    while number > 127:
        digits.append(number & 127 | 128)
        number >>= 7
    return bytes([*digits, number])


def number(field: int, value: int) -> bytes:
    return varint(field << 3) + varint(value)


def message(field: int, content: bytes) -> bytes:
    return varint(field << 3 | 2) + varint(len(content)) + content


def block(entries: Iterable[tuple[bytes, bytes]], interval: int = 16) -> bytes:
    """A block of a LevelDB table: keys share prefixes, except for each sixteenth key."""
    content, restarts, previous_key = b"", [], b""
    for index, (key, value) in enumerate(entries):
        shared = 0
        if index % interval:
            while shared < min(len(previous_key), len(key)) and previous_key[shared] == key[shared]:
                shared += 1
        else:
            restarts.append(len(content))
        content += varint(shared) + varint(len(key) - shared) + varint(len(value)) + key[shared:] + value
        previous_key = key
    offsets = restarts or [0]
    return content + b"".join(number.to_bytes(4, "little") for number in [*offsets, len(offsets)])


def write_checkpoint(variables: dict[str, np.ndarray], prefix: Path, shards: int = 2, per_block: int = 40) -> None:
    """The .index and .data files of TensorFlow's Saver, with zeros for checksums."""
    entries, contents = [(b"", number(1, shards))], [b""] * shards
    for index, (name, value) in enumerate(sorted(variables.items())):
        shard = index % shards
        shape = b"".join(message(2, number(1, size)) for size in value.shape)
        entry = number(1, DATA_TYPES[value.dtype.name]) + message(2, shape) + number(3, shard)
        entry += number(4, len(contents[shard])) + number(5, value.nbytes) + varint(6 << 3 | 5) + bytes(4)
        entries.append((name.encode(), entry))
        contents[shard] += value.tobytes()
    for shard, content in enumerate(contents):
        Path(f"{prefix}.data-{shard:05d}-of-{shards:05d}").write_bytes(content)
    table, handles = b"", []
    for start in range(0, len(entries), per_block):
        block_entries = entries[start : start + per_block]
        content = block(block_entries)
        handles.append((block_entries[-1][0], varint(len(table)) + varint(len(content))))
        table += content + bytes(5)
    footer = b""
    for content in (block([]), block(handles)):
        footer += varint(len(table)) + varint(len(content))
        table += content + bytes(5)
    Path(f"{prefix}.index").write_bytes(table + footer.ljust(40, b"\0") + 0xDB4775248B80FB57.to_bytes(8, "little"))


def reference_states(variables: dict[str, Tensor], ids: list[int]) -> Tensor:
    """(tokens, width) states, following the released code."""

    def layer_norm(states: Tensor, scope: str) -> Tensor:
        return F.layer_norm(states, (WIDTH,), variables[f"{scope}/gamma"], variables[f"{scope}/beta"])

    def parameters(scope: str) -> tuple[Tensor, Tensor]:
        return variables[f"{scope}/kernel"].T, variables[f"{scope}/bias"]

    words, positions = (variables[f"newslm/embeddings/{name}_embed"] for name in ("word", "pos"))
    states = layer_norm(words[ids] + positions[: len(ids)], "newslm/embeddings/LayerNorm_embed_norm")
    for layer in range(LAYERS):
        scope = f"newslm/layer{layer:02d}"
        projections = [parameters(f"{scope}/{name}") for name in PROJECTIONS]
        summed = states + attend(states, states, projections, WIDTH // HEAD, causal=True)
        middle = F.linear(layer_norm(summed, f"{scope}/LayerNorm_mlp_ln0"), *parameters(f"{scope}/intermediate"))
        output = F.linear(F.gelu(middle), *parameters(f"{scope}/output"))
        states = layer_norm(summed + output, f"{scope}/LayerNorm_mlp_ln1")
    return states


def as_leaves(variables: dict[str, np.ndarray]) -> dict[str, Tensor]:
    return {name: torch.from_numpy(value).double().requires_grad_() for name, value in variables.items()}


def test_language_model_matches_reference_loop(tmp_path: Path, capsys) -> None:
    variables = random_variables(vocab_size=1 + 256 + len(PAIRS) + 13)
    write_checkpoint(variables, tmp_path / "model.ckpt")
    checkpoint = TensorFlowCheckpoint(tmp_path / "model.ckpt.index")
    assert {name: value.shape for name, value in checkpoint.items()} == {n: v.shape for n, v in variables.items()}
    out = tmp_path / "out"
    assert run_command("convert", "grover", **release_files(tmp_path), output=out) == 0
    assert "632,576 parameters" in capsys.readouterr().out
    tokenizer = AutoTokenizer.from_pretrained(out)
    model = AutoModelForCausalLM.from_pretrained(out).eval().double()
    assert len(tokenizer) == model.config.vocab_size == 273
    ids = tokenizer.encode_fields({"title": "the"}, target="article")
    assert ids == [266, 1 + 257, 267, 268], "GPT-2's ids plus one, then the field tokens"
    assert tokenizer.convert_ids_to_tokens([0, 259, 272]) == ["<|padding|>", "Ġthe", "<|resetcontext|>"]
    assert (model.config.pad_token_id, model.config.bos_token_id, model.config.eos_token_id) == (0, 268, 269)
    rows, reference = [[266, 258, 267, 268, 40, 259, 90], [268, 7]], as_leaves(variables)
    batch = tokenizer.pad({"input_ids": rows}, return_tensors="pt")
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    logits, loss = model(**batch).logits, model(**batch, labels=labels).loss
    losses = []
    for row, row_logits in zip(rows, logits, strict=True):
        expected = reference_states(reference, row) @ reference["newslm/embeddings/word_embed"].T
        torch.testing.assert_close(row_logits[: len(row)], expected, atol=1e-6, rtol=1e-6)
        losses.append(F.cross_entropy(expected[:-1], torch.tensor(row[1:]), reduction="sum"))
    total = sum(losses) / 7
    torch.testing.assert_close(loss, total, atol=1e-5, rtol=1e-5, check_dtype=False)
    loss.backward()
    total.backward()
    compare_gradients(model.grover, reference)


def compare_gradients(model: torch.nn.Module, reference: dict[str, Tensor]) -> None:
    """Gradients of the embeddings and of a middle layer."""
    scope, layer = "newslm/layer01", model.layers[1]
    attention = layer.attention.qkv_proj.weight.grad.split(WIDTH)
    pairs = {
        "newslm/embeddings/word_embed": model.word_embeddings.weight.grad,
        "newslm/embeddings/pos_embed": model.position_embeddings.weight.grad,
        "newslm/embeddings/LayerNorm_embed_norm/gamma": model.embedding_norm.weight.grad,
        f"{scope}/query_layer/kernel": attention[0].T,
        f"{scope}/key_layer/kernel": attention[1].T,
        f"{scope}/value_layer/kernel": attention[2].T,
        f"{scope}/context_projection_layer/bias": layer.attention.out_proj.bias.grad,
        f"{scope}/LayerNorm_mlp_ln0/beta": layer.feed_forward_norm.bias.grad,
        f"{scope}/intermediate/kernel": layer.feed_forward.up_proj.weight.grad.T,
        f"{scope}/output/kernel": layer.feed_forward.down_proj.weight.grad.T,
        f"{scope}/LayerNorm_mlp_ln1/gamma": layer.output_norm.weight.grad,
    }
    for name, gradient in pairs.items():
        expected = reference[name].grad
        scale = expected.abs().max()
        assert scale > 1e-6, f"{name} has no gradient"
        torch.testing.assert_close(
            gradient / scale, expected / scale, atol=1e-4, rtol=1e-4, msg=lambda text, of=name: f"{of}: {text}"
        )


def test_classifier_matches_reference_loop(tmp_path: Path) -> None:
    """The state of <|beginsummary|> is classified; the training loss adds half of the mean language modeling loss."""
    variables = random_variables(vocab_size=273, classes=2, seed=1)
    write_checkpoint(variables, tmp_path / "model.ckpt", shards=1, per_block=1000)
    out = tmp_path / "out"
    assert run_command("convert", "grover", **release_files(tmp_path), output=out) == 0
    dropout = {"hidden_dropout_prob": 0.0, "classifier_dropout": 0.0}
    model = AutoModelForSequenceClassification.from_pretrained(out, **dropout).double().train()
    tokenizer = AutoTokenizer.from_pretrained(out)
    tokenizer.prepare_for_tasks()
    tokenizer.save_pretrained(out)
    tokenizer = AutoTokenizer.from_pretrained(out)
    rows = [tokenizer(text).input_ids for text in ("the cat", "th")]
    assert [row[-1] for row in rows] == [270, 270]
    rows[0] += [5, 6]  # tokens after <|beginsummary|> do not change the classifier's input
    batch = tokenizer.pad({"input_ids": rows}, return_tensors="pt")
    labels, reference = torch.tensor([1, 0]), as_leaves(variables)
    outputs = model(**batch, labels=labels)
    expected, lm_losses = [], []
    for row in rows:
        states = reference_states(reference, row)
        logits = states[:-1] @ reference["newslm/embeddings/word_embed"].T
        lm_losses.append(F.cross_entropy(logits, torch.tensor(row[1:])))
        pooled = states[row.index(270)]
        expected.append(pooled @ reference["classification/logits/kernel"] + reference["classification/logits/bias"])
    expected = torch.stack(expected)
    torch.testing.assert_close(outputs.logits, expected, atol=1e-6, rtol=1e-6)
    total = F.cross_entropy(expected, labels) + 0.5 * torch.stack(lm_losses).mean()
    torch.testing.assert_close(outputs.loss, total, atol=1e-5, rtol=1e-5, check_dtype=False)
    outputs.loss.backward()
    total.backward()
    compare_gradients(model.grover, reference)


def test_data_types(tmp_path: Path) -> None:
    variables = {name: np.array([[1, 2, 3], [4, 5, 6]], dtype=name) for name in DATA_TYPES}
    write_checkpoint(variables, tmp_path / "model.ckpt")
    checkpoint = TensorFlowCheckpoint(tmp_path / "model.ckpt")
    for name, value in variables.items():
        assert torch.equal(checkpoint[name], torch.from_numpy(value)), name
        assert checkpoint[name].dtype == getattr(torch, name)


def test_invalid_files_raise(tmp_path: Path) -> None:
    variables = random_variables(vocab_size=273)
    write_checkpoint(variables, tmp_path / "model.ckpt")
    index = (tmp_path / "model.ckpt.index").read_bytes()
    damaged = {"cut": index[:-9], "compressed": index[:-200], "text": b"not a table", "empty": b""}
    for name, content in damaged.items():
        (tmp_path / f"{name}.index").write_bytes(content)
        with pytest.raises(CtxError, match="The index of the checkpoint cannot be read"):
            TensorFlowCheckpoint(tmp_path / name)
    with pytest.raises(CtxError, match="cannot be read: No such file"):
        TensorFlowCheckpoint(tmp_path / "none")
    data = tmp_path / "model.ckpt.data-00001-of-00002"
    data.write_bytes(data.read_bytes()[:-4])
    with pytest.raises(CtxError, match=r"The variable .* cannot be read"):
        dict(TensorFlowCheckpoint(tmp_path / "model.ckpt"))
    tensors = {name: torch.from_numpy(value) for name, value in variables.items()}
    for invalid_tensors, message in (
        ({"bert/embeddings": torch.zeros(2)}, "not a Grover model"),
        ({n: v for n, v in tensors.items() if n != "newslm/layer01/output/bias"}, "has no newslm/layer01/output/bias"),
        (tensors | {"newslm/layer01/output/bias": torch.zeros(7)}, r"down_proj.bias is \(7,\), expected \(128,\)"),
    ):
        with pytest.raises(CtxError, match=message):
            read_grover_checkpoint(invalid_tensors, "model.ckpt")
