"""What the checks share: texts, and small saved models."""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModel, AutoModelForMaskedLM, AutoModelForSequenceClassification

from hf_ctxmodels import CtxBertConfig, CtxBertTokenizer

ROOT = Path(__file__).parents[2]
TEXTS = ["a cat sat on the mat", "the dog ran to the river", "rain fell on the old bridge", "nobody saw a boat"]
SHAPE = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 256}


@dataclass(frozen=True)
class Check:
    """One row of the table.

    Attributes:
        tool: What is checked.
        packages: What it needs; their versions are in the table.
        run: Its docstring says what is checked. Takes the workplace and returns what a user has to know, empty for
            nothing; raises if something does not work.
    """

    tool: str
    packages: tuple[str, ...]
    run: Callable[["Workplace"], str]


def check(tool: str, *packages: str) -> Callable[[Callable[["Workplace"], str]], Check]:
    """Make a function a row."""
    return lambda run: Check(tool, packages, run)


class Workplace:
    """A folder with a tokenizer and small saved models, made when first asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tokenizer = CtxBertTokenizer.train(TEXTS * 3, vocab_size=120)

    def save(self, auto_class: Any) -> str:
        """The directory of a saved BERT with this head."""
        directory = self.folder / auto_class.__name__
        if not directory.exists():
            torch.manual_seed(0)
            config = CtxBertConfig(vocab_size=len(self.tokenizer), initializer_range=0.1, **SHAPE)
            auto_class.from_config(config).save_pretrained(directory)
            self.tokenizer.save_pretrained(directory)
        return str(directory)

    def classifier(self) -> Any:
        """A classifier of two classes, in evaluation mode."""
        directory = self.save(AutoModelForSequenceClassification)
        return AutoModelForSequenceClassification.from_pretrained(directory).eval()

    def batch(self, texts: Sequence[str] = TEXTS) -> dict[str, Tensor]:
        """The tokenized texts."""
        return dict(self.tokenizer(list(texts), padding=True, return_tensors="pt"))

    def launch(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a Python process of its own; what it printed is in `stdout` and `stderr`.

        Raises:
            RuntimeError: It failed; the end of what it printed.
        """
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true"}
        done = subprocess.run(
            [sys.executable, *arguments], cwd=self.folder, env=environment, capture_output=True, text=True
        )
        if done.returncode:
            raise RuntimeError((done.stdout + done.stderr)[-2000:])
        return done

    def pretrain(self, config_file: str, *arguments: str) -> None:
        """A short distributed run of `pretrain`, whose model opens afterwards."""
        tokenizer = self.save(AutoModelForMaskedLM)
        text, output = self.folder / "text.txt", self.folder / config_file.removesuffix(".yaml")
        text.write_text("\n\n".join(TEXTS * 20), encoding="utf-8")
        launcher = ("-m", "accelerate.commands.launch", "--config_file", str(ROOT / "scripts/accelerate" / config_file))
        sizes = ("--family", "bert", "--config", "tiny", "--max_length", "32", "--max_steps", "4")
        paths = ("--dataset", str(text), "--tokenizer", tokenizer, "--output_dir", str(output))
        done = self.launch(*launcher, *arguments, "-m", "hf_ctxmodels", "pretrain", *sizes, *paths)
        assert "not in force" not in done.stdout + done.stderr, done
        AutoModel.from_pretrained(output)


def assert_close(found: Tensor, expected: Tensor, tolerance: float = 1e-4) -> None:
    """Raise AssertionError unless equal within the tolerance."""
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
