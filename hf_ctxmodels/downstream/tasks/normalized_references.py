"""References as a tokenizer writes them: the best that a model of it can do.

A tokenizer that lower-cases, drops accents, sets spaces around punctuation or lacks words cannot give a text back, so
that even a model without errors does not reach a full score against the references as they are. What it gets is the
ceiling.
"""

from collections.abc import Mapping, Sequence

from transformers import PreTrainedTokenizerBase

from hf_ctxmodels.core.generation import decode_generated
from hf_ctxmodels.downstream.tasks.text_metrics import score_texts

CEILING = "ceiling: what the references get when the tokenizer writes them; NAME_normalized is against those texts"


class NormalizedReferences:
    """References decoded from their own ids, each once.

    Args:
        tokenizer: Of the targets.
        metrics: Names of `TEXT_METRICS`.
        lower_case: Whether the metrics leave case out of regard.
        tokenizer_arguments: Keywords by which the tokenizer is told the language, see `LanguagePair.tokenizer_arguments`.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        metrics: Sequence[str],
        *,
        lower_case: bool = False,
        tokenizer_arguments: Mapping[str, str] | None = None,
    ) -> None:
        self._encoded_in = tokenizer_arguments or {}
        self._tokenizer, self._metrics, self._lower_case = tokenizer, metrics, lower_case
        self._known: dict[str, str] = {}

    def texts(self, references: Sequence[str]) -> list[str]:
        """The references as the tokenizer writes them, without special tokens."""
        if new := [each for each in dict.fromkeys(references) if each not in self._known]:
            ids = self._tokenizer(text_target=new, verbose=False, **self._encoded_in)["input_ids"]
            self._known |= zip(new, decode_generated(self._tokenizer, ids), strict=True)
        return [self._known[each] for each in references]

    def differ(self, references: Sequence[str]) -> bool:
        """Whether one is not given back, but for white space and, where it does not count, case."""
        sides = (self.texts(references), references)
        words = ([(text.lower() if self._lower_case else text).split() for text in side] for side in sides)
        return any(one != two for one, two in zip(*words, strict=True))

    def ceiling(self, references: Sequence[str]) -> dict[str, float]:
        """The metrics of `texts` against the references; empty where they do not differ."""
        if not self.differ(references):
            return {}
        return score_texts(self._metrics, self.texts(references), references, lower_case=self._lower_case)

    def scores(self, predictions: Sequence[str], references: Sequence[str]) -> dict[str, float]:
        """The metrics of predictions against `texts`, as `NAME_normalized`; empty where they do not differ."""
        if not self.differ(references):
            return {}
        found = score_texts(self._metrics, predictions, self.texts(references), lower_case=self._lower_case)
        return {f"{name}_normalized": value for name, value in found.items()}
