"""Translation: rows, targets, text without a translation, and CoVe's tokenizer."""

from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from hf_ctxmodels import CtxBertTokenizer, CtxCoveTokenizer, CtxCvtTokenizer, CtxError, CtxLmSeq2SeqTokenizer
from hf_ctxmodels.data import Documents, load_documents
from hf_ctxmodels.objectives import Translation, TranslationWithLanguageModels
from hf_ctxmodels.tokenizers.word_level import CtxTranslationTokenizer

PAIRS = [
    ("A cat sat on the mat.", "Eine Katze saß auf der Matte."),
    ("A dog saw a cat!", "Ein Hund sah eine Katze!"),
    ("The dog's T-shirt.", "Das T-Shirt  des Hundes."),
]


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    paths = tmp_path / "text.en", tmp_path / "text.de"
    for path, lines in zip(paths, zip(*PAIRS, strict=True), strict=True):
        path.write_text("\n".join([*lines, "", "Alone." if path.suffix == ".en" else ""]) + "\n")
    return paths


@pytest.fixture
def documents(files: tuple[Path, Path]) -> Documents:
    return load_documents(str(files[0]), translations=[str(files[1])])


@pytest.fixture
def tokenizer(documents: Documents) -> CtxCoveTokenizer:
    return CtxCoveTokenizer.train(documents.texts(), vocab_size=60, min_count=1, min_target_count=1)


def test_documents_are_translated_lines(documents: Documents) -> None:
    assert [tuple(document) for document in documents] == PAIRS, "a line without a translation is skipped"
    training, held_out = documents.split(0.5)
    assert sorted(map(tuple, [*training, *held_out])) == sorted(PAIRS)


def test_files_of_different_lengths_raise(files: tuple[Path, Path], documents: Documents) -> None:
    files[1].write_text("Eine Katze.\n")
    with pytest.raises(CtxError, match=r"has 1 lines(.|\n)*text\.de"):
        list(documents)
    with pytest.raises(CtxError, match="1 files of translations for 2 datasets"):
        load_documents(str(files[0]), str(files[0]), translations=[str(files[1])])


def test_rows_and_batches(documents: Documents, tokenizer: CtxCoveTokenizer) -> None:
    objective = Translation(tokenizer, max_length=20, seed=0)
    rows = list(objective.examples(documents))
    for row, (text, translation) in zip(rows, PAIRS, strict=True):
        assert tokenizer.decode(row["input_ids"], use_source_tokenizer=True).split() == tokenizer.tokenize(text)
        assert row["labels"][-1] == tokenizer.target_end_id
        assert tokenizer.decode_target([row["labels"]]) == [" ".join(translation.split())]
    batch = objective.collate(rows)
    for number, row in enumerate(rows):
        assert batch["input_ids"][number][batch["attention_mask"][number] == 1].tolist() == row["input_ids"].tolist()
        labels = batch["labels"][number]
        assert labels[: len(row["labels"])].tolist() == row["labels"].tolist()
        assert (labels[len(row["labels"]) :] == -100).all()
    counts = objective.count_batch(batch)
    assert counts["targets"] == sum(len(row["labels"]) for row in rows)
    assert objective.rates(counts)["unknown_source_share"] == objective.rates(counts)["unknown_target_share"] == 0
    assert objective.config_fields["target_vocab_size"] == len(tokenizer.target_words)


def test_long_pairs_are_skipped_and_counted(documents: Documents, tokenizer: CtxCoveTokenizer) -> None:
    objective = Translation(tokenizer, max_length=7, seed=0)
    assert len(list(objective.examples(documents))) == 1
    assert objective.statistics["left_out"] == 2


def test_missing_translation_or_vocabulary_raises(tokenizer: CtxCoveTokenizer) -> None:
    objective = Translation(tokenizer, max_length=20, seed=0)
    with pytest.raises(CtxError, match=r"no translation(.|\n)*--translations"):
        list(objective.examples([["A cat sat.", "A dog sat."]]))
    with pytest.raises(CtxError, match="target vocabulary is empty"):
        Translation(CtxCoveTokenizer.train(["a cat"], 9, min_count=1), max_length=20, seed=0)
    with pytest.raises(CtxError, match="has no target vocabulary"):
        Translation(CtxBertTokenizer.train(["a cat sat"] * 9, 60), max_length=20, seed=0)


class TestWithLanguageModels:
    """Translation with language models of both languages."""

    @pytest.fixture
    def tokenizer(self) -> CtxLmSeq2SeqTokenizer:
        return CtxLmSeq2SeqTokenizer.train(("\t".join(pair) for pair in PAIRS), 60, min_count=1, min_target_count=1)

    @pytest.mark.parametrize("side", ["right", "left"])
    def test_targets_are_next_words(self, documents: Documents, tokenizer: CtxLmSeq2SeqTokenizer, side: str) -> None:
        tokenizer.padding_side = side
        objective = TranslationWithLanguageModels(tokenizer, max_length=20, seed=0)
        translation = Translation(tokenizer, max_length=20, seed=0)
        rows = list(objective.examples(documents))
        batch, expected = objective.collate(rows), translation.collate(rows)
        assert all((batch[name] == value).all() for name, value in expected.items())
        assert (batch["target_labels"] == batch["labels"]).all()
        for ids, mask, labels in zip(batch["input_ids"], batch["attention_mask"], batch["source_labels"], strict=True):
            words = ids[mask == 1].tolist()
            assert words[-1] == tokenizer.eos_token_id
            assert labels[mask == 1].tolist() == [*words[1:], -100]
            assert (labels[mask == 0] == -100).all()
        assert objective.auto_class == "AutoModelForPreTraining"
        assert tokenizer.target_end_id not in objective.baseline.excluded_ids, "the first input of the decoder"

    @pytest.mark.parametrize("disabled", ["source", "target"])
    def test_language_models_can_be_disabled(
        self, documents: Documents, tokenizer: CtxLmSeq2SeqTokenizer, disabled: str
    ) -> None:
        objective = TranslationWithLanguageModels(tokenizer, max_length=20, seed=0, **{f"{disabled}_lm": False})
        batch = objective.collate(list(objective.examples(documents)))
        for language in ("source", "target"):
            assert (batch[f"{language}_labels"] == -100).all() == (language == disabled)


class TestTokenizer:
    def test_save_and_load(self, tokenizer: CtxCoveTokenizer, tmp_path: Path) -> None:
        tokenizer.save_pretrained(tmp_path)
        loaded = AutoTokenizer.from_pretrained(tmp_path)
        assert type(loaded) is CtxCoveTokenizer
        for text, translation in PAIRS:
            assert loaded(text).input_ids == tokenizer(text).input_ids
            ids = tokenizer(text_target=translation).input_ids
            assert loaded(text_target=translation).input_ids == ids
            assert loaded(text, text_target=translation).labels == ids
            assert loaded(text).input_ids == tokenizer(text).input_ids, "reset to the source language"

    @pytest.mark.parametrize("text", ["Das T-Shirt!", "auf der (Matte), 'sah'.", "...", "a b"])
    def test_decode_target_restores_text(self, text: str) -> None:
        tokenizer = CtxCoveTokenizer.train([f"x\t{text}"], 30, min_count=1, min_target_count=1)
        assert tokenizer.decode_target(tokenizer(text_target=[text]).input_ids) == [text]

    @pytest.mark.parametrize("tokenizer_class", [CtxCoveTokenizer, CtxLmSeq2SeqTokenizer, CtxCvtTokenizer])
    def test_decode_reads_the_ids_of_the_decoder(self, tokenizer_class: type[CtxTranslationTokenizer]) -> None:
        """As in tokenizers of transformers with separate vocabularies (Marian): the decoder's ids, or source ids with
        `use_source_tokenizer`."""
        tokenizer = tokenizer_class.train(["the cat sat\teine Katze saß."], 30, min_count=1, min_target_count=1)
        encoded = tokenizer(["the cat", "sat"], text_target=["eine Katze", "saß."])
        generated = torch.full((2, 5), tokenizer.target_pad_token_id)
        for row, ids in zip(generated, encoded["labels"], strict=True):
            row[: len(ids) + 1] = torch.tensor([tokenizer.target_start_id, *ids])
        targets = ["eine Katze", "saß."]
        assert tokenizer.batch_decode(generated, skip_special_tokens=True) == targets
        assert tokenizer.decode(generated.numpy(), skip_special_tokens=True) == targets
        assert [tokenizer.decode(row, skip_special_tokens=True) for row in generated.tolist()] == targets
        assert tokenizer.decode(generated[0, -2:]).count("[PAD]") == 1
        assert tokenizer.decode(generated[0, 1]) == "eine"
        source = tokenizer.decode(encoded["input_ids"][0], skip_special_tokens=True, use_source_tokenizer=True)
        assert source == "the cat"
        monolingual = tokenizer_class.train(["the cat sat"], 30, min_count=1)
        assert monolingual.decode(monolingual("the cat").input_ids, skip_special_tokens=True) == "the cat"

    def test_case_and_unknown_words(self) -> None:
        texts = ["A cat\tEine Katze"]
        lower = CtxCoveTokenizer.train(texts, 30, min_count=1, min_target_count=1, target_lower_case=True)
        assert lower.decode_target(lower(text_target=["EINE Maus"]).input_ids) == ["eine[UNK]"]

    def test_vocabulary_without_special_tokens_raises(self) -> None:
        with pytest.raises(CtxError, match="vocabulary begins with"):
            CtxCoveTokenizer.from_words(["a"], target_words=["Katze"])
