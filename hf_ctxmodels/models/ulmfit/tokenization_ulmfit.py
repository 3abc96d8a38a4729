"""Tokenizer of ULMFiT: words in lower case, with what that loses written before them (as in the fastai library)."""

import re
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Self

from tokenizers import Regex, normalizers

from hf_ctxmodels.tokenizers.words import CtxWordTokenizer

UNKNOWN, PADDING, BEGINS, ENDS, FIELD = "xxunk", "xxpad", "xxbos", "xxeos", "xxfld"
REPEATS, REPEATS_WORD, CAPITALS, CAPITAL = "xxrep", "xxwrep", "xxup", "xxmaj"

_LONGEST_REPETITION = 20  # longer ones count as so many
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

    The first sign of a repetition gives way to the token; then so many of the others as are counted to their number.
    Every rule takes something out, since the backend cannot put anything between two signs.
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
    """Splits text into words in lower case, and says before a word that it had a capital (`xxmaj`) or was all capitals
    (`xxup`), how often a sign stood (`xxrep 4 !`) and how often a word (`xxwrep 3 very`).

    A text begins with `xxbos`, each of two texts by itself. Offsets are those of the text as it was given,
    also of a word that is repeated: that of its last time.

    Args:
        vocab, counts, split_punctuation, unk_token, pad_token: see `CtxWordTokenizer`.
        do_lower_case: lower-case the text, with marks; else nothing is marked but repetitions.
        bos_token: begins a text.
        eos_token: ends one, where it is used; no text is given it.
        **kwargs: passed on.

    Example:
        >>> tokenizer = CtxUlmfitTokenizer.train(["A good film. GOOD!!!!"] * 3, vocab_size=20)
        >>> tokenizer.tokenize("Good, very GOOD!!!!")
        ['xxmaj', 'good', 'xxunk', 'xxunk', 'xxup', 'good', 'xxrep', '4', '!']
    """

    special_tokens: ClassVar[tuple[str, ...]] = (
        *(UNKNOWN, PADDING, BEGINS, ENDS, FIELD),
        *(REPEATS, REPEATS_WORD, CAPITALS, CAPITAL),
    )

    def __init__(
        self,
        vocab: dict[str, int] | None = None,
        counts: Sequence[int] | None = None,
        do_lower_case: bool = True,
        split_punctuation: bool = True,
        unk_token: str = UNKNOWN,
        pad_token: str = PADDING,
        bos_token: str = BEGINS,
        eos_token: str = ENDS,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            vocab=vocab,
            counts=counts,
            do_lower_case=do_lower_case,
            split_punctuation=split_punctuation,
            unk_token=unk_token,
            pad_token=pad_token,
            bos_token=bos_token,
            eos_token=eos_token,
            **kwargs,
        )
        self.set_template("{bos}:0 $A:0", "{bos}:0 $A:0 {bos}:1 $B:1")

    @classmethod
    def train(
        cls,
        texts: Iterable[str],
        vocab_size: int,
        *,
        min_count: int = 3,
        do_lower_case: bool = True,
        split_punctuation: bool = True,
        model_max_length: int = 1_000_000,
        **kwargs: Any,
    ) -> Self:
        """Count words and keep the most frequent; see `CtxWordTokenizer.train`."""
        return super().train(
            texts,
            vocab_size,
            min_count=min_count,
            do_lower_case=do_lower_case,
            split_punctuation=split_punctuation,
            model_max_length=model_max_length,
            **kwargs,
        )

    @classmethod
    def normalizers(cls, do_lower_case: bool) -> list[normalizers.Normalizer]:
        """Markup, repetitions, and what lower case loses, by the rules of fastai: of what white space separates."""
        steps = [normalizers.NFC(), *(normalizers.Replace(*pair) for pair in _MARKUP.items())]
        steps += [normalizers.Prepend(" "), *_repetitions()]
        if do_lower_case:
            steps.append(_replace(r"\s(?=\p{Lu}[^\p{Ll}\s]*[\p{Lu}\p{Nd}][^\p{Ll}\s]*(?:\s|\z))", f" {CAPITALS} "))
            steps.append(_replace(r"\s(?=\p{Lu}[^\p{Lu}\s]*\p{Ll}[^\p{Lu}\s]*(?:\s|\z))", f" {CAPITAL} "))
            steps.append(normalizers.Lowercase())
        return steps

    def _decode(self, token_ids: int | list[int], *arguments: Any, **kwargs: Any) -> str:
        """Text, with capitals and repetitions as the tokens say."""
        text = super()._decode(token_ids, *arguments, **kwargs)
        text = re.sub(rf"{REPEATS} (\d{{1,2}}) (\S)", lambda found: found[2] * int(found[1]), text)
        text = re.sub(rf"{REPEATS_WORD} (\d{{1,2}}) (\w+)", lambda found: " ".join([found[2]] * int(found[1])), text)
        text = re.sub(rf"{CAPITALS} (\S+)", lambda found: found[1].upper(), text)
        return re.sub(rf"{CAPITAL} (\S+)", lambda found: found[1].capitalize(), text)
