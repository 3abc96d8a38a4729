"""Dependency trees in the space of a structural probe (Coenen et al. 2019, arXiv 1906.02715, section 3).

In an ideal space, the squared distance of two words is the number of arcs between them in the tree (a Pythagorean
embedding), so that each arc has the squared length 1. The probe of Hewitt & Manning (2019, NAACL) approximates it; the
mean squared length of the arcs of a relation shows whether its words are closer together (below 1) or farther apart.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_ctxmodels.analysis.probing.probes import ProbeGrid
from hf_ctxmodels.analysis.probing.structural import (
    ParsedSentence,
    StructuralProbes,
    TreeData,
    evaluate_distances,
    predict_structure,
    scored_edges,
    train_structural,
)
from hf_ctxmodels.analysis.probing.training import ProbeTraining, standardize
from hf_ctxmodels.analysis.senses import project
from hf_ctxmodels.architectures.word_encoder import WordEncoder
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.data.treebanks import TreebankSentence

_DEV_FRACTION = 0.1  # of the training sentences


@dataclass(frozen=True)
class TreeSpace:
    """The space of a structural probe of one layer, and the test sentences in it.

    Attributes:
        layer: Number of the layer.
        uuas: Share of the arcs, without punctuation, in the minimum spanning trees of the test sentences.
        sentences: The test sentences.
        points: (words, rank) projected vectors of each test sentence.
    """

    layer: int
    uuas: float
    sentences: list[TreebankSentence]
    points: list[Tensor]

    def edge_lengths(self) -> dict[str, Tensor]:
        """Relation, without its subtype -> squared lengths of its arcs, of the most frequent relation first; without
        the root and punctuation."""
        lengths: dict[str, list[float]] = defaultdict(list)
        for sentence, points in zip(self.sentences, self.points, strict=True):
            is_punctuation = sentence.is_punctuation()
            for word, (head, relation) in enumerate(zip(sentence.heads, sentence.relations, strict=True)):
                if head >= 0 and not is_punctuation[word]:
                    squared = (points[word] - points[head]).square().sum()
                    lengths[relation.partition(":")[0]].append(float(squared))
        ordered = sorted(lengths.items(), key=lambda item: -len(item[1]))
        return {relation: torch.tensor(values, dtype=torch.float64) for relation, values in ordered}

    def tree_map(self, index: int) -> tuple[Tensor, list[tuple[int, int, str]]]:
        """A test sentence in the plane of its two principal components: (words, 2) points; solid edges are arcs, and
        dotted ones pairs of words without an arc (wrong edges of the minimum spanning tree)."""
        sentence, points = self.sentences[index], self.points[index]
        arcs = {(min(word, head), max(word, head)) for word, head in enumerate(sentence.heads) if head >= 0}
        distances = torch.cdist(points.double(), points.double()).square().numpy()
        parsed = ParsedSentence.from_treebank(sentence, 0)
        joined = {(first, second) for first, second in scored_edges(distances, parsed.is_scored).tolist()}
        edges = [(*arc, "solid") for arc in sorted(arcs)] + [(*pair, "dotted") for pair in sorted(joined - arcs)]
        return project(points[:, None])[:, 0], edges


def fit_tree_spaces(
    encoder: WordEncoder,
    train: Sequence[TreebankSentence],
    test: Sequence[TreebankSentence],
    *,
    rank: int = 64,
    seeds: Sequence[int] = (0,),
    training: ProbeTraining | None = None,
) -> list[TreeSpace]:
    """Train distance probes on one layer, one for each seed, and project the test sentences.

    Vectors are standardized over the words of the training sentences.

    Args:
        encoder: Model with its tokenizer, and a single layer.
        train: Parsed sentences, a tenth of which selects the best weights.
        test: Parsed sentences that are projected.
        rank: Rank of the probe.
        seeds: Seeds of the initial probes.
        training: Optimization; None for the default.

    Raises:
        CtxError: There are several layers, fewer than 10 training sentences, or heads that do not form a tree.
    """
    if len(encoder.layers) != 1 or len(train) < 10:
        raise CtxError(
            f"Got {len(encoder.layers)} layers and {len(train)} training sentences.",
            hint="use one layer, and at least 10 sentences.",
        )
    held_out = max(1, round(_DEV_FRACTION * len(train)))
    first_dev, first_test = len(train) - held_out, len(train)
    sentences = [*train[held_out:], *train[:held_out], *test]
    corpus = encoder.encode_corpus([sentence.words for sentence in sentences])
    starts = corpus.starts.tolist()
    vectors = standardize(corpus.vectors, starts[first_dev], corpus.has_tokens)
    parsed = [ParsedSentence.from_treebank(sentence, start) for sentence, start in zip(sentences, starts)]
    splits = {"train": parsed[:first_dev], "dev": parsed[first_dev:first_test], "test": parsed[first_test:]}
    data = {name: TreeData(vectors, split) for name, split in splits.items()}
    grid = ProbeGrid([f"layer {encoder.layers[0]}"], list(map(str, seeds)), encoder.hidden_size, 1, 1)
    probes = StructuralProbes(grid, min(rank, encoder.hidden_size))
    options = training or ProbeTraining()
    train_structural(probes, data["train"], data["dev"], "distance", options, description="probe")
    scores = evaluate_distances(predict_structure(probes, data["test"], "distance"))
    test_vectors = vectors[starts[first_test] :, 0].float()
    sizes = [len(sentence.words) for sentence in test]
    return [
        TreeSpace(encoder.layers[0], float(uuas), list(test), list((test_vectors @ weight).split(sizes)))
        for uuas, weight in zip(scores["uuas"][0], probes.weight[0].detach(), strict=True)
    ]
