"""The base of static word embeddings: a table and pooling."""

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

from hf_ctxmodels.architectures.configuration_static import CtxStaticConfig
from hf_ctxmodels.architectures.recurrent_inputs import prepare_inputs, zero_padding
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.model import CtxPreTrainedModel
from hf_ctxmodels.layers.pooling import PoolingLayer
from hf_ctxmodels.tokenizers.base import check_tokenizer_matches_model
from hf_ctxmodels.tokenizers.word_level import CtxWordTokenizer

# For numba kernels: sums in any order, but no assumption of finite numbers. Kernels are loops, since every array
# expression costs a call.
FASTMATH = {"reassoc", "contract", "arcp", "nsz"}


def supports_compiled_updates(table: Tensor) -> bool:
    """Whether compiled code can update a table: float32, on a CPU, with numba installed."""
    return table.dtype == torch.float32 and table.device.type == "cpu" and find_spec("numba") is not None


def run_in_threads(number: int, update: Callable[..., Tensor], *batch: Tensor | None) -> Tensor:
    """Run `update` on at most `number` parts of a batch's rows, one thread each; returns the sum of its losses.

    The threads update the same tables without locks, as the released code of word2vec and GloVe does. During the call
    torch's operations use one thread each.
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


class StaticEmbedding(nn.Embedding):
    """One vector (or number) for each word of the vocabulary.

    Args:
        spread: The table is initialised uniformly in +-0.5 / spread; the released code of word2vec and GloVe uses the
            width of the vectors. None for zeros.
    """

    def __init__(self, rows: int, width: int, spread: int | None, padding_idx: int | None = None) -> None:
        self.spread = spread
        super().__init__(rows, width, padding_idx=padding_idx)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialise the vectors; that of padding is zero."""
        if self.spread is None:
            init.zeros_(self.weight)
        else:
            init.uniform_(self.weight, -0.5 / self.spread, 0.5 / self.spread)
            if self.padding_idx is not None and not getattr(self.weight, "_is_hf_initialized", False):
                init.zeros_(self.weight[self.padding_idx])


class StaticPreTrainedModel(CtxPreTrainedModel):
    """The common model base of static word embeddings."""

    config: CtxStaticConfig
    supports_gradient_checkpointing = False  # there are no activations to recompute

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, StaticEmbedding):
            module.reset_parameters()
        else:
            super()._init_weights(module)

    def static_embeddings_with_parents(self) -> list[tuple[nn.Module, str]]:
        """All tables with a row for each word: parent module and attribute name."""
        return [
            (parent, name)
            for parent in self.modules()
            for name, child in parent.named_children()
            if isinstance(child, StaticEmbedding)
        ]

    def _resize_token_embeddings(
        self, new_num_tokens: int | None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> nn.Module:
        """Resize every table, as transformers does with one; without `mean_resizing`, new rows are initialised."""
        for parent, name in self.static_embeddings_with_parents():
            table: StaticEmbedding = getattr(parent, name)
            kept = table.num_embeddings
            self._get_resized_embeddings(table, new_num_tokens, pad_to_multiple_of, mean_resizing)
            if not mean_resizing and table.num_embeddings > kept:
                fresh = StaticEmbedding(table.num_embeddings - kept, table.embedding_dim, table.spread)
                table.weight.data[kept:] = fresh.weight.data.to(table.weight)
        return self.get_input_embeddings()

    def set_sparse_gradients(self, sparse: bool) -> None:
        """Whether the gradients of the tables are sparse, which not every optimizer supports."""
        for parent, name in self.static_embeddings_with_parents():
            getattr(parent, name).sparse = sparse


class StaticEmbeddingModel(StaticPreTrainedModel):
    """A table look-up: a token's state is its word vector; a row's vectors are pooled.

    Args:
        config: Number and width of the vectors.
        add_pooling_layer: Whether to compute `pooler_output`.

    Attributes:
        word_embeddings: (vocabulary, hidden) table.
        pooler: Pools the states to `pooler_output`, or None.
    """

    _input_embed_layer = "word_embeddings"

    def __init__(self, config: CtxStaticConfig, add_pooling_layer: bool = True) -> None:
        super().__init__(config)
        self.word_embeddings: nn.Embedding = self.build_table(config)
        self.pooler = PoolingLayer(config.pooling) if add_pooling_layer else None
        self.build_encoder(config)
        self.post_init()

    def build_table(self, config: CtxStaticConfig) -> StaticEmbedding:
        """A table of the vectors' number and width."""
        size = config.hidden_size
        return StaticEmbedding(config.vocab_size, size, spread=size, padding_idx=config.pad_token_id)

    def build_encoder(self, config: CtxStaticConfig) -> None:
        """Create the family's own modules."""

    def embed_ids(self, input_ids: Tensor) -> Tensor:
        """(batch, length) ids -> (batch, length, hidden)."""
        return self.word_embeddings(input_ids)

    def vectors(self) -> Tensor:
        """(vocabulary, hidden) vectors of all words."""
        return self.embed_ids(torch.arange(self.config.vocab_size, device=self.device)[None])[0]

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

        Args: those of `prepare_inputs`, whose errors it raises, and
            output_hidden_states: Return `hidden_states`, which is (`last_hidden_state`,).
            kwargs: Ignored arguments of other families' models.
        """
        width, given = self.config.hidden_size, (input_ids, inputs_embeds, attention_mask, sequence_ids)
        inputs = prepare_inputs(self, *given, width=width, output_mask=output_mask)
        states = zero_padding(inputs.embed(self.embed_ids), inputs.tokens)
        wants_states = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        return BaseModelOutputWithPooling(
            last_hidden_state=states if output_mask is None else states[output_mask],
            pooler_output=None if self.pooler is None else self.pooler(states, inputs.tokens),
            hidden_states=(states,) if wants_states else None,
        )


def get_words_and_vectors(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> tuple[list[str], Tensor, list[int]]:
    """The words of a static embedding without special tokens, their vectors (words, width), float32 on the CPU, and
    their ids.

    Raises:
        CtxError: The model is no static embedding, or the tokenizer is not one of words, or not the model's.
    """
    encoder: Any = model.base_model
    if not isinstance(encoder, StaticEmbeddingModel) or not isinstance(tokenizer, CtxWordTokenizer):
        raise CtxError(
            f"{type(model).__name__} with {type(tokenizer).__name__} is no static word embedding.",
            hint="use a model of word2vec or GloVe with its tokenizer.",
        )
    check_tokenizer_matches_model(tokenizer, model.config, location=tokenizer.name_or_path or type(tokenizer).__name__)
    special = set(tokenizer.all_special_ids)
    words = tokenizer.words
    ids = [number for number in range(len(words)) if number not in special]
    with torch.no_grad():
        return [words[number] for number in ids], encoder.vectors()[ids].float().cpu(), ids
