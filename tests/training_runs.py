"""A small pretraining setup: text, tokenizer, configuration, and helpers that run the training loop."""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from commands import flag_list
from forked import ForkedProcess
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_ctxmodels import CtxBertConfig, CtxBertForPreTraining
from hf_ctxmodels.data import build_training_set, load_documents
from hf_ctxmodels.objectives import MaskedLMWithNextSentence
from hf_ctxmodels.registry import FAMILIES
from hf_ctxmodels.training.accelerator import make_accelerator
from hf_ctxmodels.training.arguments import LoopArguments
from hf_ctxmodels.training.loop import TrainingLoop
from hf_ctxmodels.training.model_loading import load_tokenizer
from hf_ctxmodels.training.training_log import read_log

ROOT = Path(__file__).resolve().parents[1]
WORDS = ["the", "a", "cat", "dog", "bird", "sat", "ran", "saw", "on", "under", "by", "mat", "tree", "house", "red"]
WORDS += ["old", "small", "it", "was", "and", "then"]


@dataclass(frozen=True)
class Workspace:
    """Paths of the files, and runs of `hf-ctxmodels pretrain`."""

    folder: Path
    family: str = "bert"
    extra_flags: dict[str, object] = field(default_factory=dict)

    def flags(self, output_dir: Path, *extra_arguments: object, config: str = "dropout.json") -> list[str]:
        defaults = {
            "family": self.family,
            "config": self.folder / config,
            "tokenizer": self.folder / "tokenizer",
            "dataset": self.folder / "text.txt",
            "max_length": 32,
            "learning_rate": 1e-3,
            "lr_scheduler": "constant",
            "logging_steps": 2,
            "output_dir": output_dir,
            **self.extra_flags,
        }
        return [*flag_list(**defaults), *map(str, extra_arguments)]

    def start(self, *command: object) -> ForkedProcess:
        """Start `python <command>`."""
        return ForkedProcess(*command, cwd=ROOT, OMP_NUM_THREADS="1")

    def run(self, *command: object) -> tuple[int, str]:
        """Exit code and stderr of `python <command>`."""
        process = self.start(*command)
        _, errors = process.communicate()
        return process.returncode, errors

    def pretrain(self, *flags: object) -> tuple[int, str]:
        """Exit code and stderr of `hf-ctxmodels pretrain`."""
        return self.run("-m", "hf_ctxmodels", "pretrain", *flags)


def make_workspace(folder: Path, family: str, vocab_size: int = 80, **extra_flags: object) -> Workspace:
    rng = random.Random(0)
    documents = [
        "\n".join(" ".join(rng.choices(WORDS, k=rng.randint(4, 9))) + "." for _ in range(rng.randint(3, 8)))
        for _ in range(60)
    ]
    (folder / "text.txt").write_text("\n\n".join(documents) + "\n", encoding="utf-8")
    options = {"min_frequency": 1} if family == "bert" else {}
    tokenizer = FAMILIES[family].tokenizer.train(documents, vocab_size=vocab_size, **options)
    tokenizer.save_pretrained(folder / "tokenizer")
    for name, dropout in (("dropout.json", 0.1), ("exact.json", 0.0)):
        config = {
            "vocab_size": vocab_size,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 64,
            "max_position_embeddings": 32,
            "hidden_dropout_prob": dropout,
            "attention_probs_dropout_prob": dropout,
        }
        fields = FAMILIES[family].config.__dataclass_fields__
        config = {name: value for name, value in config.items() if name in fields}
        (folder / name).write_text(json.dumps(config), encoding="utf-8")
    return Workspace(folder, family, extra_flags)


@pytest.fixture(scope="session")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    return make_workspace(tmp_path_factory.mktemp("workspace"), "bert")


@pytest.fixture(scope="session")
def contiguous_workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """A model with a memory, trained on contiguous text."""
    return make_workspace(tmp_path_factory.mktemp("contiguous"), "xlnet", objective="plm:memory_length=20")


@pytest.fixture(params=["workspace", "contiguous_workspace"])
def any_workspace(request: pytest.FixtureRequest) -> Workspace:
    """Independent examples, and contiguous text with a memory."""
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="session")
def pair_workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """ELECTRA: a generator and a discriminator."""
    return make_workspace(tmp_path_factory.mktemp("pair"), "electra")


@pytest.fixture
def fresh_accelerate() -> Iterator[None]:
    """Reset accelerate's shared state before and after a test with other settings of its Accelerator."""
    reset_accelerate()
    yield
    reset_accelerate()


def reset_accelerate() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.fixture(scope="module")
def pretraining_setup(workspace):
    """Tokenizer, objective and examples."""
    tokenizer = load_tokenizer(workspace.folder / "tokenizer")
    objective = MaskedLMWithNextSentence(tokenizer, max_length=32, seed=3)
    examples = build_training_set(load_documents(str(workspace.folder / "text.txt")), objective)
    return tokenizer, objective, examples


def new_model(workspace, config: str = "exact.json") -> CtxBertForPreTraining:
    torch.manual_seed(0)
    return CtxBertForPreTraining(CtxBertConfig(**json.loads((workspace.folder / config).read_text())))


def arguments(output_dir: Path, **overrides: object) -> LoopArguments:
    defaults = {
        "max_steps": 3,
        "per_device_batch_size": 4,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "save_steps": 0,
        "dataloader_workers": 0,
        "lr_scheduler": "constant",
    }
    return LoopArguments(output_dir=str(output_dir), **{**defaults, **overrides})


def run(model, pretraining_setup, options: LoopArguments, collate=None, **loop_arguments):
    tokenizer, objective, examples = pretraining_setup
    accelerator = make_accelerator(options)
    return TrainingLoop(
        model, examples, collate or objective.collate, options, accelerator, tokenizer=tokenizer, **loop_arguments
    ).run()


def stop_after(collate, batches):
    """A collator that raises InterruptedError after this number of batches."""
    remaining = iter(range(batches))

    def limited_collate(examples):
        if next(remaining, None) is None:
            raise InterruptedError
        return collate(examples)

    return limited_collate


def trainer_arguments(output_dir: Path, cls: type[TrainingArguments] = TrainingArguments, **overrides: Any) -> Any:
    """Arguments of transformers' Trainer: on the CPU, without checkpoints and reports."""
    defaults = {"use_cpu": True, "save_strategy": "no", "report_to": "none", "disable_tqdm": True}
    return cls(output_dir=str(output_dir), **{**defaults, **overrides})


def log_without_speed(output_dir: Path) -> list[dict[str, Any]]:
    """Records of the training log without tokens per second."""
    return [
        {name: value for name, value in record.items() if "per_second" not in name} for record in read_log(output_dir)
    ]


def unbatch(batch: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """The examples of a batch, as a dataset for Trainer."""
    return [{name: tensor[index] for name, tensor in batch.items()} for index in range(len(batch["input_ids"]))]


class CallbackRun:
    """Trainer events without a model: `begin(callback)`, then `step_begin(callback, step)` and so on."""

    def __init__(self, optimizer: Any = None, max_steps: int = 10, epochs: float = 0.0, **begin_arguments: Any) -> None:
        Accelerator(cpu=True)  # callbacks read its state
        self.state = TrainerState(max_steps=max_steps, num_train_epochs=epochs)  # type: ignore[arg-type]
        self.control, self._optimizer, self._begin = TrainerControl(), optimizer, begin_arguments

    def _call(self, callback: TrainerCallback, event: str, **arguments: Any) -> None:
        getattr(callback, event)(None, self.state, self.control, **arguments)

    def begin(self, callback: TrainerCallback) -> None:
        self._call(callback, "on_train_begin", optimizer=self._optimizer, **self._begin)

    def step_begin(self, callback: TrainerCallback, step: int) -> None:
        self.state.global_step = step
        self._call(callback, "on_step_begin")

    def pre_optimizer_step(self, callback: TrainerCallback, gradient_scale: float = 1.0) -> dict[str, Any]:
        logs: dict[str, Any] = {}
        self._call(callback, "on_pre_optimizer_step", gradient_scale=gradient_scale, logs=logs)
        return logs

    def end(self, callback: TrainerCallback) -> None:
        self._call(callback, "on_train_end")
