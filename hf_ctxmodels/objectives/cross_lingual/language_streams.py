"""Text of several languages as XLM reads it: a stream for each language, cut into sequences (Lample & Conneau 2019)."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from hf_ctxmodels.core.constants import IGNORE_INDEX
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import check_at_least, flag
from hf_ctxmodels.core.generation import split_language_tag
from hf_ctxmodels.data.documents import TranslatedText
from hf_ctxmodels.data.examples import Example
from hf_ctxmodels.data.padding import required_token
from hf_ctxmodels.objectives.autoregressive.causal_lm import DataCollatorForCausalLM, TokenStream
from hf_ctxmodels.objectives.base import Objective
from hf_ctxmodels.objectives.components.tokenized_documents import SENTENCES_PER_CALL, document_batches

Sentence = tuple[int, np.ndarray]
"""The language id of a sentence, and its (tokens,) ids without special tokens."""


class LanguageReader:
    """Tokenizes the sentences of documents, and determines the language id of each.

    The language of a sentence is its tag ("<de> Ein Satz."); without a tag, the language of the previous sentence of
    the document, for example after sentence splitting; else `language`.

    Args:
        tokenizer: Its `languages` are the valid names; with fewer than two every text has the language 0.
        language: Name of the language of texts without a tag; "" makes these an error.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, language: str) -> None:
        self.tokenizer, self.language = tokenizer, language
        self.names: list[str] = list(getattr(tokenizer, "languages", ()))
        self.is_multilingual = len(self.names) > 1
        if language and self.names:
            tokenizer.language_id(language)  # raises for an unknown name

    def read(self, documents: list[list[str]]) -> list[list[Sentence]]:
        """The sentences of each document, tokenized by the rules of their language; raises CtxError for a text with no
        tag or an unknown one."""
        tagged_documents = [list(self._with_languages(document)) for document in documents]
        texts: dict[int, list[str]] = {}
        for language, text in (sentence for document in tagged_documents for sentence in document):
            texts.setdefault(language, []).append(text)
        ids = {language: self._tokenize(language, language_texts) for language, language_texts in texts.items()}
        return [[(language, next(ids[language])) for language, _ in document] for document in tagged_documents]

    def _tokenize(self, language: int, texts: list[str]) -> Iterator[np.ndarray]:
        """(tokens,) ids of each text of a language, without special tokens."""
        arguments = {"language": self.names[language]} if self.names else {}
        for start in range(0, len(texts), SENTENCES_PER_CALL):
            batch = texts[start : start + SENTENCES_PER_CALL]
            encoded = self.tokenizer(batch, add_special_tokens=False, verbose=False, **arguments)
            yield from (np.asarray(ids, dtype=np.int32) for ids in encoded["input_ids"])

    def _with_languages(self, document: list[str]) -> Iterator[tuple[int, str]]:
        previous: str | None = None
        for sentence in document:
            if not self.is_multilingual:
                yield 0, sentence
                continue
            tag, text = split_language_tag(sentence)
            inherited = None if isinstance(document, TranslatedText) else previous
            name = tag or inherited or self.language
            if not name:
                raise CtxError(
                    f"A text has no language tag: {sentence[:60]!r}.",
                    hint="set a tag for each --dataset: --language_tags '<de>' ...; for texts with translations, whose "
                    "tag is the translation's, set --objective NAME:language=LANGUAGE.",
                )
            previous = name
            yield self.tokenizer.language_id(name), text


@dataclass
class StreamObjective(Objective):
    """Base class of objectives on streams of one language each.

    A stream is the sentences of a language with one end token before, between and after them; a sequence begins where
    the previous one ended. Documents are texts whose sentences begin with a language tag (`--language_tags`); both
    sides of a text with its translation are sentences. A tokenizer with fewer than two languages requires no tags, and
    examples then have no `langs`.
    """

    immutable_config_fields = ("n_langs", "lang2id")
    language: str = flag("", "Name of the language of texts without a tag, such as texts with a translation.")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(2, max_length=self.max_length)
        self.end = required_token(self.tokenizer, "eos_token", "separates sentences")
        self.reader = LanguageReader(self.tokenizer, self.language)
        self.baseline = replace(self.baseline, excluded_ids=[int(self.tokenizer.pad_token_id)])

    @property
    def config_fields(self) -> dict[str, Any]:
        """The languages, and whether the model is causal."""
        names = self.reader.names
        return {
            "n_langs": max(1, len(names)),
            "lang2id": {name: number for number, name in enumerate(names)} or None,
            "causal": self.auto_class == "AutoModelForCausalLM",
        }

    def examples(self, documents: Iterable[list[str]], pass_index: int = 0) -> Iterator[Example]:
        """Examples of the streams, see `example`; raises CtxError for a text without language."""
        streams: dict[int, TokenStream] = {}
        for batch in document_batches(documents):
            for document, sentences in zip(batch, self.reader.read(batch), strict=True):
                tokens = sum(len(ids) for _, ids in sentences)
                self.statistics.update(documents=1, sentences=len(sentences), tokens=tokens)
                yield from self.document_examples(document, sentences, streams)
        for language, stream in sorted(streams.items()):
            if len(stream.remaining) > 1:
                yield self.example(language, stream.remaining, IGNORE_INDEX)

    def document_examples(
        self, document: list[str], sentences: list[Sentence], streams: dict[int, TokenStream]
    ) -> Iterator[Example]:
        """The examples that a document completes."""
        for language, ids in sentences:
            if len(ids):
                stream = streams.setdefault(language, TokenStream(self.max_length, [self.end]))
                for sequence, following in stream.add(np.append(ids, self.end)):
                    yield self.example(language, sequence, following)

    def example(self, language: int, ids: np.ndarray, following: int) -> Example:
        """The example of a sequence of a stream: input_ids, langs with several languages, and following."""
        return {"input_ids": ids, **self.langs((language, len(ids))), "following": following}

    def langs(self, *segments: tuple[int, int]) -> dict[str, np.ndarray]:
        """The column of language ids, from the language and the number of tokens of each segment."""
        if not self.reader.is_multilingual:
            return {}
        return {"langs": np.concatenate([np.full(length, language, dtype=np.int16) for language, length in segments])}


@dataclass
class StreamCausalLM(DataCollatorForCausalLM, StreamObjective):
    """XLM's causal language modelling: predict each token of a stream from its predecessors.

    | document | example | targets |
    |---|---|---|
    | sentences of one language | `max_length` tokens of `</s> sentence </s> sentence </s> ...` | every token |

    Unlike in the released code, the last token of an example has a target, the first one of the next example.

    References: Lample & Conneau 2019 (arXiv 1901.07291), section 3.2.
    Related: `DocumentLM` has the end token after documents; `StreamMaskedLM` masks the same sequences.

    Example:
        >>> StreamCausalLM(tokenizer, max_length=256, seed=0, language="en")
    """

    auto_class = "AutoModelForCausalLM"
