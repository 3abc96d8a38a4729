"""Ensembles of classifiers: the mean of their probabilities."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.downstream.tasks.base import Logits
from hf_ctxmodels.downstream.tasks.sequence_classification import SequenceClassification, SequenceExample
from hf_ctxmodels.inference.running import run_head


@dataclass(frozen=True)
class EnsembleScores:
    """Metrics by name.

    Attributes:
        alone: Metrics of each classifier.
        together: Metrics of the mean of their probabilities.
    """

    alone: list[dict[str, float]]
    together: dict[str, float]


def score_ensemble(
    classifiers: Sequence[tuple[PreTrainedModel, PreTrainedTokenizerBase]],
    examples: Sequence[SequenceExample],
    task: SequenceClassification,
    batch_size: int = 32,
) -> EnsembleScores:
    """Score classifiers on labelled texts, each alone and the mean of their probabilities.

    Howard & Ruder 2018 (arXiv 1801.06146, section 3.3) average the probabilities of a forward and a backward model.

    Args:
        classifiers: Sequence classifiers of any families, each with its tokenizer.
        examples: Examples of `task`.
        task: The task, with the maximum length of texts.
        batch_size: Texts per batch.

    Raises:
        CtxError: There are no classifiers or no texts, or their labels differ.
    """
    if not classifiers or not examples:
        raise CtxError(f"{len(classifiers)} classifiers on {len(examples)} texts.", hint="give at least one of each.")
    labels = [{str(name) for name in model.config.id2label.values()} for model, _ in classifiers]
    for (model, _), names in zip(classifiers, labels, strict=True):
        if names != labels[0]:
            raise CtxError(
                f"The labels of one classifier are {sorted(labels[0])}, those of another one {sorted(names)}.",
                location=model.name_or_path,
                hint="use classifiers that were fine-tuned on the same labels.",
            )
    alone, probabilities = [], []
    common = sorted(labels[0])
    for model, tokenizer in classifiers:
        task.labels = [str(model.config.id2label[number]) for number in range(model.config.num_labels)]
        encoded = task.encode(examples, tokenizer)
        outputs = run_head(model, tokenizer, task, encoded, batch_size)
        alone.append(task.score(examples, task.decode(examples, encoded, outputs)))
        order = [task.labels.index(name) for name in common]  # label ids differ between classifiers
        logits = torch.from_numpy(np.stack([output["logits"] for output in outputs]))
        probabilities.append(logits.double().softmax(-1)[:, order].numpy())
    task.labels = common
    together: list[Logits] = [{"logits": row} for row in np.mean(probabilities, axis=0)]
    return EnsembleScores(alone, task.score(examples, task.decode(examples, encoded, together)))
