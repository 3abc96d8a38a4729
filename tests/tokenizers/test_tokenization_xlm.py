"""XLM's tokenizer: upstream's ids (with sacremoses), vocabularies that lack what merges make, languages, training."""

import json
from pathlib import Path

import pytest
from bpe_texts import TEXTS, TRICKY, trained_in_both_orders
from transformers import AutoTokenizer, XLMTokenizer

from hf_ctxmodels import CtxError, CtxXLMTokenizer
from hf_ctxmodels.models.xlm.moses import without_accents

LINES = [
    "C'est l'été; «voilà» — n’est-ce pas ?",
    "Dr. Müller's Straße, z.B. 3.14 % von 2.000!",
    "Ştefan şi ţară, în România.",
    "A. Smith vs. B. Jones, e.g. at 5 p.m. in the U.S.A.",
]


@pytest.fixture(scope="module")
def tagged() -> CtxXLMTokenizer:
    texts = [f"<de> {text}\n<fr> {LINES[0]}" for text in [*TEXTS, *TRICKY, *LINES]]
    return CtxXLMTokenizer.train(texts, 500, min_frequency=1)


@pytest.fixture(scope="module")
def files(tagged: CtxXLMTokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """vocab.json and merges.txt; as in released ones, some that merges make are not in the vocabulary."""
    folder = tmp_path_factory.mktemp("released")
    model = json.loads(tagged.backend_tokenizer.to_str())["model"]
    made = ["".join(pair) for pair in model["merges"]]
    kept = [token for token in model["vocab"] if token not in made[::3]]
    (folder / "vocab.json").write_text(json.dumps({token: number for number, token in enumerate(kept)}))
    (folder / "merges.txt").write_text("\n".join(map(" ".join, model["merges"])) + "\n", encoding="utf-8")
    return folder


@pytest.mark.parametrize("language", ["en", "de", "fr", "ro"])
@pytest.mark.parametrize("do_lower_case", [True, False])
def test_ids_are_upstreams(files: Path, language: str, do_lower_case: bool) -> None:
    pytest.importorskip("sacremoses", reason="upstream's tokenizer needs sacremoses (extra `moses`)")
    theirs = XLMTokenizer.from_pretrained(files, do_lowercase_and_remove_accent=do_lower_case)
    names = {"de": 0, "en": 1, "fr": 2, "ro": 3}
    ours = CtxXLMTokenizer.from_pretrained(files, do_lowercase_and_remove_accent=do_lower_case, lang2id=names)
    assert ours.get_vocab() == theirs.get_vocab()
    assert len(ours) == ours.vocab_size == len(theirs)
    for text in [*TEXTS[:10], *TRICKY, *LINES]:
        expected = theirs.convert_tokens_to_ids(theirs._tokenize(text, lang=language))
        encoded = ours(text, language=language)
        assert encoded.input_ids == [ours.cls_token_id, *expected, ours.sep_token_id], text
        assert encoded.langs == [names[language]] * len(encoded.input_ids)


def test_special_tokens_stay_whole_and_round_trip(files: Path, tmp_path: Path) -> None:
    ours = CtxXLMTokenizer.from_pretrained(files, word_splitting="whitespace")
    ids = ours("boat <special1> Bridge").input_ids
    assert ours.mask_token_id in ids
    ours.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert type(again) is CtxXLMTokenizer
    assert (len(again), again.get_vocab()) == (len(ours), ours.get_vocab())
    assert again(LINES).input_ids == ours(LINES).input_ids
    unlisted = [row.count(ours.unk_token_id) for row in ours(TEXTS[:20]).input_ids]
    assert sum(unlisted) > 0, "a subword outside the vocabulary is unknown"
    assert max(map(max, again(TEXTS).input_ids)) < len(ours)
    with pytest.raises(CtxError, match="cannot be added"):
        again.add_tokens(["new"])


def test_languages(tagged: CtxXLMTokenizer, tmp_path: Path) -> None:
    assert tagged.lang2id == {"de": 0, "fr": 1}
    assert "langs" not in tagged("boat")
    tagged.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path, language="fr")
    assert (again.languages, again.token_counts) == (["de", "fr"], tagged.token_counts)
    padded = again(["boat", "a small boat"], padding=True, return_tensors="pt")
    assert padded["langs"].tolist() == [[1] * padded["input_ids"].shape[1]] * 2
    later = again.pad([again("boat"), again("a small boat")], return_tensors="pt")
    assert later["langs"].tolist() == padded["langs"].tolist()
    assert again("boat", language="de").langs[0] == 0
    with pytest.raises(CtxError, match=r"no language 'it'.*\n.*de, fr"):
        again.language = "it"


def test_pairs_and_accents(tagged: CtxXLMTokenizer) -> None:
    end, one, other = tagged.eos_token_id, *(tagged(text, add_special_tokens=False).input_ids for text in ("a", "b"))
    assert tagged("a", "b").input_ids == [end, *one, end, end, *other, end]
    assert tagged("Café").input_ids == tagged("cafe").input_ids
    assert without_accents("ÉTÉ Ångström") == "ete angstrom"


def test_counts_are_of_the_training_text(tagged: CtxXLMTokenizer) -> None:
    rows = tagged([line for text in [*TEXTS, *TRICKY, *LINES] for line in (text, LINES[0])], add_special_tokens=False)
    counts = [0] * len(tagged)
    for row in rows.input_ids:
        for token in row:
            counts[token] += 1
    assert counts == tagged.token_counts


def test_training_gives_the_same_vocabulary_in_every_process_and_order(tmp_path: Path) -> None:
    trained, vocabulary = trained_in_both_orders(CtxXLMTokenizer, 300, tmp_path)
    assert vocabulary == trained.get_vocab()
    assert trained.convert_ids_to_tokens([0, 1, 2, 3, 5]) == ["<s>", "</s>", "<pad>", "<unk>", "<special1>"]


def test_missing_package_is_named(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "sacremoses", None)
    from hf_ctxmodels.models.xlm import moses

    moses._moses.cache_clear()
    with pytest.raises(CtxError, match=r"hf_ctxmodels\[moses\]"):
        CtxXLMTokenizer.from_pretrained(files)("a boat")
    with pytest.raises(CtxError, match="without spaces"):
        CtxXLMTokenizer.from_pretrained(files, lang2id={"zh": 0})("a", language="zh")
    with pytest.raises(CtxError, match="word_splitting='words'"):
        CtxXLMTokenizer.from_pretrained(files, word_splitting="words")
