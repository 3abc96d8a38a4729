"""Data augmentation for distillation: words replaced by a masked language model and by word vectors (TinyBERT, Jiao et
al. 2020, section 3.2 and the released code), or masks and n-grams (Tang et al. 2019, section 3.3)."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tokenizers.models import WordPiece
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_ctxmodels.compression.distillation.forward_pass import get_prediction_level, run_forward
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.model import evaluation_mode

# English function words, which are never replaced: they carry the structure of a text, not its topic
_FUNCTION_WORDS = (
    "a about above after again against all am an and any are as at be because been before being below between both but "
    "by can could did do does doing don down during each few for from further had has have having he her here hers "
    "herself him himself his how i if in into is it its itself just me more most must my myself no nor not now of off "
    "on once only or other our ours ourselves out over own same shall she should so some such t than that the their "
    "theirs them themselves then there these they this those through to too under until up very was we were what when "
    "where which while who whom why will with would you your yours yourself yourselves"
)
_STOP_WORDS = frozenset(_FUNCTION_WORDS.split())
_WORD = re.compile(r"[a-z]+")

PreparedText = tuple[list[str], dict[int, list[str]]]
"""The words of a text, and the candidates of replaceable words by position."""


def split_words(tokenizer: PreTrainedTokenizerBase, text: str) -> list[str]:
    """Words and punctuation marks of a text, normalized and pre-tokenized by a tokenizer."""
    backend: Any = tokenizer.backend_tokenizer  # type: ignore[attr-defined]
    normalized = text if backend.normalizer is None else backend.normalizer.normalize_str(text)
    if backend.pre_tokenizer is None:
        return [normalized]
    return [word for word, _ in backend.pre_tokenizer.pre_tokenize_str(normalized)]


@dataclass(frozen=True)
class Substitution:
    """Replaces words by predictions of a masked language model, or by their nearest neighbors (TinyBERT).

    The candidates of a word of one token are the `number` best predictions for its masked position, in a pair with the
    whole text, without continuation tokens and special tokens; of a word of several tokens, its `number` nearest
    neighbors by word vectors. Function words, and words with other characters than a-z, are not replaced.

    Attributes:
        model, tokenizer: A masked language model and its WordPiece tokenizer.
        nearest: (word, number) -> nearest words, best first; empty for an unknown word.
        number: Number of candidates of a word.
        probability: Probability of replacing a word that has candidates.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    nearest: Callable[[str, int], list[str]]
    number: int = 15
    probability: float = 0.4

    def __post_init__(self) -> None:
        backend: Any = self.tokenizer.backend_tokenizer  # type: ignore[attr-defined]
        if get_prediction_level(self.model) != "tokens" or not isinstance(backend.model, WordPiece):
            raise CtxError(
                f"{type(self.model).__name__} with {type(self.tokenizer).__name__} cannot replace words.",
                hint="use a masked language model with a WordPiece tokenizer, such as BERT.",
            )
        prefix, new_modules = self.model.base_model_prefix, getattr(self.model, "newly_initialized_modules", ())
        if new_modules := [name for name in new_modules if not name.startswith(prefix)]:
            raise CtxError(
                f"The checkpoint has no trained masked-LM head: {', '.join(new_modules)} is newly initialized.",
                location=self.model.config.name_or_path or None,
                hint="use the pretrained model, not a fine-tuned one.",
            )

    def prepare(self, text: str) -> PreparedText:
        """The words of a text, and the candidates of replaceable words by position."""
        words = split_words(self.tokenizer, text)
        positions = [i for i, word in enumerate(words) if _WORD.fullmatch(word) and word not in _STOP_WORDS]
        num_tokens = {position: len(self.tokenizer.tokenize(words[position])) for position in positions}
        candidates = self._predict(words, [position for position in positions if num_tokens[position] == 1])
        for position in positions:
            if num_tokens[position] > 1:
                candidates[position] = self.nearest(words[position], self.number)
        return words, {position: candidates[position] for position in positions if candidates.get(position)}

    def sample(self, prepared: PreparedText, rng: np.random.Generator) -> list[str]:
        """An augmented copy of the prepared words."""
        words, candidates = prepared
        copy = list(words)
        for position, replacements in candidates.items():
            replacement = replacements[rng.integers(len(replacements))]
            if rng.random() < self.probability:
                copy[position] = replacement
        return copy

    def _predict(self, words: list[str], positions: list[int]) -> dict[int, list[str]]:
        """Position -> the model's candidates, without positions that are truncated."""
        if not positions:
            return {}
        mask = str(self.tokenizer.mask_token)
        masked = [[mask if i == position else word for i, word in enumerate(words)] for position in positions]
        limit = min(self.tokenizer.model_max_length, self.model.config.max_sequence_length or 1 << 30)
        truncation = {"truncation": True, "max_length": limit} if limit < 1 << 20 else {}
        batch = self.tokenizer(
            masked, [words] * len(positions), is_split_into_words=True, padding=True, return_tensors="pt", **truncation
        ).to(self.model.device)
        mask_positions: Tensor = batch["input_ids"] == self.tokenizer.mask_token_id
        mask_positions &= mask_positions.cumsum(1) == 1
        with evaluation_mode(self.model):
            deferred = run_forward(self.model, dict(batch)).deferred_logits(mask_positions)
            logits = deferred.decoder(deferred.hidden_states)
            best = logits.topk(min(self.number, len(self.tokenizer)), -1).indices.tolist()
        is_visible = mask_positions.any(1).tolist()
        visible = [position for position, visible in zip(positions, is_visible) if visible]
        special, convert = set(self.tokenizer.all_special_ids), self.tokenizer.convert_ids_to_tokens
        words_of_ids = [convert([token_id for token_id in ids if token_id not in special]) for ids in best]
        candidates = [[word for word in words if not word.startswith("##")] for words in words_of_ids]
        return dict(zip(visible, candidates, strict=True))


@dataclass(frozen=True)
class Masking:
    """Masks words, and replaces texts by n-grams of them (Tang et al. 2019, section 3.3), without the paper's
    replacement by words with the same part of speech.

    Attributes:
        tokenizer: The teacher's tokenizer, for the mask token and for splitting words.
        mask_probability: Probability of masking a word.
        ngram_probability: Probability of reducing a copy to an n-gram of 1 to `longest` words.
    """

    tokenizer: PreTrainedTokenizerBase
    mask_probability: float = 0.1
    ngram_probability: float = 0.25
    longest: int = 5

    def prepare(self, text: str) -> PreparedText:
        """The words of a text."""
        return split_words(self.tokenizer, text), {}

    def sample(self, prepared: PreparedText, rng: np.random.Generator) -> list[str]:
        """An augmented copy of the prepared words."""
        mask = str(self.tokenizer.mask_token)
        copy = [mask if rng.random() < self.mask_probability else word for word in prepared[0]]
        if copy and rng.random() < self.ngram_probability:
            size = min(int(rng.integers(1, self.longest + 1)), len(copy))
            start = int(rng.integers(len(copy) - size + 1))
            copy = copy[start : start + size]
        return copy


@dataclass(frozen=True)
class Augmenter:
    """Augmented copies of examples by a rule, `Substitution` or `Masking`; the copies of an example depend on the seed
    and its index only."""

    rule: Any
    copies: int
    seed: int = 0

    def augment(self, texts: Sequence[str], index: int) -> list[tuple[str, ...]]:
        """The example at `index`, one text or a pair, and its copies without duplicates; texts of a pair are augmented
        separately."""
        rng = np.random.Generator(np.random.Philox(np.random.SeedSequence((self.seed, index))))
        prepared = [self.rule.prepare(text) for text in texts]
        original = tuple(" ".join(words) for words, _ in prepared)
        copies = [tuple(" ".join(self.rule.sample(text, rng)) for text in prepared) for _ in range(self.copies)]
        return [tuple(texts), *(copy for copy in dict.fromkeys(copies) if copy != original and all(copy))]
