"""Invalid command lines raise before data and models are read, and without a request to the Hub."""

import errno
import json
import os
import sys
from pathlib import Path

import pytest
import torch
from commands import command_output, run_command, save, tiny_pair
from httpx2 import ConnectError
from huggingface_hub import HfApi, constants
from safetensors.torch import load_file
from transformers import AutoConfig, AutoTokenizer

from hf_ctxmodels import CtxBertConfig, CtxError
from hf_ctxmodels.core.command_line import parse_arguments
from hf_ctxmodels.core.loading import load_pretrained, read_json, require_existing_path
from hf_ctxmodels.training.arguments import LoopArguments
from hf_ctxmodels.training.model_loading import load_config, load_config_file, load_model, load_tokenizer

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
TEXTS = ["the cat sat on the mat", "a dog ran to the river", "it was cold", "the bird saw a tree"]

pytestmark = pytest.mark.usefixtures("fresh_accelerate")


def write_rows(path: Path, labels: str) -> Path:
    rows = [{"text": text, "label": label} for label, text in zip(labels, TEXTS, strict=False)] * 2
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A classifier with labels A, B and C in runs/abc, and an interrupted run in runs/stopped."""
    workspace = tmp_path_factory.mktemp("early")
    model, tokenizer = tiny_pair(
        "bert", "AutoModelForSequenceClassification", TEXTS, 60, id2label=dict(enumerate("ABC"))
    )
    save(workspace / "runs" / "abc", model, tokenizer)
    save(workspace / "runs" / "stopped" / "checkpoint-120", model, tokenizer)
    save(workspace / "tokenizer", tokenizer)
    write_rows(workspace / "rows.jsonl", "AB")
    (workspace / "text.txt").write_text("\n".join(TEXTS * 9))
    (workspace / "link").symlink_to("missing")
    (workspace / "broken.txt").write_bytes(b"the caf\xe9 was closed")
    return workspace


TASK = "--train_file rows.jsonl --validation_file rows.jsonl --max_length 16 --max_steps 1 --output_dir out"
TEXT = "--family bert --dataset text.txt --max_length 16 --max_steps 1 --output_dir out"
CHECKPOINT = "use runs/stopped/checkpoint-120, or run the command of the run again with --resume"
HINT = "did you mean runs/abc?"


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (f"finetune sequence-classification --model runs/abd {TASK}", HINT),
        ("generate --model ./runs/abcd --input text.txt", HINT),
        ("generate --model none --input text.txt --bag_of_words words.txt:bias=3", "words.txt"),
        ("generate --model none --input text.txt --fudge runs/abd:label=A", HINT),
        ("generate --model none --fields title=A --bag_of_words words.txt", "words.txt"),
        ("evaluate perplexity --model runs/ab --dataset text.txt", HINT),
        ("push --model runs/ab --repo_id a/b", HINT),
        (f"finetune sequence-classification --model tokenizer {TASK}", "has a tokenizer, and no model"),
        ("predict --model runs/abc --input text.tsv", "No such file"),
        ("analyze similarity --model a b --text t --output_dir out --measures ckaa", "did you mean cka"),
        ("analyze senses --model a --text t --word b --output_dir out --max_lemmas 0", "max_lemmas=0 is out of range"),
        ("evaluate pairs --model a --pairs b --unigram_text c --batch_size -1", "batch_size=-1 is out of range"),
        ("evaluate forgetting --pretrained a --finetuned b --text c --batch_size 0", "batch_size=0 is out of range"),
        ("evaluate ensemble --models a b --validation_file c --batch_size 0", "batch_size=0 is out of range"),
        (f"pretrain --tokenizer runs/bac {TEXT}", HINT),
        (f"pretrain --tokenizer runs/abc {TEXT.replace('text.txt', './texts')}", "There is no such directory"),
        (f"distill regression --teacher no/such/model --losses cosine {TASK}", "There is no such directory"),
        (f"finetune sequence-classification --model runs/stopped {TASK}", CHECKPOINT),
        (f"pretrain --tokenizer runs/stopped {TEXT}", CHECKPOINT),
        ("push --model runs/stopped --repo_id a/b", CHECKPOINT),
        (f"pretrain --tokenizer runs/abc {TEXT} --report_to trackio", "Not installed: trackio"),
        (f"pretrain --tokenizer none {TEXT} --optimizer lamb", "Not installed: pytorch_optimizer"),
        ("data tokenizer --family t5 --dataset broken.txt --vocab_size 60 --output_dir out", "packages sentencepiece"),
        ("export onnx --model none --output o.onnx", "Not installed: onnx"),
        ("export openvino --model none --output o.xml", "Not installed: onnx, openvino"),
        ("export openvino --model none --output o.onnx", "use the suffix .xml"),
        ("export torch --model none --output o.onnx", "use the suffix .pt2"),
        (f"pretrain --tokenizer none {TEXT} --output_dir text.txt/out", "cannot be created or written to"),
        (f"pretrain --tokenizer none {TEXT} --output_dir /proc/out", "cannot be created or written to: /proc"),
        (f"pretrain --tokenizer none {TEXT} --output_dir link/out", "link is a broken symbolic link"),
        ("data units --gazetteers text.txt --output text.txt/units.txt", "text.txt is a file"),
        (f"pretrain --tokenizer none {TEXT} --output_dir s3://bucket/out", "is a URL, expected a local path"),
        (f"finetune regression --model none {TASK} --output_dir file:///out", "is a URL, expected a local path"),
        ("embed sentences --model none --input text.txt --output memory://out.npy", "--output memory:/out.npy"),
        ("convert adapter --adapter none --output s3://bucket/out", "is a URL, expected a local path"),
        ("data overlap --train text.txt --test text.txt --output_dir gs://out", "is a URL, expected a local path"),
        (f"pretrain --tokenizer none {TEXT} --resume finish", "There is no checkpoint to finish"),
        (f"pretrain --tokenizer runs/abc {TEXT.replace('bert', 'elmo')}", "CtxBertTokenizer has no characters"),
        (f"finetune sequence-classification --family elmo:tokenizer=runs/abc {TASK}", "has no characters"),
        (
            f"pretrain --tokenizer runs/abc {TEXT.replace('bert', 'cvt')}",
            "The family cvt is not pretrained on raw text",
        ),
        (f"pretrain --tokenizer none {TEXT} --device cuda:99", "There is no device cuda:99"),
        (f"distill regression --teacher none --losses cosine {TASK} --device gpu", "There is no device gpu"),
        ("generate --model none --input text.txt --device cuda:99", "Fix: use one of: cpu"),
        ("evaluate perplexity --model none --dataset text.txt --device cuda:99", "Fix: use one of: cpu"),
        ("evaluate words --model none --near a --device cuda:99", "There is no device cuda:99"),
        ("data augment --model none --input rows.jsonl --output o --device cuda:99", "There is no device cuda:99"),
        pytest.param(
            f"pretrain --tokenizer none {TEXT} --dtype float16",
            "Training in float16 needs a GPU",
            marks=pytest.mark.skipif(torch.accelerator.is_available(), reason="needs a machine without GPU"),
        ),
    ],
)
def test_invalid_command_fails_without_hub_request(workspace, command, message, monkeypatch):
    def fail_on_request(source, *args, **kwargs):
        raise AssertionError(f"{source} is requested from the Hub")

    monkeypatch.chdir(workspace)
    for name in ("trackio", "pytorch_optimizer", "onnx", "openvino", "sentencepiece"):
        monkeypatch.setitem(sys.modules, name, None)
    command_args = command.split()
    if "runs/abc" not in command:
        monkeypatch.setattr(AutoConfig, "from_pretrained", fail_on_request)
        monkeypatch.setattr(AutoTokenizer, "from_pretrained", fail_on_request)
    stderr = command_output(command_args[0], *command_args[1:], fails=True)
    assert message in stderr
    assert "requested from the Hub" not in stderr
    assert not (workspace / "out").exists()


@pytest.mark.parametrize(
    "command",
    [
        "analyze behavior --suite sentiment --output_dir out --model",
        "analyze compare --text text.txt --output_dir out --model",
        "analyze similarity --text text.txt --output_dir out --model",
        "analyze triggers --validation_file rows.jsonl --output_dir out --transfer_to runs/abd --model",
        "evaluate ensemble --validation_file rows.jsonl --models",
        "evaluate forgetting --text text.txt --finetuned runs/abd --pretrained",
    ],
)
def test_all_paths_are_checked_before_the_first_model_is_loaded(workspace, command, monkeypatch):
    def fail_on_load(source, *args, **kwargs):
        raise AssertionError(f"{source} is loaded")

    monkeypatch.chdir(workspace)
    monkeypatch.setattr(AutoConfig, "from_pretrained", fail_on_load)
    models = ["runs/abc"] if "runs/abd" in command else ["runs/abc", "runs/abd"]
    assert HINT in command_output(*command.split(), *models, fails=True)


def test_missing_dataset_raises_before_model_creation(workspace, monkeypatch):
    monkeypatch.chdir(workspace)
    monkeypatch.setattr("hf_ctxmodels.training.pretraining.make_model", lambda *args: pytest.fail("model is created"))
    command_args = f"pretrain --tokenizer runs/abc {TEXT.replace('text.txt', 'texts.txt')}".split()
    assert "texts.txt" in command_output(command_args[0], *command_args[1:], fails=True)


def test_unavailable_device_of_script():
    stderr = command_output(SCRIPTS / "benchmark.py", "--device", "cuda:9", "--only", "nothing", fails=True)
    assert "The device cannot be used: " in stderr
    assert "--device cuda:9" in stderr


@pytest.mark.parametrize(
    ("suite", "rows"), [("encoders", "bert inference"), ("compression", "bert inference"), ("bands", "T=1024; T=2048.")]
)
def test_unknown_row_of_benchmark(suite, rows):
    stderr = command_output(SCRIPTS / "benchmark.py", "--suite", suite, "--only", "nothing", fails=True)
    assert "--only nothing" in stderr
    assert f"rows: {rows}" in stderr


@pytest.mark.parametrize(
    ("file", "load"),
    [
        ("config.json", load_config),
        ("tokenizer.json", load_tokenizer),
        ("config.json", lambda folder: load_config_file(CtxBertConfig, folder / "config.json")),
        ("config.json", lambda folder: load_pretrained(AutoConfig, folder, "the configuration")),
        ("config.json", lambda folder: read_json(folder / "config.json")),
        ("model.safetensors", lambda folder: load_model(folder, "AutoModel", load_config(folder))),
    ],
)
def test_hint_for_files_without_permission(workspace, monkeypatch, file, load):
    def open_file(path, *arguments, **options):
        if isinstance(path, str | Path) and Path(path).name == file:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return open_any(path, *arguments, **options)

    open_any = open
    monkeypatch.setattr("builtins.open", open_file)
    monkeypatch.setattr("io.open", open_file)
    with pytest.raises(CtxError, match="Permission denied") as error:
        load(workspace / "runs" / "abc")
    assert "permissions" in error.value.hint


def test_hub_ids_and_missing_paths(workspace, tmp_path, monkeypatch):
    monkeypatch.chdir(workspace)
    require_existing_path("google/bert")
    require_existing_path("gpt2")
    for name in ("my model", "adapter+adapter", "a/b/c", "../bert", "~/bert", "/bert", "bert/", "./bert"):
        with pytest.raises(CtxError, match="no such directory"):
            require_existing_path(name)
    (tmp_path / "models--runs--bert").mkdir()
    with pytest.raises(CtxError, match="if it is a Hub id, download it first: hf download runs/bert"):
        require_existing_path("runs/bert")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", tmp_path)
    require_existing_path("runs/bert")


def test_unreachable_hub_is_asked_once(tmp_path, monkeypatch, capsys):
    """A missing directory is an error without the half minute of retries, if its parent directory is missing, too."""
    requests = []

    def refuse(api, repo_id, **options):
        requests.append(repo_id)
        raise ConnectError("refused")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(HfApi, "repo_info", refuse)
    (tmp_path / "texts.txt").write_text("one text\n")
    assert run_command("predict", model="runs/bret", input="texts.txt") == 2
    assert "no such directory, and the Hub cannot be reached" in capsys.readouterr().err
    assert requests == ["runs/bret"]


def test_resume_flag_values():
    for args, expected in ((["--resume"], True), (["--resume", "finish"], "finish"), (["--resume", "no"], False)):
        argv = ["--output_dir", "out", "--max_steps", "1", *args]
        assert parse_arguments(LoopArguments, argv=argv)[0].resume == expected


def test_checkpoints_can_be_used_as_models(workspace, tmp_path, monkeypatch):
    monkeypatch.chdir(workspace)
    checkpoint = "runs/stopped/checkpoint-120"
    assert run_command("push", model=checkpoint, repo_id="a/b", dry_run=True) == 0
    flags = {"train_file": "rows.jsonl", "validation_file": "rows.jsonl", "max_length": 16, "max_steps": 1}
    assert run_command("finetune", "sequence-classification", model=checkpoint, **flags, output_dir=tmp_path) == 0
    assert run_command("export", "int8", model=checkpoint, output_dir=tmp_path / "int8") == 0


@pytest.mark.parametrize("labels", ["CBA", "BA", "XYZ", "XY"])
def test_head_is_replaced_if_labels_differ(workspace, labels, tmp_path, monkeypatch, capsys):
    """A head with the same set of labels is kept with its label order; any other head is replaced."""
    monkeypatch.chdir(workspace)
    file = write_rows(tmp_path / "rows.jsonl", labels)
    flags = {"train_file": file, "validation_file": file, "max_length": 16, "max_steps": 1, "learning_rate": 1e-9}
    out = tmp_path / "out"
    assert run_command("finetune", "sequence-classification", model="runs/abc", **flags, output_dir=out) == 0
    notice = f"the head of runs/abc for the labels A, B, C is replaced by a new one for {', '.join(sorted(labels))}"
    assert (notice in capsys.readouterr().err) == (labels != "CBA")
    assert list(AutoConfig.from_pretrained(out).id2label.values()) == sorted(labels)
    before, after = (load_file(directory / "model.safetensors") for directory in (workspace / "runs" / "abc", out))
    for name, weight in before.items():
        is_kept = after[name].shape == weight.shape and torch.allclose(after[name], weight, atol=1e-6)
        assert is_kept or (labels != "CBA" and name.startswith("classifier.")), name
    if labels == "XYZ":
        assert not torch.allclose(after["classifier.weight"], before["classifier.weight"], atol=1e-3)
