"""Inference with task heads: question answering, and token classification by words."""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TokenClassificationPipeline

from hf_ctxmodels.core.console import progress_bar
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import check_range
from hf_ctxmodels.core.generation import max_input_length
from hf_ctxmodels.core.host_copies import CollatedBatch
from hf_ctxmodels.core.model import evaluation_mode
from hf_ctxmodels.data.padding import batches_by_length
from hf_ctxmodels.downstream.finetuning.task_evaluation import feature_outputs
from hf_ctxmodels.downstream.tasks import QuestionAnswering, TaskArguments
from hf_ctxmodels.downstream.tasks.base import Encoded, Logits, Task
from hf_ctxmodels.downstream.tasks.question_answering import AnswerSpan, Question


def run_head(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    task: Task,
    encoded: Encoded,
    batch_size: int,
    progress: bool = False,
) -> list[Logits]:
    """Logits for every feature, in order, in evaluation mode; the model's training mode is restored. A batch has
    features of similar lengths; `progress` shows a progress bar."""
    check_range({"batch_size": batch_size}, at_least=1)
    features, collate = encoded.features, task.collator(tokenizer)
    batches = batches_by_length([_num_items(feature["input_ids"]) for feature in features], batch_size)
    outputs: dict[int, Logits] = {}
    with evaluation_mode(model):
        for indices in progress_bar(batches, "predicting", unit="batches", enabled=progress):
            batch = collate([features[index] for index in indices])
            inputs = {name: tensor for name, tensor in batch.items() if name not in task.targets}
            logits = feature_outputs(task, model(**CollatedBatch(inputs).to(model.device)), batch)
            outputs |= dict(zip(indices, logits, strict=True))
    return [outputs[index] for index in range(len(features))]


def _num_items(ids: Any) -> int:
    """Number of ids in nested lists: tokens, choices of tokens, or words of characters."""
    return sum(map(_num_items, ids)) if isinstance(ids, list | tuple) else 1


def answer_questions(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    questions: Sequence[tuple[str, str]],
    *,
    max_length: int = 384,
    doc_stride: int | None = None,
    max_answer_length: int = 30,
    may_be_unanswerable: bool = False,
    batch_size: int = 16,
) -> list[AnswerSpan]:
    """Extract the best answer span of each question, as the evaluation of `hf-ctxmodels finetune` does, from contexts
    of any length. transformers 5 has no question-answering pipeline.

    Args:
        model, tokenizer: A model of `AutoModelForQuestionAnswering` and its tokenizer.
        questions: (question, context) pairs.
        max_length: Tokens per window, at most the model's limit.
        doc_stride: Tokens of overlap between two windows; None for the default of `TaskArguments`.
        max_answer_length: Tokens of the longest answer.
        may_be_unanswerable: Return "" if the model prefers no answer; for models trained on unanswerable questions.
    """
    if not len(questions):
        return []
    max_length = min(max_length, max_input_length(model.config) or max_length)
    task = QuestionAnswering(TaskArguments(None, None, None, max_length, doc_stride, max_answer_length))
    task.has_unanswerable = may_be_unanswerable
    if "p_mask" in inspect.signature(model.forward).parameters:
        task.use_beam_search()
    examples = [Question(str(index), text, context, (), "") for index, (text, context) in enumerate(questions)]
    encoded = task.encode(examples, tokenizer)
    outputs = run_head(model, tokenizer, task, encoded, batch_size)
    return task.decode(examples, encoded, outputs)


class WordTaggingPipeline(TokenClassificationPipeline):
    """`TokenClassificationPipeline` that also accepts `input_ids` of shape (batch, words, characters), as in ELMo.

    It returns words of the text instead of tokens; raises CtxError for a tokenizer without offsets.

    Example:
        >>> from transformers import pipeline
        >>> pipeline("token-classification", directory, pipeline_class=WordTaggingPipeline)("A cat")  # doctest: +SKIP
    """

    def gather_pre_entities(
        self, sentence: str, input_ids: Any, scores: Any, offset_mapping: Any, *arguments: Any, **kwargs: Any
    ) -> list[dict]:
        """Group the scores of tokens into words; character ids are replaced by unknown tokens, whose offsets give the
        words."""
        if offset_mapping is None:
            raise CtxError("The tokenizer returns no character offsets.", hint="use the family's tokenizer.")
        if input_ids.ndim > 1:
            input_ids = torch.full((len(input_ids),), self.tokenizer.unk_token_id)
        return super().gather_pre_entities(sentence, input_ids, scores, offset_mapping, *arguments, **kwargs)
