"""A model as explainers expect it: hooks see padded rows, gradients reach hidden states, and all is restored."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.modeling_layers import GradientCheckpointingLayer
from zoo import BASES, HEADS, Case, assert_close, make_batch, make_targets, objective

from hf_ctxmodels import CtxBertModel, CtxBertTokenizer, CtxError, inspection_mode
from hf_ctxmodels.architectures.query_generation import QueryForConditionalGeneration
from hf_ctxmodels.core.config import CtxTransformerConfig
from hf_ctxmodels.registry import FAMILIES

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "explain.md"
# heads that write by query tokens have source, target and queries in one row, whatever the batch's shape
TRANSFORMERS = [
    case
    for case in [*BASES, *HEADS]
    if issubclass(case.family.config, CtxTransformerConfig)
    and not issubclass(case.model_class, QueryForConditionalGeneration)
]
SETTINGS = ("unpad", "_attn_implementation", "return_logits_with_labels")


def test_hooks_see_padded_rows_and_gradients_reach_them() -> None:
    """On every head of every Transformer, with the outputs of the model as it was."""
    for case in TRANSFORMERS:
        model, batch = case.model(), make_batch(case)
        batch |= {} if case.is_base else make_targets(case, batch)
        rows = case.positions(batch).flatten(0, -2).shape
        expected, seen = objective(case, model, batch), []
        layer = next(each for each in model.base_model.modules() if isinstance(each, GradientCheckpointingLayer))
        hook = layer.register_forward_hook(lambda *given, seen=seen: seen.append(given[2][0].shape[:-1]))
        model(**batch)
        assert seen.pop() != rows, f"{case}: padded without being asked for"
        seen.clear()
        with inspection_mode(model):
            outputs = model(**batch, output_hidden_states=True, output_attentions=True)
            assert seen == [rows] * len(seen), f"{case}: {seen}"
            decoder = "decoder_" if "decoder_hidden_states" in outputs else ""
            recorded, attentions = (outputs[decoder + name] for name in ("hidden_states", "attentions"))
            read = batch["decoder_input_ids"].shape if case.writes else rows
            for states in recorded:
                assert states.shape[:-1] == read, f"{case}: a hidden state is {tuple(states.shape)}"
                states.retain_grad()
            (outputs.last_hidden_state.square().sum() if case.is_base else outputs.loss).backward()
            assert all(states.grad.any() for states in recorded), f"{case}: no gradient"
            assert attentions[0].shape[-2:] == (read[1], read[1])
            assert_close(objective(case, model, batch), expected, str(case))
        hook.remove()
        assert_close(objective(case, model, batch), expected, str(case))


def test_all_is_as_before_also_after_an_error() -> None:
    """Settings of every configuration in the model, and hooks; a recurrent network has no attention weights."""
    joint = Case(FAMILIES["electra"], "AutoModelForPreTraining").model(attention="sdpa")
    joint.generator.config.unpad = False
    configs = [joint.config, joint.generator.config]
    before = [[getattr(config, name) for name in SETTINGS] for config in configs]

    def fail() -> None:
        assert [config._attn_implementation for config in configs] == ["eager", "eager"]
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), inspection_mode(torch.nn.Sequential(joint)):
        fail()
    assert [[getattr(config, name) for name in SETTINGS] for config in configs] == before
    assert not joint._forward_hooks
    case = Case(FAMILIES["elmo"], "AutoModel")
    with inspection_mode(model := case.model()), pytest.raises(CtxError, match="no attention weights"):
        model(**make_batch(case), output_attentions=True)
    with pytest.raises(CtxError, match="no model of this package"), inspection_mode(torch.nn.Linear(1, 1)):
        pass


@pytest.fixture
def pretrained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the page opens, in the working directory."""
    monkeypatch.chdir(tmp_path)
    texts = ["A joy from start to end.", "A dull film."]
    tokenizer = CtxBertTokenizer.train(texts, vocab_size=60, min_frequency=1)
    torch.manual_seed(0)
    config = Case(FAMILIES["bert"], "AutoModel").config(vocab_size=len(tokenizer))
    CtxBertModel(config).save_pretrained("runs/bert")
    tokenizer.save_pretrained("runs/bert")


def run_example(package: str) -> dict[str, Any]:
    """The names that the page's example of a package leaves; skipped without the package."""
    pytest.importorskip(package, reason=f"needs {package}, which the extra `ecosystem` brings")
    blocks = re.findall(r"^```py(?:thon)?\n(.*?)^```", PAGE.read_text("utf-8"), re.DOTALL | re.M)
    (code,) = (block for block in blocks if f"from {package}" in block)
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(code, str(PAGE), "exec"), names)
    return names


@pytest.mark.usefixtures("pretrained")
def test_captum_example() -> None:
    """The attributions sum to the difference of the scores of text and baseline."""
    names = run_example("captum")
    attributions: Tensor = names["attributions"]
    batch, score = names["batch"], names["score"]
    assert attributions.shape[:2] == batch["input_ids"].shape
    baseline = torch.full_like(batch["input_ids"], names["tokenizer"].pad_token_id)
    with torch.no_grad():
        difference = score(**_plain(batch)) - score(baseline, batch["attention_mask"])
    assert difference.abs().min() > 0.01
    assert_close(attributions.sum((1, 2)).float(), difference, "completeness", 0.01)


def _plain(batch: Any) -> dict[str, Tensor]:
    return {name: batch[name] for name in ("input_ids", "attention_mask")}


@pytest.mark.usefixtures("pretrained")
def test_bertviz_example() -> None:
    names = run_example("bertviz")
    page = Path("attention.html").read_text("utf-8")
    assert all(token in page for token in names["tokens"][1:-1])
    assert len(names["attentions"]) == names["model"].config.num_hidden_layers
