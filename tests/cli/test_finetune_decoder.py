"""`hf-ctxmodels finetune seq2seq --decoder`: encoder-decoders from two checkpoints."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import command_output, run_command, save
from safetensors.torch import load_file
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
from zoo import tiny_config

from hf_ctxmodels import CtxEncoderDecoderForConditionalGeneration, CtxLmSeq2SeqForConditionalGeneration
from hf_ctxmodels.registry import FAMILIES
from hf_ctxmodels.training.training_log import read_log

WORDS = {"red": "rot", "cat": "katze", "sees": "sieht", "one": "ein", "big": "gross", "dog": "hund"}
TEXTS = [*WORDS, *WORDS.values()]
LOOP = {"max_length": 8, "max_target_length": 8, "per_device_batch_size": 16, "learning_rate": 5e-3}
LOOP |= {"save_steps": 0, "eval_steps": 0, "metrics": "exact_match", "dataloader_workers": 0, "logging_steps": 1}


def save_model(folder: Path, family: str, texts: list[str] = TEXTS, **fields: Any) -> Path:
    """Save a small language model and a tokenizer trained on the texts."""
    spec = FAMILIES[family]
    tokenizer = spec.tokenizer.train(texts * 3, 300)
    sizes = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id, "max_position_embeddings": 16}
    sizes |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "initializer_range": 0.1, **fields}
    sizes = {name: value for name, value in sizes.items() if name in spec.config.__dataclass_fields__}
    auto_class = "AutoModelForMaskedLM" if "AutoModelForMaskedLM" in spec.models else "AutoModelForCausalLM"
    torch.manual_seed(0)
    return save(folder, spec.models[auto_class](tiny_config(spec, **sizes)), tokenizer)


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Any]:
    """Texts and word-by-word translations."""
    rng = random.Random(0)
    for name, size in (("train", 300), ("dev", 12)):
        texts = [rng.choices(list(WORDS), k=rng.randint(1, 3)) for _ in range(size)]
        rows = [{"source": " ".join(text), "target": " ".join(map(WORDS.get, text))} for text in texts]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
        (tmp_path / f"{name}.txt").write_text("".join(row["source"] + "\n" for row in rows))
    return {"train_file": tmp_path / "train.jsonl", "validation_file": tmp_path / "dev.jsonl"}


@pytest.mark.slow
def test_shared_decoder_is_trained_resumed_and_used(files: dict[str, Any], tmp_path: Path) -> None:
    """`generate` reproduces the predictions; a resumed run has the losses and weights of an uninterrupted one."""
    model = save_model(tmp_path / "bert", "bert")
    flags = {**files, **LOOP, "model": model, "decoder": "shared", "max_steps": 60}
    uninterrupted, resumed, predictions_file = tmp_path / "whole", tmp_path / "resumed", tmp_path / "predictions.jsonl"
    assert run_command("finetune", "seq2seq", **flags, output_dir=uninterrupted, predictions_file=predictions_file) == 0
    summary = json.loads((uninterrupted / "training_summary.json").read_text())
    assert summary["metrics"]["eval_exact_match"] > 0.3
    finetuned = AutoModelForSeq2SeqLM.from_pretrained(uninterrupted)
    assert isinstance(finetuned, CtxEncoderDecoderForConditionalGeneration)
    encoder, decoder = finetuned.model.encoder, finetuned.model.decoder.base_model
    assert encoder.layers[0].attention.qkv_proj.weight is decoder.layers[0].attention.qkv_proj.weight

    generated_file = tmp_path / "generated.txt"
    source = {"input": tmp_path / "dev.txt", "output_file": generated_file, "max_new_tokens": 8}
    assert run_command("generate", model=uninterrupted, **source) == 0
    records = map(json.loads, predictions_file.read_text().splitlines())
    assert generated_file.read_text().splitlines() == [record["prediction"] for record in records]

    checkpoint_flags = {**flags, "save_steps": 20, "save_total_limit": 3, "output_dir": tmp_path / "saved"}
    assert run_command("finetune", "seq2seq", **checkpoint_flags) == 0
    resumed.mkdir()
    shutil.copytree(tmp_path / "saved" / "checkpoint-20", resumed / "checkpoint-20")
    assert run_command("finetune", "seq2seq", **{**checkpoint_flags, "output_dir": resumed}, resume=True) == 0
    losses = [[entry["loss"] for entry in read_log(folder) if "loss" in entry] for folder in (uninterrupted, resumed)]
    assert losses[0][20:] == losses[1][-40:]
    expected, weights = (load_file(folder / "model.safetensors") for folder in (uninterrupted, resumed))
    assert all(torch.equal(weights[name], value) for name, value in expected.items())


def test_xlm_encoder_decoder_with_languages(files: dict[str, Any], tmp_path: Path) -> None:
    texts = [f"<en> {source}\t<de> {target}" for source, target in WORDS.items()]
    fields = {"n_langs": 2, "lang2id": {"de": 0, "en": 1}, "intermediate_size": None}
    model = save_model(tmp_path / "xlm", "xlm", texts, **fields)
    languages = ["--language", "en", "--target_language", "de"]
    flags = {**files, **LOOP, "model": model, "decoder": "separate", "max_steps": 60, "output_dir": tmp_path / "out"}
    assert run_command("finetune", "seq2seq", *languages, **flags) == 0
    summary = json.loads((tmp_path / "out" / "training_summary.json").read_text())
    assert summary["metrics"]["eval_exact_match"] > 0.3
    source = {"input": tmp_path / "dev.txt", "max_new_tokens": 8}
    translated = command_output("generate", model=tmp_path / "out", language="de", **source)
    assert any(word in translated for word in WORDS.values())


def test_lstm_language_models_form_encoder_decoder(files: dict[str, Any], tmp_path: Path) -> None:
    """Two recurrent language models are combined in a recurrent encoder-decoder."""
    models = {}
    for name, texts in (("source", list(WORDS)), ("target", list(WORDS.values()))):
        tokenizer = FAMILIES["seqae"].tokenizer.train(texts, 40, min_count=1)
        config = tiny_config(FAMILIES["seqae"], vocab_size=len(tokenizer))
        model = FAMILIES["seqae"].models["AutoModelForCausalLM"](config)
        models[name] = save(tmp_path / name, model, tokenizer)
    flags = {**files, **LOOP, "model": models["source"], "decoder": f"separate:model={models['target']}"}
    assert run_command("finetune", "seq2seq", **flags, max_steps=2, output_dir=tmp_path / "out") == 0
    assert isinstance(AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out"), CtxLmSeq2SeqForConditionalGeneration)
    assert "".join(AutoTokenizer.from_pretrained(tmp_path / "out").target_words).count("katze") == 1
    error = command_output("finetune", "seq2seq", **{**flags, "decoder": "shared"}, output_dir="x", fails=True)
    assert "do not share weights" in error


@pytest.mark.parametrize(
    ("decoder", "overrides", "message"),
    [
        ("separate:model={other}", {}, "differ, but the command reads and generates with one tokenizer"),
        ("separate:model={missing}", {}, "missing"),
        ("shared", {"model": None}, "exactly one of --model"),
        ("copied", {}, "use one of: shared, separate"),
    ],
)
def test_invalid_decoders(
    decoder: str, overrides: dict[str, Any], message: str, files: dict[str, Any], tmp_path: Path
) -> None:
    model, gpt2 = save_model(tmp_path / "bert", "bert"), save_model(tmp_path / "gpt2", "gpt2", ["other words"])
    decoder = decoder.format(other=gpt2, missing=tmp_path / "missing")
    flags = {**files, **LOOP, "model": model, "decoder": decoder, "output_dir": tmp_path / "out", **overrides}
    flags = {name: value for name, value in flags.items() if value is not None}
    assert message in command_output("finetune", "seq2seq", **flags, fails=True)
