"""LASER's own: the decoder by its equations, what it is told, what generate writes, languages in data and tokenizer."""

from pathlib import Path

import pytest
import torch
from bpe_texts import trained_in_both_orders
from torch import Tensor
from transformers import AutoTokenizer
from zoo import Case, make_batch, make_targets

from hf_ctxmodels import CtxError, CtxLaserForConditionalGeneration, CtxLaserTokenizer
from hf_ctxmodels.data import load_documents
from hf_ctxmodels.inference import generate_texts
from hf_ctxmodels.objectives import TranslationToLanguages
from hf_ctxmodels.registry import FAMILIES

TRANSLATOR = Case(FAMILIES["laser"], "AutoModelForSeq2SeqLM")
BEGIN, END = 0, 2
PAIRS = [("A cat sat.", "Eine Katze saß."), ("A dog saw a cat!", "Ein Hund sah eine Katze!")]


def small(**changes: object) -> CtxLaserForConditionalGeneration:
    return TRANSLATOR.model(3, **{"initializer_range": 0.5, "num_decoder_layers": 2, **changes})


@torch.no_grad()
def by_the_equations(model: CtxLaserForConditionalGeneration, sentence: Tensor, target: list[int], language: int):
    """(steps, vocabulary) log-probabilities of the tokens behind each of `target`, one text, one step at a time."""
    decoder, size = model.decoder, model.config.decoder_size
    hidden = (decoder.first_hidden.weight @ sentence + decoder.first_hidden.bias).split(size)
    cells = (decoder.first_cell.weight @ sentence + decoder.first_cell.bias).split(size)
    remembered, logs = list(zip(hidden, cells, strict=True)), []
    for word in target:
        below = torch.cat([decoder.embeddings.weight[word], sentence, decoder.languages.weight[language]])
        for depth, layer in enumerate(decoder.layers):
            state, cell = remembered[depth]
            gates = layer.input_weight[0] @ below + layer.bias[0] + layer.state_weight[0] @ state + layer.state_bias[0]
            into, forget, new, out = gates.chunk(4)
            cell = forget.sigmoid() * cell + into.sigmoid() * new.tanh()
            below = out.sigmoid() * cell.tanh()
            remembered[depth] = (below, cell)
        logs.append((model.prediction.weight @ below + model.prediction.bias).log_softmax(0))
    return torch.stack(logs)


@pytest.mark.parametrize("unpad", [True, False])
def test_decoder_is_the_papers(unpad: bool) -> None:
    """The loss of padded rows of several lengths, too, each in another language."""
    model, batch = small(unpad=unpad), make_batch(TRANSLATOR)
    batch["target_languages"] = languages = torch.tensor([2, 0, 1, 2])
    labels = make_targets(TRANSLATOR, batch)["labels"].masked_fill_(torch.tensor([[0, 0, 0, 0, 0, 1]]).bool(), -100)
    with torch.no_grad():
        sentences = model.laser(**{name: batch[name] for name in ("input_ids", "attention_mask")}).pooler_output
        logits = model(**batch).logits.log_softmax(-1)
        loss = model(**batch, labels=labels).loss
    total = 0.0
    for row, read in enumerate(batch["decoder_input_ids"].tolist()):
        expected = by_the_equations(model, sentences[row], read, int(languages[row]))
        torch.testing.assert_close(logits[row], expected, atol=1e-5, rtol=1e-5)
        target_mask = labels[row] != -100
        total -= float(expected[target_mask].gather(1, labels[row][target_mask][:, None]).sum())
    assert float(loss) == pytest.approx(total / int((labels != -100).sum()), rel=1e-5)
    with torch.no_grad():
        first = model(**batch | {"target_languages": torch.zeros(4, dtype=torch.long)}).logits
        del batch["target_languages"]
        assert torch.equal(model(**batch).logits, first), "the first language unless another is asked for"


def test_of_a_text_the_decoder_knows_the_vector_alone() -> None:
    model, batch = small(), make_batch(TRANSLATOR, (5, 5))
    with torch.no_grad():
        encoded = model.encode(input_ids=batch["input_ids"])
        expected = model(**batch).logits
        encoded.last_hidden_state = torch.zeros_like(encoded.last_hidden_state)
        written = {name: batch[name] for name in ("decoder_input_ids", "target_languages")}
        got = model(encoder_outputs=encoded, **written).logits
    assert torch.equal(got, expected)


@pytest.mark.parametrize("cached", [True, False])
def test_greedy_search_in_every_language(cached: bool) -> None:
    model, batch = small(), make_batch(TRANSLATOR, (7, 3, 5))
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    languages = torch.tensor([2, 0, 1])
    options = {"do_sample": False, "max_new_tokens": 7, "use_cache": cached}
    written = model.generate(**inputs, target_languages=languages, **options)
    with torch.no_grad():
        sentences = model.laser(**inputs).pooler_output
    for row in range(3):
        text = [BEGIN]
        while len(text) < 8 and text[-1] != END:
            text.append(int(by_the_equations(model, sentences[row], text, int(languages[row]))[-1].argmax()))
        assert written[row, : len(text)].tolist() == text
    other = model.generate(**inputs, target_languages=torch.tensor([0, 2, 2]), **options)
    assert other.tolist() != written.tolist(), "a language changes nothing"


def test_beams_are_the_same_with_and_without_a_cache() -> None:
    model, batch = small(), make_batch(TRANSLATOR, (7, 3, 5))
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    options = {"num_beams": 4, "do_sample": False, "max_new_tokens": 7, "target_languages": torch.tensor([2, 0, 1])}
    assert torch.equal(model.generate(**inputs, **options), model.generate(**inputs, **options, use_cache=False))


def test_bad_languages() -> None:
    model, batch = small(), make_batch(TRANSLATOR)
    with pytest.raises(CtxError, match=r"target_languages\[1\] is 3, outside \[0, num_languages=3\)"):
        model(**batch | {"target_languages": torch.tensor([0, 3, 1, 1])})
    with pytest.raises(CtxError, match=r"target_languages is \(2,\), expected \(4,\)"):
        model(**batch | {"target_languages": torch.tensor([0, 1])})
    cove = Case(FAMILIES["cove"], "AutoModelForSeq2SeqLM")
    with pytest.raises(CtxError, match="one target language"):
        cove.model()(**make_batch(cove), target_languages=torch.tensor([0, 0, 0, 0]))


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    for name, place in (("en", 0), ("de", 1)):
        (tmp_path / f"text.{name}").write_text("\n".join(pair[place] for pair in PAIRS) + "\n")
    return [str(tmp_path / "text.en"), str(tmp_path / "text.de")]


def train(files: list[str], **options: object) -> CtxLaserTokenizer:
    documents = load_documents(*files, translations=files[::-1], language_tags=["<de>", "<en>"])
    return CtxLaserTokenizer.train(documents.texts(), vocab_size=120, min_frequency=1, **options)


class TestData:
    def test_rows_and_batches(self, files: list[str]) -> None:
        tokenizer = train(files)
        assert tokenizer.languages == ["<de>", "<en>"]
        objective = TranslationToLanguages(tokenizer, max_length=60, seed=0)
        documents = load_documents(*files, translations=files[::-1], language_tags=["<de>", "<en>"])
        rows = list(objective.examples(documents))
        assert [row["target_language"] for row in rows] == [0, 0, 1, 1]
        for row, (text, translation) in zip(rows, [*PAIRS, *(pair[::-1] for pair in PAIRS)], strict=True):
            assert row["input_ids"].tolist() == tokenizer(text).input_ids
            assert row["labels"].tolist() == tokenizer(translation).input_ids, "the mark is not predicted"
        batch = objective.collate(rows)
        assert batch["target_languages"].tolist() == [0, 0, 1, 1]
        assert objective.config_fields["num_languages"] == 2
        assert objective.config_fields["eos_token_id"] == tokenizer.eos_token_id
        assert set(tokenizer.convert_tokens_to_ids(["<de>", "<en>"])) <= set(objective.baseline.excluded_ids)

    def test_translations_without_a_mark_are_refused(self, files: list[str]) -> None:
        tokenizer = train(files)
        objective = TranslationToLanguages(tokenizer, max_length=60, seed=0)
        with pytest.raises(CtxError, match=r"does not begin with one of <de>, <en>[\s\S]*--language_tags"):
            list(objective.examples(load_documents(files[0], translations=[files[1]])))
        documents = load_documents(files[0], translations=[files[1]])
        plain = CtxLaserTokenizer.train(documents.texts(), vocab_size=120)
        with pytest.raises(CtxError, match="has no language tags"):
            TranslationToLanguages(plain, max_length=60, seed=0)
        with pytest.raises(CtxError, match="with 1 language tags"):
            load_documents(*files, translations=files[::-1], language_tags=["<de>"])


def test_translates_into_the_language_that_is_named(files: list[str]) -> None:
    tokenizer = train(files)
    size = {"vocab_size": len(tokenizer), "target_vocab_size": len(tokenizer), "num_languages": 2, "pad_token_id": 1}
    model = small(decoder_start_token_id=tokenizer.target_start_id, **size)
    with torch.no_grad():  # far apart: what an untrained model writes may else be alike in both
        model.decoder.languages.weight.mul_(20)
    texts = [pair[0] for pair in PAIRS]
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    for number, language in enumerate(tokenizer.languages):
        written = model.generate(**batch, target_languages=torch.full((2,), number), do_sample=False, max_new_tokens=9)
        found = generate_texts(model, tokenizer, texts, language=language, max_new_tokens=9)
        assert found == tokenizer.decode_target(written.tolist())
    assert generate_texts(model, tokenizer, texts, language="<de>", max_new_tokens=9) != found
    with pytest.raises(CtxError, match=r"'<fr>'.*\n.*<de>, <en>"):
        generate_texts(model, tokenizer, texts, language="<fr>")


class TestTokenizer:
    def test_after_saving(self, files: list[str], tmp_path: Path) -> None:
        tokenizer = train(files)
        tokenizer.save_pretrained(tmp_path / "tokenizer")
        again = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
        assert type(again) is CtxLaserTokenizer
        assert again.languages == tokenizer.languages
        assert again.target_words == tokenizer.target_words
        for text in (*PAIRS[0], "<de> Eine neue Katze?"):
            assert again(text).input_ids == tokenizer(text).input_ids

    def test_texts_come_back_in_lower_case(self, files: list[str]) -> None:
        tokenizer = train(files)
        ids = tokenizer("A CAT sat!").input_ids
        assert ids[-1] == tokenizer.eos_token_id
        assert tokenizer.decode_target([[tokenizer.bos_token_id, *ids]]) == ["a cat sat !"]
        cased = train(files, do_lower_case=False)
        assert cased.decode_target([cased("A cat sat!").input_ids]) == ["A cat sat !"]
        assert cased.unk_token_id in cased("Ω").input_ids

    def test_subwords_are_of_both_languages(self, files: list[str]) -> None:
        """What is frequent in either is one token."""
        tokenizer = train(files)
        assert tokenizer.tokenize("cat katze") == ["cat</w>", "katze</w>"]

    def test_training_gives_the_same_vocabulary_in_every_process_and_order(self, tmp_path: Path) -> None:
        trained, vocabulary = trained_in_both_orders(CtxLaserTokenizer, 120, tmp_path)
        assert vocabulary == trained.get_vocab()
        assert len(trained) == 120

    def test_without_text_or_room(self) -> None:
        with pytest.raises(CtxError, match="No text"):
            CtxLaserTokenizer.train(["", "\t<de> "], vocab_size=30)
        with pytest.raises(CtxError, match="vocab_size=5"):
            CtxLaserTokenizer.train(["a cat\t<de> Katze"], vocab_size=5)
