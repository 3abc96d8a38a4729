"""Text from the permutation language model, equal to the reference's where that one is right."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel
from zoo import Case

from hf_ctxmodels.registry import FAMILIES

CASE = Case(FAMILIES["xlnet"], "AutoModelForCausalLM")
PROMPTS = torch.randint(5, 61, (2, 6), generator=torch.Generator().manual_seed(1))
OPTIONS = {"max_new_tokens": 9, "no_repeat_ngram_size": 1, "eos_token_id": None, "pad_token_id": 0}


def pair(folder: Path, **changes: Any) -> tuple[PreTrainedModel, PreTrainedModel]:
    reference = CASE.reference_model(2, initializer_range=0.3, **changes)
    reference.save_pretrained(folder)
    return reference, CASE.auto_class.from_pretrained(folder).eval()


def ours(folder: Path, **changes: Any) -> PreTrainedModel:
    CASE.model(2, initializer_range=0.3, **changes).save_pretrained(folder)
    return CASE.auto_class.from_pretrained(folder).eval()


@pytest.mark.parametrize(
    "how",
    [
        {"do_sample": False},
        {"do_sample": True, "top_k": 20},
        {"num_beams": 3, "do_sample": False},
        {"do_sample": False, "use_mems": False},
    ],
    ids=["greedy", "sampling", "beams", "no memory"],
)
@pytest.mark.parametrize("mem_len", [None, 5, 512])
@pytest.mark.filterwarnings("ignore")
def test_equal_to_the_reference(mem_len: int | None, how: dict[str, Any], tmp_path: Path) -> None:
    texts = []
    for model in pair(tmp_path, mem_len=mem_len):
        torch.manual_seed(0)
        texts.append(model.generate(PROMPTS, **OPTIONS, **how))
    assert texts[0].shape == (2, 15)
    assert len(texts[0][:, 6:].unique()) > 4, "too dull a text to tell anything"
    assert torch.equal(*texts)


def test_memory_changes_little(tmp_path: Path) -> None:
    """Without limit it holds what would be computed anew, but for rows that saw two tokens more."""
    model = ours(tmp_path, mem_len=None)
    one = torch.randint(5, 61, (1, 12), generator=torch.Generator().manual_seed(3))
    inputs = model.prepare_inputs_for_generation(one)
    assert inputs["input_ids"].shape == (1, 13)
    with torch.no_grad():
        first = model(**inputs)
    again = model.prepare_inputs_for_generation(torch.cat([one, one[:, :1]], 1), past_key_values=first.mems)
    assert again["input_ids"].shape == (1, 3)
    assert [memory.shape[1] for memory in again["mems"]] == [11] * 3


def test_padded_prompts_go_on_as_they_would_alone(tmp_path: Path) -> None:
    model = ours(tmp_path)
    padded = PROMPTS.clone()
    padded[1, :3] = 0
    mask = (padded != 0).long()
    together = model.generate(padded, attention_mask=mask, do_sample=False, **OPTIONS)
    alone = model.generate(padded[1:, 3:], do_sample=False, **OPTIONS)
    assert torch.equal(together[1, 6:], alone[0, 3:])


def test_segments_are_passed_on(tmp_path: Path) -> None:
    """What a tokenizer returns can be given whole."""
    model = ours(tmp_path)
    types = torch.zeros_like(PROMPTS)
    with_types = model.generate(PROMPTS, token_type_ids=types, do_sample=False, **OPTIONS)
    assert with_types.shape == (2, 15)
    types[:, 3:] = 1
    other = model.generate(PROMPTS, token_type_ids=types, do_sample=False, **OPTIONS)
    assert not torch.equal(with_types, other)
