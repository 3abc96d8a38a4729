"""Words as sequences of characters: the tokenizer of character-based families."""

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any, ClassVar, Self

import numpy as np
from transformers import AddedToken, BatchEncoding

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.tokenizers.word_level import CtxWordTokenizer

BYTES = 256
SENTENCE_START, SENTENCE_END, WORD_START, WORD_END, WORD_PADDING = range(BYTES + 1, BYTES + 6)
"""Character ids after those of bytes; byte b has the id b + 1, and 0 is padding. Languages have the ids after these."""
_TAG = "<{}>"


@lru_cache(maxsize=1 << 17)
def encode_characters(word: str, width: int) -> tuple[int, ...]:
    """Ids of a word's bytes between those of its beginning and end, padded or cut to `width`."""
    return _filled([byte + 1 for byte in word.encode("utf-8", "surrogatepass")[: width - 2]], width)


def _filled(inside: list[int], width: int) -> tuple[int, ...]:
    ids = [WORD_START, *inside, WORD_END]
    return (*ids, *[WORD_PADDING] * (width - len(ids)))


class CtxCharacterTokenizer(CtxWordTokenizer):
    """Splits text into words, and these into characters: `input_ids` are (batch, words, characters).

    Each text begins with `<S>` and ends with `</S>`. Lists of words (`is_split_into_words=True`) are not split further.
    Offsets and word ids are those of words. The vocabulary is the language model's output vocabulary;
    `encodings[row].ids` are the words' ids in it. Words outside it keep their characters.

    With `languages`, a special token such as `<de>` tags the words up to the next one or the end of the text: each
    begins with a character of that language (polyglot models: Mulcaire et al. 2019, arXiv 1902.09697).

    Args:
        max_characters: Characters of a word, its beginning and end included.
        languages: Names of languages, such as "de".
        language: That of texts without a tag; None for none.
        *args, **kwargs: See `CtxWordTokenizer`. `do_lower_case` lower-cases the vocabulary, not the characters.

    Raises:
        CtxError: As in `CtxWordTokenizer`; `max_characters` is too small; or the name of a language is empty, holds
            white space, or occurs twice.

    Example:
        >>> tokenizer = CtxCharacterTokenizer.from_words([])
        >>> tokenizer("A cat", return_tensors="pt").input_ids.shape
        torch.Size([1, 4, 50])
    """

    special_tokens: ClassVar[tuple[str, ...]] = ("[PAD]", "[UNK]", "<S>", "</S>")

    defaults: ClassVar[dict[str, Any]] = {
        **CtxWordTokenizer.defaults,
        "do_lower_case": False,
        "bos_token": "<S>",
        "eos_token": "</S>",
    }
    templates = ("{bos}:0 $A:0 {eos}:0", "{bos}:0 $A:0 {eos}:0 {bos}:1 $B:1 {eos}:1")

    def __init__(
        self,
        *args: Any,
        max_characters: int = 50,
        languages: Sequence[str] = (),
        language: str | None = None,
        **kwargs: Any,
    ) -> None:
        if max_characters < 3:
            raise CtxError(
                f"max_characters={max_characters} leaves no character between a word's ends.", hint="use 50."
            )
        if len(set(languages)) < len(languages) or any(name.split() != [name] for name in languages):
            raise CtxError(f"languages={list(languages)} are no different names.", hint="give names such as en, de.")
        super().__init__(*args, max_characters=max_characters, languages=list(languages), language=language, **kwargs)
        self.max_characters, self.languages = max_characters, list(languages)
        tags = [_TAG.format(name) for name in languages]
        self.add_tokens([AddedToken(tag, special=True, normalized=False) for tag in tags])
        self._special_characters = {
            self.pad_token_id: (0,) * max_characters,
            self.bos_token_id: _filled([SENTENCE_START], max_characters),
            self.eos_token_id: _filled([SENTENCE_END], max_characters),
        }
        self._special_characters.pop(None, None)  # of a token that there is none of
        self._language_of = np.zeros(len(self), dtype=np.int64)  # a tag's language number; 0 for other words
        for number, tag in enumerate(tags, start=1):
            place = self.convert_tokens_to_ids(tag)
            self._special_characters[place] = _filled([WORD_PADDING + number], max_characters)
            self._language_of[place] = number
        self.language = language

    @property
    def language(self) -> str | None:
        """That of texts without a tag, one of `languages`; None for none. It is saved with the tokenizer."""
        return self._language

    @language.setter
    def language(self, name: str | None) -> None:
        if name is not None and name not in self.languages:
            raise CtxError(
                f"The tokenizer has no mark of the language {name!r}.",
                hint=f"use one of {', '.join(self.languages) or 'none'}.",
            )
        self._language = self.init_kwargs["language"] = name

    @classmethod
    def train(
        cls,
        texts: Iterable[str],
        vocab_size: int,
        *,
        min_count: int = 3,
        do_lower_case: bool = False,
        languages: Sequence[str] = (),
        **kwargs: Any,
    ) -> Self:
        """Count words and keep the most frequent as the output vocabulary; see `CtxWordTokenizer.train`. The tags of
        `languages` are not counted."""
        tags = re.compile("|".join(re.escape(_TAG.format(name)) for name in languages) or "(?!)")
        return super().train(
            (tags.sub(" ", text) for text in texts),
            vocab_size,
            min_count=min_count,
            do_lower_case=do_lower_case,
            languages=list(languages),
            **kwargs,
        )

    @property
    def num_characters(self) -> int:
        """Number of character ids, for a model's configuration."""
        return WORD_PADDING + 1 + len(self.languages)

    def vocabulary_ids(self, texts: Sequence[str]) -> Iterator[tuple[np.ndarray, list[str]]]:
        """For every text: its words' vocabulary ids (words,) int32, special tokens included, and its unknown words."""
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        for text, encoding in zip(texts, self._tokenizer.encode_batch(list(texts)), strict=True):
            ids = np.array(encoding.ids, dtype=np.int32)
            places = [encoding.offsets[place] for place in np.flatnonzero(ids == self.unk_token_id)]
            yield ids, [text[start:stop] for start, stop in places]

    def character_ids(self, ids: Iterable[int], words: Iterable[str]) -> np.ndarray:
        """(words, characters) int64 of words with these vocabulary ids; special tokens have characters of their own."""
        width, special = self.max_characters, self._special_characters
        rows = [special.get(number) or encode_characters(word, width) for number, word in zip(ids, words, strict=True)]
        return np.array(rows, dtype=np.int64).reshape(-1, width)

    def apply_language_tags(self, ids: Sequence[int] | np.ndarray, characters: np.ndarray) -> np.ndarray:
        """Tag words by language, in place: after a language's tag and up to the next beginning of a sentence, each
        word begins with that language's character; elsewhere with that of `language`, if there is one.

        Args:
            ids: (words,) vocabulary ids.
            characters: (words, characters).
        """
        numbers = np.asarray(ids, dtype=np.int64)
        if not self.languages or not len(numbers):
            return characters
        languages = self._language_of[numbers]
        changes = (languages > 0) | (numbers == self.bos_token_id)
        current = languages[np.maximum.accumulate(np.where(changes, np.arange(len(numbers)), 0))]
        if self.language is not None:
            current = np.where(current > 0, current, self.languages.index(self.language) + 1)
        words = (current > 0) & ~np.isin(numbers, list(self._special_characters))
        characters[words, 0] = WORD_PADDING + current[words]
        return characters

    def first_language_tag(self, ids: np.ndarray) -> np.ndarray:
        """The first language tag among vocabulary ids: (1,), or (0,) if there is none."""
        return ids[self._language_of[ids] > 0][:1]

    def character_ids_to_words(self, character_ids: Sequence[Sequence[int]] | np.ndarray) -> list[str]:
        """(words, characters) ids -> the words, without padding."""
        rows = [tuple(int(number) for number in row) for row in character_ids]
        names = {ids: self.convert_ids_to_tokens(number) for number, ids in self._special_characters.items()}
        names.pop((0,) * self.max_characters)
        words = []
        for row in rows:
            inside = bytes(number - 1 for number in row if 0 < number <= BYTES)
            if any(row):
                words.append(names.get(row) or inside.decode("utf-8", "replace"))
        return words

    def decode(self, token_ids: Any, skip_special_tokens: bool = False, **kwargs: Any) -> Any:
        """(words, characters) ids -> words joined by spaces; a list for several texts. Also takes vocabulary ids."""
        token_ids = token_ids.tolist() if hasattr(token_ids, "tolist") else token_ids
        first: Any = token_ids[0] if hasattr(token_ids, "__len__") and len(token_ids) else 0
        if not hasattr(first, "__len__"):
            return super().decode(token_ids, skip_special_tokens=skip_special_tokens, **kwargs)
        if len(first) and hasattr(first[0], "__len__"):
            return [self.decode(row, skip_special_tokens, **kwargs) for row in token_ids]
        left_out = self.all_special_tokens if skip_special_tokens else []
        return " ".join(word for word in self.character_ids_to_words(token_ids) if word not in left_out)

    def _encode_plus(
        self, text: Any, text_pair: Any = None, *, return_tensors: Any = None, **kwargs: Any
    ) -> BatchEncoding:
        """Split into words by the backend, then each word into characters."""
        split = bool(kwargs.get("is_split_into_words"))
        splitter = self._tokenizer.pre_tokenizer
        if split:
            self._tokenizer.pre_tokenizer = None  # given words are not split
        try:
            encoded = super()._encode_plus(text, text_pair, **kwargs)
        finally:
            self._tokenizer.pre_tokenizer = splitter
        rows = isinstance(text, list | tuple) and (not split or (bool(text) and isinstance(text[0], list | tuple)))
        texts = list(text) if rows else [text]
        pairs = [None] * len(texts) if text_pair is None else list(text_pair) if rows else [text_pair]
        sources = encoded.get("overflow_to_sample_mapping", range(len(encoded.encodings or [])))
        characters = [
            self._characters(encoding, _sequences(texts[source], pairs[source], split))
            for encoding, source in zip(encoded.encodings or [], sources, strict=True)
        ]
        batched = rows or "overflow_to_sample_mapping" in encoded
        if return_tensors is None:
            encoded["input_ids"] = [each.tolist() for each in characters] if batched else characters[0].tolist()
            return encoded
        encoded["input_ids"] = characters if batched else characters[0]
        return encoded.convert_to_tensors(return_tensors, prepend_batch_axis=not batched)

    def _characters(self, encoding: Any, sequences: Sequence[str | Sequence[str]]) -> np.ndarray:
        """(words, characters) of one row of the backend."""
        words = []
        for place, sequence, (start, stop) in zip(encoding.word_ids, encoding.sequence_ids, encoding.offsets):
            whole = "" if sequence is None else sequences[sequence]
            words.append((whole if isinstance(whole, str) else whole[place])[start:stop])
        return self.apply_language_tags(encoding.ids, self.character_ids(encoding.ids, words))

    def pad(self, encoded_inputs: Any, *arguments: Any, **kwargs: Any) -> BatchEncoding:
        """Pad texts to the same number of words; see `PreTrainedTokenizerBase.pad`."""
        if isinstance(encoded_inputs, list | tuple):
            names = encoded_inputs[0].keys()
            encoded_inputs = {name: [each[name] for each in encoded_inputs] for name in names}
        ids = encoded_inputs[self.model_input_names[0]]
        if not len(ids) or not isinstance(ids[0][0], int | np.integer):
            return super().pad(encoded_inputs, *arguments, **kwargs)
        batch = super().pad({name: [value] for name, value in encoded_inputs.items()}, *arguments, **kwargs)
        return BatchEncoding({name: value[0] for name, value in batch.items()})

    def _pad(self, encoded_inputs: Any, *arguments: Any, **kwargs: Any) -> dict[str, Any]:
        padded = super()._pad(encoded_inputs, *arguments, **kwargs)
        nothing = [0] * self.max_characters
        name = self.model_input_names[0]
        padded[name] = [nothing if isinstance(ids, int) else ids for ids in padded[name]]
        return padded


def _sequences(text: Any, pair: Any, split: bool) -> tuple[Any, ...]:
    """The one or two texts of a row: strings, or lists of words."""
    if pair is not None:
        return text, pair
    is_pair = isinstance(text, list | tuple) and bool(text)
    if split:  # into words, which are strings
        is_pair = is_pair and not isinstance(text[0], str)
    return tuple(text) if is_pair else (text,)
