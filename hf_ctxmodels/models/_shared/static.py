"""The model of families with one vector for each word, independent of context: a table and pooling."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers import initialization as init
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.utils.generic import can_return_tuple

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.model import CtxPreTrainedModel
from hf_ctxmodels.layers.pooling import RowPooler
from hf_ctxmodels.models._shared.configuration_static import CtxStaticConfig
from hf_ctxmodels.models._shared.inputs import prepare_inputs, zero_padding
from hf_ctxmodels.tokenizers.words import CtxWordTokenizer

# Of what numba compiles: sums in any order, but no assumption that all is finite. Kernels are loops, since array
# expressions cost a call each.
FASTMATH = {"reassoc", "contract", "arcp", "nsz"}


def is_compiled(table: Tensor) -> bool:
    """Whether compiled code can update a table: it is float32 on a CPU, and numba is installed."""
    return table.dtype == torch.float32 and table.device.type == "cpu" and find_spec("numba") is not None


def in_threads(number: int, update: Callable[..., Tensor], *batch: Tensor | None) -> Tensor:
    """The sum of the losses that `update` returns for parts of a batch's rows, at most `number`, a thread each.

    The threads update the same tables without locks, as the released code of word2vec and GloVe does, and end with the
    call. Meanwhile torch's operations have a single thread each.
    """
    rows = next(len(tensor) for tensor in batch if tensor is not None)
    number = min(number, rows)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        if number == 1:
            return update(*batch)
        parts = [[None] * number if tensor is None else tensor.chunk(number) for tensor in batch]
        with ThreadPoolExecutor(number) as threads:
            return torch.stack(list(threads.map(update, *parts))).sum()
    finally:
        torch.set_num_threads(before)


class WordTable(nn.Embedding):
    """One vector (or number) for each word of the vocabulary.

    Args:
        spread: The table is initialised uniformly in +-0.5 / spread, by the width of the vectors in the released code
            of word2vec and GloVe; None for zeros.
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
    supports_gradient_checkpointing = False  # there are no activations to recompute

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, WordTable):
            module.reset_parameters()
        else:
            super()._init_weights(module)

    def word_tables(self) -> list[tuple[nn.Module, str]]:
        """Every table with a row for each word: the module that holds it, and its name there."""
        return [
            (parent, name)
            for parent in self.modules()
            for name, child in parent.named_children()
            if isinstance(child, WordTable)
        ]

    def _resize_token_embeddings(
        self, new_num_tokens: int | None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> nn.Module:
        """Resize every table; new rows are initialised."""
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
        """Whether the gradients of the tables are sparse, which not every optimizer supports."""
        for parent, name in self.word_tables():
            getattr(parent, name).sparse = sparse


class StaticEncoder(StaticPreTrainedModel):
    """A table look-up. A token's state is its word vector; a row is pooled.

    Attributes:
        word_embeddings: (vocabulary, hidden) table.
        pooler: Pools the states to `pooler_output`, or None.
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
        """(vocabulary, hidden) vectors of all words, of `look_up`."""
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
        """Encode a batch.

        Args:
            input_ids: (batch, length) ids; or `inputs_embeds` (batch, length, hidden) in their place.
            attention_mask: (batch, length), 1 at words and 0 at padding positions, which are zero in the output.
            sequence_ids: (batch, length), 0 at padding; `pooler_output` pools over all sequences of a row.
            output_mask: (batch, length) bool; given, `last_hidden_state` holds only these positions, (targets, hidden).
            output_hidden_states: Return `hidden_states`, which is (`last_hidden_state`,).
            kwargs: Arguments of other families' models, ignored.

        Raises:
            CtxError: Input that does not fit together or the model, see `prepare_inputs`.
        """
        width, given = self.config.hidden_size, (input_ids, inputs_embeds, attention_mask, sequence_ids)
        inputs = prepare_inputs(self, *given, width=width, output_mask=output_mask)
        states = zero_padding(inputs.embed(self.look_up), inputs.tokens)
        wants_states = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        return BaseModelOutputWithPooling(
            last_hidden_state=states if output_mask is None else states[output_mask],
            pooler_output=None if self.pooler is None else self.pooler(states, inputs.tokens),
            hidden_states=(states,) if wants_states else None,
        )


def words_and_vectors(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> tuple[list[str], Tensor, list[int]]:
    """The words of a model of a static family without special tokens, their vectors (words, width) as float32 on the
    CPU, and their ids.

    Raises:
        CtxError: The model has no vector for each word, or the tokenizer is not one of words.
    """
    encoder: Any = model.base_model
    if not isinstance(encoder, StaticEncoder) or not isinstance(tokenizer, CtxWordTokenizer):
        raise CtxError(
            f"{type(model).__name__} with {type(tokenizer).__name__} has no fixed vector for each word.",
            hint="use a model with one vector for each word, with its tokenizer.",
        )
    special = set(tokenizer.all_special_ids)
    words = tokenizer.words
    ids = [number for number in range(len(words)) if number not in special]
    with torch.no_grad():
        return [words[number] for number in ids], encoder.vectors()[ids].float().cpu(), ids
