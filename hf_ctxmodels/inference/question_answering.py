"""Extractive question answering on contexts of any length; transformers 5 has no question-answering pipeline."""

from collections.abc import Sequence

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_ctxmodels.downstream.tasks import QuestionAnswering, TaskArguments
from hf_ctxmodels.downstream.tasks.question_answering import AnswerSpan, Question
from hf_ctxmodels.inference.running import run_head


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
    """Extract the best answer span of each question, as the evaluation of `hf-ctxmodels finetune` does.

    Args:
        model: A model of `AutoModelForQuestionAnswering`.
        tokenizer: The model's tokenizer.
        questions: (question, context) pairs.
        max_length: Tokens per window.
        doc_stride: Tokens of overlap between two windows; None for the default of `TaskArguments`.
        max_answer_length: Tokens of the longest answer.
        may_be_unanswerable: Return "" if the model prefers no answer; for models trained on unanswerable questions.
        batch_size: Windows per batch.
    """
    task = QuestionAnswering(TaskArguments(None, None, None, max_length, doc_stride, max_answer_length))
    task.has_unanswerable = may_be_unanswerable
    examples = [Question(str(index), text, context, (), "") for index, (text, context) in enumerate(questions)]
    encoded = task.encode(examples, tokenizer)
    outputs = run_head(model, tokenizer, task, encoded, batch_size)
    return task.decode(examples, encoded, outputs)
