"""Every example of README.md and of the site's pages runs, in order and as a reader would run it, on tiny data.

The examples build on each other (what is pretrained is then loaded, fine-tuned, published), so one test runs all of
README, and one all of the pages.
"""

import os
import re
import shlex
import string
import subprocess
import sys
from pathlib import Path

import pytest
from forked import run_forked
from hub_server import ROOT, TOKEN, HubServer, environment_for
from transformers import BertConfig, BertForMaskedLM

# Of the site: the pages with examples. Its quickstart is part of README; all others open what the first one pretrains.
FIRST = "docs/how-to/pretrain.md"
TESTED_ELSEWHERE = {"docs/how-to/export.md"}  # it takes packages of its own
WRITTEN = {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")} - TESTED_ELSEWHERE
SITE = [FIRST, *sorted(WRITTEN - {FIRST})]
PAGES = {"README": ["README.md"], "site": SITE}

# The pages show sizes of real use.
SMALLER = {
    "--vocab_size 8000": "--vocab_size 150",
    "--config mini": "--config tiny",
    "config=mini": "config=tiny",
    "--max_steps 20000": "--max_steps 3",
    "--max_length 128": "--max_length 32",
    "--per_device_batch_size 32": "--per_device_batch_size 4",
    "num_train_epochs=3": "num_train_epochs=1",
    "--num_train_epochs 3": "--num_train_epochs 1",
    "--validation_fraction 0.05": "--validation_fraction 0.3",  # of the twenty documents of the workspace
}
HUB_NAME = "my-org/my-bert"
SENTENCES = [
    "The cat sat on the mat and looked at the river.",
    "A dog ran along the bank of the river.",
    "She opened a bank account in the town.",
    "The film was a joy from start to end.",
    "Nobody in the town liked the dull film.",
]


def examples(page: str) -> list[tuple[str, str]]:
    """(language, code) of the programs to run; `make demo` and `make test` are what CI itself calls.

    A Python block that imports nothing goes on from the block above it.
    """
    blocks = re.findall(r"^```(python|bash)\n(.*?)^```", (ROOT / page).read_text("utf-8"), re.DOTALL | re.M)
    programs: list[tuple[str, str]] = []
    for language, code in blocks:
        if language == "python" and not code.startswith(("import ", "from ")):
            code = programs.pop()[1] + code
        if not code.startswith("make "):
            programs.append((language, code))
    return programs


def smaller(code: str) -> str:
    for text, replacement in SMALLER.items():
        code = code.replace(text, replacement)
    return code


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    """A folder with what the page assumes: the command, a corpus, labelled reviews, a reference checkpoint."""
    command = tmp_path / "bin" / "hf-ctxmodels"  # as pip installs it, for the interpreter that runs the tests
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m hf_ctxmodels "$@"\n')
    command.chmod(0o755)
    documents = ["\n".join(SENTENCES[first:] + SENTENCES[:first]) for first in range(5)]
    (tmp_path / "corpus.txt").write_text("\n\n".join(documents * 4) + "\n")
    rows = [f'"{sentence}",{number % 2}' for number, sentence in enumerate(SENTENCES * 4)]
    (tmp_path / "reviews.csv").write_text("text,label\n" + "\n".join(rows) + "\n")
    config = BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    BertForMaskedLM(config).save_pretrained(tmp_path / "checkpoints" / "bert")
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *string.ascii_lowercase]
    (tmp_path / "checkpoints" / "bert" / "vocab.txt").write_text("\n".join(vocabulary))
    return tmp_path


def test_every_replacement_is_in_the_pages() -> None:
    programs = [program for pages in PAGES.values() for page in pages for program in examples(page)]
    assert {"python", "bash"} == {language for language, _ in programs}
    assert [text for text in SMALLER if text not in "".join(code for _, code in programs)] == []


def commands(language: str, code: str) -> list[list[str]]:
    """What follows `python` on the command lines of an example."""
    if language == "python":
        return [["-c", code]]
    lines = [shlex.split(line) for line in code.replace("\\\n", " ").splitlines()]
    assert {line[0] for line in lines} == {"hf-ctxmodels"}
    return [["-m", "hf_ctxmodels", *line[1:]] for line in lines]


@pytest.mark.parametrize("pages", PAGES)
def test_examples_run(workspace: Path, pages: str) -> None:
    """Those that reach the Hub in interpreters of their own, since its address is read when they start; those that
    write a file by a shell."""
    with HubServer() as hub:
        environment = environment_for(hub, workspace / "cache", TOKEN)
        environment["PATH"] = f"{workspace / 'bin'}{os.pathsep}{environment['PATH']}"
        cache = {"HF_HOME": environment["HF_HOME"]}
        for language, code in (program for page in PAGES[pages] for program in examples(page)):
            if (HUB_NAME in code and "--dry_run" not in code) or "<<" in code:
                command = [sys.executable, "-c"] if language == "python" else ["bash", "-ec"]
                options = {"cwd": workspace, "env": environment, "capture_output": True, "text": True}
                ran = [subprocess.run([*command, smaller(code)], **options, timeout=600)]
            else:
                ran = [run_forked(*command, cwd=workspace, **cache) for command in commands(language, smaller(code))]
            assert [each.returncode for each in ran if each.returncode] == [], f"{code}\n{ran}"
        assert "model.safetensors" in hub.files(HUB_NAME)
        assert hub.repositories[HUB_NAME].private
