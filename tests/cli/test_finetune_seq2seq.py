"""`hf-ctxmodels finetune seq2seq`: a new encoder-decoder with a word-level vocabulary, and one of transformers."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import run_command
from test_finetune import check_two_processes, finetune
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, PreTrainedTokenizerFast, T5Config

from hf_ctxmodels.registry import FAMILIES
from hf_ctxmodels.training.summary import TrainingSummary

WORDS = {"red": "rot", "cat": "Katze", "sees": "sieht", "one": "ein", "big": "groß", "dog": "Hund"}
QUICK = {"metrics": "exact_match,bleu", "max_length": 8, "max_target_length": 6, "save_steps": 0}
QUICK |= {"learning_rate": "1e-2"}


@pytest.fixture
def files(tmp_path) -> dict[str, Any]:
    """Texts and their word-by-word translations."""
    rng = random.Random(0)
    for name, size in (("train", 400), ("dev", 30)):
        texts = [rng.choices(list(WORDS), k=rng.randint(1, 3)) for _ in range(size)]
        rows = [" ".join(text) + "\t" + " ".join(map(WORDS.get, text)) for text in texts]
        (tmp_path / f"{name}.tsv").write_text("\n".join(["text\tgerman", *rows]) + "\n")
        (tmp_path / f"{name}.txt").write_text("".join(row.split("\t")[0] + "\n" for row in rows))
    files = {"train_file": tmp_path / "train.tsv", "validation_file": tmp_path / "dev.tsv"}
    return files | {"text_columns": "text", "label_column": "german"}


def save_new(folder: Path, **options: Any) -> dict[str, Any]:
    """A family's tokenizer, for a new model."""
    pairs = [f"{source}\t{target}" for source, target in WORDS.items()]
    FAMILIES["cove"].tokenizer.train(pairs, 60, min_count=1, min_target_count=1, **options).save_pretrained(folder)
    sizes = ["embedding_size=16", "hidden_size=32", "num_hidden_layers=1", "hidden_dropout_prob=0"]
    return {"family": f"cove:tokenizer={folder}", "config_options": sizes}


def save_t5(folder: Path) -> dict[str, Any]:
    """A tiny T5 of transformers, with a tokenizer of the words of both languages."""
    vocabulary = ["<pad>", "</s>", "<unk>", *WORDS, *WORDS.values()]
    backend = Tokenizer(models.WordLevel({word: number for number, word in enumerate(vocabulary)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    special = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=backend, **special).save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 1, "num_decoder_layers": 1, "num_heads": 2}
    config = T5Config(vocab_size=len(vocabulary), dropout_rate=0.0, decoder_start_token_id=0, **sizes)
    AutoModelForSeq2SeqLM.from_config(config).save_pretrained(folder)
    return {"model": folder}


def test_translation(files, tmp_path, capsys):
    """T5 of transformers learns to translate; `generate` generates the texts of its predictions."""
    out, predictions_file, output_file = tmp_path / "out", tmp_path / "predictions.jsonl", tmp_path / "generated.txt"
    flags = {**save_t5(tmp_path / "model"), **files, **QUICK, "label_smoothing": 0.1, "max_steps": 160, "num_beams": 2}
    assert finetune("seq2seq", **flags, predictions_file=predictions_file, output_dir=out) == 0
    printed = capsys.readouterr().out
    summary = TrainingSummary.load(out)
    assert summary.metrics["eval_exact_match"] > 0.5
    assert f"{summary.metrics['eval_exact_match']:.4f}" in printed
    assert "baseline: the source itself" in printed
    assert summary.metrics["baseline_exact_match"] == 0
    rows = [json.loads(line) for line in predictions_file.read_text().splitlines()]
    translations = [" ".join(map(WORDS.get, row["source"].split())) for row in rows]
    correct = [row["prediction"] == row["target"] == text for row, text in zip(rows, translations, strict=True)]
    assert sum(correct) / len(correct) == pytest.approx(summary.metrics["eval_exact_match"])
    flags = {"model": out, "input": tmp_path / "dev.txt", "decoding": "beam:num_beams=2", "max_new_tokens": 6}
    assert run_command("generate", **flags, batch_size=7, output_file=output_file) == 0
    assert output_file.read_text().splitlines() == [row["prediction"] for row in rows]
    assert type(AutoModelForSeq2SeqLM.from_pretrained(out)).__name__ == summary.model_class
    assert AutoTokenizer.from_pretrained(out)("red cat").input_ids


def test_upper_bound_of_lower_cased_targets(files, tmp_path, capsys):
    """Both commands and the summary have it, and the metrics against normalized references."""
    out, flags = tmp_path / "out", save_new(tmp_path / "model", target_lower_case=True)
    assert finetune("seq2seq", **flags, **files, **QUICK, max_steps=80, output_dir=out) == 0
    printed, metrics = capsys.readouterr().out, TrainingSummary.load(out).metrics
    targets = [row.split("\t")[1] for row in (tmp_path / "dev.tsv").read_text().splitlines()[1:]]
    bound = sum(target == target.lower() for target in targets) / len(targets)
    assert metrics["upper_bound_exact_match"] == bound < 0.5
    assert metrics["eval_exact_match"] <= bound < metrics["eval_exact_match_normalized"]
    assert f"{metrics['eval_exact_match']:.4f}    0.0000{bound:13.4f}\n" in printed
    assert "\nupper bound: score of references" in printed
    (tmp_path / "dev.de").write_text("".join(f"{target}\n" for target in targets))
    flags = {"model": out, "input": tmp_path / "dev.txt", "references": tmp_path / "dev.de", "metrics": "exact_match"}
    assert run_command("generate", **flags) == 0
    normalized = f"{metrics['eval_exact_match_normalized']:.4f}"
    expected = f"\nupper bound: exact_match {bound:.4f}\nexact_match_normalized {normalized}\nupper bound: score"
    assert expected in capsys.readouterr().out
    assert run_command("generate", "--lower_case", **flags) == 0
    assert capsys.readouterr().out.endswith(f"exact_match {normalized}\n"), "only the case differs"


def test_tokenizer_of_an_unsuitable_family(files, tmp_path, capsys):
    save_new(tmp_path / "model")
    flags = {**files, **QUICK, "family": f"bert:tokenizer={tmp_path / 'model'}", "output_dir": tmp_path / "out"}
    assert finetune("seq2seq", **flags, max_steps=1) == 2
    assert "target_vocab_size=10, for which CtxBertConfig has no field" in capsys.readouterr().err


def test_two_processes_have_the_losses_and_texts_of_one(files, tmp_path):
    flags = {**save_t5(tmp_path / "model"), **files, **QUICK, "label_smoothing": 0.1, "max_steps": 2}
    flags |= {"logging_steps": 1, "gradient_accumulation_steps": 2, "learning_rate": 1e-3, "batch_size": 8}
    check_two_processes("seq2seq", tmp_path, "loss", "grad_norm", "eval_loss", "eval_exact_match", **flags)
