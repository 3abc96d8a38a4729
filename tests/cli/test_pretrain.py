"""`hf-ctxmodels pretrain`: invalid input is a readable error; new, continued and resumed runs."""

import functools
import json
import math
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import command_output, run_command
from training_runs import WORDS
from transformers import AutoConfig, AutoModelForPreTraining, AutoTokenizer
from zoo import TINY

from hf_ctxmodels import CtxUlmfitTokenizer
from hf_ctxmodels.data.training_set import ShuffledStream
from hf_ctxmodels.registry import FAMILIES
from hf_ctxmodels.tokenizers.base import tokenizer_digest
from hf_ctxmodels.training.summary import TrainingSummary

FAMILY = next(iter(FAMILIES.values()))
SIZE = {"max_length": 32, "per_device_batch_size": 8, "dataloader_workers": 0, "max_steps": 1}


def pretrain(*words: object, **flags: object) -> int:
    return run_command("pretrain", *words, **{**SIZE, **flags})


def new_run(folder: Path) -> dict[str, Any]:
    """Flags that train a new model on the text in `folder`."""
    flags = {"family": FAMILY.name, "config": folder / "tiny.json", "tokenizer": folder / "model"}
    return flags | {"dataset": folder / "text.txt", "output_dir": folder / "out"}


def continued_run(folder: Path) -> dict[str, Any]:
    """Flags that continue from the weights in `folder`."""
    flags = {"model": folder / "model", "tokenizer": folder / "model", "dataset": folder / "text.txt"}
    return flags | {"output_dir": folder / "out"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """text.txt, tiny.json, and the output of two training steps in model/."""
    folder, rng = tmp_path_factory.mktemp("trained"), random.Random(0)
    documents = [" ".join(rng.choices(WORDS, k=40)) + "." for _ in range(40)]
    (folder / "text.txt").write_text("\n\n".join(documents) + "\n")
    tokenizer = FAMILY.tokenizer.train(documents, vocab_size=80, min_frequency=1)
    tokenizer.save_pretrained(folder / "model")
    fields = {name: value for name, value in TINY.items() if name in FAMILY.config.__dataclass_fields__}
    fields |= {"vocab_size": len(tokenizer), "max_position_embeddings": 64}
    (folder / "tiny.json").write_text(json.dumps(fields))
    assert pretrain(**new_run(folder), max_steps=2) == 0
    shutil.rmtree(folder / "model")
    (folder / "out").rename(folder / "model")
    return folder


@pytest.fixture
def folder(trained: Path, tmp_path: Path) -> Path:
    return shutil.copytree(trained, tmp_path / "copy")


def edit(name: str, change: Callable[[bytes], bytes], has_manifest: bool = True) -> Callable[[Path], None]:
    """Damage that changes the bytes of a file; without its manifest the model has no digests."""

    def damage(folder: Path) -> None:
        (folder / name).write_bytes(change((folder / name).read_bytes()))
        if not has_manifest:
            (folder / "model" / "manifest.json").unlink()

    return damage


def flip(content: bytes, position: int) -> bytes:
    changed = bytearray(content)
    changed[position] ^= 4
    return bytes(changed)


def grow_vocabulary(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    tokenizer.add_tokens(["new"])
    tokenizer.save_pretrained(folder / "model")


def replace_tokenizer(folder: Path) -> None:
    """Another one with as many tokens: every id is valid, and means another word."""
    text = "".join(f"{word[::-1]} " * 9 for word in WORDS)
    tokenizer = FAMILY.tokenizer.train([text], vocab_size=80, min_frequency=1)
    tokenizer.add_tokens([f"more{number}" for number in range(80 - len(tokenizer))])
    tokenizer.save_pretrained(folder / "model")


def raise_token_id(folder: Path) -> None:
    """As many tokens as embeddings, but one id is above the last of them."""
    for name, change in (
        ("config.json", lambda content: content | {"tokenizer_digest": None}),
        ("tokenizer.json", lambda content: content["model"]["vocab"].update(cat=5000) or content),
    ):
        file = folder / "model" / name
        file.write_text(json.dumps(change(json.loads(file.read_text()))))


WEIGHTS = "model/model.safetensors"
CHANGED = "model.safetensors was truncated or changed after it was saved"
INVALID_ENCODING = edit("text.txt", lambda content: b"The caf\xe9 was closed.\n")
FAULTS: dict[str, tuple[Callable[[Path], None] | None, dict[str, object], str]] = {
    "flipped weight": (edit(WEIGHTS, lambda content: flip(content, -1000)), {}, CHANGED),
    "truncated weights": (edit(WEIGHTS, lambda content: content[:-100]), {}, CHANGED),
    "without digests": (edit(WEIGHTS, lambda content: content[:-100], False), {}, "The weights are damaged"),
    "flipped header": (
        edit(WEIGHTS, lambda content: flip(content, content.index(b"word_embeddings")), False),
        {},
        "weights of the encoder are missing",
    ),
    "no tokenizer": (lambda folder: (folder / "model/tokenizer.json").unlink(), {}, "The directory contains no tok"),
    "vocabulary": (grow_vocabulary, {}, "The vocabulary does not fit the model"),
    "other tokenizer": (replace_tokenizer, {}, "not the tokenizer that the model was trained with"),
    "token id": (raise_token_id, {}, "is 5000, outside [0, vocab_size="),
    "empty text": (edit("text.txt", lambda content: b"\n \n"), {}, "The dataset is empty"),
    "encoding": (INVALID_ENCODING, {}, "Not UTF-8: byte 7 is 0xe9"),
    "length": (None, {"max_length": 65}, "the model's limit of 64 positions"),
    "divergence": (None, {"learning_rate": 1e30}, "The loss of step 2 is nan"),
    "output_dir": (None, {"output_dir": __file__}, "The output directory cannot be created"),
    "width": (None, {"config_options": "hidden_size=8"}, "The weights do not match the configuration"),
    "unknown field": (None, {"config_options": "hiden_size=8"}, "has no field hiden_size"),
    "no model": (None, {"model": "nowhere"}, "No usable model configuration"),
    "no such tokenizer": (None, {"tokenizer": "nowhere"}, "tokenizer cannot be opened"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_readable_errors(fault, folder, capsys) -> None:
    damage, flags, expected = FAULTS[fault]
    if damage is not None:
        damage(folder)
    assert pretrain(**{**continued_run(folder), "max_steps": 3, **flags}) == 2
    error = capsys.readouterr().err
    message = error[error.rindex("Error: ") :]
    assert expected in message
    assert "Fix:" in message
    assert len(message.splitlines()) < 15
    assert not (folder / "out" / "model.safetensors").exists()


def test_another_tokenizer(folder) -> None:
    """A tokenizer of other words is accepted without a digest, and its digest is saved."""
    replace_tokenizer(folder)
    assert pretrain(**continued_run(folder), config_options="tokenizer_digest=null") == 0
    before, after = (AutoConfig.from_pretrained(folder / name).tokenizer_digest for name in ("model", "out"))
    assert before != after == tokenizer_digest(AutoTokenizer.from_pretrained(folder / "out"))


@pytest.mark.parametrize("workers", [0, 1])
def test_error_in_a_stream(folder, workers) -> None:
    """One message, also if a data worker raises the error."""
    INVALID_ENCODING(folder)
    flags = SIZE | continued_run(folder) | {"dataloader_workers": workers, "streaming": True}
    error = command_output("pretrain", **flags, fails=True)
    assert error[error.index("CtxError: ") :].startswith("CtxError: Not UTF-8: byte 7 is 0xe9.\n  where:")
    assert "Traceback" not in error


def test_empty_documents(folder, capsys) -> None:
    lines = [json.dumps({"text": text}) for text in ("the cat sat.", "  ", "a dog ran. the bird saw it.")]
    (folder / "text.jsonl").write_text("\n".join(lines))
    flags = continued_run(folder) | {"dataset": folder / "text.jsonl"}
    assert pretrain(**flags) == 2
    assert "Document 1 (counted from 0) has no text" in capsys.readouterr().err
    assert pretrain("--skip_empty_documents", **flags) == 0


def test_config_options(folder, capsys) -> None:
    flags, layers = new_run(folder), "num_hidden_layers=1"
    for option, message in (
        ("hidden_sise=8", "Not a configuration of"),
        ("num_attention_heads=7", "Not a configuration of CtxBertConfig: hidden_size=32 is not a multiple of"),
    ):
        assert pretrain(**flags, config_options=[layers, option]) == 2
        assert message in capsys.readouterr().err
    for name, config in (("out", flags["config"]), ("out2", "tiny")):
        changes = {"config": config, "output_dir": folder / name}
        assert pretrain(**flags | changes, config_options=layers) == 0
        assert json.loads((folder / name / "config.json").read_text())["num_hidden_layers"] == 1


def test_frequency_baselines(folder) -> None:
    assert pretrain(**new_run(folder), validation_fraction=0.2) == 0
    metrics = TrainingSummary.load(folder / "out").metrics
    baselines = [value for name, value in metrics.items() if name.startswith("baseline_") and name.endswith("loss")]
    assert baselines
    assert all(0 < value < math.log(80) < metrics["eval_loss"] for value in baselines)
    assert (folder / "out" / "training_curve.png").exists()


@pytest.mark.parametrize("streaming", [False, True])
def test_sampled_languages_resume_exactly(folder, capsys, monkeypatch, streaming) -> None:
    fill_buffer = functools.partialmethod(ShuffledStream.__init__, buffer_size=50)
    monkeypatch.setattr(ShuffledStream, "__init__", fill_buffer)
    documents = (folder / "text.txt").read_text().split("\n\n")
    (folder / "small.txt").write_text("\n\n".join(documents[:4]))
    flags = new_run(folder) | {"max_steps": 6, "save_steps": 3, "save_total_limit": 9, "sampling_alpha": 0.3}
    if streaming:
        flags["streaming"] = True
    else:
        assert pretrain(**flags) == 2
        assert "requires several datasets" in capsys.readouterr().err
    flags["dataset"] = [folder / "text.txt", folder / "small.txt"]
    assert pretrain(**flags) == 0
    shutil.copytree(folder / "out", folder / "stopped")
    shutil.rmtree(folder / "stopped" / "checkpoint-6", ignore_errors=True)
    assert pretrain("--resume", **flags | {"output_dir": folder / "stopped"}) == 0
    weights = (folder / "out" / "model.safetensors").read_bytes()
    assert (folder / "stopped" / "model.safetensors").read_bytes() == weights
    assert pretrain(**flags | {"output_dir": folder / "proportional", "sampling_alpha": 1}) == 0
    assert (folder / "proportional" / "model.safetensors").read_bytes() != weights


def test_resume_requires_the_same_model_and_data(folder, capsys) -> None:
    flags = new_run(folder)
    assert pretrain(**flags) == 0
    for changes, message in (
        ({"config_options": "hidden_dropout_prob=0.25"}, "0.25, was"),
        ({"validation_fraction": 0.5}, "0.5, was"),
    ):
        assert pretrain("--resume", **flags, **changes) == 2
        assert message in capsys.readouterr().err
    (folder / "elsewhere").mkdir()
    (folder / "text.txt").rename(folder / "elsewhere" / "text.txt")
    (folder / "model").rename(folder / "renamed")
    moved = {"dataset": folder / "elsewhere" / "text.txt", "tokenizer": folder / "renamed"}
    assert pretrain("--resume", **flags | moved) == 0


def test_family_and_tokenizer_of_the_model(folder, capsys) -> None:
    flags = {"dataset": folder / "text.txt", "output_dir": folder / "out"}
    assert pretrain(**flags, tokenizer=folder / "model") == 2
    assert "No model family is given" in capsys.readouterr().err
    assert pretrain(**flags, family=FAMILY.name) == 2
    assert "No tokenizer is given" in capsys.readouterr().err
    assert pretrain(**flags, model=folder / "model", config="mini") == 0
    assert "--config mini is ignored" in capsys.readouterr().err
    assert type(AutoModelForPreTraining.from_pretrained(folder / "out")) is FAMILY.models["AutoModelForPreTraining"]
    vocabularies = [AutoTokenizer.from_pretrained(folder / name).get_vocab() for name in ("out", "model")]
    assert vocabularies[0] == vocabularies[1]


def test_reference_checkpoint(folder, capsys) -> None:
    """A checkpoint of transformers is continued with the family that --family names."""
    model = AutoModelForPreTraining.from_pretrained(folder / "model")
    model.export_reference(folder / "reference")
    flags = continued_run(folder) | {"model": folder / "reference", "learning_rate": 1e-12}
    assert pretrain(**flags) == 2
    assert FAMILY.name in capsys.readouterr().err
    assert pretrain(**flags, family=FAMILY.name) == 0
    assert "newly initialised" not in capsys.readouterr().err
    continued = AutoModelForPreTraining.from_pretrained(folder / "out")
    assert type(continued) is type(model)
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(continued.state_dict()[name], weight)


def test_direction_of_a_language_model(folder, capsys) -> None:
    """A continued model keeps its direction; a family without the field refuses the option only if it is set."""
    text, words = folder / "text.txt", folder / "words"
    CtxUlmfitTokenizer.train([text.read_text()], 60, min_count=1).save_pretrained(words)
    new = {"family": "ulmfit", "tokenizer": words, "dataset": text, "objective": "clm:backward=true"}
    sizes = ["hidden_size=8", "cell_size=12", "num_hidden_layers=1"]
    assert pretrain(**new, config_options=sizes, output_dir=folder / "backward") == 0
    capsys.readouterr()
    flags = {"model": folder / "backward", "dataset": text, "output_dir": folder / "more"}
    assert pretrain(**flags) == 2
    assert "pass --objective NAME:backward=true" in capsys.readouterr().err
    assert pretrain(**flags, objective="clm:backward=true") == 0
    assert AutoConfig.from_pretrained(folder / "more").backward

    FAMILIES["seqae"].tokenizer.train([text.read_text()], 60, min_count=1).save_pretrained(words)
    new |= {"family": "seqae", "config_options": ["embedding_size=8", "hidden_size=8"], "output_dir": folder / "out"}
    assert pretrain(**new) == 2
    assert "needs the configuration field backward" in capsys.readouterr().err
    assert pretrain(**new | {"objective": "clm"}) == 0
