"""Minimal pairs: whether a language model prefers the acceptable sentence of a pair."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import isnan, log, nan
from pathlib import Path
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.data.record_files import read_records
from hf_ctxmodels.data.text_files import read_lines

Scorer = Callable[[Sequence[str]], Sequence[float]]
"""Function from sentences to scores; a higher score means a more probable sentence."""


class MinimalPair(NamedTuple):
    """An acceptable sentence, an unacceptable one, and the linguistic phenomenon in which they differ."""

    good: str
    bad: str
    phenomenon: str


class PairResult(NamedTuple):
    """Number of pairs whose acceptable sentence has the higher score (a tie counts 0.5), and of all pairs."""

    correct: float
    pairs: int

    @property
    def accuracy(self) -> float:
        """Fraction of correct pairs; 0.5 by chance."""
        return self.correct / self.pairs


def read_pairs(path: str | Path) -> list[MinimalPair]:
    """Read the pairs of a file.

    A `.txt` file, also compressed, has the format of Zorro (Huebner et al. 2021): lines alternate between an
    unacceptable sentence and the acceptable one. Others have the format of BLiMP (Warstadt et al. 2020, arXiv
    1912.00582): JSON lines, Parquet or a dataset with `sentence_good`, `sentence_bad` and `linguistics_term`. The
    phenomenon of pairs without a term is the file's name.

    Raises:
        CtxError: The file cannot be read, has another format, or has no pairs.
    """
    name = Path(path).name
    if ".txt" in Path(path).suffixes:
        lines = [line.strip() for line in read_lines(path)]
        if len(lines) % 2 or not all(lines):
            raise CtxError(
                "Expected an even number of lines without empty ones.",
                location=str(path),
                hint="alternate between an unacceptable and an acceptable sentence.",
            )
        pairs = [MinimalPair(good, bad, name.partition(".txt")[0]) for bad, good in zip(lines[::2], lines[1::2])]
    else:
        pairs = list(_read_json_pairs(path, name.partition(".")[0]))
    if not pairs:
        raise CtxError("The file has no pairs.", location=str(path), hint="use files in the format of BLiMP or Zorro.")
    return pairs


def _read_json_pairs(path: str | Path, default_phenomenon: str) -> Iterator[MinimalPair]:
    for record, location in read_records(path):
        good, bad = record.get("sentence_good"), record.get("sentence_bad")
        if not all(isinstance(sentence, str) and sentence.strip() for sentence in (good, bad)):
            message = "Expected an object with the strings sentence_good and sentence_bad."
            raise CtxError(message, location=location, hint="use files in the format of BLiMP.")
        yield MinimalPair(str(good), str(bad), str(record.get("linguistics_term") or default_phenomenon))


def evaluate_pairs(pairs: Sequence[MinimalPair], scorer: Scorer) -> dict[str, PairResult]:
    """Result of each phenomenon, in alphabetical order; nan if a score of it is not a number."""
    good_scores, bad_scores = scorer([pair.good for pair in pairs]), scorer([pair.bad for pair in pairs])
    results = {name: PairResult(0.0, 0) for name in sorted({pair.phenomenon for pair in pairs})}
    for pair, good, bad in zip(pairs, good_scores, bad_scores, strict=True):
        correct, count = results[pair.phenomenon]
        is_correct = nan if isnan(good) or isnan(bad) else (good > bad) + 0.5 * (good == bad)
        results[pair.phenomenon] = PairResult(correct + is_correct, count + 1)
    return results


def total_result(results: Iterable[PairResult]) -> PairResult:
    """Result over all phenomena."""
    results = list(results)
    return PairResult(sum(result.correct for result in results), sum(result.pairs for result in results))


def unigram_scorer(tokenizer: PreTrainedTokenizerBase, texts: Iterable[str]) -> Scorer:
    """Baseline that ignores word order: the log-probability of a sentence under a unigram model with add-one smoothing
    of the tokens of `texts`."""
    counts = Counter(token for text in texts for token in tokenizer.tokenize(text, verbose=False))
    normalizer = counts.total() + len(tokenizer)

    def score_sentences(sentences: Sequence[str]) -> list[float]:
        return [
            sum(log((counts[token] + 1) / normalizer) for token in tokenizer.tokenize(sentence, verbose=False))
            for sentence in sentences
        ]

    return score_sentences
