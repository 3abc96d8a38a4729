"""Embeddings of the pretraining task (Sun et al. 2020, section 3.3.1)."""

from typing import Any

import torch
from torch import Tensor, nn

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.layers.transformer import TokenPositionTypeEmbeddings


class TaskEmbeddings(TokenPositionTypeEmbeddings):
    """BERT's input embeddings plus task embeddings (Sun et al. 2020, section 3.3.1).

    Args:
        num_tasks: Number of task embeddings; None for no task embeddings.
        sizes, options: See `TokenPositionTypeEmbeddings`.
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
        """Embed the inputs as in `TokenPositionTypeEmbeddings`, with task ids `task_type_ids` (...), None for task 0.

        Raises:
            CtxError: The model has no task embeddings, but `task_type_ids` is not None.
        """
        if self.task_type_embeddings is None:
            if task_type_ids is not None:
                raise CtxError(
                    "The model has no task embeddings.", hint="set config.use_task_id, or remove task_type_ids."
                )
            return super().forward(words, position_ids, token_type_ids)
        embedded = words if words.is_floating_point() else self.word_embeddings(words)
        tasks = torch.zeros_like(position_ids) if task_type_ids is None else task_type_ids
        return super().forward(embedded + self.task_type_embeddings(tasks), position_ids, token_type_ids)
