"""Tokenizer of ULMFiT: lower-cased words, with tokens for capitals and repetitions (as in the fastai library)."""

import re
from collections.abc import Iterable
from typing import Any, ClassVar, Self

from tokenizers import Regex, Tokenizer, normalizers

from hf_ctxmodels.tokenizers.english_words import english_splitter
from hf_ctxmodels.tokenizers.word_level import CtxWordTokenizer

SPECIAL_TOKENS = ("xxunk", "xxpad", "xxbos", "xxeos", "xxfld", "xxrep", "xxwrep", "xxup", "xxmaj")
UNK, PAD, BOS, EOS, FIELD, REPEATED_CHARACTER, REPEATED_WORD, ALL_CAPITALS, CAPITALIZED = SPECIAL_TOKENS

_MAX_REPETITIONS = 20  # longer repetitions are truncated
_MARKUP = {  # HTML entities, which fastai also replaces without `&`, and separators of WikiText
    "<br />": "\n",
    "<br/>": "\n",
    "<br>": "\n",
    "\\n": "\n",
    "&amp;": "&",
    "amp;": "&",
    "&quot;": '"',
    "quot;": "'",
    '\\"': '"',
    "&#39;": "'",
    "#39;": "'",
    "#146;": "'",
    "#36;": "$",
    "&lt;": "<",
    "&gt;": ">",
    "&nbsp;": " ",
    "nbsp;": " ",
    "<unk>": UNK,
    " @.@ ": ".",
    " @-@ ": "-",
    "...": " …",
}


def _replace(pattern: str, content: str) -> normalizers.Normalizer:
    return normalizers.Replace(Regex(pattern), content)


def _repetitions() -> list[normalizers.Normalizer]:
    """Replace repetitions: `good!!!!` -> `good xxrep 4 !`, and `no no no` -> `xxwrep 3 no`.

    The token replaces the first character of a repetition, and the number replaces the others except the last, since
    the backend cannot insert between two characters.
    """
    steps = [_replace(r"(?:\A|([\s\S])(?!\1))\K(\S)(?=\2\2)", f" {REPEATED_CHARACTER} ")]
    words = r"(?:\A\s*|[^\w\s]\s*|(?<!\w)(\w+)\s+(?!\1(?!\w)))\K(\w+)\s+(?=\2\s+\2(?!\w))"
    quantifiers = {_MAX_REPETITIONS: f"{{{_MAX_REPETITIONS - 3},}}"}  # number -> quantifier of the replaced characters
    quantifiers |= {number: f"{{{number - 3}}}" for number in range(3, _MAX_REPETITIONS)}
    steps += [
        _replace(rf"{REPEATED_CHARACTER} \K(\S)\1{quantifier}(?=\1(?!\1))", f"{number} ")
        for number, quantifier in quantifiers.items()
    ]
    steps.append(_replace(words, f" {REPEATED_WORD} "))
    steps += [
        _replace(rf"{REPEATED_WORD} \K(\w+)\s+(?:\1\s+){quantifier}(?=\1(?!\w)(?!\s+\1(?!\w)))", f"{number} ")
        for number, quantifier in quantifiers.items()
    ]
    return steps


class CtxUlmfitTokenizer(CtxWordTokenizer):
    """Splits text into lower-cased words with fastai's special tokens.

    A token before a word marks a capital (`xxmaj`), all capitals (`xxup`), a repeated character (`xxrep 4 !`) or a
    repeated word (`xxwrep 3 very`); without `do_lower_case`, only repetitions are marked. Each text begins with
    `xxbos`; `xxeos` is not added. Offsets refer to the original text, for a repeated word to its last
    occurrence. See `CtxWordTokenizer` for arguments, training and errors.

    Example:
        >>> tokenizer = CtxUlmfitTokenizer.train(["A good film. GOOD!!!!"] * 3, vocab_size=20)
        >>> tokenizer.tokenize("Good, very GOOD!!!!")
        ['xxmaj', 'good', 'xxunk', 'xxunk', 'xxup', 'good', 'xxrep', '4', '!']
    """

    special_tokens: ClassVar[tuple[str, ...]] = SPECIAL_TOKENS
    defaults: ClassVar[dict[str, Any]] = {
        **CtxWordTokenizer.defaults,
        "unk_token": UNK,
        "pad_token": PAD,
        "bos_token": BOS,
        "eos_token": EOS,
    }
    templates = ("{bos}:0 $A:0", "{bos}:0 $A:0 {bos}:1 $B:1")

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int, *, min_count: int = 3, **kwargs: Any) -> Self:
        """Learn a vocabulary of the most frequent words; see `CtxWordTokenizer.train`."""
        return super().train(texts, vocab_size, min_count=min_count, **kwargs)

    @classmethod
    def normalizers(cls, do_lower_case: bool) -> list[normalizers.Normalizer]:
        """Replace markup, and mark repetitions and capitals by fastai's rules."""
        steps = [normalizers.NFC(), *(normalizers.Replace(*pair) for pair in _MARKUP.items())]
        steps += [normalizers.Prepend(" "), *_repetitions()]
        if do_lower_case:
            steps.append(_replace(r"\s(?=\p{Lu}[^\p{Ll}\s]+(?:\s|\z))", f" {ALL_CAPITALS} "))
            steps.append(_replace(r"\s(?=\p{Lu}[^\p{Lu}\s]*\p{Ll}[^\p{Lu}\s]*(?:\s|\z))", f" {CAPITALIZED} "))
            steps.append(normalizers.Lowercase())
        # the backend normalizes added tokens, too, and finds "foo" in "(foo)" only if they do not begin with a space
        return [*steps, normalizers.Strip(left=True, right=False)]

    @classmethod
    def _backend(cls, vocab: dict[str, int], unk_token: str, lower_case: bool, split_punctuation: bool) -> Tokenizer:
        backend = super()._backend(vocab, unk_token, lower_case, split_punctuation)
        if split_punctuation:
            backend.pre_tokenizer = english_splitter(treebank=False, line_breaks=True)
        return backend

    def _decode(self, token_ids: int | list[int], *arguments: Any, **kwargs: Any) -> str:
        """The text with its capitals and repetitions restored."""
        text = super()._decode(token_ids, *arguments, **kwargs)
        text = re.sub(rf"{REPEATED_CHARACTER} (\d{{1,2}}) (\S)", lambda match: match[2] * int(match[1]), text)
        text = re.sub(rf"{REPEATED_WORD} (\d{{1,2}}) (\w+)", lambda match: " ".join([match[2]] * int(match[1])), text)
        text = re.sub(rf"{ALL_CAPITALS} (\S+)", lambda match: match[1].upper(), text)
        return re.sub(rf"{CAPITALIZED} (\S+)", lambda match: match[1].capitalize(), text)
