"""Ratios of co-occurrence probabilities of two words, counted and learned (Pennington et al. 2014, table 1)."""

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.models.glove import CtxGloveModel
from hf_ctxmodels.objectives.cooccurrence import CooccurrenceCounter
from hf_ctxmodels.objectives.tokenized_documents import document_batches, encode_ids
from hf_ctxmodels.tokenizers.word_level import CtxWordTokenizer


def word_ids(tokenizer: CtxWordTokenizer, words: Sequence[str]) -> list[int]:
    """Ids of words, lower-cased if the tokenizer does; raises CtxError for a word outside the vocabulary."""
    vocabulary = tokenizer.get_vocab()
    normalized = [word.lower() if tokenizer.do_lower_case else word for word in words]
    if unknown := [word for word in normalized if word not in vocabulary or word in tokenizer.all_special_tokens]:
        raise CtxError(
            f"Not in the vocabulary: {', '.join(map(repr, unknown))}.",
            location="--ratios",
            hint="use words of the training text that reach the tokenizer's min_count.",
        )
    return [vocabulary[word] for word in normalized]


def cooccurrence_probabilities(
    tokenizer: CtxWordTokenizer,
    documents: Iterable[list[str]],
    words: Sequence[str],
    probes: Sequence[str],
    window: int = 10,
) -> Tensor:
    """Count P(k | i) = X_ik / X_i in a text (section 3), with GloVe's symmetric window weighted by 1 / distance.

    Args:
        documents: Lists of sentences.
        words: The words i.
        probes: The words k.
        window: Maximum distance in words.

    Returns:
        (words, probes) float64; NaN for a word without context.

    Raises:
        CtxError: A word is not in the vocabulary.
    """
    rows, columns = word_ids(tokenizer, words), word_ids(tokenizer, probes)
    counter = CooccurrenceCounter(len(tokenizer), window)
    for batch in document_batches(documents):
        for ids in encode_ids(tokenizer, [" ".join(document) for document in batch]):
            counter.add(ids[ids != tokenizer.unk_token_id])
    counts = torch.zeros(len(words), len(tokenizer), dtype=torch.float64)
    for centers, contexts, sums in counter.cells(np.random.default_rng(0)):
        for number, row in enumerate(rows):
            cells = centers == row
            counts[number, contexts[cells]] = torch.from_numpy(sums[cells]).double()
    return counts[:, columns] / counts.sum(1, keepdim=True)


def learned_ratios(
    model: PreTrainedModel, tokenizer: CtxWordTokenizer, words: Sequence[str], probes: Sequence[str]
) -> Tensor:
    """Ratios P(k | i) / P(k | j) of a GloVe model: exp((w_i - w_j) . w~_k), as the biases contain log X_i and log X_j
    (section 3, equations 5 to 7).

    Returns:
        (probes,) float64.

    Raises:
        CtxError: The model has no context vectors, or a word is not in the vocabulary.
    """
    if not isinstance(model, CtxGloveModel) or model.context_embeddings is None:
        raise CtxError(
            f"{type(model).__name__} has no context vectors, from which ratios are computed.",
            location="--ratios",
            hint="use a GloVe model trained by `pretrain`, or count in a text: --ratio_text FILE.",
        )
    first, second = model.word_embeddings.weight.detach()[word_ids(tokenizer, words)].double()
    contexts = model.context_embeddings.weight.detach()[word_ids(tokenizer, probes)].double()
    return (contexts @ (first - second)).exp()
