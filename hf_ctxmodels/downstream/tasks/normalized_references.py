"""References after encoding and decoding by a tokenizer: the best possible output of a model with this tokenizer.

A tokenizer that lower-cases, drops accents, sets spaces around punctuation or lacks words does not reproduce a text, so
that even a perfect model does not reach the full score against the original references. Its score is an upper bound.
"""

from collections.abc import Mapping, Sequence

from transformers import PreTrainedTokenizerBase

from hf_ctxmodels.core.generation import decode_generated
from hf_ctxmodels.downstream.tasks.text_metrics import score_texts

UPPER_BOUND_NOTE = (
    "upper bound: score of references that the tokenizer encoded and decoded; NAME_normalized: score against these"
)


class NormalizedReferences:
    """References decoded from their own token ids; each reference is encoded once.

    Args:
        tokenizer: The tokenizer of the targets.
        metrics: Names of `TEXT_METRICS`.
        lower_case: Whether the metrics ignore case.
        tokenizer_arguments: Language arguments of the tokenizer, see `LanguagePair.tokenizer_arguments`.
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
        self._decoded: dict[str, str] = {}

    def texts(self, references: Sequence[str]) -> list[str]:
        """The references encoded and decoded by the tokenizer, without special tokens."""
        if new := [reference for reference in dict.fromkeys(references) if reference not in self._decoded]:
            ids = self._tokenizer(text_target=new, verbose=False, **self._encoded_in)["input_ids"]
            self._decoded |= zip(new, decode_generated(self._tokenizer, ids), strict=True)
        return [self._decoded[reference] for reference in references]

    def differ(self, references: Sequence[str]) -> bool:
        """Whether a reference differs after decoding, except in whitespace and, if ignored, case."""
        sides = (self.texts(references), references)
        words = ([(text.lower() if self._lower_case else text).split() for text in side] for side in sides)
        return any(decoded != original for decoded, original in zip(*words, strict=True))

    def upper_bounds(self, references: Sequence[str]) -> dict[str, float]:
        """The metrics of `texts` against the references; empty if they do not differ."""
        if not self.differ(references):
            return {}
        return score_texts(self._metrics, self.texts(references), references, lower_case=self._lower_case)

    def scores(self, predictions: Sequence[str], references: Sequence[str]) -> dict[str, float]:
        """The metrics of predictions against `texts`, as `NAME_normalized`; empty if no reference differs."""
        if not self.differ(references):
            return {}
        scores = score_texts(self._metrics, predictions, self.texts(references), lower_case=self._lower_case)
        return {f"{name}_normalized": score for name, score in scores.items()}
