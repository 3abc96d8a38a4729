"""Context of the checks: texts and small saved models."""

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
    """Check of a tool, one row of the table.

    Attributes:
        tool: Name of the tool.
        packages: Required packages; the table shows their versions.
        run: Runs the check and returns a note for users, which may be empty; raises an exception on failure. Its
            docstring is the description in the table.
    """

    tool: str
    packages: tuple[str, ...]
    run: Callable[["CheckContext"], str]


def check(tool: str, *packages: str) -> Callable[[Callable[["CheckContext"], str]], Check]:
    """Decorator that turns a function into a `Check`."""
    return lambda run: Check(tool, packages, run)


class CheckContext:
    """A folder with a tokenizer and small saved models, which are created on first use."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tokenizer = CtxBertTokenizer.train(TEXTS * 3, vocab_size=120)

    def save(self, auto_class: Any) -> str:
        """Save a BERT with the head of an Auto class, and return its directory."""
        directory = self.folder / auto_class.__name__
        if not directory.exists():
            torch.manual_seed(0)
            config = CtxBertConfig(vocab_size=len(self.tokenizer), initializer_range=0.1, **SHAPE)
            auto_class.from_config(config).save_pretrained(directory)
            self.tokenizer.save_pretrained(directory)
        return str(directory)

    def classifier(self) -> Any:
        """Load a classifier with two classes in evaluation mode."""
        directory = self.save(AutoModelForSequenceClassification)
        return AutoModelForSequenceClassification.from_pretrained(directory).eval()

    def batch(self, texts: Sequence[str] = TEXTS) -> dict[str, Tensor]:
        """Tokenize texts into a padded batch."""
        return dict(self.tokenizer(list(texts), padding=True, return_tensors="pt"))

    def launch(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run Python in a subprocess and capture its output.

        Raises:
            RuntimeError: The process failed; the message is the end of its output.
        """
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true"}
        result = subprocess.run(
            [sys.executable, *arguments], cwd=self.folder, env=environment, capture_output=True, text=True
        )
        if result.returncode:
            raise RuntimeError((result.stdout + result.stderr)[-2000:])
        return result

    def pretrain(self, config_file: str, *arguments: str) -> None:
        """Run a short distributed pretraining and load its model."""
        tokenizer = self.save(AutoModelForMaskedLM)
        text, output = self.folder / "text.txt", self.folder / config_file.removesuffix(".yaml")
        text.write_text("\n\n".join(TEXTS * 20), encoding="utf-8")
        launcher = ("-m", "accelerate.commands.launch", "--config_file", str(ROOT / "scripts/accelerate" / config_file))
        sizes = ("--family", "bert", "--config", "tiny", "--max_length", "32", "--max_steps", "4")
        paths = ("--dataset", str(text), "--tokenizer", tokenizer, "--output_dir", str(output))
        result = self.launch(*launcher, *arguments, "-m", "hf_ctxmodels", "pretrain", *sizes, *paths)
        assert "not in force" not in result.stdout + result.stderr, result
        AutoModel.from_pretrained(output)


def assert_close(actual: Tensor, expected: Tensor, tolerance: float = 1e-4) -> None:
    """Assert that tensors are equal within an absolute and relative tolerance."""
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)
