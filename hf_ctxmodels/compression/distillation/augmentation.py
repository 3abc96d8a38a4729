"""More examples of a task for distillation: words replaced by a masked language model and by word vectors (TinyBERT,
Jiao et al. 2020, section 4.2 and the released code), or by masks and n-grams (Tang et al. 2019, section 3.3)."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tokenizers.models import WordPiece
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_ctxmodels.compression.distillation.forward_pass import predictions_of, run
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.model_modes import evaluation_mode

# English function words, which are never replaced: they say little of a text's topic and much of its structure
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


def split_words(tokenizer: PreTrainedTokenizerBase, text: str) -> list[str]:
    """The words and punctuation marks that a tokenizer splits a text into, normalised, before subwords."""
    backend: Any = tokenizer.backend_tokenizer  # type: ignore[attr-defined]
    normal = text if backend.normalizer is None else backend.normalizer.normalize_str(text)
    pieces = [(normal, None)] if backend.pre_tokenizer is None else backend.pre_tokenizer.pre_tokenize_str(normal)
    return [piece for piece, _ in pieces]


@dataclass(frozen=True)
class Substitution:
    """Replaces words by others that fit in their place.

    A word of one piece may become one of the masked language model's `number` best for its place, which is masked, in a
    pair with the whole text; pieces inside a word and special tokens are left out. A word of several pieces may become
    one of its `number` nearest by word vectors. Function words and what is no word of a-z stay.

    Attributes:
        model: A masked language model with a WordPiece tokenizer.
        tokenizer: Its tokenizer.
        nearest: (word, number) -> its nearest words, best first; empty for an unknown word.
        number: Candidates of a word.
        probability: Share of the words with candidates that are replaced in a copy.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    nearest: Callable[[str, int], list[str]]
    number: int = 15
    probability: float = 0.4

    def __post_init__(self) -> None:
        backend: Any = self.tokenizer.backend_tokenizer  # type: ignore[attr-defined]
        if predictions_of(self.model) != "tokens" or not isinstance(backend.model, WordPiece):
            raise CtxError(
                f"{type(self.model).__name__} with {type(self.tokenizer).__name__} cannot replace words.",
                hint="give a masked language model with a WordPiece tokenizer, such as BERT.",
            )
        head = [
            name
            for name in getattr(self.model, "newly_initialized_modules", ())
            if not name.startswith(self.model.base_model_prefix)
        ]
        if head:
            raise CtxError(
                f"The checkpoint has no trained head of masked words ({', '.join(head)}): any words would do.",
                location=self.model.config.name_or_path or None,
                hint="give the pretrained model, not one that was fine-tuned from it.",
            )

    def prepare(self, text: str) -> tuple[list[str], dict[int, list[str]]]:
        """The words of a text, and the candidates of each that may be replaced, by its place."""
        words = split_words(self.tokenizer, text)
        places = [place for place, word in enumerate(words) if _WORD.fullmatch(word) and word not in _STOP_WORDS]
        pieces = [len(self.tokenizer.tokenize(words[place])) for place in places]
        whole = [place for place, number in zip(places, pieces) if number == 1]
        found = self._predicted(words, whole)
        for place, number in zip(places, pieces):
            if number > 1:
                found[place] = self.nearest(words[place], self.number)
        return words, {place: found[place] for place in places if found.get(place)}

    def draw(self, prepared: tuple[list[str], dict[int, list[str]]], rng: np.random.Generator) -> list[str]:
        """A copy of the prepared words."""
        words, candidates = prepared
        copy = list(words)
        for place, others in candidates.items():
            chosen = others[rng.integers(len(others))]
            if rng.random() < self.probability:
                copy[place] = chosen
        return copy

    def _predicted(self, words: list[str], places: list[int]) -> dict[int, list[str]]:
        """Place -> the model's candidates; without those places that the longest input cuts off."""
        if not places:
            return {}
        mask = str(self.tokenizer.mask_token)
        masked = [[mask if at == place else word for at, word in enumerate(words)] for place in places]
        limit = min(self.tokenizer.model_max_length, self.model.config.max_sequence_length or 1 << 30)
        cut = {"truncation": True, "max_length": limit} if limit < 1 << 20 else {}
        batch = self.tokenizer(
            masked, [words] * len(places), is_split_into_words=True, padding=True, return_tensors="pt", **cut
        ).to(self.model.device)
        where: Tensor = batch["input_ids"] == self.tokenizer.mask_token_id
        where &= where.cumsum(1) == 1
        with evaluation_mode(self.model):
            scores = run(self.model, dict(batch)).vocabulary(where)
            best = scores.decoder(scores.hidden_states).topk(min(self.number, len(self.tokenizer)), -1).indices.tolist()
        kept = [place for place, there in zip(places, where.any(1).tolist()) if there]
        return {place: self._words(ids) for place, ids in zip(kept, best, strict=True)}

    def _words(self, ids: list[int]) -> list[str]:
        special = set(self.tokenizer.all_special_ids)
        tokens: Any = self.tokenizer.convert_ids_to_tokens([number for number in ids if number not in special])
        return [token for token in tokens if not token.startswith("##")]


@dataclass(frozen=True)
class Masking:
    """Masks words, and takes an n-gram of the text in its place (Tang et al. 2019, section 3.3).

    The paper's third rule, another word of the same part of speech, needs a tagger and is left out.

    Attributes:
        tokenizer: Of the teacher; gives the mask token and splits words.
        mask_probability: Share of the words that become the mask token.
        ngram_probability: Share of the copies of which a run of 1 to `longest` words remains.
        longest: Longest such run.
    """

    tokenizer: PreTrainedTokenizerBase
    mask_probability: float = 0.1
    ngram_probability: float = 0.25
    longest: int = 5

    def prepare(self, text: str) -> list[str]:
        """The words of a text."""
        return split_words(self.tokenizer, text)

    def draw(self, prepared: list[str], rng: np.random.Generator) -> list[str]:
        """A copy of the prepared words."""
        mask = str(self.tokenizer.mask_token)
        copy = [mask if rng.random() < self.mask_probability else word for word in prepared]
        if copy and rng.random() < self.ngram_probability:
            size = min(int(rng.integers(1, self.longest + 1)), len(copy))
            start = int(rng.integers(len(copy) - size + 1))
            copy = copy[start : start + size]
        return copy


@dataclass(frozen=True)
class Augmenter:
    """Copies of examples, the same for the same seed, whatever the others are.

    Attributes:
        rule: How a text is changed.
        copies: Copies of an example, itself not counted.
        seed: Seed of the draws.
    """

    rule: Any
    copies: int
    seed: int = 0

    def augment(self, texts: Sequence[str], index: int) -> list[tuple[str, ...]]:
        """The example itself, and those of its copies that differ from it and from each other.

        Args:
            texts: One text or a pair, each of which is changed on its own.
            index: The example's number, which seeds the draws.
        """
        rng = np.random.Generator(np.random.Philox(np.random.SeedSequence((self.seed, index))))
        prepared = [self.rule.prepare(text) for text in texts]
        made = [tuple(texts)]
        plain = tuple(" ".join(_words_of(each)) for each in prepared)
        for _ in range(self.copies):
            made.append(tuple(" ".join(self.rule.draw(each, rng)) for each in prepared))
        return [made[0], *(copy for copy in dict.fromkeys(made[1:]) if copy != plain and all(copy))]


def _words_of(prepared: Any) -> list[str]:
    return prepared[0] if isinstance(prepared, tuple) else prepared
