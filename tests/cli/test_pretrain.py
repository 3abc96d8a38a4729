"""`hf-ctxmodels pretrain` as a user runs it, on input that is wrong: one screen says what, where and how to mend it."""

import json
import math
import random
import shutil
from pathlib import Path

import pytest
import torch
from commands import run_command
from forked import run_forked
from transformers import AutoConfig, AutoModelForPreTraining, AutoTokenizer
from zoo import TINY

from hf_ctxmodels import CtxUlmfitTokenizer
from hf_ctxmodels.registry import FAMILIES
from hf_ctxmodels.tokenizers.base import tokenizer_digest
from hf_ctxmodels.training.summary import TrainingSummary

FAMILY = next(iter(FAMILIES.values()))
WORDS = [
    "the",
    "a",
    "cat",
    "dog",
    "bird",
    "sat",
    "ran",
    "saw",
    "on",
    "under",
    "by",
    "mat",
    "tree",
    "house",
    "red",
    "old",
    "small",
    "it",
    "was",
    "and",
    "then",
]


def pretrain(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    common = ("--max_length", 32, "--per_device_batch_size", 8, "--dataloader_workers", 0)
    return run_command("pretrain", *common, *arguments)


def new_run(folder: Path) -> list[object]:
    """Flags that train a new model on the text in `folder`."""
    named = {"family": FAMILY.name, "config": folder / "tiny.json", "tokenizer": folder / "model"}
    named |= {"dataset": folder / "text.txt", "output_dir": folder / "out"}
    return [part for name, value in named.items() for part in (f"--{name}", value)]


def continued_run(folder: Path) -> list[object]:
    """Flags that go on from the weights in `folder`."""
    named = {"model": folder / "model", "tokenizer": folder / "model", "dataset": folder / "text.txt"}
    return [part for name, value in (named | {"output_dir": folder / "out"}).items() for part in (f"--{name}", value)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """text.txt, tiny.json, and model/ as the script left it after two steps."""
    folder, rng = tmp_path_factory.mktemp("trained"), random.Random(0)
    documents = [" ".join(rng.choices(WORDS, k=40)) + "." for _ in range(40)]
    (folder / "text.txt").write_text("\n\n".join(documents) + "\n")
    tokenizer = FAMILY.tokenizer.train(documents, vocab_size=80, min_frequency=1)
    tokenizer.save_pretrained(folder / "model")
    fields = {name: value for name, value in TINY.items() if name in FAMILY.config.__dataclass_fields__}
    fields |= {"vocab_size": len(tokenizer), "max_position_embeddings": 64}
    (folder / "tiny.json").write_text(json.dumps(fields))
    with pytest.MonkeyPatch.context() as monkeypatch:
        assert pretrain(monkeypatch, *new_run(folder), "--max_steps", 2) == 0
    (folder / "out").rename(folder / "model-2")
    shutil.rmtree(folder / "model")
    (folder / "model-2").rename(folder / "model")
    return folder


@pytest.fixture
def folder(trained: Path, tmp_path: Path) -> Path:
    return shutil.copytree(trained, tmp_path / "copy")


def flip(file: Path, place: int) -> None:
    content = bytearray(file.read_bytes())
    content[place] ^= 4
    file.write_bytes(content)


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def flip_a_weight(folder: Path) -> None:
    flip(folder / "model" / "model.safetensors", -1000)


def truncate_the_weights(folder: Path) -> None:
    truncate(folder / "model" / "model.safetensors")


def truncate_foreign_weights(folder: Path) -> None:
    (folder / "model" / "manifest.json").unlink()
    truncate_the_weights(folder)


def flip_the_header_of_foreign_weights(folder: Path) -> None:
    (folder / "model" / "manifest.json").unlink()
    weights = folder / "model" / "model.safetensors"
    flip(weights, weights.read_bytes().index(b"word_embeddings"))


def remove_the_tokenizer(folder: Path) -> None:
    (folder / "model" / "tokenizer.json").unlink()


def grow_the_vocabulary(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    tokenizer.add_tokens(["new"])
    tokenizer.save_pretrained(folder / "model")


def exchange_the_tokenizer(folder: Path) -> None:
    """Another one with as many tokens: every id is valid, and means another word."""
    text = "".join(f"{word[::-1]} " * 9 for word in WORDS)
    tokenizer = FAMILY.tokenizer.train([text], vocab_size=80, min_frequency=1)
    tokenizer.add_tokens([f"more{number}" for number in range(80 - len(tokenizer))])
    tokenizer.save_pretrained(folder / "model")


def forget_the_tokenizer(folder: Path) -> None:
    config = json.loads((folder / "model" / "config.json").read_text())
    (folder / "model" / "config.json").write_text(json.dumps(config | {"tokenizer_digest": None}))


def number_a_token_too_high(folder: Path) -> None:
    """As many tokens as embeddings, but one id is past the last of them."""
    forget_the_tokenizer(folder)
    file = folder / "model" / "tokenizer.json"
    content = json.loads(file.read_text())
    content["model"]["vocab"]["cat"] = 5000
    file.write_text(json.dumps(content))


def empty_the_text(folder: Path) -> None:
    (folder / "text.txt").write_text("\n \n")


def spoil_the_encoding(folder: Path) -> None:
    (folder / "text.txt").write_bytes(b"The caf\xe9 was closed.\n")


def pass_over(folder: Path) -> None:
    """Nothing on disk is wrong; the flags are."""


@pytest.mark.parametrize(
    ("damage", "flags", "says"),
    [
        (flip_a_weight, (), "model.safetensors was truncated or changed after it was saved"),
        (truncate_the_weights, (), "model.safetensors was truncated or changed after it was saved"),
        (truncate_foreign_weights, (), "The weights are damaged"),
        (flip_the_header_of_foreign_weights, (), "weights of the encoder are missing"),
        (remove_the_tokenizer, (), "The directory contains no tokenizer"),
        (grow_the_vocabulary, (), "The vocabulary does not fit the model"),
        (exchange_the_tokenizer, (), "not the tokenizer that the model was trained with"),
        (number_a_token_too_high, (), "is 5000, outside [0, vocab_size="),
        (pass_over, ("--max_length", 65), "the model's limit of 64 positions"),
        (empty_the_text, (), "The dataset is empty"),
        (spoil_the_encoding, (), "Not UTF-8: byte 7 is 0xe9"),
        (pass_over, ("--learning_rate", 1e30), "The loss of step 2 is nan"),
        (pass_over, ("--output_dir", __file__), "The output directory cannot be created"),
        (pass_over, ("--config_options", "hidden_size=8"), "The weights do not match the configuration"),
        (pass_over, ("--config_options", "hiden_size=8"), "has no field hiden_size"),
        (pass_over, ("--model", "nowhere"), "No usable model configuration"),
        (pass_over, ("--tokenizer", "nowhere"), "tokenizer cannot be opened"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_fault_is_one_screen(damage, flags, says, folder, monkeypatch, capsys) -> None:
    damage(folder)
    assert pretrain(monkeypatch, *continued_run(folder), "--max_steps", 3, *flags) == 2
    error = capsys.readouterr().err
    message = error[error.rindex("Error: ") :]
    assert says in message
    assert "Fix:" in message
    assert len(message.splitlines()) < 15
    assert not (folder / "out" / "model.safetensors").exists()


def test_another_tokenizer_is_taken_when_told_so_and_remembered(folder, monkeypatch) -> None:
    exchange_the_tokenizer(folder)
    flags = [*continued_run(folder), "--max_steps", 1, "--config_options", "tokenizer_digest=null"]
    assert pretrain(monkeypatch, *flags) == 0
    before, after = (AutoConfig.from_pretrained(folder / name).tokenizer_digest for name in ("model", "out"))
    assert before != after == tokenizer_digest(AutoTokenizer.from_pretrained(folder / "out"))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_fault_in_a_stream_is_one_screen_and_ends_the_process(folder, workers) -> None:
    spoil_the_encoding(folder)
    flags = ["--max_steps", 1, "--max_length", 32, "--streaming", "--dataloader_workers", workers]
    run = run_forked("-m", "hf_ctxmodels", "pretrain", *continued_run(folder), *flags)
    assert run.returncode == 2
    message = run.stderr[run.stderr.index("CtxError: ") :]
    assert message.startswith("CtxError: Not UTF-8: byte 7 is 0xe9.\n  where:")
    assert "Traceback" not in run.stderr


def test_a_document_without_text_is_one_screen_unless_it_may_be_passed_over(folder, monkeypatch, capsys) -> None:
    lines = [json.dumps({"text": text}) for text in ("the cat sat.", "  ", "a dog ran. the bird saw it.")]
    (folder / "text.jsonl").write_text("\n".join(lines))
    flags = [*continued_run(folder), "--max_steps", 1, "--dataset", folder / "text.jsonl"]
    assert pretrain(monkeypatch, *flags) == 2
    assert "Document 1 (counted from 0) has no text" in capsys.readouterr().err
    assert pretrain(monkeypatch, *flags, "--skip_empty_documents") == 0


def test_options_change_the_configuration(folder, monkeypatch, capsys) -> None:
    flags = [*new_run(folder), "--max_steps", 1, "--config_options", "num_hidden_layers=1"]
    assert pretrain(monkeypatch, *flags, "hidden_sise=8") == 2
    assert "Not a configuration of" in capsys.readouterr().err
    assert pretrain(monkeypatch, *flags, "num_attention_heads=7") == 2
    assert "Not a configuration of CtxBertConfig: hidden_size=32 is not a multiple of" in capsys.readouterr().err
    assert pretrain(monkeypatch, *flags) == 0
    assert json.loads((folder / "out" / "config.json").read_text())["num_hidden_layers"] == 1
    assert pretrain(monkeypatch, *flags, "--config", "tiny", "--output_dir", folder / "out2") == 0
    assert json.loads((folder / "out2" / "config.json").read_text())["num_hidden_layers"] == 1


def test_the_summary_holds_the_frequency_baseline(folder, monkeypatch) -> None:
    flags = [*new_run(folder), "--max_steps", 1, "--validation_fraction", 0.2]
    assert pretrain(monkeypatch, *flags) == 0
    metrics = TrainingSummary.load(folder / "out").metrics
    token_losses = [name for name in metrics if name.startswith("baseline_") and name.endswith("loss")]
    assert token_losses
    for name in token_losses:
        assert 0 < metrics[name] < math.log(80) < metrics["eval_loss"]
    assert (folder / "out" / "training_curve.png").exists()


@pytest.mark.parametrize("streaming", [False, True])
def test_languages_are_sampled_and_exactly_so_after_a_stop(folder, monkeypatch, streaming) -> None:
    documents = (folder / "text.txt").read_text().split("\n\n")
    (folder / "small.txt").write_text("\n\n".join(documents[:4]))
    data = ("--dataset", folder / "text.txt", folder / "small.txt", "--sampling_alpha", 0.3)
    flags = (*new_run(folder), *data, "--max_steps", 6, "--save_steps", 3, "--save_total_limit", 9)
    flags += ("--streaming",) if streaming else ()
    assert pretrain(monkeypatch, *flags) == 0
    shutil.copytree(folder / "out", folder / "stopped")
    shutil.rmtree(folder / "stopped" / "checkpoint-6", ignore_errors=True)
    assert pretrain(monkeypatch, *flags, "--output_dir", folder / "stopped", "--resume") == 0
    files = [(folder / name / "model.safetensors").read_bytes() for name in ("out", "stopped")]
    assert files[0] == files[1]
    assert pretrain(monkeypatch, *flags, "--output_dir", folder / "proportional", "--sampling_alpha", 1) == 0
    assert (folder / "proportional" / "model.safetensors").read_bytes() != files[0]


def test_a_resumed_run_has_the_same_model_and_data(folder, monkeypatch, capsys) -> None:
    flags = (*new_run(folder), "--max_steps", 1)
    assert pretrain(monkeypatch, *flags) == 0
    for changed in ("--config_options", "hidden_dropout_prob=0.25"), ("--validation_fraction", 0.5):
        assert pretrain(monkeypatch, *flags, "--resume", *changed) == 2
        assert f"{changed[-1]}".removeprefix("hidden_dropout_prob=") + ", was" in capsys.readouterr().err
    (folder / "elsewhere").mkdir()
    (folder / "text.txt").rename(folder / "elsewhere" / "text.txt")
    (folder / "model").rename(folder / "renamed")
    moved = ("--dataset", folder / "elsewhere" / "text.txt", "--tokenizer", folder / "renamed")
    assert pretrain(monkeypatch, *flags, "--resume", *moved) == 0


def test_one_language_is_not_sampled(folder, monkeypatch, capsys) -> None:
    assert pretrain(monkeypatch, *new_run(folder), "--max_steps", 1, "--sampling_alpha", 0.3) == 2
    assert "requires several datasets" in capsys.readouterr().err


def test_the_family_follows_from_the_model(folder, monkeypatch, capsys) -> None:
    flags = ["--tokenizer", folder / "model", "--dataset", folder / "text.txt", "--output_dir", folder / "out"]
    assert pretrain(monkeypatch, *flags, "--max_steps", 1) == 2
    assert "No model family is given" in capsys.readouterr().err
    assert pretrain(monkeypatch, *flags, "--max_steps", 1, "--model", folder / "model", "--config", "mini") == 0
    assert "--config mini is ignored" in capsys.readouterr().err
    model = AutoModelForPreTraining.from_pretrained(folder / "out")
    assert type(model) is FAMILY.models["AutoModelForPreTraining"]


def test_the_tokenizer_is_that_of_the_model(folder, monkeypatch, capsys) -> None:
    flags = [part for name, value in (("dataset", "text.txt"), ("output_dir", "out")) for part in (f"--{name}", value)]
    monkeypatch.chdir(folder)
    assert pretrain(monkeypatch, *flags, "--max_steps", 1, "--model", "model") == 0
    assert AutoTokenizer.from_pretrained("out").get_vocab() == AutoTokenizer.from_pretrained("model").get_vocab()
    assert pretrain(monkeypatch, *flags, "--max_steps", 1, "--family", FAMILY.name) == 2
    assert "No tokenizer is given" in capsys.readouterr().err


def test_a_reference_checkpoint_is_continued_in_its_family(folder, monkeypatch, capsys) -> None:
    model = AutoModelForPreTraining.from_pretrained(folder / "model")
    model.export_reference(folder / "reference")
    flags = [*continued_run(folder), "--max_steps", 1, "--model", folder / "reference", "--learning_rate", 1e-12]
    assert pretrain(monkeypatch, *flags) == 2
    assert FAMILY.name in capsys.readouterr().err
    assert pretrain(monkeypatch, *flags, "--family", FAMILY.name) == 0
    assert "newly initialised" not in capsys.readouterr().err
    continued = AutoModelForPreTraining.from_pretrained(folder / "out")
    assert type(continued) is type(model)
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(continued.state_dict()[name], weight)


def test_the_direction_of_a_model_stays(folder, monkeypatch, capsys) -> None:
    text = folder / "text.txt"
    CtxUlmfitTokenizer.train([text.read_text()], 60, min_count=1).save_pretrained(folder / "words")
    sizes = ["--config_options", "hidden_size=8", "cell_size=12", "num_hidden_layers=1", "--max_steps", 1]
    start = ["--family", "ulmfit", "--tokenizer", folder / "words", *sizes, "--objective", "clm:backward=true"]
    assert pretrain(monkeypatch, *start, "--dataset", text, "--output_dir", folder / "backward") == 0
    flags = ["--model", folder / "backward", "--dataset", text, "--output_dir", folder / "more", "--max_steps", 1]
    capsys.readouterr()
    assert pretrain(monkeypatch, *flags) == 2
    assert "pass --objective NAME:backward=true" in capsys.readouterr().err
    assert pretrain(monkeypatch, *flags, "--objective", "clm:backward=true") == 0
    assert AutoConfig.from_pretrained(folder / "more").backward


def test_a_field_that_a_family_lacks(folder, monkeypatch, capsys) -> None:
    """It is an error to ask for it, and none not to."""
    text = folder / "text.txt"
    FAMILIES["seqae"].tokenizer.train([text.read_text()], 60, min_count=1).save_pretrained(folder / "words")
    sizes = ["--config_options", "embedding_size=8", "hidden_size=8", "--max_steps", 1, "--output_dir", folder / "out"]
    flags = ["--family", "seqae", "--objective", "clm", "--tokenizer", folder / "words", *sizes, "--dataset", text]
    assert pretrain(monkeypatch, *flags, "--objective", "clm:backward=true") == 2
    assert "needs the configuration field backward" in capsys.readouterr().err
    assert pretrain(monkeypatch, *flags) == 0
