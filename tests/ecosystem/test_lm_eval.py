"""lm-evaluation-harness opens saved decoders by its own `hf` model, as the how-to page says."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from ecosystem_checks import CheckContext
from ecosystem_checks.evaluation import TEXTS, perplexity, save_decoder

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "how-to" / "evaluate.md"

pytest.importorskip("lm_eval", reason="needs lm-evaluation-harness, which the extra `ecosystem` brings")


def blocks() -> dict[str, str]:
    return dict(re.findall(r"^```(yaml|sh)\n(.*?)^```", PAGE.read_text("utf-8"), re.DOTALL | re.M))


@pytest.mark.parametrize("family", ["gpt2", "seqae"])
def test_example_of_the_page(family: str, tmp_path: Path) -> None:
    """The perplexity is the model's own; a tokenizer that ends its texts needs what the page says."""
    directory = Path(save_decoder(CheckContext(tmp_path), family))
    (tmp_path / "runs").mkdir()
    directory.rename(tmp_path / "runs" / "gpt2")
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "last_word.yaml").write_text(blocks()["yaml"])
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in TEXTS))
    program, *arguments = shlex.split(blocks()["sh"].replace("\\\n", " "))
    options = {"add_special_tokens": False} if family == "seqae" else {}
    if options:
        arguments = [each + ",add_bos_token=False" if "pretrained=" in each else each for each in arguments]
    command = [sys.executable, "-m", program, *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    (file,) = (tmp_path / "results").rglob("*.json")
    found = json.loads(file.read_text("utf-8"))["results"]["last_word"]
    assert found["perplexity,none"] == pytest.approx(perplexity(str(tmp_path / "runs" / "gpt2"), **options), rel=1e-3)
