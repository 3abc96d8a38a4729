"""CoVe's own: the decoder by the paper's equations, what generate writes, fixed vectors, texts in pairs."""

from itertools import product

import pytest
import torch
from torch import Tensor
from zoo import FIRST_WORD, TINY, Case, make_batch, make_targets

from hf_ctxmodels import CtxCoveForConditionalGeneration, CtxError
from hf_ctxmodels.registry import FAMILIES

TRANSLATOR = Case(FAMILIES["cove"], "AutoModelForSeq2SeqLM")
CLASSIFIER = Case(FAMILIES["cove"], "AutoModelForSequenceClassification")
BEGIN, END = 2, 3


def small(**changes: object) -> CtxCoveForConditionalGeneration:
    return TRANSLATOR.model(3, **{"initializer_range": 0.5, **changes})


@torch.no_grad()
def by_the_equations(
    model: CtxCoveForConditionalGeneration, ids: Tensor, target: list[int], attention: list[Tensor] | None = None
) -> Tensor:
    """(steps, vocabulary) log-probabilities of the words behind each of `target`, one text, one step at a time; the
    weights of attention are appended to `attention`."""
    encoded = model.cove(input_ids=ids[None], output_final_states=True)
    states = encoded.last_hidden_state[0, :, model.config.embedding_size :]  # H
    decoder = model.decoder
    remembered = [(hidden, cell) for hidden, cell in zip(encoded.final_hidden[0], encoded.final_cell[0], strict=True)]
    adjusted, logs = torch.zeros(model.config.hidden_size), []
    for word in target:
        below = torch.cat([decoder.embeddings.weight[word], adjusted])
        for depth, layer in enumerate(decoder.cells):
            hidden, cell = remembered[depth]
            gates = layer.weight_ih @ below + layer.bias_ih + layer.weight_hh @ hidden + layer.bias_hh
            into, forget, new, out = gates.chunk(4)
            cell = forget.sigmoid() * cell + into.sigmoid() * new.tanh()
            below = out.sigmoid() * cell.tanh()
            remembered[depth] = (below, cell)
        weights = torch.softmax(states @ (decoder.query.weight @ below + decoder.query.bias), 0)
        if attention is not None:
            attention.append(weights)
        joined = torch.cat([states.T @ weights, below])
        adjusted = torch.tanh(decoder.combine.weight @ joined + decoder.combine.bias)
        logs.append((model.prediction.weight @ adjusted + model.prediction.bias).log_softmax(0))
    return torch.stack(logs)


def test_decoder_is_the_papers() -> None:
    """The loss of padded rows of several lengths, too."""
    model, batch = small(), make_batch(TRANSLATOR)
    labels = make_targets(TRANSLATOR, batch)["labels"].masked_fill_(torch.tensor([[0, 0, 0, 0, 0, 1]]).bool(), -100)
    read = batch["decoder_input_ids"]
    with torch.no_grad():
        logits = model(**batch).logits.log_softmax(-1)
        loss = model(**batch, labels=labels).loss
    total = 0.0
    for row, tokens in enumerate(batch["attention_mask"].bool()):
        expected = by_the_equations(model, batch["input_ids"][row][tokens], read[row].tolist())
        torch.testing.assert_close(logits[row], expected, atol=1e-5, rtol=1e-5)
        target_mask = labels[row] != -100
        total -= float(expected[target_mask].gather(1, labels[row][target_mask][:, None]).sum())
    assert float(loss) == pytest.approx(total / int((labels != -100).sum()), rel=1e-5)


def test_recorded_attention_and_states_are_the_papers() -> None:
    model, batch = small(), make_batch(TRANSLATOR)
    outputs = model(**batch, output_attentions=True, output_hidden_states=True)
    (attention,) = outputs.cross_attentions
    for row, tokens in enumerate(batch["attention_mask"].bool()):
        expected: list[Tensor] = []
        by_the_equations(model, batch["input_ids"][row][tokens], batch["decoder_input_ids"][row].tolist(), expected)
        torch.testing.assert_close(attention[row, 0][:, tokens], torch.stack(expected), atol=1e-5, rtol=1e-5)
        assert not attention[row, 0][:, ~tokens].any()
    assert torch.equal(model.prediction(outputs.decoder_hidden_states[-1]), outputs.logits)
    assert small(decoder_attention=False)(**batch, output_attentions=True).cross_attentions is None


def test_without_attention_the_source_is_in_the_first_state_alone() -> None:
    model, batch = small(decoder_attention=False), make_batch(TRANSLATOR, (5, 5))
    with torch.no_grad():
        encoded = model.encode(input_ids=batch["input_ids"], output_final_states=True)
        expected = model(**batch).logits
        encoded.last_hidden_state = torch.zeros_like(encoded.last_hidden_state)
        got = model(encoder_outputs=encoded, decoder_input_ids=batch["decoder_input_ids"]).logits
    assert torch.equal(got, expected)


def test_decoder_reads_its_labels_shifted() -> None:
    model, batch = small(), make_batch(TRANSLATOR)
    labels = torch.randint(FIRST_WORD, TINY["target_vocab_size"], (4, 5))
    labels[1, 3:] = -100
    shifted = torch.cat([torch.full((4, 1), BEGIN), labels[:, :-1].clamp(min=0)], 1)
    expected = model(**batch | {"decoder_input_ids": shifted}, labels=labels).loss
    del batch["decoder_input_ids"]
    assert model(**batch, labels=labels).loss == expected
    with pytest.raises(CtxError, match="decoder_input_ids, or labels"):
        model(**batch)


class TestGenerate:
    def inputs(self) -> dict[str, Tensor]:
        batch = make_batch(TRANSLATOR, (7, 3, 5))
        return {name: batch[name] for name in ("input_ids", "attention_mask")}

    def test_greedy_is_the_likeliest_word_again_and_again(self) -> None:
        model, batch = small(), self.inputs()
        written = model.generate(**batch, do_sample=False, max_new_tokens=7)
        assert len(written.unique()) > 5, "too dull a text to tell anything"
        for row, tokens in enumerate(batch["attention_mask"].bool()):
            text = [BEGIN]
            while len(text) < 8 and text[-1] != END:
                text.append(int(by_the_equations(model, batch["input_ids"][row][tokens], text)[-1].argmax()))
            assert written[row, : len(text)].tolist() == text
            assert not written[row, len(text) :].any()

    @pytest.mark.parametrize("beams", [1, 4])
    def test_the_state_is_the_whole_text_read_anew(self, beams: int) -> None:
        model, batch = small(), self.inputs()
        options = {"num_beams": beams, "do_sample": False, "max_new_tokens": 7}
        expected = model.generate(**batch, **options, use_cache=False)
        assert torch.equal(model.generate(**batch, **options), expected)

    def test_wide_beams_find_the_best_of_all_texts(self) -> None:
        """Against every text of at most three words and its end, in a language of eight."""
        size, steps = 8, 3
        model, batch = TRANSLATOR.model(0, initializer_range=0.2, target_vocab_size=size), self.inputs()
        options = {"num_beams": size**2, "do_sample": False, "max_new_tokens": steps, "length_penalty": 0.0}
        found = model.generate(**batch, **options, output_scores=True, return_dict_in_generate=True)
        greedy = model.generate(**batch, do_sample=False, max_new_tokens=steps)
        for row, tokens in enumerate(batch["attention_mask"].bool()):
            ids = batch["input_ids"][row][tokens]
            scores = {}
            for text in product(range(size), repeat=steps):
                cut = text[: text.index(END) + 1] if END in text else text
                if cut not in scores:
                    logs = by_the_equations(model, ids, [BEGIN, *cut[:-1]])
                    scores[cut] = float(logs[range(len(cut)), list(cut)].sum())
            best = max(scores, key=scores.__getitem__)
            assert tuple(found.sequences[row, 1 : 1 + len(best)].tolist()) == best
            assert float(found.sequences_scores[row]) == pytest.approx(scores[best], abs=1e-4)
        assert greedy[0].tolist() != found.sequences[0].tolist(), "greedy search finds it as well"


class TestVectors:
    def test_output_is_the_vector_and_the_state(self) -> None:
        base = Case(FAMILIES["cove"], "AutoModel")
        model, batch = base.model(), make_batch(base)
        outputs = model(**batch)
        vectors = model.word_embeddings(batch["input_ids"]) * batch["attention_mask"][..., None]
        assert torch.equal(outputs.last_hidden_state[..., : TINY["embedding_size"]], vectors)
        assert outputs.last_hidden_state.shape[-1] == TINY["embedding_size"] + TINY["hidden_size"]


class TestClassifier:
    def test_two_texts_are_read_apart(self) -> None:
        """What stands in the second text changes nothing that is read of the first, but what it attends to."""
        model, ids = CLASSIFIER.model(), torch.randint(FIRST_WORD, 61, (1, 9))
        types = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1, 1]])
        with torch.no_grad():
            both = model.encode(input_ids=ids, token_type_ids=types).last_hidden_state
            first, second = (model.encode(input_ids=part).last_hidden_state for part in (ids[:, :4], ids[:, 4:]))
        torch.testing.assert_close(both, torch.cat([first, second], 1))

    @pytest.mark.parametrize("unpad", [True, False])
    @pytest.mark.parametrize("side", ["right", "left"])
    def test_masked_words_within_a_text_are_as_if_left_out(self, unpad: bool, side: str) -> None:
        """Whatever their type, which is that of padding (0) or of the text they stand in."""
        model = CLASSIFIER.model(unpad=unpad)
        ids = torch.randint(FIRST_WORD, 61, (1, 11), generator=torch.Generator().manual_seed(2))
        types = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1]])
        for hole in (2, 6, [1, 7, 8]):
            mask = torch.ones_like(ids).index_fill(1, torch.tensor(hole), 0)
            kept = mask.bool()
            expected = model(input_ids=ids[kept][None], token_type_ids=types[kept][None]).logits
            for in_hole in (types, types * mask):
                given = {"input_ids": ids, "attention_mask": mask, "token_type_ids": in_hole}
                widths = (2, 0) if side == "left" else (0, 2)
                padded = {name: torch.nn.functional.pad(tensor, widths) for name, tensor in given.items()}
                torch.testing.assert_close(model(**padded).logits, expected, atol=1e-5, rtol=1e-5)

    def test_the_vectors_alone(self) -> None:
        """The baseline: then the encoder's weights change nothing."""
        model, batch = CLASSIFIER.model(task_context=False), make_batch(CLASSIFIER)
        before = model(**batch).logits
        with torch.no_grad():
            for parameter in model.cove.layers.parameters():
                parameter.mul_(2)
        assert torch.equal(model(**batch).logits, before)

    def test_a_frozen_encoder_has_no_gradient_and_no_dropout(self) -> None:
        model, batch = CLASSIFIER.model(freeze_context=True, hidden_dropout_prob=0.5).train(), make_batch(CLASSIFIER)
        assert torch.equal(model.encode(**batch).last_hidden_state, model.encode(**batch).last_hidden_state)
        model(**batch, labels=torch.tensor([0, 1, 2, 0])).loss.backward()
        assert all(parameter.grad is None for parameter in model.cove.parameters())
        assert all(parameter.grad is not None for parameter in model.biattention.parameters())
        thawed = CLASSIFIER.model(hidden_dropout_prob=0.5).train()
        assert not torch.equal(thawed.encode(**batch).last_hidden_state, thawed.encode(**batch).last_hidden_state)
