"""Outputs of a task head for encoded examples."""

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_ctxmodels.core.model import evaluation_mode
from hf_ctxmodels.downstream.finetuning.task_evaluation import feature_outputs
from hf_ctxmodels.downstream.tasks.base import Encoded, Logits, Task


def run_head(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, task: Task, encoded: Encoded, batch_size: int
) -> list[Logits]:
    """Logits for every feature, in order, in evaluation mode; the model's training mode is restored."""
    collate = task.collator(tokenizer)
    outputs: list[Logits] = []
    with evaluation_mode(model):
        for first in range(0, len(encoded.features), batch_size):
            batch = collate(encoded.features[first : first + batch_size])
            inputs = {name: tensor.to(model.device) for name, tensor in batch.items() if name not in task.targets}
            outputs += feature_outputs(task, model(**inputs), batch)
    return outputs
