"""Translation: which words stand in a row, what is predicted, and text that has no translation."""

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from hf_ctxmodels import CtxBertTokenizer, CtxCoveTokenizer, CtxError, CtxLmSeq2SeqTokenizer
from hf_ctxmodels.data import Documents, load_documents
from hf_ctxmodels.objectives import Translation, TranslationWithLanguageModels

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


def test_documents_are_lines_with_their_translations(documents: Documents) -> None:
    assert [tuple(document) for document in documents] == PAIRS, "a line without a translation is left out"
    training, held_out = documents.split(0.5)
    assert sorted(map(tuple, [*training, *held_out])) == sorted(PAIRS)


def test_files_of_different_lengths_are_refused(files: tuple[Path, Path], documents: Documents) -> None:
    files[1].write_text("Eine Katze.\n")
    with pytest.raises(CtxError, match=r"has 1 lines(.|\n)*text\.de"):
        list(documents)
    with pytest.raises(CtxError, match="1 files of translations for 2 datasets"):
        load_documents(str(files[0]), str(files[0]), translations=[str(files[1])])


def test_rows_and_batches(documents: Documents, tokenizer: CtxCoveTokenizer) -> None:
    objective = Translation(tokenizer, max_length=20, seed=0)
    rows = list(objective.examples(documents))
    for row, (text, translation) in zip(rows, PAIRS, strict=True):
        assert tokenizer.decode(row["input_ids"]).split() == tokenizer.tokenize(text)
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


def test_long_pairs_are_left_out_and_counted(documents: Documents, tokenizer: CtxCoveTokenizer) -> None:
    objective = Translation(tokenizer, max_length=7, seed=0)
    assert len(list(objective.examples(documents))) == 1
    assert objective.statistics["left_out"] == 2


def test_what_cannot_be_translated_is_refused(tokenizer: CtxCoveTokenizer) -> None:
    objective = Translation(tokenizer, max_length=20, seed=0)
    with pytest.raises(CtxError, match=r"no translation(.|\n)*--translations"):
        list(objective.examples([["A cat sat.", "A dog sat."]]))
    with pytest.raises(CtxError, match="target vocabulary is empty"):
        Translation(CtxCoveTokenizer.train(["a cat"], 9, min_count=1), max_length=20, seed=0)
    with pytest.raises(CtxError, match="has no target vocabulary"):
        Translation(CtxBertTokenizer.train(["a cat sat"] * 9, 60), max_length=20, seed=0)


class TestWithLanguageModels:
    """Translation's rows, and both languages' next words."""

    @pytest.fixture
    def tokenizer(self) -> CtxLmSeq2SeqTokenizer:
        return CtxLmSeq2SeqTokenizer.train(("\t".join(pair) for pair in PAIRS), 60, min_count=1, min_target_count=1)

    @pytest.mark.parametrize("side", ["right", "left"])
    def test_targets_are_the_next_words(
        self, documents: Documents, tokenizer: CtxLmSeq2SeqTokenizer, side: str
    ) -> None:
        tokenizer.padding_side = side
        objective = TranslationWithLanguageModels(tokenizer, max_length=20, seed=0)
        plain = Translation(tokenizer, max_length=20, seed=0)
        rows = list(objective.examples(documents))
        batch, expected = objective.collate(rows), plain.collate(rows)
        assert all((batch[name] == value).all() for name, value in expected.items())
        assert (batch["target_labels"] == batch["labels"]).all()
        for ids, mask, labels in zip(batch["input_ids"], batch["attention_mask"], batch["source_labels"], strict=True):
            words = ids[mask == 1].tolist()
            assert words[-1] == tokenizer.eos_token_id
            assert labels[mask == 1].tolist() == [*words[1:], -100]
            assert (labels[mask == 0] == -100).all()
        assert objective.auto_class == "AutoModelForPreTraining"
        assert tokenizer.target_end_id not in objective.baseline.excluded_ids, "the first input of a decoder"

    @pytest.mark.parametrize("left_out", ["source", "target"])
    def test_each_can_be_left_out(self, documents: Documents, tokenizer: CtxLmSeq2SeqTokenizer, left_out: str) -> None:
        objective = TranslationWithLanguageModels(tokenizer, max_length=20, seed=0, **{f"{left_out}_lm": False})
        batch = objective.collate(list(objective.examples(documents)))
        for language in ("source", "target"):
            assert (batch[f"{language}_labels"] == -100).all() == (language == left_out)


class TestTokenizer:
    def test_both_languages_after_saving(self, tokenizer: CtxCoveTokenizer, tmp_path: Path) -> None:
        tokenizer.save_pretrained(tmp_path)
        again = AutoTokenizer.from_pretrained(tmp_path)
        assert type(again) is CtxCoveTokenizer
        for text, translation in PAIRS:
            assert again(text).input_ids == tokenizer(text).input_ids
            ids = tokenizer(text_target=translation).input_ids
            assert again(text_target=translation).input_ids == ids
            assert again(text, text_target=translation).labels == ids
            assert again(text).input_ids == tokenizer(text).input_ids, "back to the source language"

    @pytest.mark.parametrize("text", ["Das T-Shirt!", "auf der (Matte), 'sah'.", "...", "a b"])
    def test_targets_are_put_together_again(self, text: str) -> None:
        tokenizer = CtxCoveTokenizer.train([f"x\t{text}"], 30, min_count=1, min_target_count=1)
        assert tokenizer.decode_target(tokenizer(text_target=[text]).input_ids) == [text]

    def test_case_and_unknown_words(self) -> None:
        texts = ["A cat\tEine Katze"]
        lower = CtxCoveTokenizer.train(texts, 30, min_count=1, min_target_count=1, target_lower_case=True)
        assert lower.decode_target(lower(text_target=["EINE Maus"]).input_ids) == ["eine[UNK]"]

    def test_a_vocabulary_without_its_special_tokens_is_refused(self) -> None:
        with pytest.raises(CtxError, match="vocabulary begins with"):
            CtxCoveTokenizer.from_words(["a"], target_words=["Katze"])
