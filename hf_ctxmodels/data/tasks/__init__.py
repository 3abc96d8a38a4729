"""Fine-tuning tasks: `TASKS` maps what `hf-ctxmodels finetune --task` takes to the class that does the work."""

from typing import Any

from hf_ctxmodels.data.tasks.base import Encoded, Task, TaskArguments
from hf_ctxmodels.data.tasks.multiple_choice import MultipleChoice
from hf_ctxmodels.data.tasks.question_answering import QuestionAnswering
from hf_ctxmodels.data.tasks.ranking import Ranking
from hf_ctxmodels.data.tasks.seq2seq import Seq2Seq
from hf_ctxmodels.data.tasks.sequence import Regression, SequenceClassification
from hf_ctxmodels.data.tasks.token import TokenClassification

TASKS: dict[str, type[Task[Any]]] = {
    task.name: task
    for task in (
        SequenceClassification,
        Regression,
        TokenClassification,
        QuestionAnswering,
        MultipleChoice,
        Ranking,
        Seq2Seq,
    )
}
