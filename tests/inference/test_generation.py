"""Text from the permutation language model, equal to the reference's where that one is right; further outputs of
`generate`, of every generating model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel
from zoo import HEADS, Case, assert_close, make_batch, make_targets

from hf_ctxmodels.layers.cpu.linear import active_prepacked_weights
from hf_ctxmodels.registry import FAMILIES

WRITING = [head for head in HEADS if head.has_auto_class and head.model_class.can_generate()]
CASE = Case(FAMILIES["xlnet"], "AutoModelForCausalLM")
PROMPTS = torch.randint(5, 61, (2, 6), generator=torch.Generator().manual_seed(1))
OPTIONS = {"max_new_tokens": 9, "no_repeat_ngram_size": 1, "eos_token_id": None, "pad_token_id": 0}


def pair(folder: Path, **changes: Any) -> tuple[PreTrainedModel, PreTrainedModel]:
    reference = CASE.reference_model(2, initializer_range=0.3, **changes)
    reference.save_pretrained(folder)
    return reference, CASE.auto_class.from_pretrained(folder).eval()


def build_model(folder: Path, **changes: Any) -> PreTrainedModel:
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
    """Without limit the memory equals a computation without it, except rows that saw two tokens more."""
    model = build_model(tmp_path, mem_len=None)
    one = torch.randint(5, 61, (1, 12), generator=torch.Generator().manual_seed(3))
    inputs = model.prepare_inputs_for_generation(one)
    assert inputs["input_ids"].shape == (1, 13)
    with torch.no_grad():
        first = model(**inputs)
    again = model.prepare_inputs_for_generation(torch.cat([one, one[:, :1]], 1), past_key_values=first.mems)
    assert again["input_ids"].shape == (1, 3)
    assert [memory.shape[1] for memory in again["mems"]] == [11] * 3


def test_padded_prompts_go_on_as_they_would_alone(tmp_path: Path) -> None:
    model = build_model(tmp_path)
    padded = PROMPTS.clone()
    padded[1, :3] = 0
    mask = (padded != 0).long()
    together = model.generate(padded, attention_mask=mask, do_sample=False, **OPTIONS)
    alone = model.generate(padded[1:, 3:], do_sample=False, **OPTIONS)
    assert torch.equal(together[1, 6:], alone[0, 3:])


def test_segments_are_passed_on(tmp_path: Path) -> None:
    """What a tokenizer returns can be given whole."""
    model = build_model(tmp_path)
    types = torch.zeros_like(PROMPTS)
    with_types = model.generate(PROMPTS, token_type_ids=types, do_sample=False, **OPTIONS)
    assert with_types.shape == (2, 15)
    types[:, 3:] = 1
    other = model.generate(PROMPTS, token_type_ids=types, do_sample=False, **OPTIONS)
    assert not torch.equal(with_types, other)


@pytest.mark.parametrize("case", WRITING, ids=str)
@pytest.mark.filterwarnings("ignore")
def test_hidden_states_and_attention_weights_of_every_step(case: Case) -> None:
    """Equal to one forward over the text; attention weights where the model has some."""
    model, batch = case.model(), make_batch(case, (5, 3), side="left")
    batch = {name: batch[name] for name in ("input_ids", "attention_mask")}
    recorded = {"output_hidden_states": True, "output_attentions": True}
    options = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None}
    found = model.generate(**batch, **options, **recorded, return_dict_in_generate=True)
    assert torch.equal(found.sequences, model.generate(**batch, **options))
    beams = model.generate(**batch, **options, **recorded, num_beams=2, return_dict_in_generate=True)
    names = [name for name in found if name.endswith(("hidden_states", "attentions"))]
    for name in names:
        assert beams[name] is not None
        if name.startswith("encoder"):
            assert all(len(state) == 2 for state in found[name])
        else:
            assert len(found[name]) == 3
    if case.model_class is CASE.model_class:  # every step is a batch of its own: the text so far, and the unknown token
        assert all(len(step) == 2 * model.config.num_hidden_layers + 2 for step in found.hidden_states)
        assert all(len(step) == model.config.num_hidden_layers for step in found.attentions)
        return
    read = found.sequences[:, :-1]
    with torch.no_grad():
        if case.is_seq2seq:
            whole = model(**batch, decoder_input_ids=read, **recorded)
            assert any(state.any() for state in found.encoder_hidden_states)
        else:
            mask = torch.cat([batch["attention_mask"], torch.ones_like(read[:, batch["input_ids"].shape[1] :])], 1)
            whole = model(input_ids=read, attention_mask=mask, **recorded)
    for name in [name for name in names if not name.startswith("encoder")]:
        if whole.get(name) is None:
            assert not any(found[name])
            continue
        assert len(whole[name]) > 0
        for number, expected in enumerate(whole[name]):
            steps = [step[number] for step in found[name]]
            width = expected.shape[-1]  # the keys so far, with a cache of keys
            got = torch.cat([torch.nn.functional.pad(step, (0, width - step.shape[-1])) for step in steps], -2)
            assert_close(got, expected, f"{name}[{number}]")


@pytest.mark.parametrize("case", WRITING, ids=str)
@pytest.mark.filterwarnings("ignore")
def test_generation_with_prepacked_weights(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scores are those without; the copies are gone afterwards, and none is made where none is wanted."""
    model, made = case.model(2), []
    order = torch.ops.mkldnn._reorder_linear_weight
    monkeypatch.setattr(
        torch.ops.mkldnn, "_reorder_linear_weight", lambda weight, rows: (made.append(weight), order(weight, rows))[1]
    )
    batch = {name: tensor for name, tensor in make_batch(case, (5, 3), side="left").items() if name != "token_type_ids"}
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    options |= {"output_logits": True, "return_dict_in_generate": True}
    copied = model.generate(**batch, **options)
    assert made
    if model.get_output_embeddings() is not None:
        assert copied.logits[0].shape[-1] in {len(weight) for weight in made}
    assert active_prepacked_weights() is None
    made.clear()
    model.prepacked_bytes = 0
    plain = model.generate(**batch, **options)
    assert not made
    assert torch.equal(copied.sequences, plain.sequences)
    assert_close(torch.stack(copied.logits), torch.stack(plain.logits))


@pytest.mark.parametrize("case", [case for case in WRITING if not case.is_seq2seq], ids=str)
def test_logits_to_keep(case: Case) -> None:
    """As in transformers; the loss does not depend on it."""
    model, batch = case.model(), make_batch(case)
    every = model(**batch).logits
    targets = make_targets(case, batch)
    for kept, expected in (
        (0, every),
        (1, every[:, -1:]),
        (3, every[:, -3:]),
        (torch.tensor([0, 4]), every[:, [0, 4]]),
        (batch["attention_mask"].bool(), every[batch["attention_mask"].bool()]),
    ):
        assert_close(model(**batch, logits_to_keep=kept).logits, expected)
        outputs = model(**batch, **targets, logits_to_keep=kept, return_logits=True)
        assert_close(outputs.logits, expected)
        assert_close(outputs.loss, model(**batch, **targets).loss)
    assert model._supports_logits_to_keep()
