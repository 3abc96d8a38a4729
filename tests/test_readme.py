"""All examples of README.md and the documentation pages run on tiny data, one page per test; the page on pretraining
runs first."""

import json
import re
import shlex
import shutil
import string
import subprocess
import sys
from pathlib import Path

import pytest
from fork_server import ForkServer
from hub_server import ROOT, HubServer
from transformers import BertConfig, BertForMaskedLM

from hf_ctxmodels import CtxT5Config, CtxT5ForConditionalGeneration

PRETRAINING = "docs/how-to/pretrain.md"
TESTED_ELSEWHERE = {"docs/how-to/export.md"}  # needs extra packages: tests/test_export.py
EXAMPLE = re.compile(r"^```(python|bash)\n(.*?)^```", re.DOTALL | re.MULTILINE)
OUTPUT = re.compile(r"^```python\n(.*?)^```\n\n```text\n(.*?)^```", re.DOTALL | re.MULTILINE)
DOCS = sorted(path for path in (ROOT / "docs").rglob("*.md") if EXAMPLE.search(path.read_text("utf-8")))
QUICKSTART = "docs/quickstart.md"  # needs no files and runs with the sizes it shows
PAGES = ["README.md", *(path.relative_to(ROOT).as_posix() for path in DOCS)]

# Replacements for the realistic sizes of the pages.
SMALL_SIZES = {
    "--vocab_size 8000": "--vocab_size 150",
    "--config mini": "--config tiny",
    "config=mini": "config=tiny",
    "--max_steps 20000": "--max_steps 3",
    "--max_length 128": "--max_length 32",
    "--per_device_batch_size 32": "--per_device_batch_size 4",
    "num_train_epochs=3": "num_train_epochs=1",
    "--num_train_epochs 3": "--num_train_epochs 1",
    'from_pretrained("google-bert/bert-base-uncased")': 'from_pretrained("checkpoints/bert")',
    "--validation_fraction 0.05": "--validation_fraction 0.3",  # of the twenty documents of the workspace
}
REPO_ID = "my-org/my-bert"
SENTENCES = [
    "The cat sat on the mat and looked at the river.",
    "A dog ran along the bank of the river.",
    "She opened a bank account in the town.",
    "The film was a joy from start to end.",
    "Nobody in the town liked the dull film.",
]


def page_examples(page: str) -> list[tuple[str, str]]:
    """(language, code) of the examples, without `make demo` and `make test`, which CI itself runs.

    A Python block without imports continues the block above it.
    """
    examples: list[tuple[str, str]] = []
    for language, code in EXAMPLE.findall((ROOT / page).read_text("utf-8")):
        if language == "python" and not code.startswith(("import ", "from ")):
            code = examples.pop()[1] + code
        if not code.startswith("make "):
            examples.append((language, code))
    return examples


def expected_output(page: str, code: str) -> str | None:
    """Output that a page shows below an example, or None."""
    return dict(OUTPUT.findall((ROOT / page).read_text("utf-8"))).get(code)


def run_example(
    language: str, code: str, workspace: Path, hub_process: ForkServer, *, sizes: dict[str, str] = SMALL_SIZES
) -> str:
    """Run an example with smaller sizes and return its output; fails unless all commands succeed."""
    for size, smaller in sizes.items():
        code = code.replace(size, smaller)
    if "<<" in code:  # a here-document needs a shell
        command = f'hf-ctxmodels() {{ {sys.executable} -m hf_ctxmodels "$@"; }}\n{code}'
        results = [subprocess.run(["bash", "-ec", command], cwd=workspace, capture_output=True, text=True, timeout=600)]
    else:
        results = [hub_process.run(*command, cwd=workspace) for command in commands(language, code)]
    assert [result for result in results if result.returncode] == [], code
    return "".join(result.stdout for result in results)


def commands(language: str, code: str) -> list[list[str]]:
    """Arguments of `python` for each command of an example."""
    if language == "python":
        return [["-c", code]]
    lines = [shlex.split(line) for line in code.replace("\\\n", " ").splitlines() if line]
    assert {line[0] for line in lines} == {"hf-ctxmodels"}
    return [["-m", "hf_ctxmodels", *line[1:]] for line in lines]


def make_workspace(folder: Path) -> Path:
    """Write the files that the pages assume: a corpus, labeled reviews, a reference checkpoint and a T5."""
    documents = ["\n".join(SENTENCES[first:] + SENTENCES[:first]) for first in range(5)]
    (folder / "corpus.txt").write_text("\n\n".join(documents * 4) + "\n")
    reviews = [f'"{sentence}",{number % 2}' for number, sentence in enumerate(SENTENCES * 4)]
    for name in ("reviews.csv", "reviews_dev.csv"):
        (folder / name).write_text("text,label\n" + "\n".join(reviews) + "\n")
    config = BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    BertForMaskedLM(config).save_pretrained(folder / "checkpoints" / "bert")
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *string.ascii_lowercase]
    (folder / "checkpoints" / "bert" / "vocab.txt").write_text("\n".join(vocabulary))
    t5_config = CtxT5Config(vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, head_dim=8)
    CtxT5ForConditionalGeneration(t5_config).save_pretrained(folder / "runs" / "t5")
    return folder


@pytest.fixture(scope="module")
def pretrained_workspace(hub_process: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace in which the examples of the page on pretraining have run."""
    workspace = make_workspace(tmp_path_factory.mktemp("pretrained"))
    for language, code in page_examples(PRETRAINING):
        run_example(language, code, workspace, hub_process)
    return workspace


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=() if page == "README.md" else pytest.mark.slow)
        for page in PAGES
        if page not in {PRETRAINING, QUICKSTART, *TESTED_ELSEWHERE}
    ],
)
def test_page_examples_run(
    page: str, hub: HubServer, hub_process: ForkServer, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if page == "README.md":
        workspace = make_workspace(tmp_path)
    else:
        workspace = tmp_path / "workspace"
        shutil.copytree(request.getfixturevalue("pretrained_workspace"), workspace)
    hub.repositories.clear()
    examples = page_examples(page)
    assert examples
    for language, code in examples:
        output = run_example(language, code, workspace, hub_process)
        assert expected_output(page, code) in (None, output)
    if page in ("README.md", "docs/how-to/publish.md"):
        assert "model.safetensors" in hub.files(REPO_ID)
        assert hub.repositories[REPO_ID].private


@pytest.mark.slow
def test_quickstart_runs_unmodified(hub: HubServer, hub_process: ForkServer, tmp_path: Path) -> None:
    pytest.importorskip("gensim", reason="the example text needs the extra `demo`")
    hub.repositories.clear()
    outputs = [run_example(*example, tmp_path, hub_process, sizes={}) for example in page_examples(QUICKSTART)]
    *_, predictions, _, reloaded = outputs
    labels = [json.loads(line)["label"] for line in predictions.splitlines()]
    assert labels == ["news", "encyclopedia"]
    assert "'label': 'news'" in reloaded
    assert "model.safetensors" in hub.files("my-org/my-classifier")


def test_replaced_sizes_occur_in_pages() -> None:
    examples = [example for page in PAGES for example in page_examples(page)]
    assert {language for language, _ in examples} == {"python", "bash"}
    code = "".join(code for _, code in examples)
    assert [size for size in SMALL_SIZES if size not in code] == []
