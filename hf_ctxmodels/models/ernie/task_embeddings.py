"""The embedding of the pretraining task (Sun et al. 2020, section 3.3.1)."""

from typing import Any

import torch
from torch import Tensor, nn

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.layers.transformer import TokenPositionTypeEmbeddings


class TaskEmbeddings(TokenPositionTypeEmbeddings):
    """BERT's input embeddings plus that of the task (Sun et al. 2020, section 3.3.1).

    Args:
        num_tasks: Rows of the task table; None for no table.
        sizes, options: As in `TokenPositionTypeEmbeddings`.
    """

    def __init__(self, num_tasks: int | None, *sizes: int, **options: Any) -> None:
        super().__init__(*sizes, **options)
        width = self.word_embeddings.embedding_dim
        self.task_type_embeddings = None if num_tasks is None else nn.Embedding(num_tasks, width)

    def forward(
        self,
        words: Tensor,
        position_ids: Tensor,
        token_type_ids: Tensor | None,
        task_type_ids: Tensor | None = None,
    ) -> Tensor:
        """As there; `task_type_ids` (...) are the tasks, None for the first. Raises CtxError for ids without a
        table."""
        if self.task_type_embeddings is None:
            if task_type_ids is not None:
                raise CtxError("The model has no task embeddings.", hint="set config.use_task_id, or give no ids.")
            return super().forward(words, position_ids, token_type_ids)
        embedded = words if words.is_floating_point() else self.word_embeddings(words)
        tasks = torch.zeros_like(position_ids) if task_type_ids is None else task_type_ids
        return super().forward(embedded + self.task_type_embeddings(tasks), position_ids, token_type_ids)
