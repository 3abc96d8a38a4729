"""RoBERTa: positions that skip padding, exported defaults, and the classifier input."""

import pytest
import torch
from transformers import RobertaForMaskedLM
from zoo import PATHS, Case, make_batch

from hf_ctxmodels import CtxRobertaConfig
from hf_ctxmodels.registry import FAMILIES

ENCODER = Case(FAMILIES["roberta"], "AutoModel")
PAD = 0  # in the tiny configuration


def states(model, batch, **inputs):
    """(tokens, hidden) states of the tokens of all examples."""
    batch = {name: tensor for name, tensor in batch.items() if name not in ("position_ids", *inputs)} | inputs
    if "inputs_embeds" in inputs:
        batch.pop("input_ids")
    return model(**batch).last_hidden_state[batch["attention_mask"].bool()]


@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
def test_states_are_independent_of_padding(path):
    """Padding side and ids in masked columns have no effect; `inputs_embeds` have the same positions."""
    model = ENCODER.model(**path)
    expected = states(model, make_batch(ENCODER, side="right"))
    for side in ("right", "left"):
        batch = make_batch(ENCODER, side=side)
        input_ids = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, 7)
        embeds = model.get_input_embeddings()(batch["input_ids"])
        for inputs in ({}, {"input_ids": input_ids}, {"inputs_embeds": embeds}):
            torch.testing.assert_close(states(model, batch, **inputs), expected, atol=1e-5, rtol=1e-5)


def test_positions_match_transformers():
    reference = ENCODER.reference_model()
    for side in ("right", "left"):
        ids = make_batch(ENCODER, side=side)["input_ids"]
        expected = reference.embeddings.create_position_ids_from_input_ids(ids, PAD)
        assert ENCODER.model().default_positions(ids, None, None).equal(expected)


def test_padding_position_embedding_has_no_gradient():
    model = ENCODER.model_class(ENCODER.config(pad_token_id=3))
    positions = model.embeddings.position_embeddings
    assert not positions.weight[3].any()
    model(input_ids=torch.tensor([[5, 6, 3, 3]])).last_hidden_state.square().sum().backward()
    assert not positions.weight.grad[3].any()
    assert positions.weight.grad[4:6].any(-1).all()


def test_export_of_default_configuration(tmp_path):
    """The defaults of transformers differ from the released models, which have 512 positions for tokens."""
    assert CtxRobertaConfig().max_sequence_length == 512
    config = CtxRobertaConfig(num_hidden_layers=1, hidden_size=12, intermediate_size=8, vocab_size=30)
    FAMILIES["roberta"].models["AutoModelForMaskedLM"](config).export_reference(tmp_path)
    exported = RobertaForMaskedLM.from_pretrained(tmp_path).config
    assert (exported.max_position_embeddings, exported.type_vocab_size, exported.layer_norm_eps) == (514, 1, 1e-5)


def test_classifier_with_left_padding():
    case = Case(FAMILIES["roberta"], "AutoModelForSequenceClassification")
    model, batch = case.model(), make_batch(case, side="left")
    batch.pop("position_ids")
    expected = model(**make_batch(case, side="right")).logits
    torch.testing.assert_close(model(**batch).logits, expected, atol=1e-5, rtol=1e-5)
