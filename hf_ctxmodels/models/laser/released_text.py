"""Subwords of the released LASER encoders, which are looked up in the dictionary of the encoder."""

import re
import unicodedata
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import ClassVar, Self

from tokenizers import Regex, decoders
from tokenizers.models import BPE

from hf_ctxmodels.core.errors import require_packages, wrap_errors
from hf_ctxmodels.core.loading import read_utf8
from hf_ctxmodels.tokenizers.bpe import CONTINUATION, END_OF_WORD, to_native_subword, to_released_subword

_UNKNOWN = "<unk>"
_CACHE_SIZE = 100_000  # words
# Substitutions of sacremoses that the release of LASER2 replaces by the ones of the Perl code of Moses 4.0
_PERL_SUBSTITUTIONS = {
    ("\u2018", "'"): '"',
    ("\u201a", "'"): '"',
    ("\u2019", "'"): '"',
    ("\u00a0\u00ab\u00a0", '"'): ' "',
    ("\u00a0\u00bb\u00a0", '"'): '" ',
}


def replace_non_printing(text: str) -> str:
    """Replace characters of the Unicode categories "other" (control, format, private use, unassigned) by spaces."""
    return "".join(" " if unicodedata.category(character)[0] == "C" else character for character in text)


@lru_cache
def _punctuation_rules() -> list[tuple[re.Pattern[str], str]]:
    require_packages("sacremoses", extra="moses", location="tokenizer of LASER2")
    from sacremoses import MosesPunctNormalizer

    rules = MosesPunctNormalizer(lang="en").substitutions
    return [(re.compile(pattern), _PERL_SUBSTITUTIONS.get((pattern, value), value)) for pattern, value in rules]


def normalize_punctuation(text: str) -> str:
    """Normalize punctuation by the English rules of Moses 4.0; raises CtxError if sacremoses is not installed."""
    for pattern, replacement in _punctuation_rules():
        text = pattern.sub(replacement, text)
    return text.strip()


class ReleasedSubwords(ABC):
    """A splitter of texts into subwords.

    Attributes:
        file_name: Name of its file in the directory of a tokenizer.
        accepts_words: Whether it splits words, which the Moses rules separate.
    """

    file_name: ClassVar[str]
    accepts_words: ClassVar[bool]

    @abstractmethod
    def split(self, text: str) -> str:
        """The subwords of a text, separated by spaces."""

    @abstractmethod
    def save(self, file: Path) -> None:
        """Write the file."""

    @abstractmethod
    def decoder(self) -> decoders.Decoder:
        """The decoder of subwords to text."""


class FastBPE(ReleasedSubwords):
    """The byte-pair encoding of LASER1 (fastBPE), of lower-cased words that are separated by white space.

    A subword that the dictionary lacks is split by undoing its merges, until all parts are in the dictionary or single
    characters; the last subword of a word has no mark, the others end with "@@".

    Args:
        merges: Pairs of subwords in the order in which they are merged; the last subword of a word ends with "</w>".
        dictionary: Tokens of the encoder.
    """

    file_name = "merges.txt"
    accepts_words = True

    def __init__(self, merges: Sequence[tuple[str, str]], dictionary: Iterable[str]) -> None:
        self._merges, self._dictionary = list(merges), frozenset(dictionary)
        self._parts = {first + second: (first, second) for first, second in merges}
        subwords = dict.fromkeys([_UNKNOWN, *map(to_native_subword, self._dictionary)])
        subwords |= dict.fromkeys(subword for pair in merges for subword in (*pair, "".join(pair)))
        vocab = {subword: number for number, subword in enumerate(subwords)}
        options = {"unk_token": _UNKNOWN, "end_of_word_suffix": END_OF_WORD}
        self._model = BPE(vocab, self._merges, fuse_unk=False, **options)
        self._cache: dict[str, str] = {}

    @classmethod
    def read(cls, file: str | Path, dictionary: Iterable[str]) -> Self:
        """Read the file that `save` wrote."""
        pairs = (line.split(" ") for line in read_utf8(file).split("\n") if line)
        hint = "copy it again from its source."
        with wrap_errors("The file does not contain merges", location=str(file), hint=hint):
            return cls([(first, second) for first, second in pairs], dictionary)

    def save(self, file: Path) -> None:
        """Write one merge per line."""
        file.write_text("".join(f"{first} {second}\n" for first, second in self._merges), encoding="utf-8")

    def decoder(self) -> decoders.Decoder:
        """The decoder of subwords to text."""
        steps = [decoders.Replace(Regex("$"), END_OF_WORD), decoders.Replace(f"{CONTINUATION}{END_OF_WORD}", "")]
        return decoders.Sequence([*steps, decoders.BPEDecoder(suffix=END_OF_WORD)])

    def split(self, text: str) -> str:
        """The subwords of a text."""
        return " ".join(map(self._split_word, text.lower().split()))

    def _split_word(self, word: str) -> str:
        if (subwords := self._cache.get(word)) is None:
            parts = (part for token in self._model.tokenize(word) for part in self._listed_subwords(token.value))
            subwords = " ".join(part if part == _UNKNOWN else to_released_subword(part) for part in parts)
            if len(self._cache) < _CACHE_SIZE:
                self._cache[word] = subwords
        return subwords

    def _listed_subwords(self, subword: str) -> list[str]:
        if subword not in self._parts or to_released_subword(subword) in self._dictionary:
            return [subword]
        return [part for half in self._parts[subword] for part in self._listed_subwords(half)]


class SentencePieces(ReleasedSubwords):
    """The SentencePiece model of LASER2; normalizes punctuation and lower-cases text before.

    Args:
        file: Its file, such as `laser2.spm`.

    Raises:
        CtxError: The file is damaged, or sentencepiece is not installed.
    """

    file_name = "spm.model"
    accepts_words = False

    def __init__(self, file: str | Path) -> None:
        require_packages("sentencepiece", extra="sentencepiece", location=str(file))
        from sentencepiece import SentencePieceProcessor

        hint = "use the released file laser2.spm, or copy it again from its source."
        with wrap_errors("Cannot read the SentencePiece model", location=str(file), hint=hint):
            self._content = Path(file).read_bytes()
            self._processor = SentencePieceProcessor(model_proto=self._content)

    def save(self, file: Path) -> None:
        """Write the SentencePiece model."""
        file.write_bytes(self._content)

    def decoder(self) -> decoders.Decoder:
        """The decoder of pieces to text."""
        return decoders.Metaspace(replacement="\u2581", prepend_scheme="always")

    def split(self, text: str) -> str:
        """The pieces of a text."""
        text = normalize_punctuation(text).lower()
        return " ".join(" ".join(self._processor.encode(text, out_type=str)).split())
