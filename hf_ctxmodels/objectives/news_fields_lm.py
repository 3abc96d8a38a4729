"""Language modeling of news articles and their metadata (Zellers et al. 2019, section 3.1)."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from hf_ctxmodels.core.constants import IGNORE_INDEX, NEWS_FIELDS
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import check_range, flag
from hf_ctxmodels.data.documents import NewsArticle
from hf_ctxmodels.data.examples import Example
from hf_ctxmodels.data.seeding import Purpose, generator
from hf_ctxmodels.objectives.base import Objective
from hf_ctxmodels.objectives.causal_lm import DataCollatorForCausalLM
from hf_ctxmodels.objectives.tokenized_documents import document_batches

_NEVER_DROPPED = ("title", "article")


@dataclass
class DataCollatorForNewsFieldsLM(DataCollatorForCausalLM):
    """`DataCollatorForCausalLM` for sequences that may contain padding tokens, which are not targets."""

    def targets(self, ids: np.ndarray, feature: Mapping[str, Any]) -> np.ndarray:
        """(words,) ids -> (words,) the next word of each; -100 for padding tokens."""
        targets = super().targets(ids, feature)
        targets[targets == self.tokenizer.pad_token_id] = IGNORE_INDEX
        return targets


@dataclass
class NewsFieldsLM(DataCollatorForNewsFieldsLM, Objective):
    """Predict each token of a news article and its metadata, with the fields in two parts of varying order.

    The canonical order is domain, date, authors, title, article, summary. Every field is enclosed by its begin and end
    tokens.

    | share | first part | second part |
    |---|---|---|
    | `article_first` .35 | article | the other fields, with `metadata_dropout` |
    | `canonical` .15 | all fields | - |
    | the remaining .5 | half of the fields | the other half |

    Both parts keep the canonical order. In the last case a field other than article and title is dropped with
    probability `metadata_dropout`, and a summary in the first part is dropped. If the parts together exceed an example,
    each of them is shorter, and the article is in the first part, that part is cut with probability `cut`, so that the
    second one fits after one padding token, which is not a target. A sequence that is still longer gives
    round(tokens / (max_length + 1)) windows at random positions. Documents of running text are articles without
    metadata.

    References: Zellers et al. 2019 (arXiv 1905.12616), section 3.1; the released code (realnews/prepare_lm_data.py).
    Related: `DocumentLM` joins running text to full examples.

    Example:
        >>> from hf_ctxmodels.data.document_sources import load_documents
        >>> objective = NewsFieldsLM(tokenizer, max_length=1024, seed=0)
        >>> next(objective.examples(load_documents("news.jsonl", news_articles=True)))
    """

    auto_class = "AutoModelForCausalLM"
    predicts_special_tokens = True
    article_first: float = flag(0.35, "Share of articles that precede their metadata.")
    canonical: float = flag(0.15, "Share of articles with all fields in the canonical order.")
    metadata_dropout: float = flag(0.1, "Probability of dropping a field, except in the canonical order.")
    cut: float = flag(0.2, "Probability of cutting an article that is too long, so that its second part fits.")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "article_first", "canonical", at_least=0, at_most=1)
        check_range(self, "metadata_dropout", "cut", at_least=0, at_most=1)
        check_range(self, "max_length", at_least=2)
        if self.article_first + self.canonical > 1:
            raise CtxError(
                f"article_first={self.article_first} and canonical={self.canonical} have a sum over 1.",
                hint="use shares with a sum of at most 1.",
            )
        if not hasattr(self.tokenizer, "field_ids"):
            raise CtxError(
                f"{type(self.tokenizer).__name__} has no tokens that begin and end the fields of an article.",
                hint="use the tokenizer of Grover.",
            )
        self.window_size = self.max_length + 1
        self.field_tokens = {field: self.tokenizer.field_ids(field) for field in NEWS_FIELDS}
        (begin, end), (classifier, _) = self.field_tokens["article"], self.field_tokens["summary"]
        self.config_fields = {"bos_token_id": begin, "eos_token_id": end, "classifier_token_id": classifier}

    def examples(self, documents: Iterable[list[str]], epoch: int = 0) -> Iterator[Example]:
        """Examples with input_ids and following."""
        for number, field_ids in enumerate(self._articles(documents)):
            rng = generator(self.seed, epoch, number, Purpose.ORDER)
            for window in self._windows(self._sequence(field_ids, rng), rng):
                yield {"input_ids": window[:-1], "following": int(window[-1])}

    def _articles(self, documents: Iterable[list[str]]) -> Iterator[dict[str, np.ndarray]]:
        """Field -> (tokens,) ids with its begin and end tokens, of each document with text."""
        for batch in document_batches(documents):
            fields = [
                document.fields if isinstance(document, NewsArticle) else {"article": " ".join(document)}
                for document in batch
            ]
            field_texts = [text for texts in fields for text in texts.values()]
            encoded = self.tokenizer(
                field_texts,
                add_special_tokens=False,
                split_special_tokens=True,  # within a text they are ordinary words
                return_attention_mask=False,
                verbose=False,
            )["input_ids"]
            self.statistics.update(
                documents=len(batch),
                sentences=len(field_texts),
                tokens=sum(map(len, encoded)),
                words=len(" ".join(field_texts).split()),
            )
            remaining_ids = iter(encoded)
            for texts in fields:
                field_ids = {field: next(remaining_ids) for field in texts}
                if field_ids["article"]:
                    tokens = self.field_tokens
                    yield {
                        field: np.array([tokens[field][0], *ids, tokens[field][1]], dtype=np.int32)
                        for field, ids in field_ids.items()
                    }

    def arrange(self, rng: np.random.Generator) -> tuple[list[str], list[str]]:
        """The fields of both parts of an example, whether the article has them or not, as in the released code."""
        uniform = rng.random()
        if uniform < self.article_first:
            metadata = [field for field in NEWS_FIELDS if field != "article"]
            return ["article"], [field for field in metadata if rng.random() >= self.metadata_dropout]
        if uniform < self.article_first + self.canonical:
            return list(NEWS_FIELDS), []
        first, second = [], []
        for field in NEWS_FIELDS:
            if rng.random() < self.metadata_dropout and field not in _NEVER_DROPPED:
                continue
            if rng.random() >= 0.5:
                second.append(field)
            elif field != "summary":
                first.append(field)
        return first, second

    def _sequence(self, field_ids: Mapping[str, np.ndarray], rng: np.random.Generator) -> np.ndarray:
        """(tokens,) of both parts, cut or not."""
        field_groups = self.arrange(rng)
        empty = np.zeros(0, dtype=np.int32)
        first, second = (
            np.concatenate([empty, *(field_ids[field] for field in fields if field in field_ids)])
            for fields in field_groups
        )
        is_long = len(first) + len(second) > self.window_size
        if not (is_long and "article" in field_groups[0] and len(second) and rng.random() < self.cut):
            return np.concatenate([first, second])
        if len(first) >= self.window_size or len(second) >= self.window_size:
            return first  # as in the released code: the second part is lost
        first_length = self.window_size - len(second) - 1
        return np.concatenate([first[:first_length], [self.tokenizer.pad_token_id], second], dtype=np.int32)

    def _windows(self, ids: np.ndarray, rng: np.random.Generator) -> Iterator[np.ndarray]:
        """The sequence, or windows of `window_size` tokens of a longer one."""
        if len(ids) <= self.window_size:
            yield ids
            return
        positions = len(ids) - self.window_size + 1
        count = int(0.5 + len(ids) / self.window_size)
        for start in rng.choice(positions, size=min(count, positions), replace=False):
            yield ids[start : start + self.window_size]
