"""Language modelling of news articles and their metadata, in parts (Zellers et al. 2019, section 3.1)."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, ClassVar, NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from hf_ctxmodels.core.constants import NEWS_FIELDS
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import flag
from hf_ctxmodels.data.documents import NewsArticle
from hf_ctxmodels.data.examples import Example
from hf_ctxmodels.data.seeding import Stream, generator
from hf_ctxmodels.objectives.autoregressive.causal_lm import DataCollatorForCausalLM
from hf_ctxmodels.objectives.base import Objective
from hf_ctxmodels.objectives.components.masking import IGNORE_INDEX
from hf_ctxmodels.objectives.components.tokenized_documents import document_batches

_NEVER_DROPPED = ("title", "article")


@dataclass
class DataCollatorForNewsFieldsLM(DataCollatorForCausalLM):
    """`DataCollatorForCausalLM` for rows that may hold padding tokens, which are no targets."""

    def _targets(self, row: np.ndarray, feature: dict[str, Any]) -> np.ndarray:
        targets = super()._targets(row, feature)
        targets[targets == self.tokenizer.pad_token_id] = IGNORE_INDEX
        return targets


@dataclass(frozen=True)
class NewsFieldsOptions:
    """Options of `NewsFieldsLM`."""

    article_first: float = flag(0.35, "Share of articles that stand before their metadata.")
    canonical: float = flag(0.15, "Share of articles with all fields in the canonical order.")
    metadata_dropout: float = flag(0.1, "Probability of leaving a field out, in all but the canonical order.")
    cut: float = flag(0.2, "Probability of cutting an article that is too long, so that its second part fits.")

    def __post_init__(self) -> None:
        for name in ("article_first", "canonical", "metadata_dropout", "cut"):
            if not 0 <= getattr(self, name) <= 1:
                raise CtxError(f"{name}={getattr(self, name)} is no probability.", hint="use a number from 0 to 1.")
        if self.article_first + self.canonical > 1:
            raise CtxError(
                f"article_first={self.article_first} and canonical={self.canonical} are more than 1 together.",
                hint="use shares of at most 1 together.",
            )


class Arrangement(NamedTuple):
    """The fields of a row: those of the first part, then those of the second."""

    first: list[str]
    second: list[str]


class NewsFieldsLM(Objective):
    """Predict each token of a news article and its metadata, with the fields in parts of varying order.

    The canonical order is domain, date, authors, title, article, summary. Every field stands between its own tokens.

    | share | first part | second part |
    |---|---|---|
    | `article_first` .35 | article | each other field but with `metadata_dropout` |
    | `canonical` .15 | all fields | - |
    | the others .5 | half of the fields | the other half |

    Both parts keep the canonical order. In the last case a field other than article and title is left out with
    `metadata_dropout`, and a summary that falls into the first part is left out. A row holds `max_length` tokens and
    the one that follows them. If the parts are longer together, each shorter than a row, and the article is in the
    first part, that part is cut with probability `cut`, so that the second one fits after one padding token, which is
    no target. What is still longer gives round(tokens / row) windows at different uniformly random places.

    Documents of running text are articles without metadata.

    References: Zellers et al. 2019 (arXiv 1905.12616), section 3.1; the released code
        (realnews/prepare_lm_data.py, sample/encoder.py), which this follows: the order is not a permutation.
    Related: `DocumentLM` joins running text to full rows.

    Example:
        >>> objective = NewsFieldsLM(tokenizer, max_length=1024, seed=0)
        >>> next(objective.examples(load_documents("news.jsonl", news_articles=True)))
    """

    auto_class = "AutoModelForCausalLM"
    Options: ClassVar[type] = NewsFieldsOptions
    options: NewsFieldsOptions
    collate: DataCollatorForNewsFieldsLM

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, max_length: int, seed: int, **options: Any) -> None:
        super().__init__(tokenizer, max_length=max_length, seed=seed, **options)
        if not hasattr(tokenizer, "field_ids"):
            raise CtxError(
                f"{type(tokenizer).__name__} has no tokens that begin and end the fields of an article.",
                hint="use the tokenizer of Grover.",
            )
        if max_length < 2:
            raise CtxError(f"max_length={max_length} leaves no token to be predicted.", hint="use 2 or more.")
        self.row_size = max_length + 1
        self.tokens_of = {field: tokenizer.field_ids(field) for field in NEWS_FIELDS}
        self.baseline = replace(self.baseline, excluded_ids=[int(tokenizer.pad_token_id)])
        self.collate = DataCollatorForNewsFieldsLM(tokenizer)

    @property
    def config_fields(self) -> dict[str, Any]:
        """Ids of the tokens that the model's heads look for."""
        begin, end = self.tokens_of["article"]
        return {"bos_token_id": begin, "eos_token_id": end, "classifier_token_id": self.tokens_of["summary"][0]}

    def examples(self, documents: Iterable[list[str]], pass_index: int = 0) -> Iterator[Example]:
        """Rows with input_ids and following."""
        numbers = count()
        for pieces in self._articles(documents):
            draws = generator(self.seed, pass_index, next(numbers), Stream.ORDER)
            for row in self._windows(self._row(pieces, draws), draws):
                yield {"input_ids": row[:-1], "following": int(row[-1])}

    def _articles(self, documents: Iterable[list[str]]) -> Iterator[dict[str, np.ndarray]]:
        """Field -> (tokens,) ids with the tokens that begin and end it, of each document with text."""
        for batch in document_batches(documents):
            fields = [
                document.fields if isinstance(document, NewsArticle) else {"article": " ".join(document)}
                for document in batch
            ]
            flat = [text for texts in fields for text in texts.values()]
            encoded = self.tokenizer(
                flat,
                add_special_tokens=False,
                split_special_tokens=True,  # in a text they are words like any other
                return_attention_mask=False,
                verbose=False,
            )["input_ids"]
            rows = iter(encoded)
            self.statistics.update(
                documents=len(batch),
                sentences=len(flat),
                tokens=sum(map(len, encoded)),
                words=len(" ".join(flat).split()),
            )
            for texts in fields:
                pieces = {field: np.asarray(next(rows), dtype=np.int32) for field in texts}
                if len(pieces["article"]):
                    yield {field: self._between(field, ids) for field, ids in pieces.items()}

    def _between(self, field: str, ids: np.ndarray) -> np.ndarray:
        begin, end = self.tokens_of[field]
        return np.concatenate([[begin], ids, [end]], dtype=np.int32)

    def arrange(self, draws: np.random.Generator) -> Arrangement:
        """The fields of a row, whether the article has them or not; the released code draws likewise."""
        options, kind = self.options, draws.random()
        if kind < options.article_first:
            others = [field for field in NEWS_FIELDS if field != "article"]
            return Arrangement(["article"], [field for field in others if draws.random() >= options.metadata_dropout])
        if kind < options.article_first + options.canonical:
            return Arrangement(list(NEWS_FIELDS), [])
        arrangement = Arrangement([], [])
        for field in NEWS_FIELDS:
            if draws.random() < options.metadata_dropout and field not in _NEVER_DROPPED:
                continue
            if draws.random() >= 0.5:
                arrangement.second.append(field)
            elif field != "summary":
                arrangement.first.append(field)
        return arrangement

    def _row(self, pieces: Mapping[str, np.ndarray], draws: np.random.Generator) -> np.ndarray:
        """(tokens,) of both parts, cut or not."""
        arrangement = self.arrange(draws)
        first, second = (
            np.concatenate([np.zeros(0, dtype=np.int32), *(pieces[field] for field in part if field in pieces)])
            for part in arrangement
        )
        too_long = len(first) + len(second) > self.row_size
        if not (too_long and "article" in arrangement.first and len(second) and draws.random() < self.options.cut):
            return np.concatenate([first, second])
        if len(first) >= self.row_size or len(second) >= self.row_size:
            return first  # as in the released code: the second part is lost
        room = self.row_size - len(second) - 1
        return np.concatenate([first[:room], [self.tokenizer.pad_token_id], second], dtype=np.int32)

    def _windows(self, row: np.ndarray, draws: np.random.Generator) -> Iterator[np.ndarray]:
        """The row itself, or windows of `row_size` tokens of a longer one."""
        if len(row) <= self.row_size:
            yield row
            return
        places = len(row) - self.row_size + 1
        number = int(0.5 + len(row) / self.row_size)
        for start in draws.choice(places, size=min(number, places), replace=False):
            yield row[start : start + self.row_size]
