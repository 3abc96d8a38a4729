"""A special token that a vocabulary lacks: added where the caller of `from_pretrained` gives it, else an error."""

from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from hf_ctxmodels import CtxError
from hf_ctxmodels.registry import FAMILIES

TEXTS = ["the cat saw a small garden", "nobody", "a dog carried seven letters over the bridge"]


@pytest.fixture(params=FAMILIES.values(), ids=list(FAMILIES))
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, PreTrainedTokenizerBase]:
    tokenizer = request.param.tokenizer.train(TEXTS * 5, vocab_size=300)
    tokenizer.save_pretrained(tmp_path / "saved")
    return tmp_path / "saved", tokenizer


def test_a_token_that_is_given_is_added(saved: tuple[Path, PreTrainedTokenizerBase], tmp_path: Path) -> None:
    """Only the unknown token is given by the vocabulary itself."""
    directory, plain = saved
    names = {"pad_token", *(name for name in plain.SPECIAL_TOKENS_ATTRIBUTES if plain.special_tokens_map.get(name))}
    for name in names - {"unk_token"}:
        opened = AutoTokenizer.from_pretrained(directory, **{name: "[FILL]"})
        opened.save_pretrained(tmp_path / name)
        again = AutoTokenizer.from_pretrained(tmp_path / name)
        for tokenizer in (opened, again):
            assert (len(tokenizer), getattr(tokenizer, f"{name}_id")) == (len(plain) + 1, len(plain)), name
            assert tokenizer.decode(tokenizer("the cat").input_ids, skip_special_tokens=True).strip() == "the cat"
        assert opened(TEXTS, padding=True) == again(TEXTS, padding=True)
    with pytest.raises(CtxError, match=r"lacks \[FILL\]"):
        AutoTokenizer.from_pretrained(directory, unk_token="[FILL]")


def test_a_token_of_none_is_left_out(tmp_path: Path) -> None:
    """Of the special tokens around a text."""
    for name, family in FAMILIES.items():
        plain = family.tokenizer.train(TEXTS * 5, vocab_size=300)
        plain.save_pretrained(tmp_path / name)
        for attribute in ("cls_token", "bos_token", "eos_token"):
            token = getattr(plain, attribute)
            opened = AutoTokenizer.from_pretrained(tmp_path / name, **{attribute: None})
            if not plain.templates or f"{{{attribute.removesuffix('_token')}}}" not in plain.templates[0]:
                continue
            assert getattr(opened, attribute) is None
            kept = [each for each in plain("the cat").tokens() if each != token]
            assert opened("the cat").tokens() == kept, (name, attribute)
            assert opened.decode(opened("the cat").input_ids, skip_special_tokens=True).strip() == "the cat"


def test_trained_anew(tmp_path: Path) -> None:
    """`train_new_from_iterator` gives a tokenizer of the family with other words and the same special tokens."""
    for name, family in FAMILIES.items():
        plain = family.tokenizer.train(TEXTS * 5, vocab_size=300)
        other = plain.train_new_from_iterator(["seven old sailors sang"] * 9, 290, show_progress=False)
        other.save_pretrained(tmp_path / name)
        for tokenizer in (other, AutoTokenizer.from_pretrained(tmp_path / name)):
            assert type(tokenizer) is family.tokenizer
            assert tokenizer.special_tokens_map == plain.special_tokens_map, name
            text = tokenizer.decode(tokenizer("seven sailors sang").input_ids, skip_special_tokens=True)
            assert text.strip() == "seven sailors sang", name
            assert tokenizer.get_vocab() != plain.get_vocab(), name
