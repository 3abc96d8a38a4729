"""Answers from contexts of any length; transformers 5 has no question-answering pipeline."""

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
    """The best span of its context for every question, found as in evaluation by `hf-ctxmodels finetune`.

    Args:
        model: A model of `AutoModelForQuestionAnswering`.
        tokenizer: Its tokenizer.
        questions: (question, context) pairs.
        max_length, doc_stride, max_answer_length: See `TaskArguments`.
        may_be_unanswerable: Return "" where the model prefers no answer; for models trained on unanswerable questions.
        batch_size: Windows per batch.
    """
    task = QuestionAnswering(TaskArguments(None, None, None, max_length, doc_stride, max_answer_length))
    task.has_unanswerable = may_be_unanswerable
    examples = [Question(str(i), question, context, (), "") for i, (question, context) in enumerate(questions)]
    encoded = task.encode(examples, tokenizer)
    outputs = run_head(model, tokenizer, task, encoded, batch_size)
    return task.decode(examples, encoded, outputs)
