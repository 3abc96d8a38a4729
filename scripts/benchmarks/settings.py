"""Settings of a benchmark run, which are also its command line arguments."""

from dataclasses import dataclass, field
from typing import Literal

import torch


@dataclass(frozen=True)
class Settings:
    """Settings of a benchmark run."""

    only: str | None = field(default=None, metadata={"help": "Run only rows with a word that starts with this text."})
    repeats: int = field(default=7, metadata={"help": "Timed runs per implementation; the median is reported."})
    threads: int = field(default=2, metadata={"help": "CPU threads."})
    busy: bool = field(default=False, metadata={"help": "Keep one core busy with a second process."})
    device: str = field(default="cpu", metadata={"help": "Device: cpu or cuda."})
    dtype: Literal["float32", "bfloat16"] = field(
        default="float32", metadata={"help": "Precision (training uses autocast)."}
    )
    reference_attention: str = field(
        default="sdpa",
        metadata={"help": "Attention implementation of the reference: sdpa, flash_attention_2 or eager."},
    )
    dataset: str = field(default="demo", metadata={"help": "Training text of the suites static and static-quality."})
    word_tests: str | None = field(
        default=None,
        metadata={"help": "Directory with the word similarity and analogy tests of the suite static-quality."},
    )
    epochs: int = field(default=5, metadata={"help": "Epochs of the suite static-quality."})
    row_names: list[str] = field(default_factory=list, init=False)  # of the suite, selected or not

    @property
    def torch_device(self) -> torch.device:
        """The device as an object."""
        return torch.device(self.device)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The precision as an object."""
        return getattr(torch, self.dtype)

    def autocast(self) -> torch.autocast:
        """Autocast to the precision; float32 disables it."""
        return torch.autocast(self.torch_device.type, self.torch_dtype, enabled=self.dtype != "float32")

    def select_row(self, name: str) -> bool:
        """Add a row to `row_names`; returns whether a word of its name starts with `only`, or `only` is not set."""
        self.row_names.append(name)
        return self.only is None or f" {self.only}" in f" {name}"
