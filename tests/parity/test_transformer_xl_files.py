"""Conversion of Transformer-XL files, written here with the released names."""

import json
import pickle
import re
from collections import Counter, OrderedDict, UserList, defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import run_command
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_ctxmodels.models.transformer_xl import (
    CtxTransformerXLConfig,
    CtxTransformerXLForCausalLM,
    CtxTransformerXLTokenizer,
)

WORDS = ["<eos>", "the", "<unk>", "cat", ",", *(f"w{number}" for number in range(25))]
RELEASED = {  # native name -> released name
    r"word_embeddings\.clusters\.(\d)\.weight": r"word_emb.emb_layers.\1.weight",
    r"word_embeddings\.projections\.(\d)": r"word_emb.emb_projs.\1",
    r"attention\.qkv_proj": "dec_attn.qkv_net",
    r"attention\.position_proj": "dec_attn.r_net",
    r"attention\.out_proj": "dec_attn.o_net",
    r"attention_norm": "dec_attn.layer_norm",
    r"attention\.content_bias": "dec_attn.r_w_bias",
    r"attention\.position_bias": "dec_attn.r_r_bias",
    r"feed_forward\.up_proj": "pos_ff.CoreNet.0",
    r"feed_forward\.down_proj": "pos_ff.CoreNet.3",
    r"feed_forward_norm": "pos_ff.layer_norm",
    r"softmax\.biases\.(\d)": r"crit.out_layers.\1.bias",
    r"softmax\.projections\.(\d)": r"crit.out_projs.\1",
    r"softmax\.cluster_": "crit.cluster_",
}


def write_release(folder: Path, **fields: Any) -> tuple[CtxTransformerXLForCausalLM, dict[str, Any]]:
    """Write a random model as released files; returns it with the flags of the conversion."""
    torch.manual_seed(0)
    values = {
        "vocab_size": 30, "d_model": 16, "d_embed": 16, "n_layer": 2, "n_head": 4, "d_inner": 24, "cutoffs": [8, 15],
        "div_val": 2, "mem_len": 6, "clamp_len": 5, "same_length": True, "untie_r": True, "layer_norm_epsilon": 0.1,
        **fields,
    }  # fmt: skip
    model = CtxTransformerXLForCausalLM(CtxTransformerXLConfig(**values)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    weights = {}
    for name, value in model.state_dict().items():
        for pattern, replacement in RELEASED.items():
            name = re.sub(pattern, replacement, name)
        weights[name] = value
    if not values["untie_r"]:
        for bias_name in ("r_w_bias", "r_r_bias"):
            weights[f"transformer.{bias_name}"] = weights[f"transformer.layers.0.dec_attn.{bias_name}"]
            for layer in range(2):
                del weights[f"transformer.layers.{layer}.dec_attn.{bias_name}"]
    for cluster in range(3):
        weights[f"crit.out_layers.{cluster}.weight"] = weights[f"transformer.word_emb.emb_layers.{cluster}.weight"]
        if cluster and values["div_val"] > 1:
            weights[f"crit.out_projs.{cluster}"] = weights[f"transformer.word_emb.emb_projs.{cluster}"]
    if values["div_val"] == 1:  # one matrix for all clusters
        for name in (
            "transformer.word_emb.emb_layers.{}.weight",
            "crit.out_layers.{}.weight",
            "crit.out_layers.{}.bias",
        ):
            weights[name.format(0)] = torch.cat([weights.pop(name.format(cluster)) for cluster in range(3)])
    weights["transformer.pos_emb.inv_freq"] = torch.zeros(8)
    torch.save(weights, folder / "pytorch_model.bin")
    config = {**values, "d_head": 4, "pre_lnorm": False, "attn_type": 0, "proj_share_all_but_first": True}
    (folder / "config.json").write_text(json.dumps({**config, "adaptive": True, "tie_weight": True}))
    vocabulary = {
        "counter": Counter(WORDS), "special": ["<eos>"], "lower_case": False, "idx2sym": WORDS,
        "sym2idx": OrderedDict((word, number) for number, word in enumerate(WORDS)),
    }  # fmt: skip
    torch.save(vocabulary, folder / "vocab.bin")
    files = {"weights": "pytorch_model.bin", "config": "config.json", "vocabulary": "vocab.bin"}
    return model, {name: folder / file for name, file in files.items()} | {"output": folder / "out"}


@pytest.mark.parametrize(("untie_r", "div_val"), [(True, 2), (False, 2), (True, 1)])
@torch.no_grad()
def test_converted_outputs_equal_model(untie_r: bool, div_val: int, tmp_path: Path) -> None:
    model, flags = write_release(tmp_path, untie_r=untie_r, div_val=div_val)
    assert run_command("convert", "transformer-xl", **flags) == 0
    converted = AutoModelForCausalLM.from_pretrained(flags["output"]).eval()
    tokenizer = AutoTokenizer.from_pretrained(flags["output"])
    batch = tokenizer("the cat , the dog", return_tensors="pt")
    assert batch["input_ids"].tolist() == [[1, 3, 4, 1, 2, 0]]
    outputs, expected = (network(batch["input_ids"], use_mems=True) for network in (converted, model))
    torch.testing.assert_close(outputs.logits, expected.logits)
    next_logits = [network(batch["input_ids"], mems=outputs.mems).logits for network in (converted, model)]
    torch.testing.assert_close(*next_logits)


def test_moses_rules_of_running_text() -> None:
    """The words of `TransfoXLTokenizer` of transformers 4."""
    pytest.importorskip("sacremoses", reason="needs the extra `moses`")
    words = ["The", "cat", ",", "don", "'t", "well", "@-@", "1", "@,@", "000", "@.@", "5", "."]
    tokenizer = CtxTransformerXLTokenizer.from_words(words, moses_language="en")
    assert tokenizer.tokenize("The cat, don't well-cat <unk> 1,000.5.") == [
        *("The", "cat", ",", "don", "'t", "well", "@-@", "cat", "<unk>", "1", "@,@", "000", "@.@", "5", ".")
    ]
    tokenizer.moses_language = None
    assert tokenizer.tokenize(" ".join(words)) == words


class Forbidden:
    """An object that must not be unpickled."""

    def __reduce__(self) -> tuple[Any, tuple[str, ...]]:
        return print, ("executed",)


class SavedObject:
    """An object with a state, as in vocab.pkl of transformers 4."""


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickled_vocabulary_of_transformers_4(
    protocol: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its attributes include compiled patterns, and objects of sacremoses and tokenizers; no code is executed."""
    _, flags = write_release(tmp_path)
    normalizer, items = SavedObject(), UserList(["a"])
    normalizer.substitutions = [("a", "b")]
    attributes = {
        "counter": Counter(WORDS), "special": ["<eos>"], "delimiter": None, "idx2sym": WORDS,
        "sym2idx": OrderedDict((word, number) for number, word in enumerate(WORDS)),
        "pattern": re.compile("[a-z]"), "moses_punct_normalizer": normalizer, "items": items,
        "defaults": defaultdict(list, {"a": [1]}), "code": Forbidden(),
    }  # fmt: skip
    (tmp_path / "vocab.pkl").write_bytes(pickle.dumps(attributes, protocol))
    assert run_command("convert", "transformer-xl", **flags | {"vocabulary": tmp_path / "vocab.pkl"}) == 0
    assert "executed" not in capsys.readouterr().out
    assert AutoTokenizer.from_pretrained(flags["output"])("the cat").input_ids == [1, 3, 0]


def test_invalid_files_raise(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Pickled code, unsupported variants, and weights that are not tied."""
    _, flags = write_release(tmp_path)
    torch.save({"idx2sym": WORDS, "other": Forbidden()}, tmp_path / "code.bin")
    assert run_command("convert", "transformer-xl", **flags | {"vocabulary": tmp_path / "code.bin"}) == 2
    captured = capsys.readouterr()
    assert re.search(r"Cannot read the vocabulary(.|\n)*code\.bin", captured.err)
    assert "executed" not in captured.out
    for content in (b"", b"text", pickle.dumps(Forbidden())):
        (tmp_path / "damaged.pkl").write_bytes(content)
        assert run_command("convert", "transformer-xl", **flags | {"vocabulary": tmp_path / "damaged.pkl"}) == 2
        captured = capsys.readouterr()
        assert re.search(r"vocabulary|list of words", captured.err)
        assert "executed" not in captured.out
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "other.json").write_text(json.dumps(config | {"pre_lnorm": True}))
    assert run_command("convert", "transformer-xl", **flags | {"config": tmp_path / "other.json"}) == 2
    assert "pre_lnorm=True" in capsys.readouterr().err
    (tmp_path / "none.json").write_text("{}")
    assert run_command("convert", "transformer-xl", **flags | {"config": tmp_path / "none.json"}) == 2
    assert "d_model, n_head, cutoffs missing" in capsys.readouterr().err
    for content, message in (("null", "'NoneType' is not iterable"), (config | {"cutoffs": "8"}, "field 'cutoffs'")):
        (tmp_path / "none.json").write_text(content if isinstance(content, str) else json.dumps(content))
        assert run_command("convert", "transformer-xl", **flags | {"config": tmp_path / "none.json"}) == 2
        assert message in capsys.readouterr().err
    (tmp_path / "words.txt").write_text("\n".join(WORDS[:20]) + "\n")
    assert run_command("convert", "transformer-xl", **flags | {"vocabulary": tmp_path / "words.txt"}) == 2
    assert "has 20 words, the configuration 30" in capsys.readouterr().err
    weights = torch.load(tmp_path / "pytorch_model.bin")
    weights["crit.out_layers.1.weight"] = weights["crit.out_layers.1.weight"] + 1
    torch.save(weights, tmp_path / "untied.bin")
    assert run_command("convert", "transformer-xl", **flags | {"weights": tmp_path / "untied.bin"}) == 2
    assert "differs from the embeddings" in capsys.readouterr().err
