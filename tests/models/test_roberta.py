"""What is RoBERTa's own: positions that count tokens, and the classifier on <s>."""

import pytest
import torch
from huggingface_hub.errors import StrictDataclassClassValidationError
from transformers import RobertaForMaskedLM, RobertaModel
from zoo import Case, make_batch

from hf_ctxmodels import CtxRobertaConfig
from hf_ctxmodels.registry import FAMILIES, get_family

ENCODER = Case(FAMILIES["roberta"], "AutoModel")
PAD = 0  # of the tiny configuration


def states(model, batch, **inputs):
    """(tokens, hidden) the states of real tokens, row by row."""
    batch = {name: tensor for name, tensor in batch.items() if name not in ("position_ids", *inputs)} | inputs
    if "inputs_embeds" in inputs:
        batch.pop("input_ids")
    return model(**batch).last_hidden_state[batch["attention_mask"].bool()]


PATHS = pytest.mark.parametrize(
    "path", [{}, {"unpad": False}, {"unpad": False, "attention": "eager"}], ids=["packed", "padded", "eager"]
)


@PATHS
def test_the_side_of_the_padding_makes_no_difference(path):
    model = ENCODER.model(**path)
    right, left = (make_batch(ENCODER, side=side) for side in ("right", "left"))
    torch.testing.assert_close(states(model, left), states(model, right), atol=1e-5, rtol=1e-5)


@PATHS
def test_embeddings_have_the_positions_of_their_ids(path):
    model = ENCODER.model(**path)
    for side in ("right", "left"):
        batch = make_batch(ENCODER, side=side)
        embeds = model.get_input_embeddings()(batch["input_ids"])
        expected = states(model, batch)
        torch.testing.assert_close(states(model, batch, inputs_embeds=embeds), expected, atol=1e-5, rtol=1e-5)


def test_ids_at_masked_columns_do_not_count():
    model, batch = ENCODER.model(), make_batch(ENCODER, side="left")
    filled = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, 7)
    torch.testing.assert_close(states(model, batch, input_ids=filled), states(model, batch), atol=1e-5, rtol=1e-5)


def test_positions():
    model = ENCODER.model()
    ids = torch.tensor([[PAD, PAD, 5, 6, 7], [5, 6, PAD, 7, PAD]])
    assert model.default_positions(ids, None, None).tolist() == [[0, 0, 1, 2, 3], [1, 2, 0, 3, 0]]
    mask = torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    embeds = torch.zeros(2, 5, 32)
    assert model.default_positions(embeds, mask, None).tolist() == [[0, 1, 2, 3, 4], [1, 2, 3, 0, 0]]
    sequences = torch.tensor([[3, 3, 3, 1, 1], [0, 2, 2, 3, 3]])
    assert model.default_positions(embeds, None, sequences).tolist() == [[1, 2, 3, 1, 2], [0, 1, 2, 1, 2]]
    both = model.default_positions(embeds, mask, sequences)
    assert both.tolist() == [[0, 1, 2, 1, 2], [0, 1, 2, 0, 0]]


def test_positions_are_those_of_the_reference():
    reference = ENCODER.reference_model()
    for side in ("right", "left"):
        ids = make_batch(ENCODER, side=side)["input_ids"]
        expected = reference.embeddings.create_position_ids_from_input_ids(ids, PAD)
        assert ENCODER.model().default_positions(ids, None, None).equal(expected)


def test_packed_sequences_are_as_if_alone():
    model = ENCODER.model()
    first, second = torch.tensor([[5, 6, 7, 8]]), torch.tensor([[9, 10, 11]])
    sequence_ids = torch.tensor([[1, 1, 1, 1, 2, 2, 2]])
    together = model(input_ids=torch.cat([first, second], 1), sequence_ids=sequence_ids).last_hidden_state
    alone = torch.cat([model(input_ids=each).last_hidden_state for each in (first, second)], 1)
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-5)


def test_the_position_of_padding_is_zero_and_learns_nothing():
    model = ENCODER.model_class(ENCODER.config(pad_token_id=3))
    table = model.embeddings.position_embeddings
    assert not table.weight[3].any()
    model(input_ids=torch.tensor([[5, 6, 3, 3]])).last_hidden_state.square().sum().backward()
    assert not table.weight.grad[3].any()
    assert table.weight.grad[4:6].any(-1).all()


def test_a_position_table_without_a_row_for_a_token_is_refused():
    with pytest.raises(StrictDataclassClassValidationError, match=r"pad_token_id \+ 1 = 2"):
        CtxRobertaConfig(max_position_embeddings=2)
    assert CtxRobertaConfig().max_sequence_length == 512


def test_the_reference_opens_the_default_configuration(tmp_path):
    """The reference's own defaults are not those of the released models."""
    config = CtxRobertaConfig(num_hidden_layers=1, hidden_size=12, intermediate_size=8, vocab_size=30)
    FAMILIES["roberta"].models["AutoModelForMaskedLM"](config).export_reference(tmp_path)
    found = RobertaForMaskedLM.from_pretrained(tmp_path).config
    assert (found.max_position_embeddings, found.type_vocab_size, found.layer_norm_eps) == (514, 1, 1e-5)


def test_a_configuration_belongs_to_its_own_family_alone():
    """XLM-R's configuration is RoBERTa's by inheritance, and RoBERTa's is BERT's."""
    assert [get_family(FAMILIES[name].config()).name for name in ("bert", "roberta", "xlm_roberta")] == [
        *("bert", "roberta", "xlm_roberta")
    ]


def test_tokens_before_the_text_do_not_move_what_the_classifier_reads():
    case = Case(FAMILIES["roberta"], "AutoModelForSequenceClassification")
    model = case.model()
    right, left = ({**make_batch(case, side=side)} for side in ("right", "left"))
    left.pop("position_ids")
    torch.testing.assert_close(model(**left).logits, model(**right).logits, atol=1e-5, rtol=1e-5)
    reference = RobertaModel(case.reference_config())
    assert not [name for name, _ in model.named_parameters() if "pooler" in name]
    assert [name for name, _ in reference.named_parameters() if "pooler" in name], "the bare encoder has one"
