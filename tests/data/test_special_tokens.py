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


def test_the_vocabulary_itself_gives_the_unknown_token(saved: tuple[Path, PreTrainedTokenizerBase]) -> None:
    with pytest.raises(CtxError, match=r"lacks \[FILL\]"):
        AutoTokenizer.from_pretrained(saved[0], unk_token="[FILL]")
