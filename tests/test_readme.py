"""Every example of README.md runs, in the order of the page and as a reader would run it, on tiny data.

The examples build on each other (what is pretrained is then loaded, fine-tuned, published), so one test runs them all.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
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


def test_examples_run(workspace: Path) -> None:
    with HubServer() as hub:
        environment = environment_for(hub, workspace / "cache", TOKEN)
        environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
        for language, code in examples():
            command = [sys.executable, "-c"] if language == "python" else ["bash", "-ec"]
            ran = subprocess.run(
                [*command, smaller(code)], cwd=workspace, env=environment, capture_output=True, text=True, timeout=600
            )
            assert ran.returncode == 0, f"{code}\n{ran.stdout}\n{ran.stderr}"
        assert "model.safetensors" in hub.files("my-org/my-bert")
        assert hub.repositories["my-org/my-bert"].private
