"""Stop strings of `generate` for any tokenizer."""

from collections.abc import Callable, Iterable
from copy import copy
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationMixin, PreTrainedTokenizerBase, StoppingCriteria, StoppingCriteriaList

_TOKENS_PER_CHARACTER = 4  # at most, in a vocabulary of bytes


class DecodedStopStrings(StoppingCriteria):
    """Stops a sequence if its last token completes one of the stop strings in the decoded text.

    `StopStringCriteria` of transformers encodes the text "abcdef" and expects to decode it, which needs these letters
    in the vocabulary, and knows no target vocabulary.

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

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        """(sequences,) whether each of the (sequences, length) ids has ended."""
        sequences = input_ids[:, -self.window :].tolist()
        texts, previous_texts = self.decode(sequences), self.decode([ids[:-1] for ids in sequences])
        has_ended = [
            any(text.count(string) > previous_text.count(string) for string in self.stop_strings)
            for text, previous_text in zip(texts, previous_texts, strict=True)
        ]
        return torch.tensor(has_ended, device=input_ids.device)


class GenerationWithStopStrings(GenerationMixin):
    """`generate` whose `stop_strings` need no particular vocabulary, see `DecodedStopStrings`."""

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
