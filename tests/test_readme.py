"""Every example of README.md runs, in the order of the page and as a reader would run it, on tiny data.

The examples build on each other (what is pretrained is then loaded, fine-tuned, published), so one test runs them all.
"""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from forked import run_forked
from hub_server import ROOT, TOKEN, HubServer, environment_for
from transformers import BertConfig, BertForMaskedLM

# The page shows sizes of real use.
SMALLER = {
    "--vocab_size 8000": "--vocab_size 150",
    "--config mini": "--config tiny",
    "--max_steps 20000": "--max_steps 3",
    "--max_length 128": "--max_length 32",
    "--per_device_batch_size 32": "--per_device_batch_size 4",
    "num_train_epochs=3": "num_train_epochs=1",
}
HUB_NAME = "my-org/my-bert"
SENTENCES = [
    "The cat sat on the mat and looked at the river.",
    "A dog ran along the bank of the river.",
    "She opened a bank account in the town.",
    "The film was a joy from start to end.",
    "Nobody in the town liked the dull film.",
]


def examples() -> list[tuple[str, str]]:
    """(language, code) of the blocks to run; `make demo` and `make test` are what CI itself calls."""
    blocks = re.findall(r"^```(python|bash)\n(.*?)^```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL | re.M)
    return [(language, code) for language, code in blocks if not code.startswith("make ")]


def smaller(code: str) -> str:
    for text, replacement in SMALLER.items():
        code = code.replace(text, replacement)
    return code


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    """A folder with what the page assumes: the scripts, a corpus, labelled reviews, a reference checkpoint."""
    (tmp_path / "scripts").symlink_to(ROOT / "scripts")
    documents = ["\n".join(SENTENCES[first:] + SENTENCES[:first]) for first in range(5)]
    (tmp_path / "corpus.txt").write_text("\n\n".join(documents * 4) + "\n")
    rows = [f'"{sentence}",{number % 2}' for number, sentence in enumerate(SENTENCES * 4)]
    (tmp_path / "reviews.csv").write_text("text,label\n" + "\n".join(rows) + "\n")
    config = BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    BertForMaskedLM(config).save_pretrained(tmp_path / "checkpoints" / "bert")
    return tmp_path


def test_every_replacement_is_in_the_page() -> None:
    page = "".join(code for _, code in examples())
    assert [text for text in SMALLER if text not in page] == []
    assert {"python", "bash"} == {language for language, _ in examples()}


def commands(language: str, code: str) -> list[list[str]]:
    """What follows `python` on the command lines of an example."""
    if language == "python":
        return [["-c", code]]
    lines = [shlex.split(line) for line in code.replace("\\\n", " ").splitlines()]
    assert {line[0] for line in lines} == {"python"}
    return [line[1:] for line in lines]


def test_examples_run(workspace: Path) -> None:
    """Those that reach the Hub in interpreters of their own, since its address is read when they start."""
    with HubServer() as hub:
        environment = environment_for(hub, workspace / "cache", TOKEN)
        environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
        cache = {"HF_HOME": environment["HF_HOME"]}
        for language, code in examples():
            if HUB_NAME in code:
                command = [sys.executable, "-c"] if language == "python" else ["bash", "-ec"]
                options = {"cwd": workspace, "env": environment, "capture_output": True, "text": True}
                ran = [subprocess.run([*command, smaller(code)], **options, timeout=600)]
            else:
                ran = [run_forked(*command, cwd=workspace, **cache) for command in commands(language, smaller(code))]
            assert [each.returncode for each in ran if each.returncode] == [], f"{code}\n{ran}"
        assert "model.safetensors" in hub.files(HUB_NAME)
        assert hub.repositories[HUB_NAME].private
