"""Minimal pairs: does a model hold the acceptable sentence to be likelier than one that differs in one point?"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from math import log
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.json_parsing import parse_json
from hf_ctxmodels.data.text_files import read_lines

Scorer = Callable[[Sequence[str]], Sequence[float]]
"""Texts -> a number for each, higher for likelier ones."""


class MinimalPair(NamedTuple):
    """An acceptable sentence, one that is not, and the phenomenon that makes the difference."""

    good: str
    bad: str
    phenomenon: str


class PairResult(NamedTuple):
    """Pairs whose acceptable sentence has the higher score, a tie counting half; and all pairs."""

    right: float
    pairs: int

    @property
    def accuracy(self) -> float:
        """The share of right pairs; 0.5 by chance."""
        return self.right / self.pairs


def read_pairs(path: str | Path) -> list[MinimalPair]:
    """Pairs of a file of JSON lines with `sentence_good`, `sentence_bad` and `linguistics_term`, as in BLiMP
    (Warstadt et al. 2020, arXiv 1912.00582). Without a term the file's name is the phenomenon.

    Raises:
        CtxError: The file cannot be read, holds no pair, or a line is no such object.
    """
    name = Path(path).name.partition(".")[0]
    pairs = []
    for number, line in enumerate(read_lines(Path(path)), start=1):
        location = f"{path}, line {number}"
        found: Any = parse_json(line, location=location)
        sentences = [found.get(key) for key in ("sentence_good", "sentence_bad")] if isinstance(found, dict) else [None]
        if not all(isinstance(each, str) and each.strip() for each in sentences):
            raise CtxError(
                "Not an object with the texts sentence_good and sentence_bad.",
                location=location,
                hint="give files in the format of BLiMP.",
            )
        good, bad = map(str, sentences)
        pairs.append(MinimalPair(good, bad, str(found.get("linguistics_term") or name)))
    if not pairs:
        raise CtxError("No pair in the file.", location=str(path), hint="give files in the format of BLiMP.")
    return pairs


def evaluate_pairs(pairs: Sequence[MinimalPair], scorer: Scorer) -> dict[str, PairResult]:
    """The results of every phenomenon, by the alphabet."""
    goods, bads = scorer([pair.good for pair in pairs]), scorer([pair.bad for pair in pairs])
    results = {name: PairResult(0.0, 0) for name in sorted({pair.phenomenon for pair in pairs})}
    for pair, good, bad in zip(pairs, goods, bads, strict=True):
        right, number = results[pair.phenomenon]
        results[pair.phenomenon] = PairResult(right + (good > bad) + 0.5 * (good == bad), number + 1)
    return results


def total(results: Iterable[PairResult]) -> PairResult:
    """All phenomena together."""
    rows = list(results)
    return PairResult(sum(each.right for each in rows), sum(each.pairs for each in rows))


def unigram_scorer(tokenizer: PreTrainedTokenizerBase, texts: Iterable[str]) -> Scorer:
    """The sum of the log-frequencies of a text's tokens in `texts`, each counted once more than it occurs: what can be
    told without their order."""
    counts = Counter(token for text in texts for token in tokenizer.tokenize(text))
    whole = sum(counts.values()) + len(tokenizer)

    def scores(sentences: Sequence[str]) -> list[float]:
        return [sum(log((counts[token] + 1) / whole) for token in tokenizer.tokenize(each)) for each in sentences]

    return scores
