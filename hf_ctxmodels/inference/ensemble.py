"""Ensembles of sequence classifiers."""

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
    """Metrics of an ensemble.

    Attributes:
        members: Metrics of each classifier, name -> value.
        ensemble: Metrics of the averaged probabilities, name -> value.
    """

    members: list[dict[str, float]]
    ensemble: dict[str, float]


def score_ensemble(
    classifiers: Sequence[tuple[PreTrainedModel, PreTrainedTokenizerBase]],
    examples: Sequence[SequenceExample],
    task: SequenceClassification,
    batch_size: int = 32,
) -> EnsembleScores:
    """Evaluate classifiers and the average of their probabilities.

    Howard & Ruder 2018 (arXiv 1801.06146, section 3.3) average the probabilities of a forward and a backward model.

    Args:
        classifiers: Sequence classifiers of any families, with their tokenizers.
        examples: Labelled examples of `task`.
        task: The task, with the maximum length.
        batch_size: Examples per batch.

    Raises:
        CtxError: There are no classifiers or no examples, or the classifiers have different labels.
    """
    if not classifiers or not examples:
        raise CtxError(
            f"Got {len(classifiers)} classifiers and {len(examples)} examples.", hint="provide at least one of each."
        )
    label_names = [{str(name) for name in model.config.id2label.values()} for model, _ in classifiers]
    for (model, _), names in zip(classifiers, label_names, strict=True):
        if names != label_names[0]:
            raise CtxError(
                f"The classifiers have different labels: {sorted(label_names[0])} and {sorted(names)}.",
                location=model.name_or_path,
                hint="use classifiers that were fine-tuned on the same labels.",
            )
    members, probabilities = [], []
    common_labels = sorted(label_names[0])
    for model, tokenizer in classifiers:
        task.labels = [str(model.config.id2label[index]) for index in range(model.config.num_labels)]
        encoded = task.encode(examples, tokenizer)
        outputs = run_head(model, tokenizer, task, encoded, batch_size)
        members.append(task.score(examples, task.decode(examples, encoded, outputs)))
        label_order = [task.labels.index(name) for name in common_labels]  # label ids differ between classifiers
        logits = torch.from_numpy(np.stack([output["logits"] for output in outputs]))
        probabilities.append(logits.double().softmax(-1)[:, label_order].numpy())
    task.labels = common_labels
    averaged: list[Logits] = [{"logits": row} for row in np.mean(probabilities, axis=0)]
    return EnsembleScores(members, task.score(examples, task.decode(examples, encoded, averaged)))
