"""Fine-tuning tasks: `TASKS` maps the TASK of `hf-ctxmodels finetune TASK` to the class that does the work."""

from typing import Any

from hf_ctxmodels.downstream.tasks.base import Encoded, Task, TaskArguments
from hf_ctxmodels.downstream.tasks.coreference import Coreference
from hf_ctxmodels.downstream.tasks.dependency_parsing import DependencyParsing
from hf_ctxmodels.downstream.tasks.multiple_choice import MultipleChoice
from hf_ctxmodels.downstream.tasks.question_answering import QuestionAnswering
from hf_ctxmodels.downstream.tasks.ranking import Ranking
from hf_ctxmodels.downstream.tasks.semantic_roles import SemanticRoleLabeling
from hf_ctxmodels.downstream.tasks.seq2seq import Seq2Seq
from hf_ctxmodels.downstream.tasks.sequence_classification import (
    MultiLabelClassification,
    Regression,
    SequenceClassification,
)
from hf_ctxmodels.downstream.tasks.token_classification import TokenClassification

TASKS: dict[str, type[Task[Any]]] = {
    task.name: task
    for task in (
        SequenceClassification,
        MultiLabelClassification,
        Regression,
        TokenClassification,
        SemanticRoleLabeling,
        DependencyParsing,
        QuestionAnswering,
        MultipleChoice,
        Ranking,
        Seq2Seq,
        Coreference,
    )
}
