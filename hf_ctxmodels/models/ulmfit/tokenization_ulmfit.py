"""Tokenizer of ULMFiT: lower-cased words, with tokens for capitals and repetitions (as in the fastai library)."""

import re
from collections.abc import Iterable
from typing import Any, ClassVar, Self

from tokenizers import Regex, normalizers

from hf_ctxmodels.tokenizers.word_level import CtxWordTokenizer

UNKNOWN, PADDING, BEGINS, ENDS, FIELD = "xxunk", "xxpad", "xxbos", "xxeos", "xxfld"
REPEATS, REPEATS_WORD, CAPITALS, CAPITAL = "xxrep", "xxwrep", "xxup", "xxmaj"

_LONGEST_REPETITION = 20  # of longer ones, only so many count
_MARKUP = {
    "<br />": "\n",
    "<br/>": "\n",
    "<br>": "\n",
    "&amp;": "&",
    "&quot;": '"',
    "&#39;": "'",
    "&lt;": "<",
    "&gt;": ">",
    "&nbsp;": " ",
}


def _replace(pattern: str, content: str) -> normalizers.Normalizer:
    return normalizers.Replace(Regex(pattern), content)


def _repetitions() -> list[normalizers.Normalizer]:
    """`good!!!!` -> `good xxrep 4 !`, and `no no no` -> `xxwrep 3 no`.

    The first character of a repetition is replaced by the token, then the others but the last by their number: the
    backend cannot insert between two characters.
    """
    steps = [_replace(r"(?:\A|([\s\S])(?!\1))\K(\S)(?=\2\2)", f" {REPEATS} ")]
    words = r"(?:\A\s*|[^\w\s]\s*|(?<!\w)(\w+)\s+(?!\1(?!\w)))\K(\w+)\s+(?=\2\s+\2(?!\w))"
    counted = [*range(3, _LONGEST_REPETITION)]
    more = f"{{{_LONGEST_REPETITION - 3},}}"
    times = [(_LONGEST_REPETITION, more), *((number, f"{{{number - 3}}}") for number in counted)]
    steps += [_replace(rf"{REPEATS} \K(\S)\1{left}(?=\1(?!\1))", f"{number} ") for number, left in times]
    steps.append(_replace(words, f" {REPEATS_WORD} "))
    steps += [
        _replace(rf"{REPEATS_WORD} \K(\w+)\s+(?:\1\s+){left}(?=\1(?!\w)(?!\s+\1(?!\w)))", f"{number} ")
        for number, left in times
    ]
    return steps


class CtxUlmfitTokenizer(CtxWordTokenizer):
    """Splits text into lower-cased words; tokens before a word mark a capital (`xxmaj`), all capitals (`xxup`), a
    repeated character (`xxrep 4 !`) and a repeated word (`xxwrep 3 very`).

    Each text begins with `xxbos`; `xxeos` is not added. Offsets refer to the original text, those of a repeated word to
    its last occurrence. Without `do_lower_case` only repetitions are marked. See `CtxWordTokenizer` for arguments,
    training and errors.

    Example:
        >>> tokenizer = CtxUlmfitTokenizer.train(["A good film. GOOD!!!!"] * 3, vocab_size=20)
        >>> tokenizer.tokenize("Good, very GOOD!!!!")
        ['xxmaj', 'good', 'xxunk', 'xxunk', 'xxup', 'good', 'xxrep', '4', '!']
    """

    special_tokens: ClassVar[tuple[str, ...]] = (
        *(UNKNOWN, PADDING, BEGINS, ENDS, FIELD),
        *(REPEATS, REPEATS_WORD, CAPITALS, CAPITAL),
    )

    defaults: ClassVar[dict[str, Any]] = {
        **CtxWordTokenizer.defaults,
        "unk_token": UNKNOWN,
        "pad_token": PADDING,
        "bos_token": BEGINS,
        "eos_token": ENDS,
    }
    templates = ("{bos}:0 $A:0", "{bos}:0 $A:0 {bos}:1 $B:1")

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int, *, min_count: int = 3, **kwargs: Any) -> Self:
        """Count words and keep the most frequent; see `CtxWordTokenizer.train`."""
        return super().train(texts, vocab_size, min_count=min_count, **kwargs)

    @classmethod
    def normalizers(cls, do_lower_case: bool) -> list[normalizers.Normalizer]:
        """Replace markup and mark repetitions and capitals by fastai's rules, for texts split at white space."""
        steps = [normalizers.NFC(), *(normalizers.Replace(*pair) for pair in _MARKUP.items())]
        steps += [normalizers.Prepend(" "), *_repetitions()]
        if do_lower_case:
            steps.append(_replace(r"\s(?=\p{Lu}[^\p{Ll}\s]*[\p{Lu}\p{Nd}][^\p{Ll}\s]*(?:\s|\z))", f" {CAPITALS} "))
            steps.append(_replace(r"\s(?=\p{Lu}[^\p{Lu}\s]*\p{Ll}[^\p{Lu}\s]*(?:\s|\z))", f" {CAPITAL} "))
            steps.append(normalizers.Lowercase())
        return steps

    def _decode(self, token_ids: int | list[int], *arguments: Any, **kwargs: Any) -> str:
        """The text with its capitals and repetitions restored."""
        text = super()._decode(token_ids, *arguments, **kwargs)
        text = re.sub(rf"{REPEATS} (\d{{1,2}}) (\S)", lambda found: found[2] * int(found[1]), text)
        text = re.sub(rf"{REPEATS_WORD} (\d{{1,2}}) (\w+)", lambda found: " ".join([found[2]] * int(found[1])), text)
        text = re.sub(rf"{CAPITALS} (\S+)", lambda found: found[1].upper(), text)
        return re.sub(rf"{CAPITAL} (\S+)", lambda found: found[1].capitalize(), text)
