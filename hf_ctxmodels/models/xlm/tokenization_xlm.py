"""BPE tokenizer of XLM, trained jointly on all languages (Lample & Conneau 2019, section 3.1)."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, ClassVar, Self

import numpy as np
import torch
from tokenizers import Tokenizer, normalizers, pre_tokenizers
from tokenizers.models import BPE
from transformers import BatchEncoding

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import check_range
from hf_ctxmodels.core.generation import split_language_tag
from hf_ctxmodels.models.xlm.word_splitting import split_words, without_accents
from hf_ctxmodels.tokenizers.base import empty_text_error
from hf_ctxmodels.tokenizers.bpe import END_OF_WORD, WordBPETokenizer, require_text, train_bpe
from hf_ctxmodels.tokenizers.moses import map_texts
from hf_ctxmodels.tokenizers.word_level import TRANSLATION_SEPARATOR

_MAX_VOCABULARIES = 16  # planes of Unicode beyond the first
_WORD_SPLITTINGS = ("moses", "punctuation", "whitespace")


class CtxXLMTokenizer(WordBPETokenizer):
    """Tokenizer of XLM: BPE of lower-cased words without accents; the last subword of a word ends with "</w>".

    A text is encoded as `</s> A </s>`, a pair as `</s> A </s></s> B </s>`, as in the released code. On the same files
    (`vocab.json` with `merges.txt`) the ids equal `transformers.XLMTokenizer`'s except for the first token: <s>
    there, on which no released model was trained.

    If `language` is set, or passed in a call, the encoding has `langs`, the language id at each token. A tokenizer of a
    single language has no ids; the language of a call is then that of the Moses rules, without them an error.

    Args:
        vocab, merges, do_lower_case: See `WordBPETokenizer`. As in released files, merges may result in tokens outside
            the vocabulary, which are encoded as unknown.
        word_splitting: "moses", as for the released models, requires sacremoses; "punctuation" splits at white space
            and punctuation; "whitespace" is for text that is already split into words.
        lang2id: Language name -> id; None for a single language.
        language: Language of all texts; None returns no `langs`.
        separate_vocabularies: Whether the languages share no tokens, except special tokens (Wu et al. 2020, arXiv
            1911.01464, section 4: a model without anchor points); a call then needs a language. The characters of
            language i are shifted by i + 1 Unicode planes, so that one list of merges has disjoint parts; characters
            beyond U+FFFF are unknown.
        token_counts: Frequency of each token in the training text, for objectives that sample by frequency.
        **kwargs: See `WordBPETokenizer`.

    Raises:
        CtxError: `word_splitting` or `language` is unknown, there are more than 16 separate vocabularies, or as in
            `WordBPETokenizer`.

    Example:
        >>> texts = ["<de> Eine Katze.", "<en> A cat."]
        >>> tokenizer = CtxXLMTokenizer.train(texts * 2, vocab_size=60)
        >>> tokenizer("eine Katze", language="de").langs
        [0, 0, 0, 0]
    """

    first_tokens = ("<s>", "</s>", "<pad>", "<unk>", *(f"<special{number}>" for number in range(10)))
    reads_unchanged_text = False
    accepts_counts = True  # released files are fastBPE's
    trained_defaults: ClassVar[dict[str, Any]] = {"word_splitting": "punctuation"}
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
        separate_vocabularies: bool = False,
        **kwargs: Any,
    ) -> None:
        if word_splitting not in _WORD_SPLITTINGS:
            raise CtxError(
                f"word_splitting={word_splitting!r} is unknown.", hint=f"use one of {', '.join(_WORD_SPLITTINGS)}."
            )
        do_lower_case = kwargs.pop("do_lowercase_and_remove_accent", do_lower_case)  # the name in released files
        kwargs.pop("id2lang", None)
        self._num_listed: int | None = None
        self.word_splitting, self.separate_vocabularies = word_splitting, separate_vocabularies
        self.lang2id = dict(lang2id or {})
        self._language: str | None = None
        self.token_counts = None if token_counts is None else list(token_counts)
        super().__init__(
            vocab,
            merges,
            do_lower_case,
            lang2id=lang2id,
            token_counts=self.token_counts,
            word_splitting=word_splitting,
            listed_tokens=listed_tokens,
            separate_vocabularies=separate_vocabularies,
            **kwargs,
        )
        self._num_listed = self.init_kwargs.get("listed_tokens")
        self.lower_cases = do_lower_case
        if word_splitting != "punctuation" or separate_vocabularies:
            self._tokenizer.normalizer = None
            self._tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        self.language = language

    @property
    def vocab_size(self) -> int:
        """Number of tokens, without the results of merges that the vocabulary lacks."""
        return super().vocab_size if self._num_listed is None else self._num_listed

    def __len__(self) -> int:
        return super().__len__() if self._num_listed is None else self._num_listed

    def get_vocab(self) -> dict[str, int]:
        """Token -> id."""
        vocab = super().get_vocab()
        if self._num_listed is None:
            return vocab
        return {token: index for token, index in vocab.items() if index < self._num_listed}

    def _add_tokens(self, new_tokens: Any, special_tokens: bool = False) -> int:
        unknown = [str(token) for token in new_tokens if str(token) not in self.get_vocab()]
        if unknown and self._num_listed is not None:
            raise CtxError(
                f"{', '.join(unknown)} cannot be added: the ids after this released vocabulary belong to results of "
                "merges.",
                hint="use one of <special2> to <special9>, on which no model was trained.",
            )
        return super()._add_tokens(new_tokens, special_tokens)

    @property
    def languages(self) -> list[str]:
        """Names of the languages in the order of their ids."""
        return sorted(self.lang2id, key=self.lang2id.__getitem__)

    @property
    def language(self) -> str | None:
        """Language of all texts; None returns no `langs`."""
        return self._language

    @language.setter
    def language(self, name: str | None) -> None:
        if name is not None:
            self.language_id(name)
        self._language = name
        self.init_kwargs["language"] = name

    @property
    def tokens_depend_on_language(self) -> bool:
        """Whether tokens depend on the language: words are split by its rules (of English without a language), or its
        vocabulary is separate."""
        return self.word_splitting == "moses" or self.separate_vocabularies

    def language_id(self, name: str) -> int:
        """The id of a language; raises CtxError for an unknown language."""
        if name not in self.lang2id:
            raise CtxError(
                f"The tokenizer has no language {name!r}.",
                hint=f"use one of {', '.join(self.languages) or 'none'}, or train a tokenizer on texts with language "
                "tags: --language_tags '<de>' ...",
            )
        return self.lang2id[name]

    def _encode_plus(
        self, text: Any, text_pair: Any = None, *args: Any, language: str | None = None, **kwargs: Any
    ) -> BatchEncoding:
        language = self._language if language is None else language
        if self.separate_vocabularies and language is None:
            raise CtxError(
                "Each language has a vocabulary, and the language of the text is not set.",
                hint=f"set tokenizer.language or language= to one of {', '.join(self.languages)}; in commands, use "
                "--language or --language_tags.",
            )
        if self.tokens_depend_on_language or (self.word_splitting == "whitespace" and self.lower_cases):
            text, text_pair = (self._split_into_words(texts, language or "en") for texts in (text, text_pair))
        encoded = super()._encode_plus(text, text_pair, *args, **kwargs)
        if self._num_listed is not None:
            encoded["input_ids"] = _mask_unlisted(encoded["input_ids"], self._num_listed, self.unk_token_id)
        if language is not None and (self.lang2id or not self.tokens_depend_on_language):
            encoded["langs"] = _fill_like(encoded["input_ids"], self.language_id(language))
        return encoded

    def _split_into_words(self, texts: Any, language: str) -> Any:
        """Separate the words of (nested lists of) texts by spaces; special tokens are unchanged."""

        def split(text: str) -> str:
            if self.word_splitting == "moses":
                text = " ".join(split_words(text, language, self.lower_cases))
            elif self.word_splitting == "punctuation":
                text = " ".join(split_at_punctuation(text, self.lower_cases))
            elif self.lower_cases:
                text = without_accents(text)
            return _shift_characters(text, self.language_id(language)) if self.separate_vocabularies else text

        return map_texts(self, texts, split)

    def decode(self, *args: Any, **kwargs: Any) -> str | list[str]:
        """As in transformers, with the characters of separate vocabularies."""
        decoded = super().decode(*args, **kwargs)
        if not self.separate_vocabularies:
            return decoded
        return _unshift_characters(decoded) if isinstance(decoded, str) else [*map(_unshift_characters, decoded)]

    def _pad(self, encoded_inputs: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        padded = super()._pad(encoded_inputs, *args, **kwargs)
        if (langs := padded.get("langs")) is not None and len(langs) < len(padded["input_ids"]):
            padded["langs"] = [*langs, *langs[:1] * (len(padded["input_ids"]) - len(langs))]
        return padded

    @classmethod
    def remap_vocabulary(
        cls, vocab: dict[str, int], pairs: list[tuple[str, str]], kwargs: dict[str, Any]
    ) -> dict[str, int]:
        """Merge results that the vocabulary lacks get the ids after it; `listed_tokens` is its size without them."""
        unlisted = dict.fromkeys(token for pair in pairs for token in (*pair, "".join(pair)) if token not in vocab)
        if kwargs.get("listed_tokens") is None and unlisted:
            kwargs["listed_tokens"] = len(vocab)
        return vocab | {token: len(vocab) + index for index, token in enumerate(unlisted)}

    @classmethod
    def train(
        cls,
        texts: Iterable[str],
        vocab_size: int,
        *,
        language: str = "",
        separate_vocabularies: bool = False,
        **options: Any,
    ) -> Self:
        """Learn joint merges, the names of the languages, and the frequency of each token.

        Args:
            texts: Texts with one sentence per line; a line may begin with a language tag such as <de>, and a
                translation may follow after a tab.
            vocab_size: Number of tokens, including characters and special tokens.
            language: Language of lines without a tag; "" for none.
            separate_vocabularies: Learn the merges of each language on its text alone, with equal shares of the
                vocabulary.
            options: See `WordBPETokenizer.train`.

        Raises:
            CtxError: As in `WordBPETokenizer.train`, or a line has no language, which separate vocabularies need.
        """
        sentences = _Sentences(list(texts) if isinstance(texts, Iterator) else texts, language)
        if separate_vocabularies:
            return cls._train_separately(sentences, vocab_size, **options)
        tokenizer = super().train(sentences, vocab_size, **options)
        names = sorted(name for name in {*sentences.languages, language} if name)
        tokenizer._set_training_statistics(names, {None: sentences})
        return tokenizer

    @classmethod
    def _train_separately(
        cls,
        sentences: "_Sentences",
        vocab_size: int,
        *,
        do_lower_case: bool = True,
        min_frequency: int = 2,
        model_max_length: int = 512,
    ) -> Self:
        """Learn the merges of each language from its characters, shifted to a plane of their own."""
        check_range({"min_frequency": min_frequency, "model_max_length": model_max_length}, at_least=1)
        names = sentences.read_languages()
        size = (vocab_size - len(cls.first_tokens)) // len(names)
        vocab, merges = {token: index for index, token in enumerate(cls.first_tokens)}, []
        for number, name in enumerate(names):
            lines = (split_at_punctuation(line, do_lower_case) for line in sentences.of_language(name))
            texts = [_shift_characters(" ".join(words), number) for words in lines]
            alphabet = sorted({character for text in texts for character in text} - {" "})
            backend = Tokenizer(BPE(end_of_word_suffix=END_OF_WORD))
            backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
            initial_tokens = [*alphabet, *(character + END_OF_WORD for character in alphabet)]
            state = train_bpe(
                backend, require_text(texts), initial_tokens, size, min_frequency, end_of_word_suffix=END_OF_WORD
            )
            vocab |= {token: len(vocab) + index for token, index in state["vocab"].items()}
            merges += state["merges"]
        options = {"do_lower_case": do_lower_case, "model_max_length": model_max_length, **cls.trained_defaults}
        lang2id = {name: number for number, name in enumerate(names)}
        tokenizer = cls(vocab=vocab, merges=merges, lang2id=lang2id, separate_vocabularies=True, **options)
        tokenizer._set_training_statistics(names, {name: sentences.of_language(name) for name in names})
        return tokenizer

    def _set_training_statistics(self, names: list[str], texts: Mapping[str | None, Iterable[str]]) -> None:
        """Set the languages, and the frequency of each token in the training texts by language."""
        counts = np.zeros(len(self), dtype=np.int64)
        for language, sentences in texts.items():
            iterator = iter(sentences)
            while batch := list(islice(iterator, 1000)):
                encoded = self(batch, add_special_tokens=False, verbose=False, language=language)
                tokens = [token for sequence in encoded.input_ids for token in sequence]
                counts += np.bincount(tokens, minlength=len(self))
        self.lang2id = {name: number for number, name in enumerate(names)}
        self.token_counts = counts.tolist()
        self.init_kwargs |= {"lang2id": self.lang2id, "token_counts": self.token_counts}


class _Sentences:
    """The sentences of texts without language tags; `languages` are the tags of the last iteration."""

    def __init__(self, texts: Iterable[str], language: str = "") -> None:
        self.texts, self.language, self.languages = texts, language, set[str]()

    def __iter__(self) -> Iterator[str]:
        return (sentence for _, sentence in self._with_languages())

    def _with_languages(self) -> Iterator[tuple[str, str]]:
        self.languages = set()
        for text in self.texts:
            for line in text.replace(TRANSLATION_SEPARATOR, "\n").split("\n"):
                language, sentence = split_language_tag(line)
                self.languages |= {language} if language else set()
                yield language or self.language, sentence

    def read_languages(self) -> list[str]:
        """The sorted languages of all lines; raises CtxError if a line has none, or there are more than 16."""
        names = {language for language, sentence in self._with_languages() if sentence.strip()}
        if not names:
            raise empty_text_error()
        if "" in names or len(names) > _MAX_VOCABULARIES:
            raise CtxError(
                "A line has no language." if "" in names else f"There are {len(names)} languages.",
                location="separate_vocabularies=true",
                hint=f"set the language of each file by --language_tags, at most {_MAX_VOCABULARIES}.",
            )
        return sorted(names)

    def of_language(self, name: str) -> Iterator[str]:
        """The sentences of a language."""
        return (sentence for language, sentence in self._with_languages() if language == name)


def split_at_punctuation(text: str, lower_cases: bool) -> list[str]:
    """Split a text as `WordBPETokenizer` does: at white space and punctuation, after BERT's normalization."""
    normalized = normalizers.BertNormalizer(lowercase=lower_cases).normalize_str(text)
    return [word for word, _ in pre_tokenizers.BertPreTokenizer().pre_tokenize_str(normalized)]


def _shift_characters(text: str, language_id: int) -> str:
    """Shift each character, except white space, by `language_id + 1` planes of 65,536 code points; a character beyond
    the first plane becomes the replacement character of that language."""
    shift = (language_id + 1) << 16
    return "".join(c if c.isspace() else chr(shift + (ord(c) if ord(c) < 1 << 16 else 0xFFFD)) for c in text)


def _unshift_characters(text: str) -> str:
    """The inverse of `_shift_characters`; characters of the first plane are unchanged."""
    return "".join(chr(ord(character) & 0xFFFF) for character in text)


def _mask_unlisted(ids: Any, vocab_size: int, unk_token_id: int) -> Any:
    """Replace ids from `vocab_size` on by `unk_token_id`, in a tensor, array or nested list."""
    if isinstance(ids, torch.Tensor | np.ndarray):
        ids[ids >= vocab_size] = unk_token_id
        return ids
    if isinstance(ids, list):
        return [_mask_unlisted(element, vocab_size, unk_token_id) for element in ids]
    return unk_token_id if ids >= vocab_size else ids


def _fill_like(ids: Any, value: int) -> Any:
    """A tensor, array or nested list of the shape of `ids`, filled with `value`."""
    if isinstance(ids, torch.Tensor):
        return torch.full_like(ids, value)
    if isinstance(ids, np.ndarray):
        return np.full_like(ids, value)
    return [_fill_like(element, value) for element in ids] if isinstance(ids, list) else value
