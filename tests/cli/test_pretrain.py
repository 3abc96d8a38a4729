"""`hf-ctxmodels pretrain`: errors; new, continued and resumed runs; sentence tasks of GenSen; domains of ELMo."""

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
from torch import Tensor
from training_runs import WORDS, log_without_speed
from transformers import AutoConfig, AutoModel, AutoModelForPreTraining, AutoTokenizer, pipeline
from zoo import TINY

from hf_ctxmodels import CtxElmoConfig, CtxElmoTokenizer, CtxGenSenConfig, CtxGenSenForPreTraining, CtxUlmfitTokenizer
from hf_ctxmodels.data import document_sources, documents
from hf_ctxmodels.data.streams import ShuffledStream
from hf_ctxmodels.objectives.bidirectional_lm import BidirectionalLM
from hf_ctxmodels.registry import FAMILIES
from hf_ctxmodels.tokenizers.base import tokenizer_digest
from hf_ctxmodels.training.summary import TrainingSummary

FAMILY = next(iter(FAMILIES.values()))
SIZE = {"max_length": 32, "per_device_batch_size": 8, "dataloader_workers": 0, "max_steps": 1}


def pretrain(*args: object, **flags: object) -> int:
    return run_command("pretrain", *args, **{**SIZE, **flags})


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


def edit_file(name: str, change: Callable[[bytes], bytes], has_manifest: bool = True) -> Callable[[Path], None]:
    """A function that changes the bytes of a file; without a manifest the model has no digests."""

    def damage(folder: Path) -> None:
        (folder / name).write_bytes(change((folder / name).read_bytes()))
        if not has_manifest:
            (folder / "model" / "manifest.json").unlink()

    return damage


def flip(content: bytes, position: int) -> bytes:
    changed = bytearray(content)
    changed[position] ^= 4
    return bytes(changed)


def replace_tokenizer(folder: Path) -> None:
    """Replace the tokenizer by one with as many tokens, which stand for other words."""
    text = "".join(f"{word[::-1]} " * 9 for word in WORDS)
    tokenizer = FAMILY.tokenizer.train([text], vocab_size=80, min_frequency=1)
    tokenizer.add_tokens([f"more{number}" for number in range(80 - len(tokenizer))])
    tokenizer.save_pretrained(folder / "model")


def raise_token_id(folder: Path) -> None:
    """Raise one token id above the embedding table; the number of tokens stays the same."""
    for name, change in (
        ("config.json", lambda content: content | {"tokenizer_digest": None}),
        ("tokenizer.json", lambda content: content["model"]["vocab"].update(cat=5000) or content),
    ):
        file = folder / "model" / name
        file.write_text(json.dumps(change(json.loads(file.read_text()))))


WEIGHTS = "model/model.safetensors"
CHANGED = "model.safetensors was truncated or changed after it was saved"
INVALID_ENCODING = edit_file("text.txt", lambda content: b"The caf\xe9 was closed.\n")
FAULTS: dict[str, tuple[Callable[[Path], None] | None, dict[str, object], str]] = {
    "flipped weight": (edit_file(WEIGHTS, lambda content: flip(content, -1000)), {}, CHANGED),
    "truncated weights": (edit_file(WEIGHTS, lambda content: content[:-100]), {}, CHANGED),
    "without digests": (edit_file(WEIGHTS, lambda content: content[:-100], False), {}, "The weights are damaged"),
    "flipped header": (
        edit_file(WEIGHTS, lambda content: flip(content, content.index(b"word_embeddings")), False),
        {},
        "weights of the encoder are missing",
    ),
    "no tokenizer": (lambda folder: (folder / "model/tokenizer.json").unlink(), {}, "The directory contains no tok"),
    "other tokenizer": (replace_tokenizer, {}, "not the tokenizer that the model was trained with"),
    "token id": (raise_token_id, {}, "is 5000, outside [0, vocab_size="),
    "empty text": (edit_file("text.txt", lambda content: b"\n \n"), {}, "The dataset is empty"),
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
def test_faults_raise_readable_errors(fault, folder, capsys) -> None:
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


def test_one_held_out_document_raises(folder) -> None:
    """Next sentence prediction needs two documents; the error names the held-out ones."""
    tokenizer = FAMILIES["bert"].tokenizer.train([(folder / "text.txt").read_text()], vocab_size=80)
    tokenizer.save_pretrained(folder / "bert")
    flags = {"family": "bert", "tokenizer": folder / "bert", "objective": "mlm+nsp", "validation_fraction": 0.02}
    flags |= {"dataset": folder / "text.txt", "output_dir": folder / "out"}
    error = command_output("pretrain", **SIZE, **flags, fails=True)
    assert "only one document" in error
    assert "where: the held-out documents\n  Fix: raise --validation_fraction, or: separate" in error


def test_replaced_tokenizer_without_digest(folder) -> None:
    """Another tokenizer is accepted if the configuration has no digest; its digest is saved."""
    replace_tokenizer(folder)
    assert pretrain(**continued_run(folder), config_options="tokenizer_digest=null") == 0
    before, after = (AutoConfig.from_pretrained(folder / name).tokenizer_digest for name in ("model", "out"))
    assert before != after == tokenizer_digest(AutoTokenizer.from_pretrained(folder / "out"))


def test_saved_tokenizer_truncates_to_the_positions_of_the_model(trained: Path) -> None:
    """`truncation=True` without `max_length` returns inputs that the model accepts."""
    tokenizer, limit = AutoTokenizer.from_pretrained(trained / "model"), 64  # as in tiny.json
    assert tokenizer.model_max_length == limit
    inputs = tokenizer("the cat sat " * 99, truncation=True, return_tensors="pt")
    assert AutoModel.from_pretrained(trained / "model")(**inputs).last_hidden_state.shape[1] == limit
    fill = pipeline("fill-mask", str(trained / "model"), tokenizer_kwargs={"truncation": True})
    assert fill(f"the {tokenizer.mask_token} " + "sat on the mat " * 99)


@pytest.mark.parametrize("workers", [0, 1])
def test_invalid_stream_prints_one_error(folder, workers) -> None:
    """The error is printed once, also if a data worker raises it."""
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
    assert pretrain(**flags, config_options=[layers, "num_attention_heads=7"]) == 2
    assert "Not a configuration of CtxBertConfig: hidden_size=32 is not a multiple of" in capsys.readouterr().err
    for name, config in (("out", flags["config"]), ("out2", "tiny")):
        changes = {"config": config, "output_dir": folder / name}
        assert pretrain(**flags | changes, config_options=layers) == 0
        assert json.loads((folder / name / "config.json").read_text())["num_hidden_layers"] == 1


@pytest.mark.parametrize("fraction", [0.2, 0])
def test_warning_if_loss_is_not_below_baseline(folder, capsys, fraction) -> None:
    """The warning is printed after the results, also without held-out text."""
    assert pretrain(**new_run(folder), validation_fraction=fraction) == 0
    summary = TrainingSummary.load(folder / "out")
    assert any("is not below" in warning and "mlm_loss" in warning for warning in summary.warnings)
    last_line = capsys.readouterr().out.partition("\nnext:")[0].splitlines()[-1]
    assert last_line.startswith(f"warning: {'; '.join(summary.warnings)}; hint: try a higher --learning_rate")
    if not fraction:
        assert summary.metrics == {}
        return
    metrics = summary.metrics
    baselines = [value for name, value in metrics.items() if name.startswith("baseline_") and name.endswith("loss")]
    assert baselines
    assert all(0 < value < math.log(80) < metrics["eval_loss"] for value in baselines)
    assert (folder / "out" / "training_curve.png").exists()


@pytest.mark.parametrize("alpha", [None, pytest.param(0.3, marks=pytest.mark.slow)])
def test_resumed_stream_equals_uninterrupted_run(folder, capsys, monkeypatch, alpha) -> None:
    for module in (documents, document_sources):
        monkeypatch.setattr(module, "PART_BYTES", 2000)
    (folder / "more.txt").write_text((folder / "text.txt").read_text())
    flags = new_run(folder) | {"dataset": [folder / "text.txt", folder / "more.txt"]}
    flags |= {"max_steps": 6, "save_steps": 3, "save_total_limit": 9, "streaming": True}
    flags |= {"validation_fraction": 0.2} if alpha is None else {"sampling_alpha": alpha}
    assert pretrain(**flags) == 0
    shutil.copytree(folder / "out", folder / "stopped")
    shutil.rmtree(folder / "stopped" / "checkpoint-6", ignore_errors=True)
    (state,) = (folder / "stopped" / "checkpoint-3").glob("stream_state_*.json")
    assert pretrain("--resume", **flags | {"output_dir": folder / "stopped"}) == 0
    weights = (folder / "out" / "model.safetensors").read_bytes()
    assert (folder / "stopped" / "model.safetensors").read_bytes() == weights
    (positions,) = json.loads(state.read_text())["positions"].values()
    assert positions[0] == 3 * SIZE["per_device_batch_size"]
    shutil.rmtree(folder / "stopped" / "checkpoint-6")
    capsys.readouterr()
    assert pretrain("--resume", **flags | {"output_dir": folder / "stopped", "dataloader_workers": 2}) == 0
    assert "number of processes or workers changed" in capsys.readouterr().err


@pytest.mark.parametrize("streaming", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_resumed_language_sampling_equals_uninterrupted_run(folder, capsys, monkeypatch, streaming) -> None:
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


def test_resume_requires_same_model_and_data(folder, capsys) -> None:
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
    moved_files = {"dataset": folder / "elsewhere" / "text.txt", "tokenizer": folder / "renamed"}
    assert pretrain("--resume", **flags | moved_files) == 0


def test_resume_requires_same_file_of_objective(folder, capsys) -> None:
    (folder / "units.txt").write_text(f"{WORDS[0]} {WORDS[1]}\n")
    flags = new_run(folder) | {"family": "ernie", "objective": f"unit-mlm+pairs:units={folder / 'units.txt'}"}
    assert pretrain(**flags) == 0
    assert pretrain("--resume", **flags) == 0
    (folder / "elsewhere").mkdir()
    shutil.copy(folder / "units.txt", folder / "elsewhere" / "phrases.txt")
    moved_file = {"objective": f"unit-mlm+pairs:units={folder / 'elsewhere' / 'phrases.txt'}"}
    assert pretrain("--resume", **flags | moved_file) == 0
    (folder / "units.txt").write_text(f"{WORDS[2]} {WORDS[3]}\n")
    assert pretrain("--resume", **flags) == 2
    assert "objective_files.units" in capsys.readouterr().err


def test_family_and_tokenizer_default_to_model(folder, capsys) -> None:
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


def test_continued_reference_checkpoint(folder, capsys) -> None:
    """A checkpoint of transformers is continued as a model of the family given by --family."""
    model = AutoModelForPreTraining.from_pretrained(folder / "model")
    model.export_reference(folder / "reference")
    flags = continued_run(folder) | {"model": folder / "reference", "learning_rate": 1e-12}
    assert pretrain(**flags) == 2
    assert FAMILY.name in capsys.readouterr().err
    assert pretrain(**flags, family=FAMILY.name) == 0
    assert "newly initialized" not in capsys.readouterr().err
    continued = AutoModelForPreTraining.from_pretrained(folder / "out")
    assert type(continued) is type(model)
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(continued.state_dict()[name], weight)


def test_direction_of_continued_language_model(folder, capsys) -> None:
    """A continued model keeps its direction; a family without this field raises only if the option is set."""
    text, words = folder / "text.txt", folder / "words"
    CtxUlmfitTokenizer.train([text.read_text()], 60, min_count=1).save_pretrained(words)
    fresh = {"family": "ulmfit", "tokenizer": words, "dataset": text, "objective": "clm:backward=true"}
    sizes = ["hidden_size=8", "cell_size=12", "num_hidden_layers=1"]
    assert pretrain(**fresh, config_options=sizes, output_dir=folder / "backward") == 0
    capsys.readouterr()
    flags = {"model": folder / "backward", "dataset": text, "output_dir": folder / "more"}
    assert pretrain(**flags) == 2
    assert "pass --objective NAME:backward=true" in capsys.readouterr().err
    assert pretrain(**flags, objective="clm:backward=true") == 0
    assert AutoConfig.from_pretrained(folder / "more").backward

    FAMILIES["seqae"].tokenizer.train([text.read_text()], 60, min_count=1).save_pretrained(words)
    fresh |= {"family": "seqae", "config_options": ["embedding_size=8", "hidden_size=8"], "output_dir": folder / "out"}
    assert pretrain(**fresh) == 2
    assert "needs the configuration field backward" in capsys.readouterr().err
    assert pretrain(**fresh | {"objective": "clm"}) == 0


SENTENCE_WORDS = ["cat", "dog", "bird", "sat", "ran", "saw", "tree", "house"]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A folder with a tokenizer, and the data flags."""
    folder, rng = tmp_path_factory.mktemp("tasks"), random.Random(0)
    sentences = [" ".join(rng.choices(SENTENCE_WORDS, k=rng.randint(2, 6))) for _ in range(60)]
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
    assert run_command("data", "tokenizer", *flags, *data) == 0
    return folder, data


def pretrain_gensen(prepared: tuple[Path, list[str]], *flags: object) -> int:
    folder, data = prepared
    common = ("--family", "gensen", "--config", folder / "tiny.json", "--tokenizer", folder / "tokenizer")
    sizes = ("--per_device_batch_size", 4, "--dataloader_workers", 0, "--logging_steps", 1)
    return run_command("pretrain", *common, *sizes, *data, *flags)


def test_resumed_sentence_tasks_equal_uninterrupted_run(prepared, tmp_path) -> None:
    flags = ("--max_steps", 12, "--save_steps", 5, "--gradient_accumulation_steps", 2, "--save_total_limit", 9)
    flags += ("--validation_fraction", 0.1)
    assert pretrain_gensen(prepared, *flags, "--output_dir", tmp_path / "whole") == 0
    log = log_without_speed(tmp_path / "whole")
    steps = {int(record["step"]): record for record in log if "grad_norm" in record}
    assert [step for step, record in steps.items() if "relation_loss" in record] == [1, 11]
    assert all(("generation_loss" in record) != ("relation_loss" in record) for record in steps.values())
    summary = json.loads((tmp_path / "whole/training_summary.json").read_text())
    names = {f"{prefix}_{name}" for prefix in ("eval", "baseline") for name in ("generation_loss", "relation_loss")}
    assert names | {"eval_relation_accuracy", "baseline_relation_accuracy"} <= set(summary["metrics"])
    assert summary["rates"]["<de>_share"] > 0
    shutil.copytree(tmp_path / "whole", tmp_path / "stopped")
    for step in (10, 12):  # as if killed after step 5
        shutil.rmtree(tmp_path / f"stopped/checkpoint-{step}", ignore_errors=True)
    assert pretrain_gensen(prepared, *flags, "--output_dir", tmp_path / "stopped", "--resume") == 0
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "stopped")]
    assert weights[0] == weights[1]
    assert log_without_speed(tmp_path / "stopped") == log


def test_single_sentence_task(prepared, tmp_path) -> None:
    flags = ("--max_steps", 3, "--objective", "sentence-tasks:tasks=relations", "--output_dir", tmp_path)
    assert pretrain_gensen(prepared, *flags) == 0
    model = AutoModelForPreTraining.from_pretrained(tmp_path)
    assert type(model) is CtxGenSenForPreTraining
    assert model.config.decoder_tasks == []
    assert model.config.relations == ["contradiction", "entailment", "neutral"]
    vectors = AutoModel.from_pretrained(tmp_path).encode(["a cat sat", "dog"])
    assert vectors.shape == (2, 16)
    assert not torch.allclose(vectors[0], vectors[1])


def test_invalid_sentence_tasks(prepared, tmp_path, capsys) -> None:
    for flags, message in (
        (("--streaming",), "samples a task for each step"),
        (("--objective", "sentence-tasks:tasks=<fr>"), "no task '<fr>'"),
        (("--objective", "sentence-tasks:relations=same,other"), "is not among same, other"),
    ):
        assert pretrain_gensen(prepared, "--max_steps", 2, *flags, "--output_dir", tmp_path) == 2
        assert message in capsys.readouterr().err


def pretrain_elmo(directory: Path, **flags: object) -> None:
    common = {"tokenizer": directory / "tokenizer", "per_device_batch_size": 16, "learning_rate": 3e-2}
    assert run_command("pretrain", **common, warmup_steps=0.1, dataloader_workers=0, save_steps=0, **flags) == 0


def write_domain(file: Path, next_words: dict[str, str], length: int, count: int, seed: int) -> list[list[str]]:
    """Write documents of three sentences, in which the first word determines the others."""
    rng, documents = random.Random(seed), []
    for _ in range(count):
        document = []
        for _ in range(3):
            sentence = [rng.choice(list(next_words))]
            while len(sentence) < length:
                sentence.append(next_words[sentence[-1]])
            document.append(" ".join(sentence).capitalize() + ".")
        documents.append(document)
    file.write_text("\n\n".join(" ".join(document) for document in documents) + "\n")
    return documents


NEWS = {"a": "b", "b": "c", "c": "d", "d": "a"}
STEPS = 200
LAW = {next_: word for word, next_ in NEWS.items()}  # the same words in the reverse order
LETTERS = ["a b c d A B C D ."]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    fields = {name: value for name, value in TINY.items() if name in CtxElmoConfig.__dataclass_fields__}
    fields |= {"num_characters": 262, "num_hidden_layers": 1, "max_characters_per_token": 50}
    fields |= {"character_embedding_size": 16, "filters": [[1, 32], [2, 32]]}  # fast to train
    (tmp_path / "tiny.json").write_text(json.dumps(fields))
    return tmp_path


def make_batch(tokenizer: Path, documents: list[list[str]], max_length: int) -> dict[str, Tensor]:
    objective = BidirectionalLM(AutoTokenizer.from_pretrained(tokenizer), max_length=max_length, seed=0)
    return objective.collate(list(objective.examples(documents)))


@torch.no_grad()
def perplexity(model: Path, batch: dict[str, Tensor]) -> float:
    """Perplexity over the full vocabulary."""
    return math.exp(AutoModelForPreTraining.from_pretrained(model).eval()(**batch).loss)


@pytest.mark.slow
def test_elmo_continued_on_another_domain(directory: Path) -> None:
    """A model trained with sampled softmax is continued on another domain with full softmax."""
    tokenizer, news_model, law_model = directory / "tokenizer", directory / "general", directory / "special"
    CtxElmoTokenizer.train(LETTERS, vocab_size=99, min_count=1).save_pretrained(tokenizer)
    for name, next_words in (("news", NEWS), ("law", LAW)):
        write_domain(directory / f"{name}.txt", next_words, 7, 120, seed=0)
    unseen = [write_domain(directory / "unseen.txt", next_words, 7, 30, seed=2) for next_words in (NEWS, LAW)]
    news, law = (make_batch(tokenizer, documents, 10) for documents in unseen)
    common = {"max_length": 10, "max_steps": STEPS}
    fresh = {"family": "elmo", "config": directory / "tiny.json"}
    fresh |= {"objective": "bilm:negatives=6", "dataset": directory / "news.txt", "output_dir": news_model}
    pretrain_elmo(directory, **fresh, **common)
    news_ppl, law_ppl = perplexity(news_model, news), perplexity(news_model, law)
    assert news_ppl < 2 < 4 < law_ppl, "four equally frequent words, of which only the first of a sentence is random"
    full_softmax = {**common, "objective": "bilm:negatives=0"}
    pretrain_elmo(directory, model=news_model, **full_softmax, dataset=directory / "law.txt", output_dir=law_model)
    assert perplexity(law_model, law) < 2


@pytest.mark.slow
def test_elmo_with_language_tags(directory: Path) -> None:
    """Both languages have the same words: only the tags determine which word follows."""
    tokenizer = directory / "tokenizer"
    CtxElmoTokenizer.train(LETTERS, vocab_size=99, min_count=1, languages=["en", "de"]).save_pretrained(tokenizer)
    for name, next_words in (("news", NEWS), ("law", LAW)):
        write_domain(directory / f"{name}.txt", next_words, 2, 120, seed=0)
    data = {"dataset": [directory / "news.txt", directory / "law.txt"], "language_tags": ["<en>", "<de>"]}
    single_sentences = {"max_length": 8, "objective": "bilm:carry=false"}  # an example is one sentence
    out = directory / "both"
    fresh = {"family": "elmo", "config": directory / "tiny.json"}
    pretrain_elmo(directory, **fresh, **data, **single_sentences, output_dir=out, max_steps=350)
    config = AutoModelForPreTraining.from_pretrained(out).config
    assert (config.num_characters, config.num_languages) == (264, 2)

    unseen = [[sentence] for text in write_domain(directory / "unseen.txt", NEWS, 2, 30, seed=2) for sentence in text]
    correct_tags, wrong_tags = (
        make_batch(tokenizer, [[f"{tag} {sentence}"] for (sentence,) in unseen], 8) for tag in ("<en>", "<de>")
    )
    correct_perplexity = perplexity(out, correct_tags)
    assert correct_perplexity < 1.7, "only tags (2) and first words (4) are random"
    assert perplexity(out, wrong_tags) > 1.5 * correct_perplexity
    # the backward direction identifies the language by the first characters of words, not by the tag
    tags = correct_tags["input_ids"][..., 0]
    assert (tags == 262).sum() == 3 * len(unseen)
    correct_tags["input_ids"][..., 0] = tags + (tags == 262)
    assert perplexity(out, correct_tags) > 1.2 * correct_perplexity
