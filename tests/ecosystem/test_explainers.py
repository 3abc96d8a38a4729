"""The examples of docs/how-to/explain.md."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from zoo import Case, assert_close

from hf_ctxmodels import CtxBertModel, CtxBertTokenizer
from hf_ctxmodels.registry import FAMILIES

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "explain.md"


@pytest.fixture
def pretrained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Saves the model that the examples load from the working directory."""
    monkeypatch.chdir(tmp_path)
    texts = ["A joy from start to end.", "A dull film."]
    tokenizer = CtxBertTokenizer.train(texts, vocab_size=60, min_frequency=1)
    torch.manual_seed(0)
    config = Case(FAMILIES["bert"], "AutoModel").config(vocab_size=len(tokenizer))
    CtxBertModel(config).save_pretrained("runs/bert")
    tokenizer.save_pretrained("runs/bert")


def run_example(package: str) -> dict[str, Any]:
    """Run the example of a package and return its variables; skip without the package."""
    pytest.importorskip(package, reason=f"needs {package}, which the extra `ecosystem` brings")
    blocks = re.findall(r"^```py(?:thon)?\n(.*?)^```", PAGE.read_text("utf-8"), re.DOTALL | re.M)
    (code,) = (block for block in blocks if f"from {package}" in block)
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(code, str(PAGE), "exec"), names)
    return names


@pytest.mark.usefixtures("pretrained")
def test_captum_example() -> None:
    """The attributions add up to the difference between the scores of text and baseline."""
    names = run_example("captum")
    attributions: Tensor = names["attributions"]
    batch, score = names["batch"], names["score"]
    assert attributions.shape[:2] == batch["input_ids"].shape
    baseline = torch.full_like(batch["input_ids"], names["tokenizer"].pad_token_id)
    with torch.no_grad():
        difference = score(batch["input_ids"], batch["attention_mask"]) - score(baseline, batch["attention_mask"])
    assert difference.abs().min() > 0.01
    assert_close(attributions.sum((1, 2)).float(), difference, "completeness", 0.01)


@pytest.mark.usefixtures("pretrained")
def test_bertviz_example() -> None:
    names = run_example("bertviz")
    page = Path("attention.html").read_text("utf-8")
    assert all(token in page for token in names["tokens"][1:-1])
    assert len(names["attentions"]) == names["model"].config.num_hidden_layers
