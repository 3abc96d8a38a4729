"""XLM's tokenizer: ids (with sacremoses), incomplete vocabularies, languages and training."""

import json
from collections import Counter
from pathlib import Path

import pytest
from tokenizer_texts import EDGE_CASE_TEXTS, TEXTS, write_bpe_files
from transformers import AutoTokenizer, XLMTokenizer

from hf_ctxmodels import CtxError, CtxXLMTokenizer
from hf_ctxmodels.models.xlm.word_splitting import without_accents
from hf_ctxmodels.tokenizers.moses import load_moses

LINES = [
    "C'est l'été; «voilà» — n’est-ce pas ?",
    "Dr. Müller's Straße, z.B. 3.14 % von 2.000!",
    "Ştefan şi ţară, în România.",
    "A. Smith vs. B. Jones, e.g. at 5 p.m. in the U.S.A.",
]


@pytest.fixture(scope="module")
def tagged() -> CtxXLMTokenizer:
    texts = [f"<de> {text}\n<fr> {LINES[0]}" for text in [*TEXTS, *EDGE_CASE_TEXTS, *LINES]]
    return CtxXLMTokenizer.train(texts, 500, min_frequency=1)


@pytest.fixture(scope="module")
def files(tagged: CtxXLMTokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """vocab.json and merges.txt; as in released files, the vocabulary lacks results of some merges."""
    folder = tmp_path_factory.mktemp("released")
    model = json.loads(tagged.backend_tokenizer.to_str())["model"]
    merged = ["".join(pair) for pair in model["merges"]]
    tokens = [token for token in model["vocab"] if token not in merged[::3]]
    write_bpe_files(folder, {"vocab": tokens, "merges": model["merges"]})
    return folder


@pytest.mark.parametrize("language", ["en", "de", "fr", "ro"])
@pytest.mark.parametrize("do_lower_case", [True, False])
def test_ids_equal_transformers(files: Path, language: str, do_lower_case: bool) -> None:
    pytest.importorskip("sacremoses", reason="transformers' tokenizer needs sacremoses (extra `moses`)")
    reference = XLMTokenizer.from_pretrained(files, do_lowercase_and_remove_accent=do_lower_case)
    names = {"de": 0, "en": 1, "fr": 2, "ro": 3}
    tokenizer = CtxXLMTokenizer.from_pretrained(files, do_lowercase_and_remove_accent=do_lower_case, lang2id=names)
    assert tokenizer.get_vocab() == reference.get_vocab()
    assert len(tokenizer) == tokenizer.vocab_size == len(reference)
    for text in [*TEXTS[:10], *EDGE_CASE_TEXTS, *LINES]:
        expected = reference.convert_tokens_to_ids(reference._tokenize(text, lang=language))
        encoded = tokenizer(text, language=language)
        assert encoded.input_ids == [tokenizer.cls_token_id, *expected, tokenizer.sep_token_id], text
        assert encoded.langs == [names[language]] * len(encoded.input_ids)


def test_save_and_load(files: Path, tmp_path: Path) -> None:
    tokenizer = CtxXLMTokenizer.from_pretrained(files, word_splitting="whitespace")
    ids = tokenizer("boat <special1> Bridge").input_ids
    assert tokenizer.mask_token_id in ids
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert type(loaded) is CtxXLMTokenizer
    assert (len(loaded), loaded.get_vocab()) == (len(tokenizer), tokenizer.get_vocab())
    assert loaded(LINES).input_ids == tokenizer(LINES).input_ids
    num_unknown = [row.count(tokenizer.unk_token_id) for row in tokenizer(TEXTS[:20]).input_ids]
    assert sum(num_unknown) > 0, "tokens outside the vocabulary are unknown"
    assert max(map(max, loaded(TEXTS).input_ids)) < len(tokenizer)
    with pytest.raises(CtxError, match="cannot be added"):
        loaded.add_tokens(["new"])


def test_languages(tagged: CtxXLMTokenizer, tmp_path: Path) -> None:
    assert tagged.convert_ids_to_tokens([0, 1, 2, 3, 5]) == ["<s>", "</s>", "<pad>", "<unk>", "<special1>"]
    assert tagged.lang2id == {"de": 0, "fr": 1}
    assert "langs" not in tagged("boat")
    tagged.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path, language="fr")
    assert (loaded.languages, loaded.token_counts) == (["de", "fr"], tagged.token_counts)
    padded = loaded(["boat", "a small boat"], padding=True, return_tensors="pt")
    assert padded["langs"].tolist() == [[1] * padded["input_ids"].shape[1]] * 2
    arrays = loaded(["boat", "a small boat"], padding=True, return_tensors="np")
    assert arrays["langs"].tolist() == padded["langs"].tolist()
    padded_later = loaded.pad([loaded("boat"), loaded("a small boat")], return_tensors="pt")
    assert padded_later["langs"].tolist() == padded["langs"].tolist()
    assert loaded("boat", language="de").langs[0] == 0
    with pytest.raises(CtxError, match="no language 'de'"):
        CtxXLMTokenizer.train(["A boat."], 60)("boat", language="de")
    with pytest.raises(CtxError, match=r"no language 'it'.*\n.*de, fr"):
        loaded.language = "it"


def test_pairs_and_accents(tagged: CtxXLMTokenizer) -> None:
    end, first, second = tagged.eos_token_id, *(tagged(text, add_special_tokens=False).input_ids for text in ("a", "b"))
    assert tagged("a", "b").input_ids == [end, *first, end, end, *second, end]
    assert tagged("Café").input_ids == tagged("cafe").input_ids
    assert without_accents("ÉTÉ Ångström") == "ete angstrom"


def test_token_counts(tagged: CtxXLMTokenizer) -> None:
    rows = tagged(
        [line for text in [*TEXTS, *EDGE_CASE_TEXTS, *LINES] for line in (text, LINES[0])], add_special_tokens=False
    )
    counts = Counter(token for row in rows.input_ids for token in row)
    assert tagged.token_counts == [counts[token] for token in range(len(tagged))]


@pytest.mark.parametrize("do_lower_case", [True, False])
def test_separate_vocabularies(tmp_path: Path, do_lower_case: bool) -> None:
    """Each language is tokenized as by a monolingual tokenizer; the languages share no ids."""
    texts = {"de": ["Der Hund, das Haus – im Café!", *LINES], "fr": ["Le chien, la maison au Café", *TEXTS[:20]]}
    lines = [f"<{language}> {text}" for language, language_texts in texts.items() for text in language_texts]
    options = {"min_frequency": 1, "do_lower_case": do_lower_case}
    tokenizer = CtxXLMTokenizer.train(lines, 600, separate_vocabularies=True, **options)
    assert tokenizer.lang2id == {"de": 0, "fr": 1}
    special_ids = set(tokenizer.all_special_ids)
    ids = {}
    for language, language_texts in texts.items():
        monolingual = CtxXLMTokenizer.train(language_texts, (600 - 14) // 2 + 14, **options)
        rows, references = tokenizer(language_texts, language=language), monolingual(language_texts)
        ids[language] = {token for row in rows.input_ids for token in row} - special_ids
        assert rows.langs[0][0] == tokenizer.language_id(language)
        for row, reference in zip(rows.input_ids, references.input_ids, strict=True):
            tokens = [tokenizer.decode([token]) for token in row]
            assert tokens == [monolingual.decode([token]) for token in reference]
        assert tokenizer.unk_token_id not in ids[language]
        assert tokenizer.decode(rows.input_ids[0], skip_special_tokens=True) == monolingual.decode(
            references.input_ids[0], skip_special_tokens=True
        )
        assert sum(tokenizer.token_counts[token] for token in ids[language]) == sum(
            token not in special_ids for row in rows.input_ids for token in row
        )
    assert not ids["de"] & ids["fr"], "the vocabularies are disjoint"
    joint = CtxXLMTokenizer.train(lines, 600, **options)
    assert (
        joint("Café", add_special_tokens=False).input_ids
        == joint("Café", language="fr", add_special_tokens=False).input_ids
    )
    assert set(tokenizer("Привет 😀", language="de").input_ids[1:-1]) == {tokenizer.unk_token_id}
    assert tokenizer("Haus <special1>", language="de").input_ids[-2] == tokenizer.mask_token_id

    with pytest.raises(CtxError, match=r"the language of the text is not set(.|\n)*de, fr"):
        tokenizer("Haus")
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path, language="de")
    assert loaded(LINES).input_ids == tokenizer(LINES, language="de").input_ids
    assert loaded.tokens_depend_on_language
    with pytest.raises(CtxError, match="A line has no language"):
        CtxXLMTokenizer.train(["<de> Haus", "maison"], 600, separate_vocabularies=True, **options)


def test_missing_sacremoses(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "sacremoses", None)
    load_moses.cache_clear()
    with pytest.raises(CtxError, match=r"hf_ctxmodels\[moses\]"):
        CtxXLMTokenizer.from_pretrained(files)("a boat")
    with pytest.raises(CtxError, match="without spaces"):
        CtxXLMTokenizer.from_pretrained(files, lang2id={"zh": 0})("a", language="zh")
    with pytest.raises(CtxError, match="word_splitting='words'"):
        CtxXLMTokenizer.from_pretrained(files, word_splitting="words")
