"""Tokenizer of character-based families: words as sequences of characters."""

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any, ClassVar, Self

import numpy as np
from transformers import AddedToken, BatchEncoding
from transformers.utils import to_py_obj

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.tokenizers.composed_offsets import complete_offsets, encoded_sequences
from hf_ctxmodels.tokenizers.word_level import CtxWordTokenizer

BYTES = 256
SENTENCE_START, SENTENCE_END, WORD_START, WORD_END, WORD_PADDING = range(BYTES + 1, BYTES + 6)
"""Character ids: 0 is padding, byte b has the id b + 1, then these, then one id per language."""
_TAG = "<{}>"


@lru_cache(maxsize=1 << 17)
def encode_characters(word: str, width: int) -> tuple[int, ...]:
    """Ids of a word's bytes between start and end ids, padded or truncated to `width`."""
    return _word_characters([byte + 1 for byte in word.encode("utf-8", "surrogatepass")[: width - 2]], width)


def _word_characters(characters: list[int], width: int) -> tuple[int, ...]:
    ids = [WORD_START, *characters, WORD_END]
    return (*ids, *[WORD_PADDING] * (width - len(ids)))


class CtxCharacterTokenizer(CtxWordTokenizer):
    """Splits text into words, and words into characters: `input_ids` are (batch, words, characters).

    Each text begins with `<S>` and ends with `</S>`. Lists of words (`is_split_into_words=True`) are not split further.
    Offsets and word ids refer to words. The vocabulary is the language model's output vocabulary, and
    `encodings[i].ids` are ids in it. Words outside the vocabulary keep their characters.

    With `languages`, a special token such as `<de>` sets the language of the following words, up to the next tag or the
    end of the text: their first character is an id of the language (polyglot models: Mulcaire et al. 2019, arXiv
    1902.09697).

    Args:
        max_characters: Characters per word, including its start and end.
        languages: Names of languages, such as "de".
        language: Language of texts without a tag, or None.
        *args, **kwargs: See `CtxWordTokenizer`. `do_lower_case` lower-cases the vocabulary, not the characters.

    Raises:
        CtxError: As in `CtxWordTokenizer`; `max_characters` is too small; or the name of a language is empty, contains
            white space, or is repeated.

    Example:
        >>> tokenizer = CtxCharacterTokenizer.from_words([])
        >>> tokenizer("A cat", return_tensors="pt").input_ids.shape
        torch.Size([1, 4, 50])
    """

    reads_unchanged_text = False
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
                f"max_characters={max_characters} leaves no character between a word's start and end.", hint="use 50."
            )
        if len(set(languages)) < len(languages) or any(name.split() != [name] for name in languages):
            raise CtxError(f"languages={list(languages)} are not distinct names.", hint="use names such as en, de.")
        super().__init__(*args, max_characters=max_characters, languages=list(languages), language=language, **kwargs)
        self.max_characters, self.languages = max_characters, list(languages)
        tags = [_TAG.format(name) for name in languages]
        self.add_tokens([AddedToken(tag, special=True, normalized=False) for tag in tags])
        self._special_characters = {
            self.pad_token_id: (0,) * max_characters,
            self.bos_token_id: _word_characters([SENTENCE_START], max_characters),
            self.eos_token_id: _word_characters([SENTENCE_END], max_characters),
        }
        self._special_characters.pop(None, None)  # of an undefined special token
        # language of each token that is a tag, 0 for other tokens; the last entry is for tokens that are added later
        self._language_of = np.zeros(len(self) + 1, dtype=np.int64)
        for number, tag in enumerate(tags, start=1):
            tag_id = self.convert_tokens_to_ids(tag)
            self._special_characters[tag_id] = _word_characters([WORD_PADDING + number], max_characters)
            self._language_of[tag_id] = number
        self.language = language

    @property
    def language(self) -> str | None:
        """Language of texts without a tag, one of `languages` or None. It is saved with the tokenizer."""
        return self._language

    @language.setter
    def language(self, name: str | None) -> None:
        if name is not None and name not in self.languages:
            raise CtxError(
                f"The tokenizer has no language {name!r}.",
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
        """Learn the output vocabulary, without tags of `languages`; see `CtxWordTokenizer.train`."""
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
        """Yield the vocabulary ids of each text, (words,) int32 with special tokens, and its unknown words."""
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        for text, encoding in zip(texts, self._tokenizer.encode_batch(list(texts)), strict=True):
            ids = np.array(encoding.ids, dtype=np.int32)
            offsets = complete_offsets(encoding, [text])
            spans = [offsets[index] for index in np.flatnonzero(ids == self.unk_token_id)]
            yield ids, [text[start:stop] for start, stop in spans]

    def character_ids(self, ids: Iterable[int], words: Iterable[str]) -> np.ndarray:
        """(words, characters) int64 ids of words, or of special tokens, with these vocabulary ids."""
        width, special = self.max_characters, self._special_characters
        characters = [
            special.get(word_id) or encode_characters(word, width) for word_id, word in zip(ids, words, strict=True)
        ]
        return np.array(characters, dtype=np.int64).reshape(-1, width)

    def apply_language_tags(self, ids: Sequence[int] | np.ndarray, characters: np.ndarray) -> np.ndarray:
        """Set the first character of each word to the id of its language, in place.

        The last tag since the beginning of the sentence determines the language; without a tag, it is `language`. `ids`
        are (words,) vocabulary ids, `characters` (words, characters) ids.
        """
        word_ids = np.asarray(ids, dtype=np.int64)
        if not self.languages or not len(word_ids):
            return characters
        languages = self._language_of.take(word_ids, mode="clip")
        changes = (languages > 0) | (word_ids == self.bos_token_id)
        current = languages[np.maximum.accumulate(np.where(changes, np.arange(len(word_ids)), 0))]
        if self.language is not None:
            current = np.where(current > 0, current, self.languages.index(self.language) + 1)
        words = (current > 0) & ~np.isin(word_ids, list(self._special_characters))
        characters[words, 0] = WORD_PADDING + current[words]
        return characters

    def first_language_tag(self, ids: np.ndarray) -> np.ndarray:
        """The first language tag among vocabulary ids: (1,), or (0,) without a tag."""
        return ids[self._language_of.take(ids, mode="clip") > 0][:1]

    def character_ids_to_words(self, character_ids: Sequence[Sequence[int]] | np.ndarray) -> list[str]:
        """Convert (words, characters) ids to words, without padding."""
        special = {ids: self.convert_ids_to_tokens(token_id) for token_id, ids in self._special_characters.items()}
        special.pop((0,) * self.max_characters)
        words = []
        for row in character_ids:
            ids = tuple(int(character) for character in row)
            if any(ids):
                encoded = bytes(character - 1 for character in ids if 0 < character <= BYTES)
                words.append(special.get(ids) or encoded.decode("utf-8", "replace"))
        return words

    def decode(self, token_ids: Any, skip_special_tokens: bool = False, **kwargs: Any) -> Any:
        """Decode (words, characters) ids of one text or a batch, or vocabulary ids, to words joined by spaces."""
        token_ids = to_py_obj(token_ids)
        first: Any = token_ids[0] if isinstance(token_ids, list | tuple) and token_ids else 0
        if not isinstance(first, list | tuple):
            return super().decode(token_ids, skip_special_tokens=skip_special_tokens, **kwargs)
        first_element: Any = next((row[0] for row in token_ids if row), [])  # a text of a batch may be empty
        if isinstance(first_element, list | tuple):
            return [self.decode(row, skip_special_tokens, **kwargs) for row in token_ids]
        skipped = self.all_special_tokens if skip_special_tokens else []
        return " ".join(word for word in self.character_ids_to_words(token_ids) if word not in skipped)

    def _encode_plus(
        self, text: Any, text_pair: Any = None, *, return_tensors: Any = None, **kwargs: Any
    ) -> BatchEncoding:
        """Split text into words by the backend, and words into characters."""
        is_split = bool(kwargs.get("is_split_into_words"))
        pre_tokenizer = self._tokenizer.pre_tokenizer
        if is_split:
            self._tokenizer.pre_tokenizer = None
        try:
            encoded = super()._encode_plus(text, text_pair, **kwargs)
        finally:
            self._tokenizer.pre_tokenizer = pre_tokenizer
        characters = [
            self._characters(encoding, sequences)
            for encoding, sequences in zip(
                encoded.encodings or [], encoded_sequences(encoded, text, text_pair, is_split), strict=True
            )
        ]
        is_batch = isinstance(text, list | tuple) and (
            not is_split or (bool(text) and isinstance(text[0], list | tuple))
        )
        is_batch = is_batch or "overflow_to_sample_mapping" in encoded
        if return_tensors is None:
            encoded["input_ids"] = [ids.tolist() for ids in characters] if is_batch else characters[0].tolist()
            return encoded
        encoded["input_ids"] = characters if is_batch else characters[0]
        return encoded.convert_to_tensors(return_tensors, prepend_batch_axis=not is_batch)

    def _characters(self, encoding: Any, sequences: Sequence[str | Sequence[str]]) -> np.ndarray:
        """(words, characters) ids of one encoding of the backend."""
        words = []
        for word_index, sequence_index, (start, stop) in zip(
            encoding.word_ids, encoding.sequence_ids, complete_offsets(encoding, sequences)
        ):
            sequence = "" if sequence_index is None else sequences[sequence_index]
            words.append((sequence if isinstance(sequence, str) else sequence[word_index])[start:stop])
        return self.apply_language_tags(encoding.ids, self.character_ids(encoding.ids, words))

    def pad(self, encoded_inputs: Any, *arguments: Any, **kwargs: Any) -> BatchEncoding:
        """Pad texts to the same number of words; see `PreTrainedTokenizerBase.pad`."""
        if isinstance(encoded_inputs, list | tuple):
            names = encoded_inputs[0].keys()
            encoded_inputs = {name: [example[name] for example in encoded_inputs] for name in names}
        ids = encoded_inputs[self.model_input_names[0]]
        first_element: Any = next((row[0] for row in ids if len(row)), [])  # a text of a batch may be empty
        if not isinstance(first_element, int | np.integer):
            return super().pad(encoded_inputs, *arguments, **kwargs)
        batch = super().pad({name: [value] for name, value in encoded_inputs.items()}, *arguments, **kwargs)
        return BatchEncoding({name: value[0] for name, value in batch.items()})

    def _pad(self, encoded_inputs: Any, *arguments: Any, **kwargs: Any) -> dict[str, Any]:
        padded = super()._pad(encoded_inputs, *arguments, **kwargs)
        padding = [0] * self.max_characters
        name = self.model_input_names[0]
        padded[name] = [padding if isinstance(ids, int) else ids for ids in padded[name]]
        return padded
