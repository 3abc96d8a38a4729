"""Text of several languages as XLM reads it: streams of one language each, cut into rows (Lample & Conneau 2019)."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from transformers import PreTrainedTokenizerBase

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import flag
from hf_ctxmodels.core.languages import split_language_tag
from hf_ctxmodels.data.examples import Example
from hf_ctxmodels.data.padding import RowPadder
from hf_ctxmodels.objectives.autoregressive.causal_lm import DataCollatorForCausalLM
from hf_ctxmodels.objectives.base import Batch, Objective
from hf_ctxmodels.objectives.components.features import padded_columns
from hf_ctxmodels.objectives.components.masking import IGNORE_INDEX
from hf_ctxmodels.objectives.components.tokenized_documents import SENTENCES_PER_CALL, document_batches

Sentence = tuple[int, np.ndarray]
"""The number of a sentence's language, and its (tokens,) ids without special tokens."""


class LanguageReader:
    """Tokenises the sentences of documents, each with the number of its language.

    A sentence's language is that of its tag ("<de> Ein Satz."); else that of the sentence before it in its document,
    as where a sentence was split; else `language`.

    Args:
        tokenizer: Its `languages` are the known names; with less than two every text has the language 0.
        language: Name of the language of texts without a tag; "" makes these an error.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, language: str) -> None:
        self.tokenizer, self.language = tokenizer, language
        self.names: list[str] = list(getattr(tokenizer, "languages", ()))
        if language and self.names:
            tokenizer.language_id(language)

    @property
    def is_multilingual(self) -> bool:
        """Whether there are several languages."""
        return len(self.names) > 1

    def read(self, documents: list[list[str]]) -> list[list[Sentence]]:
        """The sentences of each document; the tokenizer is told their language, by whose rules it may split words.

        Raises:
            CtxError: A text has no tag, or that of an unknown language.
        """
        tagged = [list(self._tagged(document)) for document in documents]
        texts: dict[int, list[str]] = {}
        for number, text in (sentence for document in tagged for sentence in document):
            texts.setdefault(number, []).append(text)
        found = {number: self._ids(number, of_language) for number, of_language in texts.items()}
        return [[(number, next(found[number])) for number, _ in document] for document in tagged]

    def _ids(self, number: int, texts: list[str]) -> Iterator[np.ndarray]:
        """(tokens,) ids of each text of a language, without special tokens."""
        told = {"language": self.names[number]} if self.names else {}
        for start in range(0, len(texts), SENTENCES_PER_CALL):
            some = texts[start : start + SENTENCES_PER_CALL]
            rows = self.tokenizer(some, add_special_tokens=False, verbose=False, **told)
            yield from (np.asarray(row, dtype=np.int32) for row in rows["input_ids"])

    def _tagged(self, document: list[str]) -> Iterator[tuple[int, str]]:
        known: str | None = None
        for sentence in document:
            tag, text = split_language_tag(sentence) if self.is_multilingual else (None, sentence)
            known = tag or (known if not hasattr(document, "separator") else None) or self.language or None
            if self.is_multilingual and known is None:
                raise CtxError(
                    f"A text has no tag of its language: {sentence[:60]!r}.",
                    hint="give a tag for each --dataset: --language_tags '<de>' ...; of a text with translations, "
                    "whose tag is the translation's, --objective_options language=NAME.",
                )
            yield (self.tokenizer.language_id(known) if self.is_multilingual else 0), text


class LanguageStreams:
    """Concatenates the sentences of each language, with one end symbol between them, and cuts rows.

    A stream begins with the symbol, so that it both begins and ends every sentence; a row begins where the one before
    ended.

    Args:
        end: Id of the symbol.
        length: Tokens of a row.
    """

    def __init__(self, end: int, length: int) -> None:
        self.end, self.length = end, length
        self._rests: dict[int, np.ndarray] = {}

    def add(self, language: int, ids: np.ndarray) -> Iterator[tuple[int, np.ndarray, int]]:
        """Append a sentence; yields the full rows: the language, (length,) ids and the token that follows."""
        rest = self._rests.get(language, np.array([self.end], dtype=np.int32))
        rest, start = np.concatenate([rest, ids, [self.end]], dtype=np.int32), 0
        while start + self.length < len(rest):
            stop = start + self.length
            yield language, rest[start:stop], int(rest[stop])
            start = stop
        self._rests[language] = rest[start:]

    def rests(self) -> Iterator[tuple[int, np.ndarray, int]]:
        """The last row of each language, which may be shorter; nothing follows."""
        for language, rest in sorted(self._rests.items()):
            if len(rest) > 1:
                yield language, rest, IGNORE_INDEX
        self._rests = {}


@dataclass(frozen=True)
class StreamOptions:
    """Options of all objectives with streams."""

    language: str = flag("", "Name of the language of texts without a tag, as those that have a translation.")


class StreamObjective(Objective):
    """The base of objectives on streams of one language each.

    Documents are texts whose sentences begin with the tag of their language (`--language_tags`); of a text with its
    translation both sides are sentences. A tokenizer with less than two languages needs no tags, and rows then have no
    `langs`.
    """

    Options: ClassVar[type] = StreamOptions
    immutable_config_fields = ("n_langs", "lang2id")

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, max_length: int, seed: int, **options: Any) -> None:
        super().__init__(tokenizer, max_length=max_length, seed=seed, **options)
        if tokenizer.eos_token_id is None:
            raise CtxError(
                f"{type(tokenizer).__name__} has no eos_token, which stands between sentences.",
                hint="tokenizer.add_special_tokens({'eos_token': '</s>'}), and resize the model's embeddings.",
            )
        if max_length < 2:
            raise CtxError(f"max_length={max_length} leaves no room for text.", hint="use 2 or more.")
        self.end = int(tokenizer.eos_token_id)
        self.reader = LanguageReader(tokenizer, self.options.language)
        self.baseline = replace(self.baseline, excluded_ids=[int(tokenizer.pad_token_id)])

    @property
    def config_fields(self) -> dict[str, Any]:
        """The languages, and whether the model is causal."""
        names = self.reader.names
        numbers = {name: number for number, name in enumerate(names)} or None
        return {"n_langs": max(1, len(names)), "lang2id": numbers, "causal": self.auto_class == "AutoModelForCausalLM"}

    def examples(self, documents: Iterable[list[str]], pass_index: int = 0) -> Iterator[Example]:
        """Rows of the streams, see `row`; raises CtxError for a text without language."""
        streams = LanguageStreams(self.end, self.max_length)
        for batch in document_batches(documents):
            for document, sentences in zip(batch, self.reader.read(batch), strict=True):
                self.statistics.update(
                    documents=1, sentences=len(sentences), tokens=sum(len(ids) for _, ids in sentences)
                )
                yield from self.document_rows(document, sentences, streams)
        for language, ids, following in streams.rests():
            yield self.row(language, ids, following)

    def document_rows(
        self, document: list[str], sentences: list[Sentence], streams: LanguageStreams
    ) -> Iterator[Example]:
        """The rows that a document fills."""
        for language, ids in sentences:
            for row in streams.add(language, ids) if len(ids) else ():
                yield self.row(*row)

    def row(self, language: int, ids: np.ndarray, following: int) -> Example:
        """The example of a stream's row: input_ids, langs with several languages, and following."""
        return {"input_ids": ids, **self.langs((language, len(ids))), "following": following}

    def langs(self, *parts: tuple[int, int]) -> dict[str, np.ndarray]:
        """The column of languages of a row, from the language and the number of tokens of each part."""
        if not self.reader.is_multilingual:
            return {}
        return {"langs": np.concatenate([np.full(length, language, dtype=np.int16) for language, length in parts])}


@dataclass
class DataCollatorForStreamCausalLM(DataCollatorForCausalLM):
    """`DataCollatorForCausalLM` with `langs` (batch, words), if the features hold them."""

    def torch_call(self, features: list[dict[str, Any]]) -> Batch:
        """Collate features."""
        batch = super().torch_call(features)
        padder = RowPadder([len(feature["input_ids"]) for feature in features], self.tokenizer.padding_side)
        return batch | padded_columns(features, ("langs",), padder, self.tokenizer)


class StreamCausalLM(StreamObjective):
    """XLM's causal language modelling: predict each token of a stream from those before it.

    | document | row | targets |
    |---|---|---|
    | sentences of one language | `max_length` tokens of `</s> sentence </s> sentence </s> ...` | every token |

    Unlike in the released code, a row's last token has a target, the first one of the next row.

    References: Lample & Conneau 2019 (arXiv 1901.07291), section 3.2.
    Related: `DocumentLM` has the end symbol after documents; `StreamMaskedLM` masks the same rows.

    Example:
        >>> StreamCausalLM(tokenizer, max_length=256, seed=0, language="en")
    """

    auto_class = "AutoModelForCausalLM"
    collate: DataCollatorForStreamCausalLM

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, max_length: int, seed: int, **options: Any) -> None:
        super().__init__(tokenizer, max_length=max_length, seed=seed, **options)
        self.collate = DataCollatorForStreamCausalLM(tokenizer)
