"""The model of families with one vector for each word, whatever stands around it: a table and pooling."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.utils.generic import can_return_tuple

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.inputs import check_row_lengths, is_traced
from hf_ctxmodels.core.model import CtxPreTrainedModel
from hf_ctxmodels.layers.pooling import RowPooler
from hf_ctxmodels.models._shared.configuration_static import CtxStaticConfig


def is_compiled(table: Tensor) -> bool:
    """Whether a table can be updated by what numba compiled: single precision on a CPU, and numba is installed."""
    return table.dtype == torch.float32 and table.device.type == "cpu" and find_spec("numba") is not None


@cache
def _threads(number: int) -> ThreadPoolExecutor:
    """Threads that stay: to start one takes milliseconds."""
    return ThreadPoolExecutor(number)


def in_threads(number: int, follow: Callable[..., Tensor], *batch: Tensor | None) -> Tensor:
    """The sum of what `follow` returns for parts of a batch's rows, at most one for each of a `number` of threads.

    They change the same tables without locks, as the released code of word2vec and GloVe does. torch's operations are
    left a single thread each.
    """
    rows = next(len(tensor) for tensor in batch if tensor is not None)
    number = min(number, rows)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        if number == 1:
            return follow(*batch)
        parts = [[None] * number if tensor is None else tensor.chunk(number) for tensor in batch]
        return torch.stack(list(_threads(number).map(follow, *parts))).sum()
    finally:
        torch.set_num_threads(before)


class WordTable(nn.Embedding):
    """One vector (or number) for each word of the vocabulary.

    Args:
        spread: Initialised uniformly in +-0.5 / spread, as the released code of word2vec and GloVe does with the width
            of the vectors; None for zeros.
    """

    def __init__(self, rows: int, width: int, spread: int | None, padding_idx: int | None = None) -> None:
        self.spread = spread
        super().__init__(rows, width, padding_idx=padding_idx)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw new vectors; that of padding is zero."""
        if self.spread is None:
            init.zeros_(self.weight)
        else:
            init.uniform_(self.weight, -0.5 / self.spread, 0.5 / self.spread)
            if self.padding_idx is not None and not getattr(self.weight, "_is_hf_initialized", False):
                init.zeros_(self.weight[self.padding_idx])


class StaticPreTrainedModel(CtxPreTrainedModel):
    """The part of the model base that such families share."""

    config: CtxStaticConfig
    supports_gradient_checkpointing = False  # there is nothing to compute again

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, WordTable):
            module.reset_parameters()
        else:
            super()._init_weights(module)

    def word_tables(self) -> list[tuple[nn.Module, str]]:
        """Every table that has a row for each word, as the module that holds it and its name there."""
        return [
            (parent, name)
            for parent in self.modules()
            for name, child in parent.named_children()
            if isinstance(child, WordTable)
        ]

    def _resize_token_embeddings(
        self, new_num_tokens: int | None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> nn.Module:
        """Give every table the new number of rows; new ones are drawn as at the start."""
        if new_num_tokens is None and pad_to_multiple_of is None:
            return self.get_input_embeddings()
        new_num_tokens = new_num_tokens or self.config.vocab_size
        if pad_to_multiple_of:
            new_num_tokens = -(-new_num_tokens // pad_to_multiple_of) * pad_to_multiple_of
        for parent, name in self.word_tables():
            old: WordTable = getattr(parent, name)
            new = WordTable(new_num_tokens, old.embedding_dim, old.spread, old.padding_idx)
            new.to(old.weight.device, old.weight.dtype)
            kept = min(new_num_tokens, old.num_embeddings)
            with torch.no_grad():
                new.weight[:kept] = old.weight[:kept]
            new.sparse = old.sparse
            new.requires_grad_(old.weight.requires_grad)
            setattr(parent, name, new)
        return self.get_input_embeddings()

    def set_sparse_gradients(self, sparse: bool) -> None:
        """Whether gradients of the tables hold the rows concerned alone, which not every optimizer takes."""
        for parent, name in self.word_tables():
            getattr(parent, name).sparse = sparse


class StaticEncoder(StaticPreTrainedModel):
    """Looks words up. A word's state is its vector; that of a row is pooled.

    Attributes:
        word_embeddings: (vocabulary, hidden) table.
        pooler: What makes `pooler_output`, or None.
    """

    word_embeddings: nn.Embedding
    pooler: RowPooler | None

    def build_encoder(self, config: CtxStaticConfig, add_pooling_layer: bool) -> None:
        """Create the table and the pooling."""
        self.word_embeddings = WordTable(
            config.vocab_size, config.hidden_size, config.hidden_size, padding_idx=config.pad_token_id
        )
        self.pooler = RowPooler(config.pooling) if add_pooling_layer else None

    def get_input_embeddings(self) -> nn.Module:
        """The word vectors."""
        return self.word_embeddings

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        """Replace the word vectors."""
        self.word_embeddings = value

    def look_up(self, input_ids: Tensor) -> Tensor:
        """(batch, length) ids -> (batch, length, hidden)."""
        return self.word_embeddings(input_ids)

    def vectors(self) -> Tensor:
        """(vocabulary, hidden): the vector of every word, as `look_up` gives it."""
        return self.look_up(torch.arange(self.config.vocab_size, device=self.device)[None])[0]

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        sequence_ids: Tensor | None = None,
        output_mask: Tensor | None = None,
        output_hidden_states: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPooling:
        """Look a batch up.

        Args:
            input_ids: (batch, length) ids; or `inputs_embeds` (batch, length, hidden) in their place.
            attention_mask: (batch, length), 1 at words and 0 at padding, which is zero in the output.
            sequence_ids: (batch, length), 0 at padding; several sequences in a row are one to `pooler_output`.
            wanted: (batch, length) bool; given, `last_hidden_state` holds only these positions, (wanted, hidden).
            output_hidden_states: Give `hidden_states`, of which there is one.
            kwargs: What other families' models read, such as `token_type_ids`.

        Raises:
            CtxError: Input that does not fit together or the model, see `check_encoder_input`.
        """
        given = self.check_encoder_input(
            input_ids, inputs_embeds, attention_mask, None, sequence_ids=sequence_ids, output_mask=output_mask
        )
        states = self.look_up(given) if input_ids is not None else given
        tokens = _tokens(states, attention_mask, sequence_ids)
        wants_states = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        states = states * tokens[..., None].to(states.dtype)
        return BaseModelOutputWithPooling(
            last_hidden_state=states if output_mask is None else states[output_mask],
            pooler_output=None if self.pooler is None else self.pooler(states, tokens),
            hidden_states=(states,) if wants_states else None,
        )


def _tokens(states: Tensor, *masks: Tensor | None) -> Tensor:
    """(batch, length) bool: where there is a word.

    Raises:
        CtxError: a mask of another layout, or a row without any word.
    """
    tokens = torch.ones(states.shape[:2], dtype=torch.bool, device=states.device)
    for mask in masks:
        if mask is not None:
            if mask.dim() != 2:
                raise CtxError(f"attention_mask must be (batch, length); got {tuple(mask.shape)}.")
            tokens = tokens & (mask != 0)
    if not is_traced(states):
        check_row_lengths(tokens.sum(1))
    return tokens
