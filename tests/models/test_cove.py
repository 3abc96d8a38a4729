"""CoVe: attention, beam search, word vectors, text pairs and the biattentive classifier."""

from itertools import product

import pytest
import torch
from recurrent_decoders import cove as reference
from torch import Tensor
from zoo import FIRST_WORD, TINY, Case, make_batch

from hf_ctxmodels import CtxCoveForConditionalGeneration, CtxError
from hf_ctxmodels.layers.biattention import Maxout
from hf_ctxmodels.layers.common import SafeBatchNorm1d
from hf_ctxmodels.registry import FAMILIES

TRANSLATION = Case(FAMILIES["cove"], "AutoModelForSeq2SeqLM")
CLASSIFIER = Case(FAMILIES["cove"], "AutoModelForSequenceClassification")
START, END = 2, 3


def build_model(**overrides: object) -> CtxCoveForConditionalGeneration:
    return TRANSLATION.model(3, **{"initializer_range": 0.5, **overrides})


def test_attention_and_hidden_states_match_equations() -> None:
    model, batch = build_model(), make_batch(TRANSLATION)
    outputs = model(**batch, output_attentions=True, output_hidden_states=True)
    (attention,) = outputs.cross_attentions
    for row, token_mask in enumerate(batch["attention_mask"].bool()):
        expected: list[Tensor] = []
        reference(
            model, batch["input_ids"][row][token_mask], batch["decoder_input_ids"][row].tolist(), attention=expected
        )
        torch.testing.assert_close(attention[row, 0][:, token_mask], torch.stack(expected), atol=1e-5, rtol=1e-5)
        assert not attention[row, 0][:, ~token_mask].any()
    assert torch.equal(model.prediction(outputs.decoder_hidden_states[-1]), outputs.logits)
    assert build_model(decoder_attention=False)(**batch, output_attentions=True).cross_attentions is None


def test_decoder_without_attention_uses_only_initial_state() -> None:
    model, batch = build_model(decoder_attention=False), make_batch(TRANSLATION, (5, 5))
    with torch.no_grad():
        encoded = model.encode(input_ids=batch["input_ids"], output_final_states=True)
        expected = model(**batch).logits
        encoded.last_hidden_state = torch.zeros_like(encoded.last_hidden_state)
        logits = model(encoder_outputs=encoded, decoder_input_ids=batch["decoder_input_ids"]).logits
    assert torch.equal(logits, expected)


def test_decoder_input_ids_are_shifted_labels() -> None:
    model, batch = build_model(), make_batch(TRANSLATION)
    labels = torch.randint(FIRST_WORD, TINY["target_vocab_size"], (4, 5))
    labels[1, 3:] = -100
    shifted = torch.cat([torch.full((4, 1), START), labels[:, :-1].clamp(min=0)], 1)
    expected = model(**batch | {"decoder_input_ids": shifted}, labels=labels).loss
    del batch["decoder_input_ids"]
    assert model(**batch, labels=labels).loss == expected
    with pytest.raises(CtxError, match="decoder_input_ids or labels"):
        model(**batch)


def test_exhaustive_beam_search_finds_most_probable_text() -> None:
    """Compared with all texts of at most three words from a vocabulary of eight."""
    vocab_size, max_steps = 8, 3
    model = TRANSLATION.model(0, initializer_range=0.2, target_vocab_size=vocab_size)
    batch = {name: make_batch(TRANSLATION, (7, 3, 5))[name] for name in ("input_ids", "attention_mask")}
    options = {"num_beams": vocab_size**2, "do_sample": False, "max_new_tokens": max_steps, "length_penalty": 0.0}
    output = model.generate(**batch, **options, output_scores=True, return_dict_in_generate=True)
    greedy = model.generate(**batch, do_sample=False, max_new_tokens=max_steps)
    for row, token_mask in enumerate(batch["attention_mask"].bool()):
        ids = batch["input_ids"][row][token_mask]
        scores = {}
        for prefix in product(range(vocab_size), repeat=max_steps - 1):
            log_probs = reference(model, ids, [START, *prefix])
            for text in ((*prefix, word) for word in range(vocab_size)):
                words = text[: text.index(END) + 1] if END in text else text
                scores[words] = float(log_probs[range(len(words)), list(words)].sum())
        best = max(scores, key=scores.__getitem__)
        assert tuple(output.sequences[row, 1 : 1 + len(best)].tolist()) == best
        assert float(output.sequences_scores[row]) == pytest.approx(scores[best], abs=1e-4)
    assert greedy[0].tolist() != output.sequences[0].tolist(), "greedy search finds the same text"


def test_output_starts_with_word_vectors() -> None:
    base = Case(FAMILIES["cove"], "AutoModel")
    model, batch = base.model(), make_batch(base)
    outputs = model(**batch)
    vectors = model.word_embeddings(batch["input_ids"]) * batch["attention_mask"][..., None]
    assert torch.equal(outputs.last_hidden_state[..., : TINY["embedding_size"]], vectors)
    assert outputs.last_hidden_state.shape[-1] == TINY["embedding_size"] + TINY["hidden_size"]


class TestClassifier:
    def test_text_pairs_are_encoded_separately(self) -> None:
        model, ids = CLASSIFIER.model(), torch.randint(FIRST_WORD, 61, (1, 9))
        types = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1, 1]])
        with torch.no_grad():
            pair = model.encode(input_ids=ids, token_type_ids=types).last_hidden_state
            first, second = (model.encode(input_ids=text).last_hidden_state for text in (ids[:, :4], ids[:, 4:]))
        torch.testing.assert_close(pair, torch.cat([first, second], 1))

    @pytest.mark.parametrize("unpad", [True, False])
    @pytest.mark.parametrize("side", ["right", "left"])
    def test_masked_words_have_no_effect(self, unpad: bool, side: str) -> None:
        """With the `token_type_ids` of padding (0) or of the surrounding text."""
        model = CLASSIFIER.model(unpad=unpad)
        ids = torch.randint(FIRST_WORD, 61, (1, 11), generator=torch.Generator().manual_seed(2))
        types = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1]])
        for masked in (2, 6, [1, 7, 8]):
            mask = torch.ones_like(ids).index_fill(1, torch.tensor(masked), 0)
            token_mask = mask.bool()
            expected = model(input_ids=ids[token_mask][None], token_type_ids=types[token_mask][None]).logits
            for token_type_ids in (types, types * mask):
                inputs = {"input_ids": ids, "attention_mask": mask, "token_type_ids": token_type_ids}
                widths = (2, 0) if side == "left" else (0, 2)
                padded = {name: torch.nn.functional.pad(tensor, widths) for name, tensor in inputs.items()}
                torch.testing.assert_close(model(**padded).logits, expected, atol=1e-5, rtol=1e-5)

    def test_encoder_is_unused_without_task_context(self) -> None:
        model, batch = CLASSIFIER.model(task_context=False), make_batch(CLASSIFIER)
        expected = model(**batch).logits
        with torch.no_grad():
            for parameter in model.cove.layers.parameters():
                parameter.mul_(2)
        assert torch.equal(model(**batch).logits, expected)

    def test_frozen_encoder_has_no_gradient_or_dropout(self) -> None:
        model, batch = CLASSIFIER.model(freeze_context=True, hidden_dropout_prob=0.5).train(), make_batch(CLASSIFIER)
        assert torch.equal(model.encode(**batch).last_hidden_state, model.encode(**batch).last_hidden_state)
        model(**batch, labels=torch.tensor([0, 1, 2, 0])).loss.backward()
        assert all(parameter.grad is None for parameter in model.cove.parameters())
        assert all(parameter.grad is not None for parameter in model.biattention.parameters())
        trainable = CLASSIFIER.model(hidden_dropout_prob=0.5).train()
        assert not torch.equal(trainable.encode(**batch).last_hidden_state, trainable.encode(**batch).last_hidden_state)


class TestBiattention:
    """Layers of the classifier; tests/downstream/networks compares the biattention with its formulas."""

    def test_maxout_is_maximum_of_linear_layers(self) -> None:
        layer, states = Maxout(6, 4, 3), torch.randn(5, 6)
        weights, biases = layer.maps.weight.unflatten(0, (4, 3)), layer.maps.bias.unflatten(0, (4, 3))
        expected = torch.stack([states @ weights[:, number].T + biases[:, number] for number in range(3)]).amax(0)
        torch.testing.assert_close(layer(states), expected)

    def test_batch_norm_of_single_row(self) -> None:
        """A single row has no variance and does not change the running statistics."""
        norm, states = SafeBatchNorm1d(6).train(), 5 + torch.randn(8, 6)
        assert norm(states).mean(0).abs().max() < 1e-5
        mean = norm.running_mean.clone()
        assert norm(states[:1]).shape == (1, 6)
        assert torch.equal(norm.running_mean, mean)
