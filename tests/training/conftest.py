"""A small training problem: text, tokenizer and configuration on disk, and the same in memory."""

import json
import os
import random
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from accelerate.state import AcceleratorState, GradientState

from hf_ctxmodels import CtxBertTokenizer

ROOT = Path(__file__).resolve().parents[2]
WORDS = ["the", "a", "cat", "dog", "bird", "sat", "ran", "saw", "on", "under", "by", "mat", "tree", "house", "red"]
WORDS += ["old", "small", "it", "was", "and", "then"]


@dataclass(frozen=True)
class Workspace:
    """Paths of the problem, and how to run `scripts/pretrain.py` on it."""

    folder: Path

    def flags(self, output_dir: Path, *more: object, config: str = "dropout.json") -> list[str]:
        fixed = {
            "family": "bert",
            "config": self.folder / config,
            "tokenizer": self.folder / "tokenizer",
            "dataset": self.folder / "text.txt",
            "max_length": 32,
            "learning_rate": 1e-3,
            "lr_scheduler": "constant",
            "logging_steps": 2,
            "output_dir": output_dir,
        }
        return [str(part) for name, value in fixed.items() for part in (f"--{name}", value)] + [str(x) for x in more]

    def start(self, *command: object) -> subprocess.Popen:
        """Start `python <command>` as a user does."""
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
        return subprocess.Popen(
            [sys.executable, *map(str, command)],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def pretrain(self, *flags: object) -> tuple[int, str]:
        """Run `scripts/pretrain.py` to its end: exit code and stderr."""
        process = self.start("scripts/pretrain.py", *flags)
        _, errors = process.communicate(timeout=120)
        return process.returncode, errors


@pytest.fixture(scope="session")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    folder = tmp_path_factory.mktemp("problem")
    rng = random.Random(0)
    documents = [
        "\n".join(" ".join(rng.choices(WORDS, k=rng.randint(4, 9))) + "." for _ in range(rng.randint(3, 8)))
        for _ in range(60)
    ]
    (folder / "text.txt").write_text("\n\n".join(documents) + "\n", encoding="utf-8")
    tokenizer = CtxBertTokenizer.train(documents, vocab_size=80, min_frequency=1)
    tokenizer.save_pretrained(folder / "tokenizer")
    for name, dropout in (("dropout.json", 0.1), ("exact.json", 0.0)):
        config = {
            "vocab_size": 80,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 64,
            "max_position_embeddings": 32,
            "hidden_dropout_prob": dropout,
            "attention_probs_dropout_prob": dropout,
        }
        (folder / name).write_text(json.dumps(config), encoding="utf-8")
    return Workspace(folder)


@pytest.fixture
def fresh_accelerate() -> None:
    """Let a test make an Accelerator with settings of its own."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
