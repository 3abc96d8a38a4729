"""Recurrent encoder-decoders compared with the papers' equations: logits, losses, greedy and beam search."""

from typing import Any

import pytest
import recurrent_decoders
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel
from zoo import Case, make_batch, make_targets

from hf_ctxmodels import CtxError
from hf_ctxmodels.registry import FAMILIES

CASES = {
    name: Case(FAMILIES[name], "AutoModelForPreTraining" if name == "gensen" else "AutoModelForSeq2SeqLM")
    for name in ("cove", "laser", "gensen", "lmseq2seq", "cvt")
}
CONFIGURATIONS = [
    ("cove", {}),
    *(("laser", {"num_decoder_layers": 2, "unpad": unpad}) for unpad in (True, False)),
    *(("gensen", {"unpad": unpad}) for unpad in (True, False)),
    ("lmseq2seq", {}),
    *(("lmseq2seq", overrides) for overrides in ({"residual": False}, {"multi_layer_attention": False})),
    ("lmseq2seq", {"pretrained_layers": 2}),
    *(("cvt", {"unpad": unpad}) for unpad in (True, False)),
]


def reference(case: Case, model: PreTrainedModel, batch: dict[str, Tensor], row: int, target: list[int]) -> Tensor:
    """(steps, vocabulary) log-probabilities of the token after each token of `target`, for a row of a batch."""
    token_mask = batch["attention_mask"][row] == 1
    if case.family.name == "gensen" and "token_type_ids" in batch:  # the source is the first text
        token_mask = token_mask & (batch["token_type_ids"][row] == 0)
    language = int(batch["target_languages"][row]) if "target_languages" in batch else 0
    decode = getattr(recurrent_decoders, case.family.name)
    return decode(model, batch["input_ids"][row][token_mask], target, language)


@pytest.mark.parametrize(("name", "overrides"), CONFIGURATIONS, ids=str)
@torch.no_grad()
def test_logits_and_loss_match_equations(name: str, overrides: dict[str, Any]) -> None:
    """With padded sequences of several lengths, and an example without labels."""
    case = CASES[name]
    model, batch = case.model(3, initializer_range=0.5, **overrides), make_batch(case, (9, 4, 7, 6))
    labels = make_targets(case, batch)["labels"]
    labels[:, -1], labels[3] = -100, -100
    targets = batch["decoder_input_ids"].tolist()
    expected = torch.stack([reference(case, model, batch, row, target) for row, target in enumerate(targets)])
    torch.testing.assert_close(model(**batch).logits.log_softmax(-1), expected, atol=1e-5, rtol=1e-5)
    loss = F.nll_loss(expected.flatten(0, 1), labels.flatten(), ignore_index=-100)
    torch.testing.assert_close(model(**batch, labels=labels).loss, loss)


@pytest.fixture(params=[*CASES.values(), Case(FAMILIES["lmseq2seq"], "AutoModelForPreTraining")], ids=str)
def case(request: pytest.FixtureRequest) -> Case:
    return request.param


def generation_inputs(case: Case) -> dict[str, Tensor]:
    batch = make_batch(case, (7, 3, 5))
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    return inputs | ({"target_languages": torch.tensor([2, 0, 1])} if "target_languages" in batch else {})


@pytest.mark.parametrize("use_cache", [True, False])
def test_greedy_search_matches_equations(case: Case, use_cache: bool) -> None:
    seed, scale = {"cove": (3, 0.5), "cvt": (5, 0.9)}.get(case.family.name, (6, 0.9))  # yields varied texts
    model, inputs = case.model(seed, initializer_range=scale), generation_inputs(case)
    generated = model.generate(**inputs, do_sample=False, max_new_tokens=7, use_cache=use_cache)
    assert len(generated.unique()) > 5, "too few distinct words for this test"
    for row in range(3):
        text = [model.config.decoder_start_token_id]
        while len(text) < 8 and (len(text) == 1 or text[-1] != model.config.eos_token_id):
            text.append(int(reference(case, model, inputs, row, text)[-1].argmax()))
        assert generated[row, : len(text)].tolist() == text
        assert (generated[row, len(text) :] == model.config.pad_token_id).all()


def test_beam_search_is_independent_of_cache_and_batch(case: Case) -> None:
    model, inputs = case.model(3, initializer_range=0.9), generation_inputs(case)
    options = {"num_beams": 4, "do_sample": False, "max_new_tokens": 7}
    expected = model.generate(**inputs, **options, use_cache=False)
    assert torch.equal(model.generate(**inputs, **options), expected)
    row_inputs = {name: value[1:2, :3] if value.dim() > 1 else value[1:2] for name, value in inputs.items()}
    row_output = model.generate(**row_inputs, **options)[0]
    assert torch.equal(row_output, expected[1, : len(row_output)])


@pytest.mark.parametrize("name", ["decoder_attention_mask", "decoder_inputs_embeds"])
def test_unsupported_decoder_inputs_raise(case: Case, name: str) -> None:
    inputs = generation_inputs(case) | {"decoder_input_ids": torch.ones(3, 2, dtype=torch.long)}
    with pytest.raises(CtxError, match=f"does not support {name}"):
        case.model()(**inputs, **{name: torch.ones(3, 2)})
