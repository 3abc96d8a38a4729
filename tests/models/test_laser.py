"""LASER: the decoder against its equations, generation, and languages in data and tokenizer."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer
from zoo import Case, make_batch, make_targets

from hf_ctxmodels import CtxError, CtxLaserForConditionalGeneration, CtxLaserTokenizer
from hf_ctxmodels.data import load_documents
from hf_ctxmodels.inference import generate_texts
from hf_ctxmodels.objectives import TranslationToLanguages
from hf_ctxmodels.registry import FAMILIES

TRANSLATION = Case(FAMILIES["laser"], "AutoModelForSeq2SeqLM")
START, END = 0, 2
PAIRS = [("A cat sat.", "Eine Katze saß."), ("A dog saw a cat!", "Ein Hund sah eine Katze!")]


def build_model(**changes: object) -> CtxLaserForConditionalGeneration:
    return TRANSLATION.model(3, **{"initializer_range": 0.5, "num_decoder_layers": 2, **changes})


@torch.no_grad()
def reference_log_probabilities(
    model: CtxLaserForConditionalGeneration, sentence: Tensor, target: list[int], language: int
):
    """(steps, vocabulary) log-probabilities of the token after each token of `target`, step by step for one text."""
    decoder, size = model.decoder, model.config.decoder_size
    hidden = (decoder.first_hidden.weight @ sentence + decoder.first_hidden.bias).split(size)
    cells = (decoder.first_cell.weight @ sentence + decoder.first_cell.bias).split(size)
    states, logs = list(zip(hidden, cells, strict=True)), []
    for word in target:
        layer_input = torch.cat([decoder.embeddings.weight[word], sentence, decoder.languages.weight[language]])
        for depth, layer in enumerate(decoder.layers):
            state, cell = states[depth]
            gates = (
                layer.input_weight[0] @ layer_input
                + layer.bias[0]
                + layer.state_weight[0] @ state
                + layer.state_bias[0]
            )
            input_gate, forget_gate, candidate, output_gate = gates.chunk(4)
            cell = forget_gate.sigmoid() * cell + input_gate.sigmoid() * candidate.tanh()
            layer_input = output_gate.sigmoid() * cell.tanh()
            states[depth] = (layer_input, cell)
        logs.append((model.prediction.weight @ layer_input + model.prediction.bias).log_softmax(0))
    return torch.stack(logs)


@pytest.mark.parametrize("unpad", [True, False])
def test_decoder_matches_the_equations(unpad: bool) -> None:
    """Logits, and the loss of padded sequences of several lengths, in several languages."""
    model, batch = build_model(unpad=unpad), make_batch(TRANSLATION)
    batch["target_languages"] = languages = torch.tensor([2, 0, 1, 2])
    labels = make_targets(TRANSLATION, batch)["labels"].masked_fill_(torch.tensor([[0, 0, 0, 0, 0, 1]]).bool(), -100)
    with torch.no_grad():
        sentences = model.laser(**{name: batch[name] for name in ("input_ids", "attention_mask")}).pooler_output
        logits = model(**batch).logits.log_softmax(-1)
        loss = model(**batch, labels=labels).loss
    total = 0.0
    for row, target_ids in enumerate(batch["decoder_input_ids"].tolist()):
        expected = reference_log_probabilities(model, sentences[row], target_ids, int(languages[row]))
        torch.testing.assert_close(logits[row], expected, atol=1e-5, rtol=1e-5)
        target_mask = labels[row] != -100
        total -= float(expected[target_mask].gather(1, labels[row][target_mask][:, None]).sum())
    assert float(loss) == pytest.approx(total / int((labels != -100).sum()), rel=1e-5)
    with torch.no_grad():
        first = model(**batch | {"target_languages": torch.zeros(4, dtype=torch.long)}).logits
        del batch["target_languages"]
        assert torch.equal(model(**batch).logits, first), "the first language is the default"


def test_decoder_depends_only_on_the_sentence_embedding() -> None:
    model, batch = build_model(), make_batch(TRANSLATION, (5, 5))
    with torch.no_grad():
        encoded = model.encode(input_ids=batch["input_ids"])
        expected = model(**batch).logits
        encoded.last_hidden_state = torch.zeros_like(encoded.last_hidden_state)
        decoder_inputs = {name: batch[name] for name in ("decoder_input_ids", "target_languages")}
        logits = model(encoder_outputs=encoded, **decoder_inputs).logits
    assert torch.equal(logits, expected)


@pytest.mark.parametrize("use_cache", [True, False])
def test_greedy_search_in_several_languages(use_cache: bool) -> None:
    model, batch = build_model(), make_batch(TRANSLATION, (7, 3, 5))
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    languages = torch.tensor([2, 0, 1])
    options = {"do_sample": False, "max_new_tokens": 7, "use_cache": use_cache}
    generated = model.generate(**inputs, target_languages=languages, **options)
    with torch.no_grad():
        sentences = model.laser(**inputs).pooler_output
    for row in range(3):
        text = [START]
        while len(text) < 8 and text[-1] != END:
            text.append(int(reference_log_probabilities(model, sentences[row], text, int(languages[row]))[-1].argmax()))
        assert generated[row, : len(text)].tolist() == text
    in_other_languages = model.generate(**inputs, target_languages=torch.tensor([0, 2, 2]), **options)
    assert in_other_languages.tolist() != generated.tolist(), "the language has no effect"


def test_cache_does_not_change_beam_search() -> None:
    model, batch = build_model(), make_batch(TRANSLATION, (7, 3, 5))
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    options = {"num_beams": 4, "do_sample": False, "max_new_tokens": 7, "target_languages": torch.tensor([2, 0, 1])}
    assert torch.equal(model.generate(**inputs, **options), model.generate(**inputs, **options, use_cache=False))


def test_invalid_target_languages() -> None:
    model, batch = build_model(), make_batch(TRANSLATION)
    with pytest.raises(CtxError, match=r"target_languages\[1\] is 3, outside \[0, num_languages=3\)"):
        model(**batch | {"target_languages": torch.tensor([0, 3, 1, 1])})
    with pytest.raises(CtxError, match=r"target_languages is \(2,\), expected \(4,\)"):
        model(**batch | {"target_languages": torch.tensor([0, 1])})
    cove = Case(FAMILIES["cove"], "AutoModelForSeq2SeqLM")
    with pytest.raises(CtxError, match="one target language"):
        cove.model()(**make_batch(cove), target_languages=torch.tensor([0, 0, 0, 0]))


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    for name, index in (("en", 0), ("de", 1)):
        (tmp_path / f"text.{name}").write_text("\n".join(pair[index] for pair in PAIRS) + "\n")
    return [str(tmp_path / "text.en"), str(tmp_path / "text.de")]


def train(files: list[str], **options: object) -> CtxLaserTokenizer:
    documents = load_documents(*files, translations=files[::-1], language_tags=["<de>", "<en>"])
    return CtxLaserTokenizer.train(documents.texts(), vocab_size=120, min_frequency=1, **options)


class TestData:
    def test_examples_and_batches(self, files: list[str]) -> None:
        tokenizer = train(files)
        assert tokenizer.languages == ["<de>", "<en>"]
        objective = TranslationToLanguages(tokenizer, max_length=60, seed=0)
        documents = load_documents(*files, translations=files[::-1], language_tags=["<de>", "<en>"])
        examples = list(objective.examples(documents))
        assert [example["target_language"] for example in examples] == [0, 0, 1, 1]
        for example, (text, translation) in zip(examples, [*PAIRS, *(pair[::-1] for pair in PAIRS)], strict=True):
            assert example["input_ids"].tolist() == tokenizer(text).input_ids
            assert example["labels"].tolist() == tokenizer(translation).input_ids, "the tag is not predicted"
        batch = objective.collate(examples)
        assert batch["target_languages"].tolist() == [0, 0, 1, 1]
        assert objective.config_fields["num_languages"] == 2
        assert objective.config_fields["eos_token_id"] == tokenizer.eos_token_id
        assert set(tokenizer.convert_tokens_to_ids(["<de>", "<en>"])) <= set(objective.baseline.excluded_ids)

    def test_translations_without_a_language_tag_are_an_error(self, files: list[str]) -> None:
        tokenizer = train(files)
        objective = TranslationToLanguages(tokenizer, max_length=60, seed=0)
        with pytest.raises(CtxError, match=r"does not begin with one of <de>, <en>[\s\S]*--language_tags"):
            list(objective.examples(load_documents(files[0], translations=[files[1]])))
        documents = load_documents(files[0], translations=[files[1]])
        untagged = CtxLaserTokenizer.train(documents.texts(), vocab_size=120)
        with pytest.raises(CtxError, match="has no language tags"):
            TranslationToLanguages(untagged, max_length=60, seed=0)
        with pytest.raises(CtxError, match="with 1 language tags"):
            load_documents(*files, translations=files[::-1], language_tags=["<de>"])


def test_generate_texts_in_a_language(files: list[str]) -> None:
    tokenizer = train(files)
    size = {"vocab_size": len(tokenizer), "target_vocab_size": len(tokenizer), "num_languages": 2, "pad_token_id": 1}
    model = build_model(decoder_start_token_id=tokenizer.target_start_id, **size)
    with torch.no_grad():  # otherwise, an untrained model may generate the same text in both languages
        model.decoder.languages.weight.mul_(20)
    texts = [pair[0] for pair in PAIRS]
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    for number, language in enumerate(tokenizer.languages):
        generated = model.generate(
            **batch, target_languages=torch.full((2,), number), do_sample=False, max_new_tokens=9
        )
        translations = generate_texts(model, tokenizer, texts, language=language, max_new_tokens=9)
        assert translations == tokenizer.decode_target(generated.tolist())
    assert generate_texts(model, tokenizer, texts, language="<de>", max_new_tokens=9) != translations
    with pytest.raises(CtxError, match=r"'<fr>'.*\n.*<de>, <en>"):
        generate_texts(model, tokenizer, texts, language="<fr>")


class TestTokenizer:
    def test_save_and_load(self, files: list[str], tmp_path: Path) -> None:
        tokenizer = train(files)
        tokenizer.save_pretrained(tmp_path / "tokenizer")
        loaded = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
        assert type(loaded) is CtxLaserTokenizer
        assert loaded.languages == tokenizer.languages
        assert loaded.target_words == tokenizer.target_words
        for text in (*PAIRS[0], "<de> Eine neue Katze?"):
            assert loaded(text).input_ids == tokenizer(text).input_ids

    def test_decode_in_lower_case(self, files: list[str]) -> None:
        tokenizer = train(files)
        ids = tokenizer("A CAT sat!").input_ids
        assert ids[-1] == tokenizer.eos_token_id
        assert tokenizer.decode_target([[tokenizer.bos_token_id, *ids]]) == ["a cat sat !"]
        cased = train(files, do_lower_case=False)
        assert cased.decode_target([cased("A cat sat!").input_ids]) == ["A cat sat !"]
        assert cased.unk_token_id in cased("Ω").input_ids

    def test_merges_are_learned_from_both_languages(self, files: list[str]) -> None:
        tokenizer = train(files)
        assert tokenizer.tokenize("cat katze") == ["cat</w>", "katze</w>"]

    def test_training_errors(self) -> None:
        with pytest.raises(CtxError, match="No text"):
            CtxLaserTokenizer.train(["", "\t<de> "], vocab_size=30)
        with pytest.raises(CtxError, match="vocab_size=5"):
            CtxLaserTokenizer.train(["a cat\t<de> Katze"], vocab_size=5)
