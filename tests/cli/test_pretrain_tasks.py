"""`hf-ctxmodels pretrain` of GenSen on several sentence tasks."""

import json
import random
import shutil
from pathlib import Path

import pytest
import torch
from commands import run_command
from transformers import AutoModel, AutoModelForPreTraining

from hf_ctxmodels import CtxGenSenConfig, CtxGenSenForPreTraining

WORDS = ["cat", "dog", "bird", "sat", "ran", "saw", "tree", "house"]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A folder with a tokenizer, and the flags of the data."""
    folder, rng = tmp_path_factory.mktemp("tasks"), random.Random(0)
    sentences = [" ".join(rng.choices(WORDS, k=rng.randint(2, 6))) for _ in range(60)]
    (folder / "running.txt").write_text("".join(f"{text.capitalize()}.\n" for text in sentences))
    (folder / "text.en").write_text("".join(f"{text}\n" for text in sentences))
    (folder / "text.de").write_text("".join(f"{text.upper()[::-1]}\n" for text in sentences))
    rows = [{"a": text, "b": sentences[0], "label": rng.choice(["entailment", "neutral"])} for text in sentences]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = CtxGenSenConfig(vocab_size=90, embedding_size=12, hidden_size=16, classifier_size=8)
    fields = {name: value for name, value in config.to_diff_dict().items() if name in config.__dataclass_fields__}
    (folder / "tiny.json").write_text(json.dumps({**fields, "hidden_dropout_prob": 0.1}))
    names = [str(folder / name) for name in ("running.txt", "text.en", "text.de", "pairs.jsonl")]
    data = ["--dataset", *names[:2], f"{names[3]}=a,b,label", "--translations", "-", names[2], "-"]
    data += ["--language_tags", "-", "<de>", "-"]
    flags = ("--family", "gensen", "--vocab_size", 90, "--output_dir", folder / "tokenizer")
    assert run_command("train-tokenizer", *flags, *data) == 0
    return folder, data


def pretrain(prepared: tuple[Path, list[str]], *flags: object) -> int:
    folder, data = prepared
    common = ("--family", "gensen", "--config", folder / "tiny.json", "--tokenizer", folder / "tokenizer")
    sizes = ("--per_device_batch_size", 4, "--dataloader_workers", 0, "--logging_steps", 1)
    return run_command("pretrain", *common, *sizes, *data, *flags)


def records(folder: Path) -> list[dict[str, float]]:
    lines = (folder / "training_log.jsonl").read_text().splitlines()
    return [{name: value for name, value in json.loads(line).items() if "per_second" not in name} for line in lines]


def test_resumed_run(prepared, tmp_path) -> None:
    flags = ("--max_steps", 12, "--save_steps", 5, "--gradient_accumulation_steps", 2, "--save_total_limit", 9)
    flags += ("--validation_fraction", 0.1)
    assert pretrain(prepared, *flags, "--output_dir", tmp_path / "whole") == 0
    log = records(tmp_path / "whole")
    steps = {int(record["step"]): record for record in log if "grad_norm" in record}
    assert [step for step, record in steps.items() if "relation_loss" in record] == [1, 11]
    assert all(("generation_loss" in record) != ("relation_loss" in record) for record in steps.values())
    summary = json.loads((tmp_path / "whole/training_summary.json").read_text())
    names = {f"{kind}_{name}" for kind in ("eval", "baseline") for name in ("generation_loss", "relation_loss")}
    assert names | {"eval_relation_accuracy", "baseline_relation_accuracy"} <= set(summary["metrics"])
    assert summary["rates"]["<de>_share"] > 0
    shutil.copytree(tmp_path / "whole", tmp_path / "stopped")
    for step in (10, 12):  # as if the run had been killed after step 5
        shutil.rmtree(tmp_path / f"stopped/checkpoint-{step}", ignore_errors=True)
    assert pretrain(prepared, *flags, "--output_dir", tmp_path / "stopped", "--resume") == 0
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "stopped")]
    assert files[0] == files[1]
    assert records(tmp_path / "stopped") == log


def test_one_task(prepared, tmp_path) -> None:
    flags = ("--max_steps", 3, "--objective", "sentence-tasks:tasks=relations", "--output_dir", tmp_path)
    assert pretrain(prepared, *flags) == 0
    head = AutoModelForPreTraining.from_pretrained(tmp_path)
    assert type(head) is CtxGenSenForPreTraining
    assert head.config.decoder_tasks == []
    assert head.config.relations == ["contradiction", "entailment", "neutral"]
    vectors = AutoModel.from_pretrained(tmp_path).encode(["a cat sat", "dog"])
    assert vectors.shape == (2, 16)
    assert not torch.allclose(vectors[0], vectors[1])


def test_errors(prepared, tmp_path, capsys) -> None:
    for flags, message in (
        (("--streaming",), "samples a task for each step"),
        (("--objective", "sentence-tasks:tasks=<fr>"), "no task '<fr>'"),
        (("--objective", "sentence-tasks:relations=same,other"), "is not among same, other"),
    ):
        assert pretrain(prepared, "--max_steps", 2, *flags, "--output_dir", tmp_path) == 2
        assert message in capsys.readouterr().err
