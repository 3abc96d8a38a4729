"""Several classifiers as one: the mean of their probabilities."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.data.tasks.base import Logits
from hf_ctxmodels.data.tasks.sequence import SequenceClassification, SequenceExample
from hf_ctxmodels.inference.running import run_head


@dataclass(frozen=True)
class EnsembleScores:
    """Metrics by name.

    Attributes:
        alone: of each classifier by itself.
        together: of the mean of their probabilities.
    """

    alone: list[dict[str, float]]
    together: dict[str, float]


def score_ensemble(
    classifiers: Sequence[tuple[PreTrainedModel, PreTrainedTokenizerBase]],
    examples: Sequence[SequenceExample],
    task: SequenceClassification,
    batch_size: int = 32,
) -> EnsembleScores:
    """Score classifiers on labelled texts, each alone and all together.

    Their probabilities are averaged, as Howard & Ruder 2018 (arXiv 1801.06146, section 3.3) do with a forward and a
    backward model.

    Args:
        classifiers: Models with a classifier of texts, each with its own tokenizer; of any families.
        examples: What `task` read.
        task: Says how long the texts may be.
        batch_size: Texts at a time.

    Raises:
        CtxError: There is no classifier or no text, or two classifiers tell other labels apart, or a text has another.
    """
    if not classifiers or not examples:
        raise CtxError(f"{len(classifiers)} classifiers on {len(examples)} texts.", hint="give one or more of either.")
    labels = [{str(name) for name in model.config.id2label.values()} for model, _ in classifiers]
    for (model, _), found in zip(classifiers, labels, strict=True):
        if found != labels[0]:
            raise CtxError(
                f"One classifier tells {sorted(labels[0])} apart, another one {sorted(found)}.",
                location=model.name_or_path,
                hint="take classifiers that were fine-tuned on the same labels.",
            )
    alone, probabilities = [], []
    names = sorted(labels[0])
    for model, tokenizer in classifiers:
        task.labels = [str(model.config.id2label[number]) for number in range(model.config.num_labels)]
        encoded = task.encode(examples, tokenizer)
        outputs = run_head(model, tokenizer, task, encoded, batch_size)
        alone.append(task.score(examples, task.decode(examples, encoded, outputs)))
        order = [task.labels.index(name) for name in names]  # each may number its labels in its own way
        logits = torch.from_numpy(np.stack([output["logits"] for output in outputs]))
        probabilities.append(logits.double().softmax(-1)[:, order].numpy())
    task.labels = names
    together: list[Logits] = [{"logits": row} for row in np.mean(probabilities, axis=0)]
    return EnsembleScores(alone, task.score(examples, task.decode(examples, encoded, together)))
