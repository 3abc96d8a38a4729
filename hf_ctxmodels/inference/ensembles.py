"""Ensembles of sequence classifiers."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.downstream.tasks import SequenceClassification, TaskArguments
from hf_ctxmodels.downstream.tasks.base import Logits
from hf_ctxmodels.downstream.tasks.sequence_classification import SequenceExample
from hf_ctxmodels.inference.prediction import Predictor
from hf_ctxmodels.inference.task_heads import run_head


class EnsembleScores(NamedTuple):
    """Metrics (name -> value) of each classifier, and of their averaged probabilities."""

    members: list[dict[str, float]]
    ensemble: dict[str, float]


def score_ensemble(
    classifiers: Sequence[Predictor], examples: Sequence[SequenceExample], batch_size: int = 32
) -> EnsembleScores:
    """Evaluate classifiers and the average of their probabilities (Howard & Ruder 2018, arXiv 1801.06146, section 3.3,
    for a forward and a backward model).

    Args:
        classifiers: Sequence classifiers of any families, each with its tokenizer and the maximum length of its task.
        examples: Labeled examples.
        batch_size: Examples per batch.

    Raises:
        CtxError: There are no classifiers or no examples, or the classifiers have different labels.
    """
    if not classifiers or not examples:
        raise CtxError(
            f"Got {len(classifiers)} classifiers and {len(examples)} examples.", hint="provide at least one of each."
        )
    ensemble = SequenceClassification(TaskArguments())
    ensemble.labels = sorted(str(name) for name in classifiers[0].model.config.id2label.values())
    for classifier in classifiers:
        names = sorted(str(name) for name in classifier.model.config.id2label.values())
        if names != ensemble.labels:
            raise CtxError(
                f"The classifiers have different labels: {ensemble.labels} and {names}.",
                location=classifier.model.name_or_path,
                hint="use classifiers that were fine-tuned on the same labels.",
            )
    members, probabilities = [], []
    for classifier in classifiers:
        task = classifier.task
        encoded = task.encode(examples, classifier.tokenizer)
        outputs = run_head(classifier.model, classifier.tokenizer, task, encoded, batch_size)
        members.append(task.score(examples, task.decode(examples, encoded, outputs)))
        label_order = [task.labels.index(name) for name in ensemble.labels]  # label ids differ between classifiers
        logits = torch.from_numpy(np.stack([output["logits"] for output in outputs]))
        probabilities.append(logits.double().softmax(-1)[:, label_order].numpy())
    averaged: list[Logits] = [{"logits": row} for row in np.mean(probabilities, axis=0)]
    return EnsembleScores(members, ensemble.score(examples, ensemble.decode(examples, encoded, averaged)))
