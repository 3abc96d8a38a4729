"""Attention patterns: measures of each head, the classes of Kovaleva et al. (2019), and distances between heads."""

import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import tee
from typing import Any, Literal, Self, get_args

import numpy as np
import torch
from sklearn.manifold import smacof
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_ctxmodels.analysis.attention.maps import attention_maps
from hf_ctxmodels.core.errors import CtxError

Pattern = Literal["vertical", "diagonal", "vertical + diagonal", "block", "heterogeneous"]
MEASURES = ("self", "previous", "next", "first", "separator", "punctuation", "entropy")
"""Measures of a head: attention to the token itself, the previous and the next token, the first token of the input,
separators, punctuation; and the mean entropy of its rows in nats."""

MIN_TOKENS = 16
"""Minimum length of an input: uniform attention to fewer tokens would look like a pattern."""

_SPECIAL, _POSITION, _BOTH, _BLOCK = 0.6, 0.5, 0.2, 0.2  # thresholds of `classify`


@dataclass
class AttentionInput:
    """A text, or a pair of texts, as the input of a model.

    Attributes:
        features: Model inputs, without padding.
        special, separators, punctuation: (tokens,) bool.
        segments: (tokens,) 0 or 1 for the tokens of the two texts, -1 for special tokens.
    """

    features: dict[str, Any]
    special: Tensor
    separators: Tensor
    punctuation: Tensor
    segments: Tensor

    @classmethod
    def from_texts(cls, tokenizer: PreTrainedTokenizerBase, *texts: str) -> Self:
        """Tokenize one or two texts."""
        encoding = tokenizer(*texts, return_offsets_mapping=True, return_special_tokens_mask=True, verbose=False)
        offsets = encoding.pop("offset_mapping")
        special = torch.tensor(encoding.pop("special_tokens_mask")).bool()
        segments = [-1 if number is None else number for number in encoding.sequence_ids(0)]
        punctuation = [
            segment >= 0 and _is_punctuation(texts[segment][start:end])
            for segment, (start, end) in zip(segments, offsets, strict=True)
        ]
        ids = torch.tensor(encoding["input_ids"])
        separator_ids = (tokenizer.sep_token_id, tokenizer.eos_token_id)
        separators = ids == next((token_id for token_id in separator_ids if token_id is not None), -1)
        return cls(dict(encoding), special, separators, torch.tensor(punctuation), torch.tensor(segments))


def _is_punctuation(text: str) -> bool:
    text = text.strip()
    return bool(text) and all(unicodedata.category(character).startswith("P") for character in text)


def make_inputs(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], max_length: int | None
) -> list[AttentionInput]:
    """Inputs of pairs of consecutive texts, or of a single text, with `MIN_TOKENS` to `max_length` tokens.

    Raises:
        CtxError: No input has such a length, or the tokenizer has no offsets.
    """
    if not tokenizer.is_fast:
        raise CtxError(
            f"{type(tokenizer).__name__} has no offsets, which locate punctuation.",
            hint="use a tokenizer with a tokenizer.json.",
        )
    groups: list[tuple[str, ...]] = [*zip(texts[::2], texts[1::2])] or [(text,) for text in texts]
    inputs = [AttentionInput.from_texts(tokenizer, *group) for group in groups]
    inputs = [
        item
        for item in inputs
        if len(item.special) >= MIN_TOKENS and (not max_length or len(item.special) <= max_length)
    ]
    if not inputs:
        raise CtxError(
            f"No input has {MIN_TOKENS} to {max_length or 'any number of'} tokens.",
            hint="use longer sentences.",
        )
    return inputs


@dataclass
class HeadProfile:
    """Measures of all heads, means over tokens and then over inputs.

    Attributes:
        measures: Name in `MEASURES` -> (layers, heads).
        attention_to_special_tokens: (layers, heads).
        attention_to_neighbors: (layers, heads) attention to the previous, the same and the next token, unless these
            are special.
        within_segment_excess: (layers, heads) attention within the same text of a pair, minus the share that uniform
            attention to the tokens of both texts would have.
    """

    measures: dict[str, Tensor]
    attention_to_special_tokens: Tensor
    attention_to_neighbors: Tensor
    within_segment_excess: Tensor

    def classify(self) -> list[list[Pattern]]:
        """The pattern of each head of each layer (Kovaleva et al. 2019, section 4.1), by the first rule that holds:

        1. vertical: more than 0.6 of the attention on special tokens (the threshold of Clark et al. 2019);
        2. diagonal: more than 0.5 on the previous, the same and the next token (also from Clark et al.);
        3. vertical + diagonal: more than 0.6 on both together, and more than 0.2 on each;
        4. block: 0.2 more than expected within the same text of a pair;
        5. heterogeneous.

        The paper labeled 400 maps by hand and trained a network on them; neither was released.
        """
        special, neighbors, excess = (
            values.double().numpy()
            for values in (self.attention_to_special_tokens, self.attention_to_neighbors, self.within_segment_excess)
        )
        *names, other = get_args(Pattern)
        rules = [
            special > _SPECIAL,
            neighbors > _POSITION,
            (special + neighbors > _SPECIAL) & (np.minimum(special, neighbors) > _BOTH),
            excess > _BLOCK,
        ]
        return np.select(rules, names, other).tolist()


def profile_heads(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, inputs: Iterable[AttentionInput]
) -> HeadProfile:
    """The `HeadProfile` of a model (Clark et al. 2019, section 3); raises CtxError as `attention_maps`."""
    measured, mapped = tee(inputs)
    totals: dict[str, Tensor] = {}
    count = 0
    for item, attention in zip(measured, attention_maps(model, tokenizer, (item.features for item in mapped))):
        for name, value in measure(attention, item).items():
            totals[name] = totals.get(name, torch.zeros(())) + value
        count += 1
    means = {name: total / count for name, total in totals.items()}
    return HeadProfile(
        {name: means[name] for name in MEASURES},
        means["attention_to_special_tokens"],
        means["attention_to_neighbors"],
        means["within_segment_excess"],
    )


def measure(attention: Tensor, item: AttentionInput) -> dict[str, Tensor]:
    """The measures of a (layers, heads, tokens, tokens) map, each (layers, heads)."""
    tokens = attention.shape[-1]
    indices = torch.arange(tokens)
    is_adjacent = ((indices[:, None] - indices).abs() <= 1) & ~item.special
    smoothed = 0.9999 * attention + 0.0001 / tokens  # as in the released code

    def attention_to(columns: Tensor) -> Tensor:
        return attention[..., columns].sum(-1).mean(-1)

    is_text_token = (item.segments >= 0).expand(tokens, -1)
    same_segment = (item.segments[:, None] == item.segments) & is_text_token
    visible = attention.amax((0, 1)) > 0
    expected = (same_segment & visible).sum(-1) / (is_text_token & visible).sum(-1).clamp(min=1)
    excess = (attention * same_segment).sum(-1) - expected * (attention * is_text_token).sum(-1)
    has_pair = bool((item.segments == 1).any())
    return {
        "self": attention.diagonal(0, -2, -1).mean(-1),
        "previous": attention.diagonal(-1, -2, -1).mean(-1),
        "next": attention.diagonal(1, -2, -1).mean(-1),
        "first": attention[..., 0].mean(-1),
        "separator": attention_to(item.separators),
        "punctuation": attention_to(item.punctuation),
        "entropy": _entropy(smoothed).mean(-1),
        "attention_to_special_tokens": attention_to(item.special),
        "attention_to_neighbors": (attention * is_adjacent).sum(-1).mean(-1),
        "within_segment_excess": excess[..., item.segments >= 0].mean(-1) * has_pair,
    }


def head_distances(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, inputs: Iterable[AttentionInput]
) -> np.ndarray:
    """(heads of all layers, heads of all layers) mean Jensen-Shannon divergence in nats of the rows of two heads (Clark
    et al. 2019, section 6)."""
    total, rows = None, 0
    for attention in attention_maps(model, tokenizer, (item.features for item in inputs)):
        tokens = attention.shape[-1]
        heads = (0.999 * attention + 0.001 / tokens).flatten(0, 1)
        entropies = _entropy(heads)
        divergences = [
            (_entropy((heads + head) / 2) - (entropies + entropy) / 2).sum(-1)
            for head, entropy in zip(heads, entropies, strict=True)
        ]
        total = torch.stack(divergences) if total is None else total + torch.stack(divergences)
        rows += tokens
    assert total is not None
    distances = (total / rows).clamp(min=0).numpy().astype(np.float64)
    distances = (distances + distances.T) / 2
    np.fill_diagonal(distances, 0)
    return distances


def _entropy(rows: Tensor) -> Tensor:
    return torch.special.entr(rows).sum(-1)


def embed_heads_2d(distances: np.ndarray, seed: int = 0) -> np.ndarray:
    """(heads, 2) positions of the heads by metric multidimensional scaling of their distances."""
    positions, _ = smacof(distances, n_components=2, n_init=5, random_state=seed, normalized_stress=False)
    return positions
