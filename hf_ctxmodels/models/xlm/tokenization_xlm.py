"""Tokenizer of XLM (Lample & Conneau 2019, section 3.1): words, split by the joint BPE of all languages."""

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar, Self

import numpy as np
import torch
from tokenizers import pre_tokenizers
from transformers import BatchEncoding

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.languages import split_language_tag
from hf_ctxmodels.models.xlm.moses import split_words, without_accents
from hf_ctxmodels.tokenizers.bpe import Merges
from hf_ctxmodels.tokenizers.translation import TRANSLATION_SEPARATOR
from hf_ctxmodels.tokenizers.word_bpe import WordBPETokenizer

_SPLITTINGS = ("moses", "punctuation", "whitespace")
_TEXTS_AT_ONCE = 1000


class CtxXLMTokenizer(WordBPETokenizer):
    """XLM's tokenizer: lower-cased words without accents in subwords, of which a word's last one ends with "</w>".

    A text is `</s> A </s>`, a pair `</s> A </s></s> B </s>`, as in the released code. On the same files (`vocab.json`
    with `merges.txt`) the ids of a text are those of `transformers.XLMTokenizer`, which begins it with <s>, a token
    that no released model was trained on.

    With `language` set, or given in a call, the encoding has `langs`, the language's number at every token.

    Args:
        vocab, merges, do_lower_case: As in `WordBPETokenizer`. Merges may have results outside the vocabulary, as in
            released files; where such a subword remains it is unknown.
        word_splitting: "moses", as for the released models, which needs sacremoses; "punctuation", at white space and
            punctuation; or "whitespace", for text that is split already.
        lang2id: Name of each language -> its number; None for one language.
        language: Name of the language of all texts; None gives no `langs`.
        token_counts: How often each token occurs in the training text, for objectives that prefer rare tokens.
        **kwargs: As in `WordBPETokenizer`.

    Raises:
        CtxError: As there, or the languages or the way of splitting are not known.

    Example:
        >>> texts = ["<de> Eine Katze.", "<en> A cat."]
        >>> tokenizer = CtxXLMTokenizer.train(texts * 2, vocab_size=60)
        >>> tokenizer("eine Katze", language="de").langs
        [0, 0, 0, 0, 0, 0]
    """

    first_tokens = ("<s>", "</s>", "<pad>", "<unk>", *(f"<special{number}>" for number in range(10)))
    trained: ClassVar[dict[str, Any]] = {"word_splitting": "punctuation"}
    defaults: ClassVar[dict[str, Any]] = {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "cls_token": "</s>",
        "sep_token": "</s>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        "mask_token": "<special1>",
    }
    templates = ("{eos}:0 $A:0 {eos}:0", "{eos}:0 $A:0 {eos}:0 {eos}:0 $B:0 {eos}:0")

    def __init__(
        self,
        vocab: str | dict[str, int] | None = None,
        merges: str | list[Any] | None = None,
        do_lower_case: bool = True,
        word_splitting: str = "moses",
        lang2id: dict[str, int] | None = None,
        language: str | None = None,
        token_counts: Sequence[int] | None = None,
        listed_tokens: int | None = None,
        **kwargs: Any,
    ) -> None:
        if word_splitting not in _SPLITTINGS:
            raise CtxError(f"word_splitting={word_splitting!r}.", hint=f"use one of {', '.join(_SPLITTINGS)}.")
        do_lower_case = kwargs.pop("do_lowercase_and_remove_accent", do_lower_case)  # the name in released files
        kwargs.pop("id2lang", None)
        self._listed: int | None = None
        self.word_splitting = word_splitting
        self.lang2id = dict(lang2id or {})
        self._language: str | None = None
        self.token_counts = None if token_counts is None else list(token_counts)
        own = {"lang2id": lang2id, "token_counts": self.token_counts, "word_splitting": word_splitting}
        super().__init__(vocab, merges, do_lower_case, **own, listed_tokens=listed_tokens, **kwargs)
        self._listed = self.init_kwargs.get("listed_tokens")
        self.lower_cases = do_lower_case
        if word_splitting != "punctuation":
            self._tokenizer.normalizer = None
            self._tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        self.language = language

    @property
    def vocab_size(self) -> int:
        """Number of tokens, without those that merges make and the vocabulary lacks."""
        return super().vocab_size if self._listed is None else self._listed

    def __len__(self) -> int:
        return super().__len__() if self._listed is None else self._listed

    def get_vocab(self) -> dict[str, int]:
        """Token -> id."""
        vocab = super().get_vocab()
        return vocab if self._listed is None else {token: n for token, n in vocab.items() if n < self._listed}

    def _add_tokens(self, new_tokens: Any, special_tokens: bool = False) -> int:
        unknown = [str(token) for token in new_tokens if str(token) not in self.get_vocab()]
        if unknown and self._listed is not None:
            raise CtxError(
                f"{', '.join(unknown)} cannot be added: merges of this released vocabulary make tokens outside of it, "
                "which have the ids after it.",
                hint="use one of <special2> to <special9>, which no model was trained on.",
            )
        return super()._add_tokens(new_tokens, special_tokens)

    @property
    def languages(self) -> list[str]:
        """Names of the languages in the order of their numbers."""
        return sorted(self.lang2id, key=self.lang2id.__getitem__)

    @property
    def language(self) -> str | None:
        """Name of the language of all texts; None gives no `langs`."""
        return self._language

    @language.setter
    def language(self, name: str | None) -> None:
        if name is not None:
            self.language_id(name)
        self._language = name
        self.init_kwargs["language"] = name

    @property
    def splits_by_language(self) -> bool:
        """Whether words are split by the rules of their language, English ones where none is given."""
        return self.word_splitting == "moses"

    def language_id(self, name: str) -> int:
        """The number of a language; raises CtxError for one that is not known."""
        if name not in self.lang2id:
            raise CtxError(
                f"The tokenizer has no language {name!r}.",
                hint=f"it has {', '.join(self.languages) or 'none'}; train it on texts with tags of their languages: "
                "--language_tags '<de>' ...",
            )
        return self.lang2id[name]

    def _encode_plus(
        self, text: Any, text_pair: Any = None, *args: Any, language: str | None = None, **kwargs: Any
    ) -> BatchEncoding:
        language = self._language if language is None else language
        if self.splits_by_language or (self.word_splitting == "whitespace" and self.lower_cases):
            text, text_pair = (self._split(given, language or "en") for given in (text, text_pair))
        encoded = super()._encode_plus(text, text_pair, *args, **kwargs)
        if self._listed is not None:
            encoded["input_ids"] = _replaced(encoded["input_ids"], self._listed, self.unk_token_id)
        if language is not None and self.lang2id:
            encoded["langs"] = _filled(encoded["input_ids"], self.language_id(language))
        return encoded

    def _split(self, given: Any, language: str) -> Any:
        """Texts, however nested, as words with spaces between them; special tokens stay."""
        if not isinstance(given, str):
            return given if given is None else [self._split(each, language) for each in given]
        special = "|".join(map(re.escape, sorted(self.all_special_tokens, key=len, reverse=True)))
        parts = re.split(f"({special})", given)
        return " ".join(part if number % 2 else self._words(part, language) for number, part in enumerate(parts))

    def _words(self, text: str, language: str) -> str:
        if self.splits_by_language:
            return " ".join(split_words(text, language, self.lower_cases))
        return without_accents(text)

    def _pad(self, encoded_inputs: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        padded = super()._pad(encoded_inputs, *args, **kwargs)
        if (langs := padded.get("langs")) is not None and len(langs) < len(padded["input_ids"]):
            padded["langs"] = [*langs, *langs[:1] * (len(padded["input_ids"]) - len(langs))]
        return padded

    @classmethod
    def read(
        cls, vocab: str | dict[str, int] | None, merges: str | list[Any] | None, kwargs: dict[str, Any]
    ) -> tuple[dict[str, int], Merges, str | None]:
        """As in `BPETokenizer`; what merges make and the vocabulary lacks gets ids after it, see `listed_tokens`."""
        table, pairs, file = super().read(vocab, merges, kwargs)
        made = dict.fromkeys(token for pair in pairs for token in (*pair, "".join(pair)) if token not in table)
        if kwargs.get("listed_tokens") is None and made:
            kwargs["listed_tokens"] = len(table)
        return table | {token: len(table) + number for number, token in enumerate(made)}, pairs, file

    @classmethod
    def train(
        cls,
        texts: Iterable[str],
        vocab_size: int,
        *,
        do_lower_case: bool = True,
        min_frequency: int = 2,
        model_max_length: int = 512,
        language: str = "",
    ) -> Self:
        """Learn the merges of all languages together, their names, and how often each token occurs.

        Args:
            texts: Of sentences, one a line, of which each may begin with the tag of its language, such as <de>; after a
                tab, a translation.
            vocab_size: Number of tokens, characters and special ones included.
            do_lower_case, min_frequency, model_max_length: As in `WordBPETokenizer.train`.
            language: Name of the language of texts without a tag; "" where these are in no language of their own.

        Raises:
            CtxError: As there.
        """
        texts = list(texts) if isinstance(texts, Iterator) else texts
        sentences = _Sentences(texts)
        options: dict[str, Any] = {"do_lower_case": do_lower_case, "min_frequency": min_frequency}
        tokenizer = super().train(sentences, vocab_size, model_max_length=model_max_length, **options)
        names = sorted(name for name in {*sentences.languages, language} if name)
        counts = np.zeros(len(tokenizer), dtype=np.int64)
        batch: list[str] = []
        for sentence in sentences:
            batch.append(sentence)
            if len(batch) == _TEXTS_AT_ONCE:
                counts += tokenizer._count(batch)
                batch = []
        counts += tokenizer._count(batch)
        tokenizer.lang2id = {name: number for number, name in enumerate(names)}
        tokenizer.token_counts = counts.tolist()
        tokenizer.init_kwargs |= {"lang2id": tokenizer.lang2id, "token_counts": tokenizer.token_counts}
        return tokenizer

    def _count(self, texts: list[str]) -> np.ndarray:
        """(tokens,) occurrences in some texts, without special tokens."""
        rows = self(texts, add_special_tokens=False, verbose=False).input_ids if texts else []
        return np.bincount([token for row in rows for token in row], minlength=len(self))


class _Sentences:
    """The sentences of texts, without tags; `languages` are those of the last iteration."""

    def __init__(self, texts: Iterable[str]) -> None:
        self.texts, self.languages = texts, set[str]()

    def __iter__(self) -> Iterator[str]:
        self.languages = set()
        for text in self.texts:
            for line in text.replace(TRANSLATION_SEPARATOR, "\n").split("\n"):
                language, sentence = split_language_tag(line)
                self.languages |= {language} if language else set()
                yield sentence


def _replaced(ids: Any, limit: int, unknown: int) -> Any:
    """Ids, a tensor or however nested, with `unknown` in place of those from `limit` on."""
    if isinstance(ids, torch.Tensor | np.ndarray):
        ids[ids >= limit] = unknown
        return ids
    if isinstance(ids, list):
        return [_replaced(each, limit, unknown) for each in ids]
    return unknown if ids >= limit else ids


def _filled(ids: Any, value: int) -> Any:
    """The value in the shape of ids, a tensor or however nested."""
    if isinstance(ids, torch.Tensor):
        return torch.full_like(ids, value)
    return [_filled(each, value) for each in ids] if isinstance(ids, list) else value
