"""Evaluation of control codes: perplexity with the right, a wrong and no code, and attribution of texts to codes
(Keskar et al. 2019, section 5)."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.data.documents import TextWithCode
from hf_ctxmodels.data.padding import required_token
from hf_ctxmodels.evaluation.scoring import score_token_ids
from hf_ctxmodels.objectives.tokenized_documents import document_batches, encode_ids

CodedText = tuple[str, np.ndarray]
"""The control code of a text, and its (tokens,) ids."""


def coded_texts(tokenizer: PreTrainedTokenizerBase, documents: Iterable[list[str]]) -> Iterator[CodedText]:
    """The tokens of the documents that have a code."""
    for batch in document_batches(document for document in documents if isinstance(document, TextWithCode)):
        ids = encode_ids(tokenizer, [" ".join(document) for document in batch])
        yield from ((document.code, text) for document, text in zip(batch, ids, strict=True) if len(text))


def cut_windows(texts: Iterable[CodedText], length: int, texts_per_code: int | None = None) -> list[CodedText]:
    """Windows of exactly `length` tokens, the first `texts_per_code` of each code; shorter text is left out."""
    windows: dict[str, list[CodedText]] = {}
    for code, ids in texts:
        selected = windows.setdefault(code, [])
        starts = range(0, len(ids) - length + 1, length)
        selected += [(code, ids[start : start + length]) for start in starts]
    return [window for selected in windows.values() for window in selected[:texts_per_code]]


@dataclass(frozen=True)
class Attribution:
    """Attribution of texts to codes.

    Attributes:
        codes: Names of the codes.
        confusion: (codes, codes) number of texts by their code and the code that they were attributed to.
    """

    codes: tuple[str, ...]
    confusion: np.ndarray

    @classmethod
    def from_scores(cls, codes: Sequence[str], labels: np.ndarray, scores: np.ndarray) -> "Attribution":
        """Attribute each text to the code with the highest of its (texts, codes) scores."""
        confusion = np.zeros((len(codes), len(codes)), dtype=np.int64)
        np.add.at(confusion, (labels, scores.argmax(1)), 1)
        return cls(tuple(codes), confusion)

    @property
    def accuracy(self) -> float:
        """Share of texts that are attributed to their code."""
        return float(np.trace(self.confusion) / max(1, self.confusion.sum()))

    @property
    def chance(self) -> float:
        """Accuracy of the most frequent code."""
        return float(self.confusion.sum(1).max() / max(1, self.confusion.sum()))


@dataclass(frozen=True)
class ControlScores:
    """Cross-entropy (nats) of texts under each code.

    Attributes:
        codes: Names of the codes.
        labels: (texts,) number of each text's code.
        nats: (texts, codes + 1), the last column without a code, after the separator of documents.
        tokens: (texts,) number of predicted tokens.
    """

    codes: tuple[str, ...]
    labels: np.ndarray
    nats: np.ndarray
    tokens: np.ndarray

    def attribution(self) -> Attribution:
        """The code under which each text is most probable; all codes are equally probable a priori."""
        return Attribution.from_scores(self.codes, self.labels, -self.nats[:, :-1])

    def perplexities(self) -> dict[str, float]:
        """Perplexity per token with the `right` code, a `wrong` one (geometric mean of the others) if there are several
        codes, and with `none`."""
        right = self.nats[np.arange(len(self.labels)), self.labels]
        nats = {"right": right}
        if len(self.codes) > 1:
            nats["wrong"] = (self.nats[:, :-1].sum(1) - right) / (len(self.codes) - 1)
        nats["none"] = self.nats[:, -1]
        return {name: math.exp(values.sum() / self.tokens.sum()) for name, values in nats.items()}


def score_codes(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: Sequence[CodedText], *, batch_size: int = 32
) -> ControlScores:
    """Score texts under each code of a model; each token of a text is predicted.

    Raises:
        CtxError: The model has no codes, or no left-to-right language model; a text has another code or too many
            tokens, or there is no text.
    """
    codes: dict[str, int] = getattr(model.config, "control_codes", None) or {}
    unknown = sorted({code for code, _ in texts} - codes.keys())
    if not codes or not texts or unknown:
        problem = f"The model has no control code {', '.join(unknown)}." if unknown else "There is no text to score."
        raise CtxError(
            problem,
            location=model.config.name_or_path or None,
            hint=f"use the codes {', '.join(codes)}." if codes else "use texts and a model with control codes.",
        )
    names, limit = tuple(codes), model.config.max_sequence_length
    longest = max(len(ids) for _, ids in texts)
    if limit is not None and longest + 1 > limit:
        raise CtxError(
            f"A text has {longest} tokens and its code; the longest input of the model is {limit}.",
            hint=f"use texts of at most {limit - 1} tokens.",
        )
    prefixes = [*codes.values(), required_token(tokenizer, "eos_token", "precedes text without a code")]
    sequences = [[prefix, *ids.tolist()] for _, ids in texts for prefix in prefixes]
    scores = score_token_ids(model, tokenizer, sequences, batch_size=batch_size)
    nats = -np.array([score.log_probability for score in scores]).reshape(len(texts), len(prefixes))
    labels = np.array([names.index(code) for code, _ in texts])
    return ControlScores(names, labels, nats, np.array([len(ids) for _, ids in texts]))


class UnigramClassifier:
    """Naive Bayes over tokens: the baseline of attribution, which ignores their order.

    Args:
        texts: Training texts.
        codes: Names of the codes, which are equally probable a priori.
        vocab_size: Size of the vocabulary, each token of which has one additional count per code.
    """

    def __init__(self, texts: Iterable[CodedText], codes: Sequence[str], vocab_size: int) -> None:
        counts = {code: np.ones(vocab_size) for code in codes}
        for code, ids in texts:
            if code in counts:
                counts[code] += np.bincount(ids, minlength=vocab_size)
        self.codes = tuple(codes)
        self.log_probabilities = np.log([counts[code] / counts[code].sum() for code in codes])

    def attribution(self, texts: Sequence[CodedText]) -> Attribution:
        """The most probable code of each text."""
        labels = np.array([self.codes.index(code) for code, _ in texts], dtype=np.int64)
        return Attribution.from_scores(self.codes, labels, self.scores([ids for _, ids in texts]))

    def scores(self, texts: Sequence[np.ndarray]) -> np.ndarray:
        """(texts, codes) log-likelihood of each text."""
        return np.array([self.log_probabilities[:, ids].sum(1) for ids in texts]).reshape(-1, len(self.codes))


def confusion_table(attribution: Attribution) -> list[str]:
    """Lines of the confusion table: a row for each code of the texts, and a column for each code attributed."""
    width = max(8, *map(len, attribution.codes)) + 2
    header = "code".ljust(width) + "".join(code.rjust(width) for code in attribution.codes)
    rows: Mapping[str, np.ndarray] = dict(zip(attribution.codes, attribution.confusion, strict=True))
    return [header, *(code.ljust(width) + "".join(f"{count:>{width},}" for count in row) for code, row in rows.items())]
