"""`hf-ctxmodels finetune seq2seq` as a user runs it: an encoder-decoder of words, new, and one of transformers."""

import json
import random
from pathlib import Path

import pytest
import torch
from commands import run_command
from forked import run_forked
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, PreTrainedTokenizerFast, T5Config

from hf_ctxmodels.registry import FAMILIES
from hf_ctxmodels.training.summary import TrainingSummary

ROOT = Path(__file__).parents[2]
WORDS = {"red": "rot", "cat": "Katze", "sees": "sieht", "one": "ein", "big": "groß", "dog": "Hund"}
QUICK = ["--metrics", "exact_match,bleu", "--max_length", 8, "--max_target_length", 6, "--save_steps", 0]
QUICK += ["--learning_rate", "1e-2"]


@pytest.fixture
def files(tmp_path) -> list:
    """Texts, and word by word their translations."""
    rng = random.Random(0)
    for name, size in (("train", 400), ("dev", 30)):
        texts = [rng.choices(list(WORDS), k=rng.randint(1, 3)) for _ in range(size)]
        rows = [" ".join(text) + "\t" + " ".join(map(WORDS.get, text)) for text in texts]
        (tmp_path / f"{name}.tsv").write_text("\n".join(["text\tgerman", *rows]) + "\n")
        (tmp_path / f"{name}.txt").write_text("".join(row.split("\t")[0] + "\n" for row in rows))
    files = ["--train_file", tmp_path / "train.tsv", "--validation_file", tmp_path / "dev.tsv"]
    return [*files, "--text_columns", "text", "--label_column", "german"]


def save_new(folder: Path) -> list:
    """A family's tokenizer; the model is new."""
    pairs = [f"{source}\t{target}" for source, target in WORDS.items()]
    FAMILIES["cove"].tokenizer.train(pairs, 60, min_count=1, min_target_count=1).save_pretrained(folder)
    sizes = ["embedding_size=16", "hidden_size=32", "num_hidden_layers=1", "hidden_dropout_prob=0"]
    return ["--family", f"cove:tokenizer={folder}", "--config_options", *sizes]


def save_peer(folder: Path) -> list:
    """A tiny T5 of transformers, with a tokenizer of both languages' words."""
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
    return ["--model", folder]


@pytest.mark.parametrize("save", [save_new, save_peer])
def test_learns_and_writes_what_generate_writes(save, files, tmp_path, monkeypatch, capsys):
    out, predicted, written = tmp_path / "out", tmp_path / "predictions.jsonl", tmp_path / "written.txt"
    flags = ["seq2seq", *save(tmp_path / "model"), *files, *QUICK, "--label_smoothing", 0.1]
    flags += ["--max_steps", 160, "--num_beams", 2, "--predictions_file", predicted, "--output_dir", out]
    assert run_command("finetune", *flags) == 0
    shown = capsys.readouterr().out
    summary = TrainingSummary.load(out)
    assert summary.metrics["eval_exact_match"] > 0.5
    assert f"{summary.metrics['eval_exact_match']:.4f}" in shown
    assert "baseline: the source itself" in shown
    assert summary.metrics["baseline_exact_match"] == 0
    predictions = [json.loads(line) for line in predicted.read_text().splitlines()]
    wanted = [" ".join(map(WORDS.get, each["source"].split())) for each in predictions]
    right = [each["prediction"] == each["target"] == text for each, text in zip(predictions, wanted, strict=True)]
    assert sum(right) / len(right) == pytest.approx(summary.metrics["eval_exact_match"])
    flags = [
        "--model",
        out,
        "--input",
        tmp_path / "dev.txt",
        "--decoding",
        "beam:num_beams=2",
        "--max_new_tokens",
        6,
        "--batch_size",
        7,
    ]
    assert run_command("generate", *flags, "--output_file", written) == 0
    assert written.read_text().splitlines() == [each["prediction"] for each in predictions]
    assert type(AutoModelForSeq2SeqLM.from_pretrained(out)).__name__ == summary.model_class
    assert AutoTokenizer.from_pretrained(out)("red cat").input_ids


def test_the_upper_bound_of_lower_cased_targets_is_shown(files, tmp_path, monkeypatch, capsys):
    """By both commands, in the summary too, beside the metrics against the targets as the tokenizer writes them."""
    flags, out = save_new(tmp_path / "model"), tmp_path / "out"
    pairs = [f"{source}\t{target}" for source, target in WORDS.items()]
    train = FAMILIES["cove"].tokenizer.train
    train(pairs, 60, min_count=1, min_target_count=1, target_lower_case=True).save_pretrained(tmp_path / "model")
    flags = ["seq2seq", *flags, *files, *QUICK, "--max_steps", 80, "--output_dir", out]
    assert run_command("finetune", *flags) == 0
    shown, found = capsys.readouterr().out, TrainingSummary.load(out).metrics
    targets = [row.split("\t")[1] for row in (tmp_path / "dev.tsv").read_text().splitlines()[1:]]
    most = sum(target == target.lower() for target in targets) / len(targets)
    assert found["ceiling_exact_match"] == most < 0.5
    assert found["eval_exact_match"] <= most < found["eval_exact_match_normalized"]
    assert f"{found['eval_exact_match']:.4f}    0.0000{most:13.4f}\n" in shown
    assert "\nupper bound: score of references" in shown
    (tmp_path / "dev.de").write_text("".join(f"{target}\n" for target in targets))
    flags = ["--model", out, "--input", tmp_path / "dev.txt", "--references", tmp_path / "dev.de"]
    assert run_command("generate", *flags, "--metrics", "exact_match") == 0
    shown, normalized = capsys.readouterr().out, found["eval_exact_match_normalized"]
    assert (
        f"\nupper bound: exact_match {most:.4f}\nexact_match_normalized {normalized:.4f}\nupper bound: score" in shown
    )
    assert run_command("generate", *flags, "--metrics", "exact_match", "--lower_case") == 0
    shown = capsys.readouterr().out
    assert shown.endswith(f"exact_match {normalized:.4f}\n"), "case alone differs"


def test_a_tokenizer_of_another_kind_of_family_is_refused(files, tmp_path, monkeypatch, capsys):
    flags = ["seq2seq", *save_new(tmp_path / "model"), *files, *QUICK, "--max_steps", 1, "--output_dir", "o"]
    flags[2] = flags[2].replace("cove", "bert")
    del flags[3:8]  # --config_options of CoVe
    assert run_command("finetune", *flags) == 2
    assert "target_vocab_size=10, for which CtxBertConfig has no field" in capsys.readouterr().err


# Two processes that meet in a file; tests/training/test_faults.py starts two by `accelerate launch`.
TWO_PROCESSES = """
import sys
from accelerate import debug_launcher
from hf_ctxmodels_cli import run
sys.argv.insert(1, "finetune")
debug_launcher(run, num_processes=2)
"""


def test_two_processes_give_the_losses_and_texts_of_one(files, tmp_path):
    flags = ["seq2seq", *save_peer(tmp_path / "model"), *files, *QUICK, "--label_smoothing", 0.1]
    flags += ["--max_steps", 2, "--logging_steps", 1, "--gradient_accumulation_steps", 2, "--learning_rate", 1e-3]
    logs, texts = {}, {}
    for processes, command in ((1, ["-m", "hf_ctxmodels", "finetune"]), (2, ["-c", TWO_PROCESSES])):
        out, predicted = tmp_path / f"out{processes}", tmp_path / f"{processes}.jsonl"
        more = ["--output_dir", out, "--per_device_batch_size", 8 // processes, "--predictions_file", predicted]
        result = run_forked(*command, *flags, *more, cwd=ROOT)
        assert result.returncode == 0, result.stderr[-3000:]
        logs[processes] = [json.loads(line) for line in (out / "training_log.jsonl").read_text().splitlines()]
        texts[processes] = predicted.read_text()
    for one, two in zip(logs[1], logs[2], strict=True):
        for name in ("loss", "grad_norm", "eval_loss", "eval_exact_match"):
            assert one.get(name) == pytest.approx(two.get(name), abs=1e-5)
    assert texts[1] == texts[2]
