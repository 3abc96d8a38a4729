"""Flags of dataclasses: help of options, and flags that exclude each other."""

from dataclasses import dataclass, field

import pytest

from hf_ctxmodels import CtxError
from hf_ctxmodels.core.flags import check_conflicts, flag, join_choice, option_help, split_choice


@dataclass
class Length:
    """Training length."""

    steps: int = flag(10, "Number of steps.")
    epochs: float | None = flag(None, "Number of epochs.", conflicts=("steps", "resume"))


@dataclass
class Start:
    """Start of a run."""

    resume: bool = flag(False, "Continue a run.")
    name: str = field(default="run")


def test_conflicting_flags_raise() -> None:
    """Also flags of different dataclasses; only those that differ from their defaults."""
    check_conflicts(Length(epochs=1.0), Start(name="other"))
    check_conflicts(Length(steps=3), Start(resume=True))
    for arguments in ((Length(steps=3, epochs=1.0),), (Length(epochs=1.0), Start(resume=True))):
        with pytest.raises(CtxError, match=r"--epochs cannot be combined with --(steps|resume)"):
            check_conflicts(*arguments)


def test_option_help() -> None:
    assert list(option_help(Start)) == ["resume=False: Continue a run.", "name=run"]
    assert list(option_help(Start(resume=True), documented_only=True)) == ["resume=True: Continue a run."]


@pytest.mark.parametrize(
    ("text", "name", "options"),
    [
        ("mlm", "mlm", {}),
        ("adamw:beta2=0.98,weight_decay=0.1", "adamw", {"beta2": "0.98", "weight_decay": "0.1"}),
        ("bert:tokenizer=C:\\tok", "bert", {"tokenizer": "C:\\tok"}),
        ("C:\\words.txt", "C:\\words.txt", {}),
        ("C:/words.txt:bias=2", "C:/words.txt", {"bias": "2"}),
        ("news 12:30.txt:bias=2", "news 12:30.txt", {"bias": "2"}),
        ("s3://bucket/tasks.yaml:text_size=9", "s3://bucket/tasks.yaml", {"text_size": "9"}),
        ("s3://bucket/tasks.yaml", "s3://bucket/tasks.yaml", {}),
        (":split=test", "", {"split": "test"}),
    ],
)
def test_names_with_colons(text: str, name: str, options: dict[str, str]) -> None:
    """Paths with a drive or a colon, and URLs, can have options."""
    assert split_choice(text) == (name, options)
    assert join_choice(name, options) == text
    assert split_choice("adamw:beta2") == ("adamw", {"beta2": ""})
