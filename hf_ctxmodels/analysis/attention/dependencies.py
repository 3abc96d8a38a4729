"""Which heads attend from words to their syntactic heads (Clark et al. 2019, section 4.2)."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_ctxmodels.analysis.attention.maps import attention_maps, word_attention
from hf_ctxmodels.architectures.word_alignment import NO_WORD, align_words
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.data.treebanks import TreebankSentence

ALL = "all"
"""Name of the row of all relations together."""
Direction = Literal["to head", "from head"]
"""A word's head is predicted as the word that it attends to most, or that attends to it most."""
DIRECTIONS: tuple[Direction, ...] = ("to head", "from head")


@dataclass
class BestHead:
    """The attention head that finds the syntactic heads of a relation best, chosen on every other sentence.

    Attributes:
        count: Dependents in the sentences on which the accuracies are measured.
        accuracy: Accuracy of the head on the other sentences.
        offset, offset_accuracy: The best constant distance from dependent to head, chosen and measured in the same way.
    """

    relation: str
    layer: int
    head: int
    direction: Direction
    accuracy: float
    offset: int
    offset_accuracy: float
    count: int


@dataclass
class DependencyScores:
    """Correct predictions of all heads, by relation.

    Attributes:
        correct: Relation -> (halves, layers, heads, directions) number of dependents whose head is predicted; the
            halves are the sentences with even and with odd numbers.
        offsets: Relation -> for each half, the number of dependents by offset of their head.
        num_skipped: Number of sentences that exceed the maximum length, or have fewer than two words.
    """

    correct: dict[str, Tensor] = field(default_factory=dict)
    offsets: dict[str, tuple[Counter[int], Counter[int]]] = field(default_factory=dict)
    num_skipped: int = 0

    def counts(self, relation: str) -> list[int]:
        """The number of dependents in each half."""
        return [half.total() for half in self.offsets[relation]]

    def accuracies(self, relation: str) -> Tensor:
        """(layers, heads) accuracies on all sentences, of the better direction."""
        return (self.correct[relation].sum(0) / sum(self.counts(relation))).amax(-1)

    def best_heads(self, min_arcs: int = 20) -> list[BestHead]:
        """The best head of all relations together and of each relation with at least `min_arcs` dependents in both
        halves, the most frequent relation first."""
        relations = [relation for relation in self.correct if min(self.counts(relation)) >= min_arcs]
        relations.sort(key=lambda relation: (relation != ALL, -sum(self.counts(relation))))
        rows = []
        for relation in relations:
            correct, offsets, count = self.correct[relation], self.offsets[relation], self.counts(relation)[1]
            best = torch.unravel_index(correct[0].argmax(), correct.shape[1:])
            layer, head, direction = map(int, best)
            [(offset, _)] = offsets[0].most_common(1)
            accuracy, offset_accuracy = float(correct[1][best]) / count, offsets[1][offset] / count
            direction_name = DIRECTIONS[direction]
            rows.append(BestHead(relation, layer, head, direction_name, accuracy, offset, offset_accuracy, count))
        return rows


def score_dependencies(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sentences: Sequence[TreebankSentence],
    max_length: int | None = None,
) -> DependencyScores:
    """Count how often each head finds the syntactic head of a word.

    Attention is between words, without special tokens and without a word's attention to itself. Punctuation and roots
    are not scored; relations are without their subtypes.

    Args:
        max_length: Longest input in tokens; longer sentences are left out.

    Raises:
        CtxError: No sentence can be scored; or as in `attention_maps` and `align_words`.
    """
    scores = DependencyScores()
    windows = align_words(tokenizer, [sentence.words for sentence in sentences])
    fitting = [
        window
        for window in windows
        if len(sentences[window.sentence].words) > 1
        and (max_length is None or len(window.token_words) <= max_length)
        and (window.token_words != NO_WORD).any()
    ]
    scores.num_skipped = len(sentences) - len(fitting)
    maps = attention_maps(model, tokenizer, (window.features for window in fitting))
    for window, attention in zip(fitting, maps, strict=True):
        sentence = sentences[window.sentence]
        has_tokens = set(window.token_words.tolist())
        punctuation = sentence.is_punctuation()
        scored = [
            word
            for word, head in enumerate(sentence.heads)
            if head >= 0 and not punctuation[word] and word in has_tokens and head in has_tokens
        ]
        if scored:
            words = word_attention(attention, window.token_words, len(sentence.words))
            _add_sentence(scores, words, sentence, scored, window.sentence % 2)
    if not scores.correct:
        raise CtxError("No word has a syntactic head.", hint="use a treebank whose HEAD column is annotated.")
    return scores


def _add_sentence(
    scores: DependencyScores, attention: Tensor, sentence: TreebankSentence, scored: list[int], half: int
) -> None:
    """Add a sentence with (layers, heads, words, words) attention; `scored` are its dependents."""
    attention = attention.clone()
    attention.diagonal(0, -2, -1).fill_(-1)
    predictions = torch.stack([attention.argmax(-1), attention.argmax(-2)], 2)[..., scored]
    heads = torch.tensor([sentence.heads[word] for word in scored])
    correct = (predictions == heads).permute(3, 0, 1, 2)  # (dependents, layers, heads, directions)
    for position, word in enumerate(scored):
        for relation in (ALL, sentence.relations[word].partition(":")[0]):
            if relation not in scores.correct:
                scores.correct[relation] = torch.zeros(2, *correct.shape[1:], dtype=torch.long)
                scores.offsets[relation] = (Counter(), Counter())
            scores.correct[relation][half] += correct[position]
            scores.offsets[relation][half][sentence.heads[word] - word] += 1
