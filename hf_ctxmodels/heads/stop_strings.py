"""Stop strings of `generate` for any tokenizer."""

from collections.abc import Callable, Iterable
from copy import copy
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationMixin, PreTrainedTokenizerBase, StoppingCriteria, StoppingCriteriaList

_TOKENS_PER_CHARACTER = 4  # at most, in a vocabulary of bytes


class DecodedStopStrings(StoppingCriteria):
    """Stops a sequence if its last token completes one of the stop strings in the decoded text.

    It needs no particular tokens in the vocabulary, unlike `StopStringCriteria` of transformers, which encodes a text
    of letters, and decodes target vocabularies.

    Args:
        stop_strings: The stop strings.
        tokenizer: A tokenizer; its `decode_target` decodes if it has a separate target vocabulary.
    """

    def __init__(self, stop_strings: Iterable[str], tokenizer: PreTrainedTokenizerBase) -> None:
        self.stop_strings = tuple(stop_strings)
        self.window = 1 + _TOKENS_PER_CHARACTER * max(map(len, self.stop_strings), default=0)
        has_targets = getattr(tokenizer, "target_words", None) is not None
        self.decode: Callable[[list[list[int]]], list[str]] = (
            tokenizer.decode_target if has_targets else tokenizer.batch_decode
        )

    def __call__(self, input_ids: Tensor, scores: Tensor | None, **kwargs: Any) -> Any:
        """(sequences,) whether each of the (sequences, length) ids has ended."""
        has_ended = [self._is_completed(ids) for ids in input_ids[:, -self.window :].tolist()]
        return torch.tensor(has_ended, device=input_ids.device)

    def _is_completed(self, ids: list[int]) -> bool:
        """Whether a stop string of the text ends after the common prefix with the text without the last token."""
        (text,) = self.decode([ids])
        if not any(string in text for string in self.stop_strings):
            return False
        (previous_text,) = self.decode([ids[:-1]])
        pairs = enumerate(zip_longest(text, previous_text))
        common = next((index for index, (new, previous) in pairs if new != previous), len(text))
        return any(text.find(string, max(0, common + 1 - len(string))) >= 0 for string in self.stop_strings)


class GenerationWithStopStrings(GenerationMixin):
    """Generation with stop strings for any vocabulary, see `DecodedStopStrings`."""

    def _get_stopping_criteria(self, generation_config: Any, *args: Any, **kwargs: Any) -> StoppingCriteriaList:
        stop_strings, tokenizer = generation_config.stop_strings, kwargs.get("tokenizer")
        if stop_strings is None or tokenizer is None:
            return super()._get_stopping_criteria(generation_config, *args, **kwargs)
        generation_config = copy(generation_config)
        generation_config.stop_strings = None
        criteria = super()._get_stopping_criteria(generation_config, *args, **kwargs)
        strings = (stop_strings,) if isinstance(stop_strings, str) else stop_strings
        criteria.append(DecodedStopStrings(strings, tokenizer))
        return criteria
