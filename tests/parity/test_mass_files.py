"""Released MASS checkpoints of both code bases: logits against loops over their weights."""

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch
from attention_reference import attend
from commands import run_command
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from hf_ctxmodels import CtxError
from hf_ctxmodels.conversion.mass import build_summarization_model, build_translation_model, read_checkpoint

SPECIAL = ["<s>", "</s>", "<pad>", "<unk>", *(f"<special{number}>" for number in range(10))]
SUBWORDS = ["t@@", "t", "h@@", "h", "e@@", "e", "th@@", "the"]
CODES = "t h 10\nth e</w> 9\n"
LANGUAGES = {"en": 0, "fr": 1}
BERT = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "##s"]
SOURCE, TARGET = torch.tensor([[1, 15, 17, 20, 1]]), torch.tensor([[1, 21, 16]])


def random_weights(shapes: dict[str, tuple[int, ...]], seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) * 0.3 for name, shape in shapes.items()}


def linear(name: str, out: int, width: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (out, width), f"{name}.bias": (out,)}


def norm(name: str, width: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def translation_checkpoint(setting: str, layers: int = 2, width: int = 8, same_words: bool = False) -> dict[str, Any]:
    """A checkpoint of the translation code: "v1" has an output projection of the cross-attention for each language,
    "v2" all its projections."""
    sides: dict[str, Any] = {}
    for side in ("encoder", "decoder"):
        shapes = {"embeddings.weight": (22, width), "position_embeddings.weight": (12, width)}
        shapes |= {"lang_embeddings.weight": (2, width), **norm("layer_norm_emb", width)}
        for n in range(layers):
            names = [f"attentions.{n}.{name}_lin" for name in ("q", "k", "v", "out")]
            if side == "decoder":
                shapes |= norm(f"layer_norm15.{n}", width)
                inner = f"encoder_attn.{n}"
                names += {
                    "plain": [f"{inner}.{name}_lin" for name in ("q", "k", "v", "out")],
                    "v1": [f"{inner}.{name}" for name in ("q_lin", "k_lin", "v_lin", "out_lin.0", "out_lin.1")],
                    "v2": [f"{inner}.{lang}.{name}_lin" for lang in range(2) for name in ("q", "k", "v", "out")],
                }[setting]
            for name in names:
                shapes |= linear(name, width, width)
            shapes |= linear(f"ffns.{n}.lin1", 4 * width, width) | linear(f"ffns.{n}.lin2", width, 4 * width)
            shapes |= norm(f"layer_norm1.{n}", width) | norm(f"layer_norm2.{n}", width)
        weights = random_weights(shapes | {"pred_layer.proj.bias": (22,)}, len(side) + (side == "decoder"))
        if same_words and sides:
            weights["embeddings.weight"] = sides["encoder"]["embeddings.weight"]
        weights["pred_layer.proj.weight"] = weights["embeddings.weight"]
        sides[side] = weights
    params = {"n_heads": 2, "emb_dim": width, "gelu_activation": True, "lang2id": LANGUAGES, "asm": False}
    params |= {"pad_index": 2, "bos_index": 0, "eos_index": 1, "dropout": 0.1, "attention_dropout": 0.1}
    vocabulary = dict(enumerate([*SPECIAL, *SUBWORDS]))
    return {**sides, "params": params, "dico_id2word": vocabulary, "epoch": 3, "encoder_optimizer": {"state": {}}}


def fairseq_checkpoint(fused: bool, fields: dict[str, Any]) -> dict[str, Any]:
    """A fairseq checkpoint with fused (old releases) or separate projections of queries, keys and values."""
    width, shapes = 128, {}
    for side in ("encoder", "decoder"):
        shapes |= {f"{side}.version": (1,), f"{side}.embed_positions.weight": (11, width)}
        shapes |= norm(f"{side}.emb_layer_norm", width)
        for name in ("self_attn", "encoder_attn")[: 1 + (side == "decoder")]:
            inner = f"{side}.layers.0.{name}"
            shapes |= linear(f"{inner}.out_proj", width, width) | norm(f"{inner}_layer_norm", width)
            shapes |= {f"{inner}.in_proj_weight": (3 * width, width), f"{inner}.in_proj_bias": (3 * width,)}
        shapes |= linear(f"{side}.layers.0.fc1", 32, width) | linear(f"{side}.layers.0.fc2", width, 32)
        shapes |= norm(f"{side}.layers.0.final_layer_norm", width)
    weights = random_weights(shapes | {"encoder.embed_tokens.weight": (len(BERT), width)}, 3)
    weights["decoder.embed_tokens.weight"] = weights["encoder.embed_tokens.weight"]
    if not fused:
        for name in [name for name in weights if ".in_proj_" in name]:
            layer, _, suffix = name.partition(".in_proj_")
            weights |= dict(zip([f"{layer}.{letter}_proj.{suffix}" for letter in "qkv"], weights.pop(name).chunk(3)))
    return {"model": weights, **fields}


def translation_logits(checkpoint: dict[str, Any], language: int) -> Tensor:
    """(steps, vocabulary) logits of `TARGET` in a language, given `SOURCE`."""

    def run(side: str, ids: Tensor, lang: int, memory: Tensor | None) -> Tensor:
        weights = checkpoint[side]

        def projections(name: str) -> list[tuple[Tensor, Tensor]]:
            layers = []
            for letter in ("q", "k", "v", "out"):
                candidates = (f"{name}.{letter}_lin", f"{name}.{letter}_lin.{lang}", f"{name}.{lang}.{letter}_lin")
                layer = next(candidate for candidate in candidates if f"{candidate}.weight" in weights)
                layers.append((weights[f"{layer}.weight"], weights[f"{layer}.bias"]))
            return layers

        def normed(states: Tensor, name: str) -> Tensor:
            return F.layer_norm(states, states.shape[1:], weights[f"{name}.weight"], weights[f"{name}.bias"], 1e-12)

        states = weights["embeddings.weight"][ids] + weights["position_embeddings.weight"][: len(ids)]
        states = normed(states + weights["lang_embeddings.weight"][lang], "layer_norm_emb")
        for n in range(2):
            context = attend(states, states, projections(f"attentions.{n}"), 2, memory is not None)
            states = normed(states + context, f"layer_norm1.{n}")
            if memory is not None:
                context = attend(states, memory, projections(f"encoder_attn.{n}"), 2, False)
                states = normed(states + context, f"layer_norm15.{n}")
            inner = F.gelu(F.linear(states, weights[f"ffns.{n}.lin1.weight"], weights[f"ffns.{n}.lin1.bias"]))
            output = F.linear(inner, weights[f"ffns.{n}.lin2.weight"], weights[f"ffns.{n}.lin2.bias"])
            states = normed(states + output, f"layer_norm2.{n}")
        return states

    states = run("decoder", TARGET[0], language, run("encoder", SOURCE[0], 0, None))
    decoder = checkpoint["decoder"]
    return F.linear(states, decoder["pred_layer.proj.weight"], decoder["pred_layer.proj.bias"])


def summarization_logits(weights: dict[str, Tensor], source: Tensor, target: Tensor, heads: int) -> Tensor:
    """(steps, vocabulary) logits, with fused projections. Positions start at row 1, after the padding row."""

    def normed(states: Tensor, name: str) -> Tensor:
        return F.layer_norm(states, states.shape[1:], weights[f"{name}.weight"], weights[f"{name}.bias"], 1e-5)

    def linear(states: Tensor, name: str) -> Tensor:
        return F.linear(states, weights[f"{name}.weight"], weights[f"{name}.bias"])

    memory = None
    for side, ids in (("encoder", source), ("decoder", target)):
        layer, positions = f"{side}.layers.0", weights[f"{side}.embed_positions.weight"][1:]
        states = 128**0.5 * weights[f"{side}.embed_tokens.weight"][ids] + positions[: len(ids)]
        states = normed(states, f"{side}.emb_layer_norm")
        for name in ("self_attn", "encoder_attn")[: 1 + (side == "decoder")]:
            inner = f"{layer}.{name}"
            qkv = zip(weights[f"{inner}.in_proj_weight"].chunk(3), weights[f"{inner}.in_proj_bias"].chunk(3))
            layers = [*qkv, (weights[f"{inner}.out_proj.weight"], weights[f"{inner}.out_proj.bias"])]
            attended = memory if name == "encoder_attn" else states
            context = attend(states, attended, layers, heads, side == "decoder" and name == "self_attn")
            states = normed(states + context, f"{inner}_layer_norm")
        output = linear(F.gelu(linear(states, f"{layer}.fc1")), f"{layer}.fc2")
        memory = states = normed(states + output, f"{layer}.final_layer_norm")
    return states @ weights["decoder.embed_tokens.weight"].T


@torch.no_grad()
def test_convert_translation_checkpoints(subtests, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "codes").write_text(CODES)
    for setting, shared in (("plain", True), ("plain", False), ("v1", False), ("v2", False)):
        with subtests.test(setting=setting, same_words=shared):
            checkpoint, file, out = (
                translation_checkpoint(setting, same_words=shared),
                tmp_path / f"{setting}.pth",
                tmp_path / setting,
            )
            torch.save(checkpoint, file)
            flags = ["--checkpoint", file, "--codes", tmp_path / "codes", "--output", out, "--overwrite", "true"]
            flags += ["--word_splitting", "whitespace"]
            if setting != "plain":
                assert run_command("convert", "mass", *flags, "--language", "de") == 2
                assert "'de'" in capsys.readouterr().err
                flags += ["--language", "fr"]
            assert run_command("convert", "mass", *flags) == 0, capsys.readouterr().err
            model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(out), AutoTokenizer.from_pretrained(out)
            assert tokenizer("the th").input_ids == [1, 21, 14, 17, 1]
            assert model.config.share_word_embeddings == model.config.tie_word_embeddings == shared
            langs = {"langs": torch.zeros_like(SOURCE), "decoder_langs": torch.ones_like(TARGET)}
            logits = model(SOURCE, decoder_input_ids=TARGET, **langs).logits[0]
            torch.testing.assert_close(logits, translation_logits(checkpoint, 1), rtol=0, atol=2e-5)
            assert model.config.lang2id == tokenizer.lang2id == LANGUAGES


@torch.no_grad()
def test_convert_summarization_checkpoints(subtests, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "dict.txt").write_text("".join(f"{token} 1\n" for token in BERT))
    finetuned_args = argparse.Namespace(encoder_attention_heads=4, decoder_attention_heads=4, activation_fn="gelu")
    source, target = torch.tensor([5, 6, 7, 3]), torch.tensor([3, 6, 7])
    expected = {
        heads: summarization_logits(fairseq_checkpoint(True, {})["model"], source, target, heads) for heads in (2, 4)
    }
    for name, fused, fields in (
        ("pretrained", True, None),
        ("fine-tuned", True, {"args": finetuned_args, "best_loss": 1.0}),
        ("new", False, {"args": finetuned_args}),
    ):
        with subtests.test(name):
            file, out = tmp_path / f"{name}.pt", tmp_path / name
            checkpoint = fairseq_checkpoint(fused, fields or {})
            torch.save(checkpoint if fields else checkpoint["model"], file)
            flags = ["--checkpoint", file, "--vocabulary", tmp_path / "dict.txt", "--output", out]
            assert run_command("convert", "mass", *flags) == 0, capsys.readouterr().err
            model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(out), AutoTokenizer.from_pretrained(out)
            logits = model(source[None], decoder_input_ids=target[None]).logits[0]
            torch.testing.assert_close(logits, expected[4 if fields else 2], rtol=0, atol=1e-4)
            assert model.config.decoder_start_token_id == model.config.eos_token_id == tokenizer.sep_token_id
            assert tokenizer("the cats").input_ids == [5, 6, 7, 3]  # no [CLS]
            assert model.config.max_position_embeddings == 10


def test_invalid_checkpoints_raise(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Unknown and missing weights, wrong shapes, other files, and flags of the other model."""
    checkpoint = translation_checkpoint("plain")
    changes = (
        ({"memory.values.weight": torch.ones(2)}, r"1 unknown weights: decoder.memory.values.weight"),
        ({"layer_norm15.1.bias": None}, r"lacks 1 weights.*: mass.decoder.layers.1.cross_attention_norm.bias"),
        ({"position_embeddings.weight": None}, r"lacks 1 weights.*: mass.decoder.position_embeddings"),
        ({"attentions.0.v_lin.weight": None}, r"qkv_proj.weight is \(16, 8\), expected \(24, 8\)"),
    )
    for change, message in changes:
        decoder = {name: value for name, value in {**checkpoint["decoder"], **change}.items() if value is not None}
        with pytest.raises(CtxError, match=message):
            build_translation_model({**checkpoint, "decoder": decoder}, "f")
    for params, message in (({"asm": True}, "adaptive softmax"), ({"lang2id": LANGUAGES}, "params lack n_heads")):
        with pytest.raises(CtxError, match=message):
            build_translation_model({**checkpoint, "params": params}, "f")
    with pytest.raises(CtxError, match=r"(?s)no language is given.*en, fr"):
        build_translation_model(translation_checkpoint("v1"), "f")
    weights = fairseq_checkpoint(True, {})["model"]
    # the last one is no stack of the projections of queries, keys and values
    for name in ("head.weight", "decoder.layers.0.fc3.weight", "decoder.layers.0.self_attn.in_proj_bias"):
        with pytest.raises(CtxError, match=rf"unknown weights: {name}"):
            build_summarization_model({"model": weights | {name: torch.ones(4)}}, "f")
    files = {"other": {"a": torch.ones(1)}, "code": {"model": {}, "args": Path("x")}}
    for name, content in files.items():
        torch.save(content, tmp_path / name)
        with pytest.raises(CtxError, match="not a MASS checkpoint" if name == "other" else "Cannot read the weights"):
            read_checkpoint(tmp_path / name)
    torch.save(checkpoint, tmp_path / "a.pth")
    (tmp_path / "dict.txt").write_text("[PAD] 1\n")
    flags = ["--checkpoint", tmp_path / "a.pth", "--vocabulary", tmp_path / "dict.txt", "--output", tmp_path / "out"]
    assert run_command("convert", "mass", *flags) == 2
    assert "pass --codes" in capsys.readouterr().err
    (tmp_path / "codes").write_text("a b 1\n")
    assert run_command("convert", "mass", *flags, "--codes", tmp_path / "codes") == 2
    assert "--vocabulary" in capsys.readouterr().err
