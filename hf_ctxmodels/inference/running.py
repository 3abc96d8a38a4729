"""The outputs of a head for the features of a task."""

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_ctxmodels.data.tasks.base import Encoded, Logits, Task
from hf_ctxmodels.training.metrics.task_evaluation import feature_outputs


@torch.no_grad()
def run_head(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, task: Task, encoded: Encoded, batch_size: int
) -> list[Logits]:
    """The outputs for every feature, in order, without dropout; the model's mode is restored."""
    collate, training = task.collator(tokenizer), model.training
    model.eval()
    outputs: list[Logits] = []
    for first in range(0, len(encoded.features), batch_size):
        batch = collate(encoded.features[first : first + batch_size])
        inputs = {name: tensor.to(model.device) for name, tensor in batch.items() if name not in task.targets}
        outputs += feature_outputs(task, model(**inputs), batch)
    model.train(training)
    return outputs
