"""LSTM language models: parity with `torch.nn.LSTM`, states across batches, labels and generation."""

import pytest
import torch
from zoo import HEADS, Case, make_batch

from hf_ctxmodels import CtxError
from hf_ctxmodels.architectures.lstm_language_model import LSTMForCausalLM

LMS = [case for case in HEADS if issubclass(case.model_class, LSTMForCausalLM)]
IDS = torch.randint(5, 61, (3, 12), generator=torch.Generator().manual_seed(1))


@pytest.fixture(params=[case for case in LMS if case.auto_name == "AutoModelForCausalLM"], ids=str)
def language_model(request: pytest.FixtureRequest) -> Case:
    return request.param


def test_states_and_gradients_match_torch(language_model: Case) -> None:
    """Compared with layers of `torch.nn.LSTM` with the same weights."""
    model = language_model.model()
    encoder = model.base_model
    embeddings = [encoder.word_embeddings.weight.detach().clone().requires_grad_() for _ in range(2)]
    states = torch.nn.functional.embedding(IDS, embeddings[0])
    for layer in encoder.layers:
        reference = torch.nn.LSTM(states.shape[2], layer.cell_size, batch_first=True)
        names = {"weight_ih": layer.input_weight, "weight_hh": layer.state_weight}
        names |= {"bias_ih": layer.bias, "bias_hh": layer.state_bias}
        reference.load_state_dict({f"{name}_l0": value[0].detach() for name, value in names.items()})
        states, (hidden, cell) = reference(states)
    outputs = encoder(inputs_embeds=torch.nn.functional.embedding(IDS, embeddings[1]), use_cache=True)
    torch.testing.assert_close(outputs.last_hidden_state, states, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(outputs.past_key_values.states[-1][0][:, 0], hidden[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(outputs.past_key_values.states[-1][1][:, 0], cell[0], atol=1e-5, rtol=1e-5)
    for output in (states, outputs.last_hidden_state):
        output.square().sum().backward()
    torch.testing.assert_close(embeddings[1].grad, embeddings[0].grad, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("unpad", [True, False])
def test_past_key_values_continue_texts(language_model: Case, unpad: bool, side: str) -> None:
    """Lengths differ between the batches; padding does not change the state."""
    model = language_model.model(unpad=unpad)
    first, second = (
        make_batch(language_model, (5, 3, 7), side=side),
        make_batch(language_model, (2, 6, 4), side=side, seed=1),
    )
    with torch.no_grad():
        cache = model(**first, use_cache=True).past_key_values
        logits = model(**second, past_key_values=cache).logits
        for row in range(3):
            texts = [batch["input_ids"][row][batch["attention_mask"][row].bool()] for batch in (first, second)]
            expected = model(input_ids=torch.cat(texts)[None]).logits[0, len(texts[0]) :]
            torch.testing.assert_close(logits[row][second["attention_mask"][row].bool()], expected)
    assert model(**first).past_key_values is None
    assert language_model.model(stateful=True)(**first).past_key_values is not None


def test_mismatched_states_raise(language_model: Case) -> None:
    model = language_model.model()
    cache = model(input_ids=IDS, use_cache=True).past_key_values
    with pytest.raises(CtxError, match="The states of past_key_values are"):
        model(input_ids=IDS[:2], past_key_values=cache)
    with pytest.raises(CtxError, match="sequence_ids"):
        model(input_ids=IDS, past_key_values=cache, sequence_ids=torch.ones_like(IDS))


@torch.no_grad()
def test_positions_separate_packed_sequences_only_without_a_mask(language_model: Case) -> None:
    model = language_model.model()
    positions = torch.tensor([[*range(5), *range(7)]]).expand(3, -1)
    separate = torch.cat([model(IDS[:, :5]).logits, model(IDS[:, 5:]).logits], dim=1)
    torch.testing.assert_close(model(IDS, position_ids=positions).logits, separate)
    mask = torch.ones_like(IDS)
    torch.testing.assert_close(model(IDS, attention_mask=mask, position_ids=mask.cumsum(1)).logits, model(IDS).logits)
    with pytest.raises(CtxError, match=r"Row 0 of position_ids .*\n.*sequence_ids"):
        model(IDS, attention_mask=mask, position_ids=positions)


def test_packed_sequences_have_separate_targets(language_model: Case) -> None:
    model = language_model.model()
    ids = IDS[:1, :7]
    packed = model(input_ids=ids, sequence_ids=torch.tensor([[1, 1, 1, 1, 2, 2, 2]]), labels=ids).loss
    losses = [
        model(input_ids=sequence, labels=sequence).loss * (sequence.shape[1] - 1)
        for sequence in (ids[:, :4], ids[:, 4:])
    ]
    torch.testing.assert_close(packed, sum(losses) / 5)


@pytest.mark.parametrize("strategy", [{}, {"num_beams": 3}, {"do_sample": True}], ids=["greedy", "beams", "sampling"])
def test_generation_is_independent_of_cache(language_model: Case, strategy: dict) -> None:
    """Compared with a forward pass over the full text at each step."""
    model = language_model.model(2, initializer_range=0.5)
    options = {"max_new_tokens": 8, "eos_token_id": None, "pad_token_id": 0, **strategy}
    texts = []
    for use_cache in (True, False):
        if not use_cache:
            model.prepare_inputs_for_generation = lambda ids, **kwargs: {"input_ids": ids, "use_cache": True}
        torch.manual_seed(0)
        texts.append(model.generate(IDS[:, :4], **options))
    assert texts[0].shape == (3, 12)
    assert len(texts[0][:, 4:].unique()) > 2, "too few distinct words for this test"
    assert torch.equal(*texts)


def test_generation_from_padded_prompts(language_model: Case) -> None:
    model = language_model.model(2, initializer_range=0.5)
    padded = IDS[:2, :6].clone()
    padded[1, :3] = 0
    options = {"max_new_tokens": 6, "eos_token_id": None, "pad_token_id": 0, "do_sample": False}
    generated = model.generate(padded, attention_mask=(padded != 0).long(), **options)
    assert torch.equal(generated[1, 6:], model.generate(padded[1:, 3:], **options)[0, 3:])
