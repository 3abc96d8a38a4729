"""Fine-tuning tasks; `TASKS` maps the names of `--task` to their classes."""

from typing import Any

from hf_ctxmodels.data.tasks.base import Encoded, Task, TaskArguments
from hf_ctxmodels.data.tasks.multiple_choice import MultipleChoice
from hf_ctxmodels.data.tasks.question_answering import QuestionAnswering
from hf_ctxmodels.data.tasks.sequence import Regression, SequenceClassification
from hf_ctxmodels.data.tasks.token import TokenClassification

TASKS: dict[str, type[Task[Any]]] = {
    task.name: task
    for task in (SequenceClassification, Regression, TokenClassification, QuestionAnswering, MultipleChoice)
}
