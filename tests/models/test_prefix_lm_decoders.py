"""Prefix language models: prefix masks compared with dense masks in all layouts, and generation."""

import pytest
import torch
from torch.nn import functional as F
from zoo import CASES, Case, assert_close, make_batch

from hf_ctxmodels import CtxError
from hf_ctxmodels.registry import FAMILIES

DECODERS = [
    case for case in CASES if case.auto_name == "AutoModelForCausalLM" and case.family.name in ("gpt", "gpt2", "gpt3")
]
LENGTHS, PREFIXES = (9, 4, 6), (4, 4, 1)


def batch_of(case, side="right"):
    """Ids, attention mask and prefix mask of three sequences."""
    batch = make_batch(case, LENGTHS, side=side)
    mask = batch["attention_mask"]
    positions = mask.cumsum(1) - mask
    prefix = (positions < torch.tensor(PREFIXES)[:, None]) & (mask == 1)
    return {"input_ids": batch["input_ids"], "attention_mask": mask, "prefix_mask": prefix.long()}


def dense_mask(length, prefix):
    """(1, 1, length, length) mask: attend to the prefix and to previous positions."""
    return torch.tensor([[[[k <= q or k < prefix for k in range(length)] for q in range(length)]]])


@pytest.mark.all_families
@pytest.mark.parametrize("case", DECODERS, ids=str)
@torch.no_grad()
def test_prefix_mask_matches_dense_mask(case):
    """A prefix in padded, packed and unpadded batches equals a dense mask for each sequence."""
    model = case.model()
    batches = {side: batch_of(case, side) for side in ("right", "left")}
    ids = [batches["right"]["input_ids"][row, :length] for row, length in enumerate(LENGTHS)]
    expected = []
    for row, (length, prefix) in enumerate(zip(LENGTHS, PREFIXES)):
        expected.append(model(ids[row][None], attention_mask=dense_mask(length, prefix)).logits[0])
        assert_close(model(ids[row][None], prefix_mask=(torch.arange(length) < prefix)[None]).logits[0], expected[-1])
        if 1 < prefix < length:
            assert not torch.allclose(model(ids[row][None]).logits[0], expected[-1], atol=1e-3)
    expected = torch.cat(expected)
    for unpad in (True, False):
        model.config.unpad = unpad
        for batch in batches.values():
            assert_close(model(**batch).logits[batch["attention_mask"] == 1], expected)
        rows = {
            "input_ids": torch.cat(ids)[None],
            "sequence_ids": torch.arange(3).repeat_interleave(torch.tensor(LENGTHS))[None] + 1,
        }
        prefix = torch.cat([torch.arange(length) < prefix for length, prefix in zip(LENGTHS, PREFIXES)])[None]
        rows["prefix_mask"] = prefix.long()
        assert_close(model(**rows).logits[0], expected)
        padded = {name: F.pad(tensor, (2, 1)) for name, tensor in rows.items()}
        assert_close(model(**padded).logits[0, 2:-1], expected)
        labels = padded["input_ids"].masked_fill(padded["prefix_mask"] == 1, -100)
        assert_close(model(**padded, labels=labels).loss, model(**rows, labels=labels[:, 2:-1]).loss)
    model.config.unpad = True


@pytest.mark.parametrize("case", DECODERS, ids=str)
@pytest.mark.parametrize("side", ["right", "left"])
@torch.no_grad()
def test_generation_with_prefix(case, side):
    """The prompt is the prefix; outputs match forward passes over the growing text, with and without a cache."""
    model = case.model(prefix_lm=True)
    batch = batch_of(case, side)
    del batch["prefix_mask"]
    options = {"max_new_tokens": 5, "eos_token_id": None, "pad_token_id": 0, "do_sample": False}
    generated = model.generate(**batch, **options)[:, -5:]
    for row, length in enumerate(LENGTHS):
        text = batch["input_ids"][row][batch["attention_mask"][row] == 1][None]
        for step in range(5):
            prefix = (torch.arange(length + step) < length)[None]
            token = model(text, prefix_mask=prefix).logits[:, -1].argmax(-1)
            assert token == generated[row, step]
            text = torch.cat([text, token[None]], 1)
    assert model.generate(**batch, **options, use_cache=False)[:, -5:].tolist() == generated.tolist()
    beams = [
        model.generate(**batch, **options, num_beams=3, use_cache=use_cache).tolist() for use_cache in (True, False)
    ]
    assert beams[0] == beams[1]
    embeddings = model.get_input_embeddings()(batch["input_ids"])
    mask = batch["attention_mask"]
    from_embeddings = model.generate(inputs_embeds=embeddings, attention_mask=mask, **options)
    assert from_embeddings[:, -5:].tolist() == generated.tolist()
    model.config.prefix_lm = False
    from_embeddings = model.generate(inputs_embeds=embeddings, attention_mask=mask, **options)
    assert from_embeddings[:, -5:].tolist() == model.generate(**batch, **options)[:, -5:].tolist()
    assert model.generate(**batch, **options)[:, -5:].tolist() != generated.tolist()


@pytest.mark.parametrize("family", ["ulmfit", "seqae"])
def test_recurrent_decoders_reject_prefix_mask(family):
    case = Case(FAMILIES[family], "AutoModelForCausalLM")
    ids = torch.tensor([[3, 4, 5]])
    with pytest.raises(CtxError, match="does not accept the argument prefix_mask"):
        case.model()(ids, prefix_mask=torch.ones_like(ids))


def test_invalid_prefixes(tmp_path):
    case = next(case for case in DECODERS if case.family.name == "gpt2")
    model, batch = case.model(prefix_lm=True), batch_of(case)
    for unpad in (True, False):
        model.config.unpad = unpad
        with pytest.raises(CtxError, match="a token of the prefix follows"):
            model(**batch | {"prefix_mask": batch["attention_mask"].flip(1)})
    with pytest.raises(CtxError, match="prefix_mask"):
        model(**batch | {"prefix_mask": batch["prefix_mask"][:, :-1]})
    cache = model(batch["input_ids"], use_cache=True).past_key_values
    with pytest.raises(CtxError, match="past_key_values with tokens"):
        model(batch["input_ids"], prefix_mask=torch.ones(3, 9, dtype=torch.long), past_key_values=cache)
    with pytest.raises(CtxError, match="one piece"):
        model.generate(batch["input_ids"], max_new_tokens=2, prefill_chunk_size=2)
    with pytest.raises(CtxError, match="prefix_lm"):
        model.export_reference(tmp_path)
