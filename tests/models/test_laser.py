"""LASER: languages in the model, the data and the tokenizer."""

from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer
from zoo import Case, make_batch

from hf_ctxmodels import CtxError, CtxLaserForConditionalGeneration, CtxLaserTokenizer
from hf_ctxmodels.data import load_documents
from hf_ctxmodels.inference import generate_texts
from hf_ctxmodels.objectives import TranslationToLanguages
from hf_ctxmodels.registry import FAMILIES

TRANSLATION = Case(FAMILIES["laser"], "AutoModelForSeq2SeqLM")
PAIRS = [("A cat sat.", "Eine Katze saß."), ("A dog saw a cat!", "Ein Hund sah eine Katze!")]


def build_model(**overrides: object) -> CtxLaserForConditionalGeneration:
    return TRANSLATION.model(3, **{"initializer_range": 0.5, "num_decoder_layers": 2, **overrides})


@torch.no_grad()
def test_first_language_is_default() -> None:
    model, batch = build_model(), make_batch(TRANSLATION)
    expected = model(**batch | {"target_languages": torch.zeros(4, dtype=torch.long)}).logits
    del batch["target_languages"]
    assert torch.equal(model(**batch).logits, expected)


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


def train_tokenizer(files: list[str], **options: object) -> CtxLaserTokenizer:
    documents = load_documents(*files, translations=files[::-1], language_tags=["<de>", "<en>"])
    return CtxLaserTokenizer.train(documents.texts(), vocab_size=120, min_frequency=1, **options)


class TestData:
    def test_examples_and_collation(self, files: list[str]) -> None:
        tokenizer = train_tokenizer(files)
        assert tokenizer.languages == ["<de>", "<en>"]
        assert tokenizer.tokenize("cat katze") == ["cat</w>", "katze</w>"], "merges of both languages"
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

    def test_missing_language_tags_raise(self, files: list[str]) -> None:
        tokenizer = train_tokenizer(files)
        objective = TranslationToLanguages(tokenizer, max_length=60, seed=0)
        with pytest.raises(CtxError, match=r"does not begin with one of <de>, <en>[\s\S]*--language_tags"):
            list(objective.examples(load_documents(files[0], translations=[files[1]])))
        documents = load_documents(files[0], translations=[files[1]])
        untagged_tokenizer = CtxLaserTokenizer.train(documents.texts(), vocab_size=120)
        with pytest.raises(CtxError, match="has no language tags"):
            TranslationToLanguages(untagged_tokenizer, max_length=60, seed=0)
        with pytest.raises(CtxError, match="with 1 language tags"):
            load_documents(*files, translations=files[::-1], language_tags=["<de>"])


def test_generate_texts_in_target_language(files: list[str]) -> None:
    tokenizer = train_tokenizer(files)
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
        tokenizer = train_tokenizer(files)
        tokenizer.save_pretrained(tmp_path / "tokenizer")
        loaded = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
        assert (loaded.languages, loaded.target_words) == (tokenizer.languages, tokenizer.target_words)
        assert loaded("<de> Eine neue Katze?").input_ids == tokenizer("<de> Eine neue Katze?").input_ids

    def test_decoding_in_lower_case(self, files: list[str]) -> None:
        tokenizer = train_tokenizer(files)
        ids = tokenizer("A CAT sat!").input_ids
        assert ids[-1] == tokenizer.eos_token_id
        assert tokenizer.decode_target([[tokenizer.bos_token_id, *ids]]) == ["a cat sat !"]
        cased_tokenizer = train_tokenizer(files, do_lower_case=False)
        assert cased_tokenizer.decode_target([cased_tokenizer("A cat sat!").input_ids]) == ["A cat sat !"]
        assert cased_tokenizer.unk_token_id in cased_tokenizer("Ω").input_ids

    def test_tokenizer_training_errors(self) -> None:
        for texts, size, message in ((["", "\t<de> "], 30, "No text"), (["a cat\t<de> Katze"], 5, "vocab_size=5")):
            with pytest.raises(CtxError, match=message):
                CtxLaserTokenizer.train(texts, vocab_size=size)
